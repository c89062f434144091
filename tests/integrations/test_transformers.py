"""transformers' Trainer with FusedSAM, compared with the same steps in a plain loop."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastsam
from fastsam import FusedSAM
from fastsam.integrations import hf as integration
from fastsam.integrations.accelerate import unwrap_optimizer
from fastsam.integrations.hf import SAMTrainerMixin
from tests.helpers.libraries import library
from tests.helpers.places import ROOT
from tests.helpers.sam_oracle import same_bits

transformers = library("transformers")
accelerate = library("accelerate")
SAMTrainer, SGD = integration.SAMTrainer, torch.optim.SGD

COUNT, SIZE = 12, 2  # samples, of a micro-batch
GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = [
    {"input_ids": torch.randint(16, (6,), generator=GENERATOR), "labels": torch.randint(3, (), generator=GENERATOR)}
    for _ in range(COUNT)
]


def tiny_model(dropout: float = 0.0) -> nn.Module:
    """Make a classifier of BERT's kind with some hundred parameters."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
        max_position_embeddings=8, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def arguments(folder: Path, **settings: Any) -> Any:
    defaults = {"max_steps": 4, "weight_decay": 0.1, "save_strategy": "no", "logging_steps": 1}
    return transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, learning_rate=0.02, optim="adamw_torch", seed=0,
        per_device_train_batch_size=SIZE, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        **{**defaults, "lr_scheduler_type": "constant", **settings},
    )  # fmt: skip


class InOrder:
    """A trainer that keeps the samples in order, as a plain loop, and averages losses over micro-batches."""

    def get_batch_samples(self, *arguments: Any) -> Any:
        # BERT's classifier ignores the number of items, which would then scale the loss
        return super().get_batch_samples(*arguments)[0], None  # type: ignore[misc]

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(SAMPLES)


class Trainer(InOrder, SAMTrainer):
    pass


def train(folder: Path, model: nn.Module, sam: fastsam.SAM | None = None, kind: type = Trainer, **settings: Any) -> Any:
    trainer = kind(model=model, args=arguments(folder, **settings), train_dataset=SAMPLES, variant=sam)
    trainer.train()
    return trainer


