"""Sums over clients that do not depend on the order in which the clients arrive: the same bits for any grouping.

Floating-point addition is not associative, integer addition is. So a number x becomes fixed point in two int64 limbs,

    x = high * 2^-28 + low * 2^-80,    0 <= low < 2^52

and the limbs are added. The rounding to 2^-80 happens once per client, before any addition: a value of 1e-8 keeps the 53 bits of a
double, and the sum of a round is exact to its last bit before the one conversion back. One limb would not do (with room for large
values its step is 2e-10 of a typical displacement). The range is checked before the conversion, because an integer sum wraps in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from fastsam_kernels.conventions import HIGH_BITS, LOW_BITS

from .. import ops

LIMIT = 2.0**34  # of the sum: the high limb of it has 62 bits
_CARRY_EVERY = 1024  # so many low limbs fit into 63 bits


class FixedPointSum:
    """The sum of float vectors, order-independent. At most `terms` of them are added, each within `+-bound`."""

    def __init__(self, like: Tensor, terms: int) -> None:
        self.bound = LIMIT / (2.0 ** math.ceil(math.log2(max(terms, 1))))
        self.high = torch.zeros(like.shape, dtype=torch.int64, device=like.device)
        self.low = torch.zeros_like(self.high)
        self._kernels = ops.bind("auto", like.device, torch.float32)  # every backend gives the same integers
        self._pending = 0

    def problem(self, x: Tensor, factor: float) -> str | None:
        """Why `factor * x` cannot be added; None when it can."""
        return None if x.numel() == 0 else self._of_size(_largest(x), factor)

    def _of_size(self, largest: float, factor: float) -> str | None:
        """Why a vector whose largest element has this size cannot be added."""
        if not math.isfinite(largest):
            return "is not finite"
        if largest * factor <= self.bound:
            return None
        return f"is out of range (an element of size {largest:.3g}, at most {self.bound / factor:.3g} can be summed)"

    def add_(self, x: Tensor, factor: float) -> None:
        """Adds `factor * x`; `problem(x, factor)` must be None. The product is rounded to float64."""
        x = x.detach().contiguous()
        self._kernels.accumulate_(self.high, self.low, x if x.dtype == torch.float64 else x.float(), factor)
        self._pending += 1
        if self._pending >= _CARRY_EVERY:
            self.carry_()

    def add_rows_(self, rows: Tensor, begins: Tensor | None, factor: float) -> list[str | None]:
        """Adds `factor * row` for every row of `rows` (`[n, ...]`; less `begins`, where given). Returns for each why it was left out, or None."""
        x = rows.detach() if begins is None else rows.detach() - begins
        flat = x.reshape(len(x), -1)
        if not flat.shape[1]:
            return [None] * len(x)
        largest = flat.abs().amax(1).tolist() if len(x) > 1 else [_largest(flat)]
        problems = [self._of_size(size, factor) for size in largest]
        for row, problem in zip(x, problems, strict=True):
            if problem is None:
                self.add_(row, factor)
        return problems

    def carry_(self) -> None:
        """Moves what is over in the low limb to the high one; the number they stand for stays."""
        self.high.add_(self.low >> LOW_BITS)
        self.low.bitwise_and_((1 << LOW_BITS) - 1)
        self._pending = 0

    def limbs(self) -> tuple[Tensor, Tensor]:
        """The sum as it is: int64, high and low."""
        self.carry_()
        return self.high, self.low

    def add_limbs_(self, high: Tensor, low: Tensor) -> None:
        """Adds another sum. Together they may have `terms` terms."""
        self.high.add_(high)
        self.low.add_(low)
        self.carry_()

    def value(self) -> Tensor:
        """The sum as float64."""
        self.carry_()
        return (self.high.double() + self.low.double() * 2.0**-LOW_BITS) * 2.0**-HIGH_BITS


def _largest(x: Tensor) -> float:
    """The size of the largest element; NaN when one is NaN."""
    low, high = (v.item() for v in torch.aminmax(x.detach()))
    return high if math.isnan(high) else max(-low, high)


def _not_finite(numbers: Mapping[str, Sequence[float]], n: int) -> list[str | None]:
    """For each of n clients which of its numbers is not finite, or None."""
    problems: list[str | None] = [None] * n
    for name, values in numbers.items():
        if not all(map(math.isfinite, values)):
            problems = [
                p if p or math.isfinite(v) else f"the {name} is not finite"
                for p, v in zip(problems, values, strict=True)
            ]
    return problems


def _by_weight(weights: Sequence[int], problems: Sequence[str | None]) -> Iterator[tuple[int, list[int]]]:
    """Each weight with the places of those clients that have it and no problem."""
    for weight in set(weights):
        chosen = [
            i for i, (w, problem) in enumerate(zip(weights, problems, strict=True)) if w == weight and not problem
        ]
        if chosen:
            yield weight, chosen


@dataclass(frozen=True)
class SumParts:
    """A rank's sums, without the vectors themselves: their shapes, the numbers, how many clients and which weight."""

    shapes: dict[tuple[str, str], tuple[int, ...]]
    numbers: dict[str, Fraction]
    clients: int
    weight: int


