"""Losses of sets are one call on all outputs and labels, unless they are means. Gradients of a set
are exact too."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from fastsam import fed
from fastsam.arena import Layout
from fastsam.fed.clients import set_loss
from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss
from fastsam.fed.clients.loss_kind import kind_of
from fastsam.fed.executors import task
from fastsam.fed.loop import requirements
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import vector

WEIGHTS = torch.tensor([0.1, 1.0, 4.0], dtype=torch.float64)
CLIENTS = oracle.ragged_clients(sizes=(700, 30, 600))
TEST = oracle.ragged_clients(sizes=(1300,), seed=5)[0]


def pairwise(out: Tensor, y: Tensor) -> Tensor:
    """Return a ranking loss of all pairs of a batch."""
    scores = out[:, 0]
    return F.softplus(scores[:, None] - scores[None]).mul(y[:, None] > y[None]).sum() / len(y) ** 2


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "pairs": pairwise,
}


def run(loss: Any, **options: Any) -> fed.Result:
    common: dict[str, Any] = {"rounds": 1, "participation": 1.0, "batch_size": 100, "lr": 1e-3, "loss": loss}
    clients, algorithm = options.pop("clients", CLIENTS), options.pop("algorithm", fed.FedAvg())
    return fed.run(
        oracle.smooth_model(), clients, algorithm, **{"test": TEST, "measures": ["train"], **common, **options}
    )


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_set_is_one_call_whatever_the_order(name: str) -> None:
    """The samples are sorted by class, so that batches of them have other classes than the set."""
    loss = LOSSES[name]
    order = TEST[1].argsort()
    result = run(loss, test=(TEST[0][order], TEST[1][order]))
    record, model = result.history[-1], result.model
    x, y = (torch.cat(parts) for parts in zip(*CLIENTS, strict=True))
    assert record["test_loss"] == pytest.approx(loss(model(TEST[0]), TEST[1]).item(), rel=1e-9)
    assert record["train_set_loss"] == pytest.approx(loss(model(x), y).item(), rel=1e-9)


def test_a_lazy_test_set_has_one_call_too() -> None:
    samples = list(zip(*TEST, strict=True))
    clients = [list(zip(*pair, strict=True)) for pair in CLIENTS]
    result = run(LOSSES["weights"], clients=clients, test=samples, measures=())
    expected = LOSSES["weights"](result.model(TEST[0]), TEST[1]).item()
    assert result.history[-1]["test_loss"] == pytest.approx(expected, rel=1e-9)


def test_a_loss_of_a_batch_is_averaged_by_samples() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[1]))
        return F.cross_entropy(model(batch[0]), batch[1])

    result = run(fed.BatchLoss(loss), measures=())
    assert result.history[-1]["test_loss"] == pytest.approx(
        F.cross_entropy(result.model(TEST[0]), TEST[1]).item(), rel=1e-9
    )
    assert max(sizes) == 100


@pytest.mark.parametrize("limit", [0, 40_000])
def test_means_of_large_sets_are_averaged_over_parts(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_loss, "MEAN_LIMIT", limit)
    record = run("cross_entropy").history[-1]
    monkeypatch.undo()
    whole = run("cross_entropy").history[-1]
    for key in ("test_loss", "train_set_loss"):
        assert record[key] == pytest.approx(whole[key], rel=1e-12)


def test_other_losses_are_called_once_on_all_samples() -> None:
    sizes: list[int] = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(y))
        return F.cross_entropy(out, y)

    run(loss)
    assert sizes.count(1300) == 2 and sizes.count(1330) == 1  # the test set, before round 1 too, and the clients
    assert not {1300, 1330, 512} & {n for n in sizes if 100 < n < 1300}


# --- which losses are means


W = WEIGHTS.float()
MEANS: dict[str, Any] = {
    "cross entropy": F.cross_entropy,
    "as a module": nn.CrossEntropyLoss(),
    "smoothed labels": nn.CrossEntropyLoss(label_smoothing=0.1),
    "ignored class": nn.CrossEntropyLoss(ignore_index=1),
    "of a partial": partial(F.cross_entropy, ignore_index=1, weight=None),
    "squares": F.mse_loss,
    "absolute": nn.L1Loss(),
    "two classes": F.binary_cross_entropy_with_logits,
    "of a batch": BatchLoss(lambda model, batch: model(batch).sum()),
}
OTHERS: dict[str, Any] = {
    "weights": nn.CrossEntropyLoss(weight=W),
    "one weight of many": nn.CrossEntropyLoss(weight=torch.ones(5000).index_fill(0, torch.tensor([4999]), 2.0)),
    "weights of a partial": partial(F.cross_entropy, weight=W),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "sum of a partial": partial(F.mse_loss, reduction="sum"),
    "positive weight": nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)),
    "of a user": lambda out, y: F.cross_entropy(out, y),
    "subclass": type("Mine", (nn.MSELoss,), {})(),
    "pairs": pairwise,
}


def test_only_losses_of_torch_without_weights_are_means() -> None:
    hooked = nn.MSELoss()
    hooked.register_forward_hook(lambda module, inputs, output: output * 2)
    assert all(kind_of(loss).is_mean and kind_of(PairLoss(loss)).is_mean for loss in MEANS.values())
    assert not any(kind_of(loss).is_mean for loss in (*OTHERS.values(), hooked))


def test_a_loss_is_not_called_to_find_its_kind() -> None:
    outputs, labels = torch.ones(12, 3), torch.zeros(12, dtype=torch.int64)
    kind = kind_of(lambda out, y: 1 / 0, {"a": outputs, "b": None}, labels, 12)
    assert kind.sample_bytes == 20


def self_normalised(out: Tensor, y: Tensor) -> Tensor:
    """Return the mean weighted by the share of each sample's class in the set."""
    weights = torch.bincount(y, minlength=3)[y].to(out.dtype)
    return (F.cross_entropy(out, y, reduction="none") * weights).sum() / weights.sum()


