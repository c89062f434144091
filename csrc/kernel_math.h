// The kernels' arithmetic, element by element, shared by the C++ and the CUDA kernels. kernels/reference.py has the
// equations and their sources; the names here are the same.
#pragma once

#include <cmath>

#include "types.h"

namespace fastsam {

// The columns of `hparams`, as in kernels/hparams.py. Columns from kFirstRuleHParam on belong to the update rule
// (rules/*.h).
enum HParam : int {
  RHO = 0,
  PERTURB_EPS = 1,
  ADAPTIVE = 2,
  ETA = 3,
  LR = 4,
  DECAY = 5,
  PROX_MU = 6,
  G2_COEF = 7,
  G1_COEF = 8,
  CLIP = 9,
  CLIP_INCLUDES_PROX = 10,
  PENALTY = 11,
  DECOUPLED = 12,
};
constexpr int kFirstRuleHParam = 13;
constexpr int kNumHParams = 17;
constexpr double kClipEps = 1e-6;

template <class C>
FASTSAM_HD C absolute(C x) {
  return x < C(0) ? -x : x;
}

FASTSAM_HD bool finite(double x) { return x - x == 0.0; }

// ---- norm ----------------------------------------------------------------------------------------------------------

template <class C>
struct NormFunctor {
  C eta;
  bool adaptive;

  FASTSAM_HD explicit NormFunctor(const double* h) : eta(static_cast<C>(h[ETA])), adaptive(h[ADAPTIVE] != 0.0) {}

  // T*g with T = |w| + eta
  FASTSAM_HD C direction(C w, C g) const { return (absolute(w) + eta) * g; }
};

// ---- perturb -------------------------------------------------------------------------------------------------------

template <class C>
struct PerturbFunctor {
  C scale, eta;
  bool adaptive, moves;

  FASTSAM_HD PerturbFunctor(const double* h, double sumsq)
      : scale(static_cast<C>(h[RHO] / (sqrt(sumsq) + h[PERTURB_EPS]))),
        eta(static_cast<C>(h[ETA])),
        adaptive(h[ADAPTIVE] != 0.0),
        moves(finite(sumsq) && sumsq > 0.0) {}

  FASTSAM_HD C step(C w, C g) const {
    const C t = absolute(w) + eta;
    return scale * (adaptive ? t * t * g : g);
  }
  FASTSAM_HD C perturbed(C w, C g) const { return moves ? w + step(w, g) : w; }
};

// Returns the backup of the unperturbed weight `z`. A master copy stays if `z` is its rounding; else `z` was written.
template <class O, class W>
FASTSAM_HD O backup_of(O backup, W z) {
  if constexpr (std::is_same_v<W, O>) {
    return z;
  } else {
    return same(narrow<W>(backup), z) ? backup : static_cast<O>(widen(z));
  }
}

// ---- a perturbation with a dual ------------------------------------------------------------------------------------

template <class C>
struct DualFunctor {
  C scale, penalty, inverse;
  bool moves;

  FASTSAM_HD DualFunctor(const double* h, double sumsq)
      : scale(static_cast<C>(h[RHO] / (sqrt(sumsq) + h[PERTURB_EPS]))),
        penalty(static_cast<C>(h[PENALTY])),
        inverse(static_cast<C>(1.0 / h[PENALTY])),
        moves(finite(sumsq) && sumsq > 0.0) {}

