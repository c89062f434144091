// update_. See per_isa.h. All functions are templates of the rule, because every rule is compiled separately.

#include "stream.h"

template <class W, class S>
inline void copy_piece(W* z, const S* from, int64_t n) {
  if (static_cast<const void*>(from) == static_cast<const void*>(z)) return;
  for (int64_t i = 0; i < n; ++i) z[i] = narrow<W>(widen(from[i]));
}

// Calls f with `given` as a constant, so that the loops are compiled for each set of fields.
template <class Rule, unsigned Mask = 0, class F>
inline __attribute__((always_inline)) void with_given(unsigned given, const F& f) {
  if constexpr (Mask >> Rule::kState == 0) {
    if constexpr ((Mask & Rule::kNeeded) == Rule::kNeeded) {
      if (given == Mask) return f(std::integral_constant<unsigned, Mask>{});
    }
    with_given<Rule, Mask + 1>(given, f);
  }
}

// The operands that a piece reads in addition to the weights; nullptr for an absent operand.
template <class W>
struct Beside {
  using C = compute_t<W>;
  const W *g2, *g1;
  const C *q, *shift;
  std::array<C*, kMostState> state;

  bool ordinary() const { return g1 == nullptr && q == nullptr && shift == nullptr; }
  std::array<C*, kMostState> state_at(int64_t i) const {
    auto at = state;
    for (C*& field : at) field = field == nullptr ? nullptr : field + i;
    return at;
  }
};

// Computes d = the gradients of the local update rule with more terms than g2, for elements [start, start + n).
template <class W, class S>
FASTSAM_ONCE void gradient_block(compute_t<W>* d, const S* w, const Beside<W>& x, int64_t start, int64_t n,
                                 FormU<compute_t<W>> form) {
  using C = compute_t<W>;
  const W *g2 = x.g2 + start, *g1 = x.g1 == nullptr ? nullptr : x.g1 + start;
  const C* q = x.q == nullptr ? nullptr : x.q + start;
  const C* shift = x.shift == nullptr ? nullptr : x.shift + start;
  FASTSAM_SIMD for (int64_t i = 0; i < n; ++i) {
    d[i] = form.gradient(widen(w[i]), widen(g2[i]), g1 != nullptr ? widen(g1[i]) : C(0), q != nullptr ? q[i] : C(0),
                         shift != nullptr ? shift[i] : C(0));
  }
}

// Computes z = the new weights, rounded, and keep = the new weights, for n elements, in blocks that stay in the
// first-level cache. G is the type of the gradients that the rule reads: W, directly from x, if the step is ordinary,
// else C. This is the only loop that is compiled for each rule and each set of its fields. Constants stay in registers
// over all blocks.
template <class Rule, unsigned kGiven, class G, class W, class S>
FASTSAM_ONCE void rule_blocks(W* z, const S* from, S* keep, const Beside<W>& x, int64_t n,
                              const FormU<compute_t<W>> whole, const Rule rule, bool past_caches) {
  using C = compute_t<W>;
  const bool ordinary = x.ordinary();
  const FormU<C> form = ordinary ? whole : whole.without_gradient();
  alignas(64) C made[kBlock];
  alignas(64) S unkept[kBlock];
  write_blocks(z, n, past_caches, [&](int64_t start, W* to, int64_t count) FASTSAM_EACH {
    const G* g;
    if constexpr (std::is_same_v<G, W>) g = x.g2 + start;
    if constexpr (std::is_same_v<G, C>) {
      if (!ordinary) {
        gradient_block(made, from + start, x, start, count, whole);
        g = made;
      }
    }
    const S* old = from + start;
    [[maybe_unused]] S* kept = keep == nullptr ? unkept : keep + start;
    const auto fields = x.state_at(start);
    C *s0 = fields[0], *s1 = fields[1], *s2 = fields[2];
    FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) {
      C state[kMostState] = {};
      if constexpr (has(kGiven, 0)) state[0] = s0[i];
      if constexpr (has(kGiven, 1)) state[1] = s1[i];
      if constexpr (has(kGiven, 2)) state[2] = s2[i];
      const C w = widen(old[i]);
      const C updated = rule.step(form.weight(w), form.gradient(w, widen(g[i]), C(0), C(0), C(0)), state, kGiven);
      if constexpr (has(kGiven, 0)) s0[i] = state[0];
      if constexpr (has(kGiven, 1)) s1[i] = state[1];
      if constexpr (has(kGiven, 2)) s2[i] = state[2];
      if constexpr (!std::is_same_v<W, S>) kept[i] = narrow<S>(updated);
      to[i] = narrow<W>(updated);
    }
    if constexpr (std::is_same_v<W, S>) {
      if (keep != nullptr) std::memcpy(kept, to, count * sizeof(W));
    }
  });
}

// Computes one piece of an update; from: the kept copy, or z itself. The ordinary step reads its gradients in place.
template <class Rule, class W, class S>
inline void rule_piece(W* z, const S* from, S* keep, const Beside<W>& x, int64_t n, const FormU<compute_t<W>>& form,
                       const Rule& rule, unsigned given, bool stream) {
  using C = compute_t<W>;
  const bool past_caches = stream && static_cast<const void*>(from) != static_cast<const void*>(z);
  with_given<Rule>(given, [&](auto mask) FASTSAM_EACH {
    constexpr unsigned kGiven = decltype(mask)::value;
    if (x.ordinary()) {
      rule_blocks<Rule, kGiven, W>(z, from, keep, x, n, form, rule, past_caches);
    } else {
      rule_blocks<Rule, kGiven, C>(z, from, keep, x, n, form, rule, past_caches);
    }
  });
}

template <template <class> class Rule>
inline void update_range(const UpdateArgs& args, bool stream, int64_t begin, int64_t end) {
  const bool stop = args.found_inf != nullptr && *args.found_inf != 0.0f;
  const double inverse = args.grad_scale != nullptr ? 1.0 / *args.grad_scale : 1.0;
  const unsigned given = args.given();
  const Call& call = args.call;
  with_types(call, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    using C = compute_t<W>;
    each_piece(call, begin, end, [&](int64_t row, int64_t segment, Piece piece) {
      W* z = at<W>(args.params, row, segment, piece.begin);
      O* o = at<O>(args.backup, call, row, segment, piece.begin);
      if (stop) {
        if (o != nullptr) copy_piece(z, o, piece.count);
        return;
      }
      const double* h = scalars(call, row, segment);
      const double t = args.steps == nullptr ? 0.0 : args.steps[row * args.slots + call.table[segment].slot] + 1.0;
      const FormU<C> form(h, inverse, args.sumsq != nullptr ? args.sumsq[row] : -1.0);
      const Rule<C> rule(h, t, args.first);
      Beside<W> beside{at<const W>(args.grads, row, segment, piece.begin),
                       at<const W>(args.g1, row, segment, piece.begin),
                       at<const C>(args.q, call, row, segment, piece.begin),
                       at<const C>(args.shift, call, row, segment, piece.begin),
                       {}};
      for (int i = 0; i < kMostState; ++i) beside.state[i] = at<C>(args.state[i], call, row, segment, piece.begin);
      if (o != nullptr) {
        rule_piece(z, static_cast<const O*>(o), args.keep ? o : nullptr, beside, piece.count, form, rule, given,
                   stream);
      } else {
        rule_piece(z, static_cast<const W*>(z), static_cast<W*>(nullptr), beside, piece.count, form, rule, given,
                   stream);
      }
    });
  });
  if (stream) stream_fence();
}
