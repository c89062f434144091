"""FusedSAM in skorch, which gives `step` a closure, compared with the same steps in a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastsam import GSAM, FusedSAM
from tests.helpers.libraries import library
from tests.helpers.sam_oracle import same_bits

skorch = library("skorch")

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
OPTIONS = {"rho": 0.1, "lr": 0.1, "momentum": 0.9}


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def trained_by_skorch(**options: object) -> nn.Module:
    net = skorch.NeuralNetClassifier(
        tiny_model(), criterion=nn.CrossEntropyLoss, max_epochs=2, batch_size=8, train_split=None, verbose=0,
        optimizer=FusedSAM, optimizer__base_optimizer=torch.optim.SGD, iterator_train__shuffle=False,
        **{f"optimizer__{name}": value for name, value in options.items()},
    )  # fmt: skip
    net.fit(X.numpy(), Y.numpy())
    return net.module_


@pytest.mark.shows("skorch", "`NeuralNetClassifier(optimizer=FusedSAM)`: the steps of a plain loop", "works")
def test_the_steps_of_a_plain_loop() -> None:
    expected = tiny_model()
    opt = FusedSAM(expected.parameters(), torch.optim.SGD, **OPTIONS)
    for _ in range(2):
        for x, y in zip(X.split(8), Y.split(8)):
            opt.step(lambda x=x, y=y: nn.functional.cross_entropy(expected(x), y).backward())
    assert same_bits(list(trained_by_skorch(**OPTIONS).parameters()), list(expected.parameters()))


def test_steps_before_sam_take_one_pass() -> None:
    options, calls = {**OPTIONS, "start": 5}, []
    expected = tiny_model()
    opt = FusedSAM(expected.parameters(), torch.optim.SGD, **options)
    for x, y in [*zip(X.split(8), Y.split(8))] * 2:
        opt.step(lambda x=x, y=y: nn.functional.cross_entropy(expected(x), y).backward())
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module) is nn.Tanh))
    try:
        trained = trained_by_skorch(**options)
    finally:
        hook.remove()
    assert same_bits(list(trained.parameters()), list(expected.parameters()))
    assert sum(calls) == 5 + 2 * 3


@pytest.mark.shows("skorch", "`optimizer__variant` sets the variant", "works")
def test_options_go_through_its_names() -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "rho"}
    small_rho, large = (trained_by_skorch(variant=GSAM(rho=rho, alpha=0.4), **options) for rho in (0.05, 0.5))
    assert not same_bits(list(small_rho.parameters()), list(large.parameters()))
