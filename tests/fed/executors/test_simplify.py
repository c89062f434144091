"""Recorded graphs: the operations of torch's own recorder, and after the passes over a graph fewer of them, with
layouts that are true."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fastsam.fed.executors import simplify
from fastsam.fed.executors.record import CannotRecordError, record, record_pass
from fastsam.fed.executors.simplify import aten, module_of
from tests.helpers.stacked_passes import make_passes, same


class Writes(nn.Linear):
    """A layer that writes into its result and into a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        scale = torch.tensor([1.0, 2.0, 3.0])
        scale[0] = 0.5
        out[:, :1].mul_(2)
        return out * scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.MaxPool2d((1, 2)), nn.Flatten(),
        nn.Linear(4, 3),
    ),
    "encoder": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True), nn.Flatten(),
        nn.Linear(6, 3),
    ),
    "writes": lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), Writes(4, 3)),
}  # fmt: skip


def flat_pass(name: str) -> tuple[Callable[..., Sequence[Tensor]], list[Tensor]]:
    """Return a pass as a function of tensors, and its inputs."""
    torch.manual_seed(0)
    passes, rows = make_passes(MODELS[name]())

    def flat(*tensors: Tensor) -> Sequence[Tensor]:
        *parameters, x, y = tensors
        losses, grads = passes.gradients([w.detach().requires_grad_() for w in parameters], x, y)
        return (losses, *(g for g in grads if g is not None))

    return flat, [*(w.detach() for w in rows.leaves), torch.randn(5, 4, 6), torch.randint(0, 3, (5, 4))]


@pytest.mark.parametrize("name", MODELS)
def test_a_recording_has_the_bits_of_a_recording_by_make_fx(name: str) -> None:
    flat, inputs = flat_pass(name)
    graph, expected = record(flat, inputs), make_fx(flat)(*inputs)
    with torch.no_grad():
        assert all(map(torch.equal, module_of(graph)(*inputs), expected(*inputs)))


@pytest.mark.parametrize("name", MODELS)
def test_a_simplified_recording_computes_the_same_with_layouts_that_are_true(name: str) -> None:
    flat, inputs = flat_pass(name)
    graph, _ = record_pass(lambda weights, *batch: split(flat(*weights, *batch)), inputs[:-2], *inputs[-2:])
    values = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "get_attr":
                values[node] = node.meta["val"]
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                if isinstance(values[node], Tensor):
                    assert node.meta["val"].stride() == values[node].stride(), node
                    assert node.meta["val"].storage_offset() == values[node].storage_offset(), node
    results = [values[node] for node in simplify.outputs(graph)]
    for result, expected in zip(results, flat(*inputs), strict=True):
        assert torch.allclose(result, expected, rtol=1e-5, atol=1e-6)


