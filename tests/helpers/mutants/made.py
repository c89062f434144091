"""Mutants that a program makes, or that were written by hand, with the test that notices each. `made/ROOM.txt` has the
mutants of a room.

- `python -m tests.helpers.mutants.made map` stores in build/mutants which tests run a line. It takes a quarter of an
  hour.
- `... draw ROOM` draws mutants until the room has 40 that fit the code.
- `... run ROOM` runs them, stops at the first test that fails, and writes their states.

A state is `killed` with the test, `survived`, or `equivalent` with a reason. Reasons are written by hand.
"""

import argparse
import ast
import copy
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.mutants.apply import Stale, replace_source
from tests.helpers.places import ROOT

ROOMS = {
    "optim": "fastsam/optim",
    "lab": "fastsam/lab",
    **{path.parent.name: f"fastsam/fed/{path.parent.name}" for path in ROOT.glob("fastsam/fed/*/__init__.py")},
}
FOLDER, MAP = Path(__file__).parent / "made", ROOT / "build" / "mutants"
COUNT = 40  # mutants a room
SECONDS = 20.0  # duration of the tests of a mutant
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


class Row(NamedTuple):
    """A mutant and its state."""

    module: str
    function: str
    old: str
    new: str
    state: str

    def __str__(self) -> str:
        return f"{self.module} {self.function}: {self.old} => {self.new} @ {self.state}"


def read(room: str) -> list[Row]:
    """Return the rows of a room, in the form `module function: old => new @ state`."""
    path = FOLDER / f"{room}.txt"
    result = []
    for line in path.read_text().splitlines() if path.exists() else []:
        change, _, state = line.rpartition(" @ ")
        place, _, change = change.partition(": ")
        (module, function), (old, new) = place.split(), change.split(" => ")
        result.append(Row(module, function, old, new, state))
    return result


def write(room: str, rows: list[Row]) -> None:
    """Write the rows of a room."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{room}.txt").write_text("".join(f"{row}\n" for row in rows))


# --- mutants of a function ---


def mutations(node: ast.AST) -> Iterator[ast.AST | str]:
    """Yield the replacements of a node."""
    changed = copy.deepcopy(node)
    if isinstance(changed, ast.Compare) and type(changed.ops[0]) in SWAPS:
        changed.ops[0] = SWAPS[type(changed.ops[0])]()
        yield changed
    elif isinstance(changed, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(changed.op) in SWAPS:
        changed.op = SWAPS[type(changed.op)]()
        yield changed
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not | ast.USub):
        yield changed.operand
    elif isinstance(changed, ast.IfExp):
        yield changed.body
        yield changed.orelse
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, bool):
        yield ast.Constant(not changed.value)
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, int | float):
        yield ast.Constant(changed.value + 1)
    elif isinstance(changed, ast.Return) and changed.value is not None:
        yield "return None"
    elif isinstance(changed, ast.Expr) and isinstance(changed.value, ast.Call):
        yield "pass"


def parts(node: ast.AST, parents: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, ...]]:
    """Yield every node of a function's body after its parents, except for texts, messages of errors and types."""
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Raise):
                yield (*parents, child)
                yield from parts(child, (*parents, child))


def mutants_of(module: str, function: str, tree: ast.AST) -> Iterator[tuple[Row, int]]:
    """Yield the mutants of a function, with their line. Their text is once in the function."""
    texts: Counter[str] = Counter()
    for *_, node in parts(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.keyword):
            texts[ast.unparse(node)] += not isinstance(node, ast.Expr)  # its value has the same text
    for *parents, node in parts(tree):
        for new in mutations(node):
            text = new if isinstance(new, str) else ast.unparse(new)
            old = whole = node
            changed: ast.AST = ast.parse(text).body[0] if isinstance(new, str) else copy.deepcopy(new)
            for parent in reversed(parents):
                if texts[ast.unparse(old)] == 1 or not isinstance(parent, ast.expr | ast.keyword):
                    break
                around = copy.deepcopy(parent)
                replace_child(parent, around, whole, changed)
                old, whole, changed = parent, parent, around
            before, after = ast.unparse(old), ast.unparse(changed)
            if "\n" not in before + after and len(before) < 200 and " => " not in before + after:
                yield Row(module, function, before, after, "new"), getattr(node, "lineno", 0)


