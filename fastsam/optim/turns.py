"""Whose turn it is in a step: what a training loop can ask, and the errors for calls out of turn."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fastsam.optim.buffers import Phase
from fastsam.optim.modes import Modes


class Turns(Modes):
    """An optimizer whose steps are several calls."""

    @property
    def is_perturbed(self) -> bool:
        """True at a perturbed point: in every call of a closure but the first, and between `first_step()` and
        `second_step()`. What a training loop logs and counts belongs to the other pass. Always False with a variant of
        one pass, which is the first; `training` says where its weights are.
        """
        return self._engine.phase is not Phase.IDLE and not self._engine.one_pass

    @property
    def phase(self) -> Literal["first", "second"]:
        """Which of a step's two passes a forward and backward pass made now would be: "second" at the perturbed
        point."""
        return "second" if self.is_perturbed else "first"

    @property
    def perturbs(self) -> bool:
        """Whether the step that begins, or is under way, perturbs the weights and so takes two backward passes.

        False in a step in which the variant does not perturb (`interval`, `LookSAM`): its first pass may be left out,
        `first_step()` with it. If it is made all the same, the weights stay where they are, and the step is the same
        with the second pass's gradients. Always False with a variant of one pass (`MSAM`), where `first_step()` is an
        error.
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
        if engine.phase is not Phase.PERTURBED and (engine.phase is not Phase.IDLE or engine.perturbs):
            self._require(Phase.PERTURBED, problem, remedy)

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
