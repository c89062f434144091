// rowwise_steps_: all local steps of clients, each client by itself. A client's batches, passes, perturbations and
// updates are computed while its weights and gradients are in the first-level cache. Passes are computed as in rowwise,
// and the rest as norm_, perturb_, update_norm_ and update_ do for a row. The bits are the same as with single calls.
#include "steps.h"

namespace fastsam {
namespace {

constexpr int64_t kFetched = 256;  // most words of a sample to prefetch; longer samples are fetched by the hardware

// The samples of a call. words: of 4 bytes, of x of a sample.
struct Samples {
  const float* x;
  const int64_t *y, *indices;
  int64_t count, words;

  // Copies a batch into private memory. Returns false, with the index, if an index is not a sample.
  bool gather(BatchRange range, float* to_x, int64_t* to_y, int64_t* wrong) const {
    for (int64_t i = 0; i < range.size; ++i) {
      const int64_t sample = indices[range.begin + i];
      if (sample < 0 || sample >= count) return *wrong = sample, false;
      std::memcpy(to_x + i * words, x + sample * words, words * sizeof(float));
      to_y[i] = y[sample];
    }
    return true;
  }

  // Prefetches the samples of a batch, whose addresses are random, during the step before it. So they cost no waiting.
  void prefetch(BatchRange range) const {
    if (words > kFetched) return;
    for (int64_t i = 0; i < range.size; ++i) {
      const float* sample = x + std::clamp<int64_t>(indices[range.begin + i], 0, count - 1) * words;
      for (int64_t j = 0; j < words; j += 16) __builtin_prefetch(sample + j);
    }
  }
};

// Private memory of a thread.
struct Memory {
  std::vector<float> x, first, second;
  std::vector<int64_t> y;
  std::vector<double> partials, zeros;
};

// Returns the gradients of one row at a time, in the same memory for every row.
List gradients_of(const Problem& problem, float* grads) {
  List list;
  for (int64_t i = 0; i < problem.segments; ++i) list.start.push_back(grads + problem.table[i].offset);
  list.row_stride.assign(problem.segments, 0);
  return list;
}

// Returns the sum of squares of a row, from the partial sums of its chunks in their order.
template <class Args>
double norm_of_row(const Args& args, int64_t row, Memory& memory,
                   void (*range)(const Args&, double*, int64_t, int64_t)) {
  const int64_t chunks = args.problem.chunks(), at = row * chunks;
  range(args, memory.partials.data(), at, at + chunks);
  double total = 0.0;
  for (int64_t i = 0; i < chunks; ++i) total += memory.partials[at + i];
  return total;
}

// The rows of one thread.
class Thread {
 public:
  Thread(const RowSteps& steps, const Samples& samples, int64_t batch)
      : steps_(steps),
        samples_(samples),
        batch_(batch),
        memory_{std::vector<float>(batch * samples.words),
                std::vector<float>(steps.width),
                std::vector<float>(steps.two_passes ? steps.width : 0),
                std::vector<int64_t>(batch),
                std::vector<double>(steps.update.problem.rows * steps.update.problem.chunks()),
                std::vector<double>(steps.update.problem.groups * kNumHParams)},
        by_size_(batch + 1, nullptr) {
    const Problem& problem = steps.update.problem;
    const List first = gradients_of(problem, memory_.first.data());
    steps_.norm.grads = steps_.perturb.grads = first;
    steps_.update.grads = steps.two_passes ? gradients_of(problem, memory_.second.data()) : first;
    if (steps_.update.g1.defined()) steps_.update.g1 = first;
    for (RowForm& form : steps_.forms) {
      form.inputs[steps.weights] = RowInput{memory_.x.data(), 0};
      form.inputs[steps.weights + 1] = RowInput{memory_.y.data(), 0};
      by_size_[form.batch] = &form;
    }
    result_.problem = problem;
    result_.problem.rows = 1, result_.problem.hparams = memory_.zeros.data();
    result_.grads = first;
  }

  // Takes the steps of the calls' rows [begin, end).
  void run(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t* failure = steps_.failures + kFailureWords * i;
      std::fill_n(failure, kFailureWords, 0);
      train(steps_.work[i], i + 1 < end ? &steps_.work[i + 1] : nullptr, failure);
      if (steps_.squares != nullptr) write_results(i);
    }
  }

 private:
  void train(const RowWork& work, const RowWork* next, int64_t* failure) {
    const int64_t row = work.row, loss = steps_.width - kShared;
    for (int64_t step = 0; step < work.steps; ++step) {
      const BatchRange range = batch_range_of(work, batch_, step);
      failure[2] = step;
      if (!samples_.gather(range, memory_.x.data(), memory_.y.data(), &failure[1]))
        return void(*failure = wrong_sample);
      if (step + 1 < work.steps) {
        samples_.prefetch(batch_range_of(work, batch_, step + 1));
      } else if (next != nullptr && next->steps > 0) {
        samples_.prefetch(batch_range_of(*next, batch_, 0));
      }
      const RowForm& form = *by_size_[range.size];
      if ((*failure = pass(form, memory_.first, row, &failure[1])) != no_failure) return;
      steps_.losses[row] += static_cast<double>(memory_.first[loss]) * range.size;
      if (steps_.two_passes) {
        perturb(row);
        if ((*failure = pass(form, memory_.second, row, &failure[1])) != no_failure) return;
      }
      update(row);
    }
  }

