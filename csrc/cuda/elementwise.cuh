// The loop of the kernels that write element by element.
#pragma once

#include "common.cuh"

namespace fastsam {

// Lanes of the first warp that read a separate operand. Earlier lanes read the columns of `hparams`. Powers follow the
// last lane.
enum Lane : int { SUMSQ = kNumHParams, GRAD_SCALE, FOUND_INF, STEPS, POWERS = kWarp };

// The scalars of a tile's rule, and the rule, in shared memory. One warp reads all scalars at once, so that a block
// waits for memory once, not once per scalar. Powers of them are computed by a lane each, all at the same time. Then
// one thread computes the rule: a square root and divisions in double, once per tile.
template <class Rule>
struct SmemFunctor {
  double scalars[kWarp + kMostPowers];
  alignas(Rule) unsigned char bytes[sizeof(Rule)];

  __device__ __forceinline__ const Rule& rule() const { return *reinterpret_cast<const Rule*>(bytes); }

  // Called by all threads of the block, each with the scalar of its lane. The rule may be used afterwards.
  template <int Powers = 0, class MakeRule>
  __device__ __forceinline__ void make(const Tile& tile, double scalar, const MakeRule& make_rule) {
    if (tile.thread < kWarp) {
      scalars[tile.thread] = scalar;
      __syncwarp();
      if constexpr (Powers > 0) {
        if (tile.thread < Powers) scalars[POWERS + tile.thread] = power_of(scalars, tile.thread, scalars[STEPS] + 1.0);
        __syncwarp();
      }
      if (tile.thread == 0) *reinterpret_cast<Rule*>(bytes) = make_rule(static_cast<const double*>(scalars));
    }
    __syncthreads();
  }
};

// Returns the functor of the calling thread's tile.
template <class Rule>
__device__ __forceinline__ SmemFunctor<Rule>& functor_of(SmemFunctor<Rule> (&functors)[kWarps], const Tile& tile) {
  return functors[tile.warp];
}

__device__ __forceinline__ double scalar_or(const float* p, double otherwise) { return p != nullptr ? *p : otherwise; }

// op.load(x, i) reads the vector at element i; op.store(x, i, rule) computes and writes it. All loads of a sweep come
// before its first store. The first sweep is loaded while the rule is computed: the tile's first warp calls
// read_scalar(lane), and one thread calls make_rule(scalars).
template <class Op, class ReadScalar, class MakeRule>
__device__ __forceinline__ void elementwise(const Op& op, const Tile& tile, const ReadScalar& read_scalar,
                                            const MakeRule& make_rule) {
  __shared__ SmemFunctor<decltype(make_rule(nullptr))> shared;
  constexpr int width = Op::kVecSize, unroll = Op::kUnroll;
  const double scalar = tile.thread < kWarp ? read_scalar(tile.thread) : 0.0;
  const int vectorized = tile.count - tile.count % width;
  int start = 0;
  do {
    typename Op::template Loaded<width> x[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int i = start + vector_of(u, tile.thread, kThreads, width);
      if (i < vectorized) op.load(x[u], i);
    }
    if (start == 0) shared.template make<powers_of<Op>()>(tile, scalar, make_rule);
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int i = start + vector_of(u, tile.thread, kThreads, width);
      if (i < vectorized) op.store(x[u], i, shared.rule());
    }
    start += kThreads * width * unroll;
  } while (start < vectorized);
  const int i = vectorized + tile.thread;
  if (i < tile.count) {
    typename Op::template Loaded<1> x;
    op.load(x, i);
    op.store(x, i, shared.rule());
  }
}

// Launch settings that these kernels share. A row of 50,000 float parameters gets 25 to 50 blocks, a row of 100 million
// 6,000 to 12,000. These are several rounds for every multiprocessor, and a block is long enough to hide the work
// before its first load. Small segments have separate blocks. If each warp had a rule, it would cost registers of every
// thread, and so one block of five on a multiprocessor.
template <class Args>
struct Elementwise {
  static constexpr bool kWarpPerSegment = false, kReversed = false;
  static constexpr int64_t kEnough = 8192;
  const Args& args;

  bool finishes() const { return false; }
};

}  // namespace fastsam
