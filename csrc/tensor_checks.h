// Checks of the table and of every tensor of a call, so that the kernels access no memory outside of them.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kernel_args.h"

namespace fastsam {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// Returns the index of a GPU, -1 for the CPU.
inline int device_of(const Tensor& tensor) { return tensor.is_cpu() ? -1 : tensor.get_device_index(); }

// Returns false if the storage ends before the last element, as after a storage's resize_.
inline bool has_memory(const Tensor& tensor) {
  int64_t bytes = 0, last = tensor.storage_offset();
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    last += (sizes[i] - 1) * strides[i];
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  return (last + 1) * static_cast<int64_t>(tensor.element_size()) <= bytes;
}

inline void check_device_and_storage(const Tensor& tensor, int device, const char* name) {
  STD_TORCH_CHECK(device_of(tensor) == device, name, " must be on the device of the others");
  STD_TORCH_CHECK(has_memory(tensor), name, " must have all of its memory; its storage was freed or cut");
}

// Returns true if the dimensions from `first` on fill one block of memory without gaps or overlaps, in any order.
inline bool is_dense(const Tensor& tensor, size_t first) {
  if (tensor.is_contiguous()) return true;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::vector<std::pair<int64_t, int64_t>> steps;
  for (size_t i = first; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1) steps.emplace_back(strides[i], sizes[i]);
  }
  std::sort(steps.begin(), steps.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : steps) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// Kernels read the tensors of one segment in memory order, so tensors of one shape must have the same order.
inline void check_order(const Tensors& a, const Tensors& b, const Problem& problem, const char* names) {
  if (a.size() != b.size()) return;
  for (size_t i = 0; i < a.size(); ++i) {
    const auto sizes = a[i].sizes(), other_sizes = b[i].sizes();
    if (sizes.size() != other_sizes.size() || !std::equal(sizes.begin(), sizes.end(), other_sizes.begin())) continue;
    const auto x = a[i].strides(), y = b[i].strides();
    for (size_t d = problem.rows == 1 ? 0 : 1; d < sizes.size() && a[i].numel() > 0; ++d) {
      STD_TORCH_CHECK(sizes[d] == 1 || x[d] == y[d], names, " of segment ", i,
                      " must have their elements in one order of memory");
    }
  }
}

// Checks that segments are inside the row, have groups of `hparams` (nullopt: the op takes no hparams), and share no
// element.
inline void check_table(const Segment* table, int64_t segments, int64_t rows, std::optional<int64_t> groups) {
  const int64_t most = (int64_t{1} << 62) / std::max<int64_t>(rows, 1);
  std::vector<std::pair<int64_t, int64_t>> ranges;  // begin and end of segments with elements
  for (int64_t i = 0; i < segments; ++i) {
    const Segment& s = table[i];
    STD_TORCH_CHECK(s.offset >= 0 && s.length >= 0 && s.offset <= most && s.length <= most - s.offset && s.group >= 0 &&
                        s.slot >= 0 && s.slot < most,
                    "table has offset ", s.offset, ", length ", s.length, ", group ", s.group, " and slot ", s.slot,
                    " for segment ", i, "; they are counted from 0");
    STD_TORCH_CHECK(!groups || s.group < *groups, "table names parameter group ", s.group,
                    ", counted from 0, but hparams has ", groups.value_or(0), " groups");
    if (s.length > 0) ranges.emplace_back(s.offset, s.offset + s.length);
  }
  if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    STD_TORCH_CHECK(ranges[i - 1].second <= ranges[i].first, "segments of the table overlap at ", ranges[i].first);
  }
}

// Checks that segments have different counters of steps. A shared counter would count each step twice.
inline void check_slots(const Segment* table, int64_t segments) {
  std::vector<int64_t> slots(segments);
  for (int64_t i = 0; i < segments; ++i) slots[i] = table[i].slot;
  if (!std::is_sorted(slots.begin(), slots.end())) std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  STD_TORCH_CHECK(twice == slots.end(), "the table has slot ", twice == slots.end() ? 0 : *twice,
                  " twice; where steps are counted each segment has a slot of its own");
}

}  // namespace fastsam
