"""A comparison: algorithms times seeds times values of a sweep. Each run has a sub-directory of one directory."""

from __future__ import annotations

import errno
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch

from fastsam.fed.algorithms import registry
from fastsam.fed.callbacks.terminal import Countdown, RunProgress
from fastsam.fed.common.atomic_files import make_directory, read_json, write_json
from fastsam.fed.data import FederatedData
from fastsam.fed.loop.options import RESUMABLE
from fastsam.fed.rundir.checkpoint import RunDirectoryError
from fastsam.lab import experiment
from fastsam.lab.config import ConfigError, ConfigSource, resolve
from fastsam.lab.experiment import Experiment
from fastsam.lab.plots.curves import value_text
from fastsam.lab.report.finished import FinishedRun, by_label, spelled
from fastsam.lab.report.surface import loss_surface
from fastsam.lab.run_config import DATA_KEYS, RunConfig, short_name
from fastsam.lab.sweep import Axis, check_directories, check_taken, combinations, parse_axis, with_values

if TYPE_CHECKING:
    from rich.console import Console

ALL_ALGORITHMS = "all"  # text that stands for all built-in algorithms


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison."""

    config: RunConfig
    point: tuple[tuple[str, Any], ...] = ()  # swept keys that its algorithm takes, with their values in this run

    @property
    def label(self) -> str:
        """Return the name of the run's line in reports, the same for all seeds, e.g. "fedsam rho=0.05"."""
        point = [f"{key}={value_text(value)}" for key, value in self.point]
        return " ".join([short_name(self.config.algorithm), *point])

    @property
    def directory(self) -> str:
        """Return the name of the sub-directory, e.g. "fedsam-rho=0.05-seed0"."""
        name = "-".join([*self.label.split(" "), f"seed{self.config.seed}"])
        return "".join(c if c.isalnum() or c in "-_.=+" else "_" for c in name)


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison, all checked.

    They are ordered by algorithm, then by point of the sweep, then by seed.
    """

    name: str
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    sweep: tuple[Axis, ...]
    runs: tuple[PlannedRun, ...]

    @property
    def configs(self) -> tuple[RunConfig, ...]:
        """Return the config of each run."""
        return tuple(run.config for run in self.runs)

    def record(self) -> dict[str, Any]:
        """Return the comparison's config.json. `fastsam compare` reads it again to this same plan."""
        records: dict[str, dict[str, Any]] = {}
        for config in self.configs:
            records.setdefault(short_name(config.algorithm), config.record())
        first = next(iter(records.values()))
        separate_keys = {"algorithm", "seed", *records}  # the last are the algorithms' own tables
        keys = [k for k in first if k not in separate_keys]
        common_values = {k: first[k] for k in keys if all(k in r and r[k] == first[k] for r in records.values())}
        tables = {
            algorithm: {k: v for k, v in record.items() if k not in (*common_values, "algorithm", "seed", algorithm)}
            | record[algorithm]
            for algorithm, record in records.items()
        }
        compare: dict[str, list[Any]] = {"algorithms": list(self.algorithms), "seeds": list(self.seeds)}
        if self.sweep:
            compare["sweep"] = [axis.text for axis in self.sweep]
        return common_values | tables | {"compare": compare}


