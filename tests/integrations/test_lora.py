"""LoRA in a federation: the methods of examples/lora.py, with peft. Masks of Hugging Face's models."""

import runpy
from typing import Any

import pytest
import torch

from fastsam import fed
from fastsam.fed.executors.stacked_masks import advice
from tests.helpers.libraries import library
from tests.helpers.places import ROOT

library("peft")


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "lora.py"))


@pytest.mark.parametrize(("optimizer", "rho"), [("SGD", 0.05), ("AdamW", 0.0)])
@pytest.mark.parametrize("method", ["plain", "FFA-LoRA", "FedSA-LoRA", "FedEx-LoRA"])
def test_methods_learn_and_keep_what_they_do_not_train(
    method: str, optimizer: str, rho: float, example: dict[str, Any]
) -> None:
    result = example["train"](method, optimizer, rho, rounds=8, executor="sequential")
    key = "client_accuracy_mean" if method == "FedSA-LoRA" else "test_accuracy"
    assert result.history[-1][key] > result.history[0][key] + 0.04
    trained = {name.split(".")[-3] for name, p in result.model.named_parameters() if p.requires_grad and "lora" in name}
    assert trained == ({"lora_B"} if method == "FFA-LoRA" else {"lora_A", "lora_B"})
    if method != "FedEx-LoRA":
        active = result.history[0]["clients"]
        assert result.history[0]["megabytes_up"] == pytest.approx(active * example["sent"](method, result.model) * 4e-6)


@pytest.mark.parametrize("method", ["plain", "FFA-LoRA", "FedSA-LoRA", "FedEx-LoRA"])
def test_adapters_of_stacked_clients(method: str, example: dict[str, Any]) -> None:
    """The executors agree to rounding, in float64."""
    x, y = torch.randn(3, 8, 1, 8, 8, dtype=torch.float64), torch.arange(24).reshape(3, 8) % 10
    prepare, algorithm, options = example["METHODS"][method]
    model = prepare(example["adapted"](example["pretrained"](x[0].float(), y[0], 1))).double()
    one, two = (
        fed.run(
            model, list(zip(x, y, strict=True)), algorithm(0.05), rounds=2, participation=1.0, batch_size=4,
            optimizer="AdamW", lr=1e-3, executor=executor, **options,
        ).model
        for executor in ("sequential", "vmap")
    )  # fmt: skip
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_model_of_hugging_face_with_batches_of_dicts(example: dict[str, Any]) -> None:
    """FedSA-LoRA of a small BERT: the head and A move, other parameters stay, and B stays with the clients."""
    transformers, peft = library("transformers"), library("peft")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification(config).double()
    model = peft.get_peft_model(bert, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    lengths = (torch.full((8, 1), 6), torch.arange(8)[:, None] % 4 + 2)  # a client without padding, and one with it
    labels = torch.arange(8) % 3
    clients = [
        transformers.BatchEncoding(
            {"input_ids": torch.randint(50, (8, 6)), "attention_mask": torch.arange(6) < n, "labels": labels}
        )
        for n in lengths
    ]
    loss = fed.BatchLoss(
        lambda model, batch: model(**batch).loss, lambda model, batch: (model(**batch).logits, batch["labels"])
    )
    result, stacked = (
        fed.run(
            model, clients, fed.FedSAM(rho=0.05), rounds=2, participation=1.0, loss=loss, optimizer="AdamW", lr=1e-2,
            batch_size=4, executor=executor, **example["METHODS"]["FedSA-LoRA"].options,
        )
        for executor in ("sequential", "auto")
    )  # fmt: skip
    assert stacked.summary()["executor"] == "vmap"
    for a, b in zip(result.model.parameters(), stacked.model.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-12
    old = dict(model.named_parameters())
    moved = {name for name, p in result.model.named_parameters() if not torch.equal(p, old[name])}
    assert moved == {name for name, p in old.items() if p.requires_grad and "lora_B" not in name}
    assert all("lora_A" in name or "classifier" in name for name in moved)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_mask_that_vmap_advises_is_the_mask_of_the_tokenizer(attention: str) -> None:
    transformers = library("transformers")
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
        attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p *= 20  # the first weights are so small that no mask changes much
    words, present = torch.randint(1, 16, (4, 6)), (torch.arange(6) < torch.tensor([[3], [6], [2], [5]])).long()
    expression = advice(RuntimeError("data-dependent control flow")).rpartition(": ")[2]
    mask = eval(expression, {"torch": torch, "batch": {"attention_mask": present}})
    expected = model(input_ids=words, attention_mask=present).logits
    torch.testing.assert_close(model(input_ids=words, attention_mask=mask).logits, expected)
