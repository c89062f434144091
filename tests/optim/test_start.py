"""`FusedSAM(start=)`: the base optimizer's steps before, with one backward pass in every style, and SAM's after."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import SAM, FusedSAM
from fastsam.optim.rho_scheduler import CosineRho
from fastsam.optim.variants import LookSAM
from tests.helpers.sam_oracle import copies, same_bits
from tests.helpers.trainings import by_hand, loss_of, outcome
from tests.helpers.variant_cases import BASES, RHO, Training, make_fused, problem

START, STEPS = 3, 6
BACKWARD = {"assume_no_alias": True, "optimizer_in_backward": True}


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose one element is the number of backward passes from now on."""
    count, backward = [0], Tensor.backward

    def counted(*arguments: Any, **options: Any) -> None:
        count[0] += 1
        backward(*arguments, **options)

    monkeypatch.setattr(Tensor, "backward", counted)
    return count


# --- a step in every style; each makes the first pass of a step only if the step perturbs ---


def by_closure(training: Training, t: int) -> None:
    training.steps(range(t, t + 1))


def with_clipping(training: Training, t: int) -> None:
    """Clip, as a trainer does, in the last pass, to a norm that is not reached."""
    by_hand(training, t, spoil=lambda _: nn.utils.clip_grad_norm_(training.params, 1e9))


def in_micro_batches(training: Training, t: int) -> None:
    """Accumulate the gradients of three quarters and of a quarter of the loss."""
    for last in (False, True) if training.opt.perturbs else (True,):
        training.opt.zero_grad()
        for part in (0.75, 0.25):
            (part * loss_of(training, t)).backward()
        training.opt.step() if last else training.opt.first_step()


def with_a_scaler(scaler: torch.amp.GradScaler, training: Training, t: int) -> None:
    for last in (False, True) if training.opt.perturbs else (True,):
        training.opt.zero_grad()
        scaler.scale(loss_of(training, t)).backward()
        last or training.opt.first_step()
    scaler.step(training.opt)
    scaler.update()


