"""The rules of a local step, for the steps of all algorithms."""

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.algorithms.base import has_loop
from fastsam.fed.algorithms.fedsol import Orthogonal
from fastsam.fed.algorithms.fedswa import Falling
from fastsam.fed.update.rows import Rows
from tests.helpers import oracle
from tests.helpers.fake_cuda import FakeCuda, Watch
from tests.helpers.fake_devices import install_step_graphs
from tests.helpers.fed_runs import FLOAT, digest, norm_model, run, untimed_records
from tests.helpers.fed_seam import Constants
from tests.helpers.fed_watch import Watched
from tests.promises.step_cases import ALGORITHMS, STEPS, layer_normed

EVEN = (10,) * 4
STEPPING = [name for name, algorithm in ALGORITHMS.items() if not has_loop(algorithm)]
SHIFTED = ("fedlesam", "fedlesam-d", "fedlesam-s")
# Numbers of forms of algorithms whose first round has a different step.
FORMS = {"fedgf": 2, "fedlesam-none": 2}
# Algorithms whose steps `vmap` does not capture: objectives, and pooled samples.
STEP_BY_STEP = ("fedgmt", "fedntd", "fedsol", "centralised-sgd", "centralised-sam")


def train(algorithm: Any, executor: str = "sequential", slots: int | None = None, **options: Any) -> fed.Result:
    options = {"model": layer_normed(FLOAT), "sizes": EVEN, "participation": 1.0, "lr_decay": 0.8, **options}
    return run(algorithm, executor, slots, **options)


@functools.cache
def steps_of(name: str) -> list[fed.Step]:
    """Return all steps of an algorithm in four rounds, each of two or four clients."""
    watched: Any = Watched(ALGORITHMS[name])
    train(watched, rounds=4, sampler=lambda t, generator: [0, 1] if t == 0 else range(4))
    return watched._steps


# --- what a step reads ---


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_round_reads_nothing_that_the_last_client_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, begin = digest(train(ALGORITHMS[name])), Rows.begin

    def begin_in_nan(rows: Rows, step: fed.Step, w: Tensor, lr: float) -> None:
        memory, place = rows.memory, rows.place
        scalars = {key: x for key, x in memory.scalars.items() if key != "hparams" or not step.key.keeps_numbers}
        for field in memory.arena.names:
            for view in rows.layout.views(memory.field(field)[place]):  # zeros between parameters stay
                view.fill_(torch.nan)
        for x in (*memory.numbers.values(), *scalars.values()):
            x[place].fill_(torch.nan)
        begin(rows, step, w, lr)

    monkeypatch.setattr(Rows, "begin", begin_in_nan)
    assert digest(train(ALGORITHMS[name])) == plain


@pytest.mark.parametrize("name", STEPPING)
def test_deltas_are_measured_from_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[int, tuple[fed.Step, Tensor]] = {}
    begin, results, checked = Rows.begin, Rows.results, []

    def keep_start(rows: Rows, step: fed.Step, w: Tensor, lr: float) -> None:
        begun[id(rows)] = step, w
        begin(rows, step, w, lr)

    def check_delta(rows: Rows, *arguments: Any, **options: Any) -> dict[str, Any]:
        result = results(rows, *arguments, **options)
        step, w = begun[id(rows)]
        end, eps = step.unperturbed(rows)
        assert (eps is None) == (not isinstance(step, fed.Shifted))
        torch.testing.assert_close(result["delta"], end - (w if step.start is None else step.start), rtol=0, atol=1e-6)
        assert torch.equal(result["delta"], rows.z - rows["start"])
        checked.append(step)
        return result

    monkeypatch.setattr(Rows, "begin", keep_start)
    monkeypatch.setattr(Rows, "results", check_delta)
    train(ALGORITHMS[name], rounds=2)
    assert checked


