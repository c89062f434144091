"""One call of an op: gathers its operands, then launches its kernels with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from .rule import MOST_FIELDS
from .triton_chunks import Operand
from .triton_common import INTERPRETED, WARPS
from .triton_tables import field_of, operand_of, plan_of


class Call:
    """What the kernels of one op have in common, and the operands of a call.

    Operands come by name: lists, fields, and None or an empty list (then there may be nothing to do at all) for what is
    absent.
    """

    def __init__(
        self,
        table: Tensor,
        rows: int,
        device: torch.device,
        hparams: Tensor | None = None,
        **operands: Sequence[Tensor] | Tensor | None,
    ) -> None:
        self.plan, self.rows, self.device = plan_of(table, device), rows, device
        self.programs = self.plan.n_chunks * rows
        self._aligned = self.plan.aligned
        self._args: dict[str, Any] = {name: self._operand(x) for name, x in operands.items()}
        if hparams is not None:
            self._args["hparams"] = (hparams, *hparams.stride()[:2])

    def _operand(self, given: Sequence[Tensor] | Tensor | None) -> Operand | None:
        if isinstance(given, Tensor):
            operand, aligned = field_of(given, self.rows)
        elif given:
            operand, aligned = operand_of(given, self.plan, self.rows)
        else:
            return None
        self._aligned &= aligned
        return operand

    def each_chunk(self, kernel: Any, **args: Any) -> None:
        """Launches a program per chunk and row with all that was gathered, plus `args`."""
        plan = self.plan
        common = {"plan": (plan.chunks, plan.table), "n_chunks": plan.n_chunks, "segments": plan.segments}
        launch(kernel, self.programs, self.device, ALIGNED=self._aligned, **common, **self._args, **args)


def launch(kernel: Any, programs: int, device: torch.device, **args: Any) -> None:
    """Launches `programs` programs, if any, on `device`; the kernels' comment on multiply and add is in
    `triton_common`."""
    if programs:
        with _surroundings(device):
            kernel[(programs,)](**args, num_warps=WARPS, enable_fp_fusion=False)


def _surroundings(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device; its interpreter computes with NumPy, whose warnings mean nothing for a
    masked lane."""
    if INTERPRETED:
        return np.errstate(all="ignore")
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def compute_type(tensors: Sequence[Tensor]) -> tl.dtype:
    """`conventions.compute_dtype` of an operand's tensors, if there are any, in Triton's types."""
    return tl.float64 if tensors and tensors[0].dtype == torch.float64 else tl.float32


def wrote(params: Sequence[Tensor]) -> None:
    """Tells autograd that the weights changed: a graph that saved them then raises instead of giving wrong
    gradients."""
    torch.autograd.graph.increment_version(params)


P = ParamSpec("P")


def schema_of(function: Callable[..., None], writes: Sequence[str]) -> str:
    """The schema of an op with the signature of `function`, which writes the tensors `writes` and a rule's `state`,
    field by field."""
    parts: list[str] = []
    for i, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if name == "state":
            parts += [f"Tensor(state{field}!)? state{field}" for field in range(MOST_FIELDS)]
            continue
        kind = str(parameter.annotation).replace("Sequence[Tensor]", "Tensor[]").replace(" | None", "?")
        kind = kind.replace("Tensor", f"Tensor(a{i}!)") if name in writes else kind
        parts.append(f"{kind} {name}" + ("" if parameter.default is parameter.empty else f"={parameter.default}"))
    return f"({', '.join(parts)}) -> ()"


def compilable(twin: Callable[P, None], *writes: str) -> Callable[[Callable[..., None]], Callable[P, None]]:
    """Gives a launcher the signature of its `twin`, and makes it opaque to torch.compile, which would trace into it and
    find no addresses.

    Under torch.compile it is an op that writes the tensors `writes`, without a graph break. Everywhere else it stays
    the plain function, since a call through a Python op takes longer than a launch.
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
