"""Stacked clients whose batches are trees of tensors: the numbers of `sequential`, from one store."""

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.clients import packed_samples
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.executors.stacked_masks import advice
from tests.helpers import oracle
from tests.helpers.fed_runs import digest, vector

WORDS, LENGTH = 9, 5
DOUBLE = torch.float64


class Reader(nn.Module):
    """A model like Hugging Face's: words, a mask and labels in, an object with the loss out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, 4)
        # A bias of keys has no gradient but rounding, which AdamW would make large.
        self.attention, self.head = nn.MultiheadAttention(4, 2, bias=False, batch_first=True), nn.Linear(4, 3)

    def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        x = self.table(words)
        x, _ = self.attention(x, x, x, key_padding_mask=~mask)
        logits = self.head((x * mask.unsqueeze(-1)).sum(1))
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


class Batch(NamedTuple):
    words: Tensor
    mask: Tensor
    labels: Tensor


def columns_of(n: int, length: int = LENGTH) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(n)
    words, ends = torch.randint(WORDS, (n, length), generator=draw), torch.randint(1, length + 1, (n,), generator=draw)
    return {"words": words, "mask": torch.arange(length) < ends[:, None], "labels": torch.arange(n) % 3}


SIZES = (4, 6, 1, 6)  # whole batches, and batches of 2 and of 1
COLUMNS = [columns_of(n) for n in SIZES]
DICT_LOSS = fed.BatchLoss(
    lambda model, batch: model(**batch).loss, lambda model, batch: (model(**batch).logits, batch["labels"])
)
# A function that makes a client of columns, and the loss of its batches.
KINDS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], Any]] = {
    "dict": (lambda c: c, DICT_LOSS),
    "encoding": (UserDict, DICT_LOSS),
    "named": (
        lambda c: [Batch(*row) for row in zip(*c.values(), strict=True)],
        fed.BatchLoss(lambda model, batch: model(*batch).loss),
    ),
    "nested": (
        lambda c: {"inputs": [(c["words"], c["mask"])], "labels": c["labels"]},
        fed.BatchLoss(lambda model, batch: model(*batch["inputs"][0], batch["labels"]).loss),
    ),
    "inputs and labels": (
        lambda c: ({"words": c["words"], "mask": c["mask"]}, c["labels"]),
        lambda outputs, y: F.cross_entropy(outputs.logits, y, label_smoothing=0.1),
    ),
}


QUICK = ("dict", "nested", "adamw", "clip", "client states", "full gradient")  # the others: `make test-slow`


def train(
    executor: str, clients: Any = COLUMNS, algorithm: fed.Algorithm | None = None, model: Any = None, **options: Any
) -> fed.Result:
    keywords = {"rounds": 2, "batch_size": 4, "local_epochs": 2, "participation": 1.0, "loss": DICT_LOSS} | options
    model = Reader().double() if model is None else model
    return fed.run(model, clients, algorithm or fed.FedSAM(rho=0.05), executor=executor, **keywords)


def assert_equal(clients: Any = COLUMNS, tolerance: float = 1e-12, **options: Any) -> fed.Result:
    """Compare stacked clients with `sequential`."""
    plain, stacked = (train(executor, clients, **options) for executor in ("sequential", "vmap"))
    assert not torch.equal(vector(plain.model), vector(Reader().to(vector(plain.model).dtype)))
    assert (vector(plain.model) - vector(stacked.model)).abs().max() < tolerance
    assert stacked.history[-1]["train_loss"] == pytest.approx(plain.history[-1]["train_loss"], rel=tolerance)
    return stacked


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_every_kind_of_tree_has_the_numbers_of_sequential(kind: str) -> None:
    make, loss = KINDS[kind]
    assert_equal([make(columns) for columns in COLUMNS], loss=loss)


OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "AdamW", "lr": 1e-2},
    "clip": {"clip_norm": 0.1, "momentum": 0.5, "weight_decay": 0.01},
    "uploads": {"privacy": fed.Privacy(clip=0.05), "algorithm": fed.FedAvg()},
    "client states": {"algorithm": fed.SCAFFOLD(), "rounds": 3, "participation": 0.6},
    "adaptive": {"algorithm": fed.FedSAM(rho=0.5, adaptive=True)},
    "dual": {"algorithm": fed.FedSMOO(rho=0.05)},
    "path": {"algorithm": fed.FedLESAM(rho=0.05), "rounds": 3},
    "full gradient": {"algorithm": fed.MimeLite()},
    "stored order": {"shuffle": False, "drop_last": True},
}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_steps_of_trees_are_the_steps_of_pairs(name: str) -> None:
    assert_equal(**OPTIONS[name])


def test_clients_of_other_lengths_have_no_store() -> None:
    clients = [columns_of(n, length) for n, length in ((4, 4), (6, 5), (4, 4))]
    assert prepare(clients, None, DOUBLE, torch.device("cpu"), takes_batches=True).clients.store is None
    for algorithm in (fed.FedSAM(rho=0.05), fed.MimeLite()):
        assert_equal(clients, algorithm=algorithm)


def test_dicts_in_another_order_are_one_tree() -> None:
    other = [dict(reversed(columns.items())) if i % 2 else columns for i, columns in enumerate(COLUMNS)]
    assert digest(train("vmap", other)) == digest(train("vmap"))


def test_clients_are_views_of_one_store() -> None:
    clients = prepare(COLUMNS, None, DOUBLE, torch.device("cpu"), takes_batches=True).clients
    assert clients.store is not None and len(clients.store.tensors) == 3
    for i, columns in enumerate(COLUMNS):
        for part, stored, column in zip(clients.tensors[i], clients.store.tensors, columns.values(), strict=True):
            assert torch.equal(part, column) and part.data_ptr() == stored[clients.store.offsets[i]].data_ptr()
        tree = clients[i].take(torch.arange(len(columns["labels"])), 0)
        assert list(tree) == list(columns) and all(torch.equal(tree[name], columns[name]) for name in tree)


def test_too_large_samples_are_gathered_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest(train("vmap"))
    monkeypatch.setattr(packed_samples, "MAX_BYTES", 1)
    assert digest(train("vmap")) == expected


def test_a_mask_that_python_reads() -> None:
    """Models of Hugging Face do not read it while torch compiles. Others get a message that shows a mask."""

    class Reads(Reader):
        def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
            if not torch.compiler.is_compiling() and mask.all():
                mask = torch.ones_like(mask)
            return super().forward(words, mask, labels)

    with pytest.raises(ValueError, match=r"reads the values of a tensor.*\['attention_mask'\]\[:, None, None, :\]"):
        train("vmap", model=Reads())
    Reads.__module__ = "transformers.models.reads"
    assert_equal(model=Reads().double())
    assert not torch.compiler.is_compiling()


def test_the_mask_of_the_advice_has_the_meaning_of_the_mask_that_was_read() -> None:
    """Eager attention adds a mask to the scores, and scaled_dot_product_attention takes either kind."""
    words, present = torch.randn(4, 1, 6, 8), torch.arange(6) < torch.tensor([[3], [6], [2], [5]])
    expression = advice(RuntimeError("data-dependent control flow")).rpartition(": ")[2]
    mask = eval(expression, {"torch": torch, "batch": {"attention_mask": present.long()}})
    expected = F.scaled_dot_product_attention(words, words, words, attn_mask=present[:, None, None, :])
    eager = torch.softmax(words @ words.mT / 8**0.5 + mask, -1) @ words
    torch.testing.assert_close(eager, expected)
    torch.testing.assert_close(F.scaled_dot_product_attention(words, words, words, attn_mask=mask), expected)


def test_auto_stacks_trees_as_it_stacks_pairs() -> None:
    assert train("auto", rounds=1).summary()["executor"] == "vmap"


def test_inputs_in_a_dict_have_the_bits_of_pairs() -> None:
    """Both have row programs, which take all steps natively."""

    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = oracle.smooth_model(torch.float32)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    pairs = oracle.ragged_clients(torch.float32)
    trees, options = [({"x": x}, y) for x, y in pairs], {"model": ByName(), "loss": "cross_entropy", "rounds": 3}
    assert digest(train("vmap", trees, **options)) == digest(train("vmap", pairs, **options))
