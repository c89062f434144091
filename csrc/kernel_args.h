// The interface of the kernels in plain C++: raw pointers, sizes and a stream, no torch. ops.cpp and cuda/ops_cuda.cpp
// fill these structs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "chunks.h"
#include "kernel_math.h"

namespace fastsam {

enum class Type : int { f32, f64, f16, bf16 };

inline size_t size_of(Type type) { return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2; }

// A list operand: the address of segment i in row 0, and the elements from one row to the next.
struct List {
  std::vector<void*> start;
  std::vector<int64_t> row_stride;
  bool defined() const { return !start.empty(); }
};

// A field [rows, stride], addressed at the segments' offsets. nullptr: not given.
struct Field {
  void* data = nullptr;
  int64_t stride = 0;
};

// The arguments that all ops have; `problem_of` makes them.
struct Problem {
  int64_t rows = 0, segments = 0, groups = 0;
  const Segment* table = nullptr;   // host memory
  const double* hparams = nullptr;  // [rows, groups, kNumHParams], on the device of the tensors
  std::vector<int64_t> prefix;      // prefix[i]: chunks of a row before segment i; prefix[segments]: all of them
  int64_t end = 0, slots = 0;       // the end of the table's last segment, and its largest slot plus one
  int device = -1;                  // the index of a GPU, -1: the CPU
  Type weight = Type::f32;          // type of params, the gradients and g1
  Type backup_type = Type::f32;     // type of backup: `weight`, or the compute type (a master copy)
  int64_t chunks() const { return prefix.back(); }
  int64_t elements() const {
    int64_t n = 0;
    for (int64_t i = 0; i < segments; ++i) n += table[i].length;
    return n * rows;
  }
};

// Returns the call of `rows` rows with these checked segments, without its types. groups, hparams: 0 and nullptr for an
// op without hyper-parameters.
inline Problem problem_of(const Segment* table, int64_t segments, int64_t rows, int64_t groups, const double* hparams,
                          int device) {
  Problem problem;
  problem.rows = rows, problem.segments = segments, problem.groups = groups;
  problem.table = table, problem.hparams = hparams, problem.device = device;
  problem.prefix.assign(segments + 1, 0);
  for (int64_t i = 0; i < segments; ++i) {
    problem.prefix[i + 1] = problem.prefix[i] + chunks_of(table[i].length);
    problem.slots = std::max(problem.slots, table[i].slot + 1);
    if (table[i].length > 0) problem.end = std::max(problem.end, table[i].offset + table[i].length);
  }
  return problem;
}

// Calls f(W{}, O{}) for the types of the weights and of backup.
template <class F>
inline __attribute__((always_inline)) decltype(auto) dispatch_types(const Problem& problem, F&& f) {
  const bool master = problem.backup_type != problem.weight;
  switch (problem.weight) {
    case Type::f64:
      return f(double{}, double{});
    case Type::f16:
      return master ? f(f16{}, float{}) : f(f16{}, f16{});
    case Type::bf16:
      return master ? f(bf16{}, float{}) : f(bf16{}, bf16{});
    default:
      return f(float{}, float{});
  }
}

struct NormArgs {
  Problem problem;
  List grads, weights;  // weights: only if a group is adaptive
  double* sumsq = nullptr;
  bool accumulate = false;
};

struct PerturbArgs {
  Problem problem;
  List params, grads;
  Field backup;
  const double* sumsq = nullptr;
  const int64_t* seed = nullptr;  // [rows]: half-precision weights are rounded stochastically
  bool save = true;
};

struct RestoreArgs {
  Problem problem;
  List params;
  Field backup;
};

// dual_norm_ and dual_perturb_.
struct DualArgs {
  Problem problem;
  List params, grads;
  Field backup;
  Field mu, s, eps;         // in the compute type
  double* sumsq = nullptr;  // dual_norm_: written; dual_perturb_: read
  bool accumulate = false;
};

struct InnerArgs {
  Problem problem;
  List x, y;
  double* out = nullptr;  // [rows, 2]
  bool accumulate = false;
};

struct FixedPointArgs {
  int64_t n = 0, rows = 0, row_stride = 0;  // elements of a row, rows of x, elements from one to the next
  Type type = Type::f32;
  const void *x = nullptr, *base = nullptr;
  uint64_t* high = nullptr;
  int64_t* low = nullptr;
  double* largest = nullptr;  // [rows]
  double scale = 0.0;         // factor * 2^28
};

// float32 [rows, ., .] with any strides; nullptr: not given.
struct Matrix {
  const float* data = nullptr;
  int64_t row_stride = 0, column_stride = 0, matrix_stride = 0;  // in elements
  Matrix of(int64_t i) const { return {data + i * matrix_stride, row_stride, column_stride, matrix_stride}; }
  Matrix from(int64_t i, int64_t j) const {
    return {data + i * row_stride + j * column_stride, row_stride, column_stride, matrix_stride};
  }
};

// out[row] = bias[row] + a[row] * b[row]: [m, k] times [k, n], out contiguous.
struct ProductArgs {
  int64_t rows = 0, m = 0, k = 0, n = 0;
  Matrix a, b, bias;
  float* out = nullptr;
};

struct UpdateRule;

// The operands of the local update rule, of update_norm_ and update_.
struct UpdateArgs {
  Problem problem;
  List params, grads, g1;
  Field backup, q, shift;
  const UpdateRule* rule = nullptr;     // update_
  std::array<Field, kMostState> state;  // state of the rule, in the compute type
  float* steps = nullptr;               // [rows, slots], if the rule counts steps
  int64_t slots = 0;
  double* sumsq = nullptr;  // update_norm_: written; update_: read, nullptr without clipping
  bool accumulate = false;  // update_norm_
  const float* grad_scale = nullptr;
  const float* found_inf = nullptr;
  bool init_state = false, write_master = false;

