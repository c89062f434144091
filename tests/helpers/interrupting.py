"""An exception before a chosen line of the code in some folders, or wherever a real signal finds it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import fastsam
import fastsam_kernels

PACKAGE = str(Path(fastsam.__file__).parent) + os.sep
KERNELS = str(Path(fastsam_kernels.__file__).parent) + os.sep


class Interrupt(BaseException):
    """An interrupt like KeyboardInterrupt, no Exception: it must not be swallowed on the way."""


class Tracer:
    """Counts the executed lines of the code in `folders`, and raises before the one with number `stop_line`."""

    def __init__(self, stop_line: int | None, folders: tuple[str, ...] = (PACKAGE,)) -> None:
        self.stop_line, self.folders, self.lines, self.where = stop_line, folders, 0, ""

    def __enter__(self) -> Tracer:
        self._outer = sys.gettrace()  # such as that of coverage
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._outer)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self.folders) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            if self.lines == self.stop_line:
                self.lines += 1
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise Interrupt(self.where)
            self.lines += 1
        return self._line


class Alarm:
    """Raises where the main thread is after some seconds, as Ctrl-C does: by the system's timer, or by a signal that
    another thread sends."""

    def __init__(self, delay: float, by_thread: bool) -> None:
        self.delay, self.by_thread = delay, by_thread

    def __enter__(self) -> Alarm:
        signal.signal(signal.SIGALRM, _raise)
        if self.by_thread:
            self._timer = threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGALRM))
            self._timer.start()
        else:
            signal.setitimer(signal.ITIMER_REAL, self.delay)
        return self

    def __exit__(self, *_: object) -> None:
        if self.by_thread:
            self._timer.cancel()
            self._timer.join()
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "")
