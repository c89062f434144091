// The ops of row programs (csrc/rowprograms/ops.cpp) for CUDA tensors. LibTorch's stable ABI only.
#include <deque>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "../rowprograms/steps.h"
#include "device_stream_guard.h"
#include "rowprograms.h"

namespace fastsam {
namespace {

struct DeviceProgram {
  RowProgram program;
  Tensor words;  // on the device
  int64_t begin, panel;
};

std::mutex lock;

std::deque<DeviceProgram>& programs() {
  static auto* all = new std::deque<DeviceProgram>;  // never freed, because the device may be released first at exit
  return *all;
}

const DeviceProgram& device_program(int64_t number) {
  const std::lock_guard<std::mutex> guard(lock);
  STD_TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(programs().size()), "there is no row program ", number);
  return programs()[number];
}

// Checks that a number fits the 32-bit counters of a block.
void check_size(const RowProgram& program) {
  constexpr int64_t most = std::numeric_limits<int>::max();
  bool fits = program.scratch < most && program.width < most && program.inputs.size() <= kMostInputs;
  for (const Expected& input : program.inputs) fits = fits && input.span() < most;
  for (const Instruction& in : program.instructions) {
    fits = fits && in.size[0] * static_cast<double>(in.size[1]) * in.size[2] * in.size[3] < most;
  }
  STD_TORCH_CHECK(fits, "a row program on CUDA has at most ", kMostInputs, " inputs, and tensors of fewer than ", most,
                  " elements a row");
}

// Returns the number of floats needed to transpose the largest matrix whose columns are not dense.
int64_t panel_of(const RowProgram& program) {
  int64_t most = 0;
  for (const Instruction& in : program.instructions) {
    if (in.code == Code::product && in.b.stride[1] != 1) most = std::max(most, in.size[1] * (in.size[2] | 1));
  }
  return most;
}

// words: as the words of the CPU's op, on the device.
int64_t add_program(const Tensor program) {
  STD_TORCH_CHECK(program.dim() == 1 && program.scalar_type() == ScalarType::Long && program.is_contiguous(),
                  "a row program must be contiguous int64 [.]");
  const DeviceStreamGuard device(program);
  std::vector<int64_t> words(program.numel());
  DeviceStreamGuard::check("row_program", cudaMemcpy(words.data(), program.data_ptr(), words.size() * sizeof(int64_t),
                                                     cudaMemcpyDeviceToHost));
  RowProgram row_program = read_program(words.data(), words.size());
  check_size(row_program);
  constexpr int64_t words_each = sizeof(Instruction) / sizeof(int64_t);
  const int64_t begin = program.numel() - static_cast<int64_t>(row_program.instructions.size()) * words_each;
  const int64_t panel = panel_of(row_program);
  const std::lock_guard<std::mutex> guard(lock);
  programs().push_back(DeviceProgram{std::move(row_program), program, begin, panel});
  return programs().size() - 1;
}

RowsArgs args_of(const DeviceProgram& held_program, int64_t rows) {
  RowsArgs args;
  args.words = static_cast<const int64_t*>(held_program.words.data_ptr()) + held_program.begin;
  args.instructions = static_cast<int>(held_program.program.instructions.size());
  args.inputs = static_cast<int>(held_program.program.inputs.size());
  args.rows = rows;
  args.width = held_program.program.width;
  return args;
}

RowsInput input_of(const RowInput& input, const Expected& expected) {
  const int64_t bytes = expected.labels ? sizeof(int64_t) : sizeof(float);
  return RowsInput{static_cast<const char*>(input.data), input.row * bytes, -1};
}

// Launches with shared memory. If that is too small, uses memory that returns to the allocator in stream order.
void run(const char* name, RowsArgs& args, const DeviceProgram& held_program, const Tensor& like) {
  const DeviceStreamGuard device(like);
  place_rows(args, held_program.program.scratch, held_program.panel);
  OptionalTensor outside;
  if (args.memory.total > shared_cuda(device.device())) {
    outside = torch::stable::new_empty(like, {args.rows * args.memory.total / 4}, ScalarType::Float);
    args.outside = static_cast<unsigned char*>(outside->data_ptr());
  }
  DeviceStreamGuard::check(name, rows_cuda(args, device.stream()));
}

Tensor rowwise(int64_t program, const Tensors inputs) {
  const DeviceProgram& held_program = device_program(program);
  const RowProgram& row_program = held_program.program;
  STD_TORCH_CHECK(inputs.size() == row_program.inputs.size() && !inputs.empty(), "the row program takes ",
                  row_program.inputs.size(), " inputs, got ", inputs.size());
  const int64_t rows = inputs[0].size(0);
  RowsArgs args = args_of(held_program, rows);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_device_and_storage(inputs[i], device_of(held_program.words), "the inputs of a row program");
    args.input[i] = input_of(input_of(inputs[i], row_program.inputs[i], rows, i), row_program.inputs[i]);
  }
  const Tensor out = torch::stable::new_empty(inputs[0], {rows, row_program.width});
  args.out = static_cast<float*>(out.data_ptr());
  run("rowwise", args, held_program, out);
  return out;
}

