"""Parameters that stay with the client: an algorithm around another one, of which the others are sent and averaged.

With the head of a model that is FedPer (Arivazhagan et al. 2019), with the parameters of its normalisation layers the trained half of FedBN
(Li et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastsam.fed.aggregation import Rule
from fastsam.fed.algorithms.base import Algorithm, Round, State, Sums, Upload
from fastsam.fed.step.local_step import LocalStep, RowEnds
from fastsam.fed.step.rows import Rows

OWN = "personal"  # the name of a client's own parameters in its state
_MASKED = ("displacement", "gradient", "dual", "eps")  # what an algorithm sees of the rows of a client that are over


class Personal:
    """`inner`, with some of the parameters never sent: a client begins with its own ones, and what the inner algorithm sees of them is zero.

    So the global model keeps those of the start, sums and control variates are zero there, and a proximal term pulls to where the client began.
    Raises ValueError for patterns that match nothing (see `Rows.mask`), or all.
    """

    def __init__(self, inner: Algorithm, rows: Rows, patterns: str | Sequence[str]) -> None:
        self.inner, self.mask = inner, rows.mask("personal", patterns)
        self.places = self.mask.nonzero().flatten()
        own = len(self.places)
        if own == rows.numel:
            raise ValueError(
                f"personal={patterns!r} are all parameters of the model, and nothing would be learnt together"
            )
        shared = 1 - own / rows.numel
        self.down, self.up = inner.down * shared, inner.up * shared
        self.client_vectors = getattr(inner, "client_vectors", 0) + own / rows.numel
        self.working_vectors = getattr(inner, "working_vectors", 0) + 1  # where it begins

    def row(self, w: Tensor, state: State | None) -> Tensor:
        """A client's model: the global one `[stride]` with its own parameters; those of the start where it has no state yet."""
        if state is None:
            return w
        made = w.clone()
        made[self.places] = state[OWN].to(w.device)
        return made

    def init_server(self, w0: Tensor) -> State:
        """As of the inner algorithm."""
        self.places = self.places.to(w0.device)
        self.mask = self.mask.to(w0.device)
        return self.inner.init_server(w0)

    def init_client(self, server: State) -> State:
        """The inner state, and the client's own parameters, which are those of the start."""
        return {**self.inner.init_client(server), OWN: server["w"][self.places]}

    def local_step(self, server: State, client: State, round: Round) -> LocalStep | Sequence[LocalStep]:
        """The inner constants, from where each client begins."""
        own = client[OWN]
        start = server["w"].repeat(len(own), 1)
        start[:, self.places] = own
        made = self.inner.local_step(server, _inner(client), round)
        if isinstance(made, LocalStep):
            return self._begun(made, start, server["w"])
        return [self._begun(step, row, server["w"]) for step, row in zip(made, start, strict=True)]

    def _begun(self, step: LocalStep, start: Tensor, w: Tensor) -> LocalStep:
        if step.start is not None:
            raise ValueError(
                f"personal= serves no algorithm with a start of its own, and {type(self.inner).__name__} has one"
            )
        q = step.q
        if q is not None and step.phi:  # the constant half of phi*(w - start)
            q = q - step.phi * (start - w)
        return replace(step, start=start, q=q)

    def close_client(self, server: State, client: State, ends: RowEnds, round: Round) -> tuple[State, Upload]:
        """The inner state and upload of what is shared, and the client's own parameters as they are now."""
        own = client[OWN] + ends.displacement[:, self.places]
        shared: dict[str, Any] = {name: self._without(getattr(ends, name)) for name in _MASKED}
        state, upload = self.inner.close_client(server, _inner(client), replace(ends, **shared), round)
        return {**state, OWN: own}, upload

    def _without(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.masked_fill(self.mask, 0)

    def step_server(self, server: State, sums: Sums, round: Round) -> State:
        """As of the inner algorithm."""
        return self.inner.step_server(server, sums, round)


def _inner(client: State) -> State:
    return {name: x for name, x in client.items() if name != OWN}


def check_personal(personal: Any, algorithm: object, rule: Rule | None, ranks: int) -> None:
    """Raises ValueError where parameters cannot stay with the clients."""
    if personal is None:
        return
    if getattr(algorithm, "pools_data", False):
        raise ValueError(f"personal={personal!r} is for clients, and {type(algorithm).__name__} has none")
    if rule is not None:
        raise ValueError(
            f"personal={personal!r} is served with aggregation='mean' alone: {rule.name!r} compares whole models"
        )
    if ranks > 1:
        raise ValueError(
            f"personal={personal!r} is served in one process, where all clients' models can be evaluated; got {ranks}"
        )
