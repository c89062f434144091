"""The record of a measurement: where and how it was made, and cases with a row per contender.

A record is JSON with `kind`, `device`, `environment`, `added` (later commands), `cases` and `left_out`. A case has a
part, a name, a title, facts, its commit and day (`made`) and `rows`. A row has a name and figures: numbers, or
summaries (median and quartiles). A row without figures says why: `problem` (it failed or was wrong) or `absent` (it
cannot run here). In a file each row is a line.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import ROOT, environment
from fastsam.fed.common.atomic_files import write_bytes

RESULTS = ROOT / "bench" / "results"
KINDS = ("step", "variants", "kernels", "federated", "evidence", "language", "ncu")
FORMAT = "fastsam.bench.{}/2"
HOW = ("command", "date", "commit")
UNTIMED = ("evidence", "evidence-cuda", "language")  # their figures do not depend on the day

Record = Mapping[str, Any]
Row = Mapping[str, Any]


def new(kind: str, device: str, quick: bool, command: str) -> dict[str, Any]:
    """Return a record without cases."""
    return {
        "kind": FORMAT.format(kind), "device": device, "quick": quick, "environment": environment.facts(command),
        "added": [], "cases": [], "left_out": [],
    }  # fmt: skip


def name_of(record: Record) -> str:
    """Return the name of the record's file, without its suffix: "step", or "step-cuda" on a GPU."""
    name = str(record["kind"]).removeprefix("fastsam.bench.").removesuffix("/2")
    return f"{name}-{record['device']}" if record["device"] != "cpu" else name


def read(path: Path) -> dict[str, Any]:
    """Return the record of a file. Raises ValueError if it is not a file that a benchmark wrote."""
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); expected a results file of a benchmark") from error
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in {FORMAT.format(name) for name in KINDS}:
        raise ValueError(f"{path} holds {kind!r}, expected {FORMAT.format('NAME')}, NAME of {', '.join(KINDS)}")
    return dict(record)


def write(record: Record, path: Path) -> None:
    """Write a record as JSON, so that a run that is stopped leaves the last complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, f"{text(record)}\n".encode())


def text(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each row of a table.

    A list of objects has an item per line. An object has a key per line at the first two levels, and if it has "rows";
    every other object is written in one line.
    """
    is_table = isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    if is_table:
        lines = [text(item, depth + 1) for item in value]
    elif isinstance(value, dict) and value and (depth < 2 or "rows" in value):
        lines = [f"{json.dumps(key)}: {text(item, depth + 1)}" for key, item in value.items()]
    else:
        return json.dumps(value)
    first, last = "[]" if is_table else "{}"
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    return f"{first}{inner}{f',{inner}'.join(lines)}{outer}{last}"


def has_failed(row: Row) -> bool:
    """Return whether a row has a reason in place of figures."""
    return bool(row.get("problem") or row.get("absent"))


def rows(record: Record) -> Iterator[Row]:
    """Yield the rows of all cases."""
    for case in record["cases"]:
        yield from case["rows"]


def figure(row: Any, path: str) -> Any:
    """Return a figure, such as "eager.to.copied"; None if the row has none."""
    for key in path.split("."):
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def median(row: Any, path: str) -> Any:
    """Return the median of a summary, or a plain number; None if the row has none."""
    value = figure(row, path)
    return value["median"] if isinstance(value, Mapping) else value


def find(record: Record, case: Record) -> dict[str, Any] | None:
    """Return the record's case of the same part and name."""
    matches = (one for one in record["cases"] if (one["part"], one["name"]) == (case["part"], case["name"]))
    return next(matches, None)


def made(e: Record) -> str:
    """Return the commit and the day of an environment."""
    changes = "+changes" if e["commit"].endswith("+changes") else ""
    return f"commit {e['commit'][:12]}{changes} on {e['date'][:10]}"


def check_made(record: Record, part: str, name: str, rows: Collection[str], new_made: str) -> None:
    """Raise ValueError if a known case has times of a different commit or day next to the new rows, because readers
    divide the times of a case.

    Args:
        rows: names of the new rows that have figures.
        new_made: commit and day of the new rows.
    """
    old_case = find(record, {"part": part, "name": name})
    if old_case is None or name_of(record) in UNTIMED:
        return
    old_made = old_case.get("made", made(record["environment"]))
    remaining = [row["name"] for row in old_case["rows"] if not has_failed(row) and row["name"] not in rows]
    if remaining and rows and old_made != new_made:
        raise ValueError(
            f"{part}/{name}: rows of {old_made} and of {new_made} cannot be in one table, because their times would be "
            f"divided. Measure {', '.join(remaining)} and the new rows in one call, or leave one of the files out"
        )


def add(record: dict[str, Any], case: dict[str, Any], new_made: str | None = None) -> None:
    """Add a case. Rows of a known case are added or replaced, but a failure does not replace figures.

    `new_made` is the commit and the day of the case, by default of the record. Raises ValueError as `check_made` does.
    """
    new_made = made(record["environment"]) if new_made is None else new_made
    names = [row["name"] for row in case["rows"] if not has_failed(row)]
    check_made(record, case["part"], case["name"], names, new_made)
    old_case = find(record, case)
    case = case | {"made": new_made}
    if old_case is None:
        record["cases"].append(case)
        return
    rows_by_name = {row["name"]: row for row in old_case["rows"]}
    for row in case["rows"]:
        if row["name"] not in rows_by_name or has_failed(rows_by_name[row["name"]]) or not has_failed(row):
            rows_by_name[row["name"]] = row
    old_case.update(case | {"rows": list(rows_by_name.values())})


def join(record: dict[str, Any], new_record: Record) -> dict[str, Any]:
    """Add the cases of a later record.

    Raises ValueError if the two were not made on like machines, or if a case would have rows of different commits or
    days.
    """
    old_facts, new_facts = (
        f"{e['machine']['cores']} cores of {e['machine']['cpu']}, {', '.join(e['machine'].get('gpus', ['no GPU']))}, "
        f"torch {e['versions']['torch']}{', quick' * one['quick']}"
        for one in (record, new_record)
        for e in [one["environment"]]
    )
    if old_facts != new_facts:
        raise ValueError(f"a record of {new_facts} cannot be added to a record of {old_facts}: keep the two apart")
    record["added"] += [{key: new_record["environment"][key] for key in HOW}, *new_record["added"]]
    record["left_out"] = [*record["left_out"], *new_record["left_out"]]
    for case in new_record["cases"]:
        add(record, case, case.get("made", made(new_record["environment"])))
    return record
