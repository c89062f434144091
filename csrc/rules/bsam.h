// bSAM: the equation stands in kernels/rules/bsam.py.
#pragma once

#include "../math.h"

namespace fastsam::bsam {

enum : int { BETA1 = kOwn, BETA2, FLOOR };

template <class C>
struct Rule {
  static constexpr int kState = 3;  // the momentum, the scale, and the first gradient, which is only read
  static constexpr unsigned kNeeded = 0b111;
  static constexpr bool kCounts = false;
  C lr, b1, rest1, b2, rest2, floor;

  FASTSAM_HD Rule(const double* h, double, bool)
      : lr(static_cast<C>(h[LR])),
        b1(static_cast<C>(h[BETA1])),
        rest1(static_cast<C>(1.0 - h[BETA1])),
        b2(static_cast<C>(h[BETA2])),
        rest2(static_cast<C>(1.0 - h[BETA2])),
        floor(static_cast<C>(h[FLOOR])) {}

  FASTSAM_HD C step(C w, C g, C* state, unsigned) const {
    C &m = state[0], &s = state[1];
    m = b1 * m + rest1 * g;
    s = b2 * s + rest2 * (sqrt(s) * absolute(state[2]) + floor);
    return w - lr * (m / s);
  }
};

}  // namespace fastsam::bsam
