"""`precision=`: passes in bfloat16 by autocast, and the flags of float32, in every executor."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.rundir.environment import float32_precision
from fastsam.fed.rundir.manifest import RunDirectoryError
from tests.helpers.fed_runs import digest, vector

CPU = torch.device("cpu")


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)).to(dtype)


def clients_of(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 20, generator=draw), torch.randint(5, (n,), generator=draw)) for n in sizes]


def train(model: nn.Module, clients: list[tuple[Tensor, Tensor]], **options: object) -> fed.Result:
    base = {"rounds": 2, "batch_size": 8, "participation": 1.0, "test": clients[0], "executor": "sequential"}
    return fed.run(model, clients, fed.FedSAM(rho=0.05), **base | options)


def test_local_steps_have_the_bits_of_a_loop_under_autocast() -> None:
    """The first deltas before the server rounds: `w^1 = w^0 + delta`, once in float64."""
    (client,) = clients_of(24)
    model, loop = model_of(), copy.deepcopy(model_of())
    result = fed.run(
        model, [client], fed.FedAvg(), rounds=1, batch_size=8, participation=1.0, shuffle=False, lr=0.125,
        executor="sequential", precision="bf16",
    )  # fmt: skip
    optimizer, total = torch.optim.SGD(loop.parameters(), lr=0.125), 0.0
    for x, y in zip(*(part.split(8) for part in client), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(loop(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * 8
    start = vector(model)
    expected = (start.double() + (vector(loop) - start).double()).float()
    assert result.history[0]["train_loss"] == total / 24
    assert torch.equal(vector(result.model), expected)
    assert type(result.model) is type(model) and "forward" not in vars(result.model), "the user's model as it was"


def test_a_model_whose_maxima_rounding_moves_is_refused_for_that() -> None:
    """The losses of stacked clients are right, and gradients go to other ones of equal values."""
    draw = torch.Generator().manual_seed(3)
    clients = [(torch.rand(16, 3, 16, 16, generator=draw), torch.arange(16) % 5) for _ in range(2)]
    torch.manual_seed(3)
    blocks = [layer for a in (3, 4, 4) for layer in (nn.Conv2d(a, 4, 3, padding=1), nn.MaxPool2d(2))]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16, 5))
    train(model, clients, executor="vmap", batch_size=16)
    with pytest.raises(
        ValueError, match="the losses of a plain one, but other gradients, because in bfloat16 rounding"
    ):
        train(model, clients, executor="vmap", batch_size=16, precision="bf16")


@pytest.mark.parametrize("options", [{}, {"optimizer": "AdamW", "lr": 0.01}, {"measures": ["sharpness"]}], ids=str)
def test_executors_agree(options: dict) -> None:
    clients = clients_of(24, 24, 10)
    plain = train(model_of(), clients, precision="bf16", **options)
    assert digest(train(model_of(), clients, precision="bf16", executor="threads", **options)) == digest(plain)
    distance = (vector(plain.model) - vector(train(model_of(), clients, **options).model)).abs().max()
    stacked = train(model_of(), clients, precision="bf16", executor="vmap", **options)
    assert 1e-5 < distance < 0.05, "the passes are in bfloat16"
    assert (vector(stacked.model) - vector(plain.model)).abs().max() < 2 * distance


def test_stacked_clients_are_recorded_and_have_their_own_bits() -> None:
    clients = clients_of(24, 24, 10)
    runs = [train(model_of(), clients, precision="bf16", executor="vmap", rounds=4, slots=3) for _ in range(2)]
    assert digest(runs[0]) == digest(runs[1])


def test_a_bilinear_layer_whose_inner_product_is_rounded_is_no_random_model() -> None:
    """torch rounds it when it is called, and not when its operations are recorded."""

    class Pairs(nn.Bilinear):
        def forward(self, x: Tensor, _: None = None) -> Tensor:
            return super().forward(x, x)

    assert train(Pairs(20, 20, 5), clients_of(24, 10), precision="bf16").history


def test_evaluation_is_in_the_same_precision() -> None:
    clients = clients_of(24, 16)
    result = train(model_of(), clients, precision="bf16")
    x, y = clients[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(result.model(x), y)
    assert result.history[-1]["test_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert result.history[-1]["test_loss"] != pytest.approx(F.cross_entropy(result.model(x), y).item(), rel=1e-6)
    assert len(fed.finetune(result, clients, test=clients[0])) == 2


def test_a_loss_of_batches_and_outputs_in_a_dict() -> None:
    """Outputs in bfloat16 become float32 at any depth. Other outputs keep their dtype."""
    dtypes: list[list[torch.dtype]] = []

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 5)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            logits = self.layer(x)
            assert logits.dtype == torch.bfloat16
            return {"loss": F.mse_loss(logits, F.one_hot(y, 5).to(logits.dtype)), "rest": (logits, y, x.double())}

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(*batch)
        dtypes.append([t.dtype for t in (outputs["loss"], *outputs["rest"])])
        loss: Tensor = outputs["loss"]
        return loss

    loss = fed.BatchLoss(loss_of)
    result = train(WithLoss(), clients_of(16, 8), precision="bf16", loss=loss, test=None)
    assert dtypes and all(d == [torch.float32, torch.float32, torch.int64, torch.float64] for d in dtypes)
    assert all(p.dtype == torch.float32 for p in result.model.parameters())


def test_flags_of_float32_are_set_inside_and_put_back() -> None:
    seen, old_flags = [], float32_precision(CPU)

    class Watch(fed.Callback):
        def on_round(self, run: object, record: object) -> None:
            seen.append(float32_precision(CPU))
            raise KeyboardInterrupt

    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(KeyboardInterrupt):
            train(model_of(), clients_of(8), precision="float32", callbacks=[Watch()])
        assert set(seen[0].values()) == {"ieee"}
        assert float32_precision(CPU)["mkldnn.matmul"] == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = old_flags["mkldnn.matmul"]
    assert float32_precision(CPU) == old_flags


def test_what_is_refused(tmp_path: Path) -> None:
    clients = clients_of(8, 8)
    for precision, model, message in (
        ("fp16", model_of(), "did you mean 'bf16'"), ("tf32", model_of(), "needs an NVIDIA GPU"),
        ("bf16", model_of(torch.float64), "needs float32 parameters"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            train(model, clients, precision=precision)
    train(model_of(), clients, precision="bf16", run_dir=tmp_path)
    with pytest.raises(RunDirectoryError, match="precision"):
        train(model_of(), clients, rounds=3, run_dir=tmp_path, resume=True)
    resumed = train(model_of(), clients, rounds=3, precision="bf16", run_dir=tmp_path, resume=True)
    assert torch.equal(vector(resumed.model), vector(train(model_of(), clients, rounds=3, precision="bf16").model))
