// The checked operands of rowwise_steps_, shared by the CPU and CUDA.
#pragma once

#include "args.h"

namespace fastsam {

// The arguments of rowwise_steps_; kernels/rowprograms/program.py describes them.
struct StepsCall {
  const std::vector<int64_t>& programs;
  int64_t batch;
  const Tensors &weights, &constants;
  const Tensor &x, &y, &sample_indices, &work, &params;
  const OptionalTensor& w;
  const Tensor &table, &hparams;
  const std::string& rule;
  const std::array<OptionalTensor, kMostState> state;
  const OptionalTensor &counts, &q, &shift, &sumsq, &sumsq_v;
  bool adaptive, keeps_first;
  const Tensor &losses, &failures;
  const OptionalTensor &start, &deltas, &squares;
};

// The op, with the arguments as the dispatcher gives them. Run: function of a StepsCall.
template <void (*Run)(const StepsCall&)>
void rowwise_steps(const std::vector<int64_t> programs, int64_t batch, const Tensors weights, const Tensors constants,
                   const Tensor x, const Tensor y, const Tensor sample_indices, const Tensor work, const Tensor params,
                   const OptionalTensor w, const Tensor table, const Tensor hparams, const std::string rule,
                   const OptionalTensor state0, const OptionalTensor state1, const OptionalTensor state2,
                   const OptionalTensor counts, const OptionalTensor q, const OptionalTensor shift,
                   const OptionalTensor sumsq, const OptionalTensor sumsq_v, bool adaptive, bool keeps_first,
                   const Tensor losses, const Tensor failures, const OptionalTensor start, const OptionalTensor deltas,
                   const OptionalTensor squares) {
  Run(StepsCall{programs, batch,    weights, constants, x,       y,        sample_indices,
                work,     params,   w,       table,     hparams, rule,     {state0, state1, state2},
                counts,   q,        shift,   sumsq,     sumsq_v, adaptive, keeps_first,
                losses,   failures, start,   deltas,    squares});
}

// A program for batches of `batch` samples. inputs: weights, x, y, constants. The call itself creates x and y.
struct RowForm {
  const RowProgram* program;
  int64_t batch;
  std::vector<RowInput> inputs;
};

// A checked call. `norm` and `perturb` are used with two passes.
struct RowSteps {
  std::vector<RowForm> forms;
  size_t weights;              // number of weights among a form's inputs
  int64_t rows, width, words;  // rows of work; floats of a row's result; words of 4 bytes of a sample
  NormArgs norm;
  PerturbArgs perturb;
  UpdateArgs update;
  bool two_passes;
  const RowWork* work;  // on the device of the tensors, as all pointers
  double *losses, *squares = nullptr;
  int64_t* failures;
  Field params, start, deltas;  // start and deltas: nullptr without results
};

// Checks a tensor of words, [rows, columns].
inline int64_t* words_of(const Tensor& tensor, int64_t rows, int64_t columns, int device, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns &&
                      tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous(),
                  name, " must be contiguous int64 [", rows, ", ", columns, "]");
  check_device_and_storage(tensor, device, name);
  return static_cast<int64_t*>(tensor.data_ptr());
}

inline bool has_indices(const StepsCall& call) { return call.x.scalar_type() == ScalarType::Long; }

inline void check_samples(const StepsCall& call, int device) {
  STD_TORCH_CHECK(call.x.is_contiguous() && call.y.is_contiguous() && call.y.dim() == 1 && call.x.dim() > 0 &&
                      call.x.size(0) == call.y.size(0) && call.y.scalar_type() == ScalarType::Long &&
                      (call.x.scalar_type() == ScalarType::Float || has_indices(call)),
                  "x and y must be contiguous, float32 or int64 [n, ...] and int64 [n]");
  STD_TORCH_CHECK(call.sample_indices.dim() == 1 && call.sample_indices.scalar_type() == ScalarType::Long &&
                      call.sample_indices.is_contiguous(),
                  "sample_indices must be contiguous int64 [.]");
  for (const Tensor* read : {&call.x, &call.y, &call.sample_indices})
    check_device_and_storage(*read, device, "x, y and sample_indices");
}

