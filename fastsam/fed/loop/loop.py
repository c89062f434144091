"""The federated loop: sample -> constants -> train -> client_end -> server -> evaluate -> log -> checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round
from fastsam.fed.clients import sampling
from fastsam.fed.clients.population import Population
from fastsam.fed.executors import Choice
from fastsam.fed.loop import row_contract
from fastsam.fed.loop.client_state import ClientStates
from fastsam.fed.loop.contract import asked, check_finite, check_server, numbers
from fastsam.fed.loop.evaluate import Evaluator
from fastsam.fed.loop.listeners import Listeners
from fastsam.fed.loop.options import Settings
from fastsam.fed.loop.outliers import warn
from fastsam.fed.loop.padding import check_padding
from fastsam.fed.loop.personal import ClientModels
from fastsam.fed.loop.round import BUFFERS, Cohort
from fastsam.fed.measures import NAMES
from fastsam.fed.measures.base import Measures
from fastsam.fed.privacy.mechanism import Privacy
from fastsam.fed.rundir.checkpoint import RunDirectory, RunState
from fastsam.fed.step.model_copy import Replica, move_buffers
from fastsam.fed.step.parameter_layout import ParameterLayout
from fastsam.fed.sums.all_reduce import Exchange
from fastsam.fed.sums.ranks import Ranks

_KEYS = (  # of a record, apart from those of evaluations and measures
    *("round", "lr", "server_lr", "clients", "samples", "steps", "train_loss", "megabytes_down", "megabytes_up"),
    *("backprops", "seconds_training", "seconds", "clip_update", "epsilon", "delta"),
)


@dataclass(frozen=True)
class Loop:
    """What a run is made of, and its rounds. It knows neither what an algorithm does nor how an executor trains.

    view: the replica on which the global model is evaluated. states: the store of the clients' states. layout: what a
    row holds.
    weights: of all clients, where the user names them. personal: where the clients have models of their own. privacy:
    the noise.
    """

    population: Population
    algorithm: Algorithm
    settings: Settings
    chosen: Choice
    evaluator: Evaluator
    view: Replica
    states: ClientStates
    measures: Measures | None
    ranks: Ranks
    layout: ParameterLayout
    weights: Sequence[int] | None = None
    personal: ClientModels | None = None
    privacy: Privacy | None = None

    def run(self, state: RunState, directory: RunDirectory | None, listeners: Listeners) -> RunState:
        """The rounds that are left after `state`. Whatever ends it early (Ctrl-C too), the directory then holds the
        last completed round.

        A round makes the next state in one assignment: whoever leaves in the middle of a round leaves a whole one
        behind. Until the end only rank 0 has the records.
        """
        exchange, settings = Exchange(self.ranks), self.settings
        try:
            while state.round < settings.rounds and listeners.stopped is None:
                state = self._round(state, exchange)
                if directory is not None:
                    if self.ranks.first:
                        directory.log(state.history[-1])
                    if state.round % settings.checkpoint_every == 0 or state.round == settings.rounds:
                        directory.save(state)
                listeners.round(state, self._evaluates(state.round))
            if directory is not None and directory.saved_round < state.round:  # it was stopped
                directory.save(state)
            return replace(state, history=self.ranks.share(state.history))
        except BaseException:
            if directory is not None:
                directory.rescue(state)
            raise

    def nbytes(self, state: RunState) -> int:
        """Bytes of what the server and the clients keep, on all ranks; collective."""
        clients = self.ranks.gather(replace(state, server={}).nbytes)
        return replace(state, clients={}).nbytes + sum(clients)

    def record_keys(self) -> list[str] | None:
        """Return the names of the numbers that a record may have, or None if measures of the user's add to them."""
        if self.measures is not None and not type(self.measures).__module__.startswith("fastsam."):
            return None
        measured = [] if self.measures is None else [key for keys in NAMES.values() for key in keys]
        return [*_KEYS, *self.evaluator.nothing(), *measured]

    @cached_property
    def sampler(self) -> sampling.Sampler:
        """Who takes part in a round."""
        settings = self.settings
        clients = len(self.population.sizes)
        return sampling.make(settings.sampler, clients, settings.share_of(clients), not self._poisson)

    @cached_property
    def _poisson(self) -> bool:
        return self.privacy is not None and self.privacy.poisson

    def _round(self, state: RunState, exchange: Exchange) -> RunState:
        began = time.perf_counter()
        settings, clients, t = self.settings, len(self.population.sizes), state.round
        before = row_contract.attributes(self.algorithm) if t == 0 else None
        active = self._cohort(t)
        if callable(settings.sampler) or settings.available:  # they may draw what they like; the ranks need one cohort
            active = self.ranks.cohort(active, clients, state.server["w"])
        about = Round(
            t,
            settings.lr_of(t),
            settings.local_epochs,
            clients,
            len(active),
            settings.server_lr_of(t),
            settings.lr_of(0),
            self.layout,
            settings.momentum,
            settings.seed,
        )
        if not active:
            return self._skipped(state, about, began)
        mine = active
        if self.ranks.size > 1:
            dealt = self.ranks.deal(active, {i: self.population.sizes[i] for i in active}, state.homes)
            state = replace(state, clients=self.ranks.move_states(state.clients, dealt, state.homes, self.states.adopt))
            mine = [i for i in active if dealt[i] == self.ranks.rank]
        cohort = Cohort(
            self.algorithm,
            self.population,
            settings,
            state,
            about,
            active,
            self.states,
            exchange,
            self.measures,
            mine,
            self.weights,
            self.privacy,
        )
        executor = self.chosen.executor
        tasks = cohort.tasks(executor, self._next(t))
        for ends in executor.train(state.server["w"], state.buffers, tasks):
            cohort.close(ends)
        cohort.join()
        cohort.check()
        server = self._stepped(state, cohort, about)
        if t == 0:
            check_padding({"w": server["w"]}, self.layout, "the state that step_server returns")
            row_contract.warn_changed(self.algorithm, before or {})
        check_finite(server, state.server, t + 1, about.server_lr)
        cohort.lent.check()
        trained = time.perf_counter() - began
        buffers = state.buffers
        if settings.buffers == "average" and buffers:
            buffers = move_buffers(buffers, cohort.server_aggregate.mean(BUFFERS))
        if self.ranks.first:
            record = self._record(cohort, server, buffers, trained)
            warn(record["outliers"], state.history, settings.aggregation)
            state.history.append(record | {"seconds": time.perf_counter() - began})
        self.states.commit()
        return RunState(t + 1, server, buffers, cohort.clients, state.history, cohort.homes)

    def _stepped(self, state: RunState, cohort: Cohort | None, about: Round) -> dict[str, Tensor]:
        """The server's state after its step. cohort: None where nobody was sampled, and the step is of noise alone."""
        t, privacy = about.index, self.privacy
        if privacy is None or not privacy.at_server:
            assert cohort is not None
            aggregate: Aggregate = cohort.server_aggregate
        else:
            plain = None if cohort is None else cohort.aggregate
            aggregate = privacy.aggregate(plain, t, state.server, about.cohort_size)
            about = privacy.told(about) if cohort is None else cohort.told
        server = asked(self.algorithm, "step_server", (state.server, aggregate, about), t)
        server = check_server(server, state.server["w"], "step_server")
        return server

    def _cohort(self, t: int) -> list[int]:
        """Who takes part in round t, as this rank draws it."""
        settings, clients = self.settings, len(self.population.sizes)
        if settings.available is None:
            return sampling.draw(self.sampler, t, clients, settings.seed, self._poisson)
        assert isinstance(settings.sampler, str) and callable(settings.available)  # the options have been checked
        return sampling.draw_present(settings.sampler, settings.share_of, settings.available, t, clients, settings.seed)

    def _skipped(self, state: RunState, about: Round, began: float) -> RunState:
        """Return the state after a round without clients. If no client was available, only the record changes. If
        private sampling chose no client, noise is added all the same, because the server must not learn it."""
        before, why = state.server, "nobody was available"
        if self._poisson:
            why = "nobody was sampled, and the server's step was of noise alone"
            state = replace(state, server=self._stepped(state, None, about))
            check_finite(state.server, before, about.index + 1, about.server_lr)
        if self.ranks.first:
            record: dict[str, Any] = {"round": about.index + 1, "lr": about.lr, "clients": 0, "samples": 0, "steps": 0}
            record |= {"train_loss": None} | self._evaluate(state, about.index + 1)
            record |= self._traffic(0) | {"backprops": 0, "excluded": [], "outliers": [], "seconds_training": 0.0}
            record |= {"skipped": why} | self._private(about.index)
            state.history.append(record | {"seconds": time.perf_counter() - began})
        return replace(state, round=about.index + 1)

    def _record(
        self, cohort: Cohort, server: dict[str, Tensor], buffers: list[Tensor], trained: float
    ) -> dict[str, Any]:
        """What a round's line says, all but its seconds. trained: those without what is done here."""
        about = cohort.about
        record: dict[str, Any] = {"round": about.index + 1, "lr": about.lr, **cohort.record()}
        if not isinstance(self.settings.server_lr, float):
            record["server_lr"] = about.server_lr
        after = RunState(about.index + 1, server, buffers, cohort.clients)
        record |= self._evaluate(after, about.index + 1) | self._traffic(about.cohort_size)
        own = {
            "backprops": cohort.backward_passes,
            "excluded": cohort.excluded_list(),
            "outliers": cohort.outlier_list(),
            "seconds_training": trained,
        } | self._private(about.index)
        if self.measures is not None:
            about = replace(about, layout=about.layout.with_buffers(buffers))
            found = self.measures.round(cohort.before.server, server, cohort.server_aggregate, about)
            record |= numbers(found, "round()", {*record, *own, "seconds"})
        return record | own

    def _private(self, t: int) -> dict[str, Any]:
        """Return what the record of round t says of its noise."""
        return {} if self.privacy is None else self.privacy.record(t)

    def _next(self, t: int) -> list[int]:
        """Who takes part in the round after round t, where that is worth to know and can be known: a callable is asked
        once a round."""
        settings = self.settings
        looks = self.states.looks_ahead or self.population.looks_ahead
        if not looks or callable(settings.sampler) or settings.available or t + 1 >= settings.rounds:
            return []
        return sampling.draw(self.sampler, t + 1, len(self.population.sizes), settings.seed, self._poisson)

    def _evaluate(self, state: RunState, completed: int) -> dict[str, Any]:
        if not self._evaluates(completed):
            return self.evaluator.nothing()
        self.view.load_(state.server["w"], state.buffers)
        found = self.evaluator(self.view.module)
        return found if self.personal is None else found | self.evaluator.of_own(self._own_models(state, self.personal))

    def _own_models(self, state: RunState, personal: ClientModels) -> Iterator[nn.Module]:
        """The model of every client, one after the other in the same module."""
        for i in range(len(self.population.sizes)):
            own = state.clients.get(i)
            self.view.load_(personal.row(state.server, own), personal.buffers(state.buffers, own))
            yield self.view.module

    def _evaluates(self, completed: int) -> bool:
        """Whether the model is evaluated when so many rounds are completed."""
        return completed % self.settings.eval_every == 0 or completed == self.settings.rounds

    def _traffic(self, active: int) -> dict[str, float]:
        """Megabytes (1e6 bytes) of all active clients: what the algorithm declares, and the buffers where they are
        averaged."""
        buffers = sum(b.nbytes for b in self.view.buffers) if self.settings.buffers == "average" else 0
        ways = {"down": self.algorithm.download_vectors, "up": self.algorithm.upload_vectors}
        return {f"megabytes_{way}": active * (n * self.view.nbytes + buffers) / 1e6 for way, n in ways.items()}
