"""The import rules: permitted imports, read from the sources, and modules that `import fastsam` must not load."""

import ast
import graphlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.places import ROOT

# A module may import from its own group and from the groups named; the first group whose prefix fits is its own.
# Folders of `fed` are ordered in levels: a folder imports from lower levels only, and `lab` is above them. Only ops
# and optim run kernels, and only backends knows where they are (`product` and `rowprograms` belong to no backend).
BELOW_FED = ("fastsam.optim", "fastsam.step", "fastsam.ops", "fastsam.arena", "fastsam.extras")
FLOORS = (  # from the ground up; rooms of one floor do not know each other
    ("common", "sums"),
    ("aggregation", "clients", "models", "update"),
    ("data", "executors"),
    ("algorithms",),
    ("measures", "privacy"),
    ("rundir", "stages"),
    ("callbacks",),
    ("loop",),
)


def _rooms() -> Iterator[tuple[str, tuple[str, ...]]]:
    lower_rooms: tuple[str, ...] = ()
    for floor in FLOORS:
        rooms = tuple(f"fastsam.fed.{room}" for room in floor)
        exceptions = ("fastsam.backends", "fastsam.__version__") if floor[0] in ("common", "rundir", "loop") else ()
        allowed_rooms = lower_rooms
        if floor == ("algorithms",):  # the only part of executors is the handle that loops get
            allowed_rooms = (
                *(room for room in lower_rooms if room != "fastsam.fed.executors"),
                "fastsam.fed.executors.client",
            )
        yield from ((room, (*allowed_rooms, *BELOW_FED, *exceptions)) for room in rooms)
        lower_rooms += rooms


RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fastsam_kernels", ()),
    ("fastsam.backends", ("fastsam_kernels",)),
    ("fastsam.arena", ("fastsam.backends",)),
    (
        "fastsam.ops",
        (
            "fastsam.arena", "fastsam.backends", "fastsam_kernels.small_bmm", "fastsam_kernels.rowprograms",
            "fastsam_kernels.orders",
        ),
    ),
    ("fastsam.extras", ()),
    ("fastsam.step", ()),
    ("fastsam.batchnorm", ()),
    ("fastsam.optim", ("fastsam.ops", "fastsam.arena", "fastsam.backends", "fastsam.step", "fastsam.batchnorm")),
    ("fastsam.integrations", ("fastsam.optim", "fastsam.batchnorm")),
    *_rooms(),
    ("fastsam.fed", BELOW_FED),
    ("fastsam.lab", ("fastsam.fed", *BELOW_FED, "fastsam.backends", "fastsam.__version__", "fastsam.FusedSAM")),
)  # fmt: skip
OUTER = frozenset({"fastsam", "fastsam.__main__"})  # may import all modules, and no module imports them
# Definitions that all backends share: the layout of the device scalars, dtypes, update rules, row programs' words.
SHARED = tuple(
    f"fastsam_kernels.{name}"
    for name in ("hparams", "constants", "rule", "rules", "rowprograms.instructions", "weak_tensors")
)
BACKEND_NAMES = frozenset({"native", "triton", "foreach", "reference"})
EXECUTOR_NAMES = frozenset({"sequential", "threads", "streams", "graph", "vmap"})
# imported inside the function that needs them
HEAVY = frozenset(
    {
        *("matplotlib", "PIL", "sklearn", "triton", "pandas", "scipy", "rich"),
        *("lightning", "transformers", "accelerate", "tensorboard", "wandb", "mlflow", "dp_accounting"),
    }
)


