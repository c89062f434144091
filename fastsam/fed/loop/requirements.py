"""Combinations of options that a run refuses, in a table of needs, contradictions and remedies.

`check` compares the rows of `REQUIREMENTS` with the facts of a run. It is called when the options are known, when the
algorithm and the clients are known, and after the trial of the algorithm. A row whose facts are not known yet is passed
over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastsam.fed.algorithms import registry
from fastsam.fed.algorithms.base import Algorithm, LocalUpdate
from fastsam.fed.executors.torch_updates import SERVED

ACCOUNTED = ("bernoulli", "fixed", "shuffled")  # samplers whose law dp-accounting knows
FEWEST = 3  # least clients of a round with a majority against one client


@dataclass(frozen=True)
class Facts:
    """A run, as far as it is known.

    Args:
        settings: the options (`fastsam.fed.loop.options.Settings`).
        algorithm: the algorithm of the user, not yet wrapped.
        ranks: number of processes.
        cohort_size: the largest likely number of clients in a round.
        changed_buffers: buffers that training changes.
        own_parameters: patterns of parameters that the algorithm keeps with the clients.
        sized: the numbers of samples of all clients are known.
        measured: the run has measures.
        path_measures: names of the measures that follow a client's local steps.
        update: constants of a first client.
        has_phases: the algorithm's loop is more than one path of steps over the run's batches.
    """

    settings: Any
    algorithm: Any = None
    ranks: int = 1
    cohort_size: int | None = None
    changed_buffers: Sequence[str] = ()
    own_parameters: Sequence[str] = ()
    sized: bool = True
    measured: bool = False
    path_measures: Sequence[str] = ()
    update: LocalUpdate | None = None
    has_phases: bool = False

    @property
    def name(self) -> str:
        """Name of the algorithm's class."""
        return type(self.algorithm).__name__

    def is_(self, flag: str) -> bool:
        """Return a flag of the algorithm, False if it is unknown or does not have it."""
        return bool(getattr(self.algorithm, flag, False))


class Requirement(NamedTuple):
    """An option that needs something.

    Args:
        asked: function that returns the name of the option for messages, or None if it is not used.
        needs: text of the need.
        lacks: function that returns the contradiction in the run, or None if nothing is wrong.
        remedy: text of the remedy, or a function that returns it.
    """

    asked: Callable[[Facts], str | None]
    needs: str
    lacks: Callable[[Facts], str | None]
    remedy: str | Callable[[], str]


def check(facts: Facts) -> None:
    """Raises ValueError for the first requirement that the run does not meet."""
    for row in REQUIREMENTS:
        asked = row.asked(facts)
        lack = None if asked is None else row.lacks(facts)
        if asked is not None and lack is not None:
            raise ValueError(_message(asked, row, lack))


def _message(asked: str, row: Requirement, lack: str) -> str:
    remedy = row.remedy if isinstance(row.remedy, str) else row.remedy()
    return f"{asked} needs {row.needs}, but {lack}. {remedy}"


# --- options, as messages name them ---


def _value(name: str, default: object) -> Callable[[Facts], str | None]:
    """Return a function that names an option if it has another value than `default`."""

    def asked(facts: Facts) -> str | None:
        value = getattr(facts.settings, name)
        return None if value == default else f"{name}={value!r}"

    return asked


def _noise(facts: Facts) -> str | None:
    z = facts.settings.privacy.noise_multiplier
    return f"noise_multiplier={z:g}" if z > 0 else None


def _central_noise(facts: Facts) -> str | None:
    return "noise='central'" if _noise(facts) and facts.settings.privacy.noise == "central" else None


def _optimizer(facts: Facts) -> str | None:
    return None if facts.settings.optimizer is None else "optimizer"


def _sgd_options(facts: Facts) -> str:
    used = {"momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
    values = {name: getattr(facts.settings, name) for name in used}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value != used[name])


def _accountant(facts: Facts) -> str | None:
    accountant = facts.settings.privacy.accountant
    return f"accountant={accountant!r}" if _noise(facts) and accountant is not None else None


def _rule(facts: Facts) -> str | None:
    return None if facts.settings.rule is None else f"aggregation={facts.settings.rule.name!r}"


def _unweighted_rule(facts: Facts) -> str | None:
    rule = facts.settings.rule
    return None if rule is None or rule.supports_weights else f"aggregation={rule.name!r}"


def _function_rule(facts: Facts) -> str | None:
    rule = facts.settings.rule
    return f"aggregation={rule.name!r}" if rule is not None and rule.only_deltas else None


def _compression(facts: Facts) -> str | None:
    options = facts.settings.compression
    return None if options is None else f"compression=TopK(share={options.share:g})"


def _plain_upload(algorithm: object) -> bool:
    return type(algorithm).finish_client is Algorithm.finish_client  # type: ignore[attr-defined]


