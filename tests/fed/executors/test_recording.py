"""Recordings of passes: the operations of torch's own recorder, and layouts that stay true when a graph changes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fastsam.fed.executors import graph_passes
from fastsam.fed.executors.graph_recorder import CannotRecordError, module_of, record
from fastsam.fed.executors.recording import Recording
from tests.helpers.stacked_passes import make_passes


class Writes(nn.Linear):
    """A layer that writes into its result and into a new tensor."""

    def forward(self, x):
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


def pass_of(name):
    torch.manual_seed(0)
    passes, rows = make_passes(MODELS[name]())
    return passes.gradients, rows.leaves, torch.randn(5, 4, 6), torch.randint(0, 3, (5, 4))


@pytest.mark.parametrize("name", MODELS)
def test_a_recording_computes_the_bits_of_a_recording_by_make_fx(name):
    gradients, weights, x, y = pass_of(name)

    def flat(*tensors):
        *parameters, x, y = tensors
        losses, grads = gradients([w.detach().requires_grad_() for w in parameters], x, y)
        return (losses, *grads)

    inputs = [*(w.detach() for w in weights), x, y]
    recorded = Recording(gradients, weights, x, y)
    torch_recording = make_fx(flat)(*inputs)
    with torch.no_grad():
        expected = make_fx(torch.func.functionalize(torch_recording))(*inputs)(*inputs)
        assert all(map(torch.equal, module_of(recorded.graph)(*inputs), expected))
        assert all(map(torch.equal, recorded.outputs, expected))


@pytest.mark.parametrize("name", MODELS)
def test_layouts_are_those_of_the_changed_graph(name):
    recording = Recording(*pass_of(name))
    graph = recording.graph
    graph_passes.simplify(graph)
    values = dict(zip(graph.find_nodes(op="placeholder"), recording.inputs, strict=True))
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "get_attr":
                values[node] = node.meta["val"]
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                if isinstance(values[node], torch.Tensor):
                    assert graph_passes.layout_of(node.meta["val"]) == graph_passes.layout_of(values[node]), node


def test_what_cannot_be_recorded():
    x = torch.randn(3)
    for function in (lambda x: [x * float(x.sum())], lambda x: [x if x.equal(x) else -x]):
        with pytest.raises(CannotRecordError, match="it reads the value of a tensor"):
            record(function, [x])

    def draws(weights, x, y):
        loss = (weights[0] * torch.rand(3)).flatten(1).sum(1)
        return loss.detach(), torch.autograd.grad(loss.sum(), weights)

    with pytest.raises(CannotRecordError, match="it draws random numbers"):
        Recording(draws, [torch.randn(5, 1, 3)], x, x)


def test_attention_draws_only_with_dropout():
    def attend(dropout):
        def plain(weights, x, y):
            op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            loss = op(weights[0], x, x, dropout)[0].flatten(1).sum(1)
            return loss.detach(), torch.autograd.grad(loss.sum(), weights)

        x = torch.randn(2, 1, 4, 8)
        return Recording(plain, [torch.randn(2, 1, 4, 8)], x, x)

    assert len(attend(0.0).outputs) == 2
    with pytest.raises((CannotRecordError, RuntimeError), match="random numbers|dropout"):
        attend(0.5)


def test_a_tensor_of_numbers_is_not_written_by_a_replay():
    def count(x):
        ones = torch.tensor([1.0])
        ones.add_(x)
        return [ones * 1.5]

    module, x = module_of(record(count, [torch.ones(1)])), torch.ones(1)
    assert [module(x)[0].item() for _ in range(3)] == [3.0] * 3


def test_losses_of_a_set_are_recorded():
    passes, rows = make_passes(nn.Linear(6, 3), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])))
    recording = Recording(passes.gradients, rows.leaves, torch.randn(5, 4, 6), torch.randint(0, 3, (5, 4)))
    graph_passes.simplify(recording.graph)
    losses, gradients = passes.plain(rows, *recording.inputs[-2:])
    replayed = module_of(recording.graph)(*recording.inputs)
    assert torch.allclose(replayed[0], losses) and torch.allclose(replayed[1], gradients.tensors[0], atol=1e-6)
