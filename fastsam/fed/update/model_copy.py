"""A copy of the user's model whose trainable parameters are views of one flat row."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fastsam.arena import Arena, Layout
from fastsam.fed.update.tensor_guard import TensorGuard

DTYPES = (torch.float32, torch.float64)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters, each once (tied ones too), in the order of `model.parameters()`."""
    return [p for p in model.parameters() if p.requires_grad]


def check_model(model: nn.Module) -> torch.dtype:
    """Return the one dtype of a model that can be trained here. Raises ValueError, with the reason, for any other
    model."""
    if not isinstance(model, nn.Module):
        make = f"Make one: fastsam.fed.models.build({model!r}, in_shape, classes, seed)"
        kind = f"{model!r}. {make}" if isinstance(model, str) else type(model).__name__
        raise ValueError(f"model must be a torch.nn.Module, got {kind}")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ValueError("the model has lazy parameters without a shape; run one forward pass before handing it over")
    parameters = trainable(model)
    if not parameters:
        raise ValueError("the model has no trainable parameters (none with requires_grad=True)")
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        names = ", ".join(sorted(str(d) for d in dtypes))
        raise ValueError(
            "federated training runs in float32 or float64, all trainable parameters in one of them; the model has "
            f"{names}. Half-precision models are not served: convert with model.float()"
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "the model has parameters without values (on the device 'meta'): model.to_empty(device='cpu') makes room "
            "for them, then load or initialise them"
        )
    bad = next((name for name, p in model.named_parameters() if p.requires_grad and not torch.isfinite(p).all()), None)
    if bad is not None:
        raise ValueError(f"the model's parameter {bad!r} holds NaN or infinity before the first round")
    return dtypes.pop()


def copy_model(model: nn.Module, shared_tensors: Iterable[Tensor] = ()) -> nn.Module:
    """Return a deep copy that shares `shared_tensors` with the model.

    Raises ValueError, with the reason, for a model that cannot be copied.
    """
    try:
        return copy.deepcopy(model, {id(t): t for t in shared_tensors})
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied (copy.deepcopy), and clients train on copies: {type(error).__name__}: {error}"
        ) from error


class Replica:
    """A deep copy of a model on `device`, with the trainable parameters in `row` `[row_size]`.

    Parameters that are not trained are shared with the model if they are on that device, because no pass may write them
    and there may be many replicas.

    Attributes:
        guard: finds the tensors that a pass has written or replaced.
        buffers: the buffers. Writing into these aliases leaves the version counters to the passes.
    """

    def __init__(self, model: nn.Module, layout: Layout, row: Tensor) -> None:
        frozen_parameters = [p for p in model.parameters() if not p.requires_grad]
        is_on_device = all(p.device == row.device for p in frozen_parameters)
        self.module = copy_model(model, frozen_parameters if is_on_device else ()).to(row.device)
        self.row, self.layout = row, layout
        self.parameters = trainable(self.module)
        self.buffers = [b.data for b in self.module.buffers()]
        layout.gather([p.detach() for p in self.parameters], row)
        for parameter, view in zip(self.parameters, layout.views(row), strict=True):
            parameter.data = view
            parameter.grad = None
        self.guard = TensorGuard(self.module)

    @classmethod
    def new(cls, model: nn.Module, layout: Layout, device: torch.device) -> Replica:
        """Return a replica in a new row."""
        return cls(model, layout, Arena(layout, device=device).field("w", trainable(model)[0].dtype)[0])

    @torch.no_grad()
    def load(self, weights: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copy the weights (`[row_size]`) and the buffers in."""
        self.row.copy_(weights)
        for buffer, new in zip(self.buffers, buffers, strict=True):
            buffer.copy_(new)

    @property
    def nbytes(self) -> int:
        """Bytes of the trainable parameters, without padding."""
        return sum(p.nbytes for p in self.parameters)

    def copy_of_buffers(self) -> list[Tensor]:
        return [b.detach().clone() for b in self.buffers]


def export(model: nn.Module, weights: Iterable[Tensor], buffers: Sequence[Tensor]) -> nn.Module:
    """Return a copy of the user's model, on its device, with these trainable parameters and buffers. It shares no
    memory."""
    model_copy = copy_model(model)
    with torch.no_grad():
        for parameter, value in zip(trainable(model_copy), weights, strict=True):
            parameter.copy_(value)
        for buffer, new in zip(model_copy.buffers(), buffers, strict=True):
            buffer.copy_(new)
    return model_copy


def _with_mean(buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the buffers that have a mean: all but bool and complex ones, which keep their first values."""
    return (b for b in buffers if b.dtype != torch.bool and not b.is_complex())


def buffer_displacement(ends: Sequence[Tensor], starts: Sequence[Tensor]) -> Tensor:
    """Return the changes of the buffers, flat float64. As changes and not values, a buffer that does not change keeps
    its bits."""
    parts = [(e.double() - s.double()).flatten() for e, s in zip(_with_mean(ends), _with_mean(starts), strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def move_buffers(starts: Sequence[Tensor], shift: Tensor) -> list[Tensor]:
    """Return the buffers moved by the flat float64 `shift`, integer buffers (BatchNorm's num_batches_tracked) by the
    nearest whole numbers."""
    result, offset = [], 0
    for start in starts:
        if start.dtype == torch.bool or start.is_complex():
            result.append(start)
            continue
        step = shift[offset : offset + start.numel()].reshape(start.shape)
        offset += start.numel()
        is_float = start.is_floating_point()
        result.append((start.double() + step).to(start.dtype) if is_float else start + step.round().to(start.dtype))
    return result
