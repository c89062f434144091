// Functions that the tests call, and the handlers of the compiler's checks (-fsanitize=alignment,bounds without its
// library).
#include "chunks.h"
#include "cuda_runtime.h"

#pragma GCC visibility push(default)
extern "C" {

void emulation_order(int blocks, int threads) {
  emulation::block_order = blocks;
  emulation::thread_order = threads;
}

void emulation_idle(int idle) { emulation::idle = idle != 0; }
int64_t emulation_launches() { return emulation::launches; }
int64_t emulation_last_stream() { return reinterpret_cast<int64_t>(emulation::last_stream); }
int64_t emulation_blocks() { return emulation::blocks_run; }
int64_t emulation_largest_argument() { return emulation::largest_argument; }
int64_t emulation_misaligned() { return emulation::misaligned; }
int64_t emulation_out_of_bounds() { return emulation::out_of_bounds; }

// Walks over a row of segments as the kernels do, with the functions of csrc/chunks.h, and counts how often each
// element is met. Returns -1 when that is once and packs begin at multiples of their width; else the place, in the row,
// of the first element for which it is not so. `counts` has a zero per element.
int64_t emulation_walk(const int64_t* lengths, int64_t segments, int width, int unroll, int64_t enough,
                       uint8_t* counts) {
  using namespace fastsam;
  constexpr int kThreads = 256;
  int64_t elements = 0;
  for (int64_t i = 0; i < segments; ++i) elements += lengths[i];
  const int64_t sweep = int64_t{kThreads} * width * unroll, chunk = chunk_for(elements, sweep, enough);
  std::vector<int> prefix(segments + 1);
  std::vector<int64_t> offsets(segments + 1);
  for (int64_t i = 0; i < segments; ++i) {
    prefix[i + 1] = prefix[i] + static_cast<int>(chunks_of(lengths[i], chunk));
    offsets[i + 1] = offsets[i] + lengths[i];
  }
  for (int tile = 0; tile < prefix[segments]; ++tile) {
    const int64_t segment = segment_of(prefix.data(), segments, tile);
    const ChunkRange range = chunk_range_of(tile - prefix[segment], lengths[segment], chunk);
    uint8_t* here = counts + offsets[segment] + range.begin;
    if (range.begin % width != 0 || range.count > chunk) return offsets[segment] + range.begin;
    const int64_t whole = range.count - range.count % width;
    for (int64_t start = 0; start < whole; start += sweep) {
      for (int slot = 0; slot < kThreads * unroll; ++slot) {
        const int64_t i = start + vector_of(slot / kThreads, slot % kThreads, kThreads, width);
        for (int lane = 0; lane < width && i < whole; ++lane) ++here[i + lane];
      }
    }
    for (int64_t i = whole; i < range.count; ++i) ++here[i];
  }
  for (int64_t i = 0; i < elements; ++i) {
    if (counts[i] != 1) return i;
  }
  return -1;
}

void __ubsan_handle_type_mismatch_v1(void*, void*) { ++emulation::misaligned; }
void __ubsan_handle_out_of_bounds(void*, void*) { ++emulation::out_of_bounds; }
}
#pragma GCC visibility pop
