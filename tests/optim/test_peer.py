"""Another library's SAM: the same trajectories."""

from typing import Any

import pytest
import torch
from torch import nn

from fastsam import SAM, FusedSAM
from fastsam.optim.variants import WSAM, LookSAM
from tests.helpers.sam_oracle import backward, make_parameters

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
SHAPES: list[tuple[int, ...]] = [(5, 3), (8,), (2, 2, 2)]
# The base and its options, our variant, their class and its options. Their LookSAM takes norms and projections tensor
# by tensor, so they agree for one tensor. The default of eta makes them the same ASAM.
PEERS: list[tuple[Any, dict[str, Any], SAM, str, dict[str, Any]]] = [
    (SGD, MOMENTUM, SAM(), "SAM", {}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, SAM(0.5, True), "SAM", {"adaptive": True}),
    (ADAMW, {"lr": 0.05, "weight_decay": 0.1}, SAM(), "SAM", {}),
    (torch.optim.Adam, {"lr": 0.05}, SAM(0.5, True), "SAM", {"adaptive": True}),
    (torch.optim.RMSprop, {"lr": 0.02}, SAM(), "SAM", {}),
    *(
        (base, options, sam, type(sam).__name__, more_options)
        for base, options in ((SGD, MOMENTUM), (ADAMW, {"lr": 0.01}))
        for sam, more_options in (
            (WSAM(0.3, gamma=0.8, decouple=False), {"gamma": 0.8, "decouple": False}),
            (WSAM(0.3, gamma=0.8), {"gamma": 0.8}),
            (WSAM(0.3, True, gamma=0.8), {"gamma": 0.8, "adaptive": True}),
            (LookSAM(0.3, k=3, alpha=0.7), {"k": 3, "alpha": 0.7}),
        )
    ),
]


@pytest.mark.parametrize(("base", "options", "sam", "name", "extras"), PEERS)
def test_the_same_trajectory_as_pytorch_optimizer(
    base: Any, options: dict[str, Any], sam: SAM, name: str, extras: dict[str, Any]
) -> None:
    """In float64, each on its own: the losses they see and the weights they end with."""
    library = pytest.importorskip("pytorch_optimizer", reason="not installed; it is in the extra `test`")

    def train(make: Any) -> tuple[list[float], list[torch.Tensor]]:
        params = make_parameters(SHAPES[: 1 if name == "LookSAM" else 3], torch.float64)
        losses, opt = [], make(params)
        for step in range(30 if name == "SAM" else 7):
            losses.append(float(backward(params, step)))
            opt.first_step(zero_grad=True)
            backward(params, step)
            opt.second_step(zero_grad=True)
        return losses, params

    def peer(params: list[nn.Parameter]) -> Any:
        of_class = {"SAM": {"foreach": False}, "WSAM": {"model": nn.ParameterList(params)}}.get(name, {})
        return getattr(library, name)(params=params, base_optimizer=base, rho=sam.rho, **extras, **of_class, **options)

    losses, their_params = train(peer)
    our_losses, our_params = train(lambda p: FusedSAM(p, base, variant=sam, **options))
    # a difference in the last bit grows over the steps; coupled, 4*g2 - 3*g1 multiplies it
    tolerance = {"rtol": 1e-7, "atol": 1e-7} if name == "SAM" else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close([*our_losses, *our_params], [*losses, *their_params], **tolerance)
