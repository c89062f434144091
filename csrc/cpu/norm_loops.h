// The sums of squares: of the direction (norm_) and of v (update_norm_). See per_isa.h.

// Returns the sum of squares of n <= kChunk numbers. The lanes are the same in every instruction set, so the bits are
// the same.
template <class C>
struct Squares {
  static constexpr int64_t lanes = 64 / sizeof(C), ways = 4;
  typedef C Vector __attribute__((vector_size(64)));
  Vector sum[ways] = {};
  double tail = 0.0;

  inline void add(const C* x, int64_t n) {
    int64_t i = 0;
    for (; i + ways * lanes <= n; i += ways * lanes) {
      for (int64_t way = 0; way < ways; ++way) {
        Vector v;
        std::memcpy(&v, x + i + way * lanes, sizeof(v));
        sum[way] += v * v;
      }
    }
    for (; i < n; ++i) tail += static_cast<double>(x[i] * x[i]);
  }

  double total() const {
    const Vector both = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    double all = 0.0;
    for (int64_t lane = 0; lane < lanes; ++lane) all += static_cast<double>(both[lane]);
    return all + tail;
  }
};

template <class W>
inline double norm_chunk(const W* g, const W* w, int64_t n, const NormFunctor<compute_t<W>>& rule) {
  using C = compute_t<W>;
  Squares<C> squares;
  if constexpr (std::is_same_v<W, C>) {
    if (!rule.adaptive) {
      squares.add(g, n);
      return squares.total();
    }
  }
  alignas(64) C x[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = std::min(kBlock, n - start);
    if (rule.adaptive) {
      FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) x[i] = rule.direction(widen(w[start + i]), widen(g[start + i]));
    } else {
      FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) x[i] = widen(g[start + i]);
    }
    squares.add(x, count);
  }
  return squares.total();
}

inline void norm_range(const NormArgs& args, double* partials, int64_t begin, int64_t end) {
  dispatch_types(args.problem, [&](auto weight, auto) {
    using W = decltype(weight);
    int64_t unit = begin;
    for_each_chunk(args.problem, begin, end, [&](int64_t row, int64_t segment, ChunkRange range) {
      const NormFunctor<compute_t<W>> rule(scalars(args.problem, row, segment));
      partials[unit++] = norm_chunk(at<const W>(args.grads, row, segment, range.begin),
                                    at<const W>(args.weights, row, segment, range.begin), range.count, rule);
    });
  });
}

template <class W, class S>
inline double linear_chunk(const S* w, const W* g2, const W* g1, const compute_t<W>* q, int64_t n,
                           const LinearFunctor<compute_t<W>>& rule) {
  using C = compute_t<W>;
  Squares<C> squares;
  alignas(64) C x[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = std::min(kBlock, n - start);
    FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) {
      const int64_t at = start + i;
      x[i] = rule.clipped_part(widen(w[at]), widen(g2[at]), g1 != nullptr ? widen(g1[at]) : C(0),
                               q != nullptr ? q[at] : C(0));
    }
    squares.add(x, count);
  }
  return squares.total();
}

inline void update_norm_range(const UpdateArgs& args, double* partials, int64_t begin, int64_t end) {
  const double inverse = args.grad_scale != nullptr ? 1.0 / *args.grad_scale : 1.0;
  dispatch_types(args.problem, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using C = compute_t<W>;
    int64_t unit = begin;
    for_each_chunk(args.problem, begin, end, [&](int64_t row, int64_t segment, ChunkRange range) {
      const LinearFunctor<C> rule(scalars(args.problem, row, segment), inverse);
      const W* g2 = at<const W>(args.grads, row, segment, range.begin);
      const W* g1 = at<const W>(args.g1, row, segment, range.begin);
      const C* q = at<const C>(args.q, args.problem, row, segment, range.begin);
      const auto* o = at<const decltype(stored)>(args.backup, args.problem, row, segment, range.begin);
      const W* z = at<const W>(args.params, row, segment, range.begin);
      partials[unit++] =
          o != nullptr ? linear_chunk(o, g2, g1, q, range.count, rule) : linear_chunk(z, g2, g1, q, range.count, rule);
    });
  });
}
