"""The contenders: ways of doing a SAM step's optimizer part, with one small protocol.

A contender is built from the initial weights. Before each of its `phases()` it gets the gradients of backward pass i by
`set_grads(gradients, i)`, which is not timed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bench.workload import FLOOR_BYTES, LR, MOMENTUM, NU, RHO, WEIGHT_DECAY, Gradients
from fastsam import SAM, FusedSAM, backends, variants
from fastsam.lab.copied_class import CopiedSAM

SGD_OPTIONS: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
PLAIN = SAM(RHO)
NO_MEASUREMENT = "on the CPU Triton runs in its interpreter, thousands of times slower: not a measurement"


Tensors = list[Tensor]


class Stepper(Protocol):
    """One contender with its own weights and state."""

    def set_grads(self, gradients: Gradients, index: int) -> None: ...
    def weights(self) -> Sequence[Tensor]: ...

    def phases(self) -> Sequence[Callable[[], object]]:
        """Return the optimizer's parts of the next step, one after each pass."""
        ...


@dataclass(frozen=True)
class Contender:
    """A way of doing a step.

    Args:
        absent: reason why it cannot be measured here, or empty.
        backend: name of our backend, empty for any other.
        compiles (bool): takes most of a minute to get ready.
        norm_error (float): relative error of the gradient's norm that the correctness check allows; the default suits
            float32 sums over tensors of 2 M elements.
        sam: variant whose step in float64 is the reference, or None if the contender has no such reference.
        floor (float): bytes per parameter and step.
        rival: name of our contender that it is compared with, or empty.
    """

    name: str
    title: str
    build: Callable[[Sequence[Tensor]], Stepper]
    absent: str = ""
    backend: str = ""
    compiles: bool = False
    norm_error: float = 1e-4
    sam: SAM | None = PLAIN
    floor: float = FLOOR_BYTES
    rival: str = ""


def parameters(weights: Iterable[Tensor]) -> list[nn.Parameter]:
    """Return parameters with copies of the weights."""
    return [nn.Parameter(w.detach().clone()) for w in weights]


class OptimizerStepper(Stepper):
    """A SAM optimizer of any author with `first_step` and `second_step`."""

    def __init__(self, weights: Sequence[Tensor], make: Callable[[list[nn.Parameter]], Any]) -> None:
        self.parameters = parameters(weights)
        self.optimizer = make(self.parameters)

    def set_grads(self, gradients: Gradients, index: int) -> None:
        for p, g in zip(self.parameters, gradients.tensors(index), strict=True):
            p.grad = g

    def phases(self) -> Sequence[Callable[[], object]]:
        if isinstance(self.optimizer, FusedSAM) and not self.optimizer.perturbs:
            return (self.optimizer.step,)
        return self.optimizer.first_step, self.optimizer.second_step

    def weights(self) -> Sequence[Tensor]:
        return [p.detach() for p in self.parameters]


