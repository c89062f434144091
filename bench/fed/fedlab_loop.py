"""FedLab's standalone simulation: its serial trainer and its synchronous server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench.fed.workload import BATCH, LR, Workload


def train(workload: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
    """option: none."""
    _without_torchvision()
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.standalone import StandalonePipeline

    sets = [TensorDataset(x, y) for x, y in workload.tensors()]

    class Data:
        def get_dataloader(self, id: int, batch_size: int) -> DataLoader:
            return DataLoader(sets[id], batch_size=batch_size, shuffle=True)

    class Pipeline(StandalonePipeline):
        def evaluate(self) -> None:
            tick()

    model = workload.make_model()
    handler = SyncServerHandler(model, rounds, workload.cohort / workload.clients, False, logger=Silent())
    trainer = SGDSerialClientTrainer(workload.make_model(), workload.clients, False, logger=Silent())
    trainer.setup_dataset(Data())
    trainer.setup_optim(1, BATCH, LR)
    Pipeline(handler, trainer).main()
    return handler.model


def _without_torchvision() -> None:
    """FedLab imports torchvision for data sets that are not used here; an empty module does where none fits the
    installed torch."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        empty = ModuleType("torchvision")
        empty.transforms = ModuleType("torchvision.transforms")  # type: ignore[attr-defined]
        sys.modules |= {"torchvision": empty, "torchvision.transforms": empty.transforms}


class Silent:
    """A logger whose time is not measured."""

    def info(self, text: str) -> None:
        pass
