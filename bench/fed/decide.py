"""The measurements that decide how clients train at the same time on a GPU: M1 to M9, most important first.

    make gpu ARGS="--call decide" OUT=DIR        # nine minutes; a second call measures the rows that DIR lacks

Every measurement has a share of the time and its rows. A row is stored in DIR when it is measured. Rows that the
package cannot serve yet are "not built" and skipped. M1 compares bits: if some are unequal, nothing else is measured.
M2 also measures another tree (`--against`), which `python -m bench.carry --against COMMIT` exports.
The table of decisions (bench/fed/decisions.py) is printed last.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from bench import environment
from bench import record as records
from bench.carry import AGAINST, COMMIT_FILE
from bench.fed import decide_rows, decisions
from bench.fed.decide_rows import LAUNCHER, NO_TIME, NOT_BUILT, OTHER_TREE, REFUSAL, ROWS
from bench.fed.on_gpu import SHARE, TO_START
from bench.fed.setting import QUICK, Row, Setting, Sizes

GRACE = 5.0  # seconds that a process has for its last row after its time


@dataclass(frozen=True)
class Part:
    """A measurement, and the weight of its share of the time."""

    name: str
    weight: int
    title: str


PARTS = (
    Part("M1", 45, "M1: bits of `sequential`"),
    Part("M2", 90, "M2: CNN under `graph`"),
    Part("M3", 40, "M3: kernels at once"),
    Part("M4", 50, "M4: `vmap` and `graph` by clients"),
    Part("M5", 20, "M5: dense models"),
    Part("M6", 110, "M6: ResNet-18-GN, a local epoch"),
    Part("M7", 25, "M7: CNN with dropout"),
    Part("M8", 90, "M8: `sequential` in several processes"),
    Part("M9", 20, "M9: the host's part of a round"),
)


class Measurements:
    """The record of the measurements and its file, which is written after every row."""

    def __init__(self, folder: Path, device: str, is_quick: bool) -> None:
        self.record = records.new("decide", device, is_quick, environment.command_line("bench.fed.decide"))
        self.path, self.skips_refused = folder / f"{records.name_of(self.record)}.json", False
        if self.path.exists():
            old_record, commit = records.read(self.path), self.record["environment"]["commit"]
            last = (old_record["added"] or [old_record["environment"]])[-1]
            self.skips_refused = last["commit"] == commit  # the same package refuses the same rows again
            self.record = records.join(old_record, self.record)

    def add(self, part: Part, row: Mapping[str, Any], **facts: Any) -> None:
        """Store a row, and print it."""
        case = {"part": part.name, "name": part.title, "title": part.title, **facts, "rows": [row]}
        records.add(self.record, case)
        records.write(self.record, self.path)
        print(decisions.line(row), flush=True)

    def rows(self, part: Part) -> dict[str, Any]:
        """Return the rows of a part by name."""
        case = records.find(self.record, {"part": part.name, "name": part.title})
        return {} if case is None else {row["name"]: row for row in case["rows"]}

    def lacks(self, part: Part, row: Row) -> bool:
        """Return True if a row has to be measured."""
        known = self.rows(part).get(row.name, {"absent": NO_TIME})
        is_refused = REFUSAL in known.get("absent", "")
        return records.has_failed(known) and not (is_refused and self.skips_refused)


def measure_part(
    part: Part, rows: Sequence[Row], results: Measurements, setting: Setting, end: float, tree: Path
) -> None:
    """Measure rows of a part until `end`, in a process for each kind."""
    queue = []
    for row in rows:
        reason = row.missing()
        if row.process == OTHER_TREE and not (tree / "fastsam").is_dir():
            reason = f"there is no tree in {tree}: `python -m bench.carry --against COMMIT` exports one"
        if reason:
            results.add(part, _row(row.name, absent=f"{NOT_BUILT}: {reason}"))
        else:
            queue.append(row)
    for kind, members in groupby(queue, key=lambda row: row.process):
        group = list(members)
        left, rest = end - time.monotonic(), len(queue) - queue.index(group[0])
        limit = time.monotonic() + min(left, SHARE * left * len(group) / rest)
        if kind == LAUNCHER:
            _measure_here(part, group, results, limit)
        else:
            _measure_there(part, kind, group, results, setting, limit, tree)


def _measure_here(part: Part, rows: Sequence[Row], results: Measurements, end: float) -> None:
    """Measure rows that start processes themselves."""
    for number, row in enumerate(rows):
        left = end - time.monotonic()
        results.add(part, decide_rows.measure_row(row, min(left, SHARE * left / (len(rows) - number))))


def _measure_there(
    part: Part, kind: str, rows: Sequence[Row], results: Measurements, setting: Setting, end: float, tree: Path
) -> None:
    """Measure rows in a process. If it dies, its row has failed, and another process goes on with the next row."""
    facts = {"other_tree": _commit(tree)} if kind == OTHER_TREE else {}
    queue = [row.name for row in rows]
    while queue:
        seconds = end - time.monotonic() - TO_START
        if seconds <= 0:
            for name in queue:
                results.add(part, _row(name, absent=NO_TIME))
            return
        process = decide_rows.start(part.name, kind, setting, seconds, queue, tree if kind == OTHER_TREE else None)
        try:
            while row := process.answer(max(end - time.monotonic() + GRACE, 1.0)):
                queue.remove(row["name"])
                results.add(part, row, **facts)
        except RuntimeError as error:
            if queue and time.monotonic() < end:  # it was not ended for its time
                results.add(part, _row(queue.pop(0), problem=str(error)))
        finally:
            process.close()


def _row(name: str, **reason: str) -> dict[str, Any]:
    return {"name": name, "title": name, "ours": True, **reason}


def _commit(tree: Path) -> str:
    """Return the commit of an exported tree."""
    return (tree / COMMIT_FILE).read_text().strip() if (tree / COMMIT_FILE).exists() else "unknown"


def measure(results: Measurements, setting: Setting, parts: Sequence[Part], seconds: float, tree: Path) -> None:
    """Measure what the record lacks, part by part; stop after M1 if bits are unequal."""
    end = time.monotonic() + seconds
    missing = {part: [row for row in ROWS[part.name](setting) if results.lacks(part, row)] for part in parts}
    queue = [part for part in parts if missing[part]]
    for number, part in enumerate(queue):
        left = end - time.monotonic()
        share = left * part.weight / sum(other.weight for other in queue[number:])
        print(f"\n--- {part.title}: {len(missing[part])} rows, {share:.0f} s", flush=True)
        measure_part(part, missing[part], results, setting, time.monotonic() + share, tree)
        if part.name == "M1" and (unequal := decisions.unequal(results.rows(part).values())):
            print(f"stopped: {', '.join(unequal)} without the bits of `sequential`")
            return


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fed.decide", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=540, help="time limit (default: 540)")
    parser.add_argument("--out", type=Path, default=Path("runs/decide"), metavar="DIR", help="default: runs/decide")
    parser.add_argument("--against", type=Path, default=AGAINST, metavar="DIR", help=f"default: {AGAINST}")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if bits are unequal, a row failed, or nothing has figures."""
    options = parse(argv)
    try:
        results = Measurements(options.out, options.device, options.quick)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    setting = Setting(options.device, QUICK if options.quick else Sizes())
    parts = [part for part in PARTS if part.name in options.parts]
    try:
        measure(results, setting, parts, options.seconds, options.against.resolve())
    except KeyboardInterrupt:
        print("interrupted")
    (options.out / "decisions.md").write_text(f"{decisions.table(results.record).markdown()}\n")
    print(f"\n{decisions.text(results.record)}\n\nwritten: {results.path}")
    rows = list(records.rows(results.record))
    has_problem = any(row.get("problem") for row in rows) or bool(decisions.unequal(rows))
    return int(has_problem or all(map(records.has_failed, rows)))


if __name__ == "__main__":
    sys.exit(main())
