// A recorded pass of one client, computed row by row. All data of a row stays in the first-level cache, and a pass is
// one call with any number of operations. kernels/rowprograms/ writes the programs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../types.h"

namespace fastsam {

constexpr int kProgramDims = 4;
constexpr int kShared = 16;  // floats of a row's result after the gradients; the loss is the first

// The order of kernels/rowprograms/instructions.py.
enum class Code : int64_t {
  product,
  sum,
  log_softmax,
  log_softmax_backward,
  nll,
  nll_backward,
  is_not,
  copy,
  relu,
  negate,
  exponential,
  logarithm,
  root,
  inverse_root,
  magnitude,
  tanh,
  sigmoid,
  add,
  scale,
  power,
  multiply,
  divide,
  threshold_backward,
  tanh_backward,
  sigmoid_backward,
  multiply_add,
  error_function,
  shift,
  look_up,
  look_up_backward,
  count
};

// Elements of a tensor in one row. base: the memory that they are in.
struct RowOperand {
  enum Base : int64_t { none = -1, scratch, out, first_input };
  int64_t base, offset, stride[kProgramDims];
};

// sizes: sizes of the elementwise loops and of sum, whose `out` has strides of 0 in the summed dimensions. Other
// operations document their sizes.
struct Instruction {
  Code code;
  int64_t size[kProgramDims];
  RowOperand out, a, b, c;
  double number;
};

static_assert(sizeof(Instruction) == 30 * 8, "kernels/rowprograms/instructions.py writes it as 30 words");

// The form of an input: its size and strides without the rows. labels: int64 instead of float32.
struct Expected {
  bool labels, one;  // one: the same for all rows
  std::vector<int64_t> size, stride;
  // Returns the number of elements from a row's first to its last; -1 for sizes below 1, strides below 0 and overflow.
  int64_t span() const {
    constexpr int64_t most = int64_t{1} << 62;
    int64_t last = 0;
    for (std::size_t d = 0; d < size.size(); ++d) {
      if (size[d] < 1 || stride[d] < 0) return -1;
      if (size[d] > 1 && stride[d] > (most - last) / (size[d] - 1)) return -1;
      last += (size[d] - 1) * stride[d];
    }
    return last + 1;
  }
  // Returns true if it has `count` elements of that kind, without gaps.
  bool is_dense(int64_t count, bool of_labels) const {
    int64_t n = 1;
    for (std::size_t d = size.size(); d-- > 0; n *= size[d]) {
      if (size[d] > 1 && stride[d] != n) return false;
    }
    return n == count && labels == of_labels;
  }
};

struct RowProgram {
  int64_t scratch = 0, width = 0;  // floats of intermediate values, and of a row of the result
  int64_t work = 0;                // approximate multiplications and elements of a row
  std::vector<Expected> inputs;
  std::vector<Instruction> instructions;
};

struct RowInput {
  const void* data;
  int64_t row;  // elements from one row to the next
};

struct RowProgramArgs {
  const RowProgram& program;
  const RowInput* inputs;
  float* out;
  int64_t out_row;  // elements from one row of the result to the next
};

// The work of a row in a call of rowwise_steps_, as words of a tensor. The row takes `steps` steps. An epoch is the
// next `samples` of the call's sample_indices, the first from `begin` on, in batches; its last batch has the rest.
struct RowWork {
  int64_t row, begin, samples, steps;
};

// A batch: sample_indices[begin] to sample_indices[begin + size - 1].
struct BatchRange {
  int64_t begin, size;
};

FASTSAM_HD BatchRange batch_range_of(const RowWork& work, int64_t batch, int64_t step) {
  const int64_t batches = (work.samples + batch - 1) / batch, first = step % batches * batch;
  const int64_t rest = work.samples - first;
  return BatchRange{work.begin + step / batches * work.samples + first, rest < batch ? rest : batch};
}

// Why a row did not take all its steps: the first of three words. The others are the label or index, and the step.
// wrong_sample: an index of samples. wrong_index: an index of a table.
enum Failure : int64_t { no_failure, wrong_label, wrong_sample, wrong_index };
constexpr int kFailureWords = 3;

constexpr int64_t kIgnored = -100;  // a label that does not count, torch's default

// Runs the rows [begin, end). A label that is not a class and an index outside of its table are failures, with the
// number in `wrong`.
Failure run_rows(const RowProgramArgs& args, int64_t begin, int64_t end, int64_t* wrong);

}  // namespace fastsam
