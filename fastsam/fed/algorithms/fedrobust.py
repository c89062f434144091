"""FedRobust: Reisizadeh, Farnia, Pedarsani and Jadbabaie, "Robust Federated Learning: The Case of Affine Distribution
Shifts", NeurIPS 2020 (FLRA objective; gradient descent-ascent)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, Client, ClientResults, Round, State, Upload, hparam
from fastsam.fed.common.checks import choice, integer, number
from fastsam.fed.models.pixels import Pixels

FORMS = ("full", "channel", "diag")
FULL_UP_TO = 1024  # inputs; above, the default is "channel"


@dataclass(frozen=True)
class FedRobust(Algorithm):
    """Local SGD on inputs that an affine map shifts. Each client trains its map by gradient ascent.

        f_i(w, Lam, delta) = loss(model_w(Lam*x + delta), y) - lam*||Lam - I||^2 - lam*||delta||^2
        w <- w - lr * (grad_w f_i + weight_decay*w)
        Lam_i <- Lam_i + eta_2*grad_Lam f_i,  delta_i <- delta_i + eta_2*grad_delta f_i

    All gradients of a step are taken at the same point. The maps start at the identity and stay with their clients. The
    server's step is FedAvg's. The defaults are our choice, because no settings are published. Per round and client 1 P
    down and 1 P up; state: w, and Lam, delta on every client (d^2 + d numbers for d inputs). One backward pass a step,
    and one more for every further ascent step.

    Args:
        lam: weight of the penalty.
        eta_2: learning rate of the map; None for the round's learning rate.
        ascent_steps: steps of the map per step of w. The last one shares its backward pass with w.
        form: Lam is a "full" matrix `[d, d]` over the d numbers of an input, a "channel" matrix `[c, c]`, or a "diag"
            vector `[d]`. None for "full" up to 1024 inputs, else "channel". delta is `[d]`, for "channel" `[c]`.
        radius: (e1, e2) for the constraints ||Lam - I|| <= e1 and ||delta|| <= e2 in place of the penalty.
    """

    lam: float = hparam(1.0, number, at_least=0)
    eta_2: float | None = None
    ascent_steps: int = hparam(1, integer, at_least=1)
    form: str | None = hparam(None, choice, (*FORMS, None))
    radius: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta_2 is not None:
            number("eta_2 (None for the local learning rate)", self.eta_2, at_least=0)
        if self.radius is not None:
            object.__setattr__(self, "radius", _pair(self.radius))

    def uses_lr(self) -> bool:
        return self.eta_2 is None

    def train_client(self, client: Client, server: State, state: State, round: Round) -> Mapping[str, Tensor]:
        eta_2 = round.lr if self.eta_2 is None else self.eta_2
        input_map: InputMap | None = None
        for x, y in client.batches():
            if isinstance(client.model, Pixels):
                x = client.model.normalise(x)  # the map works on numbers, and the model takes them as they are
            if input_map is None:
                input_map = self.input_map(x, state)
            for _ in range(self.ascent_steps - 1):
                leaves = input_map.leaves()
                loss = client.loss(leaves.apply(x), y)
                ascent = torch.autograd.grad(loss, (leaves.Lam, leaves.delta))
                client.backward_passes += 1
                input_map = input_map.ascend(eta_2, *ascent)
            leaves = input_map.leaves()
            client.step(leaves.apply(x), y)
            input_map = input_map.ascend(eta_2, _gradient(leaves.Lam), _gradient(leaves.delta))
        assert input_map is not None  # every client has a batch
        return {"Lam": input_map.Lam, "delta": input_map.delta}

    def input_map(self, x: object, state: State) -> InputMap:
        """Return the client's map, for inputs like `x` `[n, ...]`.

        Raises:
            ValueError: the inputs are not a tensor of floating-point numbers.
        """
        if not isinstance(x, Tensor):
            raise ValueError(
                "FedRobust, which trains a map of the inputs, needs inputs x of pairs (x, y), but the samples come in "
                "batches. Use another algorithm"
            )
        if not x.is_floating_point():
            works = "FedRobust cannot train on token ids"
            if x.dtype == torch.uint8:
                works = "for images of bytes the model must be a fastsam.fed.models.Pixels(model, mean, std)"
            raise ValueError(f"an input map needs floating-point inputs, got {x.dtype}; {works}")
        inputs, channels = prod(x.shape[1:]), x.shape[1] if x.dim() > 2 else 1
        form = self.form or ("full" if inputs <= FULL_UP_TO else "channel")
        size = channels if form == "channel" else inputs
        Lam = torch.ones(size) if form == "diag" else torch.eye(size)
        Lam, delta = state.get("Lam", Lam), state.get("delta", torch.zeros(size))
        return InputMap(form, self.lam, self.radius, Lam.to(x), delta.to(x))

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state, upload = super().finish(server, client, results, round)
        return {**state, **results.extra}, upload


@dataclass(frozen=True)
class InputMap:
    """An affine map of the inputs, `x -> Lam*x + delta`.

    Args:
        form: one of `FORMS`.
        lam: weight of the penalty.
        radius: bounds in place of the penalty, or None.
        Lam: factor of the inputs, `[d, d]`, `[c, c]` or `[d]`.
        delta: shift of the inputs, `[d]` or `[c]`.
    """

    form: str
    lam: float
    radius: tuple[float, float] | None
    Lam: Tensor
    delta: Tensor

    def leaves(self) -> InputMap:
        """Return the same map, whose tensors require gradients."""
        return replace(self, Lam=self.Lam.detach().requires_grad_(), delta=self.delta.detach().requires_grad_())

    def apply(self, x: Tensor) -> Tensor:
        """Return the mapped inputs, of the shape of `x`."""
        Lam, delta = self.Lam, self.delta
        if self.form == "channel" and x.dim() > 2:
            return torch.einsum("ij,nj...->ni...", Lam, x) + delta.view(-1, *[1] * (x.dim() - 2))
        flat = x.flatten(1) if x.dim() > 1 else x[:, None]
        if self.form == "full":
            flat = flat @ Lam.T
        else:
            flat = flat * (Lam if self.form == "diag" else Lam[0])
        return (flat + delta).view(x.shape)

    def ascend(self, lr: float, grad_Lam: Tensor, grad_delta: Tensor) -> InputMap:
        """Return the map after one step of ascent along the gradients of the loss."""
        Lam, delta = self.Lam, self.delta
        identity = torch.ones_like(Lam) if self.form == "diag" else torch.eye(len(Lam)).to(Lam)
        if self.radius is None:
            grad_Lam, grad_delta = grad_Lam - 2 * self.lam * (Lam - identity), grad_delta - 2 * self.lam * delta
        Lam, delta = Lam + lr * grad_Lam, delta + lr * grad_delta
        if self.radius is not None:
            Lam = identity + _project(Lam - identity, self.radius[0])
            delta = _project(delta, self.radius[1])
        return replace(self, Lam=Lam, delta=delta)


def _gradient(leaf: Tensor) -> Tensor:
    """Return the gradient of a tensor, 0 if the loss does not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _project(x: Tensor, radius: float) -> Tensor:
    """Return `x` with its norm reduced to `radius` if it is larger."""
    return x * (radius / x.norm().clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=1.0)


def _pair(radius: object) -> tuple[float, float]:
    """Return (e1, e2), also from a list, because JSON and TOML have no tuples. Raises ValueError for anything else."""
    if isinstance(radius, (str, bytes)) or not isinstance(radius, Sequence) or len(radius) != 2:
        raise ValueError(f"radius must be two numbers [e1, e2], the largest ||Lam - I|| and ||delta||, got {radius!r}")
    return number("radius[0]", radius[0], at_least=0), number("radius[1]", radius[1], at_least=0)
