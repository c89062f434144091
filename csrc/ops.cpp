// The schemas of all ops, and their registration for the CPU. Only LibTorch's stable ABI is used, so one binary serves
// torch 2.10 and later. kernels/reference.py describes every argument.
#include "cpu/parallel.h"
#include "tensor_args_fed.h"

namespace fastsam {
namespace {

void norm(const Tensor sumsq, const Tensors grads, const Tensors weights, const Tensor table, const Tensor hparams,
          bool accumulate) {
  const NormArgs args = norm_args(sumsq, grads, weights, table, hparams, accumulate);
  for (int64_t i = 0; i < args.problem.rows * args.problem.groups; ++i) {
    STD_TORCH_CHECK(
        args.problem.hparams[i * kNumHParams + ADAPTIVE] == 0.0 || args.weights.defined() || args.problem.segments == 0,
        "weights are needed when a group is adaptive");
  }
  run_norm(args);
}

void perturb(const Tensors params, const Tensor backup, const Tensors grads, const Tensor table, const Tensor hparams,
             const Tensor sumsq, bool save, const OptionalTensor seed) {
  run_perturb(perturb_args(params, backup, grads, table, hparams, sumsq, save, seed));
}

void restore(const Tensors params, const Tensor backup, const Tensor table) {
  const RestoreArgs args = restore_args(params, backup, table);
  const bool stream =
      use_nontemporal_stores(args.problem, size_of(args.problem.weight) + size_of(args.problem.backup_type));
  parallel_for_chunks(args.problem, [&](int64_t begin, int64_t end) { restore_range(args, stream, begin, end); });
}

void dual_norm(const Tensor sumsq, const Tensors grads, const Tensor mu, const Tensor s, const Tensor table,
               const Tensor hparams, bool accumulate) {
  const DualArgs args = dual_norm_args(sumsq, grads, mu, s, table, hparams, accumulate);
  std::vector<double> partials(args.problem.rows * args.problem.chunks());
  parallel_for_chunks(args.problem,
                      [&](int64_t begin, int64_t end) { dual_norm_range(args, partials.data(), begin, end); });
  reduce(args.problem, partials, args.sumsq, accumulate);
}

void dual_perturb(const Tensors params, const Tensor backup, const Tensor mu, const Tensors grads, const Tensor s,
                  const Tensor table, const Tensor hparams, const Tensor sumsq, const OptionalTensor eps) {
  const DualArgs args = dual_perturb_args(params, backup, mu, grads, s, table, hparams, sumsq, eps);
  const bool stream =
      use_nontemporal_stores(args.problem, 2 * size_of(args.problem.weight) + 3 * size_of(args.problem.backup_type));
  parallel_for_chunks(args.problem, [&](int64_t begin, int64_t end) { dual_perturb_range(args, stream, begin, end); });
}

void inner(const Tensor out, const Tensors x, const Tensors y, const Tensor table, bool accumulate) {
  const InnerArgs args = inner_args(out, x, y, table, accumulate);
  const int64_t chunks = args.problem.chunks();
  std::vector<double> partials(2 * args.problem.rows * chunks);
  parallel_for_chunks(args.problem,
                      [&](int64_t begin, int64_t end) { inner_range(args, partials.data(), begin, end); });
  for (int64_t i = 0; i < 2 * args.problem.rows; ++i) {
    double total = 0.0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) total += partials[2 * (i / 2 * chunks + chunk) + i % 2];
    args.out[i] = accumulate ? args.out[i] + total : total;
  }
}

void accumulate(const Tensor high, const Tensor low, const Tensor x, double factor, const OptionalTensor base,
                const OptionalTensor largest) {
  run_accumulate(fixed_point_args(high, low, x, factor, base, largest));
}

void update_norm(const Tensor sumsq, const Tensors params, const OptionalTensor backup, const Tensors grads,
                 const Tensor table, const Tensor hparams, const Tensors g1, const OptionalTensor q,
                 const OptionalTensor grad_scale, bool accumulate) {
  const UpdateArgs args = update_norm_args(sumsq, params, backup, grads, table, hparams, g1, q, grad_scale, accumulate);
  std::vector<double> partials(args.problem.rows * args.problem.chunks());
  parallel_for_chunks(args.problem,
                      [&](int64_t begin, int64_t end) { update_norm_range(args, partials.data(), begin, end); });
  reduce(args.problem, partials, args.sumsq, accumulate);
}

void update(const Tensors params, const OptionalTensor backup, const Tensors grads, const Tensor table,
            const Tensor hparams, const std::string rule, const OptionalTensor state0, const OptionalTensor state1,
            const OptionalTensor state2, const OptionalTensor steps, const Tensors g1, const OptionalTensor q,
            const OptionalTensor sumsq_v, const OptionalTensor grad_scale, const OptionalTensor found_inf,
            bool init_state, bool write_master, const OptionalTensor shift) {
  run_update(update_args(params, backup, grads, table, hparams, rule, {state0, state1, state2}, steps, g1, q, sumsq_v,
                         grad_scale, found_inf, init_state, write_master, shift));
}

}  // namespace
}  // namespace fastsam