class ForeachStepper(OptimizerStepper):
    """By hand from torch's multi-tensor functions, without a temporary, and torch's fused SGD: 52 bytes per parameter.

    Reading the norm on the host costs nothing on a CPU, and lets one call per list perturb without a temporary.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__(weights, lambda params: torch.optim.SGD(params, **SGD_OPTIONS, fused=True))
        self.data = [p.detach() for p in self.parameters]
        self.backup = [torch.empty_like(p) for p in self.data]

    def phases(self) -> Sequence[Callable[[], object]]:
        return self.first, self.second

    @torch.no_grad()
    def first(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_copy_(self.backup, self.data)
        self.perturb(gradients, norm)

    def perturb(self, gradients: list[Tensor], norm: Tensor) -> None:
        torch._foreach_add_(self.data, gradients, alpha=RHO / (norm.item() + NU))

    @torch.no_grad()
    def second(self) -> None:
        torch._foreach_copy_(self.data, self.backup)
        self.optimizer.step()


class DeviceForeachStepper(ForeachStepper):
    """`ForeachStepper` without a wait for the device: it can be captured in a graph.

    torch's fused SGD takes its learning rate from the device, so with minus the radius for a rate it perturbs.
    """

    def perturb(self, gradients: list[Tensor], norm: Tensor) -> None:
        torch._fused_sgd_(
            self.data, gradients, [], weight_decay=0.0, momentum=0.0, lr=-RHO / (norm + NU), dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip


class FlatStepper(Stepper):
    """One flat parameter whose gradients were flat to begin with, and torch's fused SGD: 52 bytes per parameter, and no
    lists at all.

    The bar to beat. In practice flat gradients have a cost, which is not counted here.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.shapes = [w.shape for w in weights]
        self.parameter = nn.Parameter(torch.cat([w.detach().reshape(-1) for w in weights]))
        self.data = self.parameter.detach()
        self.backup = torch.empty_like(self.data)
        self.sgd = torch.optim.SGD([self.parameter], **SGD_OPTIONS, fused=True)

    def set_grads(self, gradients: Gradients, index: int) -> None:
        self.parameter.grad = gradients.flat(index)

    def phases(self) -> Sequence[Callable[[], object]]:
        return self.first, self.second

    @torch.no_grad()
    def first(self) -> None:
        gradient = self.parameter.grad
        assert gradient is not None
        norm = torch.linalg.vector_norm(gradient)
        self.backup.copy_(self.data)
        self.data.addcmul_(gradient, RHO / (norm + NU))

    @torch.no_grad()
    def second(self) -> None:
        self.data.copy_(self.backup)
        self.sgd.step()

    def weights(self) -> Sequence[Tensor]:
        pieces = self.data.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def _compiled_perturb(weights: list[Tensor], backup: list[Tensor], gradients: list[Tensor]) -> None:
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    scale = RHO / (norm + NU)
    torch._foreach_copy_(backup, weights)
    torch._foreach_add_(weights, torch._foreach_mul(gradients, scale))


def _compiled_update(weights: Tensors, backup: Tensors, gradients: Tensors, momenta: Tensors) -> None:
    direction = torch._foreach_add(gradients, backup, alpha=WEIGHT_DECAY)
    torch._foreach_mul_(momenta, MOMENTUM)
    torch._foreach_add_(momenta, direction)
    torch._foreach_copy_(weights, torch._foreach_add(backup, momenta, alpha=-LR))


class CompiledStepper(Stepper):
    """The whole arithmetic in two functions under `torch.compile`, which fuses it to 40 bytes per parameter."""

    _compiled_for: tuple[Any, ...] | None = None

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.data = [w.detach().clone() for w in weights]
        self.backup = [torch.empty_like(w) for w in self.data]
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

    def set_grads(self, gradients: Gradients, index: int) -> None:
        self.gradients[:] = gradients.tensors(index)

    def phases(self) -> Sequence[Callable[[], object]]:
        lists = self.data, self.backup, self.gradients
        return lambda: self.perturb(*lists), lambda: self.update(*lists, self.momenta)

    def weights(self) -> Sequence[Tensor]:
        return self.data


def ours(backend: str = "auto", sam: SAM | None = None, **options: Any) -> Callable[[Sequence[Tensor]], Stepper]:
    """Return what builds a stepper of `FusedSAM`. SAMON perturbs the tensors of one dimension here, and the base of
    PreconditionedSAM is AdamW."""
    keywords = {"variant": sam or PLAIN, "backend": backend, **options, **SGD_OPTIONS}

    def make(params: list[nn.Parameter]) -> FusedSAM:
        if isinstance(sam, variants.PreconditionedSAM):
            return FusedSAM(params, torch.optim.AdamW, **{n: v for n, v in keywords.items() if n != "momentum"})
        if not isinstance(sam, variants.SAMON):
            return FusedSAM(params, torch.optim.SGD, **keywords)
        other_params = [p for p in params if p.dim() != 1]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in params if p.dim() == 1]},
            {"params": other_params, "rho": 0.0},
        ]
        return FusedSAM([g for g in groups if g["params"]], torch.optim.SGD, **keywords)

    return partial(OptimizerStepper, make=make)


def _peer(kind: str, foreach: bool | None, **options: Any) -> Callable[[Sequence[Tensor]], Stepper]:
    """Return what builds a stepper of a class of pytorch-optimizer."""

    def make(params: list[nn.Parameter]) -> Any:
        import pytorch_optimizer

        model = {"model": nn.ParameterList(params)} if kind == "WSAM" else {}
        keywords = {"rho": RHO, "base_optimizer": torch.optim.SGD, "foreach": foreach} | SGD_OPTIONS | options | model
        return getattr(pytorch_optimizer, kind)(params=params, **keywords)

    return partial(OptimizerStepper, make=make)


