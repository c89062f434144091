"""Row programs: each instruction against float64, passes against autograd, whole local epochs bit for bit against step
by step."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from fastsam import fed, ops
from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.executors import rowprograms
from fastsam.fed.executors.replay import Replays
from fastsam.fed.executors.rowprograms.row_pass import RowPass
from fastsam.fed.step.local_update import Direction, LocalUpdate
from fastsam_kernels import native
from fastsam_kernels.rowprograms.instructions import FIRST_INPUT, OUT, Code, Input, Instruction, NoFormError, Operand
from tests.helpers import fed_cases as cases
from tests.helpers import oracle
from tests.helpers.crosses import one_in
from tests.helpers.fed_runs import digest
from tests.helpers.stacked_passes import same, stacked

pytestmark = pytest.mark.skipif(native.why_not("cpu") is not None, reason=f"{native.why_not('cpu')}")

Formula = Callable[..., Tensor]
# Number of operands; formula of a, b, c and the number x in float64; range of the operands; roundings of the result,
# relative to it and to the operands' sum.
ELEMENTWISE: dict[Code, tuple[int, Formula, float, float]] = {
    Code.COPY: (1, lambda a, x: a, -2.0, 2.0),
    Code.RELU: (1, lambda a, x: a.relu(), -2.0, 2.0),
    Code.NEGATE: (1, lambda a, x: -a, -2.0, 2.0),
    Code.EXPONENTIAL: (1, lambda a, x: a.exp(), -80.0, 80.0),
    Code.LOGARITHM: (1, lambda a, x: a.log(), 1e-3, 50.0),
    Code.ROOT: (1, lambda a, x: a.sqrt(), 0.0, 50.0),
    Code.INVERSE_ROOT: (1, lambda a, x: a.rsqrt(), 1e-3, 50.0),
    Code.MAGNITUDE: (1, lambda a, x: a.abs(), -2.0, 2.0),
    Code.TANH: (1, lambda a, x: a.tanh(), -5.0, 5.0),
    Code.SIGMOID: (1, lambda a, x: a.sigmoid(), -30.0, 30.0),
    Code.SCALE: (1, lambda a, x: a * x, -2.0, 2.0),
    Code.POWER: (1, lambda a, x: a**x, 0.1, 3.0),
    Code.ADD: (2, lambda a, b, x: a + x * b, -2.0, 2.0),
    Code.MULTIPLY: (2, lambda a, b, x: a * b, -2.0, 2.0),
    Code.DIVIDE: (2, lambda a, b, x: a / b, 0.5, 2.0),
    Code.THRESHOLD_BACKWARD: (2, lambda a, b, x: torch.where(b <= x, 0.0, a), -2.0, 2.0),
    Code.TANH_BACKWARD: (2, lambda a, b, x: a * (1 - b * b), -1.0, 1.0),
    Code.SIGMOID_BACKWARD: (2, lambda a, b, x: a * (1 - b) * b, 0.0, 1.0),
    Code.MULTIPLY_ADD: (3, lambda a, b, c, x: a + x * b * c, -2.0, 2.0),
}
ROUNDING = 8 * 2**-24


def program(instructions: list[Instruction], inputs: list[Tensor], width: int) -> Tensor:
    given = [Input(tuple(t.shape[1:]), tuple(t.stride()[1:]), t.dtype == torch.int64) for t in inputs]
    return ops.row_program(instructions, given, 0, width)(inputs)


def operand(i: int, t: Tensor, shape: tuple[int, ...]) -> Operand:
    return Operand(FIRST_INPUT + i, 0, t.expand(shape).stride()[1:])


@st.composite
def tensors(draw, rows: int, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    """`[rows, *shape]`, or broadcast to it in some dimensions; in any order of memory."""
    sizes = [1 if draw(st.booleans()) else n for n in shape]
    order = draw(st.permutations(range(len(shape))))
    made = torch.empty(rows, *(sizes[d] for d in order)).uniform_(low, high)
    back = [order.index(d) for d in range(len(shape))]
    return made.permute(0, *(1 + d for d in back))


SHAPES = st.lists(st.sampled_from([1, 2, 3, 7, 16, 17, 33]), min_size=1, max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(ELEMENTWISE)), st.integers(1, 3), SHAPES, st.data())
def test_elementwise(code: Code, rows: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    count, formula, low, high = ELEMENTWISE[code]
    read = [data.draw(tensors(rows, shape, low, high)) for _ in range(count)]
    x = data.draw(st.sampled_from([2.0, -0.5, 1.5])) if code is not Code.THRESHOLD_BACKWARD else 0.0
    full = (rows, *shape)
    out = torch.empty(full)
    made = Instruction(
        code, shape, Operand(OUT, 0, out.stride()[1:]), *(operand(i, t, full) for i, t in enumerate(read)), number=x
    )
    found = program([made.flattened()], read, out[0].numel()).view(full)
    exact = formula(*(t.double() for t in read), x).expand(full)
    size = sum(t.double().abs() for t in read) + exact.abs()
    assert bool(((found - exact).abs() <= ROUNDING * size.expand(full)).all())


def test_elementwise_where_numbers_end() -> None:
    ends = torch.tensor([[0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-42, 3e38, -3e38, 88.7, -103.0]])
    for code in (Code.EXPONENTIAL, Code.LOGARITHM, Code.RELU, Code.SIGMOID, Code.TANH, Code.MAGNITUDE, Code.ROOT):
        formula, n = ELEMENTWISE[code][1], ends.numel()
        found = program([Instruction(code, (n,), Operand(OUT, 0, (1,)), Operand(FIRST_INPUT, 0, (1,)))], [ends], n)
        flushed = torch.where(ends.abs() < 2.0**-126, 0.0, ends)  # no denormals: trained classifiers would be slow
        assert torch.allclose(found, formula(flushed, 0.0), rtol=1e-6, atol=1e-37, equal_nan=True), code.name


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), SHAPES, st.data())
def test_sums(rows: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    a = data.draw(tensors(rows, shape, -1.0, 1.0))
    over = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    kept = [1 if d in over else n for d, n in enumerate(shape)]
    out = torch.empty(rows, *kept)
    strides = tuple(0 if d in over else s for d, s in enumerate(out.stride()[1:]))
    made = Instruction(Code.SUM, shape, Operand(OUT, 0, strides), operand(0, a, (rows, *shape)))
    found = program([made.flattened()], [a], out[0].numel()).view(out.shape)
    exact = a.double().expand(rows, *shape)
    dims = [1 + d for d in over]
    bound = exact.abs().sum(dims, keepdim=True) * (exact[0].numel() + 1) * 2**-24
    assert bool(((found - exact.sum(dims, keepdim=True)).abs() <= bound).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), SHAPES.filter(lambda s: len(s) < 4), st.integers(0, 2), st.data())
def test_log_softmax_and_its_gradient(rows: int, shape: tuple[int, ...], dim: int, data: st.DataObject) -> None:
    dim = min(dim, len(shape) - 1)
    a = data.draw(tensors(rows, shape, -20.0, 20.0)).expand(rows, *shape)
    g = data.draw(tensors(rows, shape, -1.0, 1.0)).expand(rows, *shape)
    exact = a.double().requires_grad_()
    outputs = exact.log_softmax(1 + dim)
    (gradient,) = torch.autograd.grad(outputs, exact, g.double())
    place = Operand(OUT, 0, torch.empty(rows, *shape).stride()[1:])
    reads = [operand(i, t, (rows, *shape)) for i, t in enumerate((a, g, outputs.detach().float()))]
    if (dim, len(shape)) in ((0, 3), (2, 3)):
        with pytest.raises(NoFormError, match="more than one dimension"):
            Instruction(Code.LOG_SOFTMAX, shape, place, reads[0]).by_classes(dim)
        return
    forward = Instruction(Code.LOG_SOFTMAX, shape, place, reads[0]).by_classes(dim)
    found = program([forward], [a], a[0].numel()).view(a.shape)
    assert torch.allclose(found.double(), outputs, rtol=1e-6, atol=3e-6)
    backward = Instruction(Code.LOG_SOFTMAX_BACKWARD, shape, place, reads[1], reads[2]).by_classes(dim)
    found = program([backward], [a, g, outputs.detach().float()], a[0].numel()).view(a.shape)
    assert torch.allclose(found.double(), gradient, rtol=1e-5, atol=3e-5)


def model_of(activation: Callable[[], nn.Module] = nn.ReLU, *widths: int) -> nn.Module:
    widths, layers = widths or (12, 9, 4), []
    torch.manual_seed(0)
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), activation()]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


@pytest.mark.parametrize(
    ("activation", "loss"),
    one_in(2, [nn.ReLU, nn.Tanh, nn.Sigmoid], [F.cross_entropy, nn.CrossEntropyLoss()]),
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_dense_classifiers_have_a_row_program(activation: type, loss: Callable[..., Tensor]) -> None:
    for rows, n, widths in ((5, 7, (12, 9, 4)), (1, 16, (12, 40, 33, 10)), (2, 1, (3, 4)), (3, 50, (64, 32, 100))):
        passes, form = stacked(model_of(activation, *widths), loss, rows)
        x, y = torch.randn(rows, n, widths[0]), torch.randint(widths[-1], (rows, n))
        y[0, 0] = -100 if n > 1 else 0  # a label that does not count
        for _ in range(2):
            losses, grads, _ = same(passes, form, x, y)
        assert passes.replays.has_row_pass(x, y)
        known = passes.replays.row_pass(n, x[0], y[0])
        alone = known.program([*(t[:1] for t in (*form.leaves, x, y)), *known.others])[0]
        assert torch.equal(alone[: form.z.shape[1] + 1][-1], losses[0]), "other rows change no bit"
        assert torch.equal(passes.layout.views(alone)[0], grads[0][0])


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU])
def test_what_has_no_form_is_replayed_operation_by_operation(activation: type) -> None:
    passes, form = stacked(model_of(activation), F.cross_entropy, 3)
    x, y = torch.randn(3, 5, 12), torch.randint(4, (3, 5))
    same(passes, form, x, y)
    assert not passes.replays.has_row_pass(x, y)
    passes, form = stacked(model_of().double(), F.cross_entropy, 3)
    same(passes, form, x.double(), y)
    assert not passes.replays.has_row_pass(x.double(), y), "row programs are float32"


def test_labels_that_are_no_class() -> None:
    passes, form = stacked(model_of(), F.cross_entropy, 2)
    x, y = torch.randn(2, 5, 12), torch.randint(4, (2, 5))
    for _ in range(2):
        passes.run(form, x, y)
    for wrong in (4, -1, -101):
        y[1, 3] = wrong
        with pytest.raises(RuntimeError, match=f"Target {wrong} is out of bounds"):
            passes.run(form, x, y)


def test_inputs_that_do_not_fit() -> None:
    passes, form = stacked(model_of(), F.cross_entropy, 2)
    x, y = torch.randn(2, 5, 12), torch.randint(4, (2, 5))
    for _ in range(2):
        passes.run(form, x, y)
    found = passes.replays.row_pass(5, x[0], y[0])
    leaves = [v.detach() for v in form.leaves]
    for bad in (x[:, :4], x.double(), x.mT.contiguous().mT, x[:1]):
        with pytest.raises(RuntimeError, match="another shape, order of memory or dtype"):
            found.program([*leaves, bad, y, *found.others])
    with pytest.raises(RuntimeError, match="inputs, got 2"):
        found.program([x, y])
    with FakeTensorMode(allow_non_fake_inputs=True):
        seen = found.program([torch.empty(7, 5, 12)])
    assert seen.shape == (7, found.program([*leaves, x, y, *found.others]).shape[1]), "what a compiler is told"


# --- local epochs ---


def test_samples_and_labels_that_are_not_there() -> None:
    passes, form = stacked(model_of(), F.cross_entropy, 2)
    x, y, wanted = torch.randn(9, 12), torch.randint(4, (9,)), torch.arange(10).view(2, 5) % 9
    passes.run(form, x[wanted], y[wanted])
    assert passes.replays.row_pass(5, x, y) is None, "compared with the plain pass once"
    passes.run(form, x[wanted], y[wanted])
    known, losses = passes.replays.row_pass(5, x, y), torch.zeros(2, dtype=torch.float64)

    def take(x: Tensor, y: Tensor, wanted: Tensor, batch: int = 5) -> None:
        known.program.steps_(
            form.leaves, known.others, x, y, wanted, batch, form.z, None, form.layout.table, form.hparams, losses
        )

    take(x, y, wanted)
    for place in (9, -1):
        with pytest.raises(RuntimeError, match="places in x and y, 0 to 8"):
            take(x, y, torch.where(wanted == 3, place, wanted))
    with pytest.raises(RuntimeError, match="Target 4 is out of bounds"):
        take(x, torch.full_like(y, 4), wanted)
    for bad in ((x[:, :4], y, wanted, 5), (x, y, wanted, 4), (x, y, wanted[:1], 5), (x.double(), y, wanted, 5)):
        with pytest.raises(RuntimeError, match=r"contiguous|wanted must be|batches of another shape"):
            take(*bad)


STEPS = (
    "fedavg", "fedprox", "feddyn", "scaffold", "fedcm", "fedsam", "mofedsam", "fedgamma", "fedlesam", "fedsmoo",
    "fedspeed", "fedgsam", "fedsam-asam", "fedmoswa",
)  # fmt: skip
OPTIONS = (
    {}, {"momentum": 0.3, "weight_decay": 0.01}, {"clip_norm": 0.05, "weight_decay": 0.01},
    {"clip_norm": 0.05, "clip_scope": "linear", "momentum": 0.5}, {"shuffle": False, "local_epochs": 1},
)  # fmt: skip


def trained(method: str, slots: int, **options: object) -> str:
    data = [(x.view(len(x), -1), y) for x, y in oracle.ragged_clients(torch.float32, (23, 23, 23, 8, 8, 1, 30))]
    base = {"rounds": 2, "participation": 0.9, "batch_size": 5, "local_epochs": 2} | options
    model = nn.Sequential(nn.Linear(data[0][0].shape[1], 9), nn.ReLU(), nn.Linear(9, 4))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p).roll(i))
    return digest(fed.run(model, data, cases.ours(method), executor="vmap", slots=slots, **base))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param(method, options, marks=[] if (i - 2 * j) % (6 * len(OPTIONS)) == 0 else pytest.mark.slow)
        for i, method in enumerate(STEPS)
        for j, options in enumerate(OPTIONS)
    ],
    ids=str,
)
def test_epochs_have_the_bits_of_single_steps(
    method: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, train_ = [], RowPass.train_
    monkeypatch.setattr(
        RowPass,
        "train_",
        lambda self, blocks, form: (taken.append(blocks[0].alike_steps[0]), train_(self, blocks, form)),
    )
    native_ = trained(method, 3, **options)
    alone = "fedsmoo", "fedgsam", "fedmoswa"
    assert (max(taken, default=0) > 1) == (method not in alone), "duals, gaps and changing rates go step by step"
    assert native_ == trained(method, 5, **options), "rows are computed by themselves"
    monkeypatch.setattr(Replays, "row_pass", lambda *a: None)
    assert native_ == trained(method, 3, **options)


def weights(method: str) -> Tensor:
    data = [(x.view(len(x), -1), y) for x, y in oracle.ragged_clients(torch.float32, (23, 23, 8, 1))]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(data[0][0].shape[1], 9), nn.ReLU(), nn.Linear(9, 4))
    done = fed.run(model, data, cases.ours(method), executor="vmap", rounds=3, participation=0.9, batch_size=5)
    return torch.cat([p.detach().flatten() for p in done.model.parameters()])


@pytest.mark.parametrize("method", [pytest.param("fedsam", marks=pytest.mark.slow), "fedsmoo"])
def test_all_else_works_without_them(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one way in closed."""
    with_them = weights(method)
    monkeypatch.setattr(rowprograms, "maker", lambda setup: None)
    monkeypatch.setattr(ops, "row_program", lambda *a: pytest.fail("there is another way in"))
    assert torch.allclose(weights(method), with_them, rtol=0, atol=2e-5)


