"""The trial step where samples come in batches: trees, data sets that are read, losses of a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss
from fastsam.fed.clients.population import IGNORED, Loss, Population, check_labels
from fastsam.fed.clients.samples import ClientDataset, leaves
from fastsam.fed.loop.trial_pass import explain, look, random_state_kept
from fastsam.fed.loop.trial_step import Trial, are_labels, check_function, check_outputs, of_classes, one_per_class
from fastsam.fed.step.model_copy import copied


def batch_loss(loss: Loss | BatchLoss, population: Population) -> Loss | BatchLoss:
    """The loss as steps take it: where samples come in batches, of a batch."""
    return PairLoss(loss) if population.samples is not None and not isinstance(loss, BatchLoss) else loss


def try_batches(model: nn.Module, population: Population, loss: BatchLoss, batch_size: int) -> Trial:
    """Take a step on the client with most samples, and then a pass over the test set, as `trial_step.try_pairs` does.

    Raises:
        ValueError: something does not work; the message names client and batch.
    """
    check_function(loss.of_outputs if isinstance(loss, PairLoss) else loss)
    assert population.samples is not None
    sizes = population.known_sizes
    client = max(sizes, key=lambda i: (sizes[i], -i)) if sizes else 0
    batch = _first(population.samples[client], f"client {client}", batch_size)
    trial = copied(model).to(population.device)
    failed = f"a trial step on client {client} ({_about(batch)}) failed"
    with random_state_kept(population.device):
        trial.train()
        tensors = [leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor)]
        draws, changed = look(model, trial, loss, tensors, lambda: loss(trial, batch), failed)
        classifies = _classifies(trial.eval(), population, loss, batch, failed)
        if population.test_samples is not None:
            first = _first(population.test_samples, "the test set", batch_size)
            what = f"the model and the loss work on the clients' data, but not on the test set ({_about(first)})"
            with torch.no_grad(), explain(what):
                loss.evaluated(trial, first, loss.predicts)
    return Trial(classifies, changed, draws, None)


def _first(samples: ClientDataset, who: str, batch_size: int) -> Any:
    with explain(f"{who}: its first batch cannot be made"):
        return samples.take(torch.arange(min(batch_size, len(samples))), 0)


def _about(batch: Any) -> str:
    """Names, dtypes and shapes."""
    parts = (
        f"{path or 'batch'} {leaf.dtype} {list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else f"{path} {type(leaf).__name__}"
        for path, leaf in leaves(batch)
    )
    return ", ".join(parts)


@torch.no_grad()
def _classifies(trial: nn.Module, population: Population, loss: BatchLoss, batch: Any, failed: str) -> bool:
    """Return True if outputs are one per class and the test set has labels for them."""
    if not loss.predicts:
        return False
    with explain(failed):
        _, outputs, labels = loss.evaluated(trial, batch, True)
    if not isinstance(labels, Tensor) or not are_labels(outputs, labels):
        return False
    if not isinstance(loss, PairLoss):  # outputs of a user's `predict` are one per class
        known = bool(((labels >= 0) & (labels < outputs.shape[1]) | (labels == IGNORED)).all())
        return labels.dim() == 1 and outputs.shape[1] > 1 and known
    function = loss.of_outputs
    if of_classes(function):
        check_outputs(outputs.shape[1], population.classes)
        check_labels(population, outputs.shape[1], getattr(function, "ignore_index", IGNORED))
        return labels.dim() == 1
    return labels.dim() == 1 and one_per_class(outputs, [labels, *(population.labels or [])], function)