def _local_parts(facts: Facts) -> str | None:
    """Return what stays with the clients, if not whole models."""
    if facts.settings.local_parameters is not None:
        return f"local_parameters={facts.settings.local_parameters!r}"
    if facts.own_parameters:
        return f"{facts.name}, whose parameters stay with the clients,"
    return "buffers='local'" if facts.settings.buffers == "local" else None


def _client_models(facts: Facts) -> str | None:
    return facts.name if facts.is_("own_models") else _local_parts(facts)


# --- what a run lacks ---


def _pools_data(facts: Facts) -> str | None:
    return f"{facts.name} has none" if facts.is_("pools_data") else None


def _unlike_weights(facts: Facts) -> str | None:
    weighting = facts.settings.weighting
    return None if weighting == "uniform" else f"weighting={weighting!r} makes some of them count more"


def _processes(facts: Facts) -> str | None:
    return f"the run has {facts.ranks}" if facts.ranks > 1 else None


def _unknown_law(facts: Facts) -> str | None:
    settings = facts.settings
    if not isinstance(settings.sampler, str):
        return "there is none for a sampler of your own"
    if settings.sampler not in ACCOUNTED:
        return f"there is none for sampler={settings.sampler!r}"
    return "there is none for available=..." if settings.available is not None else None


def _more_than_delta(facts: Facts) -> str | None:
    """Return why the server learns more of a client than its clipped delta."""
    algorithm, kind = facts.algorithm, type(facts.algorithm)
    if algorithm is None or only_deltas(algorithm):
        return None
    if facts.is_("pools_data"):
        return f"{facts.name} has no clients"
    if getattr(kind, "finish_client", None) is not Algorithm.finish_client:
        return f"the clients of {facts.name} send or keep more"
    return f"the clients of {facts.name} keep something, which depends on the rounds in which they took part"


def only_deltas(algorithm: object) -> bool:
    """Return True if the delta is all that the server learns of a client, and a client keeps nothing."""
    kind, methods = type(algorithm), ("init_client", "finish_client", "own_parameters")
    plain = all(getattr(kind, f, None) is getattr(Algorithm, f) for f in methods)
    return plain and not getattr(algorithm, "pools_data", False)


def only_means(algorithm: Algorithm) -> bool:
    """Return True if the clients' deltas are whole models, and the server reads only means with the run's weights."""
    stays = type(algorithm).own_parameters is not Algorithm.own_parameters
    return not (algorithm.uses_sums or algorithm.sends_weights or algorithm.pools_data or stays)


def _names(serves: Callable[[Any], bool]) -> str:
    return ", ".join(sorted(one.__name__ for one in registry.values() if serves(one())))


def _phases(facts: Facts) -> str | None:
    return f"{facts.name} has phases of its own" if facts.has_phases else None


