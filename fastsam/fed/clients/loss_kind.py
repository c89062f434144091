"""The kind of a loss of outputs and labels: a mean over samples or another function of a set, and its ignored label.

A loss is called on a fixed probe: pseudo-random outputs, and labels of all classes in unequal shares. The loss of the
whole probe is compared with the mean of the losses of its parts. So class weights and sums are recognised.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss
from fastsam.fed.clients.labels import ignored_label
from fastsam.fed.clients.samples import IGNORED

Probe = tuple[Tensor, Tensor, list[int]]  # outputs, labels, and the numbers of samples in the parts
_ELEMENTS = 2**22  # most outputs of a probe
_CLASSES = 96  # most classes of a probe, spread evenly over all classes
_PARTS = 32  # most parts of a probe
_SAMPLES = 64  # most samples of a probe that is made of the data's labels
_ROUNDING = {torch.float64: 1e-10}  # relative; other dtypes 1e-5


@dataclass(frozen=True)
class LossKind:
    """The kind of a loss.

    Attributes:
        name: name of the loss, for messages.
        is_mean: the loss of a set is the mean of the losses of its parts, each with its number of labels; None: that is
            not known.
        ignored: the label that does not count, or None if all labels count.
        sample_bytes: bytes of the outputs and labels of a sample, 0 if unknown.
    """

    name: str = "the loss"
    is_mean: bool | None = None
    ignored: int | None = None
    sample_bytes: float = 0.0

    @property
    def unlabelled(self) -> int:
        """The label of samples that are in no accuracy: the ignored label, else -100."""
        return IGNORED if self.ignored is None else self.ignored


def default_kind(loss: object) -> LossKind:
    """Return the kind of a loss that was not called on a probe."""
    return LossKind(ignored=ignored_label(loss))


@torch.no_grad()
def kind_of(loss: BatchLoss, outputs: Any, labels: Any, has_classes: bool, has_ignored: bool) -> LossKind:
    """Return the kind of a loss. torch's random state stays as it is if the caller restores it.

    Args:
        loss: the loss. A loss of a batch is a mean by contract.
        outputs: outputs of the model for some samples.
        labels: labels of the samples.
        has_classes: outputs are one per class in dimension 1, and labels are class numbers.
        has_ignored: some labels of the data are -100.
    """
    if not isinstance(loss, PairLoss):
        return LossKind(is_mean=True)
    ignored, function = ignored_label(loss), loss.of_outputs
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor) or len(outputs) != len(labels):
        return LossKind(name, ignored=ignored)
    sample_bytes = (outputs.nbytes + labels.nbytes) / len(labels)
    try:
        function = copy.deepcopy(function)  # it may count its calls
    except Exception:
        return LossKind(name, ignored=ignored, sample_bytes=sample_bytes)
    is_mean: bool | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run would repeat warnings about the user's data
        for probe in _probes(outputs, labels, has_classes, IGNORED if ignored is None else ignored):
            is_mean = _is_mean(function, *probe)
            if is_mean is None:
                continue
            if ignored is None and has_ignored and _ignores(function, *probe[:2]):
                ignored = IGNORED
            break
    return LossKind(name, is_mean, ignored, sample_bytes)


def _probes(outputs: Tensor, labels: Tensor, has_classes: bool, ignored: int) -> Iterator[Probe]:
    """Yield probes, the best one first: of all classes, of the data's labels, and with the model's own outputs."""
    if has_classes:
        yield _class_probe(outputs, labels, ignored)
    known = labels if labels.is_floating_point() else labels[labels != ignored]
    if not known.numel():
        return
    if not labels.is_floating_point():
        labels = labels.masked_fill(labels == ignored, known.max().item())
    index = torch.arange(max(min(len(labels), _SAMPLES), 4), device=labels.device) % len(labels)
    if labels.dtype == torch.int64:  # the parts then have unequal classes
        index = index[labels.reshape(len(labels), -1)[index, 0].argsort()]
    y, quarter = labels[index], max(1, len(index) // 4)
    sizes = [quarter, quarter, len(index) - 2 * quarter]
    yield _random_like(outputs, len(index)), y, sizes
    yield outputs[index], y, sizes


def _class_probe(outputs: Tensor, labels: Tensor, ignored: int) -> Probe:
    """Return a probe with two to four samples of each class, in the order of the classes."""
    shape = outputs.shape[1:]
    classes = [c for c in range(shape[0]) if c != ignored]
    count = min(len(classes), _CLASSES, max(4, _ELEMENTS // (3 * math.prod(shape))))
    classes = [classes[i * len(classes) // count] for i in range(count)]
    sizes = [2 + i % 3 for i in range(count)]
    numbers = torch.tensor(classes).repeat_interleave(torch.tensor(sizes)).to(labels.device)
    y = numbers.reshape(-1, *[1] * (labels.dim() - 1)).expand(-1, *labels.shape[1:]).contiguous()
    step = math.ceil(count / _PARTS)
    return _random_like(outputs, len(y)), y, [sum(sizes[i : i + step]) for i in range(0, count, step)]


def _random_like(outputs: Tensor, n: int) -> Tensor:
    """Return n fixed pseudo-random outputs with the shape, the dtype and the device of the model's."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, *outputs.shape[1:], generator=generator).to(outputs.device, outputs.dtype)


def _is_mean(function: Callable[..., Tensor], outputs: Tensor, y: Tensor, sizes: Sequence[int]) -> bool | None:
    """Return True if the loss of all samples is the mean of the losses of the parts, or None if the loss cannot be
    called on them, draws random numbers, or is not finite."""
    try:
        whole, again = (float(function(outputs, y)) for _ in range(2))
        parts = [float(function(a, b)) for a, b in zip(outputs.split(sizes), y.split(sizes), strict=True)]
    except Exception:
        return None
    if whole != again or not all(map(math.isfinite, (whole, *parts))):
        return None
    mean, scale = (sum(f(x) * n for x, n in zip(parts, sizes, strict=True)) / len(y) for f in (float, abs))
    return abs(whole - mean) <= _ROUNDING.get(outputs.dtype, 1e-5) * scale


def _ignores(function: Callable[..., Tensor], outputs: Tensor, y: Tensor) -> bool:
    """Return True if samples with the label -100 do not change the loss."""
    try:
        whole = float(function(torch.cat([outputs, outputs.flip(0)]), torch.cat([y, torch.full_like(y, IGNORED)])))
        return math.isclose(whole, float(function(outputs, y)), rel_tol=_ROUNDING.get(outputs.dtype, 1e-5))
    except Exception:
        return False
