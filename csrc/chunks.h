// Maps a unit of work to its elements. The CPU and the CUDA kernels use the same functions, and the host can enumerate
// them.
#pragma once

#include <cstdint>

#include "types.h"

namespace fastsam {

// A row of the table; see kernels/reference.py.
struct Segment {
  int64_t offset, length, group, slot;
};

// Work is cut into chunks of at most kChunk elements that never cross a segment. The cut depends only on the layout,
// not on the number of rows, threads or blocks. So sums over chunks have the same bits for any distribution of the
// work.
constexpr int64_t kChunk = 8192;

FASTSAM_HD int64_t chunks_of(int64_t length, int64_t chunk = kChunk) { return (length + chunk - 1) / chunk; }

// Returns the last i in [0, n) with prefix[i] <= chunk, where prefix[i] is the number of chunks before segment i. It is
// never an empty segment (equal prefixes).
template <class Int>
FASTSAM_HD int64_t segment_of(const Int* prefix, int64_t n, int64_t chunk) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (static_cast<int64_t>(prefix[middle]) <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The elements [begin, begin + count) of one segment.
struct ChunkRange {
  int64_t begin, count;
};

FASTSAM_HD ChunkRange chunk_range_of(int64_t chunk_in_segment, int64_t length, int64_t chunk = kChunk) {
  const int64_t begin = chunk_in_segment * chunk;
  const int64_t remaining = length - begin;
  return ChunkRange{begin, remaining < chunk ? remaining : chunk};
}

// ---- CUDA: a block computes a chunk in sweeps of `threads * width * unroll` elements; in each of `unroll` turns a
// thread has `width` of them, and neighbouring threads have neighbouring elements ----

// Returns the first element in the chunk of the `u`-th vector of `width` elements of a thread.
FASTSAM_HD int vector_of(int u, int thread, int threads, int width) { return (u * threads + thread) * width; }

// Returns the chunk length for a row of `elements`: one sweep, or two, four or eight sweeps if at least `enough` chunks
// remain.
inline int64_t chunk_for(int64_t elements, int64_t sweep, int64_t enough) {
  int64_t chunk = sweep;
  while (elements > enough * chunk && chunk < 8 * sweep) chunk *= 2;
  return chunk;
}

}  // namespace fastsam
