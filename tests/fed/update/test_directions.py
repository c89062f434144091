"""Directions that depend on the path, and the pull of the perturbed point: their effects and refusals."""

from functools import partial

import pytest
import torch
from torch import nn

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_seam import Constants

D = fed.Direction


class Partly(nn.Module):
    """Uses its second layer in no pass, and its third one in one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.sometimes = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.double()

    def forward(self, x):
        out = self.first(x)
        return self.sometimes(out) if len(x) == 5 else out


def offset(number):
    """Return a function for a row with this number at each weight that is not zero."""
    return lambda w, layout: number * (w != 0).to(w.dtype)


STEPS = {
    "path": {"direction": D.PATH, "direction_vector": offset(0.7), "drift_weight": -1.0},
    "path along e": {"direction": D.PATH, "direction_vector": offset(0.7)},
    "gradient plus": {
        "direction": D.GRADIENT_PLUS,
        "direction_vector": offset(0.2),
        "drift_weight": 0.5,
        "uses_last_gradient": True,
    },
    "anchor_weight": {
        "direction": D.GRADIENT,
        "anchor": lambda w, layout: w + 0.4 * (w != 0).to(w.dtype),
        "anchor_weight": 0.25,
    },
}


def train(constants, model, clients, executor, **options):
    options |= {"rounds": 2, "participation": 1.0, "batch_size": 5, "lr": 0.1}
    return fed.run(model, clients, Constants(constants), executor=executor, **options)


BOTH = [(name, "sequential") for name in STEPS] + [
    pytest.param(name, "vmap", marks=[] if name == "path" else pytest.mark.slow) for name in STEPS
]


@pytest.mark.parametrize(("name", "executor"), BOTH)
def test_parameters_that_a_pass_does_not_use_stay(name, executor):
    """Perturbed with everything else, they come back: bit for bit where no pass uses them."""
    torch.manual_seed(0)
    model = Partly()
    clients = [(torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % 3) for n in (7, 10)]
    final = train(STEPS[name], model, clients, executor).model
    for old_p, new_p in zip(model.unused.parameters(), final.unused.parameters(), strict=True):
        assert torch.equal(old_p, new_p)
    assert not torch.equal(model.sometimes.weight, final.sometimes.weight)
    other_model = train(STEPS[name], model, clients, "sequential").model
    for a, b in zip(final.parameters(), other_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["path", "anchor_weight"])
def test_measures_along_the_path_see_the_perturbation(name):
    """The same on every executor, and no bit of the training changes."""

    start = partial(train, STEPS[name], oracle.smooth_model(), oracle.ragged_clients())
    run_1, run_2 = (start(e, measures=["perturbation_drift"]) for e in ("sequential", "vmap"))
    records = run_1.history[-1]["perturbation_drift"]
    assert records == pytest.approx(run_2.history[-1]["perturbation_drift"], rel=1e-6) and records > 1e-3
    for p, q in zip(run_1.model.parameters(), start("sequential").model.parameters(), strict=True):
        assert torch.equal(p, q)
