"""The script of `make gpu`: parts that fail, hang or cannot run do not hide other parts. The files of build/carry."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch

from bench import __main__ as command
from bench import carry, gpu, ncu
from bench import record as records
from fastsam_kernels import native
from tests.gpu import sanitized
from tests.helpers.places import ROOT


def part(name: str, code: str, weight: int = 60, prefix: str = "") -> gpu.Part:
    return gpu.Part(name, 0, f"the part {name}", f'{prefix}python -c "{code}"', weight)


PARTS = (
    part("build", "print('made'); print('  in some folder')"),
    part("red", "print('1 failed, 2 passed'); raise SystemExit(1)"),
    part("hangs", "import time; print('started', flush=True); time.sleep(60)", 4),
    part("deaf", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)", 4),
    part("absent", "print('not permitted'); raise SystemExit(77)"),
    part("skips", "print('12 skipped')", prefix="env ABOUT=pytest "),
    gpu.Part("sanitizer", 1, "the part sanitizer", "compute-sanitizer", 60),
    part("green", "import fastsam, fastsam_kernels; print('========= 3 passed =========')"),
)


@pytest.mark.of_each_kind
def test_a_part_does_not_hide_the_others(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "PARTS", PARTS)
    assert gpu.main(["--out", str(tmp_path), "--parts", *(part.name for part in PARTS), "--seconds", "90"]) == 1
    page, output = (tmp_path / "summary.md").read_text(), capsys.readouterr().out
    for line in (
        r"\*\*passed\*\* the part build, \d+ s: made", r"\*\*failed\*\* the part red, \d+ s: 1 failed, 2 passed",
        r"\*\*timed out\*\* the part hangs, \d+ s: started", r"\*\*timed out\*\* the part deaf, ",
        r"\*\*left out\*\* the part absent, \d+ s: not permitted",
        r"\*\*failed\*\* the part skips, \d+ s: no test passed: 12 skipped",
        r"\*\*left out\*\* the part sanitizer, 0 s: no GPU: torch sees no CUDA device",
        r"\*\*passed\*\* the part green, \d+ s: 3 passed",
    ):  # fmt: skip
        assert re.search(line, page), (line, page)
    assert page in output and output.rstrip().endswith(str(tmp_path)), "the summary comes last"
    assert "started" in (tmp_path / "hangs.txt").read_text()


def test_checks_run_at_the_same_time(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Each of two checks ends when the other one has begun."""
    code = (
        "import time; from pathlib import Path; Path('{0}').touch(); end = time.monotonic() + 20\n"
        "while not Path('{1}').exists(): assert time.monotonic() < end\n"
        "print('1 passed')"
    )
    files = [str(tmp_path / name) for name in ("first", "second")]
    commands = [f'python -c "{code.format(*pair)}"' for pair in (files, files[::-1])]
    monkeypatch.setattr(gpu, "PARTS", [gpu.Part(f"p{i}", 0, "", text, 20, True) for i, text in enumerate(commands)])
    assert gpu.main(["--out", str(tmp_path), "--seconds", "60"]) == 0
    assert (tmp_path / "summary.md").read_text().count("1 passed") == 2


@pytest.mark.of_each_kind
def test_the_real_parts() -> None:
    assert [part.name for part in gpu.PARTS if not gpu.absent(part, {"machine": {}}, "")] == ["build"]
    assert (
        gpu.absent(next(part for part in gpu.PARTS if part.name == "memcheck"), {"machine": {"gpus": ["H100"]}}, "")
        != ""
    )
    assert {part.call for part in gpu.PARTS} == {0, 1, 2, 3}
    for one in (one for one in gpu.PARTS if "bench " in one.command):
        words = one.command.replace("--device cuda", "").replace("SECONDS", "1").replace("'", "").split()[3:]
        assert command.parse(words).selection, one.name


@pytest.mark.of_each_kind
def test_the_tests_of_a_gpu_are_where_the_script_looks() -> None:
    """The script's list has every module with a test marked `gpu`, or with a test of each backend on each device."""
    paths = [ROOT / path for path in gpu.GPU_TESTS.split()]
    assert all(path.exists() for path in paths)
    sign = re.compile(r"@pytest\.mark\.gpu\b|def test_\w+\([^)]*\b(every_)?backend: (backends\.)?Backend\b")
    modules = [path for path in (ROOT / "tests").rglob("test_*.py") if sign.search(path.read_text())]
    modules = [path for path in modules if "bench" not in path.parts]
    assert len(modules) > 5
    strays = [path for path in modules if not any(path == root or root in path.parents for root in paths)]
    assert not strays, strays


