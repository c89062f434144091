"""CUDA's part of the build: which compiler, which architectures, and that it never costs the CPU library."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from fastsam_kernels import build, libraries, toolchain
from tests.helpers.building import clean_linux, needs_compiler, script

pytestmark = clean_linux


def fake_nvcc(path: Path, archs: str) -> str:
    return script(path, f"printf '{archs}'")


def test_cuda_code_for_each_architecture_this_nvcc_knows(tmp_path: Path) -> None:
    new_nvcc = fake_nvcc(tmp_path / "new", "compute_75\\ncompute_80\\ncompute_90\\ncompute_100\\ncompute_120\\n")
    old_nvcc = fake_nvcc(tmp_path / "old", "compute_80\\ncompute_90\\n")
    ancient_nvcc = fake_nvcc(tmp_path / "ancient", "compute_50\\n")

    def codes(nvcc: str) -> list[str]:
        return [flag.rsplit("=", 1)[1] for flag in toolchain.gencode(nvcc)]

    assert codes(new_nvcc) == ["sm_75", "sm_80", "sm_90", "sm_100", "compute_100"]
    assert codes(old_nvcc) == ["sm_80", "sm_90", "compute_90"]
    with pytest.raises(build.BuildError, match="any of sm_75, sm_80, sm_90, sm_100"):
        codes(ancient_nvcc)


def test_cuda_architectures_by_the_variable_that_torch_extensions_use(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;9.0a+PTX")
    assert toolchain.gencode("unused") == [
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(build.BuildError, match="'Hopper'"):
        toolchain.gencode("unused")


def test_cuda_is_built_where_it_can_run_or_where_it_is_asked_for(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    cpu_torch, cuda_torch = (toolchain.Torch("2.13.0", cuda, tmp_path) for cuda in (None, "13.0"))
    monkeypatch.setenv("CUDACXX", fake_nvcc(tmp_path / "nvcc", ""))
    assert build._wants_cuda(cuda_torch, None) and not build._wants_cuda(cpu_torch, None)
    assert build._wants_cuda(cpu_torch, True) and not build._wants_cuda(cuda_torch, False)
    monkeypatch.setenv("FASTSAM_CUDA", "1")
    assert build._wants_cuda(cpu_torch, None)
    monkeypatch.setenv("FASTSAM_CUDA", "0")
    assert not build._wants_cuda(cuda_torch, None)
    monkeypatch.setenv("FASTSAM_CUDA", "maybe")
    with pytest.raises(build.BuildError, match="must be 0 or 1, got 'maybe'"):
        build._wants_cuda(cuda_torch, None)
    monkeypatch.delenv("FASTSAM_CUDA")
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    assert not build._wants_cuda(cuda_torch, None)
    with pytest.raises(build.BuildError, match="nvcc is not found"):
        build._wants_cuda(cuda_torch, True)


@needs_compiler
def test_a_failing_nvcc_costs_only_the_cuda_library(sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (sources / "cuda").mkdir()
    (sources / "cuda" / "ops_cuda.cpp").touch()
    monkeypatch.setenv(
        "CUDACXX",
        script(
            tmp_path / "nvcc", '[ "$1" = --list-gpu-arch ] && echo compute_90 || { echo "error: too old"; exit 1; }'
        ),
    )
    monkeypatch.setattr(build, "_wants_cuda", lambda torch, cuda: True)
    result = build.build(tmp_path / "out")
    assert set(result.paths) == {"cpu"}
    assert "the CUDA library could not be built" in result.message and "too old" in result.message
    with pytest.raises(build.BuildError, match="too old") as error_info:
        build.build(tmp_path / "asked", cuda=True)
    assert set(build.installed(tmp_path / "asked").paths) == set(error_info.value.built) == {"cpu"}


def test_a_toolkit_without_nvcc_is_passed_over(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """`CUDA_HOME` is set for many reasons, also where only the run time is."""
    nvcc = fake_nvcc(tmp_path / "nvcc", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "lost"))
    assert toolchain.find_nvcc() == nvcc
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    toolkit_nvcc = fake_nvcc(tmp_path / "toolkit" / "bin" / "nvcc", "")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    assert toolchain.find_nvcc() == toolkit_nvcc
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    assert toolchain.find_nvcc() is None


@needs_compiler
def test_an_nvcc_that_does_not_run_costs_no_cpu_library_of_the_cache(
    sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    (sources / "cuda").mkdir()
    (sources / "cuda" / "ops_cuda.cpp").touch()
    monkeypatch.setenv("CUDACXX", script(tmp_path / "nvcc", "exit 127"))
    monkeypatch.setattr(build, "_wants_cuda", lambda torch, cuda: True)
    assert set(build.jit().paths) == {"cpu"}


KERNEL = """
__global__ void scale(float* x) { x[threadIdx.x] *= 2; }
void launch(float* x, void* stream) { scale<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(x); }
"""
REGISTRATION = """
extern "C" int aoti_torch_get_current_cuda_stream(int, void**);
void launch(float* x, void* stream);
void call(float* x) { void* stream; aoti_torch_get_current_cuda_stream(0, &stream); launch(x, stream); }
__attribute__((constructor)) void keep() { if (false) call(nullptr); }
"""


@pytest.mark.gpu_code
@needs_compiler
def test_cuda_library_needs_torchs_cuda_and_keeps_its_run_time_private(sources: Path, tmp_path: Path) -> None:
    """This holds for a CPU build of torch too: the library from nvcc must also load with a CUDA build."""
    if not toolchain.find_nvcc():
        pytest.skip("no nvcc")
    if not shutil.which("readelf"):
        pytest.skip("no readelf")
    (sources / "cuda").mkdir()
    (sources / "cuda" / "scale.cu").write_text(KERNEL)
    (sources / "cuda" / "ops_cuda.cpp").write_text(REGISTRATION)
    library = build.build(tmp_path / "out", cuda=True).paths["cuda"]
    dynamic = toolchain.output_of(["readelf", "--dynamic", str(library)])
    libraries = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert "libtorch_cuda.so" in libraries and not [name for name in libraries if name.startswith("libcudart")]
    assert "RUNPATH" not in dynamic and "RPATH" not in dynamic, "torch is found because it is loaded, wherever it lies"
    symbols = toolchain.output_of(["readelf", "--dyn-syms", "--wide", str(library)]).splitlines()
    assert not [line for line in symbols if re.search(r" (GLOBAL|WEAK) +DEFAULT +\d+ +cuda", line)]
    content = library.read_bytes()
    assert b"compute_100" in content or b"sm_100" in content or b"sm_90" in content


def test_the_report_of_a_cuda_library_names_the_driver_that_it_needs(
    sources: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    release = "Cuda compilation tools, release {}, V1"
    nvcc = {version: script(tmp_path / version, f"echo '{release.format(version)}'") for version in ("12.6", "13.0")}
    assert [toolchain.cuda_version(path) for path in nvcc.values()] == ["12.6", "13.0"]
    assert [toolchain.driver_for(version) for version in nvcc] == ["driver 525 or newer", "driver 580 or newer"]
    with pytest.raises(build.BuildError, match="must name its release, got 'nonsense'"):
        toolchain.cuda_version(script(tmp_path / "strange", "echo nonsense"))
    monkeypatch.setenv("CUDACXX", nvcc["13.0"])
    monkeypatch.setattr(build, "_wants_cuda", lambda torch, cuda: True)

    def touch(steps: object, folder: Path) -> None:
        for name in build.FILES.values():
            (folder / name).touch()

    monkeypatch.setattr(build, "execute", touch)
    monkeypatch.setattr(build, "cuda_steps", lambda torch: [])
    build.build(tmp_path / "out")
    report = build.installed(tmp_path / "out")
    assert report.cuda == "13.0" and "its CUDA 13.0 needs driver 580 or newer" in report.message


@pytest.mark.parametrize(
    ("library", "driver", "expected"),
    [
        ("13.0", "12.4", "driver 580 or newer, and the driver here serves CUDA 12.4.*nvcc 12"),
        ("12.8", "12.4", None),
        ("12.6", "13.0", None),
        ("13.0", None, None),  # torch sees a GPU by other means
        (None, "12.4", None),
    ],
)
def test_a_driver_that_is_too_old_is_named(
    library: str | None, driver: str | None, expected: str | None, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "driver_cuda", lambda: driver)
    reason = libraries.driver_problem(library)
    assert reason is None if expected is None else re.search(expected, str(reason))


def test_the_driver_tells_its_cuda_version(monkeypatch: MonkeyPatch) -> None:
    class Driver:
        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = 12040
            return 0

    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    assert libraries.driver_cuda() == "12.4"
