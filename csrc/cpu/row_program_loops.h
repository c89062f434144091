// The operations of a row program. See per_isa.h.
#include "product_loops.h"

inline __attribute__((always_inline)) Lanes chosen(Places where, Lanes yes, Lanes no) {
  return (Lanes)((where & (Places)yes) | (~where & (Places)no));
}

// e^x to 2 units in the last place: 2^n times a polynomial in the rest. Below 2^-126 with fewer digits, as floats have.
inline Lanes exponential(Lanes x) {
  const Lanes low = every(-104.0f), high = every(89.0f), magic = every(12582912.0f);
  x = chosen(x < low, low, chosen(x > high, high, x));
  const Lanes shifted = x * 1.44269504088896341f + magic;  // its last bits are the nearest whole number
  const Places n = (Places)shifted - (Places)magic;
  const Lanes whole = shifted - magic;
  const Lanes r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  Lanes p = every(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Places half = n >> 1;  // 2^n alone may be out of range
  return p * (Lanes)((half + 127) << 23) * (Lanes)((n - half + 127) << 23);
}

template <class F>
inline Lanes by_lane(Lanes x, F f) {
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = f(x[lane]);
  return x;
}

// log(x) to 2 units in the last place; where the exponent has no full set of digits, element by element.
inline Lanes logarithm(Lanes x) {
  const Places bits = (Places)x, ordinary = (bits >= 0x00800000) & (bits < 0x7F800000);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!ordinary[lane]) return by_lane(x, [](float v) { return v == 0.0f ? -INFINITY : std::log(v); });
  }
  const Places n = (bits - 0x3F3504F3) >> 23;  // x = 2^n * m with m from sqrt(1/2) to sqrt(2)
  const Lanes m = (Lanes)(bits - (n << 23)) - 1.0f, e = __builtin_convertvector(n, Lanes), square = m * m;
  Lanes p = every(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * square + e * -2.12194440e-4f - 0.5f * square;
  return m + p + e * 0.693359375f;
}

// Where the operands of an instruction lie for one row.
struct Places3 {
  float* out;
  const float *a, *b, *c;
};

// Calls f(begin of the innermost loop's operands) for all outer indices.
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

// out = f(a, b, c), element by element.
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

// In halves: a sum in the order of the lanes would wait for every addition.
inline float added_up(Lanes x) {
  float half[kLanes];
  store(half, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) half[lane] += half[lane + width];
  }
  return half[0];
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

// Adds `down` lines of n dense elements to out, element by element.
inline void add_lines(float* out, const float* a, int64_t down, int64_t stride, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, n - i);
    Lanes total = load_some(out + i, lanes);
    for (int64_t line = 0; line < down; ++line) total += load_some(a + line * stride + i, lanes);
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

// Sizes: outer, classes, inner. Calls f(from of a, from of b, out, lanes) where neighbouring inner elements are dense,
// for as many as a vector has; else g, element by element.
template <class F, class G>
inline void over_classes(const Instruction& in, Places3 all, F f, G g) {
  const int64_t inner = in.size[2];
  const bool dense =
      in.out.stride[2] == 1 && in.a.stride[2] == 1 && (in.b.base == Operand::none || in.b.stride[2] == 1);
  for (int64_t o = 0; o < in.size[0]; ++o) {
    const Places3 at{all.out + o * in.out.stride[0], all.a + o * in.a.stride[0], all.b + o * in.b.stride[0], nullptr};
    for (int64_t i = 0; dense && i < inner; i += kLanes) {
      f(Places3{at.out + i, at.a + i, at.b + i * in.b.stride[2], nullptr}, std::min<int64_t>(kLanes, inner - i));
    }
    for (int64_t i = 0; !dense && i < inner; ++i) {
      g(Places3{at.out + i * in.out.stride[2], at.a + i * in.a.stride[2], at.b + i * in.b.stride[2], nullptr});
    }
  }
}

