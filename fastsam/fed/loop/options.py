"""The table of a run's options: the keywords of `fastsam.fed.run`, each declared once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional

from fastsam import backends
from fastsam.fed import executors
from fastsam.fed.aggregation import Aggregation, RobustAggregator, rule_of
from fastsam.fed.aggregation import names as aggregations
from fastsam.fed.aggregation.function import FunctionRule
from fastsam.fed.algorithms.base import Round
from fastsam.fed.clients import sampling
from fastsam.fed.clients.batch_loss import BatchLoss
from fastsam.fed.clients.population import Loss
from fastsam.fed.clients.sampling import Available, Sampler, Weighting, check_available, checked_weighting
from fastsam.fed.common.checks import decay_rate, nearest
from fastsam.fed.common.fingerprints import describe
from fastsam.fed.common.option import check, option, table
from fastsam.fed.executors import LocalOptions
from fastsam.fed.loop import client_state as states
from fastsam.fed.loop import requirements
from fastsam.fed.loop.evaluate import VALIDATION
from fastsam.fed.loop.local_optimizer import Optimizer, OptimizerFacts, facts_of, optimizer_of, split_rate
from fastsam.fed.loop.rates import Rate, check_formula, rate_at
from fastsam.fed.measures import NAMES, Measures, NamedMeasures, measures_by_name
from fastsam.fed.measures.metrics import resolve
from fastsam.fed.privacy.options import Privacy, privacy_of
from fastsam.fed.stages.compression import TopK, compression_of
from fastsam.fed.update.memory_format import FORMATS
from fastsam.fed.update.parameter_layout import ParameterLayout
from fastsam.fed.update.precision import PRECISIONS


@dataclass(frozen=True)
class Settings:
    """The options of `fastsam.fed.run`, without model, clients, algorithm and directories.

    Raises:
        ValueError: a value is out of range, or options do not go together.
    """

    # fmt: off
    rounds: int = option(50, "number of communication rounds", at_least=1, resumable=True)
    local_epochs: int = option(1, "passes over its data that a client makes in a round", at_least=1)
    local_steps: int | None = option(None, "number of local steps of a client in a round, in place of local_epochs",
        at_least=1)
    batch_size: int = option(16, "samples in a local batch; the last batch of an epoch has the rest", at_least=1)
    drop_last: bool = option(False, "leave out the last partial batch of an epoch, unless a client has less than a "
                                    "batch")
    lr: Rate | None = option(None,
        "local learning rate, in round t (from 0) lr * lr_decay**t; or a formula such as 'cosine(0.1, 0.001, 100)', in "
        "Python also a function of t; none: the rate of the optimizer, 0.1 for SGD",
        greater_than=0, formula=check_formula)
    lr_decay: float = option(1.0, "factor on the learning rate after each round, if lr is a number", greater_than=0)
    participation: float = option(0.2, "share of the clients that is sampled in a round, in (0, 1]",
        greater_than=0, at_most=1)
    cohort: int | None = option(None, "number of clients that is sampled in a round, in place of participation",
        at_least=1)
    sampler: str | Sampler | None = option(None,
        "how clients are sampled: 'bernoulli' (each client independently; again if none is), 'fixed' (that share, "
        "without replacement), 'shuffled' (that share, each client once before a client comes again), 'simulator' (the "
        "cohorts of the papers' code), or a callable (round, generator) -> client ids, in a config its import path; "
        "none: 'fixed', unless epsilon depends on it")
    available: str | Available | None = option(None,
        "clients that can be sampled: a function round -> client ids or a mask of all clients, in a config its import "
        "path; a round without clients is skipped")
    weighting: str | Weighting = option("uniform",
        "weights of the clients in the server's mean: 'uniform', 'samples', or integers: a list, or a function of the "
        "client id, in a config its import path")
    aggregation: str | Aggregation = option("mean",
        f"how the clients' uploads are combined: {', '.join(aggregations())}; a rule's number follows a colon "
        "('trimmed_mean:0.1'); in Python also a function of deltas [n, row_size] and weights [n] that returns one row")
    shuffle: bool = option(True, "use a new order of each client's samples in every local epoch; false: stored order")
    momentum: float = option(0.0, "local heavy-ball momentum", at_least=0)
    weight_decay: float = option(0.0, "local weight decay, at the unperturbed weights, not clipped", at_least=0)
    clip_norm: float | None = option(None, "largest norm of a local step's update direction; none: no clipping",
        greater_than=0)
    clip_scope: str = option("full", "what is clipped: the whole step, or the step without the proximal term's linear "
                                     "half",
        choices=("full", "linear"))
    optimizer: str | Optimizer | None = option(None,
        "optimizer of the local steps: a class of torch.optim by name ('AdamW'), 'Lion', or a functools.partial of a "
        "class, in a config its import path; the lr of a partial is the run's lr; none: SGD")
    optimizer_state: str = option("reset", "state of the local optimizer (momentum, moments, counts): new in each "
                                           "round, or kept by the client until its next round",
        choices=("reset", "keep"))
    server_lr: Rate = option(1.0,
        "learning rate of the server, a factor on the mean delta; or a formula such as '1/sqrt(round)', in Python also "
        "a function of t",
        at_least=0, formula=check_formula)
    seed: int = option(0, "random seed of sampling and of batch orders; in a config also of the initial weights")
    loss: str | Loss | BatchLoss = option("cross_entropy",
        "function loss(model(x), y) -> scalar, the mean over a batch: a name in torch.nn.functional, or your function, "
        "in a config its import path; fed.BatchLoss(f) takes f(model, batch)")
    client_test_split: str = option("prior", "test samples of each client: by its class prior, all, or an equal slice",
        choices=VALIDATION)
    eval_every: int = option(1, "rounds between evaluations; the last round is always evaluated", at_least=1)
    measures: Sequence[str] | NamedMeasures | Mapping[str, Any] | Measures = option((),
        f"further measurements: {', '.join(NAMES)}; or a table of names and settings: "
        f"{', '.join(table(NamedMeasures))}; in Python also your own object", resumable=True)
    metrics: Mapping[str, Any] | None = option(None,
        "functions (outputs, labels) -> number on the test set, over all samples and over clients, by name; in a "
        "config their import paths", resumable=True)
    local_parameters: str | Sequence[str] | None = option(None,
        "parameters that stay with the client, by name or module: 'head.*' or a list; client_* numbers are then "
        "of the clients' own models")
    target: float | None = option(
        None, "test accuracy in 0..1 for 'rounds to target'", greater_than=0, at_most=1, resumable=True)
    buffers: str | None = option(None, "buffers that training changes (BatchNorm's): the clients' mean, the initial "
                                       "ones, or each client's own",
        choices=("average", "keep", "local"))
    device: torch.device | str | None = option(None, "'cpu', 'cuda', 'cuda:N'; none: the device of the model")
    backend: str = option("auto", "backend of the kernels; `fastsam info` lists them", choices=backends.NAMES)
    executor: str = option("auto", "how the clients of a round are trained; auto: by a rule on model and device",
        choices=executors.names(), resumable=True)
    precision: str | None = option(None,
        "precision of training and evaluation: float32, tf32 (matrix products on NVIDIA GPUs), or bf16 (autocast; "
        "weights and sums stay float32); none: as torch's flags are",
        choices=PRECISIONS)
    slots: int | None = option(None, "number of clients that train at once; none: chosen by the executor", at_least=1,
        resumable=True)
    memory_format: str = option("auto", "order of 4-d weights in training; auto: by a rule on model and device",
        choices=FORMATS, resumable=True)
    client_state: str = option("auto", "storage of clients' states between rounds; auto: by their size",
        choices=states.CHOICES, resumable=True)
    max_excluded: float = option(1.0, "share of a round's clients that may be excluded before the run stops; 1: all "
                                      "but one",
        at_least=0, at_most=1, resumable=True)
    on_client_error: str = option("raise", "if the model or loss raises for a client: end the run, or exclude the "
                                           "client from the round",
        choices=("raise", "exclude"), resumable=True)
    privacy: Privacy | Mapping[str, Any] | None = option(None,
        "clipping of the clients' deltas and noise on them, a table: " + ", ".join(table(Privacy)))
    compression: TopK | Mapping[str, Any] | None = option(None,
        "send only the largest elements of a delta, with error feedback, a table: " + ", ".join(table(TopK)))
    checkpoint_every: int = option(1, "rounds between checkpoints", at_least=1, resumable=True)
    # fmt: on

    def __post_init__(self) -> None:
        check(self)
        names = [self.local_parameters] if isinstance(self.local_parameters, str) else self.local_parameters
        if names is not None and not (
            isinstance(names, list) and names and all(n and isinstance(n, str) for n in names)
        ):
            raise ValueError(
                "local_parameters must be a parameter's name or a pattern such as 'head.*', or a list of them; got "
                f"{names!r}"
            )
        self.name_sampler()
        self.set_rate(optimizer_of(self.optimizer))
        sampling.make(sampling.DEFAULT if self.sampler is None else self.sampler, 1, self.participation)
        check_available(self.available, self.sampler)
        object.__setattr__(self, "weighting", checked_weighting(self.weighting))
        object.__setattr__(self, "privacy", privacy_of(self.privacy))
        object.__setattr__(self, "compression", compression_of(self.compression))
        object.__setattr__(self, "measures", measures_by_name(self.measures) or self.measures)
        resolve(self.metrics)
        requirements.check(requirements.Facts(self))
        self._check_rates()
        object.__setattr__(self, "loss", _function(self.loss))

    @cached_property
    def local(self) -> LocalOptions:
        """The options of local work."""
        return LocalOptions(**{f.name: getattr(self, f.name) for f in fields(LocalOptions)})

    @property
    def rule(self) -> RobustAggregator | None:
        """The robust rule in place of the mean; None for the mean."""
        return rule_of(self.aggregation)

    @property
    def aggregation_name(self) -> str:
        """The name of the rule or function in place of the mean, or "mean"."""
        return self.aggregation if isinstance(self.aggregation, str) else FunctionRule(self.aggregation).name

    def name_sampler(self) -> None:
        """Put the name of the default sampler in place of None, unless epsilon depends on it: then the user chooses."""
        if self.sampler is None and (self.participation == 1 or not privacy_of(self.privacy).has_epsilon):
            object.__setattr__(self, "sampler", sampling.DEFAULT)

    def set_rate(self, optimizer: Optimizer | None) -> None:
        """Put the rate of `optimizer` in place of None. The optimizer gets it with every client."""
        lr, optimizer = split_rate(self.lr, optimizer)
        object.__setattr__(self, "lr", lr)
        object.__setattr__(self, "optimizer", optimizer)

    @cached_property
    def optimizer_facts(self) -> OptimizerFacts:
        """Facts about the local optimizer that algorithms compute with."""
        if self.optimizer is None:
            return OptimizerFacts(self.momentum)
        assert callable(self.optimizer)  # a name is a class by now
        return facts_of(self.optimizer)

    def share_of(self, clients: int) -> float:
        """Return the share of `clients` clients that is active in a round, in (0, 1]."""
        return self.participation if self.cohort is None else min(1.0, self.cohort / clients)

    def lr_of(self, index: int) -> float:
        """Return the local learning rate of round `index` (from 0). It is NaN if the optimizer takes none."""
        if isinstance(self.lr, float):
            return self.lr * self.lr_decay**index
        if self.lr is None:
            return math.nan
        return rate_at("lr", self.lr, index, {}, greater_than=0)

    def server_lr_of(self, index: int) -> float:
        """Return the server's learning rate of round `index` (from 0)."""
        if isinstance(self.server_lr, float):
            return self.server_lr
        variables = {"lr": self.lr_of(index), "first_lr": self.lr_of(0)}
        return rate_at("server_lr", self.server_lr, index, variables, at_least=0)

    def rates_of(self, index: int) -> dict[str, float | None]:
        """Return the rates of round `index` (from 0) as in records: None if the optimizer takes no rate."""
        return {"lr": None if self.lr is None else self.lr_of(index), "server_lr": self.server_lr_of(index)}

    def round(self, index: int, num_clients: int, cohort_size: int, layout: ParameterLayout) -> Round:
        """Return round `index` (from 0) as algorithms see it."""
        facts = self.optimizer_facts
        return Round(
            index, self.lr_of(index), self.local_epochs, num_clients, cohort_size, self.server_lr_of(index),
            self.lr_of(0), layout, facts.momentum, self.seed, facts.dampening, facts.nesterov,
        )  # fmt: skip

    def _check_rates(self) -> None:
        """Raise ValueError for a rate without a value in some round, or out of range."""
        steady = isinstance(self.lr, (float, type(None))) and isinstance(self.server_lr, float)
        if isinstance(self.lr, float):  # it changes most in the last round
            decay_rate("lr", self.lr, "lr_decay", self.lr_decay, self.rounds - 1)
        for index in (self.rounds - 1,) if steady else range(self.rounds):
            self.lr_of(index)
            self.server_lr_of(index)

    def identity(self) -> dict[str, Any]:
        """Return the options that must be the same when a run is resumed."""
        plain = {name: describe(getattr(self, name)) for name in table(Settings) if name not in {*RESUMABLE, "privacy"}}
        return plain | {f"privacy.{name}": value for name, value in asdict(privacy_of(self.privacy)).items()}

    def call_options(self) -> dict[str, Any]:
        """Return the options that may change when a run is resumed, but must be the same on all ranks."""
        return {name: getattr(self, name) for name in ("rounds", "checkpoint_every", "max_excluded", "on_client_error")}


# Options that may change when a run is resumed: the bits do not depend on them, or the identity has their effect.
RESUMABLE = frozenset(name for name, row in table(Settings).items() if row.resumable)


def _function(loss: str | Loss | BatchLoss) -> Loss | BatchLoss:
    """Return the loss of that name, or `loss` itself. The trial step refuses what cannot be a loss."""
    if not isinstance(loss, str):
        return loss
    functions = {name: f for name, f in vars(functional).items() if callable(f) and not name.startswith("_")}
    if loss not in functions:
        raise ValueError(
            "loss must be the name of a function of torch.nn.functional (e.g. 'cross_entropy') or a function "
            f"loss(model(x), y) (in a config its import path), got {loss!r}{nearest(loss, functions)}"
        )
    return functions[loss]
