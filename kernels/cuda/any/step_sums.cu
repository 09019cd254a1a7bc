/* step_sums.cu - sums of a step, kept on the device: loss, hits, KL, auxiliary loss, rows and gates of every expert.
 * Shapes: nll, hit, kl [N]; count, prob [E]; offs [E+1]; row_slot, gate [M]; all outputs f64, "+=".
 * Grid: one block of 1024 threads; expert_sums one block of 128 threads per expert.
 * Numerics: f64 sums in a fixed order. */
#include "kernels/cuda/parts/rows.cuh"

enum { BLOCK = 1024, EXPERT_BLOCK = 128 };

/* Sums over the block; the first warp gets them. All threads must call it, once. */
template <int THREADS = BLOCK, int N> static __device__ inline void block_sums(double (&v)[N])
{
    __shared__ double part[N][THREADS / 32];
#pragma unroll
    for (int k = 0; k < N; k++) {
        v[k] = warp_sum(v[k]);
        if (threadIdx.x % 32 == 0) part[k][threadIdx.x / 32] = v[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N && threadIdx.x < 32; k++)
        v[k] = warp_sum(threadIdx.x < THREADS / 32 ? part[k][threadIdx.x] : 0);
}

static __global__ void __launch_bounds__(BLOCK)
    loss_sum(double *out, const float *nll, const int32_t *hit, const float *kl, int64_t n)
{
    enum { AHEAD = 4 }; /* loads at a time */
    double sums[3] = {0, 0, 0};
    for (int64_t first = threadIdx.x; first < n; first += AHEAD * BLOCK) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t i = first + k * BLOCK;
            if (i >= n) continue;
            sums[0] += (double)nll[i];
            sums[1] += (double)hit[i];
            if (kl) sums[2] += (double)kl[i];
        }
    }
    block_sums(sums);
    if (threadIdx.x < 3) out[threadIdx.x] += threadIdx.x == 0 ? sums[0] : threadIdx.x == 1 ? sums[1] : sums[2];
}

static __global__ void __launch_bounds__(BLOCK)
    aux_sum(double *out, const float *count, const float *prob, int64_t n_exp, double factor)
{
    double sum[1] = {0};
    for (int64_t i = threadIdx.x; i < n_exp; i += BLOCK) sum[0] += (double)count[i] * (double)prob[i];
    block_sums(sum);
    if (threadIdx.x == 0) out[0] += factor * sum[0];
}

static __global__ void __launch_bounds__(EXPERT_BLOCK)
    expert_sums(double *rows, double *gates, const int32_t *offs, const int32_t *slot, const float *gate)
{
    const int e = (int)blockIdx.x;
    double sum[1] = {0};
    for (int i = offs[e] + (int)threadIdx.x; i < offs[e + 1]; i += EXPERT_BLOCK) sum[0] += (double)gate[slot[i]];
    block_sums<EXPERT_BLOCK>(sum);
    if (threadIdx.x) return;
    rows[e] += (double)(offs[e + 1] - offs[e]);
    gates[e] += sum[0];
}

extern "C" void cuda_loss_sum(struct device *dev, struct tensor out, struct tensor nll, struct tensor hit,
                              struct tensor kl)
{
    if (nll.shape[0] == 0) return;
    loss_sum<<<1, BLOCK, 0, cuda.stream>>>((double *)out.data, f32_ptr(nll), i32_ptr(hit), kl.ndim ? f32_ptr(kl) : NULL,
                                           nll.shape[0]);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_aux_sum(struct device *dev, struct tensor out, const struct aux *aux, double factor)
{
    aux_sum<<<1, BLOCK, 0, cuda.stream>>>((double *)out.data, f32_ptr(aux->count), f32_ptr(aux->prob),
                                          aux->count.shape[0], factor);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_expert_sums(struct device *dev, struct tensor rows, struct tensor gates, const struct route *r)
{
    const int64_t n_exp = rows.shape[0];
    if (n_exp == 0) return;
    expert_sums<<<grid_x(n_exp), EXPERT_BLOCK, 0, cuda.stream>>>(
        (double *)rows.data, (double *)gates.data, i32_ptr(r->offs), i32_ptr(r->row_slot), f32_ptr(r->gate));
    CUDA_CHECK_LAUNCH();
}
