"""The pure and the compiled wheel and their files. The C++ here is a stand-in that compiles at once."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fastsam import extras
from tests.helpers.installing import ROOT, build_wheel, copy_checkout, require_pip_and_setuptools, run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the libraries are built on Linux")
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    require_pip_and_setuptools()
    copy = copy_checkout(tmp_path / "checkout")
    shutil.rmtree(copy / "csrc" / "cpu")
    (copy / "csrc" / "cpu").mkdir()
    for source in [*(copy / "csrc").glob("*.cpp"), *(copy / "csrc" / "rowprograms").glob("*.cpp")]:
        source.unlink()  # they would include what was removed
    (copy / "csrc" / "ops.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int one() { return 1; }\n'
    )
    (copy / "csrc" / "cpu" / "two.cpp").write_text('#include "chunks.h"\nint two() { return 2; }\n')
    return copy


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def read_file(wheel: Path, suffix: str) -> str:
    (name,) = (name for name in names(wheel) if name.endswith(suffix))
    return zipfile.ZipFile(wheel).read(name).decode()


def assert_pure(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "Root-Is-Purelib: true" in read_file(wheel, ".dist-info/WHEEL")
    assert not [name for name in names(wheel) if name.endswith(".so")]
    assert json.loads(read_file(wheel, "native.json"))["libraries"] == []


def test_the_distribution_has_one_name_and_needs_what_importing_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == extras.DISTRIBUTION == "fused-sam"
    assert project["dependencies"] == ["torch>=2.10", "numpy", "safetensors"]
    assert set(extras.EXTRAS.values()) <= set(project["optional-dependencies"])
    requirements = [
        r for names in project["optional-dependencies"].values() for r in names if r.startswith("torchvision")
    ]
    assert not requirements, "torchvision belongs to one version of torch and would replace the torch that is there"


WITHOUT_EXTRAS = """
import sys
for name in ("rich", "matplotlib", "PIL", "sklearn"):
    sys.modules[name] = None