  Failure pass(const RowForm& form, std::vector<float>& out, int64_t row, int64_t* wrong) {
    return run_rows(RowProgramArgs{*form.program, form.inputs.data(), out.data(), 0}, row, row + 1, wrong);
  }

  void perturb(int64_t row) {
    const int64_t chunks = steps_.perturb.problem.chunks();
    steps_.norm.sumsq[row] = norm_of_row(steps_.norm, row, memory_, norm_range);
    perturb_range(steps_.perturb, false, row * chunks, (row + 1) * chunks);
  }

  void update(int64_t row) {
    const UpdateArgs& args = steps_.update;
    const int64_t chunks = args.problem.chunks();
    if (args.sumsq != nullptr) args.sumsq[row] = norm_of_row(args, row, memory_, update_norm_range);
    args.rule->range(args, false, row * chunks, (row + 1) * chunks);
    count_step(args, row);
  }

  // Writes what row i of the call has changed, and its squared norm.
  void write_results(int64_t i) {
    const int64_t row = steps_.work[i].row, size = steps_.width - kShared;
    const auto* z = static_cast<const float*>(steps_.params.data) + row * steps_.params.stride;
    const auto* start = static_cast<const float*>(steps_.start.data) + row * steps_.start.stride;
    float* delta = memory_.first.data();
    for (int64_t j = 0; j < size; ++j) delta[j] = z[j] - start[j];
    steps_.squares[i] = norm_of_row(result_, 0, memory_, norm_range);
    std::memcpy(static_cast<float*>(steps_.deltas.data) + i * steps_.deltas.stride, delta, size * sizeof(float));
  }

  RowSteps steps_;
  const Samples& samples_;
  int64_t batch_;
  Memory memory_;
  std::vector<const RowForm*> by_size_;
  NormArgs result_;  // norm of a row's delta
};

// Checks the numbers of the rows' work, which CUDA cannot read without waiting.
void check_work(const RowSteps& steps, int64_t num_indices, int64_t batch) {
  std::vector<bool> has_form(batch + 1), seen(steps.update.problem.rows);
  for (const RowForm& form : steps.forms) has_form[form.batch] = true;
  for (int64_t i = 0; i < steps.rows; ++i) {
    const RowWork& work = steps.work[i];
    const bool is_row = work.row >= 0 && work.row < steps.update.problem.rows && !seen[work.row];
    STD_TORCH_CHECK(is_row, "work must name different rows of params");
    seen[work.row] = true;
    if (work.steps <= 0) continue;
    STD_TORCH_CHECK(work.samples > 0 && work.begin >= 0, "work must have samples for its steps");
    const int64_t batches = (work.samples + batch - 1) / batch;
    for (const int64_t step : {int64_t{0}, std::min(work.steps, batches) - 1}) {  // all between are whole
      const int64_t size = batch_range_of(work, batch, step).size;
      STD_TORCH_CHECK(has_form[size], "no row program has batches of ", size, " samples");
    }
    const BatchRange last = batch_range_of(work, batch, work.steps - 1);
    STD_TORCH_CHECK(last.begin + last.size <= num_indices, "work must have samples for its steps");
  }
}

void run(const StepsCall& call) {
  const RowSteps steps = row_steps(call, program_of);
  check_work(steps, call.sample_indices.size(0), call.batch);
  const Samples samples{static_cast<const float*>(call.x.data_ptr()), static_cast<const int64_t*>(call.y.data_ptr()),
                        static_cast<const int64_t*>(call.sample_indices.data_ptr()), call.y.size(0), steps.words};
  int64_t num_steps = 0, work = 0;
  for (int64_t i = 0; i < steps.rows; ++i) num_steps += std::max<int64_t>(0, steps.work[i].steps);
  for (const RowForm& form : steps.forms) work = std::max(work, form.program->work);
  work *= num_steps * (steps.two_passes ? 2 : 1);
  over_rows(steps.rows, steps.rows == 0 ? 0 : work / steps.rows,
            [&](int64_t begin, int64_t end) { Thread(steps, samples, call.batch).run(begin, end); });
}

}  // namespace
}  // namespace fastsam

STABLE_TORCH_LIBRARY_IMPL(fastsam, CPU, m) {
  m.impl("rowwise_steps_", TORCH_BOX(&fastsam::rowwise_steps<fastsam::run>));
}
