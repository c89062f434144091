"""The noise of whole runs: its scale, the influence of one client, empty rounds, a resumed run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.algorithms import registry
from fastsam.fed.common import seeds
from fastsam.fed.loop.requirements import only_deltas
from fastsam.fed.stages.noise import normals
from tests.helpers import privacy_checks
from tests.helpers import privacy_checks as checks
from tests.helpers.mutants.apply import replace_source
from tests.helpers.mutants.privacy import MUTANTS

BITS = ("scales", "local_scale", "denominator", "clipped")
KINDS: dict[str, dict[str, Any]] = {
    "poisson": {"participation": 0.5},
    "local": {"participation": 0.5, "noise": "local"},
}


@pytest.mark.parametrize("check", BITS)
def test_what_must_hold(check: str) -> None:
    getattr(checks, check)()


class Summed(fed.FedAvg):
    """FedAvg that stores the sum that the server reads."""

    mean: torch.Tensor

    def step_server(self, server: Any, aggregate: Any, round: Any) -> Any:
        type(self).mean = aggregate.mean("delta")
        return super().step_server(server, aggregate, round)


def total(cohort: list[int], **options: Any) -> torch.Tensor:
    """Return the sum of a round as the server reads it, for clients whose inputs are 1e4 times larger than usual."""
    g = torch.Generator().manual_seed(1)
    data = [(1e4 * torch.randn(6, 9, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(6)]
    torch.manual_seed(0)
    fed.run(
        nn.Linear(9, 3), data, Summed(), rounds=1, lr=3.0, batch_size=2, executor="sequential",
        sampler=lambda t, g: cohort, privacy=fed.Privacy(accountant=None, **options),
    )  # fmt: skip
    return Summed.mean * len(cohort)


@pytest.mark.parametrize("noise", [0.0, 1.0], ids=["clip alone", "with noise"])
@pytest.mark.parametrize("clip", [0.37, *(pytest.param(c, marks=pytest.mark.slow) for c in (1e-3, 50.0))])
def test_no_client_moves_the_sum_by_more_than_the_clip(clip: float, noise: float) -> None:
    """With and without it, client for client; the noise is the same in both, being a function of seed and round."""
    everybody = list(range(6))
    total_sum = total(everybody, clip=clip, noise_multiplier=noise)
    moves = [
        total([i for i in everybody if i != run_1], clip=clip, noise_multiplier=noise) - total_sum
        for run_1 in everybody
    ]
    lengths = [float(move.norm()) for move in moves]
    assert max(lengths) <= clip * (1 + 1e-12)  # the noise that is taken out again leaves a last bit of float64
    assert max(lengths) > 0.99 * clip


class Gradients(fed.MimeLite):
    """MimeLite that stores the clients' vectors, by name."""

    rows: dict[str, list[torch.Tensor]]

    def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        state, upload = super().finish(server, client, results, round)
        for name, rows in upload.mean.items():
            type(self).rows.setdefault(name, []).extend(rows)
        return state, upload


@pytest.mark.parametrize("local", [None, "bias"])
@pytest.mark.parametrize("executor", ["sequential", "vmap"])
def test_the_clip_bounds_the_full_gradient_that_mimelite_sends(executor: str, local: str | None) -> None:
    g = torch.Generator().manual_seed(1)
    data = [(10.0**i * torch.randn(6, 9, generator=g), torch.randint(0, 3, (6,), generator=g)) for i in range(-3, 3)]
    norms = []
    for clip in (None, 0.5):
        Gradients.rows = {}
        torch.manual_seed(0)
        options: dict[str, Any] = {"rounds": 1, "participation": 1.0, "lr": 0.3, "executor": executor}
        privacy = fed.Privacy(clip=clip)
        fed.run(nn.Linear(9, 3), data, Gradients(), privacy=privacy, local_parameters=local, **options)
        sent = {name: rows[: len(data)] for name, rows in Gradients.rows.items()}  # later rows compare clients
        norms.append({name: [float(row.norm()) for row in rows] for name, rows in sent.items()})
    for name in ("delta", "G"):
        pairs = list(zip(norms[0][name], norms[1][name], strict=True))
        assert any(free > 1 for free, _ in pairs) and any(free < 0.5 for free, _ in pairs)
        assert all(clipped == (free if free <= 0.5 else pytest.approx(0.5, rel=1e-4)) for free, clipped in pairs)


def test_nobody_in_a_round_is_noise_alone() -> None:
    """Poisson sampling has empty rounds; skipping or redrawing them would reveal that no client took part."""
    result = checks.run(size=2000, participation=0.02, rounds=1)
    (record,) = result.history
    assert record["clients"] == 0 and "noise only" in record["skipped"]
    checks.scale(2 * 0.5 / (0.02 * 8), participation=0.02)
    plain = checks.run(participation=0.02, noise_multiplier=0.0).history[0]
    assert plain["clients"] == 1  # as ever where there is no noise


