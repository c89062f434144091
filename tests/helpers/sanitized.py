"""The compiled CPU kernels under gcc's sanitizers of addresses and of undefined behaviour:
`python -m tests.helpers.sanitized PYTEST-ARGUMENTS`.

build/sanitized gets a copy of the package `fastsam_kernels` with a library that was compiled for it. PYTHONPATH puts
the copy before the installed package, in the processes that tests start too. A finding ends the process, and so fails
the test.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastsam_kernels import build, toolchain
from tests.helpers.places import ROOT

FOLDER = ROOT / "build" / "sanitized"
# The last -O counts. Leaks are not checked, because Python has many; tests/attack/leaks.py counts fastsam's.
FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Signals as tests expect them; odr: the copy's symbols are loaded with no other library.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:handle_abort=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}
REPORTS = FOLDER / "reports"  # reports of findings; pytest's captured output is lost when its process ends
_PRELOADED = (
    "libasan.so",
    "libubsan.so",
    "libstdc++.so",
)  # the last one, because asan looks for its throw when it starts


def why_not() -> str | None:
    """Return the reason why the sanitizers cannot run here, or None."""
    if reason := build.why_not():
        return reason
    try:
        sanitizer_libraries()
    except toolchain.BuildError as error:
        return str(error)
    return None


def sanitizer_libraries() -> list[str]:
    """Return the sanitizers' libraries. Raise BuildError if the compiler has none."""
    paths = []
    for name in _PRELOADED:
        path = toolchain.output_of([*toolchain.find_cxx(), f"-print-file-name={name}"]).strip()
        if not Path(path).is_absolute():
            raise toolchain.BuildError(f"{toolchain.find_cxx()[0]} has no {name}, which its sanitizers need")
        paths.append(path)
    return paths


def compiler(folder: Path) -> Path:
    """Write a compiler that adds `FLAGS` after all other flags."""
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\nexec {" ".join(toolchain.find_cxx())} "$@" {" ".join(FLAGS)}\n')
    script.chmod(0o755)
    return script


def environment(packages: Path) -> dict[str, str]:
    """Return the environment of a process that loads the sanitized build from `packages` before all others."""
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | OPTIONS | {"LD_PRELOAD": " ".join(sanitizer_libraries()), "PYTHONPATH": path}


def compile_copy() -> Path:
    """Compile a copy of the package, and return the path of its library."""
    package = FOLDER / "fastsam_kernels"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "kernels", package, ignore=shutil.ignore_patterns("*.so", "native.json", "__pycache__"))
    if not (FOLDER / "csrc").is_symlink():
        (FOLDER / "csrc").symlink_to(build.csrc())
    os.environ["CXX"] = str(compiler(FOLDER))
    return build.build(package, cuda=False, work_dir=FOLDER / "objects").paths["cpu"]


def main() -> int:
    if reason := why_not():
        print(f"the sanitizers cannot run here: {reason}", file=sys.stderr)
        return 1
    library = compile_copy()
    del os.environ["CXX"]
    env = environment(FOLDER)
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir()
    env |= {name: f"{value}:log_path={REPORTS / 'found'}" for name, value in OPTIONS.items()}
    script = "from fastsam_kernels import libraries; print(libraries.library())"
    options: Any = {"capture_output": True, "text": True, "check": True}
    path = subprocess.run([sys.executable, "-c", script], env=env, **options).stdout.strip()
    if Path(path) != library:
        print(f"{path} would be tested, not {library}", file=sys.stderr)
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], env=env, cwd=ROOT, check=False).returncode
    reports = sorted(REPORTS.iterdir())
    for report in reports:
        print(f"{report}:\n{report.read_text(errors='replace')[:4000]}")
    return code or len(reports)


if __name__ == "__main__":
    sys.exit(main())
