"""A radius that changes over the local steps of a round, or from weight to weight: on every executor, against a loop
without fused kernels."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fastsam import fed
from fastsam_kernels import native
from tests.helpers import oracle
from tests.helpers.crosses import one_in
from tests.helpers.fed_cases import ACTIVE, run_replayed
from tests.helpers.fed_runs import same_bits
from tests.helpers.fed_seam import Constants
from tests.helpers.oracle.loop import Vector, add, minus, norm, scale_vector

pytestmark = pytest.mark.usefixtures("no_cuda")
D = fed.Direction
OPTIONS = oracle.Options(rounds=2, epochs=2, momentum=0.5, weight_decay=0.05, clip=0.5)
EXECUTORS = ("sequential", "threads", "vmap", "streams", "graph")


def steps(constants: dict[str, Any]) -> Constants:
    """Return an algorithm with these constants; e, where a direction takes it, is the global model."""
    takes_e = constants["direction"] in (D.PATH, D.CONSTANT, D.GRADIENT_PLUS)
    return Constants(constants | ({"direction_vector": lambda w, layout: w} if takes_e else {}))


@dataclass
class Unfused(oracle.FedAvg):
    """The same in float64: of each direction d, of the radius in step k of K, and of the radius of each parameter."""

    direction: Any
    rho: float
    rho_end_factor: float = 1.0
    scale: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)

    def steps(self, visit) -> int:
        return OPTIONS.epochs * -(-len(visit.y) // OPTIONS.batch)

    def weighed(self, visit, w: Vector, x, y) -> tuple[Vector, Vector]:
        """Return the direction, and the vector whose norm scales it."""
        k, anchor = visit.steps, visit.anchor
        if self.direction is D.CONSTANT:
            return anchor, anchor
        if self.direction is D.PATH:
            d = add(scale_vector(k, anchor), scale_vector(-1.0, minus(w, anchor)))
            return d, d
        g = visit.gradient(w, x, y)
        if self.direction is D.ADAPTIVE_GRADIENT:
            return [p * p * v for p, v in zip(w, g, strict=True)], [p.abs() * v for p, v in zip(w, g, strict=True)]
        if self.direction is D.GRADIENT_BY_DRIFT:
            far = [p.abs() for p in minus(w, anchor)]
            return [f / f.square().sum(0).sqrt().clamp(min=1e-12) * v for f, v in zip(far, g, strict=True)], g
        return (add(g, anchor),) * 2 if self.direction is D.GRADIENT_PLUS else (g, g)

    def scale_of(self, visit) -> tuple[float, ...]:
        return self.scale

    def gradient(self, visit, w: Vector, x, y) -> Vector:
        d, measured_parts = self.weighed(visit, w, x, y)
        scale = self.scale_of(visit)
        measured_parts = [v for v, number in zip(measured_parts, scale, strict=True) if number]
        d = [number * v for v, number in zip(d, scale, strict=True)]
        share = visit.steps / self.steps(visit)
        rho = (1 - share) * self.rho + share * self.rho_end_factor * self.rho
        return visit.gradient(add(w, scale_vector(rho / (norm(measured_parts) + 1e-7), d)), x, y)


FALLING = {
    "falling": {"direction": D.GRADIENT, "rho": 0.4, "rho_end_factor": 0.1},
    "rising": {"direction": D.ADAPTIVE_GRADIENT, "rho": 0.2, "rho_end_factor": 3.0},
    "to nothing": {"direction": D.GRADIENT_PLUS, "rho": 0.4, "rho_end_factor": 0.0},
    "along a path": {"direction": D.PATH, "drift_weight": -1.0, "rho": 0.4, "rho_end_factor": 0.1},
}


def distance(algorithm: fed.Algorithm, twin: Unfused, executor: str, **options: Any) -> float:
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    final = run_replayed(model, clients, algorithm, OPTIONS, executor=executor, **options).model
    return oracle.difference(final, oracle.run(model, clients, twin, OPTIONS, ACTIVE))


@pytest.mark.parametrize(("name", "executor"), one_in(2, FALLING, EXECUTORS))
def test_the_radius_moves_on_a_line(name, executor):
    constants = FALLING[name]
    result = {key: constants[key] for key in ("direction", "rho", "rho_end_factor")}
    assert distance(steps(constants), Unfused(**result), executor) < 1e-12


def test_a_dual_follows_a_falling_radius():
    """FedSMOO without its servers' parts: mu = s = 0 at first, so the first step is SAM's with the round's radius, the
    last one's is kept."""

    @dataclass(frozen=True)
    class Dual(fed.Algorithm):
        rho_end_factor: float = 1.0

        def local_update(self, server, client, round):
            zero = torch.zeros_like(server["w"])
            return fed.LocalUpdate(
                D.GRADIENT_MINUS_DUAL, rho=0.3, rho_end_factor=self.rho_end_factor, dual=zero, server_perturbation=zero
            )

        def finish_client(self, server, client, results, round):
            lengths.append(float(torch.linalg.vector_norm(results.eps)))
            return client, fed.Upload(mean={"delta": results.delta})

    x, y = oracle.ragged_clients()[0]
    for steps, share in ((1, 1.0), (2, 0.5 + 0.5 / 3), (4, 0.25 + 0.75 / 3)):
        lengths: list[float] = []
        options = {"rounds": 1, "participation": 1.0, "local_epochs": steps, "batch_size": len(y)}
        fed.run(oracle.smooth_model(), [(x, y)], Dual(1 / 3), **options)
        assert lengths == pytest.approx([0.3 * share], rel=1e-5)


