/* loss.cu - fused linear cross-entropy over the labelled rows, in chunks.
 *
 * Math:     logits = x[rows] W^T; nll = log(sum exp(logit - max)) + (max - logit[id]); hit = id is the arg max, ties to
 *           the lowest id; dlogits = scale * (softmax - onehot); dx[rows] = dlogits W, other rows 0.
 * Shapes:   x, dx [T,D] bf16; W [V,D] any format (any but bf16 is decoded once per call); rows, ids, hit [N] i32; nll
 *           [N] f32. Scratch: logits [chunk, V] f32, x and then dx of the chunk [chunk, D] bf16.
 * Needs:    D a multiple of 8, rows of x and dx 16-byte aligned; any V; N may be 0. A label outside the vocabulary
 *           gives a NaN loss.
 * Grid:     loss_kernel: 512 threads per row; one pass for maximum, arg max and sum, one for the gradient, which
 *           overwrites the logits as bf16 from the start of the same row: 32 registers, 192 bytes of shared memory, no
 *           spills. move_kernel: 128 threads copy a row; 38 registers.
 * Moves:    loss_kernel: 4*N*V bytes read for the loss, 4*N*V read and 2*N*V written for the gradient -> memory bound.
 * Numerics: f32 logits, f32 sums in a fixed order (each thread every 512th group of 8 columns, then a tree); dlogits
 *           rounded to bf16. Bitwise repeatable. A NaN stays in its row.
 * Measured: H100 80GB HBM3, commit cfa73e2, op alone, T = N = 16384, V 201088, D 2880, forward and dX, of which the
 *   forward takes 34 ms: chunks of 512 67 ms, 565 TFLOP/s (0.38 GiB of logits); of 640 70; of 1024 66; of 1280 68; of
 *   1536 65 (1.15 GiB). Inside a step 70 ms (b8e3659), where the GPU is at its power limit. H200, inside a step: chunks
 *   of 512 67.3 ms (0abb89a), of 1536 64.2 (31162e7), of 3072 64.7.
 * Tried and dropped: a cluster of eight blocks per row that holds it in shared memory, to read the logits once: 65.6 ms
 *   instead of 67.1, forward alone 35.8 instead of 34.3; the same, persistent, prefetching the next row: 68. Not tried:
 *   bf16 logits, which by their bytes would save about 5 ms, with an error of 0.06 for a logit of 16. */
#include "kernels/cuda/loss.cuh"

/* Of some logits: maximum, its first index, and the sum of exp(logit - max). */
struct tally {
    float max, sum;
    int id;
};

static __device__ __forceinline__ struct tally merge(struct tally a, struct tally b)
{
    struct tally c;
    c.max = fmaxf(a.max, b.max);
    c.sum = a.sum * exp2f((a.max - c.max) * LOG2_E) + b.sum * exp2f((b.max - c.max) * LOG2_E);
    c.id = a.max > b.max ? a.id : b.max > a.max ? b.id : min(a.id, b.id);
    return c;
}

/* The tally of a row; every thread of the block gets it. */
static __device__ __forceinline__ struct tally tally_row(const float *row, int n)
{
    __shared__ struct tally part[WARPS];
    struct tally all = {-FLT_MAX, 0, INT32_MAX}; /* finite: exp(-inf - max) is 0 from the start */
    for (int g = threadIdx.x; g < (n + VECTOR - 1) / VECTOR; g += THREADS) {
        float v[VECTOR], max = all.max;
        load_group(v, row, g, n);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            if (v[j] > max) all.id = g * VECTOR + j;
            max = fmaxf(max, v[j]);
        }
        all.sum *= exp2f((all.max - max) * LOG2_E);
        all.max = max;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) all.sum += exp2f((v[j] - max) * LOG2_E);
    }
    for (int step = 16; step; step /= 2) {
        const struct tally other = {__shfl_xor_sync(~0u, all.max, step), __shfl_xor_sync(~0u, all.sum, step),
                                    __shfl_xor_sync(~0u, all.id, step)};
        all = merge(all, other);
    }
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = all;
    __syncthreads();
    all = part[0];
    for (int i = 1; i < WARPS; i++) all = merge(all, part[i]);
    return all;
}

