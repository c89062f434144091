"""Local steps that cannot be made, and in which words."""

import pytest
import torch

from fastsam import fed
from tests.helpers.fed_refusals import refusals

D = fed.Direction


@refusals(
    # options that exclude each other
    (lambda: fed.LocalUpdate(D.PATH), "'path' takes direction_vector of the .*; direction_vector was not given"),
    (lambda: fed.LocalUpdate(D.GRADIENT, drift_weight=1.0),
     "drift_weight belongs to the directions 'path' and 'gradient plus'"),
    (lambda: fed.LocalUpdate(D.PATH, direction_vector=torch.zeros(3), uses_last_gradient=True),
     "uses_last_gradient to 'gradient plus'"),
    (lambda: fed.LocalUpdate(D.PATH, direction_vector=torch.zeros(3), clean_weight=0.5),
     "the direction 'path' has one gradient only"),
    (lambda: fed.LocalUpdate(D.GRADIENT, anchor_weight=0.5),
     'an anchor and an anchor_weight > 0 go together.*anchor_weight=0.5, no anchor'),
    (lambda: fed.LocalUpdate(D.GRADIENT, anchor=torch.zeros(3)),
     'an anchor and an anchor_weight > 0 go together.*anchor_weight=0.0, an anchor'),
    (lambda: fed.LocalUpdate(D.NONE, anchor=torch.zeros(3), anchor_weight=0.5),
     "found by a first gradient.*the direction 'none'"),
    (lambda: fed.LocalUpdate(D.GRADIENT, anchor=torch.zeros(3), anchor_weight=1.5),
     'anchor_weight must be a finite number >= 0 and <= 1, got 1.5'),
    (lambda: fed.LocalUpdate(D.PATH, direction_vector=torch.zeros(3), drift_weight=float("nan")),
     'drift_weight must be a finite number'),
    # options of the radius
    (lambda: fed.LocalUpdate(D.GRADIENT, rho_end_factor=-0.1), 'rho_end_factor must be a finite number >= 0, got -0.1'),
    (lambda: fed.LocalUpdate(rho_scale=torch.ones(3)),
     "rho_scale belongs to a perturbation without a dual; the direction is 'none'"),
    (lambda: fed.LocalUpdate(rho_end_factor=0.5),
     "rho_end_factor belongs to directions with a perturbation of every step; the direction is 'none'"),
    (lambda: fed.LocalUpdate(D.CONSTANT, direction_vector=torch.zeros(3), rho_end_factor=0.5),
     "the direction is 'constant', with rho_end_factor=0.5"),
)  # fmt: skip
def test_refused(call, words, error):
    with pytest.raises(error, match=words):
        call()
