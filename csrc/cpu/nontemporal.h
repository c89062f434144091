// Stores of results that were not read before, and stores past the caches. Included once per instruction set, inside
// its namespace; FASTSAM_VECTOR_BYTES is the width.

#ifdef __x86_64__
// Streams one staged block to `to`, which is aligned to a vector. The line is then written without a fetch.
template <class T>
inline __attribute__((always_inline)) void stream_block(T* to, const T* staged) {
  constexpr int64_t width = FASTSAM_VECTOR_BYTES / sizeof(T);
  for (int64_t i = 0; i < kNontemporalBytes / static_cast<int64_t>(sizeof(T)); i += width) {
#if FASTSAM_VECTOR_BYTES == 64
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(staged + i));
#elif FASTSAM_VECTOR_BYTES == 32
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(staged + i)));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<const __m128i*>(staged + i)));
#endif
  }
}
#endif

// to[i] = value(i) for i < n, where `value` may write elements i of other arrays. With `nontemporal`, `to` goes past
// the caches: in small blocks, so that the loads of the next block are under way while one drains.
template <class T, class F>
inline __attribute__((always_inline)) void write_each(T* to, int64_t n, bool nontemporal, F value) {
  int64_t i = 0;
#ifdef __x86_64__
  if (nontemporal) {
    constexpr int64_t block = kNontemporalBytes / sizeof(T);
    const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % FASTSAM_VECTOR_BYTES);
    const int64_t head = past == 0 ? 0 : (FASTSAM_VECTOR_BYTES - past) / static_cast<int64_t>(sizeof(T));
    for (; i < std::min(head, n); ++i) to[i] = value(i);
    alignas(64) T staged[block];
    for (; i + block <= n; i += block) {
      FASTSAM_SIMD for (int64_t k = 0; k < block; ++k) staged[k] = value(i + k);
      stream_block(to + i, staged);
    }
  }
#endif
  FASTSAM_SIMD for (int64_t k = i; k < n; ++k) to[k] = value(k);
}

// Calls write(i, to, count) for the blocks [i, i + count) of z[0, n): `to` is z + i, or with `nontemporal` a staged
// block that then goes past the caches. No block has more than kBlock elements.
template <class T, class F>
inline __attribute__((always_inline)) void write_blocks(T* z, int64_t n, bool nontemporal, const F& write) {
  constexpr int64_t small = kNontemporalBytes / sizeof(T);
  alignas(64) T staged[small];
#ifdef __x86_64__
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(z) % FASTSAM_VECTOR_BYTES);
  const int64_t head = nontemporal && past != 0 ? (FASTSAM_VECTOR_BYTES - past) / static_cast<int64_t>(sizeof(T)) : 0;
#else
  nontemporal = false;
  constexpr int64_t head = 0;
#endif
  for (int64_t i = 0, count; i < n; i += count) {
    count = i < head ? std::min(head, n) : std::min(nontemporal ? small : kBlock, n - i);
    const bool is_full_block = nontemporal && i >= head && count == small;
    write(i, is_full_block ? staged : z + i, count);
#ifdef __x86_64__
    if (is_full_block) stream_block(z + i, staged);
#endif
  }
}

// Makes streamed stores visible to other threads before the range is reported as done.
inline void nontemporal_fence() {
#ifdef __x86_64__
  _mm_sfence();
#endif
}
