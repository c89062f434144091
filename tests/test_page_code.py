"""Code in pages fits a page of the site and of a code host: a longer line has a scrollbar, which hides options."""

import pytest

from tests.helpers.pages import PAGES, blocks, indented_blocks

WIDTH = 88


@pytest.mark.parametrize("page", PAGES)
def test_code_has_no_long_line(page: str) -> None:
    lines = [
        f"{page}:{number}: {line}"
        for block in blocks(page) if block.language != "math"
        for number, line in enumerate(block.code.splitlines(), block.line) if len(line) > WIDTH
    ]  # fmt: skip
    lines += [f"{page}: {line}" for line in indented_blocks(page) if len(line) > WIDTH]
    assert not lines, f"at most {WIDTH} columns:\n" + "\n".join(lines)
