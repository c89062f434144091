// The operations of a row program. See per_isa.h.
#include "lane_math.h"

// The addresses of an instruction's operands for one row.
struct Places3 {
  float* out;
  const float *a, *b, *c;
};

// Calls f(first operands of the innermost loop) for all outer indices.
template <class F>
inline void outer(const Instruction& in, Places3 at, F&& f) {
  const int64_t *so = in.out.stride, *sa = in.a.stride, *sb = in.b.stride, *sc = in.c.stride;
  for (int64_t i = 0; i < in.size[0]; ++i) {
    for (int64_t j = 0; j < in.size[1]; ++j) {
      for (int64_t k = 0; k < in.size[2]; ++k) {
        f(Places3{at.out + i * so[0] + j * so[1] + k * so[2], at.a + i * sa[0] + j * sa[1] + k * sa[2],
                  at.b + i * sb[0] + j * sb[1] + k * sb[2], at.c + i * sc[0] + j * sc[1] + k * sc[2]});
      }
    }
  }
}

// Computes out = f(a, b, c), element by element.
template <class F>
inline void each(const Instruction& in, Places3 all, F f) {
  const int64_t n = in.size[3], so = in.out.stride[3], sa = in.a.stride[3], sb = in.b.stride[3], sc = in.c.stride[3];
  const bool dense = so == 1 && (sa | 1) == 1 && (sb | 1) == 1 && (sc | 1) == 1;
  outer(in, all, [&](const Places3& at) {
    int64_t i = 0;
    for (; dense && i + kLanes <= n; i += kLanes) {
      store(at.out + i, f(sa ? load(at.a + i) : every(*at.a), sb ? load(at.b + i) : every(*at.b),
                          sc ? load(at.c + i) : every(*at.c)));
    }
    if (dense && i < n) {
      const int64_t some = n - i;
      store_some(at.out + i,
                 f(sa ? load_some(at.a + i, some) : every(*at.a), sb ? load_some(at.b + i, some) : every(*at.b),
                   sc ? load_some(at.c + i, some) : every(*at.c)),
                 some);
      return;
    }
    for (; i < n; ++i) at.out[i * so] = f(every(at.a[i * sa]), every(at.b[i * sb]), every(at.c[i * sc]))[0];
  });
}

// Adds a's n elements, one stride apart, to out.
inline void add_line(float* out, const float* a, int64_t n, int64_t stride) {
  Lanes partial{};
  int64_t i = 0;
  for (; stride == 1 && i + kLanes <= n; i += kLanes) partial += load(a + i);
  float total = i > 0 ? added_up(partial) : 0.0f;
  for (; i < n; ++i) total += a[i * stride];
  *out += total;
}

// Adds `num_lines` lines of n dense elements to out, element by element.
inline void add_lines(float* out, const float* a, int64_t num_lines, int64_t stride, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, n - i);
    Lanes total = load_some(out + i, lanes);
    for (int64_t line = 0; line < num_lines; ++line) total += load_some(a + line * stride + i, lanes);
    store_some(out + i, total, lanes);
  }
}

inline void sum(const Instruction& in, Places3 all) {
  const int64_t *so = in.out.stride, *sa = in.a.stride;
  Instruction lines = in;
  for (int d = 0; d < kProgramDims; ++d) lines.size[d] = so[d] == 0 ? 1 : in.size[d];
  outer(lines, all, [&](const Places3& at) {
    for (int64_t i = 0; i < lines.size[3]; ++i) at.out[i * so[3]] = 0.0f;
  });
  const bool dense = so[3] == 1 && sa[3] == 1;
  lines = in;
  if (dense && so[2] == 0) lines.size[2] = 1;  // the lines of add_lines
  outer(lines, all, [&](const Places3& at) {
    if (so[3] == 0) return add_line(at.out, at.a, in.size[3], sa[3]);
    if (dense) return add_lines(at.out, at.a, so[2] == 0 ? in.size[2] : 1, sa[2], in.size[3]);
    for (int64_t i = 0; i < in.size[3]; ++i) at.out[i * so[3]] += at.a[i * sa[3]];
  });
}

#include "class_loops.h"

// Computes 1 if an int64 is not the number, else 0.
inline void is_not(const Instruction& in, Places3 all, const int64_t* labels) {
  const int64_t *so = in.out.stride, *sa = in.a.stride, number = static_cast<int64_t>(in.number);
  for (int64_t i = 0; i < in.size[0]; ++i) {
    for (int64_t j = 0; j < in.size[1]; ++j) {
      for (int64_t k = 0; k < in.size[2]; ++k) {
        for (int64_t l = 0; l < in.size[3]; ++l) {
          all.out[i * so[0] + j * so[1] + k * so[2] + l * so[3]] =
              labels[i * sa[0] + j * sa[1] + k * sa[2] + l * sa[3]] != number;
        }
      }
    }
  }
}

