// perturb_ and restore_ on the CPU.
#include "../stochastic.h"
#include "loops.h"

#define FASTSAM_LOOPS "perturb_loops.h"
#include "per_isa.h"

namespace fastsam {

void perturb_range(const PerturbArgs& args, bool nontemporal, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(perturb_range, args, nontemporal, begin, end);
}

void restore_range(const RestoreArgs& args, bool nontemporal, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(restore_range, args, nontemporal, begin, end);
}

}  // namespace fastsam
