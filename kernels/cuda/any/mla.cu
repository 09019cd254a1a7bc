/* mla.cu - latent attention: the packed q | k | v from queries, latent keys and values, and the shared rotated key.
 * Math: per head, q = [q_nope | R q_rope], k = [k_nope | R k_rope], v; R rotates pairs by the angle of the position,
 *   k_rope is one for all heads; q * (1 + beta log(1 + floor(pos / beta_len))). Backward: the same copies and factor, R
 *   with -s; dk_rope sums over the heads.
 * Shapes: qkv [T, H(2(N+G)+B)], q [T, H(N+G)], kv [T, H(N+B)], k_rope [T, G] bf16 (views), pos [T] i32, table [P, G]
 *   f32: cos [G/2], then sin [G/2]. T may be 0.
 * Needs: N and B multiples of 8, G of 16, at most 256; 16-byte aligned rows; 0 <= pos < P (an invalid position traps).
 * Grid: one block of 256 threads per token. A thread copies 8 columns or rotates 8 pairs. Backward: then the threads
 *   share the heads of dk_rope and add their sums in 16 KiB of shared memory.
 * Bound: fwd 2 T (H(3N+3G+2B+N) + G) bytes, reading k_rope once; bwd the same and dk again, from L2: memory bound.
 * Numerics: f32; one rounding at the end; the sum over heads in a fixed order. */
#include "kernels/cuda/parts/rope.cuh"

enum { BLOCK = 256 };

struct mla_job {
    row_view<> qkv, q, kv, k_rope; /* backward: their gradients */
    struct angles angles;
    int n_head, nope, rope, value;
    bool interleaved;
    int beta_len;
    float beta;
};

static __device__ inline float query_factor(const struct mla_job &j)
{
    return j.beta > 0 ? 1 + j.beta * logf(1 + (float)(j.angles.pos[blockIdx.x] / j.beta_len)) : 1;
}

static __device__ inline void scale8(float x[8], float factor)
{
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] *= factor;
}

static __device__ inline void copy8(bf16 *to, const bf16 *from, float factor)
{
    if (factor == 1) {
        store16(to, load16(from));
        return;
    }
    float v[8];
    unpack8(v, load16(from));
    scale8(v, factor);
    store16(to, pack8(v));
}

static __device__ inline void turn(float lo[8], float hi[8], const float *cosine, int at, int half, float direction)
{
    float c[8], s[8];
    load_f32x8(c, cosine + at);
    load_f32x8(s, cosine + half + at);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float a = lo[k], b = hi[k], n = direction * s[k];
        lo[k] = a * c[k] - b * n;
        hi[k] = b * c[k] + a * n;
    }
}

/* What a thread copies or rotates of a head: eight columns of q, k_nope or v (copied), then eight rotated pairs of q
 * or, in the forward, of k, in this order. */
struct piece {
    int head, at;
    bool rotated, key, query;
    bf16 *packed, *part; /* in q | k | v; in q, kv or k_rope */
};
static __device__ inline struct piece find_piece(const struct mla_job &j, int64_t t, int i, int n_piece)
{
    const int n8 = j.nope / 8, v8 = j.value / 8, pairs = j.rope / 16, width = j.nope + j.rope;
    bf16 *row = j.qkv.at(t), *q = j.q.at(t), *kv = j.kv.at(t);
    struct piece p = {i / n_piece, i % n_piece, false, false, false, NULL, NULL};
    bf16 *head_kv = kv + p.head * (j.nope + j.value);
    if (p.at < n8) {
        p.query = true;
        p.packed = row + p.head * width + 8 * p.at;
        p.part = q + p.head * width + 8 * p.at;
    } else if ((p.at -= n8) < n8) {
        p.packed = row + (j.n_head + p.head) * width + 8 * p.at;
        p.part = head_kv + 8 * p.at;
    } else if ((p.at -= n8) < v8) {
        p.packed = row + 2 * j.n_head * width + p.head * j.value + 8 * p.at;
        p.part = head_kv + j.nope + 8 * p.at;
    } else {
        p.at -= v8;
        p.rotated = true;
        p.key = p.at >= pairs;
        p.query = !p.key;
        p.at = p.at % pairs * 8;
        p.packed = row + (p.key * j.n_head + p.head) * width + j.nope;
        p.part = p.key ? j.k_rope.at(t) : q + p.head * width + j.nope;
    }
    return p;
}

static __global__ void __launch_bounds__(BLOCK) mla_fwd(const struct mla_job j)
{
    const float *cosine = angles_of_block(j.angles), factor = query_factor(j);
    const int half = j.rope / 2, n_piece = (2 * j.nope + j.value) / 8 + 2 * (j.rope / 16);
    for (int i = (int)threadIdx.x; i < j.n_head * n_piece; i += BLOCK) {
        const struct piece p = find_piece(j, blockIdx.x, i, n_piece);
        float lo[8], hi[8];
        if (!p.rotated) {
            copy8(p.packed, p.part, p.query ? factor : 1);
            continue;
        }
        load_pairs(lo, hi, p.part, p.at, half, j.interleaved);
        turn(lo, hi, cosine, p.at, half, 1);
        scale8(lo, p.query ? factor : 1);
        scale8(hi, p.query ? factor : 1);
        store16(p.packed + p.at, pack8(lo));
        store16(p.packed + half + p.at, pack8(hi));
    }
}

