"""Stacked clients on a GPU: a step waits for nothing."""

import pytest
import torch
from pytest import MonkeyPatch

from fastsam import fed
from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam.fed.executors.vmap import Vmap
from fastsam_kernels import native
from tests.helpers import oracle
from tests.helpers.emulated_rows import classifier
from tests.helpers.gpu_step import DEVICE


def test_no_step_of_stacked_clients_waits_for_the_device(monkeypatch: MonkeyPatch) -> None:
    """Ragged clients, whose rows are gathered and put back; from the second round on, when every shape has been
    recorded and compared."""
    original, rounds = Vmap._tick, [0]

    def tick(self: Vmap, blocks: list) -> None:
        if rounds[0] < 2:
            original(self, blocks)
            return
        with Cuda(torch.device(DEVICE)).no_wait():
            original(self, blocks)

    monkeypatch.setattr(Vmap, "_tick", tick)
    # in the third step the first and the last have whole batches
    clients = oracle.ragged_clients(torch.float32, (15, 12, 9))
    fed.run(
        oracle.smooth_model(torch.float32), clients, fed.FedSAM(), rounds=4, batch_size=5, participation=1.0,
        device=DEVICE,
        executor="vmap", slots=3, local_epochs=2, progress=lambda record: rounds.__setitem__(0, rounds[0] + 1),
    )  # fmt: skip
    assert rounds == [4]


@pytest.mark.skipif(native.why_not("cuda") is not None, reason=f"{native.why_not('cuda')}")
@pytest.mark.parametrize("hidden_size", [32, 700])
@pytest.mark.parametrize("algorithm", [fed.FedAvg(), fed.FedSAM()], ids=["fedavg", "fedsam"])
def test_row_programs_agree_with_the_cpus(algorithm: fed.Algorithm, hidden_size: int, monkeypatch: MonkeyPatch) -> None:
    """Products in shared and in global memory have the CPU's bits; sums over a batch may have a different order."""
    original, calls = RowSteps._train, []
    monkeypatch.setattr(RowSteps, "_train", lambda *operands: (calls.append(1), original(*operands)))
    draw, weights = torch.Generator().manual_seed(0), []
    clients = [(torch.randn(n, 64, generator=draw), torch.randint(10, (n,), generator=draw)) for n in (40, 40, 23)]
    for device in ("cpu", DEVICE):
        old_count = len(calls)
        result = fed.run(
            classifier((64, hidden_size, 10)), clients, algorithm, rounds=3, batch_size=16, participation=1.0,
            device=device, executor="vmap", momentum=0.5, lr=0.05,
        )  # fmt: skip
        assert len(calls) > old_count
        weights.append(torch.cat([p.detach().flatten().cpu() for p in result.model.parameters()]))
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-5)
