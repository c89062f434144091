"""The measures on a quadratic loss, where every one of them has a known value."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsam.fed.measures import Objective, diagnostics, drift, sharpness, subset, unit
from fastsam.fed.measures.surface import directions, surface
from tests.helpers import quadratic
from tests.helpers.quadratic import flat, row, samples

EIGENVALUES = [4.0, 1.0, 0.5, 0.25, 2.0, 3.0]
DIAGONAL = torch.diag(torch.tensor(EIGENVALUES, dtype=torch.float64))
IDENTITY = torch.eye(6, dtype=torch.float64)

vectors = st.lists(st.floats(-2, 2), min_size=6, max_size=6)
cheap = settings(max_examples=25, deadline=None)


def rotation(seed: int = 0) -> Tensor:
    """A symmetric matrix with the eigenvalues above and no zero entries."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))
    return q @ DIAGONAL @ q.T


def objective(curvature: Tensor, *pairs: tuple[Tensor, Tensor], batch: int = 512) -> Objective:
    return Objective.sample_mean(quadratic.replica(), quadratic.loss_of(curvature), pairs, batch)


@cheap
@given(vectors, vectors, st.integers(1, 4))
def test_value_gradient_and_hessian_are_those_of_the_formula(w: list[float], v: list[float], batch: int) -> None:
    a = rotation()
    f = objective(a, samples([1.0], [0, 2.0], [0, 0, 3.0]), samples([1.0] * 6, [2.0] * 6), batch=batch)
    x = torch.cat([samples([1.0], [0, 2.0], [0, 0, 3.0])[0], samples([1.0] * 6, [2.0] * 6)[0]])
    w6, v6 = torch.tensor(w, dtype=torch.float64), torch.tensor(v, dtype=torch.float64)
    offsets = w6 - x
    assert f.value(row(w)) == pytest.approx(0.5 * (offsets @ a * offsets).sum(1).mean().item(), abs=1e-12)
    torch.testing.assert_close(flat(f.gradient(row(w))), a @ offsets.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(flat(f.hessian_times(row(w), row(v))), a @ v6, rtol=0, atol=1e-12)


def test_pooled_weighs_samples_and_mean_of_weighs_clients() -> None:
    small_clients, large = samples([1.0]), samples([0.0], [0.0], [0.0])
    w = row([0.0] * 6)
    pooled_objective = objective(IDENTITY, small_clients, large)
    fair = Objective.mean_of(quadratic.replica(), quadratic.loss_of(IDENTITY), [small_clients, large], batch=2)
    assert pooled_objective.value(w) == pytest.approx(0.5 / 4) and fair.value(w) == pytest.approx(0.5 / 2)
    assert float(fair.gradient(w)[0]) == pytest.approx(-0.5)


def test_rows_are_rounded_to_the_models_dtype_and_padding_stays_zero() -> None:
    f = Objective.sample_mean(quadratic.replica(dtype=torch.float32), quadratic.loss_of(rotation()), [
        tuple(t.float() for t in samples([1.0, 2.0]))
    ])  # fmt: skip
    gradient = f.gradient(row([0.1] * 6))
    assert gradient.dtype == torch.float64 and gradient.count_nonzero() == 6
    exact = rotation() @ (torch.full((6,), 0.1, dtype=torch.float64) - samples([1.0, 2.0])[0][0])
    torch.testing.assert_close(flat(gradient), exact, rtol=1e-5, atol=1e-6)


@cheap
@given(vectors, st.floats(0.01, 2.0))
def test_one_step_sharpness_is_the_taylor_polynomial(w: list[float], rho: float) -> None:
    a = rotation()
    f = objective(a, samples([1.0, 0, 0, 1.0], [3.0]))
    g = flat(f.gradient(row(w)))
    u = g / g.norm()
    expected = float(rho * g.norm() + 0.5 * rho**2 * (u @ a @ u))
    assert sharpness.one_step(f, row(w), rho) == pytest.approx(expected, rel=1e-9)
    assert sharpness.ascent(f, row(w), rho, steps=1) == pytest.approx(expected, rel=1e-9)


def test_ascent_finds_the_sharpest_direction_even_at_the_minimum() -> None:
    """At the minimum the gradient is zero, and the maximum over the ball is rho^2/2 times the largest eigenvalue."""
    f = objective(rotation(), samples([0.0]))
    w = row([0.0] * 6)
    assert sharpness.one_step(f, w, 0.1) == 0
    assert sharpness.ascent(f, w, 0.1, steps=60) == pytest.approx(0.5 * 0.01 * 4, rel=1e-6)


def test_ascent_with_more_steps_rises_further_and_stays_in_the_ball() -> None:
    f = objective(DIAGONAL, samples([0.0]))
    w = row([0.1, 0.0, 0.0, 1.0, 0.0, 0.0])
    result = [sharpness.ascent(f, w, 2.0, steps) for steps in (1, 3, 30)]
    assert result[0] < result[1] < result[2]
    # The maximum of the secular equation: (L - A)d = A w with ||d|| = rho.
    a, start = torch.tensor(EIGENVALUES, dtype=torch.float64), torch.tensor([0.1, 0, 0, 1.0, 0, 0], dtype=torch.float64)
    low, high = 4.0 + 1e-9, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((a * start / (middle - a)).norm()) > 2.0 else (low, middle)
    d = a * start / (low - a)
    best = 0.5 * float((a * (start + d) ** 2).sum() - (a * start**2).sum())
    assert result[2] == pytest.approx(best, rel=1e-6) and max(result) <= best * (1 + 1e-9)


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_the_hessian_norm_is_the_largest_eigenvalue_in_size(scale: float) -> None:
    f = objective(rotation(), samples([1.0] * 6, scale=scale))
    assert diagnostics.hessian_norm(f, row([0.0] * 6), iterations=300, tolerance=1e-12) == pytest.approx(4, rel=1e-6)
    assert diagnostics.hessian_norm(f, row([0.0] * 6)) <= 4 * (1 + 1e-12)


def test_a_linear_loss_has_no_curvature() -> None:
    f = Objective.sample_mean(quadratic.replica(), lambda output, y: output.sum(), [samples([1.0])])
    assert diagnostics.hessian_norm(f, row([1.0] * 6)) == 0 and flat(f.gradient(row([0.0] * 6))).tolist() == [1.0] * 6


def test_smoothness_along_a_path_is_the_largest_curvature_on_it() -> None:
    f = objective(DIAGONAL, samples([0.0]))
    path = [
        row([0, 0, 0, 0, 0, 0]), row([0, 1.0, 0, 0, 0, 0]), row([0, 1.0, 0, 0, 0, 1.0]), row([0, 1.0, 0, 0, 0, 1.0]),
    ]  # fmt: skip
    assert diagnostics.path_smoothness(f, path) == pytest.approx(3.0)  # along axis 1 it is 1, along axis 5 it is 3
    assert diagnostics.path_smoothness(f, path[:1]) == 0


def test_gradient_variances() -> None:
    """Unit gradients -e1 and -e2 about their mean's direction are at a squared distance of 2 - sqrt(2)."""
    w, objectives = row([0.0] * 6), [objective(IDENTITY, samples([2.0])), objective(IDENTITY, samples([0, 2.0]))]
    full = objective(IDENTITY, samples([2.0], [0, 2.0]))
    assert diagnostics.sigma_local(full, objectives, w) == pytest.approx(math.sqrt(2 - math.sqrt(2)))
    assert diagnostics.sigma_local(full, [full], w) == 0
    assert diagnostics.sigma_global(objectives, w) == pytest.approx(math.sqrt(2))  # (1, -1) and (-1, 1) around the mean


def test_estimation_bias_is_zero_for_a_round_quadratic_and_two_for_the_opposite() -> None:
    f = objective(IDENTITY, samples([1.0] * 6))
    start = row([3.0, 0, 0, 0, 0, 0])
    end = start - 0.1 * f.gradient(start)
    assert diagnostics.estimation_bias(start, end, f.gradient(end)) == pytest.approx(0, abs=1e-7)
    assert diagnostics.estimation_bias(end, start, f.gradient(end)) == pytest.approx(2)
    assert diagnostics.estimation_bias(row([1.0]+[0.0]*5), row([0.0]*6),
        row([0.0, 1.0]+[0.0]*4)) == pytest.approx(math.sqrt(2))  # fmt: skip


def test_dual_gap() -> None:
    gap = diagnostics.dual_gap([row([1.0, 0, 0, 0, 0, 0]), row([0, 1.0, 0, 0, 0, 0])], row([0.5, 0, 0, 0, 0, 0]))
    assert gap == pytest.approx(0.5)


@cheap
@given(st.lists(vectors, min_size=1, max_size=5), vectors)
def test_consistency_from_sums_is_the_sum_of_squares(ends: list[list[float]], new: list[float]) -> None:
    deltas, new_row = [row(end) for end in ends], row(new)
    squares, total = sum(float(d @ d) for d in deltas), torch.stack(deltas).sum(0)
    expected = sum(float((d - new_row).square().sum()) for d in deltas) / len(deltas)
    assert drift.consistency(squares, total, new_row, len(deltas)) == pytest.approx(expected, abs=1e-9)


def test_weight_drift_and_perturbation_spread() -> None:
    weights = [[row([0.0] * 6), row([1.0] + [0.0] * 5)], [row([0.0] * 6), row([0, 2.0, 0, 0, 0, 0])]]
    assert drift.weight_drift(weights, row([0.0] * 6)) == pytest.approx((0 + 1 + 0 + 4) / 4)
    # The mean at the first step is (1/2, 1/2): squared distances 1/2 for e1, e2 and 0, and 5/2 for 2 e1. (With two
    # steps the last would do.)
    zero, e1, e2 = row([0.0] * 6), row([1.0] + [0.0] * 5), row([0, 1.0, 0, 0, 0, 0])
    assert drift.perturbation_spread([[e1, zero, e2], [e2, zero, 2 * e1]]) == pytest.approx((5 * 0.5 + 2.5) / 6)


@cheap
@given(vectors, st.integers(1, 7))
def test_clients_that_perturb_alike_have_exactly_no_spread(e: list[float], clients: int) -> None:
    assert drift.perturbation_spread([[row(e)] * 3] * clients) == 0


def test_perturbation_drift_is_zero_for_the_global_direction_and_one_for_the_opposite() -> None:
    """The virtual model is server_lr times the mean of (1/2, 0, ...) and (-1/4, 1, 0, ...); its gradient turns with
    it."""
    f = objective(DIAGONAL, samples([1.0] * 6))
    w, weights = row([0.0] * 6), [[row([0.5, 0, 0, 0, 0, 0])], [row([-0.25, 1.0, 0, 0, 0, 0])]]

    def with_direction(factor: float, server_lr: float = 1.0) -> float:
        virtual = row([0.125 * server_lr, 0.5 * server_lr, 0, 0, 0, 0])
        step = factor * 0.05 * unit(f.gradient(virtual))
        return drift.perturbation_drift(weights, [[step], [step]], w, f.gradient, server_lr)

    assert with_direction(1) == pytest.approx(0, abs=1e-7) and with_direction(1, 0.5) == pytest.approx(0, abs=1e-7)
    assert with_direction(-1) == pytest.approx(1)
    g = flat(f.gradient(row([0.125, 0.5, 0, 0, 0, 0])))
    orthogonal = row([float(g[1]), -float(g[0]), 0, 0, 0, 0])
    assert drift.perturbation_drift(weights, [[orthogonal], [orthogonal]], w, f.gradient) == pytest.approx(
        math.sqrt(2) / 2
    )


def test_the_surface_of_a_quadratic() -> None:
    f = objective(DIAGONAL, samples([0.5] * 6))
    w = row([1.0, 2.0, 3.0, 4.0, 0.0, 1.0])
    first, second = directions(f.replica.layout, w, seed=3)
    grid = surface(f, w, (first, second), points=5, radius=2.0)
    assert grid.shape == (5, 5) and float(grid[2, 2]) == pytest.approx(f.value(w))
    point = flat(w) + 1.0 * flat(first) - 2.0 * flat(second) - 0.5
    assert float(grid[0, 3]) == pytest.approx(float(0.5 * (DIAGONAL.diagonal() * point**2).sum()))
    with pytest.raises(ValueError, match="2 points or more"):
        surface(f, w, (first, second), points=1)


def test_directions_have_the_size_of_the_filters_and_none_in_biases() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(3, 4)).double()
    result = quadratic.replica(model)
    pair = directions(result.layout, result.row)
    assert not torch.equal(*pair)
    for direction in pair:
        conv, conv_bias, linear, linear_bias = result.layout.views(direction)
        weights = result.layout.views(result.row)
        for d, w in ((conv, weights[0]), (linear, weights[2])):
            torch.testing.assert_close(d.flatten(1).norm(dim=1), w.flatten(1).norm(dim=1), rtol=1e-8, atol=0)
        assert not conv_bias.any() and not linear_bias.any()


