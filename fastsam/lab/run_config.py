"""The keys of a run's config: options of `fastsam.fed.run`, keys of data and model, and their meaning in a run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastsam.fed.common.import_paths import is_import_path
from fastsam.fed.common.option import check, option, table
from fastsam.fed.data import SETS, dealing, partition
from fastsam.fed.loop.local_optimizer import optimizer_of, split_rate
from fastsam.fed.loop.options import Settings
from fastsam.fed.measures import NamedMeasures
from fastsam.fed.models import MODELS
from fastsam.fed.privacy.options import Privacy
from fastsam.fed.stages.compression import TopK


@dataclass(frozen=True)
class DataKeys:
    """The data set and its split over clients. They are the same for all runs of a comparison."""

    # fmt: off
    data: str = option("digits",
        f"{', '.join(map(repr, SETS))}; a .npz file; a pattern of them, one per client; 'package.module:function' or "
        f"'file.py:function'")
    data_options: dict[str, Any] = option({}, "keyword arguments of the data function, or further options of a "
                                              "built-in data set")
    data_dir: str = option("data", "where the archive or image folders of a built-in data set are")
    download: bool = option(False, "fetch the archive into data_dir when it is not there")
    test_data: str | None = option(None, "the test set's .npz file, for data in one file per client")
    classes: int | None = option(None, "number of classes of .npz data; none: the largest label + 1")
    test_fraction: float = option(0.2, "share of the digits, or of .npz data without a test set, that becomes the test "
                                       "set")
    clients: int = option(50, "number of clients")
    split: str = option("dirichlet", "how the training set is dealt out to the clients",
        choices=tuple(partition.SPLITS))
    split_seed: int = option(20, "seed of the split; 20 is that of the papers' simulators")
    alpha: float = option(0.3, "concentration of the Dirichlet splits: small is heterogeneous")
    exhausted: str = option("reset",
        "when a class has run out in a Dirichlet or pathological split: start its samples anew, or draw another class",
        choices=dealing.EXHAUSTED)
    balanced: bool = option(False, "iid split: the same number of samples of each class for every client")
    classes_per_client: int = option(3, "pathological split: classes of each client")
    min_samples: int = option(10, "per-class Dirichlet split: samples that each client gets at least")
    indices: str | None = option(None, "own split: a JSON file with one list of positions in the training set per "
                                       "client")
    duplicates: bool = option(False, "own split: a sample may be named more than once")
    held_out: str | None = option(None, "data with domains: the domain that is the test set; none: a part of every "
                                        "domain is")
    clients_per_domain: int = option(1, "data with domains: how many clients share each domain (IID)")
    augment: str = option("auto",
        "'none', 'flip_crop', 'flip_crop_always', or the import path of a callable (x, generator) -> x; auto: that of "
        "the data set")
    # fmt: on


@dataclass(frozen=True)
class ModelKeys:
    """The model, and the algorithm that trains it."""

    # fmt: off
    model: str = option("cnn",
        f"{', '.join(map(repr, MODELS))}, or the import path of a module class, of a function that makes a module, or "
        f"of a module")
    model_options: dict[str, Any] = option({}, "keyword arguments of the model")
    dtype: str = option("float32", "of the model's weights and of floating-point inputs",
        choices=("float32", "float64"))
    weights: str | None = option(None, "the initial weights: a .safetensors file, or the directory of a finished run; "
                                       "none: by the seed")
    algorithm: str = option("fedavg", "a built-in algorithm, or the import path of a class")
    # fmt: on


@dataclass(frozen=True)
class RunConfig(Settings, ModelKeys, DataKeys):
    """All keys of one run, resolved. Import paths are checked later.

    `options` are the algorithm's hyper-parameters. There is no key of this name: they are written in the algorithm's
    table. Raises ValueError if a value is out of range.
    """

    # fmt: off
    name: str = option("", "label for default run directories; empty: the config file's name")
    # fmt: on
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        self.name_sampler()
        if not (isinstance(self.optimizer, str) and is_import_path(self.optimizer)):  # which may be a partial
            object.__setattr__(self, "lr", split_rate(self.lr, optimizer_of(self.optimizer))[0])

    def record(self) -> dict[str, Any]:
        """Return the content of config.json: every key with a meaning in this run, and the table of the algorithm's
        options.

        Read again it gives this same config.
        """
        foreign_reasons = foreign_keys(self.data, self.split)
        values = {key: getattr(self, key) for key in KEYS if key not in foreign_reasons}
        return values | {short_name(self.algorithm): dict(self.options)}


KEYS = table(RunConfig)
DATA_KEYS = tuple(table(DataKeys))
# keys whose values are tables of a file
TABLES = frozenset(key for key, row in KEYS.items() if {dict, Mapping} & {*row.kinds} and Sequence not in row.kinds)


# Keys whose table has options, which are also flags: --privacy.clip
OPTION_TABLES = {"privacy": table(Privacy), "compression": table(TopK), "measures": table(NamedMeasures)}


def short_name(algorithm: str) -> str:
    """Return an algorithm's name for tables and directories: built-in, or an import path's class in lower case."""
    return algorithm.rpartition(":")[2].lower()


@functools.cache
def foreign_keys(data: str, split: str) -> dict[str, str]:
    """Return the keys without meaning in this run, and the reasons.

    Keys of the data depend on the source of the data, and keys of the split on the split.
    """
    data_keys, why = _data_keys(data)
    reasons = {key: f"data is {data!r}, {why}" for key in (*SOURCE_KEYS, *_SPLIT_OPTIONS) if key not in data_keys}
    if "split" in data_keys:
        split_options = partition.options_of(KEYS["split"].check(split))
        reasons |= dict.fromkeys(_SPLIT_OPTIONS - split_options, f"the split {split!r} does not take it")
        if split == "own":
            reasons |= dict.fromkeys(("clients", "split_seed"), "the split 'own' lists each client's samples")
    return reasons


_SPLIT_OPTIONS = frozenset().union(*(partition.options_of(split) for split in partition.SPLITS))
# The keys that say where the data come from and how they are dealt out; each data source takes some of them.
SOURCE_KEYS = tuple(key for key in table(DataKeys) if key not in ("data", "augment") and key not in _SPLIT_OPTIONS)


def _data_keys(data: str) -> tuple[frozenset[str], str]:
    """Return the keys of `SOURCE_KEYS` and of splits that `data` takes, and the reason that excludes other keys."""
    if is_import_path(data):
        return frozenset({"data_options"}), "the function makes the clients"
    if is_pattern(data):
        return frozenset({"test_data", "classes"}), "each file is a client"
    if data not in SETS:
        return frozenset({"classes", "test_fraction", "clients", "split", "split_seed"}) | _SPLIT_OPTIONS, "one file"
    keys = set_parameters(data) & {*SOURCE_KEYS}
    keys |= _SPLIT_OPTIONS if "split" in keys else set()
    return frozenset(keys | ({"data_options"} if set_options(data) else set())), "a data set that does not take it"


def set_parameters(data: str) -> set[str]:
    """Return the keys that a built-in data set takes as arguments (`split_seed` is its `seed`)."""
    names = set(inspect.signature(SETS[data]).parameters)
    return {"split_seed" if name == "seed" else name for name in names} & {*SOURCE_KEYS}


def set_options(data: str) -> set[str]:
    """Return the arguments of a built-in data set that have no key; they are given in `data_options`."""
    not_for_files = {"alpha", "seed", "augment", "folder_set", "options"}
    return set(inspect.signature(SETS[data]).parameters) - set_parameters(data) - not_for_files


def is_pattern(data: str) -> bool:
    """Return True if `data` is a pattern for many files."""
    return not is_import_path(data) and any(c in data for c in "*?[")
