"""Sweeps: a key of the config, or an option of the algorithms, that takes several values in one comparison."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fastsam.fed.algorithms import registry
from fastsam.fed.common.checks import nearest
from fastsam.lab.config import ConfigError, ConfigSource, algorithm_options, takers_of
from fastsam.lab.run_config import KEYS, short_name


@dataclass(frozen=True)
class Axis:
    """A swept key."""

    table: str | None  # algorithm that the key is for; None for all algorithms that take it
    key: str
    values: tuple[str, ...]  # values as on the command line

    @property
    def name(self) -> str:
        """Return the name as on the command line: "rho", or "fedsam.rho"."""
        return self.key if self.table is None else f"{self.table}.{self.key}"

    @property
    def text(self) -> str:
        """Return the axis as text, in the form that `parse_axis` reads."""
        return f"{self.name}={','.join(self.values)}"

    def is_option_of(self, algorithm: str) -> bool:
        """Return True if the key is an option of the algorithm here, and not a key of the run.

        Outside an algorithm's table, a key of the run has precedence.
        """
        return self.key in algorithm_options(algorithm) and (self.table is not None or self.key not in KEYS)

    def applies_to(self, algorithm: str) -> bool:
        """Return True if runs of this algorithm take the key."""
        if self.table is not None and self.table != short_name(algorithm):
            return False
        return self.is_option_of(algorithm) or self.key in KEYS


def parse_axis(text: str) -> Axis:
    """Return the axis of a text: ``"rho=0.01,0.05"`` or ``"fedsmoo.dyn=true,false"``.

    Commas inside brackets do not separate values. Raises ConfigError if the text has a different form, or the key
    cannot be swept.
    """
    name, equals, value_text = str(text).partition("=")
    values = tuple(_split(value_text))
    if not equals or not name.strip() or not values:
        raise ConfigError(f"a sweep is written key=value,value,..., e.g. rho=0.01,0.05,0.1; got {text!r}")
    if len(set(values)) < len(values):
        raise ConfigError(f"the sweep {text!r} names a value twice; each value runs once")
    table, _, key = name.strip().removeprefix("--").rpartition(".")
    key = key.replace("-", "_")
    if key in ("algorithm", "seed", "name", "measures", "metrics"):
        hint = {"algorithm": "use --algorithms", "seed": "use --seeds"}.get(key, "it does not change the training")
        raise ConfigError(f"{key} cannot be swept: {hint}")
    return Axis(table or None, key, values)


def _split(text: str) -> Iterator[str]:
    """Yield the parts between commas that are outside brackets, without the empty ones."""
    depth, part = 0, ""
    for c in [*text, ","]:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth <= 0:
            if part.strip():
                yield part.strip()
            part = ""
        else:
            part += c


def check_taken(axes: Sequence[Axis], algorithms: Sequence[str]) -> None:
    """Check that at least one of the algorithms takes each key.

    Raises ConfigError if no algorithm takes a key. The message names the algorithms that do, or the nearest key.
    """
    for axis in axes:
        if any(axis.applies_to(name) for name in algorithms):
            continue
        tables = {short_name(name): [*algorithm_options(name), *KEYS] for name in algorithms}
        if axis.table is not None and axis.table not in tables:
            hint = f"; {axis.table} is not compared" if axis.table in registry else nearest(axis.table, tables)
        elif axis.table is None and takers_of(axis.key):
            hint = f"; it is an option of {', '.join(takers_of(axis.key))}"
        else:
            hint = nearest(
                axis.key, tables.get(axis.table or "") or [key for options in tables.values() for key in options]
            )
        raise ConfigError(f"--sweep {axis.name}: none of {', '.join(algorithms)} takes this key{hint}")


def check_directories(names: Sequence[str]) -> None:
    """Raise ConfigError if two runs of a comparison have one directory, because a value has two spellings."""
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(
                f"the sweep names a value twice: both runs are {name!r}. Each value runs once, and values must differ "
                "in their first six digits"
            )


def combinations(axes: Sequence[Axis]) -> Iterator[tuple[tuple[Axis, str], ...]]:
    """Yield every choice of one value per axis; one empty choice if there is no axis."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield tuple(zip(axes, values, strict=True))


def with_values(source: ConfigSource, values: Sequence[tuple[Axis, str]]) -> ConfigSource:
    """Return the source with these values in place of its flags."""
    flags, tables = dict(source.flags), {table: dict(options) for table, options in source.flag_tables.items()}
    for axis, value in values:
        if axis.table is None:
            flags[axis.key] = value
        else:
            tables.setdefault(axis.table, {})[axis.key] = value
    return replace(source, flags=flags, flag_tables=tables)
