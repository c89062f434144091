"""SAM for language models: the loss of a small character model, also after 4-bit rounding and after a second text.

The first text is the documentation in `pydoc_data.topics`, the second is source code of Python's standard library, so
nothing is downloaded. Every tenth paragraph of a text is held out, and all losses (nats per character) are of held-out
paragraphs. The learning rate is tuned for AdamW with a seed that the report does not use, and all methods have it.

A seed trains on the first text. Then a copy is rounded to 4 bits. The unrounded model trains on the second text with
plain AdamW, a fifth of the steps and a third of the rate, and is evaluated on both texts.
"""

import copy
import functools
import hashlib
import importlib
import inspect
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention

from bench.case import Case, Options
from bench.ncu import Absent
from bench.record import Record, Row, has_failed
from fastsam import SAM, FusedSAM
from fastsam.lab.report.table import Table

DOCUMENTATION = "pydoc_data.topics"
SOURCES = ("argparse", "ast", "dataclasses", "inspect", "subprocess", "typing")
SYMBOLS, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 128, 64, 64, 2, 2, 8
DECAY, WARM_UP = 0.1, 0.05  # weight decay, and the fraction of the steps in which the rate rises
RATES, TUNING_SEED = (2e-3, 5e-3, 1e-2), 1000
LATER_STEPS, LATER_RATE = 1 / 5, 1 / 3  # relative steps and rate of the training on the second text
GROUP, LEVELS = 32, 7  # number of weights with one scale, and the largest integer
STEPS, SEEDS, QUICK_STEPS, QUICK_SEEDS = 1600, 5, 20, 2
LATE = 0.75  # fraction of the steps before the first step of SAM
LOSSES = {
    "first": "loss", "rounded": "after 4-bit rounding", "after": "after the second text", "second": "second text",
}  # fmt: skip


class Method(NamedTuple):
    """SAM's radius (0: only AdamW), the fraction of steps before SAM, and the number of steps relative to AdamW's."""

    rho: float = 0.0
    start: float = 0.0
    share: float = 1.0


METHODS = {
    "AdamW": Method(), "AdamW, twice the steps": Method(share=2.0),
    "SAM, rho 0.05": Method(0.05), "SAM late, rho 0.2": Method(0.2, LATE),
    "SAM, rho 0.2": Method(0.2), "SAM late, rho 0.5": Method(0.5, LATE),
}  # fmt: skip


class Block(nn.Module):
    """Attention to earlier characters, and a network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        network: Tensor = self.down(relu(self.up(self.norms[1](x))))
        return x + network


class CharacterModel(nn.Module):
    """A causal transformer from characters to the scores of the next characters."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.blocks(self.symbols(x) + self.places.weight)))
        return scores


@functools.cache
def texts() -> dict[str, str]:
    """Return both texts. Raises Absent if this Python lacks one of their modules."""
    try:
        topics = importlib.import_module(DOCUMENTATION).topics
        sources = [inspect.getsource(importlib.import_module(name)) for name in SOURCES]
    except (ImportError, OSError) as error:
        names = ", ".join((DOCUMENTATION, *SOURCES))
        raise Absent(f"{error}. The texts are Python's modules {names}. Install the whole library") from error
    return {"first": "\n\n".join(topics.values()), "second": "\n\n".join(sources)}