// Sizes: outer, middle, count, inner; b: indices [outer, middle] of a table [count, inner]. Forward, a is the table and
// out [outer, middle, inner] its entries. Backward, a is the gradient of the entries, and out the table's: the sums, in
// the order of the indices. The entry `number` has no gradient. Operands have strides of 0 in their other dimensions.
inline bool look_up(const Instruction& in, Places3 all, const int64_t* indices, int64_t* wrong) {
  const int64_t *so = in.out.stride, *sa = in.a.stride, n = in.size[3];
  const bool backward = in.code == Code::look_up_backward;
  const auto padding = static_cast<int64_t>(in.number);
  Instruction line = in;  // one entry; c is what out has
  std::fill_n(line.size, 3, 1), line.c = in.out;
  for (int64_t entry = 0; backward && entry < in.size[2]; ++entry) {
    for (int64_t i = 0; i < n; ++i) all.out[entry * so[2] + i * so[3]] = 0.0f;
  }
  for (int64_t o = 0; o < in.size[0]; ++o) {
    for (int64_t m = 0; m < in.size[1]; ++m) {
      const int64_t index = indices[o * in.b.stride[0] + m * in.b.stride[1]];
      if (index < 0 || index >= in.size[2]) return *wrong = index, false;
      if (backward && index == padding) continue;
      float* out = all.out + o * so[0] + m * so[1] + index * so[2];
      const float* a = all.a + o * sa[0] + m * sa[1] + index * sa[2];
      each(line, Places3{out, a, a, out}, [&](Lanes a, Lanes, Lanes c) { return backward ? c + a : a; });
    }
  }
  return true;
}

// Sizes: m, k, n. b, `[k, n]`, and the bias c, `[m, n]`.
inline void matrix_product(const Instruction& in, Places3 at) {
  const Matrix a{at.a, in.a.stride[0], in.a.stride[1]}, b{at.b, in.b.stride[0], in.b.stride[1]};
  const Matrix bias{in.c.base == RowOperand::none ? nullptr : at.c, in.c.stride[0], in.c.stride[1]};
  one_product(ProductArgs{1, in.size[0], in.size[1], in.size[2]}, a, b, bias, at.out);
}

inline void elementwise(const Instruction& in, Places3 at) {
  const float exponent = static_cast<float>(in.number);
  const Lanes number = every(exponent);
#define FASTSAM_EACH_ELEMENT(code, result)                                              \
  case Code::code:                                                                      \
    return each(in, at, [=](Lanes a, Lanes b, Lanes c) __attribute__((always_inline)) { \
      (void)a, (void)b, (void)c, (void)number, (void)exponent;                          \
      return result;                                                                    \
    });
  switch (in.code) {
    FASTSAM_ELEMENT_OPS(FASTSAM_EACH_ELEMENT)
    default:
      return;
  }
#undef FASTSAM_EACH_ELEMENT
}

inline Failure run_rows(const RowProgramArgs& args, int64_t begin, int64_t end, int64_t* wrong) {
  static thread_local std::vector<float> scratch;
  if (static_cast<int64_t>(scratch.size()) < args.program.scratch) scratch.resize(args.program.scratch);
  static const float nothing = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    float* const out = args.out + row * args.out_row;
    const auto address = [&](const RowOperand& operand) -> const void* {
      switch (operand.base) {
        case RowOperand::none:
          return &nothing;
        case RowOperand::scratch:
          return scratch.data() + operand.offset;
        case RowOperand::out:
          return out + operand.offset;
        default:
          const int64_t i = operand.base - RowOperand::first_input;
          const int64_t bytes = args.program.inputs[i].labels ? sizeof(int64_t) : sizeof(float);
          return static_cast<const char*>(args.inputs[i].data) + (row * args.inputs[i].row + operand.offset) * bytes;
      }
    };
    for (const Instruction& in : args.program.instructions) {
      const void *a = address(in.a), *b = address(in.b);
      const Places3 at{static_cast<float*>(const_cast<void*>(address(in.out))), static_cast<const float*>(a),
                       static_cast<const float*>(b), static_cast<const float*>(address(in.c))};
      switch (in.code) {
        case Code::product:
          matrix_product(in, at);
          break;
        case Code::sum:
          sum(in, at);
          break;
        case Code::log_softmax:
          log_softmax(in, at);
          break;
        case Code::log_softmax_backward:
          log_softmax_backward(in, at);
          break;
        case Code::nll:
        case Code::nll_backward:
          if (!nll(in, at, static_cast<const int64_t*>(b), in.code == Code::nll_backward, wrong)) return wrong_label;
          break;
        case Code::look_up:
        case Code::look_up_backward:
          if (!look_up(in, at, static_cast<const int64_t*>(b), wrong)) return wrong_index;
          break;
        case Code::is_not:
          is_not(in, at, static_cast<const int64_t*>(a));
          break;
        default:
          elementwise(in, at);
      }
    }
  }
  return no_failure;
}
