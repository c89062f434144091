"""Results of the attacks as text and as a page.

`python -m tests.attack.report FILE.json` writes docs/about_reliability.md.
"""

import sys
from typing import Any

from fastsam.lab.report.table import Table
from tests.helpers.generated_page import GeneratedPage

KIND = "fastsam.attack/1"
_SHOWN = 5  # failures of an attack that the terminal shows


def line(attack: dict[str, Any]) -> str:
    """Return an attack as text for the terminal, each failure with the command that repeats it."""
    if attack["left_out"]:
        return f"{attack['name']:<24} left out: {attack['left_out']}"
    failures = attack["failures"]
    text = f"{attack['name']:<24} {attack['trials']:>8,} trials {len(failures):>5} failures {attack['seconds']:>7.1f} s"
    for failure in failures[:_SHOWN]:
        text += f"\n  python -m tests.attack --only {attack['name']} --number {failure['number']}\n"
        text += "\n".join(f"    {words}" for words in failure["what"].splitlines())
    return text + (f"\n  and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else "")


def table(record: dict[str, Any]) -> str:
    """Return the results as Markdown: a row per attack, then the environment."""
    rows = []
    for attack in record["attacks"]:
        numbers = [f"{attack['trials']:,}", f"{len(attack['failures'])}"]
        cells = [f"left out: {attack['left_out']}", ""] if attack["left_out"] else numbers
        rows.append([f"`{attack['name']}`", attack["promise"], *cells])
    table = Table("", ["attack", "what is promised", "trials", "failures"], rows, alignment="llrr")
    e = record["environment"]
    minutes = sum(attack["seconds"] for attack in record["attacks"]) / 60
    return (
        f"{table.markdown()}\n\nMade by `{e['command']}` on {e['date'][:10]}, commit "
        f"`{e['commit'][:12]}{'+changes' * ('+' in e['commit'])}`, "
        f"in {minutes:.0f} minutes on {e['machine']['cores']} cores of an {e['machine']['cpu']}; "
        f"Python {e['versions']['python']}, torch {e['versions']['torch']}."
    )


PAGE = GeneratedPage("about_reliability", "attack", KIND, "`python -m tests.attack --out`", table)

if __name__ == "__main__":
    sys.exit(PAGE.main())
