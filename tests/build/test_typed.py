"""The annotations as a user's type checker sees them: `mypy --strict` over a script, beside the built wheel in an environment of its own."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.installing import build_wheel, copy_checkout, install, layered, require_pip_and_setuptools, run

SCRIPT = """
import torch
from torch import Tensor, nn

import fastsam
from fastsam import FusedSAM, fed, variants
from fastsam.integrations.accelerate import sam_of
from fastsam.integrations.lightning import sam_callback
from fastsam.integrations.transformers import SAMTrainer
from fastsam_kernels import build

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
opt = FusedSAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, sam=variants.GSAM(rho=0.05, alpha=0.4))


def closure() -> Tensor:
    loss: Tensor = model(torch.randn(2, 64)).square().mean()
    torch.autograd.backward(loss)
    return loss


opt.first_step(zero_grad=True)
opt.second_step()
opt.step(closure)
with opt.perturbed(), fastsam.frozen_batchnorm_stats(model):
    closure()
norm: Tensor | None = opt.grad_norm
phase: str = opt.phase
sam: FusedSAM = sam_of(opt)
callbacks = [sam_callback(), SAMTrainer]
serving: str = fastsam.backend("cpu")
message: str = build.installed().message

data = fed.digits(clients=5, alpha=0.3)
result = fed.run(model, data, fed.FedSAM(rho=0.05), rounds=1, callbacks=[fed.callbacks.EarlyStopping("accuracy")])
accuracy: float = result.summary()["accuracy_final"]
reveal_type(opt)
reveal_type(result)
"""
WRONG = {  # by what mypy says of it
    'opt.first_step(zero_grad="yes")': '"zero_grad" to "first_step" of "FusedSAM" has incompatible type "str"; expected "bool"',
    'fed.run(model, data, fed.FedSAM(), rounds="many")': 'Argument "rounds" to "run" has incompatible type "str"',
    'fastsam.backend().no_such_method()': '"str" has no attribute "no_such_method"',
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lacking", [None, "py.typed"])
def test_a_users_script_is_checked(lacking: str | None, tmp_path: Path) -> None:
    """Without the marker files, which the wheel of the second case lacks, a checker takes no notice of the annotations."""
    require_pip_and_setuptools()
    pytest.importorskip("mypy", reason="mypy is not installed: the extra `dev` has it")
    wheel, _ = build_wheel(copy_checkout(tmp_path / "checkout"), tmp_path / "out", FASTSAM_NATIVE="0")
    assert {"fastsam/py.typed", "fastsam_kernels/py.typed"} <= set(zipfile.ZipFile(wheel).namelist())
    env = layered(tmp_path / "env")
    install(env, wheel, cwd=tmp_path)
    for marker in env.parent.parent.glob(f"lib/python3*/site-packages/fastsam*/{lacking}"):
        marker.unlink()
    (tmp_path / "script.py").write_text("\n".join([SCRIPT, *WRONG]))
    strict = (sys.executable, "-m", "mypy", "--strict", "--python-executable", env, "script.py")
    printed = run(*strict, cwd=tmp_path, ok=False)
    errors = [line for line in printed.splitlines() if " error: " in line]
    if lacking:
        assert "module is installed, but missing library stubs or py.typed marker" in printed
        return
    assert len(errors) == len(WRONG) and all(any(said in line for line in errors) for said in WRONG.values()), printed
    assert re.findall(r'Revealed type is "(.*)"', printed) == [
        "fastsam.optim.fused_sam.FusedSAM",
        "fastsam.fed.rundir.result.Result",
    ]