@pytest.mark.parametrize("name", [name for name in STEPPING if name != "fedbn"])
def test_the_first_pass_of_a_step_updates_statistics(name: str) -> None:
    """Later passes and passes before the first step leave them."""
    model, ((x, _),) = norm_model(), oracle.ragged_clients(FLOAT, (5,))
    options: dict[str, Any] = {"sizes": (5,), "rounds": 1, "local_epochs": 1, "buffers": "average"}
    norm: Any = train(ALGORITHMS[name], model=model, **options).model[1]
    assert norm.num_batches_tracked == 1
    if name not in SHIFTED:
        torch.testing.assert_close(norm.running_mean, 0.1 * model[0](x).mean(0), rtol=1e-5, atol=1e-6)


# --- keys ---


@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_of_all_rounds_have_one_key(name: str) -> None:
    """So the number of captured graphs does not grow with the rounds."""
    assert len({id(step.key) for step in steps_of(name)}) == FORMS.get(name, 1)


@dataclass(frozen=True, eq=False)
class Tabled(fed.Step):
    """A step with a field of any kind."""

    table: Any = None


def test_equal_values_have_one_key_and_others_have_others() -> None:
    for kind, name, values in (
        (fed.SAM, "adaptive", (False, True)), (Falling, "end", (0.5, 0.6)), (Orthogonal, "tau", (2.0, 3.0)),
        (Tabled, "table", ((1, 2), (1, 3))), (fed.SAM, "b", (None, 0.5)), (fed.Step, "q", (None, torch.zeros(3))),
    ):  # fmt: skip
        first, second, again = (kind(**{name: value}).key for value in (*values, values[0]))
        assert first is again and first is not second
    assert fed.SAM(rho=0.1, prox=1.0).key is fed.SAM(rho=0.2, prox=2.0).key


@pytest.mark.parametrize("value", [[1], {"a": 1}, ([1],)], ids=str)
def test_a_field_that_cannot_be_compared_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=r"^Tabled.table must be a tensor, a number with a column, or a value that"):
        _ = Tabled(table=value).key


# --- captured steps ---


# A Watch keeps all memory and looks at every operation; the others: `make test-slow`
REPLAYED = [pytest.param(name, marks=() if name in ("fedmoswa", "fedsmoo") else pytest.mark.slow) for name in STEPPING]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_steps_have_the_numbers_of_their_round(name: str) -> None:
    """Radius, learning rate, weights and vectors change in every round. A graph does the same in each."""
    options: dict[str, Any] = {"rounds": 3, "backend": "reference", "sizes": EVEN[:1]}
    plain = digest(train(ALGORITHMS[name], **options))
    with Watch():
        assert digest(train(ALGORITHMS[name], "graph", 1, **options)) == plain
    assert sum(graph.replays for graph in FakeCuda.graphs) >= 4


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_stacked_steps_have_the_numbers_of_their_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"rounds": 4, "backend": "reference", "sizes": EVEN[:2]}
    plain = digest(train(ALGORITHMS[name], "vmap", 2, **options))
    install_step_graphs(monkeypatch)
    with Watch():
        assert digest(train(ALGORITHMS[name], "vmap", 2, **options)) == plain
    assert (sum(graph.replays for graph in FakeCuda.graphs) >= 2) is (name not in STEP_BY_STEP)


# --- steps of some clients, and of several ---


def values_of(step: fed.Step) -> list[Any]:
    """Return the fields of a step of one client, with tensors as lists."""
    state, buffers = step.state or {}, step.buffers or ()
    values = [getattr(step, f.name) for f in fields(step) if f.name not in ("state", "buffers")]
    values += [*state, *(x[0] for x in state.values()), *(b[0] for b in buffers)]
    return [value.flatten().tolist() if isinstance(value, Tensor) else value for value in values]


def check_parts(step: fed.Step, n: int) -> None:
    parts = [step.of(slice(i, i + 1)) for i in range(n)]
    joined = fed.Step.join(parts)
    assert joined.key is step.key and all(part.key is step.key for part in parts)
    for i, part in enumerate(parts):
        assert values_of(joined.of(slice(i, i + 1))) == values_of(part)
        assert values_of(step.of(slice(i, n)).of(slice(0, 1))) == values_of(part)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_parts_of_a_step_and_the_step_of_parts(name: str) -> None:
    for step in steps_of(name):
        lengths = {len(x) for x in step.tensors.values() if x.dim() == 2 and len(x) > 1}
        check_parts(step, max(lengths, default=2))


