"""What is published: `make wheels`, and the workflow that runs it."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.installing import ROOT, copy_checkout, install, layered, require_pip_and_setuptools, run
from tools import wheels

WORKFLOW = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
SDIST, PURE, COMPILED = (
    "fastsam-0.1.0.tar.gz",
    "fastsam-0.1.0-py3-none-any.whl",
    "fastsam-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl",
)


def packages(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_a_folder_of_the_three_packages_is_right(tmp_path: Path) -> None:
    assert wheels.wrong(packages(tmp_path, SDIST, PURE, COMPILED)) == []


def test_a_wheel_that_is_missing_or_too_large_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(tmp_path, SDIST, PURE, COMPILED.replace("manylinux_2_28", "linux"))
    assert wheels.wrong(tmp_path) == ["0 of *-abi3-manylinux_*.whl, not one"]
    monkeypatch.setattr(wheels, "LARGEST", 3)
    (packages(tmp_path, COMPILED) / PURE).write_bytes(b"four")
    assert wheels.wrong(tmp_path) == [f"{PURE} has 4 bytes, more than 3"]


def test_only_packages_of_ours_are_removed(tmp_path: Path) -> None:
    wheels.clear(packages(tmp_path, SDIST, COMPILED))
    assert list(tmp_path.iterdir()) == []
    packages(tmp_path, SDIST, "thesis.tex")
    with pytest.raises(SystemExit, match=r"other files than packages of fastsam: thesis\.tex"):
        wheels.clear(tmp_path)
    assert (tmp_path / SDIST).is_file() and (tmp_path / "thesis.tex").is_file()


def test_the_workflow_builds_for_what_the_metadata_promise_and_publishes_without_a_password() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', metadata)
    (tried,) = re.findall(r"python: \[(.*)\]", WORKFLOW)
    assert re.findall(r'"([\d.]+)"', tried) == promised
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', metadata)
    assert f'torch: "{oldest}.0" }}' in WORKFLOW
    targets = re.findall(r"run: make (\S+)", WORKFLOW)
    assert targets == ["wheels"] and re.search(r"^wheels:", (ROOT / "Makefile").read_text(), re.M)
    tested = re.search(r"pytest .* (tests/\S+) (tests/\S+)$", WORKFLOW, re.M)
    assert tested and all(list((ROOT / folder).glob("test_*.py")) for folder in tested.groups())
    assert "id-token: write" in WORKFLOW and "secrets." not in WORKFLOW
    image, tag = re.search(r"pypa/(manylinux\w+)", WORKFLOW), re.search(r"PLAT=(\S+)", WORKFLOW)
    assert image and tag and image[1] == tag[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the libraries are built on Linux")
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_the_wheels_work_where_there_is_no_compiler(tmp_path: Path) -> None:
    """All three are made; the compiled one, in a fresh environment whose PATH has no program but its own, serves
    `native`."""
    require_pip_and_setuptools()
    for name in ("build", "auditwheel"):
        pytest.importorskip(name, reason=f"{name} is not installed: the extra `dev` has it")
    checkout = copy_checkout(tmp_path / "checkout")
    (checkout / "tools").mkdir()
    for name in ("wheels.py", "old_glibc.py"):
        shutil.copy(ROOT / "tools" / name, checkout / "tools")
    run(sys.executable, "tools/wheels.py", tmp_path / "dist", cwd=checkout, FASTSAM_CUDA="0", timeout=1800)

    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"setup.py", "csrc/ops.cpp", "kernels/build.py", "fastsam/__init__.py"} <= members
    (wheel,) = (tmp_path / "dist").glob("*-cp310-abi3-manylinux_*.whl")
    assert platform.machine() != "x86_64" or wheel.name.endswith("-manylinux_2_28_x86_64.whl")
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if ".so" in name]
    assert libraries == ["fastsam_kernels/libfastsam_cpu.so"], "nothing of torch, nor of the compiler, is copied"

    env = layered(tmp_path / "env")
    install(env, wheel, cwd=tmp_path)
    printed = run(env.with_name("fastsam"), "info", cwd=tmp_path, PATH=str(env.parent))
    assert re.search(r"^native +cpu +yes$", printed, re.M), printed
    assert "`auto` on this machine: native" in printed and "next:" not in printed
