// update_sgd_ on CUDA.
#include "update_sgd.cuh"

namespace fastsam {
namespace {

template <class W, class O, bool General, class Params>
__global__ void __launch_bounds__(kThreads) update_sgd_kernel(const Params __grid_constant__ p) {
  update_sgd_unit<W, O, General>(p, blockIdx.x);
}

template <bool General, size_t Lists>
int update_sgd(const UpdateArgs& args, const std::array<const List*, Lists>& lists, void* stream) {
  const Call& call = args.call;
  return with_types(call, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    const int64_t chunk = elementwise_chunk<Sgd<W, O, General>>(call);
    return each_part(call, lists, chunk, [&](const auto& table, const Part&) {
      const SgdParams<std::decay_t<decltype(table)>> params{
          table,      scalars_of(call), args.origin,    args.q,     args.shift, args.momentum,
          args.sumsq, args.grad_scale,  args.found_inf, args.first, args.keep};
      return launch(update_sgd_kernel<W, O, General, std::decay_t<decltype(params)>>, call.rows * table.chunks(),
                    stream, params);
    });
  });
}

}  // namespace

int update_sgd_cuda(const UpdateArgs& args, void* stream) {
  return args.g1.given() || args.q.data != nullptr || args.shift.data != nullptr
             ? update_sgd<true>(args, std::array{&args.z, &args.grads, &args.g1}, stream)
             : update_sgd<false>(args, std::array{&args.z, &args.grads}, stream);
}

}  // namespace fastsam
