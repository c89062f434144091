"""What the pages say of a GPU is what its files say, and that nothing is measured where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_pages
from tests.helpers.bench_machine import record_of


def place(name: str, text: str = "old\n") -> str:
    return f"before\n<!-- gpu:{name} -->\n{text}<!-- /gpu -->\nafter\n"


@pytest.mark.of_each_kind
def test_the_pages_hold_what_the_files_say() -> None:
    pages = [path.read_text() for path in gpu_pages.PAGES]
    named = [name for page in pages for name in gpu_pages.places(page)]
    assert sorted(named) == sorted([*gpu_pages.TEXTS, gpu_pages.PREDICTIONS]), "each file has one place"
    for path, page in zip(gpu_pages.PAGES, pages, strict=True):
        assert gpu_pages.fill(page) == page, f"{path.name} differs from the results; run python -m bench.gpu_pages"


def test_without_a_file_nothing_is_measured(tmp_path: Path) -> None:
    for name in gpu_pages.TEXTS:
        assert gpu_pages.fill(place(name), tmp_path) == place(name, "Not measured.\n")
    with pytest.raises(KeyError, match="kernel-cuda"):
        gpu_pages.fill(place("kernel-cuda"), tmp_path)


@pytest.mark.of_each_kind
def test_a_result_stands_there_with_commit_and_device(tmp_path: Path) -> None:
    record = record_of(device="cuda")
    e: dict[str, Any] = record["environment"]
    run = {**e, "device": "cuda", "parts": {}}
    merged = {"kernels": record, "federated": run, "family": record | {"results": []}, "ncu": record | {"rows": []}}
    (tmp_path / "gpu.json").write_text(json.dumps(merged))
    for name in gpu_pages.TEXTS:
        filled = gpu_pages.fill(place(name), tmp_path)
        assert "a GPU" in filled and "0123456789ab" in filled and "old" not in filled
        assert filled.startswith("before\n") and filled.endswith("\nafter\n")
        assert gpu_pages.fill(filled, tmp_path) == filled
    del merged["ncu"]
    merged["parts"] = [{"name": "ncu", "state": "left out", "reason": "", "result": "ncu is not installed"}]
    (tmp_path / "gpu.json").write_text(json.dumps(merged))
    assert gpu_pages.fill(place("ncu"), tmp_path) == place("ncu", "Not measured: ncu is not installed.\n")
