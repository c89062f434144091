// A stand-in for CUDA's run time that runs kernels on the host: csrc/cuda compiles against it as plain C++.
//
// Blocks run one after the other, in a chosen order. The threads of a block are fibers: each runs until it meets a
// barrier or a shuffle, in a chosen order too, so that reads before a required barrier are noticed. Operations that a
// GPU does not allow (a shuffle with a lane that has left, a barrier that some threads never reach) abort the process.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __shared__ static  // one block at a time: a function's shared memory is a static variable
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__ &  // a kernel's parameters are the same for all of its threads

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx(0, 0, 0), blockIdx(0, 0, 0), blockDim, gridDim;

namespace emulation {

// 0: ascending, 1: descending, more: a shuffle with that seed.
inline int block_order = 0, thread_order = 0;
inline void* last_stream = nullptr;
inline bool idle = false;  // launches run nothing
inline int64_t launches = 0, blocks_run = 0, largest_argument = 0, misaligned = 0, out_of_bounds = 0;
// The device: bytes of shared memory of a block, multiprocessors, resident blocks of one of them, compute capability.
constexpr int kSharedLimit = 227 << 10, kMultiprocessors = 3, kResident = 2, kMajor = 9;

constexpr int kLanes = 32;
enum class State { ready, at_block_barrier, at_warp_barrier, done };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStack);
  State state = State::done;
  int shuffles = 0;
  static constexpr size_t kStack = 128 << 10;
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline int current = 0, threads = 0;
inline void (*entry)(const void*);
inline const void* entry_argument;
inline std::vector<uint64_t> exchanged[2];  // values of two successive shuffles

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulation: block %u: %s\n", blockIdx.x, what);
  std::abort();
}

inline std::vector<int> ordered(int n, int order) {
  std::vector<int> indices(n);
  for (int i = 0; i < n; ++i) indices[i] = order == 1 ? n - 1 - i : i;
  uint64_t state = order;
  for (int i = n - 1; order > 1 && i > 0; --i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(indices[i], indices[(state >> 33) % (i + 1)]);
  }
  return indices;
}

inline void wait(State state) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  swapcontext(&fiber.context, &scheduler);
}

inline void run_fiber() {
  entry(entry_argument);
  fibers[current].state = State::done;
}

inline void start(int thread) {
  Fiber& fiber = fibers[thread];
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = Fiber::kStack;
  fiber.context.uc_link = &scheduler;
  fiber.state = State::ready;
  fiber.shuffles = 0;
  makecontext(&fiber.context, run_fiber, 0);
}

// Releases a warp if all its lanes wait, or the block if all its live threads wait.
inline bool release() {
  bool any = false;
  int waiting = 0, alive = 0;
  for (int warp = 0; warp < threads; warp += kLanes) {
    int lanes = 0;
    for (int i = warp; i < warp + kLanes; ++i) {
      lanes += fibers[i].state == State::at_warp_barrier;
      waiting += fibers[i].state == State::at_block_barrier;
      alive += fibers[i].state != State::done;
    }
    if (lanes != kLanes) continue;
    for (int i = warp; i < warp + kLanes; ++i) fibers[i].state = State::ready;
    any = true;
  }
  if (any || alive == 0 || waiting != alive) return any;
  for (int i = 0; i < threads; ++i) {
    if (fibers[i].state == State::at_block_barrier) fibers[i].state = State::ready;
  }
  return true;
}

inline void run_block(const std::vector<int>& order) {
  for (int i = 0; i < threads; ++i) start(i);
  bool progress = true;
  while (progress) {
    progress = false;
    for (const int i : order) {
      if (fibers[i].state != State::ready) continue;
      current = i;
      threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
      progress = true;
    }
    progress |= release();
  }
  for (int i = 0; i < threads; ++i) {
    if (fibers[i].state == State::at_warp_barrier) fail("a shuffle with lanes that never came");
    if (fibers[i].state == State::at_block_barrier) fail("a barrier that some threads never reached");
  }
}

// Dynamic shared memory between guards, all ones (NaN as floats) before every block, so that reads of unwritten
// memory and writes beyond it are noticed.
constexpr size_t kGuard = 256;
inline std::vector<unsigned char> dynamic;