  static FASTSAM_HD C direction(C penalty, C g, C mu, C s) { return penalty * (g - mu) - s; }
  FASTSAM_HD C direction(C g, C mu, C s) const { return direction(penalty, g, mu, s); }
  FASTSAM_HD C step(C d) const { return moves ? scale * d : C(0); }
  FASTSAM_HD C perturbed(C w, C e) const { return moves ? w + e : w; }  // keeps minus zero in rows that do not move
  FASTSAM_HD C dual(C mu, C e, C s) const { return mu + (e - s) * inverse; }
};

// ---- fixed point ---------------------------------------------------------------------------------------------------

constexpr double kHighUnit = 0x1.0p28, kLowUnit = 0x1.0p52;
constexpr int kLowBits = 52;
constexpr double kLargestValue = 0x1.0p62;  // in units of 2^-28

// Adds `value`, in units of 2^-28: its whole part to the high limb, and the rest, in units of 2^-80, to the low limb.
// Both are rounded towards zero, so that -value subtracts the added number. High limbs wrap. An overflow is undone by
// carries or by later subtractions.
FASTSAM_HD void add_fixed_point(double value, uint64_t& high, int64_t& low) {
  const double bounded = fabs(value) <= kLargestValue ? value : 0.0;  // 0 for NaN
  const int64_t integer = static_cast<int64_t>(bounded);
  high += static_cast<uint64_t>(integer);
  low += static_cast<int64_t>((bounded - static_cast<double>(integer)) * kLowUnit);
}

// Moves the overflow of the low limb to the high limb.
FASTSAM_HD void carry_fixed_point(uint64_t& high, int64_t& low) {
  high += static_cast<uint64_t>(low >> kLowBits);
  low &= (int64_t{1} << kLowBits) - 1;
}

// Returns the bits of |x|. They have the order of the numbers, and numbers that are not finite come last.
FASTSAM_HD uint32_t magnitude_bits(float x) { return bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }
FASTSAM_HD uint64_t magnitude_bits(double x) { return bit_cast<uint64_t>(x) & 0x7FFFFFFFFFFFFFFFu; }

// Returns the number with these bits, or NaN if it is not finite.
FASTSAM_HD double magnitude_of(uint32_t bits) { return bit_cast<float>(bits < 0x7F800000u ? bits : 0x7FC00000u); }
FASTSAM_HD double magnitude_of(uint64_t bits) {
  return bit_cast<double>(bits < 0x7FF0000000000000u ? bits : 0x7FF8000000000000u);
}

// ---- update: the local update rule gives every base optimizer its weight and its gradient ---------------------------

template <class C>
struct LinearFunctor {  // v = a*g2 + b*g1 + q
  C a, b, phi;
  FASTSAM_HD LinearFunctor(const double* h, double inverse_scale)
      : a(static_cast<C>(h[G2_COEF] * inverse_scale)),
        b(static_cast<C>(h[G1_COEF])),
        phi(static_cast<C>(h[CLIP_INCLUDES_PROX] != 0.0 ? h[PROX_MU] : 0.0)) {}

  FASTSAM_HD C clipped_part(C w, C g2, C g1, C q) const { return a * g2 + b * g1 + q + phi * w; }
};

template <class C>
struct CombinedGradient {
  LinearFunctor<C> linear;
  C sig, decay, shrink;

  // sumsq_v < 0: no clipping.
  FASTSAM_HD CombinedGradient(const double* h, double inverse_scale, double sumsq_v)
      : linear(h, inverse_scale),
        sig(C(1)),
        decay(
            static_cast<C>((h[DECOUPLED] != 0.0 ? 0.0 : h[DECAY]) + (h[CLIP_INCLUDES_PROX] != 0.0 ? 0.0 : h[PROX_MU]))),
        shrink(static_cast<C>(h[DECOUPLED] != 0.0 ? 1.0 - h[LR] * h[DECAY] : 1.0)) {
    if (h[CLIP] > 0.0 && !(sumsq_v < 0.0)) {
      const double factor = h[CLIP] / (sqrt(sumsq_v) + kClipEps);
      sig = static_cast<C>(factor > 1.0 ? 1.0 : factor);
    }
  }

  FASTSAM_HD C gradient(C w, C g2, C g1, C q, C shift) const {
    return sig * linear.clipped_part(w, g2, g1, q) + decay * (w - shift);
  }
  FASTSAM_HD C weight(C w) const { return w * shrink; }

  // Returns the form for gradients that `gradient` has already computed.
  CombinedGradient without_gradient() const {
    CombinedGradient remainder = *this;
    remainder.linear.a = remainder.sig = C(1);
    remainder.linear.b = remainder.linear.phi = remainder.decay = C(0);
    return remainder;
  }
};

// ---- the rules of update_ (rules/*.h) -------------------------------------------------------------------------------
//
// rules/NAME.h has, in a namespace of its name, `Rule<C>` with
//   kState              largest number of fields of its state, up to kMostState
//   kNeeded             a bit per field that every call has; the other fields of a call are in `state_mask`
//   kCounts             true if it counts steps
//   kPowers             number of powers that it reads, up to kMostPowers
//   Rule(h, powers, t, init_state)   from the columns; t: the number of this step, from 1 on; powers[k]: column
//                       kFirstRuleHParam + k to the power of t; init_state: the fields are not set yet
//   step(w, d, state, state_mask)   the new weight; `state` is an element of each field, and is written
constexpr int kMostState = 3, kMostPowers = 2;

FASTSAM_HD constexpr bool has(unsigned state_mask, int field) { return (state_mask >> field & 1u) != 0; }

FASTSAM_HD double power_of(const double* h, int k, double t) { return pow(h[kFirstRuleHParam + k], t); }

template <class Rule>
FASTSAM_HD Rule rule_of(const double* h, double t, bool init_state) {
  double powers[kMostPowers] = {};
  for (int k = 0; k < Rule::kPowers; ++k) powers[k] = power_of(h, k, t);
  return Rule(h, powers, t, init_state);
}

}  // namespace fastsam
