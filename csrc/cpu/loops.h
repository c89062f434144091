// Helpers of the loops of all CPU kernels. The loops (*_loops.h) are compiled once per instruction set (per_isa.h).
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "../kernel_args.h"
#include "../kernel_math.h"

namespace fastsam {

// Half-precision chunks are squared in blocks of this many elements, so that their conversion stays in the first-level
// cache.
constexpr int64_t kBlock = 512;

// Streamed results are staged in blocks of this many bytes.
constexpr int64_t kNontemporalBytes = 256;

#define FASTSAM_SIMD _Pragma("GCC ivdep")

// For short loops of constant length whose arrays belong in registers.
#define FASTSAM_UNROLL _Pragma("GCC unroll 16")

// For loops over the last elements of a line. Unrolled by -O3, they would be most of the compiled code.
#define FASTSAM_ROLLED _Pragma("GCC unroll 1")

// For a lambda that a loop calls per element: a call that is not inlined keeps the loop from being vectorised.
#define FASTSAM_ALWAYS_INLINE __attribute__((always_inline))

// For a function with many callers that loops over a whole block. It is compiled once, not into each caller.
#define FASTSAM_NOINLINE __attribute__((noinline)) inline

enum class InstructionSet { baseline, avx2, avx512 };

// Returns the best instruction set of the processor. FASTSAM_ISA=baseline|avx2 selects a smaller one, for tests.
InstructionSet instruction_set();

// Calls f(row, segment, range) for the chunks [begin, end) of all rows.
template <class F>
inline __attribute__((always_inline)) void for_each_chunk(const Problem& problem, int64_t begin, int64_t end, F&& f) {
  const int64_t chunks = problem.chunks();
  int64_t row = begin / chunks, chunk = begin % chunks;
  int64_t segment = segment_of(problem.prefix.data(), problem.segments, chunk);
  for (int64_t unit = begin; unit < end; ++unit) {
    while (chunk >= problem.prefix[segment + 1]) ++segment;
    f(row, segment, chunk_range_of(chunk - problem.prefix[segment], problem.table[segment].length));
    if (++chunk == chunks) chunk = segment = 0, ++row;
  }
}

template <class T>
inline T* at(const List& list, int64_t row, int64_t segment, int64_t begin) {
  if (!list.defined()) return nullptr;
  return static_cast<T*>(list.start[segment]) + row * list.row_stride[segment] + begin;
}

template <class T>
inline T* at(const Field& field, const Problem& problem, int64_t row, int64_t segment, int64_t begin) {
  if (field.data == nullptr) return nullptr;
  return static_cast<T*>(field.data) + row * field.stride + problem.table[segment].offset + begin;
}

inline const double* scalars(const Problem& problem, int64_t row, int64_t segment) {
  return problem.hparams + (row * problem.groups + problem.table[segment].group) * kNumHParams;
}

}  // namespace fastsam
