"""Noise on the clients' deltas or on their sum (`fed.Privacy`), and the epsilon of the rounds so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fastsam.extras import install_command
from fastsam.fed.algorithms.base import Aggregate, Round, State
from fastsam.fed.clients import sampling
from fastsam.fed.common import seeds
from fastsam.fed.privacy.accountant import NEIGHBOURS, Accountant, ParticipationCounter, privacy_events
from fastsam.fed.privacy.options import delta_of
from fastsam.fed.stages.base import Stage
from fastsam.fed.sums.fixed_point import FixedPointAggregate
from fastsam.fed.update.parameter_layout import ParameterLayout
from fastsam.fed.update.results import ClientResults

DELTA = "delta"  # the upload of `Algorithm.finish`


class Noise(Stage):
    """Common parts of both kinds of noise. `mask` is 1 where a row has a parameter and 0 in its padding, float64
    `[row_size]`."""

    def __init__(self, settings: Any, mask: Tensor, accountant: Accountant | None) -> None:
        self.settings, self.mask, self.accountant = settings, mask, accountant
        assert settings.privacy.clip is not None
        self.std = settings.privacy.noise_multiplier * settings.privacy.clip  # standard deviation of the noise

    def record(self, round: Round) -> dict[str, Any]:
        """Return epsilon and delta of all rounds up to this one, or nothing without an accountant."""
        if self.accountant is None:
            return {}
        return {"epsilon": self.accountant.epsilon(round.index + 1), "delta": self.accountant.delta}

    def summary(self) -> dict[str, Any]:
        """Return the guarantee without epsilon, or nothing without an accountant."""
        if self.accountant is None:
            return {"privacy": {}}
        return {
            "privacy": {
                "neighbours": NEIGHBOURS[self.accountant.run_events.relation],
                "delta": self.accountant.delta,
            }
        }


class LocalNoise(Noise):
    """Noise that each client adds to its own clipped delta."""

    def process_results(self, results: ClientResults, round: Round) -> list[float]:
        """Add noise to the deltas, in float64, rounded once. Return their norms."""
        rows, seed = results.delta, self.settings.seed
        noise = torch.stack([normals(rows.shape[1], seed, "local noise", round.index, i) for i in results.client_ids])
        rows.copy_(torch.addcmul(rows.double(), noise.to(rows.device), self.mask, value=self.std))
        norms: list[float] = torch.linalg.vector_norm(rows, dim=1).tolist()
        return norms


class CentralNoise(Noise):
    """Noise that the server adds to the sum of the clipped deltas. The server must not learn the cohort's size, so it
    reads the expected number `cohort`; None: the true number.

    It reads the round's sums, because stages before it change no mean: robust rules are refused next to central noise.
    """

    def __init__(self, settings: Any, mask: Tensor, accountant: Accountant | None, cohort: float | None) -> None:
        super().__init__(settings, mask, accountant)
        self.cohort = cohort
        # A round in which Poisson sampling chose no client is a round: drawing again would change the privacy events.
        self.keeps_empty_rounds = settings.sampler == "bernoulli" and settings.available is None
        self._sums: FixedPointAggregate | None = None

    def visible_round(self, round: Round) -> Round:
        """Return the round with the expected cohort size in place of the true one."""
        if self.cohort is None:
            return round
        expected_size = _expected_size(self.cohort)
        return round if round.cohort_size == expected_size else replace(round, cohort_size=expected_size)

    def begin_round(self, sums: FixedPointAggregate) -> None:
        """Remember the sums of this round."""
        self._sums = sums

    def process_aggregate(self, aggregate: Aggregate | None, server: State, round: Round) -> Aggregate:
        """Return the noisy mean, of noise only if no client was sampled."""
        noise = normals(len(self.mask), self.settings.seed, "noise", round.index).to(server["w"].device)
        sums, self._sums = self._sums, None
        cohort = self.cohort or round.cohort_size
        return PrivateAggregate(None if aggregate is None else sums, noise, self.mask, self.std, cohort)


class PrivateAggregate:
    """The noisy mean `(sum of the clipped deltas + noise) / cohort`, and nothing else. The noise is added in `mean`.
    `sums` is None if no client was sampled; `normals` are standard normal numbers, float64 `[row_size]`."""

    def __init__(
        self, sums: FixedPointAggregate | None, normals: Tensor, mask: Tensor, std: float, cohort: float
    ) -> None:
        self._sums, self._normals, self._mask = sums, normals, mask
        self._std, self._cohort = std, cohort

    @property
    def num_clients(self) -> int:
        """The expected number of clients."""
        return _expected_size(self._cohort)

    def mean(self, name: str) -> Tensor:
        """Return the noisy mean of the deltas, float64 `[row_size]`. Raises ValueError for any other name."""
        if name != DELTA:
            self._refuse(f"mean({name!r})")
        std = self._std / self._cohort
        if self._sums is None:
            return self._normals * self._mask * std
        return self._sums.share(DELTA, self._cohort).addcmul_(self._normals, self._mask, value=std)

    def sum(self, name: str) -> Tensor:
        """Raise ValueError."""
        self._refuse(f"sum({name!r})")

    def scalar(self, name: str) -> float:
        """Raise ValueError."""
        self._refuse(f"scalar({name!r})")

    def _refuse(self, call: str) -> NoReturn:
        raise ValueError(
            f"with noise_multiplier the server has only the noisy mean of the deltas, aggregate.mean({DELTA!r}); "
            f"it requested aggregate.{call}"
        )


def _expected_size(cohort: float) -> int:
    """Return the expected number of clients as a whole number, at least 1."""
    return max(1, round(cohort))


def noise_of(settings: Any, layout: ParameterLayout, num_clients: int, device: torch.device) -> Noise | None:
    """Return the stage of a run with noise, None for a run without.

    Raises:
        ValueError: delta is too large, or the package that computes epsilon is missing.
    """
    if settings.privacy.noise_multiplier == 0:
        return None
    mask = torch.zeros(layout.row_size, dtype=torch.float64, device=device)
    for s in layout.segments:
        mask[s.offset : s.offset + s.length] = 1
    accountant = accountant_of(settings, settings.sampler, num_clients) if settings.privacy.has_epsilon else None
    if settings.privacy.noise == "local":
        return LocalNoise(settings, mask, accountant)
    is_sampled = settings.available is None
    cohort = (
        sampling.expected_size(settings.sampler, settings.share_of(num_clients), num_clients) if is_sampled else None
    )
    return CentralNoise(settings, mask, accountant, cohort)


def accountant_of(settings: Any, sampler: str, num_clients: int) -> Accountant:
    """Return the accountant of a run with this sampler. Raises ValueError as `noise_of` does."""
    privacy = settings.privacy
    delta = delta_of(privacy, num_clients)
    try:
        import dp_accounting  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"epsilon is computed by the package dp-accounting, which is not installed: {install_command('privacy')}, "
            "or fed.Privacy(accountant=None): noise, and no guarantee"
        ) from error
    share = settings.share_of(num_clients)
    draws = sampling.make(sampler, num_clients, share)
    participations = ParticipationCounter(lambda t: sampling.draw(draws, t, settings.seed))
    return Accountant(
        privacy_events(
            privacy.noise,
            sampler,
            share,
            num_clients,
            privacy.noise_multiplier,
            participations.max_participations,
        ),
        delta,
    )


def normals(n: int, *parts: int | str) -> Tensor:
    """Return n standard normal numbers, float64 `[n]` on the CPU.

    They are the numbers of a counter-based generator (Philox) from counter 0. Its key is made of `parts`.
    """
    key = np.array([seeds.derive(*parts), 0], np.uint64)
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).standard_normal(n))


def sampler_choices(settings: Any, num_clients: int) -> str:
    """Return the samplers between which a run with an accountant chooses, with the epsilon of each."""
    share = settings.share_of(num_clients)
    kinds = {
        "bernoulli": f"Poisson sampling: each client with probability {share:.3g}",
        "fixed": f"{sampling.fixed_size(share, num_clients)} of the {num_clients} clients in each round",
    }
    choices = []
    for sampler, kind in kinds.items():
        accountant = accountant_of(settings, sampler, num_clients)
        neighbours = NEIGHBOURS[accountant.run_events.relation]
        epsilon = accountant.epsilon(settings.rounds)
        choices.append(f"sampler={sampler!r} ({kind}; epsilon {epsilon:.4g} if {neighbours})")
    return f"Use {' or '.join(choices)}, after {settings.rounds} rounds at delta={accountant.delta:.3g}"
