"""Tables of refused calls: (call, expected words) or (call, expected words, error), an error being a ValueError where
none is named."""

from collections.abc import Callable

import pytest

Refusal = tuple[Callable[[], object], str] | tuple[Callable[[], object], str, type[Exception]]


def refusals(*rows: Refusal) -> pytest.MarkDecorator:
    """Return the parameters `call`, `words` and `error` of a test over `rows`."""
    values = [(*row, ValueError)[:3] for row in rows]
    return pytest.mark.parametrize(("call", "words", "error"), values, ids=[row[1] for row in rows])
