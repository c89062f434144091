"""Replayed passes of stacked clients: the losses and gradients of the plain ones, for whatever model, from one
recording for batches of any size and any number of rows."""

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

from fastsam import fed
from fastsam.fed.executors import record
from fastsam.fed.executors.record import SHAPES, CannotRecordError, Replays, number_of
from fastsam_kernels import native
from tests.helpers import oracle
from tests.helpers.stacked_models import Everything, Writes
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


def test_unusual_parameters_and_buffers_that_change():
    torch.manual_seed(0)
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
    passes, form = make_passes(Writes(3, 2))
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    for _ in range(3):
        same(passes, form, x, y)


def count_passes(passes):
    """Return a list that gets an entry with each pass through the model's Python for a recording or a comparison."""
    calls, plain = [], passes.replays.plain
    passes.replays.plain = lambda *operands: calls.append(1) or plain(*operands)
    return calls


@needs_row_programs
def test_a_recording_for_a_row_program_stops_once_at_an_operation_without_a_form(monkeypatch, caplog):
    passes, form = make_passes(nn.Sequential(nn.GroupNorm(1, 3), nn.Linear(3, 2)))
    assert passes.replays.make_row_pass is not None
    monkeypatch.setattr(passes.replays, "make_row_pass", lambda *args: pytest.fail("it did not stop"))
    calls = count_passes(passes)
    with caplog.at_level("INFO"):
        for n in (4, 4, 3, 2, 3):
            same(passes, form, torch.randn(5, n, 3), torch.zeros(5, n, dtype=torch.int64))
    assert "not replayed" not in caplog.text
    assert len(calls) == 7, "one that stops, two recordings, two comparisons, and those of two more sizes"


def test_the_least_recently_used_recording_goes_first(monkeypatch):
    monkeypatch.setattr(record, "MAX_RECORDINGS", 2)
    passes, form = make_passes(nn.Linear(3, 2), lambda out, y: out.square().mean())
    passes.replays = Replays(passes.gradients, passes.module, passes.layout)
    calls = count_passes(passes)

    def run(length):
        """Run passes until nothing is compared, and return True if they were recorded."""
        before = len(calls)
        for _ in range(3):
            same(passes, form, torch.randn(5, 4, length, 3), torch.zeros(5, 4))
        return len(calls) > before

    assert [run(n) for n in (1, 2, 1, 3, 1, 2)] == [True, True, False, True, False, True]


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


# --- one recording for batches of any size and any number of rows ---

BATCHES = [(5, 4), (5, 1), (1, 16), (1, 1), (2, 11), (4, 40), (3, 3)]  # rows and samples


class Attending(nn.Module):
    """Tokens, a mask of the padding, attention, and a mean over the words that there are."""

    def __init__(self):
        super().__init__()
        self.words, self.query, self.out = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        present, words = (x > 0)[:, None, None, :], self.words(x)[:, None]
        read = F.scaled_dot_product_attention(self.query(words), words, words, attn_mask=present)[:, 0]
        return self.out((read * (x > 0)[..., None]).sum(1) / (x > 0).sum(1, keepdim=True).clamp_min(1))


MODELS = {
    "dense": lambda: nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(16, 3),
    ),
    "attention": Attending,
    "writes": lambda: nn.Sequential(nn.Linear(8, 3), nn.ReLU(inplace=True)),
}  # fmt: skip


def joint_passes(model, loss=F.cross_entropy, rows=5, has_row_programs=False):
    """Return passes, rows, and the list of passes through the model's Python."""
    torch.manual_seed(0)
    passes, form = make_passes(model, loss, rows)
    if not has_row_programs:
        passes.replays.make_row_pass = None
    return passes, form, count_passes(passes)


def compare(passes, form, batches=BATCHES, make=lambda *shape: torch.randn(*shape, 8, dtype=torch.float64)):
    """Compare replays of batches with the plain passes, at other weights each time."""
    leaves = form.leaves
    for rows, samples in batches:
        part = type("Part", (), {"leaves": [w.detach()[:rows].requires_grad_() for w in leaves]})
        same(passes, part, make(rows, samples), torch.randint(0, 3, (rows, samples)))
        form.z.mul_(0.99)


