"""Combinations of options that a run refuses. Each has the need of an option, the conflicting fact and a remedy.

`check` is called when the options are known, when the algorithm and the clients are known, and after the trial of the
algorithm. Facts that are not known yet contradict nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastsam.fed.algorithms import registry
from fastsam.fed.algorithms.base import Algorithm, Step
from fastsam.fed.clients.loss_kind import LossKind
from fastsam.fed.clients.set_loss import LIMIT, REMEDY, UNKNOWN
from fastsam.fed.measures.options import OF_GRADIENTS
from fastsam.fed.stages.noise import sampler_choices
from fastsam.fed.update.rules import STEP, optimizer_rule, sgd_rule
from fastsam.fed.update.steps import Shifted

ACCOUNTED = ("bernoulli", "fixed", "shuffled")  # samplers whose law dp-accounting knows
MIN_COHORT = 3  # least clients of a round with a majority against one client
ACTIVATIONS = 4 * 2**30  # most bytes that a gradient of a set of samples may keep
_MEAN = LossKind()
Contradiction = tuple[str, str, str, str]  # an option, its need, what the run has instead, and a remedy


@dataclass(frozen=True)
class Facts:
    """A run, as far as it is known.

    Attributes:
        settings: the options.
        algorithm: the algorithm of the user, not yet wrapped.
        ranks: number of processes.
        num_clients: number of clients.
        cohort_size: the largest likely number of clients in a round.
        changed_buffers: buffers that training changes.
        own_parameters: patterns of parameters that the algorithm keeps with the clients.
        has_all_sizes: the numbers of samples of all clients are known.
        has_measures: there are measures.
        path_measures: names of the measures that follow a client's local steps.
        step: the local step of a first client.
        has_phases: the algorithm's loop is more than one path of steps over the run's batches.
        loss_kind: the kind of the loss.
        measures: names of the measures.
        set_sizes: numbers of samples of the sets whose loss is recorded, by the option that requests it.
        gradient_bytes: bytes that a gradient of all measured samples at once keeps, 0 if unknown.
        written_parameters: trained parameters that a forward pass writes in place.
    """

    settings: Any
    algorithm: Any = None
    ranks: int = 1
    num_clients: int | None = None
    cohort_size: int | None = None
    changed_buffers: Sequence[str] = ()
    own_parameters: Sequence[str] = ()
    has_all_sizes: bool = True
    has_measures: bool = False
    path_measures: Sequence[str] = ()
    step: Step | None = None
    has_phases: bool = False
    loss_kind: LossKind = _MEAN
    measures: Sequence[str] = ()
    set_sizes: Mapping[str, int] = field(default_factory=dict)
    gradient_bytes: float = 0.0
    written_parameters: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Name of the algorithm's class."""
        return type(self.algorithm).__name__

    def is_(self, flag: str) -> bool:
        """Return a flag of the algorithm, False if it is unknown or does not have it."""
        return bool(getattr(self.algorithm, flag, False))


def check(facts: Facts) -> None:
    """Raise ValueError for the first contradiction in a run."""
    for part in _PARTS:
        for request, needs, lack, remedy in part(facts):
            raise ValueError(f"{request} needs {needs}, but {lack}. {remedy}")


