"""An independent SAM for the tests of `FusedSAM`: parameter by parameter, in float64, with torch's own optimizer for
the update.

It is given the gradients that `FusedSAM` saw, and says where the weights must be.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Options = dict[str, Any]


class Oracle:
    """Foret et al. 2021, eq. 2, and Kwon et al. 2021, eq. 9, written down once more."""

    def __init__(self, groups: Sequence[Options], base: Callable[..., torch.optim.Optimizer], options: Options) -> None:
        """`groups` have "params" and options, SAM's among them; `options` are the base optimizer's defaults."""
        own = {"rho": 0.05, "adaptive": False, "eta": 0.0}
        self.sam = [{name: group.get(name, default) for name, default in own.items()} for group in groups]
        self.groups: list[list[nn.Parameter]] = []
        base_groups = []
        for group in groups:
            params = [nn.Parameter(p.detach().double().cpu().clone()) for p in group["params"]]
            self.groups.append(params)
            base_groups.append({"params": params, **{n: v for n, v in group.items() if n not in own and n != "params"}})
        self.base = base(base_groups, **{n: v for n, v in options.items() if n not in own})
        for group, sam in zip(groups, self.sam):
            sam.update({n: options[n] for n in own if n in options and n not in group})
        self._saved: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for group in self.groups for p in group]

    def set_gradients(self, grads: Sequence[Tensor | None]) -> None:
        for p, g in zip(self.params, grads):
            p.grad = None if g is None else g.detach().double().cpu().clone()

    @torch.no_grad()
    def perturb(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Perturb the weights, and return the norm."""
        self.set_gradients(grads)
        self._saved = []
        total = torch.zeros((), dtype=torch.float64)
        for params, sam in zip(self.groups, self.sam):
            for p in params:
                if p.grad is not None:
                    t = p.abs() + float(sam["eta"]) if sam["adaptive"] else torch.ones_like(p)
                    total += (t * p.grad).square().sum()
        norm = total.sqrt()
        for params, sam, group in zip(self.groups, self.sam, self.base.param_groups):
            rho = -float(sam["rho"]) if group.get("maximize") else float(sam["rho"])
            for p in params:
                if p.grad is None or not torch.isfinite(norm) or norm == 0:
                    continue
                self._saved.append((p, p.detach().clone()))
                t = p.abs() + float(sam["eta"]) if sam["adaptive"] else torch.ones_like(p)
                p.add_(rho * t * t * p.grad / (norm + 1e-12))
        return norm

    @torch.no_grad()
    def restore(self) -> None:
        for p, saved in self._saved:
            p.copy_(saved)
        self._saved = []

    def update(self, grads: Sequence[Tensor | None]) -> None:
        self.restore()
        self.set_gradients(grads)
        self.base.step()


def landscape(params: Sequence[Tensor], step: int) -> Tensor:
    """Return a smooth loss of a step. Every parameter changes the gradients of all parameters."""
    waves = [(torch.sin(p.float() if p.dtype.itemsize == 2 else p) * (1 + 0.1 * i)).sum() for i, p in enumerate(params)]
    total = sum(waves[1:], waves[0])
    bowl = sum(((p - 0.1 * step % 0.7) ** 2).sum().to(total.dtype) for p in params)
    return 0.1 * bowl + torch.cos(0.05 * total + 0.3 * step) * 3


def make_parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype)) for shape in shapes]


def gradients(params: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in params]


def backward(params: Sequence[Tensor], step: int) -> Tensor:
    """Compute new gradients of the landscape at the current weights."""
    for p in params:
        p.grad = None
    loss = landscape(params, step)
    loss.backward()
    return loss.detach()


def copies(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Return True if all bits are equal. NaN equals itself, and the zeros differ."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}

    def bits(t: Tensor) -> Tensor:
        return t.detach().contiguous().view(integers[t.element_size()])

    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y)) for x, y in zip(a, b)
    )
