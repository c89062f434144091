"""Lookbehind: a step of several ascents, its order by hand, and gradients of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import SAM, FusedSAM, backends
from fastsam.optim.variants import LESAM, Lookbehind
from fastsam.optim.variants.sam import Memory
from fastsam.step import Mix
from tests.helpers.sam_oracle import copies, make_parameters, same_bits
from tests.helpers.traffic import needs_interpreter, recorded
from tests.helpers.variant_cases import RHO, Paper, Training, flat, fused, loop, problem

Loss = Callable[[list[Tensor]], Tensor]
THREE = Lookbehind(RHO, k=3, alpha=0.4)


def gradients(loss: Loss, at: list[Tensor]) -> list[Tensor]:
    points = [p.detach().clone().requires_grad_() for p in at]
    return list(torch.autograd.grad(loss(points), points))


@pytest.mark.parametrize(("k", "alpha"), [(1, 1.0), (1, 0.3), (2, 0.5), (4, 0.8)])
def test_fast_and_slow_weights_of_the_paper(k: int, alpha: float, backend: backends.Backend) -> None:
    """Algorithm 1 with SGD, step by step: fast weights descend by each gradient, and the slow ones go a part of the way
    to them."""
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    slow, loss = problem()
    params = [nn.Parameter(p.clone()) for p in slow]
    opt = FusedSAM(params, torch.optim.SGD, sam=Lookbehind(RHO, k=k, alpha=alpha), lr=0.1, backend=backend.name)
    for t in range(4):
        Training(params, opt).steps(range(t, t + 1))
        fast, behind = [p.clone() for p in slow], [p.clone() for p in slow]
        for _ in range(k):
            g = gradients(lambda ps, t=t: loss(ps, t), behind)
            behind = [p + RHO * d / flat(g).norm() for p, d in zip(behind, g, strict=True)]
            g = gradients(lambda ps, t=t: loss(ps, t), behind)
            fast = [p - 0.1 * d for p, d in zip(fast, g, strict=True)]
        slow = [p + alpha * (q - p) for p, q in zip(slow, fast, strict=True)]
    for found, expected in zip(params, slow, strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", ["sgd", "nadam"])
def test_one_ascent_and_the_whole_way_is_sam(base: str, dtype: torch.dtype) -> None:
    ends = [fused(sam, base, 3, dtype=dtype).params for sam in (Lookbehind(RHO, k=1, alpha=1.0), SAM(RHO))]
    assert same_bits(*ends)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sam", [Lookbehind(3.0, True, 0.1, k=3), Lookbehind(RHO, k=3, radius=LESAM(sigma=4.0))])
def test_the_points_of_the_ascents(sam: Lookbehind, dtype: torch.dtype) -> None:
    """Each from the point before: by the weights there (ASAM), and by the norm there (a radius of its own)."""
    training, radii = fused(sam, "sgd", 1, dtype=dtype), []
    before = copies(training.params)
    for _ in range(3):
        training.backward(1)
        w = flat([p.detach().double() for p in training.params])
        g = flat([p.grad.double() for p in training.params if p.grad is not None])
        scale = w.abs() + 0.1 if sam.adaptive else torch.ones_like(w)
        radii.append(sam.rho if sam.radius is None else min(4.0 / float(g.norm()), RHO))
        training.opt.first_step()
        moved = flat([p.detach().double() for p in training.params]) - w
        expected = radii[-1] * scale**2 * g / (scale * g).norm()
        assert (moved - expected).norm() < (1e-9 if dtype == torch.float64 else 0.2) * expected.norm()
        assert float(moved @ expected / expected.norm() ** 2) == pytest.approx(1.0, abs=0.05)
    assert sam.radius is None or (min(radii) < RHO and len(set(radii)) > 1)
    training.opt.restore()
    assert same_bits(before, training.params)


# --- the order of a step ---


def test_the_halves_in_another_order() -> None:
    training = fused(THREE, "sgd", 1)
    params, opt = training
    before = copies(params)
    for made in range(4):
        assert opt.phase == ("second" if made == 3 else "first") and opt.is_perturbed is (made > 0) and opt.two_passes
        training.backward(1)
        words = f"after {made} of the 3 ascents of Lookbehind; call first_step" if made else "without first_step"
        for early in (opt.second_step, opt.step) if 0 < made < 3 else (opt.second_step,) if made == 0 else ():
            with pytest.raises(RuntimeError, match=words):
                early()
        if made:
            with pytest.raises(RuntimeError, match=r"step\(closure\) between first_step"):
                opt.step(lambda: None)
            with pytest.raises(RuntimeError, match="inside first_step"), opt.perturbed():
                pass
        if made < 3:
            opt.first_step()
    with pytest.raises(RuntimeError, match="called already"):
        opt.first_step()
    opt.restore()
    assert same_bits(before, params) and opt.phase == "first"
    training.steps(range(1, 3))
    assert same_bits(params, fused(THREE, "sgd", 3).params)


def test_in_a_context_the_other_ascents_are_made_by_hand() -> None:
    training, whole = fused(THREE, "sgd", 1), fused(THREE, "sgd", 2)
    training.backward(1)
    with training.opt.perturbed():
        training.ascend(1)
        training.backward(1)
        training.opt.step()
    assert same_bits(training.params, whole.params)


@pytest.mark.parametrize("last", [1, 2, 3, 4])
@pytest.mark.parametrize("steps_itself", [False, True], ids=["raises", "steps itself"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_closure_that_ends_the_step(dtype: torch.dtype, steps_itself: bool, last: int) -> None:
    training = fused(THREE, "sgd", 2, dtype=dtype)
    params, opt = training
    before, calls = copies(params), []

    def closure() -> None:
        calls.append(opt.phase)
        problem()[1](params, 2).backward()
        if len(calls) == last and not steps_itself:
            raise KeyboardInterrupt("here")
        if len(calls) == last:
            (opt.first_step if last < 4 else opt.second_step)()

    with pytest.raises((RuntimeError if steps_itself else KeyboardInterrupt), match="closure made a part|here"):
        opt.step(closure)
    assert calls == ["first", "first", "first", "second"][:last] and not opt.is_perturbed
    if not (steps_itself and last == 4):  # which has made the whole step
        assert same_bits(before, params)
        training.steps(range(2, 3))
    assert same_bits(training.steps(range(3, 4)).params, fused(THREE, "sgd", 4, dtype=dtype).params)


# --- gradients of every kind ---


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"check_finite": True}], ids=["unchecked", "checked"])
@pytest.mark.parametrize("base", ["sgd", "nadam"])
def test_a_gradient_that_is_not_finite(base: str, options: dict[str, Any], bad: int) -> None:
    """At the weights it moves nothing, and the step goes on from there; at a point on the way it updates nothing, and
    the next step is as ever."""
    training = fused(THREE, base, 2, **options)
    before = copies(training.params)
    for made in range(4):
        training.backward(2)
        if made == bad:
            training.params[1].grad = torch.full_like(training.params[1], torch.nan)
        at = copies(training.params)
        (training.opt.second_step if made == 3 else training.opt.first_step)()
        assert made != bad or made == 3 or same_bits(at, training.params)
    if bad == 3 and not options:
        assert not all(p.isfinite().all() for p in training.params)  # of what the update is given nobody was asked
        return
    assert same_bits(before, training.params) is (bad > 0)
    after = copies(training.params)
    training.steps(range(3, 4))
    assert not same_bits(after, training.params) and all(p.isfinite().all() for p in training.params)


def test_parameters_without_a_gradient_in_some_of_the_passes() -> None:
    """Whoever has none stays where it is; the sum is of those that were there, and the update of those that have a last
    one."""
    start = [torch.full((3,), 1.0 + i, dtype=torch.float64) for i in range(4)]
    given = ((1, 1, None, None), (None, 1, 1, None), (1, None, 1, 1))  # in the two ascents and in the last pass
    params = [nn.Parameter(p.clone()) for p in start]
    opt = FusedSAM(params, torch.optim.SGD, sam=Lookbehind(0.5, k=2, alpha=0.5), lr=1.0)
    for _ in range(2):  # with other parameters in the step before
        for p in params:
            p.grad = torch.ones_like(p)
        opt.second_step() if opt.phase == "second" else opt.first_step()
    opt.restore()
    points = [p.clone() for p in start]
    for made, row in enumerate(given):
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else torch.full_like(p, float(g))
        if made == 2:
            opt.second_step()
            break
        opt.first_step()
        norm = (3.0 * sum(g is not None for g in row)) ** 0.5
        points = [p if g is None else p + 0.5 / norm for p, g in zip(points, row, strict=True)]
        torch.testing.assert_close([p.detach() for p in params], points)
    # one last gradient; no last one; one on the way and a last one; a last one
    expected = [start[0] - 0.5, start[1], start[2] - 1.0, start[3] - 0.5]
    torch.testing.assert_close([p.detach() for p in params], expected)


class Upper(Lookbehind):
    """Perturbs some groups only."""

    def moves(self, group: Mapping[str, Any]) -> bool:
        return bool(group["rho"])


def test_groups_that_stay_descend_by_all_gradients() -> None:
    first, second = make_parameters([(4,), (5,)], torch.float64)
    start = copies([first, second])
    opt = FusedSAM(
        [{"params": [first]}, {"params": [second], "rho": 0.0}], torch.optim.SGD, sam=Upper(RHO, k=2), lr=0.1
    )
    opt.step(lambda: ((first**2).sum() * (second**2).sum()).backward())
    w, v, total = start[0], start[1], torch.zeros(5, dtype=torch.float64)
    for _ in range(2):
        g = 2 * w * (v**2).sum()
        w = w + RHO * g / g.norm()
        total += 2 * v * (w**2).sum()
    torch.testing.assert_close(second.detach(), start[1] - 0.1 * 0.5 * total)


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float64), (torch.float32, torch.bfloat16)], ids=str)
def test_parameters_of_two_dtypes_and_with_gaps(kinds: tuple[torch.dtype, ...]) -> None:
    """One norm over all in each ascent."""
    ends = []
    for gaps in (False, True):
        params = [nn.Parameter(torch.linspace(-1, 1, 48).reshape(6, 8).to(kind)[:, :3]) for kind in kinds]
        if not gaps:
            params = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params]
        opt = FusedSAM(params, torch.optim.SGD, sam=THREE, lr=0.1, momentum=0.9)
        for _ in range(3):
            opt.step(lambda ps=params: torch.stack([p.double().sin().square().sum() for p in ps]).sum().backward())
        ends.append(params)
    assert same_bits(*ends)


# --- beside other options ---


@needs_interpreter
@pytest.mark.parametrize("k", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 4))])
def test_the_bytes_of_a_step(k: int) -> None:
    """Those that docs/variants.md has, without the gradients that torch's calls keep: 8 of the first, 12 of each other;
    a chunk, and its scalars."""
    p = nn.Parameter(torch.linspace(-1, 1, 4096))
    sam = Lookbehind(RHO, k=k)
    opt = FusedSAM([p], torch.optim.SGD, sam=sam, lr=0.1, momentum=0.9, backend="triton")
    opt.step(lambda: p.sin().square().sum().backward())
    with recorded({}) as traffic:
        opt.step(lambda: p.sin().square().sum().backward())
    expected = 40 if k == 1 else 12 + 32 * k - 8 - 12 * (k - 2)
    assert 0 <= traffic.bytes / p.numel() - expected < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_exclusive_owner_gets_the_same_bits(dtype: torch.dtype) -> None:
    """Tensors large enough that SAM would exchange their memory."""
    ends, addresses = [], []
    for exclusive in (False, True):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(300, 300).to(dtype))
        opt = FusedSAM([p], torch.optim.SGD, sam=THREE, lr=0.1, momentum=0.9, exclusive=exclusive)
        seen = {p.data_ptr()}
        for _ in range(3):

            def closure(p: nn.Parameter = p, seen: set[int] = seen) -> None:
                seen.add(p.data_ptr())
                p.float().sin().square().sum().backward()

            opt.step(closure)
        ends.append([p])
        addresses.append(len(seen))
    assert same_bits(*ends) and addresses == [1, 1]


def test_running_statistics_are_of_the_first_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(8, 3)
    opt = FusedSAM(model.parameters(), torch.optim.SGD, sam=THREE, lr=0.1, model=model)
    opt.step(lambda: model(x).square().sum().backward())
    assert int(model[1].num_batches_tracked) == 1  # type: ignore[arg-type]
    while opt.phase == "first":
        model(x).square().sum().backward()
        opt.first_step(zero_grad=True)
    model(x).square().sum().backward()
    opt.second_step()
    assert int(model[1].num_batches_tracked) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"k": 0}, ValueError, "k must be 1 or more"),
        ({"k": 2.0}, TypeError, "k must be a whole number"),
        ({"alpha": 0.0}, ValueError, "alpha must be above 0 and 1 or less"),
        ({"alpha": 1.5}, ValueError, "alpha must be above 0 and 1 or less"),
        ({"alpha": float("nan")}, ValueError, "alpha must be above 0"),
        ({"alpha": "half"}, TypeError, "alpha must be a number"),
    ],
)
def test_an_option_out_of_its_range(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Lookbehind(**options)


def test_what_does_not_go_together() -> None:
    params = make_parameters([(3,)], torch.float32)
    with pytest.raises(ValueError, match="in_backward=True with Lookbehind"):
        FusedSAM(params, torch.optim.SGD, sam=Lookbehind(), lr=0.1, exclusive=True, in_backward=True)


class Highest(SAM):
    """Two ascents, and the gradient at the last point alone."""

    @property
    def ascents(self) -> int:
        return 2

    @property
    def mix(self) -> Mix:
        return Mix()


def test_ascents_of_ones_own() -> None:
    for found, expected in zip(fused(Highest(RHO), "sgd", 3).params, loop(Paper(ascents=2), "sgd", 3), strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-11)


class Averaged(Highest):
    memory = Memory.DIRECTION


def test_ascents_go_along_the_gradients_themselves() -> None:
    with pytest.raises(ValueError, match="Averaged climbs 2 times, along the gradients themselves"):
        FusedSAM(make_parameters([(3,)], torch.float32), torch.optim.SGD, sam=Averaged(), lr=0.1)
