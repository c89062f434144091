// rowwise_steps_: whole local epochs of stacked clients, each client by itself. A client's batches, passes,
// perturbations and updates are computed while its weights and gradients are in the first-level cache. Passes are
// computed as in rowwise, and the rest as norm_, perturb_, update_norm_ and update_ (of SGD) do for a row. The bits are
// the same as with single calls.
#include "steps.h"

#include <atomic>

namespace fastsam {
namespace {

constexpr int64_t kFetched = 256;  // most features of a sample to prefetch; longer samples are fetched by the hardware
constexpr int64_t kNoSample = INT64_MIN;  // stands for a wrong label

// Copies a batch of a row into private memory. Returns false if an index is not a sample.
bool gather(const Samples& from, int64_t row, int64_t step, float* to_x, int64_t* to_y) {
  const auto* indices_of_step = static_cast<const int64_t*>(from.sample_indices.data_ptr()) +
                                row * from.sample_indices.stride(0) + step * from.batch;
  const auto* from_x = static_cast<const float*>(from.x.data_ptr());
  const auto* from_y = static_cast<const int64_t*>(from.y.data_ptr());
  for (int64_t i = 0; i < from.batch; ++i) {
    if (indices_of_step[i] < 0 || indices_of_step[i] >= from.y.size(0)) return false;
    std::memcpy(to_x + i * from.features, from_x + indices_of_step[i] * from.features, from.features * sizeof(float));
    to_y[i] = from_y[indices_of_step[i]];
  }
  return true;
}

// Prefetches the samples of a batch, whose addresses are random, during the step before it. So they cost no waiting.
void prefetch(const Samples& from, int64_t row, int64_t step) {
  if (row >= from.sample_indices.size(0) || from.features > kFetched) return;
  const auto* indices_of_step = static_cast<const int64_t*>(from.sample_indices.data_ptr()) +
                                row * from.sample_indices.stride(0) + step * from.batch;
  const auto* from_x = static_cast<const float*>(from.x.data_ptr());
  for (int64_t i = 0; i < from.batch; ++i) {
    const float* sample = from_x + std::clamp<int64_t>(indices_of_step[i], 0, from.y.size(0) - 1) * from.features;
    for (int64_t j = 0; j < from.features; j += 16) __builtin_prefetch(sample + j);
  }
}

// Private memory of a thread.
struct Memory {
  std::vector<float> x, first, second;
  std::vector<int64_t> y;
  std::vector<double> partials;
};

// Returns the gradients of one row at a time, in the same memory for every row.
List gradients_of(const Problem& problem, float* grads) {
  List list;
  for (int64_t i = 0; i < problem.segments; ++i) list.start.push_back(grads + problem.table[i].offset);
  list.row_stride.assign(problem.segments, 0);
  return list;
}

struct Steps : RowSteps {
  // Adds up the partial sums of a row, in the order of its chunks.
  template <class Args>
  void norm_of_row(const Args& args, int64_t row, Memory& memory,
                   void (*range)(const Args&, double*, int64_t, int64_t)) const {
    const int64_t chunks = args.problem.chunks(), at = row * chunks;
    range(args, memory.partials.data(), at, at + chunks);
    double total = 0.0;
    for (int64_t i = 0; i < chunks; ++i) total += memory.partials[at + i];
    args.sumsq[row] = total;
  }

  // Takes the steps of the rows [begin, end). Returns false if a label or an index is wrong.
  bool run(int64_t begin, int64_t end, Memory& memory, int64_t* wrong_label) {
    std::vector<RowInput> local_inputs = inputs;
    local_inputs[weights] = RowInput{memory.x.data(), 0};
    local_inputs[weights + 1] = RowInput{memory.y.data(), 0};
    const RowProgramArgs first{program, local_inputs.data(), memory.first.data(), 0};
    const RowProgramArgs second{program, local_inputs.data(), memory.second.data(), 0};
    const int64_t chunks = update.problem.chunks(), loss = program.width - kShared;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t steps =
          samples.steps_per_row == nullptr ? samples.steps : std::min(samples.steps_per_row[row], samples.steps);
      for (int64_t step = 0; step < steps; ++step) {
        if (!gather(samples, row, step, memory.x.data(), memory.y.data())) return *wrong_label = kNoSample, false;
        const bool last = step + 1 == steps;
        prefetch(samples, row + last, last ? 0 : step + 1);
        if (!run_rows(first, row, row + 1, wrong_label)) return false;
        losses[row] += static_cast<double>(memory.first[loss]) * samples.batch;
        if (two_passes) {
          norm_of_row(norm, row, memory, norm_range);
          perturb_range(perturb, false, row * chunks, (row + 1) * chunks);
          if (!run_rows(second, row, row + 1, wrong_label)) return false;
        }
        if (update.sumsq != nullptr) norm_of_row(update, row, memory, update_norm_range);
        update.rule->range(update, false, row * chunks, (row + 1) * chunks);
      }
    }
    return true;
  }
};

}  // namespace

void rowwise_steps(int64_t program, const Tensors weights, const Tensors constants, const Tensor x, const Tensor y,
                   const Tensor sample_indices, int64_t batch, const OptionalTensor steps_per_row, const Tensor params,
                   const OptionalTensor w, const Tensor table, const Tensor hparams, const OptionalTensor momentum,
                   const OptionalTensor q, const OptionalTensor shift, const OptionalTensor sumsq,
                   const OptionalTensor sumsq_v, bool adaptive, bool keeps_first, const Tensor losses) {
  const RowSteps steps =
      row_steps(program_of(program), weights, constants, x, y, sample_indices, batch, steps_per_row, params, w, table,
                hparams, momentum, q, shift, sumsq, sumsq_v, adaptive, keeps_first, losses);
  const Samples& samples = steps.samples;
  const RowProgram& row_program = steps.program;
  const Problem& problem = steps.update.problem;
  std::atomic<bool> failed{false};
  std::atomic<int64_t> wrong{0};
  const auto range = [&](int64_t begin, int64_t end) {
    Memory memory{std::vector<float>(batch * samples.features), std::vector<float>(row_program.width),
                  std::vector<float>(row_program.width), std::vector<int64_t>(batch),
                  std::vector<double>(problem.rows * problem.chunks())};
    Steps block_steps{steps};
    const List first = gradients_of(problem, memory.first.data());
    block_steps.norm.grads = block_steps.perturb.grads = first;
    block_steps.update.grads = steps.two_passes ? gradients_of(problem, memory.second.data()) : first;
    if (keeps_first) block_steps.update.g1 = first;
    int64_t label = 0;
    if (!block_steps.run(begin, end, memory, &label)) wrong = label, failed = true;
  };
  over_rows(problem.rows, samples.steps * row_program.work * (steps.two_passes ? 2 : 1), range);
  STD_TORCH_CHECK(!failed || wrong != kNoSample, "sample_indices must be indices of x and y, 0 to ", y.size(0) - 1);
  STD_TORCH_CHECK(!failed, "Target ", wrong.load(), " is out of bounds.");
}

}  // namespace fastsam