class RoundSums:
    """The sums of one round: vectors of the clients' uploads, weighted or plain, and their numbers.

    terms: how many clients may be added. The weights are whole numbers, fixed when the clients are sampled; `heaviest` is the largest.
    They enter as exact multiples of a power of two that is at most 1.
    """

    def __init__(self, terms: int, heaviest: int) -> None:
        self.terms, self._unit = terms, 2.0 ** -math.ceil(math.log2(max(heaviest, 1)))
        self.clients, self.weight = 0, 0
        self._vectors: dict[tuple[str, str], FixedPointSum] = {}
        self._numbers: dict[str, list[float]] = {}
        self._joined: dict[str, Fraction] | None = None  # the sums over several ranks

    def add_(
        self, weight: int, mean: Mapping[str, Tensor], total: Mapping[str, Tensor], numbers: Mapping[str, float]
    ) -> str | None:
        """Adds one client, or nothing of it. Returns why it was left out (a vector or number is not finite, or out of range), else None.

        Raises ValueError for a vector of another shape than the other clients'.
        """
        terms = [("mean", name, x, weight * self._unit) for name, x in mean.items()]
        terms += [("total", name, x, 1.0) for name, x in total.items()]
        for name, value in numbers.items():
            if not math.isfinite(value):
                return f"the {name} is not finite"
        sums = [self._sum(kind, name, x) for kind, name, x, _ in terms]
        for (_, name, x, factor), one in zip(terms, sums, strict=True):
            problem = one.problem(x, factor)
            if problem:
                return f"its {name!r} {problem}"
        for (_, _, x, factor), one in zip(terms, sums, strict=True):
            one.add_(x, factor)
        for name, value in numbers.items():
            self._numbers.setdefault(name, []).append(value)
        self.clients, self.weight = self.clients + 1, self.weight + weight
        return None

    def add_rows_(
        self,
        weights: Sequence[int],
        name: str,
        rows: Tensor,
        begins: Tensor | None,
        numbers: Mapping[str, Sequence[float]],
    ) -> list[str | None]:
        """As `add_` for n clients with one vector each for the mean `name`: `rows` (`[n, stride]`), less `begins` where given.

        Returns for each why it was left out, or None.
        """
        problems = _not_finite(numbers, len(weights))
        total = self._sum("mean", name, rows[0])
        for weight, chosen in _by_weight(weights, problems):
            some, origin = rows, begins
            if len(chosen) < len(weights):
                some = rows[chosen]
                origin = begins[chosen] if begins is not None and begins.dim() == rows.dim() else begins
            for i, problem in zip(chosen, total.add_rows_(some, origin, weight * self._unit), strict=True):
                problems[i] = problem and f"its {name!r} {problem}"
        added = [i for i, problem in enumerate(problems) if problem is None]
        for number, values in numbers.items():
            self._numbers.setdefault(number, []).extend(values[i] for i in added)
        self.clients, self.weight = self.clients + len(added), self.weight + sum(weights[i] for i in added)
        return problems

    def parts(self) -> SumParts:
        """What other ranks must know of these sums before they are added up."""
        shapes = {key: tuple(one.high.shape) for key, one in self._vectors.items()}
        numbers = {name: sum(map(Fraction, values), Fraction(0)) for name, values in self._numbers.items()}
        return SumParts(shapes, numbers, self.clients, self.weight)

    def join_(self, ranks: Sequence[SumParts], like: Tensor, add_: Callable[[Sequence[Tensor]], None]) -> None:
        """Becomes the sum over the ranks, whose `parts` these are. add_: adds int64 tensors up over them; like: a tensor on their device.

        Raises ValueError when two ranks hold vectors of one name and different shapes.
        """
        shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        for part in ranks:
            for key, shape in part.shapes.items():
                if shapes.setdefault(key, shape) != shape:
                    raise ValueError(
                        f"the upload {key[1]!r} must have one shape for all clients, got {shapes[key]} and {shape}"
                    )
        sums = [self._sum(kind, name, like.new_empty(shapes[kind, name])) for kind, name in sorted(shapes)]
        for one in sums:
            one.carry_()
        add_([limb for one in sums for limb in (one.high, one.low)])
        names = sorted({name for part in ranks for name in part.numbers})
        self._joined = {n: sum((part.numbers.get(n, Fraction(0)) for part in ranks), Fraction(0)) for n in names}
        self.clients, self.weight = (sum(getattr(part, n) for part in ranks) for n in ("clients", "weight"))

    def _sum(self, kind: str, name: str, x: Tensor) -> FixedPointSum:
        found = self._vectors.get((kind, name))
        if found is None:
            found = self._vectors[kind, name] = FixedPointSum(x, self.terms)
        elif found.high.shape != x.shape:
            raise ValueError(
                f"the upload {name!r} must have one shape for all clients, got {list(x.shape)} after {list(found.high.shape)}"
            )
        return found

    def mean(self, name: str) -> Tensor:
        """The weighted mean of an upload over the clients that were added, float64. Raises KeyError for a name nobody sent."""
        return self._get("mean", name).value() / (self.weight * self._unit)

    def total(self, name: str) -> Tensor:
        """The plain sum of an upload over the clients that were added, float64. Raises KeyError for a name nobody sent."""
        return self._get("total", name).value()

    def _get(self, kind: str, name: str) -> FixedPointSum:
        try:
            return self._vectors[kind, name]
        except KeyError:
            sent = ", ".join(repr(n) for k, n in self._vectors if k == kind) or "none"
            raise KeyError(f"no client sent {name!r} for a {kind}; sent: {sent}") from None

    def number(self, name: str) -> float:
        """The sum of a number over the clients that were added, correctly rounded; 0 when nobody sent it."""
        if self._joined is not None:
            return float(self._joined.get(name, Fraction(0)))
        return math.fsum(
            self._numbers.get(name, ())
        )  # exact before its one rounding, so the order of the clients has no part in it
