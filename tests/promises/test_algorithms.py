"""Every algorithm against an independent, unfused loop: the same batches, other arithmetic."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.mutants.apply import replace_source
from tests.helpers.mutants.privacy import MUTANTS as PRIVACY
from tests.helpers.mutants.table import MUTANTS, PERSONAL
from tests.promises.cases import (
    ACTIVE,
    METHODS,
    OPTIONS,
    TOLERANCE,
    make_algorithm,
    make_oracle,
    options_of,
    run_oracle,
    run_replayed,
)

# In the normal suite each algorithm meets one of these, and its further options one of them. Fifty steps a round: two
# algorithms.
USUAL = [
    ("momentum", torch.float64),
    ("clip-active", torch.float64),
    ("clip-linear", torch.float64),
    ("clip-active", torch.float32),
]
USUALLY_LONG = ("fedsam", "fedsmoo")
FIRST = {name: method for method, (name, _) in reversed(METHODS.items())}.values()
# Under these options the unfused backend is compared, under the others the fused one.
REFERENCE = ("clip-linear", "long")


def case(method, options, dtype):
    if options == "long":
        usual = dtype == torch.float64 and method in USUALLY_LONG
    elif method in FIRST:
        usual = (options, dtype) == USUAL[list(FIRST).index(method) % 4]
    else:
        usual = (options, dtype) == ("momentum", torch.float64)
    return pytest.param(method, options, dtype, marks=[] if usual else [pytest.mark.slow])


CASES = [case(m, o, torch.float64) for m in METHODS for o in OPTIONS]
CASES += [case(m, o, torch.float32) for m in METHODS for o in ("momentum", "clip-active", "long")]


@pytest.mark.parametrize(("method", "options", "dtype"), CASES)
def test_against_an_unfused_loop(method, options, dtype):
    model, clients = oracle.smooth_model(dtype), oracle.ragged_clients(dtype)
    backend = "reference" if options in REFERENCE else "auto"
    final = run_replayed(model, clients, make_algorithm(method), options_of(method, options), backend=backend).model
    assert next(final.parameters()).dtype == dtype
    assert oracle.difference(final, run_oracle(method, options, dtype)) < TOLERANCE[dtype]
    assert oracle.difference(final, model) > 1e-2  # it moved: agreement means something


def test_the_unfused_loop_tells_the_methods_and_options_apart():
    runs = {m: run_oracle(m, "momentum", torch.float64) for m in METHODS}
    for (a, run_a), (b, run_b) in itertools.combinations(runs.items(), 2):
        # In one epoch of a first round a step is a step: only two pairs of options of one method are nearly the same.
        assert oracle.difference(run_a, run_b) > 1e-9, (a, b)
    for method in ("fedsam", "fedlesam-d", "fedsmoo"):
        runs = {o: run_oracle(method, o, torch.float64) for o in ("momentum", "clip-active", "clip-linear", "long")}
        for (a, run_a), (b, run_b) in itertools.combinations(runs.items(), 2):
            assert oracle.difference(run_a, run_b) > 1e-3, (method, a, b)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    method=st.sampled_from(sorted(METHODS)), lr=st.floats(0.005, 0.1), lr_decay=st.floats(0.8, 1),
    momentum=st.sampled_from([0.0, 0.5, 0.9]), weight_decay=st.sampled_from([0.0, 0.02]),
    clip=st.sampled_from([None, 0.02, 0.5, 100.0]), scope=st.sampled_from(["full", "linear"]),
    weighting=st.sampled_from(["uniform", "samples"]), batch=st.integers(1, 30), epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_options_with_shuffled_batches_and_sampled_clients(method, seed, **options):
    """Here the order of the batches and the participation are the run's own."""
    selection = oracle.Options(rounds=4, shuffle=True, seed=seed, **options)
    model, clients = oracle.smooth_model(seed=seed), oracle.ragged_clients(seed=seed)
    active = oracle.attendance(4, len(clients), 0.5, seed)
    final = fed.run(model, clients, make_algorithm(method), participation=0.5, **selection.keywords()).model
    assert oracle.difference(final, oracle.run(model, clients, make_oracle(method), selection, active)) < 1e-11


@pytest.mark.parametrize("method", ["fedsam", "fedgamma", "fedlesam-d", "fedsmoo", "fedspeed"])
def test_a_model_with_dropout(method):
    """The same mask in both passes of a step, another in each step."""
    model, clients = oracle.dropout_model(), oracle.ragged_clients()
    options = options_of(method, "decay")
    expected = oracle.run(model, clients, make_oracle(method), options, ACTIVE)
    assert oracle.difference(run_replayed(model, clients, make_algorithm(method), options).model, expected) < 1e-12


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        *itertools.product(["fedavg", "fedgsam", "fedlesam-s", "fedsmoo-alpha"], TOLERANCE),
        *(("fedgmt", torch.float64), ("fedsol", torch.float64)),
    ],
)
def test_a_model_with_convolutions_and_average_pooling(method, dtype):
    model, clients = oracle.pooling_model(dtype), oracle.ragged_images(dtype)
    options = options_of(method, "momentum")
    expected = oracle.run(model, clients, make_oracle(method), options, ACTIVE)
    assert (
        oracle.difference(run_replayed(model, clients, make_algorithm(method), options).model, expected)
        < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("form", ["channel", "full", "diag", None])
def test_the_input_maps_of_fedrobust_on_images(form):
    model, clients, options = oracle.pooling_model(), oracle.ragged_images(), OPTIONS["decay"]
    twin = oracle.FedRobust(lam=0.2, ascent_steps=2, form=form or "full")
    final = run_replayed(model, clients, fed.FedRobust(lam=0.2, ascent_steps=2, form=form), options).model
    assert oracle.difference(final, oracle.run(model, clients, twin, options, ACTIVE)) < 1e-12


# --- Is the comparison with the unfused loop worth anything? Every wrong constant must fail it.


NOTICED = 1e-11  # ten times what the comparison in float64 allows


def distance(case, options, backend="reference"):
    """Return the distance of the implementation, as it is in memory, from the oracle."""
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    final = run_replayed(model, clients, make_algorithm(case), options_of(case, options), backend=backend)
    return oracle.difference(final.model, run_oracle(case, options, torch.float64))


LAST = {METHODS[m.case][0]: m for m in MUTANTS}.values()  # in `make test` the last one of each algorithm


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=[] if m in LAST else pytest.mark.slow) for m in MUTANTS],
    ids=lambda m: f"{m.case}: {m.function}: {m.new}",
)
def test_a_wrong_constant_is_noticed(mutant):
    with replace_source(*mutant[:4]):
        # Fused kernels take half the reference's time; only mutants of kernels need the reference.
        backend = "reference" if mutant.module.startswith("fastsam_kernels") else "auto"
        far = distance(mutant.case, mutant.options, backend)
    assert math.isnan(far) or far > NOTICED


def test_what_was_replaced_is_back():
    for case in ("fedavg", "feddyn", "fedsmoo", "fedgsam", "fedlesam"):
        assert distance(case, "decay") < 1e-12


def test_every_mutant_quotes_the_present_code():
    """The slow tests run most mutants, so that a stale one would go unnoticed."""
    for mutant in (*MUTANTS, *PERSONAL, *PRIVACY):
        with replace_source(*mutant[:4]):
            pass


def test_every_algorithm_has_mutants():
    assert {METHODS[m.case][0] for m in MUTANTS} == {name for name, _ in METHODS.values()}
    assert len(set(MUTANTS)) == len(MUTANTS)
