"""Metrics of other tasks than one class per sample, by name: two classes, regression, several labels a sample,
tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_IGNORED = -100  # the label that torch's losses ignore


def binary_accuracy(outputs: Tensor, labels: Tensor, threshold: float = 0.0) -> float:
    """The share of samples whose one output is on the right side of the threshold: above it where the label is 1
    (true), else not.

    outputs: `[n]` or `[n, 1]`; labels: `[n]` or `[n, 1]`, 0 and 1 or bool. A threshold of 0 suits logits, 0.5
    probabilities. Raises ValueError for other shapes.
    """
    if outputs.numel() != len(outputs) or labels.numel() != len(outputs):
        raise ValueError(
            f"binary accuracy takes one output per sample and one label, got outputs {list(outputs.shape)} and labels "
            f"{list(labels.shape)}"
        )
    return multilabel_accuracy(outputs.flatten(), labels.flatten(), threshold)


def mean_absolute_error(outputs: Tensor, labels: Tensor) -> float:
    """The mean of |output - label|. Shapes alike, or one output a sample: `[n]` or `[n, 1]`. Raises ValueError for
    others."""
    outputs, labels = _alike(outputs, labels)
    return float((outputs - labels).abs().mean())


def root_mean_squared_error(outputs: Tensor, labels: Tensor) -> float:
    """The root of the mean of (output - label)^2. Shapes as for `mean_absolute_error`."""
    outputs, labels = _alike(outputs, labels)
    return float((outputs - labels).square().mean().sqrt())


def r2(outputs: Tensor, labels: Tensor) -> float:
    """The coefficient of determination, the mean over the outputs of a sample, as scikit-learn's `r2_score`.

    Labels that are all one: 1 where they are met, else 0. Shapes as for `mean_absolute_error`.
    """
    outputs, labels = (t.flatten(1) if t.dim() > 1 else t[:, None] for t in _alike(outputs, labels))
    missed, spread = (outputs - labels).square().sum(0), (labels - labels.mean(0)).square().sum(0)
    found = torch.where(
        spread > 0, 1 - missed / spread.clamp_min(torch.finfo(spread.dtype).tiny), (missed == 0).to(spread)
    )
    return float(found.mean())


def multilabel_accuracy(outputs: Tensor, labels: Tensor, threshold: float = 0.0) -> float:
    """The share of all labels whose output is on the right side of the threshold. outputs, labels: `[n, labels]`,
    labels 0 and 1 or bool."""
    outputs, labels = _alike(outputs, labels)
    return float(((outputs > threshold) == (labels > 0.5)).double().mean())


def multilabel_f1(outputs: Tensor, labels: Tensor, threshold: float = 0.0) -> float:
    """F1 over all labels of all samples together (micro): 2 TP / (2 TP + FP + FN), 0 where nothing is positive. Shapes
    as above."""
    outputs, labels = _alike(outputs, labels)
    said, true = outputs > threshold, labels > 0.5
    right, either = int((said & true).sum()), int(said.sum()) + int(true.sum())
    return 2 * right / either if either else 0.0


def token_accuracy(outputs: Tensor, labels: Tensor) -> float:
    """The share of labels that are the largest output's number, but for labels -100. Shapes as for `perplexity`."""
    scores, known = _of_tokens(outputs, labels)
    return float((scores.argmax(1) == known).double().mean())


def perplexity(outputs: Tensor, labels: Tensor) -> float:
    """exp of the mean of -log p(label), over all labels but -100. With next tokens as labels the perplexity of a
    language model.

    outputs: logits `[n, length, classes]`, or `[n, classes, length]` as torch's losses have them, or `[n, classes]`;
    labels: int64 `[n, length]` or `[n]`. Raises ValueError for others, for as many classes as places (which is which?),
    and where every label is -100.
    """
    scores, known = _of_tokens(outputs, labels)
    return float(functional.cross_entropy(scores, known).exp())


def _alike(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """In float64 and of one shape."""
    single = outputs.numel() == len(outputs) == labels.numel() and {outputs.dim(), labels.dim()} <= {1, 2}
    if outputs.shape != labels.shape and not single:
        raise ValueError(
            f"outputs and labels must be of one shape, or one output a sample, got {list(outputs.shape)} and "
            f"{list(labels.shape)}"
        )
    return outputs.double().reshape(labels.shape), labels.double()


def _of_tokens(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `[tokens, classes]` in float64 and labels `[tokens]` of those that count."""
    behind = outputs.shape[:-1] == labels.shape
    second = outputs.dim() == labels.dim() + 1 and (outputs.shape[0], *outputs.shape[2:]) == tuple(labels.shape)
    if labels.dtype != torch.int64 or not (behind or second) or (behind and second and labels.dim() > 1):
        raise ValueError(
            "tokens take logits [n, length, classes] or [n, classes, length], told apart by their lengths, or [n, "
            "classes], and labels int64 "
            f"[n, length] or [n], got {list(outputs.shape)} and {labels.dtype} {list(labels.shape)}; a function of "
            f"your own can tell"
        )
    last = outputs if behind else outputs.movedim(1, -1)
    counted = labels != _IGNORED
    if not bool(counted.any()):
        raise ValueError(f"all labels are {_IGNORED}, which do not count")
    return last[counted].double(), labels[counted]


METRICS: dict[str, Callable[..., float]] = {
    metric.__name__: metric
    for metric in (
        binary_accuracy,
        mean_absolute_error,
        root_mean_squared_error,
        r2,
        multilabel_accuracy,
        multilabel_f1,
        token_accuracy,
        perplexity,
    )
}
THRESHOLDS = frozenset(
    {"binary_accuracy", "multilabel_accuracy", "multilabel_f1"}
)  # those that take one behind a colon
