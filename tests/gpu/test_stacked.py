"""Stacked clients on a GPU: a step waits for nothing, and every pass is replayed with the numbers of `sequential`."""

from collections.abc import Callable, Sequence

import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch
from torch import Tensor, nn

from bench.fed.workload import Workload
from fastsam import fed
from fastsam.fed.executors import cuda
from fastsam.fed.executors.cuda import Captures, Cuda
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam.fed.executors.vmap import Vmap
from fastsam_kernels import native
from tests.helpers import oracle
from tests.helpers.attending import Reader, texts
from tests.helpers.emulated_rows import classifier
from tests.helpers.gpu_step import DEVICE

Samples = tuple[Tensor, Tensor]


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
        weights.append(torch.cat([p.detach().flatten().cpu() for p in result.model.parameters()]))
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-5)


SIZES = {"equal": (12, 12, 12), "unequal": (12, 9, 6)}
TOLERANCE = {None: 1e-3, "bf16": 0.05}  # relative errors of the change of the weights; convolutions are rounded to TF32


def check_against_sequential(
    make_model: Callable[[], nn.Module], clients: Sequence[Samples], precision: str | None, caplog: LogCaptureFixture
) -> None:
    """Compare the change of the weights. No pass may run through the model's Python code for want of a recording."""
    start, changes = torch.cat([p.detach().flatten() for p in make_model().parameters()]), []
    for executor in ("sequential", "vmap"):
        result = fed.run(
            make_model(), clients, fed.FedSAM(rho=0.05), rounds=5, batch_size=4, lr=0.05, participation=1.0, slots=3,
            device=DEVICE, executor=executor, precision=precision,
        )  # fmt: skip
        changes.append(torch.cat([p.detach().flatten().cpu() for p in result.model.parameters()]) - start)
    assert float((changes[1] - changes[0]).norm()) <= TOLERANCE[precision] * float(changes[0].norm())
    assert "not replayed" not in caplog.text


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(("is_masked", "length"), [(False, 32), (True, 32), (True, 19)])
def test_attention(is_masked: bool, length: int, precision: str | None, sizes: str, caplog: LogCaptureFixture) -> None:
    """torch chooses its kernel by dtype and mask. The rows of a mask of 19 words are not aligned."""
    check_against_sequential(lambda: Reader(is_masked), texts(SIZES[sizes], length), precision, caplog)


@pytest.mark.parametrize("sizes", SIZES)
def test_convolutions(sizes: str, caplog: LogCaptureFixture) -> None:
    """cuDNN rounds the convolutions of one row in another way than grouped ones."""
    load = Workload("cnn", clients=3, cohort=3)
    clients = [(x[:n], y[:n]) for (x, y), n in zip(load.tensors(), SIZES[sizes], strict=True)]
    check_against_sequential(load.make_model, clients, None, caplog)


class Dropping(nn.Module):
    """A reader whose attention and features have dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.words, self.inner, self.head = nn.Embedding(11, 16), nn.TransformerEncoder(layer, 1), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.inner(self.words(x)).mean(1))
        return result


MODELS = {"attention": lambda: Reader(is_masked=True), "dropout": Dropping}


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_unequal_clients_are_captured(name: str, monkeypatch: MonkeyPatch) -> None:
    """Runs with captures and without them have the same weights, and round 3 captures nothing."""
    captured, rounds, ends, capture = list[int](), [1], list[Tensor](), Captures.capture

    def count(*operands: object) -> None:
        captured.append(rounds[0])
        capture(*operands)  # type: ignore[arg-type]

    monkeypatch.setattr(Captures, "capture", count)
    for limit in (cuda.MAX_GRAPHS, 0):
        monkeypatch.setattr(cuda, "MAX_GRAPHS", limit)
        rounds[0] = 1
        result = fed.run(
            MODELS[name](), texts((15, 12, 10, 7, 3), 8), fed.FedSAM(rho=0.05), rounds=5, batch_size=4, lr=0.05,
            participation=1.0, slots=5, device=DEVICE, executor="vmap",
            progress=lambda record: rounds.__setitem__(0, rounds[0] + 1),
        )  # fmt: skip
        ends.append(torch.cat([p.detach().flatten().cpu() for p in result.model.parameters()]))
        if limit:
            assert captured and max(captured) <= 2, captured
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_a_client_drops_the_same_alone_and_in_a_group(caplog: LogCaptureFixture) -> None:
    start, changes = torch.cat([p.detach().flatten() for p in Dropping().parameters()]), []
    for slots in (1, 4):
        result = fed.run(
            Dropping(), texts((12, 9, 6, 12), 8), fed.FedSAM(rho=0.05), rounds=4, batch_size=4, lr=0.05,
            participation=1.0, slots=slots, device=DEVICE, executor="vmap",
        )  # fmt: skip
        changes.append(torch.cat([p.detach().flatten().cpu() for p in result.model.parameters()]) - start)
    assert float((changes[1] - changes[0]).norm()) <= 1e-2 * float(changes[0].norm())
    assert "not replayed" not in caplog.text