void set_segments(RowsArgs& args, const Problem& problem) {
  STD_TORCH_CHECK(problem.segments <= kMostSegments, "a row program on CUDA has at most ", kMostSegments,
                  " parameters");
  args.segments = static_cast<int>(problem.segments);
  args.groups = static_cast<int>(problem.groups);
  args.num_chunks = static_cast<int>(problem.chunks());
  for (int i = 0; i < args.segments; ++i) {
    const Segment& segment = problem.table[i];
    args.segment[i] = RowsSegment{static_cast<int>(segment.offset), static_cast<int>(segment.length),
                                  static_cast<int>(segment.group)};
  }
}

// The weights are read from the block's copy, so they must be parts of params.
void set_inputs(RowsArgs& args, const RowSteps& steps) {
  const auto* z = static_cast<const float*>(args.params.data);
  args.weights = static_cast<int>(steps.weights);
  for (size_t i = 0; i < steps.inputs.size(); ++i) {
    args.input[i] = input_of(steps.inputs[i], steps.program.inputs[i]);
    if (i >= steps.weights) continue;
    const int64_t at = static_cast<const float*>(steps.inputs[i].data) - z, span = steps.program.inputs[i].span();
    STD_TORCH_CHECK(
        at >= 0 && at + span <= args.width - kShared && (args.rows == 1 || steps.inputs[i].row == args.params.stride),
        "weights must be views of params");
    args.input[i].local = at;
  }
}

void rowwise_steps_cuda(int64_t program, const Tensors weights, const Tensors constants, const Tensor x, const Tensor y,
                        const Tensor sample_indices, int64_t batch, const OptionalTensor steps_per_row,
                        const Tensor params, const OptionalTensor w, const Tensor table, const Tensor hparams,
                        const OptionalTensor momentum, const OptionalTensor q, const OptionalTensor shift,
                        const OptionalTensor sumsq, const OptionalTensor sumsq_v, bool adaptive, bool keeps_first,
                        const Tensor losses) {
  const DeviceProgram& held_program = device_program(program);
  const RowSteps steps =
      row_steps(held_program.program, weights, constants, x, y, sample_indices, batch, steps_per_row, params, w, table,
                hparams, momentum, q, shift, sumsq, sumsq_v, adaptive, keeps_first, losses);
  const UpdateArgs& update = steps.update;
  RowsArgs args = args_of(held_program, params.size(0));
  args.params = Field{params.data_ptr(), params.stride(0)};
  args.w = update.backup, args.momentum = update.state[0], args.q = update.q, args.shift = update.shift;
  args.two_passes = steps.two_passes, args.keeps_first = keeps_first, args.adaptive = adaptive;
  args.hparams = update.problem.hparams;
  args.sumsq = steps.norm.sumsq, args.sumsq_v = update.sumsq, args.losses = steps.losses;
  args.x = static_cast<const float*>(x.data_ptr()), args.y = static_cast<const int64_t*>(y.data_ptr());
  args.sample_indices = static_cast<const int64_t*>(sample_indices.data_ptr()),
  args.indices_stride = sample_indices.stride(0);
  args.samples = y.size(0), args.features = static_cast<int>(steps.samples.features);
  args.batch = static_cast<int>(batch), args.steps = static_cast<int>(steps.samples.steps);
  args.steps_per_row = steps.samples.steps_per_row;
  set_segments(args, update.problem);
  set_inputs(args, steps);
  run("rowwise_steps_", args, held_program, params);
}

}  // namespace
}  // namespace fastsam

STABLE_TORCH_LIBRARY_IMPL(fastsam, CUDA, m) {
  m.impl("row_program", TORCH_BOX(&fastsam::add_program));
  m.impl("rowwise", TORCH_BOX(&fastsam::rowwise));
  m.impl("rowwise_steps_", TORCH_BOX(&fastsam::rowwise_steps_cuda));
}
