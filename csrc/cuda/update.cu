// update_ on CUDA with the rule FASTSAM_RULE, for which this file is compiled (../rules.h).
#include "../rules.h"
#include "elementwise.cuh"
#include "reduce.cuh"
#include FASTSAM_RULE_FILE

namespace fastsam {
namespace {

// General: g1, q or shift is given. The ordinary step uses no registers or accesses for them.
template <template <class> class Rule_, class W, class O, bool General>
struct Update {
  using C = compute_t<W>;
  static constexpr int kState = Rule_<C>::kState;
  static constexpr int kVecSize = kVecBytes / sizeof(C), kPowers = Rule_<C>::kPowers;
  // Two turns at a time if they fit the registers. They do not with several fields, nor in half precision with a rule
  // of roots and quotients (the rules that count steps).
  static constexpr int kUnroll = General || kState > 1 || (Rule_<C>::kCounts && sizeof(W) == 2) ? 1 : 2;
  VectorPtr<W, kVecSize> z;
  VectorPtr<O, kVecSize> from;  // the unperturbed weights: backup, or z
  VectorPtr<const W, kVecSize> g2, g1;
  VectorPtr<const C, kVecSize> q, shift;
  VectorPtr<C, kVecSize> state[kState];
  unsigned state_mask;            // a bit for each field of the state that is given
  bool init_state, write_master;  // the fields are not set yet; backup is written too

  struct Rule {
    CombinedGradient<C> combined;
    Rule_<C> rule;
    bool stop;
  };

  template <int N>
  struct Loaded {
    AlignedVector<O, N> from;
    AlignedVector<W, N> g2, g1;
    AlignedVector<C, N> q, shift, state[kState];
  };
  __device__ __forceinline__ bool has_field(int k) const { return has(Rule_<C>::kNeeded, k) || state[k]; }

  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    from.read(x.from, i);
    g2.read(x.g2, i);
    if (General && g1) g1.read(x.g1, i);
    if (General && q) q.read(x.q, i);
    if (General && shift) shift.read(x.shift, i);
#pragma unroll
    for (int k = 0; k < kState; ++k) {
      if (has_field(k) && !init_state) state[k].read(x.state[k], i);
    }
  }
  template <int N>
  __device__ __forceinline__ void store(Loaded<N>& x, int i, const Rule& rule) const {
    AlignedVector<W, N> out;
    if (rule.stop) {
#pragma unroll
      for (int lane = 0; lane < N; ++lane) out.x[lane] = convert<W>(x.from.x[lane]);
      z.write(out, i);
      return;
    }
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      const C w = widen(x.from.x[lane]);
      const C g1_ = General && g1 ? widen(x.g1.x[lane]) : C(0), q_ = General && q ? x.q.x[lane] : C(0);
      const C shift_ = General && shift ? x.shift.x[lane] : C(0);
      const C d = rule.combined.gradient(w, widen(x.g2.x[lane]), g1_, q_, shift_);
      C states[kState];
#pragma unroll
      for (int k = 0; k < kState; ++k) states[k] = x.state[k].x[lane];
      const C updated = rule.rule.step(rule.combined.weight(w), d, states, state_mask);
#pragma unroll
      for (int k = 0; k < kState; ++k) x.state[k].x[lane] = states[k];
      x.from.x[lane] = narrow<O>(updated);
      out.x[lane] = narrow<W>(updated);
    }
#pragma unroll
    for (int k = 0; k < kState; ++k) {
      if (has_field(k)) state[k].write(x.state[k], i);
    }
    if (write_master) from.write(x.from, i);
    z.write(out, i);
  }
};

template <class SegmentMetadata>
struct UpdateParams {
  SegmentMetadata table;  // lists: params, gradients, and g1 in the general form
  Scalars scalars;
  Field backup, q, shift;
  Field state[kMostState];
  const double* sumsq_v;
  float* steps;
  int64_t slots;
  unsigned* tickets;
  const float *grad_scale, *found_inf;
  unsigned state_mask;
  bool init_state, write_master;
};

