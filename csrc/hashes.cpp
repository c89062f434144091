// BLAKE2b (RFC 7693) with a digest of 8 bytes, of many short texts that differ in a number: the seeds of a cohort's
// clients. hashlib does the same; calling it twice per client takes longer than a client's orders.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>

namespace fastsam {
namespace {

constexpr std::array<uint64_t, 8> kStart = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                            0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                            0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

uint64_t turned(uint64_t x, int bits) { return (x >> bits) | (x << (64 - bits)); }

// One block of 128 bytes; `seen`: bytes of the text up to its end.
void compress(std::array<uint64_t, 8>& state, const char* block, uint64_t seen, bool last) {
  uint64_t m[16], v[16];
  std::memcpy(m, block, sizeof(m));
  for (int i = 0; i < 8; ++i) v[i] = state[i], v[i + 8] = kStart[i];
  v[12] ^= seen;
  if (last) v[14] = ~v[14];
  const auto mix = [&](int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x, v[d] = turned(v[d] ^ v[a], 32);
    v[c] += v[d], v[b] = turned(v[b] ^ v[c], 24);
    v[a] += v[b] + y, v[d] = turned(v[d] ^ v[a], 16);
    v[c] += v[d], v[b] = turned(v[b] ^ v[c], 63);
  };
  for (int round = 0; round < 12; ++round) {
    const uint8_t* s = kOrder[round % 10];
    for (int i = 0; i < 4; ++i) mix(i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
    for (int i = 0; i < 4; ++i) {
      mix(i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[s[2 * i + 8]], m[s[2 * i + 9]]);
    }
  }
  for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

uint64_t hash(std::string text) {
  std::array<uint64_t, 8> state = kStart;
  state[0] ^= 0x01010000u ^ 8u;
  const uint64_t length = text.size();
  text.resize(std::max<uint64_t>(1, (length + 127) / 128) * 128);
  for (uint64_t at = 0; at < text.size(); at += 128) {
    const bool last = at + 128 == text.size();
    compress(state, text.data() + at, last ? length : at + 128, last);
  }
  return state[0];
}

}  // namespace
}  // namespace fastsam

// out[i]: the hash of `before`, values[i] in decimal, `after`, as a little-endian number without its last bit.
extern "C" __attribute__((visibility("default"))) void fastsam_hashes(const char* before, const char* after,
                                                                      const int64_t* values, int64_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    char digits[24];
    const auto end = std::to_chars(digits, digits + sizeof(digits), values[i]).ptr;
    out[i] = static_cast<int64_t>(fastsam::hash(std::string(before).append(digits, end).append(after)) >> 1);
  }
}
