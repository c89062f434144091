// update_. See per_isa.h. All functions are templates of the rule, because every rule is compiled separately.

#include "nontemporal.h"

template <class W, class S>
inline void copy_chunk(W* z, const S* from, int64_t n) {
  if (static_cast<const void*>(from) == static_cast<const void*>(z)) return;
  for (int64_t i = 0; i < n; ++i) z[i] = narrow<W>(widen(from[i]));
}

// Calls f with the mask as a constant, so that the loops are compiled for each set of fields.
template <class Rule, unsigned Mask = 0, class F>
inline __attribute__((always_inline)) void dispatch_state_mask(unsigned state_mask, const F& f) {
  if constexpr (Mask >> Rule::kState == 0) {
    if constexpr ((Mask & Rule::kNeeded) == Rule::kNeeded) {
      if (state_mask == Mask) return f(std::integral_constant<unsigned, Mask>{});
    }
    dispatch_state_mask<Rule, Mask + 1>(state_mask, f);
  }
}

// The operands that a chunk reads in addition to the weights; nullptr for an absent operand.
template <class W>
struct UpdateOperands {
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
FASTSAM_NOINLINE void gradient_block(compute_t<W>* d, const S* w, const UpdateOperands<W>& x, int64_t start, int64_t n,
                                     CombinedGradient<compute_t<W>> combined) {
  using C = compute_t<W>;
  const W *g2 = x.g2 + start, *g1 = x.g1 == nullptr ? nullptr : x.g1 + start;
  const C* q = x.q == nullptr ? nullptr : x.q + start;
  const C* shift = x.shift == nullptr ? nullptr : x.shift + start;
  FASTSAM_SIMD for (int64_t i = 0; i < n; ++i) {
    d[i] = combined.gradient(widen(w[i]), widen(g2[i]), g1 != nullptr ? widen(g1[i]) : C(0), q != nullptr ? q[i] : C(0),
                             shift != nullptr ? shift[i] : C(0));
  }
}

// Computes z = the new weights, rounded, and master = the new weights, for n elements, in blocks that stay in the
// first-level cache. G is the type of the gradients that the rule reads: W, directly from x, if the step is ordinary,
// else C. This is the only loop that is compiled for each rule and each set of its fields. Constants stay in registers
// over all blocks.
template <class Rule, unsigned kStateMask, class G, class W, class S>
FASTSAM_NOINLINE void rule_blocks(W* z, const S* from, S* master, const UpdateOperands<W>& x, int64_t n,
                                  const CombinedGradient<compute_t<W>> combined_whole, const Rule rule,
                                  bool past_caches) {
  using C = compute_t<W>;
  const bool ordinary = x.ordinary();
  const CombinedGradient<C> combined = ordinary ? combined_whole : combined_whole.without_gradient();
  alignas(64) C results[kBlock];
  alignas(64) S unkept[kBlock];
  write_blocks(z, n, past_caches, [&](int64_t start, W* to, int64_t count) FASTSAM_ALWAYS_INLINE {
    const G* g;
    if constexpr (std::is_same_v<G, W>) g = x.g2 + start;
    if constexpr (std::is_same_v<G, C>) {
      if (!ordinary) {
        gradient_block(results, from + start, x, start, count, combined_whole);
        g = results;
      }
    }
    const S* old = from + start;
    [[maybe_unused]] S* block_master = master == nullptr ? unkept : master + start;
    const auto fields = x.state_at(start);
    C *s0 = fields[0], *s1 = fields[1], *s2 = fields[2];
    FASTSAM_SIMD for (int64_t i = 0; i < count; ++i) {
      C state[kMostState] = {};
      if constexpr (has(kStateMask, 0)) state[0] = s0[i];
      if constexpr (has(kStateMask, 1)) state[1] = s1[i];
      if constexpr (has(kStateMask, 2)) state[2] = s2[i];
      const C w = widen(old[i]);
      // Gradients that are computed already do not depend on w: 0 times an infinite weight would be NaN.
      const C d = combined.gradient(ordinary ? w : C(0), widen(g[i]), C(0), C(0), C(0));
      const C updated = rule.step(combined.weight(w), d, state, kStateMask);
      if constexpr (has(kStateMask, 0)) s0[i] = state[0];
      if constexpr (has(kStateMask, 1)) s1[i] = state[1];
      if constexpr (has(kStateMask, 2)) s2[i] = state[2];
      if constexpr (!std::is_same_v<W, S>) block_master[i] = narrow<S>(updated);
      to[i] = narrow<W>(updated);
    }
    if constexpr (std::is_same_v<W, S>) {
      if (master != nullptr) std::memcpy(block_master, to, count * sizeof(W));
    }
  });
}

// Computes one chunk of an update; from: the kept copy, or z itself. The ordinary step reads its gradients in place.
template <class Rule, class W, class S>
inline void rule_chunk(W* z, const S* from, S* master, const UpdateOperands<W>& x, int64_t n,
                       const CombinedGradient<compute_t<W>>& combined, const Rule& rule, unsigned state_mask,
                       bool nontemporal) {
  using C = compute_t<W>;
  const bool past_caches = nontemporal && static_cast<const void*>(from) != static_cast<const void*>(z);
  dispatch_state_mask<Rule>(state_mask, [&](auto mask) FASTSAM_ALWAYS_INLINE {
    constexpr unsigned kStateMask = decltype(mask)::value;
    if (x.ordinary()) {
      rule_blocks<Rule, kStateMask, W>(z, from, master, x, n, combined, rule, past_caches);
    } else {
      rule_blocks<Rule, kStateMask, C>(z, from, master, x, n, combined, rule, past_caches);
    }
  });
}

template <template <class> class Rule>
inline void update_range(const UpdateArgs& args, bool nontemporal, int64_t begin, int64_t end) {
  const bool stop = args.found_inf != nullptr && *args.found_inf != 0.0f;
  const double inverse = args.grad_scale != nullptr ? 1.0 / *args.grad_scale : 1.0;
  const unsigned state_mask = args.state_mask();
  const Problem& problem = args.problem;
  dispatch_types(problem, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    using C = compute_t<W>;
    for_each_chunk(problem, begin, end, [&](int64_t row, int64_t segment, ChunkRange range) {
      W* z = at<W>(args.params, row, segment, range.begin);
      O* o = at<O>(args.backup, problem, row, segment, range.begin);
      if (stop) {
        if (o != nullptr) copy_chunk(z, o, range.count);
        return;
      }
      const double* h = scalars(problem, row, segment);
      const double t = args.steps == nullptr ? 0.0 : args.steps[row * args.slots + problem.table[segment].slot] + 1.0;
      const CombinedGradient<C> combined(h, inverse, args.sumsq != nullptr ? args.sumsq[row] : -1.0);
      const auto rule = rule_of<Rule<C>>(h, t, args.init_state);
      UpdateOperands<W> operands{at<const W>(args.grads, row, segment, range.begin),
                                 at<const W>(args.g1, row, segment, range.begin),
                                 at<const C>(args.q, problem, row, segment, range.begin),
                                 at<const C>(args.shift, problem, row, segment, range.begin),
                                 {}};
      for (int i = 0; i < kMostState; ++i) operands.state[i] = at<C>(args.state[i], problem, row, segment, range.begin);
      if (o != nullptr) {
        rule_chunk(z, static_cast<const O*>(o), args.write_master ? o : nullptr, operands, range.count, combined, rule,
                   state_mask, nontemporal);
      } else {
        rule_chunk(z, static_cast<const W*>(z), static_cast<W*>(nullptr), operands, range.count, combined, rule,
                   state_mask, nontemporal);
      }
    });
  });
  if (nontemporal) nontemporal_fence();
}
