"""The `fastsam` command: `info`, `bench`, `demo`, `run`, `compare`, `reproduce` and `plots`.

Heavy modules (torch first of all) are imported inside the commands, so that `fastsam info` can say that torch is
missing. Exit codes: 0 done; 1 an error, shown in one message; 2 wrong usage; 130 interrupted with Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastsam.extras import DISTRIBUTION, install_command, installed_version, missing_module_hint, torchvision_command
from fastsam.lab import completion
from fastsam.lab.cli_parser import parser

if TYPE_CHECKING:
    from rich.console import Console

    from fastsam.lab.config import ConfigSource

USAGE, INTERRUPT = 2, 130
NO_VERSION = "not installed"
_WITHOUT_KEYS = ("info", "bench", "demo", "plots")  # commands that take no key of a config
MOST_POINTS = 1001  # largest number of points on a side of a loss surface: a million losses
OPTIONAL = {  # packages that some uses need, and what each is for
    "triton": f"kernels for GPUs: {install_command('triton')}",
    "torchvision": f"EMNIST, CIFAR, image folders and the model vit_b_32: {torchvision_command()}",
    "dp-accounting": f"epsilon of runs with noise: {install_command('privacy')}",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    top = parser()
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _call_command(top, argv, debug)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, and not at Python's exit, where a closed pipe would be an error
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted. {interrupt}".rstrip(), file=sys.stderr)
        return INTERRUPT
    except BrokenPipeError:  # the reader closed the pipe, as in `fastsam info | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _report_error(error, debug)


def _call_command(top: argparse.ArgumentParser, argv: Sequence[str] | None, debug: bool) -> int:
    """Call the command that the arguments name, and return its exit code."""
    arguments, flags = top.parse_known_args(argv)
    if arguments.version:
        print(f"fastsam {_version(DISTRIBUTION)}")
        return 0
    if arguments.print_completion:
        print(completion.script(top, arguments.print_completion))
        return 0
    if arguments.command is None:
        top.print_help()
        return USAGE
    if arguments.command == "demo" and arguments.copy is None:
        from fastsam.lab import examples

        return _call_command(top, ["compare", str(examples.path(examples.SHOWCASE)), *flags], debug)
    if flags and (arguments.command in _WITHOUT_KEYS or not flags[0].startswith("--")):
        top.error(f"unrecognized arguments: {' '.join(flags)}")
    with warnings.catch_warnings():
        if not debug:
            warnings.showwarning = _show_warning
        if arguments.command != "run":
            _check_one_process(arguments.command)
        if arguments.command == "reproduce" and arguments.list:
            return list_tables(arguments, flags)
        if arguments.command in _WITHOUT_KEYS:
            call = {"info": info, "bench": bench, "demo": copy_examples, "plots": plots}[arguments.command]
            return call(arguments, flags)
        from fastsam.lab.trust import trust_names

        with trust_names(*arguments.trust):
            return {"run": run, "compare": compare, "reproduce": reproduce}[arguments.command](arguments, flags)


def _check_one_process(command: str) -> None:
    """Raise ValueError if a launcher started several processes of a command that needs only one."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(f"`fastsam {command}` runs in one process; torchrun is for `fastsam run`")


def _show_warning(message: Warning | str, *origin: Any, **options: Any) -> None:
    """Print a warning as one line, without the place in the code that raised it."""
    print(f"warning: {message}", file=sys.stderr)


def _report_error(error: Exception, debug: bool) -> int:
    """Print the error as one message, with its type if the message was not written for users. Return the exit code."""
    if debug:
        traceback.print_exception(error)
    is_package_error = type(error).__module__.startswith("fastsam.")
    is_for_users = is_package_error or isinstance(error, (ValueError, RuntimeError, OSError))
    print(f"error: {error}" if is_for_users else f"error: {type(error).__name__}: {error}", file=sys.stderr)
    hint = missing_module_hint(error.name) if isinstance(error, ImportError) else None
    if isinstance(error, ImportError) and error.name == "torch":
        print("fastsam needs PyTorch: pip install 'torch>=2.10'", file=sys.stderr)
    elif hint is not None:
        print(hint, file=sys.stderr)
    elif not is_for_users and not debug:
        print("run it again with --debug for the traceback", file=sys.stderr)
    return 1


