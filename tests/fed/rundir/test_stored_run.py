"""A run directory and a config.json that commit 59d46cb wrote, before options were renamed, still resume.

`stored/run` is two rounds of `RUN` with that commit's names: `FedLESAM(first="none", ref="last_round")`, `personal="2"`
and `validation="iid"`. `fastsam run examples/digits.toml --algorithm fedlesam-s --fedlesam-s.ref last_round --rounds 1
--validation iid` wrote `stored/config.json`.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.rundir.checkpoint import RunDirectoryError
from fastsam.lab.config import read, resolve
from tests.helpers import oracle

STORED = Path(__file__).parent / "stored"
RUN: dict[str, Any] = {
    "batch_size": 4, "lr": 0.1, "participation": 1.0, "executor": "sequential", "backend": "reference", "seed": 3,
    "local_parameters": "2", "client_test_split": "iid",
}  # fmt: skip


def start(rounds: int, run_dir: Path, reference: str = "last_round", **options: Any) -> fed.Result:
    generator = torch.Generator().manual_seed(0)
    *clients, test = [
        (torch.randn(n, 3, generator=generator, dtype=torch.float64), torch.randint(2, (n,), generator=generator))
        for n in (6, 8, 5, 7)
    ]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    algorithm = fed.FedLESAM(rho=0.1, initial_perturbation="none", reference=reference)
    return fed.run(model, clients, algorithm, rounds=rounds, test=test, run_dir=run_dir, **RUN, **options)


def test_a_run_directory_resumes(tmp_path: Path) -> None:
    shutil.copytree(STORED / "run", tmp_path / "run")
    resumed_result = start(3, tmp_path / "run", resume=True)
    full_run = start(3, tmp_path / "whole")
    assert len(resumed_result.history) == 3
    assert resumed_result.history[-1]["train_loss"] == pytest.approx(full_run.history[-1]["train_loss"], rel=1e-12)
    assert oracle.difference(resumed_result.model, full_run.model) < 1e-12


def test_another_value_of_a_renamed_option_is_refused_by_its_new_name(tmp_path: Path) -> None:
    shutil.copytree(STORED / "run", tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"another algorithm\.reference: .*'last_round', now it is 'client'"):
        start(3, tmp_path / "run", resume=True, reference="client")


def test_a_config_is_read_with_the_names_of_today() -> None:
    config = resolve(read(STORED / "config.json"))
    assert config.client_test_split == "iid"
    assert config.local_parameters is None
    assert config.privacy == {
        "clip": None, "noise_multiplier": 0.0, "noise": "central", "delta": None, "accountant": "rdp",
    }  # fmt: skip
    assert config.options["reference"] == "last_round" and config.options["initial_perturbation"] == "origin"
