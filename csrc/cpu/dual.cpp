// dual_norm_ and dual_perturb_ on the CPU.
#include "loops.h"

#define FASTSAM_LOOPS "dual_loops.h"
#include "per_isa.h"

namespace fastsam {

void dual_norm_range(const DualArgs& args, double* partials, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(dual_norm_range, args, partials, begin, end);
}

void dual_perturb_range(const DualArgs& args, bool nontemporal, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(dual_perturb_range, args, nontemporal, begin, end);
}

}  // namespace fastsam
