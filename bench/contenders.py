"""The contenders: every way of doing a SAM step's optimizer part that is compared, behind one small protocol.

A contender is built from the initial weights and then driven by: `take(gradients, i)` (what the backward pass i leaves;
not timed), `first()` (gradients in place -> perturbed weights), `take(gradients, i + 1)`, `second()` (-> new weights).
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bench.copied_sam import CopiedSAM
from bench.problem import LR, MOMENTUM, NU, RHO, WEIGHT_DECAY, Gradients
from fastsam import backends

T = TypeVar("T")
SGD_OPTIONS: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}


class Stepper(Protocol):
    """One contender with its own weights and state."""

    def take(self, gradients: Gradients, index: int) -> None: ...
    def first(self) -> None: ...
    def second(self) -> None: ...
    def weights(self) -> Sequence[Tensor]: ...

    def phases(self) -> Sequence[Callable[[], object]]:
        """Return the optimizer's parts of the next step, one after each pass."""
        return self.first, self.second


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    build: Callable[[Sequence[Tensor]], Stepper]
    why_not: Callable[[], str | None] = lambda: None  # the reason why it cannot be measured here
    ours: bool = False
    backend: str | None = None  # of ours
    compiles: bool = False  # takes most of a minute to get ready
    norm_error: float = (
        1e-4  # relative error of the gradient's norm that the gate allows: float32 sums over tensors of 2 M elements
    )


def parameters(weights: Iterable[Tensor]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(w.detach().clone()) for w in weights]


class OptimizerStepper(Stepper):
    """A SAM optimizer with `first_step` and `second_step`, whoever wrote it."""

    def __init__(self, weights: Sequence[Tensor], make: Callable[[list[torch.nn.Parameter]], Any]) -> None:
        self.parameters = parameters(weights)
        optimizer = make(self.parameters)
        self.first: Callable[[], None] = optimizer.first_step
        self.second: Callable[[], None] = optimizer.second_step

    def take(self, gradients: Gradients, index: int) -> None:
        for p, g in zip(self.parameters, gradients.tensors(index), strict=True):
            p.grad = g

    def weights(self) -> Sequence[Tensor]:
        return [p.detach() for p in self.parameters]


class ForeachStepper(OptimizerStepper):
    """By hand from torch's multi-tensor functions, without a temporary, and torch's fused SGD: 52 bytes per parameter.

    Reading the norm on the host costs nothing on a CPU, and lets one call per list perturb without a temporary.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.parameters = parameters(weights)
        self.data = [p.detach() for p in self.parameters]
        self.saved = [torch.empty_like(p) for p in self.data]
        self.sgd = torch.optim.SGD(self.parameters, **SGD_OPTIONS, fused=True)
        self.first, self.second = self._first, self._second

    @torch.no_grad()
    def _first(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_copy_(self.saved, self.data)
        torch._foreach_add_(self.data, gradients, alpha=RHO / (norm.item() + NU))

    @torch.no_grad()
    def _second(self) -> None:
        torch._foreach_copy_(self.data, self.saved)
        self.sgd.step()


class FlatStepper(Stepper):
    """One flat parameter whose gradients were flat to begin with, and torch's fused SGD: 52 bytes per parameter, and no
    lists at all.

    The bar to beat: nobody's gradients are flat without a cost that is not counted here.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.shapes = [w.shape for w in weights]
        self.parameter = torch.nn.Parameter(torch.cat([w.detach().reshape(-1) for w in weights]))
        self.data = self.parameter.detach()
        self.saved = torch.empty_like(self.data)
        self.sgd = torch.optim.SGD([self.parameter], **SGD_OPTIONS, fused=True)

    def take(self, gradients: Gradients, index: int) -> None:
        self.parameter.grad = gradients.flat(index)

    @torch.no_grad()
    def first(self) -> None:
        gradient = self.parameter.grad
        assert gradient is not None
        norm = torch.linalg.vector_norm(gradient)
        self.saved.copy_(self.data)
        self.data.addcmul_(gradient, RHO / (norm + NU))

    @torch.no_grad()
    def second(self) -> None:
        self.data.copy_(self.saved)
        self.sgd.step()

    def weights(self) -> Sequence[Tensor]:
        pieces = self.data.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def _compiled_perturb(weights: list[Tensor], saved: list[Tensor], gradients: list[Tensor]) -> None:
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    scale = RHO / (norm + NU)
    torch._foreach_copy_(saved, weights)
    torch._foreach_add_(weights, torch._foreach_mul(gradients, scale))


def _compiled_update(
    weights: list[Tensor], saved: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]
) -> None:
    direction = torch._foreach_add(gradients, saved, alpha=WEIGHT_DECAY)
    torch._foreach_mul_(momenta, MOMENTUM)
    torch._foreach_add_(momenta, direction)
    torch._foreach_copy_(weights, torch._foreach_add(saved, momenta, alpha=-LR))


