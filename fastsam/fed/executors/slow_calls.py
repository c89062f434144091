"""Warnings of torch about operations that `torch.vmap` calls once per row, in the words of a federated run."""

from __future__ import annotations

import logging
import re
import warnings
from types import TracebackType

from torch._C import _functorch

log = logging.getLogger("fastsam.fed")

_set_warnings = _functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
_WARNING = re.compile(r"performance drop .* batching rule for aten::(\w+)")


class SlowCalls:
    """A context of stacked passes without torch's warnings about slow operations. They ask users to file an issue with
    torch.

    Args:
        is_logged: log, once, the operations of the first pass that are called once per client. Other warnings of the
            first pass are shown as the user's filters say.
    """

    def __init__(self, is_logged: bool = False) -> None:
        self._is_logged = is_logged  # by the next pass
        self._records: list[warnings.WarningMessage] = []

    def __enter__(self) -> None:
        if not self._is_logged:
            _set_warnings(False)
            return
        self._catcher = warnings.catch_warnings(record=True)
        records = self._catcher.__enter__()
        assert records is not None
        self._records = records
        warnings.simplefilter("always")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_logged:
            _set_warnings(True)
            return
        self._is_logged = error is not None  # a pass that did not end has not called everything
        self._catcher.__exit__(kind, error, trace)
        names = set[str]()
        for record in self._records:
            found = _WARNING.search(str(record.message))
            if found is not None:
                names.add(found[1])
            else:
                warnings.warn_explicit(record.message, record.category, record.filename, record.lineno)
        if names and not self._is_logged:
            log.info(
                "torch.vmap calls %s once per client, which is slow. executor='threads' or 'graph' may be faster",
                ", ".join(sorted(names)),
            )
