// Row programs on CUDA: a block for a client, all its local steps in one launch. The data of a row (weights, gradients,
// activations, the batch) is in shared memory if it fits, else in private memory of the block.
#include "../rules/adam.h"
#include "../rules/sgd.h"
#include "row_ops.cuh"

namespace fastsam {
namespace {

constexpr int kSquares = 64;  // partial sums of squares of a chunk, as csrc/cpu/norm_loops.h
constexpr int kTeams = kThreads / kSquares;

// The rules of a step for a segment's elements. Rule: the rule of update_.
template <class Rule>
struct Rules {
  PerturbFunctor<float> perturb;
  CombinedGradient<float> combined;
  Rule rule;
};

// A block's row, its program, and the addresses in its memory. item: index of its work, or the row of a pass.
struct Row {
  const RowsArgs& p;
  unsigned char* memory;
  int64_t item, row;
  int form;  // -1: none yet

  template <class T>
  __device__ __forceinline__ T* at(int64_t bytes) const {
    return reinterpret_cast<T*>(memory + bytes);
  }
  __device__ __forceinline__ const char** input_addresses() const { return at<const char*>(p.memory.input_addresses); }
  __device__ __forceinline__ float* z() const { return at<float>(p.memory.z); }
  __device__ __forceinline__ float* first() const { return at<float>(p.memory.first); }
  __device__ __forceinline__ float* second() const { return at<float>(p.memory.second); }
  __device__ __forceinline__ float* field(const Field& f) const {
    return f.data == nullptr ? nullptr : static_cast<float*>(f.data) + row * f.stride;
  }
  __device__ __forceinline__ const double* scalars(int segment) const {
    return p.hparams + (row * p.groups + p.segment[segment].group) * kNumHParams;
  }
};

// Copies the instructions of a program and the addresses of its inputs to the block's memory.
__device__ __forceinline__ void stage(Row& r, int number) {
  if (r.form == number) return;
  r.form = number;
  const RowsForm& form = r.p.form[number];
  int* ops = r.at<int>(r.p.memory.instructions);
  for (int i = threadIdx.x; i < form.instructions * kOpWords; i += kThreads) {
    const int64_t word = form.words[i];
    const bool number = i % kOpWords == kOpWords - 1;
    ops[i] = number ? bit_cast<int>(static_cast<float>(bit_cast<double>(word))) : static_cast<int>(word);
  }
  const bool trains = r.p.out == nullptr;
  for (int i = threadIdx.x; i < form.inputs; i += kThreads) {
    const bool is_constant = trains && i >= r.p.weights + 2;
    const RowsInput& input = r.p.input[is_constant ? form.constant + i - r.p.weights - 2 : i];
    const char* address = input.data + r.row * input.bytes;
    if (input.local >= 0) address = reinterpret_cast<const char*>(r.z() + input.local);
    if (trains && i == r.p.weights) address = r.at<const char>(r.p.memory.x);
    if (trains && i == r.p.weights + 1) address = r.at<const char>(r.p.memory.y);
    r.input_addresses()[i] = address;
  }
}

// Computes a pass; ends with a barrier.
__device__ __forceinline__ void pass(const Row& r, float* out) {
  float* scratch = r.at<float>(r.p.memory.scratch);
  const RowOp* ops = r.at<const RowOp>(r.p.memory.instructions);
  const auto address = [&](const DeviceOperand& o, int bytes) -> const char* {
    if (o.base == RowOperand::scratch) return reinterpret_cast<const char*>(scratch + o.offset);
    if (o.base == RowOperand::out) return reinterpret_cast<const char*>(out + o.offset);
    return r.input_addresses()[o.base - RowOperand::first_input] + static_cast<int64_t>(o.offset) * bytes;
  };
  float* nothing = r.at<float>(r.p.memory.lanes);
  if (threadIdx.x == 0) *nothing = 0.0f;
  __syncthreads();
  const auto floats = [&](const DeviceOperand& o) {
    return o.base == RowOperand::none ? nothing : reinterpret_cast<const float*>(address(o, sizeof(float)));
  };
  for (int i = 0; i < r.p.form[r.form].instructions; ++i) {
    const RowOp& op = ops[i];
    const Code code = static_cast<Code>(op.code);
    RowPlaces at{const_cast<float*>(floats(op.out)), nullptr, nullptr, floats(op.c), nullptr,
                 r.at<int64_t>(r.p.memory.failure)};
    if (code == Code::is_not) {
      at.labels = reinterpret_cast<const int64_t*>(address(op.a, sizeof(int64_t)));
    } else {
      at.a = floats(op.a);
    }
    const bool is_lookup = code == Code::look_up || code == Code::look_up_backward;
    if (is_lookup || code == Code::nll || code == Code::nll_backward) {
      at.labels = reinterpret_cast<const int64_t*>(address(op.b, sizeof(int64_t)));
    } else {
      at.b = floats(op.b);
    }
    if (code == Code::product) {
      product(op, at, r.at<float>(r.p.memory.panel));
    } else if (code == Code::sum) {
      sums(op, at);
    } else if (code < Code::is_not) {
      by_classes(op, at);
    } else if (is_lookup) {
      look_up(op, at);
    } else {
      elements(op, at);
    }
    __syncthreads();
  }
}

// Copies a batch into the block's memory. An index that is not a sample is a failure.
__device__ __forceinline__ void gather(const Row& r, const BatchRange& range) {
  const RowsArgs& p = r.p;
  int* x = r.at<int>(p.memory.x);
  int64_t *y = r.at<int64_t>(p.memory.y), *failure = r.at<int64_t>(p.memory.failure);
  const auto sample_of = [&](int i) {
    const int64_t at = range.begin + i;
    return at >= 0 && at < p.num_indices ? p.sample_indices[at] : -1;
  };
  const int size = static_cast<int>(range.size), none = bit_cast<int>(nanf(""));  // no index of a table either
  for (int i = threadIdx.x; i < size * p.words; i += kThreads) {
    const int64_t sample = sample_of(i / p.words);
    x[i] = sample >= 0 && sample < p.samples ? p.x[sample * p.words + i % p.words] : none;
  }
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const int64_t sample = sample_of(i);
    const bool is_sample = sample >= 0 && sample < p.samples;
    y[i] = is_sample ? p.y[sample] : kIgnored;
    if (!is_sample) failure[0] = wrong_sample, failure[1] = sample;
  }
}

// Returns the sum of value(segment, element of the row)^2, in the order of csrc/cpu/norm_loops.h. A chunk has 64
// partial sums, a thread each, and the remaining elements are added after them. Valid in all threads; ends with a
// barrier.
template <class F>
__device__ __forceinline__ double squares(const Row& r, const F& value) {
  const RowsArgs& p = r.p;
  float* lanes = r.at<float>(p.memory.lanes);
  double* partials = r.at<double>(p.memory.partials);
  const int team = threadIdx.x / kSquares, thread_in_team = threadIdx.x % kSquares;
  int segment = 0, before = 0;  // segment of this team's next chunk, and the number of chunks before it
  for (int first = 0; first < p.num_chunks; first += kTeams) {
    const int chunk = first + team;
    const bool busy = chunk < p.num_chunks;
    ChunkRange part{0, 0};
    while (busy) {
      const int num_chunks = static_cast<int>(chunks_of(p.segment[segment].length));
      if (chunk < before + num_chunks) {
        part = chunk_range_of(chunk - before, p.segment[segment].length);
        break;
      }
      before += num_chunks, ++segment;
    }
    const int begin = busy ? p.segment[segment].offset + static_cast<int>(part.begin) : 0;
    const int count = static_cast<int>(part.count), full = count / kSquares * kSquares;
    float sum = 0.0f;
    for (int i = thread_in_team; i < full; i += kSquares) {
      const float x = value(segment, begin + i);
      sum += x * x;
    }
    lanes[threadIdx.x] = sum;
    __syncthreads();
    if (thread_in_team == 0 && busy) {
      const float* s = lanes + team * kSquares;
      double all = 0.0, tail = 0.0;
      for (int lane = 0; lane < 16; ++lane) {
        all += static_cast<double>((s[lane] + s[lane + 16]) + (s[lane + 32] + s[lane + 48]));
      }
      for (int i = full; i < count; ++i) {
        const float x = value(segment, begin + i);
        tail += static_cast<double>(x * x);
      }
      partials[chunk] = all + tail;
    }
    __syncthreads();
  }
  double total = 0.0;
  for (int i = 0; i < p.num_chunks; ++i) total += partials[i];
  __syncthreads();
  return total;
}

// Calls f(segment, element of the row) for all elements.
template <class F>
__device__ __forceinline__ void each_element(const Row& r, const F& f) {
  for (int s = 0; s < r.p.segments; ++s) {
    const RowsSegment& segment = r.p.segment[s];
    for (int i = threadIdx.x; i < segment.length; i += kThreads) f(s, segment.offset + i);
  }
}

template <class Rule>
__device__ __forceinline__ void perturb(const Row& r) {
  const float *w = r.field(r.p.w), *g = r.first();
  const double sumsq = squares(r, [&](int segment, int i) {
    const NormFunctor<float> rule(r.scalars(segment));
    return rule.adaptive && r.p.adaptive ? rule.direction(w[i], g[i]) : g[i];
  });
  if (threadIdx.x == 0) r.p.sumsq[r.row] = sumsq;
  auto* rules = r.at<Rules<Rule>>(r.p.memory.rules);
  for (int s = threadIdx.x; s < r.p.segments; s += kThreads) {
    rules[s].perturb = PerturbFunctor<float>(r.scalars(s), sumsq);
  }
  __syncthreads();
  float* z = r.z();
  each_element(r, [&](int s, int i) { z[i] = rules[s].perturb.perturbed(w[i], g[i]); });
  __syncthreads();
}

template <class Rule>
__device__ __forceinline__ void update(const Row& r) {
  const RowsArgs& p = r.p;
  float *z = r.z(), *w = r.field(p.w);
  float* state[Rule::kState];
  unsigned state_mask = 0;
#pragma unroll
  for (int k = 0; k < Rule::kState; ++k) {
    state[k] = r.field(p.state[k]);
    state_mask |= state[k] != nullptr ? 1u << k : 0u;
  }
  const float *g2 = p.two_passes ? r.second() : r.first(), *g1 = p.keeps_first ? r.first() : nullptr;
  const float *q = r.field(p.q), *shift = r.field(p.shift);
  double sumsq = -1.0;
  if (p.sumsq_v != nullptr) {
    sumsq = squares(r, [&](int segment, int i) {
      const LinearFunctor<float> rule(r.scalars(segment), 1.0);
      return rule.clipped_part(w != nullptr ? w[i] : z[i], g2[i], g1 != nullptr ? g1[i] : 0.0f,
                               q != nullptr ? q[i] : 0.0f);
    });
    if (threadIdx.x == 0) p.sumsq_v[r.row] = sumsq;
  }
  auto* rules = r.at<Rules<Rule>>(p.memory.rules);
  float* counts = Rule::kCounts ? p.counts + r.row * p.slots : nullptr;
  for (int s = threadIdx.x; s < p.segments; s += kThreads) {
    const double t = Rule::kCounts ? counts[p.segment[s].slot] + 1.0 : 0.0;
    rules[s].combined = CombinedGradient<float>(r.scalars(s), 1.0, sumsq);
    rules[s].rule = rule_of<Rule>(r.scalars(s), t, false);
  }
  __syncthreads();
  each_element(r, [&](int s, int i) {
    const CombinedGradient<float>& combined = rules[s].combined;
    const float old = w != nullptr ? w[i] : z[i];
    const float d = combined.gradient(old, g2[i], g1 != nullptr ? g1[i] : 0.0f, q != nullptr ? q[i] : 0.0f,
                                      shift != nullptr ? shift[i] : 0.0f);
    float values[Rule::kState];
#pragma unroll
    for (int k = 0; k < Rule::kState; ++k) values[k] = has(state_mask, k) ? state[k][i] : 0.0f;
    z[i] = rules[s].rule.step(combined.weight(old), d, values, state_mask);
#pragma unroll
    for (int k = 0; k < Rule::kState; ++k) {
      if (has(state_mask, k)) state[k][i] = values[k];
    }
    if (w != nullptr) w[i] = z[i];
  });
  // Each segment has a separate slot, as the gradients' table has all parameters.
  for (int s = threadIdx.x; Rule::kCounts && s < p.segments; s += kThreads) counts[p.segment[s].slot] += 1.0f;
  __syncthreads();
}

// Takes a step. Returns false if a label or an index is wrong; the numbers of that row are NaN then.
template <class Rule>
__device__ __forceinline__ bool step(Row& r, const BatchRange& range) {
  const RowsArgs& p = r.p;
  int number = 0;
  while (number < p.forms && p.form[number].batch != range.size) ++number;
  if (number == p.forms) return false;
  stage(r, number);
  gather(r, range);
  pass(r, r.first());
  if (threadIdx.x == 0) p.losses[r.row] += static_cast<double>(r.first()[p.width - kShared]) * range.size;
  if (p.two_passes) {
    perturb<Rule>(r);
    pass(r, r.second());
  }
  update<Rule>(r);
  const bool is_good = *r.at<int64_t>(p.memory.failure) == no_failure;
  __syncthreads();  // the next step may write it
  return is_good;
}

// Writes what the row has changed, and its squared norm.
__device__ __forceinline__ void write_results(const Row& r) {
  const RowsArgs& p = r.p;
  const float *z = r.z(), *start = r.field(p.start);
  float *delta = r.first(), *out = static_cast<float*>(p.deltas.data) + r.item * p.deltas.stride;
  for (int i = threadIdx.x; i < p.width - kShared; i += kThreads) out[i] = delta[i] = z[i] - start[i];
  __syncthreads();
  const double sumsq = squares(r, [&](int, int i) { return delta[i]; });
  if (threadIdx.x == 0) p.squares[r.item] = sumsq;
}

template <class Rule>
__device__ __forceinline__ void train(Row& r) {
  const RowsArgs& p = r.p;
  const RowWork work = p.work[r.item];
  int64_t* failure = r.at<int64_t>(p.memory.failure);
  if (work.row < 0 || work.row >= p.param_rows) return;
  r.row = work.row;
  float *z = r.z(), *backup = r.field(p.params);
  for (int i = threadIdx.x; i < p.width - kShared; i += kThreads) z[i] = backup[i];
  if (threadIdx.x < kFailureWords) failure[threadIdx.x] = 0;
  __syncthreads();
  bool goes_on = work.samples > 0;
  for (int64_t k = 0; goes_on && k < work.steps; ++k) {
    if (threadIdx.x == 0) failure[2] = k;
    goes_on = step<Rule>(r, batch_range_of(work, p.batch, k));
  }
  for (int i = threadIdx.x; i < p.width - kShared; i += kThreads) backup[i] = z[i];
  if (threadIdx.x < kFailureWords) p.failures[kFailureWords * r.item + threadIdx.x] = failure[threadIdx.x];
  if (p.squares != nullptr) write_results(r);
}

template <class Rule>
__global__ void __launch_bounds__(kThreads, 2) rows_kernel(const RowsArgs __grid_constant__ p) {
  extern __shared__ __align__(16) unsigned char shared[];
  Row row{p, p.outside == nullptr ? shared : p.outside + blockIdx.x * p.memory.total, blockIdx.x, blockIdx.x, -1};
  if (p.out == nullptr) {
    train<Rule>(row);
  } else {
    stage(row, 0);
    pass(row, p.out + row.row * p.width);
  }
}

}  // namespace