def last_weighted(classes: int) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.ones(classes).double().index_fill(0, torch.tensor([classes - 1]), 50.0))


@pytest.mark.parametrize("is_sorted", [False, True])
def test_losses_that_look_like_means(is_sorted: bool) -> None:
    """Class weights that differ in the last of many classes, and a loss that depends on the set's classes."""
    x, y = TEST
    for loss, classes in ((self_normalised, 3), (last_weighted(200), 200)):
        labels = torch.where(y == 2, classes - 1, y)
        order = labels.argsort() if is_sorted else torch.arange(len(labels))
        test, model = (x[order], labels[order]), nn.Linear(6, classes).double()
        common: dict[str, Any] = {"rounds": 1, "participation": 1.0, "loss": loss, "measures": ["train"]}
        result = fed.run(model, [test], fed.FedAvg(), test=test, **common)
        expected = loss(result.model(test[0]), test[1]).item()
        record = result.history[-1]
        assert record["test_loss"] == pytest.approx(expected, rel=1e-9), classes
        assert record["train_set_loss"] == pytest.approx(expected, rel=1e-9), classes


class Tagger(nn.Module):
    """Outputs `[n, 3, length]` for texts of one length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).transpose(1, 2)


def texts(lengths: Sequence[int], seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": (x := torch.randint(0, 9, (n,), generator=generator)), "y": x % 3} for n in lengths
    ]  # fmt: skip


def pad(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    x = nn.utils.rnn.pad_sequence([one["x"] for one in samples], batch_first=True)
    y = nn.utils.rnn.pad_sequence([one["y"] for one in samples], batch_first=True, padding_value=-100)
    return x, y


PADDED: dict[str, Any] = {
    "plain": F.cross_entropy,
    "weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "of a user": lambda out, y: F.cross_entropy(out, y, weight=WEIGHTS, ignore_index=-100),
}


@pytest.mark.parametrize("name", PADDED)
def test_padded_batches_are_one_set(name: str) -> None:
    """The batches of the test set have texts of other lengths, and are padded to different lengths."""
    test, loss = texts([5, 6, 7, 4, 2, 1, 2, 2, 9, 8, 9, 3], 1), PADDED[name]
    result = fed.run(
        Tagger(), [texts([4, 5, 3, 8], 2), texts([6, 2, 2, 3], 3)], fed.FedAvg(), rounds=1, participation=1.0, lr=1e-3,
        batch_size=4, collate=pad, loss=loss, test=test,
    )  # fmt: skip
    x, y = pad(test)
    assert result.history[-1]["test_loss"] == pytest.approx(loss(result.model(x), y).item(), rel=1e-9)


def test_targets_of_several_lengths() -> None:
    """The mean of squares is over elements, so longer samples count more."""

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    samples = [(torch.full((n,), 1.0 + n), torch.zeros(n)) for n in (2, 2, 5, 5, 3, 3)]
    result = fed.run(
        Double(), [samples[:2]], fed.FedAvg(), rounds=1, lr=1e-3, batch_size=2, loss="mse_loss", test=samples,
        participation=1.0, collate=default_collate,
    )  # fmt: skip
    x = torch.cat([x for x, _ in samples]).double()
    assert result.history[-1]["test_loss"] == pytest.approx((result.model(x) ** 2).mean().item(), rel=1e-9)


def test_outputs_in_a_tree_are_joined() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": self.body(x), "code": x[:, :2]}

    def loss(outputs: dict[str, Tensor], y: Tensor) -> Tensor:
        return LOSSES["weights"](outputs["scores"], y) + outputs["code"].std()

    result = fed.run(Two(), CLIENTS, fed.FedAvg(), rounds=1, participation=1.0, loss=loss, test=TEST)
    assert result.history[-1]["test_loss"] == pytest.approx(loss(result.model(TEST[0]), TEST[1]).item(), rel=1e-9)


# --- what is refused


class Penalised(nn.Module):
    """Returns a penalty next to its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = oracle.smooth_model()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x.square().mean()


