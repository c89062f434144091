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


class SilentCalls:
    """A context of stacked passes without torch's warnings about slow operations. They ask users to file an issue with
    torch."""

    def __enter__(self) -> None:
        _set_warnings(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set_warnings(True)


class SlowCalls(SilentCalls):
    """A context of stacked passes that logs, once, the operations of the first pass that are called once per client.

    Other warnings of the pass are shown as the user's filters say.

    Attributes:
        names: names of the operations.
    """

    def __init__(self) -> None:
        self._is_first, self.names = True, set[str]()
        self._records: list[warnings.WarningMessage] = []

    def __enter__(self) -> None:
        if not self._is_first:
            return super().__enter__()
        self._catcher = warnings.catch_warnings(record=True)
        records = self._catcher.__enter__()
        assert records is not None
        self._records = records
        warnings.simplefilter("always")
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_first:
            return super().__exit__(kind, error, trace)
        self._is_first = error is not None  # a pass that did not end has not called everything
        self._catcher.__exit__(kind, error, trace)
        for record in self._records:
            found = _WARNING.search(str(record.message))
            if found is not None:
                self.names.add(found[1])
            else:
                warnings.warn_explicit(record.message, record.category, record.filename, record.lineno)
        if self.names and not self._is_first:
            log.info(
                "torch.vmap calls %s once per client, which is slow. executor='threads' or 'graph' may be faster",
                ", ".join(sorted(self.names)),
            )
        return None
