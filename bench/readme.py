"""The paragraph of README with figures: each figure comes from a file of bench/results, and the times of a loop and of
fastsam from one call."""

import textwrap
from pathlib import Path
from typing import Any

from bench import record as records
from bench.record import Record, median

WIDTH = 120
LARGE = ("30m", "100m")  # sizes from 30 million parameters on
CLIENTS = 100
TEXT = """
On an {gpu} the optimizer part of a captured step takes {least:.2f} to {most:.2f} of the time of
`torch._foreach_*` with fused SGD, and from 30 million parameters on it reaches {slowest:.2f} to {fastest:.2f} of the
memory's speed. A round of {clients} small, equal clients takes {mlp:.1f} ms where a plain PyTorch loop takes
{mlp_loop:.0f} ms (an MLP), or {cnn:.0f} ms and {cnn_loop:.0f} ms (a CNN): [all GPU
figures](docs/benchmarks_method.md#a-gpu-in-three-calls).
"""


def text(folder: Path) -> str:
    """Return the paragraph from the files of a folder."""
    return textwrap.fill(
        " ".join(TEXT.split()).format(**figures(folder)), WIDTH, break_long_words=False, break_on_hyphens=False
    )


def figures(folder: Path) -> dict[str, Any]:
    """Return the GPU and the figures of the paragraph, by name."""
    steps, rounds = (records.read(folder / f"{name}-cuda.json") for name in ("kernels", "federated"))
    cases = [case for case in steps["cases"] if case["part"] == "steps"]
    times = [_row(case, "fastsam_native", "replayed.to.foreach") for case in cases]
    speeds = [_row(case, "fastsam_native", "replayed.fraction") for case in cases if case["name"] in LARGE]
    mlp, cnn = (_case(rounds, f"{model}, fedavg, by clients") for model in ("MLP", "CNN"))
    loop = "bare loop"
    seconds = {"mlp": (mlp, "vmap"), "mlp_loop": (mlp, loop), "cnn": (cnn, "graph"), "cnn_loop": (cnn, loop)}
    return {
        "gpu": steps["environment"]["machine"]["gpus"][0],
        "least": min(times), "most": max(times), "slowest": min(speeds), "fastest": max(speeds), "clients": CLIENTS,
        **{name: 1e3 * _row(case, f"{row}, {CLIENTS}", "seconds") for name, (case, row) in seconds.items()},
    }  # fmt: skip


def _case(record: Record, name: str) -> Record:
    return next(case for case in record["cases"] if case["name"] == name)


def _row(case: Record, name: str, path: str) -> Any:
    return median(next(row for row in case["rows"] if row["name"] == name), path)
