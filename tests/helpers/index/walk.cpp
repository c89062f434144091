// Walks over all rows, segments, blocks and threads as the kernels do, with their own functions, and counts how often
// each element is met. Host code: `cuda_runtime.h` is the one of tests/helpers/emulation.
#include <cstdint>
#include <map>
#include <vector>

#include "cpu/loops.h"
#include "cuda/common.cuh"

namespace {

using namespace fastsam;

// Result of a walk: the element of the row with the first error, or kFine. Counts are checked separately.
constexpr int64_t kFine = -1;

// An element of a row: [rows][row_size] counts, addressed at the segments' offsets.
struct Counts {
  uint8_t* data;
  int64_t stride;
  bool inside(int64_t row, int64_t rows, int64_t i) const { return row >= 0 && row < rows && i >= 0 && i < stride; }
  // Counts one more; false outside.
  bool meet(int64_t row, int64_t rows, int64_t i) const {
    if (!inside(row, rows, i)) return false;
    ++data[row * stride + i];
    return true;
  }
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The CUDA kernels: blocks of `threads` threads with `turns` packs of `width` elements, of which a chunk has one, or a
// small segment a warp, in launches of at most 3 or 24 segments (`few`), the last segments first (`reversed`). table:
// int64 [segments, 4] as in kernels/reference.py; counts: zeros [rows, row_size]. Returns -1, or the place of an error:
// an element outside, a pack that is not aligned (segments at multiples of `width` given), a piece that leaves its
// chunk, a chunk whose number is not its place in the row, where its sum goes, a launch out of turn.
int64_t walk_cuda(const int64_t* table, int64_t segments, int64_t rows, int width, int unroll, int64_t enough, int few,
                  int reversed, uint8_t* data, int64_t stride) {
  constexpr int threads = kThreads;
  const Counts counts{data, stride};
  const Problem problem = problem_of(reinterpret_cast<const Segment*>(table), segments, rows, 1, nullptr, -1);
  const int64_t sweep = int64_t{threads} * width * unroll, chunk = chunk_for(row_elements(problem), sweep, enough);
  std::map<int64_t, int64_t> chunks_before;  // chunks of the row by a segment's offset
  int64_t chunks = 0;
  for (int64_t i = 0; i < segments; chunks += chunks_of(problem.table[i++].length, chunk)) {
    if (problem.table[i].length > 0) chunks_before[problem.table[i].offset] = chunks;
  }
  const List none;
  int64_t error = kFine, previous = reversed != 0 ? chunks : 0;
  const auto walk = [&](const auto& part, const Part& place) {
    const bool in_turn = reversed != 0 ? place.chunks_before <= previous : place.chunks_before >= previous;
    if (!in_turn) return error = part.offset[0], 1;
    previous = place.chunks_before;
    for (unsigned index = 0; index < rows * static_cast<unsigned>(part.blocks()); ++index) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
        const Tile tile = tile_of<true>(part, index);
        if (tile.count == 0) continue;
        const int64_t offset = part.offset[tile.segment], first = offset + tile.begin;
        const bool fits = tile.count > 0 && tile.count <= chunk && tile.begin % width == 0;
        if (!fits || tile.begin + tile.count > part.length[tile.segment]) return error = first, 1;
        if (place.chunks_before + tile.chunk != chunks_before.at(offset) + tile.begin / chunk) return error = first, 1;
        const int whole = tile.count - tile.count % width;
        for (int start = 0; start < whole; start += sweep) {
          for (int u = 0; u < unroll; ++u) {
            const int i = start + vector_of(u, tile.thread, threads, width);
            if (i % width != 0) return error = first + i, 1;
            for (int lane = 0; lane < width && i < whole; ++lane) {
              if (!counts.meet(tile.row, rows, first + i + lane)) return error = first + i, 1;
            }
          }
        }
        if (const int i = whole + tile.thread; i < tile.count && !counts.meet(tile.row, rows, first + i)) {
          return error = first, 1;
        }
      }
    }
    return 0;
  };
  const std::array lists{&none};
  few != 0 ? in_parts<3>(problem, lists, chunk, kWarp * width, reversed != 0, walk)
           : in_parts<24>(problem, lists, chunk, kWarp * width, reversed != 0, walk);
  return error;
}

// The CPU kernels: chunks of all rows in `ranges` ranges of about one length, as threads get them.
int64_t walk_cpu(const int64_t* table, int64_t segments, int64_t rows, int ranges, uint8_t* data, int64_t stride) {
  const Counts counts{data, stride};
  const Problem problem = problem_of(reinterpret_cast<const Segment*>(table), segments, rows, 1, nullptr, -1);
  const int64_t units = rows * problem.chunks();
  int64_t error = kFine;
  for (int64_t range = 0; range < ranges; ++range) {
    const int64_t begin = range * units / ranges, end = (range + 1) * units / ranges;
    if (begin == end) continue;
    for_each_chunk(problem, begin, end, [&](int64_t row, int64_t segment, ChunkRange range) {
      const int64_t first = problem.table[segment].offset + range.begin;
      if (range.count <= 0 || range.count > kChunk || range.begin % 16 != 0) error = first;
      for (int64_t i = 0; i < range.count && error == kFine; ++i) {
        if (!counts.meet(row, rows, first + i)) error = first + i;
      }
    });
  }
  return error;
}
}
#pragma GCC visibility pop
