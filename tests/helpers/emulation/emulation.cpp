// Functions that the tests call, and the handlers of the compiler's checks (-fsanitize=alignment,bounds without its
// library).
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

void __ubsan_handle_type_mismatch_v1(void*, void*) { ++emulation::misaligned; }
void __ubsan_handle_out_of_bounds(void*, void*) { ++emulation::out_of_bounds; }
}
#pragma GCC visibility pop
