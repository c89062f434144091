"""Row programs in executors: passes against autograd, whole local epochs bit for bit against step by step."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from fastsam import fed, ops
from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.algorithms.fedgsam import SurrogateGap
from fastsam.fed.executors import rowprograms
from fastsam.fed.executors.record import Replays
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam_kernels import native
from fastsam_kernels.rowprograms.program import steps_
from tests.helpers import oracle
from tests.helpers.crosses import one_in
from tests.helpers.emulated_rows import work_of
from tests.helpers.fed_runs import digest, vector
from tests.helpers.places import ROOT
from tests.helpers.stacked_passes import StackedPasses, make_passes, row_pass_of, same
from tests.promises import cases

pytestmark = pytest.mark.skipif(native.why_not("cpu") is not None, reason=f"{native.why_not('cpu')}")


def model_of(activation: Callable[[], nn.Module] = nn.ReLU, *widths: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for i, o in pairwise(widths or (12, 9, 4)) for layer in (nn.Linear(i, o), activation())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def prepare_passes() -> tuple[StackedPasses, Any, Tensor, Tensor]:
    """Return passes of two rows that have run twice, so that they have a row program, with their inputs."""
    passes, form = make_passes(model_of(), F.cross_entropy, 2)
    x, y = torch.randn(2, 5, 12), torch.randint(4, (2, 5))
    for _ in range(2):
        passes.run(form, x, y)
    return passes, form, x, y


@pytest.mark.parametrize(
    ("activation", "loss"),
    one_in(2, [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU], [F.cross_entropy, nn.CrossEntropyLoss()]),
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_dense_classifiers_have_a_row_program(activation: type, loss: Callable[..., Tensor]) -> None:
    for rows, n, widths in ((5, 7, (12, 9, 4)), (1, 16, (12, 40, 33, 10)), (2, 1, (3, 4)), (3, 50, (64, 32, 100))):
        passes, form = make_passes(model_of(activation, *widths), loss, rows)
        x, y = torch.randn(rows, n, widths[0]), torch.randint(widths[-1], (rows, n))
        y[0, 0] = -100 if n > 1 else 0  # a label that does not count
        for _ in range(2):
            losses, grads, _ = same(passes, form, x, y)
        row_pass = row_pass_of(passes, n, x[0], y[0])
        assert row_pass is not None
        single_row_program = row_pass.program([*(t[:1] for t in (*form.leaves, x, y)), *row_pass.constants])[0]
        assert torch.equal(single_row_program[: form.z.shape[1] + 1][-1], losses[0]), "other rows change no bit"
        assert torch.equal(passes.layout.views(single_row_program)[0], grads[0][0])


class Shifted(nn.Module):
    """A number is added to and subtracted from activations."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 0.5) * (x - 2)


@pytest.mark.parametrize(
    "middle",
    [
        nn.LayerNorm(9),
        nn.LayerNorm(9, elementwise_affine=False),
        nn.RMSNorm(9),
        nn.GELU("tanh"),
        nn.Softmax(-1),
        Shifted(),
    ],
    ids=["LayerNorm", "LayerNorm without weights", "RMSNorm", "GELU by tanh", "shares", "numbers"],
)
def test_operations_made_of_others_have_a_row_program(middle: nn.Module) -> None:
    torch.manual_seed(0)
    passes, form = make_passes(nn.Sequential(nn.Linear(12, 9), middle, nn.Linear(9, 4)), F.cross_entropy, 3)
    x, y = torch.randn(3, 7, 12), torch.randint(4, (3, 7))
    for _ in range(2):
        same(passes, form, x, y)
    assert row_pass_of(passes, 7, x[0], y[0]) is not None


