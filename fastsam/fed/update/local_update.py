"""The local update rule, which all algorithms share, and the results of clients.

In one client and one round (w^t is the global model that the client received):

    d   = none, g1, T^2*g1 with T = |w| + eta (ASAM), alpha*(g1 - mu) - s (FedSMOO), a constant e,
          k*e + m*(w - w^t) in step k = 0, 1, ..., g1 + e + m*(w - w^t) [+ g2 of the step before], or L*g1 with
          L = |w - w^t|, of each parameter over its norms along the first dimension (FedSOL)
    eps = rho * d / (||d|| + nu)                  ASAM: the norm of T*g1; FedSOL: the norm of g1
    mu <- mu + (eps - s)/alpha                    FedSMOO only
    g2  = gradient at w + eps, or at (1 - c)*(w + eps) + c*anchor; without a direction g2 = g1
    v   = a*g2 + b*g1 + q
    w  <- w - lr * (sig*v + (weight_decay + phi)*w + o)    with SGD; another optimizer has its own step of v, and o

    letter  field of LocalUpdate       letter  field of LocalUpdate
    q       gradient_offset            mu      dual
    e       direction_vector           a       perturbed_weight
    s       server_perturbation        b       clean_weight
    alpha   penalty                    phi     proximal_coefficient
    m       drift_weight               c       anchor_weight
    o       step_offset

An algorithm chooses the constants, and an executor takes the steps. `Direction` and `GradCoefficients` are shared with
`FusedSAM` (`fastsam.step`). The arithmetic is in `fastsam_kernels.reference`. Clipping (`sig`), weight decay and
momentum are options of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.common.checks import number
from fastsam.fed.common.option import NamedOptions
from fastsam.fed.update.pilot import Pilot
from fastsam.fed.update.variant import ALONG_THE_WAY, StepVariant
from fastsam.step import Direction, GradCoefficients

NU = 1e-7  # added to the norm of a direction; the papers add nothing, their simulators this


# Fields of a LocalUpdate: the numbers and flags, the vectors, and all optional objects.
NUMBERS = (
    *("direction", "rho", "eta", "perturbed_weight", "clean_weight", "surrogate_gap", "proximal_coefficient"),
    *("drift_weight", "uses_last_gradient", "penalty", "lr_end_factor"),
    *("anchor_weight", "full_gradient", "second_moment_steps"),
)
VECTORS = (
    *("gradient_offset", "direction_vector", "dual", "server_perturbation", "start", "anchor"),
    "step_offset",
)
OBJECTS = (*VECTORS, "pilot", "optimizer_state")
_NEEDS = {
    Direction.GRADIENT_MINUS_DUAL: ("dual", "server_perturbation"),
    Direction.CONSTANT: ("direction_vector",),
    **dict.fromkeys(ALONG_THE_WAY, ("direction_vector",)),
}
_MAX_CONSTANTS = 1024  # constants that are remembered
_constants: dict[tuple[object, ...], Constants] = {}


@dataclass(frozen=True, eq=False)
class Constants:
    """Properties that follow from the numbers of a LocalUpdate. Equal local updates share one object.

    Args:
        mix: weights of the two gradients.
        variant: which kernels a step calls.
        vectors: names of the vectors that are given.
    """

    mix: GradCoefficients
    variant: StepVariant
    vectors: tuple[str, ...]


@dataclass(frozen=True)
class LocalUpdate(NamedOptions):
    """The constants of the local update rule for some clients in one round.

    The vectors (`VECTORS`) are `[row_size]`, one for all clients, or `[n, row_size]`, a row for each client, or None,
    in the dtype of the weights. They are only read. An executor works on its own copy of the dual.

    Args:
        direction: how the perturbation is found.
        rho: radius of the perturbation, over the whole model.
        eta: eta of ASAM.
        perturbed_weight: a, the weight of the gradient at the perturbed point.
        clean_weight: b, the weight of the gradient at the unperturbed point.
        surrogate_gap: GSAM's alpha. If it is not 0, `v = (1 + alpha*cc)*g2 - alpha*g1 + q` with `cc = <g1,
            g2>/||g2||^2`, and perturbed_weight is 1 and clean_weight 0.
        gradient_offset: q, a constant that is added to the gradient.
        proximal_coefficient: phi. `gradient_offset` then holds the constant half `-phi*w^t` of the proximal term
            `phi*(w - w^t)`.
        direction_vector: e, the direction (CONSTANT) or a part of it (PATH, GRADIENT_PLUS).
        drift_weight: weight of `w - w^t` in the direction (PATH, GRADIENT_PLUS).
        uses_last_gradient: the direction has the gradient g2 of the step before, 0 in the first step (GRADIENT_PLUS).
        dual: mu, the client's dual at the start (GRADIENT_MINUS_DUAL).
        server_perturbation: s (GRADIENT_MINUS_DUAL).
        penalty: alpha (GRADIENT_MINUS_DUAL).
        lr_end_factor: the learning rate of step k of K is `1 - (1 - lr_end_factor)*k/K` times the round's.
        anchor: weights towards which the perturbed point, at which g2 is taken, is moved. Not with PATH and CONSTANT.
        anchor_weight: c, from 0 (no movement) to 1 (the anchor).
        start: weights at which the local steps begin, in place of the global model; deltas are measured from there.
        full_gradient: compute the gradient over the client's whole data at the start (`ClientResults.gradient`), in
            batches, in evaluation mode.
        pilot: gradients at the start find the radius, and `rho` has no effect (`ClientResults.gradient`, `norms`).
        buffers: buffers of the model at the start, each `[n, ...]`, in place of the global model's.
        optimizer_state: values at the start of the local optimizer's fields, by their names in torch ("exp_avg_sq"),
            each `[n, ...]`, or `[1, ...]` for all clients. Other fields begin as in a new optimizer. If it is given,
            also `{}`, the results have the fields at the end (`ClientResults.optimizer_state`).
        second_moment_steps: number of earlier steps whose gradients are in the second moments that `optimizer_state`
            has. Adam's bias correction of second moments counts these steps too.
        step_offset: o, a constant that is added to the step of all weights, outside of the optimizer and of clipping.

    Raises:
        ValueError: `direction` is not a Direction, a number is not finite, the radius is negative, or the direction
            lacks a vector or does not use one.
    """

    direction: Direction = Direction.NONE
    rho: float = 0.0
    eta: float = 0.0
    perturbed_weight: float = 1.0
    clean_weight: float = 0.0
    surrogate_gap: float = 0.0
    gradient_offset: Tensor | None = None
    proximal_coefficient: float = 0.0
    direction_vector: Tensor | None = None
    drift_weight: float = 0.0
    uses_last_gradient: bool = False
    dual: Tensor | None = None
    server_perturbation: Tensor | None = None
    penalty: float = 1.0
    lr_end_factor: float = 1.0
    anchor: Tensor | None = None
    anchor_weight: float = 0.0
    start: Tensor | None = None
    full_gradient: bool = False
    pilot: Pilot | None = None
    buffers: Sequence[Tensor] | None = None
    optimizer_state: Mapping[str, Tensor] | None = None
    second_moment_steps: float = 0.0
    step_offset: Tensor | None = None
    constants: Constants = field(init=False, repr=False, compare=False)  # made of these, once for all equal ones

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", _constants_of(self))

    @property
    def backward_passes(self) -> int:
        """Back-propagations of one step: a second one when the direction is found by the first."""
        return self.direction.backward_passes

    def lr_factor(self, k: int, steps: int) -> float:
        """Return the learning rate of step k of `steps`, in units of the round's."""
        return 1 - (1 - self.lr_end_factor) * k / steps


ClientUpdate = tuple[LocalUpdate, int]  # a client's local update, and the client's row in its vectors


def _constants_of(update: LocalUpdate) -> Constants:
    """Return the constants of a LocalUpdate.

    Raises:
        ValueError: for objects of other kinds, numbers that are not finite or out of range, and fields that do not go
            together.
    """
    numbers = [getattr(update, name) for name in NUMBERS]
    names = tuple([name for name in OBJECTS if getattr(update, name) is not None])
    key = (*numbers, *map(type, (*numbers, update.pilot)), names)  # with the types, because True equals 1
    try:
        constants = _constants.get(key)
    except TypeError:  # a value without a hash, which the checks name
        constants = None
    if constants is None:
        constants = _make_constants(update, names)
        if len(_constants) == _MAX_CONSTANTS:
            _constants.clear()
        _constants[key] = constants
    return constants


def _make_constants(update: LocalUpdate, names: Sequence[str]) -> Constants:
    _check(update, names)
    mix = GradCoefficients(update.perturbed_weight, update.clean_weight, update.surrogate_gap)
    variant = _variant(
        update.direction,
        "gradient_offset" in names,
        bool(update.proximal_coefficient),
        mix.needs_g1,
        bool(update.surrogate_gap),
        update.lr_end_factor != 1,
        update.drift_weight,
        update.uses_last_gradient,
        update.anchor_weight,
        "pilot" in names,
        bool(update.full_gradient),
        "start" in names,
        "optimizer_state" in names,
        "step_offset" in names,
    )
    return Constants(mix, variant, tuple(name for name in VECTORS if name in names))


_variant = lru_cache(maxsize=256)(StepVariant)


def _check(c: LocalUpdate, names: Sequence[str]) -> None:
    """Raise ValueError for objects of other kinds, numbers out of range, and fields that do not go together."""
    if not isinstance(c.direction, Direction):
        raise ValueError(f"direction must be a fed.Direction such as fed.Direction.GRADIENT, got {c.direction!r}")
    if not isinstance(c.pilot, (Pilot, type(None))):
        raise ValueError(f"pilot must be a fed.Pilot or None, got {c.pilot!r}")
    number("rho", c.rho, at_least=0)
    number("eta", c.eta, at_least=0)
    number("penalty", c.penalty, greater_than=0)
    number("lr_end_factor", c.lr_end_factor, at_least=0)
    number("anchor_weight", c.anchor_weight, at_least=0, at_most=1)
    for name in ("perturbed_weight", "clean_weight", "proximal_coefficient", "surrogate_gap", "drift_weight"):
        number(name, getattr(c, name))
    number("second_moment_steps", c.second_moment_steps, at_least=0)
    if c.second_moment_steps and "exp_avg_sq" not in (c.optimizer_state or ()):
        raise ValueError(
            "LocalUpdate: second_moment_steps belongs to second moments that optimizer_state gives. Add 'exp_avg_sq' "
            "to optimizer_state, or leave second_moment_steps out"
        )
    vectors = _NEEDS.get(c.direction, ())
    for name in ("direction_vector", "dual", "server_perturbation"):
        if (name in names) != (name in vectors):
            raise ValueError(
                f"LocalUpdate: the direction {c.direction.value!r} takes {', '.join(vectors) or 'none'} of the vectors "
                f"direction_vector, dual, server_perturbation; {name} was {'not given' if name in vectors else 'given'}"
            )
    if (c.drift_weight and c.direction not in ALONG_THE_WAY) or (
        c.uses_last_gradient and c.direction is not Direction.GRADIENT_PLUS
    ):
        raise ValueError(
            "LocalUpdate: drift_weight belongs to the directions 'path' and 'gradient plus', uses_last_gradient to "
            f"'gradient plus'; the direction is {c.direction.value!r}, with drift_weight={c.drift_weight!r} and "
            f"uses_last_gradient={c.uses_last_gradient!r}"
        )
    if ("anchor" not in names) == (c.anchor_weight > 0) or (c.anchor_weight and c.backward_passes == 1):
        raise ValueError(
            "LocalUpdate: an anchor and an anchor_weight > 0 go together, in a step whose perturbation is found by a "
            f"first gradient; got anchor_weight={c.anchor_weight!r}, {'no' if 'anchor' not in names else 'an'} anchor, "
            f"and the direction {c.direction.value!r}"
        )
    if (c.clean_weight or c.surrogate_gap) and c.backward_passes == 1:
        raise ValueError(
            "LocalUpdate: clean_weight and surrogate_gap combine the gradients at the unperturbed and at the "
            f"perturbed weights; the direction {c.direction.value!r} has one gradient only"
        )
    if "pilot" in names and (c.direction is Direction.NONE or c.full_gradient):
        raise ValueError(
            "LocalUpdate: a pilot finds the radius of a perturbation, by gradients that take the place of the full "
            f"one; got the direction {c.direction.value!r} and full_gradient={c.full_gradient!r}"
        )


def lr_sum(lr_end_factor: float, steps: int) -> float:
    """Return the sum of the learning rates of `steps` steps, in units of the round's learning rate."""
    return steps - (1 - lr_end_factor) * (steps - 1) / 2


@dataclass(frozen=True)
class Snapshot:
    """A row before one of its local steps: its unperturbed weights and, for a step with two back-propagations, that
    step's eps. `[row_size]`."""

    w: Tensor
    eps: Tensor | None = None

    def with_perturbation(self, z: Tensor) -> Snapshot:
        """Return the snapshot with the perturbation by which the row is at `z`."""
        return Snapshot(self.w, z - self.w)


@dataclass(frozen=True)
class ClientResults:
    """The results of the local steps of n clients. The receiver may keep and change its tensors. A field that is None
    is None for all n clients.

    Attributes:
        client_ids: ids of the n clients.
        delta: `[n, row_size]`, `w_K - w^t`, or `w_K - start` with a `LocalUpdate.start`, in the dtype of the weights.
        num_steps: number of local steps of each client, mostly `epochs * ceil(num_samples / batch_size)`.
        backward_passes: number of backward passes of each client, including the passes of a full gradient or a pilot.
        losses: `[n]` float64, the sums over the batches of (batch size) * (loss at the first gradient's weights).
        num_samples: number of samples in these batches.
        buffers: changes of the model's buffers, flat float64, `[n, ...]`.
        dual, eps: `[n, row_size]`, mu and the perturbation after the last step, for directions with a dual.
        gradient: `[n, row_size]`, the mean gradient over a client's samples at the start, or over a pilot's batches.
        norms: with a pilot, `[n]` float64, the mean norm of its gradients.
        squares: `[n]` float64, the squared norms of the deltas, or None if they are not computed yet.
        snapshots: copies of each client's row, by local step.
        extra: tensors `[n, ...]` that `Algorithm.train_client` returned, by name.
        start: `[n, row_size]`, weights at the start, or None if that is the global model. It is only read.
        optimizer_state: fields of the local optimizer at the end, by name, each `[n, ...]`, or None if the local update
            has none.
    """

    client_ids: Sequence[int]
    delta: Tensor
    num_steps: Sequence[int]
    backward_passes: Sequence[int]
    losses: Tensor
    num_samples: Sequence[int]
    buffers: Tensor | None = None
    dual: Tensor | None = None
    eps: Tensor | None = None
    gradient: Tensor | None = None
    norms: Tensor | None = None
    squares: Tensor | None = None
    snapshots: Sequence[Mapping[int, Snapshot]] | None = None
    start: Tensor | None = None
    optimizer_state: Mapping[str, Tensor] | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def column(self, numbers: Iterable[float]) -> Tensor:
        """Return one number for each client as `[n, 1]`, in the dtype of the weights. It multiplies or divides the
        clients' rows."""
        rows = self.delta
        return torch.tensor(list(numbers), dtype=torch.float64).to(rows.device, rows.dtype)[:, None]

    def take(self, places: Sequence[int]) -> ClientResults:
        """Return the results of some clients, by their indices, in new memory."""

        def select(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.stack([value[i] for i in places])
            if isinstance(value, Mapping):
                return {name: select(x) for name, x in value.items()}
            return None if value is None else [value[i] for i in places]

        return ClientResults(**{f.name: select(getattr(self, f.name)) for f in fields(self)})
