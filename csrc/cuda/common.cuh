// Helpers of all CUDA kernels: vectors of 128 bits, the segment table as a kernel argument, and launching.
//
// One block computes one chunk of one row (`Tile`). In sums, each warp of a block may compute a small segment, because
// most tensors of a model have fewer elements than a block has threads. Blocks are not persistent. The work of a block
// before its first load (a search in the table, in constant memory) is short, and its scalars are computed during the
// first loads. The hardware's scheduler is expected to balance blocks of unequal length better than a fixed stride.
//
// The table of segments is a kernel argument. So there is no copy on the device to refresh, and a captured CUDA graph
// owns it. Arguments may take 32,764 bytes (CUDA 12.1, Volta and later); models with few segments use a small class of
// 4 KB. A table beyond the large class (417 to 707 segments, by the number of list operands) takes several launches.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <type_traits>

#include "../kernel_args.h"
#include "../kernel_math.h"

namespace fastsam {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kVecBytes = 16;
constexpr int64_t kArgumentLimit = 32764;

// ---- vectors
// ---------------------------------------------------------------------------------------------------------

template <class T, int N>
struct alignas(N * sizeof(T)) AlignedVector {
  T x[N];
};

// The words for loads and stores with a cache hint.
template <int Bytes>
using Word = std::conditional_t<Bytes == 16, int4,
                                std::conditional_t<Bytes == 8, int2, std::conditional_t<Bytes == 4, int, short>>>;

// The address of a block's first element of an operand (nullptr: not given). The flag is true if vectors of Width
// elements may be read and written in one access. Gradients in the buckets of DistributedDataParallel are aligned to 4
// bytes. Such an operand costs more instructions, and the other operands keep their wide accesses.
//
// kStreaming: the next access to these elements is at least a pass of the model later. They leave the second-level
// cache first, so that it keeps the data of the next kernel: the gradients between norm and perturbation, the weights
// before a pass.
template <class T, int Width, bool kStreaming = false>
struct VectorPtr {
  using Element = std::remove_const_t<T>;
  T* data;
  bool aligned;

  __device__ __forceinline__ VectorPtr(T* p = nullptr)
      : data(p), aligned(reinterpret_cast<uintptr_t>(p) % (Width * sizeof(T)) == 0) {}

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  template <int N>
  __device__ __forceinline__ void read(AlignedVector<Element, N>& vector, int i) const {
    if (kStreaming && (N == 1 || aligned)) {
      using Whole = Word<sizeof(vector)>;
      vector = bit_cast<AlignedVector<Element, N>>(__ldcs(reinterpret_cast<const Whole*>(data + i)));
    } else if (N == 1 || aligned) {
      vector = *reinterpret_cast<const AlignedVector<Element, N>*>(data + i);
    } else {
#pragma unroll
      for (int lane = 0; lane < N; ++lane) vector.x[lane] = data[i + lane];
    }
  }

  template <int N>
  __device__ __forceinline__ void write(const AlignedVector<Element, N>& vector, int i) const {
    if (kStreaming && (N == 1 || aligned)) {
      using Whole = Word<sizeof(vector)>;
      __stcs(reinterpret_cast<Whole*>(data + i), bit_cast<Whole>(vector));
    } else if (N == 1 || aligned) {
      *reinterpret_cast<AlignedVector<Element, N>*>(data + i) = vector;
    } else {
#pragma unroll
      for (int lane = 0; lane < N; ++lane) data[i + lane] = vector.x[lane];
    }
  }
};

// ---- the table -----------------------------------------------------------------------------------------------------

// The segments of one launch: first the large ones, then the small ones, which share blocks. Both are in the row's
// order. Lists: the number of list operands.
template <int Lists, int Capacity>
struct SegmentMetadata {
  int segments, chunk;
  int large, large_chunks;  // number of large segments, and of their chunks in a row, a block each
  int prefix[Capacity];     // number of a row's chunks of large segments before segment i
  uint16_t less[Capacity];  // number of a row's small segments before segment i, a chunk each
  int group[Capacity], slot[Capacity];
  int64_t offset[Capacity], length[Capacity];
  void* start[Lists][Capacity];
  int64_t row_stride[Lists][Capacity];

