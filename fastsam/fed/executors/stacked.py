"""Forward and backward passes of several clients at once: the model mapped over stacked weights by
`torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.func import vmap

from fastsam import ops
from fastsam.arena import Layout, Segment
from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss, call, split_pair
from fastsam.fed.clients.samples import Tensors, fill_tree, tensors_of
from fastsam.fed.executors import rowprograms, stacked_attention
from fastsam.fed.executors.base import refusal
from fastsam.fed.executors.gradient_passes import NEEDS_PAIRS, ModelPasses, check_scalar
from fastsam.fed.executors.record import BF16_LOSS, Replays, agree
from fastsam.fed.executors.simplify import copy_with_strides
from fastsam.fed.executors.slow_calls import SlowCalls
from fastsam.fed.executors.stacked_dropout import StackedDropout, stacked_dropout
from fastsam.fed.executors.stacked_lookups import StackedLookups
from fastsam.fed.executors.stacked_masks import advice, kept_masks
from fastsam.fed.executors.task import Setup
from fastsam.fed.sums.ranks import ranks_per_device
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.passes import Objective
from fastsam.fed.update.rows import Rows

_CACHE = 4 * 2**20  # bytes of weights
# rows use a fourth of a GPU's memory; fields, their copies and gradients each count as a row
_SHARE, _FIELDS = 4, 16
_ACTIVATIONS = 2**30  # bytes of the activations of all rows on a CPU: one number for all machines, for equal bits
_UNKNOWN = 64  # rows for a cohort of unknown size
_TRIAL_TOLERANCE = 0.05  # largest error of the gradients of a row (see `agree`)


@contextmanager
def mapping() -> Iterator[None]:
    """Let an interrupt inside `torch.vmap` come out unchanged, without an open level of mapping.

    Between two lines of torch's own code an interrupt leaves a level open, in which everything later fails. Or it
    closes a level that was not open yet, and then an internal error of torch hides the interrupt.
    """
    depth = _functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException as error:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if (interrupt := _interrupt_behind(error)) is not None:
            raise interrupt from None
        raise


def _interrupt_behind(error: BaseException | None) -> BaseException | None:
    """Return the interrupt (Ctrl-C) that an ordinary error has hidden, or None."""
    if not isinstance(error, Exception):
        return None
    while isinstance(error, Exception):
        error = error.__context__
    return error


class StackedPasses:
    """Losses `[rows]` and gradients `[rows, *shape]` of stacked clients.

    Only the forward pass is mapped: the rows are independent, so the gradient of the sum of their losses holds each
    row's own, and the backward pass is a plain one over the batched operations. Both are recorded once per shape and
    replayed (see `Replays`). `calls` says what becomes of torch's warnings about slow operations.

    If the model draws random numbers, the last tensor of a batch has the seeds of the rows' steps, int64 `[rows,
    batch]`, equal for all samples of a row (see `stacked_dropout`).
    """

    def __init__(self, replica: Replica, layout: Layout, setup: Setup, calls: SlowCalls | None = None) -> None:
        # Operations in `vmap` import it at their first use: seconds, which would count as training of the first round
        # of a process.
        import torch._dynamo  # noqa: F401

        stacked_attention.register()
        self.module, self.layout, self.template = replica.module, layout, setup.population.clients.template
        of_batch = setup.loss if isinstance(setup.loss, BatchLoss) else PairLoss(setup.loss)
        self.of_batch, self.of_outputs = of_batch, of_batch.of_outputs if isinstance(of_batch, PairLoss) else None
        self.is_cross_entropy = _is_cross_entropy(self.of_outputs)
        self.has_channels_last = any(len(s.shape) == 4 and s.stride[1] < s.stride[3] for s in layout.segments)
        self.places = [_places(replica.module, p) for p in replica.parameters]
        self.parameters = replica.parameters
        self.draws = setup.draws is not None
        self._vmap = partial(vmap, randomness="different" if self.draws else "error")
        self._outputs, self._losses = self._vmap(self._output), self._vmap(self._loss)
        self._batch_losses = self._vmap(self._batch_loss)
        self.lookups, self.calls = StackedLookups(), calls or SlowCalls()
        self.masks = kept_masks(replica.module)
        product_of = partial(ops.product_of, backend=setup.backend)
        self.replays = Replays(self.gradients, replica.module, layout, rowprograms.maker(setup), product_of)

    def run(
        self, rows: Rows, *batch: Tensor, objective: Objective | None = None, operands: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Gradients]:
        """Run a pass on the tensors of a batch, each `[rows, batch, ...]`. The losses are detached. They have the
        gradients of the loss, or of an objective with operands `[rows, ...]`. A parameter that is not used has none.

        Raises:
            ValueError: there is an objective, but samples come in batches that only the loss reads.
        """
        result = None if objective is not None else self.replays.run(rows.leaves, *batch)
        if result is None:
            return self.plain(rows, *batch, objective=objective, operands=operands)
        losses, grads, slots = result
        return losses, Gradients(grads, slots, self.layout.subtable(slots))

    def plain(
        self, rows: Rows, *batch: Tensor, objective: Objective | None = None, operands: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Gradients]:
        """Run a pass through the model's Python code, torch.vmap and autograd. This is the meaning of `run`."""
        losses, grads = self.gradients(rows.leaves, *batch, objective=objective, operands=operands)
        slots = tuple(i for i, g in enumerate(grads) if g is not None)
        present = [_dense(g, s) for g, s in zip(grads, self.layout.segments, strict=True) if g is not None]
        return losses, Gradients(present, slots, self.layout.subtable(slots))

    def gradients(
        self,
        leaves: list[Tensor],
        *batch: Tensor,
        objective: Objective | None = None,
        operands: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return losses (detached) and gradients at `leaves` (`[rows, *shape]`, requiring gradients), in any order of
        memory."""
        rows, (weights, batch, operands) = len(batch[0]), self._mappable(leaves, batch, operands)
        samples, dropout = self._split(batch)
        with dropout:
            with self._mapping(batch):
                losses, values = self._losses_of(weights, samples, objective, operands)
            if len(losses) > rows:
                losses, values = losses[:rows], values[:rows]
            return losses.detach(), torch.autograd.grad(values.sum(), leaves, allow_unused=True)

    @torch.no_grad()
    def outputs_of(self, w: Tensor, batch: Tensors) -> Tensor:
        """Return the outputs `[rows, ...]` of teachers with the weights `w` `[rows, row_size]`, in evaluation mode.

        Raises:
            ValueError: samples come in batches that only the loss reads.
        """
        rows, (weights, batch) = len(w), self._mappable(self.layout.views(w), batch)
        samples, dropout = self._split(batch)
        x, _ = self._pairs(samples)
        was_training = self.module.training
        self.module.eval()
        try:
            with dropout, self._mapping(batch):
                outputs: Tensor = self._outputs(weights, x)
        finally:
            self.module.train(was_training)
        return outputs[:rows]

    def _mappable(self, *groups: Sequence[Tensor]) -> Sequence[Tensors]:
        """Return tensors `[rows, ...]`, the only row twice if torch cannot map it: a norm of one row in
        channels_last."""
        if len(groups[0][0]) > 1 or not self.has_channels_last:
            return [tuple(group) for group in groups]
        return [tuple([t.expand(2, *t.shape[1:]) for t in group]) for group in groups]

    def _split(self, batch: Tensors) -> tuple[Tensors, AbstractContextManager[None]]:
        """Return the samples of a batch, and the context in which a pass drops elements by the seeds of the rows."""
        return (batch[:-1], stacked_dropout(batch[-1][:, 0])) if self.draws else (batch, nullcontext())

    @contextmanager
    def _mapping(self, batch: Tensors) -> Iterator[None]:
        """Let calls inside map the module over the rows of a batch. It has its own parameters again afterwards."""
        lookups = self.lookups.of_shape((*(t.shape for t in batch), self.module.training))
        with mapping(), self.calls, lookups, self.masks:
            try:
                yield
            finally:
                self._place(self.parameters)

    def _pairs(self, samples: Tensors) -> tuple[Any, Any]:
        """Return inputs and labels. Raises ValueError unless samples are pairs."""
        x, y = fill_tree(self.template, samples)
        if self.of_outputs is None or y is None:
            raise ValueError(NEEDS_PAIRS)
        return x, y

    def _losses_of(
        self, weights: Tensors, samples: Tensors, objective: Objective | None, operands: Tensors
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of the rows, and the values whose gradients are wanted: the losses, or an objective's."""
        if objective is not None:
            return self._vmap(partial(self._objective, objective))(weights, *self._pairs(samples), operands)
        x, y = fill_tree(self.template, samples)
        if y is None and not self.is_cross_entropy:
            losses = self._batch_losses(weights, x)
            return losses, losses
        x, y = split_pair(x) if y is None else (x, y)
        outputs = self._outputs(weights, x)
        losses = _cross_entropy(outputs, y) if self._classifies(outputs, y) else self._losses(outputs, y)
        return losses, losses

    def _place(self, weights: Sequence[Tensor]) -> None:
        """Give the module other parameters. `functional_call` does the same, with a search for them in every step."""
        for places, weight in zip(self.places, weights, strict=True):
            for mapping, name in places:
                mapping[name] = weight

    def _output(self, weights: Tensors, x: Any) -> Any:
        self._place(weights)
        return call(self.module, x)

    def _loss(self, output: Any, y: Any) -> Tensor:
        assert self.of_outputs is not None
        return check_scalar(self.of_outputs(output, y))

    def _batch_loss(self, weights: Tensors, batch: Any) -> Tensor:
        self._place(weights)
        return check_scalar(self.of_batch(self.module, batch))

    def _objective(
        self, objective: Objective, weights: Tensors, x: Any, y: Any, operands: Tensors
    ) -> tuple[Tensor, Tensor]:
        outputs = self._output(weights, x)
        loss = self._loss(outputs, y)
        return loss, check_scalar(objective(loss, outputs, y, *operands))

    def _classifies(self, outputs: Any, y: Any) -> bool:
        """Return True if torch's cross-entropy takes `[rows, batch, classes]` and class numbers, so that no mapping is
        needed."""
        if not self.is_cross_entropy or not isinstance(outputs, Tensor) or not isinstance(y, Tensor):
            return False
        return outputs.dim() == 3 and y.dim() == 2 and y.dtype == torch.int64


def _is_cross_entropy(loss: object) -> bool:
    """Return True if the loss is torch's cross-entropy without options."""
    if type(loss) is not nn.CrossEntropyLoss or loss._forward_hooks or loss._forward_pre_hooks:
        return loss is F.cross_entropy
    plain = loss.weight is None and loss.ignore_index == -100 and loss.label_smoothing == 0
    return plain and loss.reduction == "mean"


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of each row, `[rows]`. Labels of -100 do not count, as in torch's mean."""
    losses = F.cross_entropy(outputs.transpose(1, 2), y, reduction="none")
    return losses.sum(1) / (y != -100).sum(1)


def _places(module: nn.Module, parameter: nn.Parameter) -> list[tuple[dict[str, Tensor], str]]:
    """Return the places that hold a parameter, several if it is tied."""
    return [
        (inner._parameters, name)  # type: ignore[misc]
        for inner in module.modules()
        for name, p in inner._parameters.items()
        if p is parameter
    ]


def _dense(g: Tensor, segment: Segment) -> Tensor:
    """Return `g` `[rows, *shape]` with the elements of a row in the parameter's own order, as kernels read them."""
    strides = (segment.length, *segment.stride)
    return g if g.stride() == strides else copy_with_strides(g, strides)


def slots_of(setup: Setup) -> int:
    """Return the best number of rows, at most the number of clients.

    On a GPU a call costs the same for any number of rows, so it is the number that a fourth of its memory can hold, or
    a smaller share if other ranks use the same GPU. A row has vectors of the trained parameters, and the activations of
    all layers, frozen ones too. On a CPU there are enough rows to share the cost of a call, and few enough for their
    weights to stay in the cache and for their activations to take 1 GiB.
    """
    row = setup.layout.row_size * setup.dtype.itemsize
    cohort = setup.cohort
    if setup.device.type == "cuda":
        memory = _memory(setup.device) // ranks_per_device() - setup.frozen_numel * setup.dtype.itemsize
        fit = memory // (_SHARE * (_FIELDS * row + setup.activations))
        return max(1, min(fit, _UNKNOWN if cohort is None else cohort))
    fit = min(max(4, min(64, _CACHE // row)), _ACTIVATIONS // max(1, setup.activations))
    return max(1, fit if cohort is None else min(fit, cohort))


def _memory(device: torch.device) -> int:
    """Return the bytes of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def why_not(setup: Setup) -> str | None:
    """Return the reason why the model cannot be trained in stacked rows, or None. It compares a step of two rows with
    single rows."""
    if setup.population.clients.template is None:
        return "clients' samples are read batch by batch, and stacked clients need columns of tensors in memory"
    if setup.changes_buffers:
        return (
            "training changes buffers of the model (BatchNorm?) in place; use GroupNorm, or an executor that trains "
            "one client a row"
        )
    if setup.writes_parameters:
        return "a forward pass writes trained parameters in place, and the weights of stacked clients are one tensor"
    reason = refusal(setup)
    if reason is not None:
        return reason
    if setup.example is None:
        return "there is no example batch to try the model with"
    try:
        return next(filter(None, (_trial(setup, batch) for batch in _trial_batches(setup))), None)
    except Exception as error:
        first = advice(error) or (str(error).strip().splitlines()[0] if str(error).strip() else "")
        return f"torch.vmap cannot map the model or the loss over clients ({type(error).__name__}: {first})"


def _trial_rows(setup: Setup) -> tuple[Replica, Rows]:
    """Return a copy of the model in training mode, and two rows of other weights."""
    replica = Replica.new(setup.model, setup.layout, setup.device)
    replica.module.train()
    rows = Rows(setup, 2, copies=True)
    rows.z.copy_(torch.stack([replica.row, 0.9 * replica.row]))
    return replica, rows


def has_row_program(setup: Setup) -> bool:
    """Return True if clients with batches like the example have a row program. Only for models that can be stacked."""
    if setup.example is None:
        return False
    replica, rows = _trial_rows(setup)
    batch = [torch.stack([t, t]) for t in tensors_of(setup.example)]
    return StackedPasses(replica, setup.layout, setup).replays.has_row_program(rows.leaves, *batch)


def _trial_batches(setup: Setup) -> Iterator[Tensors]:
    """Yield the example. If the model draws random numbers, yield its first samples too, in a batch of the smallest
    size: the draws may depend on the size."""
    batch = tensors_of(setup.example)
    yield batch
    sizes = [setup.options.sizes_of(n) for n in set(setup.population.clients.known_sizes.values())]
    smallest = min((epoch[-1] for epoch in sizes if epoch), default=len(batch[0]))
    if setup.draws is not None and smallest < len(batch[0]):
        yield tuple(t[:smallest] for t in batch)


def _trial(setup: Setup, batch: Tensors) -> str | None:
    layout = setup.layout
    replica, rows = _trial_rows(setup)
    batches = [batch, tuple(t.flip(0) for t in batch)]
    samples, seeds = map(torch.stack, zip(*batches, strict=True)), torch.tensor([1, 2], device=setup.device)
    passes = StackedPasses(replica, layout, setup)
    keys = [seeds[:, None].expand(-1, len(batch[0]))] if passes.draws else []
    losses, stacked_grads = passes.plain(rows, *samples, *keys)
    plain = ModelPasses(replica, layout, setup.loss)
    loss_tolerance = BF16_LOSS if setup.options.precision == "bf16" else None
    for row, batch in enumerate(batches):
        replica.row.copy_(rows.z[row])
        with StackedDropout(seeds[row]) if passes.draws else nullcontext():
            loss, gradients = plain.run(*fill_tree(setup.population.clients.template, batch))
        if gradients.slots != stacked_grads.slots:
            return "a stacked step gives gradients to other parameters than a plain one"
        row_gradients = [g[row] for g in stacked_grads.tensors]
        if not agree(loss, gradients.tensors, losses[row], row_gradients, _TRIAL_TOLERANCE, loss_tolerance):
            if loss_tolerance is not None and agree(loss, [], losses[row], [], loss_tolerance=loss_tolerance):
                return (
                    "a stacked step gives the losses of a plain one, but other gradients, because in bfloat16 rounding "
                    "decides which of several values is the largest (max-pooling)"
                )
            return (
                "a stacked step gives other losses or gradients than a plain one: the forward pass is not a function "
                "of its inputs"
            )
    return None
