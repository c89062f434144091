"""What a flat row holds, in terms of the user's model: its parameters by name, the vector that torch makes of them, the
model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fastsam.arena import Layout, Segment
from fastsam.fed.common.checks import number
from fastsam.fed.step.model_copy import copied, trainable


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """The layout of a run's flat rows.

    A row is private in two ways: between parameters there is padding, which is zero and stays zero, and a parameter's
    elements stand in the order in which it is stored (channels_last, say). Arithmetic by elements need not know.
    Whoever needs a parameter, a mask, a random number for each weight or torch's own vector asks here. Every function
    takes rows with any number of dimensions before the last.

    names: of the trainable parameters, each once, in the order of `model.named_parameters()`. row_size: numbers in a
    row.
    numel: P, the parameters' elements.
    """

    names: tuple[str, ...]
    segments: tuple[Segment, ...]
    row_size: int
    numel: int
    template: nn.Module = field(repr=False)  # the user's model
    buffers: Sequence[Tensor] | None = field(default=None, repr=False)  # of the global model; None: the template's own

    @classmethod
    def of(cls, model: nn.Module, layout: Layout) -> ParameterLayout:
        """The rows of `layout`, made of `model` or of a copy in another memory format."""
        names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        return cls(names, layout.segments, layout.row_size, layout.numel, model)

    def with_buffers(self, buffers: Sequence[Tensor]) -> ParameterLayout:
        """The same, for a global model with these buffers."""
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
        """Views by parameter of rows `[..., row_size]`, each `[..., *shape]`: writing into one writes the row, and
        nothing of its padding.

        Raises ValueError for a tensor of another length.
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
        """The rows `[..., row_size]` of tensors by parameter, each `[..., *shape]`; zero in the padding. The opposite
        of `unflatten`.

        Raises ValueError for names that are not those of the parameters, and for other shapes.
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
        """Rows as new vectors `[..., P]` in the order of `torch.nn.utils.parameters_to_vector`. Raises ValueError for
        another length."""
        lead = row.dim() - 1
        return torch.cat([view.flatten(lead) for view in self.unflatten(row).values()], dim=-1)

    def row(self, vector: Tensor) -> Tensor:
        """New rows of vectors `[..., P]`, zero in the padding. The opposite of `vector`. Raises ValueError for another
        length."""
        self._check(vector, self.numel, "a vector")
        return self.flatten(self.plain.unflatten(vector))

    def mask(self, what: str, patterns: str | Sequence[str]) -> Tensor:
        """Which numbers of a row are parameters with such names, bool `[row_size]`, on the CPU; never the padding.

        patterns: names of parameters or of modules, which stand for all below them, with `*`, `?` and `[...]` as in
        file names: "head.*", "*.bias", "layer4". Raises ValueError, as an error of the option `what`, for one that
        matches no trainable parameter, with their names.
        """
        found = {self.names[place] for place in self.places(what, patterns)}
        row = torch.zeros(self.row_size, dtype=torch.bool)
        for name, view in self.unflatten(row).items():
            view.fill_(name in found)
        return row

    def places(self, what: str, patterns: str | Sequence[str]) -> tuple[int, ...]:
        """The places in `names` of the parameters with such names; patterns and errors as in `mask`."""
        found: set[str] = set()
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matched = {n for n in self.names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
            if not matched:
                raise ValueError(
                    f"{what}: {pattern!r} matches no trainable parameter of the model; its names are "
                    f"{', '.join(self.names)}"
                )
            found |= matched
        return tuple(place for place, name in enumerate(self.names) if name in found)

    def factors(self, what: str, numbers: Mapping[str, float], like: Tensor) -> Tensor:
        """A row of one number for each parameter, for `LocalUpdate(rho_scale=...)`: `[row_size]`, in the dtype and on
        the device of `like`.

        numbers: by patterns as in `mask`, of which the last one that matches counts; 1 where none does, 0 in the
        padding. Raises ValueError as `places` does, and for a number that is negative or not finite.
        """
        row = torch.zeros(self.row_size, dtype=like.dtype)
        views = list(self.unflatten(row).values())
        for view in views:
            view.fill_(1)
        for pattern, value in numbers.items():
            number(f"{what}[{pattern!r}]", value, at_least=0)
            for place in self.places(what, pattern):
                views[place].fill_(value)
        return row.to(like.device)

    @property
    def padding(self) -> Tensor:
        """Which numbers of a row belong to no parameter, bool `[row_size]`, on the CPU."""
        return ~self.mask("rows", "*")

    def model(self, row: Tensor) -> nn.Module:
        """A new copy of the user's model with these weights (`[row_size]`), in evaluation mode, in the memory format
        that it had; its buffers are the global model's. Raises ValueError for another shape."""
        if row.dim() != 1:
            raise ValueError(f"a model takes one row, [{self.row_size}], got {list(row.shape)}")
        made = copied(self.template).eval()
        with torch.no_grad():
            for parameter, value in zip(trainable(made), self.unflatten(row.detach()).values(), strict=True):
                parameter.copy_(value)
            for own, new in zip(made.buffers(), made.buffers() if self.buffers is None else self.buffers, strict=True):
                own.copy_(new)
        return made

    def _check(self, x: Tensor, length: int, what: str) -> None:
        if x.dim() == 0 or x.shape[-1] != length:
            raise ValueError(f"{what} of this run has {length} numbers in its last dimension, got {list(x.shape)}")
