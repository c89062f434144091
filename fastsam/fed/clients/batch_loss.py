"""Losses of a model and a batch, for batches that are not pairs (x, y)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


def call(model: nn.Module, x: Any) -> Any:
    """Return `model(x)` of a tensor, `model(*x)` of a tuple or list, `model(**x)` of a dict."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


class BatchLoss:
    """A loss of the form `loss(model, batch) -> scalar tensor`, the mean over the batch.

        fed.run(..., loss=fed.BatchLoss(f))

    A batch is an item of a `DataLoader` over the client's data, on the run's device: a dict, a list `[x, y, ...]` or a
    tensor. Floating-point tensors have the dtype of the model.

    Args:
        loss: the loss.
        predict: `predict(model, batch) -> (outputs, labels)`, for metrics and the accuracy. The accuracy needs outputs
            `[n, classes]`, one per class, and int64 labels `[n]`. It is called only in evaluation. Without it a run has
            only the loss.

    Raises:
        ValueError: an argument is not a function.
    """

    def __init__(
        self, loss: Callable[[Any, Any], Tensor], predict: Callable[[Any, Any], tuple[Any, Any]] | None = None
    ) -> None:
        for name, function in (("loss", loss), ("predict", predict)):
            if (not callable(function) or isinstance(function, type)) and (function is not None or name == "loss"):
                raise ValueError(f"BatchLoss: {name} must be a function ({name}(model, batch)), got {function!r}")
        self.loss, self.predict = loss, predict

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss(model, batch)

    @property
    def predicts(self) -> bool:
        """True if there is a `predict`."""
        return self.predict is not None

    def evaluate(self, model: nn.Module, batch: Any, needs_outputs: bool) -> tuple[float, Any, Any]:
        """Return the loss and, if `needs_outputs`, outputs and labels."""
        value = float(self(model, batch))
        return (
            (value, *self.outputs_and_labels(model, batch)) if needs_outputs and self.predicts else (value, None, None)
        )

    def outputs_and_labels(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return outputs and labels. Raises ValueError if `predict` returns something else."""
        assert self.predict is not None
        pair = self.predict(model, batch)
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
            raise ValueError(f"predict(model, batch) must return two tensors, (outputs, labels), got {_brief(pair)}")
        return pair


class PairLoss(BatchLoss):
    """`loss(outputs, y)` of batches (x, y) whose x is a tree, or whose samples are fetched batch by batch."""

    predicts = True

    def __init__(self, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(loss)
        self.of_outputs = loss

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = split_pair(batch)
        return self.of_outputs(call(model, x), y)

    def evaluate(self, model: nn.Module, batch: Any, needs_outputs: bool) -> tuple[float, Any, Any]:
        outputs, y = self.outputs_and_labels(model, batch)
        return float(self.of_outputs(outputs, y)), outputs, y

    def outputs_and_labels(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        x, y = split_pair(batch)
        return call(model, x), y


def split_pair(batch: Any) -> tuple[Any, Any]:
    """Return x and y of a batch. Raises ValueError if it is not a pair."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            f"loss(outputs, y) takes batches (x, y), got {_brief(batch)}; say loss=fed.BatchLoss(f) with f(model, "
            "batch) -> scalar, or hand over samples (x, y)"
        )
    return batch[0], batch[1]


def _brief(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with {', '.join(map(str, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"Tensor {batch.dtype} {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
