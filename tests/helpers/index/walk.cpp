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
int64_t walk_cuda(const int64_t* table, int64_t segments, int64_t rows, int width, int turns, int64_t enough, int few,
                  int reversed, uint8_t* data, int64_t stride) {
  constexpr int threads = kThreads;
  const Counts counts{data, stride};
  const Call call = call_of(reinterpret_cast<const Segment*>(table), segments, rows, 1, nullptr, -1);
  const int64_t sweep = int64_t{threads} * width * turns, chunk = chunk_for(row_elements(call), sweep, enough);
  std::map<int64_t, int64_t> chunks_before;  // chunks of the row by a segment's offset
  int64_t chunks = 0;
  for (int64_t i = 0; i < segments; chunks += chunks_of(call.table[i++].length, chunk)) {
    if (call.table[i].length > 0) chunks_before[call.table[i].offset] = chunks;
  }
  const List none;
  int64_t error = kFine, previous = reversed != 0 ? chunks : 0;
  const auto walk = [&](const auto& part, const Part& place) {
    const bool in_turn = reversed != 0 ? place.chunks_before <= previous : place.chunks_before >= previous;
    if (!in_turn) return error = part.offset[0], 1;
    previous = place.chunks_before;
    for (unsigned index = 0; index < rows * static_cast<unsigned>(part.blocks()); ++index) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
        const Unit unit = unit_of<true>(part, index);
        if (unit.count == 0) continue;
        const int64_t offset = part.offset[unit.segment], first = offset + unit.begin;
        const bool fits = unit.count > 0 && unit.count <= chunk && unit.begin % width == 0;
        if (!fits || unit.begin + unit.count > part.length[unit.segment]) return error = first, 1;
        if (place.chunks_before + unit.chunk != chunks_before.at(offset) + unit.begin / chunk) return error = first, 1;
        const int whole = unit.count - unit.count % width;
        for (int start = 0; start < whole; start += sweep) {
          for (int turn = 0; turn < turns; ++turn) {
            const int i = start + pack_of(turn, unit.thread, threads, width);
            if (i % width != 0) return error = first + i, 1;
            for (int lane = 0; lane < width && i < whole; ++lane) {
              if (!counts.meet(unit.row, rows, first + i + lane)) return error = first + i, 1;
            }
          }
        }
        if (const int i = whole + unit.thread; i < unit.count && !counts.meet(unit.row, rows, first + i)) {
          return error = first, 1;
        }
      }
    }
    return 0;
  };
  const std::array lists{&none};
  few != 0 ? in_parts<3>(call, lists, chunk, kWarp * width, reversed != 0, walk)
           : in_parts<24>(call, lists, chunk, kWarp * width, reversed != 0, walk);
  return error;
}

// The CPU kernels: chunks of all rows in `ranges` ranges of about one length, as threads get them.
int64_t walk_cpu(const int64_t* table, int64_t segments, int64_t rows, int ranges, uint8_t* data, int64_t stride) {
  const Counts counts{data, stride};
  const Call call = call_of(reinterpret_cast<const Segment*>(table), segments, rows, 1, nullptr, -1);
  const int64_t units = rows * call.chunks();
  int64_t error = kFine;
  for (int64_t range = 0; range < ranges; ++range) {
    const int64_t begin = range * units / ranges, end = (range + 1) * units / ranges;
    if (begin == end) continue;
    each_piece(call, begin, end, [&](int64_t row, int64_t segment, Piece piece) {
      const int64_t first = call.table[segment].offset + piece.begin;
      if (piece.count <= 0 || piece.count > kChunk || piece.begin % 16 != 0) error = first;
      for (int64_t i = 0; i < piece.count && error == kFine; ++i) {
        if (!counts.meet(row, rows, first + i)) error = first + i;
      }
    });
  }
  return error;
}
}
#pragma GCC visibility pop