class Words(nn.Module):
    """A classifier of texts of 7 words by `read(table, x)`, a vector of 6 numbers each."""

    def __init__(self, read: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.hidden, self.output, self.read = (
            nn.Embedding(11, 6, **options),
            nn.Linear(6, 9),
            nn.Linear(9, 4),
            read,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.gelu(self.hidden(self.read(self.table, x))))


def mean_of_words(table: nn.Embedding, x: Tensor) -> Tensor:
    return table(x).mean(1)


TEXTS: dict[str, nn.Module] = {
    "mean": Words(mean_of_words),
    "sum": Words(lambda table, x: table(x).sum(1)),
    "padding": Words(mean_of_words, padding_idx=2),
    "padding, counted from the end": Words(mean_of_words, padding_idx=-1),
    "word by word": Words(lambda table, x: F.relu(table(x) * 2).mean(1), padding_idx=1),
    "columns": Words(lambda table, x: table(x[:, 0]) + table(x[:, 3])),
    "tied": Words(lambda table, x: F.linear(F.linear(table(x).mean(1), table.weight).tanh(), table.weight.T)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_models_have_a_row_program(name: str) -> None:
    passes, form = make_passes(TEXTS[name], F.cross_entropy, 3)
    for n in (5, 1, 8):
        x, y = torch.randint(11, (3, n, 7)), torch.randint(4, (3, n))
        x[0, :, :4] = 2
        for _ in range(2):
            same(passes, form, x, y)
        row_pass = row_pass_of(passes, n, x[0], y[0])
        assert row_pass is not None
    for index in (11, -1):
        x[1, 2, 3] = index
        with pytest.raises(RuntimeError, match=f"Index {index} is out of bounds"):
            row_pass(*[v.detach() for v in form.leaves], x, y)
        with pytest.raises(IndexError, match="out of range"):
            passes.run(form, x, y)


@pytest.mark.parametrize(
    "model",
    [
        Words(mean_of_words, scale_grad_by_freq=True),
        Words(lambda table, x: table(x.view(len(x), 1, 7, 1)).mean((1, 2, 3))),
        Words(lambda table, x: F.embedding(x % 6, table.weight.T)[..., :6].mean(1)),
        Words(lambda table, x: F.embedding(torch.where(x > 2, x, 0), table.weight).mean(1)),
    ],
    ids=["by frequency", "three dimensions", "another table", "computed indices"],
)
def test_other_lookups_are_replayed_operation_by_operation(model: nn.Module) -> None:
    passes, form = make_passes(model, F.cross_entropy, 3)
    x, y = torch.randint(11, (3, 5, 7)), torch.randint(4, (3, 5))
    for _ in range(3):
        same(passes, form, x, y)
    assert passes.replays.find(3, 5, x[0], y[0]) is not None and row_pass_of(passes, 5, x[0], y[0]) is None


@pytest.mark.parametrize("activation", [nn.ELU, nn.Softplus])
def test_what_has_no_form_is_replayed_operation_by_operation(activation: type) -> None:
    passes, form = make_passes(model_of(activation), F.cross_entropy, 3)
    x, y = torch.randn(3, 5, 12), torch.randint(4, (3, 5))
    for _ in range(2):
        same(passes, form, x, y)
    assert passes.replays.find(3, 5, x[0], y[0]) is not None and row_pass_of(passes, 5, x[0], y[0]) is None
    passes, form = make_passes(model_of().double(), F.cross_entropy, 3)
    x = x.double()
    for _ in range(2):
        same(passes, form, x, y)
    assert passes.replays.find(3, 5, x[0], y[0]) is not None
    assert row_pass_of(passes, 5, x[0], y[0]) is None, "row programs are float32"


@pytest.mark.parametrize(("width", "fits"), [(32, True), (128, True), (200, False), (1024, False)])
def test_on_a_gpu_a_row_fits_the_memory_of_its_block(width: int, fits: bool, monkeypatch: MonkeyPatch) -> None:
    """A row of an MLP 64-width-10 and a batch of 16, with 227 KB of shared memory in a block."""
    make = ops.row_program
    monkeypatch.setattr(rowprograms, "shared_memory", lambda device: 227 * 2**10)
    monkeypatch.setattr(ops, "row_program", lambda *operands: make(*operands[:-1]))  # on the CPU
    passes, form = make_passes(model_of(nn.ReLU, 64, width, 10), F.cross_entropy, 2)
    passes.replays.make_row_pass = partial(rowprograms.row_pass, passes.layout, torch.device("cuda"))
    x, y = torch.randn(2, 16, 64), torch.randint(10, (2, 16))
    for _ in range(3):
        same(passes, form, x, y)
    assert (row_pass_of(passes, 16, x[0], y[0]) is not None) is fits


def test_labels_that_are_no_class() -> None:
    passes, form, x, y = prepare_passes()
    row_pass = row_pass_of(passes, 5, x[0], y[0])
    for label in (4, -1, -101):
        y[1, 3] = label
        with pytest.raises(RuntimeError, match=f"Target {label} is out of bounds"):
            row_pass(*[v.detach() for v in form.leaves], x, y)
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            passes.run(form, x, y)


def test_inputs_that_do_not_fit() -> None:
    passes, form, x, y = prepare_passes()
    result = row_pass_of(passes, 5, x[0], y[0])
    leaves = [v.detach() for v in form.leaves]
    for bad_x in (x[:, :4], x.double(), x.mT.contiguous().mT, x[:1]):
        with pytest.raises(RuntimeError, match="another shape, order of memory or dtype"):
            result.program([*leaves, bad_x, y, *result.constants])
    with pytest.raises(RuntimeError, match="inputs, got 2"):
        result.program([x, y])
    with FakeTensorMode(allow_non_fake_inputs=True):
        records = result.program([torch.empty(7, 5, 12)])
    assert records.shape == (7, result.program([*leaves, x, y, *result.constants]).shape[1]), "what a compiler is told"


# --- local epochs ---


def test_samples_and_labels_that_are_not_there() -> None:
    passes, form = make_passes(model_of(), F.cross_entropy, 2)
    x, y, indices = torch.randn(9, 12), torch.randint(4, (9,)), torch.arange(10).view(2, 5) % 9
    passes.run(form, x[indices], y[indices])
    assert row_pass_of(passes, 5, x, y) is None, "compared with the plain pass once"
    passes.run(form, x[indices], y[indices])
    row_pass, losses = row_pass_of(passes, 5, x, y), torch.zeros(2, dtype=torch.float64)

    failures = torch.zeros(2, 3, dtype=torch.int64)

    def take(x: Tensor, y: Tensor, indices: Tensor, batch: int = 5, work: Tensor | None = None) -> list[list[int]]:
        work = work_of(2, 5, 1) if work is None else work
        operands = ([row_pass.program], batch, form.leaves, row_pass.constants, x, y, indices, work, form.z, None)
        steps_(*operands, form.layout.table, form.hparams, losses, failures)
        return failures.tolist()

    indices = indices.view(-1)
    assert take(x, y, indices) == [[0, 0, 0]] * 2
    for place in (9, -1):
        assert take(x, y, torch.where(indices == 7, place, indices)) == [[0, 0, 0], [2, place, 0]]
    before, label = form.z.clone(), y.clone()
    label[7] = 4
    assert take(x, label, indices) == [[0, 0, 0], [1, 4, 0]], "only a row's own label counts"
    assert torch.equal(form.z[1], before[1]) and losses.isfinite().all(), "a row stops before it updates"
    for bad in (
        (x[:, :4], y, indices, 5), (x, y, indices, 4), (x, y, indices.view(2, 5), 5), (x.double(), y, indices, 5),
        (x, y, indices, 5, work_of(2, 5, 2)), (x, y, indices, 5, work_of(3, 5, 1)),
        (x, y, indices, 5, torch.tensor([(0, 0, 5, 1), (0, 5, 5, 1)])), (x, y, indices, 5, work_of(2, 3, 1)),
        (x, y, indices, 5, torch.tensor([(0, -1, 5, 1), (1, 5, 5, 1)])),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"contiguous|work must|batches of|failures must"):
            take(*bad)


STEPS = (
    "fedavg", "fedprox", "feddyn", "scaffold", "fedcm", "fedsam", "mofedsam", "fedgamma", "fedlesam", "fedsmoo",
    "fedspeed", "fedgsam", "fedsam-asam", "fedmoswa",
)  # fmt: skip
OPTIONS = (
    {}, {"momentum": 0.3, "weight_decay": 0.01}, {"clip_norm": 0.05, "weight_decay": 0.01},
    {"clip_norm": 0.05, "clip_scope": "linear", "momentum": 0.5}, {"shuffle": False, "local_epochs": 2},
    {"optimizer": "Adam", "lr": 0.01}, {"optimizer": "Lion", "lr": 0.01, "drop_last": True},
    {"local_steps": 7, "local_epochs": 1}, {"optimizer": "Adam", "lr": 0.01, "optimizer_state": "keep"},
)  # fmt: skip


def train(method: str, sizes: tuple[int, ...] = (23, 23, 23, 8, 8, 1, 30), **options: object) -> fed.Result:
    data = [(x.view(len(x), -1), y) for x, y in oracle.ragged_clients(torch.float32, sizes)]
    base = {"rounds": 2, "participation": 0.9, "batch_size": 5, "local_epochs": 2} | options
    model = nn.Sequential(nn.Linear(data[0][0].shape[1], 9), nn.ReLU(), nn.Linear(9, 4))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p).roll(i))
    return fed.run(model, data, cases.make_algorithm(method), executor="vmap", **base)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param(method, options, marks=[] if (i - 2 * j) % (6 * len(OPTIONS)) == 0 else pytest.mark.slow)
        for i, method in enumerate(STEPS)
        for j, options in enumerate(OPTIONS)
    ],
    ids=str,
)
def test_epochs_have_the_bits_of_single_steps(method: str, options: dict, monkeypatch: MonkeyPatch) -> None:
    calls, train_ = [], RowSteps._train

    def count(self: RowSteps, group: Any, *operands: Any) -> None:
        calls.append(max(count for count, *_ in group.values()))
        train_(self, group, *operands)

    monkeypatch.setattr(RowSteps, "_train", count)
    native_ = digest(train(method, slots=3, **options))
    slow_names = "fedsmoo", "fedgsam", "fedmoswa"
    assert (max(calls, default=0) > 1) == (method not in slow_names), "duals, gaps and changing rates go step by step"
    assert native_ == digest(train(method, slots=5, **options)), "rows are computed by themselves"
    monkeypatch.setattr(Replays, "find", lambda *a: None)
    assert native_ == digest(train(method, slots=3, **options))