// constant: index of the program's first constant in the call's; it is counted on.
inline RowForm form_of(const StepsCall& call, const RowProgram& program, int64_t rows, int64_t words,
                       size_t& constant) {
  const size_t n = call.weights.size();
  STD_TORCH_CHECK(program.inputs.size() >= n + 2, "a row program of steps reads the weights, x and y");
  const Expected& labels = program.inputs[n + 1];
  RowForm form{&program, labels.size.size() == 1 ? labels.size[0] : 0, {}};
  STD_TORCH_CHECK(form.batch > 0 && form.batch <= call.batch && labels.is_dense(form.batch, true) &&
                      program.inputs[n].is_dense(form.batch * words / (has_indices(call) ? 2 : 1), has_indices(call)),
                  "the row program has batches of another shape");
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (i == n || i == n + 1) {
      form.inputs.push_back(RowInput{});
      continue;
    }
    STD_TORCH_CHECK(i < n || (constant < call.constants.size() && program.inputs[i].one),
                    "the row programs have other constants");
    const Tensor& input = i < n ? call.weights[i] : call.constants[constant++];
    check_device_and_storage(input, device_of(call.params), "weights and constants");
    form.inputs.push_back(input_of(input, program.inputs[i], rows, i));
  }
  return form;
}

// find: function from the number of a program to the program.
template <class Find>
RowSteps row_steps(const StepsCall& call, const Find& find) {
  const Tensor& params = call.params;
  STD_TORCH_CHECK(params.dim() == 2 && params.scalar_type() == ScalarType::Float,
                  "params must be float32 [rows, row size]");
  STD_TORCH_CHECK(!call.programs.empty() && call.batch > 0 && call.w.has_value() == call.sumsq.has_value(),
                  "the row programs have other inputs");
  const int64_t rows = params.size(0), width = params.size(1) + kShared;
  const int device = device_of(params);
  check_samples(call, device);
  RowSteps steps;
  steps.words = call.x.size(0) == 0 ? 0 : call.x.numel() / call.x.size(0) * (has_indices(call) ? 2 : 1);
  size_t constant = 0;
  for (const int64_t number : call.programs) {
    const RowProgram& program = find(number);
    STD_TORCH_CHECK(program.width == width, "params must be float32 [rows, ", program.width - kShared,
                    "], as the row program's gradients are");
    steps.forms.push_back(form_of(call, program, rows, steps.words, constant));
  }
  STD_TORCH_CHECK(constant == call.constants.size(), "the row programs have other constants");
  for (const OptionalTensor* beside :
       {&call.w, &call.q, &call.shift, &call.start, &call.state[0], &call.state[1], &call.state[2]}) {
    STD_TORCH_CHECK(!beside->has_value() || ((*beside)->dim() == 2 && (*beside)->size(1) == params.size(1)),
                    "w, the state, q, shift and start must be fields like params, [rows, ", params.size(1), "]");
  }
  steps.two_passes = call.w.has_value(), steps.width = width, steps.weights = call.weights.size();
  steps.params = Field{params.data_ptr(), params.stride(0)};
  const Tensors field{params};
  steps.update = update_args(field, call.w, field, call.table, call.hparams, call.rule, call.state, call.counts,
                             call.keeps_first ? field : Tensors{}, call.q, call.sumsq_v, std::nullopt, std::nullopt,
                             false, steps.two_passes, call.shift);
  const Problem& problem = steps.update.problem;
  STD_TORCH_CHECK(problem.rows == rows, "hparams must be of the ", rows, " rows of params");
  if (steps.two_passes) {
    const Tensors adaptive_weights = call.adaptive ? Tensors{*call.w} : Tensors{};
    steps.norm = norm_args(*call.sumsq, field, adaptive_weights, call.table, call.hparams, false);
    steps.perturb = perturb_args(field, *call.w, field, call.table, call.hparams, *call.sumsq, false, std::nullopt);
  }
  STD_TORCH_CHECK(call.work.dim() == 2, "work must be int64 [n, 4]");
  steps.rows = call.work.size(0);
  steps.work = reinterpret_cast<const RowWork*>(words_of(call.work, steps.rows, 4, device, "work"));
  steps.failures = words_of(call.failures, steps.rows, kFailureWords, device, "failures");
  steps.losses = sums_of(call.losses, problem, "losses");
  STD_TORCH_CHECK(
      call.start.has_value() == call.deltas.has_value() && call.deltas.has_value() == call.squares.has_value(),
      "start, deltas and squares belong together");
  if (!call.deltas.has_value()) return steps;
  steps.start = field_of(*call.start, problem, Type::f32, "start");
  Problem results = problem;
  results.rows = steps.rows;
  steps.deltas = field_of(*call.deltas, results, Type::f32, "deltas", true);
  STD_TORCH_CHECK(call.deltas->size(1) == params.size(1), "deltas must be float32 [n, ", params.size(1), "]");
  steps.squares = sums_of(*call.squares, results, "squares");
  return steps;
}

}  // namespace fastsam
