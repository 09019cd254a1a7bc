/* version.cu - which machine code this program holds, and which driver and libraries this machine has. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <cuda_runtime.h>

#include "kernels/device.h"

/* As CMake names them: "80;90a-real"; without -real they are compiled for newer GPUs, too. */
extern "C" const char *ops_cuda_built(void) { return "architectures " MT_CUDA_ARCHITECTURES; }

static int nccl_version(void)
{
    void *library = dlopen("libnccl.so.2", RTLD_NOW), *symbol = library ? dlsym(library, "ncclGetVersion") : NULL;
    int (*get)(int *) = NULL, version = 0;
    memcpy(&get, &symbol, sizeof(symbol));
    return get && !get(&version) ? version : 0;
}

extern "C" const char *ops_cuda_found(char text[160])
{
    int runtime = 0, driver = 0;
    const int nccl = nccl_version(), unit = nccl < 10000 ? 1000 : 10000;
    (void)cudaRuntimeGetVersion(&runtime);
    (void)cudaDriverGetVersion(&driver);
    int n = snprintf(text, 160, "CUDA runtime %d.%d, ", runtime / 1000, runtime % 1000 / 10);
    n += driver ? snprintf(text + n, 160 - (size_t)n, "driver for CUDA %d.%d, ", driver / 1000, driver % 1000 / 10)
                : snprintf(text + n, 160 - (size_t)n, "no CUDA driver, ");
    if (nccl)
        snprintf(text + n, 160 - (size_t)n, "NCCL %d.%d.%d", nccl / unit, nccl % unit / 100, nccl % 100);
    else
        snprintf(text + n, 160 - (size_t)n, "NCCL: not installed");
    return text;
}