def test_parts_of_numbers_states_and_buffers() -> None:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    step = fed.SAM(
        rho=draw(3, 1).abs().double(), prox=0.2, q=draw(3, 8), start=draw(8), state={"m": draw(3, 8), "n": draw(1, 2)},
        buffers=[draw(3, 4), draw(1, 2, 2)],
    )  # fmt: skip
    check_parts(step, 3)
    parts = [replace(step.of(slice(i, i + 1)), rho=0.1 * i) for i in range(3)]
    joined = fed.Step.join(parts)
    assert isinstance(joined.rho, Tensor) and joined.rho.dtype == torch.float64
    assert joined.rho.tolist() == [[0.0], [0.1], [0.2]] and joined.prox == 0.2 and joined.start is step.start
    mixed = fed.Step.join([fed.SAM(rho=joined.rho[2:]), fed.SAM(rho=0.3)])
    assert isinstance(mixed.rho, Tensor) and mixed.rho.tolist() == [[0.2], [0.3]]


def test_numbers_before_the_first_step_are_of_the_rows_clients() -> None:
    """Steps of some of a group's clients, whose parameters stay with them, find their pilots' radii in place."""
    options: dict[str, Any] = {"local_parameters": "3.*", "sizes": (7, 12, 1, 22, 12, 7, 5, 30), "participation": 0.8}
    plain, stacked = (train(fed.FedSCAM(rho=0.6), executor, 2, **options) for executor in ("sequential", "vmap"))
    assert oracle.movement(plain.model, stacked.model) < 1e-5


# --- every class of steps, in models whose passes leave parameters out ---


class Partly(nn.Module):
    """Uses its second layer in no pass, and its third one only for batches of five."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.sometimes = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return self.sometimes(out) if len(x) == 5 else out


def constants(case: str) -> fed.Algorithm:
    return Constants(*STEPS[case])


QUICK = ("plain", "path", "pulled")


@pytest.mark.parametrize(
    ("case", "executor"),
    [
        pytest.param(case, executor, marks=[] if executor == "sequential" or case in QUICK else pytest.mark.slow)
        for case in STEPS
        for executor in ("sequential", "vmap")
    ],
)
def test_parameters_that_a_pass_does_not_use_stay(case: str, executor: str) -> None:
    """Perturbed with all others, they come back: bit for bit if no pass uses them."""
    torch.manual_seed(0)
    model = Partly()
    clients = [(torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % 3) for n in (7, 10)]
    options: dict[str, Any] = {"rounds": 2, "participation": 1.0, "batch_size": 5, "lr": 0.1}
    final, plain = (
        fed.run(model, clients, constants(case), executor=e, **options).model for e in (executor, "sequential")
    )
    for old, new in zip(model.unused.parameters(), final.unused.parameters(), strict=True):
        assert torch.equal(old, new)
    assert not torch.equal(model.sometimes.weight, final.sometimes.weight)
    for a, b in zip(final.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


PERTURBED = [case for case, (kind, values) in STEPS.items() if "rho" in values]


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c == "path" else pytest.mark.slow) for c in PERTURBED])
def test_measures_along_the_path_see_the_perturbation(case: str) -> None:
    """The measure agrees on executors, and changes no bit of the training."""
    options: dict[str, Any] = {"model": oracle.smooth_model(FLOAT), "rounds": 2}
    run_1, run_2 = (train(constants(case), e, 3, measures=["perturbation_drift"], **options)
                    for e in ("sequential", "vmap"))  # fmt: skip
    record = run_1.history[-1]["perturbation_drift"]
    assert record == pytest.approx(run_2.history[-1]["perturbation_drift"], rel=1e-3) and record > 1e-3
    plain = train(constants(case), **options)
    assert oracle.movement(plain.model, run_1.model) == 0
    assert [r["train_loss"] for r in untimed_records(plain)] == [r["train_loss"] for r in untimed_records(run_1)]
