"""Models, batches and losses whose clients train at the same time under `vmap`, or are refused.

A test, on a CPU or on a GPU, asks of every case that clients in a group have the numbers of a client by itself.
"""

from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fastsam import fed
from tests.helpers.attending import Reader
from tests.helpers.fed_runs import vector
from tests.helpers.stacked_models import (
    CLASSES,
    WORDS,
    AlwaysDrops,
    Attends,
    Branches,
    BySize,
    Call,
    ChannelsLast,
    Draws,
    DrawsInBackward,
    DropsSamples,
    Everything,
    LanguageModel,
    Number,
    ReadsMask,
    ScalesFirst,
    Split,
    Words,
    Writes,
    mlp,
)

SIZES = (7, 10, 1, 12)  # whole batches of 4, and batches of 3, 2 and 1

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A way to train under `vmap`.

    Args:
        model: function that returns the model, in float32.
        shape: shape of a sample.
        vocabulary: number of different integers in samples; 0 for samples of normal numbers.
        targets: function of the labels `[n]` and a dtype that returns the targets.
        client: function of x and y that returns a client.
        loss: loss of the run.
        options: other options of `fed.run`.
        kind: "served"; "once per client", which is served slowly; or "refused".
        words: words of the refusal.
        draws: True if passes draw random numbers, so that `sequential` draws others.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...] = (6,)
    vocabulary: int = 0
    targets: Callable[[Tensor, torch.dtype], Tensor] = lambda y, dtype: y
    client: Callable[[Tensor, Tensor], Any] = lambda x, y: (x, y)
    loss: Any = "cross_entropy"
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "served"
    words: str = ""
    draws: bool = False

    def clients(self, dtype: torch.dtype, sizes: Sequence[int] = SIZES) -> list[Any]:
        """Return clients with these numbers of samples."""
        draw, result = torch.Generator().manual_seed(1), []
        for n in sizes:
            size = (n, *self.shape)
            numbers = torch.randn(size, generator=draw).to(dtype)
            x = torch.randint(self.vocabulary, size, generator=draw) if self.vocabulary else numbers
            result.append(self.client(x, self.targets(torch.arange(n) % CLASSES, dtype)))
        return result

    def model_of(self, dtype: torch.dtype) -> nn.Module:
        """Return the model before training. In bfloat16 its weights stay float32."""
        torch.manual_seed(0)
        return self.model().to(torch.float32 if dtype is torch.bfloat16 else dtype)

    def train(
        self, executor: str, dtype: torch.dtype = torch.float32, clients: Sequence[Any] | None = None, **options: Any
    ) -> fed.Result:
        """Train the case. In round 1 passes are recorded, in round 2 compared, and from then on replayed."""
        model = self.model_of(dtype)
        if dtype is torch.bfloat16:
            dtype, options = torch.float32, options | {"precision": "bf16"}
        keywords: dict[str, Any] = {
            "rounds": 4, "batch_size": 4, "participation": 1.0, "lr": 0.1, "loss": self.loss, "executor": executor,
        }  # fmt: skip
        keywords |= self.options | options
        algorithm = keywords.pop("algorithm", None) or fed.FedSAM(rho=0.05)
        return fed.run(model, self.clients(dtype) if clients is None else clients, algorithm, **keywords)

    def compare(
        self, dtype: torch.dtype, slots: int, tolerance: float, sizes: Sequence[int] = SIZES, **options: Any
    ) -> None:
        """Assert that clients in a group have the numbers of a client by itself. `tolerance` is relative to the change
        of the weights. `sequential` draws other numbers for dropout than `vmap`."""
        clients = self.clients(torch.float32 if dtype is torch.bfloat16 else dtype, sizes)
        together = self.train("vmap", dtype, clients, slots=slots, **options)
        alone_options = {"executor": "vmap", "slots": 1} if self.draws else {"executor": "sequential"}
        alone = self.train(dtype=dtype, clients=clients, **alone_options, **options)
        start = vector(self.model_of(dtype)).double()
        change = vector(alone.model).cpu().double() - start
        assert change.norm() > 1e-3
        assert (vector(together.model).cpu().double() - start - change).norm() < tolerance * change.norm()
        for a, b in zip(together.history, alone.history, strict=True):
            assert all(a[key] == b[key] for key in ("steps", "backprops", "clients"))
            assert a["train_loss"] == pytest.approx(b["train_loss"], rel=tolerance)


# --- layers: the table of docs/about_federated.md ---


