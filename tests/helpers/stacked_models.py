"""Models of stacked clients: layers, unusual parameters, lookups, attention, dropout, and models that are refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, WORDS = 3, 10


class Call(nn.Module):
    """A layer, a function that calls it, and a head for its `width` results."""

    def __init__(self, layer: nn.Module, width: int, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.call = layer, nn.Linear(width, CLASSES), call

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.call(self.layer, x).flatten(1))
        return result


def mlp(activation: nn.Module | None = None, *middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), activation or nn.Tanh(), *middle, nn.Linear(8, CLASSES))


class Everything(nn.Module):
    """Tied, frozen, unused, 0-dim, channels-last and embedded parameters, and a constant buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight, self.unused = self.a.weight, nn.Linear(2, 2)
        self.conv, self.pool = nn.Conv2d(2, 4, 2), nn.MaxPool2d(2, 1)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.norm, self.out, self.scale = nn.GroupNorm(2, 4), nn.Linear(24, 3), nn.Parameter(torch.tensor(1.5))
        self.out.bias.requires_grad_(False)
        self.register_buffer("mask", torch.linspace(0.5, 1, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(self.words(x))))) * self.scale
        x = self.norm(self.conv(x.transpose(1, 2).unflatten(1, (2, 3))))
        result: Tensor = self.out(self.mask * F.pad(self.pool(x), (0, 4)).flatten(1)[:, :24])
        return result


class Writes(nn.Linear):
    """A layer that writes its results in place."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out[:, :1].mul_(2)
        return out


class BySize(nn.Linear):
    """A layer that does something else from four samples on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) < 4 else super().forward(x.tanh()).flip(0)


class Number(nn.Module):
    """A number of the model, which is one for all clients."""

    number: Tensor

    def __init__(self, number: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("number", number)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.number)


class ChannelsLast(nn.Sequential):
    """A small convolutional network whose weights are in channels-last order."""

    def __init__(self) -> None:
        conv, norm = nn.Conv2d(2, 4, 2, padding=1), nn.GroupNorm(2, 4)
        conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
        super().__init__(nn.Unflatten(1, (2, 2, 2)), conv, norm, nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten())
        self.append(nn.Linear(16, CLASSES))


class Words(nn.Module):
    """A classifier of texts of 5 words, by a function of the words and the table of their vectors."""

    def __init__(self, look_up: Callable[..., Tensor] | None = None, **options: Any) -> None:
        super().__init__()
        self.words, self.output, self.look_up = nn.Embedding(WORDS, 4, **options), nn.Linear(4, CLASSES), look_up

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.words(x) if self.look_up is None else self.look_up(x, self.words.weight)
        result: Tensor = self.output(vectors.mean(1))
        return result


class ScalesFirst(Words):
    """A model with an operation that no row program has, before its lookup."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * F.group_norm((self.output.bias * 2)[None], 1)[0]


class LanguageModel(nn.Module):
    """A model like Hugging Face's: words, a mask and labels in, an object with the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        # A bias of keys has no gradient but rounding, which AdamW would make large.
        self.attention, self.head = nn.MultiheadAttention(4, 2, bias=False, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        x = self.table(words)
        x, _ = self.attention(x, x, x, key_padding_mask=~mask)
        logits = self.head((x * mask.unsqueeze(-1)).sum(1))
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


class DropsSamples(nn.Module):
    """Stochastic depth: whole samples, by a method that writes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.7) / 0.7 if self.training else x


class Attends(nn.Module):
    """Attention with its own dropout."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (1, 4, 2))
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3 if self.training else 0.0).flatten(1)


class AlwaysDrops(nn.Module):
    """Drops in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.4)


class Split(nn.Module):
    """A layer on samples of 4 rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.unflatten(1, (4, 2))).flatten(1)
        return result


class Branches(nn.Module):
    """A model that reads the values of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) if x.sum() > 0 else self.inner(-x)
        return result


class ReadsMask(LanguageModel):
    """A model that leaves out a mask without padding."""

    def forward(self, words: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        if not torch.compiler.is_compiling() and mask.all():
            mask = torch.ones_like(mask)
        return super().forward(words, mask, labels)


class DrawsInBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * torch.rand_like(grad)


class Draws(nn.Module):
    """A function that draws random numbers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.training else x