def test_two_threads_change_no_bit() -> None:
    passes, form = stacked(model_of(nn.ReLU, 200, 300, 10), F.cross_entropy, 4)
    x, y = torch.randn(4, 32, 200), torch.randint(10, (4, 32))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [passes.replays.run(form.leaves, x, y) for _ in range(3)][-1]
        torch.set_num_threads(2)
        found = passes.replays.run(form.leaves, x, y)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set(isa: str) -> None:
    """The tests above with the instruction sets of older processors."""
    chosen = "elementwise or sums or softmax or dense_classifiers or numbers_end"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen],
        env=os.environ | {"FASTSAM_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "11 passed" in done.stdout, done.stdout[-2000:]


# --- Row programs and unusual models, labels and words: the plain numbers, or another way to them.


def soft(scores: Tensor, y: Tensor) -> Tensor:
    """Return a loss of labels `[batch]` that are numbers; it has a row program."""
    return -(scores.log_softmax(1) * y.unsqueeze(1)).sum(1).mean()


def test_labels_that_are_numbers_train_like_one_client_after_the_other() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(n, 6), torch.rand(n)) for n in (13, 13, 8, 1)]
    ends = []
    for executor in ("sequential", "vmap"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        fedsam = cases.ours("fedsam")
        done = fed.run(
            model, data, fedsam, executor=executor, loss=soft, rounds=3, batch_size=5, local_epochs=2, participation=1.0
        )
        ends.append(torch.cat([p.flatten() for p in done.model.state_dict().values()]))
    assert torch.allclose(*ends, rtol=0, atol=2e-5)


class Mixed(fed.FedAvg):
    """A surrogate gap in the first round, and then the same numbers without one."""

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        gap = {"surrogate_gap": 0.4} if round.index == 0 else {"clean_weight": -0.4}
        return LocalUpdate(Direction.GRADIENT, rho=0.1, **gap)


def test_a_surrogate_gap_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(12, 6), torch.randint(3, (12,))) for _ in range(4)]
    ends = []
    for executor in ("sequential", "vmap"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        done = fed.run(model, data, Mixed(), executor=executor, rounds=3, batch_size=5, participation=1.0)
        ends.append(torch.cat([p.flatten() for p in done.model.state_dict().values()]))
    assert torch.allclose(*ends, rtol=0, atol=1e-6)


# --- words of other writers ---

N = 20  # elements of every tensor below


def words_of(change: Callable[[dict[str, list[int]]], object] = lambda parts: None) -> list[int]:
    """A program of one instruction, `out = a * x` of an input `[rows, N]`, where `change` changes its parts."""
    parts: dict[str, list[int]] = {
        "head": [0, N, N, 2],
        "inputs": [*Input((N,), (1,)).words(), *Input((N,), (1,), labels=True).words()],
        "instruction": Instruction(
            Code.SCALE, (N,), Operand(OUT, 0, (1,)), Operand(FIRST_INPUT, 0, (1,)), number=2.0
        ).words(),
    }
    change(parts)
    return [*parts["head"], *parts["inputs"], *parts["instruction"]]


def put(part: str, at: int, word: int) -> Callable[[dict[str, list[int]]], object]:
    return lambda parts: parts[part].__setitem__(at, word)


def add(words: list[int]) -> int:
    return torch.ops.fastsam.row_program(torch.tensor(words))


# words of an instruction: the innermost size; base, offset and four strides of each operand
SIZE, OUT_AT, A_AT, B_AT = 4, 5, 11, 17
EACH = 30  # words of an instruction
MANY = 2**62
# Words of the operation, its size, operands' offsets, strides and bases; words of the memory, and of the inputs.
OUTSIDE = [
    *[put("instruction", 0, word) for word in (-1, len(Code), MANY)],
    *[put("instruction", SIZE, word) for word in (N + 1, 0, -1, MANY)],
    *[put("instruction", at + 1, word) for at in (OUT_AT, A_AT) for word in (1, -1, MANY)],
    *[put("instruction", at + 5, word) for at in (OUT_AT, A_AT, B_AT) for word in (2, -1, MANY)],
    *[put("instruction", OUT_AT, word) for word in (-1, 0, 2, MANY)],
    *[put("instruction", A_AT, word) for word in (-2, 0, 3, 4, MANY)],
    *[put("head", 1, word) for word in (N - 1, -1)],
    *[put("head", at, -1) for at in (0, 2)],
    *[put("inputs", at, word) for at in (3, 4) for word in (0, -1, MANY)],
]


def test_words_that_leave_their_memory_are_refused() -> None:
    assert add(words_of()) >= 0
    for change in OUTSIDE:
        with pytest.raises(RuntimeError, match="row program"):
            add(words_of(change))
    whole = words_of()
    for cut in range(len(whole)):
        if cut != len(whole) - EACH:  # a program of no instructions
            with pytest.raises(RuntimeError, match="row program"):
                add(whole[:cut])


def test_operations_with_labels_stay_within_their_memory() -> None:
    scores, labels = Input((4, 3), (3, 1)), Input((3,), (1,), labels=True)
    place, read = Operand(FIRST_INPUT, 0, (0, 3, 1)), Operand(FIRST_INPUT + 1, 0, (0, 0, 1))
    fine = Instruction(Code.NLL, (1, 4, 3), Operand(OUT, 0, (0, 0, 1)), place, read)
    ops.row_program([fine], [scores, labels], 0, 3)
    for change in (
        {"a": replace(place, strides=(0, 4, 1))},
        {"b": replace(read, strides=(0, 0, 2))},
        {"b": replace(read, base=FIRST_INPUT)},
        {"b": Operand()},
        {"a": replace(place, base=FIRST_INPUT + 1)},
        {"out": replace(fine.out, offset=1)},
    ):
        with pytest.raises(RuntimeError, match="outside of its memory"):
            ops.row_program([replace(fine, **change)], [scores, labels], 0, 3)
    dense = Instruction(Code.PRODUCT, (4, 3, 4), Operand(OUT, 0, (4, 1)), replace(place, strides=(3, 1)))
    dense = replace(dense, b=replace(place, strides=(1, 3)))
    ops.row_program([dense], [scores], 0, 16)
    with pytest.raises(RuntimeError, match="outside of its memory"):
        ops.row_program([dense], [scores], 0, 15)


def test_a_softmax_that_is_the_same_along_a_dimension() -> None:
    g, outputs = torch.randn(2, 3, 5), torch.randn(2, 3, 1).log_softmax(1)
    given = [Input((3, 5), (5, 1)), Input((3, 1), (1, 1))]
    reads = Operand(FIRST_INPUT, 0, (5, 1)), Operand(FIRST_INPUT + 1, 0, (1, 0))
    made = Instruction(Code.LOG_SOFTMAX_BACKWARD, (3, 5), Operand(OUT, 0, (5, 1)), *reads).by_classes(0)
    found = ops.row_program([made], given, 0, 15)([g, outputs]).view(2, 3, 5)
    assert torch.allclose(found, g - outputs.exp() * g.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)


def test_steps_check_the_memory_beside_the_weights() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    passes, form = stacked(model, F.cross_entropy, 2)
    x, y, wanted = torch.randn(9, 6), torch.randint(3, (9,)), torch.arange(8).view(2, 4)
    for _ in range(2):
        passes.run(form, x[wanted], y[wanted])
    known = passes.replays.row_pass(4, x, y)
    far, long, group = (form.layout.table.clone() for _ in range(3))
    far[0, 0], long[0, 1], group[0, 2] = form.z.shape[1], MANY, 1
    narrow, sums = form.z[:, :16].contiguous(), torch.zeros(2, dtype=torch.float64)

    def take(z: Tensor = form.z, w: Tensor | None = None, table: Tensor = form.layout.table, **fields: Tensor) -> None:
        known.program.steps_(
            form.leaves, known.others, x, y, wanted, 4, z, w, table, form.hparams, sums.clone(), **fields
        )

    take()
    for bad in (
        {"z": narrow}, {"z": form.z.double()}, {"z": torch.cat([form.z, form.z], 1)}, {"w": narrow, "sumsq": sums},
        {"momentum": narrow}, {"q": narrow}, {"shift": narrow}, {"table": far}, {"table": long}, {"table": group},
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"must be (a )?f|table (must have|has|names)"):
            take(**bad)
