"""A second model in the local steps (`fed.Teacher`): in every executor that takes it, with perturbations, buffers and
dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastsam import fed
from fastsam.fed.executors import Setup, cuda
from fastsam.fed.executors.graph import Graph
from fastsam.fed.step.teacher import divergence
from tests.helpers import oracle
from tests.helpers.fed_cases import ACTIVE, options_of, ours, replayed, theirs
from tests.helpers.fed_runs import same_bits
from tests.helpers.oracle.loop import add, scaled, unit


@dataclass(frozen=True)
class Sharp(fed.FedNTD):
    """FedNTD with SAM steps; both gradients are those of the whole loss."""

    rho: float = 0.2

    def local_update(self, server, client, round):
        taught = super().local_update(server, client, round).teacher
        return fed.LocalUpdate(fed.Direction.GRADIENT, rho=self.rho, teacher=taught)


@dataclass
class UnfusedSharp(oracle.FedNTD):
    rho: float = 0.2

    def gradient(self, visit, w, x, y):
        eps = scaled(self.rho, unit(super().gradient(visit, w, x, y)))
        return super().gradient(visit, add(w, eps), x, y)


@dataclass(frozen=True)
class Listening(fed.Algorithm):
    """Hands what the teacher said to a list."""

    said: Any = None

    def local_update(self, server, client, round):
        def term(outputs, told, y):
            if outputs.requires_grad:
                self.said.append((round.index, outputs.detach().clone(), told.clone()))
            return 0.0 * F.mse_loss(outputs, told)

        return fed.LocalUpdate(teacher=fed.Teacher(server["w"], term))


def run(algorithm, **options):
    return fed.run(oracle.smooth_model(), oracle.ragged_clients(), algorithm, **{"rounds": 2, **options})


def test_both_gradients_of_a_sharp_step_are_taught():
    model, clients, options = oracle.smooth_model(), oracle.ragged_clients(), options_of("fedntd", "decay")
    final = replayed(model, clients, Sharp(beta=0.8), options).model
    assert oracle.difference(final, oracle.run(model, clients, UnfusedSharp(beta=0.8), options, ACTIVE)) < 1e-12


@pytest.mark.parametrize("method", ["fedgmt", "fedsol"])
def test_a_model_with_convolutions(method):
    model, clients, options = oracle.pooling_model(), oracle.ragged_images(), options_of(method, "momentum")
    final = replayed(model, clients, ours(method), options).model
    assert oracle.difference(final, oracle.run(model, clients, theirs(method), options, ACTIVE)) < 1e-12


def test_the_teacher_is_in_evaluation_mode_with_the_buffers_of_the_round():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(0.5), torch.nn.Linear(7, 3)
    ).double()
    clients = oracle.ragged_clients(sizes=(8, 8))
    options = {
        "participation": 1.0,
        "buffers": "average",
        "shuffle": False,
        "batch_size": 8,
        "lr": 0.3,
        "executor": "sequential",
    }
    said: list[Any] = []
    fed.run(model, clients, Listening(said), rounds=2, **options)
    received = [model, fed.run(model, clients, fed.FedAvg(), rounds=1, **options).model]
    assert {t for t, _, _ in said} == {0, 1}
    for t, outputs, told in said:
        expected = [received[t].eval()(x).detach() for x, _ in clients]
        assert any(torch.allclose(told, wanted, rtol=1e-12, atol=1e-12) for wanted in expected)
        assert not torch.allclose(outputs, told)  # dropout, and the batch's own statistics


def test_the_records_tell_the_loss_of_the_data():
    assert run(fed.FedNTD(beta=50.0), rounds=1, local_epochs=1, batch_size=64).history[0][
        "train_loss"
    ] == pytest.approx(run(fed.FedAvg(), rounds=1, local_epochs=1, batch_size=64).history[0]["train_loss"])


def test_the_divergence_is_torchs():
    torch.manual_seed(0)
    outputs, told = torch.randn(2, 6, 4, dtype=torch.float64)
    outputs.requires_grad_()
    wanted = 9 * F.kl_div(F.log_softmax(outputs / 3, 1), F.softmax(told / 3, 1), reduction="batchmean")
    made = divergence(outputs, told, 3.0)
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(torch.autograd.grad(made, outputs), torch.autograd.grad(wanted, outputs))
    assert divergence(told, told, 2.0) == 0
    # Classes on the second dimension, whatever follows; of what is left out no gradient comes.
    left = torch.zeros(6, 4, dtype=torch.bool)
    left[:, 0] = True
    outputs = outputs.detach().requires_grad_()
    torch.testing.assert_close(divergence(outputs, told, 1.0, left), divergence(outputs[:, 1:], told[:, 1:]))
    (slope,) = torch.autograd.grad(divergence(outputs, told, 1.0, left), outputs)
    assert slope.isfinite().all() and (slope[:, 0] == 0).all() and (slope[:, 1:] != 0).any()


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        (lambda w: fed.Teacher(w[:-1], divergence), r"Teacher.weights must be torch.float64"),
        (lambda w: fed.Teacher(w, lambda o, t, y: (o - t).sum(1)), "term must be a finite scalar tensor"),
        (lambda w: fed.Teacher(w, lambda o, t, y: o @ t), "term cannot be made of outputs .*RuntimeError"),
        (lambda w: fed.Teacher(w, lambda o, t, y: o.mean() / 0), "finite scalar"),
        (lambda w: fed.Teacher(w, None), "term must be a function"),
        (lambda w: fed.Teacher(w, divergence, weight=float("nan")), "weight must be a finite number"),
        (
            lambda w: fed.Teacher((w, w[None, :-1]), divergence),
            r"Teacher.weights must be torch.float64 .* or \[1, 256\]; got",
        ),
        (
            lambda w: fed.Teacher(w, divergence, features="3"),
            "features='3' is not a module of the model.*; its modules are 0, 1, 2",
        ),
    ],
)
def test_a_teacher_is_checked_before_the_run(teacher, words, tmp_path):
    @dataclass(frozen=True)
    class Own(fed.Algorithm):
        def local_update(self, server, client, round):
            return fed.LocalUpdate(teacher=teacher(server["w"]))

    with pytest.raises(ValueError, match=words):
        run(Own(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("*.json*"))


def test_executors_that_do_not_take_one_say_so():
    with pytest.raises(ValueError, match="'vmap' cannot serve here: the algorithm has a teacher"):
        run(fed.FedGMT(), executor="vmap")
    assert "teacher" in (Graph.why_not(Setup(None, None, None, None, torch.device("cpu"), "auto", taught=True)) or "")
    with pytest.raises(ValueError, match="a teacher or a map of the inputs, not both"):
        fed.LocalUpdate(teacher=fed.Teacher(torch.zeros(3), divergence), input_map=fed.InputMap())
    with pytest.raises(
        ValueError, match="perturbs=True gives the first gradient of a step with two; the direction 'none'"
    ):
        fed.LocalUpdate(teacher=fed.Teacher(torch.zeros(3), divergence, perturbs=True))


def test_a_term_that_perturbs_leaves_the_record_the_loss_of_the_data_and_the_first_step_alone():
    """w = w^t there: one step a round is FedAvg's, to the bit."""
    options = {"local_epochs": 1, "batch_size": 64}
    taught, plain = run(fed.FedSOL(rho=5.0), **options), run(fed.FedAvg(), executor="sequential", **options)
    assert same_bits(taught.model, plain.model)
    assert [r["train_loss"] for r in taught.history] == [r["train_loss"] for r in plain.history]


