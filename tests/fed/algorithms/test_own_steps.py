"""Steps of a user: trained as a plain loop does, with numbers of each client, and tried before round 1."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_seam import Constants

EXECUTORS = ("sequential", "threads", "vmap")
SIZES = (8, 5, 12, 8)


def run(algorithm: Any, executor: str = "sequential", **options: Any) -> fed.Result:
    base = {"rounds": 2, "participation": 1.0, "batch_size": 64, "lr": 0.2, "executor": executor}
    return fed.run(oracle.smooth_model(), oracle.ragged_clients(sizes=SIZES), algorithm, **base | options)


@dataclass(frozen=True, eq=False)
class OneLayer(fed.SAM):
    """SAM that perturbs one parameter."""

    index: int = 0

    def __call__(self, rows: fed.Rows, passes: fed.Passes) -> Tensor:
        losses, g1 = passes()
        d = rows["direction"].zero_()
        rows.layout.views(d)[self.index].copy_(g1.tensors[self.index])
        rows.perturb(rows.whole(d))
        _, g2 = passes()
        rows.update(g2)
        return losses


def perturb_one_layer(model: Any, clients: Any, rho: float, index: int, rounds: int, epochs: int, lr: float) -> Any:
    """Train by autograd only, with all samples of a client in each step. Clients count alike."""
    w = copy.deepcopy(model)
    for _ in range(rounds):
        local_models = [copy.deepcopy(w) for _ in clients]
        for local_model, (x, y) in zip(local_models, clients, strict=True):
            parameters = list(local_model.parameters())
            for _ in range(epochs):
                g1 = torch.autograd.grad(F.cross_entropy(local_model(x), y), parameters)
                eps = rho * g1[index] / g1[index].norm()
                with torch.no_grad():
                    parameters[index].add_(eps)
                g2 = torch.autograd.grad(F.cross_entropy(local_model(x), y), parameters)
                with torch.no_grad():
                    parameters[index].sub_(eps)
                    for p, g in zip(parameters, g2, strict=True):
                        p.sub_(lr * g)
        with torch.no_grad():
            for p, *local in zip(w.parameters(), *(m.parameters() for m in local_models), strict=True):
                p.copy_(torch.stack(local).mean(0))
    return w


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_step_of_a_user_trains_as_a_plain_loop(executor: str, index: int) -> None:
    algorithm = Constants(OneLayer, {"rho": 0.5, "index": index})
    final = run(algorithm, executor, local_epochs=3, weighting="uniform").model
    model, clients = oracle.smooth_model(), oracle.ragged_clients(sizes=SIZES)
    expected = perturb_one_layer(model, clients, 0.5, index, rounds=2, epochs=3, lr=0.2)
    for p, q in zip(final.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)  # the norm of a direction is added 1e-7 to
    far = perturb_one_layer(model, clients, 0.5, 1, rounds=2, epochs=3, lr=0.2)
    assert not torch.allclose(next(final.parameters()), next(far.parameters()), rtol=1e-4)


# --- a number of each client ---

RADII = (0.1, 0.0, 0.7, 0.3)


@dataclass(frozen=True)
class OwnRadius(fed.Algorithm):
    """Sets the radius of each client in round 1, and trains only in round 2, where it notes the deltas by client."""

    kind: type[fed.Step]
    deltas: dict[int, Tensor]

    def init_client(self, server: fed.State) -> fed.State:
        return {"rho": torch.zeros(1, dtype=torch.float64)}

    def local_step(self, server: fed.State, client: fed.State, round: fed.Round) -> fed.Step:
        return self.kind(rho=client["rho"])

    def finish(
        self, server: fed.State, client: fed.State, results: fed.ClientResults, round: fed.Round
    ) -> tuple[fed.State, fed.Upload]:
        if round.index:
            self.deltas.update(zip(results.client_ids, results.delta, strict=True))
        radii = results.column(RADII[i] for i in results.client_ids)
        return {"rho": radii}, fed.Upload(mean={"delta": results.delta})

    def step_server(self, server: fed.State, aggregate: fed.Aggregate, round: fed.Round) -> fed.State:
        return server if round.index == 0 else super().step_server(server, aggregate, round)


@pytest.mark.parametrize("kind", [fed.SAM, OneLayer])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_number_of_each_client_is_the_one_of_a_run_alone(executor: str, kind: type[fed.Step]) -> None:
    deltas: dict[int, Tensor] = {}
    run(OwnRadius(kind, deltas), executor, slots=4)
    assert len(deltas) == len(SIZES)
    w = torch.nn.utils.parameters_to_vector(oracle.smooth_model().parameters()).detach()
    for i, radius in enumerate(RADII):
        alone = run(Constants(kind, {"rho": radius}), rounds=1, sampler=lambda t, g, i=i: [i]).model
        delta = torch.nn.utils.parameters_to_vector(alone.parameters()).detach() - w
        parts = [x.flatten() for x in deltas[i].split(1)]
        sent = torch.cat(parts)[torch.cat(parts) != 0]  # without padding
        torch.testing.assert_close(sent, delta, rtol=1e-9, atol=1e-12)


# --- fields and steps that do not fit ---


@dataclass(frozen=True, eq=False)
class OneMemory(fed.Step):
    """A step that writes the losses of all steps into one memory."""

    memory: ClassVar[Tensor] = torch.zeros(1, dtype=torch.float64)

    def __call__(self, rows: fed.Rows, passes: fed.Passes) -> Tensor:
        losses, g = passes()
        rows.update(g)
        return self.memory.copy_(losses)


def test_losses_that_a_later_step_writes_are_refused() -> None:
    """They would be added up after the steps, all of them the last one's."""
    with pytest.raises(ValueError, match=r"OneMemory must return losses in new memory.*losses\.clone\(\)"):
        run(Constants(OneMemory), local_epochs=3)


