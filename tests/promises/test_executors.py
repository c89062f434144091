"""The matrix of executors, and of algorithms and options of a run: the bits of `sequential` in two parts, with client
states on disk; or its numbers within a tolerance, or a refusal.

An executor or an algorithm is in the matrix by being registered.
"""

import contextlib
import functools
from pathlib import Path

import pytest

from fastsam import fed
from fastsam.fed import executors
from fastsam.fed.algorithms.base import has_loop
from tests.helpers import oracle
from tests.helpers.fed_runs import FIRST, FLOAT, SIZES, Drops, digest, norm_model, run
from tests.promises import cases

NORMED = {"model": norm_model, "sizes": (8, 16, 8, 12), "batch_size": 4}
NOISE = {"privacy": {"clip": 0.5, "noise_multiplier": 1.0, "accountant": None}, "momentum": 0.0}
# Every algorithm, and every option that reaches into the training of a client or into the server's step.
ALGORITHMS = {
    name: (
        cases.make_algorithm(FIRST[cls.__name__]) if cls.__name__ in FIRST else cls(),
        NORMED if name == "fedbn" else {},
    )
    for name, cls in fed.algorithms.registry.items()
}
OPTIONS = {
    "clip": (cases.make_algorithm("fedlesam"), {"clip_norm": 0.05}),
    "clip of the linear part": (
        cases.make_algorithm("fedprox"),
        {"clip_norm": 0.05, "clip_scope": "linear", "weighting": "samples"},
    ),
    "averaged buffers": (fed.FedSAM(), {**NORMED, "buffers": "average"}),
    "local buffers": (fed.FedSAM(), {**NORMED, "buffers": "local"}),
    "local steps": (cases.make_algorithm("fedsmoo"), {"local_steps": 7, "local_epochs": 1, "drop_last": True}),
    "whole batches": (fed.FedAvg(), {"drop_last": True}),
    "personal head": (fed.FedSAM(), {"local_parameters": "2.*"}),
    "personal head with duals": (cases.make_algorithm("fedsmoo"), {"local_parameters": "2.*"}),
    "median": (fed.FedCM(), {"aggregation": "median", "participation": 1.0}),
    "krum": (fed.FedCM(), {"aggregation": "krum", "participation": 1.0}),
    "compression": (fed.FedAvg(), {"compression": fed.TopK(0.3)}),
    "noise": (fed.FedAvg(), NOISE),
    "noise of clients": (
        fed.FedAvg(),
        {"privacy": {"clip": 0.5, "noise_multiplier": 1.0, "noise": "local", "accountant": None}, "momentum": 0.0},
    ),
    "schedules": (fed.FedSAM(rho="0.3/round"), {"lr": "0.2/round", "server_lr": "1/round"}),
    "last round's model": (fed.FedLESAM_S(reference="last_round"), {}),
    "dual of all clients": (fed.FedSMOO(s_rule="mu_all"), {}),
    "dropout": (fed.FedSAM(), {"model": Drops}),
    "dropout in a first gradient": (fed.MimeLite(), {"model": Drops}),
    "dropout beside a teacher": (fed.FedNTD(), {"model": Drops}),
    "active teacher": (cases.make_algorithm("fedntd"), {"clip_norm": 0.05, "momentum": 0.5}),
}
CASES = ALGORITHMS | OPTIONS
NOT_STACKED = ("averaged buffers", "local buffers", *(name for name in OPTIONS if "dropout" in name))
STACKED = ["vmap"]
EXACT = [name for name in executors.registry if name not in ("sequential", *STACKED)]


def train(name, executor="sequential", slots=None, **changes):
    algorithm, options = CASES[name]
    options = {"sizes": SIZES, **options, **changes}
    return run(algorithm, executor, slots, options.pop("model", lambda: oracle.smooth_model(FLOAT))(), **options)


def bits(name, *arguments, **options):
    """The digest of weights and records, and the tensors of the models of all clients that have one."""
    result = train(name, *arguments, **options)
    models = [result.model]
    with contextlib.suppress(ValueError):  # clients without models
        models += [result.client_model(i) for i in range(len(CASES[name][1].get("sizes", SIZES)))]
    return digest(result), [t.tolist() for model in models for t in model.state_dict().values()]


@functools.cache
def plain_bits(name, is_on_stand_in):
    """Return the bits of `sequential`. On the stand-in for CUDA a model with dropout draws other numbers."""
    return bits(name)


def cells(names, of_executors):
    """Return pairs of cases and executors: every case with the first executor, and one in four of the others."""
    return [
        pytest.param(name, executor, (1, 3, 7)[i % 3], marks=pytest.mark.slow if j and (i + j) % 4 else [])
        for i, name in enumerate(names)
        for j, executor in enumerate(of_executors)
    ]


@pytest.mark.parametrize(("name", "executor", "slots"), cells(CASES, sorted(EXACT, key="threads".__ne__)))
def test_a_run_in_parts_has_the_bits_of_one_in_one_piece(
    name: str, executor: str, slots: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if executor != "threads":
        request.getfixturevalue("no_cuda")
    refusal = "in a loop of its own" if has_loop(CASES[name][0]) else None
    if executor == "graph" and refusal:
        with pytest.raises(ValueError, match=f"'graph' cannot serve here: .*{refusal}"):
            train(name, executor, slots)
        return
    train(name, rounds=1, run_dir=tmp_path)
    assert bits(name, executor, slots, run_dir=tmp_path, resume=True) == plain_bits(
        name, is_on_stand_in=executor != "threads"
    )


@pytest.mark.parametrize(("name", "executor", "slots"), cells(OPTIONS, STACKED))
def test_stacked_clients_agree(name: str, executor: str, slots: int) -> None:
    if name in NOT_STACKED:
        with pytest.raises(ValueError, match=f"'{executor}' cannot serve here"):
            train(name, executor, slots)
        return
    plain, stacked_result = train(name), train(name, executor, slots)
    assert oracle.movement(plain.model, stacked_result.model) < 1e-4
    for key in ("steps", "backprops", "train_loss"):
        assert [r[key] for r in stacked_result.history] == pytest.approx([r[key] for r in plain.history], rel=1e-4)
