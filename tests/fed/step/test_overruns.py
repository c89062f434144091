"""No run trains a convolution of torch's that writes past its memory: seen by an allocator that looks behind every
block."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.places import ROOT
from tools import conv_overrun

SCAN = ROOT / "tools" / "conv_overrun.py"
# What an instruction set beyond it would do is not what most processors do; where it is missing, oneDNN takes what
# there is.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the allocator stands before glibc's, and is compiled"
)

COUNT = """
import ctypes, os
import torch
from torch import nn
loaded = ctypes.CDLL(os.environ["LD_PRELOAD"])
overruns = ctypes.c_size_t.in_dll(loaded, "overruns")
"""

ONE_TOO_MANY = """
loaded.malloc.restype, loaded.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for count in (100, 101):
    block = loaded.malloc(100)
    ctypes.memset(block, 1, count)
    loaded.free(block)
    print(overruns.value)
"""

# 3x3, then the shortcut of a narrow ResNet, as they come and in channels_last; one way of training clients each.
RUNS = """
from fastsam import fed
torch.manual_seed(0)
convolutions = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 1, stride=2), nn.ReLU()
model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 3))
data = [(torch.randn(32, 2, 8, 8), torch.arange(32) % 3) for _ in range(3)]
one, two = {"executor": "sequential"}, {"executor": "threads", "slots": 2}
for own, options in ((torch.contiguous_format, one), (torch.channels_last, two)):
    model = model.to(memory_format=own)
    fed.run(model, data, fed.FedSAM(rho=0.1), rounds=1, participation=1.0, batch_size=16, **options)
    print(overruns.value)
"""


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("canary") / "canary.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, ROOT / "tools" / "canary.c"], check=True)
    return str(library)


def counted(code: str, canary: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COUNT + code],
        env=os.environ | AVX2 | {"LD_PRELOAD": canary},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def scan(*arguments: str) -> None:
    done = subprocess.run([sys.executable, SCAN, *arguments], env=os.environ | AVX2, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 let through" in done.stdout


@pytest.mark.slow
def test_one_byte_too_many_is_seen(canary):
    assert counted(ONE_TOO_MANY, canary) == ["0", "1"]


def test_a_narrow_shortcut_is_trained_within_its_memory(canary):
    assert set(counted(RUNS, canary)) == {"0"}


@pytest.mark.slow
def test_what_the_rule_lets_through_writes_within_its_memory():
    scan("--quick", "--isa", "AVX2", "--threads", "1")


@pytest.mark.slow
@pytest.mark.parametrize("isa", conv_overrun.instruction_sets())
def test_every_convolution_writes_within_its_memory(isa):
    scan("--isa", isa)
