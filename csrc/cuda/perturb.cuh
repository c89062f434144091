// The rule of perturb_ for an element, and the work of a block on a tile.
#pragma once

#include "elementwise.cuh"

namespace fastsam {

template <class W, class O, bool Save>
struct Perturb {
  static constexpr bool kMaster = !std::is_same_v<W, O>;
  static constexpr int kVecSize = kVecBytes / (sizeof(W) > sizeof(O) ? sizeof(W) : sizeof(O));
  // At least 64 bytes per thread in flight, and at most 64 registers on Hopper, without spills on any architecture.
  static constexpr int kUnroll = sizeof(W) == 8 ? 4 : 2;
  static constexpr bool kReadsZ = Save, kReadsOrigin = !Save || kMaster;
  using C = compute_t<W>;
  VectorPtr<W, kVecSize> z;
  VectorPtr<O, kVecSize, sizeof(O) == 4> backup;  // for other sizes the hint needs more registers than sm_80 has
  VectorPtr<const W, kVecSize> g;

  template <int N>
  struct Loaded {
    AlignedVector<W, N> z, g;
    AlignedVector<O, N> backup;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    if constexpr (kReadsZ) z.read(x.z, i);
    if constexpr (kReadsOrigin) backup.read(x.backup, i);
    g.read(x.g, i);
  }
  template <int N>
  __device__ __forceinline__ void store(Loaded<N>& x, int i, const PerturbFunctor<C>& rule) const {
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      if constexpr (Save) x.backup.x[lane] = backup_of(x.backup.x[lane], x.z.x[lane]);
      const O w = x.backup.x[lane];
      x.z.x[lane] = rule.moves ? narrow<W>(rule.perturbed(widen(w), widen(x.g.x[lane]))) : convert<W>(w);
    }
    if constexpr (Save) backup.write(x.backup, i);
    z.write(x.z, i);
  }
};

template <class SegmentMetadata>
struct PerturbParams {
  SegmentMetadata table;  // lists: params, gradients
  Scalars scalars;
  Field backup;
  const double* sumsq;
};

template <class W, class O, bool Save, class Params>
__device__ __forceinline__ void perturb_tile(const Params& p, unsigned index) {
  const Tile tile = tile_of(p.table, index);
  const Perturb<W, O, Save> op{at<W>(p.table, 0, tile), at<O>(p.backup, p.table, tile), at<const W>(p.table, 1, tile)};
  const double* h = p.scalars.of(p.table, tile);
  elementwise(
      op, tile, [&](int lane) { return lane < kNumHParams ? h[lane]
                                       : lane == SUMSQ    ? p.sumsq[tile.row]
                                                          : 0.0; },
      [](const double* x) { return PerturbFunctor<compute_t<W>>(x, x[SUMSQ]); });
}

}  // namespace fastsam
