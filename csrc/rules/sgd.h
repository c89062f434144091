// SGD with momentum; the equation is in kernels/rules/sgd.py.
#pragma once

#include "../kernel_math.h"

namespace fastsam::sgd {

enum : int { MOMENTUM = kFirstRuleHParam, DAMPENING, NESTEROV };

template <class C>
struct Rule {
  static constexpr int kState = 1;        // the momentum,
  static constexpr unsigned kNeeded = 0;  // which may be missing
  static constexpr bool kCounts = false;
  static constexpr int kPowers = 0;
  C lr, mu, undamped;
  bool nesterov, init_state;

  FASTSAM_HD Rule(const double* h, const double*, double, bool init)
      : lr(static_cast<C>(h[LR])),
        mu(static_cast<C>(h[MOMENTUM])),
        undamped(static_cast<C>(1.0 - h[DAMPENING])),
        nesterov(h[NESTEROV] != 0.0),
        init_state(init) {}

  FASTSAM_HD C step(C w, C d, C* state, unsigned state_mask) const {
    if (!has(state_mask, 0)) return w - lr * d;
    C& m = state[0];
    m = init_state ? d : mu * m + undamped * d;
    return w - lr * (nesterov ? d + mu * m : m);
  }
};

}  // namespace fastsam::sgd
