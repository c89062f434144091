"""The parts of `make gpu` with tables of their own: Nsight Compute and the variants of SAM, seen without a GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import family_gpu, ncu
from bench.family import ENTRIES
from bench.gpu import ABSENT
from bench.kernel_cases import KERNEL_SIZES
from tests.helpers.bench_machine import Small, record_of

pytestmark = pytest.mark.of_each_kind

FAKE = """#!{python}
import sys
rows = ['==PROF== a line of progress', '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
assert sys.argv[sys.argv.index("--clock-control") + 1] == "none"
for i in range(10):
    rows += [f'"{{i}}","void fastsam::kernel{{i}}(int, float)","{{m}}","usecond","{{i}}.5"' for m in metrics]
print("\\n".join(rows))
{more}
"""


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ("", 0, "| perturb resnet18 `void fastsam::kernel4(int, float)` | 4.5 usecond | 4.5 |"),
        ("print('==ERROR== ERR_NVGPUCTRPERM'); raise SystemExit(1)", ABSENT, "does not permit"),
        ("print('out of memory'); raise SystemExit(3)", 1, "out of memory"),
    ],
)
def test_nsight_compute_is_read_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: str, code: int, said: str
) -> None:
    program = tmp_path / "ncu"
    program.write_text(FAKE.format(python=sys.executable, more=more))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    assert ncu.main(["--out", str(tmp_path)]) == code
    assert said in capsys.readouterr().out
    assert (tmp_path / ncu.FILE).exists() == (code == 0)


def test_nsight_compute_may_be_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    assert ncu.main(["--out", str(tmp_path)]) == ABSENT and "not installed" in capsys.readouterr().out


def test_variants_of_sam_have_figures_only_where_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    some: dict[str, Any] = {name: ENTRIES[name] for name in ("SAM", "WSAM")}
    monkeypatch.setattr(family_gpu, "ENTRIES", some)
    assert family_gpu.wrong(some["WSAM"], torch.device("cpu")) == ""
    assert "RuntimeError" in family_gpu.wrong(some["SAM"], torch.device("meta")) or torch.cuda.is_available()
    size = replace(KERNEL_SIZES["50k"], shapes=((40, 25), (40,)))
    result = family_gpu.measure(Small(), size, {"SAM": "", "WSAM": "weights differ"}, 3)
    sam, wsam = result["rows"]
    assert sam["to_sam"]["median"] == 1 and sam["seconds"]["median"] > 0 and "seconds" not in wsam
    page = family_gpu.page(record_of(device="cuda") | {"results": [result]})
    assert "| WSAM | not measured: weights differ | | |" in page and "| SAM |" in page
