// Checks the tensors of an op call and converts them to the plain structs of kernel_args.h. Shared by the CPU and the
// CUDA registration; stable ABI only.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "kernel_args.h"
#include "rules.h"
#include "tensor_checks.h"

namespace fastsam {

using torch::headeronly::ScalarType;
using OptionalTensor = std::optional<Tensor>;

inline Type type_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Type::f32;
    case ScalarType::Double:
      return Type::f64;
    case ScalarType::Half:
      return Type::f16;
    case ScalarType::BFloat16:
      return Type::bf16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, float64, float16 or bfloat16");
  }
}

inline Type compute_type(Type type) { return type == Type::f64 ? Type::f64 : Type::f32; }

// `device`: index of the other tensors' device; the table is on the CPU.
inline Problem problem_of(const Tensor& table, int64_t rows, int device, std::optional<int64_t> groups = std::nullopt,
                          const double* hparams = nullptr) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Long && table.dim() == 2 && table.size(1) == 4 &&
                      table.is_contiguous() && table.is_cpu(),
                  "table must be int64 [segments, 4] on the CPU");
  check_device_and_storage(table, -1, "table");
  const auto segments = static_cast<const Segment*>(table.data_ptr());
  check_table(segments, table.size(0), rows, groups);
  return problem_of(segments, table.size(0), rows, groups.value_or(0), hparams, device);
}

inline Problem problem_of(const Tensor& table, const Tensor& hparams) {
  STD_TORCH_CHECK(hparams.scalar_type() == ScalarType::Double && hparams.dim() == 3 && hparams.size(2) == kNumHParams &&
                      hparams.is_contiguous(),
                  "hparams must be float64 [rows, groups, ", kNumHParams, "]");
  check_device_and_storage(hparams, device_of(hparams), "hparams");
  const auto columns = static_cast<const double*>(hparams.data_ptr());
  return problem_of(table, hparams.size(0), device_of(hparams), hparams.size(1), columns);
}

inline void check_rows(const Tensor& tensor, const Problem& problem, int64_t length, const char* name) {
  STD_TORCH_CHECK(problem.rows <= 1 || length == 0 || tensor.stride(0) >= length, name,
                  " must have rows that do not overlap: they are written");
}

inline Field field_of(const Tensor& tensor, const Problem& problem, Type type, const char* name, bool written = false) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == problem.rows && tensor.size(1) >= problem.end &&
                      (tensor.size(1) <= 1 || tensor.stride(1) == 1),
                  name, " must be a field [", problem.rows, ", at least ", problem.end, "] with unit stride");
  STD_TORCH_CHECK(type_of(tensor, name) == type || problem.segments == 0, name, " has the wrong dtype");
  check_device_and_storage(tensor, problem.device, name);
  if (written) check_rows(tensor, problem, problem.end, name);
  return Field{tensor.data_ptr(), tensor.stride(0)};
}

inline Field field_of(const OptionalTensor& tensor, const Problem& problem, Type type, const char* name,
                      bool written = false) {
  return tensor.has_value() ? field_of(*tensor, problem, type, name, written) : Field{};
}

enum class Use { may_be_empty, read, written };

// One tensor per segment, or one field [rows, stride] addressed at the segments' offsets.
inline List list_of(const Tensors& tensors, const Problem& problem, const char* name, Use use = Use::read) {
  List list;
  const size_t n = problem.segments;
  STD_TORCH_CHECK(!tensors.empty() || n == 0 || use == Use::may_be_empty, name, " must not be empty");
  if (tensors.empty()) return list;
  const size_t bytes = size_of(problem.weight);
  list.start.resize(n);
  list.row_stride.resize(n);
  const bool flat = tensors.size() == 1 && (n != 1 || tensors[0].numel() != problem.rows * problem.table[0].length);
  if (flat) {
    const Field field = field_of(tensors[0], problem, problem.weight, name, use == Use::written);
    for (size_t i = 0; i < n; ++i) {
      list.start[i] = static_cast<char*>(field.data) + problem.table[i].offset * bytes;
      list.row_stride[i] = field.stride;
    }
    return list;
  }
  STD_TORCH_CHECK(tensors.size() == n, name, " must have one tensor per segment (", n, "), or be one field; got ",
                  tensors.size());
  for (size_t i = 0; i < n; ++i) {
    const Tensor& tensor = tensors[i];
    const int64_t length = problem.table[i].length;
    STD_TORCH_CHECK(tensor.numel() == problem.rows * length && type_of(tensor, name) == problem.weight, name, "[", i,
                    "] must have ", problem.rows * length, " elements in the dtype of the weights; got ",
                    tensor.numel());
    STD_TORCH_CHECK((problem.rows <= 1 || length == 0 || tensor.size(0) == problem.rows) &&
                        is_dense(tensor, problem.rows > 1 ? 1 : 0),
                    name, "[", i, "] must be dense, of ", problem.rows, " rows in its first dimension");
    check_device_and_storage(tensor, problem.device, name);
    if (use == Use::written) check_rows(tensor, problem, length, name);
    list.start[i] = tensor.data_ptr();
    list.row_stride[i] = problem.rows > 1 && length > 0 ? tensor.stride(0) : 0;
  }
  return list;
}