def _of_steps(facts: Facts) -> Iterator[Contradiction]:
    settings = facts.settings
    if settings.local_steps is not None and settings.local_epochs != 1:
        lack = f"the run has local_epochs={settings.local_epochs}"
        yield f"local_steps={settings.local_steps}", "local_epochs at its default", lack, "Name one of the two"
    if settings.cohort is not None and settings.participation != 0.2:
        lack = f"the run has participation={settings.participation:g}"
        yield f"cohort={settings.cohort}", "participation at its default", lack, "Name one of the two"
    if settings.cohort is not None and facts.num_clients is not None and settings.cohort > facts.num_clients:
        needs, lack = f"at least {settings.cohort} clients", f"there are {facts.num_clients}"
        yield f"cohort={settings.cohort}", needs, lack, "Use a smaller cohort"
    if settings.lr_decay != 1 and not isinstance(settings.lr, float):
        needs, lack = "a learning rate that is a number", f"the run has lr={settings.lr!r}"
        if settings.lr is None:
            needs, lack = "an optimizer that takes lr", settings.optimizer_facts.problem
        yield f"lr_decay={settings.lr_decay:g}", needs, lack, "Put the factor into lr, and leave lr_decay at 1"
    if settings.optimizer is None:
        return
    plain = {"momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
    options = [f"{name}={getattr(settings, name)}" for name, value in plain.items() if getattr(settings, name) != value]
    if options:
        needs = "momentum, weight_decay and clip_norm at their defaults, because it has its own"
        remedy = "Put them into the optimizer: partial(torch.optim.SGD, momentum=0.9), say"
        yield "optimizer", needs, f"the run has {', '.join(options)}", remedy
    problem = settings.optimizer_facts.problem if _uses_lr(facts.algorithm) else ""
    if problem:
        needs = "a local rate and momentum that are known, because it computes with them"
        yield facts.name, needs, problem, "Use optimizer=partial(torch.optim.SGD, lr=0.1), say, or another algorithm"
    rule = optimizer_rule(settings.optimizer)
    if rule is not None and rule.is_decoupled and rule.decay and isinstance(facts.step, Shifted):
        lack = f"the steps of {facts.name} are at weights that are shifted for the whole round"
        needs = "weights that shrink by themselves, because its weight decay is decoupled"
        yield "optimizer", needs, lack, "Use weight_decay=0, an optimizer with coupled decay such as Adam, or FedSAM"


def _of_kept_optimizer(facts: Facts) -> Iterator[Contradiction]:
    if facts.settings.optimizer_state != "keep":
        return
    request, needs = "optimizer_state='keep'", "one path of local steps that begins with the kept state"
    remedy = "Use optimizer_state='reset', or another algorithm"
    if facts.is_("pools_data"):
        yield request, "clients", f"{facts.name} has none", remedy
    if facts.has_phases:
        yield request, needs, f"{facts.name} has phases or models of its own", remedy
    if facts.step is not None and facts.step.state is not None:
        yield request, needs, f"{facts.name} begins each round with a state of its own", remedy


def _of_optimizer_fields(facts: Facts) -> Iterator[Contradiction]:
    """Yield the contradictions of an algorithm that gives the local optimizer its state."""
    names = sorted((facts.step.state or ()) if facts.step is not None else ())
    settings, optimizer = facts.settings, facts.settings.optimizer
    own_rule = sgd_rule(settings.momentum, settings.weight_decay)
    rule = own_rule if optimizer is None else optimizer_rule(optimizer)
    if names and (rule is None or not {*names} <= {*rule.fields, STEP}):
        needs = f"a fused local optimizer that keeps {', '.join(names)}, to which it gives values"
        name = "SGD" if optimizer is None else getattr(optimizer, "func", optimizer).__name__
        yield facts.name, needs, f"the run has {name}", "Use optimizer=torch.optim.AdamW, say"


def _of_server(facts: Facts) -> Iterator[Contradiction]:
    server_lr, method = facts.settings.server_lr, getattr(facts.algorithm, "uses_server_lr", None)
    if server_lr != 1 and method is not None and not method():
        remedy = "Leave server_lr at 1; in a comparison, set it in the table of the algorithm that uses it"
        needs = "a server's step with a learning rate"
        yield f"server_lr={server_lr!r}", needs, f"the server's step of {facts.name} has none", remedy


def _uses_lr(algorithm: Any) -> bool:
    """Return True if the algorithm computes with the local rate. An algorithm of the user may lack the method."""
    return hasattr(algorithm, "uses_lr") and bool(algorithm.uses_lr())


def _of_noise(facts: Facts) -> Iterator[Contradiction]:
    settings, privacy = facts.settings, facts.settings.privacy
    if privacy.noise_multiplier == 0:
        if privacy.noise == "local":
            remedy = "Use privacy=fed.Privacy(clip=..., noise_multiplier=1.0, noise='local'), say"
            yield "noise='local'", "noise", "noise_multiplier is 0", remedy
        return
    noise = f"noise_multiplier={privacy.noise_multiplier:g}"
    if privacy.clip is None:
        needs = "a bound on the deltas, because no noise hides a client without one"
        remedy = "Use privacy=fed.Privacy(clip=...) with about the norm of a delta (1.0, say)"
        yield noise, needs, "clip is not set", remedy
    yield from _unlike_weights(noise, settings.weighting, "Use weighting='uniform'")
    if privacy.noise == "central" and settings.aggregation != "mean":
        remedy = "Use aggregation='mean', or noise='local', which is on every delta before a rule sees it"
        lack = f"the run has aggregation={settings.aggregation!r}"
        yield "noise='central'", "a server's mean that clip bounds", lack, remedy
    if settings.local_parameters is not None:
        lack = f"the run has local_parameters={settings.local_parameters!r}"
        remedy = "Leave out local_parameters, and use fed.finetune(...) after the run"
        yield noise, "clients that keep nothing", lack, remedy
    if settings.optimizer_state == "keep":
        lack, remedy = "the run has optimizer_state='keep'", "Use optimizer_state='reset'"
        yield noise, "clients that keep nothing", lack, remedy
    if privacy.accountant is not None and (unknown := _unknown_law(settings)):
        samplers = f"sampler={', '.join(map(repr, ACCOUNTED[:-1]))} or {ACCOUNTED[-1]!r}"
        remedy = f"Use {samplers} among all clients, or accountant=None: noise, and no guarantee"
        yield f"accountant={privacy.accountant!r}", "the law by which clients are sampled", unknown, remedy
    if facts.algorithm is not None and not only_deltas(facts.algorithm):
        needs = "clients that send only their delta and keep nothing"
        yield noise, needs, _more_than_delta(facts), f"Use one of {_names(only_deltas)}"
    if facts.changed_buffers and settings.buffers in ("average", "local"):
        lack = f"the run has buffers={settings.buffers!r}"
        yield noise, "buffers that hold no data of clients", lack, "Use buffers='keep', or a model with group norms"
    if settings.sampler is None and facts.num_clients is not None:  # an option that is not set, if epsilon needs it
        needs, remedy = "a named sampler, because epsilon depends on it", sampler_choices(settings, facts.num_clients)
        yield f"accountant={privacy.accountant!r}", needs, "sampler is not set", remedy


def _of_rules(facts: Facts) -> Iterator[Contradiction]:
    settings, rule = facts.settings, facts.settings.rule
    if rule is None:
        return
    request = f"aggregation={rule.name!r}"
    if not rule.supports_weights:
        remedy = "Use weighting='uniform', or aggregation='norm_filter', which takes the weights"
        yield from _unlike_weights(request, settings.weighting, remedy)
    if facts.is_("pools_data"):
        yield request, "clients", f"{facts.name} has none", "Use aggregation='mean'"
    if facts.is_("uses_sums"):
        lack = f"the server of {facts.name} keeps a sum of what its clients keep"
        remedy = f"Use aggregation='mean' with privacy=fed.Privacy(clip=...), or one of {_names(only_means)}"
        yield request, "a server that reads only means", lack, remedy
    if facts.is_("sends_weights"):
        lack = f"the clients of {facts.name} send weights of their own"
        yield request, "the run's weights", lack, "Use aggregation='mean' with privacy=fed.Privacy(clip=...)"
    if facts.ranks > 1:
        yield request, "one process", f"the run has {facts.ranks}", "Use one process, or aggregation='mean'"
    if not rule.only_deltas and facts.cohort_size is not None and facts.cohort_size < MIN_COHORT:
        needs = f"{MIN_COHORT} clients in a round, to tell which one is far from the others"
        remedy = "Use a larger participation, or aggregation='mean'"
        yield request, needs, f"this run has rounds of {facts.cohort_size}", remedy
    if rule.only_deltas and facts.algorithm is not None and not _is_plain(facts.algorithm, "finish"):
        plain = _names(lambda one: _is_plain(one, "finish"))
        lack, remedy = f"the clients of {facts.name} send other vectors", f"Use aggregation='mean', or one of {plain}"
        yield request, "clients that send only their delta", lack, remedy


def _of_compression(facts: Facts) -> Iterator[Contradiction]:
    settings = facts.settings
    if settings.compression is None:
        return
    request = f"compression=TopK(share={settings.compression.share:g})"
    if settings.privacy.noise_multiplier != 0:
        lack = f"the run has noise_multiplier={settings.privacy.noise_multiplier:g}"
        yield request, "no noise, whose bound its error feedback breaks", lack, "Use one of the two"
    if settings.rule is not None:
        lack = f"aggregation={settings.rule.name!r} compares deltas that were not sent"
        yield request, "the mean of the deltas", lack, "Use aggregation='mean'"
    if facts.is_("sends_norms"):
        lack = f"{facts.name} compares the norms of whole deltas with their mean"
        yield request, "a server that reads only the deltas", lack, "Use another algorithm, or leave compression out"


def _of_client_models(facts: Facts) -> Iterator[Contradiction]:
    """Yield the contradictions of local parameters, buffers and models."""
    settings, own_models = facts.settings, facts.is_("own_models")
    parts = _local_parts(facts)
    if parts and facts.is_("pools_data"):
        yield parts, "clients", f"{facts.name} has none", "Leave it out"
    if parts and parts != "buffers='local'" and settings.rule is not None:
        lack = f"aggregation={settings.rule.name!r} compares whole models"
        yield parts, "the mean of the clients", lack, "Use aggregation='mean'"
    request = facts.name if own_models else parts
    if request and facts.ranks > 1:
        needs = "one process, in which the models of all clients can be evaluated"
        yield request, needs, f"the run has {facts.ranks}", "Use one process"
    if own_models and settings.local_parameters is not None:
        lack = f"the run has local_parameters={settings.local_parameters!r}"
        remedy = "Leave out local_parameters: the clients have whole models of their own"
        yield facts.name, "clients that share all parameters", lack, remedy
    if own_models and facts.changed_buffers and settings.buffers != "keep":
        needs, lack = "one set of buffers for the two models of a client", f"the run has buffers={settings.buffers!r}"
        yield facts.name, needs, lack, "Use buffers='keep', or a model with GroupNorm"


def _of_writes(facts: Facts) -> Iterator[Contradiction]:
    """Yield the contradictions of a forward pass that writes trained parameters in place."""
    if facts.written_parameters and facts.has_phases:
        lack = "has phases or models of its own"
        request = f"the parameter {facts.written_parameters[0]!r}, which a forward pass writes in place,"
        needs = "local steps that begin with a pass at the unperturbed weights, where the write counts"
        remedy = "Compute the value in forward(), as torch.nn.utils.parametrizations do, or use FedAvg or FedSAM, say"
        yield request, needs, f"{facts.name} {lack}", remedy


def _of_sizes(facts: Facts) -> Iterator[Contradiction]:
    """Yield the contradictions of measures, and of data whose sizes are not known."""
    if facts.path_measures and facts.has_phases:
        lack = f"{facts.name} has phases of its own"
        yield f"measures={list(facts.path_measures)!r}", "one path of local steps", lack, "Leave them out"
    requests = {
        "weighting='samples'": facts.settings.weighting == "samples",
        "a run with measures": facts.has_measures,
        "a run of several processes": facts.ranks > 1,
    }
    for request in () if facts.has_all_sizes else [name for name, is_used in requests.items() if is_used]:
        remedy = "Pass them: fed.LazyClients(n, load, sizes=[...])"
        yield request, "the clients' sizes before the clients are loaded", "they are not known", remedy


def _of_loss(facts: Facts) -> Iterator[Contradiction]:
    """Yield the contradictions of a loss that is not known to be a mean over samples."""
    kind = facts.loss_kind
    if kind.is_mean:
        return
    needs, lack = "a loss that is a mean over samples", f"{kind.name} may be none: {UNKNOWN}"
    for name in facts.measures:
        if name in OF_GRADIENTS and facts.gradient_bytes > ACTIVATIONS:
            reason = f"{needs}, because a gradient of all samples at once keeps {facts.gradient_bytes / 2**30:.0f} GiB"
            yield f"measures=[{name!r}]", reason, lack, "Use one of them, or fed.NamedMeasures([...], samples=1000)"
    for request, samples in facts.set_sizes.items():
        if samples * kind.sample_bytes > LIMIT:
            reason = f"{needs}, because outputs and labels of {kind.sample_bytes:.0f} bytes a sample exceed the "
            reason += f"{LIMIT // 2**20} MiB that are kept"
            yield f"{request} of {samples} samples", reason, lack, f"Use fewer samples. {REMEDY}"


def _unlike_weights(request: str, weighting: Any, remedy: str) -> Iterator[Contradiction]:
    if weighting != "uniform":
        yield request, "clients that count alike", f"weighting={weighting!r} makes some of them count more", remedy


def _local_parts(facts: Facts) -> str | None:
    """Return what stays with the clients, if not whole models."""
    if facts.settings.local_parameters is not None:
        return f"local_parameters={facts.settings.local_parameters!r}"
    if facts.own_parameters:
        return f"{facts.name}, whose parameters stay with the clients,"
    return "buffers='local'" if facts.settings.buffers == "local" else None


def _unknown_law(settings: Any) -> str | None:
    if callable(settings.sampler):
        return "there is none for a sampler of your own"
    if settings.sampler not in (None, *ACCOUNTED):
        return f"there is none for sampler={settings.sampler!r}"
    return "there is none for available=..." if settings.available is not None else None


def _more_than_delta(facts: Facts) -> str:
    """Return why the server learns more of a client than its clipped delta."""
    if facts.is_("pools_data"):
        return f"{facts.name} has no clients"
    if not _is_plain(facts.algorithm, "finish"):
        return f"the clients of {facts.name} send or keep more"
    return f"the clients of {facts.name} keep something, which depends on the rounds in which they took part"


def _is_plain(algorithm: object, *methods: str) -> bool:
    """Return True if the algorithm does not override any of the methods."""
    return all(getattr(type(algorithm), name, None) is getattr(Algorithm, name) for name in methods)


def only_deltas(algorithm: object) -> bool:
    """Return True if the delta is all that the server learns of a client, and a client keeps nothing."""
    plain = _is_plain(algorithm, "init_client", "finish", "own_parameters")
    return plain and not getattr(algorithm, "pools_data", False)


def only_means(algorithm: Algorithm) -> bool:
    """Return True if the clients' deltas are whole models, and the server reads only means with the run's weights."""
    plain = _is_plain(algorithm, "own_parameters")
    return plain and not (algorithm.uses_sums or algorithm.sends_weights or algorithm.pools_data)


def _names(serves: Callable[[Any], bool]) -> str:
    return ", ".join(sorted(one.__name__ for one in registry.values() if serves(one())))


_PARTS = (
    *(_of_steps, _of_kept_optimizer, _of_optimizer_fields, _of_server, _of_noise, _of_rules, _of_compression),
    *(_of_client_models, _of_writes, _of_sizes, _of_loss),
)
