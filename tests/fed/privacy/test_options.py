"""Options that noise excludes: the error comes before the run, with a remedy."""

import re
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.algorithms import registry
from fastsam.fed.loop.requirements import only_deltas
from tests.helpers import privacy_checks as checks
from tests.helpers.fed_refusals import refusals

ASKED = {"accountant": "rdp", "participation": 0.5}


def run_private(**options: Any) -> None:
    checks.run(**ASKED | {"run_dir": "run"} | options)


def run_spelling(**options: Any) -> None:
    fed.run(nn.Linear(2, 2), [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))], fed.FedAvg(), rounds=1, **options)


test_refused = refusals(
    (lambda: run_private(clip=None),
     r"noise_multiplier=2 needs a bound on the deltas.* Use privacy=fed.Privacy\(clip="),
    (lambda: run_private(sampler=lambda t, g: [0]),
     "there is none for a sampler of your own.*'bernoulli', 'fixed' or 'shuffled'.*accountant=None"),
    (lambda: run_private(sampler="simulator"), "there is none for sampler='simulator'.*accountant=None"),
    (lambda: run_private(available=lambda t: [0, 1]), "there is none for available=.*accountant=None"),
    (lambda: run_private(delta=0.0), "delta .* > 0, got 0.0"),
    (lambda: run_private(delta=-1e-5), "delta .* > 0"),
    (lambda: run_private(delta=1.0), r"delta must be a number in \(0, 1\), below 1/clients, such as 1e-5; got 1.0"),
    (lambda: run_private(delta=0.125), "one random client of 8 .*got 0.125. Use 1e-5"),
    (lambda: run_private(noise_multiplier=-1.0), "noise_multiplier must be a finite number >= 0, got -1"),
    (lambda: run_private(noise_multiplier=float("nan")), "noise_multiplier must be a finite number"),
    (lambda: run_private(noise_multiplier=0.0, noise="local"),
     "noise='local' needs noise, .*fed.Privacy.*noise_multiplier=1.0"),
    (lambda: run_private(noise="gauss"), "noise must be one of 'central', 'local', got 'gauss'"),
    (lambda: run_private(accountant="pld"), "accountant must be one of None, 'rdp', got 'pld'"),
    (lambda: run_private(weighting="samples"),
     "noise_multiplier=2 needs clients that count alike, but weighting='samples' .*Use weighting='uniform'"),
    (lambda: run_private(aggregation="median"), "noise='central' needs .* aggregation='median'.*noise='local'"),
    (lambda: run_private(local_parameters="bias"),
     "keep nothing, but the run has local_parameters='bias'. Leave out local_parameters"),
    (lambda: run_private(algorithm=fed.SCAFFOLD()), "the clients of SCAFFOLD send or keep more.*Use one of .*FedSAM"),
    (lambda: run_private(algorithm=fed.FedExP()), "the clients of FedExP send or keep more"),
    (lambda: run_private(algorithm=fed.Centralised_SGD()), "Centralised_SGD has no clients"),
    # other spellings
    (lambda: run_spelling(noise="local"), r"no option 'noise': write privacy=fed.Privacy\(noise=...\)", TypeError),
    (lambda: run_spelling(privacy=0.5), "privacy must be a fed.Privacy, or a table of its options; got 0.5"),
    (lambda: run_spelling(privacy={"clipp": 0.5}),
     "privacy has no option 'clipp' .did you mean 'clip'.*its options: clip, noise_mult"),
)  # fmt: skip


def test_averaged_buffers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    data = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 0])) for _ in range(4)]
    options: dict[str, Any] = {"rounds": 1, "privacy": fed.Privacy(clip=1.0, noise_multiplier=1.0, accountant=None)}
    with pytest.raises(ValueError, match="buffers='average'. Use buffers='keep', or a model with group norms"):
        fed.run(model, data, fed.FedAvg(), buffers="average", **options)
    with pytest.raises(ValueError, match="the run has buffers='local'"):
        fed.run(model, data, fed.FedAvg(), buffers="local", **options)
    with pytest.raises(ValueError, match="the clients of FedBN keep something"):
        fed.run(model, data, fed.FedBN(), **options)
    fed.run(model, data, fed.FedAvg(), buffers="keep", **options)


def test_every_algorithm_that_is_not_served_is_refused_by_name() -> None:
    for kind in registry.values():
        if not only_deltas(kind()):
            with pytest.raises(ValueError, match=f"only their delta .* {kind.__name__} "):
                checks.run(algorithm=kind())


def test_a_client_state_alone_is_refused() -> None:
    class Stateful(fed.FedAvg):
        def init_client(self, server: Any) -> Any:
            return {"seen": torch.zeros(1)}

    with pytest.raises(ValueError, match="the clients of Stateful keep something, which depends on the rounds"):
        checks.run(algorithm=Stateful())


def test_a_server_that_asks_for_more_than_the_mean_is_told() -> None:
    class Curious(fed.FedAvg):
        def step_server(self, server: Any, aggregate: Any, round: Any) -> Any:
            return super().step_server(server, aggregate, round) if aggregate.scalar("loss") else server

    with pytest.raises(fed.AlgorithmError, match="only the noisy mean of the deltas.*requested aggregate.scalar"):
        checks.run(algorithm=Curious())


def test_the_algorithm_does_not_learn_how_many_came() -> None:
    class Counted(fed.FedAvg):
        sizes: ClassVar[set[int]] = set()

        def local_step(self, server: Any, client: Any, round: Any) -> Any:
            self.sizes.add(round.cohort_size)
            return super().local_step(server, client, round)

        def step_server(self, server: Any, aggregate: Any, round: Any) -> Any:
            self.sizes.update((round.cohort_size, aggregate.num_clients))
            return super().step_server(server, aggregate, round)

    came = [r["clients"] for r in checks.run(algorithm=Counted(), participation=0.5, rounds=4).history]
    assert len(set(came)) > 2 and Counted.sizes == {1, 4}  # 1: of the trial before the first round


def test_the_sampler_is_named_where_epsilon_depends_on_it() -> None:
    """The refusal has the epsilon of each sampler, as a run with that sampler records it."""
    pytest.importorskip("dp_accounting")
    for place in ({}, {"noise": "local"}, {"cohort": 4, "participation": 0.2}):
        options = ASKED | {"rounds": 3, "delta": 1e-3} | place
        with pytest.raises(ValueError, match="accountant='rdp' needs a named sampler") as message:
            checks.run(**options, sampler=None)
        for sampler in ("bernoulli", "fixed"):
            epsilon = checks.run(**options, sampler=sampler).history[-1]["epsilon"]
            assert re.search(rf"sampler='{sampler}' \([^)]*epsilon {epsilon:.4g} if one client ", str(message.value))
    for options in ({"accountant": None}, {"noise_multiplier": 0.0}, {"participation": 1.0}):
        checks.run(**ASKED | options, sampler=None)


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ValueError, match=r"dp-accounting.*pip install 'fused-sam\[privacy\]', or .*accountant=None"):
        checks.run(**ASKED)
    with pytest.raises(ValueError, match="dp-accounting"):
        checks.run(**ASKED, sampler=None)
    checks.run(**ASKED | {"accountant": None})


@pytest.mark.parametrize("rule", ["median", "krum"])
def test_a_robust_rule_works_on_noisy_rows(rule: str) -> None:
    checks.run(participation=1.0, noise="local", aggregation=rule)
