// The device and stream of a call, for the registrations of ops.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "../tensor_args.h"

namespace fastsam {

// The device and the current stream of a call's tensors.
class DeviceStreamGuard {
 public:
  explicit DeviceStreamGuard(const Tensor& tensor) : device_(tensor.get_device_index()) {
    if (current() != device_) guard_.emplace(device_);
    // torch's CUDA runtime and the one in this library follow the same driver context. If they differ, this sets the
    // device in ours.
    if (current() != device_) check("cudaSetDevice", cudaSetDevice(device_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream_));
  }

  static void check(const char* what, int error) {
    STD_TORCH_CHECK(error == cudaSuccess, "fastsam: ", what, ": ", cudaGetErrorString(static_cast<cudaError_t>(error)));
  }

  static int current() {
    int device = -1;
    check("cudaGetDevice", cudaGetDevice(&device));
    return device;
  }

  int device() const { return device_; }
  void* stream() const { return stream_; }

 private:
  int device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  void* stream_ = nullptr;
};

}  // namespace fastsam
