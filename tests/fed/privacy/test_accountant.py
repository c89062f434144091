"""Epsilon in the records, compared with dp-accounting's value for the sampler's events."""

import logging
import math
import re
from importlib.util import find_spec

import pytest

from fastsam.fed.loop.requirements import only_deltas
from fastsam.fed.privacy.accountant import Accountant, privacy_events
from tests.helpers import privacy_checks as checks
from tests.helpers.places import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("dp_accounting") is None, reason="epsilon is computed by dp-accounting: pip install 'fused-sam[privacy]'"
)


SLOW = [
    pytest.param(c, marks=pytest.mark.slow) for c in ("poisson", "without_replacement")
]  # `make test` runs them in the test of the page


@pytest.mark.parametrize("check", ["unsampled", "every_round", *SLOW])
def test_the_events_of_a_sampler(check: str, caplog: pytest.LogCaptureFixture) -> None:
    getattr(checks, check)()
    level = logging.getLogger("absl").level
    assert level < logging.ERROR  # the package's warnings come back


def test_every_record_has_epsilon_and_the_summary_whom_it_hides() -> None:
    options = {"accountant": "rdp", "noise_multiplier": 1.2, "participation": 1.0, "delta": 1e-5, "rounds": 3}
    result = checks.run(**options)
    epsilons = [record["epsilon"] for record in result.history]
    expected = [checks.package("gaussian", "ADD_OR_REMOVE_ONE", t, 1.2) for t in (1, 2, 3)]
    assert epsilons == pytest.approx(expected, rel=1e-12)
    assert {record["delta"] for record in result.history} == {1e-5}
    privacy = result.summary()["privacy"]
    assert privacy == {"neighbours": "one client is there or not", "delta": 1e-5, "epsilon": epsilons[-1]}


def test_delta_is_below_one_in_so_many_clients_by_default() -> None:
    (record,) = checks.run(accountant="rdp", participation=1.0).history
    assert record["delta"] == checks.CLIENTS**-1.1


def test_noise_of_the_clients_counts_the_rounds_of_the_busiest_one() -> None:
    result = checks.run(accountant="rdp", noise="local", participation=0.5, rounds=5, delta=1e-5, seed=3)
    busiest = next(
        n
        for n in range(1, 6)
        if math.isclose(result.history[-1]["epsilon"], checks.package("gaussian", "REPLACE_ONE", n, 1.0))
    )
    assert busiest in (3, 4, 5)
    assert [r["epsilon"] for r in result.history] == sorted(r["epsilon"] for r in result.history)


def test_without_noise_nothing_is_said() -> None:
    result = checks.run(noise_multiplier=0.0, accountant="rdp")
    assert "epsilon" not in result.history[0] and result.summary()["privacy"] is None


def test_without_an_accountant_there_is_noise_and_no_epsilon() -> None:
    result = checks.run(sampler=lambda t, generator: [0, 1, 2])
    assert "epsilon" not in result.history[0] and result.summary()["privacy"] is None
    assert float(checks.movement(result, 6).std()) > 0.1


# --- The figures of docs/privacy.md, by dp-accounting and by ours.


PAGE = (ROOT / "docs" / "privacy.md").read_text()
EVENTS = {  # dp-accounting's events for each protocol of the table: 100 clients, 100 rounds, z = 1
    'sampler="bernoulli", participation=0.1': ("poisson", "ADD_OR_REMOVE_ONE", 100, 0.1, 1.0),
    'sampler="fixed", participation=0.1': ("without replacement", "REPLACE_ONE", 100, 100, 10, 0.5),
    "participation=1.0": ("gaussian", "ADD_OR_REMOVE_ONE", 100, 1.0),
    'sampler="shuffled", participation=0.1': ("gaussian", "ADD_OR_REMOVE_ONE", 10, 1.0),
}


def figures() -> dict[str, float]:
    return {protocol: float(epsilon) for protocol, epsilon in re.findall(r"^\| `(.*)` \| ([\d.]+) \|$", PAGE, re.M)}


def test_the_page_has_these_protocols() -> None:
    assert figures().keys() == EVENTS.keys()


@pytest.mark.parametrize("protocol", EVENTS)
def test_the_figure_of_a_protocol(protocol: str) -> None:
    options = dict(re.findall(r'(\w+)="?([\w.]+)"?', protocol))
    share, sampler, noise = float(options["participation"]), options.get("sampler", "bernoulli"), options.get("noise")
    actual = Accountant(privacy_events(noise or "central", sampler, share, 100, 1.0), 1e-5).epsilon(100)
    assert actual == pytest.approx(checks.package(*EVENTS[protocol]), rel=1e-12)
    assert f"{actual:.3f}" == f"{figures()[protocol]:.3f}"


def test_the_algorithms_of_the_page() -> None:
    from fastsam.fed.algorithms import registry

    served_names = {kind.__name__ for kind in registry.values() if only_deltas(kind())}
    line = PAGE[PAGE.index("So DP-FedAvg") : PAGE.index("## The options")]
    names = set(re.findall(r"\b(?:Fed\w+|SCAFFOLD)\b", line.replace("DP-Fed", "")))
    assert names & {kind.__name__ for kind in registry.values()} == names
    assert {name for name in names if name in served_names} >= served_names
    assert {name for name in names if name not in served_names} == {"SCAFFOLD", "FedNova", "FedExP", "FedDyn"}
