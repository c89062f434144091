"""The commands of README and docs/ exist: targets of make, modules of Python, options of `fastsam`. They are not
run."""

import argparse
import functools
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from fastsam.lab import cli, compare, config
from fastsam.lab.reproduce.command import make_plans
from fastsam.lab.reproduce.table import load
from tests.helpers.pages import PAGES, commands, words
from tests.helpers.places import ROOT

pytestmark = pytest.mark.pages

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.M))
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PACKAGES = {"bench", "fastsam", "fastsam_kernels", "tests"}
READER_FILES = {"my_script.py", "repro.py", "train.py"}  # files of the reader's, or of another project
HOLES = {"POINTS": "5", "TABLE": "fedsam-table2"}  # values for the words that a reader replaces


@pytest.mark.parametrize("page", PAGES)
def test_its_commands_exist(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        try:
            check(command)
        except (AssertionError, ValueError, OSError, SystemExit) as problem:
            pytest.fail(f"{page}: {command}: {problem}")


def test_there_are_commands_of_every_kind() -> None:
    result = {words(command)[0] for page in PAGES for command in commands(page)}
    assert result >= {"make", "python", "fastsam", "torchrun", "pip"}


@pytest.mark.parametrize(
    "command",
    [
        "make tests", "make test WOKERS=0", "python -m bench.reports", "python -m bench step --contender x",
        "python tools/key.py", "pip install 'fused-sam[labs]'", "fastsam runs", "fastsam runs examples/digits.toml",
        "fastsam run examples/digits.toml --rhoo 1", "fastsam compare CONFIG --algorithms fedsam --seed x",
        "fastsam reproduce fedsam-table9", "fastsam reproduce fedsam-table2 --scale --no-such-key 1",
        "fastsam info --jsn", "torchrun --nproc-per-node 2 -m fastsam run CONFIG --clients many",
    ],
)  # fmt: skip
def test_a_wrong_one_is_noticed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, ValueError, OSError, SystemExit)):
        check(command)


def check(command: str) -> None:
    """Raises whatever shows that it would not work as it is written."""
    program, *arguments = words(command)
    name = program.rpartition("/")[2]
    if name == "torchrun":  # it starts a different command
        position = next(n for n, word in enumerate(arguments) if word == "-m" or word.endswith(".py"))
        name, arguments = "python", arguments[position:]
    {"make": check_make, "python": check_python, "pip": check_pip, "fastsam": check_fastsam}[name](arguments)


def check_make(arguments: Sequence[str]) -> None:
    for word in arguments:
        variable, sets, _ = word.partition("=")
        if sets:
            assert re.search(rf"\$\({variable}\)|^{variable} \?=|\b{variable}=", MAKEFILE, re.M), f"no variable {word}"
        else:
            assert word in TARGETS, f"no target {word}"


def check_pip(arguments: Sequence[str]) -> None:
    for extra in re.findall(r"(?:fused-sam|\.)\[([\w,]+)\]", " ".join(arguments)):
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", PYPROJECT, re.M), f"no extra {name}"


def check_python(arguments: Sequence[str]) -> None:
    if arguments[0] != "-m":
        assert arguments[0] in READER_FILES or (ROOT / arguments[0]).is_file(), f"no file {arguments[0]}"
        return
    module, options = arguments[1], arguments[2:]
    top = module.partition(".")[0]
    if module == "fastsam":
        check_fastsam(options)
    elif top in PACKAGES:
        place = ROOT / re.sub("^fastsam_kernels", "kernels", module).replace(".", "/")
        file = next((path for path in (place.with_suffix(".py"), place / "__main__.py") if path.is_file()), None)
        assert file, f"no module {module}"
        room = "".join(path.read_text() for path in file.parent.rglob("*.py"))
        flags = [word.partition("=")[0] for word in options if word.startswith("--") and word != "--help"]
        assert all(f'"{flag}"' in room for flag in flags), f"{module} does not take all of {flags}"
    else:
        assert importlib.util.find_spec(top) or top in PYPROJECT, f"no module {module}"


def check_fastsam(arguments: Sequence[str]) -> None:
    words_of_command = [word.strip("[]") for word in arguments]
    top = cli.parser()
    # a name or a pattern, and not an example
    if (
        len(words_of_command) == 1
        or "..." in words_of_command
        or "--help" in words_of_command
        or "--key" in words_of_command
    ):
        selection = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction))
        assert words_of_command[0] in (*selection.choices, "--version", "--help"), f"no command {words_of_command[0]}"
        placeholders = ("...", "--help", "--key", "value", "options")
        words_of_command = [HOLES.get(word, word) for word in words_of_command if word not in placeholders]
        if len(words_of_command) > 1:
            top.parse_args(words_of_command)
        return
    options, flags = top.parse_known_args([HOLES.get(word, word) for word in words_of_command])
    if options.command == "reproduce" and not options.list:
        check_plans(options.table, options.scale, tuple(flags))
    elif options.command == "run":
        config.resolve(config.read(example(options.config), flags))
    elif options.command == "compare":
        lists = [text.split(",") if text else None for text in (options.algorithms, options.seeds)]
        compare.plan(config.read(example(options.config), flags), *lists, options.sweep)
    else:
        assert not flags, f"takes no {flags}"


@functools.cache  # pages name the same tables
def check_plans(name: str, scale: str | None, flags: tuple[str, ...]) -> None:
    table = load(name, scale)
    make_plans(table, flags, table.seeds)


def example(path: str) -> Path:
    """Return the config of a command, or an example in place of a config that a reader or an earlier command makes."""
    if (ROOT / path).is_file():
        return ROOT / path
    return ROOT / "examples" / ("digits_sharpness.toml" if path.endswith("config.json") else "digits.toml")
