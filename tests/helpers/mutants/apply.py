"""Runs a function with one expression of it replaced. No file is touched: the code of the changed function is put in
place in memory, and the old one comes back afterwards.

An expression is named by its module, its function and its text, compared as `ast.unparse` writes it, so that a mutant
stays valid when code moves or is wrapped otherwise. It may be a statement or a keyword of a call, too.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class Stale(Exception):
    """A mutant no longer fits its function."""


class Mutant(NamedTuple):
    """A replacement of `old` by `new` in `function` of `fastsam.fed.<module>` (or a full name), and its detecting
    case."""

    module: str
    function: str
    old: str
    new: str
    case: str
    options: str = "decay"


def mutants(table: str) -> list[Mutant]:
    """Return the mutants of a table whose rows are `module function: old => new @ case options`.

    A row goes on in indented lines; a line that begins with # is a comment.
    """
    rows: list[str] = []
    for line in table.strip().splitlines():
        if line.startswith(" "):
            rows[-1] += " " + line.strip()
        elif not line.startswith("#"):
            rows.append(line)
    result = []
    for row in rows:
        place, _, change = row.partition(": ")
        old, _, change = change.partition(" =>")
        new, _, case = change.partition(" @ ")
        module, function = place.split()
        result.append(Mutant(module, function, old, new.strip(), *case.split()))
    return result


class _Swap(ast.NodeTransformer):
    """Puts `new` in the place of one node."""

    def __init__(self, place: ast.AST, new: str) -> None:
        self.place, self.new = place, new

    def visit(self, node: ast.AST) -> Any:
        if node is not self.place:
            return self.generic_visit(node)
        if isinstance(node, ast.stmt):
            return ast.parse(self.new).body
        call = ast.parse(f"f({self.new})", mode="eval").body
        assert isinstance(call, ast.Call)
        return call.keywords if isinstance(node, ast.keyword) else call.args[0]


def _function(module: object, path: list[str]) -> FunctionType:
    """Return the function of a name, without decorators, properties and classmethods around it."""
    member: Any = module
    for name in path:
        member = inspect.getattr_static(member, name)
    member = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    return inspect.unwrap(member)


@contextmanager
def replace_source(module: str, function: str, old: str, new: str) -> Iterator[None]:
    """Run `function` with `new` for `old`. Raises Stale unless `old` is one expression of it."""
    name = module if module.startswith("fastsam") else f"fastsam.fed.{module}"
    loaded_module, path = importlib.import_module(name), function.split(".")
    tree = ast.parse(inspect.getsource(loaded_module))
    node: Any = tree
    for part in path:
        node = next((n for n in node.body if getattr(n, "name", None) == part), None)
        if node is None:
            raise Stale(f"{name} has no function {function}: bring the table of mutants up to date")
    statements = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Expr)}  # statements in themselves
    texts, kinds = {old, ast.unparse(ast.parse(old))}, (ast.expr, ast.stmt, ast.keyword)
    candidates = (n for n in ast.walk(node) if isinstance(n, kinds) and id(n) not in statements)
    places = [n for n in candidates if ast.unparse(n) in texts]
    if len(places) != 1:
        raise Stale(f"{name}: {function} has {old!r} {len(places)} times, expected once: bring the table up to date")
    new_tree = ast.fix_missing_locations(_Swap(places[0], new).visit(tree))
    code = compile(new_tree, loaded_module.__file__ or name, "exec", dont_inherit=True)
    for part in path:
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part)
    target = _function(loaded_module, path)
    original = target.__code__
    try:
        target.__code__ = code
        yield
    finally:
        target.__code__ = original
