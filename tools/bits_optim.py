"""Cases of `tools/bits.py` for the optimizer: short trainings of `FusedSAM`, each with a hash of its bits.

A hash covers all weights and state dicts that a training passed.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastsam import FusedSAM, Lion, variants

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SHAPES = ((7, 3), (16,), (4, 3, 3, 3), (), (33, 5))
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "plain sgd": (torch.optim.SGD, {}),
    "dampened sgd": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "lion": (Lion, {}),
    "nadam": (torch.optim.NAdam, {}),
}
VARIANTS: dict[str, Callable[[], variants.SAM]] = {
    "sam": partial(variants.SAM, 0.3),
    "asam": partial(variants.SAM, 0.5, True, 0.01),
    "interval": partial(variants.SAM, 0.3, interval=2),
    "le-sam": partial(variants.SAM, 0.3, rho_fn=variants.LESAM(sigma=0.5)),
    "gsam": partial(variants.GSAM, 0.3, alpha=0.4),
    "wsam": partial(variants.WSAM, 0.3, gamma=0.6),
    "coupled wsam": partial(variants.WSAM, 0.3, gamma=0.6, decouple=False),
    "looksam": partial(variants.LookSAM, 0.3, k=2),
    "friendly": partial(variants.FriendlySAM, 0.3),
    "vasso": partial(variants.VaSSO, 0.3, theta=0.4),
    "samon": partial(variants.SAMON, 0.3),
    "preconditioned": lambda: variants.PreconditionedSAM(0.3, eps=1e-3),  # other commits may not have it
    "msam": partial(variants.MSAM, 0.3),
    "last gradient": partial(variants.LastGradient, 0.3),
}
ONE_PASS = ("msam", "last gradient")
GAPS: tuple[str, ...] = ("never", "first", "second", "both", "none")
EVENTS = ("resume", "pickle", "copy", "restore", "error", "lr", "group", "write", "move", "nonfinite", "dtype")


@dataclass(frozen=True)
class Training:
    """A training of five small parameters for four steps."""

    variant: str = "sam"
    base: str = "sgd"
    dtype: torch.dtype | None = F32  # None: two dtypes
    way: str = "closure"  # or "halves", "context"
    backend: str = "auto"
    groups: int = 1
    gap: str = ""  # where the second parameter has no gradient, one of `GAPS`
    layout: str = ""  # "channels last" or "gaps"
    event: str = ""  # event after the second step, one of `EVENTS`
    scaler: bool = False
    size: int = 1  # factor of the first dimensions
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        dtype = "two dtypes" if self.dtype is None else str(self.dtype)[6:]
        words = [self.variant, self.base, dtype, self.way, self.backend if self.backend != "auto" else ""]
        words += [f"{self.groups} groups" if self.groups > 1 else "", self.layout, self.event]
        words += [f"missing: {self.gap}" if self.gap else "", "scaler" if self.scaler else ""]
        words += [f"size {self.size}" if self.size > 1 else "", *(f"{n}={v}" for n, v in self.options.items())]
        return ", ".join(word for word in words if word)

    def run(self) -> dict[str, str]:
        """Train, and return the hash of the bits."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"bits": _Run(self).bits()}


