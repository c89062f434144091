"""Test sets of the clients, in place of a common one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.clients.pairs import Pair, checked_pair


class ClientTestSets:
    """Test sets of the clients, in their order, None for a client without one.

        fed.run(..., test=fed.ClientTestSets([(x0, y0), None, ...]))

    Each test set is a pair (x, y) of tensors or arrays, all with samples of one shape. The global model is tested on
    all of them together. Accuracies and metrics of a client are on its own test set, and the records have them client
    by client.

    Raises:
        ValueError: `tests` is not a list, or no client has a test set.
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
        """Return all test sets in one pair, and the number of samples of each client. Raises ValueError, with the
        client,
        for a bad test set."""
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
                    f"the test set of client {i} has samples {_kinds(*pair)}, the test set of client {first} "
                    f"{wanted}; they must be built alike"
                )
        x, y = (torch.cat(parts) for parts in zip(*found.values(), strict=True))
        return (x, y), [len(found[i][1]) if i in found else 0 for i in range(clients)]


def _kinds(x: Tensor, y: Tensor) -> str:
    return ", ".join(f"{name} {t.dtype} {list(t.shape[1:])}" for name, t in (("x", x), ("y", y)))
