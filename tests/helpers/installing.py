"""Building wheels and making environments, for the tests of the packaging.

Environments are made without downloading anything: `layered` links the packages of the running environment into a
new one, except fastsam itself, and pip is always the running one (`pip --python`).
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.places import ROOT

SITE = Path(sysconfig.get_path("purelib"))
PACKAGED = (
    *("fastsam", "examples", "kernels", "csrc"),
    *("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"),
)
SETTINGS = (
    "CXX", "CUDACXX", "CUDA_HOME", "FASTSAM_NATIVE", "FASTSAM_CUDA", "FASTSAM_JIT", "PYTHONPATH", "XDG_CACHE_HOME",
)  # fmt: skip


def require_pip_and_setuptools() -> None:
    """Skip the test if this environment cannot build a wheel."""
    for name, oldest in (("pip", "22.3"), ("setuptools", "77")):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not in this environment")
        if [int(part) for part in version.split(".")[:2]] < [int(part) for part in oldest.split(".")]:
            pytest.skip(f"{name} {version} is older than {oldest}")


def copy_checkout(target: Path) -> Path:
    """Copy the sources of a wheel, without build products."""
    ignore = shutil.ignore_patterns("*.so", "native.json", "__pycache__")
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)
    return target


def environ(**settings: Any) -> dict[str, str]:
    """Return the environment of this process without settings of a build, with `settings` and this Python's ninja."""
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return {**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", **settings}


def run(*argv: str | Path, cwd: Path, ok: bool = True, timeout: float = 600, **settings: Any) -> str:
    """Return the output of a command. Assert that it succeeds, or with `ok=False` that it fails."""
    command = [str(argument) for argument in argv]
    process = subprocess.run(
        command, cwd=cwd, env=environ(**settings), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout,
    )  # fmt: skip
    assert (process.returncode == 0) == ok, f"{command} ended with {process.returncode}:\n{process.stdout}"
    return process.stdout


def build_wheel(checkout: Path, out: Path, **settings: Any) -> tuple[Path, str]:
    """Return the wheel that `pip` makes of `checkout` in this environment, and pip's output."""
    options = ("-v", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", out)
    output = run(sys.executable, "-m", "pip", "wheel", *options, checkout, cwd=out.parent, **settings)
    (wheel,) = out.glob("*.whl")
    return wheel, output


def make_layered(folder: Path, *, python: str = sys.executable, only: tuple[str, ...] | None = None) -> Path:
    """Return the Python of a new environment with this one's packages (`only`: just the named ones), without
    fastsam."""
    run(python, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    packages = folder / "packages"
    packages.mkdir()
    for entry in SITE.iterdir():
        name = entry.name.lower()
        is_fastsam = name.startswith(("fastsam", "__editable__")) or entry.suffix == ".pth"
        if not is_fastsam and (only is None or name.split("-")[0] in only):
            (packages / entry.name).symlink_to(entry)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


def install(python: Path, *packages: str | Path, cwd: Path, **settings: Any) -> str:
    """Run `pip install` without network in the environment of `python`."""
    options = ("-v", "--no-deps", "--no-index", "--no-build-isolation")
    return run(sys.executable, "-m", "pip", "--python", python, "install", *options, *packages, cwd=cwd, **settings)
