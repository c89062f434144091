"""csrc/chunks.h enumerated on the host, over all blocks and threads of the CUDA kernels and all ranges of the CPU's:
every element is met once, none outside, packs begin where they are aligned. An off-by-one in a copy of it must be
noticed.
"""

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsam_kernels import build, toolchain
from tests.helpers.places import HELPERS

pytestmark = pytest.mark.skipif(not toolchain.find_cxx(), reason="there is no C++ compiler")


class Walker:
    """A compiled tests/helpers/index/walk.cpp."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.walk_cuda.restype = self._library.walk_cpu.restype = ctypes.c_int64

    def cuda(self, table: Tensor, rows: int, width: int, turns: int, minimum: int) -> str | None:
        """Return the error in the chunk walk of the CUDA kernels, or None."""
        options = ctypes.c_int(width), ctypes.c_int(turns), ctypes.c_int64(minimum)
        result = (
            self._walk("walk_cuda", table, rows, *options, ctypes.c_int(small_count), ctypes.c_int(backwards))
            for small_count, backwards in itertools.product((0, 1), repeat=2)
        )
        return next(filter(None, result), None)

    def cpu(self, table: Tensor, rows: int, ranges: int) -> str | None:
        """Return the error in the chunk walk of the CPU kernels with `ranges` ranges, or None."""
        return self._walk("walk_cpu", table, rows, ctypes.c_int(ranges))

    def _walk(self, name: str, table: Tensor, rows: int, *options: object) -> str | None:
        stride = int((table[:, 0] + table[:, 1]).max()) + 1
        counts = torch.zeros(rows, stride, dtype=torch.uint8)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (table, counts)]
        sizes = ctypes.c_int64(len(table)), ctypes.c_int64(rows)
        error = getattr(self._library, name)(pointers[0], *sizes, *options, pointers[1], ctypes.c_int64(stride))
        if error != -1:
            return f"{name}: outside, or not aligned, about element {error}"
        expected = torch.zeros_like(counts)
        for offset, length, _, _ in table.tolist():
            expected[:, offset : offset + length] = 1
        places_of_error = (counts != expected).nonzero()
        return (
            f"{name}: element {places_of_error[0].tolist()} is met {counts[tuple(places_of_error[0])]} times"
            if len(places_of_error)
            else None
        )


def compile_walker(folder: Path, changes: dict[str, list[tuple[str, str]]] | None = None) -> Walker:
    """The walk over a copy of csrc/ in which texts are replaced by others, by file."""
    csrc = folder / "csrc"
    shutil.copytree(build.csrc(), csrc)
    for name, replacements in (changes or {}).items():
        text = (csrc / name).read_text()
        for old, new in replacements:
            assert text.count(old) == 1, f"{name} must hold {old!r} once"
            text = text.replace(old, new)
        (csrc / name).write_text(text)
    options = ("-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-unknown-pragmas", "-x", "c++")
    argv = [
        *toolchain.find_cxx(), *options, f"-I{HELPERS / 'emulation'}", f"-I{csrc}", str(HELPERS / "index" / "walk.cpp"),
    ]  # fmt: skip
    subprocess.run([*argv, "-o", str(folder / "walk.so")], check=True, capture_output=True, text=True)
    return Walker(folder / "walk.so")


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Walker:
    return compile_walker(tmp_path_factory.mktemp("walk"))


def table_of(lengths: list[int], gaps: list[int] | None = None) -> Tensor:
    """Segments of these lengths at multiples of 16 elements, `gaps[i]` times 16 elements before each."""
    rows, offset = [], 0
    for i, length in enumerate(lengths):
        offset += 16 * (gaps[i] if gaps else 0)
        rows.append([offset, length, 0, i])
        offset += -(-length // 16) * 16
    return torch.tensor(rows, dtype=torch.int64)


LENGTHS = st.one_of(st.integers(0, 40), st.integers(1000, 1050), st.integers(8100, 8300), st.integers(0, 70_000))
TABLES = st.lists(st.tuples(LENGTHS, st.integers(0, 3)), min_size=1, max_size=20).map(
    lambda pairs: table_of([length for length, _ in pairs], [gap for _, gap in pairs])
)
EVERY_EXAMPLE = settings(max_examples=50, deadline=None, derandomize=True)


@EVERY_EXAMPLE
@given(TABLES, st.integers(1, 3), st.sampled_from((2, 4, 8)), st.integers(1, 4), st.integers(1, 64))
def test_blocks_and_threads_meet_every_element_once(
    walker: Walker, table: Tensor, rows: int, width: int, turns: int, minimum: int
) -> None:
    """More segments than a launch takes, chunks of one sweep and of several, small segments that share blocks, all
    widths and turns."""
    assert walker.cuda(table, rows, width, turns, minimum) is None


@EVERY_EXAMPLE
@given(TABLES, st.integers(1, 3), st.integers(1, 9))
def test_ranges_of_the_cpu_meet_every_element_once(walker: Walker, table: Tensor, rows: int, ranges: int) -> None:
    assert walker.cpu(table, rows, ranges) is None


@pytest.mark.parametrize("lengths", [[11_000_001], [0, 0, 5_000_000, 0, 3], [1] * 200, [0]])
def test_long_many_and_empty_segments(walker: Walker, lengths: list[int]) -> None:
    assert walker.cuda(table_of(lengths), 1, 4, 2, 64) is None
    assert walker.cpu(table_of(lengths), 1, 7) is None


ERRORS = {
    "no error": [],
    "chunks too few": [("(length + chunk - 1) / chunk", "(length + chunk - 2) / chunk")],
    "chunks too many": [("(length + chunk - 1) / chunk", "(length + chunk) / chunk")],
    "previous segment": [
        ("static_cast<int64_t>(prefix[middle]) <= chunk", "static_cast<int64_t>(prefix[middle]) < chunk")
    ],
    "chunk begins one late": [("chunk_in_segment * chunk;", "chunk_in_segment * chunk + 1;")],
    "one element less": [("remaining < chunk ? remaining : chunk", "remaining < chunk ? remaining - 1 : chunk")],
    "one element more": [("remaining < chunk ? remaining : chunk", "remaining < chunk ? remaining + 1 : chunk")],
    "neighbouring thread": [("(u * threads + thread) * width", "(u * threads + thread + 1) * width")],
    "turns overlap": [("(u * threads + thread) * width", "(u * (threads - 1) + thread) * width")],
    "packs overlap": [("(u * threads + thread) * width", "(u * threads + thread) * (width - 1)")],
}


SHARED = {  # mutations for blocks in which each warp has a small segment
    "row's small segments in one": [("(block - table.large_chunks) * kWarps +", "(block - table.large_chunks) +")],
    "thread of a block": [("tile.thread = threadIdx.x % kWarp;", "tile.thread = threadIdx.x;")],
    "chunks of small segments": [("  tile.chunk += table.less[tile.segment];\n", "")],
    "a block less": [("(segments - large + kWarps - 1) / kWarps;", "(segments - large) / kWarps;")],
    "longer than a warp": [("segment.length <= most;", "segment.length <= most + 4;")],
    "launches in their order": [("(reversed ? parts - 1 - launched : launched)", "launched")],
}


@pytest.mark.gpu_code  # each one compiled
@pytest.mark.parametrize("error", ERRORS)
def test_a_seeded_error_in_the_index_is_found(tmp_path: Path, error: str) -> None:
    """The same check on a copy of csrc/chunks.h with an off-by-one: red, whichever it is; without one, green."""
    walker = compile_walker(tmp_path, {"chunks.h": ERRORS[error]})
    table = table_of([33, 0, 4096, 5, 4097, 70_000, 8192, 1])
    result = [walker.cuda(table, 2, width, turns, 4) for width, turns in ((4, 2), (2, 4))] + [walker.cpu(table, 2, 3)]
    assert any(result) == (error != "no error"), result


@pytest.mark.gpu_code
@pytest.mark.parametrize("error", SHARED)
def test_a_seeded_error_in_shared_blocks_is_found(tmp_path: Path, error: str) -> None:
    walker = compile_walker(tmp_path, {"cuda/common.cuh": SHARED[error]})
    assert walker.cuda(table_of([33, 128, 5, 4096, 132, 1] + [17] * 20), 2, 4, 2, 4) is not None
