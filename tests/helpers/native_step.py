"""One SAM step through the ops: its operands, what it writes as a digest, and the call of every op. Operands of
prepared calls.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from fastsam.arena import Layout
from fastsam_kernels import native
from tests.helpers.gpu_step import hparams_of

SHAPES = [(33,), (5, 7), (), (0,), (20000,), (3, 4, 2, 2)]


def hparams(**columns: float) -> Tensor:
    return hparams_of(1, "cpu", **{"PENALTY": 0.5, **columns})


class Step:
    """The operands of one SAM step over SHAPES, drawn from a seed."""

    def __init__(
        self, seed: int = 0, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, device: str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw() -> list[Tensor]:
            return [torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype) for shape in shapes]

        self.params, self.g1, self.g2 = draw(), draw(), draw()
        self.layout = Layout.from_tensors(self.params)
        state = torch.float64 if dtype == torch.float64 else torch.float32
        field: dict[str, Any] = {"size": (1, self.layout.row_size), "dtype": state, "device": device}
        self.backup, self.m, self.v, self.q, self.mu, self.s = (torch.zeros(**field) for _ in range(6))
        self.products = torch.zeros(1, 2, dtype=torch.float64, device=device)
        self.sumsq = torch.zeros(1, dtype=torch.float64, device=device)
        self.steps = torch.zeros(1, len(shapes), device=device)
        self.h, self.table = hparams().to(device), self.layout.table

    def take(self, kernels: Any, params: list[Tensor], g1: list[Tensor], g2: list[Tensor]) -> None:
        """Take one step of these weights with these gradients."""
        kernels.norm_(self.sumsq, g1, [], self.table, self.h)
        kernels.perturb_(params, self.backup, g1, self.table, self.h, self.sumsq, True)
        kernels.update_(params, self.backup, g2, self.table, self.h, "sgd", [self.m])

    def run(self) -> str:
        """Take one step, and return the digest of all written tensors."""
        self.take(native, self.params, self.g1, self.g2)
        return digest_of(*self.params, self.backup, self.m, self.sumsq)

    def run_dual(self) -> str:
        """Perturb with a dual and accumulate as in a federated round. Return the digest of all written tensors."""
        half, seed = [p.bfloat16() for p in self.params], torch.tensor([7])
        g1 = [g.bfloat16() for g in self.g1]
        native.perturb_(half, self.backup, g1, self.table, self.h, self.sumsq, True, seed)
        native.dual_norm_(self.sumsq, self.g1, self.m, self.backup, self.table, self.h)
        native.dual_perturb_(
            self.params, self.backup, self.mu, self.g1, self.m, self.table, self.h, self.sumsq, eps=self.v
        )
        native.inner_(self.products, self.g1, self.params, self.table)
        high, low = (torch.zeros(self.m.shape, dtype=torch.int64) for _ in range(2))
        native.accumulate_(high, low, self.m, 0.1)
        rows, largest = torch.stack([self.mu, self.v, *[self.m] * 3]), torch.empty(5, dtype=torch.float64)
        native.accumulate_(high, low, rows, 0.1, base=self.backup, largest_=largest)
        return digest_of(*half, *self.params, self.mu, self.v, self.sumsq, self.products, high, low, largest)


class Operands:
    """The operands of prepared calls, always with the same numbers."""

    def __init__(self, dtype: torch.dtype = torch.float32, master: bool = False, shapes: Any = SHAPES) -> None:
        generator = torch.Generator().manual_seed(3)
        draw = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(3)]
        self.params, self.g1, self.g2 = ([x.to(dtype) for x in values] for values in draw)
        self.layout = Layout.from_tensors(self.params)
        self.table = self.layout.table
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        self.backup = torch.zeros(1, self.layout.row_size, dtype=compute if master else dtype)
        self.layout.gather(self.params, self.backup[0])
        self.state = [torch.rand(1, self.layout.row_size, generator=generator).to(compute) for _ in range(3)]
        self.steps, self.sumsq = torch.ones(1, len(shapes)), torch.full((1,), torch.nan, dtype=torch.float64)

    def outputs(self) -> list[Tensor]:
        return [*self.params, self.backup, *self.state, self.steps, self.sumsq]


def digest_of(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def calls(step: Step) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    ops = torch.ops.fastsam
    grad_scale, found_inf = torch.ones(1), torch.zeros(1)
    common = (step.params, step.backup, step.g2, step.table, step.h)
    return {
        "norm_": (ops.norm_.default, (step.sumsq, step.g1, step.params, step.table, step.h, False)),
        "perturb_": (
            ops.perturb_.default,
            (step.params, step.backup, step.g1, step.table, step.h, step.sumsq, True, torch.zeros(1).long()),
        ),
        "restore_": (ops.restore_.default, (step.params, step.backup, step.table)),
        "update_norm_": (ops.update_norm_.default, (step.sumsq, *common, step.g1, step.q, grad_scale, True)),
        "update_": (
            ops.update_.default,
            (
                *(*common, "adam", step.m, step.v, None, step.steps, step.g1, step.q, step.sumsq),
                *(grad_scale, found_inf, False, True, step.s),
            ),
        ),
        "dual_norm_": (
            ops.dual_norm_.default,
            (step.sumsq, step.g1, step.mu, step.s, step.table, step.h, False),
        ),
        "dual_perturb_": (
            ops.dual_perturb_.default,
            (step.params, step.backup, step.mu, step.g1, step.s, step.table, step.h, step.sumsq, step.m),
        ),
        "inner_": (ops.inner_.default, (step.products, step.g1, step.params, step.table, True)),
        "accumulate_": (
            ops.accumulate_.default,
            (
                torch.zeros(9).long(), torch.zeros(9).long(), torch.ones(2, 9), 0.5, torch.ones(9),
                torch.zeros(2).double(),
            ),
        ),
    }  # fmt: skip
