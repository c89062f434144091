// The memory of the tickets of norm_, update_norm_ and update_.
#include <cuda_runtime.h>

#include "../kernel_args.h"

namespace fastsam {
namespace {

// Zero when the module is loaded, and zero after every kernel.
constexpr int64_t kTickets = 1 << 16;
__device__ unsigned tickets[kTickets];

}  // namespace

int tickets_cuda(unsigned** memory, int64_t* count) {
  *count = kTickets;
  // The first use may load the module, even during a capture.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t error = cudaGetSymbolAddress(reinterpret_cast<void**>(memory), tickets);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return error;
}

}  // namespace fastsam
