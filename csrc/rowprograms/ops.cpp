// The ops of row programs: row_program registers one, rowwise runs it, and rowwise_steps_ (steps.cpp) trains with it.
// CPU only; kernels/rowprograms/program.py describes every argument.
#include <atomic>
#include <deque>
#include <mutex>
#include <utility>

#include "args.h"

namespace fastsam {
namespace {

std::mutex lock;

std::deque<RowProgram>& programs() {
  static std::deque<RowProgram> all;  // never removed, because a number may be used at any time
  return all;
}

// words: see read_program.
int64_t add_program(const Tensor words) {
  STD_TORCH_CHECK(words.dim() == 1 && words.scalar_type() == ScalarType::Long && words.is_contiguous(),
                  "a row program must be contiguous int64 [.]");
  RowProgram row_program = read_program(static_cast<const int64_t*>(words.data_ptr()), words.size(0));
  const std::lock_guard<std::mutex> guard(lock);
  programs().push_back(std::move(row_program));
  return programs().size() - 1;
}

Tensor rowwise(int64_t program, const Tensors inputs) {
  const RowProgram& row_program = program_of(program);
  STD_TORCH_CHECK(inputs.size() == row_program.inputs.size() && !inputs.empty(), "the row program takes ",
                  row_program.inputs.size(), " inputs, got ", inputs.size());
  const int64_t rows = inputs[0].size(0);
  std::vector<RowInput> row_inputs;
  for (size_t i = 0; i < inputs.size(); ++i) row_inputs.push_back(input_of(inputs[i], row_program.inputs[i], rows, i));
  const Tensor out = torch::stable::new_empty(inputs[0], {rows, row_program.width});
  const RowProgramArgs args{row_program, row_inputs.data(), static_cast<float*>(out.data_ptr()), row_program.width};
  std::atomic<int64_t> failure{no_failure}, wrong{0};
  const auto range = [&](int64_t begin, int64_t end) {
    int64_t number = 0;
    if (const Failure why = run_rows(args, begin, end, &number); why != no_failure) wrong = number, failure = why;
  };
  over_rows(rows, row_program.work, range);
  STD_TORCH_CHECK(failure == no_failure, failure == wrong_label ? "Target " : "Index ", wrong.load(),
                  " is out of bounds.");
  return out;
}

}  // namespace

const RowProgram& program_of(int64_t number) {
  const std::lock_guard<std::mutex> guard(lock);
  STD_TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(programs().size()), "there is no row program ", number);
  return programs()[number];  // a deque does not move its elements when it grows
}

}  // namespace fastsam

STABLE_TORCH_LIBRARY_FRAGMENT(fastsam, m) {
  m.def("row_program(Tensor words) -> int");
  m.def("rowwise(int program, Tensor[] inputs) -> Tensor");
  m.def(
      "rowwise_steps_(int[] programs, int batch, Tensor[] weights, Tensor[] constants, Tensor x, Tensor y, Tensor "
      "sample_indices, Tensor work, Tensor(a!) params, Tensor(b!)? w, Tensor table, Tensor hparams, str rule, "
      "Tensor(c!)? state0, Tensor(d!)? state1, Tensor(e!)? state2, Tensor(f!)? steps, Tensor? q, Tensor? shift, "
      "Tensor(g!)? sumsq, Tensor(h!)? sumsq_v, bool adaptive, bool keeps_first, Tensor(i!) losses, Tensor(j!) "
      "failures, Tensor? start, Tensor(k!)? deltas, Tensor(l!)? squares) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastsam, CPU, m) {
  m.impl("row_program", TORCH_BOX(&fastsam::add_program));
  m.impl("rowwise", TORCH_BOX(&fastsam::rowwise));
}
