"""The second model of a client that learns from a mixture (see `Mixture`), in its own row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastsam.fed.executors.base import Setup, to_device
from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.executors.kernel_calls import Form, Rows
from fastsam.fed.step.local_update import LocalUpdate
from fastsam.fed.step.mixture import Mixture
from fastsam_kernels.hparams import HParam

_PLAIN = LocalUpdate()


class Beside:
    """v and alpha of one client at a time. Its updates follow the local update rule, with alpha for the weight a of the
    gradient."""

    def __init__(self, setup: Setup) -> None:
        self.rows = Rows(setup, 1)
        self.form = Form(self.rows, slice(0, 1))
        self.form.arrange(_PLAIN.constants.variant)

    def begin_(self, start: Tensor, mixture: Mixture, row: int) -> None:
        """start: `[row_size]`, v. row: the client's in alpha."""
        hparams = self.rows.hparams
        hparams[0, 0] = to_device(torch.tensor(self.rows.numbers(_PLAIN, 0.0), dtype=torch.float64), hparams.device)
        self.form.begin_(start)
        self.start, self.rate = start, mixture.rate
        self.alpha = mixture.alpha[row : row + 1].to(hparams, copy=True)

    def step_(self, first: bool, shared: Form, run: Callable[[], Gradients]) -> None:
        """A step of v. first: of the round. shared: w, before its own step, and so again afterwards. run: the gradient
        at the weights there."""
        w, v = shared.z.clone(), self.form.z
        shared.z.lerp_(v, self.alpha.to(v.dtype))
        g = run()
        shared.z.copy_(w)
        hparams = self.form.hparams[0, 0]
        hparams[HParam.G2_COEF], hparams[HParam.LR] = self.alpha[0], shared.hparams[0, 0, HParam.LR]
        if first and self.rate:
            views = shared.layout.views((v - w)[0])
            slope = sum((views[i].double() * d.double()).sum() for i, d in zip(g.slots, g.tensors, strict=True))
            self.alpha = (self.alpha - self.rate * slope).clamp(0, 1)
        self.form.update_(g, None)
