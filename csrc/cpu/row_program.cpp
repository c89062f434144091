// Row programs on the CPU.
#include "../row_program.h"

#include <cmath>
#include <utility>
#include <vector>

#include "loops.h"

#define FASTSAM_LOOPS "row_program_loops.h"
#include "per_isa.h"

namespace fastsam {

bool run_rows(const RowProgramArgs& args, int64_t begin, int64_t end, int64_t* wrong_label) {
  FASTSAM_DISPATCH(run_rows, args, begin, end, wrong_label);
}

}  // namespace fastsam
