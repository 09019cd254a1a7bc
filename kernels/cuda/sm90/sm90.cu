/* sm90.cu - whether this program contains sm_90a code that the driver loads on this GPU.
 *
 * CMake compiles this file for the same architectures as the kernels that include sm90.cuh, so the probe kernel answers
 * for them. The name of the GPU does not say what the program was compiled for. */
#include "kernels/cuda/core/cuda.h"

static __global__ void sm90_kernel(int *is_sm90a)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    *is_sm90a = 1;
#else
    *is_sm90a = 0;
#endif
}

bool cuda_has_sm90(void)
{
    int *found, is_sm90a = 0;
    CUDA_CHECK(cudaMalloc((void **)&found, sizeof(*found)));
    sm90_kernel<<<1, 1, 0, cuda.stream>>>(found);
    const cudaError_t rc = cudaGetLastError();
    if (rc == cudaSuccess)
        CUDA_CHECK(cudaMemcpyAsync(&is_sm90a, found, sizeof(*found), cudaMemcpyDefault, cuda.stream));
    CUDA_CHECK(cudaStreamSynchronize(cuda.stream));
    CUDA_CHECK(cudaFree(found));
    return rc == cudaSuccess && is_sm90a;
}
