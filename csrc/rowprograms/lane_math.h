// Vectors of a row program's elements: choices, bits, sums, and the arithmetic of element_math.h. See per_isa.h; the
// vector types are in product_loops.h.
#include "../cpu/product_loops.h"

inline __attribute__((always_inline)) Lanes chosen(Places where, Lanes yes, Lanes no) {
  return (Lanes)((where & (Places)yes) | (~where & (Places)no));
}

inline __attribute__((always_inline)) Places bits_of(Lanes x) { return (Places)x; }
inline __attribute__((always_inline)) Lanes from_bits(Places bits) { return (Lanes)bits; }
inline __attribute__((always_inline)) Lanes converted(Places x) { return __builtin_convertvector(x, Lanes); }
inline __attribute__((always_inline)) Lanes magnitude(Lanes x) { return (Lanes)((Places)x & 0x7FFFFFFF); }

inline __attribute__((always_inline)) bool all(Places where) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!where[lane]) return false;
  }
  return true;
}

template <class F>
inline Lanes by_lane(Lanes x, F f) {
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = f(x[lane]);
  return x;
}

#define FASTSAM_LANES inline
#include "element_math.h"
#undef FASTSAM_LANES

// Adds halves. A sum in the order of the lanes would wait for every addition.
inline float added_up(Lanes x) {
  float half[kLanes];
  store(half, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) half[lane] += half[lane + width];
  }
  return half[0];
}