  FASTSAM_HD int chunks() const { return large_chunks + segments - large; }
  // Returns the number of a row's blocks that have elements. A kernel that finishes rows has a block for an empty row.
  FASTSAM_HD int busy() const { return large_chunks + (segments - large + kWarps - 1) / kWarps; }
  FASTSAM_HD int blocks() const { return busy() > 0 ? busy() : 1; }
};

// Bytes reserved for the other arguments of a launch.
constexpr int64_t kOtherArguments = 200;

constexpr int capacity(int lists, int64_t bytes) {
  return static_cast<int>((bytes - kOtherArguments - 16) / (3 * sizeof(int) + 2 + 2 * sizeof(int64_t) + lists * 16));
}

// The chunk of one row for a block, or for a warp of it: [begin, begin + count) of a segment.
struct Tile {
  int row, segment, count;
  int chunk;  // number of the chunk in the row, in this launch
  int64_t begin;
  bool warp_per_segment;  // each warp has a segment, or none (`count` is 0)
  int warp;               // the block's first warp that works on it
  int thread;             // number of the calling thread in these warps
};

// WarpPerSegment: the table may have segments that share blocks.
template <bool WarpPerSegment = false, class T>
__device__ __forceinline__ Tile tile_of(const T& table, unsigned index) {
  const unsigned blocks = table.blocks();
  Tile tile;
  tile.row = index / blocks;
  const int block = index % blocks;
  tile.warp_per_segment = WarpPerSegment && block >= table.large_chunks;
  if (tile.warp_per_segment) {
    // The compiler knows that a value of the first lane is the same in the whole warp, so it needs no register of every
    // thread.
    tile.warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarp, 0);
    const int small = table.large + (block - table.large_chunks) * kWarps + tile.warp;
    const bool there = small < table.segments;
    tile.thread = threadIdx.x % kWarp;
    tile.segment = there ? small : 0;
    tile.begin = 0;
    tile.count = there ? static_cast<int>(table.length[small]) : 0;
    tile.chunk = table.prefix[tile.segment];
  } else {
    tile.warp = 0;
    tile.thread = threadIdx.x;
    tile.segment = static_cast<int>(segment_of(table.prefix, table.large, block));
    const ChunkRange range =
        chunk_range_of(block - table.prefix[tile.segment], table.length[tile.segment], table.chunk);
    tile.begin = range.begin;
    tile.count = block < table.large_chunks ? static_cast<int>(range.count) : 0;
    tile.chunk = block;
  }
  tile.chunk += table.less[tile.segment];
  return tile;
}

// Returns the address of a tile's first element in a list operand (nullptr if the list is not given), and in a field.
template <class T, class SegmentMetadata>
__device__ __forceinline__ T* at(const SegmentMetadata& table, int list, const Tile& tile) {
  T* start = static_cast<T*>(table.start[list][tile.segment]);
  return start == nullptr ? nullptr : start + tile.row * table.row_stride[list][tile.segment] + tile.begin;
}

template <class T, class SegmentMetadata>
__device__ __forceinline__ T* at(const Field& field, const SegmentMetadata& table, const Tile& tile) {
  T* data = static_cast<T*>(field.data);
  return data == nullptr ? nullptr : data + tile.row * field.stride + table.offset[tile.segment] + tile.begin;
}

// The arguments of every kernel with hyper-parameters.
struct Scalars {
  const double* hparams;
  int groups;

  // Returns the columns of the group of a tile's segment.
  template <class SegmentMetadata>
  __device__ __forceinline__ const double* of(const SegmentMetadata& table, const Tile& tile) const {
    return hparams + (static_cast<int64_t>(tile.row) * groups + table.group[tile.segment]) * kNumHParams;
  }
};

inline Scalars scalars_of(const Problem& problem) { return Scalars{problem.hparams, static_cast<int>(problem.groups)}; }

// The number of elements of one sweep of a block; see chunks.h.
template <class Op>
constexpr int64_t sweep_of() {
  return int64_t{kThreads} * Op::kVecSize * Op::kUnroll;
}

// ---- launching -----------------------------------------------------------------------------------------------------

// Returns the elements of a row. The chunk length depends on it, and not on the number of rows.
inline int64_t row_elements(const Problem& problem) {
  int64_t n = 0;
  for (int64_t i = 0; i < problem.segments; ++i) n += problem.table[i].length;
  return n;
}

// Returns the number of chunks of a row's first segments.
inline int64_t row_chunks(const Problem& problem, int64_t chunk, int64_t segments) {
  int64_t n = 0;
  for (int64_t i = 0; i < segments; ++i) n += chunks_of(problem.table[i].length, chunk);
  return n;
}

inline int64_t row_chunks(const Problem& problem, int64_t chunk) {
  return row_chunks(problem, chunk, problem.segments);
}

// Number of powers that each block computes for Element before its first store.
template <class Element>
FASTSAM_HD constexpr int powers_of() {
  if constexpr (requires { Element::kPowers; }) return Element::kPowers;
  return 0;
}

// Returns the chunk length of a row for Element: the row is cut into `enough` chunks before chunks get longer. A power
// in double takes a block as long as several sweeps. With powers half the chunks are enough, in all rows together.
template <class Element>
int64_t chunk_of(const Problem& problem, int64_t enough) {
  const int64_t elements = row_elements(problem), sweep = sweep_of<Element>();
  return powers_of<Element>() > 0 ? chunk_for(problem.rows * elements, sweep, enough / 2)
                                  : chunk_for(elements, sweep, enough);
}

// A launch of a call. All launches have this chunk length. It has the number of the row's earlier chunks, and a flag
// that is true in the call's last launch.
struct Part {
  int64_t chunk, chunks_before;
  bool last;
};