class _Run:
    def __init__(self, training: Training) -> None:
        self.training = training
        self.random = torch.Generator().manual_seed(5)
        self.digest = hashlib.sha256()
        self.params = [self._parameter(i, shape) for i, shape in enumerate(SHAPES)]
        self.targets = [torch.randn(p.shape, generator=self.random) for p in self.params]
        self.opt = self._optimizer(self.params)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if training.scaler else None
        self.number = 0  # steps made

    def _parameter(self, i: int, shape: tuple[int, ...]) -> nn.Parameter:
        t = self.training
        dtype = t.dtype or (F32, BF16)[i % 2]
        shape = (shape[0] * t.size, *shape[1:]) if shape else shape
        value = torch.randn(shape, generator=self.random).to(dtype)
        if t.layout == "channels last" and len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        elif t.layout == "gaps" and len(shape) == 2:
            value = torch.zeros(shape[0], 2 * shape[1], dtype=dtype)[:, ::2].copy_(value)
        return nn.Parameter(value)

    def _optimizer(self, params: list[nn.Parameter]) -> FusedSAM:
        t = self.training
        base, options = BASES[t.base]
        groups: list[dict[str, Any]] = [{"params": params[i :: t.groups]} for i in range(t.groups)]
        if t.groups > 1:
            groups[1].update(rho=0.0 if t.variant == "samon" else 0.1, lr=0.02)
        return FusedSAM(
            groups, base, lr=0.05, variant=VARIANTS[t.variant](), backend=t.backend, **{**options, **t.options}
        )

    # --- gradients ---

    def loss(self, second: bool) -> Tensor:
        """Compute the loss, without the parameters that are missing in this pass."""
        t = self.training
        absent = {"never": False, "first": not second, "second": second, "both": True, "none": True}
        total = torch.zeros(())
        for i, (p, target) in enumerate(zip(self.params, self.targets, strict=True)):
            is_missing = t.gap and absent[t.gap] and (i == 1 or t.gap == "none")
            if not is_missing or (t.gap == "never" and i != 1):
                error = p.float() - target * (1 + self.number)
                total = total + (error.square().mean() + 0.1 * p.float().pow(4).mean())
        if t.event == "nonfinite" and self.number == 2 and second:
            total = total * torch.inf
        return total

    def backward(self, second: bool) -> Tensor:
        loss = self.loss(second)
        if loss.requires_grad:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    # --- a step ---

    def step(self) -> None:
        getattr(self, f"_{self.training.way}")()
        self.number += 1
        self.note()

    def _closure(self) -> None:
        calls = itertools.count()
        self.opt.step(lambda: self.backward(next(calls) == 1))

    def _halves(self) -> None:
        opt = self.opt
        if self.training.variant not in ONE_PASS and opt.perturbs:
            self.backward(False)
            opt.first_step(zero_grad=True)
            self.note()
        self.backward(True)
        if self.scaler is None:
            opt.step()
        else:
            self.scaler.step(opt)
            self.scaler.update()
        opt.zero_grad()

    def _context(self) -> None:
        self.backward(False)
        with self.opt.perturbed():
            self.opt.zero_grad(set_to_none=False)
            self.backward(True)
            self.opt.step()
        self.opt.zero_grad()

    # --- between steps ---

    def happen(self) -> None:
        """Do what the training has after its second step."""
        event, opt = self.training.event, self.opt
        if event == "resume":
            state = copy.deepcopy(opt.state_dict())
            self.params = [nn.Parameter(p.detach().clone()) for p in self.params]
            self.opt = self._optimizer(self.params)
            self.opt.load_state_dict(state)
        elif event == "pickle":
            self.params, self.opt = pickle.loads(pickle.dumps((self.params, opt)))
        elif event == "copy":
            self.params, self.opt = copy.deepcopy((self.params, opt))
        elif event == "restore":
            self.backward(False)
            opt.first_step()
            opt.restore()
            opt.zero_grad()
        elif event == "error":
            self._fail()
        elif event == "lr":
            for group in opt.param_groups:
                group.update(lr=group["lr"] / 2, rho=group["rho"] * 2)
        elif event == "group":
            self.params.append(nn.Parameter(torch.ones(3, dtype=self.training.dtype)))
            self.targets.append(torch.zeros(3))
            opt.add_param_group({"params": [self.params[-1]], "rho": 0.2})
        elif event == "write":
            opt.eval()
            with torch.no_grad():
                self.params[0].mul_(0.5)
            opt.train()
        elif event == "move":
            self.params[0].data = self.params[0].data.clone()
        elif event == "dtype":
            for p in self.params:
                p.data = p.data.double()

    def _fail(self) -> None:
        def closure() -> Tensor:
            if self.opt.is_perturbed:
                raise KeyError
            return self.backward(False)

        try:
            self.opt.step(closure)
        except KeyError:
            self.note()
        self.opt.zero_grad()

    def note(self) -> None:
        """Add all bits that there are to the hash."""
        state = self.opt.state_dict()
        for value in (*self.params, self.opt.grad_norm, *_leaves(state)):
            if isinstance(value, Tensor):
                value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            self.digest.update(value if isinstance(value, bytes) else repr(value).encode())

    def bits(self) -> str:
        for number in range(4):
            self.step()
            if number == 1:
                self.happen()
        self.opt.eval()
        self.note()
        return self.digest.hexdigest()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield key
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _trainings() -> Iterator[Training]:
    plain = Training()
    for variant, base in itertools.product(VARIANTS, ("sgd", "adamw", "nadam")):
        if (variant == "msam" and base == "nadam") or (variant == "preconditioned" and base != "adamw"):
            continue
        for way, dtype in (("closure", F32), ("halves", BF16)):
            yield Training(variant, base, dtype, way, groups=2 if variant == "samon" else 1)
    for base, dtype in itertools.product(BASES, (F32, F64, BF16, F16, None)):
        yield Training("sam", base, dtype, "halves")
    for variant in VARIANTS:
        base, second_base = ("adamw", "adam") if variant == "preconditioned" else ("sgd", "rmsprop")
        yield Training(variant, second_base, F64, groups=2)
        yield Training(variant, "adam", None, "halves")
        yield Training(variant, base, F32, "halves", scaler=True)
        yield Training(variant, base, F16, backend="reference")
        yield Training(variant, base, F32, backend="foreach", groups=2)
        yield Training(variant, base, F32, event="resume")
        yield Training(variant, base, F32, "halves", options={"skip_nonfinite": True}, event="nonfinite")
        yield Training(variant, base, BF16, options={"stochastic_rounding": True})
        yield Training(variant, "adamw", F32, "halves", gap="second")
        yield Training(variant, base, F32, layout="gaps")
    for gap, way in itertools.product(GAPS, ("closure", "halves")):
        yield Training(way=way, gap=gap)
    for event, variant in itertools.product(EVENTS, ("sam", "gsam", "msam")):
        if variant == "msam" and event == "restore":
            continue
        yield Training(variant, event=event, way="halves" if event == "nonfinite" else "closure")
    for base, event in itertools.product(("adamw", "nadam"), ("resume", "pickle", "error")):
        yield Training("sam", base, BF16, event=event)
    for dtype, size in itertools.product((F32, F64, BF16), (1, 5000)):
        for options in ({"assume_no_alias": True}, {"assume_no_alias": True, "optimizer_in_backward": True}):
            yield Training("sam", "sgd", dtype, size=size, options=options)
            yield Training("asam", "adamw", dtype, "halves", size=size, options=options)
        yield Training("sam", "sgd", dtype, size=size, options={"assume_no_alias": True}, event="error")
    for way, dtype in itertools.product(("context", "halves"), (F32, BF16)):
        yield replace(plain, way=way, dtype=dtype, layout="channels last")
        yield replace(plain, way=way, dtype=dtype, options={"maximize": True}, groups=2)


def cases() -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    """Yield the name of each training, and the function that runs it and returns its hash."""
    trainings = {training.name: training for training in _trainings()}
    for name, training in trainings.items():
        yield name, training.run
