"""Passes of stacked clients without the model's Python: recorded once per shape as a graph of torch's operations, and
run from the graph.

`graph_recorder` records below autograd and vmap, so the part of torch above an operation (most of a small model's pass)
happens once. The graph is run as it is or as a row program, which is recorded on two rows and serves any number of
rows.

The plain pass defines the meaning. The first two passes of a shape run both ways and are compared. The choice of
replayed passes depends only on model and shapes, so a continued run has the bits of an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fastsam.arena import Layout
from fastsam.fed.clients.samples import Tensors
from fastsam.fed.executors import graph_passes
from fastsam.fed.executors.graph_passes import ProductOf
from fastsam.fed.executors.graph_recorder import StoppedRecordingError
from fastsam.fed.executors.recording import ROWS, CannotRecordError, Recording, difference, python_state
from fastsam.fed.executors.rowprograms import FORMLESS
from fastsam.fed.executors.rowprograms.row_pass import RowPass

log = logging.getLogger("fastsam.fed")

Plain = Callable[..., tuple[Tensor, Sequence[Tensor | None]]]  # from a list of weights and the tensors of a batch
Function = Callable[..., Sequence[Tensor]]  # from weights and batch to losses and gradients
PassResult = tuple[Tensor, list[Tensor], tuple[int, ...]]  # losses, gradients that there are, and of which parameters
Key = tuple[object, ...]

MAX_SHAPES = 256  # shapes: some hundred kilobytes each
# Largest relative errors of a loss, and of the norm of all gradients. A maximum or a kink that rounding moves
# (max-pooling, ReLU) changes single elements of a gradient much more than rounding, but not the loss.
_LOSS, _GRADIENT = {torch.float32: 1e-4, torch.float64: 1e-9}, 0.01
BF16_LOSS = 0.01  # the same of passes in bfloat16


@dataclass
class Pass:
    """The way to run passes of one shape.

    Attributes:
        function: the replayed pass, or None for the plain way.
        slots: indices of the parameters that have a gradient.
        uses: number of compared passes.
        row_pass: the function, if it is a row program.
        first_results: results of the first pass, which the recording has computed.
    """

    function: Function | None = None
    slots: tuple[int, ...] = ()
    uses: int = 0
    first_results: Sequence[Tensor] | None = None
    row_pass: RowPass | None = None


class Replays:
    """Replayed passes of one model and one loss.

    Args:
        plain: losses `[rows]` and gradients `[rows, *shape]` (None for parameters that the loss does not use) of
            weights and a batch.
        module, layout: the model and the layout of its parameters.
        make_row_pass: makes a row program from a graph and the parameters of its gradients, or returns None if an
            operation has no form. None if there are no row programs.
        product_of: see `graph_passes.use_products`.
        max_shapes: number of shapes that are remembered. The least recently used one goes first.
    """

    def __init__(
        self,
        plain: Plain,
        module: nn.Module,
        layout: Layout,
        make_row_pass: Callable[[GraphModule, Sequence[int]], RowPass | None] | None = None,
        product_of: ProductOf = lambda a, b: None,
        max_shapes: int = MAX_SHAPES,
    ) -> None:
        self.plain, self.module, self.layout, self.max_shapes = plain, module, layout, max_shapes
        self.make_row_pass, self.product_of = make_row_pass, product_of
        self.strides = [(s.length, *s.stride) for s in layout.segments]
        self.reason: str | None = None  # why nothing is replayed any more
        self._passes: OrderedDict[Key, Pass] = OrderedDict()
        self._log_reasons: set[str] = set()

    def run(self, weights: list[Tensor], *batch: Tensor) -> PassResult | None:
        """Run a pass at `weights` (`[rows, *shape]`, leaves of autograd) on a batch, each tensor `[rows, batch, ...]`.
        Return None if the plain pass has to run. Gradients are stored in the layout's order, in separate memory."""
        batch = tuple([t.contiguous() for t in batch])
        replay = None if self.reason is not None else self._pass_of(weights, batch)
        if replay is None or replay.function is None:
            return None
        if replay.first_results is not None:
            (losses, *grads), replay.first_results, replay.uses = replay.first_results, None, 1
            return losses, grads, replay.slots
        with torch.no_grad():
            losses, *grads = replay.function(*weights, *batch)
        if replay.uses < 2 and not self._compare(replay, weights, batch, losses, grads):
            return None
        return losses, grads, replay.slots

    def row_pass(self, size: int, *samples: Tensor) -> RowPass | None:
        """Return the row program of passes with a batch of `size` samples like `samples` (each `[n, ...]`) in each row.
        It is None unless a row program exists and was compared, and every parameter has a gradient."""
        replay = self._compared_pass(self._passes.get(self._key(samples, size)))
        return replay.row_pass if replay is not None and len(replay.slots) == len(self.strides) else None

    def slots_of(self, size: int, rows: int, *samples: Tensor) -> tuple[int, ...] | None:
        """Return the indices of the parameters that have a gradient in the passes of `find_function`, or None."""
        replay = self._find(size, rows, *samples)
        return None if replay is None or replay.function is None else replay.slots

    def find_function(self, size: int, rows: int, *samples: Tensor) -> Function | None:
        """Return the function of passes of `rows` rows with a batch of `size` samples like `samples` (each `[n, ...]`),
        or None if it has not been compared yet."""
        replay = self._find(size, rows, *samples)
        return None if replay is None else replay.function

    def _find(self, size: int, rows: int, *samples: Tensor) -> Pass | None:
        rowwise = self._key(samples, size)
        return self._compared_pass(self._passes.get((*rowwise, rows), self._passes.get(rowwise)))

    def has_row_pass(self, *batch: Tensor) -> bool:
        """Return True if passes over a batch, each tensor `[rows, batch, ...]`, which ran before, are run by a row
        program."""
        replay = self._passes.get(self._key(batch))
        return self.reason is None and replay is not None and replay.function is not None

    def _compared_pass(self, replay: Pass | None) -> Pass | None:
        return None if self.reason is not None or replay is None or replay.uses < 2 else replay

    # --- what is known of a shape ---

    def _key(self, tensors: Sequence[Tensor], size: int | None = None) -> Key:
        """Return the key of passes over any number of rows, of the tensors of a batch, `[rows, batch, ...]`. With a
        `size` they are samples `[n, ...]`, of which a batch has `size`."""
        if size is None:
            shapes = [t.shape[1:] for t in tensors]
        else:
            shapes = [torch.Size((size, *t.shape[1:])) for t in tensors]
        return (*shapes, *[t.dtype for t in tensors], self.module.training)

    def _pass_of(self, weights: list[Tensor], batch: Tensors) -> Pass | None:
        """Return the pass over any number of rows, or the pass over this number of rows. It is recorded if it is the
        first of its shape."""
        rowwise = self._key(batch)
        key = (*rowwise, len(batch[0]))
        if self.make_row_pass is not None:
            replay = self._passes.get(rowwise) or self._record(rowwise, *self._two_rows(weights, batch), rowwise=True)
            self._passes.move_to_end(rowwise)
            if replay.function is not None:
                return replay
        if self.reason is not None:
            return None
        replay = self._passes.get(key) or self._record(key, weights, batch)
        self._passes.move_to_end(key)
        return replay

    def _two_rows(self, weights: list[Tensor], batch: Tensors) -> tuple[list[Tensor], Tensors]:
        """Return the first two rows, or the only row twice."""
        indices = [0, min(1, len(batch[0]) - 1)]
        views = self.layout.views(weights[0].new_zeros(ROWS, self.layout.row_size))
        for view, weight in zip(views, weights, strict=True):
            view.copy_(weight.detach()[indices])
        return views, tuple(t[indices] for t in batch)

    def _record(self, key: Key, weights: list[Tensor], batch: Tensors, rowwise: bool = False) -> Pass:
        """Record a pass and keep it under `key`, as a row program if `rowwise` is True."""
        stops = FORMLESS if rowwise else frozenset()
        replay, recording = Pass(), self._make_recording(weights, batch, stops)
        if recording is not None:
            row_pass = self.make_row_pass(recording.module, recording.slots) if rowwise and self.make_row_pass else None
            function: Function | None = row_pass if rowwise else self._graph_function(recording)
            results = None if function is None else self._replay(recording, function)
            if results is not None:
                replay = Pass(function, recording.slots, 0, None if rowwise else results, row_pass)
        self._passes[key] = replay
        if len(self._passes) > self.max_shapes:
            self._passes.popitem(last=False)
        return replay

    def _make_recording(self, weights: list[Tensor], batch: Tensors, stops: frozenset[Any]) -> Recording | None:
        """Return the simplified recording of a pass, or None if it cannot be recorded or stops. The log has the reason
        for which it cannot be recorded."""
        old_state = python_state(self.module)
        try:
            recording = Recording(self.plain, weights, *batch, stops=stops)
            graph_passes.simplify(recording.module.graph)
        except StoppedRecordingError:
            return None
        except Exception as error:  # an error of the model itself comes again, from the plain pass
            kind = "" if isinstance(error, CannotRecordError) else f"{type(error).__name__}: "
            self._log(f"{kind}{str(error).strip().partition(chr(10))[0]}")
            return None
        change = difference(old_state, python_state(self.module))
        if change is None:
            return recording
        self.reason = f"the model's forward pass changes {change}"
        self._log(self.reason)
        return None

    def _graph_function(self, recording: Recording) -> Function:
        """Return the graph of a recording as a function."""
        module = recording.module
        graph_passes.use_products(module.graph, self.product_of)
        graph_passes.use_quick_pools(module.graph)
        losses = recording.outputs[0]
        graph_passes.place_outputs(module.graph, [losses.stride(), *(self.strides[i] for i in recording.slots)])
        graph_passes.bind_functions(module.graph)
        for node in module.graph.nodes:
            node.meta.clear()  # tensors as they were
        module.recompile()
        run: Function = module.forward
        return run

    # --- what is compared ---

    def _replay(self, recording: Recording, function: Function) -> Sequence[Tensor] | None:
        """Return the results of the function at the inputs of the recording, or None if they differ from its
        results."""
        losses, *grads = recording.outputs
        with torch.no_grad():
            results = replayed_losses, *replayed_grads = function(*recording.inputs)
        if agree(losses, grads, replayed_losses, replayed_grads):
            return results
        self._log("the replay of a pass gives other losses or gradients")
        return None

    def _compare(
        self, replay: Pass, weights: list[Tensor], batch: Tensors, losses: Tensor, grads: list[Tensor]
    ) -> bool:
        """Return True if the recording is right for another batch at other weights. A value that the recording froze by
        mistake shows there."""
        replay.uses += 1
        plain_losses, plain_grads = self.plain(weights, *batch)
        has_slots = replay.slots == tuple(i for i, g in enumerate(plain_grads) if g is not None)
        if has_slots and agree(plain_losses, [g for g in plain_grads if g is not None], losses, grads):
            return True
        self.reason = "the model's forward pass is not a function of its inputs and weights"
        self._log(self.reason)
        return False

    def _log(self, reason: str) -> None:
        if reason not in self._log_reasons:
            self._log_reasons.add(reason)
            log.info("executor vmap: steps run through torch.vmap each time, which is slower, not replayed: %s", reason)


def agree(
    losses: Tensor,
    grads: Sequence[Tensor],
    other_losses: Tensor,
    other_grads: Sequence[Tensor],
    tolerance: float = _GRADIENT,
    loss_tolerance: float | None = None,
) -> bool:
    """Return True if losses `[rows]` and gradients agree to rounding, or overflow, which shows nothing.

    `tolerance` bounds the relative error of the norm of all gradients. `loss_tolerance` bounds the relative error of a
    loss; None takes the bound of its dtype.
    """
    norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt() if grads else torch.zeros(())
    squares = torch.stack([(a - b).double().square().sum() for a, b in zip(grads, other_grads, strict=True)] or [norm])
    if not bool(norm.isfinite() & losses.isfinite().all()):
        return True
    loss_tolerance = _LOSS[losses.dtype] if loss_tolerance is None else loss_tolerance
    differs = ((losses - other_losses).abs() > loss_tolerance * losses.abs().clamp_min(1e-3)).any()
    return not bool(differs) and bool(squares.sum().sqrt() <= tolerance * norm)
