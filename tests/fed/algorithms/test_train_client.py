"""Loops of algorithms (`train_client`), and the handle that a loop gets."""

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastsam import fed
from fastsam.fed.clients.plan import Work
from fastsam.fed.executors import streams
from fastsam.fed.executors.task import ClientLoop, Task
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import same_bits
from tests.helpers.oracle.loop import add, scale_vector, unit
from tests.promises.cases import ACTIVE, options_of, run_replayed


@dataclass(frozen=True)
class SharpNTD(fed.FedNTD):
    """FedNTD as a loop, with SAM steps. Both gradients include the whole objective."""

    rho: float = 0.2

    def local_step(self, server, client, round):
        return fed.SAM(rho=self.rho)

    def train_client(self, client, server, state, round):
        teacher = client.teacher(server["w"])
        for x, y in client.batches():
            with torch.no_grad():
                teacher_outputs = teacher(x)
            client.step(x, y, penalty=partial(self.not_true_distillation, teacher_outputs, y))


@dataclass
class UnfusedSharpNTD(oracle.FedNTD):
    rho: float = 0.2

    def gradient(self, visit, w, x, y):
        eps = scale_vector(self.rho, unit(super().gradient(visit, w, x, y)))
        return super().gradient(visit, add(w, eps), x, y)


@dataclass(frozen=True)
class Recorded(fed.Algorithm):
    """Appends the outputs of both models to a list."""

    outputs: Any = None

    def train_client(self, client, server, state, round):
        teacher = client.teacher(server["w"])

        def record(teacher_outputs, outputs):
            self.outputs.append((round.index, outputs.detach().clone(), teacher_outputs.clone()))
            return 0.0 * F.mse_loss(outputs, teacher_outputs)

        for x, y in client.batches():
            with torch.no_grad():
                teacher_outputs = teacher(x)
            client.step(x, y, penalty=partial(record, teacher_outputs))


def run(algorithm, **options):
    return fed.run(oracle.smooth_model(), oracle.ragged_clients(), algorithm, **{"rounds": 2, **options})


def test_a_penalty_is_part_of_both_gradients_of_a_sam_step():
    model, clients, options = oracle.smooth_model(), oracle.ragged_clients(), options_of("fedntd", "decay")
    final = run_replayed(model, clients, SharpNTD(beta=0.8), options).model
    assert oracle.difference(final, oracle.run(model, clients, UnfusedSharpNTD(beta=0.8), options, ACTIVE)) < 1e-12


def test_the_teacher_is_in_evaluation_mode_with_the_buffers_of_the_round():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(0.5), torch.nn.Linear(7, 3)
    ).double()
    clients = oracle.ragged_clients(sizes=(8, 8))
    options = {
        "participation": 1.0, "buffers": "average", "shuffle": False, "batch_size": 8, "lr": 0.3,
        "executor": "sequential",
    }  # fmt: skip
    output: list[Any] = []
    fed.run(model, clients, Recorded(output), rounds=2, **options)
    received_models = [model, fed.run(model, clients, fed.FedAvg(), rounds=1, **options).model]
    assert {t for t, _, _ in output} == {0, 1}
    for t, outputs, teacher_outputs in output:
        expected = [received_models[t].eval()(x).detach() for x, _ in clients]
        assert any(
            torch.allclose(teacher_outputs, expected_value, rtol=1e-12, atol=1e-12) for expected_value in expected
        )
        assert not torch.allclose(outputs, teacher_outputs)  # dropout, and the batch's own statistics


@dataclass(frozen=True)
class Loop(fed.Algorithm):
    """An algorithm whose loop and step are arguments."""

    loop: Any
    step: fed.Step

    def local_step(self, server, client, round):
        return self.step

    def train_client(self, client, server, state, round):
        return self.loop(client)


def default(client):
    for x, y in client.batches():
        client.step(x, y)


def by_gradients(client):
    for x, y in client.batches():
        client.update(client.gradient(x, y))


def by_rows(client):
    for x, y in client.batches():
        client.update(client.vector(client.gradient(x, y)))


def by_perturbations(client):
    for x, y in client.batches():
        client.perturb(client.gradient(x, y))
        second = client.gradient(x, y)
        client.update(second)


def by_torch(client):
    for x, y in client.batches():
        client.backward(x, y)
        with torch.no_grad():
            for p in client.model.parameters():
                p.sub_(p.grad, alpha=0.3)
                p.grad = None


SAM = fed.SAM(rho=0.3)
PLAIN = {"momentum": 0.0, "lr": 0.3, "executor": "sequential"}


@pytest.mark.parametrize(
    ("loop", "step", "twin", "options"),
    [
        (default, fed.Step(), fed.FedAvg(), {"momentum": 0.5, "clip_norm": 0.1}),
        (default, SAM, fed.FedSAM(rho=0.3), {"momentum": 0.5, "weight_decay": 0.01}),
        (by_gradients, fed.Step(), fed.FedAvg(), {"momentum": 0.5, "clip_norm": 0.1}),
        (by_rows, fed.Step(), fed.FedAvg(), {"momentum": 0.5, "weight_decay": 0.01}),
        (by_perturbations, SAM, fed.FedSAM(rho=0.3), {"momentum": 0.5, "clip_norm": 0.1}),
        (by_torch, fed.Step(), fed.FedAvg(), {}),
    ],
    ids=["step", "SAM step", "gradient", "row", "perturb", "torch"],
)
@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_a_loop_trains_as_steps_do(loop, step, twin, options, executor):
    loops = run(Loop(loop, step), **PLAIN | options | {"executor": executor})
    steps = run(twin, **PLAIN | options)
    assert oracle.difference(loops.model, steps.model) < 1e-14
    if loop is default:
        assert same_bits(loops.model, steps.model)
        numbers = [[r[key] for key in ("train_loss", "steps", "backprops", "samples")] for r in loops.history]
        keys = ("train_loss", "steps", "backprops", "samples")
        assert numbers == [[r[key] for key in keys] for r in steps.history]


