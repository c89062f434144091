"""The script behind `make gpu`: parts that fail, hang or cannot run do not hide the others, and what there is gets
written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.bench_machine import record_of
from tests.helpers.places import ROOT

sys.path.insert(0, str(ROOT))
from bench import gpu, ncu


def part(name: str, code: str, weight: int = 60, why_not: str | None = None, is_test: bool = False) -> gpu.Part:
    return gpu.Part(
        name,
        f"the part {name}",
        lambda place: [sys.executable, "-c", code],
        weight,
        lambda place: why_not,
        is_test=is_test,
    )


PARTS = (
    part("build", "print('made'); print('  in some folder')"),
    part("red", "print('1 failed, 2 passed'); raise SystemExit(1)"),
    part("hangs", "import time; print('started', flush=True); time.sleep(60)", 4),
    part("deaf", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)", 4),
    part("absent", "", why_not="there is no such tool"),
    part("forbidden", f"print('not permitted'); raise SystemExit({gpu.ABSENT})"),
    part("skips", "print('12 skipped')", is_test=True),
    part("tests", "print('1 passed, 12 skipped')", is_test=True),
    gpu.Part("unknown", "the part unknown", lambda place: [str(place.work / "no-such-command")], 60),
    part("green", "import fastsam, fastsam_kernels; print('========= 3 passed =========')"),
)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not the folder of a checkout, where somebody may be at work."""
    folder = tmp_path / "work"
    monkeypatch.setattr(gpu, "WORK", folder)
    return folder


def run(out: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[dict[str, object]]]:
    code = gpu.main(["--out", str(out), *arguments])
    return code, capsys.readouterr().out, json.loads((out / "gpu.json").read_text())["parts"]


@pytest.mark.of_each_kind
def test_a_part_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "PARTS", PARTS)
    monkeypatch.setattr(gpu, "PATIENCE", 1)
    monkeypatch.setattr(gpu, "facts", lambda: {"gpu": None, "capability": None, "nvcc": None})
    code, printed, parts = run(tmp_path / "out", capsys, "--seconds", "80")
    assert code == 1
    assert [(p["name"], p["state"]) for p in parts] == [
        ("build", "passed"),
        ("red", "failed"),
        ("hangs", "timed out"),
        ("deaf", "timed out"),
        ("absent", "left out"),
        ("forbidden", "left out"),
        ("skips", "failed"),
        ("tests", "passed"),
        ("unknown", "failed"),
        ("green", "passed"),
    ]
    by_name = {str(p["name"]): p for p in parts}
    assert by_name["build"]["result"] == "made" and by_name["green"]["result"] == "3 passed"
    assert by_name["red"]["reason"] == "exit code 1" and by_name["red"]["result"] == "1 failed, 2 passed"
    assert str(by_name["hangs"]["reason"]).startswith("stopped after 10 s") and by_name["hangs"]["result"] == "started"
    assert by_name["forbidden"]["result"] == "not permitted" and by_name["skips"]["reason"] == "no test passed"
    assert by_name["absent"]["reason"] == "there is no such tool"
    assert "cannot be started" in str(by_name["unknown"]["reason"])
    page = (tmp_path / "out" / "summary.md").read_text()
    assert page in printed and printed.rstrip().endswith(str(tmp_path / "out")), "the summary comes last"
    assert "started" in (tmp_path / "out" / "log.txt").read_text()
    assert len(list((tmp_path / "out").iterdir())) == 3, "the benchmarks add three: fewer than eight"


def test_what_has_no_time_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "PARTS", PARTS)
    monkeypatch.setattr(gpu, "PATIENCE", 1)
    monkeypatch.setattr(gpu, "facts", lambda: {"gpu": None, "capability": None, "nvcc": None})
    code, _, parts = run(tmp_path / "out", capsys, "--parts", "green", "--seconds", "5")
    assert code == 0 and [p["reason"] for p in parts] == ["no time left"] * 2