  // A bit per field of the state that is given.
  unsigned state_mask() const {
    unsigned mask = 0;
    for (int i = 0; i < kMostState; ++i) mask |= state[i].data != nullptr ? 1u << i : 0u;
    return mask;
  }
};

// The CPU kernels. Each computes the chunks [begin, end) of rows * chunks(). Ranges may run in any order and at the
// same time. `stream`: results that were not read before are written past the caches.
void norm_range(const NormArgs&, double* partials, int64_t begin, int64_t end);
void perturb_range(const PerturbArgs&, bool nontemporal, int64_t begin, int64_t end);
void restore_range(const RestoreArgs&, bool nontemporal, int64_t begin, int64_t end);
void dual_norm_range(const DualArgs&, double* partials, int64_t begin, int64_t end);
void dual_perturb_range(const DualArgs&, bool nontemporal, int64_t begin, int64_t end);
void inner_range(const InnerArgs&, double* partials, int64_t begin, int64_t end);  // two partial sums per chunk
// Adds up the elements [begin, end) of all rows; largest: [rows], the bits of their largest |x - base|.
void accumulate_range(const FixedPointArgs&, uint64_t* largest, int64_t begin, int64_t end);
void product_rows(const ProductArgs&);
void update_norm_range(const UpdateArgs&, double* partials, int64_t begin, int64_t end);

// The CUDA kernels. Each function launches on `stream` (a cudaStream_t) and returns a cudaError_t. No function
// synchronizes the device.
//
// partials: memory for doubles, of any content; `..._partials_cuda` returns their number.
// tickets: one per row, zero before the call and zero again after it. Calls that share tickets must not run at the same
// time.
int64_t norm_partials_cuda(const Problem&);
int64_t update_norm_partials_cuda(const Problem&);
int64_t dual_norm_partials_cuda(const Problem&);
int64_t inner_partials_cuda(const Problem&);
int64_t accumulate_partials_cuda(const FixedPointArgs&);  // none without `largest`
int norm_cuda(const NormArgs&, double* partials, unsigned* tickets, void* stream);
int perturb_cuda(const PerturbArgs&, void* stream);             // rounds to nearest, even with a seed
int perturb_stochastic_cuda(const PerturbArgs&, void* stream);  // with a seed
int restore_cuda(const RestoreArgs&, void* stream);
int dual_norm_cuda(const DualArgs&, double* partials, unsigned* tickets, void* stream);
int dual_perturb_cuda(const DualArgs&, void* stream);
int inner_cuda(const InnerArgs&, double* partials, unsigned* tickets, void* stream);
int accumulate_cuda(const FixedPointArgs&, double* partials, unsigned* tickets, void* stream);  // one ticket
int update_norm_cuda(const UpdateArgs&, double* partials, unsigned* tickets, void* stream);

// Returns ticket memory on the current device: `count` zeros that stay allocated until the process ends.
int tickets_cuda(unsigned** memory, int64_t* count);

}  // namespace fastsam
