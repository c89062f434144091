"""Clients with a small BERT of Hugging Face, as it comes and with eager attention, under `graph` and `vmap` on a
stand-in for CUDA."""

from typing import Any

import pytest
import torch

from fastsam import fed
from fastsam.fed.executors import stacked_masks, streams
from tests.helpers.cuda_attention import cuda_attention
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.fed_runs import digest, vector
from tests.helpers.libraries import library

library("transformers")
LENGTH, CLASSES = 6, 3
LOSS = fed.BatchLoss(lambda model, batch: model(**batch).loss)


def clients() -> list[dict[str, torch.Tensor]]:
    """Return clients without padding and with it, of unequal sizes."""
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(1, 50, (n, LENGTH), generator=draw), "labels": torch.arange(n) % CLASSES,
            "attention_mask": (torch.arange(LENGTH) < ends).long().expand(n, -1),
        }
        for n, ends in ((8, LENGTH), (11, 4))
    ]  # fmt: skip


def train(executor: str, attention: str, **options: Any) -> fed.Result:
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    return fed.run(
        transformers.BertForSequenceClassification(config), clients(), fed.FedSAM(rho=0.05), rounds=2, batch_size=4,
        participation=1.0, loss=LOSS, executor=executor, backend="reference", **options,
    )  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_steps_are_captured(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture holds no value that Python reads, so the mask stays in all passes, and its numbers are made on the
    device."""
    monkeypatch.setattr(streams, "Cuda", FakeCuda)
    monkeypatch.setattr(streams, "why_not", lambda setup: None)
    monkeypatch.setattr(FakeCuda, "waits", False)
    monkeypatch.setattr(stacked_masks, "masks_of_passes", lambda module, device: stacked_masks.kept_masks(module))
    expected = digest(train("sequential", attention, local_epochs=2))
    assert digest(train("graph", attention, local_epochs=2)) == expected
    assert sum(graph.replays for graph in FakeCuda.graphs) > 0


def test_stacked_clients_with_the_attention_of_cuda() -> None:
    with cuda_attention("efficient") as emulation:
        one, two = (vector(train(executor, "sdpa", slots=2).model) for executor in ("sequential", "vmap"))
        assert emulation.calls["efficient", 2 * 4] > 0  # a batch of each client in one call
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
