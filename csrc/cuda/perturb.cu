// perturb_ and restore_ on CUDA.
#include "elementwise.cuh"

namespace fastsam {
namespace {

// perturb_ walks from the end of the row to its start: the norm has just read the gradients from start to end, and what
// is still in the second-level cache is their end.
constexpr bool kReversed = true;

template <class W, class O, bool Save>
struct Perturb {
  static constexpr bool kMaster = !std::is_same_v<W, O>;
  static constexpr int kWidth = kPackBytes / (sizeof(W) > sizeof(O) ? sizeof(W) : sizeof(O));
  // 64 bytes or more per thread on their way, and at most 64 registers on Hopper, without spills on any architecture.
  static constexpr int kTurns = sizeof(W) == 8 ? 4 : Save && kMaster ? 3 : 2;
  static constexpr bool kReadsZ = Save, kReadsOrigin = !Save || kMaster;
  using C = compute_t<W>;
  Operand<W, kWidth> z;
  Operand<O, kWidth> origin;
  Operand<const W, kWidth> g;

  template <int N>
  struct Loaded {
    Pack<W, N> z, g;
    Pack<O, N> origin;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    if constexpr (kReadsZ) z.read(x.z, i);
    if constexpr (kReadsOrigin) origin.read(x.origin, i);
    g.read(x.g, i);
  }
  template <int N>
  __device__ __forceinline__ void store(Loaded<N>& x, int i, const PerturbRule<C>& rule) const {
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      if constexpr (Save) {
        if constexpr (kMaster) {
          x.origin.x[lane] = resynchronised<C>(x.origin.x[lane], x.z.x[lane]);
        } else {
          x.origin.x[lane] = x.z.x[lane];
        }
      }
      const O w = x.origin.x[lane];
      x.z.x[lane] = rule.moves ? narrow<W>(rule.perturbed(widen(w), widen(x.g.x[lane]))) : convert<W>(w);
    }
    if constexpr (Save) origin.write(x.origin, i);
    z.write(x.z, i);
  }
};

template <class Table>
struct PerturbParams {
  Table table;  // lists: z, gradients
  Scalars scalars;
  Field origin;
  const double* sumsq;
};

template <class W, class O, bool Save, class Params>
__global__ void __launch_bounds__(kThreads) perturb_kernel(const Params __grid_constant__ p) {
  const Unit unit = unit_of(p.table, kReversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const Perturb<W, O, Save> op{at<W>(p.table, 0, unit), at<O>(p.origin, p.table, unit), at<const W>(p.table, 1, unit)};
  const double* h = p.scalars.of(p.table, unit);
  elementwise(
      op, unit.count, [&](int lane) { return lane < kWidth   ? h[lane]
                                             : lane == SUMSQ ? p.sumsq[unit.row]
                                                             : 0.0; },
      [](const double* x) { return PerturbRule<compute_t<W>>(x, x[SUMSQ]); });
}

template <bool Save>
int perturb(const PerturbArgs& args, void* stream) {
  const Call& call = args.call;
  return with_types(call, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    const int64_t chunk = elementwise_chunk<Perturb<W, O, Save>>(call);
    return each_part(call, std::array{&args.z, &args.grads}, chunk, [&](const auto& table, const Part&) {
      const PerturbParams<std::decay_t<decltype(table)>> params{table, scalars_of(call), args.origin, args.sumsq};
      return launch(perturb_kernel<W, O, Save, std::decay_t<decltype(params)>>, call.rows * table.chunks(), stream,
                    params);
    });
  });
}

template <class W, class O>
struct Restore {
  static constexpr int kWidth = kPackBytes / (sizeof(W) > sizeof(O) ? sizeof(W) : sizeof(O)), kTurns = 4;
  Operand<W, kWidth> z;
  Operand<const O, kWidth> origin;

  template <int N>
  struct Loaded {
    Pack<O, N> origin;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    origin.read(x.origin, i);
  }
  template <int N>
  __device__ __forceinline__ void store(const Loaded<N>& x, int i, int) const {
    Pack<W, N> out;
#pragma unroll
    for (int lane = 0; lane < N; ++lane) out.x[lane] = convert<W>(x.origin.x[lane]);
    z.write(out, i);
  }
};

template <class Table>
struct RestoreParams {
  Table table;  // lists: z
  Field origin;
};

template <class W, class O, class Params>
__global__ void __launch_bounds__(kThreads) restore_kernel(const Params __grid_constant__ p) {
  const Unit unit = unit_of(p.table, blockIdx.x);
  const Restore<W, O> op{at<W>(p.table, 0, unit), at<const O>(p.origin, p.table, unit)};
  elementwise(op, unit.count, [](int) { return 0.0; }, [](const double*) { return 0; });
}

}  // namespace

int perturb_cuda(const PerturbArgs& args, void* stream) {
  return args.save ? perturb<true>(args, stream) : perturb<false>(args, stream);
}

int restore_cuda(const RestoreArgs& args, void* stream) {
  const Call& call = args.call;
  return with_types(call, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    const int64_t chunk = elementwise_chunk<Restore<W, O>>(call);
    return each_part(call, std::array{&args.z}, chunk, [&](const auto& table, const Part&) {
      const RestoreParams<std::decay_t<decltype(table)>> params{table, args.origin};
      return launch(restore_kernel<W, O, std::decay_t<decltype(params)>>, call.rows * table.chunks(), stream, params);
    });
  });
}

}  // namespace fastsam
