"""A user's measures. They see vectors in torch's order, without the order and the padding of the run's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Round, State
from fastsam.fed.measures.options import Measures
from fastsam.fed.sums.ranks import Ranks
from fastsam.fed.update.parameter_layout import ParameterLayout
from fastsam.fed.update.results import ClientResults, Snapshot


class PlainAggregate:
    """The sums of a round with their rows as vectors."""

    def __init__(self, aggregate: Aggregate, layout: ParameterLayout) -> None:
        self._aggregate, self._layout, self.num_clients = aggregate, layout, aggregate.num_clients

    def mean(self, name: str) -> Tensor:
        """See `Aggregate`; a row is a float64 vector `[P]`."""
        return _plain(self._aggregate.mean(name), self._layout)

    def sum(self, name: str) -> Tensor:
        """See `Aggregate`; a row is a float64 vector `[P]`."""
        return _plain(self._aggregate.sum(name), self._layout)

    def scalar(self, name: str) -> float:
        return self._aggregate.scalar(name)


class OwnMeasures:
    """A user's measures, called with vectors `[..., P]` in the order of `torch.nn.utils.parameters_to_vector`.

    In a state, a tensor whose last dimension is `row_size` is a row.
    """

    def __init__(self, measures: Measures) -> None:
        self.measures = measures
        self._old_state: tuple[State, State] | None = (
            None  # the last one converted: `clients` is called often with one state
        )

    def snapshots(self, round: int, steps: int) -> tuple[int, ...]:
        return self.measures.snapshots(round, steps)

    def clients(
        self, old_state: State, results: ClientResults, context: Round
    ) -> Mapping[str, Sequence[float] | Tensor]:
        return self.measures.clients(
            self._state(old_state, context.layout), _plain_results(results, context.layout), _plain_context(context)
        )

    def join(self, ranks: Ranks, context: Round) -> None:
        """See `Measures`; does nothing if the object has no `join`."""
        join = getattr(self.measures, "join", None)
        if join is not None:
            join(ranks, _plain_context(context))

    def round(
        self, old_state: State, new_state: State, aggregate: Aggregate, context: Round
    ) -> dict[str, float | None]:
        layout, old = context.layout, self._state(old_state, context.layout)
        self._old_state = None
        return self.measures.round(
            old, _state(new_state, layout), PlainAggregate(aggregate, layout), _plain_context(context)
        )

    def _state(self, state: State, layout: ParameterLayout) -> State:
        if self._old_state is None or self._old_state[0] is not state:
            self._old_state = state, _state(state, layout)
        return self._old_state[1]


def _plain_context(context: Round) -> Round:
    return replace(context, layout=context.layout.plain)


def _plain(x: Tensor, layout: ParameterLayout) -> Tensor:
    return layout.vector(x) if x.dim() and x.shape[-1] == layout.row_size else x


def _state(state: State, layout: ParameterLayout) -> State:
    return {name: _plain(x, layout) for name, x in state.items()}


def _plain_results(results: ClientResults, layout: ParameterLayout) -> ClientResults:
    def to_vector(x: Tensor | None) -> Tensor | None:
        return None if x is None else layout.vector(x)

    snapshots = None
    if results.snapshots is not None:
        snapshots = [
            {k: Snapshot(layout.vector(s.w), to_vector(s.eps)) for k, s in one.items()} for one in results.snapshots
        ]
    return replace(
        results,
        delta=layout.vector(results.delta),
        outputs={name: _plain(x, layout) for name, x in results.outputs.items()},
        start=to_vector(results.start),
        snapshots=snapshots,
        extra={name: _plain(x, layout) for name, x in results.extra.items()},
    )