def of_layer(
    make: Callable[[], nn.Module],
    width: int,
    shape: tuple[int, ...] = (4, 6),
    call: Callable[[Any, Tensor], Tensor] = lambda layer, x: layer(x),
    **fields: Any,
) -> Case:
    """Return the case of a layer with `width` results for a sample."""
    return Case(lambda: Call(make(), width, call), shape, **fields)


def first(layer: Any, x: Tensor) -> Tensor:
    result: Tensor = layer(x)[0]
    return result


ONCE: dict[str, Any] = {"kind": "once per client"}
IMAGES: dict[str, Any] = {"shape": (2, 6, 6)}
LAYERS = {
    "Linear": of_layer(lambda: nn.Linear(6, 5), 20),
    "Conv1d": of_layer(lambda: nn.Conv1d(4, 5, 3), 20),
    "Conv2d": of_layer(lambda: nn.Conv2d(2, 3, 3), 48, **IMAGES),
    "ConvTranspose2d": of_layer(lambda: nn.ConvTranspose2d(2, 3, 3), 192, **IMAGES),
    "MaxPool2d": of_layer(lambda: nn.MaxPool2d(2), 18, **IMAGES),
    "AvgPool2d": of_layer(lambda: nn.AvgPool2d(2), 18, **IMAGES),
    "LayerNorm": of_layer(lambda: nn.LayerNorm(6), 24),
    "GroupNorm": of_layer(lambda: nn.GroupNorm(2, 4), 24),
    "InstanceNorm1d": of_layer(lambda: nn.InstanceNorm1d(4, affine=True), 24),
    "RMSNorm": of_layer(lambda: nn.RMSNorm(6), 24),
    "Embedding": of_layer(lambda: nn.Embedding(9, 5, padding_idx=0), 20, (4,), vocabulary=9),
    "MultiheadAttention": of_layer(
        lambda: nn.MultiheadAttention(6, 2, batch_first=True), 24, call=lambda m, x: m(x, x, x)[0]
    ),
    "TransformerEncoderLayer": of_layer(lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 24),
    "PReLU": of_layer(lambda: nn.PReLU(), 24),
    "Dropout": of_layer(lambda: nn.Dropout(0.5), 24, draws=True),
    "Bilinear": of_layer(lambda: nn.Bilinear(6, 6, 5), 5, (6,), lambda m, x: m(x, x), **ONCE),
    "EmbeddingBag": of_layer(lambda: nn.EmbeddingBag(9, 5), 5, (4,), vocabulary=9, **ONCE),
    "GRUCell": of_layer(lambda: nn.GRUCell(6, 5), 5, (6,), **ONCE),
    "LSTM": of_layer(lambda: nn.LSTM(6, 5, batch_first=True), 20, call=first, kind="refused"),
    "GRU": of_layer(lambda: nn.GRU(6, 5, batch_first=True), 20, call=first, kind="refused"),
    "RNN": of_layer(lambda: nn.RNN(6, 5, batch_first=True), 20, call=first, kind="refused"),
    "BatchNorm1d": of_layer(
        lambda: nn.BatchNorm1d(4), 24, kind="refused", words="BatchNorm", options={"buffers": "keep"}
    ),
}


# --- models ---


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": torch.mul,
    "quotient": torch.div,
    "sum": lambda x, number: number + x,
    "product with zeros": lambda x, number: x * 0 * number,
}
MODELS = {
    "relu": Case(lambda: mlp(nn.ReLU())),
    "gelu, layer norm": Case(lambda: mlp(nn.GELU(), nn.LayerNorm(8))),
    "silu, softmax": Case(lambda: mlp(nn.SiLU(), nn.Softmax(-1))),
    "elu, without a row program": Case(lambda: mlp(nn.ELU())),
    "unusual parameters": Case(Everything, (4,), vocabulary=11, options={"lr": 0.02}),
    "channels last": Case(ChannelsLast, (8,)),
    "writes in place": Case(lambda: mlp(nn.ReLU(inplace=True), Writes(8, 8))),
    "by the number of samples": Case(lambda: mlp(None, BySize(8, 8))),
    **{
        f"{name} with a number of shape {shape}": Case(lambda f=function, s=shape: mlp(Number(torch.full(s, 2.0), f)))
        for name, function in NUMBERS.items()
        for shape in ((), (1,))
    },
    # On a GPU torch chooses its kernel by the mask. The rows of a mask of 19 words are not aligned there.
    "attention": Case(lambda: Reader(is_masked=False), (32,), vocabulary=11),
    "attention, padding": Case(lambda: Reader(is_masked=True), (32,), vocabulary=11),
    "attention, padding, 19 words": Case(lambda: Reader(is_masked=True), (19,), vocabulary=11),
}

