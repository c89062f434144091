"""States of clients and server: of the declared size, shared by reference to save memory, never written in place."""

import pytest
import torch

from fastsam import fed
from tests.helpers.fed_watch import Watched

# fed.loop.personal stores local parameters of personalised algorithms and counts their messages.
CASES = [cls() for cls in fed.algorithms.registry.values() if cls.own_parameters is fed.Algorithm.own_parameters] + [
    fed.FedLESAM(reference="last_round"), fed.FedLESAM_S(reference="last_round"),
    fed.FedLESAM_D(reference="last_round"), fed.FedLESAM(initial_perturbation="none"), fed.FedSMOO(dyn=False),
    fed.FedSMOO(s_rule="mu_all"), fed.FedSMOO(dyn=False, s_rule="mu_all"), fed.MimeLite(momentum_form="heavy_ball"),
]  # fmt: skip


def problem(inputs=(3,)):
    torch.manual_seed(0)
    size = torch.Size(inputs).numel()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(size, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    return model, [(torch.randn(n, *inputs), torch.arange(n) % 2) for n in (5, 8, 3)]


def run(algorithm, inputs=(3,), **options):
    model, clients = problem(inputs)
    return fed.run(model, clients, algorithm, **{"rounds": 4, "participation": 0.6, "batch_size": 4, **options})


@pytest.mark.parametrize("algorithm", CASES, ids=repr)
def test_states_are_as_large_as_declared(algorithm):
    watcher = Watched(algorithm)
    result = run(watcher, participation=1.0)
    w = watcher._servers[0]["w"]
    vectors = [t for t in watcher._servers[-1].values() if t.shape == w.shape]
    assert all(t.dtype == w.dtype for t in vectors)
    assert sum(t.numel() for t in watcher._servers[-1].values()) - len(vectors) * w.numel() <= 10  # a few numbers
    kept = max(sum(t.numel() for t in state.values()) for state in watcher._clients.values()) if watcher._clients else 0
    assert result.summary()["client_vectors"] == pytest.approx(kept / w.numel(), abs=0.2)
    size = sum(p.numel() * 4 for p in result.model.parameters()) / 1e6
    for record in result.history:
        assert record["megabytes_down"] == pytest.approx(record["clients"] * algorithm.download_vectors * size)
        assert record["megabytes_up"] == pytest.approx(record["clients"] * algorithm.upload_vectors * size)


@pytest.mark.parametrize("cls", [fed.FedLESAM, fed.FedLESAM_S, fed.FedLESAM_D])
def test_the_old_model_is_kept_by_reference(cls):
    """Clients of one round share the server's tensor; an absent client keeps an older tensor."""
    watcher = Watched(cls())
    run(watcher, participation=1.0, rounds=3)
    received_weights = watcher._servers[-2]["w"]  # the last round's
    assert all(state["w_old_i"] is received_weights for state in watcher._clients.values())
    attendance = [[0, 1], [1], [1, 2]]
    watcher = Watched(cls())
    run(watcher, rounds=3, sampler=lambda t, generator: attendance[t])
    old = {client: state["w_old_i"] for client, state in watcher._clients.items()}
    assert old[0] is watcher._servers[0]["w"] and old[1] is old[2] is watcher._servers[2]["w"]


@pytest.mark.parametrize(
    ("form", "inputs", "shapes"),
    [
        ("full", (3,), ((3, 3), (3,))), ("diag", (3,), ((3,), (3,))), ("channel", (2, 3, 3), ((2, 2), (2,))),
        ("full", (2, 3, 3), ((18, 18), (18,))), (None, (2, 3, 3), ((18, 18), (18,))),
        (None, (3, 20, 20), ((3, 3), (3,))),
    ],
)  # fmt: skip
def test_the_maps_of_fedrobust(form, inputs, shapes):
    watcher = Watched(fed.FedRobust(form=form, eta_2=0.5))
    run(watcher, inputs)
    assert watcher._clients
    for state in watcher._clients.values():
        assert (tuple(state["Lam"].shape), tuple(state["delta"].shape)) == shapes
        assert state["delta"].any()