@pytest.mark.of_each_kind
def test_the_real_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU what needs one is left out with that reason; with one, everything but what runs elsewhere."""
    place = gpu.Place(tmp_path, tmp_path, None, None, "13.0", 0.0)
    reasons = {part.name: part.why_not(place) for part in gpu.PARTS}
    here = {name for name, reason in reasons.items() if reason is None}
    assert here == {"build", "bench-cpu", "compile", "emulation"}
    monkeypatch.setattr(gpu, "_sanitizer", lambda: "/usr/bin/compute-sanitizer")
    place.gpu = "a GPU"
    left_out = {part.name for part in gpu.PARTS if part.why_not(place)}
    assert left_out == {"bench-cpu", "compile", "emulation"}
    for entry in gpu.PARTS:
        assert all(isinstance(word, str) for word in entry.argv(place))
    planned = [name for call in gpu.CALLS.values() for name in call]
    assert ["build", *planned] == [part.name for part in gpu.PARTS], "each part is in one call, in the order of PARTS"


def test_a_call_runs_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "run_part", lambda part, place, following: gpu.Outcome(part.name, "", "passed"))
    monkeypatch.setattr(gpu, "facts", lambda: {"gpu": None, "capability": None, "nvcc": None})
    monkeypatch.setattr(gpu, "copy_tree", lambda work: None)
    _, _, parts = run(tmp_path / "out", capsys, "--call", "3")
    assert [part["name"] for part in parts] == ["build", "family", "racecheck", "triton", "ncu"]


def call(folder: Path, commit: str = "abc", **files: object) -> Path:
    folder.mkdir()
    states = [{"name": "build", "state": "passed"}, {"name": folder.name, "state": "passed"}]
    states.append({"name": "ncu", "state": "left out"})
    (folder / "gpu.json").write_text(json.dumps({"environment": {"commit": commit, "gpu": "H"}, "parts": states}))
    for name, content in files.items():
        (folder / f"{name}-cuda.json").write_text(json.dumps(content))
    return folder


@pytest.mark.of_each_kind
def test_calls_add_up(tmp_path: Path) -> None:
    """A later result replaces an earlier one, a later failure does not; calls of two commits are refused."""
    rows = {
        "native": {"name": "native", "gate": "green", "eager": 1},
        "worse": {"name": "native", "gate": "red"},
        "triton": {"name": "triton", "gate": "green", "eager": 3},
    }
    first = call(tmp_path / "first", kernels={"ops": [{"name": "norm", "rows": [rows["native"]]}]})
    second = call(
        tmp_path / "second",
        kernels={"ops": [{"name": "norm", "rows": [rows["worse"], rows["triton"]]}, {"name": "inner", "rows": []}]},
        federated={"parts": {"gpu": {"series": [{"title": "t", "name": "graph", "at": 8, "problem": "failed"}]}}},
    )
    third = call(
        tmp_path / "third",
        federated={"parts": {"gpu": {"series": [{"title": "t", "name": "graph", "at": 8, "seconds": 2}]}}},
    )
    file = tmp_path / "merged.json"
    assert gpu.main(["--merge", *map(str, (first, second, third)), "--out", str(file)]) == 0
    merged = json.loads(file.read_text())
    assert [part["name"] for part in merged["parts"]] == ["build", "first", "ncu", "second", "third"]
    assert [op["rows"] for op in merged["kernels"]["ops"]] == [[rows["native"], rows["triton"]], []]
    assert merged["federated"]["parts"]["gpu"]["series"] == [{"title": "t", "name": "graph", "at": 8, "seconds": 2}]
    with pytest.raises(SystemExit):
        gpu.main(["--merge", str(first), str(call(tmp_path / "other", commit="def")), "--out", str(file)])


@pytest.mark.of_each_kind
def test_the_tests_of_a_gpu_are_where_the_script_looks() -> None:
    """Every module with a test marked `gpu`, or with one that takes each backend on each device there is."""
    looked = [ROOT / path for path in gpu.GPU_TESTS]
    assert all(path.exists() for path in looked)
    sign = re.compile(r"@pytest\.mark\.gpu\b|def test_\w+\([^)]*\b(every_)?backend: (backends\.)?Backend\b")
    modules = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "bench" not in path.parts and sign.search(path.read_text())
    ]
    assert len(modules) > 5
    lost = [path for path in modules if not any(path == at or at in path.parents for at in looked)]
    assert not lost, lost


def test_a_part_has_its_share_and_no_more(tmp_path: Path) -> None:
    place = gpu.Place(tmp_path, tmp_path, None, None, None, gpu.time.monotonic() + 60)
    told = gpu.Part("share", "", lambda place: [sys.executable, "-c", "import sys; print(sys.argv[1])", gpu.LIMIT], 20)
    assert int(gpu.run_part(told, place, following=20).result) in range(20, 25)
    assert int(gpu.run_part(told, place).result) in range(40, 49), "a part by itself has all of the time"
    place.deadline = gpu.time.monotonic() + 12
    assert gpu.run_part(told, place, following=1000).result in ("7", "8"), "ten seconds at least"


@pytest.mark.of_each_kind
def test_what_is_the_same_is_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchanged sources keep their dates, so that the compiler skips them. Compiled files stay in the copy; files that
    the checkout no longer has are removed."""
    root, work = tmp_path / "root", tmp_path / "copy"
    for name in (*gpu.PACKAGES, "kernels"):
        (root / name / "inner").mkdir(parents=True)
        (root / name / "inner" / "a.cu").write_text("one")
    (root / "pyproject.toml").touch()
    monkeypatch.setattr(gpu, "ROOT", root)
    gpu.copy_tree(work)
    kept, changed, gone = (work / name / "inner" / "a.cu" for name in ("csrc", "bench", "tools"))
    compiled = work / "fastsam_kernels" / "inner" / "libfastsam_cuda.so"
    compiled.write_text("compiled")
    for path in (kept, changed):
        gpu.os.utime(path, (1e9, 1e9))
    (root / "csrc" / "inner" / "a.cu").write_text("one")  # as new as a fresh checkout
    (root / "bench" / "inner" / "a.cu").write_text("two")
    (root / "tools" / "inner" / "a.cu").unlink()
    gpu.copy_tree(work)
    assert kept.stat().st_mtime == 1e9 and changed.read_text() == "two" and changed.stat().st_mtime > 1e9
    assert not gone.exists() and compiled.read_text() == "compiled"


