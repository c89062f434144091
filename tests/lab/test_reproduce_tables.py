"""The tables' config files: they resolve, and they hold the papers' numbers and settings."""

import hashlib
import json

import numpy as np
import pytest

from fastsam.fed.algorithms import registry
from fastsam.lab.config import ConfigError
from fastsam.lab.reproduce.command import make_plans
from fastsam.lab.reproduce.numbers import METRICS
from fastsam.lab.reproduce.table import DOUBT, load, names
from tests.helpers.crosses import one_in
from tools import generated

IMAGES = {"emnist", "cifar10", "cifar100", "officehome", "domainnet"}
FIGURES = {"curves", "sweeps", "surfaces", "classes"}

# A digest of every published cell, taken when they had been cut out of the papers' texts.
PUBLISHED = {
    "fedsam-table1": "7d28f06cfc369270", "fedsam-table2": "a9391590c6f6bddd", "fedsam-table4": "08d6e405cc97afa9",
    "fedsam-table5": "6a91d22b41f86927", "fedlesam-table2": "5b45099983886031", "fedlesam-table3": "7217adb482edacee",
    "fedlesam-table4": "722ef5b2b727e929", "fedlesam-table5": "99d0887731237cfa", "fedlesam-table7": "34884e64fdd4de88",
    "fedlesam-table8": "595775697f62ee3d", "fedlesam-table9": "b46e9b256e2e587b", "fedgmt-readme": "38c590a4c1083cee",
}  # fmt: skip


@pytest.mark.slow
def test_the_list_is_that_of_the_tables() -> None:
    assert generated.LISTING.read_text() == generated.listing(), "listing.json is old: python -m tools.generated"


def test_every_table_and_figure_is_there() -> None:
    expected = set(PUBLISHED) | {f"fedsam-fig{i}" for i in range(1, 7)} | {f"fedlesam-fig{i}" for i in range(1, 7)}
    assert set(names()) == expected


@pytest.mark.parametrize(("scale", "name"), one_in(2, [None, "digits"], names()))
def test_a_table_resolves(name: str, scale: str | None) -> None:
    table = load(name, scale)
    plans = make_plans(table, (), table.seeds)
    data_names = {config.data for plan in plans.values() for config in plan.configs}
    assert data_names <= (IMAGES if scale is None else {"digits", "digits-domains"})
    assert len({part.slug for part in table.parts}) == len(table.parts), "two parts would share a directory"
    assert {config.algorithm for plan in plans.values() for config in plan.configs} <= set(registry)
    assert set(table.metrics) <= set(METRICS) and set(table.figures) <= FIGURES and (table.metrics or table.figures)
    for section in table.sections:
        assert set(section.published) <= set(table.algorithms)
        for cells in section.published.values():
            assert len(cells) == len(section.columns) * len(table.metrics)
    measures = [(part.keys.get("measures"), plans[part].configs[0].measures) for part in table.parts]
    assert all(options is None or resolved == options for options, resolved in measures)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_cells(name: str) -> None:
    table = load(name)
    cells = {
        section.title: {k: [cell.removesuffix(f" {DOUBT}") for cell in v] for k, v in section.published.items()}
        for section in table.sections
    }
    assert hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()[:16] == PUBLISHED[name]
    assert all(set(section.published) == set(table.algorithms) for section in table.sections)


def test_table_4_averages_the_settings_of_tables_2_and_3() -> None:
    """The paper's averages follow from the cells that our columns average, in columns without doubtful cells."""
    table = load("fedlesam-table4")
    assert [len(column.parts) for column in table.sections[0].columns] == [8, 8, 8, 12]
    for j, (other_name, data) in enumerate(
        [("fedlesam-table2", "CIFAR-10,"), ("fedlesam-table2", "CIFAR-100,"), ("fedlesam-table3", "OfficeHome"),
            ("fedlesam-table3", "DomainNet")]
    ):  # fmt: skip
        sections = [s for s in load(other_name).sections if s.title.startswith(data)]
        assert {p.title for s in sections for c in s.columns for p in c.parts} == {
            p.title for p in table.sections[0].columns[j].parts
        }
        for algorithm in ("fedavg", "scaffold", "fedlesam-s"):
            cells = [float(c.split(" ")[0]) for s in sections for c in s.published[algorithm]]
            assert float(table.sections[0].published[algorithm][j]) == pytest.approx(np.mean(cells), abs=0.02)