template <template <class> class Rule, class W, class O, bool General, class Params>
__device__ __forceinline__ void update_unit(const Params& p, const Tile& tile) {
  using C = compute_t<W>;
  using Op = Update<Rule, W, O, General>;
  O* backup = at<O>(p.backup, p.table, tile);
  W* z = at<W>(p.table, 0, tile);
  const W* g1 = nullptr;
  if constexpr (General) g1 = at<const W>(p.table, 2, tile);
  // Without backup the two types are the same.
  Op op{z,
        backup != nullptr ? backup : reinterpret_cast<O*>(z),
        at<const W>(p.table, 1, tile),
        g1,
        at<const C>(p.q, p.table, tile),
        at<const C>(p.shift, p.table, tile),
        {},
        p.state_mask,
        p.init_state,
        p.write_master && backup != nullptr};
#pragma unroll
  for (int k = 0; k < Op::kState; ++k) op.state[k] = at<C>(p.state[k], p.table, tile);
  const double* h = p.scalars.of(p.table, tile);
  elementwise(
      op, tile,
      [&](int lane) {
        if (lane < kNumHParams) return h[lane];
        if (lane == SUMSQ) return p.sumsq_v != nullptr ? p.sumsq_v[tile.row] : -1.0;
        if (Rule<C>::kCounts && lane == STEPS) {
          return static_cast<double>(p.steps[tile.row * p.slots + p.table.slot[tile.segment]]);
        }
        return lane == GRAD_SCALE  ? scalar_or(p.grad_scale, 1.0)
               : lane == FOUND_INF ? scalar_or(p.found_inf, 0.0)
                                   : 0.0;
      },
      [init_state = p.init_state](const double* x) {
        return typename Op::Rule{CombinedGradient<C>(x, 1.0 / x[GRAD_SCALE], x[SUMSQ]),
                                 Rule<C>(x, x + POWERS, x[STEPS] + 1.0, init_state), x[FOUND_INF] != 0.0};
      });
}

template <template <class> class Rule, class W, class O, bool General, class Params>
__global__ void __launch_bounds__(kThreads) update_kernel(const Params __grid_constant__ p) {
  const Tile tile = tile_of(p.table, blockIdx.x);
  if (tile.count > 0) update_unit<Rule, W, O, General>(p, tile);
  if constexpr (Rule<compute_t<W>>::kCounts) {
    // The steps are counted after every block of the row has read them, also the steps of empty segments.
    if (!last_of_row(p.tickets + tile.row, p.table.blocks(), false)) return;
    if (p.found_inf != nullptr && *p.found_inf != 0.0f) return;
    float* steps = p.steps + tile.row * p.slots;
    for (int i = threadIdx.x; i < p.table.segments; i += kThreads) steps[p.table.slot[i]] += 1.0f;
  }
}

template <template <class> class Rule, bool General>
struct UpdateStep : Elementwise<UpdateArgs> {
  unsigned* tickets;

  template <class W, class O>
  using Element = Update<Rule, W, O, General>;
  template <class SegmentMetadata>
  UpdateParams<SegmentMetadata> params(const SegmentMetadata& table, const Part&) const {
    return {table,
            scalars_of(args.problem),
            args.backup,
            args.q,
            args.shift,
            {args.state[0], args.state[1], args.state[2]},
            args.sumsq,
            args.steps,
            args.slots,
            tickets,
            args.grad_scale,
            args.found_inf,
            args.state_mask(),
            args.init_state,
            args.write_master};
  }
  template <class W, class O, class Params>
  static auto kernel() {
    return update_kernel<Rule, W, O, General, Params>;
  }
  bool finishes() const { return args.rule->counts; }
};

int launch_update(const UpdateArgs& args, unsigned* tickets, void* stream) {
  const bool general = args.g1.defined() || args.q.data != nullptr || args.shift.data != nullptr;
  return general ? launch_chunks(UpdateStep<FASTSAM_RULE::Rule, true>{{args}, tickets}, args.problem,
                                 std::array{&args.params, &args.grads, &args.g1}, stream)
                 : launch_chunks(UpdateStep<FASTSAM_RULE::Rule, false>{{args}, tickets}, args.problem,
                                 std::array{&args.params, &args.grads}, stream);
}

[[maybe_unused]] const bool entered = [] {
  register_rule<FASTSAM_RULE::Rule<float>>(FASTSAM_TEXT(FASTSAM_RULE)).launch = launch_update;
  return true;
}();

}  // namespace
}  // namespace fastsam
