"""Local epochs of ResNet-18-GN under `graph`, with several precisions, stems and memory formats: M6 of
bench/fed/decide.py."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from bench.fed.on_gpu import table8_data, train_model
from bench.fed.setting import Setting
from bench.fed.steady import Figures
from bench.fed.workload import CLASSES
from fastsam.fed import models


class HalfPrecision(nn.Module):
    """A model that runs in bfloat16 where torch's autocast does; weights and gradients stay float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.model(x).float()


@contextmanager
def no_tf32() -> Iterator[None]:
    """Compute convolutions and matrix products in float32."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    old_values = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = old_values


TORCHS_OWN = "torch's own precision"  # TF32 in convolutions
PRECISIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    TORCHS_OWN: nullcontext, "no TF32": no_tf32, "bfloat16": nullcontext,
}  # fmt: skip


# Variants of the first row; names begin with the stem that they are compared on.
VARIANTS: dict[str, dict[str, str]] = {
    "7x7 stem, no TF32": {"precision": "no TF32"},
    "7x7 stem, bfloat16": {"precision": "bfloat16"},
    "7x7 stem, channels_last": {"memory_format": "channels_last"},
    "7x7 stem, bfloat16, channels_last": {"precision": "bfloat16", "memory_format": "channels_last"},
    "3x3 stem": {"stem": "3x3"},
    "3x3 stem, no TF32": {"stem": "3x3", "precision": "no TF32"},
    "3x3 stem, bfloat16": {"stem": "3x3", "precision": "bfloat16"},
    "3x3 stem, channels_last": {"stem": "3x3", "memory_format": "channels_last"},
    "3x3 stem, bfloat16, channels_last": {"stem": "3x3", "precision": "bfloat16", "memory_format": "channels_last"},
}


def rounds(
    setting: Setting, slots: int, seconds: float, algorithm: str = "fedavg", stem: str = "7x7",
    precision: str = TORCHS_OWN, memory_format: str = "preserve",
) -> Figures:  # fmt: skip
    """Return the times of local epochs of a tenth of the clients of Table 8."""
    sizes = setting.sizes
    model = models.build("resnet18_gn", (3, 32, 32), CLASSES, 0, stem=stem, widths=sizes.widths).to(setting.device)
    model = HalfPrecision(model) if precision == "bfloat16" else model
    data = table8_data(setting.device, sizes.resnet_clients, sizes.images)
    options = {"executor": "graph", "slots": slots, "batch": 50, "cohort": 0.1, "memory_format": memory_format}
    with PRECISIONS[precision]():
        return setting.measure(partial(train_model, model, data, algorithm, **options), seconds).figures()