@functools.cache
def split(name: str) -> tuple[Tensor, Tensor]:
    """Return the ASCII codes of a text's training paragraphs and of its held-out ones. No paragraph is there twice."""
    paragraphs = list(dict.fromkeys(texts()[name].split("\n\n")))
    held_out = paragraphs[::10]
    del paragraphs[::10]
    codes = ("\n\n".join(part).encode("ascii", "replace") for part in (paragraphs, held_out))
    train, test = (torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in codes)
    return train, test


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of a batch of windows, CONTEXT + 1 characters each."""
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, name: str) -> float:
    """Return the loss on the held-out paragraphs of a text."""
    text = split(name)[1]
    return float(loss_of(model, text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)))


def factor(step: int, steps: int) -> float:
    """Return the learning rate of a step, relative to the largest: it rises, and falls to 0 as a cosine."""
    warm_up = max(round(WARM_UP * steps), 1)
    return min((step + 1) / warm_up, (1 + math.cos(math.pi * max(step - warm_up, 0) / (steps - warm_up))) / 2)


def train(model: nn.Module, name: str, method: Method, rate: float, steps: int, seed: int) -> None:
    """Train a model on a text, `method.share` times the steps."""
    text, rng, steps = split(name)[0], torch.Generator().manual_seed(seed), round(method.share * steps)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=DECAY)
    if method.rho:
        variant = SAM(method.rho, start=round(method.start * steps))
        optimizer = FusedSAM(model.parameters(), torch.optim.AdamW, variant=variant, lr=rate, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(factor, steps=steps))
    for _ in range(steps):
        places = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=rng) + torch.arange(CONTEXT + 1)

        def closure(windows: Tensor = text[places]) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, windows)
            loss.backward()
            return loss

        optimizer.step(closure)
        schedule.step()


def rounded(weight: Tensor) -> Tensor:
    """Return a matrix rounded to 4 bits: integers from -7 to 7, with one scale for each GROUP weights of a row."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / LEVELS
    return ((groups / scales).round() * scales).flatten(1)


def round_linear_layers(model: nn.Module) -> nn.Module:
    """Return a copy of a model with the weights of its linear layers rounded; embeddings and biases stay."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = rounded(layer.weight.data)
    return model


def run(method: Method, rate: float, steps: int, seed: int) -> dict[str, float]:
    """Return the losses of a seed, by the names of LOSSES."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CharacterModel()
    train(model, "first", method, rate, steps, seed)
    losses = {"first": evaluate(model, "first"), "rounded": evaluate(round_linear_layers(model), "first")}
    train(model, "second", Method(), LATER_RATE * rate, round(LATER_STEPS * steps), seed)
    return losses | {"after": evaluate(model, "first"), "second": evaluate(model, "second")}


@functools.cache
def tuning(steps: int) -> dict[float, float]:
    """Return AdamW's loss by learning rate, with a seed that the report does not use."""
    return {rate: run(METHODS["AdamW"], rate, steps, TUNING_SEED)["first"] for rate in RATES}


def measure(name: str, quick: bool) -> dict[str, Any]:
    """Return a case with the row of a method, which has the losses of each seed and their means."""
    steps, seeds = (QUICK_STEPS, QUICK_SEEDS) if quick else (STEPS, SEEDS)
    hashes = {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts().items()}
    rates, start, method = tuning(steps), time.process_time(), METHODS[name]
    rate = min(rates, key=lambda one: rates[one])
    runs = [run(method, rate, steps, seed) for seed in range(seeds)]
    row = {
        "name": name, "title": f"`{name}`", "passes": method.share * (2 - method.start if method.rho else 1),
        "seeds": runs, "mean": {key: statistics.fmean(losses[key] for losses in runs) for key in LOSSES},
        "cpu_seconds": time.process_time() - start,
    }  # fmt: skip
    return {"title": "Character model", "steps": steps, "rates": rates, "rate": rate, "sha256": hashes, "rows": [row]}


def cases(options: Options) -> Iterator[Case]:
    """Yield the losses of a character model by method, also after 4-bit rounding and after a second text."""
    for name in options.select(METHODS):
        yield Case("language", "characters", [name], functools.partial(measure, name, options.quick))


def table(case: Record) -> Table:
    """Return mean losses, and differences to AdamW over runs with the same seed, bold beyond two standard errors.

    Raises ValueError if AdamW is missing.
    """
    rows = {row["name"]: row for row in case["rows"] if not has_failed(row)}
    if "AdamW" not in rows:
        raise ValueError("the record lacks AdamW, with which all rows are compared. Run the command again with --add")
    cells = [
        [row["title"], f"{row['passes']:g}", *(_cell(row, rows["AdamW"], key) for key in LOSSES)]
        for row in rows.values()
    ]
    return Table("", ["", "passes", *LOSSES.values()], cells)


def _cell(row: Row, baseline: Row, key: str) -> str:
    mean = f"{row['mean'][key]:.3f}"
    if row is baseline:
        return mean
    differences = [a[key] - b[key] for a, b in zip(row["seeds"], baseline["seeds"], strict=True)]
    change, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    bold = "**" if abs(change) > 2 * error else ""
    return f"{mean}, {bold}{change:+.3f} ± {error:.3f}{bold}"
