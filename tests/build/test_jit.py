"""The library built at first use: once per sources and compiler, in a folder that is the user's alone."""

import os
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from fastsam_kernels import build, toolchain
from tests.helpers.building import clean_linux, needs_compiler, script

pytestmark = clean_linux


@needs_compiler
def test_jit_builds_once_per_sources_and_compiler(sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FASTSAM_CUDA", "0")
    first = build.jit()
    date = first.paths["cpu"].stat().st_mtime_ns
    assert first.paths["cpu"].is_relative_to(tmp_path / "cache" / "fastsam")
    assert build.jit() == first and first.paths["cpu"].stat().st_mtime_ns == date, "the second call compiles nothing"
    (sources / "one.h").write_text("#define ONE 11\n")
    second = build.jit()
    assert second.paths["cpu"] != first.paths["cpu"] and first.paths["cpu"].exists()
    other_compiler = script(
        tmp_path / "other-g++", f'[ "$1" = --version ] && echo other || exec {toolchain.find_cxx()[0]} "$@"'
    )
    monkeypatch.setenv("CXX", other_compiler)
    assert build.jit().paths["cpu"] not in (first.paths["cpu"], second.paths["cpu"])
    assert {path.name for path in build.cache_dir().iterdir() if path.is_file()} == {"lock"}


@needs_compiler
def test_jit_leaves_nothing_half_made(sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (sources / "ops.cpp").write_text("nonsense\n")
    with pytest.raises(build.BuildError, match="nonsense"):
        build.jit()
    assert [path.name for path in build.cache_dir().iterdir()] == ["lock"]


def test_jit_says_when_the_cache_cannot_be_written(sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    if build.why_not():
        pytest.skip(str(build.why_not()))
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match="cannot write to the cache .* XDG_CACHE_HOME"):
        build.jit()


@needs_compiler
@pytest.mark.parametrize("problem", ["others can write to the cache", "belongs to user", "is a link"])
@pytest.mark.parametrize("place", ["the cache", "its libraries"])
def test_jit_loads_nothing_that_others_could_have_put_there(
    sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch, place: str, problem: str
) -> None:
    """A library at a predictable path is refused before its file is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = build.cache_dir() if place == "the cache" else build.cache_dir() / build._cache_key(build.find_torch())
    folder.mkdir(parents=True, mode=0o700)
    if problem == "belongs to user":
        monkeypatch.setattr(build.os, "geteuid", lambda: 12345)
    elif problem == "is a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.chmod(0o777)
    with pytest.raises(build.BuildError, match=f"{problem}.*XDG_CACHE_HOME"):
        build.jit()


@needs_compiler
def test_jits_folders_are_the_users_alone(sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FASTSAM_CUDA", "0")
    old_mask = os.umask(0o002)
    try:
        library = build.jit().paths["cpu"]
        assert build.jit().paths["cpu"] == library
    finally:
        os.umask(old_mask)
    assert [path.stat().st_mode & 0o777 for path in (build.cache_dir(), library.parent)] == [0o700, 0o700]
