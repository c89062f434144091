"""What the figures of `python -m bench.variants` say: a line, a table, and a verdict by a rule that was there before
them.

Standard library only: `bench/gpu.py` reads it.
"""

from __future__ import annotations

from typing import Any

FILE = "variants.json"
ONE_READ = "one read"
WINS, LOSES = 0.95, 1.02  # of today's time
DECISIVE_ROWS = 100  # of 50 k, for one read


def verdict(group: str, results: list[dict[str, Any]]) -> str:
    """`keep` where the group's first case takes at most WINS of today's time and no case more than LOSES; else `drop`.

    One read: its first case is 100 rows of 50 k, and it is kept from the number of rows on from which no case takes
    more than LOSES.
    """
    ours = [r for r in results if r["group"] == group]
    measured = [(r["rows"], r["ratio"]["median"]) for r in ours if r["ratio"]]
    if any(r["gate"] == "red" for r in ours):
        return "drop: it was wrong"
    if not measured or ours[0]["ratio"] is None:
        return "not measured"
    lost = max((rows for rows, ratio in measured if ratio > LOSES), default=0)
    if measured[0][1] > WINS or lost >= measured[0][0]:
        return "drop"
    return f"keep, from {min(rows for rows, _ in measured if rows > lost)} rows on" if group == ONE_READ else "keep"


def line(result: dict[str, Any]) -> str:
    """One case in one line."""
    if result["ratio"] is None:
        return f"{result['name']}: {result['gate']}: {result['reason']}"
    return f"{result['name']}: {result['ratio']['median']:.2f} of the time, {result['predicted']:.2f} predicted"


def table(record: dict[str, Any]) -> str:
    """The figures beside the predictions, and the verdicts, as Markdown."""
    lines = [
        "| variant | case | today, µs | variant, µs | ratio (quartiles) | predicted |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for r in record["cases"]:
        if r["ratio"] is None:
            lines.append(f"| {r['group']} | {r['title']} | | | {r['gate']} | |")
            continue
        today, variant = (f"{r[name]['median'] * 1e6:.1f}" for name in ("today_seconds", "variant_seconds"))
        ratio = "{median:.3f} ({q1:.3f} to {q3:.3f})".format(**r["ratio"])
        lines.append(f"| {r['group']} | {r['title']} | {today} | {variant} | {ratio} | {r['predicted']:.2f} |")
    return "\n".join([*lines, "", *(f"{group}: {said}." for group, said in record["verdicts"].items())])
