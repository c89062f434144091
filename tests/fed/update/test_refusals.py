"""Local steps that cannot be taken, and rows that do not fit, with their messages."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastsam import fed
from fastsam.arena import Layout
from fastsam.fed.update.model_copy import trainable
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Passes
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_seam import Constants

MODEL = oracle.smooth_model(torch.float32)  # 73 parameters
ROWS = fed.ParameterLayout.from_model(MODEL, Layout.from_tensors(trainable(MODEL)))
W = torch.zeros(256)
ERROR = fed.AlgorithmError


@dataclass(frozen=True, eq=False)
class Tabled(fed.Step):
    """A step with a field of any kind."""

    table: Any = None


class Unwritten(fed.Step):
    """A step with an output that it does not write."""

    outputs: ClassVar[tuple[str, ...]] = ("gap",)


class Scalar(fed.Step):
    """A step that returns no tensor."""

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses, g = passes()
        rows.update(g)
        return float(losses)  # type: ignore[return-value]


class Early(fed.Step):
    """A step whose round begins with a pass over no batch."""

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        super().begin(rows, w, lr, passes)
        rows.put("gradient", passes.first(0)[0])


class Renamed(fed.FedAvg):
    """An algorithm with a method that had another name."""

    def local_update(self, server: Any, client: Any, round: Any) -> fed.Step:
        return fed.Step()


def check(step: fed.Step, n: int = 2) -> None:
    step.check(W, n)


def start(kind: Any, algorithm: Any = None, **values: Any) -> None:
    constants = algorithm or Constants(kind, values)
    fed.run(oracle.smooth_model(), oracle.ragged_clients(), constants, rounds=1)


test_refused = refusals(
    # objects of other kinds
    (lambda: start(str), "local_step must return a fastsam.fed.Step for all 1 clients, got str"),
    (lambda: start(None, Renamed()), "Renamed.local_update is not called any more. Write local_step"),
    # numbers
    (lambda: check(fed.SAM(rho=-1.0)), "SAM.rho must be a finite number >= 0, got -1.0"),
    (lambda: check(fed.SAM(eta=-0.1)), "SAM.eta must be a finite number >= 0"),
    (lambda: check(fed.Step(prox=float("nan"))), "Step.prox must be a finite number"),
    (lambda: check(fed.SAM(rho=torch.ones(3, 1))), r"SAM.rho .*a number of each client is \[2, 1\].*got .*\[3, 1\]"),
    (lambda: check(fed.Step(a=torch.ones(2))), r"Step.a .*got torch.float32 \[2\]"),
    # tensors
    (lambda: check(fed.Step(q=torch.zeros(3))),
     r"Step.q must be torch.float32 \[2, 256\] \(or \[256\], one for all 2 clients; .*\) on cpu, .*got .*\[3\] on cpu"),
    (lambda: check(fed.Step(q=torch.zeros(3, 256))), r"Step.q must be .*got torch.float32 \[3, 256\]"),
    (lambda: check(fed.Step(start=W.double())), r"Step.start must be .*got torch.float64 \[256\]"),
    (lambda: check(fed.Shifted(e=torch.zeros(256, device="meta"))), r"Shifted.e must be .* on cpu, .*got .* on meta"),
    (lambda: check(fed.Step(q=0.5)), "Step.q must be a tensor like the server's w, or None, got float"),
    (lambda: check(fed.Step(state=[W])), "Step.state must be a dict of tensors, or None, got list"),
    (lambda: check(fed.Step(state={"m": 1.0})), "Step.state must be a dict of tensors, or None"),
    (lambda: check(fed.Step(state={"m": torch.ones(3, 256)})),
     r"Step.state\['m'\] must be \[2, ...\], or \[1, ...\] for all 2 clients, got \[3, 256\]. Add a first dimension"),
    (lambda: check(Tabled(table=[1])), "Tabled.table must be a tensor, a number with a column, or a value that can be"),
    # steps that fail in the trial before round 1
    (lambda: start(Unwritten), "Unwritten.outputs names 'gap', which is not a field of the rows. Write it", ERROR),
    (lambda: start(Scalar), r"must return the losses of n clients, \[n\]: \[1\] here, got float", ERROR),
    (lambda: start(Early), "a trial of Early, the step of Constants.local_step, failed: ZeroDivisionError"),
    (lambda: start(fed.Step, q=lambda w, layout: torch.ones_like(w)), "padding"),
    # tensors that are not rows
    (lambda: ROWS.unflatten(torch.zeros(73)), r"in this run a row has 256 numbers .*got \[73\]"),
    (lambda: ROWS.vector(torch.tensor(1.0)), r"in this run a row has 256 numbers .*got \[\]"),
    (lambda: ROWS.row(torch.zeros(256)), r"in this run a vector has 73 numbers .*got \[256\]"),
    (lambda: ROWS.model(torch.zeros(2, 256)), r"one row, \[256\], got \[2, 256\]"),
    (lambda: ROWS.flatten({"0.weight": torch.zeros(1)}), "each of the parameters .*missing or unknown: 0.bias"),
    (lambda: ROWS.flatten(dict(MODEL.named_parameters()) | {"2.bias": torch.zeros(6)}),
     r"'2.bias' must be \[3\], got \[6\]"),
)  # fmt: skip
