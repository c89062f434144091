"""The sizes of the measurements M1 to M9 (see bench/fed/decide.py), and a row of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.fed import on_gpu, steady
from bench.fed.steady import Figures
from bench.fed.workload import Workload

PLAIN = "plain"  # the usual kind of process


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        dropped, rounds: rounds before the first time, and number of times.
        clients: number of clients of a round.
        slots: numbers of slots of `graph`, the most important first.
        lanes: numbers of slots for comparisons, the last one the largest.
        counts: numbers of clients for the crossing of `vmap` and `graph`.
        images: samples of a ResNet client, in a cohort of a tenth of `resnet_clients`.
        resnet_clients: number of ResNet clients.
        widths: channels of the ResNet.
        processes: numbers of processes on one device.
    """

    dropped: int = steady.DROPPED
    rounds: int = steady.ROUNDS
    clients: int = 100
    slots: Sequence[int] = (8, 31, 16, 4, 2, 1)
    lanes: Sequence[int] = (8, 31)
    counts: Sequence[int] = (2, 4, 8, 16, 31, 100)
    images: int = 500
    resnet_clients: int = 100
    widths: Sequence[int] = (64, 128, 256, 512)
    processes: Sequence[int] = (1, 2, 4, 8)


QUICK = Sizes(1, 2, 4, (2, 1), (2,), (2, 3), 20, 20, (16, 16, 16, 16), (1, 2))


@dataclass(frozen=True)
class Setting:
    """A device and the sizes of the measurements."""

    device: str
    sizes: Sizes

    def measure(self, train: on_gpu.Loop, seconds: float, **options: Any) -> steady.SteadyRounds:
        keywords = {"dropped": self.sizes.dropped, "rounds": self.sizes.rounds} | options
        return steady.measure(self.device, train, seconds, **keywords)

    def load(self, model: str, clients: int | None = None, algorithm: str = "fedavg") -> Workload:
        n = clients or self.sizes.clients
        return Workload(model, algorithm, clients=n, cohort=n, device=self.device)


@dataclass(frozen=True)
class Row:
    """A measurement.

    Args:
        name: name of the row.
        work: function of a time limit in seconds that returns figures.
        process: kind of the process in which it runs.
        missing: function that returns what the package lacks for it, or an empty string.
    """

    name: str
    work: Callable[[float], Figures]
    process: str = PLAIN
    missing: Callable[[], str] = str
