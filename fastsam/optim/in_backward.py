"""Updates in the second backward pass, of each parameter as soon as its gradient is complete. The gradient is then
freed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fastsam.optim.bucket import Bucket
from fastsam.optim.update import rule_of
from fastsam.optim.variants.sam import SAM

TWICE = (
    "a second gradient of parameter {} at the perturbed point: optimizer_in_backward=True made its update with the "
    "first, so that it is lost. Make one backward pass there; to accumulate over micro-batches leave "
    "optimizer_in_backward out"
)
SCALED = (
    "a GradScaler with optimizer_in_backward=True: the updates were made with gradients that it had not unscaled yet, "
    "and this step's weights are wrong. Leave optimizer_in_backward out, or train in bfloat16, which needs no scaler"
)
RANKS = (
    "optimizer_in_backward=True in a process group of several ranks, whose gradients are not reduced yet when they "
    "arrive; leave it out"
)


def check(base: Optimizer, variant: SAM, exclusive: bool, whole_gradient_options: dict[str, bool]) -> None:
    """Raise ValueError if no update can be made before all gradients are there. `whole_gradient_options` says by name
    if an option that needs all gradients is given."""
    problem = None
    if not exclusive:
        problem = "without assume_no_alias=True: weights that the pass still reads would be overwritten; give both"
    elif names := [name for name, is_given in whole_gradient_options.items() if is_given]:
        problem = f"with {names[0]}, which needs all gradients before the first update; give one of them"
    elif type(variant) is not SAM:
        problem = f"with {type(variant).__name__}; it serves SAM and ASAM"
    elif rule_of(base) is None:
        problem = (
            f"with {type(base).__name__} and these options, which makes its own step; take a base with a fused update, "
            f"such as SGD or AdamW"
        )
    if problem is not None:
        raise ValueError(f"optimizer_in_backward=True {problem}")


class InBackwardHooks:
    """Hooks on the parameters of a bucket, from a perturbation to the end of its step."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.updated_slots: set[int] = set()  # slots of the updated parameters

    def register(self, bucket: Bucket, slots: tuple[int, ...], update: Callable[[Bucket, int], bool]) -> None:
        """Call `update(bucket, slot)` when a gradient is complete. It returns True if it updated the parameter."""
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if group and torch.distributed.get_world_size() > 1:
            raise RuntimeError(RANKS)
        for slot in slots:
            p = bucket.params[slot]
            if p.requires_grad:  # else it has no gradient now
                hook = partial(self._handle_gradient, bucket, slot, update)
                self._handles.append(p.register_post_accumulate_grad_hook(hook))

    def _handle_gradient(
        self, bucket: Bucket, slot: int, update: Callable[[Bucket, int], bool], parameter: Tensor
    ) -> None:
        if slot in self.updated_slots:
            raise RuntimeError(TWICE.format(bucket.numbers[slot]))
        if update(bucket, slot):
            self.updated_slots.add(slot)
            parameter.grad = None

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
