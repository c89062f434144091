"""Every public entry accepts an argument, or refuses it with a TypeError or a ValueError that names it."""

import re
from dataclasses import fields
from typing import Any

import pytest
import torch

from fastsam import fed
from fastsam.fed import data as data_sets
from fastsam.fed.common.option import table
from fastsam.fed.data.augment import FlipCrop, augment_by_name
from fastsam.fed.loop.options import Settings
from tests.helpers import oracle
from tests.helpers.nonsense import NONSENSE


def assert_refused(names: str | tuple[str, ...], make: Any) -> None:
    """It is taken; or refused by one of the names, as a bad value or type."""
    names = (names,) if isinstance(names, str) else names
    try:
        make()
    except (TypeError, ValueError) as error:
        assert any(re.search(rf"\b{name}\b", str(error)) for name in names), f"{names}: {error}"
        assert type(error) in (TypeError, ValueError), repr(error)


@pytest.mark.parametrize("name", list(table(Settings)))
def test_options_of_a_run(name: str) -> None:
    for value in NONSENSE:
        assert_refused(name, lambda value=value: Settings(**{name: value}))


CASES = [(cls, field.name) for cls in fed.algorithms.registry.values() for field in fields(cls)]


@pytest.mark.parametrize(("cls", "name"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_options_of_the_algorithms(cls: Any, name: str) -> None:
    for value in NONSENSE:
        assert_refused(name, lambda value=value: cls(**{name: value}))


@pytest.mark.parametrize("name", ["pad", "flip", "crop"])
def test_options_of_the_augmentation(name: str) -> None:
    for value in NONSENSE:
        assert_refused(name, lambda value=value: FlipCrop(**{name: value}))
        assert_refused("augment", lambda value=value: augment_by_name(value))


@pytest.mark.parametrize("name", ["clients", "alpha", "split", "seed", "test_fraction"])
def test_options_of_a_split(name: str) -> None:
    x, y = torch.zeros(40, 2), torch.arange(40) % 4
    for value in NONSENSE:
        options = {"clients": 3, "alpha": 0.5, name: value}
        if name == "test_fraction":
            assert_refused(name, lambda value=value: data_sets.federated.stratified_test(y.numpy(), value))
        else:
            assert_refused(name, lambda options=options: data_sets.federated.split_data(x, y, (x, y), **options))


@pytest.mark.parametrize(
    "name",
    ["model", "clients", "algorithm", "test", "device", "run_dir", "resume", "callbacks", "progress", "loss", "config"],
)
def test_what_is_handed_to_a_run(name: str) -> None:
    arguments = {
        "model": oracle.smooth_model(torch.float32),
        "clients": oracle.ragged_clients(torch.float32),
        "algorithm": fed.FedAvg(),
    }
    for value in NONSENSE:
        if (name in ("run_dir", "device") and isinstance(value, str)) or (name in ("test", "config") and value is None):
            continue  # a place, or none
        # Without rounds, a call that passes the checks of options returns.
        assert_refused((name, "rounds"), lambda value=value: fed.run(**(arguments | {name: value}), rounds=0))
