// Reads a row program from its words, and checks that it stays within its memory. The loops access the memory without
// further checks.
#include <utility>

#include "args.h"

namespace fastsam {
namespace {

constexpr int64_t kMostSize = int64_t{1} << 40;  // limit of memory and dimensions, so that sizes cannot overflow

// Sizes of an operand's dimensions, in the order of its strides; 1 for a missing dimension.
struct Sizes {
  int64_t of[kProgramDims];
};

struct Checker {
  const RowProgram& program;

  // Returns the elements of a row in the memory of the operand.
  int64_t room(const RowOperand& o) const {
    if (o.base == RowOperand::scratch) return program.scratch;
    return o.base == RowOperand::out ? program.width : program.inputs[o.base - RowOperand::first_input].span();
  }

  bool is_known(const RowOperand& o) const {
    return o.base >= RowOperand::scratch &&
           o.base - RowOperand::first_input < static_cast<int64_t>(program.inputs.size());
  }

  bool within(const RowOperand& o, const Sizes& sizes) const {
    if (o.offset < 0 || o.offset >= room(o)) return false;
    int64_t remaining = room(o) - 1 - o.offset;
    for (int d = 0; d < kProgramDims; ++d) {
      const int64_t steps = sizes.of[d] - 1;
      if (o.stride[d] < 0 || (steps > 0 && o.stride[d] > remaining / steps)) return false;
      remaining -= steps * o.stride[d];
    }
    return true;
  }

  bool labels(const RowOperand& o, const Sizes& sizes) const {
    return is_known(o) && o.base >= RowOperand::first_input &&
           program.inputs[o.base - RowOperand::first_input].labels && within(o, sizes);
  }

  // An operand without memory is a single zero.
  bool read(const RowOperand& o, const Sizes& sizes) const {
    if (o.base == RowOperand::none) return !o.stride[0] && !o.stride[1] && !o.stride[2] && !o.stride[3];
    return is_known(o) &&
           (o.base < RowOperand::first_input || !program.inputs[o.base - RowOperand::first_input].labels) &&
           within(o, sizes);
  }

  bool written(const RowOperand& o, const Sizes& sizes) const {
    return is_known(o) && o.base < RowOperand::first_input && within(o, sizes);
  }

  bool fits(const Instruction& in) const {
    const int64_t* n = in.size;
    for (int d = 0; d < kProgramDims; ++d) {
      if (n[d] < 1 || n[d] > kMostSize) return false;
    }
    const Sizes all{n[0], n[1], n[2], n[3]}, classes{n[0], n[1], n[2], 1}, inner{n[0], 1, n[2], 1};
    switch (in.code) {
      case Code::product: {
        RowOperand out = in.out;  // dense, with any strides
        out.stride[0] = n[2], out.stride[1] = 1;
        const Sizes all_sizes{n[0], n[2], 1, 1};
        return written(out, all_sizes) && read(in.a, {n[0], n[1], 1, 1}) && read(in.b, {n[1], n[2], 1, 1}) &&
               read(in.c, all_sizes);
      }
      case Code::log_softmax:
        return written(in.out, classes) && read(in.a, classes);
      case Code::log_softmax_backward:
        return written(in.out, classes) && read(in.a, classes) && is_known(in.b) && read(in.b, classes);
      case Code::nll:
        return written(in.out, inner) && read(in.a, classes) && labels(in.b, inner);
      case Code::nll_backward:
        return written(in.out, classes) && read(in.a, inner) && labels(in.b, inner);
      case Code::look_up:
      case Code::look_up_backward:
        return written(in.out, all) && read(in.a, all) && labels(in.b, {n[0], n[1], 1, 1});
      case Code::is_not:
        return written(in.out, all) && labels(in.a, all);
      default:  // elementwise, and sum
        return in.code >= Code::product && in.code < Code::count && written(in.out, all) && read(in.a, all) &&
               read(in.b, all) && read(in.c, all);
    }
  }
};

// Reads words from the front.
struct WordReader {
  const int64_t *next, *end;

  const int64_t* take(int64_t count) {
    STD_TORCH_CHECK(count >= 0 && count <= end - next, "a row program must end with whole instructions");
    return std::exchange(next, next + count);
  }
  int64_t one() { return *take(1); }
};

void check_program(const RowProgram& program) {
  const auto possible = [](int64_t n) { return n >= 0 && n <= kMostSize; };
  STD_TORCH_CHECK(possible(program.scratch) && possible(program.width) && program.work >= 0,
                  "a row program must have work, scratch memory and a result of 0 or more");
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    STD_TORCH_CHECK(possible(program.inputs[i].span()), "input ", i,
                    " of the row program must have sizes of 1 or more and strides of 0 or more, at most ", kMostSize,
                    " elements");
  }
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    STD_TORCH_CHECK(Checker{program}.fits(program.instructions[i]), "instruction ", i,
                    " of the row program is none, or reads or writes outside of its memory");
  }
}

}  // namespace

RowProgram read_program(const int64_t* first, int64_t count) {
  WordReader words{first, first + count};
  RowProgram row_program;
  row_program.scratch = words.one(), row_program.width = words.one(), row_program.work = words.one();
  for (int64_t remaining = words.one(); remaining > 0; --remaining) {
    Expected& input = row_program.inputs.emplace_back();
    input.labels = words.one() != 0, input.one = words.one() != 0;
    const int64_t dims = words.one();
    const auto* sizes = words.take(dims);
    const auto* strides = words.take(dims);
    input.size.assign(sizes, sizes + dims), input.stride.assign(strides, strides + dims);
  }
  constexpr int64_t words_each = sizeof(Instruction) / sizeof(int64_t);
  const int64_t remaining_words = words.end - words.next;
  row_program.instructions.resize(remaining_words / words_each);
  const int64_t* body = words.take(remaining_words / words_each * words_each);
  if (!row_program.instructions.empty())  // an empty vector has no memory
    std::memcpy(row_program.instructions.data(), body, row_program.instructions.size() * sizeof(Instruction));
  STD_TORCH_CHECK(words.next == words.end, "a row program must end with whole instructions");
  check_program(row_program);
  return row_program;
}

}  // namespace fastsam
