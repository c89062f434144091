"""The options of privacy that this room reads, and the default of delta."""

from __future__ import annotations

from typing import Any, Protocol

NOISES = ("central", "local")


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


def delta_of(asked: Asked, clients: int) -> float:
    """Return delta of the run, by default clients^-1.1. Raises ValueError if it lets a client be published outright."""
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