inline const float* scalar_of(const OptionalTensor& tensor, const Problem& problem, const char* name) {
  if (!tensor.has_value()) return nullptr;
  check_device_and_storage(*tensor, problem.device, name);
  STD_TORCH_CHECK(tensor->numel() == 1 && tensor->scalar_type() == ScalarType::Float, name, " must be one float32");
  return static_cast<const float*>(tensor->data_ptr());
}

inline double* sums_of(const Tensor& tensor, const Problem& problem, const char* name) {
  STD_TORCH_CHECK(
      tensor.numel() == problem.rows && tensor.scalar_type() == ScalarType::Double && tensor.is_contiguous(), name,
      " must be contiguous float64 [", problem.rows, "]");
  check_device_and_storage(tensor, problem.device, name);
  return static_cast<double*>(tensor.data_ptr());
}

inline void set_types(Problem& problem, const Tensors& weights, const OptionalTensor& backup) {
  if (!weights.empty()) problem.weight = type_of(weights[0], "params");
  problem.backup_type = backup.has_value() ? type_of(*backup, "backup") : problem.weight;
  // If there are no segments, the weights may be missing, and then backup's dtype cannot be compared with theirs.
  STD_TORCH_CHECK(problem.segments == 0 || problem.backup_type == problem.weight ||
                      problem.backup_type == compute_type(problem.weight),
                  "backup must have the dtype of the weights, or float32 for half-precision weights");
}

inline NormArgs norm_args(const Tensor& sumsq, const Tensors& grads, const Tensors& weights, const Tensor& table,
                          const Tensor& hparams, bool accumulate) {
  NormArgs args{problem_of(table, hparams)};
  set_types(args.problem, grads, std::nullopt);
  args.grads = list_of(grads, args.problem, "grads");
  args.weights = list_of(weights, args.problem, "weights", Use::may_be_empty);
  check_order(grads, weights, args.problem, "grads and weights");
  args.sumsq = sums_of(sumsq, args.problem, "sumsq");
  args.accumulate = accumulate;
  return args;
}

inline PerturbArgs perturb_args(const Tensors& params, const Tensor& backup, const Tensors& grads, const Tensor& table,
                                const Tensor& hparams, const Tensor& sumsq, bool save, const OptionalTensor& seed) {
  PerturbArgs args{problem_of(table, hparams)};
  set_types(args.problem, params, backup);
  args.params = list_of(params, args.problem, "params", Use::written);
  args.grads = list_of(grads, args.problem, "grads");
  check_order(params, grads, args.problem, "params and grads");
  args.backup = field_of(backup, args.problem, args.problem.backup_type, "backup", save);
  args.sumsq = sums_of(sumsq, args.problem, "sumsq");
  args.save = save;
  if (seed.has_value()) {
    STD_TORCH_CHECK(
        seed->scalar_type() == ScalarType::Long && seed->numel() == args.problem.rows && seed->is_contiguous(),
        "seed must be contiguous int64 [", args.problem.rows, "]");
    check_device_and_storage(*seed, args.problem.device, "seed");
    args.seed = static_cast<const int64_t*>(seed->data_ptr());
  }
  return args;
}

inline RestoreArgs restore_args(const Tensors& params, const Tensor& backup, const Tensor& table) {
  STD_TORCH_CHECK(backup.dim() == 2, "backup must be a field [rows, stride]");
  RestoreArgs args{problem_of(table, backup.size(0), device_of(backup))};
  Problem& problem = args.problem;
  set_types(problem, params, backup);
  args.params = list_of(params, problem, "params", Use::written);
  args.backup = field_of(backup, problem, problem.backup_type, "backup");
  return args;
}

