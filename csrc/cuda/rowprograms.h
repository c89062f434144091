// Row programs on CUDA, from plain pointers. ops_rows.cpp fills these structs, and rowprograms.cu runs them.
#pragma once

#include "../kernel_args.h"
#include "../rowprograms/program.h"

namespace fastsam {

constexpr int kMostInputs = 64, kMostSegments = 64;  // sizes of a launch's argument

// An input. bytes: from one row to the next. local: its offset in z, in floats, or -1 if it is not in z.
struct RowsInput {
  const char* data = nullptr;
  int64_t bytes = 0, local = -1;
};

struct RowsSegment {
  int offset, length, group;
};

// Offsets in bytes of the parts of a row's memory in its block; `total` is its size.
struct RowsMemory {
  int64_t input_addresses, instructions, z, first, second, scratch, x, y, panel, lanes, partials, rules, total;
};

// A call. Without `out` it trains for `steps` steps. With `out` it is one pass.
struct RowsArgs {
  const int64_t* words = nullptr;  // the instructions, on the device
  int instructions = 0, inputs = 0, weights = 0, segments = 0, num_chunks = 0, groups = 0;
  int64_t rows = 0, width = 0;
  float* out = nullptr;
  RowsMemory memory = {};
  unsigned char* outside = nullptr;  // [rows, memory.total], if a block's shared memory is too small
  RowsInput input[kMostInputs];
  RowsSegment segment[kMostSegments];
  // Training: x [n, features], y [n], wanted [rows, steps * batch], own_steps [rows] if rows have different numbers of
  // steps.
  const float* x = nullptr;
  const int64_t *y = nullptr, *sample_indices = nullptr, *steps_per_row = nullptr;
  int64_t samples = 0, indices_stride = 0;
  int features = 0, batch = 0, steps = 0;
  bool two_passes = false, keeps_first = false, adaptive = false;
  Field params, w, momentum, q, shift;
  const double* hparams = nullptr;
  double *sumsq = nullptr, *sumsq_v = nullptr, *losses = nullptr;
};

// Fills `memory`. panel: floats that the program's products need to turn a matrix.
void place_rows(RowsArgs& args, int64_t scratch, int64_t panel);

// Bytes of shared memory that a block may have on the current device.
int64_t shared_cuda(int device);

int rows_cuda(const RowsArgs& args, void* stream);

}  // namespace fastsam
