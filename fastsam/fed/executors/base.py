"""The interface of executors: an executor trains a cohort of clients, each with its constants of the local update rule.

It does not depend on the algorithm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastsam.arena import Layout
from fastsam.fed.clients.population import Loss
from fastsam.fed.executors.task import Task
from fastsam.fed.step.local_update import ClientResults
from fastsam.fed.step.variant import needs_of


class ClientError(RuntimeError):
    """The model or the loss raised while a client trained; the cause is attached. Rounds count from 1, as in the
    records, local steps from 0."""

    client_ids: tuple[int, ...] = ()  # several if they shared a pass; none if the error concerns the whole run
    reason = ""  # without round and clients

    @classmethod
    def of(cls, clients: Sequence[int], round: int, step: int, error: Exception) -> ClientError:
        """round: from 0, as in `Work`."""
        who = ", ".join(map(str, clients[:8])) + (", ..." if len(clients) > 8 else "")
        said = str(error)
        if len(clients) == 1:
            said = said.removeprefix(f"client {clients[0]}: ")  # the reader of its data has already named it
        what = f"{type(error).__name__}: {said}"
        made = cls(f"client {who} failed in round {round + 1}, local step {step}: {what}")
        shared = f", in a pass of {len(clients)} clients" if len(clients) > 1 else ""
        made.client_ids, made.reason = tuple(clients), f"it raised {what} (local step {step}{shared})"
        return made


@dataclass(frozen=True)
class LocalOptions:
    """The options of the run for local steps.

    Attributes:
        momentum: heavy-ball momentum, zero at the start of each round.
        weight_decay: weight decay at the unperturbed weights, not clipped.
        clip_norm: largest norm of v, None for no clipping.
        clip_scope: "full" (the proximal term is inside the clipped norm and scaled with it) or "linear" (it is outside,
            like the weight decay).
        optimizer: function of parameters that makes an optimizer of torch for the updates, None for the kernels' SGD.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    clip_scope: str = "full"
    optimizer: Callable[..., torch.optim.Optimizer] | None = None

    def unserved(self, served: frozenset[str]) -> str:
        """Return the options, by name, that are used and not among the served ones; "" for none."""
        return ", ".join(sorted(needs_of(self) - served))


SGD_OPTIONS = frozenset({"momentum", "weight_decay", "clip_norm", "clip_scope"})  # options of the kernels' SGD


@dataclass(frozen=True)
class Setup:
    """The facts from which an executor is made, once per run.

    Attributes:
        model: the user's model, which is copied.
        layout: layout of its trainable parameters.
        loss, options, device, backend: settings of the run.
        slots: number of clients that may train at once, None for the executor's choice.
        draws: functions of torch that draw random numbers in a training pass (dropout), empty if something else draws
            them, None if the model draws nothing.
        changes_buffers: a pass changes the model's buffers (BatchNorm).
        example: a batch, to try the model with.
        cohort: largest likely number of clients of a round, None for unknown.
        sizes: number of samples of each client.
        excludes_errors: a client whose model or loss raises is excluded from the round.
        batched: reason why samples come in batches and not as tensors, or "".
        reads_draw: making such a batch draws random numbers.
        loop: name of the algorithm if it has its own training loop (`Algorithm.train_client`), or "".
    """

    model: nn.Module
    layout: Layout
    loss: Loss
    options: LocalOptions
    device: torch.device
    backend: str
    slots: int | None = None
    draws: frozenset[Callable[..., Any]] | None = None
    changes_buffers: bool = False
    example: tuple[Tensor, Tensor] | None = None
    cohort: int | None = None
    sizes: tuple[int, ...] = ()
    excludes_errors: bool = False
    batched: str = ""
    reads_draw: bool = False
    loop: str = ""

    def excludes(self, error: object) -> bool:
        """Return True if training continues without the clients of this error."""
        return self.excludes_errors and isinstance(error, ClientError) and bool(error.client_ids)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the trainable parameters."""
        return next(p.dtype for p in self.model.parameters() if p.requires_grad)


def refusal(setup: Setup, served: frozenset[str] = SGD_OPTIONS) -> str | None:
    """Return the reason why an executor that takes steps of several clients together cannot serve a run, or None."""
    if setup.loop:
        return f"{setup.loop} trains each client in a loop of its own (train_client), and such loops are not stacked"
    unserved = setup.options.unserved(served)
    return f"it does not serve the options {unserved}" if unserved else None


Ends = ClientResults | ClientError


class Executor(ABC):
    """The base class of executors, which train clients. One is made per run, from a `Setup`.

    A subclass with a `name`, in a module of this folder, is an executor, and the option `executor` takes the name.

    Attributes:
        longest_first: the clients with most local steps should come first, because clients train at the same time.
        stacks: several clients go through one call of the model. Their constants come for `slots` clients together, as
            vectors `[n, row_size]`.
        slots: number of clients that train at once.
        numbers: conditions on which the bits depend, "exact" if they equal the bits of `sequential`.

    Raises:
        ValueError: the executor cannot serve the run; the message has the reason.
    """

    name: ClassVar[str]
    longest_first: ClassVar[bool] = False
    stacks: ClassVar[bool] = False
    slots: int = 1
    numbers: str = "exact"

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            registry[cls.name] = cls

    @abstractmethod
    def __init__(self, setup: Setup) -> None: ...

    @abstractmethod
    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[Ends]:
        """Trains every task from the weights `start` (flat `[row_size]`) and the model's `buffers`; the ends come in
        any order, in groups of one or more clients.

        `tasks` is consumed as rows become free. Raises ClientError when the model or the loss raises; where the setup
        excludes such clients, the error comes in place of their ends.
        """


registry: dict[str, type[Executor]] = {}  # the executors by name, as they are defined
