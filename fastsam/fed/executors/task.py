"""The facts of a run that executors need, and the work of a client in one round, with its batches, orders and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastsam.arena import Layout
from fastsam.fed.clients.batch_loss import PairLoss, split_pair
from fastsam.fed.clients.labels import ignored_label, num_labels
from fastsam.fed.clients.loss_kind import kind_of
from fastsam.fed.clients.population import Loss, Population, apply_augment
from fastsam.fed.clients.samples import ClientDataset, Tensors
from fastsam.fed.common import seeds
from fastsam.fed.common.transfer import to_device
from fastsam.fed.update.local_rule import LocalRule, optimizer_rule, sgd_rule
from fastsam.fed.update.local_update import LocalUpdate

BLOCK = 32  # batches gathered by one index_select: bounded memory, and one launch where there were 32


@dataclass(frozen=True)
class LocalOptions:
    """The options of a run for the clients' local work, by the names that `fed.run` has for them. The defaults of the
    first five are a plain step.

    Attributes:
        momentum: heavy-ball momentum.
        weight_decay: weight decay at the unperturbed weights, not clipped.
        clip_norm: largest norm of v, None for no clipping.
        clip_scope: "full" (the proximal term is inside the clipped norm and scaled with it) or "linear" (it is outside,
            like the weight decay).
        optimizer: function of parameters that makes an optimizer of torch for the updates, None for the kernels' SGD.
        local_steps: number of local steps of every client, in place of epochs.
        drop_last: an epoch ends with its last whole batch, unless it has only a partial batch. Otherwise the last batch
            has the rest, at its exact shape.
        shuffle: use a new order in every epoch; otherwise the stored one.
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
    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int = 16
    drop_last: bool = False
    shuffle: bool = True
    seed: int = 0
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

    def orders(self, round: int, clients: Sequence[int], epoch: int) -> Tensor:
        """Return the orders of the samples of some clients in an epoch, int64 `[clients, longest]` on the CPU. The
        first elements of a row are valid, one for each sample of the client."""
        sizes = self.population.clients.sizes
        return seeds.permutations(clients, [sizes[i] for i in clients], *self.order_seed(round, epoch))

    def order_seed(self, round: int, epoch: int) -> tuple[int | str, ...]:
        """Return what the orders of an epoch are drawn from, or nothing if samples come in their stored order."""
        return (self.options.seed, "shuffle", round, epoch) if self.options.shuffle else ()

    def draw_orders(self, round: int, clients: Sequence[int]) -> dict[int, list[Tensor]]:
        """Return the orders of the samples of some clients, one an epoch; none if the clients may have other numbers of
        epochs."""
        if self.options.local_steps is not None:
            return {}
        sizes = self.population.clients.sizes
        epochs = [self.orders(round, clients, epoch).unbind() for epoch in range(self.options.local_epochs)]
        return {i: [order[: sizes[i]] for order in orders] for i, *orders in zip(clients, *epochs, strict=True)}


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
        setup: facts of the run.
        round, lr: index and learning rate of the round.
        update: constants of the local update.
        row: index of the client's row in vectors `[n, row_size]`.
        snapshots: local steps before which the row is copied.
        orders: orders of its samples, one per epoch, if they have been drawn (see `Setup.draw_orders`).
        loop: the algorithm's own loop, or None for the run's epochs of local steps.
        dataset: its samples if they come in batches, from `open` on.
        epochs_done: number of epochs that the client has begun in this round.
    """

    client: int
    setup: Setup
    round: int
    lr: float
    update: LocalUpdate
    row: int = 0
    snapshots: frozenset[int] = frozenset()
    orders: Sequence[Tensor] | None = None
    loop: ClientLoop | None = None
    dataset: ClientDataset | None = None
    epochs_done: int = 0

    def next_task(self, epochs_done: int, epochs: int | None = None) -> Task:
        """Return the task of further epochs after `epochs_done`. `epochs` is their number, None for the run's work."""
        if epochs is None:
            return replace(self, orders=None if epochs_done else self.orders, epochs_done=epochs_done)
        options = replace(self.setup.options, local_epochs=epochs, local_steps=None)
        return replace(self, setup=replace(self.setup, options=options), orders=None, epochs_done=epochs_done)

    def open(self) -> None:
        """Load the client's samples if they come in batches."""
        if self.setup.population.clients.is_batched:
            self.dataset = self.setup.population.clients[self.client]

    @property
    def tensors(self) -> Tensors:
        """The samples of the client, if they are in memory. With a store they are in it from `store.offsets[client]`
        on."""
        return self.setup.population.clients.tensors[self.client]

    @property
    def x(self) -> Tensor:
        """The inputs of a client whose samples are pairs."""
        return self.tensors[0]

    @property
    def y(self) -> Tensor:
        return self.tensors[1]

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

    @property
    def seed(self) -> int:
        """Seed of the passes, the augmentation and the reading of the client's samples. The order of the samples
        has a different seed (`Setup.orders`)."""
        return seeds.derive(self.setup.options.seed, "client", self.round, self.client)

    def pass_seed(self, step: int) -> int:
        """Return the seed of the model's random numbers (dropout) in both passes of a step."""
        return seeds.derive(self.seed, "pass", step)

    def lr_of_step(self, k: int, steps: int) -> float:
        """Return the learning rate of local step k of `steps`."""
        return self.lr * self.update.lr_factor(k, steps)

    # --- its batches ---

    @property
    def samples(self) -> int:
        """The number of samples of the client."""
        return self.setup.population.clients.sizes[self.client]

    @property
    def epochs(self) -> int:
        """The number of epochs that it begins."""
        steps = self.setup.options.local_steps
        return self.setup.options.local_epochs if steps is None else -(-steps // len(self.epoch_sizes()))

    def batch_sizes(self) -> list[int]:
        """Return the number of samples of each of its batches, in order."""
        return (self.epoch_sizes() * self.epochs)[: self.setup.options.local_steps]

    def epoch_sizes(self) -> list[int]:
        """Return the number of samples of each batch of an epoch."""
        return self._sizes(self.samples)

    def _sizes(self, samples: int) -> list[int]:
        options = self.setup.options
        num_full, last_size = split_epoch(samples, options.batch_size, options.drop_last)
        return [options.batch_size] * num_full + [last_size] * (last_size > 0)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Return all its batches, in order: (x, y), or (batch, None) where samples come in batches."""
        batches = self._batches() if self.dataset is None else self._own_batches(self.dataset)
        return islice(batches, self.setup.options.local_steps)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        augment = self.setup.population.augment
        for epoch in range(self.epochs_done, self.epochs_done + self.epochs):
            for number, (x, y) in enumerate(self._blocks(epoch)):
                if augment is not None:
                    generator = torch.Generator(x.device)
                    generator.manual_seed(seeds.derive(self.seed, "augment", epoch, number))
                    x = apply_augment(augment, x, generator)
                sizes = self._sizes(len(y))  # `split` by one size goes through Python
                yield from zip(x.split_with_sizes(sizes), y.split_with_sizes(sizes), strict=True)

    def _own_batches(self, samples: ClientDataset) -> Iterator[tuple[Any, None]]:
        return ((read(), None) for read in self._readings(samples))

    def _readings(self, samples: ClientDataset) -> Iterator[Callable[[], Any]]:
        """Yield functions that read the batches, one after the other."""
        sizes = self.epoch_sizes()
        for epoch in range(self.epochs_done, self.epochs_done + self.epochs):
            order = self.order(epoch) if self.setup.options.shuffle else torch.arange(sum(sizes))
            for number, places in enumerate(order.split_with_sizes(sizes)):
                yield partial(samples.take, places, seeds.derive(self.seed, "reading", epoch, number))

    def _blocks(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield an epoch's samples in their order, `BLOCK` batches at a time."""
        options = self.setup.options
        size = BLOCK * options.batch_size
        if not options.shuffle:
            num_samples = sum(self.epoch_sizes())
            yield from zip(self.x[:num_samples].split(size), self.y[:num_samples].split(size), strict=True)
            return
        order = to_device(self.order(epoch), self.y.device)
        for block in order.split(size) if len(order) > size else (order,):
            yield self.x.index_select(0, block), self.y.index_select(0, block)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the samples of an epoch."""
        order = self.orders[epoch] if self.orders else self.setup.orders(self.round, [self.client], epoch)[0]
        return order[: sum(self.epoch_sizes())] if self.setup.options.drop_last else order

    def batches_at_start(self) -> Iterator[tuple[Any, Any, float]]:
        """Yield the batches of a gradient before the first step, with the share of each in the mean: a pilot's, or all
        samples, in one batch if the loss is not a mean. Samples without a label that counts have no share."""
        pilot = self.update.pilot
        if pilot is not None:
            share = 1 / min(pilot.batches, len(self.batch_sizes()))
            yield from ((x, y, share) for x, y in islice(self.batches(), pilot.batches))
            return
        size = self.setup.options.batch_size if self.setup.has_mean_loss else self.samples
        counts = [n for _, _, n in self._full_batches(size)] if self.setup.ignored is not None else None
        total = self.samples if counts is None else max(1, sum(counts))
        yield from ((x, y, n / total) for x, y, n in self._full_batches(size))

    def full_batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield all samples once in batches, in stored order."""
        yield from ((x, y) for x, y, _ in self._full_batches(self.setup.options.batch_size))

    def _full_batches(self, size: int) -> Iterator[tuple[Any, Any, int]]:
        """Yield all samples once in batches of `size`, in stored order, with the number of labels that count."""
        ignored = self.setup.ignored
        if self.dataset is not None:
            has_labels = isinstance(self.setup.loss, PairLoss)
            for batch, n in self.dataset.batches(size):
                yield batch, None, num_labels(split_pair(batch)[1] if has_labels else None, n, ignored)
            return
        for x, y in zip(self.x.split(size), self.y.split(size), strict=True):
            yield x, y, num_labels(y, len(y), ignored)


def split_epoch(samples: int, batch_size: int, drop_last: bool) -> tuple[int, int]:
    """Return the number of whole batches of an epoch, and the number of samples after them (0 for none). A client with
    less samples than a batch has one batch in any case."""
    num_full, last_size = divmod(samples, batch_size)
    return num_full, 0 if drop_last and num_full else last_size


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
