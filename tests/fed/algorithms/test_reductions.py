"""Limits of hyper-parameters, first rounds and single clients in which two algorithms are equal.

They are equal bit for bit if the arithmetic is the same.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed
from fastsam.fed import models
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.loop.pooled_data import in_turn, pool_data
from tests.helpers import oracle
from tests.helpers.fed_runs import same_bits
from tests.helpers.fed_watch import Watched

RUNS = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-3, 0.2), "lr_decay": st.sampled_from([1.0, 0.9]), "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.05]), "clip_norm": st.sampled_from([None, 0.1, 10.0]),
        "clip_scope": st.sampled_from(["full", "linear"]), "weighting": st.sampled_from(["uniform", "samples"]),
        "participation": st.sampled_from([0.4, 1.0]), "local_epochs": st.integers(1, 2), "seed": st.integers(0, 5),
    }
)  # fmt: skip
# Each maps (rho, share, phi), all in (0, 1), to two algorithms that are one; share stands for alpha and beta.
EXACT = {
    "MoFedSAM, beta = 1, is FedSAM": lambda r, s, p: (fed.MoFedSAM(rho=r, beta=1.0), fed.FedSAM(rho=r)),
    "FedCM, alpha = 1, is FedAvg": lambda r, s, p: (fed.FedCM(alpha=1.0), fed.FedAvg()),
    "MimeLite, beta = 1, is FedAvg": lambda r, s, p: (fed.MimeLite(beta=1.0), fed.FedAvg()),
    "heavy-ball MimeLite, beta = 1, too": lambda r, s, p: (fed.MimeLite(1.0, "heavy_ball"), fed.FedAvg()),
    "FedSAM, rho = 0, is FedAvg": lambda r, s, p: (fed.FedSAM(rho=0.0), fed.FedAvg()),
    "ASAM, rho = 0, too": lambda r, s, p: (fed.FedSAM(rho=0.0, adaptive=True, eta=r), fed.FedAvg()),
    "FedGSAM, alpha = 0, is FedSAM": lambda r, s, p: (fed.FedGSAM(rho=r, alpha=0.0), fed.FedSAM(rho=r)),
    "FedSCAM of equal clients is FedSAM": lambda r, s, p: (fed.FedSCAM(r, 0.0, 0.0, 0.0, s), fed.FedSAM(rho=r)),
    "MoFedSAM, rho = 0, is FedCM": lambda r, s, p: (fed.MoFedSAM(rho=0.0, beta=s), fed.FedCM(alpha=s)),
    "FedGAMMA, rho = 0, is SCAFFOLD": lambda r, s, p: (fed.FedGAMMA(rho=0.0), fed.SCAFFOLD()),
    "FedLESAM, rho = 0, is FedAvg": lambda r, s, p: (fed.FedLESAM(rho=0.0), fed.FedAvg()),
    "FedLESAM_S, rho = 0, is SCAFFOLD": lambda r, s, p: (fed.FedLESAM_S(rho=0.0), fed.SCAFFOLD()),
    "FedLESAM_S, scale 0, is FedLESAM": lambda r, s, p: (fed.FedLESAM_S(rho=r, control_scale=0.0), fed.FedLESAM(r)),
    "FedLESAM_D, rho = 0, is FedDyn": lambda r, s, p: (fed.FedLESAM_D(rho=0.0, phi=p), fed.FedDyn(phi=p)),
    "FedGloSS without SAM is FedDyn": lambda r, s, p: (fed.FedGloSS(rho=0.0, rho_local=0.0, phi=p), fed.FedDyn(phi=p)),
    "FedSMOO, rho = 0, is FedDyn": lambda r, s, p: (fed.FedSMOO(rho=0.0, phi=p, alpha=s), fed.FedDyn(phi=p)),
    "half of FedSMOO, rho = 0, is FedAvg": lambda r, s, p: (fed.FedSMOO(rho=0.0, dyn=False), fed.FedAvg()),
    "FedAvgM, beta = 0, is FedAvg": lambda r, s, p: (fed.FedAvgM(beta=0.0), fed.FedAvg()),
    "FedExP, eps too large, is FedAvg": lambda r, s, p: (fed.FedExP(eps=1e9, average=False), fed.FedAvg()),
    "FedSWA at one rate is FedAvg": lambda r, s, p: (fed.FedSWA(rho=1.0, alpha=1.0), fed.FedAvg()),
    "FedNSAM, gamma = 0, is FedSAM": lambda r, s, p: (fed.FedNSAM(rho=r, gamma=0.0), fed.FedSAM(rho=r)),
    "MOON, mu = 0, is FedAvg": lambda r, s, p: (fed.MOON(mu=0.0), fed.FedAvg()),
    "FedNTD, beta = 0, is FedAvg": lambda r, s, p: (fed.FedNTD(beta=0.0), fed.FedAvg()),
    "FedSOL, rho = 0, is FedAvg": lambda r, s, p: (fed.FedSOL(rho=0.0), fed.FedAvg()),
    "FedProx, phi = 0, is FedAvg": lambda r, s, p: (fed.FedProx(phi=0.0), fed.FedAvg()),
    "FedRobust with a map at rest is FedAvg": lambda r, s, p: (fed.FedRobust(eta_2=0.0, form="diag"), fed.FedAvg()),
    "FedSpeed, rho = 0, mixes nothing": lambda r, s, p: (fed.FedSpeed(0.0, 1.0, p), fed.FedSpeed(r, 0.0, p)),
}


def final(algorithm, dtype=torch.float32, clients=None, **options):
    model = oracle.smooth_model(dtype)
    return fed.run(
        model, clients or oracle.ragged_clients(dtype), algorithm, **{"rounds": 3, "executor": "sequential", **options}
    ).model


@pytest.mark.parametrize("pair", EXACT)
@settings(max_examples=2, deadline=None)
@given(rho=st.floats(0.01, 1), share=st.floats(0.01, 0.99), phi=st.floats(0.01, 1), options=RUNS)
def test_reductions(pair, rho, share, phi, options):
    run_1, run_2 = EXACT[pair](rho, share, phi)
    a, b = final(run_1, **options), final(run_2, **options)
    # FedSpeed's two runs take the same gradients but weigh them by other numbers.
    assert same_bits(a, b) if "FedSpeed" not in pair else oracle.difference(a, b) < 1e-5


FIRST = {
    "SCAFFOLD": lambda r, p: (fed.SCAFFOLD(), fed.FedAvg()),
    "FedGAMMA": lambda r, p: (fed.FedGAMMA(rho=r), fed.FedSAM(rho=r)),
    "FedLESAM_S": lambda r, p: (fed.FedLESAM_S(rho=r), fed.FedLESAM(rho=r)),
    "FedSMOO's first step": lambda r, p: (fed.FedSMOO(rho=r, dyn=False, alpha=p), fed.FedSAM(rho=r)),
    "FedLESAM without a past": lambda r, p: (fed.FedLESAM(rho=r, initial_perturbation="none"), fed.FedAvg()),
}


@pytest.mark.parametrize("pair", FIRST)
@settings(max_examples=2, deadline=None)
@given(rho=st.floats(0.01, 1), phi=st.floats(0.01, 1), options=RUNS)
def test_the_first_round_is_that_of_the_base(pair, rho, phi, options):
    """All vectors are zero at the start. A dual changes within a round, so for FedSMOO only the first step is
    compared."""
    options |= {"rounds": 1}
    if "step" in pair:
        options |= {"local_epochs": 1, "batch_size": 64}
    run_1, run_2 = FIRST[pair](rho, phi)
    a, b = final(run_1, torch.float64, **options), final(run_2, torch.float64, **options)
    # penalty*g1 has a different length relative to nu
    assert oracle.difference(a, b) < (1e-5 if "step" in pair else 1e-300)


@pytest.mark.parametrize("method", ["FedLESAM", "FedLESAM_S", "FedLESAM_D"])
@pytest.mark.parametrize("first", ["origin", "none"])
def test_with_everybody_there_the_last_round_is_the_clients_last_model(method, first):
    result = getattr(fed, method)
    options = {"rounds": 4, "participation": 1.0, "weight_decay": 0.05}
    a, b = (
        final(result(rho=0.2, initial_perturbation=first, reference=ref), **options) for ref in ("client", "last_round")
    )
    assert same_bits(a, b)
    options["participation"] = 0.4
    a, b = (
        final(result(rho=0.2, initial_perturbation=first, reference=ref), **options) for ref in ("client", "last_round")
    )
    assert not same_bits(a, b)


@pytest.mark.parametrize("baseline", [fed.Centralised_SGD(), fed.Centralised_SAM(rho=0.2)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_centralised_baseline_is_training_on_the_pooled_data(baseline, momentum):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    options = oracle.Options(rounds=3, epochs=2, lr=0.05, momentum=momentum, weight_decay=0.01, shuffle=True)
    keywords = options.keywords()
    trained_model = fed.run(model, clients, baseline, participation=1.0, **keywords).model
    twin = oracle.FedSAM(baseline.rho) if isinstance(baseline, fed.Centralised_SAM) else oracle.FedAvg()
    assert oracle.difference(trained_model, oracle.central(model, clients, twin, options)) < 1e-12
    run_1 = [(torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]))]
    base = fed.FedSAM(baseline.rho) if isinstance(baseline, fed.Centralised_SAM) else fed.FedAvg()
    assert same_bits(trained_model, fed.run(model, run_1, base, participation=1.0, **keywords).model)


# --- The baselines on pooled data: their samples, their budget, and that the clients are still those of the evaluation.


def population(sizes=(5, 8, 3, 14)):
    """Every sample is its own number."""
    x = torch.arange(float(sum(sizes)))[:, None]
    return prepare([(p, p[:, 0].long() % 2) for p in x.split(list(sizes))], None, torch.float32, torch.device("cpu"))


@settings(max_examples=40, deadline=None)
@given(
    participation=st.floats(0.01, 1),
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
)
def test_the_blocks_are_the_data_dealt_out_evenly(participation, seed, sizes):
    result = pool_data(population(sizes), participation, seed)
    total = sum(sizes)
    assert len(result.clients) == min(max(1, round(1 / participation)), total)
    assert max(result.clients.sizes) - min(result.clients.sizes) <= 1
    assert sorted(torch.cat([x for x, _ in result.clients.pairs])[:, 0].tolist()) == list(range(total))
    assert all(torch.equal(y, x[:, 0].long() % 2) for x, y in result.clients.pairs)
    repeat = pool_data(population(sizes), participation, seed)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(result.clients.pairs, repeat.clients.pairs))


def test_blocks_mix_the_clients():
    blocks = [x[:, 0] for x, _ in pool_data(population((50, 50)), 0.5, 0).clients.pairs]
    assert all(15 < (x < 50).sum() < 35 for x in blocks)
    shuffled_pool = pool_data(population((50, 50)), 0.5, 1).clients.pairs[0][0][:, 0]
    assert not torch.equal(blocks[0], shuffled_pool)


def test_blocks_come_in_turn():
    sampler = in_turn(3)
    assert [sampler(t, torch.Generator()) for t in range(5)] == [[0], [1], [2], [0], [1]]


def digits():
    data = fed.digits(clients=20, alpha=0.3)
    return models.build("mlp", data.in_shape, data.classes, seed=0), data


@pytest.mark.parametrize("algorithm", [fed.Centralised_SGD(), fed.Centralised_SAM(rho=0.1)], ids=repr)
def test_the_budget_is_that_of_a_federated_run(algorithm):
    model, data = digits()
    options = {"rounds": 4, "participation": 0.25, "sampler": "fixed", "local_epochs": 2, "batch_size": 8, "lr": 0.1}
    federated_result = fed.run(model, data, fed.FedAvg(), **options)
    watcher = Watched(algorithm)
    central = fed.run(model, data, watcher, **{**options, "sampler": "bernoulli"})
    for actual, expected in zip(central.history, federated_result.history):
        assert actual["samples"] == pytest.approx(
            expected["samples"], rel=0.2
        )  # client 0 has the remainder of the split
        assert actual["steps"] == 2 * math.ceil(actual["samples"] / 8)
        assert actual["steps"] == pytest.approx(expected["steps"], rel=0.25)
        assert actual["backprops"] == actual["steps"] * algorithm.backward_passes
        assert actual["megabytes_down"] == actual["megabytes_up"] == 0 and actual["clients"] == 1
    # Over the clients of the split, not over the blocks: one block has one accuracy.
    assert central.history[-1]["client_accuracy_std"] > 0
    assert central.summary()["accuracy_final"] > federated_result.summary()["accuracy_final"] - 0.05
