"""The options of privacy (`fed.run(privacy=fed.Privacy(...))`), and the default of delta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastsam.fed.common.option import NamedOptions, check, made_of, option

NOISES = ("central", "local")


@dataclass(frozen=True)
class Privacy(NamedOptions):
    """Clipping of the clients' deltas, and noise on them: differential privacy of whole clients.

    Without noise it is clipping only. A delta longer than `clip` is scaled down before any use of it. `noise` is
    "central", if the server adds noise to the sum of the deltas, or "local", if each client adds noise to its own
    delta.

    Raises:
        ValueError: a value is out of range.
    """

    # fmt: off
    clip: float | None = option(None,
        "largest norm of a client's delta, and of a full gradient that it sends (MimeLite); none: no limit",
        greater_than=0)
    noise_multiplier: float = option(0.0, "standard deviation of the noise in units of clip; 0: no noise", at_least=0)
    noise: str = option("central", "who adds it: the server to the sum, or each client to its delta", choices=NOISES)
    delta: float | None = option(None, "delta of the guarantee (epsilon, delta); none: num_clients**-1.1",
        greater_than=0)
    accountant: str | None = option("rdp", "computes epsilon; none: noise without a guarantee", choices=("rdp",))
    # fmt: on

    def __post_init__(self) -> None:
        check(self)
        if self.noise_multiplier > 0 and self.delta is not None and self.delta >= 1:
            raise ValueError(f"delta must be a number in (0, 1), below 1/clients, such as 1e-5; got {self.delta!r}")

    @property
    def has_epsilon(self) -> bool:
        """True if epsilon is computed: there is noise, and an accountant."""
        return self.noise_multiplier > 0 and self.accountant is not None


def privacy_of(value: Privacy | Mapping[str, Any] | None) -> Privacy:
    """Return the options of privacy, for None without clipping and noise. Raises ValueError as `made_of` does."""
    return made_of(Privacy, {} if value is None else value, "privacy")


def delta_of(privacy: Privacy, clients: int) -> float:
    """Return delta of the run, by default clients^-1.1. Raises ValueError if it lets a client be published outright."""
    if privacy.delta is None:
        return float(clients**-1.1) if clients > 1 else 1e-5
    if privacy.delta >= 1 / clients:
        raise ValueError(
            f"delta must be in (0, 1/clients): publishing the data of one random client of {clients} keeps delta = "
            f"{1 / clients:.3g}; got {privacy.delta!r}. Use 1e-5, say, or leave it out for clients**-1.1 = "
            f"{clients**-1.1:.3g}"
        )
    return privacy.delta
