"""Metrics of regression, several labels and tokens, against scikit-learn and by hand; in runs of such tasks."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.measures import tasks

G = torch.Generator().manual_seed(0)
OUT, TRUE = torch.randn(50, 3, generator=G), torch.randn(50, 3, generator=G)
LABELS = (torch.rand(50, 3, generator=G) < 0.4).float()
LOGITS, TOKENS = torch.randn(4, 6, 9, generator=G), torch.randint(9, (4, 6), generator=G)


@pytest.fixture
def sklearn() -> Any:
    """Not imported with this file: it takes as long as all the tests here."""
    return importlib.import_module("sklearn.metrics")


def test_regression_is_what_scikit_learn_says(sklearn: Any) -> None:
    out, true = OUT.numpy(), TRUE.numpy()
    assert tasks.mean_absolute_error(OUT, TRUE) == pytest.approx(sklearn.mean_absolute_error(true, out))
    assert tasks.root_mean_squared_error(OUT, TRUE) == pytest.approx(math.sqrt(sklearn.mean_squared_error(true, out)))
    assert tasks.r2(OUT, TRUE) == pytest.approx(sklearn.r2_score(true, out))
    assert tasks.r2(OUT[:, :1], TRUE[:, 0]) == pytest.approx(sklearn.r2_score(true[:, 0], out[:, 0])), "no [n, n]"
    assert tasks.r2(torch.ones(3), torch.ones(3)) == 1 and tasks.r2(torch.zeros(3), torch.ones(3)) == 0


@pytest.mark.parametrize("threshold", [0.0, 0.7])
def test_several_labels_are_what_scikit_learn_says(threshold: float, sklearn: Any) -> None:
    said, true = (threshold < OUT).numpy().astype(int), LABELS.numpy().astype(int)
    assert tasks.multilabel_f1(OUT, LABELS, threshold) == pytest.approx(sklearn.f1_score(true, said, average="micro"))
    assert tasks.multilabel_accuracy(OUT, LABELS.bool(), threshold) == pytest.approx(np.mean(said == true))
    assert tasks.multilabel_f1(torch.full((2, 2), -9.0), torch.zeros(2, 2)) == 0


def test_tokens() -> None:
    expected = float(F.cross_entropy(LOGITS.double().flatten(0, 1), TOKENS.flatten()).exp())
    assert tasks.perplexity(LOGITS, TOKENS) == pytest.approx(expected)
    assert tasks.perplexity(LOGITS.movedim(2, 1), TOKENS) == pytest.approx(expected), "the order of torch's losses"
    assert tasks.perplexity(torch.zeros(4, 6, 9), TOKENS) == pytest.approx(9)
    ignored = TOKENS.clone()
    ignored[:, 3:] = -100
    assert tasks.perplexity(LOGITS, ignored) == pytest.approx(tasks.perplexity(LOGITS[:, :3], TOKENS[:, :3]))
    assert tasks.token_accuracy(F.one_hot(TOKENS, 9), ignored) == 1
    half = TOKENS.clone()
    half[:2] = (half[:2] + 1) % 9
    assert tasks.token_accuracy(F.one_hot(half, 9).movedim(2, 1), TOKENS) == 0.5
    assert tasks.perplexity(LOGITS[0], TOKENS[0]) == pytest.approx(tasks.perplexity(LOGITS[:1], TOKENS[:1]))


@pytest.mark.parametrize(
    ("metric", "outputs", "labels", "words"),
    [
        ("r2", OUT, TRUE[:, 0], r"of one shape, .*\[50, 3\] and \[50\]"),
        ("multilabel_f1", OUT, LABELS[:, :2], "of one shape"),
        ("perplexity", LOGITS[:, :, :6], TOKENS % 6, "told apart by their lengths"),
        ("perplexity", LOGITS, TOKENS.float(), "labels int64"),
        ("token_accuracy", LOGITS, TOKENS[:, 1:], "tokens take logits"),
        ("perplexity", LOGITS, torch.full_like(TOKENS, -100), "all labels are -100"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_told(metric: str, outputs: Tensor, labels: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tasks.METRICS[metric](outputs, labels)


def clients(y_of: Any) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    made = [torch.randn(16, 4, generator=g) for _ in range(4)]
    return [(x, y_of(x)) for x in made]


class Tokens(nn.Module):
    """Next tokens of a text: logits `[n, length, 11]`, or `[n, 11, length]` as `cross_entropy` takes them."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.words, self.behind = nn.Embedding(11, 11), behind

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(x)
        return out if self.behind else out.movedim(-1, 1)