REQUIREMENTS = (
    Requirement(_value("local_steps", None), "local_epochs at its default",
                lambda f: None if f.settings.local_epochs == 1
                else f"the run has local_epochs={f.settings.local_epochs}",
                "Name one of the two"),
    Requirement(_value("cohort", None), "participation at its default",
                lambda f: None if f.settings.participation == 0.2
                else f"the run has participation={f.settings.participation:g}",
                "Name one of the two"),
    Requirement(lambda f: None if f.settings.lr_decay == 1 else f"lr_decay={f.settings.lr_decay:g}",
                "a learning rate that is a number",
                lambda f: None if isinstance(f.settings.lr, float) else f"the run has lr={f.settings.lr!r}",
                "Put the factor into lr, and leave lr_decay at 1"),
    Requirement(_optimizer, "momentum, weight_decay and clip_norm at their defaults, because it has its own",
                lambda f: f"the run has {unserved}" if (unserved := _sgd_options(f)) else None,
                "Put them into the optimizer: partial(torch.optim.SGD, momentum=0.9), say"),
    Requirement(_optimizer, "plain local steps, or steps of SAM",
                lambda f: f"{f.name} has steps with {', '.join(unserved)}"
                if f.update is not None and (unserved := sorted(f.update.constants.variant.needs - SERVED)) else None,
                "Use another algorithm, or leave optimizer out"),
    # noise
    Requirement(lambda f: "noise='local'" if f.settings.privacy.noise == "local" else None, "noise",
                lambda f: "noise_multiplier is 0" if f.settings.privacy.noise_multiplier == 0 else None,
                "Use privacy=fed.Privacy(clip=..., noise_multiplier=1.0, noise='local'), say"),
    Requirement(_noise, "a bound on the deltas, because no noise hides a client without one",
                lambda f: "clip is not set" if f.settings.privacy.clip is None else None,
                "Use privacy=fed.Privacy(clip=...) with about the norm of a delta (1.0, say)"),
    Requirement(_noise, "clients that count alike", _unlike_weights, "Use weighting='uniform'"),
    Requirement(_central_noise, "a server's mean that clip bounds",
                lambda f: None if f.settings.aggregation == "mean"
                else f"the run has aggregation={f.settings.aggregation!r}",
                "Use aggregation='mean', or noise='local', which is on every delta before a rule sees it"),
    Requirement(_noise, "clients that keep nothing",
                lambda f: None if f.settings.local_parameters is None
                else f"the run has local_parameters={f.settings.local_parameters!r}",
                "Leave out local_parameters, and use fed.finetune(...) after the run"),
    Requirement(_accountant, "the law by which clients are sampled", _unknown_law,
                f"Use sampler={', '.join(map(repr, ACCOUNTED[:-1]))} or {ACCOUNTED[-1]!r} among all clients, or "
                "accountant=None: noise, and no guarantee"),
    Requirement(_noise, "clients that send only their delta and keep nothing", _more_than_delta,
                lambda: f"Use one of {_names(only_deltas)}"),
    Requirement(_noise, "buffers that hold no data of clients",
                lambda f: f"the run has buffers={f.settings.buffers!r}"
                if f.changed_buffers and f.settings.buffers in ("average", "local") else None,
                "Use buffers='keep', or a model with group norms"),
    # robust rules
    Requirement(_unweighted_rule, "clients that count alike", _unlike_weights,
                "Use weighting='uniform', or aggregation='norm_filter', which takes the weights"),
    Requirement(_rule, "clients", _pools_data, "Use aggregation='mean'"),
    Requirement(_rule, "a server that reads only means",
                lambda f: f"the server of {f.name} keeps a sum of what its clients keep" if f.is_("uses_sums") else
                None,
                lambda: f"Use aggregation='mean' with privacy=fed.Privacy(clip=...), or one of {_names(only_means)}"),
    Requirement(_rule, "the run's weights",
                lambda f: f"the clients of {f.name} send weights of their own" if f.is_("sends_weights") else None,
                "Use aggregation='mean' with privacy=fed.Privacy(clip=...)"),
    Requirement(_rule, "one process", _processes, "Use one process, or aggregation='mean'"),
    Requirement(lambda f: None if _function_rule(f) else _rule(f),
                f"{FEWEST} clients in a round, to tell which one is far from the others",
                lambda f: f"this run has rounds of {f.cohort_size}"
                if f.cohort_size is not None and f.cohort_size < FEWEST else None,
                "Use a larger participation, or aggregation='mean'"),
    Requirement(_function_rule, "clients that send only their delta",
                lambda f: f"the clients of {f.name} send other vectors" if f.algorithm is not None
                and getattr(type(f.algorithm), "finish_client", None) is not Algorithm.finish_client else None,
                lambda: f"Use aggregation='mean', or one of {_names(_plain_upload)}"),
    # compression
    Requirement(_compression, "no noise, whose bound its error feedback breaks",
                lambda f: None if f.settings.privacy.noise_multiplier == 0
                else f"the run has noise_multiplier={f.settings.privacy.noise_multiplier:g}",
                "Use one of the two"),
    Requirement(_compression, "the mean of the deltas",
                lambda f: None if f.settings.rule is None
                else f"aggregation={f.settings.rule.name!r} compares deltas that were not sent",
                "Use aggregation='mean'"),
    # local parameters, buffers and models
    Requirement(_local_parts, "clients", _pools_data, "Leave it out"),
    Requirement(lambda f: None if _local_parts(f) == "buffers='local'" else _local_parts(f), "the mean of the clients",
                lambda f: None if f.settings.rule is None
                else f"aggregation={f.settings.rule.name!r} compares whole models",
                "Use aggregation='mean'"),
    Requirement(_client_models, "one process, in which the models of all clients can be evaluated", _processes,
                "Use one process"),
    Requirement(lambda f: f.name if f.is_("own_models") else None, "clients that share all parameters",
                lambda f: None if f.settings.local_parameters is None
                else f"the run has local_parameters={f.settings.local_parameters!r}",
                "Leave out local_parameters: the clients have whole models of their own"),
    Requirement(lambda f: f.name if f.is_("own_models") else None, "one set of buffers for the two models of a client",
                lambda f: f"the run has buffers={f.settings.buffers!r}"
                if f.changed_buffers and f.settings.buffers != "keep" else None,
                "Use buffers='keep', or a model with GroupNorm"),
    # measures, and data whose sizes are not known
    Requirement(lambda f: f"measures={list(f.path_measures)!r}" if f.path_measures else None,
                "one path of local steps", _phases, "Leave them out"),
    *(
        Requirement(asked, "the clients' sizes before the clients are loaded",
                    lambda f: None if f.sized else "they are not known",
                    "Pass them: fed.LazyClients(n, load, sizes=[...])")
        for asked in (
            lambda f: "weighting='samples'" if f.settings.weighting == "samples" else None,
            lambda f: "a run with measures" if f.measured else None,
            lambda f: "a run of several processes" if f.ranks > 1 else None,
        )
    ),
)  # fmt: skip
