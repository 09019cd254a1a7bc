/* tally.cu - sums of a step, kept on the device: loss, hits, KL, auxiliary loss, rows of every expert.
 * Shapes: nll, hit, kl [N]; count, prob [E]; offs [E+1]; all outputs f64, "+=".
 * Grid: one block of 1024 threads; row_count one thread per expert.     Numerics: f64 sums in a fixed order. */
#include "kernels/cuda/rows.cuh"

enum { BLOCK = 1024 };

/* Sum over the block; every thread gets it. All threads must call it; repeated calls are allowed. */
static __device__ inline double block_sum(double v)
{
    __shared__ double part[BLOCK / 32];
    v = warp_sum(v);
    __syncthreads(); /* the partial sums of the previous call have been read */
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(part[threadIdx.x % 32]);
}

static __global__ void __launch_bounds__(BLOCK)
    loss_sum(double *out, const float *nll, const int32_t *hit, const float *kl, int64_t n)
{
    double loss = 0, divergence = 0;
    int64_t n_hit = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < n; i += BLOCK) {
        loss += (double)nll[i];
        n_hit += hit[i];
        if (kl) divergence += (double)kl[i];
    }
    loss = block_sum(loss);
    const double hits = block_sum((double)n_hit);
    divergence = block_sum(divergence);
    if (threadIdx.x) return;
    out[0] += loss;
    out[1] += hits;
    out[2] += divergence;
}

static __global__ void __launch_bounds__(BLOCK)
    aux_sum(double *out, const float *count, const float *prob, int64_t n_exp, double factor)
{
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n_exp; i += BLOCK) sum += (double)count[i] * (double)prob[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[0] += factor * sum;
}

static __global__ void __launch_bounds__(BLOCK) row_count(double *out, const int32_t *offs, int64_t n_exp)
{
    const int64_t e = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (e < n_exp) out[e] += (double)(offs[e + 1] - offs[e]);
}

extern "C" void cuda_loss_sum(struct device *dev, struct tensor out, struct tensor nll, struct tensor hit,
                              struct tensor kl)
{
    if (dev->dry_run || nll.shape[0] == 0) return;
    loss_sum<<<1, BLOCK, 0, cuda.stream>>>((double *)out.data, f32_ptr(nll), i32_ptr(hit), kl.ndim ? f32_ptr(kl) : NULL,
                                           nll.shape[0]);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_aux_sum(struct device *dev, struct tensor out, const struct aux *aux, double factor)
{
    if (dev->dry_run) return;
    aux_sum<<<1, BLOCK, 0, cuda.stream>>>((double *)out.data, f32_ptr(aux->count), f32_ptr(aux->prob),
                                          aux->count.shape[0], factor);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_row_count(struct device *dev, struct tensor out, struct tensor offs)
{
    const int64_t n_exp = out.shape[0];
    if (dev->dry_run || n_exp == 0) return;
    row_count<<<grid_x(ceil_div(n_exp, BLOCK)), BLOCK, 0, cuda.stream>>>((double *)out.data, i32_ptr(offs), n_exp);
    CUDA_CHECK_LAUNCH();
}
