"""A test of refused calls, made from a table of the calls and the words of their errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

Refusal = tuple[Callable[[], object], str] | tuple[Callable[[], object], str, type[Exception]]


def refusals(*rows: Refusal) -> Callable[..., None]:
    """Return a test of `rows`. Each call must raise the error with the expected words, and must write no file.

    Args:
        rows: (call, expected words) or (call, expected words, error). The default error is a ValueError. A call may
            name files and a run directory with relative paths, because each row has its own working directory.
    """
    values = [(*row, ValueError)[:3] for row in rows]

    @pytest.mark.parametrize(("call", "words", "error"), values, ids=[row[1] for row in rows])
    def test_refused(
        call: Callable[[], object], words: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(error, match=words):
            call()
        assert not list(tmp_path.iterdir()), "the refused call wrote a file"

    return test_refused