def modules() -> dict[str, Path]:
    """Every module of the two packages, by its installed name."""
    results = {}
    for folder, package in (("fastsam", "fastsam"), ("kernels", "fastsam_kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            results[".".join((package, *parts)).removesuffix(".__init__")] = path
    return results


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Yield absolute names of the imports of `tree` with their lines.

    `from a import b` gives `a.b`, which may be a module or a name in a module.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{prefix}.{alias.name}", node.lineno) for alias in node.names)


def is_in(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def group(module: str) -> tuple[str, tuple[str, ...]] | None:
    return next((rule for rule in RULES if is_in(module, rule[0])), None)


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Each import of `source` that the rules forbid to `module`."""
    rule = group(module)
    errors = []
    for name, line in imports(ast.parse(source), module, is_package):
        if name.split(".")[0] in ("tests", "bench", "kernels", "tools"):
            errors.append(f"{module}:{line} imports {name}: nothing imports these folders")
        if name.split(".")[0] not in ("fastsam", "fastsam_kernels"):
            continue
        if rule and not any(is_in(name, prefix) for prefix in (rule[0], *rule[1], *SHARED)):
            errors.append(f"{module}:{line} imports {name}")
    return errors


def named_strings(source: str, names: frozenset[str]) -> list[str]:
    """Return string constants of `source` that are one of `names`.

    The argument of `find_spec` is left out, because it is a package and not a backend; torch.compile needs it too.
    """
    tree = ast.parse(source)
    packages = {
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "find_spec"
        for argument in node.args
    }
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in packages)
    return [f"line {c.lineno}: {c.value!r}" for c in constants if isinstance(c.value, str) and c.value in names]


def top_level_imports(source: str, module: str, is_package: bool) -> set[str]:
    """The packages imported when the module is: outside functions and `if TYPE_CHECKING`."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.dump(node.test) else self.generic_visit(node)

    tree = Strip().visit(ast.parse(source))
    return {name.split(".")[0] for name, _ in imports(tree, module, is_package)}


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and under TYPE_CHECKING count too. A package's `__init__` stands for no module here."""
    files = {name: path for name, path in modules().items() if path.name != "__init__.py"}
    for path in sorted((ROOT / "bench").rglob("*.py")):
        files[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    graph = {}
    for name, path in files.items():
        targets = (name_imported for name_imported, _ in imports(ast.parse(path.read_text()), name, False))
        graph[name] = {m for target in targets for m in (target, target.rpartition(".")[0]) if m in files and m != name}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_every_module_has_a_rule() -> None:
    names = [name for name in modules() if name not in OUTER and group(name) is None]
    assert not names, f"say in RULES what {names} may import"


def test_every_module_is_on_the_design_page() -> None:
    """The page lists the modules of `fastsam`, `fastsam.lab` and `fastsam.fed`, and the folders of `fed`, whose
    docstring lists their modules."""
    page = (ROOT / "docs" / "design.md").read_text()
    paths = [p for folder in ("", "fed", "lab") for p in (ROOT / "fastsam" / folder).iterdir()]
    rooms = [
        p.name if p.is_file() else f"{p.name}/" for p in paths if p.suffix == ".py" or (p / "__init__.py").is_file()
    ]
    named_rooms = [room for room in rooms if not room.startswith("__")]
    missing_rooms = [room for room in named_rooms if not re.search(rf"[`/]{re.escape(room)}`", page)]
    assert rooms and not missing_rooms, f"docs/design.md does not say what {missing_rooms} are for"


def test_imports_point_down() -> None:
    errors = [
        v for name, path in modules().items() for v in violations(name, path.read_text(), path.name == "__init__.py")
    ]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fastsam_kernels.native", "import fastsam"),
        ("fastsam_kernels.native", "def f():\n    from fastsam.ops import norm"),
        ("fastsam.backends", "from .ops import norm"),
        ("fastsam.arena", "from . import optim"),
        ("fastsam.ops", "from .optim import FusedSAM"),
        ("fastsam.optim", "from . import fed"),
        ("fastsam.optim", "from fastsam_kernels import reference"),
        ("fastsam.fed.loop.loop", "import fastsam_kernels.native"),
        ("fastsam.fed.loop.loop", "from fastsam.lab.cli import main"),
        ("fastsam.fed.rundir.result", "from fastsam.lab import report"),
        ("fastsam.fed.update.steps", "from fastsam.fed.loop import options"),
        ("fastsam.fed.common.checks", "from fastsam.fed.sums import ranks"),
        ("fastsam.fed.executors.auto", "import fastsam.fed"),
        ("fastsam.fed.algorithms.fedsam", "from ..executors import sequential"),
        ("fastsam.fed.algorithms.fedsam", "from .. import executors"),
        ("fastsam.fed.algorithms.fedsam", "from ... import backends"),
        ("fastsam.fed.executors.threads", "from ...backends import select"),
        ("fastsam.fed.executors.threads", "from fastsam.fed.algorithms import FedSAM"),
        ("fastsam.optim", "import tests.op_cases"),
    ],
)
def test_the_rules_catch(module: str, source: str) -> None:
    assert violations(module, source), f"{source!r} in {module} should be a violation"


def test_algorithms_and_executors_name_neither_backend_nor_each_other() -> None:
    errors = []
    for name, path in modules().items():
        if is_in(name, "fastsam.fed.algorithms"):
            names = (BACKEND_NAMES - {"reference"}) | EXECUTOR_NAMES  # FedLESAM has an option of that name
            errors += [f"{name} {problem}" for problem in named_strings(path.read_text(), names)]
        if is_in(name, "fastsam.fed.executors"):
            errors += [f"{name} {problem}" for problem in named_strings(path.read_text(), BACKEND_NAMES)]
    assert not errors, "\n".join(errors)
    assert named_strings('x = f(backend="native")', BACKEND_NAMES), "the check itself must see a name"
    assert not named_strings('x = util.find_spec("triton")', BACKEND_NAMES)


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    heavy_imports = {
        name: top_level_imports(path.read_text(), name, path.name == "__init__.py") & HEAVY
        for name, path in modules().items()
    }
    # A Triton kernel module is itself imported at first use.
    errors = {
        name: result for name, result in heavy_imports.items() if result - ({"triton"} if "triton" in name else set())
    }
    assert not errors, f"imported at the top: {errors}"


PROBE = """
import json, os, sys
import torch
before = set(sys.modules)
events = []
watched = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "ctypes.dlopen")
sys.addaudithook(lambda name, arguments: events.append([name, str(arguments[:1])]) if name in watched else None)
import fastsam
fastsam.FusedSAM, fastsam.fed  # imported when they are named
print(json.dumps({
    "events": events,
    "cuda": torch.cuda.is_initialized(),
    "modules": sorted({m.split(".")[0] for m in set(sys.modules) - before}),
    "libraries": [lib for lib in open("/proc/self/maps").read().split() if "libfastsam" in lib],
}))
"""


def test_import_fastsam_touches_no_cuda_no_compiler_and_nothing_heavy(tmp_path: Path) -> None:
    """FASTSAM_JIT=1 compiles at first use, and not at import."""
    env = {**os.environ, "FASTSAM_JIT": "1", "XDG_CACHE_HOME": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120
    )
    assert process.returncode == 0, process.stderr
    records = json.loads(process.stdout)
    assert records["events"] == [], "import fastsam started a process or loaded a library"
    assert not records["cuda"] and records["libraries"] == []
    assert not HEAVY & set(records["modules"]), f"import fastsam imports {HEAVY & set(records['modules'])}"
    assert list(tmp_path.iterdir()) == [], "import fastsam wrote into the cache"
