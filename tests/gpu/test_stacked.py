"""Stacked clients on a GPU: a step waits for nothing, and every pass is replayed with the numbers of `sequential`."""

import itertools

import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch
from torch import Tensor

from fastsam import fed
from fastsam.fed.executors import step_graphs
from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam.fed.executors.vmap import Vmap
from fastsam_kernels import native
from tests.helpers import oracle
from tests.helpers.emulated_rows import classifier
from tests.helpers.fed_runs import vector
from tests.helpers.gpu_step import DEVICE
from tests.promises.stacked_cases import CASES, SERVED, SIZES


def test_no_step_of_stacked_clients_waits_for_the_device(monkeypatch: MonkeyPatch) -> None:
    """Ragged clients, whose rows are gathered and put back; from the third round on, when every step is captured."""
    original, rounds = Vmap._tick, [0]

    def tick(self: Vmap, clients: list) -> None:
        if rounds[0] < 2:
            original(self, clients)
            return
        with Cuda(torch.device(DEVICE)).no_wait():
            original(self, clients)

    monkeypatch.setattr(Vmap, "_tick", tick)
    clients = oracle.ragged_clients(torch.float32, (15, 12, 10))  # in the third step only the second has no whole batch
    fed.run(
        oracle.smooth_model(torch.float32), clients, fed.FedSAM(), rounds=4, batch_size=5, participation=1.0,
        device=DEVICE,
        executor="vmap", slots=3, local_epochs=2, progress=lambda record: rounds.__setitem__(0, rounds[0] + 1),
    )  # fmt: skip
    assert rounds == [4]


@pytest.mark.skipif(native.why_not("cuda") is not None, reason=f"{native.why_not('cuda')}")
@pytest.mark.parametrize(("hidden_size", "fits"), [(32, True), (700, False)])
@pytest.mark.parametrize("algorithm", [fed.FedAvg(), fed.FedSAM()], ids=["fedavg", "fedsam"])
def test_row_programs_agree_with_the_cpus(
    algorithm: fed.Algorithm, hidden_size: int, fits: bool, monkeypatch: MonkeyPatch
) -> None:
    """Products have the CPU's bits; sums over a batch may have a different order. A row that does not fit a block's
    shared memory takes batched products."""
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
        assert (len(calls) > old_count) is (fits or device == "cpu")
        weights.append(vector(result.model).cpu())
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-5)


# Each case has one dtype and one kind of sizes. Errors are relative to the change of the weights.
KINDS = {
    "float32": (torch.float32, 1e-4, SIZES),
    "bfloat16": (torch.bfloat16, 0.05, SIZES),
    "equal": (torch.float32, 1e-4, (12, 12, 12)),
}


@pytest.mark.parametrize(("name", "kind"), list(zip(SERVED, itertools.cycle(KINDS))))
def test_clients_in_a_group_have_the_numbers_of_a_client_by_itself(
    name: str, kind: str, caplog: LogCaptureFixture, monkeypatch: MonkeyPatch
) -> None:
    """cuDNN would round convolutions of one row to TF32 in another way than grouped ones."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    dtype, tolerance, sizes = KINDS[kind]
    CASES[name].compare(dtype, 3, tolerance, sizes, device=DEVICE)
    assert "not replayed" not in caplog.text or CASES[name].kind == "once per client"


@pytest.mark.parametrize("name", ["attention, padding", "dropout: transformer"])
def test_steps_of_unequal_clients_are_captured(name: str, monkeypatch: MonkeyPatch) -> None:
    """Runs with captures and without them have the same weights, and round 3 captures nothing."""
    captured, rounds, ends, capture = list[int](), [1], list[Tensor](), Cuda.capture

    def count(*operands: object) -> object:
        captured.append(rounds[0])
        return capture(*operands)  # type: ignore[arg-type]

    monkeypatch.setattr(Cuda, "capture", count)
    for limit in (step_graphs.MAX_GRAPHS, 0):
        monkeypatch.setattr(step_graphs, "MAX_GRAPHS", limit)
        rounds[0] = 1
        result = CASES[name].train(
            "vmap", clients=CASES[name].clients(torch.float32, (15, 12, 10, 7, 3)), rounds=5, lr=0.05, slots=5,
            device=DEVICE, progress=lambda record: rounds.__setitem__(0, rounds[0] + 1),
        )  # fmt: skip
        ends.append(vector(result.model).cpu())
        if limit:
            assert captured and max(captured) <= 2, captured
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
