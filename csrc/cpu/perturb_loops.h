// perturb_ and restore_. See per_isa.h.

#include "nontemporal.h"

// save: o = the unperturbed weights for z, then z = perturbed. If O is not W, o is a master copy.
template <class W, class O>
inline void save_and_perturb_chunk(W* z, O* o, const W* g, int64_t n, const PerturbFunctor<compute_t<W>>& rule,
                                   bool nontemporal) {
  using C = compute_t<W>;
  if constexpr (std::is_same_v<W, O>) {
    write_each(o, n, nontemporal, [=](int64_t i) FASTSAM_ALWAYS_INLINE {
      const W w = z[i];
      z[i] = narrow<W>(rule.perturbed(widen(w), widen(g[i])));
      return w;
    });
  } else {
    FASTSAM_SIMD for (int64_t i = 0; i < n; ++i) {
      const C w = backup_of(o[i], z[i]);
      o[i] = w;
      z[i] = narrow<W>(rule.perturbed(w, widen(g[i])));
    }
  }
}

// z = perturbed o; z is only written.
template <class W, class O>
inline void perturb_chunk(W* z, const O* o, const W* g, int64_t n, const PerturbFunctor<compute_t<W>>& rule,
                          bool nontemporal) {
  write_each(z, n, nontemporal,
             [=](int64_t i) FASTSAM_ALWAYS_INLINE { return narrow<W>(rule.perturbed(widen(o[i]), widen(g[i]))); });
}

// Computes both values of `save`; `place` is the place of the first element in the row.
template <class W, class O>
inline void perturb_stochastic_chunk(W* z, O* o, const W* g, int64_t n, const StochasticFunctor& rule,
                                     uint32_t position, bool save) {
  const auto perturbed = [=](O w, int64_t i) {
    return rule.perturbed(widen(w), convert<W>(w), g[i], position + static_cast<uint32_t>(i));
  };
  if (save) {
    FASTSAM_SIMD for (int64_t i = 0; i < n; ++i) {
      const O w = backup_of(o[i], z[i]);
      o[i] = w;
      z[i] = perturbed(w, i);
    }
  } else {
    FASTSAM_SIMD for (int64_t i = 0; i < n; ++i) z[i] = perturbed(o[i], i);
  }
}

inline void perturb_range(const PerturbArgs& args, bool nontemporal, int64_t begin, int64_t end) {
  dispatch_types(args.problem, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    for_each_chunk(args.problem, begin, end, [&](int64_t row, int64_t segment, ChunkRange range) {
      const PerturbFunctor<compute_t<W>> rule(scalars(args.problem, row, segment), args.sumsq[row]);
      W* z = at<W>(args.params, row, segment, range.begin);
      O* o = at<O>(args.backup, args.problem, row, segment, range.begin);
      const W* g = at<const W>(args.grads, row, segment, range.begin);
      if constexpr (sizeof(W) == 2) {
        if (args.seed != nullptr) {
          const auto position = static_cast<uint32_t>(args.problem.table[segment].offset + range.begin);
          perturb_stochastic_chunk(z, o, g, range.count, StochasticFunctor{rule, Random(args.seed[row])}, position,
                                   args.save);
          return;
        }
      }
      if (args.save) {
        save_and_perturb_chunk(z, o, g, range.count, rule, nontemporal);
      } else {
        perturb_chunk(z, o, g, range.count, rule, nontemporal);
      }
    });
  });
  if (nontemporal) nontemporal_fence();
}

template <class W, class O>
inline void restore_chunk(W* z, const O* o, int64_t n, bool nontemporal) {
  write_each(z, n, nontemporal, [=](int64_t i) FASTSAM_ALWAYS_INLINE { return convert<W>(o[i]); });
}

inline void restore_range(const RestoreArgs& args, bool nontemporal, int64_t begin, int64_t end) {
  dispatch_types(args.problem, [&](auto weight, auto stored) {
    for_each_chunk(args.problem, begin, end, [&](int64_t row, int64_t segment, ChunkRange range) {
      restore_chunk(at<decltype(weight)>(args.params, row, segment, range.begin),
                    at<const decltype(stored)>(args.backup, args.problem, row, segment, range.begin), range.count,
                    nontemporal);
    });
  });
  if (nontemporal) nontemporal_fence();
}
