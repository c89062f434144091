// dual_norm_ and dual_perturb_. See per_isa.h.

#include "norm_loops.h"
#include "stream.h"

template <class W>
inline double dual_norm_piece(const W* g, const compute_t<W>* mu, const compute_t<W>* s, int64_t n,
                              compute_t<W> penalty) {
  using C = compute_t<W>;
  Squares<C> squares;
  alignas(64) C x[kBlock];
  for (int64_t start = 0; start < n; start += kBlock, g += kBlock, mu += kBlock, s += kBlock) {
    const int64_t count = std::min(kBlock, n - start);
    FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) x[i] = DualRule<C>::direction(penalty, widen(g[i]), mu[i], s[i]);
    squares.add(x, count);
  }
  return squares.total();
}

inline void dual_norm_range(const DualArgs& args, double* partials, int64_t begin, int64_t end) {
  with_types(args.call, [&](auto weight, auto) {
    using W = decltype(weight);
    using C = compute_t<W>;
    int64_t unit = begin;
    each_piece(args.call, begin, end, [&](int64_t row, int64_t segment, Piece piece) {
      const C penalty = static_cast<C>(scalars(args.call, row, segment)[PENALTY]);
      partials[unit++] =
          dual_norm_piece(at<const W>(args.grads, row, segment, piece.begin),
                          at<const C>(args.mu, args.call, row, segment, piece.begin),
                          at<const C>(args.s, args.call, row, segment, piece.begin), piece.count, penalty);
    });
  });
}

// z and eps are only written.
template <class W, class O>
inline void dual_perturb_piece(W* z, const O* o, compute_t<W>* mu, const W* g, const compute_t<W>* s, compute_t<W>* eps,
                               int64_t n, const DualRule<compute_t<W>>& rule, bool stream) {
  using C = compute_t<W>;
  const auto run = [&](auto keep) {
    write_each(z, n, stream, [=](int64_t i) FASTSAM_EACH {
      const C old = mu[i], step = rule.step(rule.direction(widen(g[i]), old, s[i]));
      if constexpr (decltype(keep)::value) eps[i] = step;
      mu[i] = rule.dual(old, step, s[i]);
      return narrow<W>(rule.perturbed(widen(o[i]), step));
    });
  };
  eps != nullptr ? run(std::true_type{}) : run(std::false_type{});
}

inline void dual_perturb_range(const DualArgs& args, bool stream, int64_t begin, int64_t end) {
  with_types(args.call, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    using C = compute_t<W>;
    const Call& call = args.call;
    each_piece(call, begin, end, [&](int64_t row, int64_t segment, Piece piece) {
      const DualRule<C> rule(scalars(call, row, segment), args.sumsq[row]);
      const int64_t first = piece.begin;
      dual_perturb_piece(at<W>(args.params, row, segment, first), at<const O>(args.backup, call, row, segment, first),
                         at<C>(args.mu, call, row, segment, first), at<const W>(args.grads, row, segment, first),
                         at<const C>(args.s, call, row, segment, first), at<C>(args.eps, call, row, segment, first),
                         piece.count, rule, stream);
    });
  });
  if (stream) stream_fence();
}
