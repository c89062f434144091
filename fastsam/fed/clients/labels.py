"""Labels that a loss ignores, such as -100 of torch's losses: they are in no accuracy, margin or mean."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam.fed.clients.batch_loss import PairLoss
from fastsam.fed.clients.samples import IGNORED

CORRECT, INCORRECT, UNLABELLED = 1, 0, -1
_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)


def ignored_label(loss: object) -> int | None:
    """Return the label that a loss of torch for classes ignores, its `ignore_index`, or None for another loss."""
    function: Any = loss.of_outputs if isinstance(loss, PairLoss) else loss
    options: dict[str, Any] = {}
    if isinstance(function, partial):
        options = function.keywords
        function = function.func
    if isinstance(function, _MODULES):
        return int(function.ignore_index)
    return int(options.get("ignore_index", IGNORED)) if function in _FUNCTIONS else None


def verdicts(outputs: Tensor, y: Tensor, ignored: int) -> Tensor:
    """Return CORRECT, INCORRECT or UNLABELLED for each sample, int8 `[n]`.

    Args:
        outputs: one output per class, `[n, classes]`.
        y: class numbers, int64 `[n]`.
        ignored: the label of samples without a class.
    """
    is_correct = (outputs.argmax(1) == y).view(torch.int8)
    return is_correct.masked_fill_(y == ignored, UNLABELLED)


def accuracy_of(judged: Tensor) -> float | None:
    """Return the share of CORRECT among the labelled samples of `verdicts`, or None if no sample has a label."""
    values = judged.cpu().numpy()
    labelled = int(np.count_nonzero(values != UNLABELLED))
    return int(np.count_nonzero(values == CORRECT)) / labelled if labelled else None


def num_labels(y: object, samples: int, ignored: int | None) -> int:
    """Return the number of labels in y that a loss does not ignore: the weight of its samples in a mean.

    Args:
        y: labels of the samples. Labels that are not a tensor of integers all count.
        samples: number of samples.
        ignored: the label that the loss ignores, or None.
    """
    if ignored is None or not isinstance(y, Tensor) or y.is_floating_point():
        return samples
    return int((y != ignored).sum())
