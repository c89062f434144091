"""What the files of clients' states hold, and how much of it still lives: counted as states come and go, so that nobody
is looked at who rested."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

State = dict[str, Tensor]

_LIVE = 0.5  # of a file: with less its rest moves


class Holdings:
    """By file: the bytes of all tensors in it, and of those that are some client's state. A tensor that several clients
    share counts once."""

    def __init__(self) -> None:
        self._whole: dict[str, int] = {}
        self._live: dict[str, int] = {}
        self._owners: dict[str, dict[int, int]] = {}  # of each tensor, how many clients have it
        self._touched: set[str] = set()  # those to be looked at

    def made(self, file: str, nbytes: int) -> None:
        """There is a file with tensors of so many bytes, nobody's yet."""
        self._whole[file], self._live[file], self._owners[file] = nbytes, 0, {}
        self._touched.add(file)

    def add(self, file: str, state: State) -> None:
        """A client has its state in the file."""
        owners = self._owners[file]
        for tensor in state.values():
            count = owners[id(tensor)] = owners.get(id(tensor), 0) + 1
            self._live[file] += tensor.nbytes if count == 1 else 0

    def drop(self, file: str, state: State) -> None:
        """A client has it there no more."""
        owners = self._owners[file]
        self._touched.add(file)
        for tensor in state.values():
            owners[id(tensor)] -= 1
            if owners[id(tensor)] == 0:
                del owners[id(tensor)]
                self._live[file] -= tensor.nbytes

    def sparse(self) -> set[str]:
        """Files of which little lives; they are named until nothing does, and then forgotten."""
        for file in [file for file in self._touched if not self._owners[file]]:
            self._touched.remove(file)
            del self._whole[file], self._live[file], self._owners[file]
        self._touched = {file for file in self._touched if self._live[file] < _LIVE * self._whole[file]}
        return set(self._touched)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of all of them together."""
    return sum(t.nbytes for t in tensors)
