"""From a config to data: built-in sets by name, their keys, and a run on each kind of data."""

import json
import re
import shlex
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsam import fed
from fastsam.fed import data, models
from fastsam.fed.data import partition
from fastsam.lab import cli, config, experiment
from fastsam.lab.config import ConfigError
from fastsam.lab.run_config import RunConfig
from tests.helpers.places import ROOT
from tests.helpers.small_archives import SMALL, small_cifar, small_emnist, write_folders


def resolve(tmp_path: Path, text: str) -> RunConfig:
    (tmp_path / "exp.toml").write_text(text)
    return config.resolve(config.read(tmp_path / "exp.toml"))


@pytest.fixture
def small_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small archives and folders in `tmp_path / "data"`, expected by the built-in sets."""
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.chdir(tmp_path)
    small_cifar(monkeypatch, root, 10)
    small_cifar(monkeypatch, root, 100)
    small_emnist(monkeypatch, root)
    write_folders(root / "officehome")
    monkeypatch.setitem(data.SETS, "officehome", partial(data.officehome, folder_set=SMALL))
    return root


RUNS = {
    "cifar10": "clients = 4\nsplit = 'pathological'\nclasses_per_client = 2\nmodel = 'lenet'\nparticipation = 1.0",
    "cifar100": "clients = 3\nsplit = 'iid'\nmodel = 'mlp'\naugment = 'none'",
    "emnist": "clients = 3\nsplit = 'dirichlet'\nmodel = 'emnist_cnn'\ndata_options = {fraction = 0.5}",
    "officehome": "held_out = 'Clipart'\nmodel = 'resnet18_gn'\nmodel_options = {widths = [4, 4, 8, 8]}\ndata_options "
    "= {size = 32}",
    "digits-domains": "held_out = 'rot10'\nclients_per_domain = 2\ndata_options = {domains = ['rot0', 'rot10', "
    "'noise1']}",
    "digits": "clients = 5\nsplit = 'dirichlet_per_class'\nmin_samples = 20\naugment = 'flip_crop'\nmodel = 'mlp'",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_every_kind_of_data(tmp_path: Path, small_sets: Path, name: str) -> None:
    resolved_config = resolve(
        tmp_path, f"data = '{name}'\nrounds = 1\nlr = 0.01\nclient_test_split = 'shared'\n{RUNS[name]}"
    )
    experiment_parts = experiment.build(resolved_config)
    result = experiment.start(experiment_parts, tmp_path / "run")
    assert torch.isfinite(torch.tensor(result.history[-1]["test_loss"]))
    assert isinstance(experiment_parts.model, models.Pixels) == (name == "officehome")
    repeat = config.resolve(config.read(tmp_path / "run" / "config.json"))
    assert repeat == resolved_config


def test_the_keys_reach_the_data_set(tmp_path: Path, small_sets: Path) -> None:
    federated_data = experiment.load_data(
        resolve(tmp_path, "data = 'cifar10'\nclients = 6\nsplit = 'iid'\ndata_dir = 'data'")
    )
    direct = data.SETS["cifar10"]("data", clients=6, split="iid")
    assert (
        all(torch.equal(a[0], b[0]) for a, b in zip(federated_data, direct))
        and federated_data.augment == data.FlipCrop()
    )
    other_data = experiment.load_data(resolve(tmp_path, "data = 'cifar10'\nclients = 6\nsplit = 'iid'\nsplit_seed = 3"))
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(federated_data, other_data))
    config_always = resolve(tmp_path, "data = 'cifar10'\naugment = 'flip_crop_always'\nclients = 6")
    assert experiment.load_data(config_always).augment == data.FlipCrop(crop=1.0)


def test_a_config_names_an_augmentation_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def brighter(x, generator): return x + 1\nnumber = 3\n")
    augment = experiment.load_data(resolve(tmp_path, f"augment = '{tmp_path}/own.py:brighter'")).augment
    assert augment is not None and augment(1, None) == 2
    with pytest.raises(ValueError, match="augment must be callable .*got int"):
        experiment.load_data(resolve(tmp_path, f"augment = '{tmp_path}/own.py:number'"))


def test_a_split_of_ones_own_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text(json.dumps([[4, 2], [0], [1, 3, 9]]))
    result = resolve(tmp_path, "split = 'own'\nindices = 'mine.json'")
    all_indices = data.digits(split="own", clients=None, indices=[list(range(1437))])[0]
    federated_data = experiment.load_data(result)
    assert [len(y) for _, y in federated_data] == [2, 1, 3]
    assert torch.equal(federated_data[0][0], all_indices[0][[4, 2]])
    Path("mine.json").write_text(json.dumps([[4, 2], [4]]))
    with pytest.raises(ValueError, match="name sample 4 more than once"):
        experiment.load_data(result)
    assert len(experiment.load_data(resolve(tmp_path, "split = 'own'\nindices = 'mine.json'\nduplicates = true"))) == 2
    with pytest.raises(ValueError, match="one list of positions per client, or a JSON file"):
        experiment.load_data(resolve(tmp_path, "split = 'own'"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data = 'officehome'\nclients = 3", "clients has no meaning here: data is 'officehome'"),
        ("data = 'officehome'\nsplit = 'iid'", "split has no meaning here: data is 'officehome'"),
        ("data = 'digits-domains'\ndata_dir = 'x'", "data_dir has no meaning here"),
        ("data = 'cifar10'\nheld_out = 'Art'", "held_out has no meaning here: data is 'cifar10'"),
        ("data = 'cifar10'\ntest_fraction = 0.1", "test_fraction has no meaning here"),
        ("data = 'domainnet'\ndownload = true", "download has no meaning here"),
        ("split = 'own'\nclients = 3", "clients has no meaning here: the split 'own' lists each client's samples"),
        ("classes_per_client = 2", "classes_per_client has no meaning here: the split 'dirichlet' does not take it"),
        ("split = 'pathological'\nmin_samples = 2", "min_samples has no meaning here: the split 'pathological'"),
    ],
)
def test_keys_of_other_data_and_splits(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data = 'emnist'\ndata_options = {fractoin = 0.5}",
            "data_options of 'emnist' has no fractoin; it takes fraction, url",
        ),
        ("data = 'cifar10'\ndata_dir = 'nowhere'", "no nowhere/cifar-10-python.tar.gz of cifar10"),
        ("data = 'officehome'\ndata_dir = 'nowhere'", "no OfficeHome in .*nowhere"),
        ("data = 'digits-domains'\nheld_out = 'rot45'", "has no domain 'rot45'; its domains are 'rot0', 'rot30'"),
        ("augment = 'mixup'", "augment must be 'auto', 'none', .* got 'mixup'"),
        ("split = 'pathological'\nclasses_per_client = 11", "has samples of 10 classes"),
        ("clients = 5000", "5000 clients cannot share 1437"),
    ],
)
def test_data_that_cannot_be_made(tmp_path: Path, small_sets: Path, text: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        experiment.load_data(resolve(tmp_path, text))


# --- docs/data.md: its configs resolve, its Python runs, its commands and figures are true.


PAGE = (ROOT / "docs" / "data.md").read_text()
TOML = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"^    (fastsam .*)$", PAGE, re.M)


def test_the_page_has_what_is_tested_here() -> None:
    assert (len(TOML), len(PYTHON), len(COMMANDS)) == (4, 5, 2)


@pytest.mark.parametrize("block", TOML)
def test_its_configs_are_configs(tmp_path: Path, block: str) -> None:
    (tmp_path / "exp.toml").write_text(block)
    result = config.resolve(config.read(tmp_path / "exp.toml"))
    if result.data == "digits-domains":
        experiment_parts = experiment.build(result)
        assert experiment_parts.data.held_out == "rot60" and len(experiment_parts.data) == 15


@pytest.mark.parametrize("block", PYTHON)
def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    (tmp_path / "data").mkdir()
    small_cifar(monkeypatch, tmp_path / "data", 10)
    monkeypatch.chdir(tmp_path)

    def small_data(data_dir: str, clients: int, classes_per_client: int, **options: object) -> data.FederatedData:
        return data.cifar10(data_dir, clients=2, classes_per_client=2, **options)

    monkeypatch.setattr(fed, "cifar10", small_data)
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
    part = PAGE.partition("Client sizes and classes")[2]
    rows = re.findall(r"^\| `(\w+)`(?:, (?:alpha )?([\d.]+)[^|]*)? \| (.*?) \|$", part, re.M)
    options = {
        "dirichlet": ("alpha", float),
        "pathological": ("classes_per_client", int),
        "dirichlet_per_class": ("alpha", float),
    }
    labels = np.repeat(np.arange(10), 5000)
    for split, value, cells in rows[:7]:
        own = {options[split][0]: options[split][1](value)} if value else {}
        own |= {"min_samples": 1} if split == "dirichlet_per_class" else {}
        parts = partition.make(split, labels, 100, 20, **own)
        cifar = [labels[i] for i in parts.indices]
        digits = [y.numpy() for _, y in data.digits(50, split=split, **own)]
        sizes, distinct, num_used, digit_sizes, digit_distinct = (cell.replace(",", "") for cell in cells.split(" | "))
        assert format_sizes(cifar) == (sizes, distinct) and format_sizes(digits) == (digit_sizes, digit_distinct), split
        assert len(np.unique(np.concatenate(parts.indices))) == int(num_used)
    assert len(rows) >= 7


def format_sizes(clients: list[np.ndarray]) -> tuple[str, str]:
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
        "cnn": (1, 8, 8, 10), "mlp": (1, 8, 8, 10), "emnist_cnn": (1, 28, 28, 62), "lenet": (3, 32, 32, 10),
        "resnet18_gn": (3, 32, 32, 10),
    }  # fmt: skip
    for name, (*shape, classes) in counts.items():
        with torch.device("meta"):
            size = sum(p.numel() for p in models.MODELS[name](tuple(shape), classes).parameters())
        (row,) = re.findall(rf'^\| `"{name}"`.*$', PAGE, re.M)
        assert f"{size:,}" in row
