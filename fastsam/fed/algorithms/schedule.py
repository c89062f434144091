"""A hyper-parameter that may change from round to round: a number, a formula, or a function of the round.

A formula is a short string such as `"0.5/sqrt(round)"`. It is parsed and never executed. It may have numbers, `+ - * /
**`, brackets, the names `round` (from 1), `lr` and `first_lr` (local learning rate of this round and of the first
round), and the functions

    sqrt(x), exp(x), log(x), min(x, y, ...), max(x, y, ...)
    linear(start, end, n), cosine(start, end, n)    from start in round 1 to end in round n, then end

The number of rounds of the run has no name, so that a run that is continued keeps the rounds that it has.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from fastsam.fed.common.checks import number

if TYPE_CHECKING:
    from fastsam.fed.algorithms.base import Round

__all__ = ["Scheduled", "check_scheduled", "value_at"]

Scheduled = float | str | Callable[..., float]  # a callable takes the `Round`

_NAMES = ("round", "lr", "first_lr")
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: math.pow(a, b),
    ast.USub: lambda a: -a,
    ast.UAdd: lambda a: a,
}


def _linear(start: float, end: float, n: float, round: float) -> float:
    return start + (end - start) * _progress(n, round)


def _cosine(start: float, end: float, n: float, round: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * _progress(n, round))) / 2


def _progress(n: float, round: float) -> float:
    """Return the progress of a schedule over n rounds: 0 in round 1, 1 from round n on."""
    if n < 2:
        raise ValueError(f"a schedule over n rounds needs n >= 2, got {n:g}")
    return min(round - 1, n - 1) / (n - 1)


_FUNCTIONS: dict[str, tuple[Callable[..., float], range]] = {  # with the numbers of arguments that they take
    "sqrt": (math.sqrt, range(1, 2)),
    "exp": (math.exp, range(1, 2)),
    "log": (math.log, range(1, 2)),
    "min": (min, range(2, 100)),
    "max": (max, range(2, 100)),
    "linear": (_linear, range(3, 4)),
    "cosine": (_cosine, range(3, 4)),
}
_OF_THE_ROUND = ("linear", "cosine")
_MAX_LENGTH = 200  # characters: nothing nests deeper than Python's stack
_EXAMPLES = "0.05, '0.5/sqrt(round)', '0.1*lr', 'linear(0.1, 0.01, 100)', 'cosine(0.1, 0, 100)'"


def check_scheduled(name: str, value: Scheduled) -> None:
    """Raise ValueError unless `value` is a number >= 0, a formula (see the module), or callable."""
    if isinstance(value, str):
        tree = _parse(name, value)
        if not any(isinstance(node, ast.Name) and node.id in (*_NAMES, *_OF_THE_ROUND) for node in ast.walk(tree)):
            try:
                problem = _evaluate(tree, {})
            except (ArithmeticError, ValueError) as error:
                raise ValueError(f"{name} = {value!r} has no value: {error}") from error
            number(f"{name} = {value!r}", problem, at_least=0)
    elif not callable(value):
        number(f"{name} (or a formula such as {_EXAMPLES.split(', ')[1]})", value, at_least=0)


def value_at(name: str, value: Scheduled, round: Round) -> float:
    """Return the value in a round. Raises ValueError if it is not a finite number >= 0."""
    if type(value) is float:  # it was checked when the algorithm was made
        return value
    if isinstance(value, str):
        result: object = formula(name, value, round.index, {"lr": round.lr, "first_lr": round.first_lr})
    else:
        result = value(round) if callable(value) else value
    return number(f"{name} in round {round.index + 1}", result, at_least=0)


def formula(name: str, text: str, index: int, variables: Mapping[str, float]) -> float:
    """Return the value of a formula in round `index` (from 0). The names besides `round` have their values in
    `variables`.

    Raises:
        ValueError: it is not a formula, has an unknown name, or has no value.
    """
    tree = _parse(name, text)
    foreign = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {*variables, "round", *_FUNCTIONS}
    if foreign:
        raise ValueError(
            f"{name} = {text!r}: {min(foreign)!r} has no value here; names are {', '.join(['round', *variables])}"
        )
    try:
        return _evaluate(tree, {"round": float(index + 1), **variables})
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"{name} = {text!r} has no value in round {index + 1}: {error}") from error


@lru_cache(maxsize=256)
def _parse(name: str, text: str) -> ast.expr:
    """Return the formula's tree. Raises ValueError with the part that is not allowed."""
    try:
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"it has more than {_MAX_LENGTH} characters")
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{name} must be a number or a formula such as {_EXAMPLES}, got {text[:_MAX_LENGTH]!r} ({error})"
        ) from error
    try:
        _check(tree)
    except ValueError as error:
        raise ValueError(f"{name} = {text!r}: {error}; formulas that work: {_EXAMPLES}") from None
    return tree


def _check(node: ast.AST) -> None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        _check(node.left)
        _check(node.right)
        return
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _check(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        takes = _FUNCTIONS[node.func.id][1]
        if len(node.args) not in takes or node.keywords:
            suffix = " or more" if len(takes) > 1 else ""
            raise ValueError(f"{node.func.id} takes {takes.start} arguments{suffix}, got {len(node.args)}")
        for argument in node.args:
            _check(argument)
        return
    raise ValueError(
        f"{ast.unparse(node)!r} is not known; names are {', '.join(_NAMES)}, functions {', '.join(_FUNCTIONS)}"
    )


def _evaluate(node: ast.AST, variables: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.Name):
        return variables[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluate(node.left, variables), _evaluate(node.right, variables))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_evaluate(node.operand, variables))
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)  # nothing else passes `_check`
    arguments = [_evaluate(a, variables) for a in node.args]
    if node.func.id in _OF_THE_ROUND:
        arguments.append(variables["round"])
    return _FUNCTIONS[node.func.id][0](*arguments)
