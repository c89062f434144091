// norm_, perturb_ and update_sgd_ with as many blocks as the device holds at once, which take units in turn, beside the
// library's one block per unit. The units, and so the bits, are the same.
#include "../../csrc/cuda/norm.cuh"
#include "../../csrc/cuda/perturb.cuh"
#include "../../csrc/cuda/update_sgd.cuh"
#include "frame.h"

namespace fastsam {
namespace {

template <class Params>
struct Looped {
  Params params;
  unsigned units;
};

// The barriers are for what the units of a block share: the last one's sums or rule may still be read.
template <class Params>
__global__ void __launch_bounds__(kThreads) looped_norm_kernel(const Params __grid_constant__ p) {
  for (unsigned index = blockIdx.x; index < p.units; index += gridDim.x) {
    norm_unit<float, false>(p.params, index);
    __syncthreads();
  }
}

template <bool Save, class Params>
__global__ void __launch_bounds__(kThreads) looped_perturb_kernel(const Params __grid_constant__ p) {
  for (unsigned index = blockIdx.x; index < p.units; index += gridDim.x) {
    perturb_unit<float, float, Save>(p.params, kReversed ? p.units - 1 - index : index);
    __syncthreads();
  }
}

template <class Params>
__global__ void __launch_bounds__(kThreads) looped_update_kernel(const Params __grid_constant__ p) {
  for (unsigned index = blockIdx.x; index < p.units; index += gridDim.x) {
    update_sgd_unit<float, float, false>(p.params, index);
    __syncthreads();
  }
}

// As many blocks as are resident at once, or one per unit where those are fewer.
template <class Argument, class Params>
int launch_resident(void (*kernel)(Argument), int64_t units, void* stream, const Params& params) {
  int device = 0, multiprocessors = 0, resident = 0;
  int error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0);
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>(units, int64_t{multiprocessors} * resident);
  return launch(kernel, blocks, stream, Looped<Params>{params, static_cast<unsigned>(units)});
}

int64_t norm_chunks(const Call& call) { return row_chunks(call, reduction_chunk<Direction<float, false>>(call)); }

int norm(const Frame& frame) {
  const Call call = call_of(frame);
  const List grads = grads_of(frame);
  const int64_t chunk = reduction_chunk<Direction<float, false>>(call), chunks = norm_chunks(call);
  return each_part(call, std::array{&grads}, chunk, [&](const auto& table, const Part& part) {
    const NormParams<std::decay_t<decltype(table)>> params{
        table, scalars_of(call), sums_of(part, chunks, frame.partials, frame.sumsq, frame.tickets, false)};
    using Params = std::decay_t<decltype(params)>;
    return launch_resident(looped_norm_kernel<Looped<Params>>, call.rows * table.blocks(), frame.stream, params);
  });
}

template <bool Save>
int perturb(const Frame& frame) {
  const Call call = call_of(frame);
  const List z = z_of(frame), grads = grads_of(frame);
  const int64_t chunk = elementwise_chunk<Perturb<float, float, Save>>(call);
  return each_part(call, std::array{&z, &grads}, chunk, [&](const auto& table, const Part&) {
    const PerturbParams<std::decay_t<decltype(table)>> params{table, scalars_of(call), frame.origin, frame.sumsq};
    using Params = std::decay_t<decltype(params)>;
    return launch_resident(looped_perturb_kernel<Save, Looped<Params>>, call.rows * table.chunks(), frame.stream,
                           params);
  });
}

int update(const Frame& frame) {
  const Call call = call_of(frame);
  const List z = z_of(frame), grads = grads_of(frame);
  const int64_t chunk = elementwise_chunk<Sgd<float, float, false>>(call);
  return each_part(call, std::array{&z, &grads}, chunk, [&](const auto& table, const Part&) {
    const SgdParams<std::decay_t<decltype(table)>> params{
        table, scalars_of(call), frame.origin, {}, {}, frame.momentum, nullptr, nullptr, nullptr, false, false};
    using Params = std::decay_t<decltype(params)>;
    return launch_resident(looped_update_kernel<Looped<Params>>, call.rows * table.chunks(), frame.stream, params);
  });
}

}  // namespace
}  // namespace fastsam

#pragma GCC visibility push(default)
extern "C" {

// How many partial sums norm_ takes.
int64_t fastsam_looped_partials(const fastsam::Frame* frame) {
  return frame->rows * fastsam::norm_chunks(fastsam::call_of(*frame));
}
int fastsam_looped_norm(const fastsam::Frame* frame) { return fastsam::norm(*frame); }
int fastsam_looped_perturb(const fastsam::Frame* frame, int save) {
  return save ? fastsam::perturb<true>(*frame) : fastsam::perturb<false>(*frame);
}
int fastsam_looped_update(const fastsam::Frame* frame) { return fastsam::update(*frame); }
}
#pragma GCC visibility pop
