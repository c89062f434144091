// RMSprop, centered or not; the equation is in kernels/rules/rmsprop.py.
#pragma once

#include "../kernel_math.h"

namespace fastsam::rmsprop {

enum : int { ALPHA = kFirstRuleHParam, EPS, MOMENTUM };

template <class C>
struct Rule {
  static constexpr int kState = 3;            // the mean of squares, the momentum, the mean;
  static constexpr unsigned kNeeded = 0b001;  // the last two may be missing
  static constexpr bool kCounts = true;
  static constexpr int kPowers = 0;
  C lr, alpha, one_minus_alpha, eps, mu;

  FASTSAM_HD Rule(const double* h, const double*, double, bool)
      : lr(static_cast<C>(h[LR])),
        alpha(static_cast<C>(h[ALPHA])),
        one_minus_alpha(static_cast<C>(1.0 - h[ALPHA])),
        eps(static_cast<C>(h[EPS])),
        mu(static_cast<C>(h[MOMENTUM])) {}

  FASTSAM_HD C step(C w, C g, C* state, unsigned state_mask) const {
    C &v = state[0], &m = state[1], &mean = state[2];
    v = alpha * v + one_minus_alpha * g * g;
    C variance = v;
    if (has(state_mask, 2)) {
      mean = alpha * mean + one_minus_alpha * g;
      variance = v - mean * mean;
      variance = variance < C(0) ? C(0) : variance;  // by rounding
    }
    const C d = g / (sqrt(variance) + eps);
    if (!has(state_mask, 1)) return w - lr * d;
    m = mu * m + d;
    return w - lr * m;
  }
};

}  // namespace fastsam::rmsprop
