"""One option, one declaration: a field of a dataclass made by `option`. Checks, flags, config files, help and docs read
its row."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from fastsam.fed.common.checks import choice, closest, integer, nearest, number

if TYPE_CHECKING:
    from typing_extensions import Self

Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """A row of a table: name, annotation and default of a field, and the arguments of `option`."""

    name: str
    kind: Any
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    greater_than: float | None = None
    at_least: int | None = None
    at_most: float | None = None
    resumable: bool = False
    formula: Callable[[str, Any], None] | None = None

    @functools.cached_property
    def kinds(self) -> tuple[Any, ...]:
        """The types of the annotation, without their parameters."""
        return kinds(self.kind)

    @property
    def meaning(self) -> str:
        """Help and choices, for people."""
        return self.help + (f" ({', '.join(self.choices)})" if self.choices else "")

    @property
    def default_text(self) -> str:
        """The default as one would write it on the command line."""
        if self.default in ("", (), {}):
            return "empty"
        return (
            str(self.default).lower() if self.default is None or isinstance(self.default, bool) else str(self.default)
        )

    def check(self, value: Any) -> Any:
        """Return `value` as JSON has it: Python's own numbers, lists in place of tuples. Raises ValueError."""
        is_optional = type(None) in self.kinds
        if is_optional and value is None:
            return None
        if self.choices:
            return choice(self.name, value, (None, *self.choices) if is_optional else self.choices)
        if bool in self.kinds:
            return choice(self.name, value, (True, False))
        # The help says what none means. A rate has a long one, and is not given as none by mistake.
        name = f"{self.name} ({self.help})" if is_optional and self.formula is None else self.name
        if int in self.kinds:
            return integer(name, value, self.at_least)
        if self.formula is not None and (isinstance(value, str) or callable(value)):
            self.formula(self.name, value)
            return value
        if float in self.kinds:
            return number(name, value, greater_than=self.greater_than, at_least=self.at_least, at_most=self.at_most)
        return list(value) if isinstance(value, tuple) else value


def option(default: Any, help: str, **limits: Any) -> Any:
    """Return a field of a table of options.

    Args:
        default: default value.
        help: meaning, for people.
        **limits: `choices`; the bounds `greater_than`, `at_least` and `at_most` of a number; `resumable`, if a resumed
            run may have a different value; `formula`, a check of strings and functions that may replace a number.
    """
    default_options = {"default_factory": lambda: dict(default)} if isinstance(default, dict) else {"default": default}
    return field(**default_options, metadata={"help": help, **limits})


def kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type, without their parameters."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return tuple(typing.get_origin(k) or k for k in (typing.get_args(annotation) if union else (annotation,)))


@functools.cache
def table(cls: type) -> dict[str, Option]:
    """Return the options of a dataclass, by name, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    rows = [f for f in fields(cls) if "help" in f.metadata]
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in rows}
    return {f.name: Option(f.name, hints[f.name], defaults[f.name], **f.metadata) for f in rows}


def check(options: object) -> None:
    """Replace each option by the value that `Option.check` returns, in a frozen dataclass too. Raises ValueError."""
    cls: Any = type(options)
    for name, row in table(cls).items():
        object.__setattr__(options, name, row.check(getattr(options, name)))


def made_of(cls: type[Options], value: Any, label: str) -> Options:
    """Return the options `value`, or options made of a mapping.

    Raises:
        ValueError: `value` is something else, or a key of the mapping is unknown. `label` is the name for messages.
    """
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{label} must be a fed.{cls.__name__}, or a table of its options; got {value!r}")
    options = table(cls)  # type: ignore[arg-type]
    for name in value:
        if name not in options:
            raise ValueError(
                f"{label} has no option {name!r}{nearest(name, options)}; its options: {', '.join(options)}"
            )
    return cls(**value)


class NamedOptions:
    """A base class that names the nearest option if an option is unknown."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Raise TypeError for an unknown option, with the known ones."""
        names = _names_of(cls.__init__)
        if names is not None and (unknown := options.keys() - names):
            name, takes = min(unknown), ", ".join(names[1:]) or "none"
            raise TypeError(f"{cls.__name__} has no option {name!r}{nearest(name, names)}; its options: {takes}")
        return super().__new__(cls)


@functools.lru_cache(maxsize=256)
def _names_of(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of a function's parameters, or None if it takes any keyword."""
    parameters = inspect.signature(function).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else list(parameters)


def suggest_option(replacements: Mapping[str, str]) -> Callable[[Function], Function]:
    """Return a decorator that raises TypeError for a keyword that the function does not have, with the right one.
    `replacements` has the spelling of options that are part of another one."""

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            for name in options:
                if name not in parameters:
                    names = [*parameters, *replacements]
                    found = name if name in replacements else closest(name, names)
                    hint = "" if name in replacements else nearest(name, names)
                    hint += f": write {replacements[found]}" if found is not None and found in replacements else ""
                    raise TypeError(f"{function.__name__}() has no option {name!r}{hint}")
            return function(*arguments, **options)

        return typing.cast(Function, wrapper)

    return decorate


def with_help(cls: type) -> Callable[[Function], Function]:
    """Return a decorator that puts the options of `cls` into a docstring, in place of its line OPTIONS."""

    def fill(function: Function) -> Function:
        def list_options(line: re.Match[str]) -> str:
            indent = line[1]
            rows = (f"{row.name}: {row.meaning}." for row in table(cls).values())
            return "\n".join(
                textwrap.fill(row, 120, initial_indent=indent, subsequent_indent=indent + "    ") for row in rows
            )

        function.__doc__ = re.sub(r"^( *)OPTIONS$", list_options, function.__doc__ or "", flags=re.MULTILINE)
        return function

    return fill
