// The rule of norm_ for an element, and the work of a block on a unit.
#pragma once

#include "reduce.cuh"

namespace fastsam {

// Weighted: the weights are given, because some group is adaptive.
template <class W, bool Weighted>
struct Direction {
  static constexpr int kWidth = kPackBytes / sizeof(W), kTurns = sizeof(W) < 4 ? 2 : 4;
  using Value = compute_t<W>;
  Operand<const W, kWidth> g, w;
  NormRule<Value> rule;

  template <int N>
  struct Loaded {
    Pack<W, N> g, w;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    g.read(x.g, i);
    if constexpr (Weighted) w.read(x.w, i);
  }
  template <int N>
  __device__ __forceinline__ Value value(const Loaded<N>& x, int lane) const {
    const Value g = widen(x.g.x[lane]);
    return Weighted && rule.adaptive ? rule.direction(widen(x.w.x[lane]), g) : g;
  }
};

template <class Table>
struct NormParams {
  Table table;  // lists: gradients, and the weights if they are given
  Scalars scalars;
  Sums sums;
};

template <class W, bool Weighted, class Params>
__device__ __forceinline__ void norm_unit(const Params& p, unsigned index) {
  const Unit unit = unit_of<true>(p.table, index);
  double partial = 0.0;
  if (p.table.busy() > 0) {
    const W* w = nullptr;
    if constexpr (Weighted) w = at<const W>(p.table, 1, unit);
    const NormRule<compute_t<W>> rule(p.scalars.of(p.table, unit));
    partial = squares(Direction<W, Weighted>{at<const W>(p.table, 0, unit), w, rule}, unit);
    // A kernel cannot raise for an adaptive group without weights. With this norm the row is not perturbed.
    if (!Weighted && rule.adaptive) partial = nan("");
  }
  finish(p.sums, p.table, unit, partial);
}

}  // namespace fastsam
