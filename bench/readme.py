"""The paragraph of README with figures: each figure comes from a file of bench/results, and the times of a loop and of
fastsam from one call."""

import textwrap
from pathlib import Path
from typing import Any

from bench import record as records
from bench.record import Record, median

WIDTH = 120
CLIENTS = 100
TEXT = """
A round of {clients} small clients on an {gpu} takes {mlp_loop:,.0f} ms in a plain PyTorch loop and {mlp:.1f} ms here if
the model is an MLP, and {cnn_loop:,.0f} ms and {cnn:.1f} ms if it is a CNN. Loop and fastsam were measured in one call:
[all GPU figures](docs/about_gpu.md).
"""


def text(folder: Path) -> str:
    """Return the paragraph from the files of a folder."""
    return textwrap.fill(
        " ".join(TEXT.split()).format(**figures(folder)), WIDTH, break_long_words=False, break_on_hyphens=False
    )


def figures(folder: Path) -> dict[str, Any]:
    """Return the GPU and the figures of the paragraph, by name."""
    rounds = records.read(folder / "federated-cuda.json")
    mlp, cnn = (_case(rounds, f"{model}, fedavg, by clients") for model in ("MLP", "CNN"))
    loop = "bare loop"
    seconds = {"mlp": (mlp, "vmap"), "mlp_loop": (mlp, loop), "cnn": (cnn, "graph"), "cnn_loop": (cnn, loop)}
    return {
        "gpu": rounds["environment"]["machine"]["gpus"][0], "clients": CLIENTS,
        **{name: 1e3 * _row(case, f"{row}, {CLIENTS}", "seconds") for name, (case, row) in seconds.items()},
    }  # fmt: skip


def _case(record: Record, name: str) -> Record:
    return next(case for case in record["cases"] if case["name"] == name)


def _row(case: Record, name: str, path: str) -> Any:
    return median(next(row for row in case["rows"] if row["name"] == name), path)
