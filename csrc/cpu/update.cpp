// update_sgd_ and update_adam_ on the CPU.
#include "loops.h"

#define FASTSAM_LOOPS "update_loops.h"
#include "per_isa.h"

namespace fastsam {

void update_sgd_range(const UpdateArgs& args, bool stream, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(update_sgd_range, args, stream, begin, end);
}

void update_adam_range(const UpdateArgs& args, bool stream, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(update_adam_range, args, stream, begin, end);
}

}  // namespace fastsam