void place_rows(RowsArgs& args, int64_t scratch, int64_t panel) {
  int64_t total = 0;
  const auto reserve = [&total](int64_t count, int64_t size) {
    const int64_t begin = total;
    total += (count * size + 15) / 16 * 16;
    return begin;
  };
  const bool trains = args.out == nullptr;
  const int64_t row = trains ? args.width : 0;
  RowsMemory& m = args.memory;
  int inputs = 0, instructions = 0;
  for (int i = 0; i < args.forms; ++i) {
    inputs = std::max(inputs, args.form[i].inputs), instructions = std::max(instructions, args.form[i].instructions);
  }
  m.input_addresses = reserve(inputs, sizeof(char*));
  m.instructions = reserve(instructions, sizeof(RowOp));
  m.z = reserve(trains ? row - kShared : 0, sizeof(float));
  m.first = reserve(row, sizeof(float));
  m.second = reserve(args.two_passes ? row : 0, sizeof(float));
  m.scratch = reserve(scratch, sizeof(float));
  m.x = reserve(int64_t{args.batch} * args.words, sizeof(float));
  m.y = reserve(args.batch, sizeof(int64_t));
  m.panel = reserve(panel, sizeof(float));
  m.lanes = reserve(kThreads, sizeof(float));
  m.partials = reserve(args.num_chunks, sizeof(double));
  m.rules = reserve(args.segments, std::max(sizeof(Rules<sgd::Rule<float>>), sizeof(Rules<adam::Rule<float>>)));
  m.failure = reserve(kFailureWords, sizeof(int64_t));
  m.total = total;
}

int64_t shared_cuda(int device) {
  int bytes = 0;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess ? bytes : 0;
}

int rows_cuda(const RowsArgs& args, RowsRule rule, void* stream) {
  const auto kernel = rule == RowsRule::sgd ? rows_kernel<sgd::Rule<float>> : rows_kernel<adam::Rule<float>>;
  const auto shared = static_cast<int>(args.outside == nullptr ? args.memory.total : 0);
  if (shared > 48 << 10) {
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  return launch(kernel, args.rows, stream, args, kThreads, shared);
}

}  // namespace fastsam
