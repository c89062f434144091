// dual_norm_ and dual_perturb_ on CUDA.
#include "elementwise.cuh"
#include "reduce.cuh"

namespace fastsam {
namespace {

// ---- dual_norm_ ----------------------------------------------------------------------------------------------------

template <class W>
struct DualDirection {
  using Value = compute_t<W>;
  static constexpr int kWidth = kPackBytes / sizeof(Value), kTurns = 2;
  Operand<const W, kWidth> g;
  Operand<const Value, kWidth> mu, s;
  Value penalty;

  template <int N>
  struct Loaded {
    Pack<W, N> g;
    Pack<Value, N> mu, s;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    g.read(x.g, i);
    mu.read(x.mu, i);
    s.read(x.s, i);
  }
  template <int N>
  __device__ __forceinline__ Value value(const Loaded<N>& x, int lane) const {
    return DualRule<Value>::direction(penalty, widen(x.g.x[lane]), x.mu.x[lane], x.s.x[lane]);
  }
};

template <class Table>
struct DualNormParams {
  Table table;  // lists: gradients
  Scalars scalars;
  Field mu, s;
  Sums sums;
};

template <class W, class Params>
__global__ void __launch_bounds__(kThreads) dual_norm_kernel(const Params __grid_constant__ p) {
  using C = compute_t<W>;
  const Unit unit = unit_of<true>(p.table, blockIdx.x);
  double partial = 0.0;
  if (p.table.busy() > 0) {
    const C penalty = static_cast<C>(p.scalars.of(p.table, unit)[PENALTY]);
    partial = squares(DualDirection<W>{at<const W>(p.table, 0, unit), at<const C>(p.mu, p.table, unit),
                                       at<const C>(p.s, p.table, unit), penalty},
                      unit);
  }
  finish(p.sums, p.table, unit, partial);
}

struct DualNorm : Reduction<DualArgs> {
  template <class W, class O>
  using Element = DualDirection<W>;
  template <class Table>
  DualNormParams<Table> params(const Table& table, const Part& part) const {
    return {table, scalars_of(args.call), args.mu, args.s, sums(part, args.sumsq)};
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
  static constexpr int kWidth = kPackBytes / sizeof(C), kTurns = 1;
  Operand<W, kWidth> z;
  Operand<const O, kWidth> backup;
  Operand<const W, kWidth> g;
  Operand<C, kWidth> mu;
  Operand<const C, kWidth> s;
  Operand<C, kWidth> eps;

  template <int N>
  struct Loaded {
    Pack<O, N> backup;
    Pack<W, N> g;
    Pack<C, N> mu, s;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    backup.read(x.backup, i);
    g.read(x.g, i);
    mu.read(x.mu, i);
    s.read(x.s, i);
  }
  template <int N>
  __device__ __forceinline__ void store(Loaded<N>& x, int i, const DualRule<C>& rule) const {
    Pack<W, N> out;
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

template <class Table>
struct DualPerturbParams {
  Table table;  // lists: params, gradients
  Scalars scalars;
  Field backup, mu, s, eps;
  const double* sumsq;
};

template <class W, class O, class Params>
__global__ void __launch_bounds__(kThreads) dual_perturb_kernel(const Params __grid_constant__ p) {
  using C = compute_t<W>;
  const Unit unit = unit_of(p.table, blockIdx.x);
  const DualPerturb<W, O> op{at<W>(p.table, 0, unit),         at<const O>(p.backup, p.table, unit),
                             at<const W>(p.table, 1, unit),   at<C>(p.mu, p.table, unit),
                             at<const C>(p.s, p.table, unit), at<C>(p.eps, p.table, unit)};
  const double* h = p.scalars.of(p.table, unit);
  elementwise(
      op, unit, [&](int lane) { return lane < kWidth   ? h[lane]
                                       : lane == SUMSQ ? p.sumsq[unit.row]
                                                       : 0.0; },
      [](const double* x) { return DualRule<C>(x, x[SUMSQ]); });
}

struct DualPerturbation : Elementwise<DualArgs> {
  template <class W, class O>
  using Element = DualPerturb<W, O>;
  template <class Table>
  DualPerturbParams<Table> params(const Table& table, const Part&) const {
    return {table, scalars_of(args.call), args.backup, args.mu, args.s, args.eps, args.sumsq};
  }
  template <class W, class O, class Params>
  static auto kernel() {
    return dual_perturb_kernel<W, O, Params>;
  }
};

}  // namespace

int64_t dual_norm_partials_cuda(const Call& call) { return partials_of<DualNorm>(call); }

int dual_norm_cuda(const DualArgs& args, double* partials, unsigned* tickets, void* stream) {
  return launch_chunks(DualNorm{{args, partials, tickets}}, args.call, std::array{&args.grads}, stream);
}

int dual_perturb_cuda(const DualArgs& args, void* stream) {
  return launch_chunks(DualPerturbation{{args}}, args.call, std::array{&args.params, &args.grads}, stream);
}

}  // namespace fastsam
