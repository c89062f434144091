// perturb_ with stochastic rounding on CUDA: half-precision weights only.
#include "../stochastic.h"
#include "elementwise.cuh"

namespace fastsam {
namespace {

template <class W, class O>
struct Stochastic {
  static constexpr bool kMaster = !std::is_same_v<W, O>;
  static constexpr int kVecSize = kVecBytes / sizeof(O), kUnroll = 1;
  VectorPtr<W, kVecSize> z;
  VectorPtr<O, kVecSize> backup;
  VectorPtr<const W, kVecSize> g;
  uint32_t position;  // place of the first element in the row
  bool save;

  template <int N>
  struct Loaded {
    AlignedVector<W, N> z, g;
    AlignedVector<O, N> backup;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    if (save) z.read(x.z, i);
    if (!save || kMaster) backup.read(x.backup, i);
    g.read(x.g, i);
  }
  template <int N>
  __device__ __forceinline__ void store(Loaded<N>& x, int i, const StochasticFunctor& rule) const {
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      if (save) x.backup.x[lane] = backup_of(x.backup.x[lane], x.z.x[lane]);
      const O w = x.backup.x[lane];
      x.z.x[lane] = rule.perturbed(widen(w), convert<W>(w), x.g.x[lane], position + i + lane);
    }
    if (save) backup.write(x.backup, i);
    z.write(x.z, i);
  }
};

template <class SegmentMetadata>
struct StochasticParams {
  SegmentMetadata table;  // lists: params, gradients
  Scalars scalars;
  Field backup;
  const double* sumsq;
  const int64_t* seed;
  bool save;
};

template <class W, class O, class Params>
__global__ void __launch_bounds__(kThreads) stochastic_kernel(const Params __grid_constant__ p) {
  using Op = Stochastic<W, O>;
  const Tile tile = tile_of(p.table, blockIdx.x);
  const Op op{at<W>(p.table, 0, tile), at<O>(p.backup, p.table, tile), at<const W>(p.table, 1, tile),
              static_cast<uint32_t>(p.table.offset[tile.segment] + tile.begin), p.save};
  const double* h = p.scalars.of(p.table, tile);
  elementwise(
      op, tile, [&](int lane) { return lane < kNumHParams ? h[lane]
                                       : lane == SUMSQ    ? p.sumsq[tile.row]
                                                          : 0.0; },
      [seed = p.seed + tile.row](const double* x) {
        return StochasticFunctor{PerturbFunctor<float>(x, x[SUMSQ]), Random(*seed)};
      });
}

struct StochasticPerturbation : Elementwise<PerturbArgs> {
  template <class W, class O>
  using Element = Stochastic<std::conditional_t<sizeof(W) == 2, W, f16>, O>;
  template <class SegmentMetadata>
  StochasticParams<SegmentMetadata> params(const SegmentMetadata& table, const Part&) const {
    return {table, scalars_of(args.problem), args.backup, args.sumsq, args.seed, args.save};
  }
  template <class W, class O, class Params>
  static auto kernel() -> decltype(&stochastic_kernel<f16, f16, Params>) {
    if constexpr (sizeof(W) == 2) {
      return stochastic_kernel<W, O, Params>;
    } else {
      return nullptr;  // not called for these types
    }
  }
};

}  // namespace

int perturb_stochastic_cuda(const PerturbArgs& args, void* stream) {
  const Problem& problem = args.problem;
  if (problem.weight != Type::f16 && problem.weight != Type::bf16)
    return perturb_cuda(args, stream);  // nothing to round
  return launch_chunks(StochasticPerturbation{{args}}, problem, std::array{&args.params, &args.grads}, stream);
}

}  // namespace fastsam
