"""Replayed passes of stacked clients: the losses and gradients of the plain ones, for whatever model."""

import logging
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastsam.fed.executors import graph_passes
from fastsam.fed.executors.graph_passes import aten, simplify
from fastsam.fed.executors.recording import Recording
from fastsam.fed.executors.replay import Replays
from fastsam_kernels import native
from tests.helpers.stacked_passes import make_passes, same

needs_row_programs = pytest.mark.skipif(native.why_not("cpu") is not None, reason=f"{native.why_not('cpu')}")
ACTIVATIONS = [nn.Tanh, nn.ReLU, lambda: nn.ReLU(inplace=True), nn.GELU, nn.SiLU, nn.Identity]


@st.composite
def mlps(draw):
    torch.manual_seed(draw(st.integers(0, 1000)))
    widths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    layers = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o, bias=draw(st.booleans())), draw(st.sampled_from(ACTIVATIONS))()]
        if draw(st.booleans()):
            layers.append(nn.LayerNorm(o))
    if draw(st.booleans()) and len(layers) > 3:
        layers[0].requires_grad_(False)
    classes = draw(st.sampled_from([2, 7, 10, 20]))
    return widths[0], nn.Sequential(*layers, nn.Linear(widths[-1], classes)), classes


LOSSES = [
    F.cross_entropy,
    lambda out, y: F.cross_entropy(out, y.abs() % 2, label_smoothing=0.1),
    lambda out, y: (out - y[:, None].to(out.dtype)).square().mean(),
    lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], (y > 0).to(out.dtype)),
]


@settings(max_examples=5, deadline=None)
@given(mlps(), st.sampled_from(LOSSES), st.sampled_from([torch.float32, torch.float64]), st.integers(1, 6), st.data())
def test_a_replay_is_the_plain_pass(make_model, loss, dtype, rows, data):
    width, model, classes = make_model
    passes, form = make_passes(model.to(dtype), loss, rows)
    batch = data.draw(st.sampled_from([1, 3, 16, 40]))
    for _ in range(3):
        x, y = torch.randn(rows, batch, width, dtype=dtype), torch.randint(0, classes, (rows, batch))
        if loss is F.cross_entropy and batch > 1:
            y[:, 1::2][torch.rand_like(y[:, 1::2], dtype=dtype) < 0.3] = -100
        same(passes, form, x, y)
        form.z.mul_(0.99)
    assert passes.replays.reason is None


