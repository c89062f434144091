// Adam and AdamW; the equation is in kernels/rules/adam.py.
#pragma once

#include "../kernel_math.h"

namespace fastsam::adam {

enum : int { BETA1 = kFirstRuleHParam, BETA2, EPS, V_WEIGHT };

template <class C>
struct Rule {
  static constexpr int kState = 2;  // both moments
  static constexpr unsigned kNeeded = 0b11;
  static constexpr bool kCounts = true;
  static constexpr int kPowers = 2;  // powers of both betas
  C b1, rest1, b2, rest2, step_size, root_correction2, eps;

  FASTSAM_HD Rule(const double* h, const double* powers, double, bool)
      : b1(static_cast<C>(h[BETA1])),
        rest1(static_cast<C>(1.0 - h[BETA1])),
        b2(static_cast<C>(h[BETA2])),
        rest2(static_cast<C>(1.0 - h[BETA2])),
        step_size(static_cast<C>(h[LR] / (1.0 - powers[0]))),
        root_correction2(static_cast<C>(sqrt(1.0 - (1.0 - h[V_WEIGHT]) * powers[1]))),
        eps(static_cast<C>(h[EPS])) {}

  FASTSAM_HD C step(C w, C g, C* state, unsigned) const {
    C &m = state[0], &v = state[1];
    m = b1 * m + rest1 * g;
    v = b2 * v + rest2 * g * g;
    return w - step_size * m / (sqrt(v) / root_correction2 + eps);
  }
};

}  // namespace fastsam::adam
