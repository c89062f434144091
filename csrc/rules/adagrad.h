// Adagrad; the equation is in kernels/rules/adagrad.py.
#pragma once

#include "../kernel_math.h"

namespace fastsam::adagrad {

enum : int { LR_DECAY = kFirstRuleHParam, EPS };

template <class C>
struct Rule {
  static constexpr int kState = 1;  // the sum of squares
  static constexpr unsigned kNeeded = 0b1;
  static constexpr bool kCounts = true;
  static constexpr int kPowers = 0;
  C lr, eps;

  FASTSAM_HD Rule(const double* h, const double*, double t, bool)
      : lr(static_cast<C>(h[LR] / (1.0 + (t - 1.0) * h[LR_DECAY]))), eps(static_cast<C>(h[EPS])) {}

  FASTSAM_HD C step(C w, C g, C* state, unsigned) const {
    C& sum = state[0];
    sum = sum + g * g;
    return w - lr * (g / (sqrt(sum) + eps));
  }
};

}  // namespace fastsam::adagrad
