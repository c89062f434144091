// The ops of csrc/ops.cpp for CUDA tensors. LibTorch's stable ABI only.
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "../tensor_args_fed.h"
#include "device_stream_guard.h"

namespace fastsam {
namespace {

// A row's ticket tells the last block of a kernel that it is the last. Kernels that may run at the same time need
// separate tickets, and every captured graph needs separate ones too. Two calls that write the same output cannot run
// at the same time, so tickets are assigned by the output's address. They need no memory of the call and no clearing,
// and they work in the replays of a graph. If the memory is used up (a hundred thousand different outputs in one
// process), a call allocates zeros, which costs one more small kernel.
class Tickets {
 public:
  Tickets(const DeviceStreamGuard& guard, const Tensor& output, int64_t rows) {
    static std::mutex mutex;
    static std::map<int, Memory> memories;
    const std::lock_guard<std::mutex> lock(mutex);
    Memory& memory = memories[guard.device()];
    if (memory.start == nullptr) DeviceStreamGuard::check("tickets", tickets_cuda(&memory.start, &memory.count));
    const auto key = std::make_pair(output.data_ptr(), rows);
    auto entry = memory.by_key.find(key);
    if (entry == memory.by_key.end() && memory.next + rows <= memory.count) {
      entry = memory.by_key.emplace(key, memory.next).first;
      memory.next += rows;
    }
    if (entry != memory.by_key.end()) {
      tickets_ = memory.start + entry->second;
    } else {
      own_ = torch::stable::new_zeros(output, {rows}, ScalarType::Int);
      tickets_ = static_cast<unsigned*>(own_->data_ptr());
    }
  }
  unsigned* get() const { return tickets_; }

 private:
  struct Memory {
    unsigned* start = nullptr;
    int64_t count = 0, next = 0;
    std::map<std::pair<void*, int64_t>, int64_t> by_key;
  };
  unsigned* tickets_;
  OptionalTensor own_;
};

// Allocates n partial sums. The memory returns to the allocator in stream order.
Tensor scratch(const Tensor& like, int64_t n) {
  return torch::stable::new_empty(like, {n > 0 ? n : 1}, ScalarType::Double);
}

// A call that adds up into `out`, whose address selects its tickets.
template <class Args>
void add_up(const char* name, const Tensor& out, const Args& args, int64_t (*partials_of)(const Problem&),
            int (*run)(const Args&, double*, unsigned*, void*)) {
  const DeviceStreamGuard guard(out);
  const Tickets tickets(guard, out, args.problem.rows);
  const Tensor partials = scratch(out, partials_of(args.problem));
  DeviceStreamGuard::check(name, run(args, static_cast<double*>(partials.data_ptr()), tickets.get(), guard.stream()));
}

void norm(const Tensor sumsq, const Tensors grads, const Tensors weights, const Tensor table, const Tensor hparams,
          bool accumulate) {
  const NormArgs args = norm_args(sumsq, grads, weights, table, hparams, accumulate);
  add_up("norm_", sumsq, args, norm_partials_cuda, norm_cuda);
}

void perturb(const Tensors params, const Tensor backup, const Tensors grads, const Tensor table, const Tensor hparams,
             const Tensor sumsq, bool save, const OptionalTensor seed) {
  const PerturbArgs args = perturb_args(params, backup, grads, table, hparams, sumsq, save, seed);
  const DeviceStreamGuard guard(backup);
  DeviceStreamGuard::check("perturb_", args.seed != nullptr ? perturb_stochastic_cuda(args, guard.stream())
                                                            : perturb_cuda(args, guard.stream()));
}

void restore(const Tensors params, const Tensor backup, const Tensor table) {
  const RestoreArgs args = restore_args(params, backup, table);
  const DeviceStreamGuard guard(backup);
  DeviceStreamGuard::check("restore_", restore_cuda(args, guard.stream()));
}

void dual_norm(const Tensor sumsq, const Tensors grads, const Tensor mu, const Tensor s, const Tensor table,
               const Tensor hparams, bool accumulate) {
  const DualArgs args = dual_norm_args(sumsq, grads, mu, s, table, hparams, accumulate);
  add_up("dual_norm_", sumsq, args, dual_norm_partials_cuda, dual_norm_cuda);
}

void dual_perturb(const Tensors params, const Tensor backup, const Tensor mu, const Tensors grads, const Tensor s,
                  const Tensor table, const Tensor hparams, const Tensor sumsq, const OptionalTensor eps) {
  const DualArgs args = dual_perturb_args(params, backup, mu, grads, s, table, hparams, sumsq, eps);
  const DeviceStreamGuard guard(backup);
  DeviceStreamGuard::check("dual_perturb_", dual_perturb_cuda(args, guard.stream()));
}

void inner(const Tensor out, const Tensors x, const Tensors y, const Tensor table, bool accumulate) {
  const InnerArgs args = inner_args(out, x, y, table, accumulate);
  add_up("inner_", out, args, inner_partials_cuda, inner_cuda);
}

void accumulate(const Tensor high, const Tensor low, const Tensor x, double factor, const OptionalTensor base,
                const OptionalTensor largest) {
  const FixedPointArgs args = fixed_point_args(high, low, x, factor, base, largest);
  const DeviceStreamGuard guard(high);
  if (args.largest == nullptr) {  // nothing is left to do for the last block
    DeviceStreamGuard::check("accumulate_", accumulate_cuda(args, nullptr, nullptr, guard.stream()));
    return;
  }
  const Tickets tickets(guard, high, 1);
  const Tensor partials = scratch(high, accumulate_partials_cuda(args));
  DeviceStreamGuard::check(
      "accumulate_", accumulate_cuda(args, static_cast<double*>(partials.data_ptr()), tickets.get(), guard.stream()));
}

void update_norm(const Tensor sumsq, const Tensors params, const OptionalTensor backup, const Tensors grads,
                 const Tensor table, const Tensor hparams, const Tensors g1, const OptionalTensor q,
                 const OptionalTensor grad_scale, bool accumulate) {
  const UpdateArgs args = update_norm_args(sumsq, params, backup, grads, table, hparams, g1, q, grad_scale, accumulate);
  add_up("update_norm_", sumsq, args, update_norm_partials_cuda, update_norm_cuda);
}

void update(const Tensors params, const OptionalTensor backup, const Tensors grads, const Tensor table,
            const Tensor hparams, const std::string rule, const OptionalTensor state0, const OptionalTensor state1,
            const OptionalTensor state2, const OptionalTensor steps, const Tensors g1, const OptionalTensor q,
            const OptionalTensor sumsq_v, const OptionalTensor grad_scale, const OptionalTensor found_inf,
            bool init_state, bool write_master, const OptionalTensor shift) {
  const UpdateArgs args = update_args(params, backup, grads, table, hparams, rule, {state0, state1, state2}, steps, g1,
                                      q, sumsq_v, grad_scale, found_inf, init_state, write_master, shift);
  const DeviceStreamGuard guard(hparams);
  std::optional<Tickets> tickets;
  if (steps.has_value()) tickets.emplace(guard, *steps, args.problem.rows);
  DeviceStreamGuard::check("update_", args.rule->launch(args, tickets ? tickets->get() : nullptr, guard.stream()));
}

}  // namespace
}  // namespace fastsam

STABLE_TORCH_LIBRARY_IMPL(fastsam, CUDA, m) {
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
