/* rng.cuh - the counter-based random numbers of kernels/base.c on the GPU, bit for bit. */
#ifndef MT_CUDA_RNG_H
#define MT_CUDA_RNG_H

#include <math.h>
#include <stdint.h>

static __device__ __forceinline__ uint64_t rng_mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* rng_u64 of base.h */
static __device__ __forceinline__ uint64_t rng_device_u64(uint64_t key, uint64_t counter)
{
    const uint64_t x = rng_mix64(key + (counter + 1) * 0x9e3779b97f4a7c15u);
    return rng_mix64(x ^ (key * 0xd1342543de82ef95u + 0x632be59bd9b4e019u));
}

/* rng_uniform(key, counter) >= p, in integers: the uniform is the upper 53 bits times 2^-53, and rng_threshold(p) is p
 * in those units, rounded up. */
static inline uint64_t rng_threshold(double p) { return (uint64_t)ceil(ldexp(p, 53)); }
static __device__ __forceinline__ bool rng_at_least(uint64_t key, uint64_t counter, uint64_t threshold)
{
    return rng_device_u64(key, counter) >> 11 >= threshold;
}

#endif