def texts(method: str, slots: int, wrong: bool = False, **options: Any) -> fed.Result:
    """Train clients with unequal numbers of texts and unequal vocabularies. One index of client 3 may be `wrong`."""
    draw = torch.Generator().manual_seed(0)
    data = [
        (torch.randint(3 + i, (n, 7), generator=draw), torch.randint(4, (n,), generator=draw))
        for i, n in enumerate((23, 8, 5, 17, 1, 30))
    ]
    if wrong:
        data[3][0][10, 2] = 11
    return fed.run(
        Words(mean_of_words, padding_idx=2), data, fed.algorithms.registry[method](), executor="vmap", rounds=3,
        batch_size=5, local_epochs=2, slots=slots, cohort=6, test=data[0], **options,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["fedavg", "fedsam", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_epochs_of_texts_have_the_bits_of_single_steps(method: str, monkeypatch: MonkeyPatch) -> None:
    counts, train_ = [], RowSteps._train

    def count(self: RowSteps, group: Any, *operands: Any) -> None:
        counts.append(max(count for count, *_ in group.values()))
        train_(self, group, *operands)

    monkeypatch.setattr(RowSteps, "_train", count)
    native_ = vector(texts(method, 3).model)
    assert max(counts) > 1 and torch.equal(native_, vector(texts(method, 5).model))
    monkeypatch.setattr(Replays, "find", lambda *a: None)
    assert torch.equal(native_, vector(texts(method, 3).model))


def test_texts_of_other_lengths_have_other_row_programs() -> None:
    """Texts of two lengths are not in a store."""
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randint(11, (12, n), generator=draw), torch.arange(12) % 4) for n in (7, 9, 7, 9)]
    one, two = (
        vector(
            fed.run(Words(mean_of_words), data, fed.FedSAM(), executor=executor, batch_size=4, cohort=4, rounds=3).model
        )
        for executor in ("sequential", "vmap")
    )
    assert torch.allclose(one, two, rtol=0, atol=1e-5)


