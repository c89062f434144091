"""FedAdamW against the paper's equations in an unfused loop. Its clients need AdamW, so the cases that all other
algorithms share do not fit."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_input import start
from tests.helpers.fed_refusals import refusals
from tests.helpers.mutants.apply import mutants, replace_source
from tests.promises.cases import ACTIVE, run_replayed

ADAMW = {"betas": (0.8, 0.97), "eps": 1e-3, "weight_decay": 0.05}
OPTIONS = oracle.Options(lr=0.03, rounds=5, shuffle=True, weighting="samples", server_lr=0.8)


def distance(rho=0.0, adamw=ADAMW, options=OPTIONS, **keywords):
    """Return the distance from the oracle, and the distance that the model moved."""
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    algorithm, optimizer = fed.FedAdamW(alpha=0.4, rho=rho), partial(torch.optim.AdamW, **adamw)
    final = run_replayed(model, clients, algorithm, options, optimizer=optimizer, **keywords).model
    twin = oracle.FedAdamW(alpha=0.4, rho=rho, **adamw)
    return oracle.difference(final, oracle.run(model, clients, twin, options, ACTIVE))


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("rho", [0.0, 0.2])
@pytest.mark.parametrize("executor", ["sequential", "threads", "streams", "graph", "vmap"])
def test_against_an_unfused_loop(executor, rho):
    assert distance(rho, executor=executor, slots=2) < 1e-12


@pytest.mark.parametrize("backend", ["reference", "foreach"])
def test_on_other_backends(backend):
    assert distance(backend=backend) < 1e-12


def test_with_the_defaults_of_torch_and_many_local_steps():
    defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    assert distance(adamw=defaults, options=replace(OPTIONS, epochs=8, rounds=3)) < 1e-10


def test_a_run_without_an_optimizer_has_adamw():
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    options = {"rounds": 2, "batch_size": 5, "executor": "sequential"}
    plain = fed.run(model, clients, fed.FedAdamW(), **options)
    named = fed.run(model, clients, fed.FedAdamW(), optimizer="AdamW", lr=1e-3, **options)
    assert oracle.difference(plain.model, named.model) == 0 and plain.history[0]["lr"] == 1e-3


class Sizes(fed.FedAvg):
    """Notes the size of a row."""

    def init_server(self, w0):
        self.size = len(w0)
        return super().init_server(w0)


class Begins(fed.FedAvg):
    """Gives the local optimizer a state."""

    def __init__(self, state, local_optimizer="Adam"):
        self.state, self.local_optimizer = state, local_optimizer

    def local_step(self, server, client, round):
        return fed.Step(state=self.state)


def test_an_algorithm_may_give_the_momentum_of_the_run():
    model, clients, options = oracle.smooth_model(), oracle.ragged_clients(), {"rounds": 1, "participation": 1.0}
    fed.run(model, clients, sizes := Sizes(), **options)

    def train(state, momentum):
        return fed.run(model, clients, Begins(state, None), momentum=momentum, **options).model

    zeros, ones = torch.zeros(1, sizes.size, dtype=torch.float64), torch.ones(1, sizes.size, dtype=torch.float64)
    assert oracle.difference(train({"momentum_buffer": zeros}, 0.5), train({}, 0.5)) == 0
    assert oracle.difference(train({"momentum_buffer": ones}, 0.5), train({}, 0.5)) > 1e-3
    with pytest.raises(ValueError, match=r"a fused local optimizer that keeps momentum_buffer, .* has SGD"):
        train({"momentum_buffer": zeros}, 0.0)


def begin(algorithm, **options):
    return lambda: start(algorithm=algorithm, model=oracle.smooth_model(), **options)


test_refused = refusals(
    (begin(fed.FedAdamW(), optimizer="SGD"), "FedAdamW needs .* that keeps exp_avg_sq, .* has SGD"),
    (
        begin(fed.FedAdamW(), optimizer=partial(torch.optim.AdamW, amsgrad=True)),
        "FedAdamW needs .* that keeps exp_avg_sq, .* has AdamW",
    ),
    (begin(fed.FedAdamW(), weight_decay=0.1), "optimizer needs momentum, weight_decay and clip_norm at their defaults"),
    (begin(fed.FedAdamW(), optimizer_state="keep"), "FedAdamW begins each round with a state of its own"),
    (begin(fed.FedAdamW(), local_parameters="2"), "no algorithm that sends the state of the local optimizer"),
    (begin(fed.FedAdamW(), privacy=fed.Privacy(clip=1.0, noise_multiplier=1.0)), "clients of FedAdamW send or keep"),
    (begin(Begins({"sum": torch.zeros(1, 3)})), "Begins needs a fused local optimizer that keeps sum, .* has Adam"),
    (begin(Begins([1.0])), "Step.state must be a dict of tensors, or None, got list"),
    (begin(Begins({"exp_avg": torch.zeros(3)})), r"\['exp_avg'\] must be \[1, ...\], .* got \[3\]"),
)


MUTANTS = mutants(r"""
algorithms.fedadamw FedAdamW.local_step: self.alpha * server['D'] => server['D'] @ fedadamw
algorithms.fedadamw FedAdamW.local_step: self.alpha * server['D'] => -self.alpha * server['D'] @ fedadamw
algorithms.fedadamw FedAdamW.local_step: {V: server['v'][None]} => {} @ fedadamw
algorithms.fedadamw FedAdamW.local_step: server['n'].view(1, 1) => 0 * server['n'].view(1, 1) @ fedadamw
algorithms.fedadamw FedAdamW.local_step: server['n'].view(1, 1) => server['n'].view(1, 1) + 1 @ fedadamw
algorithms.fedadamw FedAdamW.step_server: server['n'] + aggregate.mean('n') => aggregate.mean('n') @ fedadamw
algorithms.fedadamw FedAdamW.step_server: view.copy_(mean) => view.copy_(mean.sqrt()) @ fedadamw
algorithms.fedadamw block_means: view.double() => view.double().abs().sqrt() @ fedadamw
algorithms.fedadamw Leaning.__call__: value=-1 => value=1 @ fedadamw
algorithms.fedadamw Leaning.__call__: (rows.z,) if rows.w is None else (rows.z, rows.w) => (rows.z,) @ fedadamw
algorithms.fedadamw Leaning.begin: 1 - rows.rule.columns[adam.BETA2] ** rows.number('seen') =>
    0 * rows.number('seen') @ fedadamw
""")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.function}: {m.new}")
def test_a_wrong_constant_is_noticed(mutant):
    with replace_source(*mutant[:4]):
        try:
            far = distance(0.2)
        except ValueError:
            far = math.inf
    assert math.isnan(far) or far > 1e-9
