// The rule of norm_ for an element, and the work of a block on a tile.
#pragma once

#include "reduce.cuh"

namespace fastsam {

// Weighted: the weights are given, because some group is adaptive.
template <class W, bool Weighted>
struct Direction {
  static constexpr int kVecSize = kVecBytes / sizeof(W), kUnroll = sizeof(W) < 4 ? 2 : 4;
  using Value = compute_t<W>;
  VectorPtr<const W, kVecSize> g, w;
  NormFunctor<Value> rule;

  template <int N>
  struct Loaded {
    AlignedVector<W, N> g, w;
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

template <class SegmentMetadata>
struct NormParams {
  SegmentMetadata table;  // lists: gradients, and the weights if they are given
  Scalars scalars;
  Sums sums;
};

template <class W, bool Weighted, class Params>
__device__ __forceinline__ void norm_unit(const Params& p, unsigned index) {
  const Tile tile = tile_of<true>(p.table, index);
  double partial = 0.0;
  if (p.table.busy() > 0) {
    const W* w = nullptr;
    if constexpr (Weighted) w = at<const W>(p.table, 1, tile);
    const NormFunctor<compute_t<W>> rule(p.scalars.of(p.table, tile));
    partial = squares(Direction<W, Weighted>{at<const W>(p.table, 0, tile), w, rule}, tile);
    // A kernel cannot raise for an adaptive group without weights. With this norm the row is not perturbed.
    if (!Weighted && rule.adaptive) partial = nan("");
  }
  finish(p.sums, p.table, tile, partial);
}

}  // namespace fastsam
