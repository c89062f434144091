"""One training step on a copy of the model before the first round, so that errors of round 1 come early and with their
reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastsam.fed import executors
from fastsam.fed.clients.batch_loss import BatchLoss
from fastsam.fed.clients.population import IGNORED, Augment, Loss, Population, augmented, check_labels
from fastsam.fed.executors.randomness import RandomOps
from fastsam.fed.loop.trial_pass import explain, look, random_state_kept
from fastsam.fed.step.model_copy import copied, trainable

log = logging.getLogger("fastsam.fed")
_CLASS_LOSSES: tuple[Callable[..., Tensor], ...] = (F.cross_entropy, F.nll_loss)
_KINDS = 64  # largest number of kinds of samples that are tried


@dataclass(frozen=True)
class Trial:
    """The findings of the trial.

    Attributes:
        classifies: outputs are one per class, and labels are class numbers.
        changed_buffers: names of the buffers that training changes.
        draws: functions that draw random numbers in a training pass (`Setup.draws`).
        example: the batch of the trial, or None for a tree.
    """

    classifies: bool
    changed_buffers: tuple[str, ...]
    draws: RandomOps | None
    example: tuple[Tensor, Tensor] | None


def try_pairs(model: nn.Module, population: Population, loss: Loss, batch_size: int) -> Trial:
    """Takes the step on the client with most samples. The model, and torch's random state, stay as they are.

    Raises ValueError: the model or the loss does not work on the data, the model not on the test set, labels outside
    the model's outputs, another number of outputs than the data set has classes, a loss that is not a scalar, a loss
    without a gradient, sparse gradients; a client with samples of another dtype or shape on which they do not work; an
    `augment` that returns something else than a batch like its input, or writes into that.
    """
    check_function(loss)
    client = max(range(len(population.sizes)), key=population.sizes.__getitem__)
    x, y = (t[:batch_size].clone() for t in population.clients[client])  # the model may write into them
    trial = copied(model).to(x.device)
    failed = f"a trial step on client {client} ({_about(x, y)}) failed"
    with random_state_kept(x.device):
        if population.augment is not None:
            _check_augment(population.augment, x)
        with torch.no_grad(), explain(failed):
            output = trial.eval()(x[:1])
        labels = are_labels(output, y)
        classes = of_classes(loss)
        if labels and classes:
            check_outputs(output.shape[1], population.classes)
            check_labels(population, output.shape[1], getattr(loss, "ignore_index", IGNORED))
        trial.train()
        draws, changed = look(model, trial, loss, (x, y), lambda: loss(trial(x), y), failed)
        classifies = labels and y.dim() == 1 and (classes or one_per_class(output, _all_labels(population), loss))
        _check_others(trial.eval(), population, client, loss, batch_size)
    return Trial(classifies, changed, draws, (x, y))


def _all_labels(population: Population) -> list[Tensor]:
    """Return the labels of the clients and of the test set."""
    own, test = population.labels_together(), population.test_labels
    return [*([] if own is None else [own[0]]), *([] if test is None else [test])]


def of_classes(loss: Loss) -> bool:
    """Return True if it is a loss of torch for one output per class."""
    return loss in _CLASS_LOSSES or isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))


def are_labels(output: object, y: Tensor) -> bool:
    """Return True if y are class numbers of the model's outputs."""
    return isinstance(output, Tensor) and output.dim() >= 2 and y.dtype == torch.int64 and y.dim() == output.dim() - 1


def one_per_class(output: Tensor, labels: Sequence[Tensor], loss: Loss) -> bool:
    """Return True if a user's loss reads `output` `[n, classes]` as one number per class, the larger the likelier.

    There must be several classes, every label must be a class number, and the loss must be lowest if the largest output
    is the label's. A regression on one of the outputs, or on a mean and a variance, does not pass. (A loss that fails
    on artificial batches is not tried.)
    """
    classes = output.shape[1]
    known = all(int(y.max()) < classes and bool(((y >= 0) | (y == IGNORED)).all()) for y in labels)
    if classes < 2 or not known:
        return False
    own = torch.arange(min(classes, _KINDS), device=output.device)
    likely = torch.full((len(own), classes), 0.1 / (classes - 1), dtype=output.dtype, device=output.device)
    try:
        values = [float(loss(likely.scatter(1, own.roll(by)[:, None], 0.9), own)) for by in range(len(own))]
    except Exception as problem:
        log.info(
            "the loss could not be tried on a made-up batch, outputs are taken for one number per class: %s", problem
        )
        return True
    return all(values[0] < other for other in values[1:])