class Everything(nn.Module):
    """Tied, frozen, unused, 0-dim, channels-last and embedded parameters, and a constant buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.a, self.b = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight, self.unused = self.a.weight, nn.Linear(2, 2)
        self.conv, self.pool = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last), nn.MaxPool2d(2, 1)
        self.norm, self.out, self.scale = nn.GroupNorm(2, 4), nn.Linear(24, 3), nn.Parameter(torch.tensor(1.5))
        self.out.bias.requires_grad_(False)
        self.register_buffer("mask", torch.linspace(0.5, 1, 24))

    def forward(self, x):
        x = torch.tanh(self.b(torch.tanh(self.a(self.words(x))))) * self.scale
        x = self.norm(self.conv(x.transpose(1, 2).unflatten(1, (2, 3))))
        return self.out(self.mask * F.pad(self.pool(x), (0, 4)).flatten(1)[:, :24])


def test_unusual_parameters_and_buffers_that_change():
    passes, form = make_passes(Everything().double())
    for _ in range(3):
        x, y = torch.randint(0, 11, (5, 7, 4)), torch.randint(0, 3, (5, 7))
        *_, slots = same(passes, form, x, y)
        assert len(slots) == len(form.leaves) - 2  # without the unused layer
        passes.module.mask.mul_(0.9)


def test_gradients_are_not_memory_of_the_weights():
    """The gradient of half a square is the weight itself; the update writes it."""
    model = nn.Linear(4, 1, bias=False)
    passes, form = make_passes(model, lambda out, y: out.sum() * 0)

    def plain(weights, x, y):
        loss = weights[0].square().flatten(1).sum(1) / 2
        return loss.detach(), torch.autograd.grad(loss.sum(), weights)

    replays = Replays(plain, model, passes.layout)
    for _ in range(2):
        _, (g,), _ = replays.run(form.leaves, torch.zeros(5, 1), torch.zeros(5, 1))
    copy_of_g = g.clone()
    form.z.add_(1)
    assert torch.equal(g, copy_of_g)


def graph_of(passes, form, x, y):
    """Return the number of recorded operations, and the graph that is left of them."""
    pass_recording = Recording(passes.gradients, form.leaves, x, y)
    recorded_outputs = (
        len(pass_recording.graph.find_nodes(op="call_function", target=aten.bmm.default)),
        len(pass_recording.graph.nodes),
    )
    simplify(pass_recording.graph)
    return *recorded_outputs, pass_recording.graph


def test_what_is_left_of_a_pass():
    """The five products of a two-layer network with its biases, its weights' gradients where they belong, and no call
    that does nothing."""
    passes, form = make_passes(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), rows=20)
    x, y = torch.randn(20, 16, 64), torch.randint(0, 10, (20, 16))
    _, recorded_outputs, graph = graph_of(passes, form, x, y)
    ops = [node.target for node in graph.nodes if node.op == "call_function"]
    assert ops.count(aten.baddbmm.default) == 2 and ops.count(aten.bmm.default) == 3
    gone = (aten.detach, aten._unsafe_view, aten.mul, aten.ones_like, aten.add)
    assert not [op for op in ops if getattr(op, "overloadpacket", None) in gone]
    assert len(graph.nodes) < 0.65 * recorded_outputs
    assert [node.target for node in graph.output_node().args[0][1::2]] == [aten.bmm.default] * 2


def test_weights_that_are_read_behind_the_inputs_are_not_recorded():
    passes, form = make_passes(nn.Linear(4, 1, bias=False))
    hidden_views = passes.layout.views(form.z)

    def plain(weights, x, y):
        loss = (weights[0] * hidden_views[0]).flatten(1).sum(1)
        return loss.detach(), torch.autograd.grad(loss.sum(), weights)

    replays = Replays(plain, passes.module, passes.layout)
    assert replays.run(form.leaves, torch.zeros(5, 1), torch.zeros(5, 1)) is None


# --- what is kept ---


def test_writes_in_place_are_recorded_without_them():
    class Writes(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            out[:, :1].mul_(2)
            return out

    passes, form = make_passes(Writes(3, 2))
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    for _ in range(3):
        same(passes, form, x, y)


@needs_row_programs
def test_a_recording_for_a_row_program_stops_at_an_operation_without_a_form(monkeypatch, caplog):
    passes, form = make_passes(nn.Sequential(nn.GroupNorm(1, 3), nn.Linear(3, 2)))
    assert passes.replays.make_row_pass is not None
    monkeypatch.setattr(passes.replays, "make_row_pass", lambda *args: pytest.fail("it did not stop"))
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    with caplog.at_level("INFO"):
        for _ in range(3):
            same(passes, form, x, y)
    assert "not replayed" not in caplog.text


def test_the_least_recently_used_shape_goes_first():
    passes, form = make_passes(nn.Linear(3, 2), lambda out, y: out.square().mean())
    replays = Replays(passes.gradients, passes.module, passes.layout, max_shapes=2)

    def run(length):
        assert replays.run(form.leaves, torch.randn(5, 4, length, 3), torch.zeros(5, 4)) is not None
        return [key[0][:1] for key in replays._passes]

    assert [run(n) for n in (1, 2, 1, 3, 2)] == [[(1,)], [(1,), (2,)], [(2,), (1,)], [(1,), (3,)], [(3,), (2,)]]


def test_training_and_evaluation_are_two_passes():
    class Halves(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if self.training else 0.5)

    passes, form = make_passes(Halves(3, 2))
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    for mode in (True, False, True):
        passes.module.train(mode)
        same(passes, form, x, y)


@needs_row_programs
def test_the_models_code_runs_once_for_a_replay_after_it_was_compared():
    class Seen(nn.Linear):
        calls = 0

        def forward(self, x):
            Seen.calls += 1
            return super().forward(x)

    passes, form = make_passes(Seen(3, 2))
    for expected in (2, 3, 3, 3):  # the recording on two rows, and two comparisons
        passes.run(form, torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64))
        assert Seen.calls == expected


def products(graph):
    """The shapes of the results of a pass's matrix products, which all lie in memory as they are."""
    product_values = [
        node.meta["val"] for node in graph.nodes if node.target in (aten.bmm.default, aten.baddbmm.default)
    ]
    assert all(t.is_contiguous() for t in product_values)
    return [tuple(t.shape) for t in product_values]


def test_a_product_that_is_read_transposed_alone_is_made_so():
    torch.manual_seed(0)
    x, y = torch.randn(5, 8, 6), torch.randint(3, (5, 8))
    passes, form = make_passes(nn.Linear(6, 3))
    assert products(graph_of(passes, form, x, y)[-1])[0] == (5, 3, 8)  # cross-entropy reads the classes first
    same(passes, form, x, y)


class BothWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        product = self.layer(x)
        return product.transpose(0, 1) @ product.exp()


def test_a_product_that_is_read_both_ways_is_made_once():
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, 6), torch.randint(6, (5, 6))
    passes, form = make_passes(BothWays())
    recorded_outputs, _, graph = graph_of(passes, form, x, y)
    assert len(products(graph)) <= recorded_outputs
    same(passes, form, x, y)


