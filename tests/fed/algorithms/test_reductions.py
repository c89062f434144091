"""Where one algorithm is another: limits of hyper-parameters, first rounds, one client. To the bit wherever the
arithmetic is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_cases import replayed
from tests.helpers.fed_watch import Watched

RUNS = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-3, 0.2),
        "lr_decay": st.sampled_from([1.0, 0.9]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.05]),
        "clip_norm": st.sampled_from([None, 0.1, 10.0]),
        "clip_scope": st.sampled_from(["full", "linear"]),
        "weighting": st.sampled_from(["uniform", "samples"]),
        "participation": st.sampled_from([0.4, 1.0]),
        "local_epochs": st.integers(1, 2),
        "seed": st.integers(0, 5),
    }
)
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


def same_bits(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("pair", EXACT)
@settings(max_examples=2, deadline=None)
@given(rho=st.floats(0.01, 1), share=st.floats(0.01, 0.99), phi=st.floats(0.01, 1), options=RUNS)
def test_reductions(pair, rho, share, phi, options):
    one, other = EXACT[pair](rho, share, phi)
    a, b = final(one, **options), final(other, **options)
    # FedSpeed's two runs take the same gradients but weigh them by other numbers.
    assert same_bits(a, b) if "FedSpeed" not in pair else oracle.difference(a, b) < 1e-5


FIRST = {
    "SCAFFOLD": lambda r, p: (fed.SCAFFOLD(), fed.FedAvg()),
    "FedGAMMA": lambda r, p: (fed.FedGAMMA(rho=r), fed.FedSAM(rho=r)),
    "FedLESAM_S": lambda r, p: (fed.FedLESAM_S(rho=r), fed.FedLESAM(rho=r)),
    "FedSMOO's first step": lambda r, p: (fed.FedSMOO(rho=r, dyn=False, alpha=p), fed.FedSAM(rho=r)),
    "FedLESAM without a past": lambda r, p: (fed.FedLESAM(rho=r, first="none"), fed.FedAvg()),
}


@pytest.mark.parametrize("pair", FIRST)
@settings(max_examples=2, deadline=None)
@given(rho=st.floats(0.01, 1), phi=st.floats(0.01, 1), options=RUNS)
def test_the_first_round_is_that_of_the_base(pair, rho, phi, options):
    """All vectors start at zero. A dual moves within a round, so of FedSMOO it is the first step alone."""
    options |= {"rounds": 1}
    if "step" in pair:
        options |= {"local_epochs": 1, "batch_size": 64}
    one, other = FIRST[pair](rho, phi)
    a, b = final(one, torch.float64, **options), final(other, torch.float64, **options)
    assert oracle.difference(a, b) < (1e-5 if "step" in pair else 1e-300)  # penalty*g1 has another length beside nu


@settings(max_examples=2, deadline=None)
@given(rho=st.floats(0.01, 1), share=st.floats(0.05, 1), lr=st.floats(1e-3, 0.2), seed=st.integers(0, 9))
def test_with_momentum_the_first_round_has_shorter_steps(rho, share, lr, seed):
    """D = m = 0 in round 0: steps of alpha*lr (beta*lr), the clipping and weight decay aside."""
    options = {"rounds": 1, "seed": seed, "participation": 0.6}
    for one, base in (
        (fed.FedCM(alpha=share), fed.FedAvg()),
        (fed.MimeLite(beta=share), fed.FedAvg()),
        (fed.MoFedSAM(rho=rho, beta=share), fed.FedSAM(rho=rho)),
    ):
        a = final(one, torch.float64, lr=lr, **options)
        assert oracle.difference(a, final(base, torch.float64, lr=share * lr, **options)) < 1e-13


@settings(max_examples=2, deadline=None)
@given(phi=st.floats(0.01, 1), options=RUNS)
def test_the_clients_of_feddyn_in_round_0_are_those_of_fedprox(phi, options):
    """h_i = 0: the proximal term is left. And FedAdam's clients are FedAvg's."""
    options |= {"rounds": 1}
    for one, other in ((fed.FedDyn(phi=phi), fed.FedProx(phi=phi)), (fed.FedAdam(), fed.FedAvg())):
        seen, expected = Watched(one), Watched(other)
        final(seen, **options), final(expected, **options)
        assert seen._ends and [e.clients for _, e, _ in seen._ends] == [e.clients for _, e, _ in expected._ends]
        for (_, x, _), (_, y, _) in zip(seen._ends, expected._ends):
            assert torch.equal(x.displacement, y.displacement)


def test_feddyn_without_a_penalty_is_not_fedavg():
    """The server's +H stays: a test that says otherwise would be wrong."""
    options = oracle.Options()
    runs = [
        replayed(oracle.smooth_model(), oracle.ragged_clients(), m, options).model
        for m in (fed.FedDyn(phi=1e-12), fed.FedAvg())
    ]
    assert oracle.difference(*runs) > 1e-3


@pytest.mark.parametrize("method", ["FedLESAM", "FedLESAM_S", "FedLESAM_D"])
@pytest.mark.parametrize("first", ["origin", "none"])
def test_with_everybody_there_the_last_round_is_the_clients_last_model(method, first):
    made = getattr(fed, method)
    options = {"rounds": 4, "participation": 1.0, "weight_decay": 0.05}
    a, b = (final(made(rho=0.2, first=first, ref=ref), **options) for ref in ("client", "last_round"))
    assert same_bits(a, b)
    options["participation"] = 0.4
    a, b = (final(made(rho=0.2, first=first, ref=ref), **options) for ref in ("client", "last_round"))
    assert not same_bits(a, b)


@pytest.mark.parametrize("centralised", [fed.Centralised_SGD(), fed.Centralised_SAM(rho=0.2)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_centralised_baseline_is_training_on_the_pooled_data(centralised, momentum):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    options = oracle.Options(rounds=3, epochs=2, lr=0.05, momentum=momentum, weight_decay=0.01, shuffle=True)
    keywords = options.keywords()
    trained = fed.run(model, clients, centralised, participation=1.0, **keywords).model
    twin = oracle.FedSAM(centralised.rho) if isinstance(centralised, fed.Centralised_SAM) else oracle.FedAvg()
    assert oracle.difference(trained, oracle.central(model, clients, twin, options)) < 1e-12
    one = [(torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]))]
    base = fed.FedSAM(centralised.rho) if isinstance(centralised, fed.Centralised_SAM) else fed.FedAvg()
    assert same_bits(trained, fed.run(model, one, base, participation=1.0, **keywords).model)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_as_many_steps_everywhere_is_fedavg(momentum):
    clients, options = (
        oracle.ragged_clients(sizes=(12, 11, 14)),
        {"batch_size": 5, "momentum": momentum, "participation": 1.0},
    )
    a, b = (final(m, torch.float64, clients, **options) for m in (fed.FedNova(), fed.FedAvg()))
    assert oracle.difference(a, b) < 1e-12
    unequal = oracle.ragged_clients(sizes=(12, 31))
    a, b = (final(m, torch.float64, unequal, **options) for m in (fed.FedNova(), fed.FedAvg()))
    assert oracle.difference(a, b) > 1e-4


def test_one_client_needs_no_correction():
    """With one client, c = c_i and their difference is 0: SCAFFOLD is FedAvg up to the rounding of the server's sum."""
    clients = oracle.ragged_clients(sizes=(17,))
    a, b = (final(m, torch.float64, clients, rounds=4, participation=1.0) for m in (fed.SCAFFOLD(), fed.FedAvg()))
    assert oracle.difference(a, b) < 1e-13
