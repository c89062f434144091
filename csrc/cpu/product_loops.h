// The products of small matrices of product. See per_isa.h.
//
// Every element of a result is a sum in the order of k, and only elements of the result are vectorised or blocked. So
// its bits depend neither on the other rows nor on strides. They depend on the instruction set in one way: AVX2 and
// AVX-512 round a product and its sum once, and the baseline, which has no such instruction, rounds twice.

constexpr int kLanes = FASTSAM_VECTOR_BYTES / sizeof(float);
constexpr int kVectors = FASTSAM_VECTOR_BYTES == 64 ? 2 : 1;  // vectors of a block, side by side

// Rows of a block: its sums stay in registers, and eight or more of them hide how long an addition takes.
constexpr int high(int vectors) { return FASTSAM_VECTOR_BYTES == 64 && vectors == 1 ? 16 : 8; }

typedef float Lanes __attribute__((vector_size(FASTSAM_VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(FASTSAM_VECTOR_BYTES)));

inline __attribute__((always_inline)) Lanes multiplied_and_added(float factor, Lanes x, Lanes sum) {
#if FASTSAM_VECTOR_BYTES == 64
  return (Lanes)_mm512_fmadd_ps(_mm512_set1_ps(factor), (__m512)x, (__m512)sum);
#elif FASTSAM_VECTOR_BYTES == 32
  return (Lanes)_mm256_fmadd_ps(_mm256_set1_ps(factor), (__m256)x, (__m256)sum);
#else
  return sum + factor * x;
#endif
}

// Exchanges, in squares of 2*Apart lanes, the lanes above and below the diagonal. Returns the new first or second row.
template <int Apart, bool Second, int... I>
inline __attribute__((always_inline)) Lanes crossed(Lanes first, Lanes second, std::integer_sequence<int, I...>) {
#define FASTSAM_PLACE (I / Apart % 2 == 0 ? (Second ? I + Apart : I) : (Second ? I : I - Apart) + kLanes)
#ifdef __clang__
  return __builtin_shufflevector(first, second, FASTSAM_PLACE...);
#else
  return __builtin_shuffle(first, second, Places{FASTSAM_PLACE...});
#endif
#undef FASTSAM_PLACE
}

template <int Apart>
inline __attribute__((always_inline)) void transpose(Lanes* square) {
  if constexpr (Apart > 0) {
    FASTSAM_UNROLL for (int i = 0; i < kLanes; ++i) {
      if (i / Apart % 2 == 1) continue;
      const Lanes first = square[i], second = square[i + Apart];
      square[i] = crossed<Apart, false>(first, second, std::make_integer_sequence<int, kLanes>());
      square[i + Apart] = crossed<Apart, true>(first, second, std::make_integer_sequence<int, kLanes>());
    }
    transpose<Apart / 2>(square);
  }
}

inline __attribute__((always_inline)) Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

inline __attribute__((always_inline)) void store(float* to, Lanes value) { *reinterpret_cast<Lanes*>(to) = value; }

inline __attribute__((always_inline)) Lanes every(float x) { return Lanes{} + x; }

// The first `count` lanes; the others are zero.
inline __attribute__((always_inline)) Lanes load_some(const float* from, int64_t count) {
#if FASTSAM_VECTOR_BYTES == 64
  return (Lanes)_mm512_maskz_loadu_ps(0xFFFF >> (16 - count), from);
#else
  Lanes x{};
  if (count == kLanes) return load(from);
  FASTSAM_ROLLED for (int64_t i = 0; i < count; ++i) x[i] = from[i];
  return x;
#endif
}

inline __attribute__((always_inline)) void store_some(float* to, Lanes x, int64_t count) {
#if FASTSAM_VECTOR_BYTES == 64
  _mm512_mask_storeu_ps(to, 0xFFFF >> (16 - count), (__m512)x);
#else
  if (count == kLanes) return store(to, x);
  FASTSAM_ROLLED for (int64_t i = 0; i < count; ++i) to[i] = x[i];
#endif
}

// The first `count` elements of a row of `matrix`.
inline __attribute__((always_inline)) Lanes line_of(const Matrix& matrix, int64_t count) {
  if (matrix.column_stride == 1) return load_some(matrix.data, count);
  if (matrix.column_stride == 0) return every(*matrix.data);
  Lanes x{};
  FASTSAM_ROLLED for (int64_t i = 0; i < count; ++i) x[i] = matrix.data[i * matrix.column_stride];
  return x;
}

// Copies `count` columns of b, `[k, count]`, to a panel `[k, Vectors * kLanes]`, padded with zeros.
template <int Vectors>
inline void pack(const Matrix& b, int64_t k, int64_t count, float* __restrict__ panel) {
  constexpr int64_t panel_width = Vectors * kLanes;
  if (count < panel_width) std::fill(panel, panel + k * panel_width, 0.0f);
  const int64_t squares = b.row_stride == 1 ? k / kLanes * kLanes : 0, whole_columns = count / kLanes * kLanes;
  for (int64_t row = 0; row < squares; row += kLanes) {
    for (int64_t column = 0; column < whole_columns; column += kLanes) {
      Lanes square[kLanes];
      FASTSAM_UNROLL for (int i = 0; i < kLanes; ++i) square[i] = load(b.data + (column + i) * b.column_stride + row);
      transpose<kLanes / 2>(square);
      FASTSAM_UNROLL for (int i = 0; i < kLanes; ++i) store(panel + (row + i) * panel_width + column, square[i]);
    }
  }
  for (int64_t row = 0; row < k; ++row) {
    for (int64_t i = row < squares ? whole_columns : 0; i < count; ++i)
      panel[row * panel_width + i] = *b.from(row, i).data;
  }
}

// High rows of the result, `count` columns. b: `[k, Vectors * kLanes]`, with dense rows.
template <int High, int Vectors>
FASTSAM_NOINLINE void block(const Matrix& a, const Matrix& b, int64_t k, const Matrix& bias, float* __restrict__ out,
                            int64_t width, int64_t count) {
  Lanes sums[High][Vectors];
  FASTSAM_UNROLL for (int i = 0; i < High; ++i) {
    FASTSAM_UNROLL for (int j = 0; j < Vectors; ++j) sums[i][j] = Lanes{};
  }
  const float *left = a.data, *right = b.data;
  for (int64_t step = 0; step < k; ++step, left += a.column_stride, right += b.row_stride) {
    Lanes line[Vectors];
    FASTSAM_UNROLL for (int j = 0; j < Vectors; ++j) line[j] = load(right + j * kLanes);
    FASTSAM_UNROLL for (int i = 0; i < High; ++i) {
      const float factor = left[i * a.row_stride];
      FASTSAM_UNROLL for (int j = 0; j < Vectors; ++j) sums[i][j] = multiplied_and_added(factor, line[j], sums[i][j]);
    }
  }
  FASTSAM_UNROLL for (int i = 0; i < High; ++i) {
    FASTSAM_UNROLL for (int j = 0; j < Vectors; ++j) {
      const int64_t lanes = std::min<int64_t>(kLanes, count - j * kLanes);
      if (bias.data != nullptr) sums[i][j] = line_of(bias.from(i, j * kLanes), lanes) + sums[i][j];
      store_some(out + i * width + j * kLanes, sums[i][j], lanes);
    }
  }
}

// `rows` rows, at most High.
template <int High, int Vectors>
inline void edge_rows(int64_t rows, const Matrix& a, const Matrix& b, int64_t k, const Matrix& bias, float* out,
                      int64_t width, int64_t count) {
  if constexpr (High > 0) {
    if (rows == High) return block<High, Vectors>(a, b, k, bias, out, width, count);
    edge_rows<High - 1, Vectors>(rows, a, b, k, bias, out, width, count);
  }
}

// `count` columns of the result, at most Vectors * kLanes.
template <int Vectors>
inline void columns(const ProductArgs& args, const Matrix& a, Matrix b, const Matrix& bias, float* out, int64_t count,
                    std::vector<float>& packed) {
  if (b.column_stride != 1 || count < Vectors * kLanes) {
    packed.resize(args.k * Vectors * kLanes);
    pack<Vectors>(b, args.k, count, packed.data());
    b = Matrix{packed.data(), Vectors * kLanes, 1};
  }
  constexpr int most = high(Vectors);
  for (int64_t top = 0; top < args.m; top += most) {
    edge_rows<most, Vectors>(std::min<int64_t>(most, args.m - top), a.from(top, 0), b, args.k, bias.from(top, 0),
                             out + top * args.n, args.n, count);
  }
}

// One row's.
inline void one_product(const ProductArgs& args, const Matrix& a, const Matrix& b, const Matrix& bias, float* out) {
  static thread_local std::vector<float> packed;  // freeing it in every call would cost as much as a small product
  for (int64_t at = 0; at < args.n; at += kVectors * kLanes) {
    const int64_t count = std::min<int64_t>(kVectors * kLanes, args.n - at);
    if (count > kLanes) {
      columns<kVectors>(args, a, b.from(0, at), bias.from(0, at), out + at, count, packed);
    } else {
      columns<1>(args, a, b.from(0, at), bias.from(0, at), out + at, count, packed);
    }
  }
}

inline void product_rows(const ProductArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    one_product(args, args.a.of(row), args.b.of(row), args.bias.of(row), args.out + row * args.m * args.n);
  }
}
