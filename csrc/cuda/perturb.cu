// perturb_ and restore_ on CUDA.
#include "perturb.cuh"

namespace fastsam {
namespace {

template <class W, class O, bool Save, class Params>
__global__ void __launch_bounds__(kThreads) perturb_kernel(const Params __grid_constant__ p) {
  perturb_unit<W, O, Save>(p, kReversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
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
