"""The files of a checkpoint, read and checked: manifest, tensors, the rounds so far. Nothing here writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from fastsam.fed.common.atomic_files import read_bytes, read_json
from fastsam.fed.common.fingerprints import difference

FORMAT, VERSION = "fastsam run", 1
_KEYS = {"round", "metrics_bytes", "metrics_hash", "server", "clients", "files", "identity"}
_OF_NAMES = ("clients", "files")  # from names to names
_MEANING = {  # notes on values of the identity
    "data": " (hashes of all clients' samples and of the test set: the split, the files or their order differ)",
    "numbers": " (what the bits depend on: executor, slots and the number of ranks must come to the same)",
}


class RunDirectoryError(RuntimeError):
    """A run directory that exists or belongs to another run, or a checkpoint that is cut or foreign. Nothing in it was
    changed."""


def digest_of(data: bytes) -> str:
    """Return the hash of a file's content in a manifest."""
    return blake2b(data, digest_size=16).hexdigest()


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with the checksum of its contents."""
    return {**manifest, "checksum": _checksum(manifest)}


def _checksum(manifest: Mapping[str, Any]) -> str:
    """Return the checksum of the manifest without its checksum. It is the same before and after JSON."""
    names = {key: manifest[key] for key in _OF_NAMES if key in manifest}  # long, and the same after JSON as they are
    content = json.loads(json.dumps({key: v for key, v in manifest.items() if key != "checksum" and key not in names}))
    return digest_of(json.dumps({**content, **names}, sort_keys=True).encode())


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest. Raises RunDirectoryError if it is foreign, damaged, or has an unknown version."""
    try:
        manifest = read_json(path)
        absent = _KEYS - set(manifest)
    except (OSError, ValueError, TypeError) as error:
        raise RunDirectoryError(f"{path} cannot be read ({error}); the directory was left as it is") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or absent:
        raise RunDirectoryError(f"{path} is not the manifest of a fastsam run; the directory was left as it is")
    if manifest.get("version") != VERSION:
        raise RunDirectoryError(f"{path} has version {manifest.get('version')}, this fastsam reads version {VERSION}")
    if manifest.get("checksum") != _checksum(manifest):
        raise RunDirectoryError(
            f"{path} is damaged or was changed (its checksum does not match its contents); the directory was left as "
            f"it is"
        )
    return manifest


def read_tensors(path: Path, digest: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors, on the CPU, and its metadata. Raises RunDirectoryError if its hash is not `digest`."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise RunDirectoryError(
            f"the checkpoint file {path} cannot be read ({error}); the directory was left as it is"
        ) from error
    if digest_of(data) != digest:
        raise RunDirectoryError(
            f"the checkpoint file {path} is cut or was changed (its hash is not the manifest's); the directory was "
            f"left as it is"
        )
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return safetensors.torch.load(data), header.get("__metadata__", {})


def read_history(path: Path, manifest: Mapping[str, Any]) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the known part of metrics.jsonl, and its records. Raises RunDirectoryError if rounds are missing."""
    data = read_bytes(path)[: manifest["metrics_bytes"]] if path.exists() else b""
    if digest_of(data) != manifest["metrics_hash"]:
        raise RunDirectoryError(
            f"{path} is cut or was changed (the {manifest['round']} rounds of the checkpoint are not in it); the "
            "directory was left as it is"
        )
    history = [json.loads(line) for line in data.decode().splitlines()]
    if len(history) != manifest["round"]:
        raise ValueError(f"{len(history)} rounds are recorded, the manifest says {manifest['round']!r}")
    return data, history


def check_identity(directory: Path, stored_identity: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise RunDirectoryError if the run in `directory` has a different identity. The message names the key."""
    differences = difference(stored_identity, identity)
    if differences is not None:
        key, stored_value, new_value = differences
        raise RunDirectoryError(
            f"the run in {directory} cannot be resumed with another {key}: it was started with {_short(stored_value)}, "
            f"now it is {_short(new_value)}{_MEANING.get(key, '')}. Resume it as it was started, or choose another "
            "run_dir"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
