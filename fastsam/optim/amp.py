"""What a GradScaler did before a step: gradients that it unscaled for the first pass leave it none to unscale for the
second."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from fastsam.optim.parameters import parameters_of


class LeavesScalingToStep:
    """What a GradScaler asks an optimizer: whether `step` unscales gradients and skips the update where they are not
    finite, as ours does, which restores the weights. Inside a closure no scaler can be at work (`step` refuses it), and
    Lightning, which asks there, would not clip."""

    def __get__(self, optimizer: Any, owner: type | None = None) -> bool:
        return optimizer is None or not optimizer._engine.in_closure


TELLING = 256.0  # a scale by which the norms of a scaled and of an unscaled gradient differ beyond doubt

MESSAGE = (
    "scaler.unscale_(optimizer) before first_step(): a GradScaler unscales once per step, so the second gradient would "
    "be applied with its scale. "
    "Leave it out (the perturbation is normalised, so the first gradient needs no unscaling); to clip, call "
    "scaler.unscale_(optimizer) after the "
    "second backward pass. scaler.update() makes this scaler ready for the next step"
)

SHARDED = (
    "a GradScaler with parameters that are split among ranks is not supported: train in bfloat16 (fully_shard's "
    "MixedPrecisionPolicy), which needs none, with skip_nonfinite=True for steps that are not finite"
)


class Scaling:
    """Which GradScaler steps an optimizer, so that the first pass can ask it what it did to the gradients."""

    def __init__(self, saved: Tensor | None = None) -> None:
        """saved: the scale of a scaler that is not known yet."""
        self.saved = saved
        self._scaler: weakref.ref[GradScaler] | None = None  # the one that made the last step

    def refuse_unscaled(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError when the scaler has unscaled this step's gradients already."""
        if self._scaler is not None:
            _refuse_unscaled(self._scaler(), optimizer)

    def meet(self, grad_scale: Tensor | None, sumsq: Tensor | None, groups: Sequence[dict[str, Any]]) -> None:
        """Keeps which scaler steps. grad_scale: None where it unscaled gradients since its last update; sumsq: squared
        norm of the first ones."""
        known = None if self._scaler is None else self._scaler()
        if known is not None and grad_scale is not None:
            return
        self._scaler = _calling_scaler()
        scaler = None if self._scaler is None else self._scaler()
        if grad_scale is None and scaler is not known:
            _refuse_still_scaled(scaler, sumsq, [p.grad for p in parameters_of(groups) if p.grad is not None])

    def of_first(self, grad_scale: Tensor | None) -> Tensor | None:
        """What the first gradients of the step that a scaler makes were multiplied with. grad_scale: as in `meet`,
        after which this is asked."""
        return self.scale if grad_scale is None else grad_scale

    @property
    def scale(self) -> Tensor | None:
        """What gradients are multiplied with just now; where no scaler is known, what the one of the saved state did,
        or None."""
        scaler = None if self._scaler is None else self._scaler()
        return self.saved if scaler is None else scaler._scale  # there is no way to ask that does not wait


def forget_scales(optimizer: Any) -> None:
    """A GradScaler takes its attributes away only after a step that succeeded, and would multiply with them in the
    next."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def refuse_closure(optimizer: Any, one_pass: bool = False) -> None:
    """Raises RuntimeError when a GradScaler makes this step."""
    if hasattr(optimizer, "grad_scale"):
        forget_scales(optimizer)
        again = "" if one_pass else "first_step(zero_grad=True), scaler.scale(loss).backward() again, "
        raise RuntimeError(
            "a GradScaler cannot step with a closure: it unscales and checks gradients before the closure makes them. "
            "Call "
            f"scaler.scale(loss).backward(), {again}scaler.step(optimizer), scaler.update()"
        )


def _calling_scaler() -> weakref.ref[GradScaler] | None:
    """The scaler in whose `step` this is called. It hands the optimizer a scale, and not itself."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(scaler := frame.f_locals.get("self"), GradScaler):
            return weakref.ref(scaler)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _refuse_unscaled(scaler: GradScaler | None, optimizer: Optimizer) -> None:
    # private to torch, which says it nowhere else
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer))
    if state is not None and getattr(state.get("stage"), "name", "") == "UNSCALED":
        raise RuntimeError(MESSAGE)


def _refuse_still_scaled(scaler: GradScaler | None, sumsq: Tensor | None, grads: Sequence[Tensor]) -> None:
    """For the one step before which the scaler was not known: raises RuntimeError when the second gradient, which
    should have been unscaled, is longer than the first, which should not. Waits for the device."""
    if scaler is None or sumsq is None or not grads or scaler.get_scale() < TELLING:
        return
    second = torch.nn.utils.get_total_norm(grads)
    if bool((second.double() > sumsq.sqrt()).item()):
        raise RuntimeError(MESSAGE)