class CompiledStepper(Stepper):
    """The whole arithmetic in two functions under `torch.compile`, which fuses it to 40 bytes per parameter."""

    _compiled_for: tuple[Any, ...] | None = None

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.data = [w.detach().clone() for w in weights]
        self.saved = [torch.empty_like(w) for w in self.data]
        self.momenta = [torch.zeros_like(w) for w in self.data]
        self.gradients: list[Tensor] = []
        # Compiled code holds its shapes and its number of threads; with older entries around, torch would try dynamic
        # shapes.
        key = (tuple(w.shape for w in weights), torch.get_num_threads())
        if CompiledStepper._compiled_for != key:
            torch.compiler.reset()
            CompiledStepper._compiled_for = key
        self.perturb = torch.compile(_compiled_perturb, fullgraph=True, dynamic=False)
        self.update = torch.compile(_compiled_update, fullgraph=True, dynamic=False)

    def take(self, gradients: Gradients, index: int) -> None:
        self.gradients = list(gradients.tensors(index))

    def first(self) -> None:
        self.perturb(self.data, self.saved, self.gradients)

    def second(self) -> None:
        self.update(self.data, self.saved, self.gradients, self.momenta)

    def weights(self) -> Sequence[Tensor]:
        return self.data


def _ours(backend: str, assume_no_alias: bool = False) -> Callable[[Sequence[Tensor]], Stepper]:
    from fastsam.optim import FusedSAM

    own: dict[str, Any] = {"rho": RHO, "backend": backend, "assume_no_alias": assume_no_alias, **SGD_OPTIONS}
    return lambda weights: OptimizerStepper(weights, lambda p: FusedSAM(p, torch.optim.SGD, **own))


def _ours_why_not(entry: backends.Backend) -> Callable[[], str | None]:
    if entry.name == "triton" and entry.device == "cpu":
        return lambda: "on the CPU Triton runs in its interpreter, thousands of times slower: not a measurement"
    return lambda: entry.reason


def _copied(weights: Sequence[Tensor]) -> Stepper:
    return OptimizerStepper(weights, lambda p: CopiedSAM(p, torch.optim.SGD, rho=RHO, **SGD_OPTIONS))


def _library(foreach: bool | None) -> Callable[[Sequence[Tensor]], Stepper]:
    def make(params: list[torch.nn.Parameter]) -> Any:
        from pytorch_optimizer import SAM

        return SAM(params, torch.optim.SGD, rho=RHO, perturb_eps=NU, foreach=foreach, **SGD_OPTIONS)

    return lambda weights: OptimizerStepper(weights, make)


def _library_why_not() -> str | None:
    found = importlib.util.find_spec("pytorch_optimizer") is not None
    return None if found else "the package is not installed: pip install pytorch-optimizer"


def _compiler_why_not() -> str | None:
    found = any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)
    return None if found else "torch.compile needs a C++ compiler on the CPU; none of g++, clang++ is here"


def contenders(device: str = "cpu") -> dict[str, Contender]:
    """All contenders on a type of device, ours first, in the order of the tables."""
    ours = [
        Contender(
            f"fastsam_{b.name}", f"fastsam ({b.name})", _ours(b.name), _ours_why_not(b), ours=True, backend=b.name
        )
        for b in backends.table()
        if b.device == device and b.name != "reference"  # which is the specification
    ]
    for native in (b for b in backends.table() if (b.name, b.device) == ("native", device)):  # which exchanges memory
        title, build = "fastsam (native), exclusive", _ours("native", assume_no_alias=True)
        ours.append(Contender("fastsam_exclusive", title, build, _ours_why_not(native), ours=True, backend="native"))
    peers = [
        # torch's float32 norm of one long tensor is off by 4e-4 at 11.7 M elements and 2e-3 at 30 M. An exact one would
        # cost it time.
        Contender("flat", "one flat tensor, flat gradients, fused SGD", FlatStepper, norm_error=4e-3),
        Contender("compiled", "torch.compile", CompiledStepper, _compiler_why_not, compiles=True),
        Contender("foreach", "foreach by hand, fused SGD", ForeachStepper),
        Contender("pytorch_optimizer_foreach", "pytorch-optimizer, foreach=True", _library(True), _library_why_not),
        Contender("pytorch_optimizer", "pytorch-optimizer", _library(None), _library_why_not),
        Contender("copied", "the copied per-tensor SAM", _copied),
    ]
    return {contender.name: contender for contender in ours + peers}


def choose(table: Mapping[str, T], names: Iterable[str], what: str) -> list[T]:
    """Return the entries of `table` under `names`. Raises ValueError for an unknown name, with the nearest and all."""
    chosen = []
    for name in names:
        if name not in table:
            near = difflib.get_close_matches(name, table, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"there is no {what} {name!r}; {hint}there are {', '.join(table)}")
        chosen.append(table[name])
    return chosen


def split(text: str | None) -> list[str]:
    """Return the parts of a comma-separated option."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]