def windows(accumulation_steps: int) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the micro-batches of each step of an epoch; its last step may have fewer."""
    rows = [SAMPLES[i : i + SIZE] for i in range(0, COUNT, SIZE)]
    batches = [{name: torch.stack([row[name] for row in group]) for name in group[0]} for group in rows]
    for i in range(0, len(batches), accumulation_steps):
        yield batches[i : i + accumulation_steps]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups that the trainer makes: biases and layer norms have no weight decay."""
    pairs = list(model.named_parameters())
    plain = {name for name, _ in pairs if name.endswith("bias") or "LayerNorm" in name}
    decay_params, rest = ([p for name, p in pairs if (name in plain) == flag] for flag in (False, True))
    return [{"params": decay_params, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def plain_loop(
    model: nn.Module, steps: Iterable[list[dict[str, Tensor]]], sam: Any = None, clip: float = 1.0, bf16: bool = False
) -> tuple[nn.Module, list[float], list[float]]:
    """Take the same steps by hand. Return the model, the losses of first passes, and the norms of second gradients."""
    model = copy.deepcopy(model).train()
    opt = FusedSAM(groups(model), torch.optim.AdamW, variant=sam, lr=0.02, betas=(0.9, 0.999), eps=1e-8)
    losses, norms = [], []

    def backward(batches: list[dict[str, Tensor]]) -> float:
        opt.zero_grad()
        total = 0.0
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss / len(batches)
            loss.backward()
            total += loss.item()
        return total

    for batches in steps:
        losses.append(backward(batches))
        if opt.perturbs:
            opt.first_step()
            backward(batches)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        opt.step()
    return model, losses, norms


def same(a: nn.Module, b: nn.Module) -> bool:
    return same_bits(list(a.parameters()), list(b.parameters()))


def get_log(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.shows(
    "transformers", "`SAMTrainer`: the steps, losses and norms of a plain loop; accumulation, clipping, bf16", "works"
)
@pytest.mark.parametrize(
    ("accumulation_steps", "settings"),
    [(1, {"max_grad_norm": 0.5}), (1, {"bf16": True}), (2, {}), (4, {"max_grad_norm": 0.5}),
     (2, {"bf16": True, "max_grad_norm": 0.5})],
)  # fmt: skip
def test_the_steps_of_a_plain_loop(tmp_path: Path, accumulation_steps: int, settings: dict[str, Any]) -> None:
    """With four micro-batches the last step of the epoch has two."""
    start, steps = tiny_model(), list(windows(accumulation_steps))
    model, losses, norms = plain_loop(start, steps, clip=settings.get("max_grad_norm", 1.0), bf16="bf16" in settings)
    settings = {"max_steps": len(steps), "gradient_accumulation_steps": accumulation_steps, **settings}
    trainer = train(tmp_path, copy.deepcopy(start), **settings)
    assert same(trainer.model, model)
    assert trainer.state.global_step == len(steps)
    assert get_log(trainer, "loss") == pytest.approx(losses, abs=1e-4), (
        "the first pass's, to the digits that are logged"
    )
    assert get_log(trainer, "grad_norm") == pytest.approx(norms, rel=1e-6), "the second gradient's"
    assert all(p.grad is None for p in trainer.model.parameters())


class ScalerTrainer(Trainer):
    """A trainer whose Accelerate has a gradient scaler, as `fp16=True` has on a GPU.

    The scale is a power of two, so it rounds nothing.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state._mixed_precision, self.accelerator.native_amp = "fp16", True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)


@pytest.mark.shows("transformers", "`SAMTrainer` with `fp16` (GradScaler): accumulation, clipping", "works")
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_grad_scaler_unscales_the_second_gradient(tmp_path: Path, accumulation_steps: int) -> None:
    start, steps = tiny_model(), list(windows(accumulation_steps))
    _, losses, norms = plain_loop(start, steps)
    settings = {"gradient_accumulation_steps": accumulation_steps, "max_steps": len(steps)}
    trainer = ScalerTrainer(model=copy.deepcopy(start), args=arguments(tmp_path, **settings), train_dataset=SAMPLES)
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 2.0**10 and trainer.state.global_step == len(steps)
    assert get_log(trainer, "loss") == pytest.approx(losses, rel=1e-2), "in float16's digits"
    assert get_log(trainer, "grad_norm") == pytest.approx(norms, rel=2e-2), "not a thousand times as large"


def count_passes(tmp_path: Path, sam: fastsam.SAM, accumulation_steps: int = 1) -> int:
    """Assert that the trainer makes the steps of a plain loop. Return the number of its passes."""
    start, calls, steps = tiny_model(), 0, list(windows(accumulation_steps))

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model, _, _ = plain_loop(start, steps, sam)
    start.register_forward_hook(count)
    settings = {"gradient_accumulation_steps": accumulation_steps, "max_steps": len(steps)}
    assert same(train(tmp_path, start, sam, **settings).model, model)
    return calls


@pytest.mark.shows("transformers", "`SAMTrainer` with `interval=2`", "works")
def test_a_variant_that_perturbs_in_one_step_of_two(tmp_path: Path) -> None:
    assert count_passes(tmp_path, fastsam.SAM(rho=0.3, interval=2)) == 6 + 3


def test_steps_before_sam_take_one_pass(tmp_path: Path) -> None:
    assert count_passes(tmp_path, fastsam.SAM(rho=0.3, start=4)) == 6 + 2
    assert count_passes(tmp_path, fastsam.SAM(rho=0.3, start=2), accumulation_steps=2) == 6 + 2


@pytest.mark.shows(
    "transformers", "`SAMTrainer` with `MSAM`: the clean weights are evaluated, saved and left in the model", "works"
)
@pytest.mark.parametrize("eval_strategy", ["no", "steps"])
def test_a_variant_of_one_pass_shows_the_clean_weights(tmp_path: Path, eval_strategy: str) -> None:
    start = tiny_model()
    clean_model = copy.deepcopy(start)
    sam = fastsam.MSAM(rho=0.3)
    opt = FusedSAM(groups(clean_model), torch.optim.AdamW, variant=sam, lr=0.02, betas=(0.9, 0.999), eps=1e-8)
    for batches in list(windows(1))[:4]:
        opt.zero_grad()
        clean_model(**batches[0]).loss.backward()
        nn.utils.clip_grad_norm_(clean_model.parameters(), 1.0)
        opt.step()
    perturbed_model = copy.deepcopy(clean_model)
    opt.eval()

    settings = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": eval_strategy, "eval_steps": 4}
    best = {"load_best_model_at_end": True} if eval_strategy == "steps" else {}
    args = arguments(tmp_path, **settings, **best)
    trainer = Trainer(model=start, args=args, train_dataset=SAMPLES, eval_dataset=SAMPLES, variant=sam)
    trainer.train()
    assert same(trainer.model, clean_model) and not same(trainer.model, perturbed_model)
    trainer.save_model(str(tmp_path / "end"))
    for folder in ("checkpoint-4", "end"):
        saved_model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / folder)
        assert same(saved_model, clean_model), folder


@pytest.mark.shows("transformers", "`SAMTrainer`: a loss over the tokens of all micro-batches", "works")
def test_a_language_model_counts_tokens_over_all_micro_batches(tmp_path: Path) -> None:
    """The loss is a sum over the tokens of a micro-batch, divided by the number of tokens of the whole step."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8
    )  # fmt: skip
    start = transformers.LlamaForCausalLM(config)
    samples = [{"input_ids": s["input_ids"], "labels": s["input_ids"].clone()} for s in SAMPLES[:4]]
    for i, sample in enumerate(samples):
        sample["labels"][: i + 1] = -100

    expected = copy.deepcopy(start)
    opt = FusedSAM(expected.parameters(), torch.optim.AdamW, rho=0.3, lr=0.02, weight_decay=0.0)
    count = sum((sample["labels"][1:] != -100).sum().item() for sample in samples)
    batches = [{n: torch.stack([a[n], b[n]]) for n in a} for a, b in (samples[:2], samples[2:])]
    for step in (opt.first_step, opt.step):
        opt.zero_grad()
        for batch in batches:
            expected(**batch, num_items_in_batch=torch.tensor(count)).loss.backward()
        step()

    args = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2, max_grad_norm=0.0, weight_decay=0.0)
    trainer = SAMTrainer(model=start, args=args, train_dataset=samples, variant=fastsam.SAM(rho=0.3))
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(samples)
    trainer.train()
    assert same(trainer.model, expected)


@pytest.mark.shows("transformers", "`SAMTrainer`: `resume_from_checkpoint`, bit for bit", "works")
@pytest.mark.parametrize("sam", [fastsam.SAM(rho=0.3), fastsam.MSAM(rho=0.3)])
def test_it_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, sam: fastsam.SAM) -> None:
    """Shuffled data, dropout, and a schedule; the checkpoint falls into the middle of an epoch of three steps."""
    settings = {"max_steps": 7, "gradient_accumulation_steps": 2}
    settings |= {"lr_scheduler_type": "linear", "save_strategy": "steps"}

    def trainer(folder: str) -> Any:
        args = arguments(tmp_path / folder, save_steps=5, **settings)
        return SAMTrainer(model=tiny_model(dropout=0.3), args=args, train_dataset=SAMPLES, variant=sam)

    full_run, new_trainer = trainer("whole"), trainer("resumed")
    full_run.train()
    new_trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert same(full_run.model, new_trainer.model)
    assert get_log(full_run, "loss") == get_log(new_trainer, "loss") and len(get_log(full_run, "loss")) == 7
    whole_state, state = (t.optimizer.state_dict()["state"] for t in (full_run, new_trainer))
    assert all(same_bits(list(whole_state[i].values()), list(state[i].values())) for i in whole_state)


