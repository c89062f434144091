"""Steps with an objective of a teacher's outputs: FedNTD, FedGMT, FedSOL, and a user's own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import same_bits
from tests.helpers.fed_seam import Constants

SIZES = (8, 5, 12, 8, 9)
ALGORITHMS = (fed.FedNTD(beta=3.0), fed.FedGMT(gamma=3.0), fed.FedSOL(rho=0.5))
EXECUTORS = ("sequential", "threads", "vmap")


def run(algorithm: Any, executor: str = "sequential", **options: Any) -> fed.Result:
    base = {"rounds": 3, "participation": 1.0, "batch_size": 4, "local_epochs": 2, "lr": 0.3, "executor": executor}
    return fed.run(oracle.smooth_model(), oracle.ragged_clients(sizes=SIZES), algorithm, **base | options)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "clip_norm": 0.2, "weight_decay": 0.01}], ids=["sgd", "all"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_vmap_agrees_with_sequential(algorithm: fed.Algorithm, options: Any) -> None:
    one, many = (run(algorithm, executor, **options) for executor in ("sequential", "vmap"))
    assert oracle.difference(one.model, many.model) < 1e-12
    assert oracle.difference(one.model, run(fed.FedAvg(), **options).model) > 1e-4
    for key in ("train_loss", "steps", "backprops", "samples"):
        assert [r[key] for r in many.history] == pytest.approx([r[key] for r in one.history], rel=1e-12)


@pytest.mark.parametrize("algorithm", [ALGORITHMS[0], ALGORITHMS[2]], ids=["FedNTD", "FedSOL"])
def test_clients_with_parameters_of_their_own_teach_themselves(algorithm: fed.Algorithm) -> None:
    """The teacher is the model with which a client begins, its own parameters included."""
    one, many = (run(algorithm, executor, local_parameters="2") for executor in ("sequential", "vmap"))
    assert oracle.difference(one.model, many.model) < 1e-12
    for i in range(len(SIZES)):
        assert oracle.difference(one.client_model(i), many.client_model(i)) < 1e-12
    assert oracle.difference(one.client_model(0), one.client_model(1)) > 1e-3


@pytest.mark.parametrize("executor", EXECUTORS)
def test_records_have_the_loss_of_the_data(executor: str) -> None:
    options = {"rounds": 1, "local_epochs": 1, "batch_size": 64}
    losses = [run(a, executor, **options).history[0]["train_loss"] for a in (fed.FedNTD(beta=50.0), fed.FedAvg())]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_the_first_step_of_fedsol_is_fedavgs() -> None:
    """In the first step w = w^t, so that a round of one step has the bits of FedAvg, and its recorded loss."""
    fedsol, fedavg = (run(a, local_epochs=1, batch_size=64) for a in (fed.FedSOL(rho=5.0), fed.FedAvg()))
    assert same_bits(fedsol.model, fedavg.model)
    assert [r["train_loss"] for r in fedsol.history] == [r["train_loss"] for r in fedavg.history]


# --- a teacher of a user's step ---

SEEN: list[tuple[Tensor, Tensor]] = []


@dataclass(frozen=True, eq=False)
class Noting(fed.Step):
    """A plain step that notes the outputs of the model and of its teacher, the start."""

    def __call__(self, rows: fed.Rows, passes: fed.Passes) -> Tensor:
        losses, g = passes(note, passes.outputs_of(rows["start"]))
        rows.update(g)
        return losses


def note(loss: Tensor, outputs: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
    """Note the outputs of one client, and return its loss."""
    SEEN.append((outputs.detach().clone(), teacher.clone()))
    return loss


def test_the_teacher_is_in_evaluation_mode_with_the_buffers_of_the_round() -> None:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(0.5), torch.nn.Linear(7, 3))
    model, clients = torch.nn.Sequential(*layers).double(), oracle.ragged_clients(sizes=(8, 8))
    options: dict[str, Any] = {
        "participation": 1.0, "buffers": "average", "shuffle": False, "batch_size": 8, "lr": 0.3,
        "executor": "sequential",
    }  # fmt: skip
    received = [model, fed.run(model, clients, fed.FedAvg(), rounds=1, local_epochs=2, **options).model]
    SEEN.clear()
    fed.run(model, clients, Constants(Noting), rounds=2, local_epochs=2, **options)
    rounds = [SEEN[-8:-4], SEEN[-4:]]  # after the trial
    for taught, start in zip(rounds, received, strict=True):
        expected = [start.eval()(x).detach() for x, _ in clients]
        for outputs, teacher in taught:
            assert any(torch.allclose(teacher[0] if teacher.dim() > 2 else teacher, e) for e in expected)
            assert not torch.allclose(outputs, teacher)  # dropout, and the batch's own statistics


# --- refusals ---

REGRESSION = [(x, x[:, :1]) for x, _ in oracle.ragged_clients()]
TREES = [({"input": x}, y) for x, y in oracle.ragged_clients()]


def refused(algorithm: Any, words: str, clients: Any = None, model: Any = None, **options: Any) -> tuple[Any, str]:
    """Return a row of `refusals`."""
    data = oracle.ragged_clients() if clients is None else clients
    base = {"rounds": 1, "run_dir": "run"}
    return lambda: fed.run(model or oracle.smooth_model(), data, algorithm, **base | options), words


test_refused = refusals(
    *(refused(fed.FedGMT(), "a teacher needs clients that share all parameters", local_parameters="2", executor=one)
      for one in ("sequential", "vmap")),
    *(refused(fed.FedNTD(), "FedNTD needs labels that number the model's outputs", REGRESSION,
              torch.nn.Linear(6, 1).double(), loss=F.mse_loss, executor=one) for one in ("sequential", "vmap")),
    *(refused(algorithm, r"a term of the model's outputs needs inputs x of pairs \(x, y\)", TREES)
      for algorithm in (*ALGORITHMS, Constants(Noting))),
)  # fmt: skip
