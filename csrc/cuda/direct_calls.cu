// direct_call_args.h on CUDA. Each function launches its kernels on the call's stream and returns 0, or a different
// value if it failed.
#include <cuda_runtime.h>

#include "../direct_call_args.h"

namespace fastsam {
namespace {

const int64_t* launch_of(const int64_t* words) { return pointer<const int64_t>(words[LAUNCH]); }

// Calls f() with this device as the current one.
template <class F>
int on_device(int64_t index, const F& f) noexcept {
  const int device = static_cast<int>(index);
  int before = device;
  int error = cudaGetDevice(&before);
  if (error == cudaSuccess && before != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) error = guarded(f);
  if (before != device) cudaSetDevice(before);
  return error;
}

}  // namespace
}  // namespace fastsam

// Returns the number of partial sums of the norm.
FASTSAM_EXPORT int64_t fastsam_partials_cuda(const int64_t* words) {
  return fastsam::norm_partials_cuda(fastsam::problem_of(words));
}

FASTSAM_EXPORT int fastsam_norm_perturb_cuda(const int64_t* words, const int64_t* grads, double* sumsq, int adaptive,
                                             int save) {
  using namespace fastsam;
  const int64_t* launch = launch_of(words);
  return on_device(launch[DEVICE], [&]() -> int {
    void* stream = pointer<void>(launch[STREAM]);
    const PerturbArgs args = perturb_of(words, grads, sumsq, save != 0);
    const NormArgs norm = norm_of(words, args, sumsq, adaptive != 0);
    const int error = norm_cuda(norm, pointer<double>(launch[PARTIALS]), pointer<unsigned>(launch[TICKETS]), stream);
    return error != cudaSuccess ? error : perturb_cuda(args, stream);
  });
}

FASTSAM_EXPORT const void* fastsam_rule_cuda(const char* name) { return fastsam::find_rule(name); }

FASTSAM_EXPORT int fastsam_update_cuda(const int64_t* words, const int64_t* grads, const void* rule, void* const* state,
                                       int init_state, int write_master) {
  using namespace fastsam;
  const int64_t* launch = launch_of(words);
  return on_device(launch[DEVICE], [&] {
    const UpdateArgs args = update_of(words, grads, rule, state, init_state != 0, write_master != 0);
    return args.rule->launch(args, pointer<unsigned>(launch[TICKETS]) + 1, pointer<void>(launch[STREAM]));
  });
}