/* In place: n logits become scale * (softmax - onehot) in bf16, at the start of their row. Each step reads its groups,
 * synchronises, then writes. It only overwrites groups that have been read, since bf16 takes half the space. */
static __device__ __forceinline__ void write_gradient(float *row, int n, int id, const struct tally *all, float scale)
{
    const float factor = scale / all->sum;
    const int n_group = (n + VECTOR - 1) / VECTOR;
    uint4 *out = (uint4 *)row;
    for (int first = 0; first < n_group; first += THREADS) {
        const int g = first + threadIdx.x;
        uint32_t words[4];
        if (g < n_group) {
            float v[VECTOR];
            load_group(v, row, g, n);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                v[j] = exp2f((v[j] - all->max) * LOG2_E) * factor;
                if (g * VECTOR + j == id) v[j] -= scale;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
                words[j] = *(const uint32_t *)&pair;
            }
        }
        __syncthreads();
        if (g < n_group) out[g] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

static __global__ void __launch_bounds__(THREADS) loss_kernel(float *nll, int32_t *hit, float *logits, int64_t ld,
                                                              int n, const int32_t *ids, float scale, bool gradient)
{
    float *row = logits + blockIdx.x * ld;
    const int id = ids[blockIdx.x];
    const bool known = id >= 0 && id < n;
    const float own = known && threadIdx.x == 0 ? row[id] : NAN;
    const struct tally all = tally_row(row, n);
    if (threadIdx.x == 0) {
        nll[blockIdx.x] = logf(all.sum) + (all.max - own); /* max - own first: both may be large */
        hit[blockIdx.x] = known && all.id == id;
    }
    if (gradient) write_gradient(row, n, id, &all, scale);
}

/* ---- host ---- */

/* Loss and dx of one chunk; logits [chunk, V padded] f32 and part [chunk, D] bf16 are scratch. */
static void loss_of_chunk(struct tensor nll, struct tensor hit, struct tensor dx, struct tensor x, struct tensor w,
                          struct tensor rows, struct tensor ids, float scale, struct tensor logits, struct tensor part)
{
    const int64_t n = rows.shape[0], n_vocab = w.shape[0];
    const int32_t *row = i32_ptr(rows);
    part = tensor_rows(part, 0, n);
    logits = tensor_rows(logits, 0, n);
    move_rows(part, NULL, x, row, n);
    cuda_gemm(tensor_cols(logits, 0, n_vocab), part, false, w, true, 1, 0);
    loss_kernel<<<grid_x(n), THREADS, 0, cuda.stream>>>(f32_ptr(nll), i32_ptr(hit), f32_ptr(logits), logits.ld,
                                                        (int)n_vocab, i32_ptr(ids), scale, dx.ndim > 0);
    CUDA_CHECK_LAUNCH();
    if (!dx.ndim) return;
    struct tensor dlogits = tensor_2d(logits.data, DT_BF16, n, n_vocab); /* in the first half of every row */
    dlogits.ld = 2 * logits.ld;
    cuda_gemm(part, dlogits, false, w, false, 1, 0);
    move_rows(dx, row, part, NULL, n);
}

extern "C" void cuda_linear_ce(struct device *dev, struct tensor nll, struct tensor hit, struct tensor dx,
                               struct tensor x, const struct weight *w, struct tensor rows, struct tensor ids,
                               float scale, int64_t chunk)
{
    const int64_t n_label = rows.shape[0], most = MT_MIN(chunk, n_label), mark = arena_mark(&dev->work);
    check_head(w, x);
    if (dx.ndim) check_head(w, dx);
    const struct tensor dense = cuda_dense_bf16(dev, w);
    struct tensor logits = arena_tensor_2d(&dev->work, DT_F32, most, ceil_div(w->n_out, VECTOR) * VECTOR);
    struct tensor part = arena_tensor_2d(&dev->work, DT_BF16, most, w->n_in);
    if (!dev->dry_run) {
        if (dx.ndim) zero_rows(dx);
        for (int64_t first = 0, n; first < n_label; first += n) {
            n = MT_MIN(chunk, n_label - first);
            loss_of_chunk(tensor_rows(nll, first, n), tensor_rows(hit, first, n), dx, x, dense,
                          tensor_rows(rows, first, n), tensor_rows(ids, first, n), scale, logits, part);
        }
    }
    arena_release(&dev->work, mark);
}
