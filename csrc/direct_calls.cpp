// direct_call_args.h on the CPU. Each function returns 0, or a different value if it failed.
#include "cpu/parallel.h"
#include "direct_call_args.h"

// Computes norm_ of all gradients into sumsq, then perturb_ with it.
FASTSAM_EXPORT int fastsam_norm_perturb(const int64_t* words, const int64_t* grads, double* sumsq, int adaptive,
                                        int save) {
  using namespace fastsam;
  return guarded([&] {
    const PerturbArgs args = perturb_of(words, grads, sumsq, save != 0);
    run_norm(norm_of(words, args, sumsq, adaptive != 0));
    run_perturb(args);
    return 0;
  });
}

// Returns the rule of a name for fastsam_update, or nullptr if there is no such rule.
FASTSAM_EXPORT const void* fastsam_rule(const char* name) { return fastsam::find_rule(name); }

FASTSAM_EXPORT int fastsam_update(const int64_t* words, const int64_t* grads, const void* rule, void* const* state,
                                  int init_state, int write_master) {
  using namespace fastsam;
  return guarded([&] {
    run_update(update_of(words, grads, rule, state, init_state != 0, write_master != 0));
    return 0;
  });
}
