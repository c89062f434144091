"""Losses of a whole batch, models of several inputs, and parameters that are not trained."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.arena import Arena, Layout
from fastsam.fed.update.model_copy import Replica, trainable
from tests.helpers.fed_kinds import OfParts, Rows, model, pairs, run, weights


def cross_entropy(m: Any, batch: Any) -> Tensor:
    return F.cross_entropy(m(batch[0]), batch[1])


class WithLoss(nn.Module):
    """A model like Hugging Face's: keywords in, an object out that has the loss if there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(x)
        return SimpleNamespace(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


def test_models_that_put_out_an_object_with_the_loss() -> None:
    plain = run(pairs(), executor="sequential")
    columns = [{"x": x, "labels": y} for x, y in pairs()]
    loss = fed.BatchLoss(lambda m, batch: m(**batch).loss, lambda m, batch: (m(**batch).logits, batch["labels"]))
    result = run(columns, loss=loss, model=WithLoss(), test=columns[3])
    assert torch.equal(weights(result), weights(plain))
    assert result.history[-1]["test_accuracy"] == plain.history[-1]["test_accuracy"]
    assert result.summary()["validation"] == "prior" and result.client_accuracies == plain.client_accuracies
    run_without = run(columns, loss=fed.BatchLoss(loss.loss), model=WithLoss(), test=columns[3])
    assert run_without.history[-1]["test_accuracy"] is None
    assert run_without.history[-1]["test_loss"] == pytest.approx(plain.history[-1]["test_loss"], rel=1e-6)


def named(name: str, **options: Any) -> fed.Result:
    """Run on clients whose labels are in the column `name`."""

    def predict(m: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return m(batch["x"]), batch[name]

    def loss(m: Any, batch: Any) -> Tensor:
        return F.cross_entropy(*predict(m, batch))

    columns = [{"x": x, name: y} for x, y in pairs()]
    predicts = options.pop("predicts", True)
    return run(columns, loss=fed.BatchLoss(loss, predict if predicts else None), test=columns[3], **options)


def test_labels_in_a_column_of_another_name(caplog: pytest.LogCaptureFixture) -> None:
    assert named("label").client_accuracies is not None
    assert named("target", client_test_split="iid").client_accuracies is not None
    assert "accuracies" not in caplog.text
    result = named("target")
    assert result.history[-1]["test_accuracy"] is not None and result.client_accuracies is None
    (message,) = [m for m in caplog.messages if "accuracies" in m]
    assert "a column 'labels'" in message and "client_test_split='iid'" in message


def test_a_loss_of_a_batch_without_predict_says_why_there_is_no_accuracy(caplog: pytest.LogCaptureFixture) -> None:
    assert named("labels", predicts=False).client_accuracies is None
    (message,) = [m for m in caplog.messages if "accuracies" in m]
    assert "fed.BatchLoss(loss, predict)" in message


def test_a_full_gradient_over_batches_is_that_of_all_samples() -> None:
    options: dict[str, Any] = {"rounds": 3, "participation": 1.0, "lr": 0.1, "batch_size": 4}
    results = []
    for clients, user_model in ((pairs(), model()), ([Rows(x, y, "nested") for x, y in pairs()], OfParts())):
        results.append(fed.run(user_model, clients, fed.MimeLite(), executor="sequential", **options))
    assert torch.equal(weights(results[0]), weights(results[1]))


class Half(nn.Module):
    """A large part that is not trained, and a head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(6, width), nn.Linear(width, 3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.base(x)))
        return out


@pytest.mark.parametrize("executor", ["sequential", "threads", pytest.param("vmap", marks=pytest.mark.slow)])
def test_frozen_parameters_are_neither_trained_nor_sent_nor_copied(executor: str) -> None:
    torch.manual_seed(0)
    model = Half()
    result = run(pairs(), model=model, executor=executor)
    assert (
        torch.equal(result.model.base.weight, model.base.weight) and result.model.base.weight is not model.base.weight
    )
    assert not torch.equal(result.model.head.weight, model.head.weight)
    assert not result.model.base.weight.requires_grad
    uploads = sum(p.numel() for p in model.head.parameters())
    assert result.summary()["parameters"] == uploads
    assert result.history[-1]["megabytes_up"] == pytest.approx(4 * uploads * 4 / 1e6)


def test_replicas_have_what_is_not_trained_in_common() -> None:
    model = Half()
    layout = Layout.from_tensors(trainable(model))
    replicas = [Replica(model, layout, Arena(layout).field("w", torch.float32)[0]) for _ in range(2)]
    for replica in replicas:
        assert replica.module.base.weight is model.base.weight
        assert replica.module.head.weight.data_ptr() != model.head.weight.data_ptr()


def test_a_pass_that_writes_what_is_not_trained_is_refused() -> None:
    class Momentum(Half):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.base.weight.mul_(0.9)
            return super().forward(x)

    for loss in ("cross_entropy", fed.BatchLoss(cross_entropy)):
        with pytest.raises(ValueError, match="writes the parameter 'base.weight', which is not trained"):
            run(pairs(), model=Momentum(), loss=loss)
