"""What single algorithms do, seen from outside, and what they refuse; test_fed_oracle.py has the numbers of all of
them."""

from __future__ import annotations

import math

import pytest
import torch

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_runs import same_bits


def test_sam_moves_elsewhere_than_sgd():
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    a, b = (fed.run(model, clients, m, rounds=2).model for m in (fed.FedSAM(rho=0.3), fed.FedAvg()))
    assert oracle.difference(a, b) > 1e-4


def test_mofedsam_takes_beta_sized_steps_in_round_0():
    """D^0 = 0: one step of one client moves beta times as far as FedSAM's."""
    model, clients = oracle.smooth_model(), oracle.ragged_clients(sizes=(5, 5))
    options = {"rounds": 1, "participation": 1.0, "batch_size": 5}
    moves = []
    for algorithm in (fed.FedSAM(rho=0.1), fed.MoFedSAM(rho=0.1, beta=0.25)):
        final = fed.run(model, clients, algorithm, **options).model
        moves.append([p.detach() - q.detach() for p, q in zip(final.parameters(), model.parameters())])
    for full, scaled in zip(*moves):
        torch.testing.assert_close(scaled, 0.25 * full, rtol=1e-12, atol=1e-15)


def test_mofedsam_follows_the_last_direction_with_beta_0():
    """beta = 0 ignores gradients: after a first round that does not move, nothing ever does."""
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    assert same_bits(fed.run(model, clients, fed.MoFedSAM(beta=0.0), rounds=3).model, model)


@pytest.mark.parametrize("adaptive", [False, True], ids=["sam", "asam"])
def test_the_perturbation_is_rho_over_the_whole_model(adaptive):
    """Seen from outside: a loss that records the weights at which it is asked for."""
    model, rho, eta = oracle.smooth_model(), 0.37, 0.01 if adaptive else 0.0
    points, worker = [], []

    class Spy(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            if self.training and torch.is_grad_enabled():
                points.append(torch.cat([p.detach().flatten() for p in self.inner.parameters()]).clone())
                worker.append(self)
            return self.inner(x)

    fed.run(
        Spy(model),
        oracle.ragged_clients(sizes=(6,)),
        fed.FedSAM(rho, adaptive, eta),
        rounds=1,
        participation=1.0,
        batch_size=3,
        executor="sequential",
    )
    steps = points[2:]  # the first two are of the trial
    assert len(steps) == 4
    for w, z in zip(steps[0::2], steps[1::2]):
        eps = z - w
        length = (eps / (w.abs() + eta)).norm() if adaptive else eps.norm()
        assert math.isclose(length.item(), rho, rel_tol=1e-5)
        assert (eps != 0).sum() > 0.9 * eps.numel()  # all layers together, not one


def test_a_zero_gradient_is_not_perturbed():
    """eps = 0 exactly where there is no direction: no NaN, and weight decay still acts."""
    model = oracle.smooth_model()
    final = fed.run(
        model, oracle.ragged_clients(), fed.FedSAM(rho=0.5), rounds=1, loss=lambda out, y: 0.0 * out.sum(),
        weight_decay=0.1, lr=0.1,
        participation=1.0, batch_size=100,
    ).model  # fmt: skip
    for p, q in zip(final.parameters(), model.parameters()):
        torch.testing.assert_close(p.detach(), 0.99 * q.detach(), rtol=1e-14, atol=0)


def test_weights_of_clients():
    """One step on one client of 1 and one of 23 samples: uniform means half of each, samples means 1/24 and 23/24."""
    model, clients = oracle.smooth_model(), oracle.ragged_clients(sizes=(1, 23))
    options = {"rounds": 1, "batch_size": 64, "participation": 1.0}
    uniform, samples = (
        fed.run(model, clients, fed.FedAvg(), weighting=w, **options).model for w in ("uniform", "samples")
    )
    alone = [fed.run(model, [c], fed.FedAvg(), **options).model for c in clients]
    for u, s, a, b in zip(uniform.parameters(), samples.parameters(), *(m.parameters() for m in alone)):
        torch.testing.assert_close(u.detach(), ((a + b) / 2).detach(), rtol=1e-14, atol=1e-16)
        torch.testing.assert_close(s.detach(), ((a + 23 * b) / 24).detach(), rtol=1e-14, atol=1e-16)


def test_the_registry_names_every_algorithm():
    assert len(fed.algorithms.registry) == 41
    for name, made in fed.algorithms.registry.items():
        assert made.__name__.lower().replace("_", "-") == name
        assert getattr(fed, made.__name__) is made
        assert made() == made()  # frozen dataclasses with defaults
        with pytest.raises(AttributeError):
            made().rho = 1
