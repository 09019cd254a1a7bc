/* find.cu - finds the GPU of this process, or reports why it cannot use one.
 *
 * It asks the driver (libcuda.so.1, opened by name), because the CUDA runtime reports the same error for a missing
 * driver and for one that is too old. A program of CUDA N.x runs with every driver of CUDA N. */
#include <cuda.h>
#include <stdio.h>

#include "kernels/cuda/core/cuda.h"

enum { CUDA_MAJOR = CUDA_VERSION / 1000 };

#define DRIVER_CALLS(X)                                                                                                \
    X(DriverGetVersion)                                                                                                \
    X(Init)                                                                                                            \
    X(GetErrorString)                                                                                                  \
    X(DeviceGetCount)                                                                                                  \
    X(DeviceGet)                                                                                                       \
    X(DeviceGetName)                                                                                                   \
    X(DeviceGetAttribute)                                                                                              \
    X(CtxGetExecAffinity)
#define X(name) decltype(&cu##name) name;
static struct {
    DRIVER_CALLS(X)
} driver;
#undef X

/* The first driver release of that CUDA version. */
static const char *first_driver(void)
{
    return CUDA_MAJOR == 12 ? " (525 or later)" : CUDA_MAJOR == 13 ? " (580 or later)" : "";
}

static int open_driver(struct err *err)
{
    static const char *const name = "libcuda.so.1";
#define X(name) {"cu" #name, &driver.name},
    static const struct library_call calls[] = {DRIVER_CALLS(X)};
#undef X
    int version = 0;
    void *library = library_open(&name, 1);
    if (!library) return err_set(err, "no NVIDIA GPU was found: the driver's %s is not installed", name);
    if (library_find(library, name, calls, MT_LEN(calls), err)) return -1;
    if (driver.DriverGetVersion(&version) == CUDA_SUCCESS && version / 1000 < CUDA_MAJOR)
        return err_set(
            err,
            "the NVIDIA driver is too old: it supports CUDA %d.%d, and this program needs CUDA %d: install a "
            "driver for that%s",
            version / 1000, version % 1000 / 10, CUDA_MAJOR, first_driver());
    return 0;
}

static int attribute(CUdevice_attribute name, CUdevice device)
{
    int value = 0;
    return driver.DeviceGetAttribute(&value, name, device) == CUDA_SUCCESS ? value : 0;
}

int cuda_find(struct err *err)
{
    int n = 0;
    CUdevice device;
    char name[200] = "the GPU";
    const char *text = "unknown error";
    if (open_driver(err)) return -1;
    CUresult rc = driver.Init(0);
    if (rc == CUDA_SUCCESS) rc = driver.DeviceGetCount(&n);
    if (rc == CUDA_ERROR_NO_DEVICE || (rc == CUDA_SUCCESS && n == 0))
        return err_set(err, "no NVIDIA GPU was found: the driver sees none (CUDA_VISIBLE_DEVICES can hide them)");
    if (rc != CUDA_SUCCESS) {
        driver.GetErrorString(rc, &text);
        return err_set(err, "no NVIDIA GPU can be used: the driver does not start: %s", text);
    }
    if (cuda.index > 0 && n == 1) cuda.index = 0; /* the launcher makes one GPU visible to each rank */
    if (cuda.index >= n)
        return err_set(err, "this is rank %d of this machine, which has %d GPUs: start one rank per GPU", cuda.index,
                       n);
    if (driver.DeviceGet(&device, cuda.index) != CUDA_SUCCESS)
        return err_set(err, "no NVIDIA GPU can be used: the driver cannot open GPU %d", cuda.index);
    driver.DeviceGetName(name, sizeof(name), device);
    cuda.capability = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) +
                      attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    if (cuda.capability < GPU_CAPABILITY)
        return err_set(err, "%s has compute capability %d.%d, and the CUDA kernels need 8.0 (Ampere) or later", name,
                       cuda.capability / 10, cuda.capability % 10);
    cuda.n_sm = cuda.all_sm = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    cuda.integrated = attribute(CU_DEVICE_ATTRIBUTE_INTEGRATED, device);
    cuda.host_pointers = attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device);
    snprintf(cuda.name, sizeof(cuda.name), "%s", name);
    return 0;
}

void cuda_find_sms(void)
{
    CUexecAffinityParam of;
    if (driver.CtxGetExecAffinity(&of, CU_EXEC_AFFINITY_TYPE_SM_COUNT) != CUDA_SUCCESS) return;
    const int n = (int)of.param.smCount.val;
    if (n > 0 && n < cuda.all_sm) cuda.n_sm = cuda.all_sm = n;
}
