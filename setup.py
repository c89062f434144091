"""Builds fastsam: a pure wheel, or, where there are torch and a C++ compiler, a platform wheel with compiled libraries.

`pip install .` has no torch in its isolated build environment and gives `py3-none-any` in seconds. In an environment
that has torch 2.10 or newer, `pip install --no-build-isolation .` compiles the libraries first. The wheel is tagged by
what came out, so that a failing compiler gives the pure wheel too, never an empty platform wheel.

`FASTSAM_NATIVE=0` never compiles, `FASTSAM_NATIVE=1` makes a failure an error. How things are compiled stands in
`kernels/build.py`; everything else about the package in `pyproject.toml`.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"fastsam is built with setuptools 77 or newer, this environment has {setuptools.__version__}: "
        "run `pip install --upgrade setuptools`, or leave out --no-build-isolation"
    )

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# The folder `kernels`, under its installed name: the other is a published package's too, and setuptools imports a part
# of that where it is installed.
spec = spec_from_file_location("fastsam_kernels", ROOT / "kernels" / "__init__.py")
assert spec is not None and spec.loader is not None
sys.modules["fastsam_kernels"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
from fastsam_kernels import build as native  # noqa: E402  (standard library only)

CONFIGS = ("showcase.toml", "digits.toml", "digits_sharpness.toml", "private.toml")  # fastsam/lab/examples.py has them
PYTHON_TAG = "cp310"  # the oldest Python served; the libraries have no Python symbols, so every later one is too


class NativeDistribution(Distribution):
    """The distribution, plus the compiled libraries once a command has asked for them."""

    compiled: native.BuildResult | None = None

    def build_libraries(self) -> native.BuildResult:
        """Compile, once per run; without a library the message says why."""
        if self.compiled is None:
            self.compiled = self._build_libraries()
            print(f"fastsam: {self.compiled.message}", file=sys.stderr, flush=True)
        return self.compiled

    def _build_libraries(self) -> native.BuildResult:
        setting = os.environ.get("FASTSAM_NATIVE", "")
        if setting not in ("", "0", "1"):
            raise SystemExit(f"fastsam: FASTSAM_NATIVE must be 0 or 1, got {setting!r}")
        if setting == "0":
            return native.BuildResult({}, "installed without compiled libraries: FASTSAM_NATIVE=0")
        try:
            return native.build(ROOT / "build" / "native" / "out", work_dir=ROOT / "build" / "native")
        except native.BuildError as error:
            if setting == "1":
                raise SystemExit(f"fastsam: FASTSAM_NATIVE=1 and the libraries cannot be built: {error}") from error
            missing_part = "CUDA kernels" if error.built else "compiled libraries"
            return native.BuildResult(error.built, f"installed without {missing_part}: {error}")

    def has_ext_modules(self) -> bool:
        """Return True if the wheel is a platform wheel, because libraries were compiled."""
        return bool(self.compiled and self.compiled.paths)


class BuildNative(Command):
    """Puts the libraries and their report into the package: into `kernels/` for an editable install."""

    description = "add the compiled libraries"
    user_options = []  # noqa: RUF012  (setuptools' own declaration)
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def _target(self) -> Path:
        return ROOT / "kernels" if self.editable_mode else Path(str(self.build_lib)) / "fastsam_kernels"

    def run(self) -> None:
        native.publish(self.distribution.build_libraries(), self._target())

    def get_outputs(self) -> list[str]:
        return list(self.get_output_mapping())

    def get_output_mapping(self) -> dict[str, str]:
        names = [path.name for path in self.distribution.build_libraries().paths.values()] + [native.REPORT]
        return {f"{self.build_lib}/fastsam_kernels/{name}": str(self._target() / name) for name in names}

    def get_source_files(self) -> list[str]:
        return []


class Build(build):
    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012


class BuildPy(build_py):
    def run(self) -> None:
        """Copy the packages and the example configs, without what an earlier build (of files since removed) left in the
        build folder."""
        if not self.editable_mode:
            for package in ("fastsam", "fastsam_kernels"):
                shutil.rmtree(Path(self.build_lib) / package, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "fastsam" / "lab" / "configs"
            folder.mkdir(parents=True, exist_ok=True)
            for name in CONFIGS:
                shutil.copyfile(ROOT / "examples" / name, folder / name)


class BdistWheel(bdist_wheel):
    """Tags the wheel by what was compiled; asked only when a wheel is made, not for its metadata."""

    def _settle(self) -> None:
        if self.distribution.build_libraries().paths:
            self.root_is_pure, self.py_limited_api = False, PYTHON_TAG

    def run(self) -> None:
        self._settle()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        self._settle()
        return super().get_tag()

    def write_wheelfile(self, *args: object, **options: object) -> None:
        self._settle()
        super().write_wheelfile(*args, **options)


setup(
    packages=[
        *find_packages(include=["fastsam", "fastsam.*"]),
        "fastsam_kernels",
        *(f"fastsam_kernels.{name}" for name in find_packages("kernels")),
        "fastsam_kernels.csrc",
    ],
    package_dir={"fastsam_kernels": "kernels", "fastsam_kernels.csrc": "csrc"},
    package_data={
        "fastsam_kernels.csrc": ["*.h", "*.cpp", "*/*.h", "*/*.cpp", "*/*.cu", "*/*.cuh"],
        "fastsam": ["py.typed"],
        "fastsam_kernels": ["py.typed"],
        "fastsam.lab.reproduce": ["tables/*.toml", "tables/*.json", "protocols/*.toml"],
    },
    distclass=NativeDistribution,
    cmdclass={"bdist_wheel": BdistWheel, "build": Build, "build_py": BuildPy, "build_native": BuildNative},
)
