"""`ChainedOptimizer`: several optimizers that divide the parameter groups, as one base optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer


class ChainedOptimizer(Optimizer):
    """Several optimizers that step one after another, as one optimizer over all their groups.

    Groups and state are this optimizer's. The members get them before each step, because a loaded state dict replaces
    them.

    Args:
        groups: parameter groups, the dicts from which the members were made.
        members: optimizers. Each group belongs to one of them.

    Raises:
        ValueError: a group belongs to no member or to several, or a member has a group that was not given.
    """

    def __init__(self, groups: list[dict[str, Any]], members: Sequence[Optimizer]) -> None:
        self.members: Sequence[Optimizer] = ()
        super().__init__(groups, {})
        # Positions of each member's groups. Positions outlive a state dict, in contrast to the dicts.
        self.positions = [[_position(group, groups, member) for group in member.param_groups] for member in members]
        for number in range(len(groups)):
            owners = [type(one).__name__ for one, own in zip(members, self.positions, strict=True) if number in own]
            if len(owners) != 1:
                raise ValueError(
                    f"parameter group {number} belongs to {' and '.join(owners) or 'no optimizer of the list'}. Each "
                    f"group needs one optimizer of the list that base_optimizer returns"
                )
        self.members = members

    def step(self) -> None:  # type: ignore[override]
        """Make the step of each member."""
        for member, positions in zip(self.members, self.positions, strict=True):
            member.param_groups, member.state = [self.param_groups[i] for i in positions], self.state
            member.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the constructor. Raises ValueError for a later one, which no member has."""
        if self.members:
            names = " and ".join(type(one).__name__ for one in self.members)
            raise ValueError(
                f"add_param_group() does not know which of {names} takes the new group. Give all groups to the "
                f"constructor"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "members": self.members, "positions": self.positions}


def _position(group: dict[str, Any], groups: list[dict[str, Any]], member: Optimizer) -> int:
    for number, one in enumerate(groups):
        if one is group:
            return number
    name = type(member).__name__
    raise ValueError(
        f"{name} has a group that is not one of the given dicts. Make it from some of them, as in {name}(groups[:1])"
    )
