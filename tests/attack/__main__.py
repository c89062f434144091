"""Runs the attacks: `python -m tests.attack --minutes 10 --seed 0 --out FILE.json`; `--only NAME --number N` repeats
one trial.

Prints trials and failures; the exit code is 1 when something failed.
"""

import argparse
import importlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.environment import command_line, facts
from tests.attack.plan import ATTACKS
from tests.attack.report import KIND, line
from tests.attack.trials import Attack, Count


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description="Attacks on what fastsam promises.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all attacks, dealt out by their shares [10]")
    parser.add_argument("--seed", type=int, default=0, help="which trials: those of another seed are others [0]")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(attack.name for attack in ATTACKS)}")
    parser.add_argument("--trials", type=int, help="of each attack, in place of minutes")
    parser.add_argument("--number", type=int, help="one trial alone, as a failure names it; with --only")
    parser.add_argument("--examples", type=Path, metavar="DIR", help="folder of failing values: they are tried first")
    parser.add_argument("--out", type=Path, metavar="FILE", help="what came of it, as JSON")
    return parser


def select_attacks(names: str | None) -> list[Attack]:
    """Return the attacks of these names. Raises ValueError if a name is unknown."""
    by_name = {attack.name: attack for attack in ATTACKS}
    selection = by_name if names is None else dict.fromkeys(names.split(","))
    if unknown := [name for name in selection if name not in by_name]:
        raise ValueError(f"there is no attack {unknown[0]!r}; there are {', '.join(by_name)}")
    return [by_name[name] for name in selection]


def record(attack: Attack, count: Count) -> dict[str, Any]:
    return {"name": attack.name, "promise": attack.promise, **vars(count)}


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    try:
        attacks = select_attacks(options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.number is not None and len(attacks) != 1:
        parser.error("--number is of one attack: name it with --only")
    importlib.import_module("torch._dynamo")  # which torch imports when it first needs it: here, and not in every trial
    torch.set_num_threads(1)  # before any fork: a child must not wait for threads that only its parent has
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script started this in its background
    records, seconds = list[dict[str, Any]](), options.minutes * 60 / sum(attack.share for attack in attacks)
    for attack in attacks:
        if options.number is not None:
            count = attack.repeat(options.number)
        elif options.trials is not None:
            count = attack.first(options.seed, options.trials)
        else:
            count = attack(options.seed, time.monotonic() + seconds * attack.share, options.examples)
        records.append(record(attack, count))
        print(line(records[-1]), flush=True)
    if options.out is not None:
        about = {"kind": KIND, "environment": facts(command_line("tests.attack")), "seed": options.seed}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(about | {"minutes": options.minutes, "attacks": records}, indent=1) + "\n")
    return int(any(entry["failures"] for entry in records))


if __name__ == "__main__":
    sys.exit(main())
