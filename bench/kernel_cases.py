"""The registry of kernel cases: every op with what it reads and writes, the sizes, and the order in which they are
measured.

The bytes of an op are those of its operands, each once: no implementation can move fewer. tests/ops/test_bytes.py finds
the operands of each op by experiment and holds this table to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.problem import SIZES, Shapes, Size
from fastsam_kernels.columns import WIDTH, HParam
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
    """One op with the operands of a plain call in float32."""

    name: str
    function: str  # of a backend
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    call: Callable[[Any, Operands], None]
    sums: bool = False  # it writes sums per row instead of elements
    adam: bool = False
    whole: bool = False  # on whole fields, paddings included, without a table

    @property
    def bytes_per_parameter(self) -> int:
        return sum(8 if name in LONGS else 4 for name in self.reads + self.writes)

    @property
    def operands(self) -> tuple[str, ...]:
        """Those of the parameters' size, each once."""
        return tuple(dict.fromkeys(self.reads + self.writes))


def _norm(k: Any, o: Operands) -> None:
    k.norm_(o["sumsq"], o["grads"], [], o["table"], o["hparams"])


def _perturb(save: bool) -> Callable[[Any, Operands], None]:
    def call(k: Any, o: Operands) -> None:
        k.perturb_(o["params"], o["backup"], o["grads"], o["table"], o["hparams"], o["radius"], save)

    return call


def _restore(k: Any, o: Operands) -> None:
    k.restore_(o["params"], o["backup"], o["table"])


def _update(keep: bool) -> Callable[[Any, Operands], None]:
    def call(k: Any, o: Operands) -> None:
        k.update_(o["params"], o["backup"], o["grads"], o["table"], o["hparams"], "sgd", [o["momentum"]], keep=keep)

    return call


def _update_norm(k: Any, o: Operands) -> None:
    k.update_norm_(o["sumsq"], o["params"], o["backup"], o["grads"], o["table"], o["hparams"], g1=o["g1"], q=o["q"])


def _adam(k: Any, o: Operands) -> None:
    moments = [o["exp_avg"], o["exp_avg_sq"]]
    k.update_(o["params"], o["backup"], o["grads"], o["table"], o["hparams"], "adam", moments, steps=o["steps"])


def _dual_norm(k: Any, o: Operands) -> None:
    k.dual_norm_(o["sumsq"], o["grads"], o["mu"], o["s"], o["table"], o["hparams"])


def _dual_perturb(k: Any, o: Operands) -> None:
    k.dual_perturb_(o["params"], o["backup"], o["mu"], o["grads"], o["s"], o["table"], o["hparams"], o["radius"])


def _inner(k: Any, o: Operands) -> None:
    k.inner_(o["products"], o["grads"], o["g1"], o["table"])


def _accumulate(k: Any, o: Operands) -> None:
    k.accumulate_(o["high"], o["low"], o["x"], 0.125)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("norm", "norm_", ("grads",), (), _norm, sums=True),
        Op("perturb", "perturb_", ("params", "grads"), ("params", "backup"), _perturb(True)),
        Op("update", "update_", ("backup", "grads", "momentum"), ("params", "momentum"), _update(False)),
        Op("perturb_separate", "perturb_", ("backup", "grads"), ("params",), _perturb(False)),
        Op("update_keep", "update_", ("backup", "grads", "momentum"), ("params", "backup", "momentum"), _update(True)),
        Op("restore", "restore_", ("backup",), ("params",), _restore),
        Op("update_adam", "update_", ("backup", "grads", "exp_avg", "exp_avg_sq"), ("params", "exp_avg", "exp_avg_sq"),
           _adam, adam=True),
        # With CLIP_FULL, so that the weights belong to what is clipped.
        Op("update_norm", "update_norm_", ("backup", "grads", "g1", "q"), (), _update_norm, sums=True),
        Op("dual_norm", "dual_norm_", ("grads", "mu", "s"), (), _dual_norm, sums=True),
        Op("dual_perturb", "dual_perturb_", ("backup", "mu", "grads", "s"), ("params", "mu"), _dual_perturb),
        Op("inner", "inner_", ("grads", "g1"), (), _inner, sums=True),
        Op("accumulate", "accumulate_", ("high", "low", "x"), ("high", "low"), _accumulate, whole=True),
    )
}  # fmt: skip
STEP = ("norm", "perturb", "update")  # whose bytes are a whole step's