inline void log_softmax(const Instruction& in, Places3 all) {
  const int64_t classes = in.size[1], so = in.out.stride[1], sa = in.a.stride[1];
  over_classes(
      in, all,
      [&](const Places3& at, int64_t lanes) {
        Lanes largest = load_some(at.a, lanes);
        for (int64_t c = 1; c < classes; ++c) {
          const Lanes x = load_some(at.a + c * sa, lanes);
          largest = chosen(x > largest, x, largest);
        }
        Lanes total{};
        for (int64_t c = 0; c < classes; ++c) total += exponential(load_some(at.a + c * sa, lanes) - largest);
        const Lanes log_total = logarithm(total);
        for (int64_t c = 0; c < classes; ++c) {
          store_some(at.out + c * so, load_some(at.a + c * sa, lanes) - largest - log_total, lanes);
        }
      },
      [&](const Places3& at) {
        float largest = at.a[0], total = 0.0f;
        for (int64_t c = 1; c < classes; ++c) largest = std::max(largest, at.a[c * sa]);
        for (int64_t c = 0; c < classes; ++c) total += std::exp(at.a[c * sa] - largest);
        const float log_total = std::log(total);
        for (int64_t c = 0; c < classes; ++c) at.out[c * so] = at.a[c * sa] - largest - log_total;
      });
}

// a: the gradient; b: the log-softmax.
inline void log_softmax_backward(const Instruction& in, Places3 all) {
  const int64_t classes = in.size[1], so = in.out.stride[1], sa = in.a.stride[1], sb = in.b.stride[1];
  over_classes(
      in, all,
      [&](const Places3& at, int64_t lanes) {
        Lanes total{};
        for (int64_t c = 0; c < classes; ++c) total += load_some(at.a + c * sa, lanes);
        for (int64_t c = 0; c < classes; ++c) {
          const Lanes p = exponential(load_some(at.b + c * sb, lanes));
          store_some(at.out + c * so, load_some(at.a + c * sa, lanes) - p * total, lanes);
        }
      },
      [&](const Places3& at) {
        float total = 0.0f;
        for (int64_t c = 0; c < classes; ++c) total += at.a[c * sa];
        for (int64_t c = 0; c < classes; ++c) at.out[c * so] = at.a[c * sa] - std::exp(at.b[c * sb]) * total;
      });
}

// Sizes: outer, classes, inner; b: labels [outer, inner]. nll: out [outer, inner], a [outer, classes, inner];
// backwards: a [outer, inner], out [outer, classes, inner]. Strides of what has no classes are 0 there.
inline bool nll(const Instruction& in, Places3 all, const int64_t* labels, bool backward, int64_t* wrong) {
  const int64_t* so = in.out.stride;
  const int64_t* sa = in.a.stride;
  for (int64_t o = 0; o < in.size[0]; ++o) {
    for (int64_t c = 0; backward && c < in.size[1]; ++c) {
      float* out = all.out + o * so[0] + c * so[1];
      for (int64_t i = 0; i < in.size[2]; ++i) out[i * so[2]] = 0.0f;
    }
    for (int64_t i = 0; i < in.size[2]; ++i) {
      const int64_t label = labels[o * in.b.stride[0] + i * in.b.stride[2]];
      if ((label < 0 || label >= in.size[1]) && label != kIgnored) return *wrong = label, false;
      float* out = all.out + o * so[0] + i * so[2];
      const float* a = all.a + o * sa[0] + i * sa[2];
      if (backward) {
        if (label != kIgnored) out[label * so[1]] = -*a;
      } else {
        *out = label == kIgnored ? 0.0f : -a[label * sa[1]];
      }
    }
  }
  return true;
}

// 1 where an int64 is not the number, else 0.
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

// Sizes: m, k, n. b, `[k, n]`, and the bias c, `[m, n]`.
inline void matrix_product(const Instruction& in, Places3 at) {
  const Matrix a{at.a, in.a.stride[0], in.a.stride[1]}, b{at.b, in.b.stride[0], in.b.stride[1]};
  const Matrix bias{in.c.base == Operand::none ? nullptr : at.c, in.c.stride[0], in.c.stride[1]};
  one_product(ProductArgs{1, in.size[0], in.size[1], in.size[2]}, a, b, bias, at.out);
}

