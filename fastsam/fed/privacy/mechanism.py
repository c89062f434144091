"""The noise of a run: what is added where, and what the records say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.clients import sampling
from fastsam.fed.privacy.accountant import NEIGHBOURS, Accountant, Participations, law
from fastsam.fed.privacy.adaptive import Quantile
from fastsam.fed.privacy.ahead import Ahead
from fastsam.fed.privacy.noise import normals
from fastsam.fed.privacy.options import Asked, check_algorithm, check_buffers, delta_of
from fastsam.fed.privacy.private_sums import PrivateSums
from fastsam.fed.privacy.tree import changes
from fastsam.fed.step.rows import Rows
from fastsam.fed.sums.fixed_point import RoundSums

_AT_ONCE, _MOST = 64, 2**18  # rounds, and numbers, whose noise is drawn together
CLIP = "clip_update"  # the name of an adaptive clip in the server's state
SHORT = "not clipped"  # and of the count that it follows, among the sums


@dataclass(frozen=True)
class Privacy:
    """places: 1 where a row has a parameter, 0 in its padding, float64 `[stride]`. cohort: clients expected in a round;
    None: those that came.

    epoch: rounds of a tree.
    """

    asked: Asked
    places: Tensor
    cohort: float | None
    epoch: int
    quantile: Quantile | None
    accountant: Accountant | None

    @property
    def at_server(self) -> bool:
        """Whether the server adds the noise, and so must not learn how many clients a round had."""
        return self.asked.noise != "local"

    @property
    def poisson(self) -> bool:
        """Whether rounds with nobody are rounds: to draw them again would be another law."""
        return self.at_server and self.asked.sampler == "bernoulli" and self.asked.available is None

    def begin(self, server: State) -> State:
        """The server's state before the first round, with what the noise keeps there."""
        if self.quantile is None:
            return server
        assert self.asked.clip_update is not None
        return {**server, CLIP: torch.tensor(self.asked.clip_update, dtype=torch.float64)}

    def clip(self, server: State) -> float:
        """The largest norm of a displacement in the round that begins with this state."""
        if self.quantile is not None:
            return float(server[CLIP])
        assert self.asked.clip_update is not None
        return self.asked.clip_update

    def told(self, about: Round) -> Round:
        """The round as an algorithm may know it: with as many active clients as are expected, where the server adds the
        noise."""
        if self.cohort is None or not self.at_server:
            return about
        expected = max(1, round(self.cohort))
        return about if about.active == expected else replace(about, active=expected)

    def add_to_rows_(self, rows: Tensor, clients: Sequence[int], index: int, clip: float) -> None:
        """Adds to displacements `[n, stride]` the clients' own noise, where noise is local."""
        if self.at_server:
            return
        noise = torch.stack([normals(rows.shape[1], self.asked.seed, "local noise", index, i) for i in clients])
        std = self.asked.noise_multiplier * clip
        rows.copy_(torch.addcmul(rows.double(), noise.to(rows.device), self.places, value=std))

    def sums(self, sums: RoundSums | None, index: int, server: State, active: int) -> PrivateSums:
        """What the server's step reads of a round. sums: None where nobody was sampled."""
        w = server["w"]
        z = self.asked.noise_multiplier if self.quantile is None else self.quantile.sum_multiplier
        noise = self._ahead.of(index)
        return PrivateSums(sums, noise.to(w.device), self.places, z * self.clip(server), self.cohort or active)

    def begin_round(self, index: int) -> None:
        """Before its clients train."""
        if self.at_server:
            self._ahead.begin(index)

    @cached_property
    def _ahead(self) -> Ahead[Tensor]:
        return Ahead(self._noise, max(1, min(_AT_ONCE, _MOST // len(self.places))))

    def _noise(self, rounds: range) -> Sequence[Tensor]:
        """The server's of some rounds, in units of `noise_multiplier` times the clip."""
        if self.asked.noise == "tree":
            return [self._tree(index) for index in rounds]
        n = len(self.places)
        return normals(len(rounds) * n, self.asked.seed, "noise", rounds.start).split(n)

    def _epsilon(self, index: int) -> float | None:
        """Of all rounds up to round `index`."""
        return None if self.accountant is None else self.accountant.epsilon(index + 1)

    def _tree(self, index: int) -> Tensor:
        """The noise of a round in units of that of a node."""
        tree, leaf = divmod(index, self.epoch)
        made = torch.zeros(len(self.places), dtype=torch.float64)
        for sign, level, node in changes(leaf + 1):
            made.add_(normals(len(made), self.asked.seed, "node", tree, level, node), alpha=sign)
        return made

    def after(self, before: State, server: State, sums: RoundSums | None, index: int) -> State:
        """The server's state after the round, with the clip of the next one."""
        if self.quantile is None:
            return server
        short, clients = (0.0, 0) if sums is None else (sums.number(SHORT), sums.clients)
        normal = float(normals(1, self.asked.seed, "count", index))
        clip = self.quantile.next_clip(self.clip(before), short, clients, normal)
        return {**server, CLIP: torch.tensor(clip, dtype=torch.float64)}

    def record(self, index: int, before: State) -> dict[str, Any]:
        """What the record of a round (from 0) says: epsilon is of all rounds up to it."""
        made: dict[str, Any] = {}
        if self.quantile is not None:
            made["clip_update"] = self.clip(before)
        if self.accountant is not None:
            made |= {"epsilon": self._epsilon(index), "delta": self.accountant.delta}
        return made

    def about(self) -> dict[str, Any]:
        """What the summary of a run says, but for epsilon; nothing of a run without an accountant."""
        if self.accountant is None:
            return {}
        return {"neighbours": NEIGHBOURS[self.accountant.law.relation], "delta": self.accountant.delta}


def check(asked: Asked, algorithm: object, changed: Sequence[str]) -> None:
    """Raises ValueError for what the guarantee does not hold for. changed: the buffers that training changes."""
    if asked.noise_multiplier > 0:
        check_algorithm(algorithm)
        check_buffers(asked.buffers, changed)


def make(asked: Asked, rows: Rows, clients: int, device: torch.device) -> Privacy | None:
    """That of a run with noise; None for one without. Raises ValueError for a delta that is too large, and without the
    package for epsilon."""
    if asked.noise_multiplier == 0:
        return None
    places = torch.zeros(rows.length, dtype=torch.float64, device=device)
    for s in rows.segments:
        places[s.offset : s.offset + s.length] = 1
    z, participation = asked.noise_multiplier, asked.participation
    cohort = None if asked.available is not None else sampling.expected(asked.sampler, participation, clients)
    quantile = None
    if asked.clip_quantile is not None:
        quantile = Quantile(asked.clip_quantile, z, cohort or participation * clients)
    return Privacy(asked, places, cohort, sampling.epoch(participation, clients), quantile, _accountant(asked, clients))


def _accountant(asked: Asked, clients: int) -> Accountant | None:
    if asked.accountant is None:
        return None
    delta = delta_of(asked, clients)
    try:
        import dp_accounting  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "epsilon is computed by the package dp-accounting, which is not installed: pip install 'fastsam[privacy]', "
            "or accountant=None: "
            "noise, and no guarantee"
        ) from error
    draws = sampling.make(asked.sampler, clients, asked.participation)
    taken = Participations(lambda t: sampling.draw(draws, t, clients, asked.seed))
    return Accountant(
        law(asked.noise, asked.sampler, asked.participation, clients, asked.noise_multiplier, taken.most), delta
    )
