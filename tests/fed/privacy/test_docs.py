"""The figures of docs/privacy.md, by dp-accounting and by ours."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from fastsam.fed.privacy.accountant import Accountant, law
from fastsam.fed.privacy.options import serves
from tests.helpers import privacy_checks as checks
from tests.helpers.places import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("dp_accounting") is None, reason="epsilon is computed by dp-accounting: pip install 'fused-sam[privacy]'"
)

PAGE = (ROOT / "docs" / "privacy.md").read_text()
EVENTS = {  # of dp-accounting, for each protocol of the table: 100 clients, 100 rounds, z = 1
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
    ours = Accountant(law(noise or "central", sampler, share, 100, 1.0), 1e-5).epsilon(100)
    assert ours == pytest.approx(checks.package(*EVENTS[protocol]), rel=1e-12)
    assert f"{ours:.3f}" == f"{figures()[protocol]:.3f}"


def test_the_algorithms_of_the_page() -> None:
    from fastsam.fed.algorithms import registry

    served = {kind.__name__ for kind in registry.values() if serves(kind())}
    line = PAGE[PAGE.index("So DP-FedAvg") : PAGE.index("## The options")]
    named = set(re.findall(r"\b(?:Fed\w+|SCAFFOLD)\b", line.replace("DP-Fed", "")))
    assert named & {kind.__name__ for kind in registry.values()} == named
    assert {name for name in named if name in served} >= served
    assert {name for name in named if name not in served} == {"SCAFFOLD", "FedNova", "FedExP", "FedDyn"}
