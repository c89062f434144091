"""The federated benchmark's tables and plots, and the page that holds what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.fed import overhead, report
from bench.timing import Summary
from tests.helpers.places import ROOT


def figure(label: str, speed: float, problem: str | None = None) -> dict[str, Any]:
    if problem:
        return {"label": label, "seconds": None, "speed": None, "loss": None, "peak_mib": None, "problem": problem}
    return {
        "label": label, "seconds": asdict(Summary(1 / speed, 0.9 / speed, 1.1 / speed)),
        "speed": asdict(Summary(speed, 0.9 * speed, 1.1 * speed)), "loss": 0.5, "peak_mib": 231.4, "problem": None,
    }  # fmt: skip


def content() -> dict[str, Any]:
    bars = [figure("bare loop", 1.0), figure("fastsam, vmap", 3.21), figure("flower", 0, "no | actors\nat all")]
    line = [figure(f"{n} clients", 1 / n) for n in (10, 100)] + [figure("1,000 clients", 0, "too many")]
    return {
        "command": "python -m bench.federated",
        "date": "2026-01-01T00:00:00+00:00",
        "commit": "0123456789abcdef",
        "machine": {"cores": 2, "cpu": "A CPU"},
        "versions": {"torch": "2.13.0"},
        "device": "cpu",
        "parts": {
            "speed": [{"title": "MLP, fedavg", "result": {"figures": bars, "busy": 1.0}, "axis": "", "at": []}],
            "growth": [
                {
                    "title": "by clients",
                    "result": {"figures": line, "busy": 1.0},
                    "axis": "clients",
                    "at": [10, 100, 1000],
                }
            ],
            "overhead": [
                {
                    "title": "MLP, auto",
                    "costs": [
                        asdict(
                            overhead.Cost(
                                "fedcm", Summary(1.0312, 1.02, 1.04), Summary(1.2, 1.1, 1.3), Summary(1, 1, 1)
                            )
                        ),
                        asdict(overhead.Cost("fedavg, hidden", round=Summary(2, 1.5, 3))),
                        asdict(overhead.Cost("feddyn", problem="no | vector")),
                    ],
                    "busy": 0.0,
                }
            ],
            "share": {"seconds": 0.2, "own_share": 0.034},
            "gpu": {
                "series": [
                    {"title": "t", "name": "streams", "at": 4, "seconds": 0.0123, "problem": ""},
                    {"title": "t", "name": "graph", "at": 4, "seconds": None, "problem": "no time left"},
                    {"title": "t", "name": "graph", "at": 8, "seconds": 0.5, "problem": ""},
                ],
                "jobs": [{"name": "mlp graph", "problem": "code 1: an error"}, {"name": "cnn graph", "problem": ""}],
                "busy": [
                    {"executor": "graph", "clients": 20, "kernels": 9, "streams": 5, "busy": 0.931, "at_once": 3.26},
                    {"executor": "vmap", "clients": 20, "problem": "RuntimeError: no profiler"},
                ],
            },
        },
    }


@pytest.mark.of_each_kind
def test_a_page_says_every_figure() -> None:
    again = {"overhead": {"commit": "fedcba9876543210", "command": "python -m bench.federated --parts overhead"}}
    page = report.page(content() | {"again": again})
    assert "Part `overhead` again: commit `fedcba987654`; `python -m bench.federated --parts overhead`" in page
    assert page.startswith("2 cores of A CPU; torch 2.13.0; commit `0123456789ab`; `python -m bench.federated`")
    assert "| fastsam, vmap | 3.21 | 2.89–3.53 | 231 MiB |" in page
    assert "| flower | failed: no / actors at all | | |" in page
    assert "| fedcm | 1.031 | 1.020–1.040 | 1.200 | 1.100–1.300 |" in page
    assert "| fedavg, hidden | – | – | 2.000 | 1.500–3.000 |" in page
    assert "| feddyn | failed: no / vector | | | |" in page
    assert "3.4% of a CNN round" in page
    assert "| 4 | 12.3 | – |" in page and "| 8 | – | 500.0 |" in page
    assert "| graph | 93% | 3.3 | 5 |" in page and "| vmap | failed: RuntimeError: no profiler | | |" in page
    assert "- mlp graph: failed: code 1: an error" in page and "cnn graph" not in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {6, 5, 4}


def test_the_plot_has_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert report.plot(content(), path) and path.read_bytes().startswith(b"\x89PNG")
    assert not report.plot({"parts": {"share": {}}}, tmp_path / "none.png") and not (tmp_path / "none.png").exists()


def test_the_command_writes_tables_into_a_page(tmp_path: Path) -> None:
    source, page = tmp_path / "federated.json", tmp_path / "page.md"
    source.write_text(json.dumps(content()))
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert report.main([str(source), "--into", str(page)]) == 0
    first = page.read_text()
    assert first.startswith("before\n") and first.endswith("\nafter\n") and "old" not in first and "3.21" in first
    assert "](federated.png)" in first
    assert report.main([str(source), "--into", str(page)]) == 0 and page.read_text() == first
    assert (tmp_path / "federated.md").read_text() == report.page(content())
    with pytest.raises(ValueError, match="must have the lines"):
        report.into("no markers", "")


@pytest.mark.of_each_kind
def test_the_page_holds_what_was_measured() -> None:
    """docs/benchmarks.md and the JSON beside it say the same; until there is one, the page says that nothing is
    measured."""
    text, measured = (ROOT / "docs" / "benchmarks.md").read_text(), ROOT / "bench" / "results" / "federated.json"
    held = text[text.index(report.BEGIN) + len(report.BEGIN) : text.index(report.END)].strip()
    expected = report.UNMEASURED
    if measured.exists():
        expected = report.section(report.page(json.loads(measured.read_text())), "../bench/results/federated.png")
    assert held == expected.strip()
