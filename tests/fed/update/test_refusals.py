"""Local steps that cannot be made, and in which words."""

import torch

from fastsam import fed
from fastsam.arena import Layout
from fastsam.fed.update.model_copy import trainable
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals

D = fed.Direction
MODEL = oracle.smooth_model(torch.float32)  # 73 parameters
ROWS = fed.ParameterLayout.from_model(MODEL, Layout.from_tensors(trainable(MODEL)))


class Local(fed.FedAvg):
    """An algorithm with these arguments of its LocalUpdate."""

    def __init__(self, *arguments, **options):
        self.arguments, self.options = arguments, options

    def local_update(self, server, client, round):
        return fed.LocalUpdate(*self.arguments, **self.options)


def start(*arguments, **options):
    fed.run(oracle.smooth_model(), oracle.ragged_clients(), Local(*arguments, **options), rounds=1)


test_refused = refusals(
    # objects of other kinds
    (lambda: start("gradient", rho=0.1),
     "Local.local_update failed before round 1: direction must be a fed.Direction such as fed.Direction.GRADIENT, got "
     "'gradient'", fed.AlgorithmError),
    (lambda: start([0.1]), r"direction must be a fed.Direction .* got \[0.1\]", fed.AlgorithmError),
    (lambda: (fed.LocalUpdate(D.GRADIENT, pilot=fed.Pilot(1, max)), start(D.GRADIENT, pilot=3)),
     "pilot must be a fed.Pilot or None, got 3", fed.AlgorithmError),
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
    # tensors that are not rows
    (lambda: ROWS.unflatten(torch.zeros(73)), r"in this run a row has 256 numbers .*got \[73\]"),
    (lambda: ROWS.vector(torch.tensor(1.0)), r"in this run a row has 256 numbers .*got \[\]"),
    (lambda: ROWS.row(torch.zeros(256)), r"in this run a vector has 73 numbers .*got \[256\]"),
    (lambda: ROWS.model(torch.zeros(2, 256)), r"one row, \[256\], got \[2, 256\]"),
    (lambda: ROWS.flatten({"0.weight": torch.zeros(1)}), "each of the parameters .*missing or unknown: 0.bias"),
    (lambda: ROWS.flatten(dict(MODEL.named_parameters()) | {"2.bias": torch.zeros(6)}),
     r"'2.bias' must be \[3\], got \[6\]"),
)  # fmt: skip
