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

RowsForm form_of(const DeviceProgram& held_program, int64_t batch = 0, int constant = 0) {
  const RowProgram& program = held_program.program;
  return RowsForm{static_cast<const int64_t*>(held_program.words.data_ptr()) + held_program.begin,
                  static_cast<int>(program.instructions.size()), static_cast<int>(program.inputs.size()),
                  static_cast<int>(batch), constant};
}

RowsInput input_of(const RowInput& input, const Expected& expected) {
  const int64_t bytes = expected.labels ? sizeof(int64_t) : sizeof(float);
  return RowsInput{static_cast<const char*>(input.data), input.row * bytes, -1};
}

// Launches with shared memory. If that is too small, uses memory that returns to the allocator in stream order.
void run(const char* name, RowsArgs& args, RowsRule rule, const std::vector<const DeviceProgram*>& held_programs,
         const Tensor& like) {
  const DeviceStreamGuard device(like);
  int64_t scratch = 0, panel = 0;
  for (const DeviceProgram* held_program : held_programs) {
    scratch = std::max(scratch, held_program->program.scratch), panel = std::max(panel, held_program->panel);
  }
  place_rows(args, scratch, panel);
  OptionalTensor outside;
  if (args.memory.total > shared_cuda(device.device())) {
    outside = torch::stable::new_empty(like, {args.rows * args.memory.total / 4}, ScalarType::Float);
    args.outside = static_cast<unsigned char*>(outside->data_ptr());
  }
  DeviceStreamGuard::check(name, rows_cuda(args, rule, device.stream()));
}

Tensor rowwise(int64_t program, const Tensors inputs) {
  const DeviceProgram& held_program = device_program(program);
  const RowProgram& row_program = held_program.program;
  STD_TORCH_CHECK(inputs.size() == row_program.inputs.size() && !inputs.empty(), "the row program takes ",
                  row_program.inputs.size(), " inputs, got ", inputs.size());
  const int64_t rows = inputs[0].size(0);
  RowsArgs args;
  args.forms = 1, args.form[0] = form_of(held_program), args.rows = rows, args.width = row_program.width;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_device_and_storage(inputs[i], device_of(held_program.words), "the inputs of a row program");
    args.input[i] = input_of(input_of(inputs[i], row_program.inputs[i], rows, i), row_program.inputs[i]);
  }
  const Tensor out = torch::stable::new_empty(inputs[0], {rows, row_program.width});
  args.out = static_cast<float*>(out.data_ptr());
  run("rowwise", args, RowsRule::sgd, {&held_program}, out);
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
                                  static_cast<int>(segment.group), static_cast<int>(segment.slot)};
  }
}

// The weights are read from the block's copy, so they must be parts of params.
RowsInput weight_of(const RowInput& input, const Expected& expected, const RowSteps& steps) {
  RowsInput weight = input_of(input, expected);
  weight.local = static_cast<const float*>(input.data) - static_cast<const float*>(steps.params.data);
  STD_TORCH_CHECK(weight.local >= 0 && weight.local + expected.span() <= steps.width - kShared &&
                      (steps.update.problem.rows == 1 || input.row == steps.params.stride),
                  "weights must be views of params");
  return weight;
}

void set_forms(RowsArgs& args, const RowSteps& steps, const std::vector<const DeviceProgram*>& held_programs) {
  STD_TORCH_CHECK(steps.forms.size() <= kMostForms, "a call on CUDA takes at most ", kMostForms, " row programs");
  args.forms = static_cast<int>(steps.forms.size()), args.weights = static_cast<int>(steps.weights);
  size_t used = steps.weights + 2;
  for (size_t f = 0; f < steps.forms.size(); ++f) {
    const RowForm& form = steps.forms[f];
    const std::vector<Expected>& expected = form.program->inputs;
    args.form[f] = form_of(*held_programs[f], form.batch, static_cast<int>(used));
    STD_TORCH_CHECK(used + form.inputs.size() - steps.weights - 2 <= kMostInputs, "a call on CUDA takes at most ",
                    kMostInputs, " inputs of its row programs");
    for (size_t i = 0; i < steps.weights && f == 0; ++i) args.input[i] = weight_of(form.inputs[i], expected[i], steps);
    for (size_t i = steps.weights + 2; i < form.inputs.size(); ++i) {
      args.input[used++] = input_of(form.inputs[i], expected[i]);
    }
  }
}

RowsRule rule_of(const StepsCall& call) {
  STD_TORCH_CHECK(call.rule == "sgd" || call.rule == "adam", "row programs on CUDA take the rules sgd and adam, got ",
                  call.rule);
  return call.rule == "sgd" ? RowsRule::sgd : RowsRule::adam;
}

void rowwise_steps_cuda(const StepsCall& call) {
  std::vector<const DeviceProgram*> held_programs;
  const RowSteps steps = row_steps(call, [&](int64_t number) -> const RowProgram& {
    held_programs.push_back(&device_program(number));
    return held_programs.back()->program;
  });
  const UpdateArgs& update = steps.update;
  RowsArgs args;
  args.rows = steps.rows, args.width = steps.width, args.param_rows = update.problem.rows;
  args.params = steps.params, args.w = update.backup, args.q = update.q, args.shift = update.shift;
  std::copy(update.state.begin(), update.state.end(), args.state);
  args.counts = update.steps, args.slots = update.slots;
  args.start = steps.start, args.deltas = steps.deltas, args.squares = steps.squares;
  args.two_passes = steps.two_passes, args.keeps_first = call.keeps_first, args.adaptive = call.adaptive;
  args.hparams = update.problem.hparams;
  args.sumsq = steps.norm.sumsq, args.sumsq_v = update.sumsq, args.losses = steps.losses;
  args.failures = steps.failures, args.work = steps.work;
  args.x = static_cast<const int*>(call.x.data_ptr()), args.y = static_cast<const int64_t*>(call.y.data_ptr());
  args.sample_indices = static_cast<const int64_t*>(call.sample_indices.data_ptr());
  args.num_indices = call.sample_indices.size(0), args.samples = call.y.size(0);
  args.words = static_cast<int>(steps.words), args.batch = static_cast<int>(call.batch);
  set_segments(args, update.problem);
  set_forms(args, steps, held_programs);
  run("rowwise_steps_", args, rule_of(call), held_programs, call.params);
}

}  // namespace
}  // namespace fastsam

STABLE_TORCH_LIBRARY_IMPL(fastsam, CUDA, m) {
  m.impl("row_program", TORCH_BOX(&fastsam::add_program));
  m.impl("rowwise", TORCH_BOX(&fastsam::rowwise));
  m.impl("rowwise_steps_", TORCH_BOX(&fastsam::rowwise_steps<fastsam::rowwise_steps_cuda>));
}