# ---- Nsight Compute

FAKE = """#!{python}
import sys
rows = ['==PROF== a line of progress', '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
assert sys.argv[sys.argv.index("--clock-control") + 1] == "none"
for i in range(10):
    rows += [f'"{{i}}","void fastsam::kernel{{i}}(int, float)","{{m}}","usecond","{{i}}.5"' for m in metrics]
print("\\n".join(rows))
{exporter}
"""


@pytest.mark.of_each_kind
@pytest.mark.parametrize(
    ("exporter", "code", "message"),
    [
        ("", 0, "perturb resnet18 `void fastsam::kernel4(int, float)`"),
        ("print('==ERROR== ERR_NVGPUCTRPERM'); raise SystemExit(1)", command.ABSENT, "does not permit"),
        (None, command.ABSENT, "not installed"),
    ],
)
def test_nsight_compute_is_read_or_left_out(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], exporter: Any, code: int, message: str
) -> None:
    program = tmp_path / "ncu"
    program.write_text(FAKE.format(python=sys.executable, exporter=exporter))
    program.chmod(0o755)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: str(program) if exporter is not None else None)
    assert command.main(["ncu", "--out", str(tmp_path)]) == code and message in capsys.readouterr().out
    if code == 0:
        row = list(records.rows(records.read(tmp_path / "ncu.json")))[4]
        assert row["duration"] == "4.5 usecond" and row["metrics"]["DRAM, %"] == "4.5"


def test_a_failing_ncu_is_an_error(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: "/bin/false")
    with pytest.raises(RuntimeError, match="ended with code 1"):
        ncu.measure()


@pytest.mark.skipif(native.why_not("cuda") is None, reason="the library for CUDA is there")
def test_without_the_library_nothing_is_profiled() -> None:
    """The operators exist only once the library is loaded."""
    with pytest.raises(RuntimeError, match=r"kernels for CUDA cannot be profiled: \w+"):
        ncu.main()


def test_the_row_programs_under_the_sanitizers_run(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sanitized, "DEVICE", "cpu")
    sanitized.row_programs()


# ---- what is carried


@pytest.mark.of_each_kind
def test_libraries_that_were_compiled_elsewhere_are_taken(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    source, kernels = tmp_path / "carried", tmp_path / "kernels"
    source.mkdir(), kernels.mkdir()

    gpu.take_libraries(tmp_path / "nothing was carried", kernels)
    for folder, names in ((source, (gpu.REPORT, "lib.so", gpu.ARCHITECTURES)), (kernels, (gpu.REPORT, "lib.so"))):
        for name in names:
            (folder / name).write_text(f"{folder.name} 9.0")
    gpu.take_libraries(source, kernels)
    assert (kernels / "lib.so").read_text() == "kernels 9.0" and gpu.is_for("8.0", kernels)
    (kernels / gpu.REPORT).unlink()
    gpu.take_libraries(source, kernels)
    assert (kernels / "lib.so").read_text() == "carried 9.0"
    assert gpu.is_for("9.0", kernels) and not gpu.is_for("8.0", kernels)
    facts = {"machine": {"gpus": ["A100"], "capability": "8.0"}, "backends": {"native/cuda": "available"}}
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert not gpu.absent(gpu.PARTS[0], facts, "")
    facts["machine"]["capability"] = "9.0"
    assert gpu.absent(gpu.PARTS[0], facts, "") == "the libraries are built from these sources"


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("the sources have no history to export a commit from")
    carry.export("HEAD", tmp_path / "against", tmp_path / "no libraries")
    yield tmp_path / "against"


@pytest.mark.of_each_kind
def test_another_tree_serves_its_own_package(exported: Path) -> None:
    """A measurement that is started in the tree, and the processes that it starts."""
    names = "print(fastsam.__file__, fastsam_kernels.__file__, process.__file__)"
    code = (
        "import sys, fastsam, fastsam_kernels; from bench.fed import process\n"
        f"code = 'import json, fastsam; print(json.dumps(fastsam.__file__))'; {names}\n"
        "print(process.Process([sys.executable, '-c', code], {}).answer())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=exported, env=environment, capture_output=True, text=True, check=True)
    places = [Path(text) for text in result.stdout.split()]
    assert [path.is_relative_to(exported) for path in places] == [True, True, False, True]
    assert len((exported / carry.COMMIT_FILE).read_text().strip()) == 40
