// The inner products of inner_, and the fixed-point sum of accumulate_. See per_isa.h.

// Returns the sums of x*y and y*y in double. The lanes are the same in every instruction set, so the bits are the same.
struct Products {
  static constexpr int64_t lanes = 8, ways = 4;
  typedef double Vector __attribute__((vector_size(64)));
  Vector xy[ways] = {}, yy[ways] = {};
  double tail_xy = 0.0, tail_yy = 0.0;

  inline void add(const double* x, const double* y, int64_t n) {
    int64_t i = 0;
    for (; i + ways * lanes <= n; i += ways * lanes) {
      for (int64_t way = 0; way < ways; ++way) {
        Vector a, b;
        std::memcpy(&a, x + i + way * lanes, sizeof(a));
        std::memcpy(&b, y + i + way * lanes, sizeof(b));
        xy[way] += a * b;
        yy[way] += b * b;
      }
    }
    for (; i < n; ++i) tail_xy += x[i] * y[i], tail_yy += y[i] * y[i];
  }

  static double total(const Vector* sum, double tail) {
    const Vector both = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    double all = 0.0;
    for (int64_t lane = 0; lane < lanes; ++lane) all += both[lane];
    return all + tail;
  }
};

template <class W>
inline void inner_chunk(const W* x, const W* y, int64_t n, double* out) {
  Products products;
  alignas(64) double a[kBlock], b[kBlock];
  for (int64_t start = 0; start < n; start += kBlock, x += kBlock, y += kBlock) {
    const int64_t count = std::min(kBlock, n - start);
    FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) a[i] = widen(x[i]);
    FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) b[i] = widen(y[i]);
    products.add(a, b, count);
  }
  out[0] = Products::total(products.xy, products.tail_xy);
  out[1] = Products::total(products.yy, products.tail_yy);
}

inline void inner_range(const InnerArgs& args, double* partials, int64_t begin, int64_t end) {
  dispatch_types(args.problem, [&](auto weight, auto) {
    using W = decltype(weight);
    double* out = partials + 2 * begin;
    for_each_chunk(args.problem, begin, end, [&](int64_t row, int64_t segment, ChunkRange range) {
      inner_chunk(at<const W>(args.x, row, segment, range.begin), at<const W>(args.y, row, segment, range.begin),
                  range.count, out);
      out += 2;
    });
  });
}

// Adds a block of Rows rows in registers and then to the limbs. largest: [Rows], the bits of the largest |x - base|.
template <int Rows, class T>
inline void accumulate_block(const T* x, int64_t row_stride, const T* base, double scale, int64_t count,
                             uint64_t* __restrict__ high, int64_t* __restrict__ low, uint64_t* largest) {
  decltype(magnitude_bits(T())) bits[Rows] = {};
  FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) {
    uint64_t integer = high[i];
    int64_t fraction = low[i];
    for (int row = 0; row < Rows; ++row) {
      const T d = x[row * row_stride + i] - base[i];
      bits[row] = std::max(bits[row], magnitude_bits(d));
      add_fixed_point(static_cast<double>(d) * scale, integer, fraction);
    }
    carry_fixed_point(integer, fraction);
    high[i] = integer;
    low[i] = fraction;
  }
  for (int row = 0; row < Rows; ++row) largest[row] = std::max<uint64_t>(largest[row], bits[row]);
}

// Adds block by block, so that the limbs and the base stay in the first-level cache for all rows.
template <class T>
inline void accumulate_rows(const FixedPointArgs& args, uint64_t* largest, int64_t begin, int64_t end) {
  alignas(64) static constexpr T zeros[kBlock] = {};
  constexpr int together = 4;
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t count = std::min(kBlock, end - start);
    uint64_t* high = args.high + start;
    int64_t* low = args.low + start;
    const T* x = static_cast<const T*>(args.x) + start;
    const T* base = args.base != nullptr ? static_cast<const T*>(args.base) + start : zeros;
    int64_t row = 0;
    for (; row + together <= args.rows; row += together) {
      accumulate_block<together>(x + row * args.row_stride, args.row_stride, base, args.scale, count, high, low,
                                 largest + row);
    }
    for (; row < args.rows; ++row) {
      accumulate_block<1>(x + row * args.row_stride, 0, base, args.scale, count, high, low, largest + row);
    }
  }
}

inline void accumulate_range(const FixedPointArgs& args, uint64_t* largest, int64_t begin, int64_t end) {
  if (args.type == Type::f64) {
    accumulate_rows<double>(args, largest, begin, end);
  } else {
    accumulate_rows<float>(args, largest, begin, end);
  }
}
