// update_sgd_'s rule for an element, and what a block does with a unit.
#pragma once

#include "elementwise.cuh"

namespace fastsam {

// General: g1, q or shift is given. The ordinary step spends neither registers nor accesses on them.
template <class W, class O, bool General>
struct Sgd {
  using C = compute_t<W>;
  static constexpr int kWidth = kPackBytes / sizeof(C), kTurns = General ? 1 : 2;
  Operand<W, kWidth> z;
  Operand<O, kWidth> from;  // the unperturbed weights: origin, or z
  Operand<const W, kWidth> g2, g1;
  Operand<const C, kWidth> q, shift;
  Operand<C, kWidth> m;
  bool first, keep;  // keep: origin is written too

  struct Rule {
    SgdRule<C> sgd;
    bool stop;
  };

  template <int N>
  struct Loaded {
    Pack<O, N> from;
    Pack<W, N> g2, g1;
    Pack<C, N> q, shift, m;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    from.read(x.from, i);
    g2.read(x.g2, i);
    if (General && g1) g1.read(x.g1, i);
    if (General && q) q.read(x.q, i);
    if (General && shift) shift.read(x.shift, i);
    if (m && !first) m.read(x.m, i);
  }
  template <int N>
  __device__ __forceinline__ void store(Loaded<N>& x, int i, const Rule& rule) const {
    Pack<W, N> out;
    if (rule.stop) {
#pragma unroll
      for (int lane = 0; lane < N; ++lane) out.x[lane] = convert<W>(x.from.x[lane]);
      z.write(out, i);
      return;
    }
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      const C w = widen(x.from.x[lane]);
      const C g1_ = General && g1 ? widen(x.g1.x[lane]) : C(0), q_ = General && q ? x.q.x[lane] : C(0);
      const C shift_ = General && shift ? x.shift.x[lane] : C(0);
      const C d = rule.sgd.gradient(w, widen(x.g2.x[lane]), g1_, q_, shift_);
      const C updated = m ? rule.sgd.with_momentum(w, d, x.m.x[lane]) : rule.sgd.plain(w, d);
      x.from.x[lane] = narrow<O>(updated);
      out.x[lane] = narrow<W>(updated);
    }
    if (m) m.write(x.m, i);
    if (keep) from.write(x.from, i);
    z.write(out, i);
  }
};

template <class Table>
struct SgdParams {
  Table table;  // lists: z, gradients, and g1 in the general form
  Scalars scalars;
  Field origin, q, shift, momentum;
  const double* sumsq_v;
  const float *grad_scale, *found_inf;
  bool first, keep;
};

template <class W, class O, bool General, class Params>
__device__ __forceinline__ void update_sgd_unit(const Params& p, unsigned index) {
  using C = compute_t<W>;
  using Op = Sgd<W, O, General>;
  const Unit unit = unit_of(p.table, index);
  O* origin = at<O>(p.origin, p.table, unit);
  W* z = at<W>(p.table, 0, unit);
  const W* g1 = nullptr;
  if constexpr (General) g1 = at<const W>(p.table, 2, unit);
  // Without origin the two types are the same.
  const Op op{z,
              origin != nullptr ? origin : reinterpret_cast<O*>(z),
              at<const W>(p.table, 1, unit),
              g1,
              at<const C>(p.q, p.table, unit),
              at<const C>(p.shift, p.table, unit),
              at<C>(p.momentum, p.table, unit),
              p.first,
              p.keep && origin != nullptr};
  const double* h = p.scalars.of(p.table, unit);
  elementwise(
      op, unit.count,
      [&](int lane) {
        if (lane < kWidth) return h[lane];
        if (lane == SUMSQ) return p.sumsq_v != nullptr ? p.sumsq_v[unit.row] : -1.0;
        return lane == GRAD_SCALE  ? scalar_or(p.grad_scale, 1.0)
               : lane == FOUND_INF ? scalar_or(p.found_inf, 0.0)
                                   : 0.0;
      },
      [first = p.first](const double* x) {
        return typename Op::Rule{SgdRule<C>(x, 1.0 / x[GRAD_SCALE], x[SUMSQ], first), x[FOUND_INF] != 0.0};
      });
}

}  // namespace fastsam
