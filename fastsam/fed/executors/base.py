"""The interface of executors: an executor trains a cohort of clients, each by its local step.

It does not depend on the algorithm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import ClassVar

from torch import Tensor

from fastsam.fed.executors.memory_errors import ADVICE, is_out_of_memory
from fastsam.fed.executors.task import SGD_OPTIONS, STEP_OPTIONS, Setup, Task
from fastsam.fed.update.results import ClientResults


class ClientError(RuntimeError):
    """The model or the loss raised while a client trained; the cause is attached. Rounds count from 1, as in the
    records, local steps from 0."""

    client_ids: tuple[int, ...] = ()  # several if they shared a pass; none if the error concerns the whole run
    reason = ""  # without round and clients

    @classmethod
    def from_error(cls, clients: Sequence[int], round: int, step: int, error: Exception) -> ClientError:
        """Return the error of clients in round `round`, which counts from 0, as in `Task`."""
        client_names = ", ".join(map(str, clients[:8])) + (", ..." if len(clients) > 8 else "")
        message = str(error)
        if len(clients) == 1:
            message = message.removeprefix(f"client {clients[0]}: ")  # the reader of its data has already named it
        description = f"{type(error).__name__}: {message}"
        if is_out_of_memory(error):
            description = f"{description.rstrip('.')}. {ADVICE}"
        failure = cls(f"client {client_names} failed in round {round + 1}, local step {step}: {description}")
        block_note = f", in a pass of {len(clients)} clients" if len(clients) > 1 else ""
        failure.client_ids, failure.reason = tuple(clients), f"it raised {description} (local step {step}{block_note})"
        return failure

    @classmethod
    def from_model(cls, clients: Sequence[int], round: int, step: int, problem: str) -> ClientError:
        """Return the error of a model that has changed in a pass of clients. To exclude them would not mend it."""
        failure = cls.from_error(clients, round, step, ValueError(problem))
        failure.client_ids = ()
        return failure


def refusal(setup: Setup, supported_options: frozenset[str] = SGD_OPTIONS) -> str | None:
    """Return the reason why an executor that takes steps of several clients together cannot serve a run, or None."""
    if setup.loop:
        return f"{setup.loop} trains each client in a loop of its own (train_client), and such loops are not stacked"
    if setup.rule is not None:
        supported_options |= {"optimizer"}
    changed = {f.name for f in fields(setup.options) if getattr(setup.options, f.name) != f.default}
    unsupported_options = sorted((changed & STEP_OPTIONS) - supported_options)
    if unsupported_options == ["optimizer"]:
        return "it serves the optimizers SGD, Adam, AdamW, Adagrad, RMSprop and Lion, each by name or as a partial"
    return f"it does not serve the options {', '.join(unsupported_options)}" if unsupported_options else None


def excludes(setup: Setup, error: object) -> bool:
    """Return True if training continues without the clients of this error."""
    return setup.options.on_client_error == "exclude" and isinstance(error, ClientError) and bool(error.client_ids)


ClientOutcome = ClientResults | ClientError


class Executor(ABC):
    """The base class of executors, which train clients. One is made per run, from a `Setup`.

    A subclass with a `name`, in a module of this folder, is an executor, and the option `executor` takes the name.

    Attributes:
        setup: the facts of the run.
        longest_first: the clients with most local steps should come first, because clients train at the same time.
        stacks: several clients go through one call of the model. Their step comes for `slots` clients together, with
            vectors `[n, row_size]`.
        slots: number of clients that train at once.
        numbers: conditions on which the bits depend, "exact" if they equal the bits of `sequential`.

    Raises:
        ValueError: the executor cannot serve the run; the message has the reason.
    """

    name: ClassVar[str]
    longest_first: ClassVar[bool] = False
    stacks: ClassVar[bool] = False
    setup: Setup
    slots: int = 1
    numbers: str = "exact"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            registry[cls.name] = cls

    @abstractmethod
    def __init__(self, setup: Setup) -> None: ...

    @abstractmethod
    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[ClientOutcome]:
        """Train every task from the weights `start` (flat `[row_size]`) and the model's `buffers`. The results come in
        any order, in groups of one or more clients.

        `tasks` is consumed as rows become free. If the setup excludes clients with errors, the error comes in place of
        their results.

        Raises:
            ClientError: the model or the loss raised.
        """

    def release(self) -> None:  # noqa: B027  (most executors keep nothing)
        """Release what the executor keeps on the device for later rounds. A run calls it at its end, also after an
        error."""


registry: dict[str, type[Executor]] = {}  # the executors by name, as they are defined
