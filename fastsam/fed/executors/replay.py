"""Passes of stacked clients without the model's Python: recorded once per shape as a graph of torch's operations, and
run from the graph.

`graph_recorder` records below autograd and vmap, so the part of torch above an operation (most of a small model's pass)
happens once. A recording runs in one of three ways. A row program serves batches of one size and any number of rows. A
`DynamicGraph` serves batches of any size. If its two recordings differ too much, a graph serves one shape.

The plain pass defines the meaning. The first two passes of a recording run both ways and are compared, and a dynamic
graph also for each size of a batch. A dynamic graph that differs only on several rows is dropped, and graphs of one
shape take its place. The choice of replayed passes depends only on model and shapes, so a continued run has the bits of
an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph

from fastsam.arena import Layout
from fastsam.fed.clients.samples import Tensors
from fastsam.fed.executors import graph_passes
from fastsam.fed.executors.dynamic_graph import SHAPES, DynamicGraph
from fastsam.fed.executors.graph_passes import ProductOf
from fastsam.fed.executors.graph_recorder import CannotRecordError, StoppedRecordingError
from fastsam.fed.executors.recording import ROWS, Recording, difference, python_state
from fastsam.fed.executors.rowprograms import FORMLESS
from fastsam.fed.executors.rowprograms.forms import FORMS
from fastsam.fed.executors.rowprograms.row_pass import RowPass

log = logging.getLogger("fastsam.fed")

Plain = Callable[..., tuple[Tensor, Sequence[Tensor | None]]]  # from a list of weights and the tensors of a batch
Function = Callable[..., Sequence[Tensor]]  # from weights and batch to losses and gradients
PassResult = tuple[Tensor, list[Tensor], tuple[int, ...]]  # losses, gradients that there are, and of which parameters
Key = tuple[object, ...]


class Keys(NamedTuple):
    """The keys of the three recordings that may serve a batch, the first choice first."""

    rows: Key
    dynamic: Key
    exact: Key


MAX_SHAPES = 256  # shapes: some hundred kilobytes each
# Largest relative errors of a loss, and of the norm of all gradients. A maximum or a kink that rounding moves
# (max-pooling, ReLU) changes single elements of a gradient much more than rounding, but not the loss.
_LOSS, _GRADIENT = {torch.float32: 1e-4, torch.float64: 1e-9}, 0.01
_CHECKED_ROWS = 5  # more than the recordings of a dynamic graph have
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
        sizes: whether a dynamic graph is right for batches of a size; None for other functions.
    """

    function: Function | None = None
    slots: tuple[int, ...] = ()
    uses: int = 0
    first_results: Sequence[Tensor] | None = None
    row_pass: RowPass | None = None
    sizes: dict[int, bool] | None = None

    def serves(self, size: int) -> bool:
        """Return True if the function is right for batches of that size."""
        return self.function is not None and (self.sizes is None or self.sizes.get(size, False))


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
        make_row_pass: Callable[[Graph, Sequence[int]], RowPass | None] | None = None,
        product_of: ProductOf = lambda a, b: None,
        max_shapes: int = MAX_SHAPES,
    ) -> None:
        self.plain, self.module, self.layout, self.max_shapes = plain, module, layout, max_shapes
        self.make_row_pass, self.product_of = make_row_pass, product_of
        self.strides = [(s.length, *s.stride) for s in layout.segments]
        self.reason: str | None = None  # why nothing is replayed any more
        self._passes: OrderedDict[Key, Pass] = OrderedDict()
        self._formless: set[Key] = set()  # keys of dynamic graphs in which an operation has no form
        self._warned_reasons: set[str] = set()

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
        replay = self._passes.get(self._keys([t.shape[1:] for t in samples], samples, size).rows)
        is_known = replay is not None and self._is_compared(replay) and len(replay.slots) == len(self.strides)
        return replay.row_pass if replay is not None and is_known else None

    def slots_of(self, size: int, rows: int, *samples: Tensor) -> tuple[int, ...] | None:
        """Return the indices of the parameters that have a gradient in the passes of `find_function`, or None."""
        replay = self._find(size, rows, *samples)
        return None if replay is None else replay.slots

    def find_function(self, size: int, rows: int, *samples: Tensor) -> Function | None:
        """Return the function of passes of `rows` rows with a batch of `size` samples like `samples` (each `[n, ...]`),
        or None if it has not been compared yet."""
        replay = self._find(size, rows, *samples)
        return None if replay is None else replay.function

    def _find(self, size: int, rows: int, *samples: Tensor) -> Pass | None:
        """Return the pass for such batches that has a function and was compared, or None."""
        for key in self._keys([t.shape[1:] for t in samples], samples, size, rows):
            replay = self._passes.get(key)
            if replay is not None and replay.serves(size):
                return replay if self._is_compared(replay) else None
        return None

    def has_row_pass(self, *batch: Tensor) -> bool:
        """Return True if passes over a batch, each tensor `[rows, batch, ...]`, which ran before, are run by a row
        program."""
        replay = self._passes.get(self._keys_of(batch).rows)
        return self.reason is None and replay is not None and replay.function is not None

    def _is_compared(self, replay: Pass) -> bool:
        return self.reason is None and replay.uses >= 2

    # --- what is known of a shape ---

    def _keys_of(self, batch: Tensors) -> Keys:
        """Return the keys of the tensors of a batch, each `[rows, batch, ...]`."""
        rows, size = batch[0].shape[:2]
        return self._keys([t.shape[2:] for t in batch], batch, size, rows)

    def _keys(self, shapes: Sequence[torch.Size], tensors: Sequence[Tensor], size: int, rows: int = 0) -> Keys:
        """Return the keys of batches of `size` samples with these shapes."""
        key = (*shapes, *[t.dtype for t in tensors], self.module.training)
        return Keys((size, *key), key, (rows, size, *key))

    def _pass_of(self, weights: list[Tensor], batch: Tensors) -> Pass | None:
        """Return the pass of the most general recording that serves a batch. It is recorded if it is the first."""
        keys = self._keys_of(batch)
        if self.make_row_pass is not None and keys.dynamic not in self._formless:
            replay = self._known(keys.rows) or self._keep(keys.rows, self._record_rows(weights, batch))
            if replay.function is not None:
                return replay
        if self.reason is None:
            replay = self._known(keys.dynamic) or self._keep(keys.dynamic, self._record_dynamic(keys, weights, batch))
            self._check_size(replay, weights, batch)
            if replay.serves(batch[0].shape[1]):
                return replay
        if self.reason is None:
            return self._known(keys.exact) or self._keep(keys.exact, self._record(weights, batch))
        return None

    def _known(self, key: Key) -> Pass | None:
        if key in self._passes:
            self._passes.move_to_end(key)
        return self._passes.get(key)

    def _keep(self, key: Key, replay: Pass) -> Pass:
        self._passes[key] = replay
        if len(self._passes) > self.max_shapes:
            self._passes.popitem(last=False)
        return replay

    def _resized(self, weights: list[Tensor], batch: Tensors, rows: int, size: int) -> tuple[list[Tensor], Tensors]:
        """Return `rows` rows of `size` samples, from the first on, repeated if there are fewer."""
        of_rows, of_samples = ([i % n for i in range(m)] for m, n in zip((rows, size), batch[0].shape, strict=False))
        views = self.layout.views(weights[0].new_zeros(rows, self.layout.row_size))
        for view, weight in zip(views, weights, strict=True):
            view.copy_(weight.detach()[of_rows])
        return views, tuple(t[of_rows][:, of_samples].contiguous() for t in batch)

    # --- recordings ---

    def _record_rows(self, weights: list[Tensor], batch: Tensors) -> Pass:
        """Record a row program."""
        try:
            resized = self._resized(weights, batch, ROWS, batch[0].shape[1])
            recording = self._make_recording(*resized, stops=FORMLESS, forms=FORMS)
        except StoppedRecordingError:
            return Pass()
        except CannotRecordError as error:  # a graph may be possible
            log.debug("executor vmap: no row program is made of a step: %s", error)
            return Pass()
        assert self.make_row_pass is not None
        row_pass = self.make_row_pass(recording.graph, recording.slots)
        if row_pass is None or _results(recording, row_pass) is None:
            return Pass()
        return Pass(row_pass, recording.slots, row_pass=row_pass)

    def _record_dynamic(self, keys: Keys, weights: list[Tensor], batch: Tensors) -> Pass:
        """Record a graph for batches of any size and any number of rows."""
        try:
            recordings = [self._make_recording(*self._resized(weights, batch, *shape), folds=False) for shape in SHAPES]
            if any(node.target in FORMLESS for node in recordings[0].graph.nodes):
                self._formless.add(keys.dynamic)
            graphs, strides = [one.graph for one in recordings], self._strides(recordings[0])
            if recordings[0].slots != recordings[1].slots:
                raise CannotRecordError("the number of samples changes which parameters have a gradient")
            function = DynamicGraph(graphs, self.product_of, strides, len(weights))
        except CannotRecordError as error:  # a graph for one shape may be possible
            log.debug("executor vmap: a recorded step does not serve other shapes: %s", error)
            return Pass()
        return Pass(function, recordings[0].slots, sizes={})

    def _record(self, weights: list[Tensor], batch: Tensors) -> Pass:
        """Record a graph for one shape."""
        try:
            recording = self._make_recording(weights, batch)
        except CannotRecordError as error:
            self._warn(str(error))
            return Pass()
        graph_passes.use_products(recording.graph, self.product_of)
        function = graph_passes.function_of(recording.graph, self._strides(recording))
        results = _results(recording, function)
        if results is None:
            self._warn("the replay of a pass gives other losses or gradients")
            return Pass()
        return Pass(function, recording.slots, first_results=results)

    def _make_recording(
        self,
        weights: list[Tensor],
        batch: Tensors,
        *,
        stops: frozenset[Any] = frozenset(),
        forms: Mapping[Any, Any] = MappingProxyType({}),
        folds: bool = True,
    ) -> Recording:
        """Return the simplified recording of a pass. Raises CannotRecordError if the pass cannot be recorded."""
        old_state = python_state(self.module)
        try:
            recording = Recording(self.plain, weights, *batch, stops=stops, forms=forms)
            graph_passes.simplify(recording.graph, folds)
        except CannotRecordError:
            raise
        except Exception as error:  # an error of the model itself comes again, from the plain pass
            raise CannotRecordError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
        change = difference(old_state, python_state(self.module))
        if change is None:
            return recording
        self.reason = f"the model's forward pass changes {change}"
        self._warn(self.reason)
        raise CannotRecordError(self.reason)

    def _strides(self, recording: Recording) -> list[tuple[int, ...]]:
        """Return the strides of losses and gradients."""
        return [recording.outputs[0].stride(), *(self.strides[i] for i in recording.slots)]

    # --- what is compared ---

    def _check_size(self, replay: Pass, weights: list[Tensor], batch: Tensors) -> None:
        """Compare a dynamic graph with the plain pass if the size of the batch is new, because the model may choose its
        operations by it. Every size is compared on one row, and the first one on several rows too."""
        size = batch[0].shape[1]
        if replay.sizes is None or size in replay.sizes:
            return
        counts = (1,) if any(replay.sizes.values()) else (1, _CHECKED_ROWS)
        comparisons = [self._try(replay, *self._resized(weights, batch, n, size)) for n in counts]
        if None not in comparisons:
            replay.sizes[size] = all(comparisons)

    def _try(self, replay: Pass, weights: list[Tensor], batch: Tensors) -> bool | None:
        """Return whether the function of a pass has the results of the plain pass. None: they are not finite, and show
        nothing."""
        assert replay.function is not None
        try:
            with torch.no_grad():
                losses, *grads = replay.function(*weights, *batch)
        except RuntimeError:  # the model has no such operation for this size
            return False
        expected = self._plain_results(weights, batch)
        is_finite = all(bool(t.isfinite().all()) for t in (expected[0], *expected[1]))
        return _is_right(replay, expected, losses, grads) if is_finite else None

    def _compare(
        self, replay: Pass, weights: list[Tensor], batch: Tensors, losses: Tensor, grads: list[Tensor]
    ) -> bool:
        """Return True if the recording is right for another batch at other weights. A value that the recording froze by
        mistake shows there.

        The plain pass has the same rows. With fewer rows cuDNN chooses other algorithms, which round differently, and a
        maximum that rounding moves changes the gradients.
        """
        replay.uses += 1
        if _is_right(replay, self._plain_results(weights, batch), losses, grads):
            return True
        one_row = self._resized(weights, batch, 1, batch[0].shape[1])
        if replay.sizes is not None and self._try(replay, *one_row):  # a recording of one shape may be right
            log.debug("executor vmap: a step that was recorded for all shapes gives other losses or gradients")
            replay.function = replay.sizes = None
            return False
        self.reason = "the model's forward pass is not a function of its inputs and weights"
        self._warn(self.reason)
        return False

    def _plain_results(self, weights: list[Tensor], batch: Tensors) -> PassResult:
        """Return losses, existing gradients, and the parameters that have one, of the plain pass."""
        losses, grads = self.plain([w.detach().requires_grad_() for w in weights], *batch)
        slots = tuple(i for i, g in enumerate(grads) if g is not None)
        return losses, [g for g in grads if g is not None], slots

    def _warn(self, reason: str) -> None:
        """Log, once for each reason, that passes are not replayed."""
        if reason not in self._warned_reasons:
            self._warned_reasons.add(reason)
            log.warning(
                "executor vmap: steps run through torch.vmap each time, which is slower, not replayed: %s", reason
            )


def _results(recording: Recording, function: Function) -> Sequence[Tensor] | None:
    """Return the results of a function at the inputs of a recording, or None if they differ from its results."""
    losses, *grads = recording.outputs
    with torch.no_grad():
        results = replayed_losses, *replayed_grads = function(*recording.inputs)
    return results if agree(losses, grads, replayed_losses, replayed_grads) else None


def _is_right(replay: Pass, expected: PassResult, losses: Tensor, grads: Sequence[Tensor]) -> bool:
    """Return True if losses and gradients are the expected ones, to rounding."""
    plain_losses, plain_grads, slots = expected
    return replay.slots == slots and agree(plain_losses, plain_grads, losses, grads)


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