template <int Capacity, size_t Lists, class F>
int in_parts(const Problem& problem, const std::array<const List*, Lists>& lists, int64_t chunk, int64_t most,
             bool reversed, F&& f) {
  const auto shares = [&](const Segment& segment) { return segment.length > 0 && segment.length <= most; };
  const int64_t parts = problem.segments > 0 ? (problem.segments + Capacity - 1) / Capacity : 1;
  for (int64_t launched = 0; launched < parts; ++launched) {
    const int64_t first = (reversed ? parts - 1 - launched : launched) * Capacity;
    SegmentMetadata<static_cast<int>(Lists), Capacity> table;
    table.chunk = static_cast<int>(chunk);
    table.segments = static_cast<int>(std::min<int64_t>(Capacity, problem.segments - first));
    const Segment* segments = problem.table + first;
    table.large = table.segments - static_cast<int>(std::count_if(segments, segments + table.segments, shares));
    table.large_chunks = 0;
    for (int each = 0, small = 0; each < table.segments; ++each) {
      const Segment& segment = segments[each];
      const bool shared = shares(segment);
      const int i = shared ? table.large + small : each - small;
      table.prefix[i] = table.large_chunks;
      table.less[i] = static_cast<uint16_t>(small);
      (shared ? small : table.large_chunks) += static_cast<int>(chunks_of(segment.length, chunk));
      table.group[i] = static_cast<int>(segment.group);
      table.slot[i] = static_cast<int>(segment.slot);
      table.offset[i] = segment.offset;
      table.length[i] = segment.length;
      for (size_t list = 0; list < Lists; ++list) {
        const bool defined = lists[list]->defined();
        table.start[list][i] = defined ? lists[list]->start[first + each] : nullptr;
        table.row_stride[list][i] = defined ? lists[list]->row_stride[first + each] : 0;
      }
    }
    const int error = f(table, Part{chunk, row_chunks(problem, chunk, first), launched == parts - 1});
    if (error != 0) return error;
  }
  return 0;
}

// Calls f(table, part) for the smallest number of launches that hold all segments, in their order or `reversed`. Stops
// at the first error and returns it. Segments of at most `most` elements share blocks.
template <size_t Lists, class F>
int each_part(const Problem& problem, const std::array<const List*, Lists>& lists, int64_t chunk, int64_t most,
              bool reversed, F&& f) {
  constexpr int small = capacity(Lists, 4096), large = capacity(Lists, kArgumentLimit);
  if (problem.rows == 0) return 0;
  return problem.segments <= small ? in_parts<small>(problem, lists, chunk, most, reversed, f)
                                   : in_parts<large>(problem, lists, chunk, most, reversed, f);
}

// Launches `blocks` blocks, if any, with `shared` bytes of dynamic shared memory. Returns a cudaError_t, and clears it
// so that later calls do not report it.
template <class Argument, class Params>
int launch(void (*kernel)(Argument), int64_t blocks, void* stream, const Params& params, int threads = kThreads,
           size_t shared = 0) {
  static_assert(sizeof(Params) <= kArgumentLimit, "kernel arguments");
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// Launches once for each part of a call, with a block for each chunk of each row. Small segments may share a block:
// segments for which each thread of a warp has at most one vector, as it would in a separate block. An Op has
//   Element<W, O>, kEnough   the computation on an element of weights W and backup O; for `chunk_of`
//   params(table, part)      the argument of a kernel
//   kernel<W, O, Params>()   the kernel
//   kWarpPerSegment                  true if small segments share blocks
//   kReversed                true if it walks from the end of the rows to their start
//   finishes()               true if a block finishes every row, even a row without elements
template <class Op, size_t Lists>
int launch_chunks(const Op& op, const Problem& problem, const std::array<const List*, Lists>& lists, void* stream) {
  return dispatch_types(problem, [&](auto weight, auto stored) -> int {
    using W = decltype(weight);
    using O = decltype(stored);
    using Element = typename Op::template Element<W, O>;
    const int64_t chunk = chunk_of<Element>(problem, Op::kEnough);
    const int64_t most = Op::kWarpPerSegment ? kWarp * Element::kVecSize : 0;
    return each_part(problem, lists, chunk, most, Op::kReversed, [&](const auto& table, const Part& part) {
      const auto params = op.params(table, part);
      const auto kernel = Op::template kernel<W, O, std::decay_t<decltype(params)>>();
      return launch(kernel, problem.rows * (op.finishes() ? table.blocks() : table.busy()), stream, params);
    });
  });
}

// Returns the number of partial sums of a call whose Op computes sums: one for each chunk of each row.
template <class Op>
int64_t partials_of(const Problem& problem) {
  return dispatch_types(problem, [&](auto weight, auto stored) {
    using Element = typename Op::template Element<decltype(weight), decltype(stored)>;
    return problem.rows * row_chunks(problem, chunk_of<Element>(problem, Op::kEnough));
  });
}

}  // namespace fastsam