def check_outputs(outputs: int, classes: int | None) -> None:
    if classes is not None and outputs != classes:
        raise ValueError(
            f"the model has {outputs} outputs and the data {classes} classes; a model class or function with a "
            f"parameter 'classes' "
            "is made with the right number, others may take it in model_options"
        )


def _check_others(trial: nn.Module, population: Population, client: int, loss: Loss, batch_size: int) -> None:
    """Check that the step works on all kinds of clients and on the test set. Other dtypes or shapes would end the run
    in a later round."""
    known = {_kind(*population.clients[client])}
    for i, (x, y) in enumerate(population.clients if population.store is None else ()):  # in a store all are alike
        if len(known) < _KINDS and _kind(x, y) not in known:
            known.add(_kind(x, y))
            with (
                torch.no_grad(),
                explain(f"the model and the loss work on client {client}, but not on client {i} ({_about(x, y)})"),
            ):
                loss(trial(x[:1]), y[:1])
    if population.test is not None:
        x, y = (t[:batch_size] for t in population.test)
        what = f"the model and the loss work on the clients' data, but not on the test set ({_about(x, y)})"
        with torch.no_grad(), explain(what):
            float(loss(trial(x), y))


def _kind(x: Tensor, y: Tensor) -> tuple[object, ...]:
    return x.dtype, x.shape[1:], y.dtype, y.shape[1:]


def check_smallest(
    model: nn.Module, population: Population, loss: Loss | BatchLoss, batch_size: int, drop_last: bool
) -> None:
    """Raises ValueError for a model with BatchNorm that cannot train on the smallest of all batches: one sample may
    have no variance."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    sizes = population.known_sizes
    # The last batch of an epoch.
    rest = {i: executors.split_epoch(n, batch_size, drop_last)[1] or batch_size for i, n in sizes.items()}
    if not rest:
        return
    client = min(rest, key=rest.__getitem__)
    trial = copied(model).to(population.device).train()
    what = (
        f"the last batch of client {client}, with batch_size={batch_size}, has {rest[client]} of its {sizes[client]} "
        f"samples, on which "
        "the model cannot train; use drop_last=True (for a client with fewer samples than a batch leave it out), or "
        "another batch_size"
    )
    with random_state_kept(population.device), torch.no_grad(), explain(what):
        if isinstance(loss, BatchLoss):
            assert population.samples is not None
            loss(trial, population.samples[client].take(torch.arange(rest[client]), 0))
        else:
            trial(population.clients[client][0][: rest[client]])


def _about(x: Tensor, y: Tensor) -> str:
    """Dtypes and shapes; integers as inputs are kept as they are, which is said where something fails."""
    kept = "" if x.is_floating_point() else ": no floating-point inputs, which are not converted"
    return f"x {x.dtype} {list(x.shape)}{kept}, y {y.dtype} {list(y.shape)}"


def _check_augment(augment: Augment, x: Tensor) -> None:
    """It must make a batch like `x` and leave `x` alone: in stored order that is the data itself, changed again in
    every epoch."""
    given, generator = x.clone(), torch.Generator(x.device)
    with explain(f"augment failed on a batch ({x.dtype} {list(x.shape)})"):
        augmented(augment, given, generator.manual_seed(0))
    if given._version:
        raise ValueError(
            "augment wrote into the batch that it was given; it must return a new tensor (x + y, not x.add_(y))"
        )


def check_function(loss: object) -> None:
    if not callable(loss) or isinstance(loss, type):
        hint = f"; write {loss.__name__}()" if isinstance(loss, type) else ""
        raise ValueError(f"loss must be a function loss(model(x), y) -> scalar tensor, got {loss!r}{hint}")
    if isinstance(loss, nn.Module) and trainable(loss):
        names = ", ".join(name for name, p in loss.named_parameters() if p.requires_grad)
        raise ValueError(f"loss has trainable parameters ({names}), which no run trains; make them part of the model")


def check_buffers(trial: Trial, buffers: str | None) -> None:
    """Raises ValueError when training changes buffers and the run does not say what to do with them."""
    if buffers is None and trial.changed_buffers:
        names = ", ".join(trial.changed_buffers[:3]) + (", ..." if len(trial.changed_buffers) > 3 else "")
        raise ValueError(
            f"training changes buffers of the model ({names}: BatchNorm?), and clients' buffers are not parameters. "
            f"Say buffers='average' "
            "(mean over the clients), 'keep' (those of the start) or 'local' (each client's own), or use GroupNorm"
        )