RANK = """
import sys
from pathlib import Path

import torch

from tests.helpers.libraries import with_torchvision

with_torchvision()
from tests.integrations.test_transformers import Sharded, Trainer, fastsam, tiny_model, train

folder, kind = Path(sys.argv[1]), {"ddp": Trainer, "fsdp2": Sharded}[sys.argv[2]]
trainer = train(folder, tiny_model(), fastsam.SAM(rho=0.3), kind, max_steps=1, gradient_accumulation_steps=2)
weights = [getattr(w, "full_tensor", lambda w=w: w)() for w in trainer.model.state_dict().values()]
sharded = any(hasattr(w, "full_tensor") for group in trainer.optimizer.param_groups for w in group["params"])
torch.save((weights, trainer.args.world_size, sharded), folder / f"{trainer.args.process_index}.pt")
"""


class Sharded(Trainer):
    """A trainer whose Accelerate shards with FSDP2 on the CPU, as it does on accelerators."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = accelerate.utils.DistributedType.FSDP
        state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        self.is_fsdp_enabled = True


@pytest.mark.shows("transformers", "`SAMTrainer` in two processes (DistributedDataParallel, FSDP2)", "works")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_make_the_step_of_the_whole_batch(kind: str, tmp_path: Path) -> None:
    """Micro-batches of two, two of them, in two processes are a batch of eight; both ranks have the same weights."""
    (tmp_path / "rank.py").write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    options: Any = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 300}
    process = subprocess.run([*launch, str(tmp_path / "rank.py"), str(tmp_path), kind], **options)
    assert process.returncode == 0, process.stderr
    (first, ranks, sharded), (second, _, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert ranks == 2 and same_bits(first, second) and sharded == (kind == "fsdp2")
    single_trainer = train(tmp_path, tiny_model(), fastsam.SAM(rho=0.3), max_steps=1, gradient_accumulation_steps=4)
    for weights, expected_weights in zip(first, single_trainer.model.state_dict().values()):
        torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=1e-4)


@pytest.mark.shows("transformers", "`SAMTrainer`: an exception in the second pass leaves the weights", "works")
def test_an_error_in_the_second_pass_leaves_the_weights(tmp_path: Path) -> None:
    class BadTrainer(Trainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            if unwrap_optimizer(self.optimizer).is_perturbed:
                raise RuntimeError("out of memory")
            return super().compute_loss(*arguments, **options)

    start = tiny_model()
    old_model = copy.deepcopy(start)
    trainer = BadTrainer(model=start, args=arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=SAMPLES)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert same(start, old_model) and not unwrap_optimizer(trainer.optimizer).is_perturbed


@pytest.mark.shows("transformers", "`SAMTrainer`: running statistics take only the first pass", "works")
def test_running_statistics_take_the_first_pass_alone(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(self.norm(input_ids.float()))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    model = Model()
    train(tmp_path, model, gradient_accumulation_steps=3, max_steps=2)
    assert int(model.norm.num_batches_tracked) == 6


@pytest.mark.shows("transformers", "`SAMTrainerMixin` before `Seq2SeqTrainer`; a FusedSAM that you made", "works")
def test_a_trainer_of_another_class_and_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    class OwnTrainer(InOrder, SAMTrainerMixin, transformers.Seq2SeqTrainer):
        pass

    start = tiny_model()
    model, _, _ = plain_loop(start, windows(1), fastsam.SAM(rho=0.2))
    args = transformers.Seq2SeqTrainingArguments(**{**arguments(tmp_path, max_steps=6).to_dict(), "use_cpu": True})
    opt = FusedSAM(groups(start), torch.optim.AdamW, rho=0.2, lr=0.02, betas=(0.9, 0.999), eps=1e-8)
    trainer = OwnTrainer(model=start, args=args, train_dataset=SAMPLES, optimizers=(opt, None))
    trainer.train()
    assert same(trainer.model, model)


ADAM: dict[str, Callable[[nn.Module], Any]] = {
    "optimizers": lambda model: (torch.optim.AdamW(model.parameters()), None),
    "optimizer_cls_and_kwargs": lambda model: (torch.optim.AdamW, {"lr": 0.1}),
}


@pytest.mark.shows(
    "transformers",
    "`SAMTrainer` with an optimizer that is no FusedSAM; `variant` together with an optimizer",
    "clear error",
)
@pytest.mark.parametrize("keyword", ADAM)
def test_what_cannot_work_is_refused_before_the_first_step(tmp_path: Path, keyword: str) -> None:
    model, options = tiny_model(), {"args": arguments(tmp_path), "train_dataset": SAMPLES}
    with pytest.raises(ValueError, match="SAMTrainer: expected a FusedSAM.* got AdamW"):
        Trainer(model=model, **options, **{keyword: ADAM[keyword](model)}).train()
    pair = {"optimizers": (FusedSAM(model.parameters(), lr=0.1), None), "variant": fastsam.SAM()}
    with pytest.raises(ValueError, match="variant cannot be combined with an optimizer"):
        Trainer(model=model, **options, **pair).train()


@pytest.mark.shows(
    "transformers", "`SAMTrainer` with an optimizer that chooses its parameters itself (GaLore)", "clear error"
)
@pytest.mark.parametrize("pair", [(SGD, {"lr": 0.1, "params": []}), (lambda: SGD, {"lr": 0.1})])
def test_an_optimizer_that_chooses_its_parameters_is_refused(tmp_path: Path, pair: Any, monkeypatch: Any) -> None:
    """The answer equals transformers' answer for GaLore and for its factories, which are not installed here."""
    monkeypatch.setattr(transformers.Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda *_: pair))
    with pytest.raises(ValueError, match="optim='.*adamw_torch' chooses its parameters itself"):
        train(tmp_path, tiny_model())


@pytest.mark.shows("transformers", "`Trainer` with a FusedSAM", "clear error")
def test_the_plain_trainer_says_that_a_pass_is_missing(tmp_path: Path) -> None:
    model = tiny_model()
    opt = FusedSAM(model.parameters(), torch.optim.AdamW, lr=0.02)
    trainer = transformers.Trainer(model=model, args=arguments(tmp_path), train_dataset=SAMPLES, optimizers=(opt, None))
    with pytest.raises(RuntimeError, match=r"step\(\) has nothing to do: no closure.*integrations.hf.SAMTrainer"):
        trainer.train()
