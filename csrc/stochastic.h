// Stochastic rounding to half precision, shared by the C++ and the CUDA kernels: see `stochastic` in
// kernels/rounding.py.
#pragma once

#include "kernel_math.h"

namespace fastsam {

// Returns a bijection of 32 bits that mixes them well (two multiplications, as in Wellons' "lowbias32"), with a key in
// its middle.
FASTSAM_HD uint32_t mix(uint32_t x, uint32_t key) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du ^ key;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Random bits that are a function of a row's seed and of the element's place in the row (modulo 2^32). There is no
// state, so the result does not depend on the order of the work.
struct Random {
  uint32_t first, second;

  FASTSAM_HD explicit Random(int64_t seed)
      : first(mix(static_cast<uint32_t>(seed), 0x9E3779B9u)),
        second(mix(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32) ^ first, 0x85EBCA6Bu)) {}

  FASTSAM_HD uint32_t bits(uint32_t position) const { return mix(position ^ first, second); }
};

// Returns one of the two neighbours of y among the numbers of W, the nearer one more often: the mean is y.
template <class W>
FASTSAM_HD W stochastic(float y, uint32_t random) {
  constexpr bool half = sizeof(W) == sizeof(f16) && !std::is_same_v<W, bf16>;
  constexpr int dropped = half ? 13 : 16;
  const uint32_t bits = bit_cast<uint32_t>(y), sign = bits & 0x80000000u;
  const float size = bit_cast<float>(bits ^ sign);
  // Subnormal halves have the unit of the numbers from 2^-14 on.
  const float raise = half && size < 0x1.0p-14f ? 0x1.0p-14f : 0.0f;
  const uint32_t sum = bit_cast<uint32_t>(size + raise) + (random >> (32 - dropped));
  const float rounded = bit_cast<float>(sum >> dropped << dropped) - raise;
  return narrow<W>(size != size ? y : bit_cast<float>(sign | bit_cast<uint32_t>(rounded)));
}

// perturb_ with stochastic rounding.
struct StochasticFunctor {
  PerturbFunctor<float> perturb;
  Random random;

  // w: the unperturbed weight, or its master copy; rounded: the same in half precision; place: its place in the row.
  template <class W>
  FASTSAM_HD W perturbed(float w, W rounded, W g, uint32_t position) const {
    const float y = widen(rounded) + perturb.step(w, widen(g));
    return perturb.moves ? stochastic<W>(y, random.bits(position)) : rounded;
  }
};

}  // namespace fastsam
