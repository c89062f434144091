"""Files with code that careless loading would run: fastsam must not run it."""

import builtins
import gzip
import io
import json
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastsam import fed
from fastsam.fed import data
from fastsam.fed.data import files, partition
from fastsam.fed.models import vit
from fastsam.fed.rundir.manifest import digest_of, read_manifest, seal
from fastsam.lab import cli
from tests.attack.trials import Attack, Trial
from tests.helpers.fed_rundir import start


class Payload:
    """An object whose unpickling creates a file."""

    def __init__(self, marker: Path, action: str) -> None:
        self.marker, self.action = marker, action

    def __reduce__(self) -> tuple[Any, ...]:
        calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "open": (open, (str(self.marker), "w")),
            "system": (os.system, (f"touch {self.marker}",)),
            "exec": (builtins.exec, (f"open({str(self.marker)!r}, 'w')",)),
            "mkdir": (os.mkdir, (str(self.marker),)),
        }
        return calls[self.action]


def _torch_zip(payload: Any, protocol: int) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": payload}, file, pickle_protocol=protocol)
    return file.getvalue()


def _torch_old(payload: Any, protocol: int) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": payload}, file, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _array(payload: Any, protocol: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([payload], dtype=object), allow_pickle=True)
    return file.getvalue()


def _zip(payload: Any, protocol: int) -> bytes:
    """Return an archive as numpy writes it, with a pickle in place of an array and a path outside of the folder."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", _array(payload, protocol))
        archive.writestr("y.npy", pickle.dumps(payload, protocol))
        archive.writestr("../../../out.npy", b"out")
    return file.getvalue()


FORMATS: tuple[Callable[[Any, int], bytes], ...] = (
    pickle.dumps, _torch_zip, _torch_old, _array, _zip, lambda p, n: gzip.compress(pickle.dumps(p, n)),
    lambda p, n: (20).to_bytes(8, "little") + b'{"__metadata__": {}}' + pickle.dumps(p, n),
)  # fmt: skip


# --- the doors: each is handed the bytes of a file ---


def _npz(content: bytes, folder: Path) -> None:
    (folder / "mine.npz").write_bytes(content)
    files.from_npz(folder / "mine.npz", clients=1, split="iid")


def _indices(content: bytes, folder: Path) -> None:
    (folder / "mine.json").write_bytes(content)
    partition.make("own", np.arange(6) % 3, None, 20, indices=str(folder / "mine.json"))


def _archive(content: bytes, folder: Path) -> None:
    (folder / "cifar-10-python.tar.gz").write_bytes(content)
    data.cifar10(folder, clients=2)


def _archive_folder(content: bytes, folder: Path) -> None:
    (folder / "cifar-10-batches-py").mkdir()
    for name in ("batches.meta", "test_batch", *(f"data_batch_{i}" for i in range(1, 6))):
        (folder / "cifar-10-batches-py" / name).write_bytes(content)
    data.cifar10(folder, clients=2)


def _weights(content: bytes, folder: Path) -> None:
    (folder / "weights.pth").write_bytes(content)
    vit._load(nn.Linear(1, 1), str(folder / "weights.pth"), [])


def _config(content: bytes, folder: Path) -> None:
    for name in ("mine.toml", "config.json"):
        (folder / name).write_bytes(content)
        if cli.main(["run", str(folder / name), "--run-dir", str(folder / "out")]) != 0:
            raise ValueError("refused")


def _run_directory(place: str) -> Callable[[bytes, Path], None]:
    """Return a door that replaces a file of a run. The manifest gets the hash of a file of the checkpoint."""

    def resume(content: bytes, folder: Path) -> None:
        directory = folder / "run"
        start(directory, algorithm=fed.SCAFFOLD(), rounds=1, executor="sequential")
        path = next(iter(sorted(directory.glob(place))))
        path.write_bytes(content)
        manifest = directory / "checkpoint" / "manifest.json"
        if path != manifest:
            content_table = read_manifest(manifest)
            if path.name in content_table["files"]:
                content_table["files"][path.name] = digest_of(content)
            if path.name == "metrics.jsonl":
                content_table |= {"metrics_bytes": len(content), "metrics_hash": digest_of(content)}
            manifest.write_text(json.dumps(seal(content_table)))
        start(directory, algorithm=fed.SCAFFOLD(), rounds=2, resume=True, executor="sequential")

    return resume


DOORS: dict[str, Callable[[bytes, Path], None]] = {
    "data in .npz": _npz, "a split's indices": _indices, "an archive": _archive, "an unpacked archive": _archive_folder,
    "weights": _weights, "a config": _config, "the manifest": _run_directory("checkpoint/manifest.json"),
    "the server's file": _run_directory("checkpoint/server-*"),
    "the clients' file": _run_directory("checkpoint/clients-*"), "the records": _run_directory("metrics.jsonl"),
}  # fmt: skip


def read_file(trial: Trial) -> int:
    """Hand a payload in some format to one of the doors. It must raise an error, and must not run the payload."""
    rng, marker = trial.rng, trial.folder / "ran"
    name = list(DOORS)[trial.number % len(DOORS)]
    payload = Payload(marker, rng.choice(["open", "system", "exec", "mkdir"]))
    form, protocol = rng.choice(FORMATS), rng.randint(2, 5)
    print(name, form, payload.action, protocol, flush=True)
    (place := trial.folder / "place").mkdir()
    message = ""
    try:
        DOORS[name](form(payload, protocol), place)
    except (ValueError, RuntimeError, ImportError) as error:
        message = str(error)
    assert not marker.exists(), f"{name} ran the {payload.action} of a file"
    assert message, f"{name} took the file"
    assert not (trial.folder.parent / "out.npy").exists() and not (trial.folder / "out.npy").exists()
    shutil.rmtree(place)
    return 1


PATH_KEYS = ("data", "model", "loss", "sampler", "augment", "algorithm")
MODULE = "import os, subprocess, shutil\nfrom os import system\nfrom builtins import exec as run\n"


def read_config(trial: Trial) -> int:
    """Import paths of the standard library in every key that takes one: never imported, never called."""
    rng, folder = trial.rng, trial.folder
    os.chdir(folder)
    Path("own.py").write_text(MODULE)
    module_names = sorted(sys.stdlib_module_names - {"antigravity", "this"})
    module = rng.choice(module_names)
    path = rng.choice(
        [
            f"{module}:run", f"{module}.x:y", "own.py:system", "own.py:run", "own:system", "builtins:exec", "os:system",
            "own.py:os",
        ]
    )  # fmt: skip
    key = rng.choice(PATH_KEYS)
    old_modules = set(sys.modules)
    options = f"[{key}_options]\ncommand = 'touch ran'\n" if key in ("data", "model") else ""
    Path("bad.toml").write_text(f"rounds = 1\n{key} = {path!r}\n{options}")
    print(key, path, flush=True)
    code = cli.main(["run", "bad.toml", "--trust", rng.choice(["own", "own.py", "numpy"])])
    assert code == 1, f"{key} = {path!r} was taken"
    assert not Path("ran").exists(), f"{key} = {path!r} ran a command"
    module_of_path = module if path.startswith(module) else ""
    assert not module_of_path or module_of_path in old_modules or module_of_path not in sys.modules, (
        f"{key} = {path!r} imported {module_of_path}"
    )
    return 1


ATTACKS = (
    Attack("hostile-files", "no file that is read runs code: pickles, archives, checkpoints, weights, configs",
        read_file),
    Attack("hostile-configs", "no config imports the standard library, or calls it", read_config, share=0.5,
        values=20),
)  # fmt: skip
