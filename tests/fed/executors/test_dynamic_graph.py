"""One recording for batches of any size and any number of rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastsam import fed
from fastsam.fed.executors.dynamic_graph import SHAPES, DynamicGraph, Fixed, Power, _number
from fastsam.fed.executors.graph_recorder import CannotRecordError
from tests.helpers import oracle
from tests.helpers.stacked_passes import make_passes, same

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


@pytest.fixture
def passes_of(monkeypatch):
    """A function that makes passes, in which graphs for one shape are not recorded if `dynamic_only` is True."""

    def make(model, loss=F.cross_entropy, rows=5, dynamic_only=True):
        torch.manual_seed(0)
        passes, form = make_passes(model, loss, rows)
        passes.replays.make_row_pass = None
        if dynamic_only:
            monkeypatch.setattr(passes.replays, "_record", lambda *args: pytest.fail("recorded for one shape"))
        return passes, form

    return make


def compare(passes, form, batches=BATCHES, make=lambda *shape: torch.randn(*shape, 8, dtype=torch.float64)):
    """Compare replays of batches with the plain passes, at other weights each time."""
    leaves = form.leaves
    for rows, samples in batches:
        part = type("Part", (), {"leaves": [w.detach()[:rows].requires_grad_() for w in leaves]})
        same(passes, part, make(rows, samples), torch.randint(0, 3, (rows, samples)))
        form.z.mul_(0.99)


@pytest.mark.parametrize("name", MODELS)
def test_one_recording_serves_all_sizes(passes_of, name):
    passes, form = passes_of(MODELS[name]().double())
    tokens = name == "attention"
    make = (lambda *shape: torch.randint(0, 11, (*shape, 7))) if tokens else None
    compare(passes, form, **({"make": make} if tokens else {}))


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
def test_losses_that_depend_on_the_size(passes_of, loss):
    compare(*passes_of(nn.Linear(8, 3).double(), loss))


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
def test_a_size_that_changes_the_operations_has_its_own_recording(passes_of, kind):
    passes, form = passes_of(kind(8, 3).double(), dynamic_only=False)
    compare(passes, form, [*BATCHES, (5, 8), (5, 9), (5, 21), (5, 21)])
    assert passes.replays.reason is None


def test_a_size_with_an_infinite_loss_is_not_compared_and_not_served(passes_of):
    """Numbers that are not finite show no difference between two ways to compute them."""
    passes, form = passes_of(
        nn.Linear(8, 3).double(), lambda out, y: F.cross_entropy(out, y) / (len(y) > 1), dynamic_only=False
    )
    x, y = torch.randn(5, 4, 8, dtype=torch.float64), torch.randint(0, 3, (5, 4))
    for n in (4, 1, 1, 3):
        losses, _ = passes.run(form, x[:, :n], y[:, :n])
        assert torch.allclose(losses, passes.plain(form, x[:, :n], y[:, :n])[0])
    x[:, :, 0] = torch.inf  # nothing is known of two samples then
    passes.run(form, x[:, :2], y[:, :2])
    compare(passes, form, [(5, 2)])


def test_batches_of_other_samples_have_another_recording(passes_of):
    passes, form = passes_of(nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 3)).double())
    for length in (8, 12, 8):
        compare(passes, form, [(5, 4), (5, 2)], lambda *shape, n=length: torch.randn(*shape, n, dtype=torch.float64))
    assert len(passes.replays._passes) == 2


def test_a_client_alone_in_channels_last(passes_of):
    """torch's rule for a norm of one row's images fails."""
    model = MODELS["convolution"]().double().to(memory_format=torch.channels_last)
    compare(*passes_of(model, rows=5), [(1, 4), (5, 4), (1, 3)])


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
    ("pair", "number"),
    [
        ((7, 7), Fixed(7)), ((2, 3), Power(1, (1, 0))), ((33, 39), Power(3, (0, 1))), ((44, 78), Power(2, (1, 1))),
        ((1 / 11, 1 / 13), Power(1.0, (0, -1))), ((2.0 / 22, 2.0 / 39), Power(2.0, (-1, -1))),
        ((5.5, 6.5), Power(0.5, (0, 1))),
    ],
)  # fmt: skip
def test_a_number_is_a_factor_of_rows_and_samples(pair, number):
    assert _number(*pair) == number and [number(shape) for shape in SHAPES] == list(pair)


@pytest.mark.parametrize("pair", [(10, 12), (1, 2), (2, 3.0), (True, False), ("a", "b"), (2.5, 2.6)])
def test_other_numbers_are_refused(pair):
    with pytest.raises(CannotRecordError, match=r"is .* with \(2, 11\) and .* with \(3, 13\)"):
        _number(*pair)


def test_a_recording_that_is_wrong_for_a_number_of_rows_leaves_the_place_to_a_recording_of_one_shape(
    passes_of, monkeypatch
):
    """Sizes are compared on one row and on five. With four rows a kernel may round in another way."""
    run, calls = DynamicGraph.__call__, []

    def rounding(self, *inputs):
        losses, *gradients = run(self, *inputs)
        calls.append(len(losses))
        return [losses, *(g * (1.1 if len(losses) == 4 else 1) for g in gradients)]

    monkeypatch.setattr(DynamicGraph, "__call__", rounding)
    passes, form = passes_of(nn.Linear(8, 3).double(), rows=4, dynamic_only=False)
    x, y = torch.randn(4, 6, 8, dtype=torch.float64), torch.randint(0, 3, (4, 6))
    assert passes.replays.run(form.leaves, x, y) is None  # the plain pass is right
    num_calls = len(calls)
    for _ in range(3):
        same(passes, form, x, y)
    assert 4 in calls and len(calls) == num_calls and passes.replays.reason is None