def test_a_stream_is_lent_every_vector_of_a_step():
    """Memory that another stream still reads must not be given away: of all tensors in a LocalUpdate."""
    q, e, start, weights = torch.zeros(4, 3).unbind()
    step = fed.LocalUpdate(
        fed.Direction.CONSTANT,
        direction_vector=e,
        gradient_offset=q,
        start=start,
        teacher=fed.Teacher(weights, divergence),
    )
    lent = {id(t) for t in cuda.vectors(step)}
    assert {id(q), id(e), id(start), id(weights)} <= lent


def test_a_teacher_for_each_client_and_what_a_module_returns_or_is_given():
    """The first client's teacher is twice the model, the others' thrice; of the first layer, as it is seen by hooks of
    ours."""
    said: list[Any] = []

    @dataclass(frozen=True)
    class Each(fed.Algorithm):
        received: bool = False

        def init_client(self, server):
            return {"v": 2 * server["w"]}

        def local_update(self, server, client, round):
            def term(own, told, y):
                if own.requires_grad:
                    said.append((own.detach().clone(), [t.clone() for t in told]))
                return 0.0 * own.sum()

            name = "2" if self.received else "0"
            return fed.LocalUpdate(
                teacher=fed.Teacher((server["w"], client["v"]), term, features=name, received=self.received)
            )

        def finish_client(self, server, client, results, round):
            return {"v": 3 * server["w"].expand(len(results.client_ids), -1)}, fed.Upload(
                mean={"delta": 0 * results.delta}
            )

    model, clients = oracle.smooth_model(), oracle.ragged_clients(sizes=(6, 6))
    for received in (False, True):
        said.clear()
        fed.run(
            model,
            clients,
            Each(received),
            rounds=2,
            participation=1.0,
            shuffle=False,
            batch_size=6,
            executor="sequential",
        )
        wanted = []
        for factor in (1, 2, 3):
            scaled_model = oracle.smooth_model()
            with torch.no_grad():
                for p in scaled_model.parameters():
                    p.mul_(factor)
            wanted.append([scaled_model[: 2 if received else 1](x).detach() for x, _ in clients])
        for visit, (own, told) in enumerate(said):
            client, factor = visit % 2, 2 + visit // 2
            torch.testing.assert_close(own, wanted[0][client])
            torch.testing.assert_close(told[0], wanted[0][client])
            torch.testing.assert_close(told[1], wanted[factor - 1][client])
        assert len(said) == 4


def test_features_are_a_tensor_of_every_pass():
    class Pair(torch.nn.Module):
        def forward(self, x):
            return x, x

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pair, self.idle, self.out = Pair(), torch.nn.Identity(), torch.nn.Linear(6, 3).double()

        def forward(self, x):
            return self.out(self.pair(x)[0])

    for name, words in (("pair", "it returns tuple"), ("idle", "it is not called")):
        with pytest.raises(
            ValueError, match=f"features='{name}' must be a module that works on one tensor; .* {words}"
        ):
            fed.run(Odd(), oracle.ragged_clients(), fed.MOON(features=name), rounds=1)


def test_moon_is_fedavg_in_a_clients_first_round():
    options = {"rounds": 1, "participation": 1.0}
    assert same_bits(run(fed.MOON(mu=5.0), **options).model, run(fed.FedAvg(), **options, executor="sequential").model)
