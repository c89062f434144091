"""New and continued run directories, and the options that must be the same when a run is resumed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from fastsam.fed.clients.population import Population
from fastsam.fed.common.atomic_files import read_bytes, write_json
from fastsam.fed.common.fingerprints import describe, difference, structure
from fastsam.fed.loop.loop import Loop
from fastsam.fed.loop.options import Settings
from fastsam.fed.rundir.checkpoint import RunDirectory, RunDirectoryError, RunState
from fastsam.fed.rundir.environment import environment, float32_precision
from fastsam.fed.update.memory_format import order

log = logging.getLogger("fastsam.fed")


def open_directory(
    run_dir: str | Path,
    resume: bool,
    loop: Loop,
    start: RunState,
    identity: dict[str, Any],
    config: dict[str, Any] | None,
    stack: ExitStack,
) -> tuple[RunDirectory, RunState]:
    """Return the run directory, and the state to continue from: `start` or the one in the directory."""
    ranks, place = loop.ranks, loop.population.device
    directory = RunDirectory(Path(run_dir), identity, place, ranks, loop.states.adopt, stack)
    state = directory.read(resume)
    ranks.gather(None)  # all ranks have read before one writes
    if state is None:
        directory.start(
            start,
            identity if config is None else config,
            environment(place)
            | {
                "executor": loop.choice.record(),
                "client_state": {"where": loop.states.location, "reason": loop.states.reason},
            },
        )
        return directory, start
    if state.round > loop.settings.rounds:
        raise ValueError(
            f"rounds must be {state.round} or more, because {run_dir} has {state.round}; got {loop.settings.rounds}"
        )
    _check_rates(run_dir, state.history, loop.settings)
    _warn_environment(directory.path, float32_precision(place))
    directory.rewind()
    if ranks.first:
        write_json(directory.path / "config.json", identity if config is None else config)  # rounds, say, may be others
    return directory, state


def _warn_environment(path: Path, precision: dict[str, str]) -> None:
    """Log a warning if the run began with another precision of float32 operations."""
    try:
        old_precision = json.loads(read_bytes(path / "environment.json"))["float32_precision"]
        values = difference({"float32_precision": old_precision}, {"float32_precision": precision})
    except (OSError, ValueError, KeyError, TypeError):  # written by another program
        return
    if values is not None:
        log.warning("the run in %s began with another %s: %s; it goes on with %s", path, *values)


def _check_rates(run_dir: str | Path, history: Sequence[Mapping[str, Any]], settings: Settings) -> None:
    """Raise RunDirectoryError if a learning rate that is a function gives other values than in the completed rounds."""
    for record in history:
        t = record["round"] - 1
        for name, value in settings.rates_of(t).items():
            if record.get(name, value) != value:
                raise RunDirectoryError(
                    f"the run in {run_dir} cannot be resumed with another {name}: in round {t + 1} it was "
                    f"{record[name]!r}, now it is {value!r}"
                )


def identity_of(
    facts: dict[str, Any],
    settings: Settings,
    loop: Loop,
    models: tuple[nn.Module, nn.Module],
    population: Population,
    collate: object,
) -> dict[str, Any]:
    """Return the facts that must be the same when the run is resumed. `models` are the user's and the trained one.

    `Settings.identity` returns the options among them; options.py declares with `resumable=True` which may change.
    """
    numbers = loop.choice.executor.numbers
    if numbers != "exact" and loop.ranks.size > 1:  # the ranks decide which clients are stacked together
        numbers += f", {loop.ranks.size} ranks"
    model_facts = {
        "model": structure(models[0]),
        "data": population.fingerprint(),
        "backend": facts["backend"],
        "device": population.device.type,
        "numbers": numbers,
        "memory_format": order(models[1]),
    }
    return settings_of(facts, settings) | model_facts | ({} if collate is None else {"collate": describe(collate)})


def settings_of(facts: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the algorithm and the options of a run, as JSON has them."""
    algorithm = {"algorithm": facts["algorithm"], **{f"algorithm.{k}": v for k, v in facts["hyperparameters"].items()}}
    return {**algorithm, **settings.identity()}
