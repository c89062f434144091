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

// ---- update_norm_: v of form U -------------------------------------------------------------------------------------

template <class W, class O>
struct Linear {
  using Value = compute_t<W>;
  static constexpr int kWidth = kPackBytes / sizeof(Value), kTurns = 2;
  Operand<const O, kWidth> w;  // the unperturbed weights: only read where they belong to v
  Operand<const W, kWidth> g2, g1;
  Operand<const Value, kWidth> q;
  LinearRule<Value> rule;

  template <int N>
  struct Loaded {
    Pack<O, N> w;
    Pack<W, N> g2, g1;
    Pack<Value, N> q;
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

template <class Table>
struct LinearParams {
  Table table;  // lists: z, gradients, g1
  Scalars scalars;
  Field origin, q;
  const float* grad_scale;
  Sums sums;
};

template <class W, class O, class Params>
__global__ void __launch_bounds__(kThreads) update_norm_kernel(const Params __grid_constant__ p) {
  using C = compute_t<W>;
  __shared__ Shared<LinearRule<C>> shared;
  const Unit unit = unit_of(p.table, blockIdx.x);
  double partial = 0.0;
  if (unit.count > 0) {
    const double* h = p.scalars.of(p.table, unit);
    double scalar = 0.0;
    if (threadIdx.x < kWidth) scalar = h[threadIdx.x];
    if (threadIdx.x == GRAD_SCALE) scalar = scalar_or(p.grad_scale, 1.0);
    shared.make(scalar, [](const double* x) { return LinearRule<C>(x, 1.0 / x[GRAD_SCALE]); });
    const O* origin = at<const O>(p.origin, p.table, unit);
    // Without origin the two types are the same.
    const Linear<W, O> op{origin != nullptr ? origin : at<const O>(p.table, 0, unit), at<const W>(p.table, 1, unit),
                          at<const W>(p.table, 2, unit), at<const C>(p.q, p.table, unit), shared.rule()};
    partial = squares(op, unit.count);
  }
  finish(p.sums, p.table, unit, partial);
}

// The two forms of Direction have the same chunks: so the norm of a row has the same bits whether weights are given or
// not.
int64_t norm_chunk(const Call& call) {
  return with_types(call, [&](auto weight, auto) { return reduction_chunk<Direction<decltype(weight), false>>(call); });
}

int64_t update_norm_chunk(const Call& call) {
  return with_types(call, [&](auto weight, auto stored) {
    return reduction_chunk<Linear<decltype(weight), decltype(stored)>>(call);
  });
}

template <bool Weighted, size_t Lists>
int norm(const NormArgs& args, const std::array<const List*, Lists>& lists, double* partials, unsigned* tickets,
         void* stream) {
  const Call& call = args.call;
  const int64_t chunk = norm_chunk(call), chunks = row_chunks(call, chunk);
  return each_part(call, lists, chunk, [&](const auto& table, const Part& part) {
    const NormParams<std::decay_t<decltype(table)>> params{
        table, scalars_of(call), sums_of(part, chunks, partials, args.sumsq, tickets, args.accumulate)};
    return with_types(call, [&](auto weight, auto) {
      return launch(norm_kernel<decltype(weight), Weighted, std::decay_t<decltype(params)>>, call.rows * table.blocks(),
                    stream, params);
    });
  });
}

}  // namespace

int64_t norm_partials_cuda(const Call& call) { return call.rows * row_chunks(call, norm_chunk(call)); }

int64_t update_norm_partials_cuda(const Call& call) { return call.rows * row_chunks(call, update_norm_chunk(call)); }

int norm_cuda(const NormArgs& args, double* partials, unsigned* tickets, void* stream) {
  return args.weights.given() ? norm<true>(args, std::array{&args.grads, &args.weights}, partials, tickets, stream)
                              : norm<false>(args, std::array{&args.grads}, partials, tickets, stream);
}

int update_norm_cuda(const UpdateArgs& args, double* partials, unsigned* tickets, void* stream) {
  const Call& call = args.call;
  const int64_t chunk = update_norm_chunk(call), chunks = row_chunks(call, chunk);
  const std::array lists{&args.z, &args.grads, &args.g1};
  return each_part(call, lists, chunk, [&](const auto& table, const Part& part) {
    const LinearParams<std::decay_t<decltype(table)>> params{
        table,  scalars_of(call), args.origin,
        args.q, args.grad_scale,  sums_of(part, chunks, partials, args.sumsq, tickets, args.accumulate)};
    return with_types(call, [&](auto weight, auto stored) {
      return launch(update_norm_kernel<decltype(weight), decltype(stored), std::decay_t<decltype(params)>>,
                    call.rows * table.blocks(), stream, params);
    });
  });
}

}  // namespace fastsam
