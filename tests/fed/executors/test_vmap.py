"""Stacked clients: they agree with the plain executor, one number of slots gives one set of bits, and what cannot be
stacked is refused."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastsam import fed
from fastsam.fed.clients.store import stored as store_of
from fastsam.fed.executors import Task, Work, stacked
from fastsam.fed.executors.batches import Feed
from tests.helpers import fed_cases as cases
from tests.helpers import oracle
from tests.helpers.fed_runs import SIZES, digest, run

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}  # of a weight, after a few dozen steps
REFUSED = ("fedrobust", "fedgmt", "fedntd", "fedsol", "moon")
FORMS = ("fedavg", "fedsam", "fedsmoo", "fedlesam", "scaffold")  # of a step: the other algorithms are slow tests


def distance(a, b):
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


def agree(algorithm, dtype=torch.float64, slots=3, sizes=SIZES, model=None, **options):
    """The largest difference of a weight; the records must say the same."""
    data = oracle.ragged_clients(dtype, sizes)
    made = (lambda: oracle.smooth_model(dtype)) if model is None else model
    base = {
        "rounds": 3,
        "participation": 0.8,
        "batch_size": 5,
        "local_epochs": 2,
        "momentum": 0.3,
        "weight_decay": 0.01,
    } | options
    plain = fed.run(made(), data, algorithm, executor="sequential", **base)
    ours = fed.run(made(), data, algorithm, executor="vmap", slots=slots, **base)
    for a, b in zip(plain.history, ours.history, strict=True):
        assert {k: a[k] for k in ("steps", "backprops", "clients")} == {
            k: b[k] for k in ("steps", "backprops", "clients")
        }
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-9 if dtype == torch.float64 else 1e-4)
    return distance(plain, ours)


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[] if m in FORMS else pytest.mark.slow) for m in cases.METHODS if not m.startswith(REFUSED)],
)
def test_every_algorithm_agrees_with_the_plain_executor(method):
    """Ragged clients in three rows: partial batches, rows that are refilled, rows that are not neighbours."""
    assert agree(cases.ours(method)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(("slots", "method"), [(1, "fedavg"), (7, "fedsmoo"), (64, "fedlesam-d")])
def test_any_number_of_slots_agrees_in_single_precision(slots, method):
    assert agree(cases.ours(method), torch.float32, slots) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("options", "methods"),
    [
        pytest.param({"clip_norm": 0.05}, ("fedprox", "fedsmoo"), marks=pytest.mark.slow),
        ({"clip_norm": 0.05, "clip_scope": "linear", "weighting": "samples"}, ("fedsmoo",)),
        pytest.param({"shuffle": False, "momentum": 0.0}, ("fedavg", "fedlesam"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_options_agree(options, methods):
    for method in methods:
        assert agree(cases.ours(method), **options) < TOLERANCE[torch.float64]


def test_one_number_of_slots_gives_one_set_of_bits():
    assert digest(run(cases.ours("fedsmoo"), "vmap", 3)) == digest(run(cases.ours("fedsmoo"), "vmap", 3))


def test_a_run_continues_in_the_same_bits(tmp_path):
    whole = run(fed.SCAFFOLD(), "vmap", 3, rounds=4)
    run(fed.SCAFFOLD(), "vmap", 3, rounds=2, run_dir=tmp_path / "run")
    parts = run(fed.SCAFFOLD(), "vmap", 3, rounds=4, run_dir=tmp_path / "run", resume=True)
    assert distance(whole, parts) == 0
    with pytest.raises(fed.RunDirectoryError, match="numbers"):
        run(fed.SCAFFOLD(), "vmap", 4, rounds=5, run_dir=tmp_path / "run", resume=True)


class Tied(nn.Module):
    """Tied, frozen, unused, 0-dim and channels-last parameters, and a constant buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.out, self.scale = nn.Linear(8, 3), nn.Parameter(torch.tensor(1.5))
        self.out.bias.requires_grad_(False)
        self.register_buffer("mask", torch.linspace(0.5, 1, 8))

    def forward(self, x):
        x = torch.tanh(self.b(torch.tanh(self.a(x)))) * self.scale
        return self.out(self.mask * torch.tanh(self.conv(x.view(-1, 2, 1, 3).expand(-1, 2, 2, 3))).flatten(1))