def test_two_runs_do_not_share_a_folder(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gpu.alone_in(work), pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path / "out"), "--parts", "build"])
    assert "--work takes another folder" in capsys.readouterr().err


def test_the_tables_are_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "kernels-cuda.json").write_text(json.dumps(record_of(device="cuda")))
    printed = gpu.write(tmp_path, {}, [])
    page = (tmp_path / "summary.md").read_text()
    assert page.startswith(printed) and "Made by `python -m bench.kernels --made-up`" in page
    assert "Made by" not in printed


def test_an_interrupted_run_of_tests_tells_its_failures(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pathlib, time\n"
        "def test_red(): assert 2 + 2 == 5\n"
        "def test_hangs(): pathlib.Path('hangs').touch(); time.sleep(600)\n"
    )
    place = gpu.Place(tmp_path, tmp_path, None, None, None, 0.0)
    with open(tmp_path / "log.txt", "w") as log:
        argv = gpu._pytest("test_it.py")(place)
        process = subprocess.Popen(argv, cwd=tmp_path, stdout=log, start_new_session=True)
    while process.poll() is None and " FAILED " not in (tmp_path / "log.txt").read_text():
        time.sleep(0.1)
    gpu._stop(process, 60)
    said = (tmp_path / "log.txt").read_text()
    assert "assert (2 + 2) == 5" in said and gpu.last_word(said).startswith("1 failed"), said


def test_the_tests_run_as_the_script_calls_them(tmp_path: Path) -> None:
    """With its workers and a cache of its own, under the settings of this folder."""
    place = gpu.Place(ROOT, tmp_path, None, None, None, gpu.time.monotonic() + 120)
    some = gpu.Part("some", "", gpu._pytest("-n", "2", "tests/test_docs_commands.py"), 120)
    outcome = gpu.run_part(some, place)
    assert outcome.state == "passed" and re.match(r"\d+ passed", outcome.result), outcome


@pytest.mark.slow
def test_what_the_tests_read_is_copied(tmp_path: Path) -> None:
    """pytest runs nothing after an error of collection: every module with tests for a GPU can be imported in the
    copy."""
    gpu.copy_tree(tmp_path)
    place = gpu.Place(tmp_path, tmp_path, None, None, None, gpu.time.monotonic() + 300)
    collected = gpu.Part("collected", "", gpu._pytest(*gpu.GPU_TESTS, "-m", "gpu", "--collect-only"), 300)
    outcome = gpu.run_part(collected, place)
    assert outcome.state == "passed" and "error" not in outcome.result, (tmp_path / "log.txt").read_text()[-2000:]


# ---- Nsight Compute

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


@pytest.mark.of_each_kind
@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ("", 0, "10 kernels measured"),
        ("print('==ERROR== ERR_NVGPUCTRPERM'); raise SystemExit(1)", gpu.ABSENT, "does not permit"),
        ("print('out of memory'); raise SystemExit(3)", 1, "out of memory"),
        (None, gpu.ABSENT, "not installed"),
    ],
)
def test_nsight_compute_is_read_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: str, code: int, said: str
) -> None:
    program = tmp_path / "ncu"
    program.write_text(FAKE.format(python=sys.executable, more=more))
    program.chmod(0o755)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: str(program) if more is not None else None)
    assert ncu.main(["--out", str(tmp_path)]) == code and said in capsys.readouterr().out
    if code == 0:
        row = json.loads((tmp_path / ncu.FILE).read_text())["rows"][4]
        assert (row["label"], row["kernel"]) == ("perturb resnet18", "void fastsam::kernel4(int, float)")
        assert (row["duration"], row["unit"], row["DRAM, %"]) == ("4.5", "usecond", "4.5")
