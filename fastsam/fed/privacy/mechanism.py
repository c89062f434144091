"""The noise of a run: what is added where, and what the records say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastsam.extras import install_command
from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.clients import sampling
from fastsam.fed.privacy.accountant import NEIGHBOURS, Accountant, Participations, law
from fastsam.fed.privacy.noise import normals
from fastsam.fed.privacy.options import Asked, check_algorithm, check_buffers, delta_of
from fastsam.fed.privacy.private_aggregate import PrivateAggregate
from fastsam.fed.step.parameter_layout import ParameterLayout
from fastsam.fed.sums.fixed_point import FixedPointAggregate


@dataclass(frozen=True)
class Privacy:
    """places: 1 where a row has a parameter, 0 in its padding, float64 `[row_size]`. cohort: clients expected in a
    round;
    None: those that came.
    """

    asked: Asked
    places: Tensor
    cohort: float | None
    accountant: Accountant | None

    @property
    def at_server(self) -> bool:
        """Whether the server adds the noise, and so must not learn how many clients a round had."""
        return self.asked.noise != "local"

    @property
    def poisson(self) -> bool:
        """Whether rounds with nobody are rounds: to draw them again would be another law."""
        return self.at_server and self.asked.sampler == "bernoulli" and self.asked.available is None

    def told(self, about: Round) -> Round:
        """The round as an algorithm may know it: with as many active clients as are expected, where the server adds the
        noise."""
        if self.cohort is None or not self.at_server:
            return about
        expected = max(1, round(self.cohort))
        return about if about.cohort_size == expected else replace(about, cohort_size=expected)

    def add_to_rows_(self, rows: Tensor, clients: Sequence[int], index: int, clip: float) -> None:
        """Adds to displacements `[n, row_size]` the clients' own noise, where noise is local."""
        if self.at_server:
            return
        noise = torch.stack([normals(rows.shape[1], self.asked.seed, "local noise", index, i) for i in clients])
        std = self.asked.noise_multiplier * clip
        rows.copy_(torch.addcmul(rows.double(), noise.to(rows.device), self.places, value=std))

    def aggregate(
        self, aggregate: FixedPointAggregate | None, index: int, server: State, active: int
    ) -> PrivateAggregate:
        """What the server's step reads of a round. sums: None where nobody was sampled."""
        w = server["w"]
        assert self.asked.clip_update is not None
        std = self.asked.noise_multiplier * self.asked.clip_update
        noise = normals(len(self.places), self.asked.seed, "noise", index).to(w.device)
        return PrivateAggregate(aggregate, noise, self.places, std, self.cohort or active)

    def record(self, index: int) -> dict[str, Any]:
        """Return epsilon and delta of all rounds up to round `index` (from 0), empty without an accountant."""
        if self.accountant is None:
            return {}
        return {"epsilon": self.accountant.epsilon(index + 1), "delta": self.accountant.delta}

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


def make(asked: Asked, layout: ParameterLayout, clients: int, device: torch.device) -> Privacy | None:
    """That of a run with noise; None for one without. Raises ValueError for a delta that is too large, and without the
    package for epsilon."""
    if asked.noise_multiplier == 0:
        return None
    places = torch.zeros(layout.row_size, dtype=torch.float64, device=device)
    for s in layout.segments:
        places[s.offset : s.offset + s.length] = 1
    cohort = None if asked.available is not None else sampling.expected(asked.sampler, asked.share_of(clients), clients)
    return Privacy(asked, places, cohort, _accountant(asked, clients))


def _accountant(asked: Asked, clients: int) -> Accountant | None:
    if asked.accountant is None:
        return None
    delta = delta_of(asked, clients)
    try:
        import dp_accounting  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"epsilon is computed by the package dp-accounting, which is not installed: {install_command('privacy')}, "
            "or accountant=None: noise, and no guarantee"
        ) from error
    share = asked.share_of(clients)
    draws = sampling.make(asked.sampler, clients, share)
    taken = Participations(lambda t: sampling.draw(draws, t, clients, asked.seed))
    return Accountant(law(asked.noise, asked.sampler, share, clients, asked.noise_multiplier, taken.most), delta)
