"""Clients with a small BERT of transformers, adapters of peft, AdamW, and batches of dicts with masks.

Clients, cohort and sizes are the workload's. The model "bert:16x32" has batches of 16 texts of 4 to 32 words, and
"bert:16x32x256" is 256 wide. The other simulators do not take such clients. The module is imported only if transformers
and peft are installed.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.fed import plain
from bench.fed.workload import CLASSES, FEWEST, MOST, RHO, SAMPLES, Workload
from fastsam import fed
from fastsam.fed.common.import_paths import PackageError, vision

with suppress(PackageError):
    vision("torchvision", "transformers")  # which imports an installed torchvision, and fails if that import fails

from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

VOCABULARY, WIDTH, HEAD, RANK, LR = 1000, 64, 32, 4, 1e-2
TYPICAL = 20  # words of a class, which are half of its texts

Batch = dict[str, Tensor]
LOSS = fed.BatchLoss(lambda model, batch: model(**batch).loss)


def shape(workload: Workload) -> tuple[int, int, int]:
    """Return the number of texts in a batch, of words in the longest texts, and the width of the model."""
    texts, words, *width = map(int, workload.model.partition(":")[2].split("x"))
    return texts, words, *(width or [WIDTH])


def make_model(workload: Workload) -> nn.Module:
    """Return a BERT of two layers without dropout. Adapters of query and value, and the classifier, train."""
    torch.manual_seed(0)
    _, words, width = shape(workload)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=2, num_attention_heads=width // HEAD,
        intermediate_size=2 * width, max_position_embeddings=words, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    lora = LoraConfig(task_type="SEQ_CLS", r=RANK, target_modules=["query", "value"])
    model: nn.Module = get_peft_model(BertForSequenceClassification(config), lora)
    return model.to(workload.device)


def clients(workload: Workload) -> list[Batch]:
    """Return per client `input_ids` (0 is padding), `attention_mask` and `labels`, all int64."""
    draws, length = np.random.default_rng(0), shape(workload)[1]
    typical = draws.integers(1, VOCABULARY, size=(CLASSES, TYPICAL))
    result = []
    for _ in range(workload.clients):
        n = int(draws.integers(FEWEST, MOST + 1)) if workload.sizes == "unequal" else SAMPLES
        y = draws.integers(CLASSES, size=n)
        of_class = np.take_along_axis(typical[y], draws.integers(TYPICAL, size=(n, length)), 1)
        words = np.where(draws.random((n, length)) < 0.5, of_class, draws.integers(1, VOCABULARY, size=(n, length)))
        mask = np.arange(length) < draws.integers(4, length + 1, size=(n, 1))
        arrays = {"input_ids": words * mask, "attention_mask": mask.astype(np.int64), "labels": y}
        result.append({name: torch.from_numpy(array).to(workload.device) for name, array in arrays.items()})
    return result


def train(workload: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
    """Train and return the model. `option` is "bare", "captured", or an executor, or "plain-" and an executor."""
    model, data = make_model(workload), clients(workload)
    if option in ("bare", "captured"):
        return bare(model, data, workload, rounds, tick, Captured if option == "captured" else Bare)
    if option.startswith("plain-"):
        plain.hide_kernels()
    algorithm, batch_size = fed.algorithms.registry[workload.algorithm](), shape(workload)[0]
    return fed.run(
        model, data, algorithm, rounds=rounds, batch_size=batch_size, loss=LOSS, optimizer="AdamW", lr=LR,
        participation=workload.cohort / workload.clients, sampler="fixed", eval_every=rounds, slots=workload.slots,
        progress=lambda record: tick(), executor=option.removeprefix("plain-"),
    ).model  # fmt: skip


class Bare:
    """The steps of a client in the loop that one writes without a library, with torch's fused AdamW."""

    def __init__(self, model: nn.Module, weights: list[nn.Parameter], is_sharp: bool) -> None:
        self.model, self.weights, self.is_sharp = model, weights, is_sharp
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.weights, lr=LR, fused=True)

    def begin(self, start: list[Tensor]) -> None:
        """Begin a client at these weights."""
        load(self.weights, start)
        self.optimizer = self.new_optimizer()

    def step(self, batch: Batch) -> None:
        """Take a step on a batch."""
        gradients(self.model, self.weights, batch)
        if self.is_sharp:
            second_gradients(self.model, self.weights, batch)
        self.optimizer.step()


