"""The registry of kernel cases: every op with the operands that it reads and writes, and the order of measurement.

The bytes of an op are the bytes of its operands, each counted once: no implementation can move fewer.
tests/ops/test_bytes.py finds the operands of each op by experiment and compares them with this table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.workload import Size
from fastsam_kernels.hparams import NUM_HPARAMS, HParam
from fastsam_kernels.rules import adam, sgd

LISTS = ("params", "grads")  # the user's own tensors: scattered, or one field; all other operands are fields
LONGS = ("high", "low")  # fields of int64
LAYOUTS = ("scattered", "flat")
PENALTY = 0.5


class Operands(dict[str, Any]):
    """The operands of one call by name: list operands as lists of tensors, fields and `sumsq`, `table`, `hparams`,
    `steps` as tensors."""


@dataclass(frozen=True)
class Op:
    """One op with the operands of a plain call in float32.

    Args:
        function: its name in a backend.
        reads, writes: the operands of the parameters' size.
        arguments: arguments of the call; names of operands stand for the operands.
        options: keyword arguments of the call.
        sums (bool): it writes sums per row instead of elements.
        whole (bool): it works on whole fields, paddings included, without a table.
    """

    name: str
    function: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    sums: bool = False
    whole: bool = False

    @property
    def adam(self) -> bool:
        return "exp_avg" in self.reads

    @property
    def bytes_per_parameter(self) -> int:
        return sum(8 if name in LONGS else 4 for name in self.reads + self.writes)

    @property
    def operands(self) -> tuple[str, ...]:
        """Return the operands of the parameters' size, each once."""
        return tuple(dict.fromkeys(self.reads + self.writes))

    def call(self, kernels: Any, operands: Operands) -> None:
        """Call the op of a backend."""

        def convert(value: Any) -> Any:
            if isinstance(value, tuple):
                return [operands[name] for name in value]
            return operands.get(value, value) if isinstance(value, str) else value

        options = {name: convert(value) for name, value in self.options.items()}
        getattr(kernels, self.function)(*map(convert, self.arguments), **options)


_STEP, _DUAL = ("params", "backup", "grads", "table", "hparams"), ("grads", "mu", "s", "table", "hparams")
_PERTURB, _SGD, _ADAM = (*_STEP, "radius"), (*_STEP, "sgd", ("momentum",)), (*_STEP, "adam", ("exp_avg", "exp_avg_sq"))
_OPS = (
    Op("norm", "norm_", ("grads",), (), ("sumsq", "grads", (), "table", "hparams"), sums=True),
    Op("perturb", "perturb_", ("params", "grads"), ("params", "backup"), (*_PERTURB, True)),
    Op("update", "update_", ("backup", "grads", "momentum"), ("params", "momentum"), _SGD),
    Op("perturb_separate", "perturb_", ("backup", "grads"), ("params",), (*_PERTURB, False)),
    Op("update_keep", "update_", ("backup", "grads", "momentum"), ("params", "backup", "momentum"), _SGD,
       {"write_master": True}),
    Op("restore", "restore_", ("backup",), ("params",), ("params", "backup", "table")),
    Op("update_adam", "update_", ("backup", "grads", "exp_avg", "exp_avg_sq"), ("params", "exp_avg", "exp_avg_sq"),
       _ADAM, {"steps": "steps"}),
    # CLIP_INCLUDES_PROX is set, so phi*w is inside the clipped norm and the op reads the weights.
    Op("update_norm", "update_norm_", ("backup", "grads", "g1", "q"), (), ("sumsq", *_STEP),
       {"g1": "g1", "q": "q"}, sums=True),
    Op("dual_norm", "dual_norm_", ("grads", "mu", "s"), (), ("sumsq", *_DUAL), sums=True),
    Op("dual_perturb", "dual_perturb_", ("backup", "mu", "grads", "s"), ("params", "mu"),
       ("params", "backup", "mu", "grads", "s", "table", "hparams", "radius")),
    Op("inner", "inner_", ("grads", "g1"), (), ("products", "grads", "g1", "table"), sums=True),
    Op("accumulate", "accumulate_", ("high", "low", "x"), ("high", "low"), ("high", "low", "x", 0.125),
       whole=True),
)  # fmt: skip
OPS = {op.name: op for op in _OPS}
STEP = ("norm", "perturb", "update")  # the ops of a whole step


CPU_LEFT_OUT = ("100m",)  # gigabytes of operands and their copies in float64: by name only


@dataclass(frozen=True)
class KernelCase:
    op: Op
    size: Size
    layout: str

    @property
    def name(self) -> str:
        return f"{self.op.name}-{self.size.name}-{self.layout}"


def kernel_cases(sizes: list[Size], ops: list[Op]) -> Iterator[KernelCase]:
    """Yield the most important cases first, because a run may stop early: a step's ops on scattered tensors, then the
    rest.

    The sizes that are cut differently show the cost of many tensors: a step's ops on scattered tensors say all of that.
    """
    step = [op for op in ops if op.name in STEP]
    uncut_sizes = [size for size in sizes if not size.name.startswith("cut")]
    yield from (KernelCase(op, size, "scattered") for size in sizes for op in step)
    yield from (KernelCase(op, size, "flat") for size in uncut_sizes for op in step)
    for layout in LAYOUTS:
        other_ops = [op for op in ops if op not in step and (layout == "flat" or not op.whole)]
        yield from (KernelCase(op, size, layout) for size in uncut_sizes for op in other_ops)


def hparams_of(op: Op, rows: int, device: torch.device | str, radius: float) -> Tensor:
    """Return `[rows, 1, NUM_HPARAMS]`, slightly different in every row; perturbations of about `radius` per element."""
    common = {HParam.RHO: radius, HParam.PERTURB_EPS: 1e-12, HParam.LR: 0.1, HParam.DECAY: 1e-4, HParam.G2_COEF: 1.0}
    common |= {HParam.G1_COEF: 0.5, HParam.PROX_MU: 0.25, HParam.CLIP_INCLUDES_PROX: float(op.name == "update_norm")}
    of_adam = {adam.BETA1: 0.9, adam.BETA2: 0.999, adam.EPS: 1e-8, HParam.LR: 1e-3, HParam.DECOUPLED: 1.0}
    columns = common | (of_adam if op.adam else {sgd.MOMENTUM: 0.9, HParam.PENALTY: PENALTY})
    hparams = torch.zeros(rows, 1, NUM_HPARAMS, dtype=torch.float64)
    for column, value in columns.items():
        hparams[:, 0, column] = value
    hparams[:, 0, HParam.LR] *= torch.linspace(1.0, 0.5, rows, dtype=torch.float64)
    return hparams.to(device)
