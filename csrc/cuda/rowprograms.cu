// Row programs on CUDA: a block for a client, a whole local epoch in one launch. The data of a row (weights, gradients,
// activations, the batch) is in shared memory if it fits, else in private memory of the block.
#include "../rules/sgd.h"
#include "row_ops.cuh"

namespace fastsam {
namespace {

constexpr int kSquares = 64;  // partial sums of squares of a chunk, as csrc/cpu/norm_loops.h
constexpr int kTeams = kThreads / kSquares;

// The rules of a step for a segment's elements.
struct Rules {
  PerturbFunctor<float> perturb;
  CombinedGradient<float> combined;
  sgd::Rule<float> sgd;
};

// A block's row, and the addresses in its memory.
struct Row {
  const RowsArgs& p;
  unsigned char* memory;
  int64_t row;

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

// Copies the instructions and the addresses of the inputs to the block's memory.
__device__ __forceinline__ void stage(const Row& r) {
  int* ops = r.at<int>(r.p.memory.instructions);
  for (int i = threadIdx.x; i < r.p.instructions * kOpWords; i += kThreads) {
    const int64_t word = r.p.words[i];
    const bool number = i % kOpWords == kOpWords - 1;
    ops[i] = number ? bit_cast<int>(static_cast<float>(bit_cast<double>(word))) : static_cast<int>(word);
  }
  for (int i = threadIdx.x; i < r.p.inputs; i += kThreads) {
    const RowsInput& input = r.p.input[i];
    const char* address = input.data + r.row * input.bytes;
    if (input.local >= 0) address = reinterpret_cast<const char*>(r.z() + input.local);
    if (r.p.out == nullptr && i == r.p.weights) address = r.at<const char>(r.p.memory.x);
    if (r.p.out == nullptr && i == r.p.weights + 1) address = r.at<const char>(r.p.memory.y);
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
  for (int i = 0; i < r.p.instructions; ++i) {
    const RowOp& op = ops[i];
    const Code code = static_cast<Code>(op.code);
    RowPlaces at{const_cast<float*>(floats(op.out)), nullptr, nullptr, floats(op.c), nullptr};
    if (code == Code::is_not) {
      at.labels = reinterpret_cast<const int64_t*>(address(op.a, sizeof(int64_t)));
    } else {
      at.a = floats(op.a);
    }
    if (code == Code::nll || code == Code::nll_backward) {
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
    } else {
      elements(op, at);
    }
    __syncthreads();
  }
}

// Copies a batch into the block's memory. An index that is not a sample cannot raise here; its sample is NaN.
__device__ __forceinline__ void gather(const Row& r, int step) {
  const RowsArgs& p = r.p;
  float* x = r.at<float>(p.memory.x);
  int64_t* y = r.at<int64_t>(p.memory.y);
  const int64_t* samples_of_step = p.sample_indices + r.row * p.indices_stride + static_cast<int64_t>(step) * p.batch;
  for (int i = threadIdx.x; i < p.batch * p.features; i += kThreads) {
    const int64_t sample = samples_of_step[i / p.features];
    const bool is_sample = sample >= 0 && sample < p.samples;
    x[i] = is_sample ? p.x[sample * p.features + i % p.features] : nanf("");
  }
  for (int i = threadIdx.x; i < p.batch; i += kThreads) {
    y[i] = samples_of_step[i] >= 0 && samples_of_step[i] < p.samples ? p.y[samples_of_step[i]] : kIgnored;
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

__device__ __forceinline__ void perturb(const Row& r) {
  const float *w = r.field(r.p.w), *g = r.first();
  const double sumsq = squares(r, [&](int segment, int i) {
    const NormFunctor<float> rule(r.scalars(segment));
    return rule.adaptive && r.p.adaptive ? rule.direction(w[i], g[i]) : g[i];
  });
  if (threadIdx.x == 0) r.p.sumsq[r.row] = sumsq;
  Rules* rules = r.at<Rules>(r.p.memory.rules);
  for (int s = threadIdx.x; s < r.p.segments; s += kThreads) {
    rules[s].perturb = PerturbFunctor<float>(r.scalars(s), sumsq);
  }
  __syncthreads();
  float* z = r.z();
  each_element(r, [&](int s, int i) { z[i] = rules[s].perturb.perturbed(w[i], g[i]); });
  __syncthreads();
}

__device__ __forceinline__ void update(const Row& r) {
  const RowsArgs& p = r.p;
  float *z = r.z(), *w = r.field(p.w), *momentum = r.field(p.momentum);
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
  Rules* rules = r.at<Rules>(p.memory.rules);
  for (int s = threadIdx.x; s < p.segments; s += kThreads) {
    rules[s].combined = CombinedGradient<float>(r.scalars(s), 1.0, sumsq);
    rules[s].sgd = sgd::Rule<float>(r.scalars(s), 0.0, false);
  }
  __syncthreads();
  each_element(r, [&](int s, int i) {
    const CombinedGradient<float>& combined = rules[s].combined;
    const float old = w != nullptr ? w[i] : z[i];
    const float d = combined.gradient(old, g2[i], g1 != nullptr ? g1[i] : 0.0f, q != nullptr ? q[i] : 0.0f,
                                      shift != nullptr ? shift[i] : 0.0f);
    float state = momentum != nullptr ? momentum[i] : 0.0f;
    z[i] = rules[s].sgd.step(combined.weight(old), d, &state, momentum != nullptr ? 1u : 0u);
    if (momentum != nullptr) momentum[i] = state;
    if (w != nullptr) w[i] = z[i];
  });
  __syncthreads();
}

__device__ __forceinline__ void train(const Row& r) {
  const RowsArgs& p = r.p;
  const int stride = static_cast<int>(p.width) - kShared;
  float *z = r.z(), *backup = r.field(p.params);
  for (int i = threadIdx.x; i < stride; i += kThreads) z[i] = backup[i];
  const int64_t thread_in_team = p.steps_per_row == nullptr ? p.steps : p.steps_per_row[r.row];
  const int steps = thread_in_team < p.steps ? static_cast<int>(thread_in_team) : p.steps;
  for (int step = 0; step < steps; ++step) {
    gather(r, step);
    pass(r, r.first());
    if (threadIdx.x == 0) p.losses[r.row] += static_cast<double>(r.first()[stride]) * p.batch;
    if (p.two_passes) {
      perturb(r);
      pass(r, r.second());
    }
    update(r);
  }
  for (int i = threadIdx.x; i < stride; i += kThreads) backup[i] = z[i];
}

__global__ void __launch_bounds__(kThreads, 2) rows_kernel(const RowsArgs __grid_constant__ p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Row row{p, p.outside == nullptr ? shared : p.outside + blockIdx.x * p.memory.total, blockIdx.x};
  stage(row);
  if (p.out == nullptr) {
    train(row);
  } else {
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
  m.input_addresses = reserve(args.inputs, sizeof(char*));
  m.instructions = reserve(args.instructions, sizeof(RowOp));
  m.z = reserve(trains ? row - kShared : 0, sizeof(float));
  m.first = reserve(row, sizeof(float));
  m.second = reserve(args.two_passes ? row : 0, sizeof(float));
  m.scratch = reserve(scratch, sizeof(float));
  m.x = reserve(int64_t{args.batch} * args.features, sizeof(float));
  m.y = reserve(args.batch, sizeof(int64_t));
  m.panel = reserve(panel, sizeof(float));
  m.lanes = reserve(kThreads, sizeof(float));
  m.partials = reserve(args.num_chunks, sizeof(double));
  m.rules = reserve(args.segments, sizeof(Rules));
  m.total = total;
}

int64_t shared_cuda(int device) {
  int bytes = 0;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess ? bytes : 0;
}

int rows_cuda(const RowsArgs& args, void* stream) {
  const auto shared = static_cast<int>(args.outside == nullptr ? args.memory.total : 0);
  if (shared > 48 << 10) {
    const auto error = cudaFuncSetAttribute(rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  return launch(rows_kernel, args.rows, stream, args, kThreads, shared);
}

}  // namespace fastsam