# --- losses ---


def of_labels(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype)


def pairs_of_samples(out: Tensor, y: Tensor) -> Tensor:
    """Return a loss in which each sample meets all samples of its batch."""
    return (F.normalize(out, dim=1) @ F.normalize(out, dim=1).T).logsumexp(1).mean()


LOSSES = {
    "module": nn.CrossEntropyLoss(),
    "smoothed": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y),
    "mean of the batch": lambda out, y: out.logsumexp(1).mean() + (out[:, 0] - out[:, 0].mean()).square().sum(),
    "pairs of samples": pairs_of_samples,
}
OF_NUMBERS = {
    "squares": lambda out, y: (out - y[:, None]).square().mean(),
    "binary": lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], (y > 0).to(out.dtype)),
    "soft labels": lambda out, y: -(out.log_softmax(1) * y[:, None]).sum(1).mean(),
}
WITH_LOSSES = {
    "ignored labels": Case(mlp, targets=lambda y, dtype: torch.where(torch.arange(len(y)) % 4 == 1, -100, y)),
    "margin": Case(mlp, loss=F.multi_margin_loss, kind="once per client"),
    **{name: Case(mlp, loss=loss) for name, loss in LOSSES.items()},
    **{name: Case(mlp, loss=loss, targets=of_labels) for name, loss in OF_NUMBERS.items()},
}

# --- lookups in tables ---


def of_words(look_up: Callable[..., Tensor] | None = None, **options: Any) -> Case:
    return Case(lambda: Words(look_up, **options), (5,), WORDS, options={"lr": 0.5})


LOOKUPS = {
    "words": of_words(),
    "padding": of_words(padding_idx=2),
    "padding, counted from the end": of_words(padding_idx=-1),
    "gradients by frequency": of_words(scale_grad_by_freq=True, padding_idx=1),
    "torch.embedding": of_words(lambda x, weight: torch.embedding(weight, x, 3)),
    "F.embedding": of_words(lambda x, weight: F.embedding(x, weight, padding_idx=-2)),
    "unit vectors": of_words(lambda x, weight: F.one_hot(x, WORDS).to(weight.dtype) @ weight),
    "another operation first": Case(lambda: ScalesFirst(padding_idx=2), (5,), WORDS),
}

# --- batches that are trees of tensors ---


class Batch(NamedTuple):
    words: Tensor
    mask: Tensor
    labels: Tensor