def test_an_index_outside_of_a_table_excludes_its_client_alone() -> None:
    with pytest.raises(fed.ClientError, match=r"client 3 failed in round 1.*: Index 11 is out of bounds"):
        texts("fedavg", 3, wrong=True)
    result = texts("fedavg", 3, wrong=True, on_client_error="exclude")
    assert [entry["client"] for record in result.history for entry in record["excluded"]] == [3, 3, 3]
    assert vector(result.model).isfinite().all()


def with_wrong_label(on_client_error: str, joins: bool = True) -> fed.Result:
    """Train three clients, and from round 3 on a fourth, if it `joins`. Its ninth label changes to a number that is
    not a class. It changes after round 1 began, because wrong labels are refused before."""
    draw = torch.Generator().manual_seed(1)
    data = [(torch.randn(12, 6, generator=draw), torch.randint(4, (12,), generator=draw)) for _ in range(4)]
    train_ = RowSteps._train

    def spoil(self: RowSteps, *operands: Any) -> None:
        self.store.y[self.store.offsets[1] + 8] = 9
        train_(self, *operands)

    def sampler(round: int, generator: torch.Generator) -> list[int]:
        return [0, 1, 2, 3] if joins and round > 1 else [0, 2, 3]

    with MonkeyPatch.context() as patch:
        patch.setattr(RowSteps, "_train", spoil)
        return fed.run(
            model_of(nn.ReLU, 6, 5, 4), data, fed.FedSAM(), executor="vmap", rounds=4, batch_size=5, local_epochs=2,
            sampler=sampler, on_client_error=on_client_error,
        )  # fmt: skip