def info(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print versions, optional packages included, then the table of backends, and what to do next.

    With `--json` print the same as a JSON object. Return 1 if torch cannot be imported.
    """
    python = f"{platform.python_version()} ({platform.machine()}, {platform.system()})"
    versions = {DISTRIBUTION: _version(DISTRIBUTION), "python": python} | {p: _version(p) for p in ("torch", "numpy")}
    versions |= {package: installed_version(package) or f"{NO_VERSION} ({use})" for package, use in OPTIONAL.items()}
    if not arguments.json:
        print(*(_wrapped(f"{name:<13} {text}", 14) for name, text in versions.items()), sep="\n")
    import torch

    from fastsam import backends
    from fastsam.lab import next_steps

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    libraries, driver = backends.libraries()
    rows: list[dict[str, Any]] = [
        {"name": b.name, "device": b.device, "available": b.available, "reason": b.reason} for b in backends.table()
    ]
    reasons = {(row["name"], row["device"]): row["reason"] for row in rows if not row["available"]}
    steps = next_steps.steps(reasons, torch_cuda=torch.version.cuda, gpu=torch.cuda.is_available())
    if arguments.json:
        facts = {"versions": versions, "cuda": cuda, "driver": driver, "libraries": libraries, "backends": rows}
        print(json.dumps(facts | {"auto": backends.backend(), "advice": steps}, indent=1))
        return 0
    served = f", a driver for CUDA {driver} and older" if driver else ""
    print(f"{'cuda':<13} {cuda or 'no device'}{served}")
    print(_wrapped(f"{'libraries':<13} {libraries}", 14) + "\n")
    print(f"{'backend':<11}{'device':<8}{'available':<11}why not")
    for row in rows:
        answer = "yes" if row["available"] else "no"
        print(_wrapped(f"{row['name']:<11}{row['device']:<8}{answer:<11}{row['reason'] or ''}".rstrip(), 30))
    print(f"\n`auto` on this machine: {backends.backend()}\n")
    print(*(_wrapped(step, 7) for step in steps), sep="\n")
    return 0


def bench(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Measure steps and rounds on this machine."""
    from fastsam.lab import bench

    bench.lines(bench.device_of(arguments.device))
    return 0


def _wrapped(text: str, indent: int) -> str:
    """Return a line in lines of the terminal, broken between words. A file or a pipe gets it as it is."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def run(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run `fastsam run`."""
    from fastsam.fed.sums.ranks import join_ranks
    from fastsam.lab import compare, experiment, run_config
    from fastsam.lab import config as configs
    from fastsam.lab.report import files, tables
    from fastsam.lab.report.finished import title_of

    source = configs.read(arguments.config, flags)
    _show_imports(source, arguments)
    config = configs.resolve(source)
    algorithm = run_config.short_name(config.algorithm)
    if arguments.print_config:
        print(json.dumps(config.record(), indent=1))
        return 0
    experiment.keywords(config)  # bad keywords are reported before data are read
    run_setup = experiment.build(config)
    with join_ranks() as ranks:
        # The directory of rank 0: a number that is free now may be taken a moment later.
        directory = ranks.broadcast(
            arguments.run_dir or numbered_directory(f"{config.name}-{algorithm}", arguments.resume)
        )
        console = _console(quiet=not ranks.first)
        resume_command = (
            f"fastsam run {_quote(directory / 'config.json')} --run-dir {_quote(directory)}{_trust(arguments)} --resume"
        )
        finished_run = compare.train(run_setup, directory, arguments.resume, console, algorithm, resume_command)
    if not ranks.first:
        return 0
    title = title_of([finished_run], run_setup.data.name)
    figures = files.draw_curves([finished_run], directory, title)
    tables.short_table([finished_run], f"{title}, {len(run_setup.data)} clients", console.width).show(console)
    _say(console, {figure.path.stem: figure.path for figure in figures} | {"run directory": directory})
    return 0


def compare(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run `fastsam compare`. All configs are checked before the first run starts."""
    from fastsam.lab import compare, experiment
    from fastsam.lab import config as configs
    from fastsam.lab.report import files, tables
    from fastsam.lab.report.finished import title_of

    lists = (_split(arguments.algorithms), _split(arguments.seeds), arguments.sweep)
    source = configs.read(arguments.config, flags)
    _show_imports(source, arguments)
    plan = compare.plan(source, *lists)
    if arguments.print_config:
        print(json.dumps(plan.record(), indent=1))
        return 0
    if arguments.surface is not None and not 2 <= arguments.surface <= MOST_POINTS:
        raise ValueError(
            f"--surface needs 2 points or more, {MOST_POINTS} at most, got {arguments.surface}; 51 is the usual grid"
        )
    directory = arguments.run_dir or numbered_directory(f"{plan.name}-compare", arguments.resume)
    compare.check_directory(plan, directory, arguments.resume)
    for config in plan.configs:
        experiment.keywords(config)
    data = compare.load_all(plan)
    compare.write_record(plan, directory)
    repeat_command = f"fastsam compare {_quote(directory / 'config.json')}{_trust(arguments)}"
    console = _console()
    finished_runs, errors = compare.train_all(plan, data, directory, arguments.resume, console, repeat_command)
    if not finished_runs:
        raise RuntimeError(f"no run of the comparison in {directory} was finished")
    title = title_of(finished_runs, ", ".join(dict.fromkeys(data_set.name for data_set in data.values())))
    facts = compare.facts(plan, data) | {f"failed: {name}": text for name, text in errors.items()}
    points = arguments.surface
    grids = {} if points is None else compare.surfaces(plan, data, finished_runs, points, directory)
    figures = files.write_comparison(finished_runs, directory, title, facts, repeat_command, grids)
    clients = " or ".join(dict.fromkeys(str(len(data_set)) for data_set in data.values()))
    tables.short_table(finished_runs, f"{title}, {clients} clients", console.width).show(console)
    for sentence in tables.sentences(finished_runs):
        console.print(sentence, soft_wrap=not console.is_terminal)  # only a terminal is not searched line by line
    console.print()
    paths = {name: directory / file for name, file in files.COMPARISON_FILES.items()}
    paths |= {figure.path.stem: figure.path for figure in figures}
    _say(console, paths | {"run directory": directory})
    return 1 if errors else 0


def reproduce(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run `fastsam reproduce`."""
    from fastsam.lab.reproduce import command, table

    console = _console()
    if arguments.table is None:
        raise ValueError(
            f"which table? Choose from {', '.join(table.names())}; `fastsam reproduce --list` describes them"
        )
    stem = arguments.table if arguments.scale is None else f"{arguments.table}-{arguments.scale}"
    directory = arguments.run_dir or numbered_directory(stem, arguments.resume)
    seeds = _split(arguments.seeds)
    request = (arguments.table, arguments.scale, seeds, flags)
    code, paths = command.reproduce(*request, directory, arguments.resume, console)
    _say(console, paths | {"run directory": directory})
    return code


def list_tables(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run `fastsam reproduce --list`. It reads a file, because resolving all tables needs torch and seconds."""
    if flags or any((arguments.table, arguments.scale, arguments.seeds, arguments.run_dir, arguments.resume)):
        raise ValueError("--list shows all tables and figures and takes nothing else; leave the other words out")
    listing = resources.files("fastsam.lab") / "reproduce" / "tables" / "listing.json"
    rows = json.loads(listing.read_text())
    indent = "\n" + " " * (max(len(name) for name, *_ in rows) + 2)
    _say(
        _console(),
        {name: f"{title}{indent}data: {needs}; runs: {runs} with --scale" for name, title, needs, runs in rows},
    )
    return 0


def copy_examples(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run `fastsam demo --copy DIR`."""
    from fastsam.lab import examples

    for path in examples.copy(arguments.copy):
        print(f"fastsam compare {_quote(path)}")
    return 0


def plots(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run `fastsam plots`."""
    from fastsam.lab import load_runs

    figures = load_runs.draw(arguments.directories, arguments.out)
    _say(_console(), {figure.path.stem: figure.path for figure in figures})
    return 0


def _show_imports(source: ConfigSource, arguments: argparse.Namespace) -> None:
    """Print the imports of a config before its run is resumed, and so before anything is imported."""
    if not arguments.resume:
        return
    from fastsam.lab.config import show_imports

    config = Path(arguments.config)
    for line in show_imports(source, [config, config.parent, *([arguments.run_dir] if arguments.run_dir else [])]):
        print(line, file=sys.stderr)


def _trust(arguments: argparse.Namespace) -> str:
    """Return the --trust flags as they were given, for a command that the user can copy."""
    return "".join(f" --trust {shlex.quote(name)}" for name in arguments.trust)


def numbered_directory(stem: str, resume: bool) -> Path:
    """Return ``runs/<stem>-NNN`` with the number after the highest existing one, so that nothing is overwritten.

    With `resume`, return the existing directory with the highest number. The first number is 001.
    """
    parent, pattern = Path("runs"), re.compile(re.escape(stem) + r"-(\d{3,})")
    names = [path.name for path in (parent.iterdir() if parent.is_dir() else ())]
    last = max((int(m[1]) for name in names if (m := pattern.fullmatch(name))), default=0)
    return parent / f"{stem}-{max(last, 1) if resume else last + 1:03d}"


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _version(package: str) -> str:
    return installed_version(package) or NO_VERSION


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _console(quiet: bool = False) -> Console:
    from rich.console import Console

    # elsewhere rich assumes 80 columns and would break the table's lines
    return Console(width=None if sys.stdout.isatty() else 120, quiet=quiet, highlight=False, markup=False)


def _say(console: Console, facts: Mapping[str, object]) -> None:
    """Print lines to read or to copy, without wrapping and colours."""
    width = max(13, *map(len, facts)) + 2
    for name, value in facts.items():
        console.print(f"{name + ':':<{width}}{value}", soft_wrap=True)
