// Row programs on CUDA, from plain pointers. ops_rows.cpp fills these structs, and rowprograms.cu runs them.
#pragma once

#include "../kernel_args.h"
#include "../rowprograms/program.h"

namespace fastsam {

constexpr int kMostInputs = 64, kMostSegments = 64, kMostForms = 256;  // sizes of a launch's argument

// An input. bytes: from one row to the next. local: its offset in z, in floats, or -1 if it is not in z.
struct RowsInput {
  const char* data = nullptr;
  int64_t bytes = 0, local = -1;
};

struct RowsSegment {
  int offset, length, group, slot;
};

// A program for batches of `batch` samples. constant: its first constant among the inputs of a launch.
struct RowsForm {
  const int64_t* words = nullptr;  // the instructions, on the device
  int instructions = 0, inputs = 0, batch = 0, constant = 0;
};

// Offsets in bytes of the parts of a row's memory in its block; `total` is its size.
struct RowsMemory {
  int64_t input_addresses, instructions, z, first, second, scratch, x, y, panel, lanes, partials, rules, failure, total;
};

// A call. Without `out` it trains the rows of `work`. With `out` it is one pass of the first form.
struct RowsArgs {
  int forms = 0, weights = 0, segments = 0, num_chunks = 0, groups = 0;
  int64_t rows = 0, width = 0;  // rows: of a pass, or of work
  float* out = nullptr;
  RowsMemory memory = {};
  unsigned char* outside = nullptr;  // [rows, memory.total], if a block's shared memory is too small
  RowsForm form[kMostForms];
  RowsInput input[kMostInputs];  // weights, x, y and the constants of all forms
  RowsSegment segment[kMostSegments];
  // Training: x [n, words of 4 bytes], y [n].
  const int* x = nullptr;
  const int64_t *y = nullptr, *sample_indices = nullptr;
  const RowWork* work = nullptr;
  int64_t samples = 0, num_indices = 0, param_rows = 0;
  int words = 0, batch = 0;
  bool two_passes = false, adaptive = false, keeps_first = false;
  Field params, w, q, shift, start, deltas;
  Field state[kMostState];
  float* counts = nullptr;
  int64_t slots = 0;
  const double* hparams = nullptr;
  double *sumsq = nullptr, *sumsq_v = nullptr, *losses = nullptr, *squares = nullptr;
  int64_t* failures = nullptr;
};

// Fills `memory`. panel: floats that the programs' products need to turn a matrix.
void place_rows(RowsArgs& args, int64_t scratch, int64_t panel);

// The rules with which rows train.
enum class RowsRule { sgd, adam };

// Bytes of shared memory that a block may have on the current device.
int64_t shared_cuda(int device);

int rows_cuda(const RowsArgs& args, RowsRule rule, void* stream);

}  // namespace fastsam