@pytest.mark.parametrize("name", MODELS)
def test_one_recording_serves_all_sizes(name):
    passes, form, calls = joint_passes(MODELS[name]().double())
    tokens = name == "attention"
    make = (lambda *shape: torch.randint(0, 11, (*shape, 7))) if tokens else None
    compare(passes, form, **({"make": make} if tokens else {}))
    assert len(calls) == 8, "two recordings, two comparisons, and those of four more sizes"


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
        lambda out, y: (out - y[:, None].to(out.dtype)).square().mean(),
        lambda out, y: out.logsumexp(1).sum() / len(y) + (out[:, 0] - out[:, 0].mean()).square().sum(),
        lambda out, y: (F.normalize(out, dim=1) @ F.normalize(out, dim=1).T).logsumexp(1).mean(),
        lambda out, y: (out[:, 0] * torch.arange(len(y), dtype=out.dtype)).sum() * torch.ones(3, len(y))[1].sum(),
    ],
    ids=["smoothed", "squares", "batch mean", "pairs of samples", "places"],
)
def test_losses_that_depend_on_the_size(loss):
    passes, form, calls = joint_passes(nn.Linear(8, 3).double(), loss)
    compare(passes, form)
    assert len(calls) == 8


class BySize(nn.Linear):
    """A layer that does something else from nine samples on."""

    def forward(self, x):
        return super().forward(x) if len(x) < 9 else super().forward(x.tanh()).flip(0)


class Capped(nn.Linear):
    """A layer with a number that looks like the number of samples in the two recordings."""

    def forward(self, x):
        return super().forward(x) * min(len(x), 20)


class Squeezing(nn.Linear):
    """A layer whose operations depend on a size of one."""

    def forward(self, x):
        return super().forward(x.squeeze().reshape(len(x), -1))


class Tables(nn.Linear):
    """A layer with a tensor made from the number of samples."""

    def forward(self, x):
        return super().forward(x) * torch.tensor([float(len(x))], dtype=x.dtype)


class Rank(nn.Linear):
    """A layer with more operations for more samples."""

    def forward(self, x):
        return super().forward(torch.stack([row * 2 for row in x.unbind()]))


@pytest.mark.parametrize("kind", [BySize, Capped, Squeezing, Tables, Rank])
def test_a_size_that_changes_the_operations_has_its_own_recording(kind, caplog):
    passes, form, _ = joint_passes(kind(8, 3).double())
    compare(passes, form, [*BATCHES, (5, 8), (5, 9), (5, 21), (5, 21)])
    assert passes.replays.reason is None and "not replayed" not in caplog.text


def test_a_size_with_an_infinite_loss_is_compared_later():
    """Numbers that are not finite show no difference between two ways to compute them."""
    passes, form, _ = joint_passes(nn.Linear(8, 3).double(), lambda out, y: F.cross_entropy(out, y) / (len(y) > 1))
    x, y = torch.randn(5, 4, 8, dtype=torch.float64), torch.randint(0, 3, (5, 4))
    for n in (4, 1, 1, 3):
        losses, _ = passes.run(form, x[:, :n], y[:, :n])
        assert torch.allclose(losses, passes.plain(form, x[:, :n], y[:, :n])[0])
    x[:, :, 0] = torch.inf  # nothing is known of two samples then
    passes.run(form, x[:, :2], y[:, :2])
    compare(passes, form, [(5, 2), (5, 2)])


