"""`FusedSAM`: Sharpness-Aware Minimization around any base optimizer, with fused kernels.

The class has phases and buffers and no arithmetic: the equations stand in `fastsam_kernels.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fastsam import ops
from fastsam.backends import select
from fastsam.optim import amp, early, parameters
from fastsam.optim.base import make_base, options_of_base, unhooked_step, unscale_
from fastsam.optim.engine import Call, Phase
from fastsam.optim.leftover import Leftover
from fastsam.optim.one_pass import OnePass, check_base, engine_of
from fastsam.optim.parameters import parameters_of
from fastsam.optim.saving import Saving, called_by_checkpoint
from fastsam.optim.scalars import OWN_OPTIONS, Scales, check_flag, check_group
from fastsam.optim.sharded import is_sharded, refuse_options
from fastsam.optim.statistics import Model, Statistics
from fastsam.optim.variants import SAM

NO_SCALES = Scales()
NO_SCALER = (
    "a GradScaler with parameters that are split among ranks is not supported: train in bfloat16 (fully_shard's "
    "MixedPrecisionPolicy), which needs "
    "none, with skip_nonfinite=True for steps that are not finite"
)


def _variant(variant: SAM | None, rho: float | Tensor | None, adaptive: bool, eta: float | Tensor) -> SAM:
    """Return the given variant, or a SAM with these options if None is given."""
    if variant is None:
        return SAM(0.05 if rho is None else rho, adaptive, eta)
    if not isinstance(variant, SAM):
        raise TypeError(f"variant must be an instance such as fastsam.variants.GSAM(rho=0.05), got {variant!r}")
    if rho is not None or adaptive or isinstance(eta, Tensor) or eta:
        raise ValueError(
            "rho, adaptive and eta cannot be combined with variant. Pass them to the variant: variant=GSAM(rho=0.05)"
        )
    return variant


class FusedSAM(Saving):
    """Sharpness-Aware Minimization (SAM) around a base optimizer, with fused kernels.

        w~ = w + rho * d / (||d / T|| + 1e-12),   d = T^2 * g(w),   T = |w| + eta if adaptive, else 1
        w <- base optimizer's update of w with the gradient g(w~)

    One L2 norm is taken over all parameters. With `torch.optim.SGD`, `Adam` and `AdamW` (without amsgrad), `Adagrad`,
    `RMSprop` and `fastsam.Lion`, restoring `w` and updating it are one pass over the parameters. Any other optimizer
    makes its own `step` from the restored weights. See Foret et al. 2021 for SAM and Kwon et al. 2021 for ASAM.

    Args:
        params (iterable): parameters, named parameters or parameter groups; dense and floating point, on one device.
        base_optimizer (type or callable): class of the base optimizer, or a function that makes one from parameter
            groups and options. Default: `torch.optim.SGD`.
        rho (float or Tensor, optional): radius of the perturbation, an option of each parameter group. A one-element
            tensor is read on the device in every step. Default: 0.05.
        adaptive (bool): ASAM, an option of each parameter group. Default: False.
        eta (float or Tensor): eta of ASAM, an option of each parameter group. Default: 0.
        variant (SAM, optional): variant such as `fastsam.variants.GSAM(rho=0.05, alpha=0.4)`, with its own `rho`,
            `adaptive` and `eta`. Default: `SAM(rho, adaptive, eta)`.
        backend (str): "auto", "native", "triton", "foreach" or "reference". Default: "auto".
        skip_nonfinite (bool): restore the weights and update nothing if the second gradient has inf or NaN. A first
            gradient with inf or NaN never perturbs. Default: False.
        stochastic_rounding (bool): round half-precision weights at the perturbed point up or down at random, so that
            the perturbation is right on average. Default: False.
        assume_no_alias (bool): promise that nothing else refers to the memory of the weights and first gradients during
            a step, so that a step can swap them and save memory traffic. Default: False.
        optimizer_in_backward (bool): update each parameter in the second backward pass as soon as its gradient is
            complete, and free the gradient. It needs `assume_no_alias=True`. Default: False.
        model (Module or iterable of modules, optional): modules whose running statistics the second pass leaves as they
            are. With a variant of one pass, their `train()` and `eval()` call those of the optimizer.
        base_kwargs (dict, optional): options of the base optimizer.
        **base_options: options of the base optimizer as keywords, such as `lr` and `momentum`.

    Raises:
        TypeError: if a parameter or an option has the wrong type, or an option is unknown.
        ValueError: if parameters or options cannot be used.
        RuntimeError: if `backend` is not available.

    Example:

        >>> optimizer = FusedSAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.first_step(zero_grad=True)
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.second_step(zero_grad=True)

    Note:
        `step(closure)` makes a whole step, and `step()` after `first_step()` is `second_step()`. A variant of one pass
        (`MSAM`) takes `step()` after one backward pass. `eval()` then moves to the clean weights and `train()` back.

    Note:
        Half-precision parameters have a float32 master copy if the update is fused.
    """

    _step_supports_amp_scaling = amp.LeavesScalingToStep()

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer] | Callable[..., Optimizer] = torch.optim.SGD,
        rho: float | Tensor | None = None,
        adaptive: bool = False,
        *,
        eta: float | Tensor = 0.0,
        variant: SAM | None = None,
        backend: str = "auto",
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        assume_no_alias: bool = False,
        optimizer_in_backward: bool = False,
        model: Model | None = None,
        base_kwargs: dict[str, Any] | None = None,
        **base_options: Any,
    ) -> None:
        if not callable(base_optimizer):
            raise TypeError(
                f"base_optimizer must be a class such as torch.optim.SGD, got an instance of "
                f"{type(base_optimizer).__name__}"
            )
        base_options = options_of_base(base_options, base_kwargs)
        parameters.check_given(params)
        parameters.refuse_one_ranks_part()
        flags = {
            "skip_nonfinite": skip_nonfinite,
            "stochastic_rounding": stochastic_rounding,
            "assume_no_alias": assume_no_alias,
            "optimizer_in_backward": optimizer_in_backward,
        }
        for name, flag in flags.items():
            check_flag(name, flag)
        self.skip_nonfinite = skip_nonfinite
        variant = _variant(variant, rho, adaptive, eta)
        super().__init__(params, {"rho": variant.rho, "adaptive": variant.adaptive, "eta": variant.eta, **base_options})
        self.base_optimizer = make_base(base_optimizer, self.param_groups, base_options)
        for number, group in enumerate(self.param_groups):
            check_group(group, number)
        if variant.mix.sharpness and any("lr" not in group for group in self.param_groups):
            raise ValueError(
                f"{type(variant).__name__} needs a base optimizer with a learning rate, which "
                f"{type(self.base_optimizer).__name__} has not; take "
                "decouple=False, or another base"
            )
        self.defaults.update(self.base_optimizer.defaults)
        self._engine = engine_of(self.base_optimizer, backend, stochastic_rounding, assume_no_alias, variant)
        if optimizer_in_backward:
            early.refuse(self.base_optimizer, variant, assume_no_alias, skip_nonfinite)
            self._engine.early = early.Early()
        self._scaling = amp.Scaling()
        self._leftover = Leftover()
        self._statistics = Statistics(model)
        self._share()
        self._check_parameters()
        self._follow_modules()

    # --- a step ---

    def first_step(self, zero_grad: bool = False) -> None:
        """Moves the weights to the perturbed point, using the gradients that are there. Parameters without a gradient
        stay.

        `zero_grad=True` then clears the gradients, as `zero_grad()` does. In a step that does not perturb (`perturbs`
        is False) all weights stay. Raises RuntimeError when the weights are perturbed already, for sparse or complex
        gradients, and for those that a GradScaler has unscaled; the weights are then as they were. A variant of one
        pass has no first half: RuntimeError.
        """
        self._require_halves("first_step()")
        self._require(
            Phase.IDLE, "first_step() was called already", "go on with second_step(), or go back with restore()"
        )
        self._share()
        self._engine.in_closure = self._engine.finishing = False  # which an interrupt may have left
        self._leftover.forget()
        self._scaling.refuse_unscaled(self)
        graph = torch.is_grad_enabled()
        try:
            self._engine.perturb_(None if self._engine.plain else self._scaling.scale, donate=zero_grad)
            self._statistics.freeze()
            if zero_grad:
                self.zero_grad()
        except BaseException:
            torch.set_grad_enabled(graph)  # an interrupt in the entry or exit of torch's `no_grad` leaves autograd off
            self._recover()
            raise

    def second_step(self, zero_grad: bool = False) -> None:
        """Restores the weights and updates them with the gradients of the perturbed point.

        `zero_grad=True` then clears the gradients. Raises RuntimeError without a `first_step()` before, in a step that
        perturbs.
        """
        self._require_second("second_step() without first_step()", "call first_step() after the first backward pass")
        try:
            self._engine.finishing = True
            self.step()  # which fires the hooks, and is what learning-rate schedulers watch
        finally:
            self._engine.finishing = False
        if zero_grad:
            self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, or set them to zero if `set_to_none` is False."""
        # The method of torch enters a range of the profiler, which costs a small model a tenth of its step.
        if not set_to_none or profiler._is_profiler_enabled:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """With a closure: a whole step. `closure` computes the loss, calls `backward()` and returns the loss; it is
        called twice, at the weights and at the perturbed point, each time with
        gradients cleared, so it need not call `zero_grad()`. Returns the first loss.

        Without: the second half of a step, after `first_step()`. In a step that does not perturb (`perturbs` is
        False) there is one call of the closure, and `first_step()` may be left out.

        Whatever is raised, in either pass, the original weights are back bit for bit when it leaves. Raises
        RuntimeError when there is nothing to do (no closure, and nothing perturbed).
        """
        if closure is not None and not callable(closure):
            raise TypeError(f"closure must be a function that computes the loss and calls backward(), got {closure!r}")
        # A compiled step that looked into the state would be compiled again for each new gradient.
        stateless = closure is None and not torch.compiler.is_compiling() and not self.state
        if stateless and called_by_checkpoint("_init_optim_state"):
            return self._make_state()
        if not self._observed():
            return self._step(closure)
        self._require_turn(closure)
        try:
            return self._observed_step(closure)
        except BaseException:
            self._leftover.forget()
            self._recover()  # when a hook raised before the step
            raise

    def _make_state(self) -> None:
        """A step of torch.distributed.checkpoint, with zero gradients and no learning rate: it makes the state, for one
        that was saved to come in."""
        self._share()
        self._engine.make_state_()
        if self._engine.rule is None:
            unhooked_step(self.base_optimizer)(self.base_optimizer)

    # torch would wrap `step` into a record_function, which costs a small model a tenth of its step. Ours is entered
    # when somebody looks.
    step.hooked = True  # type: ignore[attr-defined]

    def _finishes(self) -> bool:
        """`second_step` is running, and what `step` is called with is a trainer's."""
        return self._engine.finishing and (self._engine.phase is not Phase.IDLE or not self._engine.perturbs)

    def _observed(self) -> bool:
        own, everywhere = self._optimizer_step_pre_hooks, _global_optimizer_pre_hooks
        after, everywhere_after = self._optimizer_step_post_hooks, _global_optimizer_post_hooks
        return bool(own or after or everywhere or everywhere_after or profiler._is_profiler_enabled)

    def _require_turn(self, closure: Callable[[], Any] | None) -> None:
        if isinstance(self._engine, OnePass):
            self._engine.require_ready()
            if closure is None or self._finishes():
                self._leftover.forget()
            else:
                amp.refuse_closure(self, one_pass=True)
        elif closure is None or self._finishes():
            self._require_second(
                "step() has nothing to do: no closure, and the weights are not perturbed",
                "call step(closure), or first_step() after the first and step() after the second backward pass",
            )
        else:
            problem = "step(closure) between first_step() and second_step()"
            self._require(Phase.IDLE, problem, "call second_step(), or restore() first")
            amp.refuse_closure(self)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._require_turn(closure)
        self._share()
        graph = torch.is_grad_enabled()
        try:
            if closure is not None and not self._finishes():
                return self._both_passes(closure)
            if closure is not None:
                closure()  # a trainer's, around a step of its own (Lightning's clips): the gradients are there already
            return self._second_pass()
        except BaseException:
            torch.set_grad_enabled(graph)
            self._recover()
            amp.forget_scales(self)
            raise

    _observed_step = Optimizer.profile_hook_step(_step)

    def restore(self) -> None:
        """Ends a step that `first_step()` began: the original weights are back, bit for bit, and nothing is updated.

        Raises RuntimeError when the weights are not perturbed.
        """
        self._require_halves("restore()")
        self._require(Phase.PERTURBED, "restore() has nothing to restore", "it undoes a first_step()")
        self._share()
        self._recover()

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Inside, the weights are perturbed as by `first_step()`; afterwards they are the original ones, bit for bit,
        also after an exception. Calling `step()` inside, after a backward pass, makes the update.
        """
        self._require_halves("perturbed()")
        self._require(
            Phase.IDLE, "perturbed() inside first_step() and second_step()", "call second_step(), or restore() first"
        )
        graph = torch.is_grad_enabled()
        try:
            try:
                self.first_step()
                yield
            finally:
                self._recover()
        except BaseException:
            torch.set_grad_enabled(graph)
            raise
        finally:
            self._recover()  # when an interrupt fell into the line above; nothing otherwise

    def _both_passes(self, closure: Callable[[], Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._uncompiled(closure)
        self._leftover.warn(self.param_groups)
        loss = self._two_passes(closure)
        self._leftover.note(self.param_groups)
        return loss

    # Where torch.compile traces backward passes, gradients that a closure makes are lost at a break of the graph, and
    # nothing would be updated.
    @torch._disable_dynamo
    def _uncompiled(self, closure: Callable[[], Any]) -> Any:
        return self._two_passes(closure)

    def _two_passes(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = self._pass(closure, self._engine.phase)  # between steps
            if self._engine.always or self._engine.perturbs:
                self._engine.perturb_(donate=True)
                self._statistics.freeze()
                self._pass(closure, Phase.PERTURBED)
        self._second_pass()
        return loss

    def _pass(self, closure: Callable[[], Any], phase: Phase) -> Any:
        """What the closure returns, called with cleared gradients, in this phase from beginning to end."""
        for p in parameters_of(self.param_groups):
            p.grad = None
        try:
            self._engine.in_closure = True
            loss = closure()
        finally:
            self._engine.in_closure = False
        remedy = "leave first_step() and all that follows to step(closure)"
        self._require(phase, "the closure made a part of the step itself", remedy)
        return loss

    def _second_pass(self) -> None:
        self._statistics.thaw()
        if not torch.compiler.is_compiling():  # which cannot write it with torch 2.11
            # For a scheduler of the base optimizer.
            self.base_optimizer._opt_called = True  # type: ignore[attr-defined]
        grad_scale, found_inf = self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")
        found_inf = found_inf if isinstance(found_inf, Tensor) else None  # 0 when no parameter has a gradient
        calls = self._engine.look()
        if found_inf is not None:
            if self._engine.split:
                raise RuntimeError(NO_SCALER)
            if self._engine.early is not None and self._engine.early.made:
                raise RuntimeError(early.SCALED)
            sumsq = self._engine.sumsq if self._engine.perturbs else None  # of this step's first gradients
            self._scaling.meet(grad_scale, sumsq, self.param_groups)
        scales = NO_SCALES if found_inf is None else Scales(self._scaling.of_first(grad_scale), grad_scale)
        if self._engine.rule is not None:
            self._engine.update_(calls, scales, found_inf, self.skip_nonfinite)
        else:
            self._step_base(calls, scales, found_inf)

    def _step_base(self, calls: Sequence[Call], scales: Scales, found_inf: Tensor | None) -> None:
        """The update by the base optimizer's own step. With a GradScaler it waits for the device, as torch's unfused
        optimizers do."""
        if self.skip_nonfinite:
            found_inf = self._engine.nonfinite(calls, found_inf)
        self._engine.recover_()
        found_inf = self._engine.mix_(calls, scales, found_inf)
        made = found_inf is None or found_inf.item() == 0
        if made:
            if scales.second is not None:
                unscale_(self.base_optimizer, scales.second)
            unhooked_step(self.base_optimizer)(self.base_optimizer)
        self._engine.end_(calls, scales, made)

    # --- what surrounds a step ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any torch optimizer; the state of the other parameters stays. Raises as the constructor does, and then
        adds nothing."""
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), (Tensor, set, type(None))):
            param_group["params"] = list(param_group["params"])
            parameters.refuse_duplicates(param_group["params"])
        if "_engine" not in self.__dict__:
            super().add_param_group(param_group)
            return
        if isinstance(param_group, dict):
            for name in OWN_OPTIONS:
                param_group.setdefault(name, self.defaults[name])
        self._share()
        self.base_optimizer.add_param_group(param_group)
        try:
            check_group(param_group, len(self.param_groups) - 1)
            check_base(self._engine.variant, self.base_optimizer, self.param_groups)
            self._check_parameters()
        except BaseException:
            self.param_groups.pop()
            raise

    # --- small things ---

    def __repr__(self) -> str:
        """As torch's optimizers, with the base optimizer, the variant and the backend before the groups."""
        variant, used = self._engine.variant, parameters_of(self.param_groups)
        options = [f"{f.name}={getattr(variant, f.name)!r}" for f in fields(variant) if f.name not in OWN_OPTIONS]
        chosen = {select(self._engine.backend, p.device, p.dtype).name for p in used}
        head = {
            "base optimizer": type(self.base_optimizer).__name__,
            "variant": f"{type(variant).__name__}({', '.join(options)})",
            "backend": ", ".join(sorted(chosen)),
        }
        lines = "".join(f"\n{name}: {value}" for name, value in head.items())
        return super().__repr__().replace(" (", f" ({lines}\n", 1)

    def _check_parameters(self) -> None:
        params, engine = parameters_of(self.param_groups), self._engine
        parameters.check(params)
        if any(map(is_sharded, params)):
            refuse_options(engine.stochastic_rounding, engine.exclusive)
        for dtype in {p.dtype for p in params}:
            ops.bind(self._engine.backend, params[0].device, dtype)

    def _recover(self) -> None:
        """The weights of between the steps back, and running statistics on their way again, from whatever moment of a
        step."""
        try:
            self._engine.fall_back_()
        finally:
            self._statistics.thaw()
