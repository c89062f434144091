// The rule of perturb_ for an element, and the work of a block on a unit.
#pragma once

#include "elementwise.cuh"

namespace fastsam {

template <class W, class O, bool Save>
struct Perturb {
  static constexpr bool kMaster = !std::is_same_v<W, O>;
  static constexpr int kWidth = kPackBytes / (sizeof(W) > sizeof(O) ? sizeof(W) : sizeof(O));
  // At least 64 bytes per thread in flight, and at most 64 registers on Hopper, without spills on any architecture.
  static constexpr int kTurns = sizeof(W) == 8 ? 4 : 2;
  static constexpr bool kReadsZ = Save, kReadsOrigin = !Save || kMaster;
  using C = compute_t<W>;
  Operand<W, kWidth> z;
  Operand<O, kWidth, sizeof(O) == 4> backup;  // for other sizes the hint needs more registers than sm_80 has
  Operand<const W, kWidth> g;

  template <int N>
  struct Loaded {
    Pack<W, N> z, g;
    Pack<O, N> backup;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    if constexpr (kReadsZ) z.read(x.z, i);
    if constexpr (kReadsOrigin) backup.read(x.backup, i);
    g.read(x.g, i);
  }
  template <int N>
  __device__ __forceinline__ void store(Loaded<N>& x, int i, const PerturbRule<C>& rule) const {
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

template <class Table>
struct PerturbParams {
  Table table;  // lists: params, gradients
  Scalars scalars;
  Field backup;
  const double* sumsq;
};

template <class W, class O, bool Save, class Params>
__device__ __forceinline__ void perturb_unit(const Params& p, unsigned index) {
  const Unit unit = unit_of(p.table, index);
  const Perturb<W, O, Save> op{at<W>(p.table, 0, unit), at<O>(p.backup, p.table, unit), at<const W>(p.table, 1, unit)};
  const double* h = p.scalars.of(p.table, unit);
  elementwise(
      op, unit, [&](int lane) { return lane < kWidth   ? h[lane]
                                       : lane == SUMSQ ? p.sumsq[unit.row]
                                                       : 0.0; },
      [](const double* x) { return PerturbRule<compute_t<W>>(x, x[SUMSQ]); });
}

}  // namespace fastsam