class Masked(nn.Linear):
    """A layer with a buffer that has NaN, and an empty parameter."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mask", torch.tensor([torch.nan, 1.0, 1.0]))
        self.empty = nn.Parameter(torch.zeros(0, dtype=self.weight.dtype))

    def forward(self, x):
        return super().forward(x) * self.mask.nan_to_num(0.5) + self.empty.sum()


def test_a_buffer_with_nan_is_a_constant_and_a_parameter_may_be_empty(caplog):
    passes, form, _ = joint_passes(Masked(8, 3).double())
    compare(passes, form, [(5, 4), (5, 4), (5, 9)])
    assert "not replayed" not in caplog.text


def test_rows_that_are_not_finite_do_not_count():
    passes, form, calls = joint_passes(nn.Linear(8, 3).double())
    x, y = torch.randn(5, 4, 8, dtype=torch.float64), torch.randint(0, 3, (5, 4))
    x[2] = torch.nan
    for _ in range(3):
        result = passes.replays.run(form.leaves, x, y)
        assert result is not None and result[0].isfinite().tolist() == [True, True, False, True, True]
    assert len(calls) == 4, "two recordings and two comparisons"


def test_batches_of_other_samples_have_another_recording():
    passes, form, calls = joint_passes(nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 3)).double())
    for length in (8, 12, 8):
        compare(passes, form, [(5, 4), (5, 2)], lambda *shape, n=length: torch.randn(*shape, n, dtype=torch.float64))
    assert len(calls) == 2 * 4, "two recordings and two comparisons of each"


def test_a_client_alone_in_channels_last():
    """torch's rule for a norm of one row's images fails."""
    model = MODELS["convolution"]().double().to(memory_format=torch.channels_last)
    passes, form, calls = joint_passes(model)
    compare(passes, form, [(1, 4), (5, 4), (1, 3)])
    assert len(calls) == 5


def test_unequal_clients_in_channels_last_end_one_after_another():
    torch.manual_seed(0)
    model = MODELS["convolution"]().double().to(memory_format=torch.channels_last)
    clients = [(torch.randn(n, 8, dtype=torch.float64), torch.arange(n) % 3) for n in (8, 12, 21)]
    one, two = (
        fed.run(model, clients, fed.FedSAM(), rounds=2, participation=1.0, batch_size=4, executor=executor).model
        for executor in ("sequential", "vmap")
    )
    assert oracle.movement(one, two) < 1e-10


# --- numbers ---


@pytest.mark.parametrize(
    ("pair", "other"),
    [
        ((7, 7), 7), ((2, 3), 4), ((33, 39), 15), ((44, 78), 40), ((1 / 11, 1 / 13), 1 / 5), ((2 / 22, 2 / 39), 0.1),
        ((5.5, 6.5), 2.5), (([2, 11, 8], [3, 13, 8]), [4, 5, 8]),
    ],
)  # fmt: skip
def test_a_number_is_a_factor_of_rows_and_samples(pair, other):
    number = number_of(*pair)
    assert [number(shape) for shape in SHAPES] == list(pair) and number((4, 5)) == other


@pytest.mark.parametrize("pair", [(10, 12), (1, 2), (2, 3.0), (True, False), ("a", "b"), (2.5, 2.6), ([2], [3, 3])])
def test_other_numbers_are_refused(pair):
    with pytest.raises(CannotRecordError, match=r"is .* with \(2, 11\) and .* with \(3, 13\)"):
        number_of(*pair)


# --- what is compared ---


@pytest.mark.parametrize("first_rows", [4, 5])
def test_a_joint_graph_that_is_wrong_for_a_number_of_rows_leaves_the_size_to_a_graph_of_one_shape(
    first_rows, monkeypatch, caplog
):
    """With four rows a kernel may round in another way. The second comparison has the same size."""
    joint = record.joint_function

    def rounding(graph, other, *options):
        function = joint(graph, other, *options)

        def rounded(*inputs):
            losses, *gradients = function(*inputs)
            is_wrong = len(losses) == 4 and graph is not other
            return [losses, *(g * (1.1 if is_wrong else 1) for g in gradients)]

        return rounded

    monkeypatch.setattr(record, "joint_function", rounding)
    passes, form, _ = joint_passes(nn.Linear(8, 3).double())
    compare(passes, form, [(first_rows, 6), *[(4, 6)] * 3, (5, 7)])
    assert passes.replays.reason is None and "not replayed" not in caplog.text


def test_a_graph_of_one_shape_that_is_wrong_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(
        record, "joint_function", lambda *operands: lambda *inputs: [torch.ones(5), torch.ones(5, 3, 8)]
    )
    passes, form, _ = joint_passes(nn.Linear(8, 3, bias=False).double())
    x, y = torch.randn(5, 4, 8, dtype=torch.float64), torch.randint(0, 3, (5, 4))
    for _ in range(3):
        assert passes.replays.run(form.leaves, x, y) is None
    assert caplog.text.count("not replayed: the replay of a pass gives other losses or gradients") == 1


def test_a_recording_that_raises_is_a_warning(monkeypatch, caplog):
    make, is_broken = record.joint_function, []

    def joint_function(*operands):
        function = make(*operands)

        def run(*inputs):
            if is_broken:
                raise RuntimeError("no such operation")
            return function(*inputs)

        return run

    monkeypatch.setattr(record, "joint_function", joint_function)
    passes, form, _ = joint_passes(nn.Linear(8, 3))
    x, y = torch.randn(5, 4, 8), torch.randint(0, 3, (5, 4))
    for _ in range(3):
        same(passes, form, x, y)
    assert "not replayed" not in caplog.text
    is_broken.append(True)
    losses, _ = passes.run(form, x, y)
    assert torch.equal(losses, passes.plain(form, x, y)[0]) and "not replayed" in caplog.text


@pytest.mark.parametrize("row", [0, 4])
@pytest.mark.parametrize("has_row_programs", [False, True])
def test_an_error_of_a_batch_says_nothing_of_the_recording(row, has_row_programs, caplog):
    """The row is recorded, or only compared."""
    passes, form, _ = joint_passes(nn.Linear(8, 3), has_row_programs=has_row_programs)
    x, y = torch.randn(5, 4, 8), torch.randint(0, 3, (5, 4))
    for _ in range(2):
        bad = y.clone()
        bad[row, 1] = 3
        with pytest.raises((IndexError, RuntimeError), match=r"Target 3 is out of bounds"):
            passes.run(form, x, bad)
        same(passes, form, x, y)
    assert passes.replays.reason is None and "not replayed" not in caplog.text


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
