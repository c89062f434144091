"""Clients that train at the same time under `vmap` have the numbers of a client by itself, for each model, loss, kind
of batch, dtype and algorithm. Models that cannot be stacked are refused."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fastsam import fed
from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows
from tests.helpers.crosses import one_in
from tests.helpers.places import ROOT
from tests.promises import cases
from tests.promises.stacked_cases import CASES, LAYERS, LOOKUPS, SERVED, Case

# Errors relative to the change of the weights. In bfloat16 a group may round in another way than one client.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}
REFUSED = [name for name, case in CASES.items() if case.kind == "refused"]


NOT_REPLAYED = ("Bilinear", torch.bfloat16)  # torch rounds its inner product when it is called, and not when recorded
OF_PAIRS = [name for name in SERVED if CASES[name].client is Case.client]  # only the loss reads other batches
SMALL = CASES["elu, without a row program"]
METHODS = [name for name in cases.METHODS if not name.startswith(cases.NOT_STACKED)]
FORMS = ("fedavg", "fedsam", "fedsmoo", "fedlesam", "scaffold")  # one for each form of a step; the others are slow


@pytest.mark.parametrize(("name", "dtype"), one_in(3, SERVED, TOLERANCES), ids=str)
def test_clients_in_a_group_have_the_numbers_of_a_client_by_itself(
    name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "fastsam.fed"):
        CASES[name].compare(dtype, 3, TOLERANCES[dtype])
    assert ("not replayed" in caplog.text) == ((name, dtype) == NOT_REPLAYED)
    assert ("once per client" in caplog.text) == (CASES[name].kind == "once per client")


def near(loss: Tensor, outputs: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
    return loss + 0.5 * (outputs - teacher).square().mean()


@dataclass(frozen=True, eq=False)
class Near(fed.Step):
    """A step whose outputs stay near the outputs at the start of the round."""

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses, g = passes(near, passes.outputs_of(rows["start"]))
        rows.update(g)
        return losses


@dataclass(frozen=True)
class StaysNear(fed.FedAvg):
    def local_step(self, server: State, client: State, round: Round) -> fed.Step:
        return Near()


@pytest.mark.parametrize(("name", "dtype"), one_in(3, OF_PAIRS, (torch.float32, torch.float64)), ids=str)
def test_objectives_of_outputs_and_of_a_teacher(name: str, dtype: torch.dtype) -> None:
    CASES[name].compare(dtype, 3, TOLERANCES[dtype], algorithm=StaysNear())


@pytest.mark.parametrize("method", [m if m in FORMS else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_clients_of_every_algorithm(method: str) -> None:
    """Partial participation, and rows of clients that are refilled and are not neighbours."""
    options = {"participation": 0.8, "momentum": 0.3, "weight_decay": 0.01, "clip_norm": 0.05, "local_epochs": 2}
    case = replace(SMALL, options=options | {"algorithm": cases.make_algorithm(method)})
    case.compare(torch.float64, 3, TOLERANCES[torch.float64])


@pytest.mark.parametrize(("slots", "method"), [(2, "fedavg"), (7, "fedsmoo"), (64, "fedlesam-d")])
def test_any_number_of_slots(slots: int, method: str) -> None:
    case = replace(SMALL, options={"algorithm": cases.make_algorithm(method)})
    case.compare(torch.float32, slots, TOLERANCES[torch.float32])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stacked_is_refused_with_the_reason_and_trains_in_another_executor(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ValueError, match=f"executor 'vmap' cannot serve here: .*{case.words}"):
        case.train("vmap", rounds=1)
    assert case.train("auto", rounds=1).summary()["executor"] in ("threads", "sequential")


def test_the_page_says_what_every_layer_does() -> None:
    page = (ROOT / "docs/about_federated.md").read_text()
    table = re.findall(r"^\| (served|once per client|refused) \| (.+?) \|", page, re.M)
    named = {name: kind for kind, names in table for name in re.findall(r"`(\w+)`", names)}
    tree_names = ("dict", "list", "tuple", "collate")
    assert named == {name: case.kind for name, case in CASES.items() if name in LAYERS or name in tree_names}


@pytest.mark.parametrize("name", [name for name in LOOKUPS if name != "another operation first"])
@pytest.mark.parametrize("index", [10, -1])
def test_an_index_outside_of_the_table_raises(index: int, name: str) -> None:
    """In the plain executor, and in the middle row of a stacked pass: in round 1, and in a replayed pass of round 3."""
    case = CASES[name]
    data = case.clients(torch.float32, (8,) * 4)
    data[1][0][7, 2] = index
    words = r"client .*1.* in round {}.*(out of range|out of bounds|smaller than|non-negative)"
    runs = ("sequential", torch.float64), ("vmap", torch.float64), ("vmap", torch.float32)
    for (executor, dtype), algorithm in (*zip(runs, (None,) * 3, strict=True), (runs[1], StaysNear())):
        with pytest.raises(fed.ClientError, match=words.format(1)):
            case.train(executor, dtype, data, algorithm=algorithm)
        with pytest.raises(fed.ClientError, match=words.format(3)):
            case.train(
                executor, dtype, data, algorithm=algorithm, sampler=lambda t, generator: [0, 1 if t == 2 else 3, 2]
            )


@pytest.mark.parametrize("bad", range(4))
def test_such_an_error_is_torchs_own_also_where_a_row_program_finds_it(bad: int) -> None:
    case = CASES["words"]
    data = case.clients(torch.float32, (8,) * 4)
    data[bad][0][7, 2] = 10
    with pytest.raises(fed.ClientError, match=f"client {bad} failed in round 1.*: IndexError: index out of range"):
        case.train("vmap", torch.float32, data, algorithm=fed.FedAvg())
