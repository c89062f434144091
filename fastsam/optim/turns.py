"""Whose turn it is in a step: what a training loop can ask, and the errors for calls out of turn."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fastsam.optim.buffers import Phase
from fastsam.optim.modes import Modes
from fastsam.optim.sampled import Sampled


class Turns(Modes):
    """An optimizer whose steps are several calls."""

    @property
    def is_perturbed(self) -> bool:
        """True at a perturbed point: in every call of a closure but the first, and between `first_step()` and
        `second_step()`. What a training loop logs and counts belongs to the other pass. Always False with a variant of
        one pass, which is the first; `training` says where its weights are.
        """
        return self._engine.phase not in (Phase.IDLE, Phase.SAMPLED) and not self._engine.one_pass

    @property
    def phase(self) -> Literal["first", "second"]:
        """Which of a step's two passes a forward and backward pass made now would be, by the call that comes after it:
        "second" at the perturbed point, of a variant that climbs (`Lookbehind`) at the last one."""
        return "second" if self.is_perturbed and not self._engine.climbing else "first"

    @property
    def two_passes(self) -> bool:
        """Whether the step that begins, or is under way, takes two backward passes. False in a step in which the
        variant does not perturb (`every`, `LookSAM`): its first pass may be left out, `first_step()` with it. Where it
        is made all the same, the weights stay where they are, and the step is the same with the second pass's
        gradients. Always False with a variant of one pass (`MSAM`), where `first_step()` is an error. True with
        `Lookbehind`, which takes k + 1.
        """
        return self._engine.perturbs

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last first gradient (in adaptive groups of T * g), float64 on the device; None before the first
        step. With a variant of one pass that of the vector which it perturbed along."""
        return None if self._engine.sumsq is None else self._engine.sumsq.sqrt()[0]

    def _require_second(self, problem: str, remedy: str) -> None:
        """That the first half was made, where the step has one."""
        engine = self._engine
        if engine.climbing:
            raise RuntimeError(
                f"the update after {engine.ascents} of the {engine.variant.ascents} ascents of "
                f"{type(engine.variant).__name__}; call first_step() "
                'after each backward pass while phase is "first", or go back with restore()'
            )
        if engine.phase is not Phase.PERTURBED and (engine.phase is not Phase.IDLE or engine.perturbs):
            self._require(Phase.PERTURBED, problem, remedy)

    def _require_first(self, problem: str, remedy: str) -> None:
        """That the weights are where the first backward pass is made."""
        if isinstance(self._engine, Sampled) and self._engine.phase is Phase.IDLE:
            raise RuntimeError(
                f"{type(self._engine.variant).__name__} takes the first gradient of weights that it draws: call "
                f"sample() before the first backward "
                "pass, or step(closure), which does it by itself"
            )
        if self._engine.phase is not Phase.SAMPLED:
            self._require(Phase.IDLE, problem, remedy)

    def _require_halves(self, call: str) -> None:
        if self._engine.one_pass:
            raise RuntimeError(
                f"{call} with {type(self._engine.variant).__name__}, which takes one pass: its weights rest at the "
                f"perturbed point. Call step() "
                "after one backward pass, or step(closure); eval() and train() move to the clean weights and back"
            )

    def _require(self, phase: Phase, problem: str, remedy: str) -> None:
        if self._engine.phase is not phase:
            raise RuntimeError(f"{problem}; {remedy}")
