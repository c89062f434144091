// perturb_ and restore_. See per_isa.h.

#include "stream.h"

// save: o = the unperturbed weights for z, then z = perturbed. If O is not W, o is a master copy.
template <class W, class O>
inline void save_and_perturb_piece(W* z, O* o, const W* g, int64_t n, const PerturbRule<compute_t<W>>& rule,
                                   bool stream) {
  using C = compute_t<W>;
  if constexpr (std::is_same_v<W, O>) {
    write_each(o, n, stream, [=](int64_t i) FASTSAM_EACH {
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
inline void perturb_piece(W* z, const O* o, const W* g, int64_t n, const PerturbRule<compute_t<W>>& rule, bool stream) {
  write_each(z, n, stream, [=](int64_t i) FASTSAM_EACH { return narrow<W>(rule.perturbed(widen(o[i]), widen(g[i]))); });
}

// Computes both values of `save`; `place` is the place of the first element in the row.
template <class W, class O>
inline void perturb_stochastic_piece(W* z, O* o, const W* g, int64_t n, const StochasticRule& rule, uint32_t place,
                                     bool save) {
  const auto perturbed = [=](O w, int64_t i) {
    return rule.perturbed(widen(w), convert<W>(w), g[i], place + static_cast<uint32_t>(i));
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

inline void perturb_range(const PerturbArgs& args, bool stream, int64_t begin, int64_t end) {
  with_types(args.call, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    each_piece(args.call, begin, end, [&](int64_t row, int64_t segment, Piece piece) {
      const PerturbRule<compute_t<W>> rule(scalars(args.call, row, segment), args.sumsq[row]);
      W* z = at<W>(args.params, row, segment, piece.begin);
      O* o = at<O>(args.backup, args.call, row, segment, piece.begin);
      const W* g = at<const W>(args.grads, row, segment, piece.begin);
      if constexpr (sizeof(W) == 2) {
        if (args.seed != nullptr) {
          const auto place = static_cast<uint32_t>(args.call.table[segment].offset + piece.begin);
          perturb_stochastic_piece(z, o, g, piece.count, StochasticRule{rule, Random(args.seed[row])}, place,
                                   args.save);
          return;
        }
      }
      if (args.save) {
        save_and_perturb_piece(z, o, g, piece.count, rule, stream);
      } else {
        perturb_piece(z, o, g, piece.count, rule, stream);
      }
    });
  });
  if (stream) stream_fence();
}

template <class W, class O>
inline void restore_piece(W* z, const O* o, int64_t n, bool stream) {
  write_each(z, n, stream, [=](int64_t i) FASTSAM_EACH { return convert<W>(o[i]); });
}

inline void restore_range(const RestoreArgs& args, bool stream, int64_t begin, int64_t end) {
  with_types(args.call, [&](auto weight, auto stored) {
    each_piece(args.call, begin, end, [&](int64_t row, int64_t segment, Piece piece) {
      restore_piece(at<decltype(weight)>(args.params, row, segment, piece.begin),
                    at<const decltype(stored)>(args.backup, args.call, row, segment, piece.begin), piece.count, stream);
    });
  });
  if (stream) stream_fence();
}
