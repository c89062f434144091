// The op orders_: random orders of many clients' samples. CPU only; kernels/orders.py describes every argument.
#include "cpu/parallel.h"
#include "tensor_args.h"

namespace fastsam {
namespace {

constexpr int kRounds = 7;  // as fastsam/fed/common/seeds.py

struct Order {
  int64_t number, size, kept, begin, first;
};

// Writes four random words of Philox4x32.
void random_words(uint64_t key, uint32_t block, uint32_t number, uint32_t* words) {
  uint32_t a = block, b = number, c = 0, d = 0;
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t x = uint64_t{0xD2511F53} * a, y = uint64_t{0xCD9E8D57} * c;
    a = static_cast<uint32_t>(y >> 32) ^ b ^ k0, b = static_cast<uint32_t>(y);
    c = static_cast<uint32_t>(x >> 32) ^ d ^ k1, d = static_cast<uint32_t>(x);
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

// Memory of a thread.
struct Keys {
  std::vector<uint64_t> drawn, sorted;
  std::vector<int64_t> ends;
};

// Sorts the first n drawn keys. Their high bits are random, so a bucket for each key holds one or two: sorting by
// buckets and then by insertion takes a time proportional to n.
void sort(Keys& keys, int64_t n) {
  int bits = 1;
  while (int64_t{1} << bits < n) ++bits;
  const int shift = 64 - bits;
  keys.ends.assign((size_t{1} << bits) + 1, 0), keys.sorted.resize(n);
  for (int64_t i = 0; i < n; ++i) ++keys.ends[(keys.drawn[i] >> shift) + 1];
  for (size_t i = 1; i < keys.ends.size(); ++i) keys.ends[i] += keys.ends[i - 1];
  for (int64_t i = 0; i < n; ++i) keys.sorted[keys.ends[keys.drawn[i] >> shift]++] = keys.drawn[i];
  for (int64_t i = 1; i < n; ++i) {
    const uint64_t key = keys.sorted[i];
    int64_t place = i;
    for (; place > 0 && keys.sorted[place - 1] > key; --place) keys.sorted[place] = keys.sorted[place - 1];
    keys.sorted[place] = key;
  }
}

// Writes an order. Keys are sorted, and equal keys keep their order.
void write_order(const Order& order, const std::optional<int64_t>& key, int64_t* out, Keys& keys) {
  if (!key.has_value()) {
    for (int64_t i = 0; i < order.kept; ++i) out[i] = order.first + i;
    return;
  }
  keys.drawn.resize((order.size + 3) / 4 * 4);
  for (int64_t i = 0; i < order.size; i += 4) {
    uint32_t words[4];
    random_words(*key, static_cast<uint32_t>(i / 4), static_cast<uint32_t>(order.number), words);
    for (int64_t j = 0; j < 4; ++j) keys.drawn[i + j] = uint64_t{words[j]} << 32 | static_cast<uint64_t>(i + j);
  }
  sort(keys, order.size);
  for (int64_t i = 0; i < order.kept; ++i) out[i] = order.first + static_cast<int64_t>(keys.sorted[i] & 0xFFFFFFFF);
}

void orders(const Tensor out, const Tensor clients, const std::optional<int64_t> key) {
  for (const Tensor* words : {&out, &clients}) {
    STD_TORCH_CHECK(words->scalar_type() == ScalarType::Long && words->is_contiguous() && words->is_cpu(),
                    "out and clients must be contiguous int64 on the CPU");
  }
  STD_TORCH_CHECK(clients.dim() == 2 && clients.size(1) == 5, "clients must be int64 [n, 5]");
  const auto* all = static_cast<const Order*>(clients.data_ptr());
  auto* to = static_cast<int64_t*>(out.data_ptr());
  const int64_t n = clients.size(0);
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Order& order = all[i];
    STD_TORCH_CHECK(order.size >= 0 && order.size < int64_t{1} << 32 && order.kept >= 0 && order.kept <= order.size &&
                        order.begin >= 0 && order.begin <= out.numel() - order.kept,
                    "client ", i, " must have an order of 0 to 2^32 - 1 samples in out");
    total += order.size;
  }
  const auto range = [&](int64_t begin, int64_t end) {
    Keys keys;
    for (int64_t i = begin; i < end; ++i) write_order(all[i], key, to + all[i].begin, keys);
  };
  if (total <= kGrain) {
    range(0, n);
  } else {
    torch::stable::parallel_for(0, n, std::max<int64_t>(1, n * kGrain / total), range);
  }
}

}  // namespace
}  // namespace fastsam

STABLE_TORCH_LIBRARY_FRAGMENT(fastsam, m) { m.def("orders_(Tensor(a!) out, Tensor clients, int? key=None) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(fastsam, CPU, m) { m.impl("orders_", TORCH_BOX(&fastsam::orders)); }
