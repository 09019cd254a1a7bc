/* energy.cu - the energy that the GPU uses, as NVML counts it. libnvidia-ml.so comes with the driver and is opened at
 * the first call; its header is a separate package, so the four functions are declared here. */
#include <math.h>
#include <stdio.h>

#include "kernels/cuda/core/cuda.h"

static struct {
    int (*init)(void);
    int (*by_address)(const char *address, void **device);
    int (*energy)(void *device, unsigned long long *mj);
    void *device;
    bool opened;
} nvml;

static void open_nvml(void)
{
    static const char *const names[] = {"libnvidia-ml.so.1"};
    const struct library_call calls[] = {{"nvmlInit_v2", (void *)&nvml.init},
                                         {"nvmlDeviceGetHandleByPciBusId_v2", (void *)&nvml.by_address},
                                         {"nvmlDeviceGetTotalEnergyConsumption", (void *)&nvml.energy}};
    struct cudaDeviceProp p;
    struct err err;
    char address[32];
    nvml.opened = true;
    void *library = library_open(names, 1);
    if (!library || library_find(library, "NVML", calls, MT_LEN(calls), &err) || nvml.init()) return;
    CUDA_CHECK(cudaGetDeviceProperties(&p, cuda.index));
    snprintf(address, sizeof(address), "%08x:%02x:%02x.0", (unsigned)p.pciDomainID, (unsigned)p.pciBusID,
             (unsigned)p.pciDeviceID);
    if (nvml.by_address(address, &nvml.device)) nvml.device = NULL;
}

double cuda_energy(void)
{
    unsigned long long mj;
    if (!nvml.opened) open_nvml();
    return nvml.device && !nvml.energy(nvml.device, &mj) ? 1e-3 * (double)mj : NAN;
}
