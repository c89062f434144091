"""Measures: `python -m bench QUESTION`. Prints a table per case and writes QUESTION.json into `--out`.

By default that is a new folder below `runs/`; published results are written deliberately, by `python -m bench.report
FILE --publish`. The file is written after every case, so that a run that is stopped leaves what it has.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from bench import environment, plots, report
from bench import record as records
from bench.case import Case, Options
from bench.fed.peers import PEERS
from bench.ncu import Absent
from bench.questions import QUESTIONS

# A case may take SHARE times the average share of the time left, and MIN_SECONDS in any case.
SHARE, MIN_SECONDS = 3, 20.0
ABSENT = 77  # exit code if nothing can be measured here; the last line says why


def parse(argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__.splitlines()[0], allow_abbrev=False,
        epilog="; ".join(f"{name}: {question.__doc__}" for name, question in QUESTIONS.items()),
    )  # fmt: skip
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: the case's own)")
    parser.add_argument("--cases", nargs="+", metavar="PATTERN", help="names of cases, or PART/NAME, such as 'ops/*'")
    parser.add_argument("--rows", nargs="+", default=[], metavar="PATTERN", help="names of contenders")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many")
    parser.add_argument("--out", type=Path, help="folder of the results file and the plots (default: below runs/)")
    parser.add_argument("--add", action="store_true", help="measure what the file that is there lacks, into it")
    options = parser.parse_args(argv, Options())
    options.peers = dict(pair.partition("=")[::2] for pair in options.peer)
    for name, python in options.peers.items():
        if name not in PEERS or not Path(python).exists():
            parser.error(f"--peer takes NAME=PYTHON of {', '.join(PEERS)} and an existing file, not {name}={python}")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds takes whole numbers from 1, got {options.rounds}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; measure with --device cpu")
    options.selection = list(QUESTIONS[options.question](options))
    options.selection = [case for case in options.selection if _is_selected(case, options.cases or ["*"])]
    if not options.selection:
        parser.error(f"no case has these names: {options.cases}, with rows {options.rows or 'of any name'}")
    return options


def _is_selected(case: Case, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in (case.name, f"{case.part}/{case.name}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1 if a contender of fastsam was wrong or raised, or nothing was measured; or `ABSENT`."""
    options = parse(argv)
    torch.set_num_threads(1)
    end, folder = time.monotonic() + options.seconds, options.out or _new_directory()
    record = records.new(options.question, options.device, options.quick, environment.command_line("bench"))
    path, made = folder / f"{records.name_of(record)}.json", records.made(record["environment"])
    if options.add and path.exists():
        try:
            record = records.join(records.read(path), record)
        except ValueError as error:
            raise SystemExit(str(error)) from error
    case_records: list[dict[str, Any]] = []
    for number, case in enumerate(options.selection):
        recorded_case = records.find(record, {"part": case.part, "name": case.name})
        old_rows = (recorded_case or {"rows": ()})["rows"]
        missing_rows = set(case.rows) - {row["name"] for row in old_rows if not records.has_failed(row)}
        if options.add and case.rows and not missing_rows:
            continue
        try:
            records.check_made(record, case.part, case.name, case.rows, made)
        except ValueError as error:
            raise SystemExit(str(error)) from error
        seconds_left = end - time.monotonic()
        if seconds_left < 0:
            record["left_out"].append(case.name)
            print(f"no time left for {case.name}")
            continue
        share = max(SHARE * seconds_left / (len(options.selection) - number), MIN_SECONDS)
        try:
            result = case.measure(min(seconds_left, share)) if case.takes_seconds else case.measure()
            record["left_out"] = [name for name in record["left_out"] if name != case.name]
            for one in [result] if isinstance(result, dict) else result:
                case_record = {"part": case.part, "name": case.name, "title": case.name, **one}
                records.add(record, case_record, made)
                case_records.append(case_record)
                print(report.case_text(case_record), flush=True)
                records.write(record, path)
        except Absent as reason:
            print(reason)
            return ABSENT
    records.write(record, path)
    print("written:", path, *plots.draw(record, folder))
    rows = [row for case in case_records for row in case["rows"]]
    wrong = [f"{row['name']}: {row['problem']}" for row in rows if row.get("problem") and row.get("ours", True)]
    for text in wrong:
        print(f"failed: {text}")
    return int(bool(wrong) or not any(not records.has_failed(row) for row in rows))


def _new_directory() -> Path:
    from fastsam.lab.cli import numbered_directory

    return numbered_directory("bench", resume=False)


if __name__ == "__main__":
    sys.exit(main())
