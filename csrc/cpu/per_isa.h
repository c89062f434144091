// Compiles FASTSAM_LOOPS once per instruction set, each in a separate namespace, so that one binary serves every
// processor. There is no include guard, because each op's .cpp includes it once, after all other headers.

#if defined(__x86_64__) && defined(__GNUC__)
#define FASTSAM_ISAS 1
#endif

#define FASTSAM_VECTOR_BYTES 16
namespace fastsam::baseline {
#include FASTSAM_LOOPS
}
#undef FASTSAM_VECTOR_BYTES

#ifdef FASTSAM_ISAS
#define FASTSAM_VECTOR_BYTES 32
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace fastsam::avx2 {
#include FASTSAM_LOOPS
}
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#endif
#undef FASTSAM_VECTOR_BYTES
#define FASTSAM_VECTOR_BYTES 64
namespace fastsam::avx512 {
#include FASTSAM_LOOPS
}
#undef FASTSAM_VECTOR_BYTES
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#ifdef FASTSAM_ISAS
#define FASTSAM_DISPATCH(function, ...)         \
  do {                                          \
    switch (instruction_set()) {                \
      case InstructionSet::avx512:              \
        return avx512::function(__VA_ARGS__);   \
      case InstructionSet::avx2:                \
        return avx2::function(__VA_ARGS__);     \
      default:                                  \
        return baseline::function(__VA_ARGS__); \
    }                                           \
  } while (false)
#else
#define FASTSAM_DISPATCH(function, ...) return baseline::function(__VA_ARGS__)
#endif
