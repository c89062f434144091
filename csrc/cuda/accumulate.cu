// accumulate_ on CUDA: one pass over the rows and the two limbs of their sum, and the largest number of each row.
#include "reduce.cuh"

namespace fastsam {
namespace {

constexpr int kTogether = 4;  // number of rows that are loaded at the same time

template <class T>
constexpr int kEach = kVecBytes / sizeof(T);  // elements per thread

template <class T>
int64_t blocks_for(int64_t n) {
  return n > 0 ? chunks_of(n, int64_t{kThreads} * kEach<T>) : 1;
}

int64_t blocks_for(const FixedPointArgs& args) {
  return args.type == Type::f64 ? blocks_for<double>(args.n) : blocks_for<float>(args.n);
}

// Returns the largest over a warp, valid in its first lane.
template <class Bits>
__device__ __forceinline__ Bits warp_max(Bits x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const Bits neighbour = __shfl_down_sync(0xFFFFFFFFu, x, distance);
    x = neighbour > x ? neighbour : x;
  }
  return x;
}

// Returns `Each` elements from p. Elements from `count` on are zero.
template <int Width, int Each, class T>
__device__ __forceinline__ AlignedVector<std::remove_const_t<T>, Each> read(T* p, int count) {
  AlignedVector<std::remove_const_t<T>, Each> vector = {};
  const VectorPtr<T, Width> operand(p);
  if (count == Each) {
#pragma unroll
    for (int start = 0; start < Each; start += Width) {
      AlignedVector<std::remove_const_t<T>, Width> part;
      operand.read(part, start);
#pragma unroll
      for (int lane = 0; lane < Width; ++lane) vector.x[start + lane] = part.x[lane];
    }
  } else {
#pragma unroll
    for (int lane = 0; lane < Each; ++lane) {
      if (lane < count) vector.x[lane] = p[lane];
    }
  }
  return vector;
}

template <int Width, int Each, class T>
__device__ __forceinline__ void write(T* p, const AlignedVector<T, Each>& vector, int count) {
  const VectorPtr<T, Width> operand(p);
  if (count == Each) {
#pragma unroll
    for (int start = 0; start < Each; start += Width) {
      AlignedVector<T, Width> part;
#pragma unroll
      for (int lane = 0; lane < Width; ++lane) part.x[lane] = vector.x[start + lane];
      operand.write(part, start);
    }
  } else {
#pragma unroll
    for (int lane = 0; lane < Each; ++lane) {
      if (lane < count) p[lane] = vector.x[lane];
    }
  }
}

struct AccumulateParams {
  FixedPointArgs args;
  double* partials;  // [rows, warps of the grid]
  unsigned* ticket;
};

// Reduces the partial results in the last block; a warp computes a row.
__device__ __forceinline__ void finish_largest(const FixedPointArgs& args, const double* partials) {
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  for (int64_t row = threadIdx.x / kWarp; row < args.rows; row += kWarps) {
    uint64_t bits = 0;
    for (int64_t i = threadIdx.x % kWarp; i < warps; i += kWarp) {
      const uint64_t neighbour = magnitude_bits(__ldcg(partials + row * warps + i));
      bits = neighbour > bits ? neighbour : bits;
    }
    bits = warp_max(bits);
    if (threadIdx.x % kWarp == 0) args.largest[row] = magnitude_of(bits);
  }
}

// A thread has the same few elements of every row, so the limbs are read and written once.
template <class T>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(const AccumulateParams __grid_constant__ p) {
  constexpr int each = kEach<T>;
  const FixedPointArgs& args = p.args;
  const int64_t begin = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * each, remaining = args.n - begin;
  const int count = remaining < 0 ? 0 : remaining < each ? static_cast<int>(remaining) : each;
  const T* x = static_cast<const T*>(args.x) + begin;
  AlignedVector<T, each> base = {};
  if (args.base != nullptr) base = read<each, each>(static_cast<const T*>(args.base) + begin, count);
  AlignedVector<uint64_t, each> high = read<2, each>(args.high + begin, count);
  AlignedVector<int64_t, each> low = read<2, each>(args.low + begin, count);
  for (int64_t first = 0; first < args.rows; first += kTogether) {
    AlignedVector<T, each> vectors[kTogether] = {};
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (first + u < args.rows) vectors[u] = read<each, each>(x + (first + u) * args.row_stride, count);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (first + u >= args.rows) break;
      decltype(magnitude_bits(T())) bits = 0;
#pragma unroll
      for (int lane = 0; lane < each; ++lane) {
        const T d = vectors[u].x[lane] - base.x[lane];
        bits = magnitude_bits(d) > bits ? magnitude_bits(d) : bits;
        add_fixed_point(static_cast<double>(d) * args.scale, high.x[lane], low.x[lane]);
      }
      if (args.largest == nullptr) continue;
      bits = warp_max(bits);
      const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
      if (threadIdx.x % kWarp == 0) {
        p.partials[(first + u) * gridDim.x * kWarps + warp] = magnitude_of(bits);
      }
    }
#pragma unroll
    for (int lane = 0; lane < each; ++lane) carry_fixed_point(high.x[lane], low.x[lane]);
  }
  write<2>(args.high + begin, high, count);
  write<2>(args.low + begin, low, count);
  if (args.largest == nullptr) return;
  if (last_of_row(p.ticket, gridDim.x, true)) finish_largest(args, p.partials);
}

}  // namespace

int64_t accumulate_partials_cuda(const FixedPointArgs& args) {
  return args.largest != nullptr ? args.rows * blocks_for(args) * kWarps : 0;
}

int accumulate_cuda(const FixedPointArgs& args, double* partials, unsigned* tickets, void* stream) {
  const auto kernel = args.type == Type::f64 ? accumulate_kernel<double> : accumulate_kernel<float>;
  return launch(kernel, args.rows > 0 ? blocks_for(args) : 0, stream, AccumulateParams{args, partials, tickets});
}

}  // namespace fastsam
