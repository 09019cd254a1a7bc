/* preference.cu - losses over whole answers: the answers' log-probabilities, the loss of each pair or row, and the loss
 * head's gradient times the weights that follow from these losses.
 * Math: kernels/preference_value.h.
 * Shapes: nll [N] f32; cu [A+1], first, good [A] i32; logps, reference [A, 2] f64; weight [A, 2] f32; dx [T, D] bf16.
 * Grid: answer_sums a warp per answer; preference one block, a thread per pair or row; scale_labels a block per label.
 * Bound: scale_labels 4 N D bytes; the other kernels are bound by latency.
 * Numerics: f64 in a fixed order; sums over pairs in their order, as on the CPU. */
#include "kernels/cuda/parts/rows.cuh"
#include "kernels/preference_value.h"

enum { BLOCK = 256, UNITS = 128 };

struct answer_view {
    const int32_t *cu, *first;
    int64_t n;
};

static struct answer_view view_of(const struct answers *a)
{
    return {i32_ptr(a->cu), i32_ptr(a->first), a->first.shape[0]};
}

static __global__ void __launch_bounds__(BLOCK) answer_sums(double *logps, const float *nll, struct answer_view a)
{
    const int64_t i = (int64_t)blockIdx.x * (BLOCK / 32) + threadIdx.x / 32;
    double prompt = 0, completion = 0;
    if (i >= a.n) return;
    for (int k = a.cu[i] + (int)threadIdx.x % 32; k < a.cu[i + 1]; k += 32)
        (k < a.first[i] ? prompt : completion) -= (double)nll[k];
    prompt = warp_sum(prompt);
    completion = warp_sum(completion);
    if (threadIdx.x % 32) return;
    logps[2 * i] = completion;
    logps[2 * i + 1] = prompt + completion;
}

static __device__ inline struct preference_answer load_answer(const double *logps, const double *reference,
                                                              struct answer_view a, int64_t i)
{
    const int begin = a.cu[i], first = a.first[i], end = a.cu[i + 1];
    return {logps[2 * i], logps[2 * i + 1], reference ? reference[2 * i] : 0, (double)(end - first),
            (double)(end - begin)};
}

static __global__ void __launch_bounds__(UNITS)
    preference(double *sums, float *weight, const struct preference p, const double *logps, const double *reference,
               const int32_t *good, struct answer_view a)
{
    __shared__ double part[UNITS][PREFERENCE_SUMS];
    const int per_unit = good ? 1 : 2;
    double total = threadIdx.x < PREFERENCE_SUMS ? sums[threadIdx.x] : 0;
    for (int64_t begin = 0; begin < a.n; begin += UNITS * per_unit) {
        const int64_t i = begin + (int)threadIdx.x * per_unit;
        if (i < a.n) {
            struct preference_answer of[2] = {load_answer(logps, reference, a, i)};
            if (!good) of[1] = load_answer(logps, reference, a, i + 1);
            const struct preference_unit u = good ? preference_row(&p, of, good[i]) : preference_pair(&p, of);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (k < 2 * per_unit) weight[2 * i + k] = (float)u.weight[k / 2][k % 2];
#pragma unroll
            for (int k = 0; k < PREFERENCE_SUMS; k++) part[threadIdx.x][k] = u.sum[k];
        }
        __syncthreads();
        const int n = (int)min((a.n - begin) / per_unit, (int64_t)UNITS);
        for (int k = 0; k < n && threadIdx.x < PREFERENCE_SUMS; k++) total += part[k][threadIdx.x];
        __syncthreads();
    }
    if (threadIdx.x < PREFERENCE_SUMS) sums[threadIdx.x] = total;
}

/* The answer of a label: the last one that begins at it or before, not counting those without labels. */
static __device__ inline int64_t answer_of(struct answer_view a, int64_t label)
{
    int64_t low = 0, high = a.n; /* cu[low] <= label < cu[high] */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (a.cu[middle] <= label)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static __global__ void __launch_bounds__(BLOCK)
    scale_labels(row_view<> dx, int64_t n_col, const int32_t *rows, const float *weight, struct answer_view a)
{
    const int64_t label = blockIdx.x, i = answer_of(a, label);
    const float w = weight[2 * i + (label < a.first[i])];
    bf16 *row = dx.at(rows[label]);
    for (int64_t c = threadIdx.x; c < n_col; c += BLOCK) row[c] = __float2bfloat16_rn(w * __bfloat162float(row[c]));
}

extern "C" void cuda_answer_sums(struct device *dev, struct tensor logps, struct tensor nll, const struct answers *a)
{
    const int64_t n = a->first.shape[0];
    if (n == 0) return;
    answer_sums<<<grid_x((n + BLOCK / 32 - 1) / (BLOCK / 32)), BLOCK, 0, cuda.stream>>>((double *)logps.data,
                                                                                        f32_ptr(nll), view_of(a));
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_preference(struct device *dev, struct tensor sums, struct tensor weight,
                                const struct preference *p, struct tensor logps, struct tensor reference,
                                struct tensor good, const struct answers *a)
{
    if (a->first.shape[0] == 0) return;
    preference<<<1, UNITS, 0, cuda.stream>>>((double *)sums.data, f32_ptr(weight), *p, (const double *)logps.data,
                                             reference.ndim ? (const double *)reference.data : NULL,
                                             good.ndim ? i32_ptr(good) : NULL, view_of(a));
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_scale_labels(struct device *dev, struct tensor dx, struct tensor rows, struct tensor weight,
                                  const struct answers *a)
{
    if (rows.shape[0] == 0) return;
    scale_labels<<<grid_x(rows.shape[0]), BLOCK, 0, cuda.stream>>>(rows_of(dx), dx.shape[1], i32_ptr(rows),
                                                                   f32_ptr(weight), view_of(a));
    CUDA_CHECK_LAUNCH();
}
