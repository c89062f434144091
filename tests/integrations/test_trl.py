"""Trainers of TRL with FusedSAM."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import FusedSAM, variants
from fastsam.integrations.hf import SAMTrainerMixin
from tests.helpers.libraries import library, with_torchvision

with_torchvision()
transformers = library("transformers")
trl = library("trl")
tokenizers = library("tokenizers")
datasets = library("datasets")

WORDS = ["<pad>", "<eos>", "<unk>", "a", "b", "c", "d", "e"]
TEXTS = ["a b c d e", "b c d", "e d c b a", "a a b b c"] * 4


class SAMSFTTrainer(SAMTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
    """Supervised fine-tuning with both passes of a step."""


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def train(folder: Path, kind: type[Any], **options: Any) -> Any:
    """Train two steps of two micro-batches and return the trainer."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    arguments = trl.SFTConfig(
        str(folder), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], logging_steps=1, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", bf16=False,
        save_strategy="no", disable_tqdm=True, max_grad_norm=0.0, weight_decay=0.0,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"text": TEXTS})
    trainer = kind(model=model(), args=arguments, train_dataset=data, processing_class=tokenizer, **options)
    trainer.train()
    return trainer


@pytest.mark.shows("TRL", "`SAMTrainerMixin` before `SFTTrainer`: the steps of a plain loop", "works")
def test_supervised_fine_tuning_takes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    """The loss is the mean over the tokens of both micro-batches, which the trainer hands to the model."""
    batches = list[tuple[dict[str, Any], Any]]()

    class Watched(SAMSFTTrainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            batches.append((inputs, num_items_in_batch))
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = train(tmp_path, Watched, variant=variants.SAM(rho=0.3))
    plain = model()
    opt = FusedSAM(plain.parameters(), torch.optim.SGD, rho=0.3, lr=0.1)
    assert len(batches) == 4
    for step in (batches[:2], batches[2:]):
        for half in (opt.first_step, opt.second_step):
            for inputs, count in step:
                plain(**inputs, num_items_in_batch=count).loss.backward()
            half(zero_grad=True)
    for (name, p), expected in zip(trainer.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-5, msg=name)
    assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), model().parameters(), strict=True))


@pytest.mark.shows("TRL", "`SFTTrainer`: metrics count the first pass", "works")
def test_its_metrics_count_the_first_pass(tmp_path: Path) -> None:
    logs = [train(tmp_path / kind.__name__, kind, **options).state.log_history[0] for kind, options in (
        (trl.SFTTrainer, {}), (SAMSFTTrainer, {"variant": variants.SAM(rho=0.3)}),
    )]  # fmt: skip
    for name in ("loss", "num_tokens", "entropy", "mean_token_accuracy"):
        assert logs[1][name] == pytest.approx(logs[0][name], rel=1e-5), name
