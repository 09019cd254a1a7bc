/* rope.cu - rotary embedding, half-split, in place: rotates the pair (i, i + W/2) of a head by the angle of its
 * position.
 * Math: lo' = lo c - hi s, hi' = hi c + lo s; the backward uses -s. The table's cos and sin include the attention
 *   factor.
 * Shapes: qkv [T, >= (heads-1)*A + W] bf16 (view), pos [T] i32, table [P, W] f32: cos [W/2], then sin [W/2]. A: columns
 *   from one head to the next.
 * Needs: W even, 0 <= pos < P (an invalid position traps). T may be 0.
 * Grid: one block per token, one thread per eight pairs; per pair where W is not a multiple of 16, A not of 8, or a row
 *   is not 16-byte aligned.
 * Bound: 4 T heads W bytes: memory bound.
 * Numerics: f32, one rounding at the end. */
#include "kernels/cuda/parts/rope.cuh"

static __global__ void rotate(row_view<> qkv, struct angles angles, int n_head, int head_dim, int half, float direction)
{
    const float *cosine = angles_of_block(angles), *sine = cosine + half;
    bf16 *row = qkv.at(blockIdx.x);
    for (int i = (int)threadIdx.x; i < n_head * (half / 8); i += (int)blockDim.x) {
        const int head = i / (half / 8), at = 8 * (i % (half / 8));
        bf16 *lo = row + head * head_dim + at, *hi = lo + half;
        float a[8], b[8], c[8], s[8], rotated[8];
        unpack8(a, load16(lo));
        unpack8(b, load16(hi));
        load_f32x8(c, cosine + at);
        load_f32x8(s, sine + at);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            s[k] *= direction;
            rotated[k] = a[k] * c[k] - b[k] * s[k];
            b[k] = b[k] * c[k] + a[k] * s[k];
        }
        store16(lo, pack8(rotated));
        store16(hi, pack8(b));
    }
}

static __global__ void rotate_pairs(row_view<> qkv, struct angles angles, int n_head, int head_dim, int half,
                                    float direction)
{
    const float *cosine = angles_of_block(angles), *sine = cosine + half;
    bf16 *row = qkv.at(blockIdx.x);
    for (int i = (int)threadIdx.x; i < n_head * half; i += (int)blockDim.x) {
        bf16 *lo = row + i / half * head_dim + i % half, *hi = lo + half;
        const float a = __bfloat162float(*lo), b = __bfloat162float(*hi), c = cosine[i % half];
        const float s = direction * sine[i % half];
        *lo = __float2bfloat16_rn(a * c - b * s);
        *hi = __float2bfloat16_rn(b * c + a * s);
    }
}

static void launch(struct device *dev, struct tensor qkv, struct tensor pos, struct tensor table, int64_t n_head,
                   int64_t head_dim, float direction)
{
    const int64_t n_tok = qkv.shape[0], dim = table.shape[1];
    if (n_tok == 0 || n_head * dim == 0) return;
    const bool eights = dim % 16 == 0 && head_dim % 8 == 0 && rows_aligned(qkv) && rows_aligned(table);
    const int64_t work = n_head * dim / (eights ? 16 : 2);
    const int threads = (int)MT_MIN(ceil_div(work, 32) * 32, 512);
    (eights ? rotate : rotate_pairs)<<<grid_x(n_tok), threads, 0, cuda.stream>>>(
        rows_of(qkv), angles_of(pos, table), (int)n_head, (int)head_dim, (int)(dim / 2), direction);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_rope_fwd(struct device *dev, struct tensor qkv, struct tensor pos, struct tensor table,
                              int64_t n_head, int64_t head_dim)
{
    launch(dev, qkv, pos, table, n_head, head_dim, 1);
}

extern "C" void cuda_rope_bwd(struct device *dev, struct tensor dqkv, struct tensor pos, struct tensor table,
                              int64_t n_head, int64_t head_dim)
{
    launch(dev, dqkv, pos, table, n_head, head_dim, -1);
}