def _absence_of_peer() -> str:
    return "" if find_spec("pytorch_optimizer") else "pytorch-optimizer is not installed"


def contenders(device: str = "cpu") -> dict[str, Contender]:
    """Return all contenders on a type of device, ours first, in the order of the tables."""
    result = []
    for b in backends.table():
        if b.device == device and b.name != "reference":
            absent = NO_MEASUREMENT if (b.name, b.device) == ("triton", "cpu") else b.reason or ""
            result.append(Contender(f"fastsam_{b.name}", f"fastsam ({b.name})", ours(b.name), absent, b.name))
            if b.name == "native":  # which exchanges memory
                build, title = ours("native", assume_no_alias=True), "fastsam (native), exclusive"
                result.append(Contender("fastsam_exclusive", title, build, absent, b.name))
    make_copied = partial(CopiedSAM, base=torch.optim.SGD, rho=RHO, **SGD_OPTIONS)
    on_device = device == "cuda"
    by_hand = "foreach and fused SGD, on the device" if on_device else "foreach by hand, fused SGD"
    make_peer, absent = partial(_peer, "SAM", perturb_eps=NU), _absence_of_peer()
    result += [
        # torch's float32 norm of one long tensor is off by 4e-4 at 11.7 M elements and 2e-3 at 30 M. An exact one would
        # cost it time.
        Contender("flat", "one flat tensor, flat gradients, fused SGD", FlatStepper, norm_error=4e-3),
        Contender("compiled", "torch.compile", CompiledStepper, compiles=True),
        Contender("foreach", by_hand, DeviceForeachStepper if on_device else ForeachStepper),
        Contender("pytorch_optimizer_foreach", "pytorch-optimizer, foreach=True", make_peer(True), absent),
        Contender("pytorch_optimizer", "pytorch-optimizer", make_peer(None), absent),
        Contender("copied", "the copied per-tensor SAM", partial(OptimizerStepper, make=make_copied)),
    ]
    return {contender.name: contender for contender in result}


# Each variant with its bytes per parameter and step, as docs/variants.md has them, and the class of
# pytorch-optimizer with its options.
VARIANTS: dict[str, tuple[SAM, float, tuple[str, dict[str, Any]] | None]] = {
    "SAM": (PLAIN, FLOOR_BYTES, ("SAM", {})),
    "ASAM": (SAM(RHO, adaptive=True), FLOOR_BYTES + 4, ("SAM", {"adaptive": True})),
    "SAM, interval=5": (SAM(RHO, interval=5), (FLOOR_BYTES + 4 * 20) / 5, None),
    "LESAM": (SAM(RHO, rho_fn=variants.LESAM(0.01)), FLOOR_BYTES, None),
    "GSAM": (variants.GSAM(RHO), 60, None),
    "WSAM": (variants.WSAM(RHO), 64, ("WSAM", {})),
    "WSAM, coupled": (variants.WSAM(RHO, decouple=False), 52, ("WSAM", {"decouple": False})),
    "GradientPenalty": (variants.GradientPenalty(RHO), 52, None),
    "LookSAM": (variants.LookSAM(RHO, k=10), (96 + 9 * 32) / 10, ("LookSAM", {"k": 10})),
    "FriendlySAM": (variants.FriendlySAM(RHO), 92, ("FriendlySAM", {})),
    "VaSSO": (variants.VaSSO(RHO), 80, None),
    "SAMON": (variants.SAMON(RHO), 36, None),
    "LInfSAM": (variants.LInfSAM(RHO / 100), 68, None),
    "PreconditionedSAM": (variants.PreconditionedSAM(RHO), 98, None),
    "MSAM": (variants.MSAM(RHO), 36, None),
    "LastGradient": (variants.LastGradient(RHO), 44, None),
}


def variant_contenders(peers: bool) -> dict[str, Contender]:
    """Return every variant of SAM; with `peers` also the classes of pytorch-optimizer, which no check compares."""
    result = []
    for name, (sam, floor, peer) in VARIANTS.items():
        result.append(Contender(name, f"`{name}`", ours(sam=sam), backend="auto", sam=sam, floor=floor))
        if peers and peer is not None:
            build = _peer(peer[0], True, **peer[1])
            title = f"{name}, pytorch-optimizer"
            result.append(Contender(title, name, build, _absence_of_peer(), sam=None, rival=name))
    return {contender.name: contender for contender in result}