def _client_cnn() -> Shapes:
    """As `small_cnn` of bench.problem with wider convolutions: 20 tensors, 224,474 parameters."""
    shapes: list[tuple[int, ...]] = []
    for before, after in itertools.pairwise((3, 32, 32, 64, 64, 104, 104)):
        shapes += [(after, before, 3, 3), (after,), (after,)]
    return (*shapes, (10, 104), (10,))


def _resnet18_cifar() -> Shapes:
    """ResNet-18 with the stem and the classifier of CIFAR-10: 62 tensors, 11,173,962 parameters."""
    return ((64, 3, 3, 3), *SIZES["resnet18"].shapes[1:-2], (10, 512), (10,))


def cut(parameters: int, tensors: int) -> Shapes:
    """`parameters` in `tensors` pieces of nearly one length."""
    each, more = divmod(parameters, tensors)
    return tuple((each + (i < more),) for i in range(tensors))


CUT_PARAMETERS, CUTS = 4_000_000, (1, 10, 100, 400, 1000)
KERNEL_SIZES: dict[str, Size] = {
    size.name: size
    for size in (
        Size("resnet18", "ResNet-18, 11.2 M", _resnet18_cifar()),
        Size("100m", "100 M", ((1000, 999), (1000,)) * 100),
        Size("50k", "50 k", SIZES["small_cnn"].shapes),
        Size("225k", "225 k", _client_cnn()),
        Size("rows100", "100 rows of 50 k", SIZES["small_cnn"].shapes, rows=100),
        Size("30m", "30 M", SIZES["list30m"].shapes),
        *(Size(f"cut{n}", f"4 M in {n}", cut(CUT_PARAMETERS, n)) for n in CUTS),
    )
}
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
    """What matters most first, so that a run that has to stop early has it: a step's ops on scattered tensors, then the
    rest.

    The sizes that are cut differently show the cost of many tensors: a step's ops on scattered tensors say all of that.
    """
    step = [op for op in ops if op.name in STEP]
    whole = [size for size in sizes if not size.name.startswith("cut")]
    yield from (KernelCase(op, size, "scattered") for size in sizes for op in step)
    yield from (KernelCase(op, size, "flat") for size in whole for op in step)
    for layout in LAYOUTS:
        others = [op for op in ops if op not in step and (layout == "flat" or not op.whole)]
        yield from (KernelCase(op, size, layout) for size in whole for op in others)


def hparams_of(op: Op, rows: int, device: torch.device | str, radius: float) -> Tensor:
    """`[rows, 1, WIDTH]`, slightly different in every row; perturbations of about `radius` per element."""
    common = {HParam.RHO: radius, HParam.NU: 1e-12, HParam.LR: 0.1, HParam.DECAY: 1e-4, HParam.A: 1.0}
    common |= {HParam.B: 0.5, HParam.PHI: 0.25, HParam.CLIP_FULL: float(op.name == "update_norm")}
    of_adam = {adam.BETA1: 0.9, adam.BETA2: 0.999, adam.EPS: 1e-8, HParam.LR: 1e-3, HParam.DECOUPLED: 1.0}
    columns = common | (of_adam if op.adam else {sgd.MOMENTUM: 0.9, HParam.PENALTY: PENALTY})
    hparams = torch.zeros(rows, 1, WIDTH, dtype=torch.float64)
    for column, value in columns.items():
        hparams[:, 0, column] = value
    hparams[:, 0, HParam.LR] *= torch.linspace(1.0, 0.5, rows, dtype=torch.float64)
    return hparams.to(device)
