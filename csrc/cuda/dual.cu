// dual_norm_ and dual_perturb_ on CUDA.
#include "elementwise.cuh"
#include "reduce.cuh"

namespace fastsam {
namespace {

// ---- dual_norm_ ----------------------------------------------------------------------------------------------------

template <class W>
struct DualDirection {
  using Value = compute_t<W>;
  static constexpr int kVecSize = kVecBytes / sizeof(Value), kUnroll = 2;
  VectorPtr<const W, kVecSize> g;
  VectorPtr<const Value, kVecSize> mu, s;
  Value penalty;

  template <int N>
  struct Loaded {
    AlignedVector<W, N> g;
    AlignedVector<Value, N> mu, s;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    g.read(x.g, i);
    mu.read(x.mu, i);
    s.read(x.s, i);
  }
  template <int N>
  __device__ __forceinline__ Value value(const Loaded<N>& x, int lane) const {
    return DualFunctor<Value>::direction(penalty, widen(x.g.x[lane]), x.mu.x[lane], x.s.x[lane]);
  }
};

template <class SegmentMetadata>
struct DualNormParams {
  SegmentMetadata table;  // lists: gradients
  Scalars scalars;
  Field mu, s;
  Sums sums;
};

template <class W, class Params>
__global__ void __launch_bounds__(kThreads) dual_norm_kernel(const Params __grid_constant__ p) {
  using C = compute_t<W>;
  const Tile tile = tile_of<true>(p.table, blockIdx.x);
  double partial = 0.0;
  if (p.table.busy() > 0) {
    const C penalty = static_cast<C>(p.scalars.of(p.table, tile)[PENALTY]);
    partial = squares(DualDirection<W>{at<const W>(p.table, 0, tile), at<const C>(p.mu, p.table, tile),
                                       at<const C>(p.s, p.table, tile), penalty},
                      tile);
  }
  finish(p.sums, p.table, tile, partial);
}

struct DualNorm : Reduction<DualArgs> {
  template <class W, class O>
  using Element = DualDirection<W>;
  template <class SegmentMetadata>
  DualNormParams<SegmentMetadata> params(const SegmentMetadata& table, const Part& part) const {
    return {table, scalars_of(args.problem), args.mu, args.s, sums(part, args.sumsq)};
  }
  template <class W, class O, class Params>
  static auto kernel() {
    return dual_norm_kernel<W, Params>;
  }
};

// ---- dual_perturb_ -------------------------------------------------------------------------------------------------

template <class W, class O>
struct DualPerturb {
  using C = compute_t<W>;
  static constexpr int kVecSize = kVecBytes / sizeof(C), kUnroll = 1;
  VectorPtr<W, kVecSize> z;
  VectorPtr<const O, kVecSize> backup;
  VectorPtr<const W, kVecSize> g;
  VectorPtr<C, kVecSize> mu;
  VectorPtr<const C, kVecSize> s;
  VectorPtr<C, kVecSize> eps;

  template <int N>
  struct Loaded {
    AlignedVector<O, N> backup;
    AlignedVector<W, N> g;
    AlignedVector<C, N> mu, s;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    backup.read(x.backup, i);
    g.read(x.g, i);
    mu.read(x.mu, i);
    s.read(x.s, i);
  }
  template <int N>
  __device__ __forceinline__ void store(Loaded<N>& x, int i, const DualFunctor<C>& rule) const {
    AlignedVector<W, N> out;
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      const O w = x.backup.x[lane];
      const C mu_ = x.mu.x[lane], s_ = x.s.x[lane], e = rule.step(rule.direction(widen(x.g.x[lane]), mu_, s_));
      x.mu.x[lane] = rule.dual(mu_, e, s_);
      x.s.x[lane] = e;
      out.x[lane] = rule.moves ? narrow<W>(rule.perturbed(widen(w), e)) : convert<W>(w);
    }
    mu.write(x.mu, i);
    if (eps) eps.write(x.s, i);
    z.write(out, i);
  }
};

template <class SegmentMetadata>
struct DualPerturbParams {
  SegmentMetadata table;  // lists: params, gradients
  Scalars scalars;
  Field backup, mu, s, eps;
  const double* sumsq;
};

template <class W, class O, class Params>
__global__ void __launch_bounds__(kThreads) dual_perturb_kernel(const Params __grid_constant__ p) {
  using C = compute_t<W>;
  const Tile tile = tile_of(p.table, blockIdx.x);
  const DualPerturb<W, O> op{at<W>(p.table, 0, tile),         at<const O>(p.backup, p.table, tile),
                             at<const W>(p.table, 1, tile),   at<C>(p.mu, p.table, tile),
                             at<const C>(p.s, p.table, tile), at<C>(p.eps, p.table, tile)};
  const double* h = p.scalars.of(p.table, tile);
  elementwise(
      op, tile, [&](int lane) { return lane < kNumHParams ? h[lane]
                                       : lane == SUMSQ    ? p.sumsq[tile.row]
                                                          : 0.0; },
      [](const double* x) { return DualFunctor<C>(x, x[SUMSQ]); });
}

struct DualPerturbation : Elementwise<DualArgs> {
  template <class W, class O>
  using Element = DualPerturb<W, O>;
  template <class SegmentMetadata>
  DualPerturbParams<SegmentMetadata> params(const SegmentMetadata& table, const Part&) const {
    return {table, scalars_of(args.problem), args.backup, args.mu, args.s, args.eps, args.sumsq};
  }
  template <class W, class O, class Params>
  static auto kernel() {
    return dual_perturb_kernel<W, O, Params>;
  }
};

}  // namespace

int64_t dual_norm_partials_cuda(const Problem& problem) { return partials_of<DualNorm>(problem); }

int dual_norm_cuda(const DualArgs& args, double* partials, unsigned* tickets, void* stream) {
  return launch_chunks(DualNorm{{args, partials, tickets}}, args.problem, std::array{&args.grads}, stream);
}

int dual_perturb_cuda(const DualArgs& args, void* stream) {
  return launch_chunks(DualPerturbation{{args}}, args.problem, std::array{&args.params, &args.grads}, stream);
}

}  // namespace fastsam
