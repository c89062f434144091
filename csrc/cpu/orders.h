// Random orders as torch.randperm draws them on the CPU: a Mersenne Twister (MT19937, Matsumoto and Nishimura 1998) and
// a shuffle of Fisher and Yates. torch makes a block of 624 numbers ahead; here each is made when it is wanted, so a
// short order needs a part of the generator's state, and several generators go side by side: each word depends on the
// one before it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

namespace fastsam {

// out: [Rows, n]; seeds: [Rows], the low 32 bits count.
template <int Rows>
inline void orders(int64_t* out, int64_t n, const int64_t* seeds) {
  constexpr int64_t words = 624, ahead = 397;
  uint32_t state[words][Rows];
  for (int row = 0; row < Rows; ++row) state[0][row] = static_cast<uint32_t>(seeds[row]);
  const int64_t read = std::min(words, ahead + n);
  for (int64_t i = 1; i < read; ++i) {
    for (int row = 0; row < Rows; ++row) {
      const uint32_t before = state[i - 1][row];
      state[i][row] = 1812433253u * (before ^ (before >> 30)) + static_cast<uint32_t>(i);
    }
  }
  for (int row = 0; row < Rows; ++row) std::iota(out + row * n, out + (row + 1) * n, int64_t{0});
  for (int64_t i = 0, at = 0; i + 1 < n; ++i, at = at + 1 == words ? 0 : at + 1) {
    const uint32_t* next = state[at + 1 == words ? 0 : at + 1];
    const uint32_t* far = state[at + ahead < words ? at + ahead : at + ahead - words];
    for (int row = 0; row < Rows; ++row) {
      const uint32_t mixed = (state[at][row] & 0x80000000u) | (next[row] & 0x7fffffffu);
      uint32_t y = state[at][row] = far[row] ^ (mixed >> 1) ^ ((next[row] & 1u) != 0 ? 0x9908b0dfu : 0u);
      y ^= y >> 11;
      y ^= (y << 7) & 0x9d2c5680u;
      y ^= (y << 15) & 0xefc60000u;
      y ^= y >> 18;
      int64_t* own = out + row * n + i;
      std::swap(own[0], own[y % static_cast<uint32_t>(n - i)]);
    }
  }
}

}  // namespace fastsam