import torch
import fastsam
from fastsam import fed
model, data = torch.nn.Linear(3, 2), [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
fastsam.FusedSAM(model.parameters(), lr=0.1)
fed.run(model, data, fed.FedSAM(), rounds=1)
from fastsam.lab import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_without_extras_the_core_works_and_the_rest_names_its_command(tmp_path: Path) -> None:
    config = ROOT / "examples" / "digits.toml"
    for words in (["compare", str(config), "--algorithms", "fedavg"], ["run", str(config), "--rounds", "1"]):
        process = subprocess.run(
            [sys.executable, "-c", WITHOUT_EXTRAS, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert process.returncode == 1 and "Traceback" not in process.stderr, process.stderr
        assert "is not installed: pip install 'fused-sam[lab]'" in process.stderr


def test_building_needs_setuptools_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert [r.split(">")[0] for r in project["build-system"]["requires"]] == ["setuptools"]
    assert "version" in project["project"]["dynamic"], "the version stands once, in fastsam/__init__.py"


def test_pure_wheel_holds_every_module_and_every_source(checkout: Path, tmp_path: Path) -> None:
    wheel, _ = build_wheel(checkout, tmp_path / "out", FASTSAM_NATIVE="0")
    assert_pure(wheel)
    modules = {f"fastsam/{p.relative_to(checkout / 'fastsam')}" for p in (checkout / "fastsam").rglob("*.py")}
    modules |= {f"fastsam_kernels/{p.relative_to(checkout / 'kernels')}" for p in (checkout / "kernels").rglob("*.py")}
    csrc = checkout / "csrc"
    sources = {f"fastsam_kernels/csrc/{p.relative_to(csrc)}" for p in csrc.rglob("*") if p.is_file()}
    assert modules | sources <= names(wheel)
    # Without it a type checker takes no notice of a package's annotations, and the metadata promises them ("Typing ::
    # Typed").
    assert {"fastsam/py.typed", "fastsam_kernels/py.typed"} <= names(wheel)
    packages = {name.split("/")[0] for name in names(wheel)}
    assert {p for p in packages if not p.endswith(".dist-info")} == {"fastsam", "fastsam_kernels"}
    assert "fastsam = fastsam.lab.cli:main" in read_file(wheel, "entry_points.txt")
    assert "FASTSAM_NATIVE=0" in read_file(wheel, "native.json")


def test_the_package_called_kernels_may_be_installed(checkout: Path, tmp_path: Path) -> None:
    """A plugin of Hugging Face's package `kernels` is called by that name, which is also a folder of the sources."""
    files = {
        "kernels/__init__.py": "",
        "kernels/locking.py": "def write(command, basename, filename):\n    open('theirs', 'w').close()\n",
        "kernels-9.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 9\n",
        "kernels-9.dist-info/entry_points.txt": "[egg_info.writers]\nkernels.lock = kernels.locking:write\n",
    }
    for name, text in files.items():
        path = tmp_path / "installed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    hook = tmp_path / "hook.py"  # as pip's, outside the checkout
    hook.write_text("from setuptools import build_meta\nbuild_meta.prepare_metadata_for_build_wheel('.')\n")
    run(sys.executable, hook, cwd=checkout, PYTHONPATH=str(tmp_path / "installed"))
    assert (checkout / "theirs").is_file()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        pytest.param("/bin/false", "compiling failed", marks=pytest.mark.slow),
        pytest.param("no-such-compiler", "no-such-compiler not found", marks=pytest.mark.slow),
    ],
)
def test_missing_or_failing_compiler_gives_the_pure_wheel_and_says_so(
    checkout: Path, tmp_path: Path, compiler: str, reason: str
) -> None:
    wheel, output = build_wheel(checkout, tmp_path / "out", CXX=compiler)
    assert_pure(wheel)
    assert reason in output and reason in read_file(wheel, "native.json")


@pytest.mark.slow
def test_a_compiler_error_is_shown(checkout: Path, tmp_path: Path) -> None:
    (checkout / "csrc" / "ops.cpp").write_text("int one() { return undeclared_name; }\n")
    wheel, output = build_wheel(checkout, tmp_path / "out")
    assert_pure(wheel)
    assert "undeclared_name" in read_file(wheel, "native.json") and "ops.cpp" in output


@pytest.mark.slow
def test_asking_for_native_makes_a_failure_an_error(checkout: Path) -> None:
    argv = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", ".")
    assert "FASTSAM_NATIVE=1 and the libraries cannot be built" in run(
        *argv, cwd=checkout, ok=False, FASTSAM_NATIVE="1", CXX="/bin/false"
    )
    assert "FASTSAM_NATIVE must be 0 or 1, got 'yes'" in run(*argv, cwd=checkout, ok=False, FASTSAM_NATIVE="yes")
    assert not list(checkout.glob("*.whl"))


@pytest.mark.slow
@needs_compiler
def test_compiled_wheels_have_platform_tags_and_pure_wheels_none(checkout: Path, tmp_path: Path) -> None:
    wheel, output = build_wheel(checkout, tmp_path / "out", FASTSAM_NATIVE="1", FASTSAM_CUDA="0")
    tag = wheel.stem.split("-", 2)[2]
    assert tag.startswith("cp310-abi3-linux_"), tag
    assert "Root-Is-Purelib: false" in read_file(wheel, ".dist-info/WHEEL")
    assert "built libfastsam_cpu.so" in output
    (library,) = (name for name in names(wheel) if name.endswith(".so"))
    assert library == "fastsam_kernels/libfastsam_cpu.so"
    content = zipfile.ZipFile(wheel).read(library)
    assert content.startswith(b"\x7fELF") and str(tmp_path).encode() not in content
    assert not list((checkout / "kernels").glob("*.so")), "a wheel leaves the sources as they were"

    (checkout / "fastsam" / "ops.py").unlink()  # a removed file must not be in the next wheel
    wheel, _ = build_wheel(checkout, tmp_path / "again", FASTSAM_NATIVE="0")
    assert_pure(wheel)
    assert "fastsam/ops.py" not in names(wheel)
