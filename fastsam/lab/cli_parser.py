"""The parser of the `fastsam` command, with an example for every command."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastsam.lab.cli_help import Parser
from fastsam.lab.completion import SHELLS

EXAMPLES = {  # words after the name of a command
    "bench": ("", "--device cpu"),
    "demo": ("", "--seeds 0,1", "--copy configs"),
    "run": (
        "digits.toml",
        "digits.toml --algorithm fedsam --rho 0.1 --rounds 20",
        "runs/digits-fedsam-001/config.json --run-dir runs/digits-fedsam-001 --resume",
    ),
    "compare": (
        "digits.toml --algorithms fedavg,fedsam --seeds 0,1,2",
        "digits.toml --algorithms fedsam --sweep rho=0.05,0.1,0.2",
    ),
    "reproduce": ("--list", "fedlesam-table2 --scale"),
    "plots": ("runs/a", "runs/a runs/b --out figures"),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser. `parse_known_args` leaves flags for config keys over; `fastsam.lab.config` reads them."""
    top = Parser(prog="fastsam", description="Fused Sharpness-Aware Minimization, and federated experiments with it.")
    top.add_argument("--version", action="store_true", help="print the version and exit")
    text = "print what a shell evaluates to complete this command"
    top.add_argument("--print-completion", metavar="SHELL", choices=SHELLS, help=f"{text}: {' or '.join(SHELLS)}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    text = "versions, and which backends are available and why not"
    commands.add_parser("info", help=text).add_argument("--json", action="store_true", help="print it as JSON")
    text = "how fast steps and rounds are on this machine or GPU, and a line for an issue; two minutes"
    bench = commands.add_parser("bench", help=text)
    bench.add_argument("--device", choices=("cpu", "cuda"), help="what to measure; default: the GPU, if torch sees one")
    text = "five federated algorithms on handwritten digits, side by side; under a minute on two cores"
    demo = commands.add_parser("demo", help=text, usage="fastsam demo [--copy DIR] [options of compare]")
    text = "train nothing, and write the example configs there"
    demo.add_argument("--copy", type=Path, metavar="DIR", help=text)
    usage = "fastsam run CONFIG [--key value ...] [options]"
    run = commands.add_parser("run", help="one federated run from a config file", usage=usage, shows_keys=True)
    usage = "fastsam compare CONFIG --algorithms A,B [--seeds 0,1] [--sweep key=a,b]\n"
    usage += " " * 23 + "[--surface [POINTS]] [--key value ...] [options]"
    text = "several algorithms on the same data, side by side"
    compare = commands.add_parser("compare", help=text, usage=usage, shows_keys=True)
    usage = "fastsam reproduce TABLE [--scale [NAME]] [--seeds 0,1] [--key value ...]\n       fastsam reproduce --list"
    text = "a table or figure of the papers, published numbers beside ours"
    reproduce = commands.add_parser("reproduce", help=text, usage=usage)
    text = "the curves of finished runs, those from Python too"
    plots = commands.add_parser("plots", help=text, usage="fastsam plots DIR [DIR ...] [--out DIR]")
    plots.add_argument(
        "directories", metavar="DIR", nargs="+", type=Path, help="a run directory, or a folder with several below it"
    )
    plots.add_argument(
        "--out", type=Path, metavar="DIR", help="where the figures go; default: the directory, if it is one"
    )
    for command in (run, compare):
        command.add_argument("--print-config", action="store_true", help="print the resolved config as JSON and exit")
        command.add_argument("config", metavar="CONFIG", help=".toml file, or the config.json of a run directory")
    compare.add_argument(
        "--algorithms", metavar="A,B", help="what to compare, or all; default: the file's [compare] table"
    )
    compare.add_argument(
        "--sweep", metavar="KEY=A,B", action="append", help="run every value of a key; given again: all combinations"
    )
    text = "loss surfaces of the final models on a grid [51]"
    compare.add_argument("--surface", metavar="POINTS", type=int, nargs="?", const=51, help=text)
    reproduce.add_argument("table", metavar="TABLE", nargs="?", help="its name, such as fedlesam-table2")
    reproduce.add_argument("--list", action="store_true", help="the tables and figures, and what each needs")
    reproduce.add_argument(
        "--scale", metavar="NAME", nargs="?", const="digits", help="run it in small, on the digits [digits]"
    )
    for command in (compare, reproduce):
        command.add_argument(
            "--seeds", metavar="0,1", help="each algorithm once per seed; default: those of the file or table"
        )
    for command in (run, compare, reproduce):
        text = "where results go; default: a new numbered directory under runs/"
        command.add_argument("--run-dir", type=Path, metavar="DIR", help=text)
        text = "an installed package that the config may import"
        command.add_argument("--trust", action="append", default=[], metavar="PACKAGE", help=text)
        command.add_argument(
            "--resume",
            action="store_true",
            help="continue an interrupted run; without --run-dir: in the last numbered directory",
        )
    for name, lines in EXAMPLES.items():
        commands.choices[name].show_examples([f"fastsam {name} {line}".rstrip() for line in lines])
    for command in (*commands.choices.values(), top):
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show an error's traceback"
        )
    return top
