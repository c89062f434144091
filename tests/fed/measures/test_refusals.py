"""Measures that cannot be taken, and in which words."""

import pytest
import torch
import torch.nn.functional as F

from fastsam.fed.measures import check
from tests.helpers.fed_measured import run
from tests.helpers.fed_refusals import refusals

NUMBERS = torch.randn(9, 6).double(), torch.randn(9, 3).double()


@refusals(
    # bad requests
    (lambda: run(measures=["sharpnes"]), "unknown measure 'sharpnes'; choose from train, sharpness"),
    (lambda: run(measures="sharpness"), r"must be a list of names, got the string 'sharpness'; write \['sharpness'\]"),
    (lambda: run(measures=object()), 'got object without snapshots, clients, round'),
    (lambda: run(measures=["sharpness"], measure_options={"radius": 1}),
     "unknown option 'radius'; choose from rho, steps"),
    (lambda: run(measures=["sharpness"], measure_options={"rho": 0}), 'rho'),
    (lambda: run(measures=["sharpness"], measure_options={"every": 0}), 'every'),
    (lambda: run(measures=["sharpness"], measure_options={"samples": 0}), 'samples'),
    (lambda: run(measures=["sharpness"], buffers="average"), "Use buffers='keep' or GroupNorm"),
    # the margin needs classes
    (lambda: run(measures=["margin"], clients=[NUMBERS], loss=F.mse_loss, test=NUMBERS), 'needs class labels'),
    # options of no measure are an error
    (lambda: check([], {"rho": 0.1}), 'measure_options are given, but no measures'),
)  # fmt: skip
def test_refused(call, words, error):
    with pytest.raises(error, match=words):
        call()
