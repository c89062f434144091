"""Lightning: a callback for automatic optimization, and an optimizer for its command line."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim import FusedSAM
from fastsam.optim.running_stats import RunningStatsFreezer

if TYPE_CHECKING:
    SAMCallback: Any


class CommandLineFusedSAM(FusedSAM):
    """`FusedSAM` with the usual options of base optimizers in its signature, for command lines that read signatures.

    LightningCLI and jsonargparse set them, with `CommandLineFusedSAM` named by its import path:
    `--optimizer=fastsam.integrations.lightning.CommandLineFusedSAM` and `--optimizer.lr=0.1`.
    An option that is None is left to the base optimizer. `FusedSAM` documents all other options.
    """

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer] | Callable[..., Optimizer] = torch.optim.SGD,
        *,
        lr: float | Tensor | None = None,
        momentum: float | None = None,
        nesterov: bool | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        base_options: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        base_options |= {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        options.update({name: value for name, value in base_options.items() if value is not None})
        super().__init__(params, base_optimizer, **options)


class _Hooks:
    """The methods of `SAMCallback`."""

    def __init__(self) -> None:
        self._log: Any = None
        self._limit: Any = None  # the trainer's gradient_clip_val, which the optimizer applies instead

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        opt = _the_optimizer(trainer)
        _refuse_averages(trainer, opt)
        if not pl_module.automatic_optimization:
            return
        _refuse_what_cannot_work(trainer)
        norm = getattr(trainer.gradient_clip_algorithm, "value", None) in (None, "norm")
        if opt.combines_gradients and trainer.gradient_clip_val and norm:
            opt.max_grad_norm = self._limit = trainer.gradient_clip_val
            trainer.gradient_clip_val = None
        if not opt._running_stats.modules:
            opt._running_stats = RunningStatsFreezer(pl_module)
            opt._follow_modules()
        self._log = log = pl_module.log

        def log_in_the_first_pass(*arguments: Any, **options: Any) -> None:
            if not opt.is_perturbed:
                log(*arguments, **options)

        pl_module.log = log_in_the_first_pass

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        opt = _the_optimizer(trainer)
        if opt._engine.one_pass:
            with opt.evaluating():
                weights = trainer.strategy.lightning_module_state_dict()
                # copies: the model's weights are at the perturbed point again when the file is written
                checkpoint["state_dict"] = {name: copy.deepcopy(value) for name, value in weights.items()}
                # the optimizer's state must not say that the stored weights are the perturbed ones
                if "optimizer_states" in checkpoint:
                    checkpoint["optimizer_states"] = [trainer.strategy.optimizer_state(opt)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _the_optimizer(trainer).train()  # after a checkpoint was loaded

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        _the_optimizer(trainer).eval()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._limit is not None:
            trainer.gradient_clip_val, self._limit = self._limit, None
        if self._log is not None:
            del pl_module.log  # the instance's; the class has its own
            self._log = None


def _the_optimizer(trainer: Any) -> FusedSAM:
    optimizers = trainer.optimizers
    if len(optimizers) != 1 or not isinstance(optimizers[0], FusedSAM):
        class_names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise ValueError(f"SAMCallback expects configure_optimizers to return one FusedSAM, got {class_names}")
    opt: FusedSAM = optimizers[0]
    return opt


def _callback(trainer: Any, *names: str) -> str | None:
    """Return the class name of the trainer's first callback among the Lightning classes `names`, or None."""
    kinds = map(type, trainer.callbacks)
    return next((kind.__name__ for kind in kinds if any(base.__name__ in names for base in kind.__mro__)), None)


def _refuse_averages(trainer: Any, opt: FusedSAM) -> None:
    """Raise ValueError for a callback that averages the weights between steps, where these are the perturbed ones."""
    callback = _callback(trainer, "WeightAveraging", "StochasticWeightAveraging")
    if callback and opt._engine.one_pass:
        raise ValueError(
            f"{callback} with {type(opt.variant).__name__}, whose weights between steps are the perturbed "
            f"ones: it would average those. Take a variant of two passes, or average inside opt.evaluating()"
        )


def _refuse_what_cannot_work(trainer: Any) -> None:
    scheduler = _callback(trainer, "GradientAccumulationScheduler")
    batches = trainer.accumulate_grad_batches
    if scheduler or batches != 1:
        raise ValueError(
            f"{scheduler or f'accumulate_grad_batches={batches}'} with FusedSAM: step(closure) would see only the last "
            "batch. Make the batches larger, or accumulate in manual optimization: backward for all, "
            "first_step(zero_grad=True), backward for all again, second_step(zero_grad=True)"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"precision={trainer.precision!r} with FusedSAM in automatic optimization: its GradScaler unscales before "
            "the closure makes its gradients. Take precision='bf16-mixed', or manual optimization with first_step() "
            "and second_step()"
        )


def __getattr__(name: str) -> Any:
    """Make `SAMCallback` on first access, because importing Lightning takes seconds and it may be missing."""
    if name != "SAMCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning.pytorch import Callback

    class SAMCallback(_Hooks, Callback):  # type: ignore[misc, unused-ignore]
        """Callback of Lightning for modules whose `configure_optimizers` returns one `FusedSAM`.

        `self.log` writes only in the first pass. The second pass leaves the module's running statistics as they are, as
        `FusedSAM(..., model=self)` does. The weights of a one-pass variant are perturbed between steps. The callback
        writes the clean weights to checkpoints and leaves them in the model after `fit`. Manual optimization needs the
        callback only for this. There, call `self.optimizers().optimizer.step()` for a one-pass variant, without
        Lightning's closure.

        Raises:
            ValueError: As `fit` begins, for gradients accumulated over batches, because `step(closure)` sees only the
                last batch; for float16 with a GradScaler, which unscales before the closure makes the gradients; or for
                more than one optimizer.
        """

    SAMCallback.__qualname__ = name  # so that it can be pickled
    globals()[name] = SAMCallback
    return SAMCallback
