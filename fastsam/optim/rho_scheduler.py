"""Schedules of rho, with the interface of `torch.optim.lr_scheduler`."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class ConstantRho:
    """Schedule that keeps each group's rho, and the base class of the other schedules.

    Call `step()` after each step of the optimizer, or after each epoch, and after the learning-rate scheduler. A rho
    that is a tensor is written in place, so that a captured graph follows the schedule.

    Args:
        optimizer: `FusedSAM` whose groups have the largest rho.

    Raises ValueError if a group has no rho.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.last_step = 0
        self.max_rhos: list[float] = []
        self._follow_groups()
        self._write()

    def _follow_groups(self) -> None:
        """Add the rho of groups that came later."""
        for number, group in enumerate(self.optimizer.param_groups[len(self.max_rhos) :], len(self.max_rhos)):
            if "rho" not in group:
                raise ValueError(f"parameter group {number} has no rho. A schedule of rho needs a FusedSAM")
            self.max_rhos.append(float(group["rho"]))

    def get_rho(self, group: dict[str, Any], max_rho: float) -> float:
        """Return the rho of a group at `last_step`."""
        return max_rho

    def get_last_rho(self) -> list[float]:
        """Return the rho of each group."""
        groups = zip(self.optimizer.param_groups, self.max_rhos, strict=True)
        return [self.get_rho(group, max_rho) for group, max_rho in groups]

    def step(self) -> None:
        """Go on to the next step, and write its rho into the groups."""
        self.last_step += 1
        self._follow_groups()
        self._write()

    def _write(self) -> None:
        for group, rho in zip(self.optimizer.param_groups, self.get_last_rho(), strict=True):
            if isinstance(group["rho"], Tensor):
                group["rho"].fill_(rho)
            else:
                group["rho"] = rho

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without the optimizer."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, and write its rho into the groups.

        Raises ValueError if the state belongs to a different schedule or to a different number of groups.
        """
        if set(state_dict) != set(self.state_dict()):
            raise ValueError(f"this is not the state of a {type(self).__name__}: it has the keys {sorted(state_dict)}")
        if len(state_dict["max_rhos"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the state has {len(state_dict['max_rhos'])} parameter groups, the optimizer has "
                f"{len(self.optimizer.param_groups)}. Build the groups first"
            )
        vars(self).update(state_dict)
        self.max_rhos = list(self.max_rhos)
        self._write()


class LinearRho(ConstantRho):
    """Schedule that is linear in the learning rate, as Zhuang et al. (2022) write it for GSAM.

        rho = min_rho + (max_rho - min_rho) * (lr - min_lr) / (max_lr - min_lr)

    Args:
        optimizer: `FusedSAM` whose groups have the largest rho.
        max_lr (float, optional): learning rate at which rho is largest. Default: the largest of the groups, which is
            the peak of a `OneCycleLR` or the rate before a scheduler changed it. `CyclicLR` does not store its peak.
        min_lr (float): learning rate at which rho is smallest. Default: 0.
        min_rho (float): smallest rho. Default: 0.

    Raises ValueError if `max_lr` is not above `min_lr`, or if a group has no learning rate.
    """

    def __init__(
        self, optimizer: Optimizer, max_lr: float | None = None, min_lr: float = 0.0, min_rho: float = 0.0
    ) -> None:
        if any("lr" not in group for group in optimizer.param_groups):
            raise ValueError("LinearRho needs a base optimizer with a learning rate")
        # OneCycleLR begins far below its peak, which it keeps in the groups as "max_lr".
        rates = [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in optimizer.param_groups]
        self.max_lr = max(rates) if max_lr is None else max_lr
        self.min_lr, self.min_rho = min_lr, min_rho
        if not self.max_lr > min_lr:
            raise ValueError(f"max_lr must be above min_lr={min_lr!r}, got {self.max_lr!r}")
        super().__init__(optimizer)

    def get_rho(self, group: dict[str, Any], max_rho: float) -> float:
        share = (float(group["lr"]) - self.min_lr) / (self.max_lr - self.min_lr)
        return self.min_rho + (max_rho - self.min_rho) * min(max(share, 0.0), 1.0)


class CosineRho(ConstantRho):
    """Schedule that falls along half a cosine.

        rho = min_rho + (max_rho - min_rho) * (1 + cos(pi * step / total_steps)) / 2

    Args:
        optimizer: `FusedSAM` whose groups have the largest rho.
        total_steps (int): number of steps until rho is smallest; it stays there. With `FusedSAM(start=)` call `step()`
            after each step of the optimizer.
        min_rho (float): smallest rho. Default: 0.

    Raises ValueError if `total_steps` is below 1, or below the optimizer's `start`.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, min_rho: float = 0.0) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps must be 1 or more, got {total_steps!r}")
        start = getattr(getattr(optimizer, "variant", None), "start", 0)  # another optimizer with rho has none
        if start > total_steps:
            raise ValueError(f"start must be at most {total_steps}, the last step of this schedule of rho, got {start}")
        self.total_steps, self.min_rho = total_steps, min_rho
        super().__init__(optimizer)

    def get_rho(self, group: dict[str, Any], max_rho: float) -> float:
        angle = math.pi * min(self.last_step / self.total_steps, 1.0)
        return self.min_rho + (max_rho - self.min_rho) * (1 + math.cos(angle)) / 2
