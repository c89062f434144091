// Helpers of the ops of row programs: programs by their number, checked inputs, rows over threads.
#pragma once

#include "../cpu/parallel.h"
#include "../tensor_args.h"
#include "program.h"

namespace fastsam {

// Returns the program with this number. Raises if there is no such program.
const RowProgram& program_of(int64_t number);

// Reads a program from the words scratch, width, work, inputs; for each input labels, one, dimensions, sizes, strides;
// then the instructions. Raises for a program that accesses memory outside of its inputs, its scratch memory or its
// result.
RowProgram read_program(const int64_t* words, int64_t count);

inline RowInput input_of(const Tensor& tensor, const Expected& expected, int64_t rows, size_t index) {
  const int64_t lead = expected.one ? 0 : 1, dims = expected.size.size();
  bool fits = tensor.dim() == dims + lead && (expected.one || tensor.size(0) == rows) &&
              tensor.scalar_type() == (expected.labels ? ScalarType::Long : ScalarType::Float);
  for (int64_t d = 0; fits && d < dims; ++d) {
    fits = tensor.size(d + lead) == expected.size[d] &&
           (expected.size[d] == 1 || tensor.stride(d + lead) == expected.stride[d]);
  }
  STD_TORCH_CHECK(fits, "input ", index, " of the row program has another shape, order of memory or dtype");
  return RowInput{tensor.data_ptr(), expected.one || rows == 1 ? 0 : tensor.stride(0)};
}

// Calls range(begin, end) over rows that need `work` multiplications each.
template <class F>
inline void over_rows(int64_t rows, int64_t work, const F& range) {
  constexpr int64_t enough = int64_t{1} << 17;  // multiplications that justify a thread
  if (rows * work < 2 * enough) {
    range(0, rows);
  } else {
    torch::stable::parallel_for(0, rows, std::max<int64_t>(1, enough / std::max<int64_t>(1, work)), range);
  }
}

}  // namespace fastsam
