"""The run directory: records, final model, and checkpoints from which a run continues after a kill at any instant.

    config.json  environment.json  metrics.jsonl  summary.json  model.safetensors  clients.csv
    checkpoint/manifest.json                 files with their hashes, length of metrics.jsonl, identity of the run
    checkpoint/server-000012.safetensors     state of the server and the model's buffers after 12 rounds
    checkpoint/clients-000012.safetensors    states of the clients that round 12 changed, or of all clients

A checkpoint writes new files first, and then replaces the manifest in one step. Files that the manifest no longer names
are removed last. So the files of the manifest are complete at any instant. All files are safetensors, JSON or CSV, and
reading them executes no code.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fastsam.fed.common.atomic_files import errors_with_path, make_directory, open_regular, write_bytes, write_json
from fastsam.fed.rundir.lock import lock_directory
from fastsam.fed.rundir.manifest import (
    FORMAT,
    VERSION,
    RunDirectoryError,
    check_identity,
    digest_of,
    read_history,
    read_manifest,
    read_tensors,
    seal,
)
from fastsam.fed.sums.ranks import Ranks

log = logging.getLogger("fastsam.fed")
_TENSORS = re.compile(r"(server|clients)-\d{6,}(-\d+)?\.safetensors(\.tmp)?")  # names of a checkpoint's files
_FILES = ("config.json", "environment.json", "metrics.jsonl", "summary.json", "model.safetensors", "clients.csv")
_RUN_FILES = ("config.json", "environment.json", "checkpoint")  # a kill before the first checkpoint can leave them

State = dict[str, Tensor]


@dataclass(frozen=True)
class RunState:
    """A run between two rounds, as this rank knows it. Tensors are never written in place, so a state stays valid while
    the next one is made.

    Attributes:
        round: number of completed rounds.
        clients: states of the clients of this rank.
        history: one list for all states of a run; its first `round` records belong to this state. Only rank 0 has
            records.
        owner_ranks: the rank of each client's state, with several ranks.
    """

    round: int
    server: State
    buffers: list[Tensor]
    clients: dict[int, State] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    owner_ranks: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the states of server and clients."""
        states = [self.server, *self.clients.values()]
        return sum(t.nbytes for state in states for t in state.values())


