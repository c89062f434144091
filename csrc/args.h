// Checks the tensors of an op call and converts them to the plain structs of launch.h. Shared by the CPU and the CUDA
// registration; stable ABI only.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "launch.h"
#include "rules.h"

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
inline Call call_of(const Tensor& table, int64_t rows, int device, std::optional<int64_t> groups = std::nullopt,
                    const double* hparams = nullptr) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Long && table.dim() == 2 && table.size(1) == 4 &&
                      table.is_contiguous() && table.is_cpu(),
                  "table must be int64 [segments, 4] on the CPU");
  check_place(table, -1, "table");
  const auto segments = static_cast<const Segment*>(table.data_ptr());
  check_table(segments, table.size(0), rows, groups);
  return call_of(segments, table.size(0), rows, groups.value_or(0), hparams, device);
}

inline Call call_of(const Tensor& table, const Tensor& hparams) {
  STD_TORCH_CHECK(hparams.scalar_type() == ScalarType::Double && hparams.dim() == 3 && hparams.size(2) == kWidth &&
                      hparams.is_contiguous(),
                  "hparams must be float64 [rows, groups, ", kWidth, "]");
  check_place(hparams, device_of(hparams), "hparams");
  const auto columns = static_cast<const double*>(hparams.data_ptr());
  return call_of(table, hparams.size(0), device_of(hparams), hparams.size(1), columns);
}

inline void check_rows(const Tensor& tensor, const Call& call, int64_t length, const char* name) {
  STD_TORCH_CHECK(call.rows <= 1 || length == 0 || tensor.stride(0) >= length, name,
                  " must have rows that do not overlap: they are written");
}

inline Field field_of(const Tensor& tensor, const Call& call, Type type, const char* name, bool written = false) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == call.rows && tensor.size(1) >= call.end &&
                      (tensor.size(1) <= 1 || tensor.stride(1) == 1),
                  name, " must be a field [", call.rows, ", at least ", call.end, "] with unit stride");
  STD_TORCH_CHECK(type_of(tensor, name) == type || call.segments == 0, name, " has the wrong dtype");
  check_place(tensor, call.device, name);
  if (written) check_rows(tensor, call, call.end, name);
  return Field{tensor.data_ptr(), tensor.stride(0)};
}

inline Field field_of(const OptionalTensor& tensor, const Call& call, Type type, const char* name,
                      bool written = false) {
  return tensor.has_value() ? field_of(*tensor, call, type, name, written) : Field{};
}

enum class Use { may_be_empty, read, written };

// One tensor per segment, or one field [rows, stride] addressed at the segments' offsets.
inline List list_of(const Tensors& tensors, const Call& call, const char* name, Use use = Use::read) {
  List list;
  const size_t n = call.segments;
  STD_TORCH_CHECK(!tensors.empty() || n == 0 || use == Use::may_be_empty, name, " must not be empty");
  if (tensors.empty()) return list;
  const size_t bytes = size_of(call.weight);
  list.start.resize(n);
  list.row_stride.resize(n);
  const bool flat = tensors.size() == 1 && (n != 1 || tensors[0].numel() != call.rows * call.table[0].length);
  if (flat) {
    const Field field = field_of(tensors[0], call, call.weight, name, use == Use::written);
    for (size_t i = 0; i < n; ++i) {
      list.start[i] = static_cast<char*>(field.data) + call.table[i].offset * bytes;
      list.row_stride[i] = field.stride;
    }
    return list;
  }
  STD_TORCH_CHECK(tensors.size() == n, name, " must have one tensor per segment (", n, "), or be one field; got ",
                  tensors.size());
  for (size_t i = 0; i < n; ++i) {
    const Tensor& tensor = tensors[i];
    const int64_t length = call.table[i].length;
    STD_TORCH_CHECK(tensor.numel() == call.rows * length && type_of(tensor, name) == call.weight, name, "[", i,
                    "] must have ", call.rows * length, " elements in the dtype of the weights; got ", tensor.numel());
    STD_TORCH_CHECK(
        (call.rows <= 1 || length == 0 || tensor.size(0) == call.rows) && is_dense(tensor, call.rows > 1 ? 1 : 0), name,
        "[", i, "] must be dense, of ", call.rows, " rows in its first dimension");
    check_place(tensor, call.device, name);
    if (use == Use::written) check_rows(tensor, call, length, name);
    list.start[i] = tensor.data_ptr();
    list.row_stride[i] = call.rows > 1 && length > 0 ? tensor.stride(0) : 0;
  }
  return list;
}

