/* state_rows.cuh - shared by the kernels that compute a recurrence token by token: a thread holds a row or a column of
 * a state in DIM registers. */
#ifndef MT_CUDA_STATE_ROWS_H
#define MT_CUDA_STATE_ROWS_H

#include "kernels/cuda/parts/rows.cuh"

static __device__ inline float softplus(float x) { return fmaxf(x, 0) + log1pf(expf(-fabsf(x))); }

/* out[i] = factor[i] * x of n tokens from t on, zero beyond their dim columns; factor NULL: 1. */
template <int DIM, typename T>
static __device__ inline void load_rows(float (*out)[DIM], const T *x, int64_t ld, int64_t t, int n, int dim,
                                        const float *factor)
{
    for (int i = (int)threadIdx.x; i < n * DIM; i += (int)blockDim.x) {
        const int row = i / DIM, c = i % DIM;
        const float v = c < dim ? (float)x[(t + row) * ld + c] : 0;
        out[row][c] = factor ? factor[row] * v : v;
    }
}

/* The sum of s[r] v[r], by four partial sums. */
template <int DIM> static __device__ inline float dot(const float s[DIM], const float *v)
{
    float sum[4] = {0};
#pragma unroll
    for (int r = 0; r < DIM; r += 4) {
        const float4 x = *(const float4 *)(v + r);
        sum[0] = fmaf(s[r], x.x, sum[0]);
        sum[1] = fmaf(s[r + 1], x.y, sum[1]);
        sum[2] = fmaf(s[r + 2], x.z, sum[2]);
        sum[3] = fmaf(s[r + 3], x.w, sum[3]);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* s = decay * s + by * v */
template <int DIM> static __device__ inline void update(float s[DIM], float decay, const float *v, float by)
{
#pragma unroll
    for (int r = 0; r < DIM; r += 4) {
        const float4 x = *(const float4 *)(v + r);
        s[r] = fmaf(by, x.x, decay * s[r]);
        s[r + 1] = fmaf(by, x.y, decay * s[r + 1]);
        s[r + 2] = fmaf(by, x.z, decay * s[r + 2]);
        s[r + 3] = fmaf(by, x.w, decay * s[r + 3]);
    }
}

/* The elements of a row that a lane holds, zero beyond dim. */
template <int DIM, typename T> static __device__ inline void lane_load(float v[DIM / 32], const T *x, int dim)
{
#pragma unroll
    for (int e = 0; e < DIM / 32; e++) {
        const int c = (int)(threadIdx.x % 32) + 32 * e;
        v[e] = c < dim ? (float)x[c] : 0;
    }
}

template <int N> static __device__ inline float lane_dot(const float a[N], const float b[N])
{
    float sum = 0;
#pragma unroll
    for (int e = 0; e < N; e++) sum += a[e] * b[e];
    return warp_sum(sum);
}

/* The sum of the values of this lane and the lanes before it. */
static __device__ inline float warp_prefix(float v)
{
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, v, step);
        if ((int)threadIdx.x % 32 >= step) v += other;
    }
    return v;
}

/* The sum of the values of this thread and those before it, plus *carry, to which the sum over all THREADS is added.
 * part: shared memory. */
template <int THREADS> static __device__ inline float sum_before(float v, float part[THREADS / 32], float *carry)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    v = warp_prefix(v);
    if (lane == 31) part[warp] = v;
    __syncthreads();
    float before = *carry;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w == warp) v += before;
        before += part[w];
    }
    *carry = before;
    __syncthreads();
    return v;
}

#endif
