"""Sums over clients that do not depend on the order in which the clients arrive: the same bits for any grouping.

Floating-point addition is not associative, integer addition is. So a number x becomes fixed point in two int64 limbs,

    x = high * 2^-28 + low * 2^-80,    0 <= low < 2^52

and the limbs are added. The rounding to 2^-80 happens once per client, before any addition: a value of 1e-8 keeps the
53 bits of a double, and the sum of a round is exact to its last bit before the one conversion back. One limb would not
do (with room for large values its step is 2e-10 of a typical displacement). The range is checked before the conversion,
because an integer sum wraps in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, groupby
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from fastsam import ops
from fastsam.backends import Kernels
from fastsam.fed.sums.ranks import Ranks
from fastsam_kernels.constants import HIGH_BITS, LOW_BITS

LIMIT = 2.0**34  # bound of a sum, whose high limb has 62 bits

Problems = dict[int, str]  # reasons why clients were left out, by index
Key = tuple[str, str]  # kind of a sum of vectors, "mean" or "sum", and its name


class FixedPointSum:
    """The sum of float vectors, independent of their order. At most `terms` vectors are added, each within `+-bound`.

    Args:
        like: a vector with the shape and the device.
        terms: largest number of vectors.
    """

    def __init__(self, like: Tensor, terms: int) -> None:
        self.limit = LIMIT / (1 << (max(terms, 1) - 1).bit_length())
        self.high, self.low = torch.zeros(2, *like.shape, dtype=torch.int64, device=like.device).unbind()
        self._kernels = _kernels(like.device)

    def problem(self, x: Tensor, factor: float) -> str | None:
        """Return the reason why `factor * x` cannot be added, or None."""
        if x.numel() == 0:
            return None
        low, high = (v.item() for v in torch.aminmax(x.detach()))
        return self.problem_of_size(high if math.isnan(high) else max(-low, high), factor)

    def problem_of_size(self, largest: float, factor: float) -> str | None:
        """Return the reason why `factor` times a vector whose largest element has this size cannot be added, or
        None."""
        if not math.isfinite(largest):
            return "is not finite"
        if largest * factor <= self.limit:
            return None
        return f"is out of range (an element of size {largest:.3g}, at most {self.limit / factor:.3g} can be summed)"

    def add_(self, x: Tensor, factor: float, largest: Tensor | None = None) -> None:
        """Add `factor * x` of a vector x, or of every row of x `[n, ...]`. The same call with `-factor` removes it.

        Args:
            x: vector or rows.
            factor: multiple of the unit.
            largest: float64 `[n]` (`[1]`), gets the largest absolute value of each row, NaN if a row is not finite. A
                row whose `problem_of_size` is not None must be removed.
        """
        if x.dtype not in (torch.float32, torch.float64):
            x = x.float()
        if x.requires_grad:
            x = x.detach()
        self._kernels.accumulate_(self.high, self.low, x.contiguous(), factor, largest_=largest)

    def carry(self) -> None:
        """Move the excess of the low limb to the high one. The number that they represent stays."""
        self.high.add_(self.low >> LOW_BITS)
        self.low.bitwise_and_((1 << LOW_BITS) - 1)

    def limbs(self) -> tuple[Tensor, Tensor]:
        """Return the sum as it is: int64, high and low."""
        return self.high, self.low

    def add_limbs(self, high: Tensor, low: Tensor) -> None:
        """Add another sum. Together they may have `terms` terms."""
        self.high.add_(high)
        self.low.add_(low)
        self.carry()

    def value(self, divisor: float = 1.0) -> Tensor:
        """Return the sum divided by a number, float64."""
        return torch.add(self.high.double(), self.low, alpha=2.0**-LOW_BITS).div_(divisor * 2.0**HIGH_BITS)


@cache
def _kernels(device: torch.device) -> Kernels:
    return ops.bind("auto", device, torch.float32)  # every backend gives the same integers


class Term(NamedTuple):
    """Vectors of some clients that enter one sum.

    Attributes:
        sum: the sum.
        name: name of the upload.
        rows: the vectors, `[n, ...]`.
        factors: the factor of each vector in the sum.
        sizes: the largest absolute value of each vector, float64 `[n]` on its device, NaN if the vector is not finite.
    """

    sum: FixedPointSum
    name: str
    rows: Tensor
    factors: Sequence[float]
    sizes: Tensor

    def add(self) -> None:
        """Add the vectors, and write their sizes. Neighbours with one factor share a call."""
        begin = 0
        for factor, group in groupby(self.factors):
            part = slice(begin, begin := begin + len([*group]))
            self.sum.add_(self.rows[part], factor, self.sizes[part])

    def problems(self, sizes: Sequence[float]) -> Problems:
        """Return the clients whose vector cannot be summed, and the reason. `sizes` are the numbers of `self.sizes`."""
        if sum(map(mul, sizes, self.factors)) <= self.sum.limit:  # false also for NaN
            return {}
        found = enumerate(map(self.sum.problem_of_size, sizes, self.factors))
        return {i: f"its {self.name!r} {problem}" for i, problem in found if problem}


class AddedRows(NamedTuple):
    """The vectors of some clients, which were added and are not checked yet.

    Attributes:
        weights: the run's weights of the clients.
        terms: the vectors.
    """

    weights: Sequence[int]
    terms: Sequence[Term]

    @property
    def sizes(self) -> list[Tensor]:
        """The sizes of the vectors of each term."""
        return [term.sizes for term in self.terms]

    def problems(self, sizes: Iterable[Sequence[float]]) -> Problems:
        """Return the clients with a vector that cannot be summed, and the reason. `sizes` are the numbers of
        `self.sizes`."""
        problems: Problems = {}
        for term, numbers in zip(self.terms, sizes, strict=False):
            problems = term.problems(numbers) | problems
        return problems

    def remove(self, clients: Iterable[int]) -> None:
        """Remove the vectors of some clients, by index. Nothing of them stays."""
        for term in self.terms:
            for i in clients:
                term.sum.add_(term.rows[i], -term.factors[i])


def read(parts: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of vectors `[n]`, which are read from the device at once."""
    numbers = torch.cat([part.to(parts[0].device, torch.float64) for part in parts]).tolist() if parts else []
    ends = list(accumulate(len(part) for part in parts))
    return [numbers[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]


def _problems(numbers: Mapping[str, Sequence[float]], limit: float) -> Problems:
    """Return the clients with a number that cannot be summed, and the reason."""
    problems: Problems = {}
    for name, values in numbers.items():
        if sum(map(abs, values)) <= limit:  # a single number that is not finite makes the sum not finite
            continue
        for i, value in enumerate(values):
            if not math.isfinite(value):
                problems.setdefault(i, f"the {name} is not finite")
            elif abs(value) > limit:
                problems.setdefault(i, f"the {name} is out of range ({value:.3g}, at most {limit:.3g} can be summed)")
    return problems


class FixedPointAggregate:
    """The sums of one round: vectors of the clients' uploads, weighted or plain, and their numbers, such as losses.

    The weights are whole numbers, fixed when the clients are sampled. They enter as exact multiples of a power of two
    that is at most 1.

    Args:
        terms: largest number of clients that are added.
        heaviest: largest weight.
    """

    def __init__(self, terms: int, heaviest: int) -> None:
        self.terms, self._unit = terms, 1.0 / (1 << (max(heaviest, 1) - 1).bit_length())
        self.num_clients, self.weight = 0, 0
        self._largest = LIMIT * 2.0**30 / (1 << (max(terms, 1) - 1).bit_length())  # bound of a number
        self._vectors: dict[Key, FixedPointSum] = {}
        self._numbers: dict[str, list[float]] = {}

    def add_rows(
        self,
        weights: Sequence[int],
        mean: Mapping[str, Tensor],
        total: Mapping[str, Tensor],
        numbers: Mapping[str, Sequence[float]],
        problems: Problems | None = None,
    ) -> Problems:
        """Add n clients, or nothing of a client with a problem.

        Args:
            weights: the run's weights.
            mean, total: vectors `[n, ...]` for the weighted means and for the plain sums.
            numbers: n numbers under each name.
            problems: clients that are left out in any case, by index.

        Returns:
            The clients that were left out, and the reasons (a vector or number is not finite or out of range).

        Raises:
            ValueError: a vector does not have the shape of earlier clients' vectors.
        """
        added = self.add(weights, mean, total)
        return self.check(added, read(added.sizes), numbers, problems)

    def add(self, weights: Sequence[int], mean: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> AddedRows:
        """Add the vectors of n clients, as `add_rows` does. Before anything reads the sums, `check` must remove the
        clients with a problem."""
        mean_factors, ones = [weight * self._unit for weight in weights], [1.0] * len(weights)
        terms = [self._term("mean", name, x, mean_factors) for name, x in mean.items()]
        terms += [self._term("sum", name, x, ones) for name, x in total.items()]
        for term in terms:
            term.add()
        return AddedRows(weights, terms)

    def _term(self, kind: str, name: str, rows: Tensor, factors: Sequence[float]) -> Term:
        sizes = torch.zeros(len(factors), dtype=torch.float64, device=rows.device)
        return Term(self._sum(kind, name, rows), name, rows, factors, sizes)

    def check(
        self,
        added: AddedRows,
        sizes: Sequence[Sequence[float]],
        numbers: Mapping[str, Sequence[float]],
        problems: Problems | None = None,
    ) -> Problems:
        """Remove the clients with a problem, and add the numbers of the others. See `add_rows`."""
        weights = added.weights
        problems = added.problems(sizes) | _problems(numbers, self._largest) | (problems or {})
        if problems:
            added.remove(problems)
            indices = [i for i in range(len(weights)) if i not in problems]
            weights, numbers = [weights[i] for i in indices], {n: [v[i] for i in indices] for n, v in numbers.items()}
        for name, values in numbers.items():
            self._numbers.setdefault(name, []).extend(values)
        self.num_clients, self.weight = self.num_clients + len(weights), self.weight + sum(weights)
        return problems

    def add_ranks(self, ranks: Ranks, like: Tensor) -> None:
        """Add the sums of all other ranks; collective. `like` is a tensor on the device.

        Raises:
            ValueError: two ranks hold vectors of one name and different shapes.
            RankError: a rank has died.
        """
        local_shapes = {key: tuple(vector.high.shape) for key, vector in self._vectors.items()}
        parts = ranks.gather((self.num_clients, self.weight, self._numbers, local_shapes))
        self.num_clients, self.weight = sum(part[0] for part in parts), sum(part[1] for part in parts)
        names = {name for part in parts for name in part[2]}
        self._numbers = {name: [x for part in parts for x in part[2].get(name, ())] for name in sorted(names)}
        for kind, name, shape in sorted({(*key, shape) for part in parts for key, shape in part[3].items()}):
            self._sum(kind, name, like.new_empty((1, *shape)))
        vectors = [self._vectors[key] for key in sorted(self._vectors)]
        ranks.add_([limb for vector in vectors for limb in vector.limbs()])
        for vector in vectors:
            vector.carry()

    def _sum(self, kind: str, name: str, rows: Tensor) -> FixedPointSum:
        """Return the sum of vectors like the rows of `rows`."""
        fixed_sum = self._vectors.get((kind, name))
        if fixed_sum is None:
            fixed_sum = self._vectors[kind, name] = FixedPointSum(rows[0], self.terms)
        elif fixed_sum.high.shape != rows.shape[1:]:
            raise ValueError(
                f"the upload {name!r} must have one shape for all clients, got {list(rows.shape[1:])} after "
                f"{list(fixed_sum.high.shape)}"
            )
        return fixed_sum

    def mean(self, name: str) -> Tensor:
        """Return the weighted mean of an upload over the added clients, float64. Raises KeyError for an unknown
        name."""
        return self._get("mean", name).value(self.weight * self._unit)

    def share(self, name: str, divisor: float) -> Tensor:
        """Return the weighted sum of an upload over a number, in place of the added weight as in `mean`, float64.
        Raises KeyError as `mean` does."""
        return self._get("mean", name).value(divisor * self._unit)

    def sum(self, name: str) -> Tensor:
        """Return the plain sum of an upload over the added clients, float64. Raises KeyError for an unknown name."""
        return self._get("sum", name).value()

    def _get(self, kind: str, name: str) -> FixedPointSum:
        try:
            return self._vectors[kind, name]
        except KeyError:
            names = ", ".join(repr(n) for k, n in self._vectors if k == kind) or "none"
            raise KeyError(f"no client sent {name!r} for a {kind}; sent: {names}") from None

    def scalar(self, name: str) -> float:
        """Return the sum of a number over the added clients, rounded once, or 0 if no client sent it."""
        return math.fsum(self._numbers.get(name, ()))
