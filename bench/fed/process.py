"""A separate program that answers in lines of JSON, and its end."""

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from bench.fed import cores

PATIENCE, FAREWELL = 600.0, 20.0  # seconds for one answer, and for an end after the last


def answers() -> Callable[[Any], None]:
    """Return a function that writes JSON lines to standard output, and redirect other output to standard error."""
    file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda message: print(json.dumps(message), file=file, flush=True)


class Process:
    """A running program, with its standard error kept for its last words.

    Args:
        command: the program and its arguments.
        environment: variables in addition to the variables of this process.
        folder: working directory, from which `python -m` imports (default: the working directory of this process).
        num_cores: number of cores that it and its descendants may use (default: all of this process).

    Attributes:
        use: processors in use during the work of an `order`.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str | os.PathLike[str] | None = None,
        num_cores: int | None = None,
    ) -> None:  # fmt: skip
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe without a reader would fill
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        with cores.restrict(num_cores):
            self.process = subprocess.Popen(command, cwd=folder, env=os.environ | environment, **pipes)
        self.use = cores.Use(self.process.pid)

    def answer(self, patience: float | None = None) -> Any:
        """Return its next line. Raises RuntimeError with the end of its log if it died, or said nothing for
        `patience` seconds."""
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE if patience is None else patience, self.process.terminate)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            self.process.wait()
            self.log.seek(0)
            lines = [text for text in self.log.read().splitlines() if text.strip()]
            raise RuntimeError(lines[-1] if lines else f"exit {self.process.returncode}")
        return json.loads(line)

    def send(self, request: Any) -> None:
        """Send a request as a line of JSON."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died since: its log says why
            print(json.dumps(request), file=self.process.stdin, flush=True)

    def order(self, request: Any = None) -> Any:
        """Send a request and return the answer. Raises RuntimeError as `answer` does."""
        with self.use.turn():
            self.send(request)
            return self.answer()

    def close(self) -> None:
        """Let it end by itself, then stop it: a killed process leaves its own processes (ranks, actors) running."""
        for ask in (lambda: None, self.process.terminate, self.process.kill):
            ask()
            try:
                self.process.communicate(timeout=FAREWELL)
                break
            except subprocess.TimeoutExpired:
                continue
        self.log.close()
