"""The one local step that every algorithm is made of, and what the rows of clients leave behind.

Form U, in one client and one round (w^t is the global model that the client received):

    d   = none, g1, T^2*g1 with T = |w| + eta (ASAM), alpha*(g1 - mu) - s (FedSMOO), a constant e,
          k*e + drift*(w - w^t) in step k = 0, 1, ..., g1 + e + drift*(w - w^t) [+ g2 of the step before], or L*g1 with
          L = |w - w^t|, of each parameter over its norms along the first dimension (FedSOL)
    eps = rho * d / (||d|| + nu)                  ASAM: the norm of T*g1; FedSOL: the norm of g1
    mu <- mu + (eps - s)/alpha                    FedSMOO only
    g2  = gradient at w + eps, or at (1 - pull)*(w + eps) + pull*anchor; without a direction g2 = g1
    v   = a*g2 + b*g1 + q
    w  <- w - lr * (sig*v + (weight_decay + phi)*w)

    letter  field of LocalUpdate       letter  field of LocalUpdate
    q       gradient_offset            mu      dual
    e       direction_vector           a       perturbed_weight
    s       server_perturbation        b       clean_weight
    alpha   penalty                    phi     proximal_coefficient

An algorithm chooses the constants and an executor takes the steps. `Direction` and `Mix` are shared with `FusedSAM`
(`fastsam.step`). The arithmetic is in `fastsam_kernels.reference`. Clipping (`sig`), weight decay and momentum are
options of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.common.checks import integer, number
from fastsam.fed.step.constants import NUMBERS, OBJECTS, Constants, Values, constants_of
from fastsam.fed.step.input_map import InputMap
from fastsam.fed.step.mixture import Mixture
from fastsam.fed.step.pilot import Pilot
from fastsam.fed.step.teacher import Teacher
from fastsam.step import Direction

NU = 1e-7  # added to the norm of a direction; the papers add nothing, their simulators this


@dataclass(frozen=True)
class Envelope:
    """Local steps in search of a Moreau envelope's minimum (pFedMe): the proximal term `phi*(w - a)` is about an anchor
    a that moves.

    Each batch is taken `steps` times, and then `a <- a + rate*(w - a)`. The anchor begins where the local steps begin,
    with gradient_offset = -phi*a. Raises ValueError for steps below 1, and a rate that is no positive number.
    """

    steps: int
    rate: float

    def __post_init__(self) -> None:
        integer("steps", self.steps, at_least=1)
        number("rate", self.rate, above=0)


@dataclass(frozen=True)
class LocalUpdate:
    """The constants of the local update rule for some clients in one round.

    The vectors (`VECTORS`) are `[row_size]`, one for all clients, or `[n, row_size]`, a row for each client, or None,
    in the dtype of the weights. They are only read. An executor works on its own copy of the dual.
    start: the weights from which the local steps are taken, in place of the global model; displacements are measured
    from there.
    drift, remembers: of the directions PATH and GRADIENT_PLUS; the latter may remember the gradient g2 of the step
    before (0 in the first one).
    anchor, pull: the perturbed point, at which g2 is taken, is pulled towards this one, by a share from 0 to 1. Not
    with PATH and CONSTANT.
    buffers: the model's buffers with which they are begun, each `[n, ...]`, in place of the global model's.
    With `proximal_coefficient` phi > 0, `gradient_offset` holds the constant half `-phi*w^t` of the proximal term
    `phi*(w - w^t)`.
    surrogate_gap: GSAM's alpha. If it is not 0, `v = (1 + alpha*cc)*g2 - alpha*g1 + q` with
    `cc = <g1, g2>/||g2||^2`, and perturbed_weight is 1 and clean_weight 0.
    full_gradient: the gradient over the client's whole data at the start is wanted (`ClientResults.gradient`), in
    batches, in evaluation mode.
    pilot: gradients at the start find the radius; `rho` then counts for nothing (`ClientResults.gradient`,
    `ClientResults.norms`).
    input_map: a map of the inputs that is trained with the weights (FedRobust); its tensors are `[n, ...]`.
    lr_end_factor: the learning rate falls within the round, or rises: that of step k of K is `1 - (1 -
    lr_end_factor)*k/K` times the round's.
    rho_end_factor: the same of the radius, that of step k of K is `1 - (1 - rho_end_factor)*k/K` times rho. Of
    directions that perturb step by step.
    rho_scale: numbers >= 0 by which the radius is multiplied, weight by weight (`ParameterLayout.factors`):
    `eps = rho * rho_scale * d/(||d|| + nu)`, and where it is 0 nothing is perturbed and the norm does not count it. Not
    without a direction, nor with a dual.
    epochs: passes over the client's data in place of the run's local work. only: the parameters that are trained, by
    their places in `ParameterLayout.names` (`ParameterLayout.places`); the others rest. None: all.
    envelope: the proximal term's anchor moves, and is what a client's displacement is of (see `Envelope`).
    beside, mixture: the weights of a second model, which is trained in lock step with the first one (see `Mixture`);
    what that leaves behind are `ClientResults.inner` and `ClientResults.alpha`.
    then: a further phase of local steps. With a `start` it trains a second model from there, on the same batches in the
    same order, and what that leaves behind is `ClientResults.then`. Without one it goes on from where this phase
    ended, with the epochs that come next.
    teacher: a second model whose outputs those of the trained one are compared with, by a further term of the loss; one
    for all clients. Raises ValueError for numbers that are not finite, a negative radius, and vectors that the
    direction lacks or does not use.
    """

    direction: Direction = Direction.NONE
    rho: float = 0.0  # radius of the perturbation, over the whole model
    eta: float = 0.0  # ASAM only
    perturbed_weight: float = 1.0  # weight of the gradient at the perturbed point
    clean_weight: float = 0.0  # weight of the gradient at the unperturbed point
    surrogate_gap: float = 0.0
    gradient_offset: Tensor | None = None  # constant added to the gradient
    proximal_coefficient: float = 0.0  # proximal coefficient
    direction_vector: Tensor | None = None  # CONSTANT: the direction; PATH, GRADIENT_PLUS: a part of it
    drift: float = 0.0  # PATH, GRADIENT_PLUS: weight of w - w^t
    remembers: bool = False  # GRADIENT_PLUS
    dual: Tensor | None = None  # GRADIENT_MINUS_DUAL: the client's dual at the start
    server_perturbation: Tensor | None = None  # GRADIENT_MINUS_DUAL: the server's perturbation
    penalty: float = 1.0  # GRADIENT_MINUS_DUAL: alpha
    lr_end_factor: float = 1.0  # the learning rate at the end of the round, over that at its beginning
    rho_end_factor: float = 1.0  # the radius at the end of the round, over that at its beginning
    rho_scale: Tensor | None = None  # of the radius, weight by weight
    anchor: Tensor | None = None  # towards which the perturbed point is pulled
    pull: float = 0.0
    start: Tensor | None = None  # where the steps begin; None: the global model
    full_gradient: bool = False
    pilot: Pilot | None = None
    input_map: InputMap | None = None
    teacher: Teacher | None = None
    buffers: Sequence[Tensor] | None = None
    epochs: int | None = None
    only: tuple[int, ...] | None = None
    then: LocalUpdate | None = None
    envelope: Envelope | None = None
    beside: Tensor | None = None
    mixture: Mixture | None = None
    constants: Constants = field(init=False, repr=False, compare=False)  # made of these, once for all equal ones

    def __post_init__(self) -> None:
        numbers = [getattr(self, name) for name in NUMBERS]
        given = tuple([name for name in OBJECTS if getattr(self, name) is not None])
        teacher_perturbs = self.teacher is not None and self.teacher.perturbs
        next_phase_chains = self.then is not None and self.then.constants.chains
        values = Values._make((*numbers, given, teacher_perturbs, next_phase_chains))
        object.__setattr__(self, "constants", constants_of(values))

    @property
    def backward_passes(self) -> int:
        """Back-propagations of one step: a second one when the direction is found by the first."""
        return self.direction.backward_passes

    def pace(self, k: int, steps: int) -> float:
        """The learning rate of step k of `steps`, over that of the round."""
        return 1 - (1 - self.lr_end_factor) * k / steps

    def radius(self, k: int, steps: int) -> float:
        """The radius of step k of `steps`."""
        return self.rho * (1 - (1 - self.rho_end_factor) * k / steps)

    @property
    def phased(self) -> bool:
        """Whether it asks for other local work than the run's: several phases, epochs of its own, some parameters only,
        several steps a batch, a second model beside."""
        other = self.then, self.epochs, self.only, self.envelope, self.mixture
        return any(asked is not None for asked in other)

    @property
    def keeps_first(self) -> bool:
        """True if the update reads the first gradient too."""
        return self.constants.mix.keeps_first


def lr_sum(lr_end_factor: float, steps: int) -> float:
    """Return the sum of the learning rates of `steps` steps, in units of the round's learning rate."""
    return steps - (1 - lr_end_factor) * (steps - 1) / 2


