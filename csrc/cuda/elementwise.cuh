// The loop of the kernels that write element by element.
#pragma once

#include "common.cuh"

namespace fastsam {

// The scalars of a unit's rule, and the rule, in shared memory. One warp reads all scalars at once, so that a block
// waits for memory once, not once per scalar. Then one thread computes the rule: a square root and divisions in double,
// once per unit.
template <class Rule>
struct Shared {
  double scalars[kWarp];
  alignas(Rule) unsigned char bytes[sizeof(Rule)];

  __device__ __forceinline__ const Rule& rule() const { return *reinterpret_cast<const Rule*>(bytes); }

  // Called by all threads of the block, each with the scalar of its lane. The rule may be used afterwards.
  template <class MakeRule>
  __device__ __forceinline__ void make(const Unit& unit, double scalar, const MakeRule& make_rule) {
    if (unit.thread < kWarp) {
      scalars[unit.thread] = scalar;
      __syncwarp();
      if (unit.thread == 0) *reinterpret_cast<Rule*>(bytes) = make_rule(static_cast<const double*>(scalars));
    }
    __syncthreads();
  }
};

// Returns the calling thread's place among the places of a block's units.
template <class Rule>
__device__ __forceinline__ Shared<Rule>& place_of(Shared<Rule> (&places)[kWarps], const Unit& unit) {
  return places[unit.warp];
}

// Lanes of the first warp that read a separate operand. Earlier lanes read the columns of `hparams`.
enum Lane : int { SUMSQ = kWidth, GRAD_SCALE, FOUND_INF, STEPS };

__device__ __forceinline__ double scalar_or(const float* p, double otherwise) { return p != nullptr ? *p : otherwise; }

// op.load(x, i) reads the pack at element i; op.store(x, i, rule) computes and writes it. All loads of a sweep come
// before its first store. The first sweep is loaded while the rule is computed: the unit's first warp calls
// read_scalar(lane), and one thread calls make_rule(scalars).
template <class Op, class ReadScalar, class MakeRule>
__device__ __forceinline__ void elementwise(const Op& op, const Unit& unit, const ReadScalar& read_scalar,
                                            const MakeRule& make_rule) {
  __shared__ Shared<decltype(make_rule(nullptr))> shared;
  constexpr int width = Op::kWidth, turns = Op::kTurns;
  const double scalar = unit.thread < kWarp ? read_scalar(unit.thread) : 0.0;
  const int whole = unit.count - unit.count % width;
  int start = 0;
  do {
    typename Op::template Loaded<width> x[turns];
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
      const int i = start + pack_of(turn, unit.thread, kThreads, width);
      if (i < whole) op.load(x[turn], i);
    }
    if (start == 0) shared.make(unit, scalar, make_rule);
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
      const int i = start + pack_of(turn, unit.thread, kThreads, width);
      if (i < whole) op.store(x[turn], i, shared.rule());
    }
    start += kThreads * width * turns;
  } while (start < whole);
  const int i = whole + unit.thread;
  if (i < unit.count) {
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
  static constexpr bool kShares = false, kReversed = false;
  static constexpr int64_t kEnough = 8192;
  const Args& args;

  bool finishes() const { return false; }
};

}  // namespace fastsam
