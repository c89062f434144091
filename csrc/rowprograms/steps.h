// The checked operands of rowwise_steps_, shared by the CPU and CUDA.
#pragma once

#include "args.h"

namespace fastsam {

// The source of a call's batches. sample_indices: indices in x and y. steps_per_row: nullptr if all rows take `steps`.
struct Samples {
  Tensor x, y, sample_indices;
  int64_t batch, steps, features;
  const int64_t* steps_per_row = nullptr;

  Samples(const Tensor& x_, const Tensor& y_, const Tensor& sample_indices_, int64_t rows, int64_t batch_,
          const OptionalTensor& steps_per_row_)
      : x(x_),
        y(y_),
        sample_indices(sample_indices_),
        batch(batch_),
        steps(batch_ > 0 ? sample_indices_.size(1) / batch_ : 0) {
    STD_TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && y.dim() == 1 && x.size(0) == y.size(0),
                    "x and y must be contiguous, [n, ...] and [n]");
    STD_TORCH_CHECK(sample_indices.dim() == 2 && sample_indices.size(0) == rows &&
                        sample_indices.scalar_type() == ScalarType::Long && sample_indices.stride(1) == 1 &&
                        sample_indices.size(1) == steps * batch,
                    "sample_indices must be int64 [rows, samples], whole batches of them");
    if (steps_per_row_) {
      STD_TORCH_CHECK(steps_per_row_->dim() == 1 && steps_per_row_->size(0) == rows &&
                          steps_per_row_->scalar_type() == ScalarType::Long && steps_per_row_->is_contiguous() &&
                          device_of(*steps_per_row_) == device_of(sample_indices),
                      "steps must be contiguous int64 [rows], on the device of sample_indices");
      steps_per_row = static_cast<const int64_t*>(steps_per_row_->data_ptr());
    }
    features = x.size(0) == 0 ? 0 : x.numel() / x.size(0);
  }
};

// A call of rowwise_steps_. inputs: weights, x, y, constants. The call itself creates x and y.
struct RowSteps {
  const RowProgram& program;
  Samples samples;
  std::vector<RowInput> inputs;
  size_t weights;
  NormArgs norm;  // used with two passes, as `perturb`
  PerturbArgs perturb;
  UpdateArgs update;
  bool two_passes, keeps_first;
  double* losses;
};

inline RowSteps row_steps(const RowProgram& row_program, const Tensors& weights, const Tensors& constants,
                          const Tensor& x, const Tensor& y, const Tensor& sample_indices, int64_t batch,
                          const OptionalTensor& steps_per_row, const Tensor& params, const OptionalTensor& w,
                          const Tensor& table, const Tensor& hparams, const OptionalTensor& momentum,
                          const OptionalTensor& q, const OptionalTensor& shift, const OptionalTensor& sumsq,
                          const OptionalTensor& sumsq_v, bool adaptive, bool keeps_first, const Tensor& losses) {
  const int64_t rows = params.size(0);
  const bool two_passes = w.has_value();
  STD_TORCH_CHECK(weights.size() + 2 + constants.size() == row_program.inputs.size() && batch > 0 &&
                      two_passes == sumsq.has_value(),
                  "the row program has other inputs");
  const Samples samples(x, y, sample_indices, rows, batch, steps_per_row);
  const size_t n = weights.size();
  const int device = device_of(params);
  for (const Tensor* read : {&samples.x, &samples.y, &samples.sample_indices})
    check_device_and_storage(*read, device, "x, y and sample_indices");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && y.scalar_type() == ScalarType::Long &&
                      row_program.inputs[n].is_dense(batch * samples.features, false) &&
                      row_program.inputs[n + 1].is_dense(batch, true),
                  "the row program has batches of another shape");
  std::vector<RowInput> inputs;
  for (size_t i = 0; i < row_program.inputs.size(); ++i) {
    const bool is_batch = i >= n && i < n + 2;  // batches are created here
    if (is_batch) {
      inputs.push_back(RowInput{});
      continue;
    }
    const Tensor& input = i < n ? weights[i] : constants[i - n - 2];
    check_device_and_storage(input, device, "weights and constants");
    inputs.push_back(input_of(input, row_program.inputs[i], rows, i));
  }
  STD_TORCH_CHECK(
      params.dim() == 2 && params.scalar_type() == ScalarType::Float && row_program.width == params.size(1) + kShared,
      "params must be float32 [rows, ", row_program.width - kShared, "], as the row program's gradients are");
  for (const OptionalTensor* beside : {&w, &momentum, &q, &shift}) {
    STD_TORCH_CHECK(!beside->has_value() || ((*beside)->dim() == 2 && (*beside)->size(1) == params.size(1)),
                    "w, momentum, q and shift must be fields like params, [rows, ", params.size(1), "]");
  }
  const Tensors field{params};
  UpdateArgs update =
      update_args(field, w, field, table, hparams, "sgd", {momentum}, std::nullopt, keeps_first ? field : Tensors{}, q,
                  sumsq_v, std::nullopt, std::nullopt, false, two_passes, shift);
  NormArgs norm;
  PerturbArgs perturb;
  if (two_passes) {
    norm = norm_args(*sumsq, field, adaptive ? Tensors{*w} : Tensors{}, table, hparams, false);
    perturb = perturb_args(field, *w, field, table, hparams, *sumsq, false, std::nullopt);
  }
  STD_TORCH_CHECK(update.problem.rows == rows, "hparams must be of the ", rows, " rows of params");
  return RowSteps{row_program, samples, inputs,     n,           norm,
                  perturb,     update,  two_passes, keeps_first, sums_of(losses, update.problem, "losses")};
}

}  // namespace fastsam
