"""The named measures of a run: a thin layer between the loop and the functions of this package."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastsam.arena import Layout
from fastsam.fed.algorithms.base import Aggregate, Round, State
from fastsam.fed.clients.labels import accuracy_of, verdicts
from fastsam.fed.clients.loss_kind import LossKind, kind_of
from fastsam.fed.clients.pairs import Pair
from fastsam.fed.clients.population import Loss, Population
from fastsam.fed.clients.samples import IGNORED
from fastsam.fed.measures import diagnostics, drift, sharpness
from fastsam.fed.measures.objective import Objective, subset, unit
from fastsam.fed.measures.options import NAMES, Measures, NamedMeasures
from fastsam.fed.measures.own import OwnMeasures
from fastsam.fed.sums.fixed_point import FixedPointSum
from fastsam.fed.sums.ranks import Ranks
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.results import ClientResults, Snapshot

ALONG_THE_PATH = frozenset({"perturbation_drift", "smoothness", "drifts"})
WITHOUT_DATA = frozenset({"consistency", "drifts", "dual_gap"})
_OF_CLIENTS = ALONG_THE_PATH | {"consistency", "dual_gap"}


@dataclass(frozen=True)
class _End:
    """The result of a client: displacement from the global model and last eps `[row_size]`, number of steps, and copies
    of its row."""

    displacement: Tensor
    num_steps: int
    eps: Tensor | None
    snapshots: Mapping[int, Snapshot]


@dataclass
class _RoundResults:
    """The results of the clients of one round, by client."""

    clients: int = 0
    results: dict[int, _End] = field(default_factory=dict)
    total: FixedPointSum | None = None


class _MeasuredRound(NamedTuple):
    """The server's state before a round and its weights after it, the sums of the clients, and the round."""

    old_state: State
    w: Tensor
    aggregate: Aggregate
    context: Round

    @property
    def old_w(self) -> Tensor:
        return self.old_state["w"]


