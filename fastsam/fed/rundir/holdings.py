"""Usage of the files of clients' states: their bytes, and how many of them are live. It is updated as states come and
go, so that clients that did not take part need no look."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

State = dict[str, Tensor]

_LIVE = 0.5  # live share of a file, below which its rest moves


class Holdings:
    """Bytes of all tensors by file, and of the tensors in a client's state. A shared tensor counts once."""

    def __init__(self) -> None:
        self._nbytes: dict[str, int] = {}
        self._live: dict[str, int] = {}
        self._owners: dict[str, dict[int, int]] = {}  # number of clients by tensor
        self._changed_files: set[str] = set()  # files that changed

    def add_file(self, file: str, nbytes: int) -> None:
        """Add a file with `nbytes` bytes of tensors that are in no state yet."""
        self._nbytes[file], self._live[file], self._owners[file] = nbytes, 0, {}
        self._changed_files.add(file)

    def add(self, file: str, state: State) -> None:
        """A client has its state in the file."""
        owners = self._owners[file]
        for tensor in state.values():
            count = owners[id(tensor)] = owners.get(id(tensor), 0) + 1
            self._live[file] += tensor.nbytes if count == 1 else 0

    def drop(self, file: str, state: State) -> None:
        """A client has it there no more."""
        owners = self._owners[file]
        self._changed_files.add(file)
        for tensor in state.values():
            owners[id(tensor)] -= 1
            if owners[id(tensor)] == 0:
                del owners[id(tensor)]
                self._live[file] -= tensor.nbytes

    def sparse(self) -> set[str]:
        """Return the files with few live bytes. They are returned until nothing in them is live, and then forgotten."""
        for file in [file for file in self._changed_files if not self._owners[file]]:
            self._changed_files.remove(file)
            del self._nbytes[file], self._live[file], self._owners[file]
        self._changed_files = {file for file in self._changed_files if self._live[file] < _LIVE * self._nbytes[file]}
        return set(self._changed_files)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors together."""
    return sum(t.nbytes for t in tensors)
