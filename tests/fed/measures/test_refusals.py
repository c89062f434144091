"""Measures that cannot be taken, and in which words."""

import torch
import torch.nn.functional as F

from fastsam import fed
from tests.helpers.fed_measured import measure_of, run
from tests.helpers.fed_refusals import refusals


def run_measure(**methods):
    run(measures=measure_of(**methods), rounds=1)


NUMBERS = torch.randn(9, 6).double(), torch.randn(9, 3).double()


test_refused = refusals(
    # bad requests
    (lambda: run(measures=["sharpnes"]), "unknown measure 'sharpnes'; choose from train, sharpness"),
    (lambda: run(measures="sharpness"), r"must be a list of names, got the string 'sharpness'; write \['sharpness'\]"),
    (lambda: run(measures=object()), 'got object without snapshots, clients, round'),
    (lambda: run(measures={"names": ["sharpness"], "radius": 1}),
     "measures has no option 'radius'; its options: names, rho, steps"),
    (lambda: run(measures=fed.NamedMeasures(["sharpness"], rho=0)), 'rho'),
    (lambda: run(measures=fed.NamedMeasures(["sharpness"], every=0)), 'every'),
    (lambda: run(measures=fed.NamedMeasures(["sharpness"], samples=0)), 'samples'),
    (lambda: run(measures=["sharpness"], buffers="average"), "Use buffers='keep' or GroupNorm"),
    # the margin needs classes
    (lambda: run(measures=["margin"], clients=[NUMBERS], loss=F.mse_loss, test=NUMBERS), 'needs class labels'),
    # options of no measure are an error
    (lambda: run(measures={"rho": 0.1}), 'measures has settings, but no names'),
    # settings have moved
    # measures of a user's own that return something else
    (lambda: run_measure(round=lambda *a: None),
     r"the measures' round\(\) must return a dict of numbers, got NoneType"),
    (lambda: run_measure(clients=lambda *a: 5.0),
     r"the measures' clients\(\) must return a dict of numbers, got float"),
    (lambda: run_measure(round=lambda *a: {"x": "high"}), r"round\(\) .*numbers .or None., got str for 'x'"),
    (lambda: run_measure(round=lambda *a: {"x": torch.zeros(2)}), r"round\(\) .*got Tensor for 'x'"),
    (lambda: run_measure(round=lambda *a: {"seconds": 1.0}),
     r"the measures' round\(\) returned 'seconds', which the run has already"),
    (lambda: run_measure(clients=lambda *a: {"loss": [1.0]}),
     r"the measures' clients\(\) returned 'loss', which the run has already"),
    (lambda: run_measure(clients=lambda *a: {"k": 1.0}),
     r"clients\(\) .*must return \d+ numbers, one for each client, got float"),
    (lambda: run_measure(clients=lambda old_state, results, round: {"k": ["high"] * len(results.num_steps)}),
     r"clients\(\) .*numbers .*got str for 'k'"),
    (lambda: run_measure(clients=lambda old_state, results, round: {"k": torch.ones(len(results.num_steps) + 1)}),
     r"clients\(\) .*got Tensor for 'k'"),
)  # fmt: skip
