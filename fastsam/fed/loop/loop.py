"""The federated loop.

One round:  Loop._draw -> Cohort.tasks (Algorithm.init_client, local_step) -> Executor.train (local steps)
            -> Cohort.finish (Stage.process_results, Algorithm.finish, Stage.process_uploads, fixed-point sums)
            -> Cohort.all_reduce -> Stage.process_aggregate -> Algorithm.step_server -> Stage.process_buffers
            -> Evaluator -> Stage.measure, Stage.record -> RunDirectory.log and save
One client: executors.local_work.train -> ClientTrainer.open -> run_step for each batch (Step: passes() for a
            gradient, Rows.perturb, passes() again, Rows.update) -> ClientTrainer.results

`Cohort.tasks` is lazy: a client's task is made when the executor takes it. Algorithms are called by way of `Contract`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round
from fastsam.fed.clients import sampling
from fastsam.fed.clients.population import Population
from fastsam.fed.executors import Choice
from fastsam.fed.loop.client_state import ClientStateStorage
from fastsam.fed.loop.cohort import Cohort
from fastsam.fed.loop.contract import Contract, check_finite
from fastsam.fed.loop.evaluate import Evaluator
from fastsam.fed.loop.listeners import CallbackHandler
from fastsam.fed.loop.options import Settings
from fastsam.fed.loop.outliers import warn
from fastsam.fed.loop.personal import ClientModels
from fastsam.fed.rundir.checkpoint import RunDirectory, RunState
from fastsam.fed.stages.base import Stage
from fastsam.fed.sums.ranks import Ranks
from fastsam.fed.update.memory_format import return_freed
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.parameter_layout import ParameterLayout

log = logging.getLogger("fastsam.fed")
_ROUNDS_OF_HEAP = 16  # rounds between two checks of the free memory
INTERRUPTED = (
    "interrupted after %d of %d rounds, which are lost. With run_dir='runs/name' they would be kept, and resume=True "
    "would continue them"
)


@dataclass(frozen=True)
class Loop:
    """The parts of a run, and its rounds. It does not depend on the algorithm or the executor.

    Args:
        view: the replica on which the global model is evaluated.
        stages: the chain between the clients' local work and the server's step.
        weights: the weights of all clients if the user gives them.
        personal: makes the clients' own models, or None.
        vectors: number of vectors of the size of the weights that a client in training has.
    """

    population: Population
    contract: Contract
    settings: Settings
    choice: Choice
    evaluator: Evaluator
    view: Replica
    states: ClientStateStorage
    ranks: Ranks
    layout: ParameterLayout
    stages: Sequence[Stage] = ()
    weights: Sequence[int] | None = None
    personal: ClientModels | None = None
    vectors: int = 2

    def run(self, state: RunState, directory: RunDirectory | None, listeners: CallbackHandler) -> RunState:
        """Run the rounds after `state`, and return the last state.

        If the run ends early, also by Ctrl-C, the directory has the last completed round. A round makes the next state
        in one assignment, so that an interrupt in a round leaves a complete state. Until the end only rank 0 has the
        records.
        """
        settings = self.settings
        try:
            while state.round < settings.rounds and listeners.stopped is None:
                state = self._round(state)
                if directory is not None:
                    if self.ranks.first:
                        directory.log(state.history[-1])
                    if state.round % settings.checkpoint_every == 0 or state.round == settings.rounds:
                        directory.save(state)
                listeners.round(state, self._evaluates(state.round))
                if state.round % _ROUNDS_OF_HEAP == 0:
                    return_freed()
            if directory is not None and directory.saved_round < state.round:  # it was stopped
                directory.save(state)
            return replace(state, history=self.ranks.broadcast(self._final_history(state)))
        except BaseException as error:
            if directory is not None:
                directory.rescue(state)
            elif isinstance(error, KeyboardInterrupt) and state.round and self.ranks.first:
                log.warning(INTERRUPTED, state.round, settings.rounds)
            raise
        finally:
            self.choice.executor.release()

    def nbytes(self, state: RunState) -> int:
        """Return the bytes that the server and the clients keep, on all ranks; collective."""
        clients = self.ranks.gather(replace(state, server={}).nbytes)
        return replace(state, clients={}).nbytes + sum(clients)

    def client_vectors(self, state: RunState) -> float:
        """Return the largest number of vectors of the size of the weights that a client keeps; collective."""
        kept = [sum(t.nbytes for t in client.values()) for client in state.clients.values()]
        return max(self.ranks.gather(max(kept, default=0))) / state.server["w"].nbytes

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the run."""
        return self.contract.algorithm

    @cached_property
    def _draw(self) -> Callable[[int], list[int]]:
        """The function that draws the clients of round t, the same on all ranks."""
        settings, num_clients, share = self.settings, len(self.population.clients), self.ranks.broadcast
        name, available = settings.sampler, settings.available
        if isinstance(name, str) and callable(available):  # functions of users may differ between ranks
            return lambda t: share(
                sampling.draw_present(name, settings.share_of, available, t, num_clients, settings.seed)
            )
        sampler = sampling.make(name, num_clients, settings.share_of(num_clients), not self._may_empty)
        if callable(name):
            return lambda t: share(sampling.draw(sampler, t, settings.seed))
        return lambda t: sampling.draw(sampler, t, settings.seed)

    @cached_property
    def _may_empty(self) -> bool:
        """True if a round in which no client was sampled has a server step."""
        return any(stage.keeps_empty_rounds for stage in self.stages)

    @cached_property
    def weight_of(self) -> Callable[[int], int]:
        """A function of a client's id that returns its weight in the server's mean."""
        if self.weights is not None:
            return self.weights.__getitem__
        return self.population.clients.sizes.__getitem__ if self.settings.weighting == "samples" else lambda client: 1

    def _round(self, state: RunState) -> RunState:
        """Return the state after one more round."""
        began, t = time.perf_counter(), state.round
        client_ids = self._draw(t)
        round, visible = self._rounds_of(t, len(client_ids))
        if not client_ids:
            return self._skip_round(state, round, visible, began)
        state, local_ids = self._assign_clients(state, client_ids)
        weights = {i: self.weight_of(i) for i in client_ids}
        cohort = Cohort(
            self.contract, self.settings, self.population.clients, self.stages, self.states, self.ranks, state, round,
            visible, weights, local_ids,
        )  # fmt: skip
        tasks = cohort.tasks(self.choice.executor, self._next(t) if self._prefetches else ())
        for results in self.choice.executor.train(state.server["w"], state.buffers, tasks):
            cohort.finish(results)
        cohort.all_reduce()
        cohort.check()
        server, buffers = self._server_step(state, cohort.sums, round, visible)
        seconds_training = time.perf_counter() - began
        new_state = RunState(t + 1, server, buffers, cohort.clients, state.history, cohort.owner_ranks)
        if self.ranks.first:
            record = self._record(new_state, round, cohort.record(), seconds_training)
            if record["outliers"]:
                warn(record["outliers"], state.history, self.settings.aggregation_name)
            for stage in self.stages:
                record |= stage.measure(state.server, server, buffers, round, {*record, "seconds"})
            state.history.append(record | {"seconds": time.perf_counter() - began})
        self.states.commit()
        return new_state

    def _rounds_of(self, t: int, cohort_size: int) -> tuple[Round, Round]:
        """Return round t, and the same as the algorithm may see it."""
        round = visible = self.settings.round(t, len(self.population.clients), cohort_size, self.layout)
        for stage in self.stages:
            visible = stage.visible_round(visible)
        return round, visible

    def _assign_clients(self, state: RunState, client_ids: Sequence[int]) -> tuple[RunState, Sequence[int]]:
        """Return the state after the clients' states have moved to their ranks, and the clients of this rank."""
        if self.ranks.size == 1:
            return state, client_ids
        owners = self.ranks.assign(
            client_ids, {i: self.population.clients.sizes[i] for i in client_ids}, state.owner_ranks
        )
        state = replace(
            state, clients=self.ranks.move_states(state.clients, owners, state.owner_ranks, self.states.adopt)
        )
        return state, [i for i in client_ids if owners[i] == self.ranks.rank]

    def _server_step(
        self, state: RunState, aggregate: Aggregate | None, round: Round, visible: Round
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the server's state and the buffers. `aggregate` is None if no client was sampled."""
        for stage in self.stages:
            aggregate = stage.process_aggregate(aggregate, state.server, round)
        assert aggregate is not None  # a round without clients has a server step only if a stage makes its aggregate
        server = self.contract.step_server(state.server, aggregate, visible)
        check_finite(server, state.server, round.index + 1, round.server_lr)
        buffers = state.buffers
        for stage in self.stages:
            buffers = stage.process_buffers(buffers, aggregate)
        return server, buffers

    def _skip_round(self, state: RunState, round: Round, visible: Round, began: float) -> RunState:
        """Return the state after a round without clients. If no client was available, only the record changes. If
        private sampling chose no client, noise is added all the same, because the server must not learn it."""
        why = "no client was available"
        if self._may_empty:
            why = "no client was sampled; the server's step was noise only"
            state = replace(state, server=self._server_step(state, None, round, visible)[0])
        if self.ranks.first:
            of_clients: dict[str, Any] = {"clients": 0, "samples": 0, "steps": 0, "train_loss": None, "backprops": 0}
            record = self._record(state, round, of_clients | {"excluded": [], "outliers": [], "skipped": why}, 0.0)
            state.history.append(record | {"seconds": time.perf_counter() - began})
        return replace(state, round=round.index + 1)

    def _record(
        self, state: RunState, round: Round, of_clients: Mapping[str, Any], seconds_training: float
    ) -> dict[str, Any]:
        """Return the record of the round that ended in `state`, without measures and its seconds. `seconds_training`
        has no evaluation and measures."""
        lr = None if self.settings.lr is None else round.lr
        record = {"round": round.index + 1, "lr": lr, **of_clients}
        if not isinstance(self.settings.server_lr, float):
            record["server_lr"] = round.server_lr
        is_evaluated = self._evaluates(round.index + 1)
        record |= self._evaluate(state) if is_evaluated else self.evaluator.empty_record()
        record |= self._traffic(round.cohort_size)
        record["seconds_training"] = seconds_training
        for stage in self.stages:
            record |= stage.record(round)
        return record

    def _next(self, t: int) -> list[int]:
        """Return the clients of the round after round t, [] after the last."""
        return self._draw(t + 1) if t + 1 < self.settings.rounds else []

    @cached_property
    def _prefetches(self) -> bool:
        """True if the clients of the next round are known and their states or data can be fetched before it."""
        is_known = isinstance(self.settings.sampler, str) and not self.settings.available
        return is_known and (self.states.prefetches or self.population.clients.prefetches)

    def _final_history(self, state: RunState) -> list[dict[str, Any]]:
        """Return the records of the run. The last one has an evaluation, also if a callback stopped the run between
        evaluations. The log keeps its records, because a resumed run continues from them."""
        history, keys = state.history, self.evaluator.empty_record()
        if not self.ranks.first or not history or any(history[-1].get(key) is not None for key in keys):
            return history
        return [*history[:-1], history[-1] | self._evaluate(state)]

    def _evaluate(self, state: RunState) -> dict[str, Any]:
        self.view.load(state.server["w"], state.buffers)
        metrics = self.evaluator(self.view.module)
        if self.personal is not None:
            metrics |= self.evaluator.own_model_record(self._own_models(state, self.personal))
        if problem := self.view.guard.find_problem(has_fixed_buffers=False):
            raise RuntimeError(f"the evaluation after round {state.round} changed the model: {problem}")
        return metrics

    def client_accuracies(self, state: RunState) -> list[float | None] | None:
        """Return the accuracy of each client at the end of the run, None for a client without one; collective.

        It is None if the run has no accuracies over clients.
        """
        if not self.evaluator.classifies or self.evaluator.mode is None or not state.round:
            return None
        if self.ranks.first and self.evaluator.client_accuracies is None:  # no round was left
            self._evaluate(state)
        values = self.ranks.broadcast(self.evaluator.client_accuracies)
        return None if values is None else list(map(values.get, range(self.evaluator.num_clients)))

    def _own_models(self, state: RunState, personal: ClientModels) -> Iterator[nn.Module]:
        """Yield the model of every client, one after the other in the same module."""
        for i in range(len(self.population.clients)):
            local = state.clients.get(i)
            self.view.load(personal.row(state.server, local), personal.buffers(state.buffers, local))
            yield self.view.module

    def _evaluates(self, num_rounds: int) -> bool:
        """Return True if the model is evaluated after `num_rounds` rounds."""
        return num_rounds % self.settings.eval_every == 0 or num_rounds == self.settings.rounds

    def has_value(self, key: str, num_rounds: int) -> bool:
        """Return True if the record of a round has a value of `key` in a run that was never interrupted. Before a
        resume, the last round of a run with fewer rounds was evaluated too."""
        return key not in self.evaluator.empty_record() or self._evaluates(num_rounds)

    @cached_property
    def _client_bytes(self) -> tuple[float, float]:
        """The bytes that a client of a round receives and sends."""
        extra, nbytes = [stage.traffic(self.view) for stage in self.stages], self.view.nbytes
        down = self.algorithm.download_vectors * nbytes + sum(of_stage[0] for of_stage in extra)
        return down, self.algorithm.upload_vectors * nbytes + sum(of_stage[1] for of_stage in extra)

    def _traffic(self, cohort_size: int) -> dict[str, float]:
        """Return the megabytes (1e6 bytes) that all clients of a round receive and send."""
        down, up = self._client_bytes
        return {"megabytes_down": cohort_size * down / 1e6, "megabytes_up": cohort_size * up / 1e6}
