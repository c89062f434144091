"""The small models: shapes, sizes, initial weights that depend only on a seed, and user-defined models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastsam.fed import models
from fastsam.lab.import_paths import import_object
from tests.helpers.fed_runs import vector


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("cnn", (1, 8, 8), 13_706), ("cnn", (8, 8), 13_706), ("cnn", (1, 28, 28), 105_866), ("cnn", (3, 9, 11), None),
        ("mlp", (1, 8, 8), 4_810), ("emnist_cnn", (1, 8, 8), None), ("lenet", (3, 32, 32), 797_962),
        ("lenet", (16, 16), None), ("resnet18_gn", (3, 32, 32), 11_181_642), ("resnet18_gn", (1, 8, 8), None),
    ],
)  # fmt: skip
def test_models_take_their_inputs(name: str, shape: tuple[int, ...], parameters: int | None) -> None:
    model = models.build(name, shape, 10, seed=0)
    assert model(torch.randn(5, *shape)).shape == (5, 10)
    assert not list(model.buffers())
    if parameters is not None:
        assert vector(model).numel() == parameters


def test_initial_weights_are_a_function_of_the_seed_and_leave_the_callers_generator_alone() -> None:
    torch.manual_seed(5)
    old_state = torch.random.get_rng_state()
    a, b, c = (models.build("cnn", (1, 8, 8), 10, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), old_state)
    torch.randn(3)
    assert torch.equal(vector(a), vector(b))
    assert torch.equal(vector(a), vector(models.build("cnn", (1, 8, 8), 10, 1)))
    assert not torch.equal(vector(a), vector(c))


def test_options_reach_the_model() -> None:
    assert models.build("mlp", (4,), 3, 0, hidden=[7, 5])(torch.zeros(1, 4)).shape == (1, 3)
    assert vector(models.build("mlp", (4,), 3, 0, hidden=[])).numel() == 15
    assert vector(models.build("mlp", (4,), 3, 0, hidden=2)).equal(vector(models.build("mlp", (4,), 3, 0, hidden=[2])))
    assert models.build("cnn", (1, 8, 8), 2, 0, channels=[4, 6]).conv2.weight.shape[:2] == (6, 4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn", (3, 8, 8)), ("emnist_cnn", (1, 12, 12)), ("lenet", (3, 16, 16)), ("resnet18_gn", (3, 16, 16))],
)
def test_images_whose_channels_come_last_are_refused(name: str, shape: tuple[int, int, int]) -> None:
    """Their number of values is right, but they would be read as different images."""
    result, x = models.build(name, shape, 4, 0).eval(), torch.randn(5, *shape)
    with pytest.raises(ValueError, match=r"takes images \[n, .*channels come last: x.movedim\(-1, 1\)"):
        result(x.movedim(1, -1))
    with pytest.raises(ValueError, match=r"takes images \[n, .*\]$"):
        result(x[None])
    assert torch.equal(result(x), result(x.flatten(1))) and (shape[0] > 1 or torch.equal(result(x), result(x[:, 0])))
    if name != "resnet18_gn":  # which takes images of three rows
        with pytest.raises(ValueError, match=r"got samples of the shape .*channels come last"):
            models.build(name, (*shape[1:], shape[0]), 4, 0)


def test_the_models_of_the_experiments_have_the_published_sizes() -> None:
    assert vector(models.build("emnist_cnn", (1, 28, 28), 62, 0)).numel() == 1_206_590
    resnet = models.build("resnet18_gn", (3, 32, 32), 100, 0)
    assert vector(resnet).numel() == 11_227_812 and len(list(resnet.parameters())) == 62


def test_emnist_cnn_drops_in_training_only() -> None:
    model, x = models.build("emnist_cnn", (1, 28, 28), 62, 0), torch.randn(4, 1, 28, 28)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    still = models.build("emnist_cnn", (1, 28, 28), 62, 0, dropout=[0.0, 0.0])
    assert torch.equal(still(x), model(x))
    last = models.build("emnist_cnn", (1, 28, 28), 62, 0, dropout=[0.0, 1.0])
    assert torch.equal(last(x), last.out.bias.expand(4, 62))  # nothing reaches the last layer
    first = models.build("emnist_cnn", (1, 28, 28), 62, 0, dropout=[1.0, 0.0])
    assert torch.equal(first(x), first(torch.zeros_like(x))) and not torch.equal(first(x)[0], first.out.bias)


def test_resnet_starts_as_kaiming_normal_of_the_fan_out() -> None:
    model = models.build("resnet18_gn", (3, 32, 32), 10, 0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
        if isinstance(module, nn.GroupNorm):
            assert (module.num_groups, module.eps) == (2, 1e-5)
            assert module.weight.eq(1).all() and module.bias.eq(0).all()


def plain_resnet(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The topology of the publication, block after block, on the model's own weights."""
    values = iter(model.parameters())
    F = nn.functional

    def conv_norm(x: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
        return F.group_norm(F.conv2d(x, next(values), None, stride, padding), 2, next(values), next(values))

    x = F.max_pool2d(F.relu(conv_norm(x, 2, 3)), 3, 2, 1)
    for stage in range(4):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = conv_norm(F.relu(conv_norm(x, stride, 1)), 1, 1)
            x = F.relu(y + (conv_norm(x, stride, 0) if stride == 2 else x))
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), next(values), next(values))


def test_resnet_is_the_published_topology() -> None:
    model = models.build("resnet18_gn", (3, 32, 32), 10, 0).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
        assert torch.allclose(model(x), plain_resnet(model, x), rtol=1e-9)


def test_resnets_other_stem_keeps_the_resolution() -> None:
    model = models.build("resnet18_gn", (3, 16, 16), 10, 0, stem="3x3")
    records = []
    model.blocks.register_forward_pre_hook(lambda _, inputs: records.append(tuple(inputs[0].shape)))
    model(torch.randn(2, 3, 16, 16))
    assert records == [(2, 64, 16, 16)] and model.conv1.weight.shape == (64, 3, 3, 3)
    small_model = models.build("resnet18_gn", (1, 8, 8), 10, 0, widths=[8, 8, 16, 16], stem="3x3")
    assert small_model(torch.randn(3, 1, 8, 8)).shape == (3, 10)


def test_mcmahans_cnn() -> None:
    model = models.build("cnn", (3, 32, 32), 10, 0, channels=[32, 64], hidden=512, kernel=5)
    assert vector(model).numel() == 2_156_490 and model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


OWN = """
from torch import nn
class Plain(nn.Sequential):
    def __init__(self, width=3):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))
def make(in_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_shape[-1] ** 2, classes))
ready = nn.Linear(64, 10)
def wrong(): return 3
"""


def test_a_users_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def own(name: str) -> Any:
        return import_object(f"{tmp_path / 'own.py'}:{name}", "model")

    assert models.build(own("Plain"), (8, 8), 10, 0, width=4)[1].out_features == 4
    result = models.build(own("make"), (8, 8), 10, 3)
    assert torch.equal(vector(result), vector(models.build(own("make"), (8, 8), 10, 3)))
    first, second = models.build(own("ready"), (64,), 10, 0), models.build(own("ready"), (64,), 10, 0)
    assert first is not second and torch.equal(first.weight, second.weight)
    with pytest.raises(ValueError, match="must make a torch.nn.Module, got int"):
        models.build(own("wrong"), (8, 8), 10, 0)