@dataclass(frozen=True, eq=False)
class WithOutput(fed.Step):
    """A step with an output that no field has."""

    outputs: ClassVar[tuple[str, ...]] = ("memory",)


@dataclass(frozen=True, eq=False)
class Listed(fed.Step):
    """A step with a field that cannot be compared."""

    names: list[str] | None = None


def step_with(call: Any = None, begin: Any = None) -> type[fed.Step]:
    """Return a class of steps with these methods."""
    methods = {name: method for name, method in (("__call__", call), ("begin", begin)) if method is not None}
    return dataclass(frozen=True, eq=False)(type("Odd", (fed.SAM,), methods))


def refused(kind: type[fed.Step], words: str, **values: Any) -> tuple[Any, str]:
    """Return a row of `refusals`: a run whose steps are `kind(**values)`."""
    return lambda: run(Constants(kind, values), run_dir="run", executor="vmap"), words


def passes_only(self: Any, rows: fed.Rows, passes: fed.Passes) -> Any:
    passes()


def wide_losses(self: Any, rows: fed.Rows, passes: fed.Passes) -> Any:
    losses, g = passes()
    rows.update(g)
    return losses.expand(3)


def lost_operand(self: Any, rows: fed.Rows, passes: fed.Passes) -> Any:
    losses, g = passes(lambda loss, outputs, y, t: loss * t, torch.ones(2, 5))
    rows.update(g)
    return losses + torch.ones(2)


def wrong_radius(self: Any, rows: fed.Rows, w: Tensor, lr: float, passes: fed.Passes) -> None:
    fed.SAM.begin(self, rows, w, lr, passes)
    rows.column(3).copy_(torch.ones(3, 1))


def pass_in_begin(self: Any, rows: fed.Rows, w: Tensor, lr: float, passes: fed.Passes) -> None:
    fed.SAM.begin(self, rows, w, lr, passes)
    passes()


ROW = r"torch.float64 \[1, \d+\] \(or \[\d+\], one for all 1 clients; a number of each client is \[1, 1\]\)"
TRIAL = "a trial of Odd, the step of Constants.local_step,"

test_refused = refusals(
    refused(step_with(passes_only), rf"{TRIAL} must return the losses of n clients, \[n\]: \[1\] here, got NoneType"),
    refused(step_with(wide_losses), rf"{TRIAL} must return the losses of n clients, \[n\]: \[1\] here, got .*\[3\]"),
    refused(step_with(lost_operand), f"{TRIAL} failed: "),
    refused(step_with(begin=wrong_radius), f"{TRIAL} failed: RuntimeError: "),
    refused(step_with(begin=pass_in_begin), f"{TRIAL} failed: "),
    refused(step_with(lambda self, rows, passes: 1 / 0), f"{TRIAL} failed: ZeroDivisionError: division by zero"),
    refused(WithOutput, "a trial of WithOutput, .* failed: WithOutput.outputs names 'memory', which is not a field"),
    refused(Listed, "Listed.names must be a tensor, a number with a column, or a value that can be compared and "
            "hashed; got list", names=["w"]),
    refused(fed.Step, rf"Step.q must be {ROW} on cpu, like the server's w; got torch.float32 \[3\] on cpu",
            q=torch.zeros(3)),
    refused(fed.Step, r"Step.q must be .*; got torch.float32 \[\d+\]", q=lambda w, layout: w.float()),
    refused(fed.Step, r"Step.q must be .*; got torch.float64 \[2, \d+\]", q=lambda w, layout: w.expand(2, -1)),
    refused(fed.Step, "Step.q must be a tensor like the server's w, or None, got float", q=0.1),
    refused(fed.Step, r"Step.start must be .*; got torch.float64 \[\d+\]", start=lambda w, layout: w[:-1]),
    refused(fed.SAM, rf"SAM.rho must be {ROW}.*; got torch.float64 \[3, 1\]", rho=torch.ones(3, 1).double()),
    refused(fed.SAM, r"SAM.rho must be .*; got torch.float32 \[4\]", rho=torch.ones(4)),
    refused(fed.SAM, "SAM.rho must be a finite number >= 0, got -1", rho=-1),
    refused(fed.SAM, "SAM.rho must be a finite number", rho="0.1"),
    refused(fed.Step, "Step.a must be a finite number, got inf", a=float("inf")),
    refused(fed.Shifted, "Shifted.e must be a tensor like the server's w, got float", e=0.1),
    refused(fed.Shifted, "Shifted.e must be a tensor like the server's w, got NoneType"),
)  # fmt: skip
