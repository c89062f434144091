"""The facts of a run that executors need, and the task of a client in one round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastsam.arena import Layout
from fastsam.fed.clients.batch_loss import PairLoss, split_pair
from fastsam.fed.clients.labels import ignored_label, num_labels
from fastsam.fed.clients.loss_kind import kind_of
from fastsam.fed.clients.plan import SampleOptions, Work
from fastsam.fed.clients.population import Loss, Population
from fastsam.fed.common import seeds
from fastsam.fed.update.local_rule import LocalRule, optimizer_rule, sgd_rule
from fastsam.fed.update.local_update import LocalUpdate


@dataclass(frozen=True)
class LocalOptions(SampleOptions):
    """The options of a run for the clients' local work, by the names that `fed.run` has for them. The defaults of the
    first five are a plain step.

    Attributes:
        momentum: heavy-ball momentum.
        weight_decay: weight decay at the unperturbed weights, not clipped.
        clip_norm: largest norm of v, None for no clipping.
        clip_scope: "full" (the proximal term is inside the clipped norm and scaled with it) or "linear" (it is outside,
            like the weight decay).
        optimizer: function of parameters that makes an optimizer of torch for the updates, None for the kernels' SGD.
        slots: number of clients that may train at once, None for the executor's choice.
        on_client_error: "exclude" excludes a client whose model or loss raises from the round.
        precision: precision of passes; the model has it already (`update/precision.py`).
        buffers: the option of the run for buffers that training changes, or None.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    clip_scope: str = "full"
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    slots: int | None = None
    on_client_error: str = "raise"
    precision: str | None = None
    buffers: str | None = None


STEP_OPTIONS = frozenset({"momentum", "weight_decay", "clip_norm", "clip_scope", "optimizer"})  # options of a step
SGD_OPTIONS = STEP_OPTIONS - {"optimizer"}  # options of the kernels' SGD