def penalised_loss(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], y) + outputs[1]


WEIGHTED = nn.CrossEntropyLoss(weight=WEIGHTS)
test_refused = refusals(
    (lambda: fed.run(Penalised(), CLIENTS, fed.FedAvg(), rounds=1, loss=penalised_loss, test=TEST, run_dir="run"),
     r"penalised_loss is called once on a set, .* without a row for each sample \(\[512, 3\], \[\], .*BatchLoss"),
)  # fmt: skip


def gradient(loss: Any, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parts = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("name", LOSSES)
def test_measures_of_gradients_are_of_all_samples_at_once(name: str) -> None:
    loss, names = LOSSES[name], fed.NamedMeasures(["sharpness", "variances"], rho=0.1)
    result = run(loss, measures=names)
    record, model = result.history[-1], result.model
    x, y = (torch.cat(parts) for parts in zip(*CLIENTS, strict=True))
    moved, g = copy.deepcopy(model), gradient(loss, model, x, y)
    nn.utils.vector_to_parameters(vector(model) + 0.1 * g / g.norm(), moved.parameters())
    expected = loss(moved(x), y).item() - loss(model(x), y).item()
    assert record["sharpness"] == pytest.approx(expected, rel=1e-6)
    gradients = torch.stack([gradient(loss, model, *pair) for pair in CLIENTS])
    spread = (gradients - gradients.mean(0)).square().sum(1).mean().sqrt()
    assert record["sigma_g"] == pytest.approx(float(spread), rel=1e-9)


def test_measures_of_many_activations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "ACTIVATIONS", 1000)
    words = r"measures=\['sharpness'\] needs a loss .* all samples at once .* CrossEntropyLoss .*samples=1000"
    with pytest.raises(ValueError, match=words):
        run(WEIGHTED, measures=["sharpness"])
    run("cross_entropy", algorithm=fed.MimeLite(), measures=["sharpness"])
    run(WEIGHTED, measures=["train"])


@pytest.mark.parametrize("executor", ["sequential", "vmap"])
def test_full_gradients_of_many_activations_are_refused(
    executor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(task, "MAX_WHOLE", 1000)
    largest = max(len(y) for _, y in CLIENTS)
    words = (
        rf"MimeLite.local_step, failed: .*a gradient of all {largest} samples of a client at once .* fed.BatchLoss\(f\)"
    )
    with pytest.raises(ValueError, match=words):
        run(WEIGHTED, algorithm=fed.MimeLite(), measures=(), executor=executor, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run("cross_entropy", algorithm=fed.MimeLite(), measures=(), executor=executor)


@pytest.mark.parametrize("executor", ["sequential", "vmap"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_full_gradient_is_of_all_samples_at_once(name: str, executor: str) -> None:
    """The server's momentum after a round is beta times the mean of the clients' gradients at the start."""

    class Keeps(fed.MimeLite):
        def step_server(self, server: Any, aggregate: Any, round: Any) -> Any:
            states.append(super().step_server(server, aggregate, round))
            return states[-1]

    states: list[Any] = []
    loss, model = LOSSES[name], oracle.smooth_model()
    common: dict[str, Any] = {"rounds": 1, "participation": 1.0, "batch_size": 100, "lr": 1e-3, "loss": loss}
    fed.run(model, CLIENTS, Keeps(beta=0.9), executor=executor, **common)
    layout = Layout.from_tensors(list(model.parameters()))
    actual = torch.cat([view.flatten() for view in layout.views(states[0]["m"])])
    expected = 0.9 * torch.stack([gradient(loss, model, *pair) for pair in CLIENTS]).mean(0)
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-15)


def test_sets_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample has three outputs and a label, 32 bytes. The test set has 1,300 samples, the clients have 1,330."""
    monkeypatch.setattr(requirements, "LIMIT", 32 * 1300)
    words = "needs a loss that is a mean over samples, .* 32 bytes a sample.* but CrossEntropyLoss"
    with pytest.raises(ValueError, match=rf"measures=\['train'\] of 1330 samples {words}"):
        run(WEIGHTED)
    run(WEIGHTED, measures=fed.NamedMeasures(["train"], samples=100))
    run(WEIGHTED, measures=())
    monkeypatch.setattr(requirements, "LIMIT", 32 * 1300 - 1)
    with pytest.raises(ValueError, match=f"test= of 1300 samples {words}"):
        run(WEIGHTED, measures=())
    run("cross_entropy")


def test_sets_above_the_limit_by_their_padding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(set_loss, "LIMIT", 32 * 1000)
    with pytest.raises(ValueError, match="CrossEntropyLoss is called once on a set, .* exceed the 0 MiB that are kept"):
        run(WEIGHTED, measures=(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
