"""Properties of noise, clipping and accountant, as functions that raise AssertionError.

The tests call them, and the mutants do too.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.common.option import table
from fastsam.fed.privacy.accountant import Accountant, privacy_events
from fastsam.fed.stages.clip import shorten_

CLIENTS = 8
PRIVACY = frozenset(table(fed.Privacy))


def run(size: int = 6, rounds: int = 1, algorithm: fed.Algorithm | None = None, **options: Any) -> fed.Result:
    """Train a linear model of `size` inputs and 8 classes on 8 clients, which hardly move unless `lr` is given.

    Options of privacy are given by their names.
    """
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, size, generator=g), torch.randint(0, 8, (4,), generator=g)) for _ in range(CLIENTS)]
    torch.manual_seed(0)
    training: dict[str, Any] = {
        "executor": "sequential",
        "lr": 1e-12,
        "batch_size": 4,
        "sampler": "bernoulli",
    }
    privacy: dict[str, Any] = {"noise_multiplier": 2.0, "clip": 0.5, "accountant": None}
    privacy |= {name: options.pop(name) for name in PRIVACY & options.keys()}
    return fed.run(
        nn.Linear(size, 8), data, algorithm or fed.FedAvg(), rounds=rounds, eval_every=100,
        privacy=fed.Privacy(**privacy), **training | options,
    )  # fmt: skip


def movement(result: fed.Result, size: int) -> Tensor:
    """Return the displacement of all parameters in float64."""
    torch.manual_seed(0)
    old_layer = nn.Linear(size, 8)
    pairs = zip(result.model.parameters(), old_layer.parameters(), strict=True)
    return torch.cat([(p.detach().double() - q.detach().double()).flatten() for p, q in pairs])


def scale(expected: float, size: int = 2000, **options: Any) -> None:
    """The standard deviation of every coordinate is `expected`: 16,008 of them tell it to 0.6 %, and five times that is
    allowed."""
    noise = movement(run(size, **options), size)
    assert abs(float(noise.std()) / expected - 1) < 5 / math.sqrt(2 * len(noise)), (float(noise.std()), expected)
    assert abs(float(noise.mean())) < 5 * expected / math.sqrt(len(noise))
    assert abs(float((noise / expected).pow(4).mean()) - 3) < 5 * math.sqrt(96 / len(noise))


def scales() -> None:
    """Check that the noise is z * clip / (expected cohort), whatever the cohort is."""
    cohort_sizes = [r["clients"] for r in run(participation=0.5, seed=3).history]
    assert cohort_sizes != [4]  # a cohort unlike the expected one tells the two denominators apart
    scale(2 * 0.5 / 4, participation=0.5, seed=3)
    scale(2 * 0.5 / 2, participation=0.25, sampler="fixed")
    scale(2 * 0.5 / 8, participation=1.0)


def local_scale() -> None:
    """Check that the mean of a cohort has the noise of each client."""
    scale(2 * 0.5 / math.sqrt(2), participation=0.25, sampler="fixed", noise="local")


def denominator() -> None:
    """Check that the sum over a cohort is divided by the expected size of the cohort."""
    options: dict[str, Any] = {"participation": 0.5, "seed": 3, "lr": 0.1, "clip": 100.0}
    (record,) = run(**options, noise_multiplier=0.0).history
    plain = movement(run(**options, noise_multiplier=0.0), 6)
    private = movement(run(**options, noise_multiplier=1e-12), 6)
    torch.testing.assert_close(private, plain * record["clients"] / 4, rtol=1e-5, atol=1e-6)


def clipped() -> None:
    """Check that no row is longer than the bound, also after rounding, and that shorter rows keep their bits."""
    for dtype in (torch.float32, torch.float64):
        g = torch.Generator().manual_seed(0)
        for limit in (1e-3, 0.7, 1.0, 1e3):
            rows = torch.randn(200, 33, generator=g, dtype=dtype) * limit * torch.logspace(-2, 3, 200)[:, None]
            clipped_rows = rows.to(dtype, copy=True)
            norms = shorten_(clipped_rows, limit)
            lengths = torch.linalg.vector_norm(clipped_rows.double(), dim=1)
            assert float(lengths.max()) <= limit
            last_row = rows[-1:].to(dtype, copy=True)
            shorten_(last_row, limit)
            assert float(last_row.double().norm()) <= limit
            for row, old_row, norm in zip(clipped_rows, rows.to(dtype), norms, strict=True):
                assert torch.equal(row, old_row) if norm <= limit else float(row.double().norm()) >= limit * (1 - 1e-5)


@cache
def package(kind: str, relation: str, count: int, *numbers: float) -> float:
    """Return epsilon at delta 1e-5 by dp-accounting's accountant for `count` events of the package."""
    import dp_accounting as dp

    relations = dp.NeighboringRelation
    *sampling_numbers, z = numbers
    inner = dp.GaussianDpEvent(z)
    events = {
        "gaussian": lambda: [(inner, count)],
        "poisson": lambda: [(dp.PoissonSampledDpEvent(*sampling_numbers, inner), count)],
        "without replacement": lambda: [(dp.SampledWithoutReplacementDpEvent(*sampling_numbers, inner), count)],
    }
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relations[relation])
    for event, times in events[kind]():
        accountant.compose(event, times)
    return float(accountant.get_epsilon(1e-5))


def epsilon(noise: str, sampler: str, participation: float, rounds: int = 7) -> float:
    """Return fastsam's epsilon after `rounds` rounds of 10 clients, with noise multiplier 1.2, at delta 1e-5."""
    accountant = Accountant(privacy_events(noise, sampler, participation, 10, 1.2, lambda rounds: 3), 1e-5)
    return [accountant.epsilon(t + 1) for t in range(rounds)][-1]


def same(epsilon: float, *events: Any) -> None:
    assert math.isclose(epsilon, package(*events), rel_tol=1e-12), (events, epsilon)


def poisson() -> None:
    same(epsilon("central", "bernoulli", 0.3), "poisson", "ADD_OR_REMOVE_ONE", 7, 0.3, 1.2)


def without_replacement() -> None:
    """Check epsilon for replaced clients, whose sensitivity is twice the clip."""
    same(epsilon("central", "fixed", 0.3), "without replacement", "REPLACE_ONE", 7, 10, 3, 0.6)


def unsampled() -> None:
    """All clients take part in every round, or once an epoch (10 clients, 3 a round: four rounds), or add noise
    locally."""
    for sampler in ("bernoulli", "fixed", "shuffled"):
        same(epsilon("central", sampler, 1.0), "gaussian", "ADD_OR_REMOVE_ONE", 7, 1.2)
    same(epsilon("central", "shuffled", 0.3), "gaussian", "ADD_OR_REMOVE_ONE", 2, 1.2)
    same(epsilon("local", "fixed", 0.3), "gaussian", "REPLACE_ONE", 3, 0.6)


def every_round() -> None:
    """Epsilon of one round, where a different bound gives 0, and of thousands equals the package's."""
    import dp_accounting as dp

    for z, delta in ((1.0, 1e-5), (40.0, 0.03), (3e4, 1e-4), (0.3, 1e-9)):
        accountant = Accountant(privacy_events("central", "bernoulli", 1.0, 10, z), delta)
        for rounds in (1, 2, 50, 4000):
            expected = dp.rdp.RdpAccountant().compose(dp.GaussianDpEvent(z), rounds).get_epsilon(delta)
            assert math.isclose(accountant.epsilon(rounds), expected, rel_tol=1e-12, abs_tol=1e-13), (z, delta, rounds)
