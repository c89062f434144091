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
from fastsam.fed.clients.set_loss import REMEDY, UNKNOWN
from fastsam.fed.common import seeds
from fastsam.fed.update.rules import LocalRule, optimizer_rule, sgd_rule
from fastsam.fed.update.steps import Step


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


MAX_WHOLE = 4 * 2**30  # most bytes that a gradient of a set of samples may keep
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
        sample_activations: `activations` of one sample.
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
    sample_activations: float = 0.0
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

    def check_whole(self, samples: int) -> None:
        """Raise ValueError if the gradient of all samples of a client takes one batch of too much memory."""
        size = samples * self.sample_activations
        if not self.has_mean_loss and size > MAX_WHOLE:
            raise ValueError(
                f"a gradient of all {samples} samples of a client at once keeps {size / 2**30:.0f} GiB, because "
                f"{kind_of(self.loss).name} may not be a mean over samples: {UNKNOWN}. {REMEDY}"
            )

    @cached_property
    def has_mean_loss(self) -> bool:
        """True if the mean of the gradients of batches is the gradient of the loss of all their samples."""
        return kind_of(self.loss).is_mean


WeightedBatch = tuple[Any, Any, float]  # inputs, labels, and the share of a batch in a mean


class ClientLoop(NamedTuple):
    """The loop of an algorithm for one client.

    Args:
        run: function of a `Client` that does the local work and returns what `finish` gets as `extra`.
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
        step: the local step of n clients.
        row: index of the client among them.
        clients: number n of the clients of the step.
        snapshots: local steps before which the row is copied.
        loop: the algorithm's own loop, or None for the run's epochs of local steps.
    """

    client: int
    work: Work
    setup: Setup
    round: int
    lr: float
    step: Step
    row: int = 0
    clients: int = 1
    snapshots: frozenset[int] = frozenset()
    loop: ClientLoop | None = None

    @property
    def own_step(self) -> Step:
        """The step of only this client."""
        return self.step if self.clients == 1 else self.step.of(slice(self.row, self.row + 1))

    def start(self, common: Tensor) -> Tensor:
        """Return the weights at the start, `[row_size]`: the client's own, or `common` ones."""
        start = self.step.start
        if start is None:
            return common
        return start if start.dim() == 1 else start[self.row if len(start) > 1 else 0]

    def buffers(self, common: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the model's buffers at the start: the client's own, or `common` ones."""
        own = self.step.buffers
        return common if own is None else [b[self.row if len(b) > 1 else 0] for b in own]

    def pass_seed(self, step: int) -> int:
        """Return the seed of the model's random numbers (dropout) in both passes of a step."""
        return seeds.derive(self.work.seed, "pass", step)

    def lr_of_step(self, k: int, steps: int) -> float:
        """Return the learning rate of local step k of `steps`."""
        return self.lr * self.step.rate(k, steps)

    def first_batches(self, batches: int) -> Iterator[WeightedBatch]:
        """Yield the first batches of the local steps, with the share of each in a mean."""
        share = 1 / min(batches, len(self.work.batch_sizes()))
        yield from ((x, y, share) for x, y in islice(self.work.batches(), batches))

    def all_batches(self) -> Iterator[WeightedBatch]:
        """Yield all samples in batches, in one if the loss is not a mean, with the share of each in a mean. Samples
        without a label that counts have no share.

        Raises:
            ValueError: the loss is not a mean, and one batch of all samples would keep too much memory.
        """
        self.setup.check_whole(self.work.samples)
        size = self.setup.options.batch_size if self.setup.has_mean_loss else self.work.samples
        counts = [n for _, _, n in self._full_batches(size)] if self.setup.ignored is not None else None
        total = self.work.samples if counts is None else max(1, sum(counts))
        yield from ((x, y, n / total) for x, y, n in self._full_batches(size))

    def _full_batches(self, size: int) -> Iterator[tuple[Any, Any, int]]:
        """Yield all samples once in batches of `size`, in stored order, with the number of labels that count."""
        ignored, has_pairs = self.setup.ignored, isinstance(self.setup.loss, PairLoss)
        for x, y, n in self.work.full_batches(size):
            yield x, y, num_labels(split_pair(x)[1] if has_pairs else y, n, ignored)


def step_of(tasks: Sequence[Task]) -> Step:
    """Return the step of the clients of tasks in their order, whose steps are of one sort (`sort_of`)."""
    first, last = tasks[0], tasks[-1]
    if all(task.step is first.step for task in tasks):
        return first.own_step if first.row == last.row else first.step.of(slice(first.row, last.row + 1))
    return Step.join([task.own_step for task in tasks])


def sort_of(step: Step) -> tuple[object, ...]:
    """Return what steps must share to begin together: their key, and the names of the states that they give."""
    return step.key, None if step.state is None else frozenset(step.state)
