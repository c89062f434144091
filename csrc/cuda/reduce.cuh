// Sums of squares with the same bits for any grid. The cut into chunks depends only on the layout. The elements of a
// thread do not depend on alignment. Partial sums are added in the order of the chunks. There are no floating-point
// atomics.
#pragma once

#include "common.cuh"

namespace fastsam {

// Returns the sum over a warp, valid in its first lane.
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_down_sync(0xFFFFFFFFu, x, distance);
  return x;
}

// Returns the sum of the sums of a block's warps, in their order.
__device__ __forceinline__ double sum_of_warps(const double* warps) {
  double sum = 0.0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += warps[warp];
  return sum;
}

// Returns the sum over the block, or over the warp if `per_warp` is true, as if the other warps were empty. Valid in
// the first thread. Two calls need a __syncthreads() between them.
__device__ __forceinline__ double block_sum(double x, bool per_warp = false) {
  __shared__ double warps[kWarps];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  return per_warp ? 0.0 + x : threadIdx.x == 0 ? sum_of_warps(warps) : 0.0;
}

// Sums of a row that are reduced together.
template <int N>
struct Totals {
  double x[N] = {};

  // See `block_sum`.
  __device__ __forceinline__ void over_block(bool per_warp = false) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k > 0) __syncthreads();
      x[k] = block_sum(x[k], per_warp);
    }
  }
};

// Returns a thread's sum over its elements of [0, count) in a block of kThreads. op.load(x, i) reads a vector, and
// op.add(sum, x, lane) adds one of its elements.
template <class Op>
__device__ __forceinline__ typename Op::Sum swept(const Op& op, int count, int thread) {
  constexpr int width = Op::kVecSize, unroll = Op::kUnroll;
  typename Op::Sum sum = {};
  const int vectorized = count - count % width;
  for (int start = 0; start < vectorized; start += kThreads * width * unroll) {
    typename Op::template Loaded<width> x[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int i = start + vector_of(u, thread, kThreads, width);
      if (i < vectorized) op.load(x[u], i);
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      if (start + vector_of(u, thread, kThreads, width) >= vectorized) continue;
#pragma unroll
      for (int lane = 0; lane < width; ++lane) op.add(sum, x[u], lane);
    }
  }
  const int i = vectorized + thread;
  if (i < count) {
    typename Op::template Loaded<1> x;
    op.load(x, i);
    op.add(sum, x, 0);
  }
  return sum;
}

// Adds op.value(...)^2, with a sum for each lane of a vector.
template <class Op>
struct Squares {
  static constexpr int kVecSize = Op::kVecSize, kUnroll = Op::kUnroll;
  using C = typename Op::Value;
  template <int N>
  using Loaded = typename Op::template Loaded<N>;
  struct Sum {
    C x[kVecSize] = {};
  };
  const Op& op;

  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    op.load(x, i);
  }
  template <class AlignedVector>
  __device__ __forceinline__ void add(Sum& sum, const AlignedVector& x, int lane) const {
    const C d = op.value(x, lane);
    sum.x[lane] += d * d;
  }
};

// Returns a thread's sum of op.value(...)^2 over its elements of [0, count) in a block of kThreads.
template <class Op>
__device__ __forceinline__ double squares_of(const Op& op, int count, int thread) {
  const auto sum = swept(Squares<Op>{op}, count, thread);
  double total = 0.0;
#pragma unroll
  for (int lane = 0; lane < Op::kVecSize; ++lane) total += static_cast<double>(sum.x[lane]);
  return total;
}

// Returns the sum of op.value(...)^2 over a tile, valid in its thread 0.
template <class Op>
__device__ __forceinline__ double squares(const Op& op, const Tile& tile) {
  return block_sum(squares_of(op, tile.count, tile.thread), tile.warp_per_segment);
}

// Returns true in the last block of its row; all threads of the block call it. It sees the stores of thread 0 of every
// block (and of its other warps, if `per_warp` is true), and their reads are complete. Thread 0 acquires them right
// after the atomic, and the barrier makes them visible to the block. The ticket wraps back to zero, ready for the next
// launch or the next replay of a graph.
__device__ __forceinline__ bool last_of_row(unsigned* ticket, unsigned blocks, bool per_warp) {
  __shared__ bool last;
  if (per_warp) __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(ticket, blocks - 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// The memory of the sums. `chunks`: number of a row's chunks in all launches; `last_part`: this launch adds them up.
struct Sums {
  double *partials, *out;
  unsigned* tickets;
  int64_t chunks, chunks_before;
  bool accumulate, last_part;
};

// Stores the tile's partial sums (in its thread 0). The last block of the row adds up the row's partial sums.
template <int N, class SegmentMetadata>
__device__ __forceinline__ void finish(const Sums& sums, const SegmentMetadata& table, const Tile& tile,
                                       const Totals<N>& partial) {
  double* row = sums.partials + N * tile.row * sums.chunks;
  if (tile.thread == 0 && tile.count > 0) {
#pragma unroll
    for (int k = 0; k < N; ++k) row[N * (sums.chunks_before + tile.chunk) + k] = partial.x[k];
  }
  if (!sums.last_part || !last_of_row(sums.tickets + tile.row, table.blocks(), tile.warp_per_segment)) return;
  Totals<N> total;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < sums.chunks; i += kThreads) {
#pragma unroll
    for (int k = 0; k < N; ++k) total.x[k] += __ldcg(row + N * i + k);
  }
  total.over_block();
  if (threadIdx.x != 0) return;
  double* out = sums.out + N * tile.row;
#pragma unroll
  for (int k = 0; k < N; ++k) out[k] = sums.accumulate ? out[k] + total.x[k] : total.x[k];
}

template <class SegmentMetadata>
__device__ __forceinline__ void finish(const Sums& sums, const SegmentMetadata& table, const Tile& tile,
                                       double partial) {
  finish(sums, table, tile, Totals<1>{{partial}});
}

// Launch settings that these kernels share. Chunks are large here. A block ends with a barrier, a fence and an atomic,
// and the last block adds up all of a row's partial sums.
template <class Args>
struct Reduction {
  static constexpr bool kWarpPerSegment = true, kReversed = false;
  static constexpr int64_t kEnough = 2048;
  const Args& args;
  double* partials;
  unsigned* tickets;

  bool finishes() const { return true; }
  Sums sums(const Part& part, double* out) const {
    const int64_t chunks = row_chunks(args.problem, part.chunk);
    return Sums{partials, out, tickets, chunks, part.chunks_before, args.accumulate, part.last};
  }
};

}  // namespace fastsam
