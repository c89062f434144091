"""How a cohort of clients trains. `registry` holds the executors by name."""

from __future__ import annotations

from collections.abc import Callable

from .base import ClientError, Executor, LocalOptions, Task
from .sequential import Sequential

registry: dict[str, Callable[..., Executor]] = {"sequential": Sequential}

__all__ = ["ClientError", "Executor", "LocalOptions", "Sequential", "Task", "registry"]