inline const float* scalar_of(const OptionalTensor& tensor, const Call& call, const char* name) {
  if (!tensor.has_value()) return nullptr;
  check_place(*tensor, call.device, name);
  STD_TORCH_CHECK(tensor->numel() == 1 && tensor->scalar_type() == ScalarType::Float, name, " must be one float32");
  return static_cast<const float*>(tensor->data_ptr());
}

inline double* sums_of(const Tensor& tensor, const Call& call, const char* name) {
  STD_TORCH_CHECK(tensor.numel() == call.rows && tensor.scalar_type() == ScalarType::Double && tensor.is_contiguous(),
                  name, " must be contiguous float64 [", call.rows, "]");
  check_place(tensor, call.device, name);
  return static_cast<double*>(tensor.data_ptr());
}

inline void set_types(Call& call, const Tensors& weights, const OptionalTensor& backup) {
  if (!weights.empty()) call.weight = type_of(weights[0], "params");
  call.backup_type = backup.has_value() ? type_of(*backup, "backup") : call.weight;
  // If there are no segments, the weights may be missing, and then backup's dtype cannot be compared with theirs.
  STD_TORCH_CHECK(
      call.segments == 0 || call.backup_type == call.weight || call.backup_type == compute_type(call.weight),
      "backup must have the dtype of the weights, or float32 for half-precision weights");
}

inline NormArgs norm_args(const Tensor& sumsq, const Tensors& grads, const Tensors& weights, const Tensor& table,
                          const Tensor& hparams, bool accumulate) {
  NormArgs args{call_of(table, hparams)};
  set_types(args.call, grads, std::nullopt);
  args.grads = list_of(grads, args.call, "grads");
  args.weights = list_of(weights, args.call, "weights", Use::may_be_empty);
  check_order(grads, weights, args.call, "grads and weights");
  args.sumsq = sums_of(sumsq, args.call, "sumsq");
  args.accumulate = accumulate;
  return args;
}

inline PerturbArgs perturb_args(const Tensors& params, const Tensor& backup, const Tensors& grads, const Tensor& table,
                                const Tensor& hparams, const Tensor& sumsq, bool save, const OptionalTensor& seed) {
  PerturbArgs args{call_of(table, hparams)};
  set_types(args.call, params, backup);
  args.params = list_of(params, args.call, "params", Use::written);
  args.grads = list_of(grads, args.call, "grads");
  check_order(params, grads, args.call, "params and grads");
  args.backup = field_of(backup, args.call, args.call.backup_type, "backup", save);
  args.sumsq = sums_of(sumsq, args.call, "sumsq");
  args.save = save;
  if (seed.has_value()) {
    STD_TORCH_CHECK(seed->scalar_type() == ScalarType::Long && seed->numel() == args.call.rows && seed->is_contiguous(),
                    "seed must be contiguous int64 [", args.call.rows, "]");
    check_place(*seed, args.call.device, "seed");
    args.seed = static_cast<const int64_t*>(seed->data_ptr());
  }
  return args;
}

inline RestoreArgs restore_args(const Tensors& params, const Tensor& backup, const Tensor& table) {
  STD_TORCH_CHECK(backup.dim() == 2, "backup must be a field [rows, stride]");
  RestoreArgs args{call_of(table, backup.size(0), device_of(backup))};
  Call& call = args.call;
  set_types(call, params, backup);
  args.params = list_of(params, call, "params", Use::written);
  args.backup = field_of(backup, call, call.backup_type, "backup");
  return args;
}