def plan(
    source: ConfigSource,
    algorithms: Sequence[str] | None = None,
    seeds: Sequence[str] | None = None,
    sweep: Sequence[str] | None = None,
) -> Plan:
    """Return all runs of a comparison, resolved and checked before the first one starts.

    Raises ConfigError if a config cannot be resolved (see `fastsam.lab.config.resolve`), an algorithm or seed is named
    twice, no algorithm takes a swept key, or runs differ in a key of the data that is not swept.

    Args:
        source: layers of the config. Its [compare] table has the defaults of the other arguments.
        algorithms: names of the algorithms; only `ALL_ALGORITHMS` for all built-in ones.
        seeds: seeds as texts; by default the seeds of [compare], else the source's seed.
        sweep: texts such as "rho=0.01,0.05" or "fedsmoo.dyn=true,false"; several of them are combined. An algorithm
            that does not take a key runs without it, once.
    """
    names = list(algorithms or source.compare.get("algorithms") or [])
    if names == [ALL_ALGORITHMS]:
        names = list(registry)
    if not names:
        raise ConfigError(
            "what shall be compared? Name algorithms with --algorithms fedavg,fedsam or in a table [compare] of the "
            "config file"
        )
    _check_unique([short_name(str(name)) for name in names], "algorithm")
    if "algorithm" in source.flags:
        raise ConfigError("compare takes --algorithms A,B, not --algorithm")
    axes = tuple(parse_axis(text) for text in (sweep or source.compare.get("sweep") or []))
    _check_unique([axis.name for axis in axes], "swept key")
    check_taken(axes, names)
    if seeds is not None and not seeds:
        raise ConfigError("seeds must be integers such as 0,1,2, got none")
    numbers = [_seed(s) for s in (seeds or source.compare.get("seeds") or [])] or [_only_seed(source, names, axes)]
    _check_unique([str(n) for n in numbers], "seed")
    runs = tuple(
        PlannedRun(config, point)
        for name in names
        for values in combinations([axis for axis in axes if axis.applies_to(name)])
        for config, point in (_resolve_point(source, name, names, seed, values) for seed in numbers)
    )
    check_directories([run.directory for run in runs])
    _check_data([run.config for run in runs], {axis.key for axis in axes})
    return Plan(runs[0].config.name, tuple(names), tuple(numbers), axes, runs)


Point = tuple[tuple[str, Any], ...]


def _resolve_point(
    source: ConfigSource, name: str, names: Sequence[str], seed: int, values: Sequence[tuple[Axis, str]]
) -> tuple[RunConfig, Point]:
    config = resolve(with_values(source, values), name, names, seed)
    point = tuple(
        (axis.key, config.options[axis.key] if axis.is_option_of(name) else getattr(config, axis.key))
        for axis, _ in values
    )
    return config, point


def _only_seed(source: ConfigSource, names: Sequence[str], axes: Sequence[Axis]) -> int:
    first = [(axis, axis.values[0]) for axis in axes if axis.applies_to(names[0])]
    return resolve(with_values(source, first), names[0], names).seed


def _check_data(configs: Sequence[RunConfig], swept_keys: set[str]) -> None:
    first = configs[0]
    for config in configs[1:]:
        for key in DATA_KEYS:
            if key not in swept_keys and getattr(config, key) != getattr(first, key):
                raise ConfigError(
                    f"a comparison runs on one data set: {key} is {getattr(first, key)!r} for {first.algorithm} and "
                    f"{getattr(config, key)!r} for {config.algorithm}"
                )


def data_key(config: RunConfig) -> str:
    """Return a key that is equal for two configs if they run on the same data."""
    return json.dumps([getattr(config, key) for key in DATA_KEYS], default=repr)


def _seed(value: Any) -> int:
    try:
        if isinstance(value, (bool, float)):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"seeds must be integers such as 0,1,2, got {value!r}") from None


def _check_unique(names: Sequence[str], kind: str) -> None:
    duplicate = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if duplicate is not None:
        raise ConfigError(f"the {kind} {duplicate!r} is named twice; each {kind} runs once")


def check_directory(plan: Plan, directory: Path, resume: bool) -> None:
    """Raise RunDirectoryError unless the comparison can run in `directory`. Writes nothing.

    The directory must be new or empty. With `resume` it may have an earlier comparison whose runs had these configs;
    keys that `fastsam.fed.run` lets a resumed run change may differ.
    """
    if is_new(directory, resume):
        return
    if "compare" not in config_of(directory):
        raise RunDirectoryError(f"{directory} is not the directory of a comparison; choose another --run-dir")
    for run in plan.runs:
        new_record, old_record = run.config.record(), config_of(directory / run.directory)
        if new_record["lr"] is None:  # an imported optimizer's rate is known in the run, which compares it
            old_record.pop("lr", None)
        for key in sorted(new_record.keys() | old_record.keys() if old_record else ()):
            if key not in (*RESUMABLE, "name") and new_record.get(key) != old_record.get(key):
                raise RunDirectoryError(
                    f"{directory / run.directory} cannot be resumed with another {key}: it was started with "
                    f"{old_record.get(key)!r}, now it is {new_record.get(key)!r}"
                )


