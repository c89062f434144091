"""The help of the `fastsam` command: flags, then the keys of a config, as wide as the terminal."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from typing import Any, NoReturn

INDENT = 22  # columns before a meaning: what the longest key, and two blanks, leave free


class Parser(argparse.ArgumentParser):
    """With `shows_keys`, help ends with the keys of a config. They need `fastsam.fed`, which is imported only when help
    is asked for."""

    def __init__(self, *, shows_keys: bool = False, **keywords: Any) -> None:
        def layout(prog: str) -> argparse.HelpFormatter:
            return argparse.HelpFormatter(prog, max_help_position=INDENT)

        super().__init__(**{"formatter_class": layout, **keywords}, allow_abbrev=False)
        self.shows_keys = shows_keys

    def error(self, message: str) -> NoReturn:
        """End with the usage, the message, and the choice that was probably meant."""
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        close = difflib.get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), n=1) if found else []
        super().error(message + "".join(f"; did you mean {name!r}?" for name in close))

    def format_help(self) -> str:
        return super().format_help() + (_keys() if self.shows_keys else "")


def _keys() -> str:
    """Every key with its meaning, its choices and its default, and every algorithm with its options."""
    from fastsam.lab import config

    lines = ["", "config keys, each also a flag (--key value), with their defaults:"]
    of_tables = {f"{table}.{key}": row for table, rows in config.OPTION_TABLES.items() for key, row in rows.items()}
    for key, row in (config.KEYS | of_tables).items():
        lines += _entry(key, f"{row.meaning} [{row.default_text}]")
    lines += ["", "algorithms and their options (--option value, or a table in the file):"]
    for name in config.registry:
        lines += _entry(name, ", ".join(config.algorithm_options(name)) or "-")
    return "\n".join(lines) + "\n"


def _entry(name: str, text: str) -> list[str]:
    """`name`, and `text` in the column beside it, wrapped to the terminal's width."""
    width = max(60, shutil.get_terminal_size().columns - 2)
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {name}".ljust(INDENT - 1) + " ",
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