/* dk_rope: thread i sums pairs 8 (i % n) .. of every (BLOCK / n)-th head; then the sums are added in order. */
static __device__ inline void sum_key(const struct mla_job &j, const float *cosine)
{
    __shared__ float sums[BLOCK * 16]; /* [threads / n, rope]: lo of all pairs, then hi */
    const int half = j.rope / 2, n = j.rope / 16, n_part = BLOCK / n, width = j.nope + j.rope;
    const int part = (int)threadIdx.x / n, at = (int)threadIdx.x % n * 8;
    const bf16 *row = j.qkv.at(blockIdx.x) + (int64_t)j.n_head * width + j.nope;
    float lo[8] = {}, hi[8] = {}, v[8];
    for (int head = part; head < j.n_head && part < n_part; head += n_part) {
        unpack8(v, load16(row + head * width + at));
#pragma unroll
        for (int k = 0; k < 8; k++) lo[k] += v[k];
        unpack8(v, load16(row + head * width + half + at));
#pragma unroll
        for (int k = 0; k < 8; k++) hi[k] += v[k];
    }
    if (part < n_part) {
        store_f32x8(sums + part * j.rope + at, lo);
        store_f32x8(sums + part * j.rope + half + at, hi);
    }
    __syncthreads();
    if (part > 0) return;
    for (int i = 1; i < n_part && i < j.n_head; i++) {
        load_f32x8(v, sums + i * j.rope + at);
#pragma unroll
        for (int k = 0; k < 8; k++) lo[k] += v[k];
        load_f32x8(v, sums + i * j.rope + half + at);
#pragma unroll
        for (int k = 0; k < 8; k++) hi[k] += v[k];
    }
    turn(lo, hi, cosine, at, half, -1);
    store_pairs(j.k_rope.at(blockIdx.x), lo, hi, at, half, j.interleaved);
}

static __global__ void __launch_bounds__(BLOCK) mla_bwd(const struct mla_job j)
{
    const float *cosine = angles_of_block(j.angles), factor = query_factor(j);
    const int half = j.rope / 2, n_piece = (2 * j.nope + j.value) / 8 + j.rope / 16;
    for (int i = (int)threadIdx.x; i < j.n_head * n_piece; i += BLOCK) {
        const struct piece p = find_piece(j, blockIdx.x, i, n_piece);
        float lo[8], hi[8];
        if (!p.rotated) {
            copy8(p.part, p.packed, p.query ? factor : 1);
            continue;
        }
        unpack8(lo, load16(p.packed + p.at));
        unpack8(hi, load16(p.packed + half + p.at));
        turn(lo, hi, cosine, p.at, half, -1);
        scale8(lo, factor);
        scale8(hi, factor);
        store_pairs(p.part, lo, hi, p.at, half, j.interleaved);
    }
    sum_key(j, cosine);
}

static struct mla_job job_of(struct tensor qkv, struct tensor q, struct tensor kv, struct tensor k_rope,
                             struct tensor pos, struct tensor table, const struct mla_shape *s)
{
    MT_REQUIRE(s->nope % 8 == 0 && s->value % 8 == 0 && s->rope % 16 == 0 && s->rope <= 256 && rows_aligned(table),
               "latent attention with heads of %lld + %lld and values of %lld: multiples of 8, 16 and 8 and an aligned "
               "table are needed",
               (long long)s->nope, (long long)s->rope, (long long)s->value);
    struct mla_job j = {};
    j.qkv = aligned_rows(qkv, "latent attention");
    j.q = aligned_rows(q, "latent attention");
    j.kv = aligned_rows(kv, "latent attention");
    j.k_rope = aligned_rows(k_rope, "latent attention");
    j.angles = angles_of(pos, table);
    j.n_head = (int)s->n_head;
    j.nope = (int)s->nope;
    j.rope = (int)s->rope;
    j.value = (int)s->value;
    j.interleaved = s->interleaved;
    j.beta_len = (int)s->beta_len;
    j.beta = s->beta;
    return j;
}

extern "C" void cuda_mla_qkv_fwd(struct device *dev, struct tensor qkv, struct tensor q, struct tensor kv,
                                 struct tensor k_rope, struct tensor pos, struct tensor table,
                                 const struct mla_shape *shape)
{
    if (qkv.shape[0] == 0) return;
    mla_fwd<<<grid_x(qkv.shape[0]), BLOCK, 0, cuda.stream>>>(job_of(qkv, q, kv, k_rope, pos, table, shape));
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_mla_qkv_bwd(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dk_rope,
                                 struct tensor dqkv, struct tensor pos, struct tensor table,
                                 const struct mla_shape *shape)
{
    if (dqkv.shape[0] == 0) return;
    mla_bwd<<<grid_x(dqkv.shape[0]), BLOCK, 0, cuda.stream>>>(job_of(dqkv, dq, dkv, dk_rope, pos, table, shape));
    CUDA_CHECK_LAUNCH();
}