def test_directions_are_orthogonal_before_the_filters_are_scaled() -> None:
    """With one filter the scaling is a number, so orthogonal directions stay orthogonal."""
    result = quadratic.replica(torch.nn.Linear(5, 1, bias=False).double())
    first, second = directions(result.layout, result.row, seed=1)
    assert float(first @ second) == pytest.approx(0, abs=1e-14) and first.any()


def test_margin_risk_by_hand() -> None:
    """Softmax of (log p, log(1-p)): margins are 2p - 1 for label 0."""
    model = torch.nn.Linear(2, 2, bias=False).double()
    result = quadratic.replica(model)
    w = torch.zeros_like(result.row)
    result.layout.gather([torch.eye(2, dtype=torch.float64)], w)

    def people(*shares: float) -> tuple[Tensor, Tensor]:
        return torch.tensor([[math.log(p), math.log(1 - p)] for p in shares]).double(), torch.zeros(len(shares)).long()

    pairs = [people(0.9, 0.6), people(0.2, 0.3, 0.55, 0.95)]  # margins 0.8, 0.2 and -0.6, -0.4, 0.1, 0.9
    assert diagnostics.margin_risk(result, pairs, w, margin=0.0) == pytest.approx((0 + 0.5) / 2)
    assert diagnostics.margin_risk(result, pairs, w, margin=0.3, batch=1) == pytest.approx((0.5 + 0.75) / 2)


