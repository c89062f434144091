"""Checks of arguments. All public functions refuse bad arguments with the same words: the expected value, and the
given one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from operator import eq, index
from typing import Any

from fastsam.optim.suggestions import FOREIGN_NAMES

NUMBER_CLASSES = (  # the remedy for labels that are texts
    "Number the classes of all clients together: classes, y = numpy.unique(labels, return_inverse=True)"
)
# Names of Flower, pfl, FedLab and FL-Simulator for options of a run.
OTHER_NAMES = {
    "clients_per_round": "cohort", "cohort_size": "cohort", "num_clients_per_round": "cohort",
    "fraction_fit": "participation", "fraction_train": "participation", "sample_ratio": "participation",
    "num_rounds": "rounds", "comm_rounds": "rounds", "communication_rounds": "rounds", "num_server_rounds": "rounds",
    "num_clients": "clients", "epochs": "local_epochs", "num_epochs": "local_epochs", "batchsize": "batch_size",
    "test_data": "test", "test_set": "test", "testset": "test", "criterion": "loss", "loss_fn": "loss",
    "partition": "split",
}  # fmt: skip


def number(
    name: str,
    value: Any,
    *,
    greater_than: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return `value` as a float. Raises ValueError unless it is a finite real number within the bounds."""
    # Nearly every call: algorithms check the numbers of every client's step.
    if type(value) is float and math.isfinite(value) and at_most is None:  # noqa: SIM102
        if (greater_than is None or value > greater_than) and (at_least is None or value >= at_least):
            return value
    bounds = [f"> {greater_than:g}"] if greater_than is not None else []
    bounds += [f">= {at_least:g}"] if at_least is not None else []
    bounds += [f"<= {at_most:g}"] if at_most is not None else []
    need = f"{name} must be a finite number" + (f" {' and '.join(bounds)}" if bounds else "")
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise ValueError(f"{need}, got {value!r}")
    try:
        result = float(value)
    except Exception as error:  # an integer beyond all floats, a tensor of several elements
        kind = f"{type(value).__name__}: {error}" if isinstance(error, OverflowError) else f"{value!r} ({error})"
        raise ValueError(f"{need}, got {kind}") from error
    in_bounds = greater_than is None or result > greater_than
    in_bounds &= (at_least is None or result >= at_least) and (at_most is None or result <= at_most)
    if not math.isfinite(result) or not in_bounds:
        raise ValueError(f"{need}, got {value!r}")
    return result


def decay_rate(name: str, value: float, factor_name: str, factor: float, index: int) -> float:
    """Return `value * factor**index`. Raises ValueError if that is beyond all floats."""
    try:
        result = value * factor**index
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(
            f"{name} * {factor_name}**{index} must be a finite number, got {value!r} * {factor!r}**{index}"
        )
    return result


def integer(name: str, value: Any, at_least: int | None = None) -> int:
    """Return `value` as an int. Raises ValueError unless it is a whole number of 64 bits, `at_least` or more."""
    need = f"{name} must be an integer" + (f" >= {at_least}" if at_least is not None else "")
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{need}, got {value!r}")
    try:
        result = index(value)  # which a tensor of floats has not
    except Exception as error:
        raise ValueError(f"{need}, got {value!r} ({error})") from error
    if at_least is not None and result < at_least:
        raise ValueError(f"{need}, got {value!r}")
    if not -(2**63) <= result < 2**63:
        raise ValueError(f"{need} that fits 64 bits, got {value!r}")
    return result


def choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return `value`. Raises ValueError unless it is one of `choices`."""
    if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
        hint = nearest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}{hint}")
    return value


def nearest(word: str, good: Iterable[str]) -> str:
    """Return the end of a message with the word of `good` that is most like `word` (see `closest`), or ""."""
    found = closest(word, good)
    return "" if found is None else f" (did you mean {found!r}?)"


def closest(word: str, good: Iterable[str]) -> str | None:
    """Return the word of `good` that is most like `word`, or None if no word is.

    A word that `word` begins comes first. Several words may be equally like it. Then the first with most letters in the
    same places is returned.
    """
    words, word = {name.lower(): name for name in good}, word.lower()
    synonyms = FOREIGN_NAMES | OTHER_NAMES
    words |= {foreign: words[name] for foreign, name in synonyms.items() if name in words and foreign not in words}
    begun = [name for name in words if len(word) > 2 and name.startswith(word)]
    close = begun or get_close_matches(word, words, n=5, cutoff=0.6)

    def likeness(name: str) -> tuple[float, int]:
        return SequenceMatcher(None, name, word).ratio(), sum(map(eq, name, word))

    return words[max(close, key=likeness)] if close else None
