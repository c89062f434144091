"""The clients of one round: tasks go to the executor, results come back in any order."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.clients.all_clients import Clients
from fastsam.fed.clients.plan import plan
from fastsam.fed.executors import ClientError, ClientOutcome, Executor, Task
from fastsam.fed.executors.task import ClientLoop
from fastsam.fed.loop.client_state import ClientStateStorage, StateRows, group_by_shape
from fastsam.fed.loop.contract import Contract, not_finite
from fastsam.fed.loop.options import Settings
from fastsam.fed.loop.outliers import outliers
from fastsam.fed.rundir.checkpoint import RunState
from fastsam.fed.stages.base import ClientUploads, Stage
from fastsam.fed.stages.client_weights import own_weights_of
from fastsam.fed.sums.fixed_point import FixedPointAggregate, Problems, read
from fastsam.fed.sums.ranks import Ranks
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.steps import Step

log = logging.getLogger("fastsam.fed")

_MAX_LOGGED = 3  # excluded clients that the log names, a round
_ORDERS_AT_ONCE = 8  # clients that train one by one and have the orders of their samples drawn together
_NOTHING: frozenset[int] = frozenset()


@dataclass
class Cohort:
    """The clients of one round, between the algorithm and the executor.

    A client is excluded if its loss, delta, an output of its step, its upload or its new state is not finite. A NaN or
    infinity in any step of a client leaves a delta that is not finite, so no step is checked. If the run says so, a
    client whose model or loss raises is excluded too. Nothing of an excluded client enters the sums, and its state
    stays as it was.

    Args:
        contract, settings, data, stages, states, ranks: parts of the run.
        old_state: the state of the run before the round.
        round: the round.
        visible: the round as the algorithm may see it.
        weights: the weights of the clients of all ranks in the server's mean. They are fixed when the clients are
            sampled. Otherwise the sums would depend on the order in which clients finish.
        local_ids: the clients of this rank.

    Attributes:
        sums: the sums of the uploads.
        clients: the states of all clients of this rank after the round.
        owner_ranks: the ranks that keep the states of clients.
        exclusions: the reasons of excluded clients.
        norms: norms of the deltas that enter the sums.
        steps: numbers of local steps.
        backward_passes: number of backward passes of all clients.
    """

    contract: Contract
    settings: Settings
    data: Clients
    stages: Sequence[Stage]
    states: ClientStateStorage
    ranks: Ranks
    old_state: RunState
    round: Round
    visible: Round
    weights: Mapping[int, int]
    local_ids: Sequence[int]
    exclusions: dict[int, str] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    backward_passes: int = 0
    # states before the round of clients that train: rows, and the client's place among them
    _training: dict[int, tuple[StateRows, int]] = field(default_factory=dict)
    _first: tuple[StateRows, Step] | None = None  # see `_first_of`

    def __post_init__(self) -> None:
        self.client_ids = list(self.weights)
        self.sums = FixedPointAggregate(len(self.client_ids), max(self.weights.values()))
        self.clients, self.owner_ranks = dict(self.old_state.clients), self.old_state.owner_ranks
        for stage in self.stages:
            stage.begin_round(self.sums)

    def tasks(self, executor: Executor, next_cohort: Sequence[int] = ()) -> Iterator[Task]:
        """Yield one task per client of this rank, on request. Clients in `next_cohort` are likely in the next round."""
        data, block_size = self.data, executor.slots if executor.stacks else 1
        setup, index, lr = executor.setup, self.round.index, self.round.lr
        order = self.local_ids
        if executor.longest_first and data.has_all_sizes:
            order, next_cohort = (
                sorted(client_ids, key=data.sizes.__getitem__, reverse=True) for client_ids in (order, next_cohort)
            )
            if executor.stacks:  # the partial batches of one size are taken together, best by neighbours
                order = self._by_last_batch(order, block_size)
        self.states.begin(self.old_state.clients, order, next_cohort)
        if data.prefetches:
            cohort_ids = set(order)  # a client in both cohorts is loaded again after its data were released
            next_ids = [i for i in next_cohort if i not in cohort_ids] if self.ranks.size == 1 else []
            data.prefetch([*order, *next_ids], executor.slots)
        at_once = block_size if executor.stacks else _ORDERS_AT_ONCE
        works = plan(setup.population, setup.options, index, order, at_once)
        for start in range(0, len(order), block_size):
            clients = order[start : start + block_size]
            for i, (step, row, n) in zip(clients, self._steps(clients), strict=True):
                snapshots = self._snapshots(i) if self.stages else _NOTHING
                loop = self._loop(i) if self.contract.has_loop else None
                yield Task(i, next(works), setup, index, lr, step, row, n, snapshots, loop)

    def _by_last_batch(self, clients: Sequence[int], block_size: int) -> list[int]:
        """Return clients in blocks, each in the order of the numbers of samples of their last batches."""
        last = {n: self.settings.local.sizes_of(n)[-1] for n in {self.data.sizes[i] for i in clients}}
        if len(last) <= 1:
            return list(clients)
        blocks = [clients[start : start + block_size] for start in range(0, len(clients), block_size)]
        return [i for block in blocks for i in sorted(block, key=lambda i: last[self.data.sizes[i]])]

    def _loop(self, client: int) -> ClientLoop:
        """Return the algorithm's loop for a client."""
        rows, place = self._training[client]
        server, state = self.old_state.server, rows.states[place]
        run = partial(self.contract.train_client, server, state, self.visible)
        return ClientLoop(run, [*server.values(), *state.values()])

    def _steps(self, clients: Sequence[int]) -> list[tuple[Step, int, int]]:
        """Return for each client its local step, the index of its row in it, and the number of the rows.

        Clients that take part for the first time share one state, and therefore one step.
        """
        all_states = self.old_state.clients
        states = {i: self.states.get(i, all_states[i]) for i in clients if i in all_states}
        steps: dict[int, tuple[Step, int, int]] = {}
        if len(states) < len(clients):
            new = clients if not states else [i for i in clients if i not in states]
            rows, step = self._first_of(new)
            self._training |= dict.fromkeys(new, (rows, 0))
            steps = dict.fromkeys(new, (step, 0, 1))
        ids, states_of_ids = list(states), list(states.values())
        for places in group_by_shape(states_of_ids):
            rows, group = StateRows.of([states_of_ids[i] for i in places]), [ids[i] for i in places]
            step = self._local_step(rows, group)
            self._training |= {client: (rows, place) for place, client in enumerate(group)}
            steps |= {client: (step, place, len(group)) for place, client in enumerate(group)}
        return [steps[i] for i in clients]

    def _first_of(self, clients: Sequence[int]) -> tuple[StateRows, Step]:
        """Return the state and the step of clients that take part for the first time, which all share."""
        if self._first is None:
            rows = StateRows.of([self.contract.init_client(self.old_state.server, self.visible, clients)])
            self._first = rows, self._local_step(rows, clients[:1])
        return self._first

    def _local_step(self, states: StateRows, clients: Sequence[int]) -> Step:
        """Return the local step of clients with these states."""
        step = self.contract.local_step(self.old_state.server, states.rows, len(clients), self.visible, clients)
        for stage in self.stages:
            step = stage.process_step(step, states.rows)
        return step

    def _snapshots(self, client: int) -> frozenset[int]:
        """Return the local steps of a client before which its row is copied for the stages."""
        num_steps = self.settings.local.steps_of(self.data.sizes[client])
        return frozenset(k for stage in self.stages for k in stage.snapshots(self.round, num_steps))

    def finish(self, results: ClientOutcome) -> None:
        """Add the results of some clients to the sums and store their new states, or exclude them."""
        if isinstance(results, ClientError):
            for client in results.client_ids:
                del self._training[client]
                self._exclude(client, results.reason)
            return
        self.steps |= zip(results.client_ids, results.num_steps, strict=True)
        self.backward_passes += sum(results.backward_passes)
        norms: list[float] | None = None
        for stage in self.stages:
            norms = stage.process_results(results, self.round) or norms
        if norms is not None:
            self.norms |= zip(results.client_ids, norms, strict=True)
        training = [self._training.pop(i) for i in results.client_ids]
        groups: dict[int, list[int]] = {}  # places of clients whose states are rows of one
        for place, (rows, _) in enumerate(training):
            groups.setdefault(id(rows), []).append(place)
        for places in groups.values():
            part = results if len(places) == len(training) else results.take(places)
            states = training[places[0]][0].take([training[place][1] for place in places])
            self._add_and_store(states, part, norms is not None)

    def _add_and_store(self, states: StateRows, results: ClientResults, has_norms: bool) -> None:
        """Add the results of clients to the sums, and store their new states."""
        norms = results.losses if has_norms else _norms_of(results)  # before `finish`, which may write into them
        uploads = self._uploads(states, results)
        for stage in self.stages:
            stage.process_uploads(uploads, self.round)
        added = self.sums.add(uploads.weights, uploads.mean, uploads.sum)
        losses, known_norms, *sizes = read([results.losses, norms, *added.sizes])
        if not has_norms:
            self.norms |= zip(results.client_ids, known_norms, strict=True)
        uploads.scalars["loss"] = losses
        problems = self.sums.check(added, sizes, uploads.scalars, _nonfinite_clients(uploads))
        for stage in self.stages:
            stage.after_sum(uploads, problems)
        new_states = _states_of(uploads, states.states) if uploads.state else None
        for place, client in enumerate(results.client_ids):
            if place in problems:
                self._exclude(client, problems[place])
            elif new_states is not None:
                self.clients[client] = self.states.put(client, new_states[place])
            else:
                self.clients.pop(client, None)

    def _uploads(self, states: StateRows, results: ClientResults) -> ClientUploads:
        """Return the uploads and new states that the algorithm makes of the results."""
        server = self.old_state.server
        state, upload = self.contract.finish_clients(server, states.states, states.rows, results, self.visible)
        own_weights = None
        if self.contract.sends_weights or upload.weight is not None:
            own_weights = own_weights_of(upload, self.contract.sends_weights, len(states.states), server["w"].device)
        scalars: dict[str, Sequence[float]] = {"loss": (), "samples": results.num_samples}  # losses are read later
        weights = [self.weights[i] for i in results.client_ids]
        return ClientUploads(
            server, results, states.rows, dict(state), dict(upload.mean), upload.sum, scalars, own_weights, weights
        )

    def _exclude(self, client: int, problem: str) -> None:
        problem += self.data.about_ignored(client)
        self.exclusions[client] = problem
        self.norms.pop(client, None)
        if len(self.exclusions) <= _MAX_LOGGED:  # the round's record names all of them
            log.warning("round %d: client %d is excluded: %s", self.round.index + 1, client, problem)

    def all_reduce(self) -> None:
        """Add up what all ranks have; collective. Raises RankError if a rank has died."""
        if self.ranks.size == 1:
            return
        self.sums.add_ranks(self.ranks, self.old_state.server["w"])
        stateful = self.clients.keys() & set(self.local_ids)
        parts = self.ranks.gather((stateful, self.norms, self.exclusions, self.steps, self.backward_passes))
        stateful_ids, norms, exclusions, steps, backward_passes = zip(*parts, strict=True)
        self.steps = {i: num_steps for part in steps for i, num_steps in part.items()}
        self.backward_passes = sum(backward_passes)
        self.exclusions = {i: reason for part in exclusions for i, reason in part.items()}
        self.norms = {i: part[i] for i in self.client_ids for part in norms if i in part}
        idle_owners = {i: rank for i, rank in self.owner_ranks.items() if i not in self.weights}
        owner_ranks = {i: rank for rank, ids in enumerate(stateful_ids) for i in ids}
        self.owner_ranks = idle_owners | {i: owner_ranks[i] for i in self.client_ids if i in owner_ranks}
        for stage in self.stages:
            stage.end_round(self.ranks, self.round)

    def check(self) -> None:
        """Raise RuntimeError if no client is left, or more than `max_excluded` of the cohort were excluded."""
        if not self.exclusions:
            return
        out, share = len(self.exclusions), self.settings.max_excluded
        if out > _MAX_LOGGED:
            log.warning("round %d: %d of %d clients are excluded", self.round.index + 1, out, len(self.client_ids))
        if self.sums.num_clients > 0 and out > share * len(self.client_ids):
            reasons = "; ".join(f"client {i}: {reason}" for i, reason in sorted(self.exclusions.items())[:4])
            raise RuntimeError(
                f"round {self.round.index + 1}: {out} of {len(self.client_ids)} active clients were excluded, more "
                f"than max_excluded={share:g} allows ({reasons}{'; ...' if out > 4 else ''}). A smaller lr or rho, "
                "clip_norm, or a larger max_excluded may help"
            )
        if self.sums.num_clients == 0:
            client, problem = min(self.exclusions.items())
            raise RuntimeError(
                f"round {self.round.index + 1}: all {len(self.client_ids)} active clients were excluded (client "
                f"{client}: {problem}). If the run has diverged, a smaller lr or rho, or clip_norm, may help"
            )

    def record(self) -> dict[str, Any]:
        """Return what the round's record says of the clients. train_loss is the mean over the samples in the sums."""
        samples = self.sums.scalar("samples")
        return {
            "clients": len(self.client_ids),
            "samples": sum(map(self.data.known_size, self.client_ids)),
            "steps": sum(self.steps.values()),
            "train_loss": self.sums.scalar("loss") / samples if samples else None,  # a loop may record none
            "backprops": self.backward_passes,
            "excluded": [{"client": i, "reason": reason} for i, reason in sorted(self.exclusions.items())],
            "outliers": [{"client": i, "factor": x} for i, x in outliers(self.norms, self.steps).items()],
        }


