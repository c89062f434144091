"""The trial of a model before round 1: one training step on a copy, so that errors come early and with their reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss
from fastsam.fed.clients.labels import ignored_label
from fastsam.fed.clients.loss_kind import LossKind, kind_of
from fastsam.fed.clients.pairs import text_hint
from fastsam.fed.clients.plan import SampleOptions
from fastsam.fed.clients.population import IGNORED, Augment, Loss, Population, apply_augment, check_labels
from fastsam.fed.clients.samples import ClientDataset, leaves, tensors_of
from fastsam.fed.loop.effects import Effects
from fastsam.fed.loop.trial_pass import explain, restore_random_state, try_again, try_pass
from fastsam.fed.update.model_copy import copy_model, trainable
from fastsam.fed.update.tensor_guard import TensorGuard

_KINDS = 64  # largest number of kinds of samples that are tried


@dataclass(frozen=True)
class Trial:
    """The findings of the trial.

    Attributes:
        classifies: outputs are one per class, and labels are class numbers.
        effects: the effects of training passes.
        example: the batch of the trial: inputs and labels, or a tree of tensors and None.
        loss_kind: the kind of the loss.
        activations: number of bytes that a training pass keeps for its backward pass (`Setup.activations`).
        sample_activations: the same for one sample.
    """

    classifies: bool
    effects: Effects
    example: tuple[Any, Any]
    loss_kind: LossKind
    activations: int
    sample_activations: float


def try_model(
    model: nn.Module, population: Population, loss: Loss | BatchLoss, batch_size: int, drop_last: bool = False
) -> Trial:
    """Try `model` on the client with most samples: outputs and labels, a training pass, other clients, the test set.
    A further pass, on the smallest batch, shows the effects that depend on the number of samples.

    The model, and torch's random state, stay as they are.

    Raises:
        ValueError: the model or the loss does not work on the data, or not in training (see `try_pass`); labels are
            outside the model's outputs; the numbers of outputs and of classes differ; or `augment` does not return
            a batch like its input, or writes into its input. The message names client and batch.
    """
    _check_function(loss.of_outputs if isinstance(loss, PairLoss) else loss)
    of_batch = loss if isinstance(loss, BatchLoss) else PairLoss(loss)
    client = population.largest_client()
    batch = _first(population.clients[client], f"client {client}", batch_size)
    samples = min(batch_size, population.clients.sizes[client])
    train_copy, eval_copy = (copy_model(model).to(population.device) for _ in range(2))
    guard = TensorGuard(eval_copy)
    failure = f"a trial step on client {client} ({_describe(batch, of_batch)}) failed"
    with restore_random_state(population.device):
        if population.augment is not None:
            _check_augment(population.augment, batch[0])
        classifies, kind = _try_outputs(eval_copy.eval(), population, of_batch, batch, samples, failure)
        effects, activations = try_pass(
            model, train_copy.train(), loss, tensors_of(batch), lambda: of_batch(train_copy, batch), failure
        )
        _, size = _smallest_batch(population, batch_size, drop_last) or (client, batch_size)
        if size < samples:
            small_batch = pytree.tree_map_only(Tensor, lambda t: t[:size].clone() if t.dim() else t, batch)
            effects = effects.join(try_again(train_copy, lambda: of_batch(train_copy, small_batch)))
        _try_others(eval_copy, population, client, of_batch, batch_size)
    if problem := guard.find_problem(has_fixed_buffers=False):
        raise ValueError(f"in evaluation mode {problem}")
    example = (batch, None) if population.clients.is_batched else (batch[0], batch[1])
    return Trial(classifies, effects, example, kind, activations, activations / samples)


@torch.no_grad()
def _try_outputs(
    trial: nn.Module, population: Population, loss: BatchLoss, batch: Any, samples: int, failure: str
) -> tuple[bool, LossKind]:
    """Return True if there is one output per class and a sample's label is a class number, and the kind of the loss."""
    if not loss.predicts:
        return False, kind_of(loss)
    with explain(failure):
        outputs, labels = loss.outputs_and_labels(trial, batch)
    label_sets = [] if ignored_label(loss) is not None else _label_sets(population, labels)
    has_classes = _has_classes(outputs, labels, label_sets, population, loss)
    return has_classes and labels.dim() == 1, kind_of(loss, outputs, labels, samples)


def _label_sets(population: Population, labels: Any) -> list[Tensor]:
    """Return the labels of the trial's batch, of the clients and of the test set, as far as they are known."""
    joint = population.clients.labels_together()
    known = labels, None if joint is None else joint[0], population.test_labels
    return [y for y in known if isinstance(y, Tensor)]


def _has_classes(
    outputs: Any, labels: Any, label_sets: Sequence[Tensor], population: Population, loss: BatchLoss
) -> bool:
    """Return True if there is one output per class in dimension 1, and labels are class numbers."""
    is_class = isinstance(outputs, Tensor) and outputs.dim() >= 2 and isinstance(labels, Tensor)
    if not is_class or labels.dtype != torch.int64 or labels.dim() != outputs.dim() - 1:
        return False
    classes, ignored = outputs.shape[1], ignored_label(loss)
    if ignored is not None:
        if population.classes not in (None, classes):
            raise ValueError(
                f"the model has {classes} outputs and the data {population.classes} classes; a model class or "
                "function with a parameter 'classes' is made with the right number, others may take it in model_options"
            )
        check_labels(population, classes, ignored)
        return True
    is_in_range = (bool(((y >= 0) & (y < classes) | (y == IGNORED)).all()) for y in label_sets)
    return labels.dim() == 1 and classes > 1 and all(is_in_range)


