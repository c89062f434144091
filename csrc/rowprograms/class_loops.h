// Log-softmax, the loss of its labels, and their gradients. See per_isa.h.

// Sizes: outer, classes, inner. If neighbouring inner elements are dense, calls f({out, a, b}, lanes) for one vector of
// elements at a time. Otherwise calls g for each element.
template <class F, class G>
inline void over_classes(const Instruction& in, Places3 all, F f, G g) {
  const int64_t inner = in.size[2];
  const bool dense =
      in.out.stride[2] == 1 && in.a.stride[2] == 1 && (in.b.base == RowOperand::none || in.b.stride[2] == 1);
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
// backwards: a [outer, inner], out [outer, classes, inner]. Operands without classes have strides of 0 in that
// dimension.
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
