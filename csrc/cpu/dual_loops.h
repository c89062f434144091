// dual_norm_ and dual_perturb_. See per_isa.h.

#include "nontemporal.h"
#include "norm_loops.h"

template <class W>
inline double dual_norm_chunk(const W* g, const compute_t<W>* mu, const compute_t<W>* s, int64_t n,
                              compute_t<W> penalty) {
  using C = compute_t<W>;
  Squares<C> squares;
  alignas(64) C x[kBlock];
  for (int64_t start = 0; start < n; start += kBlock, g += kBlock, mu += kBlock, s += kBlock) {
    const int64_t count = std::min(kBlock, n - start);
    FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) x[i] =
        DualFunctor<C>::direction(penalty, widen(g[i]), mu[i], s[i]);
    squares.add(x, count);
  }
  return squares.total();
}

inline void dual_norm_range(const DualArgs& args, double* partials, int64_t begin, int64_t end) {
  dispatch_types(args.problem, [&](auto weight, auto) {
    using W = decltype(weight);
    using C = compute_t<W>;
    int64_t unit = begin;
    for_each_chunk(args.problem, begin, end, [&](int64_t row, int64_t segment, ChunkRange range) {
      const C penalty = static_cast<C>(scalars(args.problem, row, segment)[PENALTY]);
      partials[unit++] =
          dual_norm_chunk(at<const W>(args.grads, row, segment, range.begin),
                          at<const C>(args.mu, args.problem, row, segment, range.begin),
                          at<const C>(args.s, args.problem, row, segment, range.begin), range.count, penalty);
    });
  });
}

// z and eps are only written.
template <class W, class O>
inline void dual_perturb_chunk(W* z, const O* o, compute_t<W>* mu, const W* g, const compute_t<W>* s, compute_t<W>* eps,
                               int64_t n, const DualFunctor<compute_t<W>>& rule, bool nontemporal) {
  using C = compute_t<W>;
  const auto run = [&](auto keep) {
    write_each(z, n, nontemporal, [=](int64_t i) FASTSAM_ALWAYS_INLINE {
      const C old = mu[i], step = rule.step(rule.direction(widen(g[i]), old, s[i]));
      if constexpr (decltype(keep)::value) eps[i] = step;
      mu[i] = rule.dual(old, step, s[i]);
      return narrow<W>(rule.perturbed(widen(o[i]), step));
    });
  };
  eps != nullptr ? run(std::true_type{}) : run(std::false_type{});
}

inline void dual_perturb_range(const DualArgs& args, bool nontemporal, int64_t begin, int64_t end) {
  dispatch_types(args.problem, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    using C = compute_t<W>;
    const Problem& problem = args.problem;
    for_each_chunk(problem, begin, end, [&](int64_t row, int64_t segment, ChunkRange range) {
      const DualFunctor<C> rule(scalars(problem, row, segment), args.sumsq[row]);
      const int64_t first = range.begin;
      dual_perturb_chunk(at<W>(args.params, row, segment, first),
                         at<const O>(args.backup, problem, row, segment, first),
                         at<C>(args.mu, problem, row, segment, first), at<const W>(args.grads, row, segment, first),
                         at<const C>(args.s, problem, row, segment, first),
                         at<C>(args.eps, problem, row, segment, first), range.count, rule, nontemporal);
    });
  });
  if (nontemporal) nontemporal_fence();
}
