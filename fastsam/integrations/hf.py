"""Hugging Face transformers: a `Trainer` that takes both passes of a step over the same micro-batches."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fastsam.batchnorm import frozen_batchnorm_stats
from fastsam.integrations.accelerate import unwrap_optimizer
from fastsam.optim import FusedSAM
from fastsam.optim.variants import SAM

# Type checkers see `Trainer` as the base. At run time there is no base, because transformers is imported on demand.
Base: Any = object
if TYPE_CHECKING:
    SAMTrainer: Any

# Keywords of optimizers that choose their parameters themselves (GaLore, LOMO).
OWN_PARAMETERS = ("params", "model", "optimizer_dict")
COUNTED = ("_metrics", "_total_train_tokens")  # what trainers of TRL count in `compute_loss`


class SAMTrainerMixin(Base):
    """Mixin that makes a trainer of transformers take both passes of a SAM step.

    `SAMTrainer` combines it with `Trainer`. For another trainer, write `class Mine(SAMTrainerMixin, Seq2SeqTrainer)`,
    or `SFTTrainer` of TRL, whose metrics then count the first pass.

    After the last micro-batch of a step, the weights move to the perturbed point and every micro-batch runs again. The
    second pass leaves running statistics as they are. The trainer clips the gradient of the second pass and logs its
    norm as `grad_norm`. The logged loss is the loss of the first pass. Training continues from the trainer's
    checkpoints with the same bits.

    Args:
        variant: The variant, by default `fastsam.variants.SAM(rho=0.05)`. The optimizer that
            `TrainingArguments(optim=...)` names becomes the base of a `FusedSAM`, with the learning rate, weight decay
            and parameter groups of the arguments. Alternatively, leave `variant` out and pass a FusedSAM:
            `optimizers=(FusedSAM(...), None)` or `optimizer_cls_and_kwargs=(FusedSAM, {...})`.

    Raises:
        TypeError: For an option of the variant, such as `rho`.
        ValueError: If both `variant` and an optimizer are given. As the training starts, for DeepSpeed and for an
            optimizer that is neither a FusedSAM nor a possible base of one.
    """

    def __init__(self, *arguments: Any, variant: SAM | None = None, **options: Any) -> None:
        for name in options.keys() & {option.name for option in fields(SAM)}:
            raise TypeError(
                f"{type(self).__name__} has no option {name!r}, which belongs to the variant. Pass "
                f"variant=fastsam.SAM({name}=...)"
            )
        super().__init__(*arguments, **options)
        if variant is not None and (self.optimizer is not None or self.optimizer_cls_and_kwargs is not None):
            raise ValueError(
                "variant cannot be combined with an optimizer. Pass it to the FusedSAM: FusedSAM(..., variant=variant)"
            )
        self._variant = variant
        self._batches: list[tuple[Any, Any]] = []  # micro-batches of the current step

    def get_optimizer_cls_and_kwargs(self, args: Any, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        """Return `FusedSAM` and its arguments, with the optimizer that the `TrainingArguments` name as its base."""
        base, options = super().get_optimizer_cls_and_kwargs(args, model)
        by_itself = not (isinstance(base, type) and issubclass(base, Optimizer))
        if by_itself or any(name in options for name in OWN_PARAMETERS):
            name = getattr(args.optim, "value", args.optim)
            raise ValueError(
                f"optim={name!r} chooses its parameters itself, so it cannot be the base of a FusedSAM. Take another "
                "one, such as 'adamw_torch', or make the FusedSAM yourself: optimizers=(FusedSAM(...), None)"
            )
        return FusedSAM, {"base_optimizer": base, "base_kwargs": options, "variant": self._variant}

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make a `FusedSAM` where `Trainer` makes its optimizer."""
        if self.is_deepspeed_enabled:
            raise ValueError(
                "SAMTrainer with DeepSpeed, whose engine makes the optimizer's step by itself: train without"
            )
        optimizer = super().create_optimizer(model)
        try:
            sam = unwrap_optimizer(optimizer)
        except TypeError as error:
            raise ValueError(f"SAMTrainer: {error}. To have it made, pass variant=fastsam.variants.SAM()") from error
        if sam.combines_gradients and self.args.max_grad_norm > 0:
            sam.max_grad_norm = self.args.max_grad_norm
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Return the norm of the second gradient. It is clipped here, unless the variant combines both gradients: then
        the optimizer clips the combination."""
        if unwrap_optimizer(self.optimizer).combines_gradients:
            return self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        return super()._clip_grad_norm(model)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the first pass of a micro-batch and, after the last micro-batch of a step, the second pass of all.

        Returns:
            The loss of the first pass.
        """
        sam = unwrap_optimizer(self.optimizer)
        try:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            self._batches.append((inputs, num_items_in_batch))
            if self.accelerator.sync_gradients:
                batches, self._batches = self._batches, []
                if sam.perturbs:
                    sam.first_step()
                    model.zero_grad()  # all parameters: the trainer clips by the norm over all of them
                    with frozen_batchnorm_stats(model):
                        self._pass_again(model, batches)
        except BaseException:
            self._batches = []
            if sam.is_perturbed:
                sam.restore()
            raise
        return loss

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """Save the model as `Trainer` does. With a one-pass variant the saved weights are the clean ones."""
        with nullcontext() if self.optimizer is None else unwrap_optimizer(self.optimizer).evaluating():
            super().save_model(*arguments, **options)

    def _finalize_training(self, *arguments: Any) -> Any:
        # before the trainer loads the best model, which is not to be written over
        unwrap_optimizer(self.optimizer).eval()
        return super()._finalize_training(*arguments)

    def _pass_again(self, model: nn.Module, batches: list[tuple[Any, Any]]) -> None:
        """Compute the gradients at the perturbed point. Several processes average them after the last micro-batch. What
        a trainer counts in its passes stays as the first pass left it."""
        counted = {name: copy.deepcopy(getattr(self, name)) for name in COUNTED if hasattr(self, name)}
        for number, (inputs, count) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self.accelerator.no_sync(model=model):
                super().training_step(model, inputs, count)
        for name, value in counted.items():
            setattr(self, name, value)


def __getattr__(name: str) -> Any:
    """Make `SAMTrainer` on first access, because importing transformers takes seconds."""
    if name != "SAMTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import Trainer

    trainer_class = type(
        "SAMTrainer", (SAMTrainerMixin, Trainer), {"__doc__": SAMTrainerMixin.__doc__, "__module__": __name__}
    )
    globals()[name] = trainer_class
    return trainer_class
