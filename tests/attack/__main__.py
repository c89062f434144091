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


def arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.attack", description="Attacks on what fastsam promises.")
    made.add_argument("--minutes", type=float, default=10.0, help="for all attacks, dealt out by their shares [10]")
    made.add_argument("--seed", type=int, default=0, help="which trials: those of another seed are others [0]")
    made.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(attack.name for attack in ATTACKS)}")
    made.add_argument("--number", type=int, help="one trial alone, as a failure names it; with --only")
    made.add_argument("--examples", type=Path, metavar="DIR", help="folder of failing values: they are tried first")
    made.add_argument("--out", type=Path, metavar="FILE", help="what came of it, as JSON")
    return made


def chosen(names: str | None) -> list[Attack]:
    """The attacks of these names. Raises ValueError for an unknown one."""
    known = {attack.name: attack for attack in ATTACKS}
    wanted = known if names is None else dict.fromkeys(names.split(","))
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"there is no attack {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in wanted]


def record(attack: Attack, count: Count) -> dict[str, Any]:
    return {"name": attack.name, "promise": attack.promise, **vars(count)}


def main() -> int:
    parser = arguments()
    given = parser.parse_args()
    try:
        attacks = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    if given.number is not None and len(attacks) != 1:
        parser.error("--number is of one attack: name it with --only")
    importlib.import_module("torch._dynamo")  # which torch imports when it first needs it: here, and not in every trial
    torch.set_num_threads(1)  # before any fork: a child must not wait for threads that only its parent has
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script started this in its background
    made, seconds = list[dict[str, Any]](), given.minutes * 60 / sum(attack.share for attack in attacks)
    for attack in attacks:
        if given.number is not None:
            count = attack.again(given.number)
        else:
            count = attack(given.seed, time.monotonic() + seconds * attack.share, given.examples)
        made.append(record(attack, count))
        print(line(made[-1]), flush=True)
    if given.out is not None:
        about = {"kind": KIND, "environment": facts(command_line("tests.attack")), "seed": given.seed}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(about | {"minutes": given.minutes, "attacks": made}, indent=1) + "\n")
    return int(any(one["failures"] for one in made))


if __name__ == "__main__":
    sys.exit(main())
