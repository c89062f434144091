"""Test sets of the clients' own, in place of one that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.clients.pairs import Pair, checked_pair


class ClientTestSets:
    """A test set for each client, in their order, None for one without:
    `fed.run(..., test=fed.ClientTestSets([(x0, y0), None, ...]))`.

    Each is a pair (x, y) of tensors or arrays, all of samples of one shape. The global model is tested on all of them
    together; accuracies and metrics of a client are those on its own, and the records have them client by client.

    Raises ValueError for what is no list, and where nobody has a test set.
    """

    def __init__(self, tests: Sequence[Any]) -> None:
        if not isinstance(tests, (list, tuple)):
            raise ValueError(
                f"ClientTestSets takes a list of test sets (x, y), or None, one per client; got {type(tests).__name__}"
            )
        if all(one is None for one in tests):
            raise ValueError("ClientTestSets: no client has a test set; leave test= out, or give one of them some")
        self.tests = list(tests)

    def joined(self, clients: int, dtype: torch.dtype, device: torch.device) -> tuple[Pair, list[int]]:
        """All of them behind each other, and how many samples each client has. Raises ValueError, naming the client,
        for a bad one."""
        if len(self.tests) != clients:
            raise ValueError(
                f"ClientTestSets needs a test set, or None, for each of the {clients} clients; got {len(self.tests)}"
            )
        found = {
            i: checked_pair(one, f"the test set of client {i}", dtype, device)
            for i, one in enumerate(self.tests)
            if one is not None
        }
        first, wanted = next((i, _kinds(*pair)) for i, pair in found.items())
        for i, pair in found.items():
            if _kinds(*pair) != wanted:
                raise ValueError(
                    f"the test set of client {i} has samples {_kinds(*pair)}, that of client {first} {wanted}; they "
                    f"must be built alike"
                )
        x, y = (torch.cat(parts) for parts in zip(*found.values(), strict=True))
        return (x, y), [len(found[i][1]) if i in found else 0 for i in range(clients)]


def _kinds(x: Tensor, y: Tensor) -> str:
    return ", ".join(f"{name} {t.dtype} {list(t.shape[1:])}" for name, t in (("x", x), ("y", y)))
