"""Invariants of every round for all hyper-parameters: sums of corrections, radii and directions of perturbations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_runs import vector
from tests.helpers.fed_watch import Watched

CLIENTS = 5
RUNS = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-3, 0.2), "lr_decay": st.sampled_from([1.0, 0.9]), "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.05]), "clip_norm": st.sampled_from([None, 0.1]),
        "weighting": st.sampled_from(["uniform", "samples"]), "participation": st.sampled_from([0.3, 0.6, 1.0]),
        "local_epochs": st.integers(1, 3), "seed": st.integers(0, 9),
    }
)  # fmt: skip
RHO, PHI = st.floats(0.01, 0.5), st.floats(0.01, 0.5)


class Shared(list):
    """A list that a copy of a model shares with it."""

    def __deepcopy__(self, memo):
        return self


class Spy(torch.nn.Module):
    """A module that stores the weights at which training computes a gradient."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.points = inner, Shared()

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.points.append(vector(self.inner).clone())
        return self.inner(x)


def run_with_spy(algorithm, clients, **options):
    """A run whose clients train one after the other: its final model, and the points after the two trial passes."""
    spy = Spy(oracle.smooth_model())
    final = fed.run(spy, clients, algorithm, executor="sequential", **options).model
    return vector(spy), spy.points[2:], vector(final)


def run_watched(algorithm, **options):
    """Return the calls of an algorithm in a run in float64."""
    record = Watched(algorithm)
    fed.run(oracle.smooth_model(), oracle.ragged_clients(), record, **{"rounds": 5, "batch_size": 5, **options})
    return record


def at_the_end_of(record, t, name, size):
    """Return the sum over all clients of the state `name` after round t, zero for clients that have not taken part."""
    total = torch.zeros(size, dtype=torch.float64)
    for states in record._kept.values():
        past_states = [state[name] for time, state in states if time <= t]
        total += past_states[-1] if past_states else 0
    return total


@pytest.mark.parametrize(
    ("result", "server", "client"),
    [
        (lambda r, p: fed.SCAFFOLD(), "c", "c_i"),
        (lambda r, p: fed.FedGAMMA(rho=r), "c", "c_i"),
        (lambda r, p: fed.FedLESAM_S(rho=r, control_scale=p), "c", "c_i"),
        (lambda r, p: fed.FedDyn(phi=p), "H", "h_i"),
        (lambda r, p: fed.FedLESAM_D(rho=r, phi=p), "H", "h_i"),
        (lambda r, p: fed.FedSMOO(rho=r, phi=p, alpha=2 * r), "H", "h_i"),
        (lambda r, p: fed.FedGloSS(rho=r, rho_local=r, phi=p), "H", "h_i"),
        pytest.param(lambda r, p: fed.FedGMT(gamma=r, phi=p), "H", "h_i", marks=pytest.mark.slow),
    ],
    ids=["SCAFFOLD", "FedGAMMA", "FedLESAM_S", "FedDyn", "FedLESAM_D", "FedSMOO", "FedGloSS", "FedGMT"],
)
@settings(max_examples=3, deadline=None)
@given(rho=RHO, phi=PHI, options=RUNS)
def test_what_the_server_keeps_is_the_mean_of_what_all_clients_keep(result, server, client, rho, phi, options):
    record = run_watched(result(rho, phi), **options)
    for t, state in enumerate(record._servers[1:]):
        mean = at_the_end_of(record, t, client, len(state[server])) / CLIENTS
        torch.testing.assert_close(state[server], mean, rtol=1e-10, atol=1e-13 / options["lr"])
    assert record._servers[-1][server].norm() > 0


@pytest.mark.parametrize(
    "module",
    [
        lambda r, p: fed.FedSAM(rho=r), lambda r, p: fed.FedGSAM(rho=r, alpha=p),
        lambda r, p: fed.MoFedSAM(rho=r, beta=p), lambda r, p: fed.FedGAMMA(rho=r),
        lambda r, p: fed.FedSMOO(rho=r, phi=p), lambda r, p: fed.FedSMOO(rho=r, dyn=False, alpha=2 * p),
        lambda r, p: fed.FedSpeed(rho=r, alpha=p, phi=p), lambda r, p: fed.Centralised_SAM(rho=r),
    ],
    ids=["FedSAM", "FedGSAM", "MoFedSAM", "FedGAMMA", "FedSMOO", "FedSMOO-alone", "FedSpeed", "Centralised_SAM"],
)  # fmt: skip
@settings(max_examples=2, deadline=None)
@given(rho=RHO, phi=PHI, options=RUNS)
def test_perturbations_have_length_rho_over_the_whole_model(module, rho, phi, options):
    """All layers together: not one radius per tensor, and not a sum of norms."""
    _, points, _ = run_with_spy(module(rho, phi), oracle.ragged_clients(), rounds=3, batch_size=5, **options)
    assert len(points) >= 2 and len(points) % 2 == 0
    perturbations = [z - w for w, z in zip(points[0::2], points[1::2])]
    assert all((eps != 0).sum() > 60 for eps in perturbations)
    # A gradient that is nearly as small as NU, which is added to its norm, gives a shorter perturbation.
    assert math.isclose(max(eps.norm().item() for eps in perturbations), rho, rel_tol=1e-4)
