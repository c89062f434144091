"""Absolute links in README, for the page of a package index: `python tools/index_page.py OWNER/NAME REF`.

The page of an index has no files next to it. Pictures and linked pages are read from the repository OWNER/NAME at REF,
a commit or a tag. A badge shows the state of the checks. README is rewritten in place, in a checkout that is built and
thrown away.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#|mailto:)([^)\s]+)\)")


def absolute(text: str, repository: str, ref: str) -> str:
    """Return Markdown whose relative links lead to `repository` (owner/name) at `ref`.

    Raises ValueError if `repository` is not of this form.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"the repository must be OWNER/NAME, got {repository!r}")
    page = f"https://github.com/{repository}"
    picture = f"https://raw.githubusercontent.com/{repository}/{ref}"

    def address(link: re.Match[str]) -> str:
        return f"{link[1]}{link[2]}({f'{picture}/' if link[1] else f'{page}/blob/{ref}/'}{link[3]})"

    workflow = f"{page}/actions/workflows/checks.yml"
    head, *rest = _LINK.sub(address, text).split("\n\n")
    return "\n\n".join([head, f"[![checks]({workflow}/badge.svg)]({workflow})", *rest])


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(absolute(readme.read_text(), *sys.argv[1:]))
