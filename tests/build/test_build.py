"""The build of the compiled libraries: its tools, its commands, its result and its errors."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

from fastsam_kernels import build, toolchain
from tests.helpers import emulated
from tests.helpers.building import clean_linux, needs_compiler, without_ninja

pytestmark = clean_linux


@needs_compiler
@pytest.mark.parametrize("ninja", [True, False])
def test_build_publishes_and_is_found_until_a_source_changes(
    sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch, ninja: bool
) -> None:
    if ninja and not toolchain._ninja():
        pytest.skip("ninja is not installed")
    if not ninja:
        without_ninja(monkeypatch)
    out, work = tmp_path / "out", tmp_path / "work"
    result = build.build(out, cuda=False, work_dir=work)
    assert result.paths == {"cpu": out / "libfastsam_cpu.so"} and result.paths["cpu"].read_bytes()[:4] == b"\x7fELF"
    assert build.installed(out) == result
    assert sorted(path.name for path in out.iterdir()) == ["libfastsam_cpu.so", "native.json"]

    (sources / "one.h").write_text("#define ONE 11\n")
    result_of_change = build.installed(out)
    assert (
        result_of_change.paths == {}
        and "other sources" in result_of_change.message
        and build.COMMAND in result_of_change.message
    )
    old_bytes = result.paths["cpu"].read_bytes()
    build.build(out, cuda=False, work_dir=work)
    assert build.installed(out).paths == result.paths
    assert result.paths["cpu"].read_bytes() != old_bytes, "a changed header must be compiled in"


@needs_compiler
def test_ninja_compiles_only_what_changed(sources: Path, tmp_path: Path) -> None:
    if not toolchain._ninja():
        pytest.skip("ninja is not installed")
    work = tmp_path / "work"
    build.build(tmp_path / "out", cuda=False, work_dir=work)
    dates = {name: (work / name).stat().st_mtime_ns for name in ("ops.cpp.o", "cpu_two.cpp.o")}
    (sources / "one.h").write_text("#define ONE 11\n")
    build.build(tmp_path / "out", cuda=False, work_dir=work)
    assert (work / "ops.cpp.o").stat().st_mtime_ns > dates["ops.cpp.o"]
    assert (work / "cpu_two.cpp.o").stat().st_mtime_ns == dates["cpu_two.cpp.o"]


@needs_compiler
@pytest.mark.parametrize("ninja", [True, False])
def test_a_failure_shows_the_compilers_words_and_leaves_the_old_library(
    sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch, ninja: bool
) -> None:
    if not ninja:
        without_ninja(monkeypatch)
    path = build.build(tmp_path / "out", cuda=False).paths["cpu"]
    old_bytes = path.read_bytes()
    (sources / "cpu" / "two.cpp").write_text("int two() { return undeclared_name; }\n")
    with pytest.raises(build.BuildError, match="undeclared_name") as error_info:
        build.build(tmp_path / "out", cuda=False)
    assert "undeclared_name" in str(error_info.value).splitlines()[0], "the first line says what is wrong"
    assert path.read_bytes() == old_bytes


def test_what_is_missing_is_named(sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert "no-such-compiler not found" in str(build.why_not())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "g++ or clang++ or c++ not found" in str(build.why_not())
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_torch_missing_or_too_old_is_named(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with (
        monkeypatch.context() as patch,
        pytest.raises(build.BuildError, match="torch is not installed in the environment of the build"),
    ):
        patch.delitem(sys.modules, "torch", raising=False)
        toolchain.find_torch()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cu128'\ncuda = '12.8'\n")
    with (
        monkeypatch.context() as patch,
        pytest.raises(build.BuildError, match="2.10 or newer, this environment has 2.9.1"),
    ):
        patch.delitem(sys.modules, "torch", raising=False)
        toolchain.find_torch()


@pytest.mark.parametrize("content", ["", "{", '{"libraries": []}', "[]"])
def test_an_unreadable_report_offers_nothing(sources: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / build.REPORT).write_text(content)
    result = build.installed(tmp_path)
    assert result.paths == {} and "cannot be read" in result.message


def test_a_lost_library_is_not_offered(sources: Path, tmp_path: Path) -> None:
    library = tmp_path / "made" / "libfastsam_cpu.so"
    library.parent.mkdir()
    library.write_bytes(b"x")
    build.publish(build.BuildResult({"cpu": library}, "built"), tmp_path / "out")
    (tmp_path / "out" / library.name).unlink()
    result = build.installed(tmp_path / "out")
    assert result.paths == {} and "libfastsam_cpu.so is gone" in result.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_suggests_the_cache(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(build.BuildError, match="cannot write .* FASTSAM_JIT=1"):
        build.publish(build.BuildResult({}, "nothing"), tmp_path / "out")


def test_a_file_in_the_way_suggests_the_cache(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(build.BuildError, match="cannot write .* FASTSAM_JIT=1"):
        build.publish(build.BuildResult({}, "nothing"), tmp_path / "out")


def test_builds_in_one_folder_take_turns(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Else one of two processes compiles what the other is writing."""
    num_builds, maximum = 0, 0

    def execute(steps: object, folder: Path) -> None:
        nonlocal num_builds, maximum
        num_builds += 1
        maximum = max(maximum, num_builds)
        time.sleep(0.2)
        num_builds -= 1

    monkeypatch.setattr(toolchain, "execute", execute)
    threads = [threading.Thread(target=emulated.compile_library, args=(tmp_path / "shared",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert maximum == 1


def test_bad_job_count_is_named(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(build.BuildError, match="MAX_JOBS must be a positive number, got 'many'"):
        toolchain._jobs()


@needs_compiler
def test_command_line(sources: Path, tmp_path: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    assert build.main(["--no-cuda", "--out", str(tmp_path / "out")]) == 0
    assert str(tmp_path / "out" / "libfastsam_cpu.so") in capsys.readouterr().out
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main(["--out", str(tmp_path / "other")]) == 1
    assert "no-such-compiler not found" in capsys.readouterr().err
