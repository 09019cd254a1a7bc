/* rope.cuh - the angles of RoPE: a table whose rows have the cosines, then the sines, of a position. */
#ifndef MT_CUDA_ROPE_H
#define MT_CUDA_ROPE_H

#include <stdio.h>

#include "kernels/cuda/parts/rows.cuh"

struct angles {
    const int32_t *pos;    /* [T] */
    row_view<float> table; /* [n_pos, W]: cos [W/2], then sin [W/2] */
    int64_t n_pos;
};
static inline struct angles angles_of(struct tensor pos, struct tensor table)
{
    return {i32_ptr(pos), rows_of<float>(table), table.shape[0]};
}

/* The row of position p, which must be in the table; otherwise the kernel traps, and threads with `tell` print why. */
static __device__ inline const float *angles_at(const struct angles &a, int64_t p, bool tell)
{
    if (p < 0 || p >= a.n_pos) {
        if (tell) printf("RoPE: position %lld, but the table has %lld\n", (long long)p, (long long)a.n_pos);
        __trap();
    }
    return a.table.at(p);
}
static __device__ inline const float *angles_of_block(const struct angles &a)
{
    return angles_at(a, a.pos[blockIdx.x], threadIdx.x == 0);
}

#endif
