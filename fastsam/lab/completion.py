"""Completion of the `fastsam` command in a shell, by shtab: `fastsam --print-completion bash`."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return what a shell evaluates: commands, options, files, and the keys of a config with their choices."""
    import shtab

    from fastsam.lab.run_config import KEYS

    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    for name in ("run", "compare"):
        for key, row in KEYS.items():
            commands[name].add_argument(f"--{key.replace('_', '-')}", choices=row.choices or None)
    for command in commands.values():
        for action in command._actions:
            if action.metavar in ("CONFIG", "DIR"):
                action.complete = shtab.FILE if action.metavar == "CONFIG" else shtab.DIRECTORY
    return str(shtab.complete(parser, shell=shell))
