// product on the CPU.
#include <utility>
#include <vector>

#include "loops.h"

#define FASTSAM_LOOPS "product_loops.h"
#include "per_isa.h"

namespace fastsam {

void product_rows(const ProductArgs& args) { FASTSAM_DISPATCH(product_rows, args); }

}  // namespace fastsam
