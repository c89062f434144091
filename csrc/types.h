// Storage types of tensor elements, and their conversion to and from the type of the arithmetic.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FASTSAM_HD __host__ __device__ __forceinline__
#else
#define FASTSAM_HD inline __attribute__((always_inline))
#endif

namespace fastsam {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

// The type of the arithmetic on weights of type W: double for double, otherwise float.
template <class W>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <class W>
using compute_t = typename Compute<W>::type;

template <class To, class From>
FASTSAM_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between types of one size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

FASTSAM_HD float widen(float x) { return x; }
FASTSAM_HD double widen(double x) { return x; }
FASTSAM_HD float widen(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Half to float. A normal half is shifted to the float's bits, and its exponent is rebased by a multiplication. A
// subnormal half is put under the mantissa of 0.5, and 0.5 is subtracted. Both are exact.
FASTSAM_HD float widen(f16 x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t shifted = static_cast<uint32_t>(x.bits) << 16;
  const uint32_t sign = shifted & 0x80000000u;
  const uint32_t magnitude = shifted << 1;
  const float normal = bit_cast<float>((magnitude >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const float subnormal = bit_cast<float>((magnitude >> 17) | (126u << 23)) - 0.5f;
  return bit_cast<float>(sign | bit_cast<uint32_t>(magnitude < (1u << 27) ? subnormal : normal));
#endif
}

// narrow<W>(x) converts to storage, rounding to nearest, ties to even; NaN stays NaN.
template <class W>
struct Narrow;

template <>
struct Narrow<float> {
  static FASTSAM_HD float from(float x) { return x; }
};
template <>
struct Narrow<double> {
  static FASTSAM_HD double from(double x) { return x; }
};
template <>
struct Narrow<bf16> {
  static FASTSAM_HD bf16 from(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return bf16{static_cast<uint16_t>(x != x ? 0x7FC0u : rounded)};
  }
};
template <>
struct Narrow<f16> {
  // Float to half on the host: adding a float whose unit is the half's last place makes the hardware round.
  static FASTSAM_HD f16 from(float x) {
#ifdef __CUDA_ARCH__
    return f16{__half_as_ushort(__float2half_rn(x))};
#else
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t twice = bits << 1;
    const float magnitude = bit_cast<float>(bits & 0x7FFFFFFFu);
    const float saturated = (magnitude * 0x1.0p+112f) * 0x1.0p-110f;  // beyond the half's range becomes infinite here
    uint32_t exponent = twice & 0xFF000000u;
    exponent = exponent < 0x71000000u ? 0x71000000u : exponent;  // subnormal halves share one unit
    const uint32_t sum = bit_cast<uint32_t>(bit_cast<float>((exponent >> 1) + 0x07800000u) + saturated);
    const uint32_t half = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
    return f16{static_cast<uint16_t>(sign | (twice > 0xFF000000u ? 0x7E00u : half))};
#endif
  }
};

template <class W, class C>
FASTSAM_HD W narrow(C x) {
  return Narrow<W>::from(x);
}

// Converts from one storage type to another. The bits are kept if the types are the same (a NaN keeps its payload).
template <class To, class From>
FASTSAM_HD To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else {
    return narrow<To>(widen(x));
  }
}

// Equality of stored weights as numbers: NaN differs from all, +0 equals -0.
template <class W>
FASTSAM_HD bool same(W a, W b) {
  return widen(a) == widen(b);
}

}  // namespace fastsam
