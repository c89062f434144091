"""Losses of sets are one call on all outputs and labels. Losses that are not means are recognised, and refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.clients import set_loss
from fastsam.fed.clients.batch_loss import BatchLoss, PairLoss
from fastsam.fed.clients.loss_kind import kind_of
from fastsam.fed.loop import requirements
from fastsam.fed.measures import NAMES
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals

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
    clients = options.pop("clients", CLIENTS)
    return fed.run(
        oracle.smooth_model(), clients, fed.FedAvg(), **{"test": TEST, "measures": ["train"], **common, **options}
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


@pytest.mark.parametrize("name", ["MEAN_LIMIT", "LIMIT"])
@pytest.mark.parametrize("limit", [0, 40_000])
def test_parts_of_large_sets_are_averaged(limit: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that cannot be called on the probe has the larger limit."""
    sizes: list[int] = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        assert name == "MEAN_LIMIT" or len(y) > 20, "the loss is for large batches"
        sizes.append(len(y))
        return F.cross_entropy(out, y)

    monkeypatch.setattr(set_loss, name, limit)
    record = run(loss).history[-1]
    assert max(sizes) == 512 + (0 if limit == 0 else 512) and 1300 not in sizes
    monkeypatch.undo()
    whole = run(loss).history[-1]
    assert sizes.count(1300) == sizes.count(1330) == 1
    for key in ("test_loss", "train_set_loss"):
        assert record[key] == pytest.approx(whole[key], rel=1e-12)


# --- which losses are means


def outputs_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


CLASSES, REAL, PLANE = torch.arange(12) % 3, outputs_of(12, 2), torch.arange(12 * 5).reshape(12, 5) % 3
W = WEIGHTS.float()
SMALL_WEIGHT = torch.tensor([1.0, 1.0, 1.01])
KINDS: dict[str, tuple[Any, Tensor, Tensor, bool | None]] = {
    "cross entropy": (F.cross_entropy, outputs_of(12, 3), CLASSES, True),
    "smoothed labels": (nn.CrossEntropyLoss(label_smoothing=0.1), outputs_of(12, 3), CLASSES, True),
    "equal weights": (nn.CrossEntropyLoss(weight=torch.full((3,), 2.0)), outputs_of(12, 3), CLASSES, True),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=1), outputs_of(12, 3), CLASSES, True),
    "weights": (nn.CrossEntropyLoss(weight=W), outputs_of(12, 3), CLASSES, False),
    "one weight": (nn.CrossEntropyLoss(weight=SMALL_WEIGHT), outputs_of(12, 3), CLASSES, False),
    "weights of a partial": (partial(F.cross_entropy, weight=W), outputs_of(12, 3), CLASSES, False),
    "weights of a user": (lambda out, y: F.nll_loss(out.log_softmax(1), y, W), outputs_of(12, 3), CLASSES, False),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), outputs_of(12, 3), CLASSES, False),
    "one class in the batch": (nn.CrossEntropyLoss(weight=W), outputs_of(12, 3), CLASSES * 0, False),
    "many classes": (nn.CrossEntropyLoss(weight=torch.linspace(1, 2, 5000)), outputs_of(4, 5000), CLASSES[:4], False),
    "many plain classes": (nn.CrossEntropyLoss(), outputs_of(4, 5000), CLASSES[:4], True),
    "planes": (F.cross_entropy, outputs_of(12, 3, 5), PLANE, True),
    "weighted planes": (nn.CrossEntropyLoss(weight=W), outputs_of(12, 3, 5), PLANE, False),
    "probabilities": (F.cross_entropy, outputs_of(12, 3), outputs_of(12, 3).softmax(1), True),
    "pairs": (pairwise, outputs_of(12, 3), CLASSES, False),
    "squares": (F.mse_loss, outputs_of(12, 2), REAL, True),
    "sum of squares": (partial(F.mse_loss, reduction="sum"), outputs_of(12, 2), REAL, False),
    "two classes": (
        lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y.float(), pos_weight=torch.tensor(3.0)),
        outputs_of(12, 1), CLASSES % 2, True,
    ),
    "of probabilities": (lambda out, y: F.nll_loss(out.log(), y, W), outputs_of(12, 3).softmax(1), CLASSES, False),
    "last dimension": (
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), W), outputs_of(12, 5, 3), PLANE, False,
    ),
    "random": (lambda out, y: F.cross_entropy(F.dropout(out), y), outputs_of(12, 3), CLASSES, None),
    "of one batch size": (lambda out, y: (out.reshape(12, 3) ** 2).sum(), outputs_of(12, 3), CLASSES, None),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_loss(name: str) -> None:
    loss, outputs, labels, is_mean = KINDS[name]
    has_classes = labels.dtype == torch.int64 and labels.dim() == outputs.dim() - 1 and outputs.shape[1] > 2
    has_classes = has_classes and name != "last dimension"
    kind = kind_of(PairLoss(loss), outputs, labels, has_classes, False)
    assert kind.is_mean is is_mean
    assert kind.sample_bytes == (outputs.nbytes + labels.nbytes) / len(labels)


def test_the_kinds_of_other_losses() -> None:
    assert kind_of(BatchLoss(lambda model, batch: model(batch).sum()), None, None, False, False).is_mean
    assert kind_of(PairLoss(lambda out, y: out[0].sum()), (REAL, REAL), CLASSES, False, False).is_mean is None


def test_a_loss_keeps_its_state() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return F.cross_entropy(out, y)

    loss = Counting()
    kind_of(PairLoss(loss), outputs_of(12, 3), CLASSES, True, False)
    assert loss.calls == 0


# --- what is refused

WEIGHTED = nn.CrossEntropyLoss(weight=WEIGHTS)
OF_GRADIENTS = sorted(NAMES.keys() - {"train", "consistency", "drifts", "dual_gap"})
test_refused = refusals(
    *((lambda name=name: run(WEIGHTED, measures=[name], run_dir="run"),
       rf"measures=\['{name}'\] needs a loss that is a mean over samples, but CrossEntropyLoss of a set is not")
      for name in OF_GRADIENTS),
    (lambda: run(lambda out, y: F.cross_entropy(out, y, reduction="sum"), measures=["sharpness"], run_dir="run"),
     r"measures=\['sharpness'\] needs a loss .* but <lambda> of a set is not the mean over its parts"),
)  # fmt: skip


def test_other_measures_are_served() -> None:
    record = run(WEIGHTED, measures=["train", "consistency", "drifts"]).history[-1]
    assert record["train_set_loss"] > 0 and record["consistency"] > 0 and record["e_w"] > 0
    assert run(nn.CrossEntropyLoss(label_smoothing=0.1), measures=["sharpness"]).history[-1]["sharpness"] > 0


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
