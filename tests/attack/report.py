"""What came of the attacks, in lines and on the page: `python -m tests.attack.report FILE.json` writes docs/reliability.md from it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.helpers.places import ROOT

KIND = "fastsam.attack/1"
PAGE, RESULTS = ROOT / "docs" / "reliability.md", ROOT / "bench" / "results" / "attack.json"
_PLACE = re.compile(r"(<!-- attack:last -->\n).*?(<!-- /attack -->)", re.DOTALL)
_SHOWN = 5  # failures of an attack that the terminal shows


def line(attack: dict[str, Any]) -> str:
    """An attack on the terminal; each failure with the command that repeats it."""
    if attack["left_out"]:
        return f"{attack['name']:<24} left out: {attack['left_out']}"
    failures = attack["failures"]
    text = f"{attack['name']:<24} {attack['trials']:>8,} trials {len(failures):>5} failures {attack['seconds']:>7.1f} s"
    for failure in failures[:_SHOWN]:
        text += f"\n  python -m tests.attack --only {attack['name']} --number {failure['number']}\n"
        text += "\n".join(f"    {words}" for words in failure["what"].splitlines())
    return text + (f"\n  and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else "")


def table(record: dict[str, Any]) -> str:
    """Markdown: a row per attack, and what they were made with."""
    rows = ["| attack | what is promised | trials | failures |", "|---|---|---:|---:|"]
    for one in record["attacks"]:
        came = f"left out: {one['left_out']} | " if one["left_out"] else f"{one['trials']:,} | {len(one['failures']):,}"
        rows.append(f"| `{one['name']}` | {one['promise']} | {came} |")
    e = record["environment"]
    minutes = sum(one["seconds"] for one in record["attacks"]) / 60
    rows.append(
        f"\nMade by `{e['command']}` on {e['date'][:10]}, commit `{e['commit'][:12]}{'+changes' * ('+' in e['commit'])}`, "
        f"in {minutes:.0f} minutes on {e['machine']['cores']} cores of an {e['machine']['cpu']}; "
        f"Python {e['versions']['python']}, torch {e['versions']['torch']}."
    )
    return "\n".join(rows)


def read(path: Path) -> dict[str, Any]:
    """The record of a file. Raises ValueError when it is none of `python -m tests.attack`."""
    record = json.loads(path.read_text())
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise ValueError(f"{path} is not a file of `python -m tests.attack --out`, whose kind is {KIND!r}")
    return record


def fill(page: str, record: dict[str, Any]) -> str:
    """The page with the figures of `record` in its marked place. Raises ValueError where there is none."""
    if not _PLACE.search(page):
        raise ValueError("the page has no place marked `<!-- attack:last -->` ... `<!-- /attack -->`")
    return _PLACE.sub(lambda found: f"{found[1]}{table(record)}\n{found[2]}", page)


def main() -> int:
    """Copies the file to where the page's figures are kept, and writes the page."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    record = read(path)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(fill(PAGE.read_text(), record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
