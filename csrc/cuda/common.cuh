// Helpers of all CUDA kernels: packs of 128 bits, the segment table as a kernel argument, and launching.
//
// One block computes one chunk of one row (`Unit`). In sums, each warp of a block may compute a small segment, because
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

#include "../launch.h"
#include "../math.h"

namespace fastsam {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPackBytes = 16;
constexpr int64_t kArgumentLimit = 32764;

// ---- packs ---------------------------------------------------------------------------------------------------------

template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T x[N];
};

// The words for loads and stores with a cache hint.
template <int Bytes>
using Word = std::conditional_t<Bytes == 16, int4,
                                std::conditional_t<Bytes == 8, int2, std::conditional_t<Bytes == 4, int, short>>>;

// The address of a block's first element of an operand (nullptr: not given). The flag is true if packs of Width
// elements may be read and written in one access. Gradients in the buckets of DistributedDataParallel are aligned to 4
// bytes. Such an operand costs more instructions, and the other operands keep their wide accesses.
//
// Once: the next access to these elements is at least a pass of the model later. They leave the second-level cache
// first, so that it keeps the data of the next kernel: the gradients between norm and perturbation, the weights before
// a pass.
template <class T, int Width, bool Once = false>
struct Operand {
  using Element = std::remove_const_t<T>;
  T* data;
  bool wide;

  __device__ __forceinline__ Operand(T* p = nullptr)
      : data(p), wide(reinterpret_cast<uintptr_t>(p) % (Width * sizeof(T)) == 0) {}

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  template <int N>
  __device__ __forceinline__ void read(Pack<Element, N>& pack, int i) const {
    if (Once && (N == 1 || wide)) {
      using Whole = Word<sizeof(pack)>;
      pack = bit_cast<Pack<Element, N>>(__ldcs(reinterpret_cast<const Whole*>(data + i)));
    } else if (N == 1 || wide) {
      pack = *reinterpret_cast<const Pack<Element, N>*>(data + i);
    } else {
#pragma unroll
      for (int lane = 0; lane < N; ++lane) pack.x[lane] = data[i + lane];
    }
  }

  template <int N>
  __device__ __forceinline__ void write(const Pack<Element, N>& pack, int i) const {
    if (Once && (N == 1 || wide)) {
      using Whole = Word<sizeof(pack)>;
      __stcs(reinterpret_cast<Whole*>(data + i), bit_cast<Whole>(pack));
    } else if (N == 1 || wide) {
      *reinterpret_cast<Pack<Element, N>*>(data + i) = pack;
    } else {
#pragma unroll
      for (int lane = 0; lane < N; ++lane) data[i + lane] = pack.x[lane];
    }
  }
};

// ---- the table -----------------------------------------------------------------------------------------------------

// The segments of one launch: first the large ones, then the small ones, which share blocks. Both are in the row's
// order. Lists: the number of list operands.
template <int Lists, int Capacity>
struct Table {
  int segments, chunk;
  int large, whole;         // number of large segments, and of their chunks in a row, a block each
  int prefix[Capacity];     // number of a row's chunks of large segments before segment i
  uint16_t less[Capacity];  // number of a row's small segments before segment i, a chunk each
  int group[Capacity], slot[Capacity];
  int64_t offset[Capacity], length[Capacity];
  void* start[Lists][Capacity];
  int64_t row_stride[Lists][Capacity];

  FASTSAM_HD int chunks() const { return whole + segments - large; }
  // Returns the number of a row's blocks that have elements. A kernel that finishes rows has a block for an empty row.
  FASTSAM_HD int busy() const { return whole + (segments - large + kWarps - 1) / kWarps; }
  FASTSAM_HD int blocks() const { return busy() > 0 ? busy() : 1; }
};

// Bytes reserved for the other arguments of a launch.
constexpr int64_t kOtherArguments = 200;

constexpr int capacity(int lists, int64_t bytes) {
  return static_cast<int>((bytes - kOtherArguments - 16) / (3 * sizeof(int) + 2 + 2 * sizeof(int64_t) + lists * 16));
}

