// The arguments of the ops that only federated algorithms use; see args.h.
#pragma once

#include "tensor_args.h"

namespace fastsam {

inline DualArgs dual_args(const Tensors& weights, const OptionalTensor& backup, const Tensors& grads, const Tensor& mu,
                          const Tensor& s, const Tensor& table, const Tensor& hparams, const Tensor& sumsq,
                          bool writes) {
  DualArgs args{problem_of(table, hparams)};
  Problem& problem = args.problem;
  set_types(problem, weights, backup);
  args.grads = list_of(grads, problem, "grads");
  args.backup = field_of(backup, problem, problem.backup_type, "backup");
  args.mu = field_of(mu, problem, compute_type(problem.weight), "mu", writes);
  args.s = field_of(s, problem, compute_type(problem.weight), "s");
  args.sumsq = sums_of(sumsq, problem, "sumsq");
  return args;
}

inline DualArgs dual_norm_args(const Tensor& sumsq, const Tensors& grads, const Tensor& mu, const Tensor& s,
                               const Tensor& table, const Tensor& hparams, bool accumulate) {
  DualArgs args = dual_args(grads, std::nullopt, grads, mu, s, table, hparams, sumsq, false);
  args.accumulate = accumulate;
  return args;
}

inline DualArgs dual_perturb_args(const Tensors& params, const Tensor& backup, const Tensor& mu, const Tensors& grads,
                                  const Tensor& s, const Tensor& table, const Tensor& hparams, const Tensor& sumsq,
                                  const OptionalTensor& eps) {
  DualArgs args = dual_args(params, backup, grads, mu, s, table, hparams, sumsq, true);
  args.params = list_of(params, args.problem, "params", Use::written);
  check_order(params, grads, args.problem, "params and grads");
  args.eps = field_of(eps, args.problem, compute_type(args.problem.weight), "eps", true);
  return args;
}

inline InnerArgs inner_args(const Tensor& out, const Tensors& x, const Tensors& y, const Tensor& table,
                            bool accumulate) {
  STD_TORCH_CHECK(out.dim() == 2 && out.size(1) == 2 && out.scalar_type() == ScalarType::Double && out.is_contiguous(),
                  "out must be contiguous float64 [rows, 2]");
  InnerArgs args{problem_of(table, out.size(0), device_of(out))};
  check_device_and_storage(out, args.problem.device, "out");
  set_types(args.problem, x, std::nullopt);
  args.x = list_of(x, args.problem, "x");
  args.y = list_of(y, args.problem, "y");
  check_order(x, y, args.problem, "x and y");
  args.out = static_cast<double*>(out.data_ptr());
  args.accumulate = accumulate;
  return args;
}

// Returns true if the last `dims` dimensions have the strides of a contiguous tensor.
inline bool dense_at_end(const Tensor& tensor, int64_t dims) {
  int64_t expected = 1;
  for (int64_t i = tensor.dim() - 1; i >= tensor.dim() - dims; --i) {
    if (tensor.size(i) != 1 && tensor.stride(i) != expected) return false;
    expected *= tensor.size(i);
  }
  return true;
}

inline FixedPointArgs fixed_point_args(const Tensor& high, const Tensor& low, const Tensor& x, double factor,
                                       const OptionalTensor& base, const OptionalTensor& largest) {
  FixedPointArgs args;
  args.n = high.numel();
  args.type = type_of(x, "x");
  const int device = device_of(high);
  check_device_and_storage(x, device, "x");
  for (const Tensor* limb : {&high, &low}) {
    STD_TORCH_CHECK(limb->scalar_type() == ScalarType::Long && limb->is_contiguous() && limb->numel() == args.n,
                    "high_ and low_ must be contiguous int64 of ", args.n, " elements");
    check_device_and_storage(*limb, device, "high_ and low_");
  }
  const bool several = x.dim() > high.dim();
  args.rows = several ? x.size(0) : 1;
  args.row_stride = several ? x.stride(0) : 0;
  STD_TORCH_CHECK((args.type == Type::f32 || args.type == Type::f64) && x.numel() == args.rows * args.n &&
                      (x.numel() == 0 || dense_at_end(x, several ? x.dim() - 1 : x.dim())),
                  "x must be float32 or float64, of dense rows of ", args.n, " elements");
  args.x = x.data_ptr();
  if (base.has_value()) {
    STD_TORCH_CHECK(type_of(*base, "base") == args.type && base->numel() == args.n && base->is_contiguous(),
                    "base must be contiguous, in the dtype of x, of ", args.n, " elements");
    check_device_and_storage(*base, device, "base");
    args.base = base->data_ptr();
  }
  if (largest.has_value()) {
    STD_TORCH_CHECK(
        largest->scalar_type() == ScalarType::Double && largest->numel() == args.rows && largest->is_contiguous(),
        "largest_ must be contiguous float64 [", args.rows, "]");
    check_device_and_storage(*largest, device, "largest_");
    args.largest = static_cast<double*>(largest->data_ptr());
  }
  args.high = static_cast<uint64_t*>(high.data_ptr());
  args.low = static_cast<int64_t*>(low.data_ptr());
  args.scale = factor * kHighUnit;
  return args;
}

}  // namespace fastsam
