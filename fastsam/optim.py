"""FusedSAM: Sharpness-Aware Minimization (Foret et al. 2021; ASAM: Kwon et al. 2021) with fused perturbation, restore and update."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastsam_kernels.columns import WIDTH, Column

from . import _state
from ._buckets import Bucket, Pass, check_parameters, make_buckets

NU = 1e-12  # added to the norm, as the implementation that everyone copies does
_FUSED = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}
_OWN_OPTIONS = ("rho", "adaptive", "eta")
# The options of a group that reach the kernels.
_KEYS = (*_OWN_OPTIONS, "lr", "weight_decay", "maximize", "momentum", "dampening", "nesterov", "betas", "eps")


class FusedSAM(torch.optim.Optimizer):
    """Sharpness-Aware Minimization around a base optimizer, a drop-in for the two-step SAM class that everyone copies.

        eps = rho * d/(||d|| + 1e-12),   d = g(w), or T^2*g(w) with ||T*g(w)|| and T = |w| + eta where `adaptive`
        w  <- base optimizer's step with the gradient g(w + eps)

    The norm is one L2 norm over all parameters. Perturbing, restoring and the update of SGD, Adam and AdamW are fused; every other
    optimizer class steps by itself after a fused restore.

    Three ways to step::

        opt.step(closure)                    # the closure clears gradients, computes the loss, calls backward, returns it

        loss_fn(model(x), y).backward()      # or by hand
        opt.first_step(zero_grad=True)
        loss_fn(model(x), y).backward()
        opt.second_step(zero_grad=True)      # or opt.step(), which is what trainers and a GradScaler call

        with opt.perturbed(): ...            # look at the perturbed point; the weights are back afterwards

    params: parameters or groups, as torch's optimizers take them: dense, on one device, float32, float64, float16 or bfloat16. They are
        not moved. Half-precision ones get a float32 master copy (with a fused update).
    base_optimizer: an optimizer class; `base_options` are its options.
    rho: radius, >= 0; a number, a one-element tensor, or changed at any time in `param_groups`.
    adaptive, eta: ASAM. Per group, like rho.
    backend: "auto", "native", "triton" or "reference".
    check_finite: the update is skipped (weights restored) when a second gradient is not finite. Costs one read of the gradients.

    Raises ValueError or TypeError for parameters or options that cannot be served, RuntimeError for a backend that cannot.
    """

    _step_supports_amp_scaling = True  # a GradScaler leaves `grad_scale` and `found_inf` to the update

    def __init__(
        self,
        params: Any,
        base_optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
        rho: float | Tensor = 0.05,
        adaptive: bool = False,
        *,
        eta: float = 0.0,
        backend: str = "auto",
        check_finite: bool = False,
        **base_options: Any,
    ) -> None:
        if not (isinstance(base_optimizer, type) and issubclass(base_optimizer, torch.optim.Optimizer)):
            raise TypeError(f"base_optimizer must be an optimizer class like torch.optim.SGD, got {base_optimizer!r}")
        if base_options.get("differentiable"):
            raise ValueError("FusedSAM cannot be differentiated through: leave out differentiable=True")
        closure = inspect.signature(base_optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(f"{base_optimizer.__name__} calls its closure itself, so it cannot be the base of SAM; use SGD, Adam, AdamW or the like")
        self._base_class, self._backend, self._check_finite = base_optimizer, backend, check_finite
        self._buckets: list[Bucket] = []
        self._reset()
        super().__init__(params, {"rho": rho, "adaptive": adaptive, "eta": eta, **base_options})
        self._attach(base_optimizer(self.param_groups, **base_options))
        self._rebuild({})

    def _reset(self) -> None:
        # While the weights are perturbed: the first gradients' slots per bucket. _settled: all the perturbing ops have returned.
        self._perturbed: list[Pass] | None = None
        self._settled = True
        self._raws: list[tuple[Any, ...]] = []

    def _attach(self, base: torch.optim.Optimizer) -> None:
        """Makes `base` step the same groups with the same state, so that schedulers and code may use either."""
        self.base_optimizer = base
        self.param_groups, self.state = base.param_groups, base.state
        self.defaults = {**base.defaults, **{k: v for k, v in self.defaults.items() if k in _OWN_OPTIONS}}

    @property
    def _kind(self) -> str | None:
        """The fused update that serves all groups; None: the base optimizer steps by itself."""
        kind = _FUSED.get(self._base_class)
        decoupled = {bool(g.get("decoupled_weight_decay")) for g in self.param_groups}
        return None if any(g.get("amsgrad") for g in self.param_groups) or len(decoupled) > 1 else kind

    def _rebuild(self, saved: dict[Any, dict[str, Any]]) -> None:
        """New buckets over the present parameters, with the per-parameter state `saved`."""
        params = [p for group in self.param_groups for p in group["params"]]
        check_parameters(params)
        self._fused_kind = self._kind
        buckets = make_buckets(self.param_groups, self._backend, self._fused_kind is not None)
        self._device = params[0].device
        self._hyper = torch.zeros(1, len(self.param_groups), WIDTH, dtype=torch.float64, device=self._device)
        self._sumsq = torch.zeros(1, dtype=torch.float64, device=self._device)
        self._raws = []
        self._refresh_hyper()
        self.state.clear()
        for bucket in buckets:
            _state.adopt(bucket, self._fused_kind, saved, self.state)
        self._buckets = buckets

    def _saved(self) -> dict[Any, dict[str, Any]]:
        """All that is kept per parameter: what `_rebuild` takes."""
        beside = _state.export(self._buckets, self._perturbed is not None)
        return {p: {**self.state.get(p, {}), **beside.get(p, {})} for b in self._buckets for p in b.params if p in self.state or p in beside}

    # ---- the scalars of a step ---------------------------------------------------------------------------------------

    def _refresh_hyper(self) -> None:
        """Brings `hyper` up to date with the groups. Tensors are copied on the device in every step, numbers when they changed."""
        raws = [tuple(map(group.get, _KEYS)) for group in self.param_groups]
        if raws != self._raws:
            self._tensor_columns: list[tuple[Tensor, Tensor, bool]] = []
            rows = [self._columns(g, group) for g, group in enumerate(self.param_groups)]
            self._hyper[0].copy_(torch.tensor(rows, dtype=torch.float64))
            self._any_adaptive = any(group["adaptive"] for group in self.param_groups)
            self._raws = raws
        for column, value, negative in self._tensor_columns:
            column.copy_(value if not negative else -value)

    def _columns(self, g: int, group: dict[str, Any]) -> list[float]:
        row = [0.0] * WIDTH
        maximize = bool(group.get("maximize"))
        momentum, dampening, nesterov = group.get("momentum", 0.0), group.get("dampening", 0.0), float(group.get("nesterov", False))
        if self._fused_kind == "adam":
            (momentum, dampening), nesterov = group["betas"], group["eps"]
        values = {
            Column.RHO: group["rho"],
            Column.NU: NU,
            Column.ADAPTIVE: float(group["adaptive"]),
            Column.ETA: group["eta"],
            Column.LR: group.get("lr", 0.0),
            Column.DECAY: group.get("weight_decay", 0.0),
            Column.A: -1.0 if maximize else 1.0,
            Column.MOMENTUM: momentum,
            Column.DAMPENING: dampening,
            Column.NESTEROV: nesterov,
        }
        for name, column in (("rho", Column.RHO), ("eta", Column.ETA), ("lr", Column.LR)):
            value = values[column]
            if not isinstance(value, Tensor) and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number >= 0 or a one-element tensor, got {value!r}")
        for column, value in values.items():
            negative = maximize and column is Column.RHO
            if isinstance(value, Tensor):
                self._tensor_columns.append((self._hyper[0, g, column], value.detach().reshape(()), negative))
            else:
                row[column] = -float(value) if negative else float(value)
        return row

    # ---- the phases --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        """Moves the weights to the perturbed point, along the present gradients. All gradients None: nothing moves.

        Raises RuntimeError when they are perturbed already. Until `second_step`, `step` or `restore` the weights stay perturbed.
        """
        self._perturb()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        """Restores the weights and updates them with the present gradients. Raises RuntimeError without a `first_step` before."""
        if self._perturbed is None:
            raise RuntimeError("second_step() needs first_step() before it: the weights are not perturbed")
        self.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A whole SAM step with a closure that does one forward and backward pass; without one, the second half after `first_step`.

        The closure is called twice, at the weights and at the perturbed point; gradients are cleared between the two calls. Returns the
        first loss. If anything is raised the weights are restored, bit for bit, before it leaves.
        Raises RuntimeError with a closure while perturbed, and without one while not.
        """
        if closure is None:
            if self._perturbed is None:
                raise RuntimeError("step() needs a closure, or first_step() before it: nothing is perturbed")
            self._apply(self._check_finite)
            return None
        if self._perturbed is not None:
            raise RuntimeError("step(closure) begins a new step while the weights are perturbed; finish with step() or second_step(), or call restore()")
        try:
            with torch.enable_grad():
                loss = closure()
            self._perturb()
            self.zero_grad()
            with torch.enable_grad():
                closure()
            # A GradScaler looked for infinities before the closure ran, so these gradients are not checked yet.
            self._apply(self._check_finite or getattr(self, "grad_scale", None) is not None)
        except BaseException:
            if self._perturbed is not None:
                self._restore()
            raise
        return loss

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """The weights at the perturbed point inside the `with`; restored, bit for bit, however it is left."""
        try:
            with torch.no_grad():
                self._perturb()
            yield
        finally:
            if self._perturbed is not None:
                with torch.no_grad():
                    self._restore()

    @torch.no_grad()
    def restore(self) -> None:
        """The unperturbed weights back, bit for bit, without an update. Raises RuntimeError when nothing is perturbed."""
        if self._perturbed is None:
            raise RuntimeError("restore() needs first_step() before it: the weights are not perturbed")
        self._restore()

    @property
    def grad_norm(self) -> Tensor:
        """The norm of the last first gradient (of T*g where adaptive), float64 [] on the device."""
        return self._sumsq.sqrt().reshape(())

    def _perturb(self) -> None:
        if self._perturbed is not None:
            raise RuntimeError("first_step() was called twice: the weights are perturbed already; call second_step(), step() or restore()")
        self._notice_changes()
        self._refresh_hyper()
        passes = [bucket.gather(self.state) for bucket in self._buckets]
        work = [(b, p) for b, p in zip(self._buckets, passes, strict=True) if p.grads]
        for n, (bucket, grads) in enumerate(work):
            bucket.norm_(self._sumsq, grads, self._hyper, self._any_adaptive, n > 0)
        self._settled, self._perturbed = False, passes
        for bucket, grads in work:
            bucket.perturb_(grads, self._hyper, self._sumsq)
        self._settled = True

    def _restore(self) -> None:
        assert self._perturbed is not None
        self._notice_changes()
        for bucket, grads in zip(self._buckets, self._perturbed, strict=True):
            slots = grads.slots if self._settled else bucket.perturbed_slots(grads, self._hyper, self._sumsq)
            if slots != ():
                bucket.restore_(slots)
        self._perturbed, self._settled = None, True

    def _apply(self, check_finite: bool) -> None:
        """The second half of a step."""
        assert self._perturbed is not None
        self._notice_changes()
        self._refresh_hyper()
        passes = [bucket.gather(self.state) for bucket in self._buckets]
        scale, found_inf = self._scaler_tensors()
        if check_finite:
            found_inf = self._not_finite(passes, found_inf)
        if self._fused_kind is None:
            self._restore()
            self._base_step(scale, found_inf)
        else:
            update = self._sgd_ if self._fused_kind == "sgd" else self._adam_
            for bucket, first, second in zip(self._buckets, self._perturbed, passes, strict=True):
                for part in bucket.parts(first, second, self._hyper):
                    update(bucket, part, {"grad_scale": scale, "found_inf": found_inf, "keep": bucket.master})
                    bucket.wrote(part.slots, part.weights)
            self._perturbed = None
        self.base_optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers over base_optimizer

    # ---- the update --------------------------------------------------------------------------------------------------

    def _sgd_(self, bucket: Bucket, part: Any, options: dict[str, Any]) -> None:
        momentum = None
        if any(group["momentum"] for group in self.param_groups):
            momentum = bucket.field("momentum_buffer")
            began = self._begin(bucket, part.slots)
            if began and any(group["dampening"] for group in self.param_groups):
                # Without dampening a zero buffer begins as torch's does; with it, the first buffer is the gradient itself.
                for fresh in bucket.divided(part, began):
                    self._call_sgd(bucket, fresh, momentum, options)
                return
        self._call_sgd(bucket, part, momentum, options)

    def _call_sgd(self, bucket: Bucket, part: Any, momentum: Tensor | None, options: dict[str, Any]) -> None:
        bucket.kernels.update_sgd_(
            part.weights, part.origin, part.grads, part.table, self._hyper, momentum=momentum, first=part.first, **options
        )

    def _adam_(self, bucket: Bucket, part: Any, options: dict[str, Any]) -> None:
        self._begin(bucket, part.slots)
        decoupled = bool(self.param_groups[0].get("decoupled_weight_decay"))
        bucket.kernels.update_adam_(
            part.weights, part.origin, part.grads, part.table, self._hyper,
            bucket.field("exp_avg"), bucket.field("exp_avg_sq"), bucket.steps, decoupled=decoupled, **options,
        )  # fmt: skip

    def _begin(self, bucket: Bucket, slots: Any) -> set[int]:
        """Begins the state of the parameters that have none yet; returns which."""
        if not self.state and len(bucket.fresh) < len(bucket.params):  # the user cleared it
            bucket.fresh = set(range(len(bucket.params)))
        if not bucket.fresh:
            return set()
        began = bucket.fresh if slots is None else bucket.fresh.intersection(slots)
        if self._fused_kind == "sgd":
            began = {i for i in began if self.param_groups[bucket.layout.segments[i].group]["momentum"]}
        for slot in sorted(began):
            _state.begin(bucket, self._fused_kind or "", slot, self.state)
        return set(began)

    def _scaler_tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """`grad_scale` and `found_inf`, where a GradScaler left them, as one-element float32 tensors on the device."""
        found = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        scale, inf = (t.to(self._device, torch.float32).reshape(1) if isinstance(t, Tensor) else None for t in found)
        return scale, inf

    def _not_finite(self, passes: list[Pass], found_inf: Tensor | None) -> Tensor:
        """`found_inf`, raised where the second gradients are not finite. Nothing waits for the device."""
        sumsq, plain = torch.zeros_like(self._sumsq), torch.zeros_like(self._hyper)
        for bucket, grads in zip(self._buckets, passes, strict=True):
            if grads.grads:
                bucket.norm_(sumsq, grads, plain, False, True)
        bad = (~sumsq.isfinite()).float()
        return bad if found_inf is None else torch.maximum(bad, found_inf)

    def _base_step(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """The base optimizer's own step, at the restored weights."""
        if found_inf is not None and bool(found_inf.item()):
            return
        if scale is not None:
            for bucket in self._buckets:
                for p in bucket.params:
                    if p.grad is not None:
                        p.grad.div_(scale.to(p.grad.dtype))
        self.base_optimizer.step()

    # ---- changes from outside ----------------------------------------------------------------------------------------

    def _notice_changes(self) -> None:
        """Takes note of parameters that were converted or moved, and of options that ask for another kind of update.

        State is converted along; while perturbed the backup too, so that the weights can be restored in their new dtype.
        """
        if torch.compiler.is_compiling():
            return
        moved = [b for b in self._buckets if b.moved()]
        if all([b.fits() for b in moved]) and self._fused_kind == self._kind:
            return
        for bucket in moved:
            for p, segment, name in zip(bucket.params, bucket.layout.segments, bucket.names, strict=True):
                if p.shape != segment.shape:
                    raise RuntimeError(
                        f"parameter {name} changed its shape from {tuple(segment.shape)} to {tuple(p.shape)}: build a new FusedSAM for the changed model"
                    )
        perturbed = None if self._perturbed is None else self._slots_perturbed()
        self._rebuild(self._saved())
        if perturbed is not None:
            self._perturbed = [b.as_pass([i for i, p in enumerate(b.params) if p in perturbed]) for b in self._buckets]

    def _slots_perturbed(self) -> set[Any]:
        out = set()
        for bucket, grads in zip(self._buckets, self._perturbed or [], strict=True):
            out.update(bucket.params if grads.slots is None else [bucket.params[i] for i in grads.slots])
        return out

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; the state of the others stays, bit for bit. Raises ValueError or TypeError, and RuntimeError while perturbed."""
        if not self._buckets:  # torch's constructor calls this
            return super().add_param_group(param_group)
        if self._perturbed is not None:
            raise RuntimeError("add_param_group() while the weights are perturbed: finish the step or call restore() first")
        new = param_group["params"]
        new = [new] if isinstance(new, Tensor) else list(new)
        check_parameters([p for g in self.param_groups for p in g["params"]] + [p[1] if isinstance(p, tuple) else p for p in new])
        saved = self._saved()
        super().add_param_group({**param_group, "params": new})
        try:
            self._rebuild(saved)
        except BaseException:
            self.param_groups.pop()
            self._rebuild(saved)
            raise
        return None

    # ---- saving and loading ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's format (a plain SGD or AdamW can load it), with the float32 master copies, and while perturbed the unperturbed weights."""
        out = super().state_dict()
        params = [p for g in self.param_groups for p in g["params"]]
        ids = [i for g in out["param_groups"] for i in g["params"]]
        beside = _state.export(self._buckets, self._perturbed is not None)
        for p, i in zip(params, ids, strict=True):
            if p in beside:
                out["state"][i] = {**out["state"].get(i, {}), **beside[p]}
        moved = None if self._perturbed is None else self._slots_perturbed()
        out["fastsam"] = {"perturbed": moved if moved is None else [i for p, i in zip(params, ids, strict=True) if p in moved]}
        return out

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state dict of this class, of torch's SGD, Adam or AdamW, or of the copied SAM class. float32 state stays float32.

        Raises ValueError, and changes nothing, when it is of another model.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        _state.check(state_dict, self.param_groups)
        own = [{k: g[k] for k in _OWN_OPTIONS} for g in self.param_groups]
        hooks, self._optimizer_load_state_dict_pre_hooks = self._optimizer_load_state_dict_pre_hooks, OrderedDict()
        try:
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks
        for group, defaults in zip(self.param_groups, own, strict=True):
            for key, value in defaults.items():
                group.setdefault(key, value)
        self.base_optimizer.param_groups, self.base_optimizer.state = self.param_groups, self.state
        params = [p for g in self.param_groups for p in g["params"]]
        ids = [i for g in state_dict["param_groups"] for i in g["params"]]
        self._reset()
        self._rebuild({p: state_dict["state"][i] for p, i in zip(params, ids, strict=True) if i in state_dict["state"]})
        moved = state_dict.get("fastsam", {}).get("perturbed")
        if moved is not None:
            chosen = {id(p) for p, i in zip(params, ids, strict=True) if i in set(moved)}
            self._perturbed = [b.as_pass([i for i, p in enumerate(b.params) if id(p) in chosen]) for b in self._buckets]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "fastsam": {"base": self._base_class, "backend": self._backend, "check_finite": self._check_finite},
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "saved": {p: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for p, s in self._saved().items()},
            "perturbed": None if self._perturbed is None else list(self._slots_perturbed()),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "fastsam" not in state:  # torch's load_state_dict calls this
            return super().__setstate__(state)
        settings = state["fastsam"]
        groups, defaults = state["param_groups"], state["defaults"]
        base_options = {k: v for k, v in defaults.items() if k not in _OWN_OPTIONS}
        accepted = inspect.signature(settings["base"]).parameters
        own = {k: defaults[k] for k in _OWN_OPTIONS}
        FusedSAM.__init__(
            self, groups, settings["base"], **own, backend=settings["backend"], check_finite=settings["check_finite"],
            **{k: v for k, v in base_options.items() if k in accepted},
        )  # fmt: skip
        with torch.no_grad():
            self._rebuild(state["saved"])
        if state["perturbed"] is not None:
            chosen = set(map(id, state["perturbed"]))
            self._perturbed = [b.as_pass([i for i, p in enumerate(b.params) if id(p) in chosen]) for b in self._buckets]
        return None
