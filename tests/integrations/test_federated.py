"""Clients with small transformers of Hugging Face: stacked as they come, with their dropout; and a BERT under `graph`
and `vmap` on a stand-in for CUDA."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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


# --- transformers as they come


SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}


def bert(**options: Any) -> nn.Module:
    transformers = library("transformers")
    model: nn.Module = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=50, max_position_embeddings=LENGTH, **SHAPE, **options)
    )
    return model


def lora(**options: Any) -> nn.Module:
    peft = library("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=0.1 if not options else 0.0)
    return peft.get_peft_model(bert(**options), config)  # type: ignore[no-any-return]


def gpt2(**options: Any) -> nn.Module:
    transformers = library("transformers")
    model: nn.Module = transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH, num_labels=CLASSES, pad_token_id=0,
            **options,
        )
    )  # fmt: skip
    return model


def vit(**options: Any) -> nn.Module:
    transformers = library("transformers")
    config = transformers.ViTConfig(image_size=8, patch_size=4, **SHAPE, **({"hidden_dropout_prob": 0.1} | options))
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def images() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.randn(n, 3, 8, 8, generator=draw), "labels": torch.arange(n) % CLASSES} for n in (8, 11)
    ]


STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, float], Callable[[], Any]]] = {
    "bert": (bert, STILL, clients), "lora": (lora, STILL, clients), "vit": (vit, STILL, images),
    "gpt2": (gpt2, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, clients),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    "adamw": {"optimizer": "AdamW", "lr": 1e-3},
}


def changes(name: str, executor: str, slots: int | None = None, is_still: bool = False, **options: Any) -> torch.Tensor:
    """Return how a run changes the weights. The model's own dropout is on unless it is still."""
    make, still, data = MODELS[name]
    torch.manual_seed(0)
    model = make(**(still if is_still else {}))
    start = vector(model).clone()
    keywords = {"rounds": 3, "batch_size": 4, "participation": 1.0, "loss": LOSS, "lr": 0.05} | options
    return (
        vector(fed.run(model, data(), fed.FedSAM(rho=0.05), executor=executor, slots=slots, **keywords).model) - start
    )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_stacked_transformers_have_the_numbers_of_sequential(name: str, option: str) -> None:
    """The tolerance in bfloat16 is five hundredths of the change of the weights."""
    run = functools.partial(changes, name, is_still=True, **OPTIONS[option])
    plain, stacked = run("sequential"), run("vmap", 2)
    assert float((stacked - plain).norm()) <= (0.05 if option == "bf16" else 1e-3) * float(plain.norm())


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_they_are_stacked_with_their_own_dropout(name: str, option: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client drops the same elements by itself and together with another one. Passes are replayed. `sequential` drops
    other elements."""
    one, two = (changes(name, "vmap", slots, **OPTIONS[option]) for slots in (1, 2))
    other = changes(name, "sequential", **OPTIONS[option])
    assert float((two - one).norm()) <= (0.05 if option == "bf16" else 1e-3) * float(one.norm())
    assert float((two - other).norm()) > 0.05 * float(one.norm())
    assert "not replayed" not in caplog.text