# The last layer's weights are not perturbed; the last matching pattern counts.
FACTORS = {"2": 0.0, "0.weight": 1.5, "2.b*": 0.5}
BY_PARAMETER = (1.5, 1.0, 0.0, 0.5)
SCALED = {"rho_scale": lambda w, layout: layout.factors("rho_scale", FACTORS, w)}
DIRECTIONS = {
    D.GRADIENT: {}, D.ADAPTIVE_GRADIENT: {"rho_end_factor": 0.5}, D.GRADIENT_PLUS: {}, D.GRADIENT_BY_DRIFT: {},
    D.PATH: {"drift_weight": -1.0}, D.CONSTANT: {},
}  # fmt: skip


@pytest.mark.parametrize(("direction", "executor"), one_in(3, DIRECTIONS, EXECUTORS))
def test_the_radius_of_each_parameter(direction, executor):
    constants = {"direction": direction, "rho": 0.4} | SCALED | DIRECTIONS[direction]
    twin = Unfused(direction, 0.4, constants.get("rho_end_factor", 1.0), BY_PARAMETER)
    assert distance(steps(constants), twin, executor) < 1e-12


@pytest.mark.parametrize("backend", ["reference", "foreach", "native"])
def test_the_radius_of_each_parameter_on_every_backend(backend):
    if backend == "native" and native.why_not("cpu"):
        pytest.skip(f"{native.why_not('cpu')}")
    constants = {"direction": D.ADAPTIVE_GRADIENT, "rho": 0.4} | SCALED
    twin = Unfused(D.ADAPTIVE_GRADIENT, 0.4, scale=BY_PARAMETER)
    assert distance(steps(constants), twin, "sequential", backend=backend) < 1e-12


@pytest.mark.parametrize("executor", ["sequential", "vmap", "graph"])
def test_every_client_has_its_own(executor):
    """From the second time on that it takes part; a scale of 1 before."""

    def factor_of(client: int) -> float:
        return 0.5 * (client % 3)

    @dataclass(frozen=True)
    class Each(fed.Algorithm):
        def init_client(self, server):
            return {"scale": torch.ones_like(server["w"]) * (server["w"] != 0)}

        def local_update(self, server, client, round):
            return fed.LocalUpdate(D.GRADIENT, rho=0.4, rho_scale=client["scale"])

        def finish_client(self, server, client, results, round):
            factor_rows = [round.layout.factors("scale", {"0": factor_of(i)}, server["w"]) for i in results.client_ids]
            return {"scale": torch.stack(factor_rows)}, fed.Upload(mean={"delta": results.delta})

    class UnfusedEach(Unfused):
        def start_client(self, w):
            return {"scale": 1.0}

        def scale_of(self, visit):
            return (visit.state["scale"],) * 2 + (1.0, 1.0)

        def finish(self, visit, delta):
            visit.state["scale"] = factor_of(visit.client)
            return {}

    assert distance(Each(), UnfusedEach(D.GRADIENT, 0.4), executor) < 1e-12


def test_a_scale_of_one_has_the_bits_of_none():
    """Times 1 nothing is rounded: every kernel sees the numbers that it sees without."""
    options = {"rounds": 2, "batch_size": 5, "executor": "sequential"}
    scaled_run, plain = (
        fed.run(oracle.smooth_model(), oracle.ragged_clients(), steps(constants), **options).model
        for constants in (
            {"direction": D.GRADIENT, "rho": 0.4, "rho_scale": lambda w, layout: layout.factors("rho_scale", {}, w)},
            {"direction": D.GRADIENT, "rho": 0.4},
        )
    )
    assert same_bits(scaled_run, plain)
