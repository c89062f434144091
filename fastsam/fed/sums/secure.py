"""The sums of a round under masks (`masks`): every client's fixed point leaves it masked, and the sums have the bits of
those without."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from math import ceil

import torch
from torch import Tensor

from fastsam.fed.sums.fixed_point import Key, Problems, RoundSums, Shape
from fastsam.fed.sums.masks import Client, Server

_FEWEST = 2  # clients of a round: the sum of one is its upload


def check_secure_sums(share: float | None, aggregation: str, algorithm: object, cohort: int, ranks: int) -> None:
    """Raises ValueError, with what would work, where masks have no meaning, and without the package that makes them.

    cohort: clients that a round is likely to have at most.
    """
    if share is None:
        return
    asked = f"secure_sums={share:g}"
    if aggregation != "mean":
        raise ValueError(
            f"{asked} shows the server a sum alone, and aggregation={aggregation!r} looks at single uploads: use "
            f"aggregation='mean' (with "
            "clip_update=..., which clients do themselves), or no secure_sums"
        )
    if getattr(algorithm, "pools_data", False):
        raise ValueError(
            f"{asked} hides clients from the server, and {type(algorithm).__name__} has none: leave it out"
        )
    if ranks > 1:
        raise ValueError(f"{asked} is simulated in one process, and this run has {ranks}: use one, or no secure_sums")
    if cohort < _FEWEST:
        raise ValueError(
            f"{asked} needs {_FEWEST} clients in a round, because the sum of one is its upload, and this run has "
            f"rounds of {cohort}; use a "
            "larger participation"
        )
    if find_spec("Crypto") is None:
        raise ValueError(
            f"{asked}: keys and masks are made by the package pycryptodome, which is not installed: pip install "
            f"'fastsam[secure]'"
        )


class SecureSums:
    """A round's sums as `sums` will hold them, and the clients and the server that make them. Keys are new in every
    round.

    share: of the active clients, those that must stay. heaviest: see `RoundSums`. round: from 0.

    Raises RuntimeError for a round of one client.
    """

    def __init__(self, sums: RoundSums, share: float, active: Sequence[int], heaviest: int, round: int) -> None:
        if len(active) < _FEWEST:
            raise RuntimeError(
                f"round {round + 1}: client {active[0]} is alone in its round, and the sum of one client is its "
                f"upload, which secure_sums must not "
                "show; sampler='fixed' draws as many clients in every round"
            )
        self.sums, self.heaviest = sums, heaviest
        self.clients = {i: Client(i) for i in active}
        threshold = max(_FEWEST, ceil(share * len(active) - 1e-9))
        self.server = Server({i: client.public for i, client in self.clients.items()}, threshold, round)
        for client in self.clients.values():
            client.deal(list(self.clients.values()), threshold)
        self._shapes: dict[Key, Shape] | None = None
        self._like = torch.empty(0)

    def add_rows_(
        self,
        clients: Sequence[int],
        weights: Sequence[int],
        mean: Mapping[str, Tensor],
        total: Mapping[str, Tensor],
        numbers: Mapping[str, Sequence[float]],
        problems: Problems,
    ) -> Problems:
        """As `RoundSums.add_rows_`, but that each client turns its own rows and numbers into integers, masks them and
        sends them."""
        problems = dict(problems)
        for place, client in enumerate(clients):
            if place in problems:
                continue
            own = RoundSums(self.sums.terms, self.heaviest)
            means, totals = ({name: x[place] for name, x in rows.items()} for rows in (mean, total))
            problem = own.add_(weights[place], means, totals, {name: x[place] for name, x in numbers.items()})
            if problem is not None:
                problems[place] = problem
                continue
            words = self._words(client, own, next(iter((*mean.values(), *total.values())), self._like))
            self.server.receive(client, self.clients[client].masked(words, self.server.publics))
            self.sums.clients, self.sums.weight = self.sums.clients + 1, self.sums.weight + weights[place]
        return problems

    def _words(self, client: int, own: RoundSums, like: Tensor) -> Tensor:
        """All that a client has to add up, int64 `[2, n]` on the CPU: the limbs of its vectors and numbers, and a
        zero."""
        shapes = dict(sorted(own.shapes(like).items()))
        if self._shapes is None:
            self._shapes, self._like = shapes, like
        elif shapes != self._shapes:
            own_ones, others = (", ".join(f"{k[1]!r} {list(s)}" for k, s in x.items()) for x in (shapes, self._shapes))
            raise ValueError(
                "with secure_sums all clients of a round must upload vectors of the same names and shapes, got "
                f"{own_ones} from client {client} after {others}"
            )
        limbs = [own.limbs(key, shape, like).reshape(2, -1).cpu() for key, shape in shapes.items()]
        return torch.cat([*limbs, torch.zeros(2, 1, dtype=torch.int64)], dim=1)

    def unmask_(self, dropped: Collection[int]) -> None:
        """Puts the sums without masks into `sums`. Raises RuntimeError where the masks do not cancel: see
        `Server.unmask`."""
        words = self.server.unmask(dropped, self.clients)
        assert self._shapes is not None  # something was received
        at = 0
        for key, shape in self._shapes.items():
            place = self.sums.limbs(key, shape, self._like)
            place.copy_(words[:, at : at + place[0].numel()].view(place.shape))
            at += place[0].numel()
        self.sums.become_(self._shapes, self.sums.clients, self.sums.weight, self._like)
