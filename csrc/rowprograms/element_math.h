// Arithmetic of the elementwise operations of a row program, shared by the CPU (lane_math.h) and CUDA
// (cuda/row_ops.cuh). There is no include guard, because each of them includes it in its namespaces. Before that they
// define `Lanes`, a vector of float32 numbers or one number, `Places`, int32 numbers of the same size, and these
// functions: every, chosen, by_lane, bits_of, from_bits, converted, all and magnitude.

// Returns e^x to 2 units in the last place: 2^n times a polynomial in the rest.
FASTSAM_LANES Lanes exponential(Lanes x) {
  const Lanes low = every(-104.0f), high = every(89.0f), magic = every(12582912.0f);
  x = chosen(x < low, low, chosen(x > high, high, x));
  const Lanes shifted = x * 1.44269504088896341f + magic;  // its last bits are the nearest whole number
  const Places n = bits_of(shifted) - bits_of(magic);
  const Lanes integer = shifted - magic;
  const Lanes r = x - integer * 0.693359375f - integer * -2.12194440e-4f;
  Lanes p = every(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Places half = n >> 1;  // 2^n itself may be out of range
  return p * from_bits((half + 127) << 23) * from_bits((n - half + 127) << 23);
}

// Returns log(x) to 2 units in the last place. Lanes with a number that is not normal are computed one by one.
FASTSAM_LANES Lanes logarithm(Lanes x) {
  const Places bits = bits_of(x);
  if (!all((bits >= 0x00800000) & (bits < 0x7F800000))) {
    return by_lane(x, [](float v) { return v == 0.0f ? -INFINITY : std::log(v); });
  }
  const Places n = (bits - 0x3F3504F3) >> 23;  // x = 2^n * m with m from sqrt(1/2) to sqrt(2)
  const Lanes m = from_bits(bits - (n << 23)) - 1.0f, e = converted(n), square = m * m;
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

// Returns erf(x) to 2 units in the last place: near zero x plus x times a polynomial in x^2, elsewhere 1 minus e^(-x^2)
// times a polynomial in 1/(1 + 0.4|x|).
FASTSAM_LANES Lanes error_function(Lanes x) {
  const Lanes length = magnitude(x), square = x * x;
  Lanes near = every(-6.0903985e-4f);
  near = near * square + 5.0119716e-3f;
  near = near * square - 2.6778916e-2f;
  near = near * square + 1.1282141e-1f;
  near = near * square - 3.7612525e-1f;
  near = near * square + 1.28379107e-1f;
  near = near * x + x;
  const Lanes far = chosen(length > every(4.0f), every(4.0f), length), t = 1.0f / (1.0f + 0.4f * far);
  Lanes p = every(-1.9933752e-1f);
  p = p * t + 7.2512347e-1f;
  p = p * t - 4.2579341e-1f;
  p = p * t + 5.3737289e-1f;
  p = p * t + 1.1995334e-1f;
  p = p * t + 2.4416195e-1f;
  p = p * t - 1.3679197e-3f;
  const Lanes rest = 1.0f - p * exponential(-(far * far));
  return chosen(length < every(0.9f), near, chosen(x < every(0.0f), -rest, rest));
}

// Calls OP(code, result) for each elementwise operation of the operands a, b and c and the instruction's number.
#undef FASTSAM_ELEMENT_OPS
#define FASTSAM_ELEMENT_OPS(OP)                                                                    \
  OP(copy, a)                                                                                      \
  OP(relu, chosen(a < every(0.0f), every(0.0f), a))                                                \
  OP(negate, -a)                                                                                   \
  OP(exponential, exponential(a))                                                                  \
  OP(logarithm, logarithm(a))                                                                      \
  OP(root, by_lane(a, [](float x) { return std::sqrt(x); }))                                       \
  OP(inverse_root, by_lane(a, [](float x) { return 1.0f / std::sqrt(x); }))                        \
  OP(magnitude, magnitude(a))                                                                      \
  OP(tanh, by_lane(a, [](float x) { return std::tanh(x); }))                                       \
  OP(sigmoid, 1.0f / (1.0f + exponential(-a)))                                                     \
  OP(add, a + number * b)                                                                          \
  OP(scale, a* number)                                                                             \
  OP(power, exponent == 2.0f ? a * a : by_lane(a, [=](float x) { return std::pow(x, exponent); })) \
  OP(multiply, a* b)                                                                               \
  OP(divide, a / b)                                                                                \
  OP(threshold_backward, chosen(b <= number, every(0.0f), a))                                      \
  OP(tanh_backward, a * (1.0f - b * b))                                                            \
  OP(sigmoid_backward, a * (1.0f - b) * b)                                                         \
  OP(multiply_add, a + number * (b * c))                                                           \
  OP(error_function, error_function(a))                                                            \
  OP(shift, a + number)
