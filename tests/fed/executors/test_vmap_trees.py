"""Clients whose batches are trees of tensors, from one store. The table of `tests/promises` compares their numbers."""

from dataclasses import replace
from typing import Any

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
from tests.helpers.stacked_models import ReadsMask
from tests.promises.stacked_cases import DICT

FLOAT = torch.float32


def columns_of(n: int, length: int) -> dict[str, Tensor]:
    words = torch.randint(9, (n, length), generator=torch.Generator().manual_seed(n))
    return {"words": words, "mask": torch.ones(n, length, dtype=torch.bool), "labels": torch.arange(n) % 3}


def assert_equal(*results: fed.Result) -> None:
    torch.testing.assert_close(*(vector(result.model) for result in results), rtol=0, atol=1e-12)


def test_clients_of_other_lengths_have_no_store() -> None:
    clients = [columns_of(n, length) for n, length in ((4, 4), (6, 5), (4, 4))]
    assert prepare(clients, None, torch.float64, torch.device("cpu"), takes_batches=True).clients.store is None
    for algorithm in (fed.FedSAM(rho=0.05), fed.MimeLite()):
        assert_equal(*(DICT.train(e, torch.float64, clients, algorithm=algorithm) for e in ("sequential", "vmap")))


def test_dicts_in_another_order_are_one_tree() -> None:
    clients = DICT.clients(FLOAT)
    other = [dict(reversed(columns.items())) if i % 2 else columns for i, columns in enumerate(clients)]
    assert digest(DICT.train("vmap", FLOAT, other)) == digest(DICT.train("vmap"))


def test_clients_are_views_of_one_store() -> None:
    trees = DICT.clients(FLOAT)
    clients = prepare(trees, None, FLOAT, torch.device("cpu"), takes_batches=True).clients
    assert clients.store is not None and len(clients.store.tensors) == 3
    for i, columns in enumerate(trees):
        for part, stored, column in zip(clients.tensors[i], clients.store.tensors, columns.values(), strict=True):
            assert torch.equal(part, column) and part.data_ptr() == stored[clients.store.offsets[i]].data_ptr()
        tree = clients[i].take(torch.arange(len(columns["labels"])), 0)
        assert list(tree) == list(columns) and all(torch.equal(tree[name], columns[name]) for name in tree)


def test_too_large_samples_are_gathered_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest(DICT.train("vmap"))
    monkeypatch.setattr(packed_samples, "MAX_BYTES", 1)
    assert digest(DICT.train("vmap")) == expected


def test_a_mask_that_models_of_hugging_face_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not read it while torch compiles."""
    monkeypatch.setattr(ReadsMask, "__module__", "transformers.models.reads")
    reads = replace(DICT, model=ReadsMask)
    assert_equal(*(reads.train(e, torch.float64) for e in ("sequential", "vmap")))
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
    assert DICT.train("auto", rounds=1).summary()["executor"] == "vmap"


def test_inputs_in_a_dict_have_the_bits_of_pairs() -> None:
    """Both have row programs, which take all steps natively."""

    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = oracle.smooth_model(FLOAT)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    pairs = oracle.ragged_clients(FLOAT)
    trees = [({"x": x}, y) for x, y in pairs]
    options: dict[str, Any] = {"rounds": 3, "batch_size": 4, "participation": 1.0, "executor": "vmap"}
    a, b = (fed.run(ByName(), clients, fed.FedSAM(rho=0.05), **options) for clients in (trees, pairs))
    assert digest(a) == digest(b)
