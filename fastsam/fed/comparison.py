"""A comparison: several algorithms (times seeds) on the same data, each in a sub-directory of one comparison directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastsam.fed.checkpoint import RunDirectoryError, write_json
from fastsam.fed.config import ConfigError, Source, resolve
from fastsam.fed.data import FederatedData
from fastsam.fed.experiment import DATA_KEYS
from fastsam.fed.keys import RunConfig, short_name
from fastsam.fed.settings import Settings


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison, all checked: `configs` goes through the algorithms and, within each, the seeds."""

    name: str
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    configs: tuple[RunConfig, ...]

    def directory_of(self, config: RunConfig) -> str:
        """The sub-directory of a run."""
        return f"{short_name(config.algorithm)}-seed{config.seed}"

    def record(self) -> dict[str, Any]:
        """What the comparison's config.json holds; `fastsam compare` reads it again to this same plan."""
        records = {short_name(c.algorithm): c.record() for c in self.configs if c.seed == self.seeds[0]}
        first = next(iter(records.values()))
        common = {
            k: v
            for k, v in first.items()
            if k not in ("algorithm", "seed") and all(k in r and r[k] == v for r in records.values())
        }
        common = {k: v for k, v in common.items() if k not in records}  # the algorithms' own tables
        tables = {
            short: {k: v for k, v in record.items() if k not in (*common, "algorithm", "seed", short)} | record[short]
            for short, record in records.items()
        }
        return common | tables | {"compare": {"algorithms": list(self.algorithms), "seeds": list(self.seeds)}}


def plan(source: Source, algorithms: Sequence[str] | None = None, seeds: Sequence[str] | None = None) -> Plan:
    """All runs of a comparison, resolved and checked before the first one starts.

    algorithms, seeds: from the command line; default: the source's [compare] table, then the source's seed.
    Raises ConfigError as `fastsam.fed.config.resolve` does, for an algorithm or seed named twice, and for runs that
    would not share their data.
    """
    names = list(algorithms or source.compare.get("algorithms") or [])
    if not names:
        raise ConfigError(
            "what shall be compared? Name algorithms with --algorithms fedavg,fedsam or in a table [compare] of the config file"
        )
    _unique([short_name(str(name)) for name in names], "algorithm")
    numbers = [_seed(s) for s in (seeds or source.compare.get("seeds") or [])] or [
        resolve(source, names[0], names).seed
    ]
    _unique([str(n) for n in numbers], "seed")
    if "algorithm" in source.flags:
        raise ConfigError("compare takes --algorithms A,B, not --algorithm")
    configs = tuple(resolve(source, name, names, seed) for name in names for seed in numbers)
    for config in configs[1:]:
        for key in DATA_KEYS:
            if getattr(config, key) != getattr(configs[0], key):
                raise ConfigError(
                    f"a comparison runs on one data set: {key} is {getattr(configs[0], key)!r} for {names[0]} "
                    f"and {getattr(config, key)!r} for {config.algorithm}"
                )
    return Plan(configs[0].name, tuple(names), tuple(numbers), configs)


def _seed(value: Any) -> int:
    try:
        if isinstance(value, (bool, float)):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"seeds must be integers such as 0,1,2, got {value!r}") from None


def _unique(names: Sequence[str], what: str) -> None:
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ConfigError(f"the {what} {twice!r} is named twice; each {what} runs once")


def check_directory(plan: Plan, directory: Path, resume: bool) -> None:
    """Raises RunDirectoryError unless the comparison can run in `directory`: it is new or empty, or, with `resume`, that of a
    comparison whose runs had these configs (what `fastsam.fed.run` lets a resumed run change may differ). Writes nothing.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not resume:
        raise RunDirectoryError(
            f"the directory {directory} exists; continue it with --resume, or choose another --run-dir"
        )
    if "compare" not in _stored(directory):
        raise RunDirectoryError(f"{directory} is not the directory of a comparison; choose another --run-dir")
    for config in plan.configs:
        now, before = config.record(), _stored(directory / plan.directory_of(config))
        for key in sorted(now.keys() | before.keys() if before else ()):
            if key not in (*Settings.FREE, "name") and now.get(key) != before.get(key):
                raise RunDirectoryError(
                    f"{directory / plan.directory_of(config)} cannot be resumed with another {key}: "
                    f"it was started with {before.get(key)!r}, now it is {now.get(key)!r}"
                )


def _stored(directory: Path) -> dict[str, Any]:
    """The config.json of a directory; empty when there is none that can be read."""
    try:
        content = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_record(plan: Plan, directory: Path) -> None:
    """The comparison's config.json, from which it can be repeated or resumed."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", plan.record())


def facts(plan: Plan, data: FederatedData) -> dict[str, Any]:
    """What a reader of the report must know: the data, the split, and the keys of the run that count."""
    config = plan.configs[0]
    sizes = [len(y) for _, y in data.clients]
    shown = ("rounds", "participation", "local_epochs", "batch_size", "model", "validation")
    split = f"{config.split}(alpha={config.alpha:g})" if config.split == "dirichlet" else config.split
    made = {} if data.priors is None else {"split": f"{split}, seed {config.split_seed}"}
    per_client = f"{min(sizes)} to {max(sizes)}" if min(sizes) != max(sizes) else f"{sizes[0]}"
    return {
        "data": f"{data.name}: {sum(sizes)} training and {len(data.test[1])} test samples, {data.classes} classes",
        "clients": f"{len(data)} with {per_client} samples each",
        **made,
        **{key: getattr(config, key) for key in shown},
        **{name: _settings(c) for name, c in zip(plan.algorithms, plan.configs[:: len(plan.seeds)], strict=True)},
    }


def _settings(config: RunConfig) -> str:
    return ", ".join(
        f"{key} {value}" for key, value in {"lr": config.lr, "lr_decay": config.lr_decay, **config.options}.items()
    )
