// The checked operands of rowwise_steps_, shared by the CPU and CUDA.
#pragma once

#include "args.h"

namespace fastsam {

// The source of a call's batches. wanted: indices in x and y. own: steps of each row, if they are not `steps`.
struct Samples {
  Tensor x, y, wanted;
  int64_t batch, steps, features;
  const int64_t* own = nullptr;

  Samples(const Tensor& x_, const Tensor& y_, const Tensor& wanted_, int64_t rows, int64_t batch_,
          const OptionalTensor& own_)
      : x(x_), y(y_), wanted(wanted_), batch(batch_), steps(batch_ > 0 ? wanted_.size(1) / batch_ : 0) {
    STD_TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && y.dim() == 1 && x.size(0) == y.size(0),
                    "x and y must be contiguous, [n, ...] and [n]");
    STD_TORCH_CHECK(wanted.dim() == 2 && wanted.size(0) == rows && wanted.scalar_type() == ScalarType::Long &&
                        wanted.stride(1) == 1 && wanted.size(1) == steps * batch,
                    "wanted must be int64 [rows, samples], whole batches of them");
    if (own_) {
      STD_TORCH_CHECK(own_->dim() == 1 && own_->size(0) == rows && own_->scalar_type() == ScalarType::Long &&
                          own_->is_contiguous() && device_of(*own_) == device_of(wanted),
                      "steps must be contiguous int64 [rows], where wanted is");
      own = static_cast<const int64_t*>(own_->data_ptr());
    }
    features = x.size(0) == 0 ? 0 : x.numel() / x.size(0);
  }
};

// A call of rowwise_steps_. inputs: weights, x, y, others. The call itself creates x and y.
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

inline RowSteps row_steps(const RowProgram& made, const Tensors& weights, const Tensors& others, const Tensor& x,
                          const Tensor& y, const Tensor& wanted, int64_t batch, const OptionalTensor& own,
                          const Tensor& params, const OptionalTensor& w, const Tensor& table, const Tensor& hparams,
                          const OptionalTensor& momentum, const OptionalTensor& q, const OptionalTensor& shift,
                          const OptionalTensor& sumsq, const OptionalTensor& sumsq_v, bool adaptive, bool keeps_first,
                          const Tensor& losses) {
  const int64_t rows = params.size(0);
  const bool two_passes = w.has_value();
  STD_TORCH_CHECK(
      weights.size() + 2 + others.size() == made.inputs.size() && batch > 0 && two_passes == sumsq.has_value(),
      "the row program has other inputs");
  const Samples samples(x, y, wanted, rows, batch, own);
  const size_t n = weights.size();
  const int device = device_of(params);
  for (const Tensor* read : {&samples.x, &samples.y, &samples.wanted})
    check_device_and_storage(*read, device, "x, y and wanted");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && y.scalar_type() == ScalarType::Long &&
                      made.inputs[n].is_dense(batch * samples.features, false) &&
                      made.inputs[n + 1].is_dense(batch, true),
                  "the row program has batches of another shape");
  std::vector<RowInput> inputs;
  for (size_t i = 0; i < made.inputs.size(); ++i) {
    const bool given = i >= n && i < n + 2;  // batches are created here
    if (given) {
      inputs.push_back(RowInput{});
      continue;
    }
    const Tensor& input = i < n ? weights[i] : others[i - n - 2];
    check_device_and_storage(input, device, "weights and others");
    inputs.push_back(input_of(input, made.inputs[i], rows, i));
  }
  STD_TORCH_CHECK(
      params.dim() == 2 && params.scalar_type() == ScalarType::Float && made.width == params.size(1) + kShared,
      "params must be float32 [rows, ", made.width - kShared, "], as the row program's gradients are");
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
  return RowSteps{made,    samples, inputs,     n,           norm,
                  perturb, update,  two_passes, keeps_first, sums_of(losses, update.problem, "losses")};
}

}  // namespace fastsam