inline unsigned char* dynamic_shared() { return dynamic.data() + kGuard; }

inline void check_guards(size_t bytes) {
  for (size_t i = 0; i < kGuard; ++i) {
    if (dynamic[i] != 0xFF || dynamic[kGuard + bytes + i] != 0xFF) fail("wrote beyond its dynamic shared memory");
  }
}

template <class Body>
void run_grid(int blocks, int block_threads, size_t shared, const Body& body) {
  threads = block_threads;
  if (static_cast<int>(fibers.size()) < threads) fibers.resize(threads);
  for (auto& values : exchanged) values.assign(threads, 0);
  gridDim.x = blocks;
  blockDim.x = threads;
  entry = [](const void* argument) { (*static_cast<const Body*>(argument))(); };
  entry_argument = &body;
  const std::vector<int> order = ordered(threads, thread_order);
  for (const int block : ordered(blocks, block_order)) {
    blockIdx.x = block;
    dynamic.assign(shared + 2 * kGuard, 0xFF);
    run_block(order);
    check_guards(shared);
    ++blocks_run;
  }
}

}  // namespace emulation

// ---- what kernels call ----

inline void __syncthreads() { emulation::wait(emulation::State::at_block_barrier); }
inline void __syncwarp() { emulation::wait(emulation::State::at_warp_barrier); }
inline void __threadfence() {}

namespace emulation {

// The value of the thread `from` of the same warp. Without a running kernel, when functions of a kernel are called for
// one thread after the other, it is the caller's value.
template <class T>
T shuffled(unsigned mask, T value, int from) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  if (mask != 0xFFFFFFFFu) fail("a shuffle of part of a warp");
  if (threads == 0) return value;
  const int thread = current;
  std::vector<uint64_t>& values = exchanged[fibers[thread].shuffles++ % 2];
  std::memcpy(&values[thread], &value, sizeof(T));
  wait(State::at_warp_barrier);
  std::memcpy(&value, &values[from], sizeof(T));
  return value;
}

}  // namespace emulation

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  const int thread = emulation::current;
  return emulation::shuffled(mask, value,
                             thread + (thread % emulation::kLanes + distance < emulation::kLanes ? distance : 0));
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulation::shuffled(mask, value, emulation::current / emulation::kLanes * emulation::kLanes + lane);
}

inline unsigned atomicInc(unsigned* address, unsigned limit) {
  const unsigned old = *address;
  *address = old >= limit ? 0 : old + 1;
  return old;
}

template <class T>
T __ldcg(const T* address) {
  return *address;
}

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};

// Words, as which memory of other types is read and written.
template <class T>
T __ldcs(const T* address) {
  using Aliased [[gnu::may_alias]] = T;
  return *reinterpret_cast<const Aliased*>(address);
}

template <class T>
void __stcs(T* address, T value) {
  using Aliased [[gnu::may_alias]] = T;
  *reinterpret_cast<Aliased*>(address) = value;
}

// ---- what the host calls ----

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class Argument, class Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Argument), const Params& params) {
  ++emulation::launches;
  emulation::last_stream = config->stream;
  if (emulation::idle) {
    static unsigned char taken[sizeof(Params)];
    std::memcpy(taken, &params, sizeof(Params));
    return cudaSuccess;
  }
  if (static_cast<int64_t>(sizeof(Params)) > emulation::largest_argument) emulation::largest_argument = sizeof(Params);
  emulation::run_grid(config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes, [&] { kernel(params); });
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  return bytes <= emulation::kSharedLimit ? cudaSuccess : cudaErrorInvalidConfiguration;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = emulation::kResident;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emulation::kSharedLimit
           : attribute == cudaDevAttrComputeCapabilityMajor     ? emulation::kMajor
                                                                : emulation::kMultiprocessors;
  return cudaSuccess;
}

template <class T>
cudaError_t cudaGetSymbolAddress(void** address, const T& symbol) {
  *address = const_cast<void*>(static_cast<const void*>(&symbol));
  return cudaSuccess;
}

enum cudaMemcpyKind { cudaMemcpyDeviceToHost = 2 };
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = -1;  // the index of CPU tensors
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline int aoti_torch_get_current_cuda_stream(int, void** stream) {
  *stream = nullptr;
  return 0;
}
