/* A libcuda.so.1 without a device: functions of Triton's driver, so that its loading and launching code runs.
   Each launch becomes a line of the log: kernel, blocks, threads, bytes of shared memory, architecture of the cubin,
   function, stream, and the arguments in hexadecimal. `fake_forget` empties the log. */
#include <cuda.h>
#include <elf.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PARAMETERS 64

struct Kernel {
  char name[200];
  unsigned arch, num_parameters;
  unsigned sizes[MAX_PARAMETERS]; /* bytes */
};

static char log_[1 << 20];
static size_t used_;
static struct Kernel module_; /* the kernel of the module that was loaded last; a cubin of Triton's has one */

const char* fake_log(void) { return log_; }
void fake_forget(void) { log_[used_ = 0] = 0; }

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
CUresult cuCtxGetDevice(CUdevice* device) { return cuDeviceGet(device, 0); }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 232448; /* shared memory of a block; others: plenty */
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
/* Find the sizes of a kernel's parameters in the section `.nv.info.NAME` of its cubin: records of a format (4: with
   a length), an attribute (0x17: a parameter), a length and a value, in which a parameter has its number and its
   size. */
static void read_parameters(const unsigned char* elf) {
  const Elf64_Ehdr* header = (const Elf64_Ehdr*)elf;
  const Elf64_Shdr* sections = (const Elf64_Shdr*)(elf + header->e_shoff);
  const char* names = (const char*)elf + sections[header->e_shstrndx].sh_offset;
  module_.num_parameters = 0;
  for (int i = 0; i < header->e_shnum; i++) {
    if (strncmp(names + sections[i].sh_name, ".nv.info.", 9) != 0) continue;
    const unsigned char *at = elf + sections[i].sh_offset, *end = at + sections[i].sh_size;
    while (at < end) {
      const unsigned short length = at[0] == 4 ? *(const unsigned short*)(at + 2) : 0;
      if (at[0] == 4 && at[1] == 0x17) {
        const unsigned number = *(const unsigned short*)(at + 8);
        if (number >= MAX_PARAMETERS) abort();
        module_.sizes[number] = *(const unsigned*)(at + 12) >> 18;
        if (number >= module_.num_parameters) module_.num_parameters = number + 1;
      }
      at += 4 + length;
    }
  }
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const unsigned char* elf = image;
  if (memcmp(elf, "\177ELF", 4) != 0 || elf[4] != 2 || *(const unsigned short*)(elf + 18) != 190 /* EM_CUDA */)
    return CUDA_ERROR_INVALID_IMAGE;
  unsigned flags = *(const unsigned*)(elf + 48);
  module_.arch = elf[8] >= 8 ? (flags >> 8) & 0xff : flags & 0xff; /* the place depends on the version of the ABI */
  read_parameters(elf);
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  struct Kernel* kernel = malloc(sizeof *kernel);
  *kernel = module_;
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr*)value = pointer;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  const struct Kernel* kernel = (const struct Kernel*)function;
  if (sizeof log_ - used_ < 2000) abort();
  used_ += sprintf(log_ + used_, "%s %u %u %u %u %p %p", kernel->name, config->gridDimX, config->blockDimX,
                   config->sharedMemBytes, kernel->arch, (void*)function, (void*)config->hStream);
  for (unsigned i = 0; i < kernel->num_parameters; i++) {
    unsigned long long value = 0;
    memcpy(&value, parameters[i], kernel->sizes[i]);
    used_ += sprintf(log_ + used_, " %llx", value);
  }
  used_ += sprintf(log_ + used_, "\n");
  return CUDA_SUCCESS;
}
