/* A libcuda.so.1 without a device: functions of Triton's driver, so that its loading and launching code runs.
   Each launch becomes a line of the log: kernel, blocks, threads, bytes of shared memory, architecture of the cubin. */
#include <cuda.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Kernel {
  char name[200];
  unsigned arch;
};

static char log_[1 << 18];
static unsigned arch_;

const char* fake_log(void) { return log_; }

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 232448; /* shared memory of a block; others: plenty */
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const unsigned char* elf = image;
  if (memcmp(elf, "\177ELF", 4) != 0 || elf[4] != 2 || *(const unsigned short*)(elf + 18) != 190 /* EM_CUDA */)
    return CUDA_ERROR_INVALID_IMAGE;
  unsigned flags = *(const unsigned*)(elf + 48);
  arch_ = elf[8] >= 8 ? (flags >> 8) & 0xff : flags & 0xff; /* the place depends on the version of the ABI */
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  struct Kernel* kernel = malloc(sizeof *kernel);
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  kernel->arch = arch_;
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr*)value = pointer;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  const struct Kernel* kernel = (const struct Kernel*)function;
  size_t used = strlen(log_);
  snprintf(log_ + used, sizeof log_ - used, "%s %u %u %u %u\n", kernel->name, config->gridDimX, config->blockDimX,
           config->sharedMemBytes, kernel->arch);
  return CUDA_SUCCESS;
}
