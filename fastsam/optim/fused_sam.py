"""`FusedSAM`: Sharpness-Aware Minimization around any base optimizer, with fused kernels.

    step(closure), first_step()    -> _perturb -> Engine.collect_grads
                                               -> Engine.perturb -> Engine._move -> Bucket.norm_perturb_
                                                  w <- w + rho * d / ||d||
    step(closure), second_step()   -> _update  -> Engine.collect_grads
                                               -> Engine.update -> FusedUpdate.prepare      w <- update of the saved w
                                                  or the base optimizer's own step from the restored weights
    restore(), an exception        -> _recover -> Engine.abort_step -> restore_weights
                                               -> Backup.restore after a perturbation, Bucket.unperturb_ in the middle

With `assume_no_alias` the perturbed weights may be in other memory, which `StorageSwap.swap_in` gives to the parameters
and `swap_back` takes away. The equations are in `fastsam_kernels.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fastsam.batchnorm import FrozenLayer
from fastsam.optim import amp, in_backward, parameters
from fastsam.optim.backup import WeightState
from fastsam.optim.base_optimizer import make_base, options_of_base
from fastsam.optim.engine import Engine
from fastsam.optim.grad_checks import EMPTY_CLOSURE, EMPTY_FIRST_STEP, AccumulationCheck, ClipCheck, PassCheck
from fastsam.optim.hparams import LossScales, check_flag, check_group
from fastsam.optim.parameters import parameters_of
from fastsam.optim.running_stats import Model, RunningStatsFreezer
from fastsam.optim.state_dict import StateDictMixin, called_by_checkpoint
from fastsam.optim.variants.sam import SAM, variant_of

NOT_IN_CLOSURE = "the closure made a part of the step itself; leave first_step() and all that follows to step(closure)"
NO_SCALES = LossScales()
INITIAL = "_init_optim_state"  # function of torch.distributed.checkpoint that calls `step` to have the state made


class FusedSAM(StateDictMixin):
    """Sharpness-Aware Minimization (SAM) around a base optimizer, with fused kernels.

        w~ = w + rho * d / (||d / T|| + 1e-12),   d = T^2 * g(w),   T = |w| + eta if adaptive, else 1
        w <- base optimizer's update of w with the gradient g(w~)

    One L2 norm is taken over all parameters. With `torch.optim.SGD`, `Adam` and `AdamW` (without amsgrad), `Adagrad`,
    `RMSprop` and `fastsam.Lion`, restoring `w` and updating it are one pass over the parameters. Any other optimizer
    makes its own `step` from the restored weights. See Foret et al. 2021 for SAM and Kwon et al. 2021 for ASAM.

    Args:
        params (iterable): parameters, named parameters or parameter groups; dense and floating point, on one device.
        base_optimizer (type or callable): class of the base optimizer, or a function from parameter groups and
            options to an optimizer, or to a list of optimizers that divide the groups. Default: `torch.optim.SGD`.
        rho (float or Tensor, optional): radius of the perturbation, an option of each parameter group. A one-element
            tensor is read on the device in every step. Default: 0.05.
        adaptive (bool): ASAM, an option of each parameter group. Default: False.
        eta (float or Tensor): eta of ASAM, an option of each parameter group. Default: 0.
        interval (int): number of steps of which the first perturbs; the others are the base optimizer's own, with one
            backward pass. Default: 1.
        start (int): number of steps before SAM begins, which are the base optimizer's own too. `interval` counts from
            there, and a schedule of rho counts all steps. Default: 0.
        variant (SAM, optional): variant such as `fastsam.variants.GSAM(rho=0.05, alpha=0.4)`, with its own `rho`,
            `adaptive`, `eta`, `interval` and `start`. Default: `SAM(rho, adaptive, eta, interval, start)`.
        backend (str): "auto", "native", "triton", "foreach" or "reference". Default: "auto".
        max_grad_norm (float, optional): largest norm of the gradient that updates, which is the combination if the
            variant combines both gradients. Default: no clipping.
        skip_nonfinite (bool): restore the weights and update nothing if the second gradient has inf or NaN. A first
            gradient with inf or NaN never perturbs. Default: False.
        stochastic_rounding (bool): round half-precision weights at the perturbed point up or down at random, so that
            the perturbation is right on average. Default: False.
        assume_no_alias (bool): promise that nothing else refers to the memory of the weights and first gradients during
            a step, so that a step can swap them and save memory traffic. Default: False.
        optimizer_in_backward (bool): update each parameter in the second backward pass as soon as its gradient is
            complete, and free the gradient. It needs `assume_no_alias=True`. Default: False.
        model (Module or iterable of modules, optional): modules whose running statistics the second pass does not
            update. With a variant of one pass, their `train()` and `eval()` also call the methods of the optimizer.
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
    """

    _step_supports_amp_scaling = amp.SupportsAmpScaling()

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer] | Callable[..., Optimizer | Sequence[Optimizer]] = torch.optim.SGD,
        rho: float | Tensor | None = None,
        adaptive: bool = False,
        *,
        eta: float | Tensor = 0.0,
        interval: int = 1,
        start: int = 0,
        variant: SAM | None = None,
        backend: str = "auto",
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        assume_no_alias: bool = False,
        optimizer_in_backward: bool = False,
        model: Model | None = None,
        base_kwargs: dict[str, Any] | None = None,
        **base_options: Any,
    ) -> None:
        if not callable(base_optimizer):
            kind = type(base_optimizer).__name__
            raise TypeError(f"base_optimizer must be a class such as torch.optim.SGD, got an instance of {kind}")
        base_options = options_of_base(base_options, base_kwargs)
        parameters.check_given(params)
        parameters.check_not_zero_redundancy()
        flags = {
            "skip_nonfinite": skip_nonfinite,
            "stochastic_rounding": stochastic_rounding,
            "assume_no_alias": assume_no_alias,
            "optimizer_in_backward": optimizer_in_backward,
        }
        for name, flag in flags.items():
            check_flag(name, flag)
        self.skip_nonfinite = skip_nonfinite
        variant = variant_of(variant, rho, adaptive, eta, interval, start)
        super().__init__(params, {"rho": variant.rho, "adaptive": variant.adaptive, "eta": variant.eta, **base_options})
        self.base_optimizer = make_base(base_optimizer, self.param_groups, base_options)
        for number, group in enumerate(self.param_groups):
            check_group(group, number)
        self.defaults.update(self.base_optimizer.defaults)
        options = {"variant": variant, "backend": backend, "stochastic_rounding": stochastic_rounding}
        options |= {"exclusive": assume_no_alias, "in_backward": optimizer_in_backward}
        self._set_up(options, model)
        self.max_grad_norm = max_grad_norm
        if optimizer_in_backward:
            whole_gradient_options = {"skip_nonfinite=True": skip_nonfinite, "max_grad_norm": max_grad_norm is not None}
            in_backward.check(self.base_optimizer, variant, assume_no_alias, whole_gradient_options)
        self._check_parameters()
        self._follow_modules()

    def _set_up(
        self,
        options: dict[str, Any],
        model: Model | None,
        frozen: Sequence[FrozenLayer] = (),
        scale: Tensor | None = None,
    ) -> None:
        """Make the engine with these options and the trackers of the steps, of a new optimizer or a copy.

        `frozen` and `scale` are the state of `RunningStatsFreezer` and `GradScalerTracker`.
        """
        self._share_groups()
        self._engine = Engine(self.base_optimizer, **options)
        self._scaler_tracker = amp.GradScalerTracker(scale)
        self._accumulation_check, self._clip_check, self._pass_check = AccumulationCheck(), ClipCheck(), PassCheck()
        self._running_stats = RunningStatsFreezer(model, frozen)

    # --- a step ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a whole step with a closure, or its second half without one.

        The closure computes the loss, calls `backward()` and returns the loss. It is called at the weights and at the
        perturbed point, each time with gradients cleared, so it need not call `zero_grad()`. Without a closure,
        `step()` is the second half of a step, after `first_step()`. In a step that does not perturb (`perturbs` is
        False) the closure is called once, and `first_step()` may be left out.

        If either pass raises an exception, the original weights are restored bit for bit. Raises RuntimeError if there
        is no closure and nothing is perturbed. Returns the first loss, if there is a closure.
        """
        if closure is not None and not callable(closure):
            raise TypeError(f"closure must be a function that computes the loss and calls backward(), got {closure!r}")
        # A compiled step that read the state would be compiled again for each new gradient.
        if closure is None and not torch.compiler.is_compiling() and not self.state and called_by_checkpoint(INITIAL):
            return self._make_initial_state()
        if not self._is_observed():
            return self._step(closure)
        self._begin_step(closure)
        try:
            return self._observed_step(closure)
        except BaseException:
            self._accumulation_check.reset()
            self._recover()  # when a hook raised before the step
            raise

    # torch would wrap `step` into a record_function, which costs a small model a tenth of its step. `_observed_step`
    # has one, and is called only if a hook or a profiler is there.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        engine = self._engine
        if closure is not None or engine.one_pass or engine.weight_state is not WeightState.PERTURBED:
            self._begin_step(closure)
        self._share_groups()
        graph = torch.is_grad_enabled()
        try:
            if closure is not None and not engine.finishes:
                return self._both_passes(closure)
            if closure is not None:
                closure()  # a trainer's closure, which made the passes before (Lightning's clips)
            return self._update()
        except BaseException:
            torch.set_grad_enabled(graph)
            self._recover()
            amp.forget_scales(self)
            raise

    _observed_step = Optimizer.profile_hook_step(_step)

    def _is_observed(self) -> bool:
        """Return True if a hook or a profiler looks at the step."""
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks or profiler._is_profiler_enabled:
            return True
        return bool(self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks)

    def _begin_step(self, closure: Callable[[], Any] | None) -> None:
        """Raise RuntimeError for a call of `step` out of order."""
        is_whole = closure is not None and not self._engine.finishes
        self._engine.require_turn(is_whole)
        if is_whole:
            amp.check_no_closure(self, self._engine.one_pass)
        elif self._engine.one_pass:
            self._accumulation_check.reset()

    def _both_passes(self, closure: Callable[[], Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._run_uncompiled(closure)
        self._accumulation_check.check(self.param_groups)
        loss = self._whole_step(closure)
        self._accumulation_check.record(self.param_groups)
        return loss

    def _whole_step(self, closure: Callable[[], Any]) -> Any:
        engine = self._engine
        with torch.enable_grad():
            loss = self._pass(closure, engine.weight_state)  # between steps
            self._pass_check.warn_without_gradient(self.param_groups, EMPTY_CLOSURE, 6)
            if engine.variant_step.perturbs_every_step or engine.perturbs:
                self._perturb(None, clears_grads=True)
                self._pass(closure, WeightState.PERTURBED)
        self._update()
        return loss

    # If torch.compile traces backward passes, gradients that a closure makes are lost at a break of the graph, and
    # nothing would be updated.
    _run_uncompiled = torch._disable_dynamo(_whole_step)

    def _pass(self, closure: Callable[[], Any], phase: WeightState) -> Any:
        """Return the result of the closure, called with cleared gradients, in this phase from beginning to end."""
        for p in parameters_of(self.param_groups):
            p.grad = None
        try:
            self._engine.in_closure = True
            loss = closure()
        finally:
            self._engine.in_closure = False
        if self._engine.weight_state is not phase:
            raise RuntimeError(NOT_IN_CLOSURE)
        return loss

    def first_step(self, zero_grad: bool = False) -> None:
        """Move the weights to the perturbed point, using the present gradients. Parameters without a gradient stay.

        `zero_grad=True` then clears the gradients, as `zero_grad()` does. In a step that does not perturb (`perturbs`
        is False) all weights stay.

        Raises RuntimeError if the weights are perturbed already, for sparse or complex gradients, and for gradients
        that a GradScaler has unscaled. The weights are then unchanged. Raises RuntimeError with a variant of one pass,
        which has no first half.
        """
        engine = self._engine
        if engine.one_pass or engine.weight_state is not WeightState.ORIGINAL:
            engine.require_halves("first_step()")
            remedy = "go on with second_step(), or go back with restore()"
            engine.require(WeightState.ORIGINAL, "first_step() was called already", remedy)
        self._share_groups()
        engine.in_closure = engine.is_finishing = False  # which an interrupt may have left
        self._accumulation_check.reset()
        self._scaler_tracker.check_not_unscaled(self)
        if self._pass_check.steps_left:
            self._pass_check.warn_without_gradient(self.param_groups, EMPTY_FIRST_STEP, 3)
        graph = torch.is_grad_enabled()
        try:
            self._perturb(None if engine.variant_step.is_plain_sam else self._scaler_tracker.scale, zero_grad)
            if self._pass_check.steps_left and engine.in_backward is None:
                self._pass_check.record(self.param_groups, zero_grad, engine.perturbs)
            if zero_grad:
                self.zero_grad()
        except BaseException:
            torch.set_grad_enabled(graph)  # an interrupt in the entry or exit of torch's `no_grad` leaves autograd off
            self._recover()
            raise

    def second_step(self, zero_grad: bool = False) -> None:
        """Restore the weights and update them with the gradients of the perturbed point.

        `zero_grad=True` then clears the gradients. Raises RuntimeError without `first_step()`, if the step perturbs.
        """
        engine = self._engine
        if engine.weight_state is not WeightState.PERTURBED:
            remedy = "call first_step() after the first backward pass"
            engine.require_second("second_step() without first_step()", remedy)
        try:
            engine.is_finishing = True
            self.step()  # fires the hooks, and learning-rate schedulers watch it
        finally:
            engine.is_finishing = False
        if zero_grad:
            self.zero_grad()

    def _perturb(self, loss_scale: Tensor | None, clears_grads: bool) -> None:
        """Perturb the weights: `w~ = w + rho * d / ||d||`.

        Args:
            loss_scale: factor of the gradients (a GradScaler's), None for 1 or if it is not known.
            clears_grads: the caller clears the gradients next, so that their memory may be used.
        """
        self._engine.perturb(self._engine.collect_grads(), loss_scale, clears_grads)
        self._running_stats.freeze(self.param_groups)
        if self._engine.variant_step.reads_both:
            self._clip_check.watch(self.param_groups[0]["params"])

    def _update(self) -> None:
        """Restore the weights and update them: `w <- update of w with g(w~)`."""
        engine, tracker = self._engine, self._scaler_tracker
        self._running_stats.thaw()
        if not torch.compiler.is_compiling():  # which cannot write it with torch 2.11
            # For a scheduler of the base optimizer.
            self.base_optimizer._opt_called = True  # type: ignore[attr-defined]
        grad_scale, found_inf = self.__dict__.get("grad_scale"), self.__dict__.get("found_inf")
        found_inf = found_inf if isinstance(found_inf, Tensor) else None  # 0 when no parameter has a gradient
        level = 6 if engine.is_finishing else 5
        if self._pass_check.steps_left:
            self._pass_check.warn(self.param_groups, level)
        grads, scales = engine.collect_grads(), NO_SCALES
        if found_inf is None and engine.variant_step.reads_both:
            self._clip_check.warn(self.param_groups[0]["params"], type(engine.variant).__name__, level)
        if found_inf is not None:
            if engine.has_sharded_params:
                raise RuntimeError(amp.SHARDED)
            if engine.in_backward is not None and engine.in_backward.updated_slots:
                raise RuntimeError(in_backward.SCALED)
            sumsq = engine.sumsq if engine.perturbs else None  # squared norm of this step's first gradients
            tracker.observe(grad_scale, found_inf, sumsq, self.param_groups)
            scales = LossScales(tracker.scale if grad_scale is None else grad_scale, grad_scale)
        engine.update(grads, scales, found_inf, self.skip_nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, or set them to zero if `set_to_none` is False; without the profiler range of torch's."""
        if not set_to_none or profiler._is_profiler_enabled:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    # --- back from the perturbed point ---

    def restore(self) -> None:
        """End a step that `first_step()` began: the original weights are back, bit for bit, and nothing is updated.

        Raises RuntimeError if the weights are not perturbed.
        """
        self._engine.require_halves("restore()")
        self._engine.require(WeightState.PERTURBED, "restore() has nothing to restore", "it undoes a first_step()")
        self._share_groups()
        self._recover()

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Perturb the weights inside as by `first_step()`. Afterwards they are the original ones, bit for bit, also
        after an exception. Calling `step()` inside, after a backward pass, makes the update."""
        self._engine.require_halves("perturbed()")
        self._engine.require(
            WeightState.ORIGINAL,
            "perturbed() inside first_step() and second_step()",
            "call second_step(), or restore() first",
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

    def _recover(self) -> None:
        """Restore the weights and update running statistics again, at any moment of a step."""
        self._pass_check.reset()
        try:
            self._engine.abort_step()
        finally:
            self._running_stats.thaw()

    # --- for training loops ---

    @property
    def is_perturbed(self) -> bool:
        """True at a perturbed point: in every call of a closure but the first, and between `first_step()` and
        `second_step()`.

        A training loop should log and count only in the other pass. Always False with a variant of one pass; `training`
        tells where its weights are.
        """
        return self._engine.weight_state is not WeightState.ORIGINAL and not self._engine.one_pass

    @property
    def phase(self) -> Literal["first", "second"]:
        """The pass that a forward and backward pass belongs to now: "second" at the perturbed point, else "first"."""
        return "second" if self.is_perturbed else "first"

    @property
    def perturbs(self) -> bool:
        """True if the step that begins, or is under way, perturbs the weights and so takes two backward passes.

        False in a step in which the variant does not perturb (`start`, `interval`, `LookSAM`). Its first pass and
        `first_step()` may be left out. If they are made, the weights stay, and the step is the same with the second
        pass's gradients. Always False with a variant of one pass (`MSAM`), where `first_step()` is an error.
        """
        return self._engine.perturbs

    @property
    def variant(self) -> SAM:
        """The variant of SAM, with its options."""
        return self._engine.variant

    @property
    def combines_gradients(self) -> bool:
        """True if the variant's update combines both gradients, so that `max_grad_norm` has to clip them."""
        return self._engine.variant_step.reads_both

    @property
    def max_grad_norm(self) -> float | None:
        """Largest norm of the gradient that updates, or None; it can be changed between steps.

        A variant that combines both gradients clips the combination, with the same factor in each of its updates. A
        gradient whose norm is below the limit is used as it is.
        """
        return self._engine.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, limit: float | None) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, Real)):
            raise TypeError(f"max_grad_norm must be a number or None, got {limit!r}")
        if limit is not None and not limit > 0:
            raise ValueError(f"max_grad_norm must be above 0, got {limit!r}")
        try:
            self._engine.set_max_grad_norm(None if limit is None else float(limit))
        except OverflowError as error:
            raise ValueError("max_grad_norm must be a number that a float can hold, got a larger number") from error

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last first gradient (in adaptive groups of T * g), float64 on the device; None before the first
        step.

        With a variant of one pass, the norm of the vector along which it perturbed.
        """
        return None if self._engine.sumsq is None else self._engine.sumsq.sqrt()[0]

    # --- training and evaluation ---

    @property
    def training(self) -> bool:
        """False between `eval()` and `train()`, where no step is made: of a variant of one pass, and of a base
        optimizer that has `train_mode` in its parameter groups (schedule-free ones). Otherwise always True."""
        return self._engine.training and all(group.get("train_mode", True) for group in self.param_groups)

    def eval(self) -> None:
        """Give the model the weights to evaluate or save it with.

        With a variant of one pass (`MSAM`) the weights between steps are perturbed, and `eval()` restores the clean
        weights, bit for bit. If the base optimizer has an `eval()` (schedule-free optimizers), it is called, too. With
        any other optimizer this does nothing, and a second `eval()` does nothing.

        Raises RuntimeError inside a closure, and between `first_step()` and `second_step()` if the base optimizer has
        an `eval()`.
        """
        self._engine.eval()

    def train(self) -> None:
        """Go back to the weights of training, for the next forward pass; undoes `eval()`.

        With a variant of one pass the weights move to the perturbed point. They have the bits of before `eval()` if
        weights and rho were not written. After a state is loaded the weights may be clean or perturbed. Does nothing if
        the weights are there, and inside a closure.

        Raises RuntimeError between `first_step()` and `second_step()` if the base optimizer has a `train()`.
        """
        self._engine.train()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep the weights inside as after `eval()`, and afterwards as they were before."""
        is_training = self.training
        self.eval()
        try:
            yield
        finally:
            if is_training:
                self.train()

    def _follow_modules(self) -> None:
        """Let `train()` and `eval()` of the modules of `model=` call the methods of a variant of one pass, too."""
        if self._engine.one_pass:
            self._running_stats.follow(self)