def _norms_of(results: ClientResults) -> Tensor:
    """Return the norms of the deltas, `[n]` on the device."""
    return torch.linalg.vector_norm(results.delta, dim=1) if results.squares is None else results.squares.sqrt()


def _nonfinite_clients(uploads: ClientUploads) -> Problems:
    """Return the clients whose results or new states are not finite, by row, with the reason.

    `FixedPointAggregate.check` checks what is summed; the reasons given here come before those found there.
    """
    results, n = uploads.results, len(uploads.weights)
    new_state = {name: x for name, x in uploads.state.items() if not any(x is t for t in uploads.server.values())}
    problems: Problems = {}
    summed_ids = {id(x) for x in (*uploads.mean.values(), *uploads.sum.values())}
    for name, x in {"delta": results.delta, **results.outputs}.items():
        if id(x) in summed_ids or all(v.isfinite() for v in torch.aminmax(x)):
            continue
        bad_rows = [i for i, good in enumerate(x.isfinite().all(dim=1).tolist()) if not good]
        problems = dict.fromkeys(bad_rows, f"its {name} is not finite") | problems
    # The last reason of a client counts: states and deltas follow from a loss.
    losses = {i: "the loss is not finite" for i, x in enumerate(uploads.scalars["loss"]) if not math.isfinite(x)}
    return (not_finite(new_state, uploads.client, n) if new_state else {}) | problems | losses


def _states_of(uploads: ClientUploads, old_states: Sequence[State]) -> list[State]:
    """Return the new states of the clients, in separate memory. Tensors of their old states and of the server's state
    are not copied."""
    columns: list[Sequence[Tensor]] = []
    for name, x in uploads.state.items():
        if x is uploads.client.get(name):
            columns.append([state[name] for state in old_states])
        elif any(x is t for t in uploads.server.values()):
            columns.append([x] * len(old_states))
        else:
            columns.append([row.clone() for row in x] if len(old_states) > 1 else [x[0]])
    return [dict(zip(uploads.state, tensors, strict=True)) for tensors in zip(*columns, strict=True)]
