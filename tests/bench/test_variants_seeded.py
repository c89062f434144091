"""Errors put into a copy of the variants, one at a time, must turn their emulated cases red (see
`test_variants_emulated.py`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import emulated
from tests.helpers.places import ROOT

pytestmark = [
    pytest.mark.gpu_code,
    pytest.mark.skipif(emulated.why_not() is not None, reason=str(emulated.why_not())),
]
ONE_READ = {
    "place of a segment": [("+ table.offset[unit.segment] + unit.begin;", "+ unit.begin;")],
    "place of a chunk": [("+ table.offset[unit.segment] + unit.begin;", "+ table.offset[unit.segment];")],
    "place of a pack": [("(kept + x.i) =", "(kept + x.i + N) =")],
    "warp of a chunk": [("table.blocks() + index / kWarps)", "table.blocks() + index / (kWarps + 1))")],
    "thread of a warp": [("index % kWarps * kWarp +", "index % (kWarps - 1) * kWarp +")],
    "row": [("blockIdx.x * table.blocks() +", "")],
    "tail": [("if (i < unit.count) {", "if (i + 1 < unit.count) {")],
    "sums of a chunk": [
        ("chunk < p.table.chunks(); chunk += kThreads", "chunk < p.table.chunks() - 1; chunk += kThreads")
    ],
    "order of the places": [("columns = total + kWarps * sizeof(double)", "columns = total")],
    "barrier before the sums": [("groups = p.scalars.groups;\n  __syncthreads();", "groups = p.scalars.groups;")],
    "barrier before the total": [("__syncthreads();\n  if (thread == 0)", "if (thread == 0)")],
    "barrier before the rules": [("sum_of_warps(total));\n  }\n  __syncthreads();", "sum_of_warps(total));\n  }")],
    "row of the scalars": [("static_cast<int64_t>(blockIdx.x) * p.scalars.groups", "0 * p.scalars.groups")],
}
ERRORS = {"none": {}} | {name: {"one_read.cu": texts} for name, texts in ONE_READ.items()}
CHEAP = ("none", "place of a segment")  # the others: `make test-slow`
SCRIPT = """
import sys
import torch
from bench.variants.library import OneRead
from pathlib import Path
from tests.bench.test_variants_emulated import fixed_pairs
torch.set_num_threads(1)
fixed_pairs(OneRead(Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kept from run to run where pytest has a cache, so that only what changed is compiled."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("cuda-emulation")) if cache else tmp_path_factory.mktemp("cuda-emulation")


@pytest.mark.parametrize("error", [pytest.param(e, marks=() if e in CHEAP else pytest.mark.slow) for e in ERRORS])
def test_a_seeded_error_is_found(folder: Path, error: str) -> None:
    library = emulated.compile_variants(folder / f"variants-{re.sub(r'[^a-z]', '-', error)}", ERRORS[error])
    argv = [sys.executable, "-c", SCRIPT, str(library)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if error == "none":
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0, f"the error {error!r} went unnoticed"
        assert "AssertionError" in done.stderr or done.returncode < 0, done.stderr
