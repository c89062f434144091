"""The numbers of a step (rho, learning rate, momentum, ...) on the device, refreshed when the parameter groups change.

Python numbers are written once and then only when a group holds another object (a scheduler assigned a new one).
Tensors are copied on the device in every step, without waiting for it, so a captured CUDA graph follows a schedule that
writes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from numbers import Real
from operator import is_not, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsam.optim.update import Group, StateSpec, UpdateRule, state_spec_of
from fastsam.step import GradCoefficients, set_gsam_coefficients_
from fastsam_kernels.hparams import NUM_HPARAMS, HParam

NU = 1e-12  # added to the norm before the division, as the commonly copied SAM class does
PLAIN = GradCoefficients()
OWN_OPTIONS = ("rho", "adaptive", "eta")
STEPS = "sam_steps"  # the number of steps, in every parameter group, if not every step perturbs
NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "eps", "alpha", "lr_decay")  # options of torch's optimizers


def check_group(group: Group, number: int) -> None:
    """Raise ValueError or TypeError for options of a group that no step can use. It waits for tensors on a device."""
    _check_radius(group, number)
    check_flag("adaptive", group["adaptive"])
    for name in NUMBERS:
        if not isinstance(group.get(name, 0.0), (Real, Tensor, tuple, type(None))):
            check_number(group, name, number)
    lr = group.get("lr")
    if lr is not None and not _number(lr) >= 0:
        raise ValueError(f"lr must be 0 or more, got {_number(lr)} in parameter group {number}")
    if not _number(group["rho"]) >= 0:
        raise ValueError(f"rho must be 0 or more, got {_number(group['rho'])} in parameter group {number}")
    for name, value in group.items():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, (float, Tensor)) and name not in ("params", "initial_lr") and math.isnan(_number(part)):
                raise ValueError(f"{name} is NaN in parameter group {number}")
    if group.get("differentiable", False) is not False:
        raise ValueError(
            f"FusedSAM writes weights in place and cannot be differentiated through; leave out "
            f"differentiable={group['differentiable']!r}, or pass False"
        )


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError for any value but True and False, or 1 and 0."""
    if value not in (True, False):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"an option given as a tensor must have one element, got shape {tuple(value.shape)}")
        return float(value.item())
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("an option must be a number that a float can hold, got a larger number") from error


def check_number(group: Group, name: str, number: int) -> None:
    """Raise TypeError for an option that is not a number."""
    value = group[name]
    if not isinstance(value, (Real, Tensor)) or isinstance(value, bool):
        raise TypeError(
            f"{name} must be a number or a one-element tensor, got {type(value).__name__} in parameter group {number}"
        )
    if name in NUMBERS and name != "lr" and isinstance(value, Tensor) and value.dim() > 0:
        raise TypeError(  # torch's own steps fail on it, some of them after they changed the weights
            f"{name} must be a number or a tensor without dimensions, got one of shape {list(value.shape)} in "
            f"parameter group {number}"
        )


def _check_radius(group: Group, number: int) -> None:
    """Check rho and eta, which no base optimizer does. Only Python numbers are checked."""
    for name in ("rho", "eta"):
        value = group[name]
        check_number(group, name, number)
        if not isinstance(value, Tensor) and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or more and finite, got {value} in parameter group {number}")


class LossScales(NamedTuple):
    """Factors of the first and second gradients of a GradScaler, float32 `[1]`, or None for 1."""

    g1: Tensor | None = None
    g2: Tensor | None = None

    @property
    def relative(self) -> LossScales:
        """Return the factor of the first gradients in units of the second ones', for updates that do not divide."""
        return LossScales(self.g1 if self.g2 is None else None)


