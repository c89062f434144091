// Functions of whole vectors: choices, exponentials, logarithms, sums. See per_isa.h; the vector types are in
// product_loops.h.
#include "../cpu/product_loops.h"

inline __attribute__((always_inline)) Lanes chosen(Places where, Lanes yes, Lanes no) {
  return (Lanes)((where & (Places)yes) | (~where & (Places)no));
}

// Returns e^x to 2 units in the last place: 2^n times a polynomial in the rest.
inline Lanes exponential(Lanes x) {
  const Lanes low = every(-104.0f), high = every(89.0f), magic = every(12582912.0f);
  x = chosen(x < low, low, chosen(x > high, high, x));
  const Lanes shifted = x * 1.44269504088896341f + magic;  // its last bits are the nearest whole number
  const Places n = (Places)shifted - (Places)magic;
  const Lanes whole = shifted - magic;
  const Lanes r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  Lanes p = every(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Places half = n >> 1;  // 2^n itself may be out of range
  return p * (Lanes)((half + 127) << 23) * (Lanes)((n - half + 127) << 23);
}

template <class F>
inline Lanes by_lane(Lanes x, F f) {
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = f(x[lane]);
  return x;
}

// Returns log(x) to 2 units in the last place. A vector with a number that is not normal is computed element by
// element.
inline Lanes logarithm(Lanes x) {
  const Places bits = (Places)x, ordinary = (bits >= 0x00800000) & (bits < 0x7F800000);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!ordinary[lane]) return by_lane(x, [](float v) { return v == 0.0f ? -INFINITY : std::log(v); });
  }
  const Places n = (bits - 0x3F3504F3) >> 23;  // x = 2^n * m with m from sqrt(1/2) to sqrt(2)
  const Lanes m = (Lanes)(bits - (n << 23)) - 1.0f, e = __builtin_convertvector(n, Lanes), square = m * m;
  Lanes p = every(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * square + e * -2.12194440e-4f - 0.5f * square;
  return m + p + e * 0.693359375f;
}

// Adds halves. A sum in the order of the lanes would wait for every addition.
inline float added_up(Lanes x) {
  float half[kLanes];
  store(half, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) half[lane] += half[lane + width];
  }
  return half[0];
}