@pytest.mark.slow
def test_unusual_parameters():
    model = Tied
    for algorithm in (fed.FedSAM(rho=0.2, adaptive=True), fed.SCAFFOLD()):
        assert agree(algorithm, rounds=2, model=lambda: model().double()) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    "loss",
    [
        F.multi_margin_loss,
        pytest.param(lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), marks=pytest.mark.slow),
    ],
    ids=["margin", "smoothed"],
)
def test_other_losses_are_mapped(loss):
    assert agree(fed.FedSAM(), loss=loss) < TOLERANCE[torch.float64]


def test_ignored_labels_do_not_count():
    outputs = torch.randn(3, 5, 4, dtype=torch.float64)
    y = torch.tensor([[0, 1, -100, 2, 3], [-100, -100, 1, 1, 1], [0, 1, 2, 3, 0]])
    found = stacked._cross_entropy(outputs, y)
    assert torch.allclose(
        found, torch.stack([F.cross_entropy(o, t) for o, t in zip(outputs, y, strict=True)]), rtol=1e-14
    )


def tasks_of(n, stored, **options):
    """Three tasks of n samples, in a store or each on its own."""
    work = {"round": 0, "lr": 0.1, "epochs": 2, "batch_size": 3, "shuffle": True, "seed": 5} | options
    pairs = [(torch.arange(n, dtype=torch.float64)[:, None] + 1000 * i, torch.arange(n)) for i in range(3)]
    store = None
    if stored:
        pairs, store = store_of(pairs)
    made = Work(**work, clients=pairs, sizes=[n] * 3, store=store)
    return [Task(i, made, fed.LocalStep()) for i in range(3)]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"batch_size": 1, "epochs": 1}, {"batch_size": 200}], ids=str
)
@pytest.mark.parametrize("n", [1, 7, 100])
def test_a_feed_gives_every_row_the_batches_of_its_own_task(n, options, stored):
    """n = 100 in batches of 1 or 3 is more than one block of batches."""
    tasks = tasks_of(n, stored, **options)
    feed = Feed(tasks)
    for k, batches in enumerate(zip(*(t.batches() for t in tasks), strict=True)):
        for name in (0, 1):
            assert torch.equal(feed.get(k)[name], torch.stack([batch[name] for batch in batches]))


@pytest.mark.parametrize("stored", [False, True])
def test_what_a_feed_has_gathered_goes_with_it(stored):
    """At once: until the garbage collector comes, there would be the samples of many rounds."""
    feed = Feed(tasks_of(100, stored))
    feed.get(0)
    gone = weakref.ref(feed)
    del feed
    assert gone() is None


# --- what is refused ---


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = oracle.smooth_model(torch.float32)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


@pytest.mark.parametrize(
    ("model", "words", "options"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), "draws random numbers", {}),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), "BatchNorm", {"buffers": "keep"}),
        (Branches, "torch.vmap cannot map.*data-dependent control flow", {}),
    ],
)
def test_models_that_cannot_be_stacked_are_refused_with_the_reason(model, words, options):
    options = options | {"rounds": 1, "batch_size": 4}
    with pytest.raises(ValueError, match=f"executor 'vmap' cannot serve here: .*{words}.*executor='auto'"):
        run(fed.FedAvg(), "vmap", 3, model(), sizes=(8, 8), **options)
    taken = run(fed.FedAvg(), "auto", None, model(), sizes=(8, 8), **options)
    assert taken.summary()["executor"] in ("threads", "sequential")


def test_errors_name_the_clients():
    def loss(out, y):
        if out.shape[0] == 4:  # the partial batch of the client with 9 samples
            raise RuntimeError("enough")
        return F.multi_margin_loss(out, y)

    with pytest.raises(fed.ClientError, match="client 1 failed in round 1, local step 1: RuntimeError: enough"):
        run(fed.FedAvg(), "vmap", 3, sizes=(10, 9), batch_size=5, participation=1.0, loss=loss)
