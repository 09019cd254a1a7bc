/* ring_wgmma.cuh - the pipeline of stages in shared memory between a producer and consumers, of the
 * grouped and dense products on Hopper.
 * A stage is full when its bytes have arrived, empty when all consumer warps that read it have released it. */
#ifndef MT_CUDA_RING_WGMMA_H
#define MT_CUDA_RING_WGMMA_H

#include "kernels/cuda/sm90/sm90.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Position of a producer or consumer. */
struct ring {
    uint32_t data, full, empty; /* shared-memory addresses of stage 0 and its barriers */
    int stage;
    uint32_t parity;
    uint32_t rows; /* of a consumer: where its rows of a begin in a stage */
};

template <int STAGES> static __device__ __forceinline__ void ring_advance(struct ring *ring)
{
    if (++ring->stage == STAGES) ring->stage = 0, ring->parity ^= 1;
}

static __device__ __forceinline__ void release(const struct ring &ring, int stage)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty + 8 * stage);
}

#endif
#endif