def test_a_wrong_label_excludes_its_client_alone() -> None:
    """Clients of one native call: the others train on, with the bits of a round without it."""
    result = with_wrong_label("exclude")
    (excluded,) = result.history[-1]["excluded"]
    assert excluded["client"] == 1 and "IndexError: Target 9 is out of bounds." in excluded["reason"]
    assert torch.equal(vector(result.model), vector(with_wrong_label("exclude", joins=False).model))
    with pytest.raises(fed.ClientError, match=r"client 1 failed in round 3, local step [012345]: .*Target 9 is out"):
        with_wrong_label("raise")


@pytest.mark.parametrize("method", [pytest.param("fedsam", marks=pytest.mark.slow), "fedsmoo"])
def test_passes_work_without_row_programs(method: str, monkeypatch: MonkeyPatch) -> None:
    options = {"sizes": (23, 23, 8, 1), "rounds": 3, "local_epochs": 1}
    with_them = vector(train(method, **options).model)
    monkeypatch.setattr(rowprograms, "maker", lambda setup: None)
    monkeypatch.setattr(ops, "row_program", lambda *a: pytest.fail("there is another way in"))
    assert torch.allclose(vector(train(method, **options).model), with_them, rtol=0, atol=2e-5)


def test_two_threads_change_no_bit() -> None:
    passes, form = make_passes(model_of(nn.ReLU, 200, 300, 10), F.cross_entropy, 4)
    x, y = torch.randn(4, 32, 200), torch.randint(10, (4, 32))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [passes.replays.run(form.leaves, x, y) for _ in range(3)][-1]
        torch.set_num_threads(2)
        result = passes.replays.run(form.leaves, x, y)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(result[0], expected[0]) and all(map(torch.equal, result[1], expected[1]))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set(isa: str) -> None:
    """Tests of instructions and passes with the instruction sets of older processors."""
    selection = "elementwise or sums or softmax or dense_classifiers or numbers_end"
    instructions = str(ROOT / "tests" / "ops" / "test_row_program.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, instructions, "-k", selection]
    process = subprocess.run(command, env=os.environ | {"FASTSAM_ISA": isa}, capture_output=True, text=True)
    assert process.returncode == 0 and "15 passed" in process.stdout, process.stdout[-2000:]


# --- Row programs and unusual models, labels and words: the plain numbers, or another way to them.


def soft(scores: Tensor, y: Tensor) -> Tensor:
    """Return a loss of labels `[batch]` that are numbers; it has a row program."""
    return -(scores.log_softmax(1) * y.unsqueeze(1)).sum(1).mean()


class Mixed(fed.FedAvg):
    """A surrogate gap in the first round, and then a native step with the same numbers."""

    def local_step(self, server: State, client: State, round: Round) -> fed.Step:
        return SurrogateGap(rho=0.1, b=-0.4) if round.index == 0 else fed.SAM(rho=0.1, b=-0.4)


@pytest.mark.parametrize(
    ("algorithm", "loss", "options"),
    [(cases.make_algorithm("fedsam"), soft, {"local_epochs": 2}), (Mixed(), F.cross_entropy, {})],
    ids=["labels", "gap"],
)
def test_numbers_as_labels_and_a_surrogate_gap_train_as_by_turns(algorithm: Any, loss: Any, options: Any) -> None:
    torch.manual_seed(0)
    sizes = (13, 13, 8, 1) if loss is soft else (12,) * 4
    data = [(torch.randn(n, 6), torch.rand(n) if loss is soft else torch.randint(3, (n,))) for n in sizes]
    options = {"rounds": 3, "batch_size": 5, "participation": 1.0, "loss": loss} | options
    ends = []
    for executor in ("sequential", "vmap"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        ends.append(vector(fed.run(model, data, algorithm, executor=executor, **options).model))
    assert torch.allclose(*ends, rtol=0, atol=2e-5 if loss is soft else 1e-6)


def test_steps_check_the_memory_beside_the_weights() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    passes, form = make_passes(model, F.cross_entropy, 2)
    x, y, indices = torch.randn(9, 6), torch.randint(3, (9,)), torch.arange(8).view(2, 4)
    for _ in range(2):
        passes.run(form, x[indices], y[indices])
    row_pass, failures = row_pass_of(passes, 4, x, y), torch.zeros(2, 3, dtype=torch.int64)
    far, long, group = (form.layout.table.clone() for _ in range(3))
    far[0, 0], long[0, 1], group[0, 2] = form.z.shape[1], 2**62, 1
    narrow, sums = form.z[:, :16].contiguous(), torch.zeros(2, dtype=torch.float64)

    def take(z: Tensor = form.z, w: Tensor | None = None, table: Tensor = form.layout.table, **fields: Tensor) -> None:
        operands = ([row_pass.program], 4, form.leaves, row_pass.constants, x, y, indices.view(-1), work_of(2, 4, 1))
        steps_(*operands, z, w, table, form.hparams, sums.clone(), failures, **fields)

    take()
    for arguments in (
        {"z": narrow}, {"z": form.z.double()}, {"z": torch.cat([form.z, form.z], 1)}, {"w": narrow, "sumsq": sums},
        {"state": [narrow]}, {"results": (narrow, form.z, sums)}, {"q": narrow}, {"shift": narrow}, {"table": far},
        {"table": long}, {"table": group},
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"must be (a )?f|table (must have|has|names)"):
            take(**arguments)
