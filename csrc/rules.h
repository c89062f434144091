// The table of update rules. No file lists them. For every rules/NAME.h, cpu/update.cpp and cuda/update.cu are compiled
// with FASTSAM_RULE=NAME (see kernels/build.py), and the object file registers the rule when its library is loaded.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kernel_args.h"

namespace fastsam {

// A rule. Each of the two libraries sets its own function.
struct UpdateRule {
  const char* name;
  int fields;
  unsigned needed;
  bool counts;
  // The CPU function, as the ranges of kernel_args.h. It reads steps and does not count them.
  void (*range)(const UpdateArgs&, bool nontemporal, int64_t begin, int64_t end) = nullptr;
  // The CUDA function, as the functions of kernel_args.h. It counts the steps. A rule without counts needs no tickets.
  int (*launch)(const UpdateArgs&, unsigned* tickets, void* stream) = nullptr;
};

inline std::vector<UpdateRule>& update_rules() {
  static std::vector<UpdateRule> rules;
  return rules;
}

// Registers a rule when a library is loaded. Rule: any instance of the template of rules/NAME.h.
template <class Rule>
UpdateRule& register_rule(const char* name) {
  static_assert(Rule::kState <= kMostState, "more fields than an update has");
  static_assert(Rule::kNeeded >> Rule::kState == 0, "needed fields that the rule does not have");
  return update_rules().emplace_back(UpdateRule{name, Rule::kState, Rule::kNeeded, Rule::kCounts});
}

// Returns the rule of this name, or nullptr if there is no such rule.
inline const UpdateRule* find_rule(const std::string& name) {
  const auto& rules = update_rules();
  const auto position =
      std::find_if(rules.begin(), rules.end(), [&](const UpdateRule& rule) { return rule.name == name; });
  return position == rules.end() ? nullptr : &*position;
}

inline std::string rule_names() {
  std::string names;
  for (const UpdateRule& rule : update_rules()) names += (names.empty() ? "" : ", ") + std::string(rule.name);
  return names;
}

}  // namespace fastsam

#define FASTSAM_TEXT_OF(x) #x
#define FASTSAM_TEXT(x) FASTSAM_TEXT_OF(x)
// The file of the rule for which a file of cpu/ or cuda/ is compiled. Its path is relative, because csrc is not an
// include folder.
// clang-format off
#define FASTSAM_RULE_FILE FASTSAM_TEXT(../rules/FASTSAM_RULE.h)
// clang-format on