class ClientDeltas:
    """Measures that keep, for every round in which they are called, the clients' deltas and the mean of the round."""

    def __init__(self) -> None:
        self.deltas: dict[int, list[torch.Tensor]] = {}
        self.means: dict[int, torch.Tensor] = {}

    def snapshots(self, round: int, steps: int) -> tuple[int, ...]:
        return ()

    def clients(self, before: Any, results: Any, facts: Any) -> dict[str, list[float]]:
        self.deltas.setdefault(facts.index, []).extend(results.delta.double())
        return {"one": [1.0] * len(results.delta)}

    def round(self, before: Any, after: Any, aggregate: Any, facts: Any) -> dict[str, float | None]:
        self.means[facts.index] = aggregate.mean("delta")
        return {"measured_clients": aggregate.scalar("one")}


def test_measures_read_what_has_no_noise_and_a_round_without_clients_has_no_measures() -> None:
    options: dict[str, Any] = {"rounds": 8, "participation": 0.15, "lr": 0.5}
    measures = ClientDeltas()
    result = checks.run(measures=measures, **options)
    cohorts = [record["clients"] for record in result.history]
    assert 0 in cohorts and max(cohorts) > 1
    assert [t for t, size in enumerate(cohorts) if size] == sorted(measures.means) == sorted(measures.deltas)
    for t, mean in measures.means.items():
        assert len(measures.deltas[t]) == result.history[t]["measured_clients"] == cohorts[t]
        true = torch.stack(measures.deltas[t]).mean(0)
        assert true.norm() > 0.01 and (mean - true).norm() < 1e-12
    assert all(("measured_clients" in record) == (record["clients"] > 0) for record in result.history)
    for measures in ((), ["sharpness", "consistency"]):  # other measures, or none: the same run
        same = checks.run(measures=measures, **options)
        assert torch.equal(checks.movement(same, 6), checks.movement(result, 6))
        assert all(("consistency" in r) == (bool(measures) and r["clients"] > 0) for r in same.history)


def test_other_seeds_and_rounds_have_other_noise() -> None:
    draws = [normals(1000, seed, purpose, t) for seed in (0, 1) for purpose in ("noise", "count") for t in (0, 1)]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(8)
    assert float(correlation.abs().max()) < 0.16
    assert torch.equal(normals(1000, 0, "noise", 1)[:10], normals(10, 0, "noise", 1))


def test_the_noise_is_philox_from_its_counter_zero() -> None:
    """The noise does not depend on earlier draws, in this thread and other threads."""
    for parts in ((0, "noise", 0), (5, "node", 1, 2, 3)):
        normals(3, "what", "comes", "before")
        expected = np.random.Generator(np.random.Philox(key=seeds.derive(*parts))).standard_normal(50)
        assert normals(50, *parts).tolist() == expected.tolist()


def test_epsilon_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="epsilon is computed by dp-accounting")
    options = KINDS["local"] | {"accountant": "rdp"}
    epsilons = [r["epsilon"] for r in checks.run(rounds=4, **options).history]
    checks.run(rounds=2, run_dir=tmp_path, **options)
    assert [r["epsilon"] for r in checks.run(rounds=4, run_dir=tmp_path, resume=True, **options).history] == epsilons


def test_who_is_served() -> None:
    served_names = {run_1.__name__ for run_1 in registry.values() if only_deltas(run_1())}
    assert served_names >= {"FedAvg", "FedSAM", "FedProx", "FedAvgM", "FedAdam", "FedAdagrad", "FedYogi", "FedGSAM"}
    assert not served_names & {
        "SCAFFOLD", "FedNova", "FedExP", "FedDyn", "FedSMOO", "FedCM", "MimeLite", "Centralised_SGD", "FedBN",
    }  # fmt: skip
    for name in sorted(served_names):
        checks.run(algorithm=getattr(fed, name)(), lr=0.1, executor="sequential")


# --- Are the checks of noise, clip and epsilon worth anything? Every wrong formula must fail one of them.


ACCOUNTS = {"poisson", "without_replacement", "unsampled", "every_round"}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=[pytest.mark.slow] * (m.case in ("poisson", "without_replacement"))) for m in MUTANTS],
    ids=[f"{m.case}: {m.function}: {m.new}" for m in MUTANTS],
)
def test_a_wrong_formula_is_noticed(mutant):
    if mutant.case in ACCOUNTS:
        pytest.importorskip("dp_accounting", reason="epsilon is computed by dp-accounting")
    with replace_source(*mutant[:4]), pytest.raises(AssertionError):
        getattr(privacy_checks, mutant.case)()


def test_every_mutant_is_there_once():
    assert len(set(MUTANTS)) == len(MUTANTS)
