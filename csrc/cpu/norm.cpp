// norm_ and update_norm_ on the CPU.
#include "loops.h"

#define FASTSAM_LOOPS "norm_loops.h"
#include "per_isa.h"

namespace fastsam {

void norm_range(const NormArgs& args, double* partials, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(norm_range, args, partials, begin, end);
}

void update_norm_range(const UpdateArgs& args, double* partials, int64_t begin, int64_t end) {
  FASTSAM_DISPATCH(update_norm_range, args, partials, begin, end);
}

InstructionSet instruction_set() {
  static const InstructionSet best = [] {
#ifdef FASTSAM_ISAS
    const char* asked = std::getenv("FASTSAM_ISA");
    const auto limit = [&](const char* name) { return asked != nullptr && std::strcmp(asked, name) == 0; };
    if (limit("baseline")) return InstructionSet::baseline;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && !limit("avx2")) return InstructionSet::avx512;
    if (avx2) return InstructionSet::avx2;
#endif
    return InstructionSet::baseline;
  }();
  return best;
}

}  // namespace fastsam
