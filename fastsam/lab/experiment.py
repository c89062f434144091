"""From a resolved config to a finished run: load the data, build model and algorithm, call `fastsam.fed.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fastsam.fed import data as data_sets
from fastsam.fed import models
from fastsam.fed.clients.reading import read_whole
from fastsam.fed.common.atomic_files import read_bytes
from fastsam.fed.common.import_paths import call_with_options, is_import_path
from fastsam.fed.common.option import table
from fastsam.fed.data.augment import augment_by_name
from fastsam.fed.data.partition import options_of
from fastsam.fed.loop.options import Settings
from fastsam.fed.loop.run import run
from fastsam.fed.rundir.result import Result
from fastsam.lab.config import ConfigError, algorithm_class
from fastsam.lab.import_paths import import_object
from fastsam.lab.run_config import RunConfig, is_pattern, set_options, set_parameters

_IMPORT_KEYS = ("loss", "lr", "server_lr", "sampler", "available", "weighting", "optimizer")  # may be functions


@dataclass(frozen=True)
class Experiment:
    """The data, model and algorithm of a config, ready to run."""

    config: RunConfig
    data: data_sets.FederatedData
    model: nn.Module
    algorithm: Any


def load_data(config: RunConfig) -> data_sets.FederatedData:
    """Return the data set of a config.

    Raises:
        ValueError: the data cannot be used.
        FileNotFoundError: a file is missing.
        ConnectionError: a download failed.
    """
    data = _load(config)
    if config.augment == "auto":
        return data
    is_path = is_import_path(config.augment)
    augment = import_object(config.augment, "augment") if is_path else augment_by_name(config.augment)
    return replace(data, augment=augment)


def _load(config: RunConfig) -> data_sets.FederatedData:
    if is_import_path(config.data):
        return from_function(config.data, config.data_options)
    if config.data in data_sets.SETS:
        return _load_set(config)
    if is_pattern(config.data):
        if config.test_data is None:
            raise ConfigError(f"data = {config.data!r} needs test_data, the .npz file of the common test set")
        return data_sets.from_client_files(config.data, config.test_data, config.classes)
    if config.data.endswith(".npz"):
        split = _split(config)
        return data_sets.from_npz(config.data, test_fraction=config.test_fraction, classes=config.classes, **split)
    set_names = ", ".join(map(repr, [name for name in data_sets.SETS if name != "digits"]))
    raise ConfigError(
        "data must be 'digits', a .npz file, a pattern such as 'clients/*.npz', the import path of a function "
        f"('package.module:function', 'file.py:function'), or one of {set_names}; got {config.data!r}"
    )


def from_function(path: str, options: dict[str, Any]) -> data_sets.FederatedData:
    """Return the value of a user's function ("package.module:function" or "file.py:function").

    The value is a `FederatedData`, or ``(clients, test)``: a sequence of clients and a test set in the forms that
    `fed.run` takes. Data sets and loaders are read once.
    """
    data = call_with_options(import_object(path, "data"), options, f"data_options of {path}")
    if isinstance(data, data_sets.FederatedData):
        return data
    if not isinstance(data, (tuple, list)) or len(data) != 2 or not isinstance(data[0], Sequence):
        raise ValueError(f"{path} must return a FederatedData or a pair (clients, test), got {type(data).__name__}")
    clients = [_whole(one, f"{path}: client {i}") for i, one in enumerate(data[0])]
    test = _whole(data[1], f"{path}: the test set")
    if not clients:
        raise ValueError(f"{path} returned no clients")
    classes = 1 + max(int(y.max()) for _, y in [*clients, test])
    return data_sets.FederatedData(clients, test, classes, path.rpartition(":")[2])


def _whole(data: Any, label: str) -> tuple[Tensor, Tensor]:
    return data_sets.as_tensors(*read_whole(data, label), label=label)


def _load_set(config: RunConfig) -> data_sets.FederatedData:
    """Return a built-in data set, made with the keys that it takes."""
    parameters = set_parameters(config.data)
    arguments = {key: getattr(config, key) for key in parameters - {"split_seed"}} | {"seed": config.split_seed}
    foreign_options = set(config.data_options) - set_options(config.data)
    if foreign_options:
        raise ConfigError(
            f"data_options of {config.data!r} has no {', '.join(sorted(foreign_options))}; it takes "
            f"{', '.join(sorted(set_options(config.data)))}"
        )
    split = _split(config) if "split" in parameters else {}
    return data_sets.SETS[config.data](**arguments | split | config.data_options)


def _split(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of the split over clients. The split "own" lists its clients and takes no number."""
    clients = None if config.split == "own" else config.clients
    split_options = {key: getattr(config, key) for key in options_of(config.split)}
    return {"clients": clients, "split": config.split, "seed": config.split_seed} | split_options


def build(config: RunConfig, data: data_sets.FederatedData | None = None) -> Experiment:
    """Return the experiment of a config. `data` may be given if they were loaded by a config that agrees in all
    `DATA_KEYS`."""
    data = load_data(config) if data is None else data
    make = import_object(config.model, "model") if is_import_path(config.model) else config.model
    model = models.build(make, data.in_shape, data.classes, config.seed, **config.model_options)
    if data.pixels is not None:
        model = models.Pixels(model, *data.pixels)
    model = model.to(getattr(torch, config.dtype))
    if config.weights is not None:
        _load_weights(model, Path(config.weights))
    return Experiment(config, data, model, algorithm_class(config.algorithm)(**config.options))


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load weights into the model.

    Raises ConfigError if the file is missing, is not a .safetensors file, or does not fit the model.
    """
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        model.load_state_dict(safetensors.torch.load(read_bytes(file)))
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"weights must be a .safetensors file, or the directory of a run that is finished; {file} cannot be read "
            f"({error})"
        ) from error
    except RuntimeError as error:
        raise ConfigError(f"weights: {file} does not fit the model: {error}") from error


def keywords(config: RunConfig) -> dict[str, Any]:
    """Return the checked keywords of `fastsam.fed.run` for a config. Raises ValueError as `run` would."""
    values = {key: getattr(config, key) for key in table(Settings)}
    import_keys = [key for key in _IMPORT_KEYS if isinstance(values[key], str) and is_import_path(values[key])]
    values |= {key: import_object(values[key], key) for key in import_keys}
    if values["metrics"] is not None:
        values["metrics"] = {name: import_object(path, f"metrics.{name}") for name, path in values["metrics"].items()}
    settings = Settings(**values)
    return {key: getattr(settings, key) for key in values}


def start(
    experiment: Experiment,
    run_dir: str | Path,
    resume: bool = False,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Run it. The run directory gets the config's record as config.json."""
    settings = keywords(experiment.config)
    rate = {"lr": settings["lr"]} if experiment.config.lr is None else {}  # the rate of an imported optimizer
    settings |= {
        "run_dir": run_dir,
        "resume": resume,
        "progress": progress,
        "config": experiment.config.record() | rate,
    }
    return run(experiment.model, experiment.data, experiment.algorithm, **settings)
