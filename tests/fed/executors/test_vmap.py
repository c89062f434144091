"""Stacked clients: they agree with the plain executor, and a number of slots determines the bits.

Models that cannot be stacked are refused.
"""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastsam import fed
from fastsam.fed import executors
from fastsam.fed.executors import Setup, stacked, vmap
from fastsam.fed.update import scratch_rows
from tests.helpers import oracle
from tests.helpers.fed_kinds import Rows, in_another_collate, pairs
from tests.helpers.fed_kinds import run as run_kinds
from tests.helpers.fed_runs import digest, run
from tests.helpers.setups import oracle_tasks, setup_of


def test_a_run_continues_in_the_same_bits(tmp_path):
    full_run = run(fed.SCAFFOLD(), "vmap", 3, rounds=4)
    run(fed.SCAFFOLD(), "vmap", 3, rounds=2, run_dir=tmp_path / "run")
    parts = run(fed.SCAFFOLD(), "vmap", 3, rounds=4, run_dir=tmp_path / "run", resume=True)
    assert oracle.movement(full_run.model, parts.model) == 0
    with pytest.raises(fed.RunDirectoryError, match="numbers"):
        run(fed.SCAFFOLD(), "vmap", 4, rounds=5, run_dir=tmp_path / "run", resume=True)


def test_errors_name_the_clients():
    def loss(out, y):
        if out.shape[0] == 4:  # the partial batch of the client with 9 samples
            raise RuntimeError("enough")
        return F.multi_margin_loss(out, y)

    with pytest.raises(fed.ClientError, match="client 1 failed in round 1, local step 1: RuntimeError: enough"):
        run(fed.FedAvg(), "vmap", 3, sizes=(10, 9), batch_size=5, participation=1.0, loss=loss)


# --- How many rows are stacked, and what a step of rows that are not neighbours asks of the device.


GIB = 1 << 30


def dense(device: str, cohort: int | None, width: int = 32) -> Setup:
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    return setup_of(model, device=device, cohort=cohort)


