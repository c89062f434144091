"""Local epochs of stacked clients as captured CUDA graphs: for an epoch the host queues the order of its samples and
one graph, where it queued every operation of every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from torch import Tensor

from fastsam.fed.executors.base import Setup
from fastsam.fed.executors.cuda import Cuda, Replay
from fastsam.fed.executors.kernel_calls import Form
from fastsam.fed.executors.local_work import Crew
from fastsam.fed.executors.replay import Function, Replays

KEPT = 16  # graphs, each with its own memory; later sorts train step by step
_EAGER_EPOCHS = 2  # epochs before a capture, because libraries set up on first use and that cannot be captured

Step = Callable[[Tensor, Tensor, bool], None]  # function of x, y, and whether it is the last step


class Epoch(NamedTuple):
    """A captured epoch. places: int64 `[rows, samples]`, the indices of its samples. held: objects that it reads."""

    graph: Replay
    places: Tensor
    held: tuple[object, ...]


class Epochs:
    """The captured epochs of one run, by rows, kind and number of samples.

    One is captured for clients that begin together and are alike, whose passes are replayed from recordings: a model
    that runs through its Python might be frozen by a capture. Steps that are kept for a measure run as they are.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.stream = cuda, cuda.stream()
        self._made, self._seen = dict[Hashable, Epoch](), dict[Hashable, int]()

    def train(self, crew: Crew, form: Form, replays: Replays, step: Step) -> bool:
        """The crew's next epoch, in the rows of `form`, which are arranged; False where its steps have to be taken one
        by one."""
        if crew.k % crew.epoch or crew.feed is None or crew.tasks[0].work.store is None:
            return False
        if any(task.snapshots for task in crew.tasks) or crew.k + crew.epoch > crew.steps:
            return False
        ends = form.s is not None and crew.k + crew.epoch == crew.steps
        key = (form.part.start, form.part.stop, form.kind, crew.tasks[0].samples, ends)
        epoch = self._made.get(key)
        functions = () if epoch is not None else self._functions(key, crew, replays)
        if functions is None:
            return False
        places = crew.feed.span(crew.k, crew.epoch).places
        self.stream.wait_stream(self.cuda.current())
        with self.cuda.on(self.stream):
            if epoch is None:
                epoch = self._made[key] = self._captured(crew, places.clone(), functions, step)
            epoch.places.copy_(places)
            epoch.graph.replay()
        self.cuda.current().wait_stream(self.stream)
        crew.k += crew.epoch
        return True

    def _functions(self, key: Hashable, crew: Crew, replays: Replays) -> tuple[Function, ...] | None:
        """Return the recorded passes of an epoch that is captured now, or None."""
        self._seen[key] = self._seen.get(key, 0) + 1
        sizes = crew.tasks[0].epoch_sizes()
        found = [replays.settled(size, len(crew.tasks), *crew.samples) for size in sorted(set(sizes))]
        functions = tuple(function for function in found if function is not None)
        early = self._seen[key] <= _EAGER_EPOCHS
        return None if early or len(self._made) == KEPT or len(functions) < len(found) else functions

    def _captured(self, crew: Crew, places: Tensor, functions: tuple[Function, ...], step: Step) -> Epoch:
        x, y = crew.samples
        sizes, ends = crew.tasks[0].epoch_sizes(), crew.k + crew.epoch == crew.steps

        def work() -> None:
            at = 0
            for number, size in enumerate(sizes):
                wanted = places[:, at : at + size]
                own_x, own_y = (part.index_select(0, wanted.flatten()).unflatten(0, wanted.shape) for part in (x, y))
                step(own_x, own_y, ends and number + 1 == len(sizes))
                at += size

        return Epoch(self.cuda.capture(work, self.stream), places, (x, y, functions))


def epochs_of(setup: Setup) -> Epochs | None:
    """Return the captured epochs of a run, or None if its functions may have graphs of their own (compiled models)."""
    return Epochs(Cuda(setup.device)) if setup.device.type == "cuda" else None
