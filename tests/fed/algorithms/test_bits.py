"""What single algorithms do, seen from outside, and what they refuse; test_fed_oracle.py has the numbers of all of
them."""

from __future__ import annotations

import pytest
import torch

from fastsam import fed
from tests.helpers import oracle


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


def test_the_registry_names_every_algorithm():
    assert len(fed.algorithms.registry) == 41
    for name, made in fed.algorithms.registry.items():
        assert made.__name__.lower().replace("_", "-") == name
        assert getattr(fed, made.__name__) is made
        assert made() == made()  # frozen dataclasses with defaults
        with pytest.raises(AttributeError):
            made().rho = 1
