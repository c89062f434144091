// Row programs on the CPU.
#include <cmath>
#include <utility>
#include <vector>

#include "../cpu/loops.h"
#include "program.h"

#define FASTSAM_LOOPS "../rowprograms/loops.h"
#include "../cpu/per_isa.h"

namespace fastsam {
namespace {

// While this object exists, numbers below 2^-126 are zero. Probabilities of a trained classifier become that small, and
// arithmetic with them took a quarter of its epochs' time.
class WithoutDenormals {
 public:
#ifdef __SSE__
  WithoutDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlush | kInputs); }
  ~WithoutDenormals() { _mm_setcsr(before_); }
  WithoutDenormals(const WithoutDenormals&) = delete;
  WithoutDenormals& operator=(const WithoutDenormals&) = delete;

 private:
  static constexpr unsigned kFlush = 0x8000, kInputs = 0x0040;  // flags for results and operands
  unsigned before_;
#endif
};

}  // namespace

Failure run_rows(const RowProgramArgs& args, int64_t begin, int64_t end, int64_t* wrong) {
  const WithoutDenormals guard;
  FASTSAM_DISPATCH(run_rows, args, begin, end, wrong);
}

}  // namespace fastsam
