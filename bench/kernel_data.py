"""Operands of a kernel case: sets that are used in turn, and the comparison of a call with the reference in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.correctness import excess
from bench.kernel_cases import LISTS, LONGS, KernelCase, Operands, hparams_of
from bench.timing import ROTATION
from fastsam.arena import Layout
from fastsam_kernels import reference

# Largest number of sets. If ROTATION caches need more, that much memory is read before every sample instead. Triton's
# cache of addresses holds this number.
MAX_SETS = 64
SCALE = {"params": 0.05, "backup": 0.05, "grads": 0.01, "g1": 0.01}  # standard deviations, elsewhere 0.01
EPS = torch.finfo(torch.float32).eps
# Tolerance of an element: a handful of float32 operations on operands of the tensor's scale. Tolerance of a sum:
# partial sums in float32, added up in float64.
ELEMENT, SUM = 8 * EPS, 2e-5


class Operator:
    """Sets of operands of one case on one device, and the calls on them."""

    def __init__(self, case: KernelCase, device: torch.device, cache_bytes: int) -> None:
        self.case, self.device = case, device
        size = case.size
        shapes = [torch.empty(shape, device="meta") for shape in size.shapes]
        self.layout = Layout.from_tensors(shapes)
        self.table = self.layout.table
        num_bytes = size.parameters * sum(8 if name in LONGS else 4 for name in case.op.operands)
        num_sets = -(-ROTATION * cache_bytes // num_bytes)
        self.sets = [self._operands(seed) for seed in range(min(max(num_sets, 1), MAX_SETS))]

    def _operands(self, seed: int) -> Operands:
        case, rows = self.case, self.case.size.rows
        generator = torch.Generator(self.device).manual_seed(seed)
        flat = case.layout == "flat"
        values = Operands(table=self.table)
        for name in case.op.operands:
            is_list = name in LISTS or name == "g1"
            if is_list and not flat:
                values[name] = [self._random((rows, *shape), name, generator) for shape in case.size.shapes]
            else:
                field = self._random((rows, self.layout.row_size), name, generator)
                values[name] = [field] if is_list else field
        if "params" not in values:
            values["params"] = [values["backup"]] if "backup" in values else values.get("grads", [])  # never read
        per_row = sum(case.size.lengths)
        double: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        values |= {"sumsq": torch.zeros(rows, **double), "products": torch.zeros(rows, 2, **double)}
        values["radius"] = torch.full((rows,), per_row * SCALE["grads"] ** 2, **double)
        values["hparams"] = hparams_of(case.op, rows, self.device, 0.05 * per_row**0.5)
        values["steps"] = torch.ones(rows, len(self.table), device=self.device)
        return values

    def _random(self, shape: tuple[int, ...], name: str, generator: torch.Generator) -> Tensor:
        if name in LONGS:
            return torch.randint(-(1 << 30), 1 << 30, shape, generator=generator, device=self.device)
        values = torch.randn(shape, generator=generator, device=self.device)
        values = values.mul_(SCALE.get(name, 0.01))
        return values.abs_() if name == "exp_avg_sq" else values

    def check(self, kernels: Any) -> str | None:
        """Call the op on copies of the first set, and compare with the reference in float64 on the same values. Return
        how the two differ; None if they agree."""
        op = self.case.op
        actual = Operands({name: _map(torch.clone, value) for name, value in self.sets[0].items()})
        target = Operands({name: _map(_double, value) for name, value in self.sets[0].items()})
        op.call(reference, target)
        op.call(kernels, actual)
        outputs = ("sumsq", "products") if op.sums else (*op.writes, *(("steps",) if op.adam else ()))
        return next((reason for name in outputs if (reason := self._differs(name, actual[name], target[name]))), None)

    def _differs(self, name: str, actual: Any, target: Any) -> str | None:
        share, references = SUM if name in ("sumsq", "products", "steps") else ELEMENT, self.pieces(target)
        bounds = [(share * b.abs().max() if b.numel() else b.new_zeros(())).expand(b.shape) for b in references]
        problem = excess(lambda a, b, tolerance: (a.double(), b, tolerance), self.pieces(actual), references, bounds)
        return problem and f"{name}: {problem}"

    def pieces(self, operand: Any) -> Sequence[Tensor]:
        """Return the segments of a field; other tensors whole."""
        tensors = _tensors(operand)
        if len(tensors) == 1 and tensors[0].shape[-1] == self.layout.row_size:
            return list(reference.segments(tensors, self.table, self.case.size.rows))
        return tensors


def _tensors(operand: Any) -> list[Tensor]:
    return [operand] if isinstance(operand, Tensor) else list(operand)


def _map(function: Callable[[Tensor], Tensor], operand: Any) -> Any:
    return function(operand) if isinstance(operand, Tensor) else [function(t) for t in operand]


def _double(tensor: Tensor) -> Tensor:
    """Return a copy with the same values in float64; integers keep their dtype."""
    return tensor.double() if tensor.dtype == torch.float32 else tensor.clone()
