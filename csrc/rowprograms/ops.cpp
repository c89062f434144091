// The ops of row programs: row_program takes one, rowwise runs it, and rowwise_steps_ (steps.cpp) trains with it.
// CPU only; the meaning of every argument stands in kernels/rowprograms/program.py.
#include <atomic>
#include <deque>
#include <mutex>
#include <utility>

#include "args.h"

namespace fastsam {
namespace {

std::mutex lock;

std::deque<RowProgram>& programs() {
  static std::deque<RowProgram> all;  // they stay: who has the number of one may call it
  return all;
}

// Takes words from the front.
struct Words {
  const int64_t *next, *end;

  const int64_t* take(int64_t count) {
    STD_TORCH_CHECK(count >= 0 && count <= end - next, "a row program must end with whole instructions");
    return std::exchange(next, next + count);
  }
  int64_t one() { return *take(1); }
};

// words: scratch, width, work, inputs; of each input labels, one, dimensions, sizes, strides; then the instructions.
int64_t add_program(const Tensor given) {
  STD_TORCH_CHECK(given.dim() == 1 && given.scalar_type() == ScalarType::Long && given.is_contiguous(),
                  "a row program must be contiguous int64 [.]");
  const auto* first = static_cast<const int64_t*>(given.data_ptr());
  Words words{first, first + given.size(0)};
  RowProgram made;
  made.scratch = words.one(), made.width = words.one(), made.work = words.one();
  for (int64_t left = words.one(); left > 0; --left) {
    Expected& input = made.inputs.emplace_back();
    input.labels = words.one() != 0, input.one = words.one() != 0;
    const int64_t dims = words.one();
    const auto* sizes = words.take(dims);
    const auto* strides = words.take(dims);
    input.size.assign(sizes, sizes + dims), input.stride.assign(strides, strides + dims);
  }
  constexpr int64_t words_each = sizeof(Instruction) / sizeof(int64_t);
  const int64_t rest = words.end - words.next;
  made.instructions.resize(rest / words_each);
  const int64_t* body = words.take(rest / words_each * words_each);
  if (!made.instructions.empty())  // else there is no memory to copy to
    std::memcpy(made.instructions.data(), body, made.instructions.size() * sizeof(Instruction));
  STD_TORCH_CHECK(words.next == words.end, "a row program must end with whole instructions");
  check_program(made);
  const std::lock_guard<std::mutex> guard(lock);
  programs().push_back(std::move(made));
  return programs().size() - 1;
}

Tensor rowwise(int64_t program, const Tensors inputs) {
  const RowProgram& wanted = program_of(program);
  STD_TORCH_CHECK(inputs.size() == wanted.inputs.size() && !inputs.empty(), "the row program takes ",
                  wanted.inputs.size(), " inputs, got ", inputs.size());
  const int64_t rows = inputs[0].size(0);
  std::vector<RowInput> places;
  for (size_t i = 0; i < inputs.size(); ++i) places.push_back(input_of(inputs[i], wanted.inputs[i], rows, i));
  const Tensor out = torch::stable::new_empty(inputs[0], {rows, wanted.width});
  const RowProgramArgs args{wanted, places.data(), static_cast<float*>(out.data_ptr()), wanted.width};
  std::atomic<bool> failed{false};
  std::atomic<int64_t> wrong{0};
  const auto range = [&](int64_t begin, int64_t end) {
    int64_t label = 0;
    if (!run_rows(args, begin, end, &label)) wrong = label, failed = true;
  };
  over_rows(rows, wanted.work, range);
  STD_TORCH_CHECK(!failed, "Target ", wrong.load(), " is out of bounds.");
  return out;
}

}  // namespace

const RowProgram& program_of(int64_t number) {
  const std::lock_guard<std::mutex> guard(lock);
  STD_TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(programs().size()), "there is no row program ", number);
  return programs()[number];  // a deque moves nothing when it grows
}

}  // namespace fastsam

STABLE_TORCH_LIBRARY_FRAGMENT(fastsam, m) {
  m.def("row_program(Tensor words) -> int");
  m.def("rowwise(int program, Tensor[] inputs) -> Tensor");
  m.def(
      "rowwise_steps_(int program, Tensor[] weights, Tensor[] others, Tensor x, Tensor y, Tensor wanted, int batch, "
      "Tensor(a!) z, Tensor(b!)? w, Tensor table, Tensor hyper, Tensor(c!)? momentum, Tensor? q, Tensor? shift, "
      "Tensor(d!)? sumsq, Tensor(e!)? sumsq_v, bool adaptive, bool keeps_first, Tensor(f!) losses) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastsam, CPU, m) {
  m.impl("row_program", TORCH_BOX(&fastsam::add_program));
  m.impl("rowwise", TORCH_BOX(&fastsam::rowwise));
  m.impl("rowwise_steps_", TORCH_BOX(&fastsam::rowwise_steps));
}
