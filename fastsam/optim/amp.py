"""The part of a GradScaler in a step. A scaler unscales once per step, and a step has two passes."""

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


class SupportsAmpScaling:
    """The flag by which a GradScaler learns that `step` unscales gradients and skips updates that are not finite.

    It is False inside a closure, where no scaler can work (`step` refuses it), because Lightning reads it there and
    would not clip.
    """

    def __get__(self, optimizer: Any, owner: type | None = None) -> bool:
        return optimizer is None or not optimizer._engine.in_closure


MIN_SCALE = 256.0  # a scale by which the norms of a scaled and of an unscaled gradient differ beyond doubt

MESSAGE = (
    "scaler.unscale_(optimizer) before first_step(): a GradScaler unscales once per step, so the second gradient would "
    "be applied with its scale. Leave it out (the perturbation is normalised, so the first gradient needs no "
    "unscaling); to clip, call scaler.unscale_(optimizer) after the second backward pass. scaler.update() makes this "
    "scaler ready for the next step"
)

SHARDED = (
    "a GradScaler with parameters that are split among ranks is not supported: train in bfloat16 (fully_shard's "
    "MixedPrecisionPolicy), which needs none, with skip_nonfinite=True for steps that are not finite"
)


class GradScalerTracker:
    """The GradScaler of an optimizer. The first pass asks it for the state of the gradients."""

    def __init__(self, saved_scale: Tensor | None = None) -> None:
        """Begin without a scaler. `saved_scale` is the scale of a scaler that is not known yet."""
        self.saved_scale = saved_scale
        self._scaler: weakref.ref[GradScaler] | None = None  # the scaler of the last step

    def check_not_unscaled(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if the scaler has unscaled this step's gradients already."""
        if self._scaler is not None:  # its states are private to torch, which tells it nowhere else
            state = getattr(self._scaler(), "_per_optimizer_states", {}).get(id(optimizer))
            if state is not None and getattr(state.get("stage"), "name", "") == "UNSCALED":
                raise RuntimeError(MESSAGE)

    def observe(
        self, grad_scale: Tensor | None, found_inf: Tensor, sumsq: Tensor | None, groups: Sequence[dict[str, Any]]
    ) -> None:
        """Record the scaler of this step.

        Args:
            grad_scale: scale of the gradients, None if the scaler has unscaled gradients since its last update.
            found_inf: not 0 if the scaler has found inf or NaN, so that the step updates nothing.
            sumsq: squared norm of the first gradients.
            groups: parameter groups.
        """
        last_scaler = None if self._scaler is None else self._scaler()
        if last_scaler is not None and grad_scale is not None:
            return
        self._scaler = _calling_scaler()
        scaler = None if self._scaler is None else self._scaler()
        if grad_scale is None and scaler is not last_scaler:
            _check_unscaled(scaler, found_inf, sumsq, [p.grad for p in parameters_of(groups) if p.grad is not None])

    @property
    def scale(self) -> Tensor | None:
        """The present factor of gradients: of the known scaler, or of the saved state, or None."""
        scaler = None if self._scaler is None else self._scaler()
        return self.saved_scale if scaler is None else scaler._scale  # there is no way to ask that does not wait


def forget_scales(optimizer: object) -> None:
    """Remove the attributes of a GradScaler, which removes them itself only after a step that succeeded."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def check_no_closure(optimizer: object, one_pass: bool = False) -> None:
    """Raise RuntimeError if a GradScaler makes this step."""
    if hasattr(optimizer, "grad_scale"):
        forget_scales(optimizer)
        second_pass = "" if one_pass else "first_step(zero_grad=True), scaler.scale(loss).backward() again, "
        raise RuntimeError(
            "a GradScaler cannot step with a closure: it unscales and checks gradients before the closure makes them. "
            f"Call scaler.scale(loss).backward(), {second_pass}scaler.step(optimizer), scaler.update()"
        )


def _calling_scaler() -> weakref.ref[GradScaler] | None:
    """Return the scaler in whose `step` this is called. It passes its scale to the optimizer, but not itself."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(scaler := frame.f_locals.get("self"), GradScaler):
            return weakref.ref(scaler)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _check_unscaled(
    scaler: GradScaler | None, found_inf: Tensor, sumsq: Tensor | None, grads: Sequence[Tensor]
) -> None:
    """Check the one step before which the scaler was not known, and wait for the device. A step that updates nothing
    needs no check.

    Raises RuntimeError if the second gradient, which is unscaled, is longer than the first, which must not be.
    """
    if scaler is None or sumsq is None or not grads or scaler.get_scale() < MIN_SCALE:
        return
    second = torch.nn.utils.get_total_norm(grads)
    if bool(((found_inf == 0) & (second.double() > sumsq.sqrt())).item()):
        raise RuntimeError(MESSAGE)
