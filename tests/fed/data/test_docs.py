"""docs/data.md: its configs resolve, its Python runs, its commands and figures are true."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsam.fed import data, models
from fastsam.fed.data import partition
from fastsam.lab import cli, config, experiment
from tests.helpers.places import ROOT
from tests.helpers.small_archives import small_cifar

PAGE = (ROOT / "docs" / "data.md").read_text()
TOML = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"^    (fastsam .*)$", PAGE, re.M)


def test_the_page_has_what_is_tested_here() -> None:
    assert (len(TOML), len(PYTHON), len(COMMANDS)) == (4, 5, 2)


@pytest.mark.parametrize("block", TOML)
def test_its_configs_are_configs(tmp_path: Path, block: str) -> None:
    (tmp_path / "exp.toml").write_text(block)
    made = config.resolve(config.read(tmp_path / "exp.toml"))
    if made.data == "digits-domains":
        built = experiment.build(made)
        assert built.data.held_out == "rot60" and len(built.data) == 15


@pytest.mark.parametrize("block", PYTHON)
def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    (tmp_path / "data").mkdir()
    small_cifar(monkeypatch, tmp_path / "data", 100)
    monkeypatch.chdir(tmp_path)

    def small(data_dir: str, clients: int, classes_per_client: int, **options: object) -> data.FederatedData:
        return data_cifar100(data_dir, clients=2, classes_per_client=2, **options)

    data_cifar100 = data.cifar100
    monkeypatch.setattr(data, "cifar100", small)
    names: dict = {}
    exec(block, names)
    if "clinics" in names:
        assert names["clinics"].domains == ["a", "a", "b", "b"]


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("exp.toml").write_text("rounds = 1\nmodel = 'mlp'\n")
    Path("mine.json").write_text(json.dumps([[4, 2], [0], [1, 3, 9]]))
    assert cli.main(shlex.split(command)[1:]) == 0


def test_its_figures_of_the_splits() -> None:
    rows = re.findall(
        r"^\| `(\w+)`(?:, (?:alpha )?([\d.]+)[^|]*)? \| (.*?) \|$", PAGE.partition("What the splits give")[2], re.M
    )
    options = {
        "dirichlet": ("alpha", float),
        "pathological": ("classes_per_client", int),
        "dirichlet_per_class": ("alpha", float),
    }
    labels = np.repeat(np.arange(10), 5000)
    for split, value, cells in rows[:7]:
        own = {options[split][0]: options[split][1](value)} if value else {}
        own |= {"min_samples": 1} if split == "dirichlet_per_class" else {}
        made = partition.make(split, labels, 100, 20, **own)
        cifar = [labels[i] for i in made.indices]
        digits = [y.numpy() for _, y in data.digits(50, split=split, **own)]
        sizes, distinct, used, digit_sizes, digit_distinct = (cell.replace(",", "") for cell in cells.split(" | "))
        assert shown(cifar) == (sizes, distinct) and shown(digits) == (digit_sizes, digit_distinct), split
        assert len(np.unique(np.concatenate(made.indices))) == int(used)
    assert len(rows) >= 7


def shown(clients: list[np.ndarray]) -> tuple[str, str]:
    """Sizes as "500", "28 (65)" or "4 to 54", and the mean number of classes."""
    sizes = [len(y) for y in clients]
    text = f"{min(sizes)} to {max(sizes)}"
    if len(set(sizes[1:])) == 1:
        text = f"{sizes[1]}" + (f" ({sizes[0]})" if sizes[0] != sizes[1] else "")
    return text, f"{np.mean([len(np.unique(y)) for y in clients]):.1f}"


def test_its_tables_name_every_data_set_split_and_model() -> None:
    for name in [*data.SETS, *data.SPLITS, *models.MODELS, *data.AUGMENTS]:
        assert f'| `"{name}"`' in PAGE, name
    counts = {
        "cnn": (1, 8, 8, 10),
        "mlp": (1, 8, 8, 10),
        "emnist_cnn": (1, 28, 28, 62),
        "lenet": (3, 32, 32, 10),
        "resnet18_gn": (3, 32, 32, 10),
    }
    for name, (*shape, classes) in counts.items():
        with torch.device("meta"):
            size = sum(p.numel() for p in models.MODELS[name](tuple(shape), classes).parameters())
        (row,) = re.findall(rf'^\| `"{name}"`.*$', PAGE, re.M)
        assert f"{size:,}" in row
