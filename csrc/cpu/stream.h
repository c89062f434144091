// Stores that go past the caches. Included once per instruction set, inside its namespace; FASTSAM_VECTOR_BYTES is the
// width.

// Copies n elements that nobody reads soon. A line that was not read before is then written without being fetched
// first.
template <class T>
inline void stream_copy(T* to, const T* from, int64_t n) {
#ifdef __x86_64__
  constexpr int64_t width = FASTSAM_VECTOR_BYTES / sizeof(T);
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % FASTSAM_VECTOR_BYTES / sizeof(T));
  const int64_t head = std::min(n, misaligned == 0 ? 0 : width - misaligned);
  int64_t i = head;
  std::memcpy(to, from, head * sizeof(T));
  for (; i + width <= n; i += width) {
#if FASTSAM_VECTOR_BYTES == 64
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif FASTSAM_VECTOR_BYTES == 32
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#endif
  }
  std::memcpy(to + i, from + i, (n - i) * sizeof(T));
#else
  std::memcpy(to, from, n * sizeof(T));
#endif
}

// Makes streamed stores visible to other threads before the range is reported as done.
inline void stream_fence() {
#ifdef __x86_64__
  _mm_sfence();
#endif
}

// Where a block's results go: straight to memory, or to a staging block that `flush` streams out.
template <class T>
struct Sink {
  alignas(64) T staged[kBlock];
  bool stream;
  explicit Sink(bool stream_out) : stream(stream_out) {}
  T* block(T* destination) { return stream ? staged : destination; }
  void flush(T* destination, int64_t n) {
    if (stream) stream_copy(destination, staged, n);
  }
};