class RoundMeasures:
    """The measures of a run that are chosen by name (see `NAMES`), as the loop calls them.

    While a round lasts, measures along the path keep three snapshots and the displacement of every client. Other
    measures keep only the sum of the displacements. The loss is computed on a replica, in eval mode, without
    augmentation.
    """

    def __init__(
        self, options: NamedMeasures, model: nn.Module, layout: Layout, population: Population, loss: Loss,
        *, batch_size: int, rounds: int, seed: int, classifies: bool, kind: LossKind | None = None,
    ) -> None:  # fmt: skip
        """Make the measures. `kind` is the kind of the loss. Raises ValueError for a measure of
        classes if labels are not classes."""
        names = options.names
        if "margin" in names and not classifies:
            raise ValueError("the measure 'margin' needs class labels; this task has none")
        self.names, self.options, self.rounds, self.batch_size = names, options, rounds, batch_size
        kind = kind_of(loss) if kind is None else kind
        self.classifies, self.loss, self.kind = classifies, loss, kind
        if population.batch_reason and (readers := [name for name in names if name not in WITHOUT_DATA]):
            raise ValueError(
                f"the measures {', '.join(readers)} read the loss over pairs of tensors, and "
                f"{population.batch_reason}. Use metrics=, or an object with your measures"
            )
        self.replica = Replica.new(model, layout, population.device)
        self.pairs = [] if population.batch_reason else subset(population.clients.pairs, options.samples, seed)
        self._round = -1
        self._results = _RoundResults()

    @cached_property
    def sample_mean(self) -> Objective:
        """The mean loss over all samples."""
        return self._objective(self.pairs)

    @cached_property
    def fair(self) -> Objective:
        """The mean of the clients' mean losses."""
        return Objective.mean_of(self.replica, self.loss, self.pairs, kind=self.kind)

    def _objective(self, pairs: Sequence[Pair]) -> Objective:
        """Return the mean loss over the samples of `pairs`."""
        return Objective.sample_mean(self.replica, self.loss, pairs, kind=self.kind)

    # --- what the loop calls ---

    def snapshots(self, round: int, steps: int) -> tuple[int, ...]:
        """Return the first, the middle and the last local step if a measure along the path is taken in this round."""
        path_measures = ALONG_THE_PATH & set(self.names)
        return tuple(sorted(set(kept_steps(steps)))) if path_measures and self._is_measured(round) else ()

    def clients(self, old_state: State, results: ClientResults, context: Round) -> dict[str, list[float]]:
        """Return the squared norms of the displacements, and keep the results that later methods need."""
        if not self._is_measured(context.index):
            return {}
        if context.index != self._round:
            self._round, self._results = context.index, _RoundResults()
        rows = _displacements(results, old_state["w"])
        squares = [float(row.double().square().sum()) for row in rows]
        for i, square in enumerate(squares):
            if math.isfinite(square):  # the loop will exclude the others
                self._keep(results, i, rows[i], context)
        return {"squared displacement": squares}

    def _keep(self, results: ClientResults, i: int, row: Tensor, context: Round) -> None:
        """Keep the result of the i-th client, whose displacement is `row`."""
        self._results.clients += 1
        if "consistency" in self.names:
            total = self._results.total = self._results.total or FixedPointSum(row, context.cohort_size)
            if total.problem(row, 1.0) is None:
                total.add_(row, 1.0)
        snapshots = results.snapshots[i] if results.snapshots else {}
        last = results.outputs.get("eps")
        if snapshots or last is not None:
            eps = None if last is None else last[i].clone()
            self._results.results[results.client_ids[i]] = _End(row.clone(), results.num_steps[i], eps, snapshots)

    def join(self, ranks: Ranks, context: Round) -> None:
        """Collect the results of the clients of all ranks; collective."""
        # A rank may have had no client.
        results_of_rank = self._results if self._round == context.index else _RoundResults()
        limbs = None if results_of_rank.total is None else results_of_rank.total.limbs()
        buffer = io.BytesIO()
        torch.save((results_of_rank.clients, results_of_rank.results, limbs), buffer)
        all_results = self._results = _RoundResults()
        for part in ranks.gather(buffer.getvalue()):
            clients, results, limbs = torch.load(
                io.BytesIO(part), map_location=self.replica.row.device, weights_only=False
            )
            all_results.clients += clients
            all_results.results |= results
            if limbs is not None:
                total = all_results.total = all_results.total or FixedPointSum(limbs[0], context.cohort_size)
                total.add_limbs(*limbs)
        self._round = context.index

    def round(
        self, old_state: State, new_state: State, aggregate: Aggregate, context: Round
    ) -> dict[str, float | None]:
        """Return the keys of `NAMES` for the named measures, None for a measure without a value in this round."""
        record: dict[str, float | None] = {key: None for name in self.names for key in NAMES[name]}
        if not self._is_measured(context.index):
            return record
        # A client that was excluded for its upload would count here. Measures of the clients then have no value.
        is_complete = self._results.clients == aggregate.num_clients
        measured_round = _MeasuredRound(old_state, new_state["w"], aggregate, context)
        for name in self.names if is_complete else [n for n in self.names if n not in _OF_CLIENTS]:
            record |= getattr(self, f"_{name}")(measured_round)
        self._results = _RoundResults()
        return record

    def _is_measured(self, round: int) -> bool:
        return (round + 1) % self.options.every == 0 or round + 1 == self.rounds

    # --- one measure each ---

    def _train(self, round: _MeasuredRound) -> dict[str, float | None]:
        record: dict[str, float | None] = {"train_set_loss": self.sample_mean.value(round.w)}
        if self.classifies:
            record["train_set_accuracy"] = accuracy(self.replica, self.pairs, round.w, self.kind.unlabelled)
        return record

    def _sharpness(self, round: _MeasuredRound) -> dict[str, float]:
        return {"sharpness": sharpness.one_step(self.sample_mean, round.w, self.options.rho)}

    def _sharpness_ascent(self, round: _MeasuredRound) -> dict[str, float]:
        return {"sharpness_ascent": sharpness.ascent(self.sample_mean, round.w, self.options.rho, self.options.steps)}

    def _consistency(self, round: _MeasuredRound) -> dict[str, float]:
        assert self._results.total is not None  # a round without a client has raised before
        change = round.w.double() - round.old_w.double()
        squares = round.aggregate.scalar("squared displacement")
        return {
            "consistency": drift.consistency(squares, self._results.total.value(), change, round.aggregate.num_clients)
        }

    def _perturbation_drift(self, round: _MeasuredRound) -> dict[str, float]:
        weights, perturbations = self._rows()
        if not perturbations:
            return {}
        gradient = self.fair.gradient
        return {
            "perturbation_drift": drift.perturbation_drift(
                weights, perturbations, round.old_w, gradient, round.context.server_lr
            )
        }

    def _drifts(self, round: _MeasuredRound) -> dict[str, float]:
        weights, perturbations = self._rows()
        record = {"e_w": drift.weight_drift(weights, round.old_w)} if weights else {}
        return record | ({"e_delta": drift.perturbation_spread(perturbations)} if perturbations else {})

    def _smoothness(self, round: _MeasuredRound) -> dict[str, float]:
        w, paths = round.old_w, []
        for client, end in sorted(self._results.results.items()):
            objective = self._objective([self.pairs[client]])
            path = [end.snapshots[k].w for k in sorted(end.snapshots)] + [w + end.displacement]
            paths.append(diagnostics.path_smoothness(objective, path))
        return {
            "smoothness_global": diagnostics.path_smoothness(self.sample_mean, [w, round.w]),
            "smoothness_clients": max(paths, default=0.0),
            "hessian_norm": diagnostics.hessian_norm(self.sample_mean, round.w, self.options.iterations),
        }

    def _variances(self, round: _MeasuredRound) -> dict[str, float]:
        w, local, clients = round.w, [], []
        for x, y in self.pairs:
            parts = zip(x.split(self.batch_size), y.split(self.batch_size), strict=True)
            batches = [batch for batch in (self._objective([part]) for part in parts) if batch.batches]
            if not batches:
                continue  # no sample of the client has a label
            clients.append(self._objective([(x, y)]))
            local.append(diagnostics.sigma_local(clients[-1], batches, w))
        mean_square = sum(s**2 for s in local) / max(len(local), 1)
        return {"sigma_l": mean_square**0.5, "sigma_g": diagnostics.sigma_global(clients, w)}

    def _estimation_bias(self, round: _MeasuredRound) -> dict[str, float]:
        gradient = self.fair.gradient(round.w)
        return {"estimation_bias": diagnostics.estimation_bias(round.old_w, round.w, gradient)}

    def _margin(self, round: _MeasuredRound) -> dict[str, float]:
        w, margin, unlabelled = round.w, self.options.margin, self.kind.unlabelled
        neighbour = w.double() + self.options.rho * unit(self.fair.gradient(w))
        return {
            "margin_risk": diagnostics.margin_risk(self.replica, self.pairs, w, margin, unlabelled),
            "margin_risk_perturbed": diagnostics.margin_risk(self.replica, self.pairs, neighbour, margin, unlabelled),
            "spectral_complexity": diagnostics.spectral_complexity(self.replica.layout, w),
        }

    def _dual_gap(self, round: _MeasuredRound) -> dict[str, float]:
        last = [end.eps for _, end in sorted(self._results.results.items()) if end.eps is not None]
        return {"dual_gap": diagnostics.dual_gap(last, round.old_state["s"])} if last and "s" in round.old_state else {}

    def _rows(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return weights and perturbations by client at the first, middle and last step; none without snapshots."""
        weights: list[list[Tensor]] = []
        perturbations: list[list[Tensor]] = []
        for _, end in sorted(self._results.results.items()):
            if not end.snapshots:
                continue
            snapshots = [end.snapshots[k] for k in kept_steps(end.num_steps)]
            weights.append([s.w for s in snapshots])
            if all(s.eps is not None for s in snapshots):
                perturbations.append([s.eps for s in snapshots if s.eps is not None])
        return weights, perturbations


def make(measures: Any, buffers: str | None, **parts: Any) -> Measures | None:
    """Return the measures of a run, or None. `parts` are keywords of `RoundMeasures`.

    Raises:
        ValueError: the object lacks a method, or the run averages buffers, which the measures would not see.
    """
    if not isinstance(measures, NamedMeasures):
        absent = [name for name in ("snapshots", "clients", "round") if not callable(getattr(measures, name, None))]
        if absent:
            raise ValueError(
                f"measures must be a list of names ({', '.join(NAMES)}) or an object with the methods of "
                f"fastsam.fed.measures.Measures, got {type(measures).__name__} without {', '.join(absent)}"
            )
        return OwnMeasures(measures)
    if measures.names and buffers in ("average", "local"):
        raise ValueError(
            f"measures use the initial buffers of the model, and buffers={buffers!r} changes them. Use "
            f"buffers='keep' or GroupNorm"
        )
    return RoundMeasures(measures, **parts) if measures.names else None


def _displacements(results: ClientResults, w: Tensor) -> Tensor:
    """Return the final weights of the clients minus the global model `w`, `[n, row_size]`. A client may start elsewhere
    than at `w`, with its local parameters, for example."""
    if results.start is None:
        return results.delta
    return results.delta.double() + (results.start.double() - w.double())


def kept_steps(steps: int) -> tuple[int, int, int]:
    """Return the first, the middle and the last of `steps` local steps, from 0; some may coincide."""
    return 0, (steps - 1) // 2, steps - 1


@torch.no_grad()
def accuracy(
    replica: Replica, pairs: Sequence[Pair], w: Tensor, unlabelled: int = IGNORED, batch: int = 512
) -> float | None:
    """Return the share of the labelled samples of `pairs` that the replica with the weights w classifies right, or None
    if no sample has a label. `unlabelled` is the label of the others."""
    replica.row.copy_(w)
    replica.module.eval()
    judged = [
        verdicts(replica.module(a), b, unlabelled)
        for x, y in pairs
        for a, b in zip(x.split(batch), y.split(batch), strict=True)
    ]
    return accuracy_of(torch.cat(judged))
