// The two passes of an optimizer's step without torch's dispatcher, called by kernels/direct_calls.py. Unpacking the
// arguments of an op costs 3 us, and 0.13 us per tensor and list, more than the work on a small model. Arrays of
// addresses cost almost nothing.
//
// words: the 64-bit words below, then the address of each weight tensor, one per segment. grads: the address of each
// gradient. There is one row, and no checks.
#pragma once

#include "rules.h"

#define FASTSAM_EXPORT extern "C" __attribute__((visibility("default")))

namespace fastsam {

enum ArgSlot : int {
  SEGMENTS,
  TABLE,
  HPARAMS,
  WEIGHT,  // Type of the weights and the gradients
  STORED,  // Type of backup
  BACKUP,
  LAUNCH,   // the address of 64-bit words for CUDA, in the order of LaunchSlot
  WEIGHTS,  // the first of the addresses
};

enum LaunchSlot : int {
  DEVICE,    // the index of the GPU
  STREAM,    // a cudaStream_t
  PARTIALS,  // partial sums of norm_
  TICKETS,   // two tickets, for norm_ and update_
};

template <class T>
T* pointer(int64_t word) {
  return reinterpret_cast<T*>(word);
}

inline Problem problem_of(const int64_t* words) {
  const auto table = pointer<const Segment>(words[TABLE]);
  Problem problem = problem_of(table, words[SEGMENTS], 1, 1, pointer<const double>(words[HPARAMS]), -1);
  problem.weight = static_cast<Type>(words[WEIGHT]);
  problem.backup_type = static_cast<Type>(words[STORED]);
  return problem;
}

inline List list_of(const int64_t* addresses, const Problem& problem) {
  void* const* first = reinterpret_cast<void* const*>(addresses);
  return List{std::vector<void*>(first, first + problem.segments), std::vector<int64_t>(problem.segments)};
}

// Returns the operand in backup's place if it has the dtype of the weights and is not a field. The table's offsets are
// relative to its first address.
inline List list_in_backup(const int64_t* words, const Problem& problem) {
  List list{std::vector<void*>(problem.segments), std::vector<int64_t>(problem.segments)};
  const auto size = static_cast<int64_t>(size_of(problem.backup_type));
  for (int64_t i = 0; i < problem.segments; ++i) {
    list.start[i] = pointer<char>(words[BACKUP]) + problem.table[i].offset * size;
  }
  return list;
}

inline PerturbArgs perturb_of(const int64_t* words, const int64_t* grads, const double* sumsq, bool save) {
  PerturbArgs args{problem_of(words)};
  args.params = list_of(words + WEIGHTS, args.problem);
  args.grads = list_of(grads, args.problem);
  args.backup = Field{pointer<void>(words[BACKUP]), 0};
  args.sumsq = sumsq;
  args.save = save;
  return args;
}

// Returns the arguments of the perturbation's norm. Adaptive groups need weights, which are in backup without `save`.
inline NormArgs norm_of(const int64_t* words, const PerturbArgs& args, double* sumsq, bool adaptive) {
  const List weights = !adaptive ? List{} : args.save ? args.params : list_in_backup(words, args.problem);
  return NormArgs{args.problem, args.grads, weights, sumsq, false};
}

// state: the addresses of the rule's fields (nullptr for an absent field), then the address of the steps.
inline UpdateArgs update_of(const int64_t* words, const int64_t* grads, const void* rule, void* const* state,
                            bool init_state, bool write_master) {
  UpdateArgs args{problem_of(words)};
  args.params = list_of(words + WEIGHTS, args.problem);
  args.grads = list_of(grads, args.problem);
  args.backup = Field{pointer<void>(words[BACKUP]), 0};
  args.rule = static_cast<const UpdateRule*>(rule);
  for (int i = 0; i < kMostState; ++i) args.state[i] = Field{state[i], 0};
  args.steps = static_cast<float*>(state[kMostState]);
  args.init_state = init_state;
  args.write_master = write_master;
  return args;
}

// Returns the result of f, or -1 if it throws.
template <class F>
int guarded(const F& f) noexcept {
  try {
    return f();
  } catch (...) {
    return -1;
  }
}

}  // namespace fastsam
