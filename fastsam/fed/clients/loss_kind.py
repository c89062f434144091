"""The kind of a loss of outputs and labels: a mean over samples, or another function of a set.

Only torch's own losses without weights are taken as means. No other function is, because class weights and losses of
pairs look like means on many sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss
from fastsam.fed.clients.labels import ignored_label
from fastsam.fed.clients.samples import IGNORED

_MEANS: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}
_WEIGHTS = ("weight", "pos_weight", "size_average", "reduce")  # options that a mean does not have


@dataclass(frozen=True)
class LossKind:
    """The kind of a loss.

    Attributes:
        name: name of the loss, for messages.
        is_mean: the loss of a set is the mean of the losses of its parts, each with its number of labels.
        ignored: the label that does not count, or None if all labels count.
        sample_bytes: bytes of the outputs and labels of a sample, 0 if unknown.
    """

    name: str = "the loss"
    is_mean: bool = True
    ignored: int | None = None
    sample_bytes: float = 0.0

    @property
    def unlabelled(self) -> int:
        """The label of samples that are in no accuracy: the ignored label, else -100."""
        return IGNORED if self.ignored is None else self.ignored


def kind_of(loss: object, outputs: Any = None, labels: Any = None, samples: int = 0) -> LossKind:
    """Return the kind of a loss, with the size of `outputs` and `labels` of some samples. A loss of a batch is a mean
    by contract."""
    function: Any = loss.of_outputs if isinstance(loss, PairLoss) else loss
    name = getattr(function, "__name__", type(function).__name__)
    sample_bytes = nbytes_of((outputs, labels)) / max(1, samples)
    return LossKind(name, _is_mean(function), ignored_label(loss), sample_bytes)


def nbytes_of(tree: Any) -> int:
    """Return the number of bytes of the tensors of a tree."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _is_mean(function: Any) -> bool:
    if isinstance(function, BatchLoss):
        return True
    options: dict[str, Any] = {}
    if isinstance(function, nn.Module):
        is_known = type(function) in _MEANS.values() and not (function._forward_hooks or function._forward_pre_hooks)
        options = {**vars(function), **function._buffers}
    elif isinstance(function, partial):
        is_known, options = function.func in _MEANS and not function.args, function.keywords
    else:
        is_known = any(function is known for known in _MEANS)
    is_weighted = any(options.get(name) is not None for name in _WEIGHTS)
    return is_known and not is_weighted and options.get("reduction", "mean") == "mean"