STYLES: dict[str, Callable[[], Callable[[Training, int], None]]] = {
    "closure": lambda: by_closure,
    "halves": lambda: by_hand,
    "clipped": lambda: with_clipping,
    "micro-batches": lambda: in_micro_batches,
    "scaler": lambda: partial(with_a_scaler, torch.amp.GradScaler("cpu", init_scale=2.0**8)),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("options", [{}, {"assume_no_alias": True}, BACKWARD], ids=["plain", "exclusive", "backward"])
def test_before_it_a_step_is_the_bases_and_after_it_sams(
    style: str, base: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: as with a radius of 0, and as without `start` from the weights and the state of then."""
    if "optimizer_in_backward" in options and (base in ("nadam", "amsgrad") or style in ("scaler", "micro-batches")):
        pytest.skip("refused with such updates")
    late, plain = (make_fused(SAM(RHO, start=start), base, 0, **options) for start in (START, 0))
    plain.opt.param_groups[0]["rho"] = 0.0
    passes, step, plain_step = count_passes(monkeypatch), STYLES[style](), STYLES[style]()
    factor = 2 if style == "micro-batches" else 1
    for t in range(STEPS):
        assert late.opt.perturbs is (t >= START)
        if t == START:
            plain.opt.param_groups[0]["rho"] = RHO
        passes[0] = 0
        step(late, t)
        assert passes == [factor * (1 + (t >= START))]
        plain_step(plain, t)
        assert same_bits(outcome(late), outcome(plain)), t


@pytest.mark.parametrize("base", ["nadam", "amsgrad"])
def test_a_base_that_makes_its_own_step_has_torchs_bits(base: str) -> None:
    training = make_fused(SAM(RHO, start=STEPS), base, STEPS)
    params = [p.requires_grad_() for p in problem()[0]]
    cls, options = BASES[base]
    optimizer = cls(params, **options)
    for t in range(STEPS):
        optimizer.zero_grad()
        problem()[1](params, t).backward()
        optimizer.step()
    assert same_bits(training.params, params)


def test_an_interval_counts_from_it_and_a_schedule_of_rho_from_the_first_step() -> None:
    training = make_fused(SAM(RHO, interval=2, start=START), "sgd", 0)
    schedule, seen, radii = CosineRho(training.opt, total_steps=8), [], []
    for t in range(8):
        seen.append(training.opt.perturbs)
        radii.append(training.opt.param_groups[0]["rho"])
        by_closure(training, t)
        schedule.step()
    assert seen == [False, False, False, True, False, True, False, True]
    expected = CosineRho(make_fused(SAM(RHO), "sgd", 0).opt, total_steps=8)
    for radius in radii:
        assert radius == expected.get_last_rho()[0]
        expected.step()


def test_looksam_reuses_nothing_before_it() -> None:
    """`k` counts from `start`, and before it no gradient is known that could be reused."""
    late, plain = make_fused(LookSAM(RHO, k=2, start=START), "adamw", START), make_fused(SAM(RHO), "adamw", 0)
    plain.opt.param_groups[0]["rho"] = 0.0
    assert same_bits(late.params, plain.steps(range(START)).params)
    seen = []
    for t in range(START, START + 4):
        seen.append(late.opt.perturbs)
        by_closure(late, t)
    assert seen == [True, False, True, False]


def test_a_class_that_chooses_its_steps_is_asked_from_it_on() -> None:
    class Early(SAM):
        def perturbs(self, step: int) -> bool:
            return step < 2

    training, seen = make_fused(Early(RHO, start=START), "sgd", 0), []
    for t in range(STEPS):
        seen.append(training.opt.perturbs)
        by_closure(training, t)
    assert seen == [False, False, False, True, True, False]


@pytest.mark.parametrize("moment", [1, START, START + 1])
@pytest.mark.parametrize("copied", [False, True], ids=["state dict", "deepcopy"])
def test_it_counts_the_steps_before_a_resume(moment: int, copied: bool) -> None:
    full = make_fused(SAM(RHO, start=START), "adamw", STEPS)
    training = make_fused(SAM(RHO, start=START), "adamw", moment)
    if copied:
        resumed = copy.deepcopy(training)
    else:
        resumed = make_fused(SAM(RHO, start=START), "adamw", 0)
        for p, q in zip(resumed.params, training.params, strict=True):
            p.data.copy_(q)
        resumed.opt.load_state_dict(training.opt.state_dict())
    assert resumed.opt.perturbs is (moment >= START)
    assert same_bits(resumed.steps(range(moment, STEPS)).params, full.params)


def test_a_first_half_that_is_made_in_vain_changes_nothing() -> None:
    """A loop that always calls `first_step()` has the same weights, and wastes a pass."""
    always, once = (make_fused(SAM(RHO, start=2), "sgd", 0) for _ in range(2))
    for t in range(4):
        always.backward(t)
        old_weights = copies(always.params)
        always.opt.first_step(zero_grad=True)
        assert same_bits(always.params, old_weights) is (t < 2)
        loss_of(always, t).backward()
        always.opt.second_step()
        by_hand(once, t)
    assert same_bits(outcome(always), outcome(once))


# --- the options of `FusedSAM` ---


def make(**options: Any) -> FusedSAM:
    return FusedSAM([nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1, **options)


def test_the_options_of_the_optimizer_are_the_variants() -> None:
    assert make(rho=0.1, start=3, interval=2).variant == SAM(0.1, start=3, interval=2)
    assert make(variant=LookSAM(start=5)).variant == LookSAM(start=5)


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", None])
def test_what_is_no_number_of_steps_is_refused(value: Any) -> None:
    for refused in (lambda: make(start=value), lambda: SAM(start=value)):
        with pytest.raises(ValueError, match=r"^start must be a whole number of steps, 0 or more, got "):
            refused()


@pytest.mark.parametrize("options", [{"start": 2}, {"interval": 2}], ids=str)
def test_a_variant_has_its_own(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"start cannot be combined with variant.*variant=GSAM\(rho=0.05\)"):
        make(variant=LookSAM(), **options)


def test_a_schedule_that_ends_before_it_is_refused() -> None:
    with pytest.raises(ValueError, match="start must be at most 9, the last step of this schedule of rho, got 10"):
        CosineRho(make(start=10), total_steps=9)
    CosineRho(make(start=9), total_steps=9)