class Captured(Bare):
    """The same steps, each sort of batch captured as a CUDA graph when it comes for the second time."""

    def __init__(self, model: nn.Module, weights: list[nn.Parameter], is_sharp: bool) -> None:
        super().__init__(model, weights, is_sharp)
        self._graphs: dict[int, tuple[Callable[[], None], Batch] | None] = {}  # by the number of texts

    def new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.weights, lr=LR, fused=True, capturable=self.weights[0].is_cuda)

    def begin(self, start: list[Tensor]) -> None:
        """Begin a client. Graphs hold the addresses of the optimizer's state, which stays."""
        load(self.weights, start)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def step(self, batch: Batch) -> None:
        """Take a step on a batch, by a replay if there is one."""
        size = len(batch["labels"])
        if size in self._graphs and self._graphs[size] is None:
            self._graphs[size] = self._capture(batch)
        graph = self._graphs.setdefault(size, None)
        if graph is None:
            super().step(batch)
            return
        replay, fixed = graph
        for name, tensor in batch.items():
            fixed[name].copy_(tensor)
        replay()

    def _capture(self, batch: Batch) -> tuple[Callable[[], None], Batch]:
        fixed = {name: tensor.clone() for name, tensor in batch.items()}
        work = partial(super().step, fixed)
        if not self.weights[0].is_cuda:
            return work, fixed
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay, fixed


def bare(
    model: nn.Module, data: list[Batch], workload: Workload, rounds: int, tick: Callable[[], None],
    kind: type[Bare] = Bare,
) -> nn.Module:  # fmt: skip
    """Train without a library, with steps of a kind."""
    weights = [p for p in model.parameters() if p.requires_grad]
    steps = kind(model, weights, workload.algorithm == "fedsam")
    for _ in range(rounds):
        start = [w.detach().clone() for w in weights]
        mean = [torch.zeros_like(w) for w in start]
        for i in random.sample(range(workload.clients), workload.cohort):
            steps.begin(start)
            for batch in batches(data[i], shape(workload)[0]):
                steps.step(batch)
            for m, w in zip(mean, weights, strict=True):
                m.add_(w.detach(), alpha=1 / workload.cohort)
        load(weights, mean)
        tick()
    return model


@torch.no_grad()
def load(weights: list[nn.Parameter], values: list[Tensor]) -> None:
    for w, value in zip(weights, values, strict=True):
        w.copy_(value)


def batches(client: Batch, size: int) -> Iterator[Batch]:
    for rows in torch.randperm(len(client["labels"])).split(size):
        yield {name: tensor[rows] for name, tensor in client.items()}


def gradients(model: nn.Module, weights: list[nn.Parameter], batch: Batch) -> None:
    """Set `grad` of each weight."""
    for w, g in zip(weights, torch.autograd.grad(LOSS(model, batch), weights), strict=True):
        w.grad = g


def second_gradients(model: nn.Module, weights: list[nn.Parameter], batch: Batch) -> None:
    """Set `grad` of each weight to the gradient at SAM's perturbed weights, as it is usually written."""
    grads: list[Any] = [w.grad for w in weights]
    start = [w.detach().clone() for w in weights]
    scale = RHO / (torch.stack([g.norm() for g in grads]).norm() + 1e-12)
    load(weights, [w + g * scale for w, g in zip(start, grads, strict=True)])
    gradients(model, weights, batch)
    load(weights, start)


@torch.no_grad()
def loss_of(workload: Workload, model: nn.Module) -> float:
    """Return the mean loss of 100 clients."""
    model.eval()
    return float(np.mean([float(LOSS(model, client)) for client in clients(workload)[:100]]))