@torch.no_grad()
def _try_others(trial: nn.Module, population: Population, client: int, loss: BatchLoss, batch_size: int) -> None:
    """Evaluate samples of other kinds than the client's, and the test set. They would end the run in a later round."""
    pairs = population.clients.pairs if population.clients.store is None else ()  # in a store all are alike
    kinds = {_kind(pairs[client])} if pairs else set()
    for i, pair in enumerate(pairs):
        if len(kinds) < _KINDS and _kind(pair) not in kinds:
            kinds.add(_kind(pair))
            with explain(
                f"the model and the loss work on client {client}, but not on client {i} ({_describe(pair, loss)})"
            ):
                loss(trial, [part[:1] for part in pair])
    if population.test is not None:
        first = _first(population.test, "the test set", batch_size)
        with explain(
            f"the model and the loss work on the clients' data, but not on the test set ({_describe(first, loss)})"
        ):
            loss.evaluate(trial, first, loss.predicts)


def _first(samples: ClientDataset, label: str, count: int) -> Any:
    """Return a batch of the first samples, in separate memory, because the model may write into it."""
    with explain(f"{label}: its first batch cannot be made"):
        return samples.take(torch.arange(min(count, len(samples))), 0)


def _kind(pair: Sequence[Tensor]) -> tuple[object, ...]:
    return tuple((part.dtype, part.shape[1:]) for part in pair)


def _describe(batch: Any, loss: BatchLoss) -> str:
    """Return names, dtypes and shapes of the parts of a batch, for messages."""
    names, parts = {"0": "x", "1": "y"} if isinstance(loss, PairLoss) else {}, []
    if names and (hint := text_hint(batch[1])):
        batch, parts = batch[:1], [f"y of {hint}"]
    for path, leaf in leaves(batch):
        name = names.get(path, path) or "batch"
        kind = f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
        is_integer = isinstance(leaf, Tensor) and not leaf.is_floating_point()
        note = ": no floating-point inputs, which are not converted" if name == "x" and is_integer else ""
        if note and leaf.dtype == torch.uint8:
            note += "; fed.data.as_tensors(x, y) makes pixels 0..1, and models.Pixels(model, mean, std) takes bytes"
        parts.append(f"{name} {kind}{note}")
    return ", ".join(parts)


def _check_augment(augment: Augment, x: Tensor) -> None:
    """Check that it makes a batch like `x` and leaves `x` alone, which may be the data themselves."""
    copy, generator = x.clone(), torch.Generator(x.device)
    with explain(f"augment failed on a batch ({x.dtype} {list(x.shape)})"):
        apply_augment(augment, copy, generator.manual_seed(0))
    if copy._version:
        raise ValueError(
            "augment wrote into the batch that it was given; it must return a new tensor (x + y, not x.add_(y))"
        )


def _check_function(loss: object) -> None:
    if not callable(loss) or isinstance(loss, type):
        hint = f"; write {loss.__name__}()" if isinstance(loss, type) else ""
        raise ValueError(f"loss must be a function loss(model(x), y) -> scalar tensor, got {loss!r}{hint}")
    if isinstance(loss, nn.Module) and trainable(loss):
        names = ", ".join(name for name, p in loss.named_parameters() if p.requires_grad)
        raise ValueError(f"loss has trainable parameters ({names}), which no run trains; make them part of the model")


def _smallest_batch(population: Population, batch_size: int, drop_last: bool) -> tuple[int, int] | None:
    """Return the client with the smallest batch, which is the last of its epoch, and the number of samples of that
    batch. None: the numbers of samples are not known."""
    sizes = population.clients.known_sizes
    options = SampleOptions(batch_size=batch_size, drop_last=drop_last)
    last_sizes = {n: options.sizes_of(n)[-1] for n in {*sizes.values()}}
    if not last_sizes:
        return None
    smallest = min(last_sizes, key=last_sizes.__getitem__)
    return list(sizes)[list(sizes.values()).index(smallest)], last_sizes[smallest]


def check_smallest(
    model: nn.Module, population: Population, loss: Loss | BatchLoss, batch_size: int, drop_last: bool
) -> None:
    """Raise ValueError for a model with BatchNorm that cannot train on the smallest batch, of one sample, say."""
    smallest = _smallest_batch(population, batch_size, drop_last)
    if smallest is None or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    client, size = smallest
    trial = copy_model(model).to(population.device).train()
    failure = (
        f"the last batch of client {client}, with batch_size={batch_size}, has {size} of its "
        f"{population.clients.known_sizes[client]} samples, on which the model cannot train; use drop_last=True (leave "
        "out a client with fewer samples than a batch), or another batch_size"
    )
    of_batch = loss if isinstance(loss, BatchLoss) else PairLoss(loss)
    with restore_random_state(population.device), torch.no_grad(), explain(failure):
        of_batch(trial, _first(population.clients[client], f"client {client}", size))


def check_buffers(trial: Trial, buffers: str | None) -> None:
    """Raise ValueError if training changes buffers and the run does not say what to do with them."""
    changed_buffers = trial.effects.changed_buffers
    if buffers is None and changed_buffers:
        names = ", ".join(changed_buffers[:3]) + (", ..." if len(changed_buffers) > 3 else "")
        raise ValueError(
            f"training changes buffers of the model ({names}: BatchNorm?), and clients' buffers are not parameters. "
            "Say buffers='average' (mean over the clients), 'keep' (initial buffers) or 'local' (each client's "
            "own), or use GroupNorm"
        )