def run(model: nn.Module, data: Any, loss: Any, metrics: list[str], **options: Any) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"rounds": 6, "participation": 1.0, "lr": 0.3, "validation": "iid", "test": data[0]}
    return fed.run(model, data, fed.FedAvg(), loss=loss, metrics=metrics, **settings | options).history


def test_runs_of_these_tasks_know_them_and_report_no_accuracy() -> None:
    torch.manual_seed(0)
    data = clients(lambda x: x @ torch.tensor([[1.0], [-1.0], [0.5], [0.0]]))
    history = run(nn.Linear(4, 1), data, "mse_loss", ["mean_absolute_error", "root_mean_squared_error", "r2"])
    assert history[-1]["test_r2"] > 0.95 > history[0]["test_r2"] and history[-1]["client_r2_mean"] > 0.8
    assert history[-1]["test_root_mean_squared_error"] ** 2 == pytest.approx(history[-1]["test_loss"], rel=1e-5)

    several = run(
        nn.Linear(4, 3), clients(lambda x: (x[:, :3] > 0).float()), "binary_cross_entropy_with_logits",
        ["multilabel_accuracy", "multilabel_f1:0"], lr=5.0,
    )  # fmt: skip
    assert several[-1]["test_multilabel_f1"] > 0.9 and several[-1]["client_multilabel_accuracy_min"] > 0.5

    texts = [((start[:, None] + torch.arange(6)) % 7) for start in (torch.arange(16), torch.arange(16) + 3)]
    following = [(text[:, :-1], text[:, 1:]) for text in texts]
    tokens = run(Tokens(False), following, "cross_entropy", ["perplexity", "token_accuracy"], lr=5.0)
    assert tokens[-1]["test_perplexity"] == pytest.approx(math.exp(tokens[-1]["test_loss"]), rel=1e-5)
    assert tokens[-1]["test_perplexity"] < tokens[0]["test_perplexity"]
    assert all(line["test_accuracy"] is None for line in (*history, *several, *tokens))


def test_perplexity_of_padded_texts_of_several_lengths() -> None:
    texts = [[torch.arange(i, i + n) % 7 for n in range(3, 9)] for i in range(2)]

    def pad(samples: list[Tensor]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)
        return {"ids": ids[:, :-1].clamp_min(0), "labels": ids[:, 1:]}

    def predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch["ids"]), batch["labels"]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    torch.manual_seed(0)
    data = [[{"text": text} for text in own] for own in texts]
    batches = {"collate": lambda samples: pad([s["text"] for s in samples]), "batch_size": 4}
    history = run(Tokens(True), data, fed.BatchLoss(loss, predict), ["perplexity", "token_accuracy"], lr=5.0, **batches)
    # Two batches of the test set, of 4 and 2 texts and of other lengths: the metric counts tokens, the loss is a mean
    # over batches.
    assert 1 < history[-1]["test_perplexity"] < history[0]["test_perplexity"] < 20


def test_a_number_behind_a_metric_that_takes_none() -> None:
    with pytest.raises(ValueError, match="'r2' takes no number, got 'r2:0.5'; those that do: binary_accuracy"):
        run(nn.Linear(4, 1), clients(lambda x: x[:, :1]), "mse_loss", ["r2:0.5"])