// update_norm_ and update_: the local update rule.
inline UpdateArgs form_args(const Tensors& params, const OptionalTensor& backup, const Tensors& grads,
                            const Tensor& table, const Tensor& hparams, const Tensors& g1, const OptionalTensor& q,
                            const OptionalTensor& grad_scale, bool writes, bool write_master) {
  UpdateArgs args{problem_of(table, hparams)};
  set_types(args.problem, params, backup);
  args.params = list_of(params, args.problem, "params", writes ? Use::written : Use::read);
  args.grads = list_of(grads, args.problem, "grads");
  args.backup = field_of(backup, args.problem, args.problem.backup_type, "backup", write_master);
  args.g1 = list_of(g1, args.problem, "g1", Use::may_be_empty);
  check_order(params, grads, args.problem, "params and grads");
  check_order(params, g1, args.problem, "params and g1");
  args.q = field_of(q, args.problem, compute_type(args.problem.weight), "q");
  args.grad_scale = scalar_of(grad_scale, args.problem, "grad_scale");
  return args;
}

inline UpdateArgs update_norm_args(const Tensor& sumsq, const Tensors& params, const OptionalTensor& backup,
                                   const Tensors& grads, const Tensor& table, const Tensor& hparams, const Tensors& g1,
                                   const OptionalTensor& q, const OptionalTensor& grad_scale, bool accumulate) {
  UpdateArgs args = form_args(params, backup, grads, table, hparams, g1, q, grad_scale, false, false);
  args.sumsq = sums_of(sumsq, args.problem, "sumsq");
  args.accumulate = accumulate;
  return args;
}

inline void set_rule(UpdateArgs& args, const std::string& name, const std::array<OptionalTensor, kMostState>& state,
                     const OptionalTensor& steps) {
  args.rule = find_rule(name);
  if (args.rule == nullptr) STD_TORCH_CHECK(false, "rule must be one of ", rule_names(), ", got ", name);
  const UpdateRule& rule = *args.rule;
  for (int i = 0; i < kMostState; ++i)
    args.state[i] = field_of(state[i], args.problem, compute_type(args.problem.weight), "state", true);
  STD_TORCH_CHECK(args.state_mask() >> rule.fields == 0 && (args.state_mask() & rule.needed) == rule.needed,
                  "the state of ", name, " has ", rule.fields, " fields, of which one is missing or too many");
  STD_TORCH_CHECK(steps.has_value() == rule.counts, "steps are ", rule.counts ? "missing: " : "not for ", name,
                  rule.counts ? " counts them" : "");
  if (!rule.counts) return;
  check_slots(args.problem.table, args.problem.segments);
  STD_TORCH_CHECK(
      steps->scalar_type() == ScalarType::Float && steps->dim() == 2 && steps->size(0) == args.problem.rows &&
          steps->size(1) >= args.problem.slots && steps->is_contiguous(),
      "steps must be contiguous float32 [", args.problem.rows, ", at least ", args.problem.slots, " slots]");
  check_device_and_storage(*steps, args.problem.device, "steps");
  args.steps = static_cast<float*>(steps->data_ptr());
  args.slots = steps->size(1);
}

inline UpdateArgs update_args(const Tensors& params, const OptionalTensor& backup, const Tensors& grads,
                              const Tensor& table, const Tensor& hparams, const std::string& rule,
                              const std::array<OptionalTensor, kMostState>& state, const OptionalTensor& steps,
                              const Tensors& g1, const OptionalTensor& q, const OptionalTensor& sumsq_v,
                              const OptionalTensor& grad_scale, const OptionalTensor& found_inf, bool init_state,
                              bool write_master, const OptionalTensor& shift) {
  UpdateArgs args = form_args(params, backup, grads, table, hparams, g1, q, grad_scale, true, write_master);
  set_rule(args, rule, state, steps);
  if (sumsq_v.has_value()) args.sumsq = sums_of(*sumsq_v, args.problem, "sumsq_v");
  args.found_inf = scalar_of(found_inf, args.problem, "found_inf");
  args.init_state = init_state;
  args.write_master = write_master;
  args.shift = field_of(shift, args.problem, compute_type(args.problem.weight), "shift");
  return args;
}

}  // namespace fastsam