// The chunk of one row for a block, or for a warp of it: [begin, begin + count) of a segment.
struct Unit {
  int row, segment, count;
  int chunk;  // number of the chunk in the row, in this launch
  int64_t begin;
  bool shared;  // each warp has a segment, or none (`count` is 0)
  int warp;     // the block's first warp that works on it
  int thread;   // number of the calling thread in these warps
};

// Shares: the table may have segments that share blocks.
template <bool Shares = false, class T>
__device__ __forceinline__ Unit unit_of(const T& table, unsigned index) {
  const unsigned blocks = table.blocks();
  Unit unit;
  unit.row = index / blocks;
  const int block = index % blocks;
  unit.shared = Shares && block >= table.whole;
  if (unit.shared) {
    // The compiler knows that a value of the first lane is the same in the whole warp, so it needs no register of every
    // thread.
    unit.warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarp, 0);
    const int small = table.large + (block - table.whole) * kWarps + unit.warp;
    const bool there = small < table.segments;
    unit.thread = threadIdx.x % kWarp;
    unit.segment = there ? small : 0;
    unit.begin = 0;
    unit.count = there ? static_cast<int>(table.length[small]) : 0;
    unit.chunk = table.prefix[unit.segment];
  } else {
    unit.warp = 0;
    unit.thread = threadIdx.x;
    unit.segment = static_cast<int>(segment_of(table.prefix, table.large, block));
    const Piece piece = piece_of(block - table.prefix[unit.segment], table.length[unit.segment], table.chunk);
    unit.begin = piece.begin;
    unit.count = block < table.whole ? static_cast<int>(piece.count) : 0;
    unit.chunk = block;
  }
  unit.chunk += table.less[unit.segment];
  return unit;
}

// Returns the address of a unit's first element in a list operand (nullptr if the list is not given), and in a field.
template <class T, class Table>
__device__ __forceinline__ T* at(const Table& table, int list, const Unit& unit) {
  T* start = static_cast<T*>(table.start[list][unit.segment]);
  return start == nullptr ? nullptr : start + unit.row * table.row_stride[list][unit.segment] + unit.begin;
}

template <class T, class Table>
__device__ __forceinline__ T* at(const Field& field, const Table& table, const Unit& unit) {
  T* data = static_cast<T*>(field.data);
  return data == nullptr ? nullptr : data + unit.row * field.stride + table.offset[unit.segment] + unit.begin;
}

// The arguments of every kernel with hyper-parameters.
struct Scalars {
  const double* hparams;
  int groups;

  // Returns the columns of the group of a unit's segment.
  template <class Table>
  __device__ __forceinline__ const double* of(const Table& table, const Unit& unit) const {
    return hparams + (static_cast<int64_t>(unit.row) * groups + table.group[unit.segment]) * kWidth;
  }
};

inline Scalars scalars_of(const Call& call) { return Scalars{call.hparams, static_cast<int>(call.groups)}; }

// The number of elements of one sweep of a block; see index.h.
template <class Op>
constexpr int64_t sweep_of() {
  return int64_t{kThreads} * Op::kWidth * Op::kTurns;
}

// ---- launching -----------------------------------------------------------------------------------------------------

// Returns the elements of a row. The chunk length depends on it, and not on the number of rows.
inline int64_t row_elements(const Call& call) {
  int64_t n = 0;
  for (int64_t i = 0; i < call.segments; ++i) n += call.table[i].length;
  return n;
}

// Returns the number of chunks of a row's first segments.
inline int64_t row_chunks(const Call& call, int64_t chunk, int64_t segments) {
  int64_t n = 0;
  for (int64_t i = 0; i < segments; ++i) n += chunks_of(call.table[i].length, chunk);
  return n;
}

inline int64_t row_chunks(const Call& call, int64_t chunk) { return row_chunks(call, chunk, call.segments); }

// Returns the chunk length of a row for Element: the row is cut into `enough` chunks before chunks get longer.
template <class Element>
int64_t chunk_of(const Call& call, int64_t enough) {
  return chunk_for(row_elements(call), sweep_of<Element>(), enough);
}

// A launch of a call. All launches have this chunk length. It has the number of the row's earlier chunks, and a flag
// that is true in the call's last launch.
struct Part {
  int64_t chunk, chunks_before;
  bool last;
};