def test_a_loop_may_restore_the_weights_and_measure_from_elsewhere():
    records = {}

    def loop(client):
        original = client.w.clone()
        for x, y in client.full_batches():
            client.perturb(client.gradient(x, y), rho=0.5)
            records["perturbed"] = torch.linalg.vector_norm(client.model[0].weight - client.start[:42].view(7, 6)) > 0
            client.restore()
        assert torch.equal(client.w, original)
        client.start_from(2 * original)
        assert not client.delta.any()
        client.w = original
        return {"norm": torch.linalg.vector_norm(client.delta)[None]}

    result = run(Loop(loop, SAM), rounds=1, participation=1.0, server_lr=1.0)
    assert records["perturbed"]
    assert not any(p.abs().sum() > 1e-12 for p in result.model.parameters()), "every delta is -w"


def by_perturbations_without_steps(client):
    for x, y in client.batches():
        client.perturb(client.gradient(x, y))


class Pair(torch.nn.Module):
    def forward(self, x):
        return x, x


class PairModel(torch.nn.Module):
    """A model with a module that gives two tensors, and a module that is not called."""

    def __init__(self):
        super().__init__()
        self.pair, self.idle, self.out = Pair(), torch.nn.Identity(), torch.nn.Linear(6, 3).double()

    def forward(self, x):
        return self.out(self.pair(x)[0])


def run_loop(loop, step=fed.Step()):  # noqa: B008  (a step is not changed)
    run(Loop(loop, step), run_dir="run")


def run_moon(features):
    fed.run(PairModel(), oracle.ragged_clients(), fed.MOON(features=features), rounds=1)


# A loop is tried before anything is written.
test_refused = refusals(
    (lambda: run_loop(lambda client: [1]), "train_client must return a dict of tensors, or None, got list"),
    (lambda: run_loop(lambda client: client.gradient_offset), "there is no gradient_offset to change"),
    (lambda: run_loop(lambda client: client.perturb(None)), r"perturb\(\) needs local_step to return fed.SAM"),
    (lambda: run_loop(lambda client: 1 / 0), "Loop.train_client failed before round 1: ZeroDivisionError"),
    (lambda: run_loop(lambda client: client.step(*next(client.batches()), penalty=lambda outputs: outputs.sum(1))),
     "a trial of Loop.train_client on client . failed: loss.* must be a scalar tensor"),
    (lambda: run_loop(by_perturbations_without_steps, SAM),
     r"ended at perturbed weights. Call update\(\) or restore\(\) after perturb"),
    (lambda: run_loop(default, fed.Shifted(e=torch.zeros(256).double())), "train_client does not serve fed.Shifted"),
    (lambda: run_moon("pair"), "features='pair' must be a module that works on one tensor; .* it gives tuple"),
    (lambda: run_moon("idle"), "features='idle' must be a module that works on one tensor; .* it is not called"),
)  # fmt: skip


def test_the_radius_of_one_perturbation_does_not_reach_other_steps_or_clients():
    def loop(client):
        for x, y in client.full_batches():
            client.perturb(client.gradient(x, y), rho=9.0)
            client.restore()
        default(client)

    options = {**PLAIN, "momentum": 0.5}
    assert same_bits(run(Loop(loop, SAM), **options).model, run(Loop(default, SAM), **options).model)


def test_an_error_in_reading_all_samples_excludes_the_client(monkeypatch):
    full_batches = Work.full_batches

    def unreadable(work, size):
        if work.client == 2 and threading.current_thread().name.startswith("fastsam"):
            raise OSError("disk")
        yield from full_batches(work, size)

    def loop(client):
        for x, y in client.full_batches():
            client.loss(x, y)
        default(client)

    monkeypatch.setattr(Work, "full_batches", unreadable)
    options = {"executor": "threads", "participation": 1.0, "on_client_error": "exclude", "max_excluded": 0.9}
    excluded_clients = run(Loop(loop, fed.Step()), rounds=1, **options).history[0]["excluded"]
    assert [(entry["client"], "OSError: disk" in entry["reason"]) for entry in excluded_clients] == [(2, True)]


@dataclass(frozen=True, eq=False)
class WithNumber(fed.Step):
    """A step with a number of each client."""

    seen: torch.Tensor | None = None


def test_every_tensor_that_a_loop_reads_is_recorded_on_its_stream():
    """Memory that another stream still reads must not be freed."""
    q, seen, start, w, v, u, b = torch.zeros(7, 1, 1).unbind()
    step = WithNumber(q=q, seen=seen, start=start, state={"exp_avg": u}, buffers=[b])
    task = Task(0, None, None, 0, 0.1, step, loop=ClientLoop(default, [w, v]))
    assert {id(t) for t in (q, seen, start, w, v, u, b)} <= {id(t) for t in streams.vectors(task)}
