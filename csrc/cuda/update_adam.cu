// update_adam_ on CUDA.
#include "elementwise.cuh"
#include "reduce.cuh"

namespace fastsam {
namespace {

template <class W, class O>
struct Adam {
  using C = compute_t<W>;
  static constexpr int kWidth = kPackBytes / sizeof(C), kTurns = 1;
  Operand<W, kWidth> z;
  Operand<O, kWidth> from;  // the unperturbed weights: origin, or z
  Operand<const W, kWidth> g;
  Operand<C, kWidth> m, v;
  bool keep;  // origin is written too

  struct Rule {
    AdamRule<C> adam;
    bool stop;
  };

  template <int N>
  struct Loaded {
    Pack<O, N> from;
    Pack<W, N> g;
    Pack<C, N> m, v;
  };
  template <int N>
  __device__ __forceinline__ void load(Loaded<N>& x, int i) const {
    from.read(x.from, i);
    g.read(x.g, i);
    m.read(x.m, i);
    v.read(x.v, i);
  }
  template <int N>
  __device__ __forceinline__ void store(Loaded<N>& x, int i, const Rule& rule) const {
    Pack<W, N> out;
    if (rule.stop) {
#pragma unroll
      for (int lane = 0; lane < N; ++lane) out.x[lane] = convert<W>(x.from.x[lane]);
      z.write(out, i);
      return;
    }
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      const C updated = rule.adam.step(widen(x.from.x[lane]), widen(x.g.x[lane]), x.m.x[lane], x.v.x[lane]);
      x.from.x[lane] = narrow<O>(updated);
      out.x[lane] = narrow<W>(updated);
    }
    m.write(x.m, i);
    v.write(x.v, i);
    if (keep) from.write(x.from, i);
    z.write(out, i);
  }
};

template <class Table>
struct AdamParams {
  Table table;  // lists: z, gradients
  Scalars scalars;
  Field origin, exp_avg, exp_avg_sq;
  float* steps;
  int64_t slots;
  unsigned* tickets;
  const float *grad_scale, *found_inf;
  bool decoupled, keep;
};

template <class W, class O, class Params>
__global__ void __launch_bounds__(kThreads) update_adam_kernel(const Params __grid_constant__ p) {
  using C = compute_t<W>;
  using Op = Adam<W, O>;
  const Unit unit = unit_of(p.table, blockIdx.x);
  float* steps = p.steps + unit.row * p.slots;
  if (unit.count > 0) {
    O* origin = at<O>(p.origin, p.table, unit);
    W* z = at<W>(p.table, 0, unit);
    // Without origin the two types are the same.
    const Op op{z,
                origin != nullptr ? origin : reinterpret_cast<O*>(z),
                at<const W>(p.table, 1, unit),
                at<C>(p.exp_avg, p.table, unit),
                at<C>(p.exp_avg_sq, p.table, unit),
                p.keep && origin != nullptr};
    const double* h = p.scalars.of(p.table, unit);
    elementwise(
        op, unit.count,
        [&](int lane) {
          if (lane < kWidth) return h[lane];
          if (lane == STEPS) return static_cast<double>(steps[p.table.slot[unit.segment]]);
          return lane == GRAD_SCALE  ? scalar_or(p.grad_scale, 1.0)
                 : lane == FOUND_INF ? scalar_or(p.found_inf, 0.0)
                                     : 0.0;
        },
        [decoupled = p.decoupled](const double* x) {
          return typename Op::Rule{AdamRule<C>(x, 1.0 / x[GRAD_SCALE], x[STEPS] + 1.0, decoupled), x[FOUND_INF] != 0.0};
        });
  }
  // The steps are counted when every block of the row has read them, empty segments' too.
  if (!last_of_row(p.tickets + unit.row, p.table.blocks())) return;
  if (p.found_inf != nullptr && *p.found_inf != 0.0f) return;
  for (int i = threadIdx.x; i < p.table.segments; i += kThreads) steps[p.table.slot[i]] += 1.0f;
}

}  // namespace

int update_adam_cuda(const UpdateArgs& args, unsigned* tickets, void* stream) {
  const Call& call = args.call;
  return with_types(call, [&](auto weight, auto stored) {
    using W = decltype(weight);
    using O = decltype(stored);
    const int64_t chunk = elementwise_chunk<Adam<W, O>>(call);
    return each_part(call, std::array{&args.z, &args.grads}, chunk, [&](const auto& table, const Part&) {
      const AdamParams<std::decay_t<decltype(table)>> params{
          table,      scalars_of(call), args.origin,     args.momentum,  args.exp_avg_sq, args.steps,
          args.slots, tickets,          args.grad_scale, args.found_inf, args.decoupled,  args.keep};
      return launch(update_adam_kernel<W, O, std::decay_t<decltype(params)>>, call.rows * table.blocks(), stream,
                    params);
    });
  });
}

}  // namespace fastsam
