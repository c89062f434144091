"""The layout of a flat row: the parameters by name, torch's parameter vector, and the model of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fastsam.arena import Layout, Segment
from fastsam.fed.update.model_copy import export


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """The layout of a run's flat rows.

    Between the parameters of a row there is padding, which is always zero. The elements of a parameter are in storage
    order (channels_last, for example). Elementwise arithmetic does not depend on either. The methods give parameters,
    masks and torch's vector. They take rows with any number of leading dimensions.

    Attributes:
        names: names of the trainable parameters, each once, in the order of `model.named_parameters()`.
        segments: part of the row of each parameter.
        row_size: number of elements of a row.
        numel: P, the number of elements of the parameters.
        template: the user's model.
        buffers: buffers of the global model, or None for the template's buffers.
    """

    names: tuple[str, ...]
    segments: tuple[Segment, ...]
    row_size: int
    numel: int
    template: nn.Module = field(repr=False)  # the user's model
    buffers: Sequence[Tensor] | None = field(default=None, repr=False)  # None: the template's buffers

    @classmethod
    def from_model(cls, model: nn.Module, layout: Layout) -> ParameterLayout:
        """Return the layout of rows with the arena layout `layout`, which was made of `model` or of a copy in another
        memory format."""
        names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        return cls(names, layout.segments, layout.row_size, layout.numel, model)

    def with_buffers(self, buffers: Sequence[Tensor]) -> ParameterLayout:
        """Return the same layout for a global model with these buffers."""
        return replace(self, buffers=buffers)

    @property
    def plain(self) -> ParameterLayout:
        """The same for vectors as torch makes them: no padding, every parameter in the order of its dimensions."""
        segments, offset = [], 0
        for s in self.segments:
            strides = torch.empty(s.shape, device="meta").stride()
            segments.append(Segment(offset, s.shape, strides, s.group))
            offset += s.length
        return replace(self, segments=tuple(segments), row_size=offset)

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """Return views of rows `[..., row_size]` by parameter, each `[..., *shape]`. Writing into a view writes the row
        and never its padding.

        Raises:
            ValueError: the last dimension is not `row_size`.
        """
        self._check(row, self.row_size, "a row")
        if row.stride(-1) != 1:
            row = row.contiguous()
        lead, strides, start = tuple(row.shape[:-1]), tuple(row.stride()[:-1]), row.storage_offset()
        return {
            name: row.as_strided(lead + tuple(s.shape), strides + s.stride, start + s.offset)
            for name, s in zip(self.names, self.segments, strict=True)
        }

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the rows `[..., row_size]` of tensors by parameter, each `[..., *shape]`, with zero padding. It is the
        inverse of `unflatten`.

        Raises:
            ValueError: the names differ from the parameters' names, or a shape differs.
        """
        if parameters.keys() != {*self.names}:
            wrong = sorted(parameters.keys() ^ {*self.names})
            raise ValueError(
                f"flatten takes a tensor for each of the parameters {', '.join(self.names)}; missing or unknown: "
                f"{', '.join(wrong)}"
            )
        shapes = dict(zip(self.names, (s.shape for s in self.segments), strict=True))
        first = parameters[self.names[0]]
        lead = first.shape[: first.dim() - len(shapes[self.names[0]])]
        for name, x in parameters.items():
            if x.shape != lead + shapes[name]:
                raise ValueError(f"flatten: {name!r} must be {[*lead, *shapes[name]]}, got {list(x.shape)}")
        row = torch.zeros(*lead, self.row_size, dtype=first.dtype, device=first.device)
        for name, view in self.unflatten(row).items():
            view.copy_(parameters[name])
        return row

    def vector(self, row: Tensor) -> Tensor:
        """Return rows as new vectors `[..., P]` in the order of `torch.nn.utils.parameters_to_vector`. Raises
        ValueError if the last dimension is not `row_size`."""
        lead = row.dim() - 1
        return torch.cat([view.flatten(lead) for view in self.unflatten(row).values()], dim=-1)

    def row(self, vector: Tensor) -> Tensor:
        """Return new rows of vectors `[..., P]`, with zero padding. It is the inverse of `vector`. Raises ValueError if
        the last dimension is not P."""
        self._check(vector, self.numel, "a vector")
        return self.flatten(self.plain.unflatten(vector))

    def mask(self, option: str, patterns: str | Sequence[str]) -> Tensor:
        """Return a mask of the parameters with these names, bool `[row_size]`, on the CPU. Padding is False.

        Args:
            option: the option's name, for error messages.
            patterns: names of parameters, or of modules for all parameters in them, with `*`, `?` and `[...]` as in
                file names: "head.*", "*.bias", "layer4".

        Raises:
            ValueError: a pattern matches no trainable parameter; the message has their names.
        """
        names = {self.names[i] for i in self.indices(option, patterns)}
        row = torch.zeros(self.row_size, dtype=torch.bool)
        for name, view in self.unflatten(row).items():
            view.fill_(name in names)
        return row

    def indices(self, option: str, patterns: str | Sequence[str]) -> tuple[int, ...]:
        """Return the indices in `names` of the parameters with such names. Patterns and errors are as in `mask`."""
        names: set[str] = set()
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matches = {n for n in self.names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
            if not matches:
                raise ValueError(
                    f"{option}: {pattern!r} matches no trainable parameter of the model; its names are "
                    f"{', '.join(self.names)}"
                )
            names |= matches
        return tuple(i for i, name in enumerate(self.names) if name in names)

    @property
    def padding(self) -> Tensor:
        """A mask of the padding of a row, bool `[row_size]`, on the CPU."""
        return ~self.mask("rows", "*")

    def model(self, row: Tensor) -> nn.Module:
        """Return a new copy of the user's model with the weights `row` `[row_size]`, in evaluation mode and in its
        memory format, with the buffers of the global model. Raises ValueError for any other shape."""
        if row.dim() != 1:
            raise ValueError(f"a model takes one row, [{self.row_size}], got {list(row.shape)}")
        buffers = list(self.template.buffers()) if self.buffers is None else self.buffers
        return export(self.template, self.unflatten(row.detach()).values(), buffers).eval()

    def _check(self, x: Tensor, length: int, kind: str) -> None:
        if x.dim() == 0 or x.shape[-1] != length:
            raise ValueError(f"in this run {kind} has {length} numbers in its last dimension, got {list(x.shape)}")
