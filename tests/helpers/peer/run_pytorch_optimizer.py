"""Runs the SAM tests of the library pytorch-optimizer, as they are in its source distribution, against
`fastsam.FusedSAM`.

    python tests/helpers/peer/run_pytorch_optimizer.py             fetches the source distribution from the package
    registry once, then runs python tests/helpers/peer/run_pytorch_optimizer.py FOLDER      uses an unpacked source
    distribution

Its tests import `pytorch_optimizer.SAM`; here that name, and `LookSAM` for the one test that is written for wrappers
other than SAM, is `FusedSAM`. Further arguments go to pytest.
"""

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import fastsam

VERSION = "4.1.0"
CACHE = Path(__file__).resolve().parents[3] / "build" / "peer"
TESTS = "tests/test_wrapper_optimizers.py"
LEFT_OUT = {"test_sam_family_methods": "it calls init_group and expects NoClosureError, names of that library alone"}


class SAM(fastsam.FusedSAM):
    """FusedSAM with that library's signature. `use_gc`, centralised gradients, does not belong to SAM and is
    ignored."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, adaptive: bool = False,
        use_gc: bool = False,
                 foreach: bool | None = None, **options: Any) -> None:  # fmt: skip
        if foreach is not None:
            options["foreach"] = foreach
        super().__init__(params, base_optimizer, rho, adaptive, **options)


class Substitution:
    """A pytest plugin: keeps the tests that run on FusedSAM."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        own_items = [item for item in items if self._ours(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in own_items])
        items[:] = own_items

    def _ours(self, item: pytest.Item) -> bool:
        call = getattr(item, "callspec", None)
        is_sam = call is not None and call.params.get("wrapper") is SAM
        return is_sam and item.originalname not in LEFT_OUT  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def fetch() -> Path:
    """Return the unpacked source distribution, which is downloaded at the first call."""
    folder = CACHE / f"pytorch_optimizer-{VERSION}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps", "-d", str(CACHE)]
        subprocess.run([*command, f"pytorch-optimizer=={VERSION}"], check=True)
        with tarfile.open(CACHE / f"pytorch_optimizer-{VERSION}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
    return folder


def main(arguments: list[str]) -> int:
    folder = Path(arguments.pop(0)).resolve() if arguments and not arguments[0].startswith("-") else fetch()
    if not (folder / TESTS).exists():
        print(
            f"{folder} has no {TESTS}; it should be an unpacked source distribution of pytorch-optimizer",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(folder))
    import pytorch_optimizer

    vars(pytorch_optimizer).update(SAM=SAM, LookSAM=SAM)
    torch.set_num_threads(1)
    plugin = Substitution()
    code = pytest.main(
        [str(folder / TESTS), f"--rootdir={folder}", "-p", "no:cacheprovider", "-o", "addopts=", *arguments],
        plugins=[plugin],
    )
    print(f"{plugin.passed} tests of pytorch-optimizer {VERSION} passed on fastsam.FusedSAM")
    return int(code) or (0 if plugin.passed else 3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