def is_new(directory: Path, resume: bool) -> bool:
    """Return True if a directory does not exist or is empty. Raises RunDirectoryError if not, and `resume` is False."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return True
    if not resume:
        raise RunDirectoryError(
            f"the directory {directory} exists; continue it with --resume, or choose another --run-dir"
        )
    return False


def config_of(directory: Path) -> dict[str, Any]:
    """Return the config.json of a directory, or an empty dict if it cannot be read."""
    try:
        content = read_json(directory / "config.json")
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_record(plan: Plan, directory: Path) -> None:
    """Write the comparison's config.json, from which it can be repeated or resumed."""
    make_directory(directory)
    write_json(directory / "config.json", plan.record())


def _swept_data(run: PlannedRun) -> str:
    """Return the swept values of a run's data, e.g. "alpha = 0.1", or "" if no key of the data was swept."""
    return ", ".join(f"{key} = {value_text(value)}" for key, value in run.point if key in DATA_KEYS)


def facts(plan: Plan, data: Data) -> dict[str, Any]:
    """Return the facts at the head of the report: the data, the split, and the most important keys of the run.

    A fact that differs between swept values of the data has a line for each value, with the value in its name.
    """
    config = plan.configs[0]
    swept_keys = {axis.key for axis in plan.sweep}
    share = "participation" if config.cohort is None else "cohort"
    keys = ("rounds", share, "local_epochs", "batch_size", "model", "client_test_split")
    first_configs = {short_name(c.algorithm): c for c in reversed(plan.configs)}
    data_facts = {_swept_data(run): _data_facts(run.config, data[data_key(run.config)]) for run in plan.runs}
    return {
        **_merge_facts(data_facts),
        **{key: getattr(config, key) for key in keys if key not in swept_keys},
        **{f"swept {axis.name}": ", ".join(axis.values) for axis in plan.sweep},
        **{spelled(name): _settings(first_configs[short_name(name)], swept_keys) for name in plan.algorithms},
    }


def _data_facts(config: RunConfig, data: FederatedData) -> dict[str, str]:
    """Return the facts of one data set: its size, the samples of its clients, and its split."""
    sizes = [len(y) for _, y in data.clients]
    split = f"{config.split}(alpha={config.alpha:g})" if config.split == "dirichlet" else config.split
    per_client = f"{min(sizes)} to {max(sizes)}" if min(sizes) != max(sizes) else f"{sizes[0]}"
    facts = {
        "data": f"{data.name}: {sum(sizes)} training and {len(data.test[1])} test samples, {data.classes} classes",
        "clients": f"{len(data)} with {per_client} samples each",
    }
    return facts if data.priors is None else facts | {"split": f"{split}, seed {config.split_seed}"}


