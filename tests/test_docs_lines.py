"""The prose of the pages is wrapped by `tools/wrap.py`, and by it alone: nothing but line breaks changes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mdformat", reason="mdformat is not installed: the extra `dev` has it")
from tools import wrap

LONG = "word `code with blanks` [a link](page.md#there) " * 6
PAGE = f"""# A heading {LONG}

{LONG}

A short
paragraph stays as it is.

| a | table |
|---|---:|
| {LONG} | 1 |

```python
code = "{"x" * 120}"
```

    an indented block {"x" * 120}

1. {LONG}
   - {LONG}
2. two

<!-- results:all -->
{LONG}
<!-- /results -->

{LONG}
"""


def test_nothing_but_prose_is_wrapped() -> None:
    made = wrap.wrapped(PAGE)
    for kept in (
        f"# A heading {LONG}",
        "A short\nparagraph",
        f"|---|---:|\n| {LONG} | 1 |",
        f"all -->\n{LONG}\n<!-- /",
    ):
        assert kept in made
    assert made.count("x" * 120) == 2
    long = [line for line in made.splitlines() if len(line) > wrap.COLUMNS]
    assert len(long) == 5, "the heading, the table, two blocks, and what a program wrote"
    assert wrap.MARKDOWN.render(made) == wrap.MARKDOWN.render(PAGE)
    assert wrap.wrapped(made) == made


def test_a_page_that_would_read_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrap.mdformat, "text", lambda text, **options: text.replace("word", "world"))
    with pytest.raises(ValueError, match="another"):
        wrap.wrapped(PAGE)


def test_checking_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert wrap.main(["--check", str(page)]) == 1 and page.read_text() == PAGE
    assert "page.md: has lines of more than 120 columns" in capsys.readouterr().out
    assert wrap.main([str(page)]) == 0 and page.read_text() == wrap.wrapped(PAGE)
    assert wrap.main(["--check", str(page)]) == 0
