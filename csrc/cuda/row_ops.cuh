// The operations of a row program by the threads of a block, as csrc/rowprograms/loops.h. Every sum has the same order,
// so the bits are the same as with the CPU's loops with 16 lanes (AVX-512). All threads of the block call each
// function.
#pragma once

#include "common.cuh"
#include "rowprograms.h"

namespace fastsam {

constexpr int kLineLanes = 16;

// The words of program.h in 32 bits; number: the bits of a float.
struct DeviceOperand {
  int base, offset, stride[kProgramDims];
};
struct RowOp {
  int code, size[kProgramDims];
  DeviceOperand out, a, b, c;
  int number;
};
constexpr int kOpWords = sizeof(RowOp) / sizeof(int);
static_assert(kOpWords * sizeof(int64_t) == sizeof(Instruction), "an instruction's words, one by one");

// The addresses of an instruction's operands. failure: words of a wrong label (see program.h).
struct RowPlaces {
  float* out;
  const float *a, *b, *c;
  const int64_t* labels;
  int64_t* failure;
};

// ---- the elementwise operations, for one number ----

using Lanes = float;
using Places = int;

__device__ __forceinline__ float every(float x) { return x; }
__device__ __forceinline__ float chosen(bool where, float yes, float no) { return where ? yes : no; }
__device__ __forceinline__ int bits_of(float x) { return bit_cast<int>(x); }
__device__ __forceinline__ float from_bits(int bits) { return bit_cast<float>(bits); }
__device__ __forceinline__ float converted(int x) { return static_cast<float>(x); }
__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ bool all(bool where) { return where; }
template <class F>
__device__ __forceinline__ float by_lane(float x, F f) {
  return f(x);
}

#define FASTSAM_LANES __device__ __forceinline__
#include "../rowprograms/element_math.h"
#undef FASTSAM_LANES

__device__ __forceinline__ float element(Code code, float a, float b, float c, float number) {
  const float exponent = number;
#define FASTSAM_ELEMENT(code, result) \
  case Code::code:                    \
    return result;
  switch (code) {
    FASTSAM_ELEMENT_OPS(FASTSAM_ELEMENT)
    default:
      return a;
  }
#undef FASTSAM_ELEMENT
}

// ---- elements and sums ----

struct RowIndex {
  int of[kProgramDims];
  __device__ __forceinline__ int in(const DeviceOperand& o) const {
    return of[0] * o.stride[0] + of[1] * o.stride[1] + of[2] * o.stride[2] + of[3] * o.stride[3];
  }
};

// The i-th of all; most operations have one dimension, the last.
__device__ __forceinline__ RowIndex index_of(const int (&size)[kProgramDims], int i) {
  if (i < size[3]) return {{0, 0, 0, i}};
  const int k = i / size[3], j = k / size[2];
  return {{j / size[1], j % size[1], k % size[2], i % size[3]}};
}

__device__ __forceinline__ int count_of(const int (&size)[kProgramDims]) {
  return size[0] * size[1] * size[2] * size[3];
}

__device__ __forceinline__ void elements(const RowOp& op, const RowPlaces& at) {
  const float number = bit_cast<float>(op.number);
  const Code code = static_cast<Code>(op.code);
  for (int i = threadIdx.x; i < count_of(op.size); i += kThreads) {
    const RowIndex index = index_of(op.size, i);
    if (code == Code::is_not) {
      at.out[index.in(op.out)] = at.labels[index.in(op.a)] != static_cast<int64_t>(number) ? 1.0f : 0.0f;
    } else {
      at.out[index.in(op.out)] =
          element(code, at.a[index.in(op.a)], at.b[index.in(op.b)], at.c[index.in(op.c)], number);
    }
  }
}

// Adds the second half of 2 * Width lanes to the first, then the same for the halves.
template <int Width>
__device__ __forceinline__ void halve(float (&lanes)[kLineLanes]) {
#pragma unroll
  for (int lane = 0; lane < Width; ++lane) lanes[lane] += lanes[lane + Width];
  if constexpr (Width > 1) halve<Width / 2>(lanes);
}

// n elements, one stride apart.
__device__ __forceinline__ float line_sum(const float* a, int n, int stride) {
  float total = 0.0f;
  int i = 0;
  if (stride == 1 && n >= kLineLanes) {
    float lanes[kLineLanes] = {};
    for (; i + kLineLanes <= n; i += kLineLanes) {
#pragma unroll
      for (int lane = 0; lane < kLineLanes; ++lane) lanes[lane] += a[i + lane];
    }
    halve<kLineLanes / 2>(lanes);
    total = lanes[0];
  }
  for (; i < n; ++i) total += a[i * stride];
  return total;
}

// Computes each element of the result in one thread, which adds up in the order of the elements.
__device__ __forceinline__ void sums(const RowOp& op, const RowPlaces& at) {
  int kept_dims[kProgramDims], over[kProgramDims];
#pragma unroll
  for (int d = 0; d < kProgramDims; ++d) {
    kept_dims[d] = op.out.stride[d] == 0 ? 1 : op.size[d];
    over[d] = op.out.stride[d] == 0 ? op.size[d] : 1;
  }
  const bool lines = op.out.stride[3] == 0;
  if (lines) over[3] = 1;
  for (int i = threadIdx.x; i < count_of(kept_dims); i += kThreads) {
    const RowIndex index = index_of(kept_dims, i);
    const float* from = at.a + index.in(op.a);
    float total = 0.0f;
    for (int j = 0; j < count_of(over); ++j) {
      const float* line = from + index_of(over, j).in(op.a);
      total += lines ? line_sum(line, op.size[3], op.a.stride[3]) : *line;
    }
    at.out[index.in(op.out)] = total;
  }
}

// ---- classes: sizes outer, classes, inner; a thread for an outer and an inner index ----

__device__ __forceinline__ void log_softmax(const RowOp& op, float* out, const float* a) {
  const int classes = op.size[1], so = op.out.stride[1], sa = op.a.stride[1];
  float largest = a[0], total = 0.0f;
  for (int c = 1; c < classes; ++c) largest = a[c * sa] > largest ? a[c * sa] : largest;
  for (int c = 0; c < classes; ++c) total += exponential(a[c * sa] - largest);
  const float log_total = logarithm(total);
  for (int c = 0; c < classes; ++c) out[c * so] = a[c * sa] - largest - log_total;
}

__device__ __forceinline__ void log_softmax_backward(const RowOp& op, float* out, const float* a, const float* b) {
  const int classes = op.size[1], so = op.out.stride[1], sa = op.a.stride[1], sb = op.b.stride[1];
  float total = 0.0f;
  for (int c = 0; c < classes; ++c) total += a[c * sa];
  for (int c = 0; c < classes; ++c) out[c * so] = a[c * sa] - exponential(b[c * sb]) * total;
}

// A label that is not a class is a failure. Its loss and its gradients are NaN.
__device__ __forceinline__ void nll(const RowOp& op, float* out, const float* a, int64_t label, int64_t* failure) {
  const bool wrong = (label < 0 || label >= op.size[1]) && label != kIgnored;
  if (wrong) failure[0] = wrong_label, failure[1] = label;
  const float chosen = wrong ? nanf("") : 0.0f;
  if (static_cast<Code>(op.code) == Code::nll) {
    *out = wrong || label == kIgnored ? chosen : -a[static_cast<int>(label) * op.a.stride[1]];
    return;
  }
  for (int c = 0; c < op.size[1]; ++c) out[c * op.out.stride[1]] = c == label ? -*a : chosen;
}

__device__ __forceinline__ void by_classes(const RowOp& op, const RowPlaces& at) {
  for (int i = threadIdx.x; i < op.size[0] * op.size[2]; i += kThreads) {
    const int o = i / op.size[2], inner = i % op.size[2];
    const auto from = [&](const DeviceOperand& x) { return o * x.stride[0] + inner * x.stride[2]; };
    float* out = at.out + from(op.out);
    const float* a = at.a + from(op.a);
    switch (static_cast<Code>(op.code)) {
      case Code::log_softmax:
        log_softmax(op, out, a);
        break;
      case Code::log_softmax_backward:
        log_softmax_backward(op, out, a, at.b + from(op.b));
        break;
      default:
        nll(op, out, a, at.labels[from(op.b)], at.failure);
    }
  }
}

// ---- tables: sizes outer, middle, count, inner; see csrc/rowprograms/loops.h ----

// An entry or, backward, a column of the table's gradient in one thread, which adds up in the order of the indices. An
// index outside of the table is a failure; its entry is NaN.
__device__ __forceinline__ void look_up(const RowOp& op, const RowPlaces& at) {
  const bool backward = static_cast<Code>(op.code) == Code::look_up_backward;
  const int middle = op.size[1], count = op.size[2], inner = op.size[3], lookups = op.size[0] * middle;
  const auto padding = static_cast<int64_t>(bit_cast<float>(op.number));
  const auto one = [&](int i, int column) {
    const int o = i / middle, m = i % middle;
    const auto from = [&](const DeviceOperand& x) { return o * x.stride[0] + m * x.stride[1]; };
    const int64_t index = at.labels[from(op.b)];
    const bool wrong = index < 0 || index >= count;
    if (wrong && at.failure[0] != wrong_sample) at.failure[0] = wrong_index, at.failure[1] = index;
    if (backward && (wrong || index == padding)) return;
    const int entry = wrong ? 0 : static_cast<int>(index);
    float* out = at.out + from(op.out) + entry * op.out.stride[2] + column * op.out.stride[3];
    const float a = at.a[from(op.a) + entry * op.a.stride[2] + column * op.a.stride[3]];
    *out = backward ? *out + a : wrong ? nanf("") : a;
  };
  if (!backward) {
    for (int i = threadIdx.x; i < lookups * inner; i += kThreads) one(i / inner, i % inner);
    return;
  }
  for (int column = threadIdx.x; column < inner; column += kThreads) {
    for (int i = 0; i < count; ++i) at.out[i * op.out.stride[2] + column * op.out.stride[3]] = 0.0f;
    for (int i = 0; i < lookups; ++i) one(i, column);
  }
}

// ---- products: sizes m, k, n ----

// Computes High rows of a column in one thread: sums in the order of k. The rows of b are dense.
template <int High>
__device__ __forceinline__ void block_product(const RowOp& op, const RowPlaces& at, const float* b, int row_stride) {
  const int m = op.size[0], k = op.size[1], n = op.size[2];
  for (int i = threadIdx.x; i < (m + High - 1) / High * n; i += kThreads) {
    const int top = i / n * High, column = i % n;
    float sum[High] = {};
    int row[High];
#pragma unroll
    for (int r = 0; r < High; ++r) row[r] = (top + r < m ? top + r : m - 1) * op.a.stride[0];
    const float *left = at.a, *right = b + column;
#pragma unroll 4
    for (int step = 0; step < k; ++step, left += op.a.stride[1], right += row_stride) {
      const float factor = *right;
#pragma unroll
      for (int r = 0; r < High; ++r) sum[r] = fmaf(left[row[r]], factor, sum[r]);
    }
#pragma unroll
    for (int r = 0; r < High; ++r) {
      if (top + r >= m) break;
      if (op.c.base != RowOperand::none) sum[r] = at.c[(top + r) * op.c.stride[0] + column * op.c.stride[1]] + sum[r];
      at.out[(top + r) * n + column] = sum[r];
    }
  }
}

// panel: memory for b if its columns are not dense. Otherwise neighbouring threads would use the same bank of shared
// memory.
__device__ __forceinline__ void product(const RowOp& op, const RowPlaces& at, float* panel) {
  const int k = op.size[1], n = op.size[2], panel_stride = n | 1;
  const bool is_transposed = op.b.stride[1] != 1;
  if (is_transposed) {
    for (int i = threadIdx.x; i < k * n; i += kThreads) {
      const int step = i % k, column = i / k;
      panel[step * panel_stride + column] = at.b[step * op.b.stride[0] + column * op.b.stride[1]];
    }
    __syncthreads();
  }
  const float* b = is_transposed ? panel : at.b;
  const int row_stride = is_transposed ? panel_stride : op.b.stride[0];
  if (op.size[0] * n >= 4 * kThreads) {
    block_product<4>(op, at, b, row_stride);
  } else {
    block_product<1>(op, at, b, row_stride);
  }
}

}  // namespace fastsam