@pytest.mark.parametrize(
    ("memory", "cohort", "rows"),
    [(80 * GIB, 100, 100), (80 * GIB, 5000, 5000), (80 * GIB, None, 64), (GIB // 64, 100, 25)],
)
def test_on_a_gpu_rows_follow_cohort_and_memory(
    memory: int, cohort: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cache of a processor limits them: a call costs the same for any number."""
    monkeypatch.setattr(stacked, "_memory", lambda device: memory)
    setup = dense("cuda", cohort)
    result = stacked.slots_of(setup)
    assert result == rows
    assert 4 * 16 * result * 4 * setup.layout.row_size <= memory


def test_one_row_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "_memory", lambda device: 1)
    assert stacked.slots_of(dense("cuda", 100)) == 1
    assert stacked.slots_of(replace(dense("cpu", 100), cohort=1)) == 1


def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "_memory", lambda device: 4 * GIB // 64)
    monkeypatch.setattr(stacked, "ranks_per_device", lambda: 4)
    assert stacked.slots_of(dense("cuda", 100)) == 25


def test_on_a_cpu_rows_stay_in_the_cache() -> None:
    assert stacked.slots_of(dense("cpu", 5000)) == 64 and stacked.slots_of(dense("cpu", 5000, width=4000)) == 4


def test_rows_have_memory_for_their_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA trains few parameters, and keeps the activations of a large model."""
    monkeypatch.setattr(stacked, "_memory", lambda device: 80 * GIB)
    cpu, cuda = (replace(dense(device, 5000), activations=GIB // 4) for device in ("cpu", "cuda"))
    assert stacked.slots_of(cuda) == 79 and stacked.slots_of(cpu) == 4
    assert stacked.slots_of(replace(cpu, activations=8 * GIB)) == 1


def test_operations_that_are_called_once_per_client_are_logged_in_our_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has one line in place of torch's warnings. The model's warnings and the user's vmap still warn."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(6, 6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn("a word of the model", stacklevel=1)
            result: torch.Tensor = F.layer_norm(self.layer(x, x), (3,))  # stops the recording for a row program
            return self.layer(result.repeat(1, 2), x)

    with caplog.at_level("INFO", "fastsam.fed"), warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        run(fed.FedSAM(), "vmap", 3, model=Pairs(), rounds=2)
    messages = {str(record.message) for record in records}
    assert "a word of the model" in messages and not any("performance drop" in message for message in messages)
    lines = [line for line in caplog.messages if "once per client" in line]
    assert len(lines) == 1 and "calls bilinear once per client" in lines[0]
    with pytest.warns(UserWarning, match="performance drop"):
        torch.func.vmap(F.pdist)(torch.ones(2, 4, 3))


def test_memory_that_is_too_small_names_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*operands: object, **options: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory")

    tasks, start, setup = oracle_tasks((12, 12, 12), slots=6)
    x, y = tasks[0].work.tensors
    setup = replace(setup, example=(x[:5], y[:5]))
    executor = executors.registry["vmap"](setup)
    monkeypatch.setattr(stacked.StackedPasses, "run", fail)
    monkeypatch.setattr(executor.row_steps, "train", lambda blocks: blocks)
    with pytest.raises(fed.ClientError, match=r"clients? 0.*allocate memory\. Take fewer slots, or"):
        list(executor.train(start, [], iter(tasks)))
    monkeypatch.setattr(vmap, "Rows", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"no memory for 6 clients at once .*allocate memory.*slots=3"):
        executors.registry["vmap"](setup)


def test_places_of_rows_go_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From ordinary memory each copy would wait for all that the device has to do, twice a step. Only the middle row
    has no whole batch in the second step."""
    tables: list[tuple[int, ...]] = []
    original = scratch_rows.to_device

    def count_copies(t: torch.Tensor, device: torch.device) -> torch.Tensor:
        if t.dtype == torch.int64:
            tables.append(tuple(t.tolist()))
        return original(t, device)

    monkeypatch.setattr(scratch_rows, "to_device", count_copies)
    clients = oracle.ragged_clients(torch.float32, (16, 7, 18))
    runs = [
        digest(fed.run(oracle.smooth_model(torch.float32), clients, fed.FedGSAM(rho=0.05), rounds=3, batch_size=5,
                       participation=1.0, local_epochs=2, executor="vmap", slots=3))
        for _ in range(2)
    ]  # fmt: skip
    sets = set(tables)
    assert sets and len(tables) == 2 * len(sets) and runs[0] == runs[1]


class Counting(torch.nn.Linear):
    """A layer that counts its calls, so that each pass calls it."""

    total = calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        Counting.total += 1
        return super().forward(x)


@pytest.mark.parametrize("n", [20, 100])
def test_equal_batches_of_unequal_clients_share_a_pass(n: int) -> None:
    """Whole batches step together. Partial ones wait, so that a size has one pass, whatever the number of clients."""
    sizes = torch.randint(8, 121, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    clients = [(torch.randn(size, 3), torch.randint(2, (size,))) for size in sizes]
    calls = list[int]()
    fed.run(
        Counting(3, 2), clients, fed.FedAvg(), rounds=3, batch_size=16, participation=1.0, executor="vmap", slots=n,
        eval_every=3, progress=lambda record: calls.append(Counting.total),
    )  # fmt: skip
    assert calls[1] - calls[0] == max(size // 16 for size in sizes) + len({size % 16 for size in sizes} - {0})


# --- Samples that come batch by batch: who trains them.


def test_auto_never_stacks_batches_and_vmap_refuses_them() -> None:
    clients = [Rows(x, y) for x, y in pairs()]
    assert run_kinds(clients).summary()["executor"] == "vmap"
    assert run_kinds(clients, collate=in_another_collate).summary()["executor"] in ("threads", "sequential")
    with pytest.raises(ValueError, match="'vmap' cannot serve here: .*batch by batch"):
        run_kinds(clients, collate=in_another_collate, executor="vmap")


# --- The trial step of stacked clients against each client alone: what rounding explains passes, what it does not is
# refused.


def is_stacked(x: torch.Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(x)


class Tie(nn.Module):
    """The larger one of two equal weights goes into a logit, `share` times; in stacked rows, rounding makes it the
    other one."""

    def __init__(self, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.pair, self.share = oracle.smooth_model(torch.float32), nn.Parameter(torch.ones(2)), share

    def forward(self, x):
        pair = self.pair * torch.tensor([1.0, 1 + 1e-6]) if is_stacked(self.pair) else self.pair
        return self.inner(x) + self.share * pair.max(0).values * torch.tensor([1.0, 0.0, 0.0])


class Scaled(nn.Module):
    """Logits that are off by a factor in stacked rows."""

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.factor = oracle.smooth_model(dtype), factor

    def forward(self, x):
        return self.inner(x) * self.factor if is_stacked(x) else self.inner(x)


def run_trial(model: nn.Module, dtype: torch.dtype = torch.float32) -> fed.Result:
    return fed.run(model, oracle.ragged_clients(dtype), fed.FedAvg(), rounds=1, participation=1.0, executor="vmap")


def test_a_maximum_that_rounding_moves_is_no_reason_to_refuse() -> None:
    """Single elements of the gradient are then quite different, the loss and the gradient as a whole are not."""
    run_trial(Tie(0.03))


def test_a_gradient_that_differs_as_a_whole_is_refused_though_the_loss_agrees() -> None:
    with pytest.raises(ValueError, match="a stacked step gives other losses or gradients"):
        run_trial(Tie(3.0))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_losses_may_differ_by_rounding_alone(dtype: torch.dtype, error: float) -> None:
    run_trial(Scaled(1 + error, dtype), dtype)
    with pytest.raises(ValueError, match="a stacked step gives other losses or gradients"):
        run_trial(Scaled(1 + 1000 * error, dtype), dtype)
