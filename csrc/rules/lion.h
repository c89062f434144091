// Lion; the equation is in kernels/rules/lion.py.
#pragma once

#include "../kernel_math.h"

namespace fastsam::lion {

enum : int { BETA1 = kFirstRuleHParam, BETA2 };

template <class C>
struct Rule {
  static constexpr int kState = 1;  // the momentum
  static constexpr unsigned kNeeded = 0b1;
  static constexpr bool kCounts = false;
  static constexpr int kPowers = 0;
  C lr, b1, rest1, b2, rest2;

  FASTSAM_HD Rule(const double* h, const double*, double, bool)
      : lr(static_cast<C>(h[LR])),
        b1(static_cast<C>(h[BETA1])),
        rest1(static_cast<C>(1.0 - h[BETA1])),
        b2(static_cast<C>(h[BETA2])),
        rest2(static_cast<C>(1.0 - h[BETA2])) {}

  FASTSAM_HD C step(C w, C g, C* state, unsigned) const {
    C& m = state[0];
    const C c = b1 * m + rest1 * g;
    m = b2 * m + rest2 * g;
    return w - lr * (c > C(0) ? C(1) : c < C(0) ? C(-1) : c);  // a NaN stays one
  }
};

}  // namespace fastsam::lion
