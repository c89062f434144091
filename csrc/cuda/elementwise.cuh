// The loop of the kernels that write element by element.
#pragma once

#include "common.cuh"

namespace fastsam {

// Shared memory for a value that one thread makes.
template <class T>
struct Slot {
  alignas(T) unsigned char bytes[sizeof(T)];
  __device__ __forceinline__ void put(const T& value) { *reinterpret_cast<T*>(bytes) = value; }
  __device__ __forceinline__ const T& get() const { return *reinterpret_cast<const T*>(bytes); }
};

// Packs of Width elements, Turns of them per thread and sweep; all loads of a sweep come before its first store. The
// first loads are under way while one thread makes the rule: a square root and divisions in double, once per block.
template <int Width, int Turns, class Op, class Shared, class MakeRule>
__device__ __forceinline__ void sweep(const Op& op, int count, Shared& shared, const MakeRule& make_rule) {
  const int whole = count - count % Width;
  int start = 0;
  do {
    typename Op::template Loaded<Width> x[Turns];
#pragma unroll
    for (int turn = 0; turn < Turns; ++turn) {
      const int i = start + pack_of(turn, threadIdx.x, kThreads, Width);
      if (i < whole) op.load(x[turn], i);
    }
    if (start == 0) {
      if (threadIdx.x == 0) shared.put(make_rule());
      __syncthreads();
    }
    const auto& rule = shared.get();
#pragma unroll
    for (int turn = 0; turn < Turns; ++turn) {
      const int i = start + pack_of(turn, threadIdx.x, kThreads, Width);
      if (i < whole) op.store(x[turn], i, rule);
    }
    start += kThreads * Width * Turns;
  } while (start < whole);
  const int i = whole + threadIdx.x;
  if (i < count) {
    typename Op::template Loaded<1> x;
    op.load(x, i);
    op.store(x, i, shared.get());
  }
}

// op.load(x, i) reads the pack at element i, op.store(x, i, rule) computes and writes it. op.aligned() is the same for
// the whole block; without it every access is of one element.
template <class Op, class MakeRule>
__device__ __forceinline__ void elementwise(const Op& op, int count, const MakeRule& make_rule) {
  __shared__ Slot<decltype(make_rule())> shared;
  if (op.aligned()) {
    sweep<Op::kWidth, Op::kTurns>(op, count, shared, make_rule);
  } else {
    sweep<1, Op::kTurns == 1 ? 2 : 4>(op, count, shared, make_rule);
  }
}

}  // namespace fastsam
