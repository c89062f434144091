"""docs/algorithms.md and docs/own_algorithm.md say what the classes do."""

import re
import shlex
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch

from fastsam import fed
from fastsam.fed.algorithms.fedgsam import SurrogateGap
from fastsam.fed.algorithms.fedsmoo import DualSAM
from fastsam.fed.algorithms.fedsol import Orthogonal
from fastsam.fed.algorithms.fedtoga import Remembering
from fastsam.fed.algorithms.fedwmsam import AlongPath
from fastsam.lab import config
from fastsam.lab.import_paths import import_object
from tests.helpers.fed_watch import Watched
from tests.helpers.pages import blocks
from tests.helpers.places import ROOT

pytestmark = pytest.mark.pages

PAGE = (ROOT / "docs" / "algorithms.md").read_text()
ROWS = {
    match[1].lower().replace("_", "-"): [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if (match := re.match(r"\| `(\w+)\(.*\)` \|", line))
}
NONE = "–"
DIRECTIONS = {  # text of a direction, by the first class in this order
    fed.Shifted: "`w_old_i − w^t`",
    DualSAM: "`alpha·(g1 − mu_i) − s`",
    Orthogonal: "`L·g_p`",
    Remembering: "`g1 + kappa·D + last`",
    AlongPath: "`w^t + k·D_i − w`",
    fed.SAM: "`g1`",
    fed.Step: NONE,
}


def small_model():
    """A model of 11 parameters and three clients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1, bias=False))
    x = torch.randn(3, 4, 3)
    return model, [(x[i], torch.randn(4, 1)) for i in range(3)]


def run(algorithm, **options):
    model, clients = small_model()
    loss = torch.nn.functional.mse_loss
    if isinstance(algorithm, Watched) and isinstance(
        algorithm._inner, fed.FedNTD
    ):  # needs labels; has the same number of parameters
        model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        clients, loss = [(x, torch.arange(4) % 2) for x, _ in clients], torch.nn.functional.cross_entropy
    if isinstance(algorithm, Watched) and isinstance(algorithm._inner, fed.FedBN):
        model[1] = torch.nn.LayerNorm(2)
    return fed.run(model, clients, algorithm, loss=loss, **{"rounds": 2, **options})


def vectors(cell: str) -> set[str]:
    """The names of the vectors in a cell such as "`w`, `c`"."""
    return set(re.findall(r"`([A-Za-z_]+)`", cell))


def test_the_table_has_every_algorithm():
    assert sorted(ROWS) == sorted(fed.algorithms.registry)


@pytest.mark.parametrize("name", list(fed.algorithms.registry))
def test_the_table_says_what_the_class_declares(name):
    cls = fed.algorithms.registry[name]()
    *_, downloads, uploads, _, _ = ROWS[name]
    assert ROWS[name][0] == f"`{cls!r}`"
    assert (downloads, uploads) == (f"{cls.download_vectors:g}", f"{cls.upload_vectors:g}")


@pytest.mark.parametrize("name", list(fed.algorithms.registry))
def test_the_table_says_what_the_class_does(name):
    """Its states and the constants of its steps, in the second round of a run."""
    watcher = Watched(fed.algorithms.registry[name]())
    own_decay = watcher.local_optimizer is not None  # the optimizer of the algorithm has a decay
    result = run(watcher, participation=1.0, local_epochs=5, weight_decay=0.0 if own_decay else 0.1)
    _, d, a, b, q, server, client, _, _, passes, memory = ROWS[name]
    step = watcher._steps[-1]
    assert next(cell for kind, cell in DIRECTIONS.items() if isinstance(step, kind)) == d
    gap = isinstance(step, SurrogateGap)
    assert (getattr(step, "q", None) is not None) == (q != NONE) and (step.prox is not None) == ("phi" in q)
    assert (a != "1") == (step.a != 1 or gap or name == "fedspeed")
    assert (b != "0") == (gap or getattr(step, "b", None) is not None)
    size_of_w = watcher._servers[0]["w"].shape
    assert {key for key, t in watcher._servers[-1].items() if t.shape == size_of_w} == vectors(server)
    assert {key for key, t in watcher._clients[0].items() if t.shape == size_of_w} == vectors(client)
    record = result.history[-1]
    assert record["backprops"] // record["steps"] == int(passes)  # a round may begin with some more
    size_of_model = sum(p.numel() * p.element_size() for p in result.model.parameters()) / 1e6
    assert result.summary()["client_megabytes"] == pytest.approx((2 + int(memory)) * size_of_model)
    active, size = record["clients"], 10 * 4 / 1e6
    stays = type(watcher._inner).own_parameters is not fed.Algorithm.own_parameters
    assert stays or record["megabytes_down"] == pytest.approx(active * watcher.download_vectors * size)


@pytest.mark.parametrize("name", list(fed.algorithms.registry))
def test_the_commands_are_understood(name):
    """The page says: the name in lower case, and an option as a flag."""
    cls = fed.algorithms.registry[name]()
    options = {key: value for key, value in vars(cls).items() if type(value) is float}
    flags = [word for key, value in options.items() for word in (f"--{name}.{key.replace('_', '-')}", str(value))]
    words = ["--algorithm", name, *flags]
    resolved_config = config.resolve(config.read(ROOT / "examples" / "digits.toml", words))
    assert resolved_config.algorithm == name and options.items() <= resolved_config.options.items()


def test_the_schedules_of_the_page_are_understood():
    commands = [line.strip() for line in PAGE.splitlines() if line.startswith("    fastsam run") and "--rho" in line]
    assert len(commands) >= 3
    for command in commands:
        resolved_config = config.resolve(config.read(ROOT / "examples" / "digits.toml", shlex.split(command)[3:]))
        assert isinstance(resolved_config.options["rho"], str)


def test_the_examples_of_own_algorithms_are_what_they_say():
    names = {"__name__": "own"}
    for block in (b for b in blocks("docs/own_algorithm.md") if b.language == "python"):
        block.run(names)
        assert len(names["result"].history) == 10
    torch.manual_seed(0)
    model = torch.nn.Sequential(OrderedDict(hidden=torch.nn.Linear(3, 3), out=torch.nn.Linear(3, 2)))
    clients = [(torch.randn(n, 3), torch.arange(n) % 2) for n in (5, 9, 4)]

    def final(algorithm):
        return [p.detach() for p in fed.run(model, clients, algorithm, rounds=4, participation=1.0).model.parameters()]

    expected = import_object(f"{ROOT / 'examples' / 'own_algorithm.py'}:FedAvgM", "algorithm")
    for options in ({"beta": 0.5}, {"beta": 0.0, "rho": 0.3}):
        for p, q in zip(final(names["FedAvgM"](**options)), final(expected(**options))):
            assert torch.equal(p, q)
    ifca, fedproto = (
        import_object(f"{ROOT / 'examples' / name}", "algorithm")
        for name in ("clusters.py:IFCA", "prototypes.py:FedProto")
    )
    pairs = [(names["FedAvgM"](beta=0.0, rho=0.3), fed.FedSAM(rho=0.3)), (names["Scaffold"](), fed.SCAFFOLD())]
    same_as_fedavg = (names["OwnHead"](mu=0.0), names["Plain"](), names["Sparse"](1.0), ifca(1))
    for actual, built_in in (*pairs, *((algorithm, fed.FedAvg()) for algorithm in same_as_fedavg)):
        for p, q in zip(final(actual), final(built_in)):
            torch.testing.assert_close(p, q)
    assert not all(map(torch.equal, final(names["Sparse"](0.1)), final(fed.FedAvg())))
    shape = {"classes": 2, "features": 3}
    single_run = fed.run(model, clients[:1], fed.FedAvg(), rounds=4)
    protos = fed.run(model, clients, fedproto(mu=0.0, **shape), rounds=4, participation=1.0)
    for p, q in zip(protos.client_model(0).parameters(), single_run.model.parameters()):
        torch.testing.assert_close(p, q)
    assert (
        protos.history[0]["train_loss"]
        != fed.run(model, clients, fedproto(mu=9.0, **shape), rounds=4, participation=1.0).history[3]["train_loss"]
    )
    # The received model says the same as the client's at its first step: where there is one step, nothing is distilled.
    for p, q in zip(final(names["Distilled"]()), final(fed.FedAvg())):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)
    assert not all(map(torch.equal, final(names["Distilled"]()), final(fed.FedAvg())))
    record = Watched(names["Averaged"]())
    final(record)
    for old_record, new_record in pairwise(
        record._servers
    ):  # from the second round on, what is evaluated is not what is trained
        torch.testing.assert_close(new_record["w"], (old_record["w"] + new_record["x"]) / 2)
    assert not torch.equal(new_record["w"], new_record["x"])
    with pytest.raises(ValueError, match=r"beta must lie in \[0, 1\)"):
        names["FedAvgM"](beta=1.0)


def test_the_page_of_own_algorithms_names_every_function_and_field():
    page = (ROOT / "docs" / "own_algorithm.md").read_text()
    for function in ("init_server", "init_client", "local_step", "train_client", "finish", "step_server"):
        assert f"| `{function}(" in page
    for name in fed.Round.__dataclass_fields__:
        assert f"`{name}`" in page
