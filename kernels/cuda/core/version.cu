/* version.cu - which GPU architectures this program was built for, and which driver and libraries this machine has. */
#include <stdio.h>

#include <cuda_runtime.h>

#include "kernels/device.h"

/* sm_80: machine code; compute_80: PTX, which the driver compiles for newer GPUs. A user's CMAKE_CUDA_ARCHITECTURES is
 * printed as given: "80 90a-real"; a name without -real means machine code and PTX. */
extern "C" const char *ops_cuda_built(void) { return "architectures " MT_CUDA_ARCHITECTURES; }

static int nccl_version(void)
{
    static const char *const name = "libnccl.so.2";
    int (*get)(int *) = NULL, version = 0;
    const struct library_call call = {"ncclGetVersion", &get};
    void *library = library_open(&name, 1);
    return library && !library_find(library, name, &call, 1, NULL) && !get(&version) ? version : 0;
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
