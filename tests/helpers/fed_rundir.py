"""Runs with a run directory, and the files in it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fastsam import fed
from tests.helpers import oracle


class Alarm:
    """A callback that raises an error at the end of a round; it has no base class."""

    def __init__(self, round: int, error: BaseException) -> None:
        self.round, self.error = round, error

    def on_round(self, run: fed.callbacks.RunView, record: dict[str, Any]) -> None:
        if record["round"] == self.round:
            raise self.error


def start(directory: Path, **options: Any) -> fed.Result:
    keywords: dict[str, Any] = {
        "rounds": 3, "participation": 0.6, "run_dir": directory, "test": oracle.ragged_clients(sizes=(9,))[0],
        **options,
    }  # fmt: skip
    return fed.run(
        keywords.pop("model", None) or oracle.smooth_model(),
        keywords.pop("clients", None) or oracle.ragged_clients(),
        keywords.pop("algorithm", fed.MoFedSAM()),
        **keywords,
    )


def snapshot(directory: Path) -> dict[str, str]:
    """Return the digest of every file, by its path."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of all rounds without their times."""
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("seconds")}
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