STABLE_TORCH_LIBRARY(fastsam, m) {
  m.def(
      "norm_(Tensor(a!) sumsq, Tensor[] grads, Tensor[] weights, Tensor table, Tensor hparams, bool accumulate=False) "
      "-> "
      "()");
  m.def(
      "perturb_(Tensor(a!)[] params, Tensor(b!) backup, Tensor[] grads, Tensor table, Tensor hparams, Tensor sumsq, "
      "bool "
      "save, Tensor? seed=None) -> ()");
  m.def("restore_(Tensor(a!)[] params, Tensor backup, Tensor table) -> ()");
  m.def(
      "dual_norm_(Tensor(a!) sumsq, Tensor[] grads, Tensor mu, Tensor s, Tensor table, Tensor hparams, bool "
      "accumulate=False) -> ()");
  m.def(
      "dual_perturb_(Tensor(a!)[] params, Tensor backup, Tensor(b!) mu, Tensor[] grads, Tensor s, Tensor table, Tensor "
      "hparams, Tensor sumsq, Tensor(c!)? eps=None) -> ()");
  m.def("inner_(Tensor(a!) out, Tensor[] x, Tensor[] y, Tensor table, bool accumulate=False) -> ()");
  m.def(
      "accumulate_(Tensor(a!) high_, Tensor(b!) low_, Tensor x, float factor, Tensor? base=None, Tensor(c!)? "
      "largest_=None) -> ()");
  m.def(
      "update_norm_(Tensor(a!) sumsq, Tensor[] params, Tensor? backup, Tensor[] grads, Tensor table, Tensor hparams, "
      "Tensor[] "
      "g1, Tensor? q=None, Tensor? grad_scale=None, bool accumulate=False) -> ()");
  m.def(
      "update_(Tensor(a!)[] params, Tensor(b!)? backup, Tensor[] grads, Tensor table, Tensor hparams, str rule, "
      "Tensor(c!)? state0, Tensor(d!)? state1, Tensor(e!)? state2, Tensor(f!)? steps, Tensor[] g1, Tensor? "
      "q=None, Tensor? sumsq_v=None, Tensor? grad_scale=None, Tensor? found_inf=None, bool init_state=False, bool "
      "write_master=False, Tensor? shift=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastsam, CPU, m) {
  m.impl("norm_", TORCH_BOX(&fastsam::norm));
  m.impl("perturb_", TORCH_BOX(&fastsam::perturb));
  m.impl("restore_", TORCH_BOX(&fastsam::restore));
  m.impl("dual_norm_", TORCH_BOX(&fastsam::dual_norm));
  m.impl("dual_perturb_", TORCH_BOX(&fastsam::dual_perturb));
  m.impl("inner_", TORCH_BOX(&fastsam::inner));
  m.impl("accumulate_", TORCH_BOX(&fastsam::accumulate));
  m.impl("update_norm_", TORCH_BOX(&fastsam::update_norm));
  m.impl("update_", TORCH_BOX(&fastsam::update));
}
