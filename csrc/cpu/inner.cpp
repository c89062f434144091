// inner_ and accumulate_ on the CPU.
#include "loops.h"

#define FASTSAM_LOOPS "inner_loops.h"
#include "per_isa.h"

namespace fastsam {

void inner_range(const InnerArgs& args, double* partials, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(inner_range, args, partials, begin, end);
}

void accumulate_range(const FixedPointArgs& args, uint64_t* largest, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(accumulate_range, args, largest, begin, end);
}

}  // namespace fastsam