def replace_child(parent: ast.AST, around: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Put `new` into the copy `around` of `parent`, where `parent` has `old`."""
    for name, field in ast.iter_fields(parent):
        if field is old:
            setattr(around, name, new)
        elif isinstance(field, list) and any(child is old for child in field):
            getattr(around, name)[next(i for i, child in enumerate(field) if child is old)] = new


def draw(room: str, seed: int) -> None:
    """Add mutants on lines that some test runs, until the room has COUNT that fit the code."""
    rows = [row for row in read(room) if fits(row)]
    drawn: dict[str, list[Row]] = {}
    for path in sorted((ROOT / ROOMS[room]).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        tests = lines_of(path)
        for owner in ast.parse(path.read_text()).body:
            for node in owner.body if isinstance(owner, ast.ClassDef) else [owner]:
                if isinstance(node, ast.FunctionDef):
                    name = node.name if node is owner else f"{owner.name}.{node.name}"  # type: ignore[attr-defined]
                    drawn.setdefault(module, []).extend(r for r, n in mutants_of(module, name, node) if tests.get(n))
    dice, known = random.Random(seed), {row[:4] for row in rows}
    pool = [row for of_module in drawn.values() for row in of_module if row[:4] not in known]
    dice.shuffle(pool)
    while len(rows) < COUNT and pool:
        if fits(row := pool.pop()):
            rows.append(row)
    write(room, sorted(rows))


def fits(row: Row) -> bool:
    """Return True if a mutant fits the present code and changes it."""
    try:
        with replace_source(*row[:4]):
            return True
    except (Stale, ValueError, AttributeError, StopIteration, SyntaxError):
        return False


# --- the tests of a line ---


class Contexts:
    """Pytest plugin that tells coverage which test runs, and stores the tests' times."""

    def __init__(self, measure: Any) -> None:
        self.measure, self.seconds = measure, dict[str, float]()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.measure.switch_context(item.nodeid)
        begin = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - begin
        return result


def make_map(arguments: list[str]) -> int:
    """Run the tests under coverage, with one context a test."""
    from coverage import Coverage

    MAP.mkdir(parents=True, exist_ok=True)
    measure = Coverage(data_file=str(MAP / "coverage"), source_pkgs=["fastsam", "fastsam_kernels"], config_file=False)
    measure.start()
    plugin = Contexts(measure)
    code = pytest.main(["-q", "-m", "not slow and not gpu_code", *arguments], plugins=[plugin])
    measure.stop()
    measure.save()
    (MAP / "seconds.json").write_text(json.dumps(plugin.seconds))
    return int(code)


def lines_of(path: Path) -> dict[int, list[str]]:
    """Return the tests that run each line of a file, or none for a file that no test imports."""
    from coverage import CoverageData

    data = CoverageData(str(MAP / "coverage"))
    data.read()
    return {n: [t for t in tests if t] for n, tests in data.contexts_by_lineno(str(path)).items()}


def tests_of(row: Row, seconds: dict[str, float]) -> list[str]:
    """Return the tests that run a mutant's function where it differs, quick ones and one of each function first."""
    path = Path(sys.modules[row.module].__file__ or "")
    lines, tests = lines_of(path), set[str]()
    node: ast.AST = ast.parse(path.read_text())
    for part in row.function.split("."):
        node = next(n for n in node.body if getattr(n, "name", None) == part)  # type: ignore[attr-defined]
    for child in ast.walk(node):
        if isinstance(child, ast.stmt | ast.expr) and ast.unparse(child) == row.old:
            for line in range(child.lineno, (child.end_lineno or child.lineno) + 1):
                tests |= set(lines.get(line, ()))
    rank: Counter[str] = Counter()
    ordered = []
    for test in sorted(tests, key=lambda t: seconds.get(t, 0.0)):
        if (ROOT / test.partition("::")[0]).exists():
            rank[name := test.partition("[")[0]] += 1
            ordered.append((rank[name] > 1, rank[name], seconds.get(test, 0.0), test))
    chosen, left = list[str](), SECONDS
    for _, _, took, test in sorted(ordered):
        left -= took
        if left < 0 and chosen:
            break
        chosen.append(test)
    return chosen


# --- running ---


class First:
    """Pytest plugin that stores the first test that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid.partition("[")[0])


def state_of(row: Row, tests: list[str]) -> str:
    """Return the state of a mutant after its tests, which run in a fork of this process."""
    killer = MAP / "killer"
    killer.unlink(missing_ok=True)
    if not (pid := os.fork()):
        resource.setrlimit(resource.RLIMIT_CPU, (int(4 * SECONDS), int(4 * SECONDS)))
        with open(MAP / "log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            with replace_source(*row[:4]):
                options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
                os._exit(int(pytest.main([*options, *tests], plugins=[First(killer)])))
    deadline = time.monotonic() + 40 * SECONDS  # for locks that no thread releases, on a busy machine
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "killed by time"
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(ended[1])
    if killer.exists():
        return f"killed by {killer.read_text()}"
    states = {
        0: "survived",
        1: "killed",
        2: "killed at the import",
        4: "has no test",
        -signal.SIGKILL: "killed by time",
    }
    return states.get(code, f"killed by exit {code}")


def run(room: str, again: bool) -> None:
    """Run the mutants of a room that are new or survived (`again`: all but equivalent ones) and write their states."""
    import torch

    torch.set_num_threads(1)
    rows, seconds = read(room), json.loads((MAP / "seconds.json").read_text())
    for i, row in enumerate(rows):
        if row.state.startswith("equivalent") or (row.state.startswith("killed") and not again):
            continue
        if not fits(row):
            rows[i] = row._replace(state="stale")
        elif tests := tests_of(row, seconds):
            rows[i] = row._replace(state=state_of(row, tests))
        else:
            rows[i] = row._replace(state="has no test")
        print(rows[i], flush=True)
        write(room, rows)
    print(room, dict(Counter(row.state.split()[0] for row in rows)))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("map", "draw", "run"))
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--again", action="store_true", help="run mutants that were killed before, too")
    arguments, rest = parser.parse_known_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if arguments.command == "map":
        return make_map(rest)
    for room in rest or ROOMS:
        if arguments.command == "draw":
            draw(room, arguments.seed)
        else:
            run(room, arguments.again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