def test_spectral_complexity_by_hand() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).double()
    result = quadratic.replica(model)
    w = torch.zeros_like(result.row)
    bias = torch.ones(2, dtype=torch.float64)
    first, second = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.diag(torch.tensor([2.0, -2.0])).double()
    result.layout.gather([first, bias, second, bias], w)
    assert diagnostics.spectral_complexity(result.layout, w) == pytest.approx(3 * 2 * (10 / 3 + 8 / 2))
    assert diagnostics.spectral_complexity(result.layout, torch.zeros_like(w)) == 0


def test_the_subset_has_every_clients_share_and_depends_on_the_seed_alone() -> None:
    pairs = [samples(*[[float(i)] for i in range(n)]) for n in (40, 20, 1)]
    selection = subset(pairs, 30, seed=1)
    assert [len(y) for _, y in selection] == [19, 9, 1]
    assert all(set(x[:, 0].tolist()) <= set(p[:, 0].tolist()) for (x, _), (p, _) in zip(selection, pairs))
    repeat, other_subset = subset(pairs, 30, seed=1), subset(pairs, 30, seed=2)
    assert torch.equal(selection[0][0], repeat[0][0]) and not torch.equal(selection[0][0], other_subset[0][0])
    assert subset(pairs, None, 0) == pairs and subset(pairs, 61, 0) == pairs
