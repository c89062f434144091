"""The memory format of a run's weights changes no value beyond rounding, and nothing that a user is given; freed memory
stays on a CPU."""

import copy
import os
import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastsam import fed
from fastsam.arena import Arena, Layout
from fastsam.fed import models
from fastsam.fed.executors.gradient_passes import ModelPasses
from fastsam.fed.rundir.checkpoint import RunDirectoryError
from fastsam.fed.update import memory_format
from fastsam.fed.update.model_copy import Replica, trainable
from tests.helpers import oracle

LAST = torch.channels_last
CPU = torch.device("cpu")


class Small(nn.Module):
    """Convolutions of one input channel, with a stride, grouped and 1x1; max-pooling and a linear layer. Inputs [n, 1,
    12, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.grouped, self.point = nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.Conv2d(6, 8, 1)
        self.out = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.elu(self.second(F.elu(self.first(x))))
        return self.out(F.max_pool2d(self.point(F.elu(self.grouped(x))), 2).flatten(1))


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Small().to(dtype)


def clients(dtype: torch.dtype, count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    sizes = [7 + 4 * i for i in range(count)]
    return [
        (torch.randn(n, 1, 12, 12, generator=draw, dtype=dtype), torch.randint(0, 3, (n,), generator=draw))
        for n in sizes
    ]


def run(model: nn.Module, format: str, algorithm: fed.Algorithm | None = None, **options: object) -> fed.Result:
    data = clients(trainable(model)[0].dtype)
    settings = {"rounds": 2, "participation": 1.0, "batch_size": 5, "lr": 0.1, "momentum": 0.5, "test": data[0]}
    algorithm = fed.FedSAM(rho=0.1) if algorithm is None else algorithm
    return fed.run(model, data, algorithm, memory_format=format, **(settings | options))


def largest_change(a: fed.Result, b: fed.Result) -> float:
    return oracle.movement(a.model, b.model)


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [p.stride() for p in model.parameters()]


# ---- values


@pytest.mark.parametrize("algorithm", [fed.FedAvg(), fed.FedSAM(rho=0.1), fed.SCAFFOLD(), fed.FedSMOO()], ids=repr)
def test_formats_agree_to_rounding(algorithm):
    plain, last = (run(small_model(torch.float64), f, copy.copy(algorithm)) for f in ("preserve", "channels_last"))
    assert largest_change(plain, last) < 1e-12
    for a, b in zip(plain.history, last.history, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-12)
        assert a["test_loss"] == pytest.approx(b["test_loss"], rel=1e-12)


def test_auto_is_the_format_that_the_rule_names_to_the_bit():
    auto, last, plain = (run(small_model(), f) for f in ("auto", "channels_last", "preserve"))
    assert largest_change(auto, last) == 0 and auto.history[-1]["train_loss"] == last.history[-1]["train_loss"]
    assert 0 < largest_change(auto, plain) < 1e-5  # 0 would mean that the format never reached the convolutions
    assert largest_change(run(small_model(torch.float64), "auto"), run(small_model(torch.float64), "preserve")) == 0


def test_stacked_clients_are_not_trained_in_channels_last():
    with pytest.raises(ValueError, match="memory_format='channels_last' is for .*memory_format='auto'"):
        run(small_model(), "channels_last", executor="vmap")


# ---- what the user has and gets


@pytest.mark.parametrize("format", memory_format.FORMATS)
@pytest.mark.parametrize("own_format", [torch.contiguous_format, LAST], ids=str)
def test_the_models_own_order_comes_back(format, own_format):
    model = small_model().to(memory_format=own_format)
    original, values = strides(model), [p.detach().clone() for p in model.parameters()]
    result = run(model, format)
    assert strides(result.model) == original == strides(model)
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))


def test_training_and_evaluation_both_see_the_format():
    records = set()

    class Watching(Small):
        def forward(self, x):
            records.add(
                (self.training, self.second.weight.stride() == self.second.weight.to(memory_format=LAST).stride())
            )
            return super().forward(x)

    run(Watching(), "auto", rounds=1)
    assert records == {(True, True), (False, True)}


def test_tied_weights_stay_tied_and_the_rest_keeps_its_order():
    model = small_model()
    model.twin = nn.Conv2d(6, 8, 1)
    model.twin.weight = model.point.weight
    model.register_buffer("map", torch.zeros(1, 2, 3, 3))
    result = memory_format.reorder(model, "channels_last", CPU, stacked=False)
    assert result.twin.weight is result.point.weight and result is not model
    assert result.map.stride() == model.map.stride() and result.out.weight.stride() == model.out.weight.stride()
    for p in result.parameters():
        assert p.dim() != 4 or p.stride() == torch.empty(p.shape, memory_format=LAST).stride()
    assert all(torch.equal(a, b) for a, b in zip(result.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_lie_in_the_order_of_the_flat_row(dtype):
    """Kernels read gradients where autograd left them, element by element of the row: another order would mix elements
    up."""
    model = memory_format.reorder(small_model(dtype), "channels_last", CPU, stacked=False)
    layout = Layout.from_tensors(trainable(model))
    replica = Replica(model, layout, Arena(layout).field("w", dtype)[0])
    x, y = clients(dtype)[3]
    _, gradients = ModelPasses(replica, layout, F.cross_entropy).run(x, y)
    row = layout.gather(gradients.tensors, torch.zeros(layout.row_size, dtype=dtype))
    for g, segment in zip(gradients.tensors, layout.segments, strict=True):
        in_memory = g.as_strided((segment.length,), (1,))
        assert torch.equal(in_memory, row[segment.offset : segment.offset + segment.length])


# ---- the rule

RULED = {
    "CNN": (lambda: models.build("cnn", (1, 28, 28), 10, 0), "channels_last"),
    "EMNIST": (lambda: models.build("emnist_cnn", (1, 28, 28), 62, 0), "channels_last"),
    "LeNet": (lambda: models.build("lenet", (3, 32, 32), 10, 0), "channels_last"),
    "narrow ResNet": (
        lambda: models.build("resnet18_gn", (3, 32, 32), 10, 0, widths=(16, 32, 64, 128)),
        "channels_last",
    ),
    "ResNet-18": (lambda: models.build("resnet18_gn", (3, 32, 32), 10, 0), "preserve"),
    "dense": (lambda: models.build("mlp", (1, 8, 8), 10, 0), "preserve"),
    "float64": (lambda: small_model(torch.float64), "preserve"),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten()), "preserve"),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.Flatten()), "preserve"),
    "on meta": (lambda: small_model().to("meta"), "channels_last"),
}


@pytest.mark.parametrize("name", RULED)
def test_the_rule(name):
    make, expected = RULED[name]
    model = make()
    assert memory_format.rule(model, CPU, stacked=False)[0] == expected
    assert memory_format.order(memory_format.reorder(model, "auto", CPU, stacked=False)) == expected
    assert memory_format.rule(model, torch.device("cuda"), stacked=False)[0] == "preserve"
    assert memory_format.rule(model, CPU, stacked=True)[0] == "preserve"


def test_a_model_without_maps_is_not_copied():
    model = models.build("mlp", (1, 8, 8), 10, 0)
    assert memory_format.reorder(model, "channels_last", CPU, stacked=False) is model
    conv3d = nn.Sequential(nn.Conv3d(2, 3, 3))
    assert memory_format.reorder(conv3d, "channels_last", CPU, stacked=False) is conv3d


def test_the_order_tells_apart_what_bits_depend_on():
    # Contiguous in both formats, as torch says; convolutions go by the strides.
    one_channel = nn.Sequential(nn.Conv2d(1, 4, 3))
    assert memory_format.order(one_channel) == "preserve"
    assert memory_format.order(copy.deepcopy(one_channel).to(memory_format=LAST)) == "channels_last"
    mixed_model = small_model()
    mixed_model.second.weight.data = mixed_model.second.weight.data.to(memory_format=LAST)
    assert memory_format.order(mixed_model) == {"second.weight": [36, 1, 12, 4]}


# ---- convolutions whose gradient torch writes past its memory


def narrow(channels: int = 4, **options: object) -> nn.Module:
    """A shortcut of a narrow ResNet between two convolutions. Inputs [n, 1, 8, 8]."""
    convs = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, 8, 1, **({"stride": 2} | options))
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.point = nn.Conv2d(1, 4, 3), nn.Parameter(torch.randn(8, 4, 1, 1))


AT_RISK = {
    "shortcut": (narrow, "'2'"),
    "one stride": (lambda: narrow(20, stride=(1, 2)), "'2'"),
    "a convolution itself": (lambda: nn.Conv2d(3, 8, 1, stride=2), "'the model'"),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 1, stride=2))), "'0'"),
    "a stride that cannot be seen": (Functional, "'the model'"),
}
SOUND = {
    "8 channels": lambda: narrow(8),
    "no stride": lambda: narrow(stride=1),
    "3x3": lambda: nn.Sequential(nn.Conv2d(4, 8, 3, stride=2)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, stride=2))),
    "transposed": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 3, 1, stride=2)),
}


@pytest.mark.parametrize("name", AT_RISK)
def test_models_at_risk_are_kept_out_of_channels_last(name):
    make, layer = AT_RISK[name]
    model, original = make(), make().to(memory_format=LAST)
    for module in (model, original):
        assert layer in memory_format.rule(module, CPU, stacked=False)[1]
        for is_stacked in (False, True):
            assert memory_format.order(memory_format.reorder(module, "auto", CPU, is_stacked)) == "preserve"
    assert memory_format.reorder(model, "preserve", CPU, stacked=False) is model
    for module, format in ((model, "channels_last"), (original, "channels_last"), (original, "preserve")):
        words = f"memory_format='{format}' would .* past its memory .*{layer}.*Use memory_format='auto'"
        with pytest.raises(ValueError, match=words):
            memory_format.reorder(module, format, CPU, stacked=False)
    cuda = torch.device("cuda")
    assert memory_format.order(memory_format.reorder(model, "channels_last", cuda, stacked=False)) == "channels_last"
    assert memory_format.order(memory_format.reorder(model.double(), "channels_last", CPU, False)) == "channels_last"


def normed(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A frozen convolution, and a trained normalisation after it. Inputs [n, 1, 12, 12]."""
    conv = nn.Conv2d(1, 4, 3).requires_grad_(False)
    return nn.Sequential(conv, nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("own_format", [torch.contiguous_format, LAST], ids=str)
def test_a_group_norm_after_frozen_convolutions_is_kept_out_of_channels_last(own_format, dtype):
    """Its backward pass in that order would end the process, so the refusals come first."""
    model = normed(dtype).to(memory_format=own_format)
    for format in ("channels_last", *["preserve"] * (own_format is LAST)):
        with pytest.raises(ValueError, match=r"ends the process for '1' .*Use memory_format='auto'"):
            memory_format.reorder(model, format, CPU, stacked=False)
    assert memory_format.order(memory_format.reorder(model, "auto", CPU, stacked=False)) == "preserve"
    run(model, "auto")


def test_group_norms_of_other_models_are_not_kept_out():
    trained, frozen, dense = normed().requires_grad_(True), normed(), normed()[3:]
    frozen[1].requires_grad_(False)
    for model in (trained, frozen, dense):
        assert memory_format.danger(model, CPU) == ""


@pytest.mark.parametrize("name", SOUND)
def test_models_that_are_not_at_risk_are_not_kept_out(name):
    model = SOUND[name]()
    assert memory_format.rule(model, CPU, stacked=False)[0] == "channels_last"
    result = memory_format.reorder(model, "channels_last", CPU, stacked=False)
    assert all(
        p.dim() != 4 or p.stride() == torch.empty_like(p, memory_format=LAST).stride() for p in result.parameters()
    )


# ---- resuming


def test_a_run_is_resumed_in_its_own_format(tmp_path):
    full_run = run(small_model(), "auto", rounds=3)
    run(small_model(), "auto", rounds=1, run_dir=tmp_path / "run")
    words = "another memory_format: it was started with 'channels_last', now it is 'preserve'"
    with pytest.raises(RunDirectoryError, match=words):
        run(small_model(), "preserve", rounds=3, run_dir=tmp_path / "run", resume=True)
    # "auto" resulted in channels_last.
    resumed_result = run(small_model(), "channels_last", rounds=3, run_dir=tmp_path / "run", resume=True)
    assert largest_change(resumed_result, full_run) == 0


# ---- freed memory

# A step works with blocks of 4 MiB, several at once: more than the heap's end may keep when only such blocks have come
# and gone.
FAULTS = """
import resource, sys
import torch
from torch import nn
from fastsam import fed
from fastsam.fed.loop import run
if sys.argv[1] == "without":
    run.keep_freed = lambda device: None
layers = nn.Conv2d(1, 16, 1), nn.Tanh(), nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
model = nn.Sequential(*layers)
data = [(torch.randn(20, 1, 56, 56), torch.arange(20) % 3) for _ in range(2)]
seen = []
count = lambda record: seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
fed.run(model, data, fed.FedAvg(), rounds=8, participation=1.0, batch_size=20, progress=count)
print(*(b - a for a, b in zip(seen, seen[1:])))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are those of glibc")
@pytest.mark.parametrize(("mode", "low", "high"), [("with", 0, 1000), ("without", 2000, sys.maxsize)])
def test_steps_do_not_fault_their_memory_in_again(mode, low, high):
    """A block has 980 pages of 4 KiB."""
    settings = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(settings)}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
    process = subprocess.run([sys.executable, "-c", FAULTS, mode], **options)
    assert process.returncode == 0, process.stderr
    assert low <= sorted(map(int, process.stdout.split()))[3] < high  # the median of 7 rounds


def test_memory_is_only_kept_for_runs_on_the_cpu(monkeypatch):
    monkeypatch.setattr(memory_format.torch, "empty", lambda *shape, **options: pytest.fail("nothing is to be taken"))
    memory_format.keep_freed(torch.device("cuda"))
    monkeypatch.setattr(memory_format.sys, "platform", "darwin")
    memory_format.keep_freed(CPU)


RESIDENT = """
import torch
from torch import nn
from fastsam import fed
from fastsam.fed.update import memory_format

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

torch.set_num_threads(1)
torch.manual_seed(0)
"""
HOLES = """
memory_format.keep_freed(torch.device("cpu"))
blocks = [torch.ones(2**20 if i % 2 else 2**17, dtype=torch.uint8) for i in range(200)]
del blocks[1::2]
before = resident()
memory_format.return_freed()
print(resident() - before)
"""
ROUNDS = """
sizes, data = [], [(torch.randn(n, 40), torch.randint(10, (n,))) for n in torch.randint(8, 20, (40,)).tolist()]
model = nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
fed.run(
    model, data, fed.FedSMOO(), rounds=192, participation=0.25, batch_size=4, executor="vmap",
    progress=lambda record: sizes.append(resident()),
)
print(sizes[-1] - sizes[31])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is glibc's")
@pytest.mark.parametrize(
    ("code", "most"), [(HOLES, -90), pytest.param(ROUNDS, 60, marks=pytest.mark.slow)], ids=["holes", "rounds"]
)
def test_freed_memory_does_not_add_up(code, most):
    """100 blocks of 1 MiB between others that stay, and rounds of which each frees such blocks (115 MiB more
    without a look at the heap)."""
    settings = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(settings)}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
    process = subprocess.run([sys.executable, "-c", RESIDENT + code], **options)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < most  # MiB