template <int Capacity, size_t Lists, class F>
int in_parts(const Call& call, const std::array<const List*, Lists>& lists, int64_t chunk, int64_t most, bool reversed,
             F&& f) {
  const auto shares = [&](const Segment& segment) { return segment.length > 0 && segment.length <= most; };
  const int64_t parts = call.segments > 0 ? (call.segments + Capacity - 1) / Capacity : 1;
  for (int64_t launched = 0; launched < parts; ++launched) {
    const int64_t first = (reversed ? parts - 1 - launched : launched) * Capacity;
    Table<static_cast<int>(Lists), Capacity> table;
    table.chunk = static_cast<int>(chunk);
    table.segments = static_cast<int>(std::min<int64_t>(Capacity, call.segments - first));
    const Segment* segments = call.table + first;
    table.large = table.segments - static_cast<int>(std::count_if(segments, segments + table.segments, shares));
    table.whole = 0;
    for (int each = 0, small = 0; each < table.segments; ++each) {
      const Segment& segment = segments[each];
      const bool shared = shares(segment);
      const int i = shared ? table.large + small : each - small;
      table.prefix[i] = table.whole;
      table.less[i] = static_cast<uint16_t>(small);
      (shared ? small : table.whole) += static_cast<int>(chunks_of(segment.length, chunk));
      table.group[i] = static_cast<int>(segment.group);
      table.slot[i] = static_cast<int>(segment.slot);
      table.offset[i] = segment.offset;
      table.length[i] = segment.length;
      for (size_t list = 0; list < Lists; ++list) {
        const bool given = lists[list]->given();
        table.start[list][i] = given ? lists[list]->start[first + each] : nullptr;
        table.row_stride[list][i] = given ? lists[list]->row_stride[first + each] : 0;
      }
    }
    const int error = f(table, Part{chunk, row_chunks(call, chunk, first), launched == parts - 1});
    if (error != 0) return error;
  }
  return 0;
}

// Calls f(table, part) for the smallest number of launches that hold all segments, in their order or `reversed`. Stops
// at the first error and returns it. Segments of at most `most` elements share blocks.
template <size_t Lists, class F>
int each_part(const Call& call, const std::array<const List*, Lists>& lists, int64_t chunk, int64_t most, bool reversed,
              F&& f) {
  constexpr int small = capacity(Lists, 4096), large = capacity(Lists, kArgumentLimit);
  if (call.rows == 0) return 0;
  return call.segments <= small ? in_parts<small>(call, lists, chunk, most, reversed, f)
                                : in_parts<large>(call, lists, chunk, most, reversed, f);
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
// segments for which each thread of a warp has at most one pack, as it would in a separate block. An Op has
//   Element<W, O>, kEnough   the computation on an element of weights W and backup O; for `chunk_of`
//   params(table, part)      the argument of a kernel
//   kernel<W, O, Params>()   the kernel
//   kShares                  true if small segments share blocks
//   kReversed                true if it walks from the end of the rows to their start
//   finishes()               true if a block finishes every row, even a row without elements
template <class Op, size_t Lists>
int launch_chunks(const Op& op, const Call& call, const std::array<const List*, Lists>& lists, void* stream) {
  return with_types(call, [&](auto weight, auto stored) -> int {
    using W = decltype(weight);
    using O = decltype(stored);
    using Element = typename Op::template Element<W, O>;
    const int64_t chunk = chunk_of<Element>(call, Op::kEnough);
    const int64_t most = Op::kShares ? kWarp * Element::kWidth : 0;
    return each_part(call, lists, chunk, most, Op::kReversed, [&](const auto& table, const Part& part) {
      const auto params = op.params(table, part);
      const auto kernel = Op::template kernel<W, O, std::decay_t<decltype(params)>>();
      return launch(kernel, call.rows * (op.finishes() ? table.blocks() : table.busy()), stream, params);
    });
  });
}

// Returns the number of partial sums of a call whose Op computes sums: one for each chunk of each row.
template <class Op>
int64_t partials_of(const Call& call) {
  return with_types(call, [&](auto weight, auto stored) {
    using Element = typename Op::template Element<decltype(weight), decltype(stored)>;
    return call.rows * row_chunks(call, chunk_of<Element>(call, Op::kEnough));
  });
}

}  // namespace fastsam
