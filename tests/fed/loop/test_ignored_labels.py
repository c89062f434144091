"""Labels that the loss ignores: accuracies, margins and losses of sets are over the other samples."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from tests.helpers import oracle

TORCH_LOSSES: dict[str, tuple[Any, int]] = {
    "cross entropy": ("cross_entropy", -100),
    "of a user": (lambda out, y: F.cross_entropy(out, y), -100),
    "of a module": (nn.CrossEntropyLoss(ignore_index=1), 1),
    "of a partial": (partial(F.cross_entropy, ignore_index=1), 1),
}
MEASURES = fed.NamedMeasures(["train", "margin", "sharpness", "variances"], margin=0.2, rho=0.1)


def samples(ignored: int, sizes: tuple[int, ...], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return clients whose last samples have a label less often than their first."""
    clients = oracle.ragged_clients(sizes=sizes, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    result = []
    for x, y in clients:
        share = torch.linspace(0, 0.9, len(y), dtype=torch.float64)
        unlabelled = torch.rand(len(y), generator=generator, dtype=torch.float64) < share
        unlabelled[0] = False
        result.append((x, torch.where(unlabelled, ignored, torch.where(y == ignored, 0, y))))
    return result


def accuracy(model: nn.Module, x: Tensor, y: Tensor, ignored: int) -> float:
    known = y != ignored
    return (model(x[known]).argmax(1) == y[known]).double().mean().item()


def margin_risk(model: nn.Module, x: Tensor, y: Tensor) -> float:
    p = model(x).softmax(1)
    others = p.masked_fill(F.one_hot(y, p.shape[1]).bool(), -1).amax(1)
    return (p[range(len(y)), y] - others <= 0.2).double().mean().item()


@pytest.mark.parametrize("name", TORCH_LOSSES)
def test_measures_are_over_labelled_samples(name: str) -> None:
    """With 1,400 samples, of which fewer and fewer have labels, the batches of 512 have unlike shares."""
    loss, ignored = TORCH_LOSSES[name]
    clients = samples(ignored, (700, 20, 680))
    options: dict[str, Any] = {"rounds": 2, "participation": 1.0, "batch_size": 100, "loss": loss}
    result = fed.run(oracle.smooth_model(), clients, fed.FedAvg(), measures=MEASURES, **options)
    record, model = result.history[-1], result.model
    labelled = [(x[y != ignored], y[y != ignored]) for x, y in clients]
    x, y = (torch.cat(parts) for parts in zip(*labelled, strict=True))
    assert record["train_set_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-9)
    assert record["train_set_accuracy"] == accuracy(model, x, y, ignored)
    assert record["margin_risk"] == pytest.approx(sum(margin_risk(model, *pair) for pair in labelled) / 3)
    assert record["sharpness"] == pytest.approx(sharpness(model, x, y), rel=1e-6)
    gradients = torch.stack([gradient(model, *pair) for pair in labelled])
    spread = (gradients - gradients.mean(0)).square().sum(1).mean().sqrt()
    assert record["sigma_g"] == pytest.approx(float(spread), rel=1e-9)


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parts = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([part.flatten() for part in parts])


def sharpness(model: nn.Module, x: Tensor, y: Tensor) -> float:
    moved, g = copy.deepcopy(model), gradient(model, x, y)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(weights + 0.1 * g / g.norm(), moved.parameters())
    return F.cross_entropy(moved(x), y).item() - F.cross_entropy(model(x), y).item()


class Lookup(nn.Module):
    """A model that knows the labels of its samples, and answers the ignored label's samples with class 0."""

    def __init__(self, x: Tensor, y: Tensor, ignored: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=x.dtype))
        self.register_buffer("x", x)
        self.register_buffer("y", torch.where(y == ignored, 0, y))

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, None] == self.x).all(2).int().argmax(1)
        return 10 * self.scale * F.one_hot(self.y[index], 3).to(x.dtype)


@pytest.mark.parametrize("name", TORCH_LOSSES)
@pytest.mark.parametrize("split", ["shared", "iid", "prior", "own"])
def test_evaluation_is_over_labelled_samples(name: str, split: str) -> None:
    loss, ignored = TORCH_LOSSES[name]
    clients, sets = samples(ignored, (20, 30, 25)), samples(ignored, (40, 30, 50), seed=3)
    x, y = (torch.cat(parts) for parts in zip(*sets, strict=True))
    test: Any = fed.ClientTestSets(sets) if split == "own" else (x, y)
    options: dict[str, Any] = {} if split == "own" else {"client_test_split": split}
    result = fed.run(oracle.smooth_model(), clients, fed.FedAvg(), rounds=2, loss=loss, test=test, **options)
    record, model = result.history[-1], result.model
    assert record["test_accuracy"] == accuracy(model, x, y, ignored)
    assert record["test_loss"] == pytest.approx(F.cross_entropy(model(x), y, ignore_index=ignored).item(), rel=1e-9)
    if split == "own":
        assert record["client_accuracy_each"] == [accuracy(model, *pair, ignored) for pair in sets]
        tuned = fed.finetune(result, clients, test=test)
        assert [entry["before"] for entry in tuned] == record["client_accuracy_each"]
    else:  # a model that is always right on labelled samples
        perfect = fed.run(
            Lookup(x, y, ignored), [(x, y)], fed.FedAvg(), rounds=1, lr=1e-6, loss=loss, test=test, **options
        )
        assert {perfect.history[-1][f"client_accuracy_{k}"] for k in ("mean", "min", "max")} == {1.0}
        assert (record["client_accuracy_mean"] == record["test_accuracy"]) == (split == "shared")


@pytest.mark.parametrize("split", ["prior", "iid", "shared"])
def test_a_test_set_without_labels_has_no_accuracy(split: str) -> None:
    """A loss of a user may take such a set. A loss of torch does not."""
    x, y = samples(-100, (12,), seed=3)[0]
    result = fed.run(
        oracle.smooth_model(), samples(-100, (20, 30)), fed.Ditto(), rounds=1, client_test_split=split,
        loss=lambda out, y: F.cross_entropy(out, y), test=(x, torch.full_like(y, -100)),
    )  # fmt: skip
    record = result.history[-1]
    assert all(record[key] is None for key in record if "accuracy" in key or key in ("client_worst", "client_best"))


def test_clients_without_labels_in_their_test_set_do_not_count() -> None:
    clients, sets = samples(-100, (20, 30)), samples(-100, (9, 8), seed=3)
    sets[0] = sets[0][0], torch.full_like(sets[0][1], -100)
    result = fed.run(oracle.smooth_model(), clients, fed.Ditto(), rounds=1, test=fed.ClientTestSets(sets))
    each = result.history[-1]["client_accuracy_each"]
    assert each == [None, accuracy(result.client_model(1), *sets[1], -100)]
    assert result.history[-1]["client_worst"] == 1
    plain = fed.run(oracle.smooth_model(), clients, fed.FedAvg(), rounds=1, test=fed.ClientTestSets(sets)).history[-1]
    assert plain["client_accuracy_each"][0] is None and plain["client_worst"] == plain["client_best"] == 1