def columns(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return words, a mask of the words before the first 0, which is never the first one, and labels."""
    return {"words": x, "mask": torch.cat([x[:, :1] >= 0, (x[:, 1:] > 0).cumprod(1) > 0], 1), "labels": y}


def rows(x: Tensor, y: Tensor) -> list[Batch]:
    return [Batch(*row) for row in zip(*columns(x, y).values(), strict=True)]


def nested(x: Tensor, y: Tensor) -> dict[str, Any]:
    words, mask, labels = columns(x, y).values()
    return {"inputs": [(words, mask)], "labels": labels}


def inputs_and_labels(x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    words, mask, labels = columns(x, y).values()
    return {"words": words, "mask": mask}, labels


def loss_of_tree(model: nn.Module, batch: Any) -> Tensor:
    x, *_, y = [v for part in (batch.values() if isinstance(batch, dict) else batch) for v in leaves(part)]
    return F.cross_entropy(model(x), y)


def leaves(part: Any) -> list[Tensor]:
    parts = part.values() if isinstance(part, dict) else part
    return [part] if isinstance(part, Tensor) else [leaf for p in parts for leaf in leaves(p)]


def collate(samples: list[Any]) -> Any:
    return default_collate(samples)


DICT_LOSS = fed.BatchLoss(
    lambda model, batch: model(**batch).loss, lambda model, batch: (model(**batch).logits, batch["labels"])
)
DICT = Case(LanguageModel, (5,), 9, client=columns, loss=DICT_LOSS)
TREES = {
    "dict": of_layer(
        lambda: nn.Linear(6, 5), 20, client=lambda x, y: {"x": x, "y": y}, loss=fed.BatchLoss(loss_of_tree)
    ),
    "list": of_layer(
        lambda: nn.Linear(6, 5), 20, client=lambda x, y: TensorDataset(x, y, y), loss=fed.BatchLoss(loss_of_tree)
    ),
    "tuple": of_layer(
        lambda: nn.Linear(6, 5), 20, client=lambda x, y: ({"inputs": [x, x]}, y), loss=fed.BatchLoss(loss_of_tree)
    ),
    "encoding": replace(DICT, client=lambda x, y: UserDict(columns(x, y))),
    "named": replace(DICT, client=rows, loss=fed.BatchLoss(lambda model, batch: model(*batch).loss)),
    "nested": replace(
        DICT,
        client=nested,
        loss=fed.BatchLoss(lambda model, batch: model(*batch["inputs"][0], batch["labels"]).loss),
    ),
    "inputs and labels": replace(
        DICT, client=inputs_and_labels, loss=lambda outputs, y: F.cross_entropy(outputs.logits, y, label_smoothing=0.1)
    ),
}
DICT_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "AdamW": {"optimizer": "AdamW", "lr": 1e-2},
    "clip": {"clip_norm": 0.1, "momentum": 0.5, "weight_decay": 0.01},
    "uploads": {"privacy": fed.Privacy(clip=0.05), "algorithm": fed.FedAvg()},
    "client states": {"algorithm": fed.SCAFFOLD(), "participation": 0.6},
    "adaptive": {"algorithm": fed.FedSAM(rho=0.5, adaptive=True)},
    "dual": {"algorithm": fed.FedSMOO(rho=0.05)},
    "path": {"algorithm": fed.FedLESAM(rho=0.05)},
    "full gradient": {"algorithm": fed.MimeLite()},
    "stored order": {"shuffle": False, "drop_last": True},
}
OPTIONS = {f"dict, {name}": replace(DICT, options=options) for name, options in DICT_OPTIONS.items()}

# --- dropout ---


DROPOUT_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "elements": lambda: nn.Dropout(0.4),
    "in place": lambda: nn.Dropout(0.4, inplace=True),
    "channels": lambda: Split(nn.Dropout1d(0.4)),
    "alpha": lambda: nn.AlphaDropout(0.4),
    "samples": DropsSamples,
    "everything": lambda: nn.Dropout(1.0),
    "attention": Attends,
    "always": AlwaysDrops,
    "transformer": lambda: Split(nn.TransformerEncoderLayer(2, 1, 4, dropout=0.3, batch_first=True)),
}


def of_dropout(make: Callable[[], nn.Module]) -> Case:
    return Case(lambda: mlp(make(), nn.Tanh()), draws=True)


DROPOUT = {f"dropout: {name}": of_dropout(make) for name, make in DROPOUT_LAYERS.items()}

# --- what is refused ---


def refused(words: str, model: Callable[[], nn.Module], *shape: int, **fields: Any) -> Case:
    return Case(model, shape or (6,), kind="refused", words=words, **fields)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand": lambda x: x * torch.rand(8),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "rand_like": DrawsInBackward.apply,
}
REFUSED = {
    "values of samples": refused("torch.vmap cannot map.*data-dependent control flow", Branches),
    "values of a mask": replace(
        DICT,
        model=ReadsMask,
        kind="refused",
        words=r"reads the values of a tensor.*\['attention_mask'\]\[:, None, None, :\]",
    ),
    "a table that a lookup writes": refused(
        "writes trained parameters in place", lambda: Words(max_norm=0.5, padding_idx=0), 5, vocabulary=WORDS
    ),
    # torch's batching rule of index_fill takes an index of -1 of one row for an element of the row before.
    "an operation that would mix rows": refused(
        "index_fill of several rows",
        lambda: Words(lambda x, weight: weight.index_fill(0, x[:, 0], 0.0)[x]),
        5,
        vocabulary=WORDS,
    ),
    "collate": of_layer(
        lambda: nn.Linear(6, 5),
        20,
        client=lambda x, y: DataLoader(TensorDataset(x, y), collate_fn=collate),
        loss=fed.BatchLoss(loss_of_tree),
        kind="refused",
        words="batch by batch",
    ),
    **{
        f"draws by {name}": refused(
            f"draws random numbers by aten.{name}.*serve dropout only", lambda f=function: mlp(Draws(f))
        )
        for name, function in DRAWS.items()
    },
}

CASES = LAYERS | MODELS | WITH_LOSSES | LOOKUPS | TREES | OPTIONS | DROPOUT | REFUSED
SERVED = [name for name, case in CASES.items() if case.kind != "refused"]
