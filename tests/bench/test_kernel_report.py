"""The kernel benchmark's command, its tables and plots, and what is published of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernel_report, kernels, report
from bench.kernel_cases import KERNEL_SIZES, KernelSize, cut
from tests.helpers.bench_machine import Small, record_of
from tests.helpers.places import ROOT


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a short run."""
    out = tmp_path_factory.mktemp("kernels")
    arguments = ["--device", "cpu", "--quick", "--sizes", "50k,cut10", "--ops", "norm,restore", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "Machine", lambda device: Small())
        patch.setitem(KERNEL_SIZES, "cut10", KernelSize("cut10", "few in 10", cut(5000, 10)))
        assert kernels.main(arguments) == 0
    assert [p.name for p in out.iterdir()] == ["kernels-cpu.json"]
    return report.read(out / "kernels-cpu.json")


def test_plots_are_drawn_from_the_results(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "kernels-cpu.json"
    path.write_text(json.dumps(record))
    assert report.main([str(path), "--plot", str(tmp_path)]) == 0
    plots = sorted(tmp_path.glob("*.png"))
    assert [p.name for p in plots] == ["roofline-cpu.png", "tensors-cpu.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in plots)


def test_a_run_is_added_to_one_of_the_same_commit_alone(
    record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "Machine", lambda device: Small())
    path, more = (
        tmp_path / "kernels-cpu.json",
        ["--device", "cpu", "--parts", "ops", "--sizes", "50k", "--quick", "--add"],
    )
    path.write_text(json.dumps(record))
    assert kernels.main([*more, "--ops", "perturb", "--out", str(tmp_path)]) == 0
    found = report.read(path)
    assert {case["op"] for case in found["ops"]} == {"norm", "restore", "perturb"} and found["steps"] == record["steps"]
    assert found["environment"]["command"].count("bench.kernels") == 2
    path.write_text(json.dumps(record | {"environment": record["environment"] | {"commit": "another"}}))
    with pytest.raises(SystemExit, match="of commit another: measure into another folder"):
        kernels.main([*more, "--ops", "perturb", "--out", str(tmp_path)])


def test_a_run_writes_what_its_tables_say(record: dict[str, Any]) -> None:
    pieces = report.sections(record)
    assert set(pieces) == {f"kernels-cpu:{name}" for name in ("scattered", "flat", "steps", "made")}
    case = next(c for c in record["ops"] if c["name"] == "norm-50k-scattered")
    row = next(r for r in case["rows"] if r["name"] == "reference")
    shown = f"{row['eager']['fraction']['median']:.2f} ({kernel_report.duration(row['eager']['seconds']['median'])})"
    assert f"| norm | 4 | reference | {shown} |" in pieces["kernels-cpu:scattered"]
    step = next(s for s in record["steps"] if s["size"] == "cut10")
    copied = next(r for r in step["rows"] if r["name"] == "copied")
    assert kernel_report.duration(copied["eager"]["seconds"]["median"]) in pieces["kernels-cpu:steps"]
    assert "interpreter" in pieces["kernels-cpu:made"] and "`python -m bench.kernels" in pieces["kernels-cpu:made"]


def test_places_of_other_results_are_left(record: dict[str, Any]) -> None:
    text = "<!-- bench:copied -->\nold\n<!-- /bench -->\n<!-- bench:kernels-cpu:made -->\nold\n<!-- /bench -->\n"
    filled = report.fill(text, record)
    assert filled.startswith("<!-- bench:copied -->\nold\n") and "Made by `python -m bench.kernels" in filled
    assert report.fill(filled, record) == filled
    with pytest.raises(ValueError, match="there is no section 'kernels-cpu:x'"):
        report.fill("<!-- bench:kernels-cpu:x -->\n<!-- /bench -->", record)
    with pytest.raises(ValueError, match="there is no place marked `<!-- bench:kernels-cuda:SECTION"):
        report.fill(text, record_of(device="cuda"))


@pytest.mark.of_each_kind
def test_tables_of_a_gpu(tmp_path: Path) -> None:
    """Replayed figures before eager ones, launches and host times; plots of both."""

    def summary(value: float) -> dict[str, float]:
        return {"median": value, "q1": value, "q3": value}

    def of(seconds: float) -> dict[str, Any]:
        return {"seconds": summary(seconds), "fraction": summary(0.5)}

    row = {"name": "native", "title": "native", "gate": "green", "eager": of(3e-6), "replayed": of(2e-6), "launches": 1}
    case = {"name": "norm-50k-scattered", "op": "norm", "size": "50k", "title": "50 k", "layout": "scattered",
        "tensors": 20,
            "parameters": 51_994, "bytes_per_parameter": 4, "copy": summary(4e12), "rows": [row]}  # fmt: skip
    ours = row | {"title": "fastsam (native)", "launches": 3, "host_seconds": {"unchanged": 3e-5, "changed": 3.5e-5}}
    ours["replayed"] = of(2e-6) | {"faster_than_foreach": summary(2.25)}
    step = case | {"size": "cut10", "rows": [ours | {"extra_bytes_per_parameter": 8.0}]}
    record = record_of(device="cuda", ops=[case], steps=[step], left_out=["inner-30m-flat"])
    pieces = report.sections(record)
    assert "| norm | 4 | native | 0.50 (2.0 µs) |" in pieces["kernels-cuda:scattered"]
    for text in ("| fastsam (native) | 2.25 |", "| fastsam (native) | 3 |", "| fastsam (native) | 35.0 µs |"):
        assert text in pieces["kernels-cuda:steps"]
    assert "a GPU" in pieces["kernels-cuda:made"] and "No time was left for 1 cases" in pieces["kernels-cuda:made"]
    assert "4000 to 4000 GB/s" in pieces["kernels-cuda:made"]
    assert [p.name for p in kernel_report.plots(record, tmp_path)] == ["roofline-cuda.png", "tensors-cuda.png"]


def test_no_time_left_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        kernels.main(["--device", "cpu", "--sizes", "50k", "--ops", "norm", "--seconds", "0", "--out", str(tmp_path)])
        == 1
    )
    record = json.loads((tmp_path / "kernels-cpu.json").read_text())
    assert record["left_out"] == ["norm-50k-scattered", "norm-50k-flat", "steps-50k"]
    assert "no time left for norm-50k-flat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "resnet81"], "there is no size 'resnet81'; did you mean 'resnet18'?"),
        (["--ops", "pertrub"], "there is no op 'pertrub'; did you mean 'perturb'?"),
        (["--threads", "0"], "--threads takes whole numbers from 1, got 0"),
        (["--parts", "step"], "there is no part 'step'; did you mean 'steps'?"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        kernels.parse(["--device", "cpu", "--out", "x", *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_cuda_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.parse(["--device", "cuda", "--out", "x"])
    assert "torch sees no CUDA device; measure with --device cpu" in capsys.readouterr().err


# ---- what is published
# -------------------------------------------------------------------------------------------------


@pytest.mark.of_each_kind
@pytest.mark.parametrize(
    "results", sorted((ROOT / "bench" / "results").glob("kernels-cpu*.json")), ids=lambda p: p.name
)
def test_published_numbers_are_those_of_the_results(results: Path) -> None:
    """Every results file has its place in the benchmarks page, and the page says what it says. (A GPU's:
    test_gpu_pages.py.)"""
    page, found = ROOT / "docs" / "benchmarks.md", report.read(results)
    command = f"python -m bench.report {results.relative_to(ROOT)} --into {page.relative_to(ROOT)}"
    assert report.fill(page.read_text(), found) == page.read_text(), f"numbers differ from the results; run {command}"
    assert not any(row["gate"] == "red" for result in (*found["ops"], *found["steps"]) for row in result["rows"])
