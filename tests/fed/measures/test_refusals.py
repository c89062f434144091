"""Measures that cannot be taken, and in which words."""

import pytest
import torch
import torch.nn.functional as F

from fastsam import fed
from tests.helpers.fed_measured import run
from tests.helpers.fed_refusals import refusals

NUMBERS = torch.randn(9, 6).double(), torch.randn(9, 3).double()


@refusals(
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
    (lambda: run(measures=["train"], measure_options={"every": 2}),
     r"has no option 'measure_options': write measures=fed.NamedMeasures", TypeError),
)  # fmt: skip
def test_refused(call, words, error):
    with pytest.raises(error, match=words):
        call()