@pytest.mark.parametrize(
    "options", [([2, 2], [2, 2]), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 2], [1, 1], [2, 1], True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_are_pooled_by_channels_in_the_same_bits(dtype, options):
    """Ties, NaN and windows without a maximum have the same places."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (3, 19, 11, 12)).to(dtype)
    x[x == 2] = float("nan")
    for images in (x, x.nan_to_num(-torch.inf), torch.full_like(x, -torch.inf)):
        quick = graph_passes.pool_images(images, *options)
        for result, expected in zip(quick, aten.max_pool2d_with_indices.default(images, *options), strict=True):
            assert torch.equal(result.nan_to_num(), expected.nan_to_num()) and result.is_contiguous()


@pytest.mark.parametrize(("channels", "is_quick"), [(4, False), (16, True)])
def test_images_with_channels_enough_are_pooled_by_channels(monkeypatch, channels, is_quick):
    calls, pool = [], graph_passes.pool_images
    monkeypatch.setattr(graph_passes, "pool_images", lambda *args: calls.append(args) or pool(*args))
    model = nn.Sequential(nn.Conv2d(1, channels, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(channels * 9, 3))
    passes, form = make_passes(model, F.cross_entropy, 2)
    for _ in range(2):
        same(passes, form, torch.randn(2, 5, 1, 8, 8), torch.randint(3, (2, 5)))
    assert bool(calls) is is_quick


# --- Passes of stacked clients that are not replayed: a pass with side effects runs through the model's own code each
# time.


class Changing(nn.Linear):
    """A forward pass with a side effect, given by name."""

    def __init__(self, how):
        super().__init__(3, 2)
        self.how, self.calls, self.seen, self.rate, self.inner = how, 0, [], 1.0, nn.Identity()

    def forward(self, x):
        {
            "counter": lambda: setattr(self, "calls", self.calls + 1), "list": lambda: self.seen.append(1),
            "inner": lambda: setattr(self.inner, "rate", x.shape[0]), "python": random.random, "numpy": np.random.rand,
        }[self.how]()  # fmt: skip
        return super().forward(x)


@pytest.mark.parametrize(
    ("how", "words"),
    [("counter", "calls"), ("list", "seen"), ("inner", "inner.rate"), ("python", "Python's"), ("numpy", "numpy's")],
)
def test_a_forward_that_changes_pythons_state_is_not_replayed(how, words, caplog):
    passes, form = make_passes(Changing(how))
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    with caplog.at_level(logging.WARNING, "fastsam.fed"):
        for _ in range(3):
            assert passes.replays.run(form.leaves, x, y) is None
    assert words in passes.replays.reason
    assert caplog.text.count("not replayed: the model's forward pass changes") == 1


def test_what_was_no_constant_is_found_at_the_second_pass(caplog):
    outside = [1.0]

    class Schedule(nn.Linear):
        def forward(self, x):
            return super().forward(x) * outside[0]

    passes, form = make_passes(Schedule(3, 2))
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    assert passes.replays.run(form.leaves, x, y) is not None
    outside[0] = 2.0
    with caplog.at_level(logging.WARNING, "fastsam.fed"):
        losses, gradients = passes.run(form, x, y)
    plain, expected = passes.plain(form, x, y)
    assert torch.equal(losses, plain) and all(map(torch.equal, gradients.tensors, expected.tensors))
    assert "not a function of its inputs" in caplog.text


class Overwrites(nn.Linear):
    """A module that overwrites its batch."""

    def forward(self, x):
        return super().forward(x.mul_(0.5))


class Looks(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(self.fixed.max())


@pytest.mark.parametrize(("kind", "words"), [(Overwrites, "writes"), (Looks, "reads the value of a tensor")])
def test_passes_that_cannot_be_recorded_run_plainly(kind, words, caplog):
    model = kind(3, 2)
    model.register_buffer("fixed", torch.ones(2))
    passes, form = make_passes(model)
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    with caplog.at_level(logging.WARNING, "fastsam.fed"):
        for _ in range(3):
            losses, gradients = passes.run(form, x.clone(), y)
    plain, expected = passes.plain(form, x.clone(), y)
    assert torch.equal(losses, plain) and all(map(torch.equal, gradients.tensors, expected.tensors))
    assert caplog.text.count(words) == 1


def test_results_of_elsewhere_are_not_taken_for_constants(caplog):
    """A pass that ignores its weights, like a backward pass that is not recorded, is not replayed."""
    passes, form = make_passes(nn.Linear(4, 1, bias=False))
    fixed_results = torch.ones(5), [torch.ones(5, 1, 4)]
    replays = Replays(lambda weights, x, y: fixed_results, passes.module, passes.layout)
    with caplog.at_level(logging.WARNING, "fastsam.fed"):
        assert replays.run(form.leaves, torch.zeros(5, 1), torch.zeros(5, 1)) is None
    assert "not recorded" in caplog.text
