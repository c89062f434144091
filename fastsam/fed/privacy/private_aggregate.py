"""What the server's step reads of a round whose sum has noise on it: the one noisy mean, and nothing else."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from fastsam.fed.sums.fixed_point import FixedPointAggregate

DELTA = "delta"  # the upload of `Algorithm.finish_client`


class PrivateAggregate:
    """(sum of the clipped displacements + noise) / cohort.

    sums: of the round; None where nobody was sampled, which the server must not see, so there is noise alone. normals:
    standard normal numbers, float64 `[row_size]`, and places, 0 in the padding; std: of the noise on the sum. cohort:
    clients that are expected in a round: how many there were depends on who is among the clients.
    """

    def __init__(
        self, aggregate: FixedPointAggregate | None, normals: Tensor, places: Tensor, std: float, cohort: float
    ) -> None:
        self._sums, self._normals, self._places = aggregate, normals, places
        self._std, self._cohort = std, cohort

    @property
    def num_clients(self) -> int:
        """As many as are expected."""
        return max(1, round(self._cohort))

    def mean(self, name: str) -> Tensor:
        """The noisy mean of the displacements, float64 `[row_size]`. Raises ValueError for another name."""
        if name != DELTA:
            self._refused(f"mean({name!r})")
        std = self._std / self._cohort
        if self._sums is None:
            return self._normals * self._places * std
        return self._sums.share(DELTA, self._cohort).addcmul_(self._normals, self._places, value=std)

    def sum(self, name: str) -> Tensor:
        """Raises ValueError."""
        self._refused(f"sum({name!r})")

    def scalar(self, name: str) -> float:
        """Raises ValueError."""
        self._refused(f"scalar({name!r})")

    def _refused(self, what: str) -> NoReturn:
        raise ValueError(
            f"with noise_multiplier the server has only the noisy mean of the deltas, aggregate.mean({DELTA!r}); "
            f"it asked for aggregate.{what}"
        )
