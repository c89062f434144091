"""Every way to install fastsam, each in a fresh environment and used from outside the repository.

`make test-slow` runs them.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.helpers.installing import (
    build_wheel,
    copy_checkout,
    environ,
    install,
    make_layered,
    require_pip_and_setuptools,
    run,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the libraries are built on Linux"),
]
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")

# One FusedSAM step; what ran it, and what was said.
USE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import fastsam, fastsam_kernels
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(8, 3), torch.randn(16, 8), torch.randint(3, (16,))
    optimizer = fastsam.FusedSAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.5, momentum=0.9)
    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss
    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
print(json.dumps({
    "backend": fastsam.backend("cpu"), "losses": losses, "version": fastsam.__version__,
    "fastsam": fastsam.__file__, "kernels": fastsam_kernels.__file__, "warnings": [str(w.message) for w in caught],
}))
"""


def use(python: Path, cwd: Path, **settings: str) -> dict:
    """Run `USE` in the folder `cwd`, and assert that five steps on one batch lower the loss."""
    info = json.loads(run(python, "-c", USE, cwd=cwd, **settings).splitlines()[-1])
    assert info["losses"][-1] < info["losses"][0]
    return info


# A user's script, of the kind that `mypy --strict` has nothing to say about when the libraries are typed. What it
# reveals is in `TYPES`.
TYPED = """
import torch
from torch import Tensor, nn

import fastsam
from fastsam import FusedSAM, fed, frozen_batchnorm_stats
from fastsam_kernels import build


def train(model: nn.Module, x: Tensor, y: Tensor) -> float:
    opt = FusedSAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)

    def closure() -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return loss

    loss = float(opt.step(closure))
    closure()
    opt.first_step(zero_grad=True)
    with frozen_batchnorm_stats(model):
        closure()
    opt.second_step(zero_grad=True)
    with opt.perturbed():
        closure()
    reveal_type(opt.grad_norm)
    return loss


def federated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    result = fed.run(model, [(x, y)], fed.FedSAM(rho=0.05), rounds=1, local_epochs=1, batch_size=2, lr=0.1)
    reveal_type(result.summary())


gsam = FusedSAM([nn.Parameter(torch.zeros(1))], variant=fastsam.GSAM(rho=0.05, alpha=0.4), lr=0.1)
reveal_type(fastsam.backend("cpu"))
reveal_type(build.why_not())
gsam.first_step(zero_grad="yes")
"""
TYPES = ("Tensor | None", "dict[str, Any]", "str", "str | None")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy of the repository; builds inside it share their object files."""
    require_pip_and_setuptools()
    return copy_checkout(tmp_path_factory.mktemp("repository") / "fastsam")


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def other_pythons() -> list[str]:
    """Return this Python and the other Pythons of this machine that fastsam supports."""
    pythons = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    for version in ("3.10", "3.11", "3.12", "3.13"):
        pyenv_paths = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        for path in (shutil.which(f"python{version}"), *pyenv_paths):
            # A shim on PATH may stand for a Python that is not there.
            if (
                path
                and version not in pythons
                and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0
            ):
                pythons[version] = str(path)
    return list(pythons.values())


@pytest.mark.parametrize("python", other_pythons())
def test_no_torch_no_compiler(checkout: Path, tmp_path: Path, work_dir: Path, python: str) -> None:
    """Installs, imports what needs no torch, and says what is missing."""
    env = make_layered(tmp_path / "env", python=python, only=("setuptools", "_distutils_hack", "wheel", "packaging"))
    output = install(env, checkout, cwd=work_dir, CXX="no-such-compiler")
    assert "py3-none-any" in output and "torch is not installed in the environment of the build" in output
    reason = run(env, "-c", "from fastsam_kernels import build; print(build.why_not())", cwd=work_dir)
    assert "torch is not installed in the environment of the build" in reason
    output = run(env.with_name("fastsam"), "info", cwd=work_dir, ok=False)
    assert "pip install 'torch>=2.10'" in output and "Traceback" not in output


def test_torch_and_no_compiler(checkout: Path, tmp_path: Path, work_dir: Path) -> None:
    env = make_layered(tmp_path / "env")
    output = install(env, checkout, cwd=work_dir, CXX="no-such-compiler")
    assert "py3-none-any" in output and "no-such-compiler not found" in output
    info = use(env, work_dir, CXX="no-such-compiler")
    assert info["backend"] == "foreach" and len(info["warnings"]) == 1
    assert "no-such-compiler not found" in info["warnings"][0] and "apt-get install g++" in info["warnings"][0]


@needs_compiler
def test_pure_install_beside_a_compiler_warns_once_with_the_command_and_the_command_works(
    checkout: Path, tmp_path: Path, work_dir: Path
) -> None:
    """A plain `pip install .` builds in isolation, without torch, and gives a pure package."""
    env = make_layered(tmp_path / "env")
    install(env, checkout, cwd=work_dir, FASTSAM_NATIVE="0")
    info = use(env, work_dir)
    assert info["backend"] == "foreach" and len(info["warnings"]) == 1
    assert "python -m fastsam_kernels.build" in info["warnings"][0]
    run(env, "-m", "fastsam_kernels.build", cwd=work_dir)
    info = use(env, work_dir)
    assert info["backend"] == "native" and info["warnings"] == []


@needs_compiler
def test_wheel_with_torch_and_compiler_used_elsewhere(checkout: Path, tmp_path: Path, work_dir: Path) -> None:
    wheel, _ = build_wheel(checkout, tmp_path / "out", FASTSAM_NATIVE="1")
    assert "cp310-abi3-linux_" in wheel.name
    env = make_layered(tmp_path / "env")
    install(env, wheel, cwd=work_dir)
    info = use(env, work_dir, CXX="no-such-compiler")
    assert info["backend"] == "native" and info["warnings"] == []
    assert all(Path(info[name]).is_relative_to(tmp_path / "env") for name in ("fastsam", "kernels"))
    output = run(env.with_name("fastsam"), "info", cwd=work_dir)
    assert info["version"] in output and "native" in output


def test_a_users_script_is_checked_against_the_installed_wheel(checkout: Path, tmp_path: Path, work_dir: Path) -> None:
    """`mypy --strict` sees the types of both packages, and the one mistake in the script."""
    wheel, _ = build_wheel(checkout, tmp_path / "out", FASTSAM_NATIVE="0")
    env = make_layered(tmp_path / "env")
    install(env, wheel, cwd=work_dir)
    (work_dir / "script.py").write_text(TYPED)
    output = run(env, "-m", "mypy", "--strict", "script.py", cwd=work_dir, ok=False)
    notes = [line.split("Revealed type is ")[1] for line in output.splitlines() if "Revealed type" in line]
    assert [
        note.replace("torch._tensor.", "").replace("builtins.", "").replace("typing.", "").strip('"') for note in notes
    ] == list(TYPES)
    errors = [line for line in output.splitlines() if ": error:" in line]
    assert len(errors) == 1 and 'Argument "zero_grad" to "first_step"' in errors[0], output


@needs_compiler
def test_editable(checkout: Path, tmp_path: Path, work_dir: Path) -> None:
    env = make_layered(tmp_path / "env")
    install(env, "-e", checkout, cwd=work_dir, FASTSAM_NATIVE="1")
    info = use(env, work_dir)
    assert info["backend"] == "native"
    assert Path(info["fastsam"]).parent == checkout / "fastsam" and Path(info["kernels"]).parent == checkout / "kernels"
    assert use(env, checkout)["backend"] == "native", "from the root of the repository too"
    header = checkout / "csrc" / "kernel_math.h"
    original = header.read_text()
    try:
        header.write_text(original + "// edited\n")
        info = use(env, work_dir)
        assert info["backend"] == "foreach" and "other sources" in info["warnings"][0]
    finally:
        header.write_text(original)


@needs_compiler
def test_sdist(checkout: Path, tmp_path: Path, work_dir: Path) -> None:
    make = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", make, tmp_path, cwd=checkout)
    (archive,) = tmp_path.glob("fused_sam-*.tar.gz")
    with tarfile.open(archive) as tar:
        assert not [name for name in tar.getnames() if name.endswith((".so", "native.json"))]
    env = make_layered(tmp_path / "env")
    install(env, archive, cwd=work_dir, FASTSAM_NATIVE="1")
    assert use(env, work_dir)["backend"] == "native"


@needs_compiler
@pytest.mark.parametrize("ninja", [True, False])
def test_jit_at_first_use_by_two_processes(checkout: Path, tmp_path: Path, work_dir: Path, ninja: bool) -> None:
    if ninja and not shutil.which("ninja", path=environ()["PATH"]):
        pytest.skip("ninja is not installed")
    env = make_layered(tmp_path / "env")
    install(env, checkout, cwd=work_dir, FASTSAM_NATIVE="0")
    settings = {"FASTSAM_JIT": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if not ninja:
        settings["PATH"] = str(path_without_ninja(tmp_path))
    processes = [
        subprocess.Popen(
            [env, "-c", USE], cwd=work_dir, env=environ(**settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err.decode()
        info = json.loads(out.splitlines()[-1])
        assert info["backend"] == "native" and info["warnings"] == []
    (folder,) = (path for path in (tmp_path / "cache" / "fastsam").iterdir() if path.is_dir())
    date = (folder / "libfastsam_cpu.so").stat().st_mtime_ns
    # The second time the compiler is asked for its version and nothing else.
    assert use(env, work_dir, **settings)["backend"] == "native"
    assert (folder / "libfastsam_cpu.so").stat().st_mtime_ns == date


def path_without_ninja(tmp_path: Path) -> Path:
    """Make a folder for PATH that has every program of this machine except ninja."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).iterdir() if Path(directory).is_dir() else ():
            link = folder / program.name
            if program.name != "ninja" and not link.is_symlink():
                link.symlink_to(program)
    return folder
