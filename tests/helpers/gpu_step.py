"""One SAM step over a list of tensors on the GPU, straight through the kernels."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from fastsam.arena import Arena, Layout
from fastsam_kernels.hparams import NUM_HPARAMS
from tests.helpers.op_cases import COLUMNS

DEVICE = "cuda"
VALUES = {"RHO": 0.05, "PERTURB_EPS": 1e-12, "LR": 0.1, "DECAY": 1e-2, "G2_COEF": 1.0, "MOMENTUM": 0.9}


def hparams_of(rows: int = 1, device: str = DEVICE, **columns: float) -> Tensor:
    out = torch.zeros(rows, 1, NUM_HPARAMS, dtype=torch.float64)
    for name, value in (VALUES | columns).items():
        out[..., COLUMNS[name]] = value
    return out.to(device)


class Step:
    """Its operands, drawn from a seed; `run` makes a step, `read` gives all that steps write."""

    def __init__(
        self,
        lengths: Sequence[int],
        rows: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = DEVICE,
        master: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw() -> list[Tensor]:
            shapes = [(rows, n) if rows > 1 else (n,) for n in lengths]
            return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

        self.params, self.g1, self.g2 = draw(), draw(), draw()
        layout = Layout.from_tensors([torch.empty(n, dtype=dtype) for n in lengths])
        arena = Arena(layout, rows, device)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        self.backup = arena.field("backup", compute if master else dtype)
        self.momentum = arena.field("momentum", compute)
        self.sumsq = torch.zeros(rows, dtype=torch.float64, device=device)
        self.hparams, self.table = hparams_of(rows, device), layout.table

    def run(self, kernels: ModuleType) -> None:
        kernels.norm_(self.sumsq, self.g1, [], self.table, self.hparams)
        kernels.perturb_(self.params, self.backup, self.g1, self.table, self.hparams, self.sumsq, True)
        kernels.update_(self.params, self.backup, self.g2, self.table, self.hparams, "sgd", [self.momentum])

    def read(self) -> list[Tensor]:
        return [t.detach().cpu().clone() for t in (*self.params, self.backup, self.momentum, self.sumsq)]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