inline void elementwise(const Instruction& in, Places3 at) {
  const Lanes number = every(static_cast<float>(in.number)), zero{};
#define FASTSAM_EACH_ELEMENT(result)                                                  \
  return each(in, at, [=](Lanes a, Lanes b, Lanes c) __attribute__((always_inline)) { \
    (void)a, (void)b, (void)c, (void)number, (void)zero;                              \
    return result;                                                                    \
  })
  switch (in.code) {
    case Code::copy:
      FASTSAM_EACH_ELEMENT(a);
    case Code::relu:
      FASTSAM_EACH_ELEMENT(chosen(a < zero, zero, a));
    case Code::negate:
      FASTSAM_EACH_ELEMENT(-a);
    case Code::exponential:
      FASTSAM_EACH_ELEMENT(exponential(a));
    case Code::logarithm:
      FASTSAM_EACH_ELEMENT(logarithm(a));
    case Code::root:
      FASTSAM_EACH_ELEMENT(by_lane(a, [](float x) { return std::sqrt(x); }));
    case Code::inverse_root:
      FASTSAM_EACH_ELEMENT(by_lane(a, [](float x) { return 1.0f / std::sqrt(x); }));
    case Code::magnitude:
      FASTSAM_EACH_ELEMENT((Lanes)((Places)a & 0x7FFFFFFF));
    case Code::tanh:
      FASTSAM_EACH_ELEMENT(by_lane(a, [](float x) { return std::tanh(x); }));
    case Code::sigmoid:
      FASTSAM_EACH_ELEMENT(1.0f / (1.0f + exponential(-a)));
    case Code::add:
      FASTSAM_EACH_ELEMENT(a + number * b);
    case Code::scale:
      FASTSAM_EACH_ELEMENT(a * number);
    case Code::power:
      return each(in, at, [exponent = static_cast<float>(in.number)](Lanes a, Lanes, Lanes) {
        return exponent == 2.0f ? a * a : by_lane(a, [exponent](float x) { return std::pow(x, exponent); });
      });
    case Code::multiply:
      FASTSAM_EACH_ELEMENT(a * b);
    case Code::divide:
      FASTSAM_EACH_ELEMENT(a / b);
    case Code::threshold_backward:
      FASTSAM_EACH_ELEMENT(chosen(b <= number, zero, a));
    case Code::tanh_backward:
      FASTSAM_EACH_ELEMENT(a * (1.0f - b * b));
    case Code::sigmoid_backward:
      FASTSAM_EACH_ELEMENT(a * (1.0f - b) * b);
    case Code::multiply_add:
      FASTSAM_EACH_ELEMENT(a + number * (b * c));
    default:
      return;
  }
#undef FASTSAM_EACH_ELEMENT
}

inline bool run_rows(const RowProgramArgs& args, int64_t begin, int64_t end, int64_t* wrong) {
  static thread_local std::vector<float> scratch;
  if (static_cast<int64_t>(scratch.size()) < args.program.scratch) scratch.resize(args.program.scratch);
  static const float nothing = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    float* const out = args.out + row * args.out_row;
    const auto place = [&](const Operand& operand) -> const void* {
      switch (operand.base) {
        case Operand::none:
          return &nothing;
        case Operand::scratch:
          return scratch.data() + operand.offset;
        case Operand::out:
          return out + operand.offset;
        default:
          const int64_t i = operand.base - Operand::first_input;
          const int64_t bytes = args.program.inputs[i].labels ? sizeof(int64_t) : sizeof(float);
          return static_cast<const char*>(args.inputs[i].data) + (row * args.inputs[i].row + operand.offset) * bytes;
      }
    };
    for (const Instruction& in : args.program.instructions) {
      const void *a = place(in.a), *b = place(in.b);
      const Places3 at{static_cast<float*>(const_cast<void*>(place(in.out))), static_cast<const float*>(a),
                       static_cast<const float*>(b), static_cast<const float*>(place(in.c))};
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
          if (!nll(in, at, static_cast<const int64_t*>(b), in.code == Code::nll_backward, wrong)) return false;
          break;
        case Code::is_not:
          is_not(in, at, static_cast<const int64_t*>(a));
          break;
        default:
          elementwise(in, at);
      }
    }
  }
  return true;
}