// update_norm_ and update_: the local update rule.
inline UpdateArgs form_args(const Tensors& params, const OptionalTensor& backup, const Tensors& grads,
                            const Tensor& table, const Tensor& hparams, const Tensors& g1, const OptionalTensor& q,
                            const OptionalTensor& grad_scale, bool writes, bool keep) {
  UpdateArgs args{call_of(table, hparams)};
  set_types(args.call, params, backup);
  args.params = list_of(params, args.call, "params", writes ? Use::written : Use::read);
  args.grads = list_of(grads, args.call, "grads");
  args.backup = field_of(backup, args.call, args.call.backup_type, "backup", keep);
  args.g1 = list_of(g1, args.call, "g1", Use::may_be_empty);
  check_order(params, grads, args.call, "params and grads");
  check_order(params, g1, args.call, "params and g1");
  args.q = field_of(q, args.call, compute_type(args.call.weight), "q");
  args.grad_scale = scalar_of(grad_scale, args.call, "grad_scale");
  return args;
}

inline UpdateArgs update_norm_args(const Tensor& sumsq, const Tensors& params, const OptionalTensor& backup,
                                   const Tensors& grads, const Tensor& table, const Tensor& hparams, const Tensors& g1,
                                   const OptionalTensor& q, const OptionalTensor& grad_scale, bool accumulate) {
  UpdateArgs args = form_args(params, backup, grads, table, hparams, g1, q, grad_scale, false, false);
  args.sumsq = sums_of(sumsq, args.call, "sumsq");
  args.accumulate = accumulate;
  return args;
}

inline void set_rule(UpdateArgs& args, const std::string& name, const std::array<OptionalTensor, kMostState>& state,
                     const OptionalTensor& steps) {
  args.rule = rule_named(name);
  if (args.rule == nullptr) STD_TORCH_CHECK(false, "rule must be one of ", rule_names(), ", got ", name);
  const UpdateRule& rule = *args.rule;
  for (int i = 0; i < kMostState; ++i)
    args.state[i] = field_of(state[i], args.call, compute_type(args.call.weight), "state", true);
  STD_TORCH_CHECK(args.given() >> rule.fields == 0 && (args.given() & rule.needed) == rule.needed, "the state of ",
                  name, " has ", rule.fields, " fields, of which one is missing or too many");
  STD_TORCH_CHECK(steps.has_value() == rule.counts, "steps are ", rule.counts ? "missing: " : "not for ", name,
                  rule.counts ? " counts them" : "");
  if (!rule.counts) return;
  check_slots(args.call.table, args.call.segments);
  STD_TORCH_CHECK(steps->scalar_type() == ScalarType::Float && steps->dim() == 2 && steps->size(0) == args.call.rows &&
                      steps->size(1) >= args.call.slots && steps->is_contiguous(),
                  "steps must be contiguous float32 [", args.call.rows, ", at least ", args.call.slots, " slots]");
  check_place(*steps, args.call.device, "steps");
  args.steps = static_cast<float*>(steps->data_ptr());
  args.slots = steps->size(1);
}

inline UpdateArgs update_args(const Tensors& params, const OptionalTensor& backup, const Tensors& grads,
                              const Tensor& table, const Tensor& hparams, const std::string& rule,
                              const std::array<OptionalTensor, kMostState>& state, const OptionalTensor& steps,
                              const Tensors& g1, const OptionalTensor& q, const OptionalTensor& sumsq_v,
                              const OptionalTensor& grad_scale, const OptionalTensor& found_inf, bool first, bool keep,
                              const OptionalTensor& shift) {
  UpdateArgs args = form_args(params, backup, grads, table, hparams, g1, q, grad_scale, true, keep);
  set_rule(args, rule, state, steps);
  if (sumsq_v.has_value()) args.sumsq = sums_of(*sumsq_v, args.call, "sumsq_v");
  args.found_inf = scalar_of(found_inf, args.call, "found_inf");
  args.first = first;
  args.keep = keep;
  args.shift = field_of(shift, args.call, compute_type(args.call.weight), "shift");
  return args;
}

}  // namespace fastsam