@pytest.mark.parametrize(
    ("name", "num_doubts"),
    [("fedsam-table1", 18), ("fedsam-table2", 9), ("fedsam-table4", 9), ("fedsam-table5", 8), ("fedlesam-table2", 4),
        ("fedlesam-table3", 160), ("fedlesam-table4", 5), ("fedlesam-table5", 1), ("fedlesam-table7", 3)],
)  # fmt: skip
def test_cells_in_doubt(name: str, num_doubts: int) -> None:
    cells = [cell for section in load(name).sections for row in section.published.values() for cell in row]
    assert sum(cell.endswith(f" {DOUBT}") for cell in cells) == sum(DOUBT in cell for cell in cells) == num_doubts


def test_settings_of_fedlesam_on_cifar() -> None:
    """Section 6.1 and appendix E.1 of the paper."""
    table = load("fedlesam-table2")
    plans = make_plans(table, (), table.seeds)
    runs = {(part.title, c.algorithm): c for part, plan in plans.items() for c in plan.configs}
    for (title, name), config in runs.items():
        has_100_clients = "100 clients" in title
        assert (config.clients, config.participation) == ((100, 0.1) if has_100_clients else (200, 0.05))
        assert (config.batch_size, config.local_epochs) == ((20, 2) if config.data == "cifar100" else (50, 5))
        assert (config.rounds, config.lr, config.weight_decay, config.model) == (800, 0.1, 1e-3, "resnet18_gn")
        assert config.lr_decay == (0.9995 if name in ("feddyn", "fedsmoo", "fedlesam-d") else 0.998)
        assert config.server_lr == (0.1 if name == "fedadam" else 1.0)
        small_names, large = ("fedsam", "fedlesam"), ("mofedsam", "fedgamma", "fedsmoo", "fedlesam-s", "fedlesam-d")
        assert config.options.get("rho") == (0.01 if name in small_names else 0.1 if name in large else None)


@pytest.mark.parametrize(
    ("name", "model", "batch", "rho", "target"),
    [("fedsam-table4", "emnist_cnn", 32, 0.2, 0.8), ("fedsam-table2", "resnet18_gn", 128, 0.5, 0.8),
        ("fedsam-table5", "resnet18_gn", 128, 0.6, 0.5)],
)  # fmt: skip
def test_settings_of_fedsam(name: str, model: str, batch: int, rho: float, target: float) -> None:
    """Section 5.1 and appendix E of the paper."""
    table = load(name)
    for plan in make_plans(table, (), table.seeds).values():
        for config in plan.configs:
            assert (config.clients, config.participation, config.sampler) == (100, 0.2, "bernoulli")
            assert (config.local_epochs, config.lr, config.model, config.batch_size) == (10, 0.1, model, batch)
            assert config.options.get("rho", rho) == rho and config.options.get("beta", 0.1) == 0.1
    assert [column.target for column in table.sections[0].columns] == [target] * 3


def test_settings_of_the_domains() -> None:
    table = load("fedlesam-table3")
    for part, plan in make_plans(table, (), table.seeds).items():
        config = plan.configs[0]
        upper = "1 client per domain" in part.title
        assert (config.clients_per_domain, config.participation) == ((1, 1.0) if upper else (10, 0.2))
        assert (config.lr, config.rounds, config.local_epochs, config.batch_size) == (0.001, 400, 5, 32)
        assert config.held_out == part.title.rpartition(", ")[2] and config.model == "vit_b_32"


def test_a_scaled_table_keeps_what_the_scale_does_not_change() -> None:
    table = load("fedlesam-table2", "digits")
    configs = [config for plan in make_plans(table, (), [0]).values() for config in plan.configs]
    options = [config.options for config in configs if config.algorithm == "mofedsam"]
    assert options and all(o == {"rho": 0.1, "beta": 0.1, "momentum_K": "steps"} for o in options)


def test_a_flag_for_an_algorithm_that_a_part_does_not_run() -> None:
    table = load("fedsam-fig3", "digits")
    plans = make_plans(table, ["--fedcm.alpha", "0.3"], [0])
    assert {c.options["alpha"] for p in plans.values() for c in p.configs if c.algorithm == "fedcm"} > {0.3}
    with pytest.raises(ConfigError, match="unknown key 'roundz'.*rounds"):
        make_plans(table, ["--roundz", "1"], [0])


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="no table 'fedsam-table3'.*fedsam-table1"):
        load("fedsam-table3")
    with pytest.raises(ConfigError, match="--scale must be one of digits, got 'small'"):
        load("fedsam-table1", "small")
