"""The writer of tables and pages: what the files say stands on the pages, and every figure has its place."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import ncu, plots, report
from bench.fed import overhead
from bench.fed.race import Figure, Result
from bench.federated import Case
from bench.timing import Summary
from tests.helpers.bench_machine import record_of

pytestmark = pytest.mark.of_each_kind


def summary(value: float) -> dict[str, float]:
    return asdict(Summary(value, 0.9 * value, 1.1 * value))


def federated() -> dict[str, Any]:
    """A record with every part and every way to fail."""
    bars = [Figure(n, Summary(s, s, s), Summary(s, 0.9 * s, 1.1 * s), 0.5, 231.4) for n, s in
            (("bare loop", 1.0), ("fastsam, vmap", 3.21))]  # fmt: skip
    bars.append(Figure("flower", problem="no | actors\nat all"))
    one = Summary(1.0312, 1.02, 1.04)
    costs = [overhead.Cost("fedcm", one, one, one), overhead.Cost("hidden", round=one), overhead.Cost("x", problem="y")]
    series = {"title": "t", "name": "graph", "at": 4, "seconds": 0.0123, "problem": ""}
    busy = {"executor": "graph", "clients": 20, "kernels": 9, "streams": 5, "busy": 0.931, "at_once": 3.26}
    gpu = {
        "series": [series, series | {"at": 8, "name": "vmap", "seconds": None}],
        "jobs": [{"name": "mlp graph", "problem": "code 1: an error"}, {"name": "cnn graph", "problem": ""}],
        "busy": [busy, {"executor": "vmap", "clients": 20, "problem": "no profiler"}],
    }
    growth = Case("by clients", Result(bars[:2], 1.0), "clients", (10.0, 100.0))
    parts: dict[str, Any] = {"speed": [asdict(Case("MLP, fedavg", Result(bars, 1.0)))], "growth": [asdict(growth)]}
    parts |= {"overhead": [asdict(overhead.Costs("MLP, auto", costs, 0.0))], "share": {"own_share": 0.034}, "gpu": gpu}
    machine, again = {"cores": 2, "cpu": "A CPU"}, {"overhead": {"commit": "fedcba9876543210", "command": "c"}}
    e = record_of()["environment"]
    return {**e, "kind": report.FEDERATED, "machine": machine, "device": "cpu", "parts": parts, "again": again}


def test_pages_hold_what_was_measured() -> None:
    for path, text in report.pages().items():
        assert text == path.read_text(), f"{path.name} differs from the results: python -m bench.report --publish"
    named = [name for path in report.pages() for name in report.places(path.read_text())]
    wanted = {"bench:all", "bench:kernels-cpu:all", "federated:all", "family:last", "accuracy:last"}
    assert wanted | {f"gpu:{name}" for name in ("kernels", "federated", "family", "ncu", "predictions")} <= set(named)


def test_other_places_and_the_rest_of_a_page_are_left() -> None:
    text = "before\n<!-- bench:memory -->\nold\n<!-- /bench -->\nafter <!-- gpu:x -->\nold\n<!-- /gpu -->\n"
    filled = report.fill(text, {"bench:memory": "new"})
    assert filled == text.replace("old", "new", 1) and report.fill(filled, {"bench:memory": "new"}) == filled


@pytest.mark.parametrize("content", ["not json", "[]", '{"kind": "something else"}'])
def test_a_foreign_file_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step.json").write_text(content)
    assert report.main([str(tmp_path / "step.json")]) == 1 and "expected" in capsys.readouterr().err


def test_publishing_stores_the_file_and_writes_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a page without a place\n")
    (tmp_path / "docs" / "a.md").write_text("<!-- federated:all -->\nold\n<!-- /federated -->\n")
    old = {key: value for key, value in federated().items() if key != "kind"}  # as such files were first written
    (tmp_path / "new.json").write_text(json.dumps(old))
    assert report.main([str(tmp_path / "new.json"), "--publish"]) == 0
    assert "| fastsam, vmap | 3.21 |" in (tmp_path / "docs" / "a.md").read_text()
    assert (tmp_path / "federated.json").exists() and (tmp_path / "federated.png").exists()


def test_federated_tables_say_every_figure(tmp_path: Path) -> None:
    page = report.markdown(federated())
    assert page.startswith("2 cores of A CPU; torch 2.13; commit `0123456789ab`; `python -m bench.kernels --made-up`")
    for text in (
        "Part `overhead` again: commit `fedcba987654`; `c`",
        "| fastsam, vmap | 3.21 | 2.89–3.53 | 231 MiB |",
        "| flower | failed: no / actors at all | | |",
        "| fedcm | 1.031 | 1.020–1.040 | 1.031 | 1.020–1.040 |",
        "| hidden | – | – | 1.031 | 1.020–1.040 |",
        "| x | failed: y | | | |",
        "3.4% of a CNN round",
        "| 4 | 12.3 | – |",
        "| 8 | – | – |",
        "| graph | 93% | 3.3 | 5 |",
        "| vmap | failed: no profiler | | |",
        "- mlp graph: failed: code 1: an error",
    ):
        assert text in page
    assert "cnn graph" not in page
    assert [path.name for path in plots.draw(federated(), tmp_path)] == ["federated.png"]
    assert plots.draw(federated() | {"parts": {}}, tmp_path) == []


def test_tables_of_a_gpu(tmp_path: Path) -> None:
    """Replayed figures before eager ones, launches and host times; plots of both."""

    def of(seconds: float) -> dict[str, Any]:
        return {"seconds": summary(seconds), "fraction": summary(0.5)}

    row = {"name": "native", "title": "native", "gate": "green", "eager": of(3e-6), "replayed": of(2e-6), "launches": 1}
    red = {"name": "triton", "title": "triton", "gate": "red", "reason": "it raised"}
    case = {"name": "norm-50k-scattered", "op": "norm", "size": "50k", "title": "50 k", "layout": "scattered"}
    case |= {"tensors": 20, "parameters": 51_994, "bytes_per_parameter": 4, "copy": summary(4e12), "rows": [row, red]}
    ours = row | {"title": "fastsam (native)", "launches": 3, "host_seconds": {"unchanged": 3e-5, "changed": 3.5e-5}}
    ours["replayed"] = of(2e-6) | {"faster_than_foreach": summary(2.25)}
    step = case | {"size": "cut10", "rows": [ours | {"extra_bytes_per_parameter": 8.0}]}
    record = record_of(device="cuda", ops=[case], steps=[step], left_out=["inner-30m-flat"])
    text = report.markdown(record)
    for piece in ("| norm | 4 | native | 0.50 (2.0 µs) |", "| fastsam (native) | 2.25 |", "| fastsam (native) | 3 |",
                  "| fastsam (native) | 35.0 µs |", "a GPU; Python 3.11", "4000 to 4000 GB/s", "for 1 cases",
                  "Not measured: triton: it raised.", "commit `0123456789ab+changes`"):  # fmt: skip
        assert piece in text
    assert [p.name for p in plots.draw(record, tmp_path)] == ["roofline-cuda.png", "tensors-cuda.png"]


def test_a_results_file_of_a_gpu_fills_the_pages() -> None:
    """With commit and device; what is not in it is not measured, with the reason if there is one."""
    empty = report.sections({"kind": report.GPU})
    assert all(text == "Not measured." for name, text in empty.items() if name != "gpu:predictions")
    record = record_of(device="cuda")
    variants = [
        {"name": "SAM", "seconds": summary(1e-5), "to_sam": summary(1), "floor_fraction": summary(0.5)},
        {"name": "WSAM", "problem": "weights differ"},
    ]
    family = record | {"kind": report.FAMILY, "results": [{"title": "50 k", "variants": variants}]}
    rounds = federated() | {"device": "cuda", "machine": record["environment"]["machine"]}
    merged = {"kind": report.GPU, "kernels": record, "federated": rounds, "family": family}
    merged["parts"] = [{"name": "ncu", "state": "left out", "reason": "", "result": "ncu is not installed"}]
    found = report.sections(merged)
    assert found.pop("gpu:ncu") == "Not measured: ncu is not installed."
    assert all("a GPU" in text and "0123456789ab" in text for text in found.values())
    assert "| SAM | 10.0 | 1.00 | 0.50 |\n| WSAM | not measured: weights differ | | |" in found["gpu:family"]
    rows = [{"label": "perturb 50k", "kernel": "k<float>", "duration": 4.5, "unit": "us"} | dict.fromkeys(
        ncu.METRICS.values(), 7)]  # fmt: skip
    table = report.markdown(record | {"kind": report.NCU, "rows": rows})
    assert "| perturb 50k `k<float>` | 7 us | 7 |" in table