class RunDirectory:
    """The files of a run, locked until the end of `stack`. `adopt` moves a tensor of a client's state to the run's
    memory."""

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        device: torch.device,
        ranks: Ranks,
        adopt: Callable[[Tensor], Tensor],
        stack: ExitStack,
    ) -> None:
        self.path, self.identity, self.device, self.ranks, self.adopt = path, dict(identity), device, ranks, adopt
        self._stack, self._is_locked = stack, False
        self.saved_round = -1  # none yet
        self._metrics = b""  # content of metrics.jsonl
        self._clients: dict[int, tuple[State, str]] = {}  # the state that is on disk, and its file
        self._hashes: dict[str, str] = {}
        self._sizes: dict[str, int] = {}  # bytes of the tensors in each file of clients' states

    def read(self, resume: bool) -> RunState | None:
        """Return the state to continue from, or None for a new run. Write nothing.

        Raises:
            RunDirectoryError: another run works in it; the directory is not empty and `resume` is False; it is not a
                run directory; its run had another identity (the message names the key); or a file of the checkpoint is
                missing, cut or foreign.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(f"{self.path} is a file, not a run directory; choose another run_dir")
        names = sorted(os.listdir(self.path)) if self.path.exists() else []
        if not names:
            return None
        self._lock()
        if not resume:
            raise RunDirectoryError(
                f"the run directory {self.path} exists and is not empty; continue its run with resume=True (the flag "
                "--resume), or choose another run_dir"
            )
        self._check_places()
        if not self._manifest.exists():
            foreign = [name for name in names if name.removesuffix(".tmp") not in _RUN_FILES]
            if foreign:
                raise RunDirectoryError(
                    f"{self.path} holds no checkpoint, but other files ({', '.join(foreign[:3])}): it is not the "
                    "directory of a run; choose another run_dir"
                )
            return None
        return self._load()

    def _lock(self) -> None:
        if self.ranks.first and not self._is_locked:
            lock_directory(self.path, self._stack)
            self._is_locked = True

    def _check_places(self) -> None:
        """Raise RunDirectoryError if something else has the name of a file of the run."""
        for path in (self.path / name for name in _FILES):
            if (path.exists() or path.is_symlink()) and (path.is_symlink() or not path.is_file()):
                raise RunDirectoryError(
                    f"{path} is not a regular file, and the run writes one there. Move it away, or choose another "
                    "run_dir"
                )
        folder = self._manifest.parent
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise RunDirectoryError(
                f"{folder} is a link or a file, and the run needs a real directory there. Move it away, or choose "
                "another run_dir"
            )

    @property
    def _manifest(self) -> Path:
        return self.path / "checkpoint" / "manifest.json"

    def start(self, state: RunState, config: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Make a new run's directory with its first checkpoint.

        Raises:
            ValueError: JSON cannot hold the config; nothing was written.
            RunDirectoryError: another run has begun there in the meantime.
        """
        try:
            json.dumps(config)
        except TypeError as error:
            raise ValueError(f"config must hold what JSON can: {error}") from error
        make_directory(self.path)
        self._lock()
        if self.ranks.first and self._manifest.exists():
            raise RunDirectoryError(f"another run has just begun in {self.path}; choose another run_dir")
        self._check_places()
        self._manifest.parent.mkdir(exist_ok=True)
        if self.ranks.first:
            write_json(self.path / "config.json", config)
            write_json(self.path / "environment.json", environment)
        self.save(state)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a round's line to metrics.jsonl."""
        line = (json.dumps(record) + "\n").encode()
        path, flags = self.path / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with errors_with_path(path), open(open_regular(path, flags), "ab") as file:
            file.write(line)
        self._metrics += line

    def save(self, state: RunState) -> None:
        """Write a checkpoint of `state`. The last one stays valid until the new one is complete.

        It is collective with several ranks: each rank writes the states of its clients, and then rank 0 the manifest.
        """
        self._save_clients(state)
        client_files = {i: name for i, (_, name) in self._clients.items()}
        parts = self.ranks.gather((client_files, {name: self._hashes[name] for name in client_files.values()}))
        if self.ranks.first:
            clients = {i: name for part, _ in parts for i, name in part.items()}
            for _, hashes in parts:
                self._hashes |= hashes
            self._save_manifest(state, clients)
        self.saved_round = state.round

    def _save_manifest(self, state: RunState, clients: Mapping[int, str]) -> None:
        """Write the server's file and the manifest, and remove the files that no manifest names."""
        tensors = {f"server.{name}": t for name, t in state.server.items()} | {
            f"buffer.{i}": b for i, b in enumerate(state.buffers)
        }
        server = self._write(f"server-{state.round:06d}.safetensors", tensors)
        self._sync_metrics()
        names = {server} | set(clients.values())
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "round": state.round,
            "metrics_bytes": len(self._metrics),
            "metrics_hash": digest_of(self._metrics),
            "server": server,
            "clients": {str(i): name for i, name in sorted(clients.items())},
            "files": {name: self._hashes[name] for name in sorted(names)},
            "identity": self.identity,
        }
        # in one line: indented takes ten times as long
        text = json.dumps(seal(manifest)) + "\n"
        write_bytes(self._manifest, text.encode(), folder_may_be_link=False)
        self._hashes = {name: self._hashes[name] for name in names}
        for path in self._manifest.parent.iterdir():
            if _TENSORS.fullmatch(path.name) and path.name not in names and path.is_file():
                path.unlink()

    def _sync_metrics(self) -> None:
        """Sync metrics.jsonl to the disk. Write it anew if it was removed or changed in the meantime."""
        path = self.path / "metrics.jsonl"
        content = b""
        if path.exists():
            with errors_with_path(path), open(open_regular(path, os.O_RDONLY), "rb") as file:
                os.fsync(file.fileno())
                content = file.read()
        if content != self._metrics:
            log.warning("%s was removed or changed from outside. It is written anew with all rounds", path)
            write_bytes(path, self._metrics)

    def _save_clients(self, state: RunState) -> None:
        """Write one file with the states that changed since the last checkpoint. A tensor that several clients share
        (an old w) is in it once.

        A client that is absent for long keeps a file that is otherwise full of old states. Therefore all states are
        written anew when the files would be larger than twice the states.
        """
        self._clients = {i: entry for i, entry in self._clients.items() if state.clients.get(i) is entry[0]}
        new_states = {i: s for i, s in state.clients.items() if i not in self._clients}
        if not new_states:
            return
        nbytes = sum(self._sizes[name] for name in {name for _, name in self._clients.values()})
        if nbytes + unique_nbytes(new_states.values()) > 2 * unique_nbytes(state.clients.values()):
            new_states = state.clients
        tensors: State = {}
        keys: dict[int, str] = {}
        places: dict[str, dict[str, str]] = {}
        for i, client in sorted(new_states.items()):
            for name, tensor in client.items():
                key = keys.setdefault(id(tensor), f"t{len(keys)}")
                tensors[key] = tensor
                places.setdefault(str(i), {})[name] = key
        rank = "" if self.ranks.size == 1 else f"-{self.ranks.rank}"
        file = self._write(f"clients-{state.round:06d}{rank}.safetensors", tensors, {"places": json.dumps(places)})
        self._sizes[file] = unique_nbytes([tensors])
        self._clients |= {i: (client, file) for i, client in new_states.items()}

    def _write(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> str:
        data = safetensors.torch.save(
            {k: t.detach().cpu().clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}, metadata
        )
        write_bytes(self._manifest.parent / name, data, folder_may_be_link=False)
        self._hashes[name] = digest_of(data)
        return name

    def _load(self) -> RunState:
        manifest, folder = read_manifest(self._manifest), self._manifest.parent
        try:
            check_identity(self.path, manifest["identity"], self.identity)
            tensors = {n: read_tensors(folder / Path(n).name, digest) for n, digest in manifest["files"].items()}
            state = self._assemble(manifest, tensors)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
            raise RunDirectoryError(
                f"{self._manifest} is not a valid manifest ({error!r}); the directory was left as it is"
            ) from error
        self.saved_round = state.round
        self._hashes = dict(manifest["files"])
        return state

    def _assemble(self, manifest: Mapping[str, Any], tensors: Mapping[str, tuple[State, dict[str, str]]]) -> RunState:
        server = {key: t.to(self.device) for key, t in tensors[manifest["server"]][0].items()}
        self._metrics, history = read_history(self.path / "metrics.jsonl", manifest)
        buffers = sum(key.startswith("buffer.") for key in server)
        owner_ranks = {int(i): int(i) % self.ranks.size for i in manifest["clients"]}
        return RunState(
            manifest["round"],
            {key.removeprefix("server."): t for key, t in server.items() if key.startswith("server.")},
            [server[f"buffer.{i}"] for i in range(buffers)],
            self._adopt(manifest["clients"], tensors, owner_ranks),
            history,
            owner_ranks if self.ranks.size > 1 else {},
        )

    def _adopt(
        self,
        files: Mapping[str, str],
        tensors: Mapping[str, tuple[State, dict[str, str]]],
        owner_ranks: Mapping[int, int],
    ) -> dict[int, State]:
        """Return the states of this rank's clients. Tensors that a file shares are shared in memory."""
        copies: dict[tuple[str, str], Tensor] = {}
        places = {name: json.loads(tensors[name][1]["places"]) for name in set(files.values())}
        for i, name in files.items():
            if owner_ranks[int(i)] != self.ranks.rank:
                continue
            state = {}
            for n, key in places[name][i].items():
                if (name, key) not in copies:
                    copies[name, key] = self.adopt(tensors[name][0][key])
                state[n] = copies[name, key]
            self._clients[int(i)] = (state, name)
        self._sizes = {name: unique_nbytes([tensors[name][0]]) for name in places}
        return {i: state for i, (state, _) in self._clients.items()}

    def rewind(self) -> None:
        """Cut metrics.jsonl back to the checkpoint that was loaded. The rounds after it are computed again."""
        if self.ranks.first and (self.path / "metrics.jsonl").exists():
            with open(open_regular(self.path / "metrics.jsonl", os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:
                file.truncate(len(self._metrics))

    def rescue(self, state: RunState) -> None:
        """Write a checkpoint when the run ends early, also in the middle of `log`. metrics.jsonl is written anew.

        With several ranks one of them may have died. Then the last checkpoint stays.
        """
        if self.ranks.size == 1 and state.round > self.saved_round >= 0:
            self._metrics = "".join(json.dumps(r) + "\n" for r in state.history[: state.round]).encode()
            write_bytes(self.path / "metrics.jsonl", self._metrics)
            self.save(state)

    def finish(
        self, model: nn.Module, summary: Mapping[str, Any], client_accuracies: Sequence[float | None] | None
    ) -> None:
        """Write the final model, the summary and the accuracies of the clients, unless they are None."""
        if client_accuracies is not None:
            rows = ["client,accuracy", *(f"{i},{'' if x is None else x}" for i, x in enumerate(client_accuracies))]
            write_bytes(self.path / "clients.csv", "".join(f"{row}\n" for row in rows).encode())
        write_bytes(self.path / "model.safetensors", stored_model(model))
        write_json(self.path / "summary.json", summary)


def unique_nbytes(states: Iterable[State]) -> int:
    """Return the bytes of all tensors together. A tensor that several states share counts once."""
    return sum({id(t): t.nbytes for state in states for t in state.values()}.values())


def stored_model(model: nn.Module, metadata: dict[str, str] | None = None) -> bytes:
    """Return a safetensors file of a model's state_dict. Tied tensors are stored separately."""
    tensors = {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in model.state_dict().items()
    }
    return safetensors.torch.save(tensors, metadata)