def _merge_facts(data_facts: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return one line for each fact that is the same in all data sets, and one line per data set for other facts.

    Lines of the second kind have the data set's name in their key.
    """
    lines: dict[str, str] = {}
    for key in dict.fromkeys(key for facts in data_facts.values() for key in facts):
        texts = {name: facts[key] for name, facts in data_facts.items() if key in facts}
        is_common = len({*texts.values()}) == 1 and len(texts) == len(data_facts)
        lines |= {key: next(iter(texts.values()))} if is_common else {f"{key}, {n}": text for n, text in texts.items()}
    return lines


def _settings(config: RunConfig, swept_keys: set[str]) -> str:
    settings = {
        "lr": "of the optimizer" if config.lr is None else config.lr,
        "lr_decay": config.lr_decay,
        **config.options,
    }
    return ", ".join(f"{key} {value}" for key, value in settings.items() if key not in swept_keys)


Data = Mapping[str, FederatedData]


def train(
    run_setup: Experiment, directory: Path, resume: bool, console: Console, label: str, resume_command: str,
    print_interval: int | None = None,
) -> FinishedRun:  # fmt: skip
    """Train one run.

    Args:
        run_setup: the experiment.
        directory: run directory.
        resume: continue the run in the directory.
        console: console of the progress.
        label: name of the run in the progress line.
        resume_command: command that continues the run. Ctrl-C and a full disk raise errors that show it.
        print_interval: number of rounds between lines of a log; default a tenth of the rounds.
    """
    try:
        with RunProgress(console, label, run_setup.config.rounds, print_interval) as progress:
            result = experiment.start(run_setup, directory, resume, progress)
    except KeyboardInterrupt:
        is_started = (directory / "config.json").exists()
        raise KeyboardInterrupt(
            f"Continue with:\n  {resume_command}" if is_started else "Nothing had been written yet."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"no space is left for {directory} ({error.strerror}). Its last checkpoint is whole; make room, and "
            f"continue with:\n  {resume_command}"
        ) from error
    algorithm, config = short_name(run_setup.config.algorithm), run_setup.config
    lr = result.settings.lr if isinstance(result.settings.lr, float) else None
    return FinishedRun(algorithm, config.seed, result.summary(), result.history, directory, algorithm, lr=lr)


def load_all(plan: Plan) -> dict[str, FederatedData]:
    """Return the data sets of a comparison by `data_key`, each loaded once: one, unless a key of the data is swept."""
    first = {data_key(config): config for config in reversed(plan.configs)}
    return {key: experiment.load_data(config) for key, config in first.items()}


def train_all(
    plan: Plan, data: Data, directory: Path, resume: bool, console: Console, repeat_command: str
) -> tuple[list[FinishedRun], dict[str, str]]:
    """Train all runs. Return the finished runs, and the errors of failed runs by name.

    `repeat_command` repeats the comparison. Raises RunDirectoryError if a run directory cannot be used.
    """
    resume_command = f"{repeat_command} --run-dir {shlex.quote(str(directory))} --resume"
    runs: list[FinishedRun] = []
    errors: dict[str, str] = {}
    countdown = Countdown(len(plan.runs))
    for run in plan.runs:
        name, countdown_text = run.directory, countdown.next()
        is_done = (directory / name / "summary.json").exists()
        run_setup, rounds = experiment.build(run.config, data[data_key(run.config)]), run.config.rounds
        try:
            label = countdown_text + name
            finished_run = train(run_setup, directory / name, resume, console, label, resume_command, rounds)
        except RunDirectoryError:
            raise
        except (RuntimeError, ValueError) as error:  # it diverged, say, or cannot be run so: the other runs go on
            errors[name] = str(error)
            print(f"error: {name}: {error}", file=sys.stderr)
            continue
        if not is_done:
            countdown.add_trained()
        runs.append(replace(finished_run, label=run.label, point=dict(run.point)))
    return runs, errors


def load_trained(plan: Plan, data: Data, run: FinishedRun) -> Experiment:
    """Return the experiment of a finished run, whose model has the final weights."""
    config = next(p.config for p in plan.runs if (p.label, p.config.seed) == (run.label, run.seed))
    run_setup = experiment.build(config, data[data_key(config)])
    run_setup.model.load_state_dict(safetensors.torch.load_file(run.run_dir / "model.safetensors"))
    return run_setup


def surfaces(
    plan: Plan, data: Data, runs: Sequence[FinishedRun], points: int, directory: Path
) -> dict[str, np.ndarray]:
    """Return the loss surface of each label's first run, `[points, points]`; also write surfaces.npz."""
    grids: dict[str, np.ndarray] = {}
    for label, group in by_label(runs).items():
        run_setup = load_trained(plan, data, group[0])
        loss = experiment.keywords(run_setup.config)["loss"]
        grids[label] = loss_surface(run_setup.model, run_setup.data.clients, loss, points)
    np.savez(directory / "surfaces.npz", **grids)  # type: ignore[arg-type] # the names of arrays
    return grids