@dataclass(frozen=True)
class Setup:
    """The facts from which an executor is made, once per run.

    Attributes:
        model: the user's model, which is copied.
        layout: layout of its trainable parameters.
        loss, options, population, backend: parts of the run.
        draws: functions of torch that draw random numbers in a training pass (dropout), empty if something else draws
            them, None if the model draws nothing.
        changes_buffers: a pass changes the model's buffers (BatchNorm).
        example: a batch, to try the model with: inputs and labels, or a tree of tensors and None.
        cohort: largest likely number of clients of a round, None for unknown.
        loop: name of the algorithm if it has its own training loop (`Algorithm.train_client`), or "".
        activations: number of bytes that a training pass keeps for its backward pass, without the weights, 0 for
            unknown.
        writes_parameters: the forward pass writes trained parameters in place.
    """

    model: nn.Module
    layout: Layout
    loss: Loss
    options: LocalOptions
    population: Population
    backend: str = "auto"
    draws: frozenset[Callable[..., Any]] | None = None
    changes_buffers: bool = False
    example: tuple[Any, Any] | None = None
    cohort: int | None = None
    loop: str = ""
    activations: int = 0
    writes_parameters: bool = False

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the trainable parameters."""
        return next(p.dtype for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def device(self) -> torch.device:
        """The device of training."""
        return self.population.device

    @cached_property
    def frozen_numel(self) -> int:
        """The number of the parameters that are not trained."""
        return sum(p.numel() for p in self.model.parameters() if not p.requires_grad)

    @cached_property
    def rule(self) -> LocalRule | None:
        """The rule of the kernels for the updates, or None if an optimizer of torch makes them."""
        options = self.options
        if options.optimizer is None:
            return sgd_rule(options.momentum, options.weight_decay)
        return optimizer_rule(options.optimizer)

    @property
    def optimizer_vectors(self) -> int:
        """The number of vectors in the state of the local optimizer, an estimate for an optimizer of torch."""
        return 2 if self.rule is None else len([name for name in self.rule.fields if name is not None])

    @cached_property
    def ignored(self) -> int | None:
        """The label that the loss ignores, if clients may have it. A mean over batches is then over labels."""
        ignored, labels = ignored_label(self.loss), self.population.clients.labels_together()
        return None if ignored is None or (labels is not None and not bool((labels[0] == ignored).any())) else ignored

    @cached_property
    def has_mean_loss(self) -> bool:
        """True if the mean of the gradients of batches is the gradient of the loss of all their samples."""
        return kind_of(self.loss).is_mean


class ClientLoop(NamedTuple):
    """The loop of an algorithm for one client.

    Args:
        run: function of a `Client` that does the local work and returns what `finish_client` gets as `extra`.
        tensors: the tensors of the server's and the client's state, which it reads.
    """

    run: Callable[[Any], Mapping[str, Tensor] | None]
    tensors: Sequence[Tensor]


@dataclass(slots=True)
class Task:
    """The work of one client in one round.

    Attributes:
        client: id of the client.
        work: its samples.
        setup: facts of the run.
        round, lr: index and learning rate of the round.
        update: constants of the local update.
        row: index of the client's row in vectors `[n, row_size]`.
        snapshots: local steps before which the row is copied.
        loop: the algorithm's own loop, or None for the run's epochs of local steps.
    """

    client: int
    work: Work
    setup: Setup
    round: int
    lr: float
    update: LocalUpdate
    row: int = 0
    snapshots: frozenset[int] = frozenset()
    loop: ClientLoop | None = None

    def vector(self, name: str) -> Tensor | None:
        """Return the client's own vector of the local update, `[row_size]`."""
        v: Tensor | None = getattr(self.update, name)
        return v if v is None or v.dim() == 1 else v[self.row]

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the values with which the client's local optimizer begins, by the name of the field."""
        state = self.update.optimizer_state or {}
        return {name: x[0 if len(x) == 1 else self.row] for name, x in state.items()}

    def buffers(self, common: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the model's buffers at the start: the client's own, or `common` ones."""
        vector = self.update.buffers
        return common if vector is None else [b[self.row] for b in vector]

    def pass_seed(self, step: int) -> int:
        """Return the seed of the model's random numbers (dropout) in both passes of a step."""
        return seeds.derive(self.work.seed, "pass", step)

    def lr_of_step(self, k: int, steps: int) -> float:
        """Return the learning rate of local step k of `steps`."""
        return self.lr * self.update.lr_factor(k, steps)

    def batches_at_start(self) -> Iterator[tuple[Any, Any, float]]:
        """Yield the batches of a gradient before the first step, with the share of each in the mean: a pilot's, or all
        samples, in one batch if the loss is not a mean. Samples without a label that counts have no share."""
        pilot = self.update.pilot
        if pilot is not None:
            share = 1 / min(pilot.batches, len(self.work.batch_sizes()))
            yield from ((x, y, share) for x, y in islice(self.work.batches(), pilot.batches))
            return
        size = self.setup.options.batch_size if self.setup.has_mean_loss else self.work.samples
        counts = [n for _, _, n in self._full_batches(size)] if self.setup.ignored is not None else None
        total = self.work.samples if counts is None else max(1, sum(counts))
        yield from ((x, y, n / total) for x, y, n in self._full_batches(size))

    def _full_batches(self, size: int) -> Iterator[tuple[Any, Any, int]]:
        """Yield all samples once in batches of `size`, in stored order, with the number of labels that count."""
        ignored, has_pairs = self.setup.ignored, isinstance(self.setup.loss, PairLoss)
        for x, y, n in self.work.full_batches(size):
            yield x, y, num_labels(split_pair(x)[1] if has_pairs else y, n, ignored)


def vectors_of(tasks: Sequence[Task], name: str) -> Tensor | None:
    """Return a vector of the local updates of tasks, all of one kind, in their order: `[row_size]` if all share it,
    else `[tasks, row_size]`."""
    first, last = tasks[0], tasks[-1]
    v: Tensor | None = getattr(first.update, name)
    if v is None or all(task.update is first.update for task in tasks):
        return v if v is None or v.dim() == 1 else v[first.row : last.row + 1]
    return torch.stack([vector for task in tasks if (vector := task.vector(name)) is not None])


def optimizer_states_of(tasks: Sequence[Task]) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
    """Yield the values at the start of the local optimizers' fields, by name, for slices of the tasks."""
    first, last = tasks[0], tasks[-1]
    if all(task.update is first.update for task in tasks):
        state = first.update.optimizer_state or {}
        rows = slice(first.row, last.row + 1)
        yield slice(len(tasks)), {name: x if len(x) == 1 else x[rows] for name, x in state.items()}
        return
    for i, task in enumerate(tasks):
        yield slice(i, i + 1), task.optimizer_state()
