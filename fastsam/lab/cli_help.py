"""The help of the `fastsam` command: flags, then the keys of a config, as wide as the terminal."""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

INDENT = 22  # columns before a meaning: the longest key and two blanks


class Parser(argparse.ArgumentParser):
    """Parser of a command. With `shows_keys`, `--help TOPIC` imports `fastsam.fed` and shows the keys of a config."""

    def __init__(self, *, shows_keys: bool = False, **keywords: Any) -> None:
        layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=INDENT)
        super().__init__(**{"formatter_class": layout, **keywords}, allow_abbrev=False, add_help=not shows_keys)
        if shows_keys:
            text = f"this page, or the keys of a config: {', '.join(TOPICS)}"
            self.add_argument("-h", "--help", nargs="?", metavar="TOPIC", action=_Help, help=text)

    def show_examples(self, lines: Sequence[str]) -> None:
        """Show command lines at the end of the page."""
        self.epilog = "examples:\n" + "\n".join(f"  {line}" for line in lines)

    def error(self, message: str) -> NoReturn:
        """End with the usage, the message, and the choice that was probably meant."""
        match = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if match and match[1] in _OTHER_COMMANDS:
            super().error(f"there is no command {match[1]!r}: write `{_OTHER_COMMANDS[match[1]]}`")
        suggestions = difflib.get_close_matches(match[1], re.findall(r"[\w-]+", match[2]), n=1) if match else []
        super().error(message + "".join(f"; did you mean {name!r}?" for name in suggestions))


_OTHER_COMMANDS = {  # commands that do not exist and that a user may type
    "sweep": "fastsam compare CONFIG --sweep lr=0.05,0.1", "tune": "fastsam compare CONFIG --sweep lr=0.05,0.1",
    "train": "fastsam run CONFIG", "resume": "fastsam run CONFIG --run-dir DIR --resume", "plot": "fastsam plots DIR",
    "version": "fastsam --version", "list": "fastsam run --help algorithms",
}  # fmt: skip
TOPICS = ("data", "model", "run", "privacy", "compression", "measures", "algorithms", "all")


class _Help(argparse.Action):
    """Prints the page of a command, or the keys of a topic, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        if values is None:
            parser.print_help()
        elif values in TOPICS:
            print("\n".join(_keys(values)))
        else:
            parser.error(f"argument --help: invalid choice: {values!r} (choose from {', '.join(map(repr, TOPICS))})")
        parser.exit()


def _keys(topic: str) -> list[str]:
    """Return the lines of a topic: keys with meaning, choices and default, and algorithms with their options."""
    from fastsam.lab import config, run_config

    tables = {"data": run_config.table(run_config.DataKeys), "model": run_config.table(run_config.ModelKeys)}
    tables["run"] = {key: row for key, row in run_config.KEYS.items() if key not in (*tables["data"], *tables["model"])}
    tables |= {
        name: {f"{name}.{key}": row for key, row in options.items()}
        for name, options in run_config.OPTION_TABLES.items()
    }
    lines = []
    for name, rows in tables.items():
        if topic in (name, "all"):
            lines += [f"{name} keys, each also a flag (--key value), with their defaults:"]
            lines += [line for key, row in rows.items() for line in _entry(key, f"{row.meaning} [{row.default_text}]")]
    if topic in ("algorithms", "all"):
        lines += ["algorithms and their options (--option value, or a table in the file):"]
        for name in config.registry:
            lines += _entry(name, ", ".join(config.algorithm_options(name)) or "-")
    return lines


def _entry(name: str, text: str) -> list[str]:
    """Return the lines of `name` and `text` in two columns, wrapped to the terminal's width."""
    width = max(60, shutil.get_terminal_size().columns - 2)
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {name}".ljust(INDENT - 1) + " ",
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
