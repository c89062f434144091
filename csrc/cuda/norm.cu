// norm_ and update_norm_ on CUDA.
#include "elementwise.cuh"
#include "reduce.cuh"

namespace fastsam {
namespace {

// ---- norm_: the direction ------------------------------------------------------------------------------------------

template <class W>
struct Direction {
  static constexpr int kWidth = kPackBytes / sizeof(W), kTurns = sizeof(W) < 4 ? 2 : 4;
  using Value = compute_t<W>;
  const W *g, *w;  // w: only read in adaptive groups
  NormRule<Value> rule;

  template <int N>
  struct Loaded {
    Pack<W, N> g, w;
  };
  template <bool Aligned, int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    read<Aligned>(x.g, g + i);
  }
  template <bool Aligned, int N>
  __device__ __forceinline__ void load_rest(Loaded<N>& x, int i) const {
    if (rule.adaptive) read<Aligned>(x.w, w + i);
  }
  template <int N>
  __device__ __forceinline__ Value value(const Loaded<N>& x, int lane) const {
    const Value g = widen(x.g.x[lane]);
    return rule.adaptive ? rule.direction(widen(x.w.x[lane]), g) : g;
  }
  __device__ __forceinline__ bool aligned() const { return fastsam::aligned<kWidth>(g) && fastsam::aligned<kWidth>(w); }
};

template <class Table>
struct NormParams {
  Table table;  // lists: gradients, weights
  Scalars scalars;
  Sums sums;
};

template <class W, class Params>
__global__ void __launch_bounds__(kThreads) norm_kernel(const Params __grid_constant__ p) {
  const Unit unit = unit_of(p.table, blockIdx.x);
  double partial = 0.0;
  if (unit.count > 0) {
    const Direction<W> op{at<const W>(p.table, 0, unit), at<const W>(p.table, 1, unit),
                          NormRule<compute_t<W>>(p.scalars.of(p.table, unit))};
    if (op.rule.adaptive && op.w == nullptr) {
      partial = nan("");  // the weights are missing, and a kernel cannot raise: no row is perturbed with such a norm
    } else {
      partial = op.aligned() ? squares<true>(op, unit.count) : squares<false>(op, unit.count);
    }
  }
  finish(p.sums, p.table, unit, partial);
}

// ---- update_norm_: v of form U -------------------------------------------------------------------------------------

template <class W, class O>
struct Linear {
  using Value = compute_t<W>;
  static constexpr int kWidth = kPackBytes / sizeof(Value), kTurns = 2;
  const O* w;  // the unperturbed weights: only read where they belong to v
  const W *g2, *g1;
  const Value* q;
  LinearRule<Value> rule;

  template <int N>
  struct Loaded {
    Pack<O, N> w;
    Pack<W, N> g2, g1;
    Pack<Value, N> q;
  };
  template <bool Aligned, int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    read<Aligned>(x.g2, g2 + i);
    if (g1 != nullptr) read<Aligned>(x.g1, g1 + i);
    if (q != nullptr) read<Aligned>(x.q, q + i);
    if (rule.phi != Value(0)) read<Aligned>(x.w, w + i);
  }
  template <bool Aligned, int N>
  __device__ __forceinline__ void load_rest(Loaded<N>&, int) const {}
  template <int N>
  __device__ __forceinline__ Value value(const Loaded<N>& x, int lane) const {
    return rule.clipped_part(rule.phi != Value(0) ? widen(x.w.x[lane]) : Value(0), widen(x.g2.x[lane]),
                             g1 != nullptr ? widen(x.g1.x[lane]) : Value(0), q != nullptr ? x.q.x[lane] : Value(0));
  }
  __device__ __forceinline__ bool aligned() const {
    return fastsam::aligned<kWidth>(w) && fastsam::aligned<kWidth>(g2) && fastsam::aligned<kWidth>(g1) &&
           fastsam::aligned<kWidth>(q);
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
  __shared__ Slot<LinearRule<C>> rule;
  const Unit unit = unit_of(p.table, blockIdx.x);
  double partial = 0.0;
  if (unit.count > 0) {
    if (threadIdx.x == 0) {
      rule.put(LinearRule<C>(p.scalars.of(p.table, unit), p.grad_scale != nullptr ? 1.0 / *p.grad_scale : 1.0));
    }
    __syncthreads();
    const O* origin = at<const O>(p.origin, p.table, unit);
    // Without origin the two types are the same.
    const Linear<W, O> op{origin != nullptr ? origin : at<const O>(p.table, 0, unit), at<const W>(p.table, 1, unit),
                          at<const W>(p.table, 2, unit), at<const C>(p.q, p.table, unit), rule.get()};
    partial = op.aligned() ? squares<true>(op, unit.count) : squares<false>(op, unit.count);
  }
  finish(p.sums, p.table, unit, partial);
}

int64_t norm_chunk(const Call& call) {
  return with_types(
      call, [&](auto weight, auto) { return chunk_for(row_elements(call), sweep_of<Direction<decltype(weight)>>()); });
}

int64_t update_norm_chunk(const Call& call) {
  return with_types(call, [&](auto weight, auto stored) {
    return chunk_for(row_elements(call), sweep_of<Linear<decltype(weight), decltype(stored)>>());
  });
}

}  // namespace

int64_t norm_partials_cuda(const Call& call) { return call.rows * row_chunks(call, norm_chunk(call)); }

int64_t update_norm_partials_cuda(const Call& call) { return call.rows * row_chunks(call, update_norm_chunk(call)); }

int norm_cuda(const NormArgs& args, double* partials, unsigned* tickets, void* stream) {
  const Call& call = args.call;
  const int64_t chunk = norm_chunk(call), chunks = row_chunks(call, chunk);
  const std::array lists{&args.grads, &args.weights};
  return each_part(call, lists, chunk, [&](const auto& table, const Part& part) {
    const NormParams<std::decay_t<decltype(table)>> params{
        table, scalars_of(call), sums_of(part, chunks, partials, args.sumsq, tickets, args.accumulate)};
    return with_types(call, [&](auto weight, auto) {
      return launch(norm_kernel<decltype(weight), std::decay_t<decltype(params)>>, call.rows * table.blocks(), stream,
                    params);
    });
  });
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
