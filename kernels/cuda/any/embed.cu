/* embed.cu - token embedding: one decoded row of the table for each token; the noise of NEFTune.
 * Math: x += alpha / sqrt(n D) u, n the length of the row's sequence, u a counter-based random number in [-1, 1).
 * Shapes: y, x [T, D] bf16 (view), w [V, D] in any format, tok [T] i32.
 * Needs: D % 8 == 0 (MXFP4: % 32), 16-byte aligned rows; ids below V (an invalid id traps). T may be 0.
 * Grid: one block per token, one thread per eight columns.
 * Bound: each row once, in 16-byte loads; so the table may be in host memory mapped for the device.
 * Numerics: the noise is added in f32, one rounding. */
#include <stdio.h>

#include "kernels/cuda/format/formats.cuh"
#include "kernels/cuda/parts/rng.cuh"
#include "kernels/cuda/parts/rows.cuh"
#include "kernels/cuda/parts/seqs.cuh"

template <typename FORMAT> static __global__ void embed(bf16 *y, int64_t ldy, const struct source s, const int32_t *tok)
{
    const int64_t id = tok[blockIdx.x];
    if (id < 0 || id >= s.w.n_out) {
        if (threadIdx.x == 0)
            printf("embedding: token %lld of a vocabulary of %lld\n", (long long)id, (long long)s.w.n_out);
        __trap();
    }
    for (int64_t col = 8 * threadIdx.x; col < s.w.n_in; col += 8 * blockDim.x) {
        float v[8];
        weight_load8<FORMAT>(v, s, id * s.w.n_in + col);
        store16(y + blockIdx.x * ldy + col, pack8(v));
    }
}

extern "C" void cuda_embed_fwd(struct device *dev, struct tensor y, const struct weight *w, struct tensor tok)
{
    if (y.shape[0] == 0) return;
    MT_REQUIRE(weight_loads8(w) && rows_aligned(y), "an embedding of %lld columns in %s", (long long)w->n_in,
               weight_format_name(w->format));
    const int threads = (int)MT_MIN(ceil_div(w->n_in / 8, 32) * 32, 512);
    with_decoder(w->format, [&](auto decoder) {
        embed<decltype(decoder)>
            <<<grid_x(y.shape[0]), threads, 0, cuda.stream>>>(bf16_ptr(y), y.ld, source_of(w), i32_ptr(tok));
    });
    CUDA_CHECK_LAUNCH();
}

/* prefix: rows in the prefix of each sequence, or NULL. */
static __global__ void add_noise(bf16 *x, int64_t ld, int64_t dim, const int32_t *cu, const int32_t *prefix, int n_seq,
                                 float alpha, uint64_t key)
{
    const int64_t t = blockIdx.x;
    const int seq = sequence_at(cu, n_seq, (int)t);
    const int len = (prefix ? prefix[seq] : 0) + cu[seq + 1] - cu[seq];
    const float size = alpha / sqrtf((float)len * (float)dim);
    for (int64_t col = 8 * threadIdx.x; col < dim; col += 8 * blockDim.x) {
        float v[8];
        unpack8(v, load16(x + t * ld + col));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint64_t bits = rng_device_u64(key, (uint64_t)(t * dim + col + i)) >> 40;
            v[i] += size * ((float)bits * 0x1p-23f - 1);
        }
        store16(x + t * ld + col, pack8(v));
    }
}

extern "C" void cuda_embed_noise(struct device *dev, struct tensor x, const struct seqs *seqs, float alpha,
                                 uint64_t key)
{
    const int64_t dim = x.shape[1];
    if (x.shape[0] == 0) return;
    MT_REQUIRE(dim % 8 == 0 && rows_aligned(x), "noise on %lld columns", (long long)dim);
    const int threads = (int)MT_MIN(ceil_div(dim / 8, 32) * 32, 512);
    add_noise<<<grid_x(x.shape[0]), threads, 0, cuda.stream>>>(bf16_ptr(x), x.ld, dim, i32_ptr(seqs->cu),
                                                               i32_ptr(seqs->prefix), (int)seqs->n_seq, alpha, key);
    CUDA_CHECK_LAUNCH();
}
