// update_ on the CPU with the rule FASTSAM_RULE, for which this file is compiled (../rules.h).
#include "../rules.h"
#include "loops.h"
#include FASTSAM_RULE_FILE

#define FASTSAM_LOOPS "update_loops.h"
#include "per_isa.h"

namespace fastsam {
namespace {

void range(const UpdateArgs& args, bool nontemporal, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(update_range<FASTSAM_RULE::Rule>, args, nontemporal, begin, end);
}

[[maybe_unused]] const bool entered = [] {
  register_rule<FASTSAM_RULE::Rule<float>>(FASTSAM_TEXT(FASTSAM_RULE)).range = range;
  return true;
}();

}  // namespace
}  // namespace fastsam
