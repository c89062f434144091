"""The pages for readers, and the parts of them that can be copied: blocks of code, commands, links."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.helpers.places import ROOT

FRONT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = (*FRONT, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
# Sentences by which a page says that blocks depend on others. Without them every block runs by itself.
AFTER_THE_FIRST = "The other Python blocks of this page run after this one."
IN_TURN = "The Python blocks of this page go on from each other."
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})\s*(\S*)")
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_PROGRAMS = ("fastsam", "make", "pip", "python", "torchrun")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line (int): number of its first line of code, from 1.
        left_out: the reason that the page gives for not running it.
    """

    page: str
    line: int
    language: str
    code: str
    left_out: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        """Execute the block in `names`. Tracebacks have the lines of the page."""
        lines = "\n" * (self.line - 1) + self.code
        exec(compile(lines, self.page, "exec", dont_inherit=True), names)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def says(page: str, sentence: str) -> bool:
    """Return True if the page has the sentence, on one line or on two."""
    return sentence in " ".join(text_of(page).split())


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks, in the order of the page."""
    fence_start: tuple[str, str, str, int] | None = None
    code: list[str] = []
    reason = None
    for number, line in enumerate(text_of(page).splitlines(), 1):
        fence = _FENCE.match(line)
        if fence_start is None:
            if fence:
                fence_start, code = (fence[1], fence[2], fence[3], number + 1), []
            elif line.strip():
                match = _NOT_RUN.fullmatch(line.strip())
                reason = match[1] if match else None
        elif fence and fence[2].startswith(fence_start[1]) and not fence[3]:
            text = textwrap.dedent("\n".join(code)) + "\n"
            yield Block(page, fence_start[3], fence_start[2], text, reason)
            fence_start, reason = None, None
        else:
            code.append(line)


def without_fences(page: str) -> str:
    """Return the page with empty lines in place of its fenced blocks."""
    lines, inside = [], ""
    for line in text_of(page).splitlines():
        fence = _FENCE.match(line)
        if fence and not inside:
            inside = fence[2]
        elif fence and fence[2].startswith(inside) and not fence[3]:
            inside = ""
        elif not inside:
            lines.append(line)
            continue
        lines.append("")
    return "\n".join(lines)


def indented_blocks(page: str) -> list[str]:
    """Return the lines of blocks that are indented by four blanks, after an empty line."""
    blocks_of_code, inside, last_line = [], False, ""
    for line in without_fences(page).splitlines():
        inside = line.startswith("    ") and (inside or not last_line.strip())
        if inside:
            blocks_of_code.append(line.strip())
        last_line = line
    return blocks_of_code


def commands(page: str) -> list[str]:
    """Return the shell commands of a page: lines of blocks without Python, and code in its prose.

    Comments, prompts, and the commands that made a figure (they belong to their commits) are left out.
    """
    shell = [block.code for block in blocks(page) if block.language in ("", "bash", "console", "sh")]
    texts = ["".join(shell), "\n".join(indented_blocks(page))]
    lines = [line for text in texts for line in re.sub(r" *\\\n *", " ", text).splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^Made by `.*", "", without_fences(page), flags=re.M))
    texts = [text.strip().removeprefix("$ ") for text in (*lines, *spans)]
    return list(dict.fromkeys(text for text in texts if _is_command(text)))


def words(command: str) -> list[str]:
    """Return the words of a command without variables before it and a comment after it."""
    parts = shlex.split(command, comments=True)
    while parts and re.fullmatch(r"[A-Z_]+=\S*", parts[0]):
        del parts[0]
    return parts


def _is_command(text: str) -> bool:
    match = re.match(r"(?:[A-Z_]+=\S* )*(\S+) \S", text)
    return match is not None and match[1].rpartition("/")[2] in _PROGRAMS


def links(page: str) -> list[str]:
    """Return the targets of links and pictures that lead to a file or a heading of the checkout.

    Pages that a code host makes, such as the badge of a workflow, are left out.
    """
    prose = re.sub(r"`[^`\n]*`", "", without_fences(page))
    other = re.compile(r"[a-z]+:|\.\./\.\./actions/")
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if not other.match(target)]


def anchors(page: str) -> set[str]:
    """Return the anchors of `page.md#...`: its headings as GitHub writes them (and MyST with
    `myst_heading_anchors`)."""
    names: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", without_fences(page), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.replace("`", "").lower()).replace(" ", "-")
        number = next(n for n in range(len(names) + 1) if (f"{slug}-{n}" if n else slug) not in names)
        names.add(f"{slug}-{number}" if number else slug)
    return names
