// perturb_ and restore_ on CUDA.
#include "perturb.cuh"

namespace fastsam {
namespace {

// perturb_ walks from the end of the row to its start. The norm has just read the gradients from start to end, so the
// second-level cache still holds their end. The backup is written past the cache (VectorPtr's kStreaming), so that
// gradients stay in it until they are read: with a cache of C bytes C/2 instead of C/3. The perturbed weights are
// written to the cache, because the next pass reads them.
template <class W, class O, bool Save, class Params>
__global__ void __launch_bounds__(kThreads) perturb_kernel(const Params __grid_constant__ p) {
  perturb_tile<W, O, Save>(p, gridDim.x - 1 - blockIdx.x);
}

template <bool Save>
struct Perturbation : Elementwise<PerturbArgs> {
  static constexpr bool kReversed = true;
  template <class W, class O>
  using Element = Perturb<W, O, Save>;
  template <class SegmentMetadata>
  PerturbParams<SegmentMetadata> params(const SegmentMetadata& table, const Part&) const {
    return {table, scalars_of(args.problem), args.backup, args.sumsq};
  }
  template <class W, class O, class Params>
  static auto kernel() {
    return perturb_kernel<W, O, Save, Params>;
  }
};

template <class W, class O>
struct Restore {
  static constexpr int kVecSize = kVecBytes / (sizeof(W) > sizeof(O) ? sizeof(W) : sizeof(O)), kUnroll = 4;
  VectorPtr<W, kVecSize> z;
  VectorPtr<const O, kVecSize, true> backup;

  template <int N>
  struct Loaded {
    AlignedVector<O, N> backup;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    backup.read(x.backup, i);
  }
  template <int N>
  __device__ __forceinline__ void store(const Loaded<N>& x, int i, int) const {
    AlignedVector<W, N> out;
#pragma unroll
    for (int lane = 0; lane < N; ++lane) out.x[lane] = convert<W>(x.backup.x[lane]);
    z.write(out, i);
  }
};

template <class SegmentMetadata>
struct RestoreParams {
  SegmentMetadata table;  // lists: params
  Field backup;
};

template <class W, class O, class Params>
__global__ void __launch_bounds__(kThreads) restore_kernel(const Params __grid_constant__ p) {
  const Tile tile = tile_of(p.table, blockIdx.x);
  const Restore<W, O> op{at<W>(p.table, 0, tile), at<const O>(p.backup, p.table, tile)};
  elementwise(op, tile, [](int) { return 0.0; }, [](const double*) { return 0; });
}

struct Restoration : Elementwise<RestoreArgs> {
  template <class W, class O>
  using Element = Restore<W, O>;
  template <class SegmentMetadata>
  RestoreParams<SegmentMetadata> params(const SegmentMetadata& table, const Part&) const {
    return {table, args.backup};
  }
  template <class W, class O, class Params>
  static auto kernel() {
    return restore_kernel<W, O, Params>;
  }
};

}  // namespace

int perturb_cuda(const PerturbArgs& args, void* stream) {
  const std::array lists{&args.params, &args.grads};
  return args.save ? launch_chunks(Perturbation<true>{{args}}, args.problem, lists, stream)
                   : launch_chunks(Perturbation<false>{{args}}, args.problem, lists, stream);
}

int restore_cuda(const RestoreArgs& args, void* stream) {
  return launch_chunks(Restoration{{args}}, args.problem, std::array{&args.params}, stream);
}

}  // namespace fastsam
