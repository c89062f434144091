"""Local steps of n clients: SGD, SAM, and steps from a shifted start. A step of one paper is in that paper's file.

In one client and one round (w^t is the global model that the client received):

    Step       g  = gradient at w;                      w <- U(w, a*g + q)
    SAM        g1 = gradient at w,  eps = rho * d/(||d|| + nu),  d = g1, or T^2*g1 with T = |w| + eta (ASAM: the norm of
               T*g1);  g2 = gradient at w + eps;        w <- U(w, a*g2 + b*g1 + q)
    Shifted    eps = rho * e/(||e|| + nu) once a round; g = gradient at w + eps;  w <- U(w, a*g + q)

    U(w, v) = w - lr * (clip(v + prox*w) + weight_decay*w), or the step of another optimizer of the run

Clipping, weight decay, momentum and the optimizer are options of the run. The arithmetic is in
`fastsam_kernels.reference`.

The rules of a step. `begin` may read `self`, and writes all that `__call__` reads into the rows. `__call__` reads the
rows, and of `self` only what is in the key: so a captured step serves other rounds, and rows of different clients may
step together. No number decides a branch: a value that is not used is None. The learning rate of a step is `rate`'s,
and `__call__` does not know which step of the round it is. `Step`, `SAM` and `Shifted` have no hook inside `__call__`,
because row programs take their steps natively.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastsam.fed.common.checks import number
from fastsam.fed.common.option import NamedOptions
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.row_memory import NU
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.tensor_checks import kind_of, tensor_dict
from fastsam_kernels.hparams import HParam

__all__ = ["NU", "SAM", "Key", "Number", "Passes", "Shifted", "Step", "shift_of"]


Number = float | Tensor  # a number for all clients, or a column `[n, 1]`
_BEFORE = ("state", "buffers")  # fields that only the beginning of a round reads
_VECTOR, _NUMBER, _COLUMN = "vector", "number", "column"  # parts of a key


class Key:
    """A key of steps. Steps with equal keys may share calls, stacks and captures. Equal keys are one object.

    Attributes:
        kind: the class of the step.
        given: names of the vectors that its `__call__` finds in the rows.
        tensors: names of the fields that are tensors and have no column.
        values: the values of fields that are neither tensors nor hyperparameters, by name.
        two_buffers: the unperturbed weights are kept in addition to the perturbed weights.
        has_rate: the learning rate changes within a round.
        is_native: row programs may take the steps, because `__call__` is the one of `Step`, `SAM` or `Shifted`.
        keeps_numbers: nothing but the beginning of a round writes hyperparameters.
    """

    def __init__(self, kind: type[Step], parts: Sequence[tuple[str, object]]) -> None:
        self.kind, self._uses = kind, {name for name, _ in parts}
        self.given = kind.givens(frozenset(name for name, part in parts if part == _VECTOR))
        self.tensors = tuple(name for name, part in parts if part in (_VECTOR, _NUMBER))
        self.values = {name: part[1] for name, part in parts if isinstance(part, tuple)}
        self.two_buffers = kind.two_buffers
        self.has_rate = kind.rate is not Step.rate
        self.is_native = kind.__call__ in (Step.__call__, SAM.__call__, Shifted.__call__)
        is_plain = kind.begin in (Step.begin, Shifted.begin)
        self.keeps_numbers = self.is_native and is_plain and not self.has_rate

    def uses(self, name: str) -> bool:
        """Return True if a field is not None."""
        return name in self._uses

    @property
    def passes(self) -> int:
        """Number of passes of a native step."""
        return 2 if self.kind.__call__ is SAM.__call__ else 1


_key_of = lru_cache(maxsize=1024)(Key)


@dataclass(frozen=True, eq=False)
class Step(NamedOptions):
    """One step of SGD, or of the run's optimizer, for n clients: `w <- U(w, a*g + q)`.

    A vector is `[row_size]`, one for all clients, or `[n, row_size]`, in the dtype of the weights. A number of each
    client is `[n, 1]`. Tensors are only read. In `__call__` vectors are in the rows, `rows["q"]`, and numbers that are
    tensors without a column too, `rows.number("c")`.

    Args:
        q: a constant that is added to the gradient.
        prox: weight of the proximal term. `q` then holds the constant half `-prox*w^t` of `prox*(w - w^t)`.
        a: weight of the gradient.
        start: weights at which the local steps begin, in place of the global model; deltas are measured from there.
        state: values at the start of the local optimizer's fields, by their names in torch ("exp_avg_sq"), each
            `[n, ...]`, or `[1, ...]` for all clients. Other fields begin as in a new optimizer. If it is given, also
            `{}`, the results have the fields at the end (`ClientResults.optimizer_state`).
        buffers: buffers of the model at the start, each `[n, ...]`, in place of the global model's.

    Class attributes:
        columns: the fields that kernels read as hyperparameters, and their columns (`fastsam_kernels.hparams`). A
            number that changes from round to round has a column, or is a tensor `[1, 1]`.
        outputs: names of fields of the rows that are results of a round (`ClientResults.outputs`). A field of the step
            of the same name has its values at the start.
        two_buffers: the unperturbed weights `rows.w` are kept in addition to the perturbed weights `rows.z`.
    """

    columns: ClassVar[Mapping[str, int]] = {"prox": HParam.PROX_MU, "a": HParam.G2_COEF}
    outputs: ClassVar[tuple[str, ...]] = ()
    two_buffers: ClassVar[bool] = False

    q: Tensor | None = None
    prox: Number | None = None
    a: Number = 1.0
    start: Tensor | None = None
    state: Mapping[str, Tensor] | None = None
    buffers: Sequence[Tensor] | None = None

    @classmethod
    def givens(cls, names: frozenset[str]) -> frozenset[str]:
        """Return the names of the vectors that `__call__` finds in the rows, if these fields are tensors."""
        return names

    @cached_property
    def key(self) -> Key:
        """The part of this step that `__call__` may read.

        Raises:
            ValueError: a field is neither a tensor nor a number of `columns`, and cannot be compared by value.
        """
        kind: Any = type(self)
        values = [(name, getattr(self, name)) for name in _names_of(self)]
        return _key_of(kind, tuple([(name, self._part_of_key(name, x)) for name, x in values if x is not None]))

    def _part_of_key(self, name: str, x: Any) -> object:
        """Return the part of the key for a field: the kind of a tensor, or the type and the value."""
        if name in self.columns:
            return _COLUMN
        if isinstance(x, Tensor):
            return _NUMBER if x.shape[-1:] == (1,) else _VECTOR
        try:
            hash(x)
        except TypeError:  # a tuple of lists, for example
            raise ValueError(
                f"{type(self).__name__}.{name} must be a tensor, a number with a column, or a value that can be "
                f"compared and hashed; got {kind_of(x)}"
            ) from None
        return type(x), x

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are put into the rows' fields of the same names."""
        return {name: getattr(self, name) for name in self.key.tensors}

    def numbers(self) -> dict[int, Number]:
        """Return the hyperparameters by column."""
        return {column: value for name, column in self.columns.items() if (value := getattr(self, name)) is not None}

    def rate(self, k: int, steps: int) -> float:
        """Return the learning rate of step k of `steps`, in units of the round's."""
        return 1.0

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        """Begin a round of n clients in the rows, from the global model `w` `[row_size]`. It may make passes."""
        rows.begin(self, w, lr)

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        """Take a step of n clients, and return their losses `[n]` at the unperturbed weights, or at the first pass, in
        memory that later steps do not write."""
        losses, g = passes()
        rows.update(g)
        return losses

    def unperturbed(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Return the unperturbed weights between two steps, `[n, row_size]`, and their perturbation or None."""
        return rows.z, None

    def of(self, place: slice) -> Step:
        """Return the same step of some of its clients."""

        def some(x: Any) -> Any:
            return x[place] if isinstance(x, Tensor) and x.dim() > 1 and len(x) > 1 else x

        parts = {name: y for name in _names_of(self) if (y := some(x := getattr(self, name))) is not x}
        if self.state:
            parts["state"] = {name: x if len(x) == 1 else x[place] for name, x in self.state.items()}
        if self.buffers is not None:
            parts["buffers"] = [b if len(b) == 1 else b[place] for b in self.buffers]
        if not parts:
            return self
        some_clients = replace(self, **parts)
        some_clients.__dict__["key"] = self.key  # it has the same fields
        return some_clients

    @staticmethod
    def join(steps: Sequence[Step]) -> Step:
        """Return the step of several clients, from the steps of one client each, all of one key and with the same names
        in `state`."""
        first = steps[0]
        if all(step is first for step in steps):
            return first
        parts: dict[str, Any] = {}
        for name in _names_of(first):
            values = [getattr(step, name) for step in steps]
            tensors = [x for x in values if isinstance(x, Tensor)]
            if len(tensors) == len(values):
                parts[name] = values[0] if all(x is values[0] for x in values) else _stacked(values)
            elif name in first.columns and (tensors or any(x != values[0] for x in values)):
                device = tensors[0].device if tensors else None
                numbers = torch.tensor([float(x) for x in values], dtype=torch.float64, device=device)
                parts[name] = numbers[:, None]
        if first.state:
            states = [step.state or {} for step in steps]
            parts["state"] = {name: torch.cat([state[name] for state in states]) for name in first.state}
        if first.buffers is not None:
            parts["buffers"] = [torch.cat(column) for column in zip(*(s.buffers or () for s in steps), strict=True)]
        return replace(first, **parts)

    def check(self, w: Tensor, n: int) -> None:
        """Check the fields of a step of n clients.

        Raises:
            ValueError: a number is not finite, a radius negative, or a tensor does not have a row for each client, or
                is not like the weights `w`.
        """
        label = type(self).__name__
        for name in self.columns:
            value = getattr(self, name)
            if not isinstance(value, (Tensor, type(None))):
                number(f"{label}.{name}", value, at_least=0 if name in ("rho", "eta") else None)
        tensors = [(name, x) for name in _names_of(self) if isinstance(x := getattr(self, name), Tensor)]
        for name, x in tensors:
            is_number = x.shape[-1:] == (1,)
            shapes = ((n, 1), (1, 1)) if is_number else (w.shape, (n, *w.shape))
            if x.shape not in shapes or x.device != w.device or not (is_number or x.dtype == w.dtype):
                raise ValueError(
                    f"{label}.{name} must be {w.dtype} {[n, *w.shape]} (or {list(w.shape)}, one for all {n} clients; a "
                    f"number of each client is [{n}, 1]) on {w.device}, like the server's w; "
                    f"got {kind_of(x)}"
                )
        for name in ("q", "start"):
            x = getattr(self, name)
            if not isinstance(x, (Tensor, type(None))):
                raise ValueError(f"{label}.{name} must be a tensor like the server's w, or None, got {kind_of(x)}")
        if self.state is not None:
            _check_state(label, self.state, n)
        self.key  # noqa: B018  (raises for fields that cannot be compared)


@dataclass(frozen=True, eq=False)
class SAM(Step):
    """A step of SAM: `w <- U(w, a*g2 + b*g1 + q)` with g2 at `w + rho*d/||d||`.

    Args:
        rho: radius of the perturbation, over the whole model.
        eta: eta of ASAM.
        b: weight of the gradient at the unperturbed weights; None: the step does not keep it.
        adaptive: ASAM, d = T^2*g1.
    """

    columns: ClassVar[Mapping[str, int]] = {
        **Step.columns, "rho": HParam.RHO, "eta": HParam.ETA, "b": HParam.G1_COEF,
    }  # fmt: skip
    two_buffers: ClassVar[bool] = True

    rho: Number = 0.05
    eta: Number = 0.0
    b: Number | None = None
    adaptive: bool = False

    def numbers(self) -> dict[int, Number]:
        return {**super().numbers(), HParam.ADAPTIVE: float(self.adaptive)}

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses, g1 = passes()
        rows.perturb(g1, self.adaptive)
        _, g2 = passes()
        rows.update(g2, None if self.b is None else g1)
        return losses


@dataclass(frozen=True, eq=False)
class Shifted(Step):
    """Steps at `w + p`, `p = rho*e/||e||`, in the whole round.

    A constant perturbation is a shift of the round: the row starts at `w^t + p` and takes ordinary steps there. p is
    taken out of the terms that belong to w. It is folded into q where clipping allows, else the update gets it.

    Args:
        rho: radius of the perturbation.
        e: its direction.
    """

    columns: ClassVar[Mapping[str, int]] = {**Step.columns, "rho": HParam.RHO}

    rho: Number = 0.05
    e: Tensor | None = None

    @classmethod
    def givens(cls, names: frozenset[str]) -> frozenset[str]:
        return names | {"q", "p", "start"}

    def check(self, w: Tensor, n: int) -> None:
        super().check(w, n)
        if not isinstance(self.e, Tensor):
            raise ValueError(f"{type(self).__name__}.e must be a tensor like the server's w, got {kind_of(self.e)}")

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        rows.begin(self, w, lr)
        p, start, e = rows["p"], rows.own("start"), rows.whole(rows["e"].expand_as(rows.z))
        rows.norm(e)
        rows.move(e, start, rows.z)
        torch.sub(start, rows.z, out=p)
        rows.z.copy_(start)
        coefficient = shift_coefficient(rows, self.prox is not None)
        if coefficient is None:
            if self.q is None:
                rows["q"].zero_()
            return
        correction = p * -coefficient.to(p.dtype)
        rows.put("q", correction if self.q is None else correction.add_(rows["q"]), copies=True)

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses, g = passes()
        rows.update(g, shift=shift_of(rows))
        return losses

    def unperturbed(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        return rows.z - rows["p"], rows["p"]


def shift_coefficient(rows: Rows, has_prox: bool) -> Tensor | None:
    """Return the coefficient, float64 `[n, 1]`, with which the perturbation of a round is taken out of q, or None if q
    does not change."""
    clips = rows.options.clip_norm is not None
    inside = has_prox or (not clips and rows.rule.decay > 0)
    if not inside or (clips and rows.options.clip_scope != "full"):
        return None
    phi = rows.column(HParam.PROX_MU)
    return phi if clips else phi + rows.column(HParam.DECAY)


def shift_of(rows: Rows) -> Tensor | None:
    """Return the perturbation of a round that the updates take out of the terms that clipping does not scale, or
    None."""
    key, options = rows.key, rows.options
    if not isinstance(key, Key) or not issubclass(key.kind, Shifted) or options.clip_norm is None:
        return None
    outside = rows.rule.decay > 0 or (options.clip_scope != "full" and key.uses("prox"))
    return rows["p"] if outside else None


def _names_of(step: Step) -> tuple[str, ...]:
    """Return the names of the fields that the steps of a round read."""
    return tuple(f.name for f in fields(step) if f.name not in _BEFORE)


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Return tensors of one client each, `[row_size]` or `[1, ...]`, as rows."""
    return torch.stack([x[0] if x.dim() == 2 else x for x in values])


def _check_state(label: str, state: object, n: int) -> None:
    for name, x in tensor_dict(state, f"{label}.state must be a dict of tensors, or None").items():
        if x.dim() == 0 or len(x) not in (1, n):
            raise ValueError(
                f"{label}.state[{name!r}] must be [{n}, ...], or [1, ...] for all {n} clients, got {list(x.shape)}. "
                "Add a first dimension: x[None]"
            )
