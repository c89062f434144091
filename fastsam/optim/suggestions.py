"""The option that is most like an unknown one, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

# Names of torch's options in other libraries.
FOREIGN_NAMES = {
    "learning_rate": "lr", "step_size": "lr", "wd": "weight_decay", "decay": "weight_decay", "l2": "weight_decay",
    "mom": "momentum",
    "beta": "betas", "beta1": "betas", "beta2": "betas", "beta_1": "betas", "beta_2": "betas",
}  # fmt: skip


def suggestion(name: str, names: Sequence[str]) -> str:
    """Return the end of a message with the one of `names` that is most like `name`, or ""."""
    translation = FOREIGN_NAMES.get(name.lower())
    close = [translation] if translation in names else get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def check_options(cls: type, options: Iterable[str]) -> None:
    """Raise TypeError for a keyword that the constructor of `cls` does not take, with the nearest one."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    names = list(parameters)[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in options:
        if name not in names:
            raise TypeError(
                f"{cls.__name__} has no option {name!r}{suggestion(name, names) or '.'} Its options: {', '.join(names)}"
            )
