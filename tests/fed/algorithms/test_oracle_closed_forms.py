"""The independent loop itself, where the answer is known by hand: quadratics, linear losses, one step at a time."""

import math

import pytest
import torch

from tests.helpers import oracle

LR = 0.05
CENTRES = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0], [-0.5, 0.0, 2.0]], dtype=torch.float64)
CURVATURES = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
START = torch.tensor([0.3, -0.1, 0.7], dtype=torch.float64)
EVERYBODY = [0, 1, 2]
MINIMUM = (CURVATURES[:, None] * CENTRES).sum(0) / CURVATURES.sum()


def options(**changes):
    return oracle.Options(**{"rounds": 1, "epochs": 1, "batch": 4, "lr": LR, "lr_decay": 1.0, **changes})


def final(method, trace=None, **changes):
    """The weights after training on three quadratics, one step an epoch."""
    selection, clients = options(**changes), oracle.quadratic_clients(CENTRES, CURVATURES)
    model = oracle.QuadraticModel(START)
    active = [EVERYBODY] * selection.rounds
    return oracle.run(model, clients, method, selection, active, oracle.quadratic_loss, trace).w.detach()


def exact(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("phi", [0.0, 0.3])
def test_sgd_on_quadratics_contracts_geometrically(phi):
    """w_K - w* = (1 - lr*(s + phi))^K (w_0 - w*), w* the minimum of f_i + phi/2*||w - w_0||^2."""
    K, s = 7, CURVATURES[:, None]
    aim = (s * CENTRES + phi * START) / (s + phi)
    ends = aim + (1 - LR * (s + phi)) ** K * (START - aim)
    exact(final(oracle.FedProx(phi), epochs=K), ends.mean(0))
    exact(final(oracle.FedProx(phi), epochs=K, server_lr=0.5), START + 0.5 * (ends.mean(0) - START))


def test_weight_decay_momentum_and_clipping_of_one_client():
    x = oracle.quadratic_clients(CENTRES[:1], CURVATURES[:1])
    w, v = START.clone(), torch.zeros(3, dtype=torch.float64)
    for _ in range(5):
        g = CURVATURES[0] * (w - CENTRES[0])
        v = 0.8 * v + g * min(1.0, 0.7 / (g.norm().item() + 1e-6)) + 0.1 * w
        w = w - LR * v
    selection = options(epochs=5, momentum=0.8, weight_decay=0.1, clip=0.7)
    model = oracle.run(oracle.QuadraticModel(START), x, oracle.FedAvg(), selection, [[0]], oracle.quadratic_loss)
    exact(model.w.detach(), w)


def test_the_clip_scopes_of_a_proximal_step():
    """After one step at w != anchor: full clips g + phi*(w - w0); linear clips g - phi*w0 and adds phi*w."""
    x, phi, b, s = oracle.quadratic_clients(CENTRES[1:2], CURVATURES[1:2]), 0.4, CENTRES[1], CURVATURES[1]
    for scope in ("full", "linear"):
        w = START.clone()
        for _ in range(3):
            pull = (w - START) if scope == "full" else -START
            inside = s * (w - b) + phi * pull
            inside = inside * min(1.0, 0.5 / (inside.norm().item() + 1e-6))
            w = w - LR * (inside + (0 if scope == "full" else phi * w))
        selection = options(epochs=3, clip=0.5, scope=scope)
        model = oracle.run(
            oracle.QuadraticModel(START), x, oracle.FedProx(phi), selection, [[0]], oracle.quadratic_loss
        )
        exact(model.w.detach(), w)


@pytest.mark.parametrize(
    "method",
    [
        oracle.SCAFFOLD(),
        pytest.param(oracle.FedDyn(0.4), marks=pytest.mark.slow),
        pytest.param(oracle.FedSpeed(0.0, 1.0, 0.4), marks=pytest.mark.slow),
        pytest.param(oracle.FedSpeed(0.0, 0.3, 0.4), marks=pytest.mark.slow),
    ],
)
def test_corrected_methods_reach_the_global_minimum_with_many_local_steps(method):
    assert (final(method, rounds=60, epochs=4, lr=0.3) - MINIMUM).norm() < 1e-6


@pytest.mark.parametrize(
    "method",
    [
        oracle.FedAvg(),
        pytest.param(oracle.FedCM(0.5), marks=pytest.mark.slow),
        pytest.param(oracle.FedProx(0.4), marks=pytest.mark.slow),
        pytest.param(oracle.FedLESAM(0.0), marks=pytest.mark.slow),
    ],
)
def test_uncorrected_methods_do_not(method):
    assert (final(method, rounds=60, epochs=4, lr=0.3) - MINIMUM).norm() > 0.05


def test_a_step_of_sam_on_a_quadratic():
    """g2 = s*(w + rho*g1/||g1|| - b), so it is g1*(1 + s*rho/||g1||)."""
    g1 = CURVATURES[:, None] * (START - CENTRES)
    length = g1.norm(dim=1, keepdim=True)
    g2 = g1 * (1 + CURVATURES[:, None] * 0.3 / (length + 1e-7))
    exact(final(oracle.FedSAM(0.3)), START - LR * g2.mean(0))
    exact(final(oracle.FedGSAM(0.3, alpha=0.7)), START - LR * g2.mean(0))  # g1 is parallel to g2 here
    exact(final(oracle.MoFedSAM(0.3, beta=0.2)), START - LR * 0.2 * g2.mean(0))


def test_a_step_of_asam_on_a_quadratic():
    size = START.abs() + 0.01
    expected = torch.zeros(3, dtype=torch.float64)
    for s, b in zip(CURVATURES, CENTRES):
        g1 = s * (START - b)
        eps = 0.3 * size**2 * g1 / ((size * g1).norm() + 1e-7)
        expected += s * (START + eps - b) / 3
    exact(final(oracle.FedSAM(0.3, True, 0.01)), START - LR * expected)


def test_gsam_takes_off_what_is_orthogonal_to_g2():
    model, (x, y) = oracle.smooth_model(), oracle.ragged_clients()[1]
    w = [p.detach().clone() for p in model.parameters()]
    visit = oracle.loop.Visit(model, torch.nn.functional.cross_entropy, x, y, 0, 0.1, 1, 0, w, {}, {}, 0.1)
    g1 = visit.gradient(w, x, y)
    eps = [0.3 * g / (oracle.flat_norm(g1) + 1e-7) for g in g1]
    g2 = visit.gradient([p + e for p, e in zip(w, eps)], x, y)
    v = oracle.FedGSAM(0.3, alpha=0.6).gradient(visit, w, x, y)
    orthogonal_part, g1, g2 = (torch.cat([t.flatten() for t in u]) for u in ([a - b for a, b in zip(v, g2)], g1, g2))
    assert abs(orthogonal_part @ g2) < 1e-14 and orthogonal_part.norm() > 1e-3
    exact(orthogonal_part @ g1, -0.6 * (g1 @ g1 - (g1 @ g2) ** 2 / (g2 @ g2)))


def test_the_first_perturbations_of_fedlesam():
    """No old model: from the origin, or none. Afterwards towards the model before, the same for all here."""

    def mean_gradient(w):
        return (CURVATURES[:, None] * (w - CENTRES)).mean(0)

    for first, e in (("origin", -START), ("none", torch.zeros_like(START))):
        eps = 0.2 * e / (e.norm() + 1e-7)
        w1 = START - LR * mean_gradient(START + eps)
        step_back = START - w1
        two = w1 - LR * mean_gradient(w1 + 0.2 * step_back / (step_back.norm() + 1e-7))
        exact(final(oracle.FedLESAM(0.2, first)), w1)
        exact(final(oracle.FedLESAM(0.2, first), rounds=2), two)
        exact(final(oracle.FedLESAM(0.2, first, "last_round"), rounds=2), two)


def test_momentum_of_one_step_rounds():
    """With one step a round D is the last v, and m the exponential mean of full gradients."""
    w = START.clone()
    D = m = torch.zeros(3, dtype=torch.float64)
    u, x = START.clone(), START.clone()
    m2 = torch.zeros(3, dtype=torch.float64)
    for _ in range(4):
        D = 0.3 * (CURVATURES[:, None] * (w - CENTRES)).mean(0) + 0.7 * D
        w = w - LR * D
        g = (CURVATURES[:, None] * (u - CENTRES)).mean(0)
        u, m = u - LR * (0.3 * g + 0.7 * m), 0.3 * g + 0.7 * m
        g = (CURVATURES[:, None] * (x - CENTRES)).mean(0)
        x, m2 = x - LR * (g + 0.7 * m2), g + 0.7 * m2
    exact(final(oracle.FedCM(0.3), rounds=4), w)
    exact(final(oracle.MoFedSAM(rho=0.0, beta=0.3), rounds=4), w)
    exact(final(oracle.MimeLite(0.3), rounds=4), u)
    exact(final(oracle.MimeLite(0.3, "heavy_ball"), rounds=4), x)


def test_two_rounds_of_fedadam():
    for correct in (False, True):
        w, m, V = START.clone(), torch.zeros(3, dtype=torch.float64), torch.full((3,), 1e-4, dtype=torch.float64)
        for t in (1, 2):
            d = -LR * (CURVATURES[:, None] * (w - CENTRES)).mean(0)
            m, V = 0.8 * m + 0.2 * d, 0.95 * V + 0.05 * d**2
            scale = (1 - 0.8**t, 1 - 0.95**t) if correct else (1, 1)
            w = w + 0.1 * (m / scale[0]) / ((V / scale[1]).sqrt() + 0.01)
        exact(final(oracle.FedAdam(0.8, 0.95, 0.01, correct, 1e-4), rounds=2, server_lr=0.1), w)


def test_control_variates_are_mean_gradients():
    trace = []
    final(oracle.SCAFFOLD(), trace, rounds=3, epochs=4)
    (_, _, (old_state,)), (server, states, (new_state,)) = trace[-2:]
    exact(server["c"][0], (old_state - new_state) / (LR * 4))
    exact(server["c"][0], sum(states[i]["c_i"][0] for i in EVERYBODY) / 3)


@pytest.mark.parametrize("dyn", [True, False])
def test_smoo_agrees_on_one_perturbation(dyn):
    """r_i = alpha*mu_i - eps; s has length rho, and on equal clients it is the common SAM direction."""
    trace = []
    final(oracle.FedSMOO(0.2, 1.5, 0.1, "paper", dyn), trace, rounds=3, epochs=2)
    server, states, _ = trace[-1]
    assert math.isclose(oracle.flat_norm(server["s"]), 0.2, rel_tol=1e-5)
    assert all(oracle.flat_norm(k["mu"]) > 1e-3 for k in states.values())


@pytest.mark.parametrize("form", ["full", "diag"])
@pytest.mark.parametrize("ascent_steps", [1, 3])
def test_the_affine_map_of_a_linear_loss(form, ascent_steps):
    """loss = w.(L x + d): its gradient for L is w x^T (for d: w), less the penalty's; the last ascent's gradient is the
    descent's."""
    lam, eta, mean_x = 0.3, 0.2, torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    identity = torch.eye(3, dtype=torch.float64) if form == "full" else torch.ones(3, dtype=torch.float64)
    L, d, w = identity.clone(), torch.zeros(3, dtype=torch.float64), START.clone()
    for _ in range(2):
        for _ in range(ascent_steps):
            g = (L @ mean_x if form == "full" else L * mean_x) + d
            ascent = torch.outer(w, mean_x) if form == "full" else w * mean_x
            L, d = L + eta * (ascent - 2 * lam * (L - identity)), d + eta * (w - 2 * lam * d)
        w = w - LR * g
    model = torch.nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(START)
    clients = [(mean_x.expand(4, 3), torch.zeros(4, dtype=torch.int64))]
    actual = oracle.run(model, clients, oracle.FedRobust(lam, eta, ascent_steps, form), options(epochs=2), [[0]],
                      lambda out, y: out.mean())  # fmt: skip
    exact(actual.weight.detach()[0], w)


def test_the_channel_map_is_the_full_one_with_equal_blocks():
    """On images of one pixel both are the same matrix."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 3), torch.nn.Tanh()).double()
    generator = torch.Generator().manual_seed(3)
    clients = [(torch.randn(6, 2, 1, 1, generator=generator).double(), torch.tensor([0, 1, 2, 0, 1, 2]))]
    forms = [oracle.FedRobust(0.2, 0.5, 2, form) for form in ("channel", "full")]
    a, b = (oracle.run(model, clients, form, options(epochs=5), [[0]]) for form in forms)
    assert oracle.difference(a, model) > 0 and oracle.difference(a, b) < 1e-14