class HParamTensor:
    """The hyperparameter tensor: `tensor` is float64 `[1, groups, NUM_HPARAMS]` on the device."""

    def __init__(
        self,
        rule: UpdateRule | None,
        groups: Sequence[Group],
        device: torch.device,
        coefficients: GradCoefficients | None,
        max_grad_norm: float | None,
        is_reversed: bool,
        rho_fn: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> None:
        """
        Args:
            rule: rule of the update, or None.
            groups: parameter groups.
            device: device of the tensor.
            coefficients: coefficients of the gradients, None if an update reads only the last gradient.
            max_grad_norm: largest norm of the combined gradient, or None.
            is_reversed: the perturbation goes against its vector, for any objective.
            rho_fn: the variant's function of the radius and the norm, or None.
        """
        self.rule, self.coefficients, self._is_reversed = rule, coefficients, is_reversed
        self.max_grad_norm, self._rho_fn = max_grad_norm, rho_fn
        self._host = torch.zeros(1, max(len(groups), 1), NUM_HPARAMS, dtype=torch.float64, device="cpu")
        self.tensor = self._host if device.type == "cpu" else self._host.to(device)
        options = OWN_OPTIONS + (rule.options if rule else ())
        if rule is None and all("maximize" in group for group in groups):
            options += ("maximize",)
        self._options = options
        self._values: Callable[[Group], tuple[Any, ...]] = itemgetter(*options)
        self._last_values: list[Any] = []  # the options of all groups in order
        # group, column, place in `tensor`, the user's tensor, if it is negated
        self.live: list[tuple[int, int, Tensor, Tensor, bool]] = []
        self.has_live = False  # dynamo would read the tensors on the host to test the list
        self.specs: tuple[StateSpec, ...] = ()  # per group; another object when one of them changed
        self.adaptive = False
        self.read(groups)

    def has_changed(self, groups: Sequence[Group]) -> bool:
        """Return True if an option of a group was replaced since the last `read`."""
        if torch.compiler.is_compiling():  # which guards on values, and has no identity of numbers
            values = [group[name] for group in groups for name in self._options]
            return len(values) != len(self._last_values) or any(map(_differ, values, self._last_values))
        try:
            return any(map(is_not, chain.from_iterable(map(self._values, groups)), self._last_values))
        except KeyError:  # `read` says which
            return True

    def set_max_grad_norm(self, limit: float | None) -> None:
        """Set the limit of the combined gradient, from the next step on."""
        self.max_grad_norm, self._last_values[0] = limit, None  # to read all again

    def read(self, groups: Sequence[Group]) -> None:
        """Read the options.

        Raises as `check_group` does for errors that need no wait for the device; then nothing changed.
        """
        rows, live = [], []
        for number, group in enumerate(groups):
            if absent := [name for name in self._options if name not in group]:
                raise ValueError(
                    f"parameter group {number} has no {', '.join(absent)}, which every group needs. It was taken "
                    f"away. Set param_groups[{number}][{absent[0]!r}] again"
                )
            _check_radius(group, number)
            row = [0.0] * NUM_HPARAMS
            try:
                for column, value in self._columns(group):
                    if isinstance(value, Tensor):
                        is_negated = column is HParam.RHO and self._goes_against(group)
                        live.append((number, int(column), self.tensor[0, number, column], value.detach(), is_negated))
                    else:
                        row[column] = float(value)
            except OverflowError as error:
                raise ValueError(f"an option of parameter group {number} is larger than every float") from error
            if any(map(math.isnan, row)):
                raise ValueError(f"an option of parameter group {number} is NaN")
            rows.append(row)
        kinds = tuple(state_spec_of(self.rule, group) for group in groups) if self.rule else ()
        self._host.numpy()[0, : len(rows)] = rows or 0.0
        if self.tensor is not self._host:
            self.tensor.copy_(self._host, non_blocking=True)
        if self.coefficients is not None:
            self.correction = torch.zeros_like(self.tensor)  # the numbers of a decoupled sharpness
            self._coefficient_columns = self.tensor[:, :, HParam.G2_COEF : HParam.G1_COEF + 1]
            self._base_coefficients = self._coefficient_columns.clone()
            self._signs = torch.tensor([list(map(self._sign, groups))], dtype=torch.float64, device=self.tensor.device)
        if self._rho_fn is not None:
            self._largest = self.tensor[:, :, HParam.RHO].clone()
        self.live, self.has_live = live, bool(live)
        if kinds != self.specs:
            self.specs = kinds
        self.adaptive = any(bool(group["adaptive"]) for group in groups)
        # A list can be changed in place, so a group that holds one is read again in every step.
        values = chain.from_iterable(map(self._values, groups))
        self._last_values = [object() if isinstance(value, list) else value for value in values]

    def _columns(self, group: Group) -> Iterator[tuple[int, Any]]:
        rho = group["rho"]
        rho = -rho if self._goes_against(group) and not isinstance(rho, Tensor) else rho
        yield HParam.RHO, rho
        yield HParam.PERTURB_EPS, NU
        yield HParam.ADAPTIVE, float(bool(group["adaptive"]))
        yield HParam.ETA, group["eta"]
        yield HParam.CLIP, 0.0 if self.max_grad_norm is None else self.max_grad_norm
        if self.rule:
            yield from self.rule.columns(group).items()
        # If the base optimizer makes its own step, only the check for finite gradients and the combination read these.
        yield from (PLAIN if self.coefficients is None else self.coefficients).columns(self._sign(group))

    def _goes_against(self, group: Group) -> bool:
        """Return True if the perturbation goes against its vector: if the objective is maximised, the worst point
        nearby is the lowest."""
        return self._is_reversed or bool(group.get("maximize"))

    def _sign(self, group: Group) -> float:
        """Return the sign of both gradients in a fused update. A base optimizer's own step maximises by itself."""
        return -1.0 if self.rule and group["maximize"] else 1.0

    def set_coefficients(self, inner: Tensor | None, scales: LossScales) -> None:
        """Set the coefficients of both gradients for this step. `inner`, `[1, 2]`, has the inner products for a
        surrogate gap."""
        first, ratio = scales.g1, scales.relative.g1
        numbers = self.tensor
        self._coefficient_columns.copy_(self._base_coefficients)
        if inner is not None:
            if ratio is not None:
                inner[:, 0] /= ratio
            set_gsam_coefficients_(numbers, inner, self._signs)
        if first is not None:
            numbers[:, :, HParam.G1_COEF] /= first
        sharpness = 0.0 if self.coefficients is None else self.coefficients.wsam_weight
        if sharpness:
            if ratio is not None:
                numbers[:, :, HParam.G2_COEF] /= ratio
            for column in (HParam.LR, HParam.CLIP):
                self.correction[:, :, column] = numbers[:, :, column]
            self.correction[:, :, HParam.G2_COEF] = sharpness * self._signs
            self.correction[:, :, HParam.G1_COEF] = -sharpness * (self._signs if first is None else self._signs / first)

    @property
    def combined_hparams(self) -> Tensor:
        """Coefficients of the combined gradient, whose norm is clipped; `g1 + sharpness*(g2 - g1)` if it is
        decoupled."""
        if self.coefficients is None or not self.coefficients.wsam_weight or self.max_grad_norm is None:
            return self.tensor
        hparams = self.tensor.clone()
        hparams[:, :, HParam.G2_COEF] = self.correction[:, :, HParam.G2_COEF]
        hparams[:, :, HParam.G1_COEF] = self.correction[:, :, HParam.G1_COEF] * (1 - 1 / self.coefficients.wsam_weight)
        return hparams

    def set_looksam_coefficient(self, weight: Tensor, grad_scale: Tensor | None) -> None:
        """Set the coefficient of the second vector of a step with one gradient, float64 `[1]`."""
        self.tensor[:, :, HParam.G1_COEF] = self._signs * (weight if grad_scale is None else weight / grad_scale)

    def set_single_grad_coefficients(self) -> None:
        """Set the coefficients of a step that has one gradient."""
        self.tensor[:, :, HParam.G2_COEF] = self._signs

    def apply_rho_fn(self, sumsq: Tensor, scale: Tensor | None) -> None:
        """Set this step's radius by the variant's `rho_fn`, if there is a `rho_fn`. `sumsq` is the squared norm of the
        direction, with loss scale `scale`."""
        if self._rho_fn is None:
            return
        norm = sumsq.sqrt() if scale is None else sumsq.sqrt() / scale
        self.tensor[:, :, HParam.RHO] = self._largest
        self.copy_live()
        rho = self.tensor[:, :, HParam.RHO]
        self.tensor[:, :, HParam.RHO] = self._rho_fn(rho.abs(), norm).copysign(rho)

    def copy_live(self) -> None:
        """Copy the options that are tensors. If they are on the device, nothing waits."""
        for number, column, place, value, is_negated in self.live:
            if torch.compiler.is_compiling():  # which must see that the place is part of the tensor
                place = self.tensor[0, number, column]
            place.copy_(value.reshape(()), non_blocking=True)
            if is_negated:
                place.neg_()


def _differ(value: Any, old: Any) -> bool:
    return value is not old if isinstance(value, Tensor) or isinstance(old, Tensor) else bool(value != old)
