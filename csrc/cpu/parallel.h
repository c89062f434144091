// The CPU kernels over all chunks of a call: distribution over threads, and the choice of stores past the caches.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <vector>

#include "../rules.h"

namespace fastsam {

// Smallest number of elements for a thread. The cost of starting a thread is about the work on 10,000 elements.
constexpr int64_t kGrain = 16384;

// Returns the bytes of the last-level cache that one core uses. On some machines sysconf returns the sum over a
// processor's parts, in a virtual machine even of parts that it does not use. So the kernel's file is read first.
inline int64_t last_level_cache() {
  static const int64_t bytes = [] {
    int64_t kilobytes = 0;
    if (std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (std::fscanf(file, "%" SCNd64 "K", &kilobytes) != 1) kilobytes = 0;
      std::fclose(file);
    }
    if (kilobytes > 0) return kilobytes << 10;
    const long cache_size = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return cache_size > 0 ? static_cast<int64_t>(cache_size) : int64_t{32} << 20;
  }();
  return bytes;
}

// Returns true if streamed stores are faster: if the call's buffers do not fit the last-level cache. Streamed stores
// save the fetch of an overwritten line, and cost the next reader a miss.
inline bool use_nontemporal_stores(const Problem& problem, int64_t bytes_per_element) {
  return problem.elements() * bytes_per_element > last_level_cache();
}

template <class F>
inline void parallel_for_chunks(const Problem& problem, const F& range) {
  const int64_t units = problem.rows * problem.chunks(), elements = problem.elements();
  if (elements <= kGrain) {
    if (units > 0) range(0, units);
  } else {
    torch::stable::parallel_for(0, units, std::max<int64_t>(1, units * kGrain / elements), range);
  }
}

// Adds up each row's partial sums in the order of its chunks.
inline void reduce(const Problem& problem, const std::vector<double>& partials, double* sumsq, bool accumulate) {
  for (int64_t row = 0; row < problem.rows; ++row) {
    double total = 0.0;
    for (int64_t i = 0; i < problem.chunks(); ++i) total += partials[row * problem.chunks() + i];
    sumsq[row] = accumulate ? sumsq[row] + total : total;
  }
}

inline void run_norm(const NormArgs& args) {
  std::vector<double> partials(args.problem.rows * args.problem.chunks());
  parallel_for_chunks(args.problem, [&](int64_t begin, int64_t end) { norm_range(args, partials.data(), begin, end); });
  reduce(args.problem, partials, args.sumsq, args.accumulate);
}

inline void run_perturb(const PerturbArgs& args) {
  const bool nontemporal =
      use_nontemporal_stores(args.problem, 2 * size_of(args.problem.weight) + size_of(args.problem.backup_type));
  parallel_for_chunks(args.problem, [&](int64_t begin, int64_t end) { perturb_range(args, nontemporal, begin, end); });
}

// Runs over ranges of elements, each of all rows. A row's largest number is the maximum over its ranges, in any order.
inline void run_accumulate(const FixedPointArgs& args) {
  std::vector<uint64_t> largest(args.rows);
  if (args.n * args.rows <= kGrain) {
    accumulate_range(args, largest.data(), 0, args.n);
  } else {
    std::mutex mutex;
    torch::stable::parallel_for(0, args.n, std::max<int64_t>(1, kGrain / args.rows), [&](int64_t begin, int64_t end) {
      std::vector<uint64_t> row_sums(args.rows);
      accumulate_range(args, row_sums.data(), begin, end);
      const std::lock_guard<std::mutex> lock(mutex);
      for (int64_t row = 0; row < args.rows; ++row) largest[row] = std::max(largest[row], row_sums[row]);
    });
  }
  for (int64_t row = 0; row < args.rows && args.largest != nullptr; ++row) {
    args.largest[row] =
        args.type == Type::f64 ? magnitude_of(largest[row]) : magnitude_of(static_cast<uint32_t>(largest[row]));
  }
}

// Counts a step of a row, after its update.
inline void count_step(const UpdateArgs& args, int64_t row) {
  if (!args.rule->counts) return;
  for (int64_t i = 0; i < args.problem.segments; ++i) args.steps[row * args.slots + args.problem.table[i].slot] += 1.0f;
}

inline void run_update(const UpdateArgs& args) {
  const UpdateRule& rule = *args.rule;
  const auto stored = static_cast<int64_t>((1 + rule.fields) * size_of(args.problem.backup_type));
  const bool nontemporal = use_nontemporal_stores(args.problem, 2 * size_of(args.problem.weight) + stored);
  parallel_for_chunks(args.problem, [&](int64_t begin, int64_t end) { rule.range(args, nontemporal, begin, end); });
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  for (int64_t row = 0; row < args.problem.rows; ++row) count_step(args, row);
}

}  // namespace fastsam
