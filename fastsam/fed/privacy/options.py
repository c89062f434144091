"""What of a run's options does not go together with noise, told before the run with what would work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fastsam.fed.algorithms import registry
from fastsam.fed.algorithms.base import Algorithm

NOISES = ("central", "local")
ACCOUNTED = ("bernoulli", "fixed", "shuffled")  # samplers whose law an event of dp-accounting has


class Asked(Protocol):
    """The options of `fed.run` that this room reads."""

    @property
    def clip_update(self) -> float | None: ...
    @property
    def noise_multiplier(self) -> float: ...
    @property
    def noise(self) -> str: ...
    @property
    def delta(self) -> float | None: ...
    @property
    def accountant(self) -> str | None: ...
    @property
    def sampler(self) -> Any: ...
    @property
    def available(self) -> Any: ...
    @property
    def participation(self) -> float: ...
    @property
    def weighting(self) -> Any: ...
    @property
    def aggregation(self) -> str: ...
    @property
    def local_parameters(self) -> Any: ...
    @property
    def buffers(self) -> str | None: ...
    @property
    def seed(self) -> int: ...


def check_options(asked: Asked) -> None:
    """Raises ValueError for options that contradict each other, whatever model, data and algorithm are."""
    z = asked.noise_multiplier
    if z == 0:
        _check_without_noise(asked)
        return
    if asked.clip_update is None:
        raise ValueError(
            f"noise_multiplier={z:g} is the noise in units of clip_update, and without a clip no noise hides a client; "
            f"set clip_update to "
            "about the norm of a displacement (clip_update=1.0, say)"
        )
    if asked.weighting != "uniform":
        raise ValueError(
            f"weighting={asked.weighting!r} with noise_multiplier: the guarantee is of clients that count alike, and "
            f"weights are clients' data; "
            "use weighting='uniform'"
        )
    if asked.aggregation != "mean" and asked.noise != "local":
        raise ValueError(
            f"aggregation={asked.aggregation!r} with noise={asked.noise!r}: how far one client moves a rule is not "
            f"bounded by clip_update; use "
            "aggregation='mean', or noise='local', which is on every displacement before a rule sees it"
        )
    if asked.local_parameters is not None:
        raise ValueError(
            f"local_parameters={asked.local_parameters!r} with noise_multiplier: what stays with a client depends on "
            f"the rounds in which it took part, which "
            "no accountant's law has; leave out local_parameters, and use fed.finetune(...) after the run"
        )
    if asked.delta is not None and asked.delta >= 1:
        raise ValueError(f"delta must be a number in (0, 1), below 1/clients, such as 1e-5; got {asked.delta!r}")
    _check_accountant(asked)


def _check_without_noise(asked: Asked) -> None:
    if asked.noise != "central":
        raise ValueError(
            f"noise={asked.noise!r} is of a run with noise; set noise_multiplier (1.0, say) and clip_update"
        )


def _check_accountant(asked: Asked) -> None:
    if asked.accountant is None:
        return
    wrong = "available=..." if asked.available is not None else None
    if not isinstance(asked.sampler, str) or asked.sampler not in ACCOUNTED:
        wrong = f"sampler={asked.sampler!r}" if isinstance(asked.sampler, str) else "a sampler of your own"
    if wrong is not None:
        raise ValueError(
            f"accountant={asked.accountant!r} knows no epsilon for {wrong}: what a round reveals depends on the law by "
            f"which clients are "
            f"sampled. Use sampler={', '.join(map(repr, ACCOUNTED[:-1]))} or {ACCOUNTED[-1]!r} among all clients, or "
            f"accountant=None: noise, "
            "and no guarantee"
        )


def check_run(options: Asked, algorithm: object, changed: Sequence[str]) -> None:
    """Raises ValueError if a run with noise does not have the guarantee. changed: the buffers that training changes."""
    if options.noise_multiplier > 0:
        check_algorithm(algorithm)
        check_buffers(options.buffers, changed)


def check_algorithm(algorithm: object) -> None:
    """Raises ValueError for an algorithm whose clients send anything but their displacement, or keep anything."""
    if serves(algorithm):
        return
    names = ", ".join(sorted(one.__name__ for one in registry.values() if serves(one())))
    name, kind = type(algorithm).__name__, type(algorithm)
    if getattr(algorithm, "pools_data", False):
        why = "it has no clients"
    elif getattr(kind, "finish_client", None) is not Algorithm.finish_client:
        why = "its clients send or keep more than their displacement, which clip_update does not bound"
    else:
        why = "its clients keep something, which depends on the rounds in which they took part"
    raise ValueError(f"noise_multiplier serves algorithms whose server takes the mean of displacements, and not "
                     f"{name}: {why}. "
                     f"Use one of {names}")  # fmt: skip


def serves(algorithm: object) -> bool:
    """Whether the clipped displacement is all that the server learns of a client, and a client forgets the round."""
    kind = type(algorithm)
    plain = all(
        getattr(kind, f, None) is getattr(Algorithm, f) for f in ("init_client", "finish_client", "own_parameters")
    )
    return plain and not getattr(algorithm, "pools_data", False)


def delta_of(asked: Asked, clients: int) -> float:
    """That of the run, clients^-1.1 by default. Raises ValueError for one that lets a client be published outright."""
    if asked.delta is None:
        return float(clients**-1.1) if clients > 1 else 1e-5
    if asked.delta >= 1 / clients:
        raise ValueError(
            f"delta must be in (0, 1/clients): who publishes the data of one client of {clients}, drawn at random, "
            f"keeps delta = "
            f"{1 / clients:.3g}; got {asked.delta!r}. Use 1e-5, say, or leave it out for clients**-1.1 = "
            f"{clients**-1.1:.3g}"
        )
    return asked.delta


def check_buffers(buffers: str | None, changed: Sequence[str]) -> None:
    """Raises ValueError for buffers that are averaged, which no noise is on, or stay with the clients."""
    if changed and buffers == "local":
        raise ValueError(
            "buffers='local' with noise_multiplier: what stays with a client depends on the rounds in which it took "
            "part, which no accountant's "
            "law has; use buffers='keep', or a model with group norms"
        )
    if changed and buffers == "average":
        raise ValueError(
            "buffers='average' with noise_multiplier: means of clients' statistics (BatchNorm's) would enter the model "
            "without noise; use "
            "buffers='keep', or a model with group norms"
        )
