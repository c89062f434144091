"""Another library's SAM: the same trajectories, and its own tests run on FusedSAM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsam import FusedSAM
from tests.helpers.places import ROOT
from tests.helpers.sam_oracle import backward, make_parameters

RUNNER = ROOT / "tests" / "peer" / "run_pytorch_optimizer.py"
SDIST = Path(os.environ.get("FASTSAM_PEER_SDIST", ROOT / "build" / "peer" / "pytorch_optimizer-4.1.0"))

OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "adaptive": True, "rho": 0.5}),
    (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.05, "adaptive": True, "rho": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.02}),
]


@pytest.mark.parametrize(("base", "options"), OPTIONS)
@pytest.mark.parametrize("style", ["closure", "halves"])
def test_the_same_trajectory_as_pytorch_optimizer(base: Any, options: dict[str, Any], style: str) -> None:
    """30 steps in float64, each on its own: the losses they see and the weights they end with. The default of eta makes
    them the same ASAM."""
    library = pytest.importorskip(
        "pytorch_optimizer", reason="pytorch-optimizer is not installed; it is in the extra `test`"
    )

    def train(make: Any) -> tuple[list[float], list[torch.Tensor]]:
        params, losses = make_parameters([(5, 3), (8,), (2, 2, 2)], torch.float64), []
        opt = make(params)
        for step in range(30):
            losses.append(float(backward(params, step)))
            if style == "closure":
                opt.step(lambda step=step: backward(params, step))
            else:
                opt.first_step(zero_grad=True)
                backward(params, step)
                opt.second_step(zero_grad=True)
        return losses, params

    theirs, their_params = train(lambda p: library.SAM(p, base, foreach=False, **options))
    ours, our_params = train(lambda p: FusedSAM(p, base, **options))
    # a difference in the last bit grows over 30 steps
    torch.testing.assert_close(
        torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64), rtol=1e-7, atol=1e-7
    )
    for p, q in zip(our_params, their_params):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-7)


def test_the_tests_of_pytorch_optimizer_pass() -> None:
    if not SDIST.exists():
        pytest.skip(
            f"its source distribution is not here: `python {RUNNER.relative_to(ROOT)}` fetches it and runs its tests, "
            f"or name an unpacked one "
            "in FASTSAM_PEER_SDIST"
        )
    done = subprocess.run([sys.executable, str(RUNNER), str(SDIST), "-q"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "19 tests of pytorch-optimizer" in done.stdout