def split(results: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    return results[0], results[1:]


def test_what_cannot_be_recorded() -> None:
    x = torch.randn(3)
    for function in (lambda x: [x * float(x.sum())], lambda x: [x if x.equal(x) else -x]):
        with pytest.raises(CannotRecordError, match="it reads the value of a tensor"):
            record(function, [x])

    def draws(weights: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        loss = (weights[0] * torch.rand(3)).flatten(1).sum(1)
        return loss.detach(), torch.autograd.grad(loss.sum(), weights)

    with pytest.raises(CannotRecordError, match="it draws random numbers"):
        record_pass(draws, [torch.randn(5, 1, 3)], x, x)


def test_attention_draws_only_with_dropout() -> None:
    def attend(dropout: float) -> Graph:
        def plain(weights: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            loss = op(weights[0], x, x, dropout)[0].flatten(1).sum(1)
            return loss.detach(), torch.autograd.grad(loss.sum(), weights)

        x = torch.randn(2, 1, 4, 8)
        return record_pass(plain, [torch.randn(2, 1, 4, 8)], x, x).graph

    assert len(simplify.outputs(attend(0.0))) == 2
    with pytest.raises((CannotRecordError, RuntimeError), match="random numbers|dropout"):
        attend(0.5)


def test_a_tensor_of_numbers_is_not_written_by_a_replay() -> None:
    def count(x: Tensor) -> list[Tensor]:
        ones = torch.tensor([1.0])
        ones.add_(x)
        return [ones * 1.5]

    module, x = module_of(record(count, [torch.ones(1)])), torch.ones(1)
    assert [module(x)[0].item() for _ in range(3)] == [3.0] * 3


# --- what is left of a pass ---


def test_what_is_left_of_a_pass() -> None:
    """The five products of a two-layer network with its biases, its weights' gradients where they belong, and no call
    that does nothing."""
    passes, form = make_passes(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), rows=20)
    graph, _ = record_pass(passes.gradients, form.leaves, torch.randn(20, 16, 64), torch.randint(0, 10, (20, 16)))
    ops = [node.target for node in simplify.calls(graph)]
    assert ops.count(aten.baddbmm.default) == 2 and ops.count(aten.bmm.default) == 3
    gone = (aten.detach, aten._unsafe_view, aten.mul, aten.ones_like, aten.add, aten.clone)
    assert not [op for op in ops if getattr(op, "overloadpacket", None) in gone]
    assert len(ops) < 40
    assert [node.target for node in simplify.outputs(graph)[1::2]] == [aten.bmm.default] * 2


def products(graph: Graph) -> list[tuple[int, ...]]:
    """The shapes of the results of a pass's matrix products, which all lie in memory as they are."""
    values = [n.meta["val"] for n in simplify.calls(graph) if n.target in (aten.bmm.default, aten.baddbmm.default)]
    assert all(t.is_contiguous() for t in values)
    return [tuple(t.shape) for t in values]


def test_a_product_that_is_read_transposed_alone_is_made_so() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 8, 6), torch.randint(3, (5, 8))
    passes, form = make_passes(nn.Linear(6, 3))
    graph, _ = record_pass(passes.gradients, form.leaves, x, y)
    assert products(graph)[0] == (5, 3, 8)  # cross-entropy reads the classes first
    same(passes, form, x, y)


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        product = self.layer(x)
        return product.transpose(0, 1) @ product.exp()


def test_a_product_that_is_read_both_ways_is_made_once() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, 6), torch.randint(6, (5, 6))
    passes, form = make_passes(BothWays())
    graph, _ = record_pass(passes.gradients, form.leaves, x, y)
    assert len(products(graph)) == 5, "two of the forward pass and three of the backward pass"
    same(passes, form, x, y)


# --- pooling ---


@pytest.mark.parametrize(
    "options", [([2, 2], [2, 2]), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 2], [1, 1], [2, 1], True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_are_pooled_by_channels_in_the_same_bits(dtype: torch.dtype, options: Sequence[object]) -> None:
    """Ties, NaN and windows without a maximum have the same places."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (3, 19, 11, 12)).to(dtype)
    x[x == 2] = float("nan")
    for images in (x, x.nan_to_num(-torch.inf), torch.full_like(x, -torch.inf)):
        quick = simplify.pool_images(images, *options)
        for result, expected in zip(quick, aten.max_pool2d_with_indices.default(images, *options), strict=True):
            assert torch.equal(result.nan_to_num(), expected.nan_to_num()) and result.is_contiguous()


@pytest.mark.parametrize(("channels", "is_quick"), [(4, False), (16, True)])
def test_images_with_channels_enough_are_pooled_by_channels(
    monkeypatch: pytest.MonkeyPatch, channels: int, is_quick: bool
) -> None:
    calls, pool = [], simplify.pool_images
    monkeypatch.setattr(simplify, "pool_images", lambda *args: calls.append(args) or pool(*args))
    model = nn.Sequential(nn.Conv2d(1, channels, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(channels * 9, 3))
    passes, form = make_passes(model, F.cross_entropy, 2)
    for _ in range(2):
        same(passes, form, torch.randn(2, 5, 1, 8, 8), torch.randint(3, (2, 5)))
    assert bool(calls) is is_quick