@dataclass(frozen=True)
class Snapshot:
    """A row before one of its local steps: its unperturbed weights and, for a step with two back-propagations, that
    step's eps. `[row_size]`."""

    w: Tensor
    eps: Tensor | None = None


@dataclass(frozen=True)
class ClientResults:
    """What the rows of n clients leave behind after their local steps. Its tensors are the receiver's to keep.

    client_ids: the n clients. delta: `[n, row_size]`, `w_K - w^t`, in the dtype of the weights; with a
    `LocalUpdate.start`, `w_K - start`.
    num_steps: number of local steps of each client, mostly `epochs * ceil(num_samples / batch_size)`.
    backward_passes: number of backward passes of each client, with those of a full gradient and of a pilot.
    losses: `[n]` float64, the sums over the batches of (batch size) * (loss at the first gradient's weights).
    num_samples: number of samples in these batches.
    buffers: float64 displacements of the model's buffers, flat, `[n, ...]`, from those of the round or of
    `LocalUpdate.buffers`; None for a model without.
    dual, eps: `[n, row_size]`, mu and the perturbation after the last step, where the direction has a dual.
    gradient: `[n, row_size]`, the mean gradient over a client's samples at the start, where it was asked for; with a
    pilot that over its batches. norms: with a pilot, `[n]` float64, the mean norm of its gradients.
    input_map: the maps that were trained, Lam and delta `[n, ...]`, where there are any. snapshots: of each client, by
    local step, where the tasks ask for them. What is None is so for all n.
    inner: `[n, row_size]`, with an envelope: `w_K - start` of the weights themselves, the displacement being the
    anchor's; with a mixture that of the second model from where it began. alpha: `[n]` float64, the mixture's at the
    end.
    then: of a further phase with a start of its own, its steps, losses and backward_passes apart from these; those of
    one that went on are in these.
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
    input_map: InputMap | None = None
    snapshots: Sequence[Mapping[int, Snapshot]] | None = None
    inner: Tensor | None = None
    alpha: Tensor | None = None
    then: ClientResults | None = None

    def column(self, numbers: Iterable[float]) -> Tensor:
        """One number for each client as `[n, 1]`, in the dtype of the weights: it multiplies or divides the client's
        row."""
        rows = self.delta
        return torch.tensor(list(numbers), dtype=torch.float64).to(rows.device, rows.dtype)[:, None]

    def take(self, places: Sequence[int]) -> ClientResults:
        """Of some of the clients, by their places in `client_ids`, in memory of their own."""

        def own(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.stack([value[i] for i in places])
            if isinstance(value, ClientResults):
                return value.take(places)
            if isinstance(value, InputMap):
                return replace(value, Lam=own(value.Lam), delta=own(value.delta))
            return None if value is None else [value[i] for i in places]

        return ClientResults(**{f.name: own(getattr(self, f.name)) for f in fields(self)})
