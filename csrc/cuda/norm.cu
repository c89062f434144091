// norm_ and update_norm_ on CUDA.
#include "elementwise.cuh"
#include "norm.cuh"

namespace fastsam {
namespace {

// ---- norm_ ---------------------------------------------------------------------------------------------------------

template <class W, bool Weighted, class Params>
__global__ void __launch_bounds__(kThreads) norm_kernel(const Params __grid_constant__ p) {
  norm_unit<W, Weighted>(p, blockIdx.x);
}

// ---- update_norm_: v of the local update rule -----------------------------------------------------------------------

template <class W, class O>
struct Linear {
  using Value = compute_t<W>;
  static constexpr int kVecSize = kVecBytes / sizeof(Value), kUnroll = 2;
  VectorPtr<const O, kVecSize> w;  // the unperturbed weights: only read if they are a part of v
  VectorPtr<const W, kVecSize> g2, g1;
  VectorPtr<const Value, kVecSize> q;
  LinearFunctor<Value> rule;

  template <int N>
  struct Loaded {
    AlignedVector<O, N> w;
    AlignedVector<W, N> g2, g1;
    AlignedVector<Value, N> q;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    g2.read(x.g2, i);
    if (g1) g1.read(x.g1, i);
    if (q) q.read(x.q, i);
    if (rule.phi != Value(0)) w.read(x.w, i);
  }
  template <int N>
  __device__ __forceinline__ Value value(const Loaded<N>& x, int lane) const {
    return rule.clipped_part(rule.phi != Value(0) ? widen(x.w.x[lane]) : Value(0), widen(x.g2.x[lane]),
                             g1 ? widen(x.g1.x[lane]) : Value(0), q ? x.q.x[lane] : Value(0));
  }
};

template <class SegmentMetadata>
struct LinearParams {
  SegmentMetadata table;  // lists: params, gradients, g1
  Scalars scalars;
  Field backup, q;
  const float* grad_scale;
  Sums sums;
};

template <class W, class O, class Params>
__global__ void __launch_bounds__(kThreads) update_norm_kernel(const Params __grid_constant__ p) {
  using C = compute_t<W>;
  __shared__ SmemFunctor<LinearFunctor<C>> functors[kWarps];
  const Tile tile = tile_of<true>(p.table, blockIdx.x);
  auto& shared = functor_of(functors, tile);
  double partial = 0.0;
  if (p.table.busy() > 0) {
    const double* h = p.scalars.of(p.table, tile);
    double scalar = 0.0;
    if (tile.thread < kNumHParams) scalar = h[tile.thread];
    if (tile.thread == GRAD_SCALE) scalar = scalar_or(p.grad_scale, 1.0);
    shared.make(tile, scalar, [](const double* x) { return LinearFunctor<C>(x, 1.0 / x[GRAD_SCALE]); });
    const O* backup = at<const O>(p.backup, p.table, tile);
    // Without backup the two types are the same.
    const Linear<W, O> op{backup != nullptr ? backup : at<const O>(p.table, 0, tile), at<const W>(p.table, 1, tile),
                          at<const W>(p.table, 2, tile), at<const C>(p.q, p.table, tile), shared.rule()};
    partial = squares(op, tile);
  }
  finish(p.sums, p.table, tile, partial);
}

// The two forms of Direction have the same chunks. So the norm of a row has the same bits with and without weights.
template <bool Weighted>
struct Norm : Reduction<NormArgs> {
  template <class W, class O>
  using Element = Direction<W, false>;
  template <class SegmentMetadata>
  NormParams<SegmentMetadata> params(const SegmentMetadata& table, const Part& part) const {
    return {table, scalars_of(args.problem), sums(part, args.sumsq)};
  }
  template <class W, class O, class Params>
  static auto kernel() {
    return norm_kernel<W, Weighted, Params>;
  }
};

struct UpdateNorm : Reduction<UpdateArgs> {
  template <class W, class O>
  using Element = Linear<W, O>;
  template <class SegmentMetadata>
  LinearParams<SegmentMetadata> params(const SegmentMetadata& table, const Part& part) const {
    return {table, scalars_of(args.problem), args.backup, args.q, args.grad_scale, sums(part, args.sumsq)};
  }
  template <class W, class O, class Params>
  static auto kernel() {
    return update_norm_kernel<W, O, Params>;
  }
};

}  // namespace

int64_t norm_partials_cuda(const Problem& problem) { return partials_of<Norm<false>>(problem); }

int64_t update_norm_partials_cuda(const Problem& problem) { return partials_of<UpdateNorm>(problem); }

int norm_cuda(const NormArgs& args, double* partials, unsigned* tickets, void* stream) {
  const Problem& problem = args.problem;
  return args.weights.defined()
             ? launch_chunks(Norm<true>{{args, partials, tickets}}, problem, std::array{&args.grads, &args.weights},
                             stream)
             : launch_chunks(Norm<false>{{args, partials, tickets}}, problem, std::array{&args.grads}, stream);
}

int update_norm_cuda(const UpdateArgs& args, double* partials, unsigned* tickets, void* stream) {
  return launch_chunks(UpdateNorm{{args, partials, tickets}}, args.problem,
                       std::array{&args.params, &args.grads, &args.g1}, stream);
}

}  // namespace fastsam
