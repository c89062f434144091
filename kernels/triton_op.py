"""One call of an op: gathers its operands, then launches its kernels with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec

import torch
import triton.language as tl
from torch import Tensor

from .rule import MAX_STATE
from .triton_chunks import Operand
from .triton_launch import launch_call
from .triton_tables import Addresses, chunk_table_of, field_of, operand_of, place_of

increment_version = torch._C._increment_version


class Call:
    """A call of an op: its operands, in the form that kernels take.

    Operands are passed by name: lists, lists whose `Addresses` are known, fields, and None or an empty list for an
    absent operand. Without operands there may be nothing to do. Launches need no tensor of Python's, but the memory of
    their arguments, which stays allocated as long as this object.
    """

    def __init__(
        self,
        table: Tensor,
        rows: int,
        device: torch.device,
        hparams: Tensor | None = None,
        **operands: Sequence[Tensor] | Tensor | Addresses | None,
    ) -> None:
        self._place = place_of(device)
        self.plan, self.rows, self.device = chunk_table_of(table, self._place), rows, device
        self.programs = self.plan.n_chunks * rows
        self._is_aligned = self.plan.is_aligned
        self._args: dict[str, Any] = {name: self._operand(x) for name, x in operands.items()}
        if hparams is not None:
            self._args["hparams"] = (hparams, *hparams.stride()[:2])

    def _operand(self, tensors: Sequence[Tensor] | Tensor | Addresses | None) -> Operand | None:
        if isinstance(tensors, Tensor):
            operand, is_aligned = field_of(tensors, self.rows)
        elif isinstance(tensors, Addresses):
            operand, is_aligned = tensors.operand, tensors.is_aligned
        elif tensors:
            operand, is_aligned = operand_of(tensors, self.plan, self.rows, self._place)
        else:
            return None
        self._is_aligned &= is_aligned
        return operand

    def chunk_call(self, kernel: Any, **args: Any) -> partial[None]:
        """Return the launch of a program per chunk and row with all operands, plus `args`, as a call."""
        plan = self.plan
        common = {"plan": (plan.chunks, plan.table), "n_chunks": plan.n_chunks, "segments": plan.segments}
        self._launch_args = {"ALIGNED": self._is_aligned, **common, **self._args, **args}
        return launch_call(kernel, self.programs, self.device, self._launch_args)

    def each_chunk(self, kernel: Any, **args: Any) -> None:
        """Launch a program per chunk and row with all operands, plus `args`; nothing if there is no chunk."""
        if self.programs:
            self.chunk_call(kernel, **args)()


def launch(kernel: Any, programs: int, device: torch.device, **args: Any) -> None:
    """Launch `programs` programs, if any, on `device`."""
    if programs:
        launch_call(kernel, programs, device, args)()


def compute_type(tensors: Sequence[Tensor]) -> tl.dtype:
    """Return `conventions.compute_dtype` of an operand's tensors in Triton's types; float32 for an empty operand."""
    return tl.float64 if tensors and tensors[0].dtype == torch.float64 else tl.float32


def wrote(params: Sequence[Tensor]) -> None:
    """Tell autograd that the weights changed, so that a graph that saved them raises and gives no wrong gradients."""
    increment_version(params)


P = ParamSpec("P")


def schema_of(function: Callable[..., None], writes: Sequence[str]) -> str:
    """Return the schema of an op with the signature of `function`.

    The op writes the tensors `writes`, and a rule's `state`, field by field.
    """
    parts: list[str] = []
    for i, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if name == "state":
            parts += [f"Tensor(state{field}!)? state{field}" for field in range(MAX_STATE)]
            continue
        kind = str(parameter.annotation).replace("Sequence[Tensor]", "Tensor[]").replace(" | None", "?")
        kind = kind.replace("Tensor", f"Tensor(a{i}!)") if name in writes else kind
        parts.append(f"{kind} {name}" + ("" if parameter.default is parameter.empty else f"={parameter.default}"))
    return f"({', '.join(parts)}) -> ()"


def compilable(twin: Callable[P, None], *writes: str) -> Callable[[Callable[..., None]], Callable[P, None]]:
    """Give a launcher the signature of its `twin`, and make it opaque to torch.compile.

    torch.compile would trace into the launcher and find no addresses. Under torch.compile the launcher is an op that
    writes the tensors `writes`, without a graph break. Otherwise it stays the plain function, because a call through a
    Python op takes longer than a launch.
    """

    def decorate(function: Callable[..., None]) -> Callable[P, None]:
        name = f"fastsam_triton::{function.__name__}"
        torch.library.define(name, schema_of(twin, writes))
        torch.library.impl(name, ("cpu", "cuda"), function)
        torch.library.register_fake(name, lambda *args, **kwargs: None)
        op = getattr(torch.ops.fastsam_triton, function.__name__).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            (op if torch.compiler.is_compiling() else function)(*args, **kwargs)

        return call

    return decorate
