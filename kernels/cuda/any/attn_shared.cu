/* attn_shared.cu - attention whose heads share one key, which is the value too (DeepSeek-V4): the ops, and kernels for
 * any number of heads of up to 512 columns. A token sees a window, entries, which each sum up several tokens, and a
 * sink.
 *
 * Math: o_t = sum_k p_tk key_k, p_tk = exp(scale <q_t, key_k> - lse_t) over the keys that token t sees; lse includes
 *   the sink. ds = scale p (<dout, key> - <dout, o>); dq = sum_k ds key_k; dkey = sum over tokens and heads of p dout +
 *   ds q.
 * Shapes: q, o, dout, dq [T, H*A] bf16, kv [T, A], entry [N, A] bf16, idx [T, K] i32, lse [T, H] f32; T may be 0.
 * Needs: A <= 512; T * H < 2^31. Scratch: 4*T*H bytes.
 * Grid: forward and dq: a warp per token and head, a lane has columns lane, lane + 32, ...; 8 heads per block, which
 *   read the same keys from L1. Gradients of keys: a block per row, whose 8 warps take turns at the tokens that see it;
 *   their sums are added in a fixed order.
 * Bound: arithmetic of f32 (14*H*A FLOP per pair backward), and L2, as every key reads all rows of q and dout again.
 * Numerics: f32; only inputs and outputs are rounded. 64, 128, ... heads of 512 columns have kernels in
 * attn_shared_mma.cu, on Hopper in attn_shared_wgmma_*.cu. */
#include "kernels/cuda/parts/attn_shared.cuh"

enum { WARPS = 8, WORDS = SHARED_WIDEST / 32 }; /* WORDS: columns of a lane, at most */
/* shared_sum_kernel: a thread has four columns and, in list_parts, one item (struct shared_item); SUM_LOADS: loads in
 * flight */
enum { SUM_THREADS = SHARED_DIM / 4, SUM_LOADS = 8 };
static_assert((int)SUM_THREADS == (int)SHARED_ITEMS, "a thread per item");

__device__ static inline void load_row(float x[WORDS], const bf16 *row, int dim)
{
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        const int c = threadIdx.x % 32 + 32 * j;
        x[j] = c < dim ? __bfloat162float(row[c]) : 0.0f;
    }
}
__device__ static inline void store_row(bf16 *row, const float x[WORDS], float factor, int dim)
{
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        const int c = threadIdx.x % 32 + 32 * j;
        if (c < dim) row[c] = __float2bfloat16_rn(x[j] * factor);
    }
}
__device__ static inline float dot(const float x[WORDS], const float y[WORDS])
{
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < WORDS; j++) sum += x[j] * y[j];
    return warp_sum(sum);
}

__device__ static inline const bf16 *key_row(const struct shared_args &a, const struct sight &s, int k)
{
    if (k < s.n_near) return a.kv + (s.first_key + k) * a.ld_kv;
    k -= s.n_near;
    if (k >= (s.list ? a.top : s.n_far) || (s.list && !listed(s, k))) return NULL;
    return a.entry + (int64_t)(s.first_entry + (s.list ? s.list[k] : k)) * a.ld_entry;
}

struct place {
    int t, head;
    bool used;
};
__device__ static inline struct place place_of(const struct shared_args &a)
{
    const int per_token = (a.n_head + WARPS - 1) / WARPS;
    struct place p;
    p.t = blockIdx.x / per_token;
    p.head = blockIdx.x % per_token * WARPS + threadIdx.x / 32;
    p.used = p.head < a.n_head;
    return p;
}

__global__ void __launch_bounds__(WARPS * 32) shared_fwd_kernel(const struct shared_args a)
{
    const struct place p = place_of(a);
    if (!p.used) return;
    const struct sight s = sight_of(a, p.t);
    float q[WORDS], key[WORDS], o[WORDS] = {};
    float max = a.sinks ? a.sinks[p.head] * LOG2_E : -INFINITY, sum = a.sinks ? 1.0f : 0.0f;
    load_row(q, a.q + p.t * a.ld_q + (int64_t)p.head * a.dim, a.dim);
    for (int k = 0;; k++) {
        const bf16 *row = key_row(a, s, k);
        if (!row) break;
        load_row(key, row, a.dim);
        const float score = dot(q, key) * a.scale * LOG2_E, top = fmaxf(max, score);
        const float factor = exp2f(max - top), weight = exp2f(score - top);
        max = top;
        sum = sum * factor + weight;
#pragma unroll
        for (int j = 0; j < WORDS; j++) o[j] = o[j] * factor + weight * key[j];
    }
    store_row(a.o + p.t * a.ld_o + (int64_t)p.head * a.dim, o, 1.0f / sum, a.dim);
    if (threadIdx.x % 32 == 0) a.lse[p.t * a.ld_lse + p.head] = max / LOG2_E + logf(sum);
}

/* p, and ds with its scale, of a head and a key. */
struct weights {
    float p, ds;
};
__device__ static inline struct weights weigh(const struct shared_args &a, const float q[WORDS], const float d[WORDS],
                                              const float key[WORDS], float lse, float delta)
{
    const float p = exp2f((dot(q, key) * a.scale - lse) * LOG2_E);
    return {p, p * (dot(d, key) - delta) * a.scale};
}

__global__ void __launch_bounds__(WARPS * 32) shared_dq_kernel(const struct shared_args a, float *all_delta)
{
    const struct place p = place_of(a);
    if (!p.used) return;
    const struct sight s = sight_of(a, p.t);
    const int64_t column = (int64_t)p.head * a.dim;
    float q[WORDS], d[WORDS], key[WORDS], dq[WORDS] = {};
    load_row(key, a.o + p.t * a.ld_o + column, a.dim);
    load_row(d, a.dout + p.t * a.ld_dout + column, a.dim);
    load_row(q, a.q + p.t * a.ld_q + column, a.dim);
    const float delta = dot(d, key), lse = a.lse[p.t * a.ld_lse + p.head];
    for (int k = 0;; k++) {
        const bf16 *row = key_row(a, s, k);
        if (!row) break;
        load_row(key, row, a.dim);
        const float ds = weigh(a, q, d, key, lse, delta).ds;
#pragma unroll
        for (int j = 0; j < WORDS; j++) dq[j] += ds * key[j];
    }
    store_row(a.dq + p.t * a.ld_dq + column, dq, 1.0f, a.dim);
    if (threadIdx.x % 32 == 0) all_delta[(int64_t)p.t * a.n_head + p.head] = delta;
}

/* Whether a token sees row `row` of kv, or of the entries. */
__device__ static inline bool sees(const struct shared_args &a, int t, int row, bool entry)
{
    const struct sight s = sight_of(a, t);
    if (!entry) return row >= s.first_key && row < s.first_key + s.n_near;
    const int e = row - s.first_entry;
    if (e < 0 || e >= s.n_far) return false;
    if (!s.list) return true;
    int low = 0, high = a.top; /* finds the first element that is at least e, or is -1 */
    while (low < high) {
        const int middle = (low + high) / 2, x = s.list[middle];
        if (x >= 0 && x < e)
            low = middle + 1;
        else
            high = middle;
    }
    return low < a.top && s.list[low] == e;
}

__global__ void __launch_bounds__(WARPS * 32)
    shared_dkey_kernel(const struct shared_args a, const float *all_delta, bool entry)
{
    __shared__ float sums[WARPS][WORDS * 32];
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = entry ? 0 : row, end = entry ? a.n_tok : min((int64_t)a.n_tok, (int64_t)row + a.window);
    float key[WORDS], q[WORDS], d[WORDS], sum[WORDS] = {};
    load_row(key, entry ? a.entry + row * a.ld_entry : a.kv + row * a.ld_kv, a.dim);
    for (int t = first + warp; t < end; t += WARPS) {
        if (!sees(a, t, row, entry)) continue;
        for (int head = 0; head < a.n_head; head++) {
            load_row(q, a.q + t * a.ld_q + (int64_t)head * a.dim, a.dim);
            load_row(d, a.dout + t * a.ld_dout + (int64_t)head * a.dim, a.dim);
            const struct weights w =
                weigh(a, q, d, key, a.lse[t * a.ld_lse + head], all_delta[(int64_t)t * a.n_head + head]);
#pragma unroll
            for (int j = 0; j < WORDS; j++) sum[j] += w.p * d[j] + w.ds * q[j];
        }
    }
#pragma unroll
    for (int j = 0; j < WORDS; j++) sums[warp][lane + 32 * j] = sum[j];
    __syncthreads();
    for (int c = threadIdx.x; c < a.dim; c += WARPS * 32) {
        float total = 0.0f;
        for (int w = 0; w < WARPS; w++) total += sums[w][c];
        (entry ? a.dentry + row * a.ld_dentry : a.dkv + row * a.ld_dkv)[c] = __float2bfloat16_rn(total);
    }
}

/* ---- what the kernels for 64, 128, ... heads of 512 columns share in the backward */

/* Lists the rows of x.part with this chunk's terms of the gradient of row `row` of kv, or of the entries, in the order
 * of the tokens. They have columns 0 .. 255; columns 256 .. 511 are SHARED_BLOCK rows further. Returns their number.
 * All SHARED_ITEMS threads of a block call it; it ends with a barrier. */
__device__ static inline int list_parts(int parts[SHARED_ITEMS], const struct shared_args &a,
                                        const struct shared_chunk &x, int row, bool entry)
{
    __shared__ uint32_t seen[SHARED_ITEMS / 32];
    const int item = threadIdx.x, warp = item / 32, first = x.first + item * SHARED_TOKENS, end = x.first + x.n;
    int2 range = {0, 0}; /* rows that the tokens of the item see, at most */
    if (first < end) {
        const int last = min(first + (int)SHARED_TOKENS, end) - 1;
        range = entry ? far_range(a, first, last) : make_int2(first - a.window + 1, last + 1);
    }
    const bool sees = row >= range.x && row < range.y;
    const uint32_t ballot = __ballot_sync(~0u, sees);
    if (item % 32 == 0) seen[warp] = ballot;
    __syncthreads();
    int n = 0, before = __popc(ballot & ((1u << item % 32) - 1));
    for (int w = 0; w < SHARED_ITEMS / 32; w++) {
        if (w < warp) before += __popc(seen[w]);
        n += __popc(seen[w]);
    }
    if (sees) {
        const int at = row - range.x + (entry ? near_rows(a) : 0); /* entries follow the window, in its last block */
        const int block = item * (x.n_window + x.n_far) + at / SHARED_BLOCK;
        parts[before] = block * 2 * SHARED_BLOCK + at % SHARED_BLOCK;
    }
    __syncthreads();
    return n;
}

/* A block adds the terms of one row (list_parts), in the order of the tokens. The first blocks have the rows of kv from
 * row0 on, the others the rows of the entries. x.dkv and x.dentry have the sums of earlier chunks; a row that no later
 * token sees is written in bf16. */
static __global__ void __launch_bounds__(SUM_THREADS)
    shared_sum_kernel(const struct shared_args a, const struct shared_chunk x, int row0)
{
    __shared__ int parts[SHARED_ITEMS];
    const int end = x.first + x.n, n_near = end - row0, i = threadIdx.x;
    const bool entry = (int)blockIdx.x >= n_near;
    const int row = entry ? blockIdx.x - n_near : row0 + blockIdx.x;
    const int n = list_parts(parts, a, x, row, entry);
    const float *from =
        x.part + i / (SHARED_COLUMNS / 4) * SHARED_BLOCK * SHARED_COLUMNS + i % (SHARED_COLUMNS / 4) * 4;
    float4 *to = (float4 *)((entry ? x.dentry : x.dkv) + (int64_t)row * SHARED_DIM) + i;
    const bool begins = entry ? x.first == 0 : row >= x.first;
    const bool ends = end == a.n_tok || (!entry && row + a.window <= end);
    float4 sum = begins ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *to;
    for (int s = 0; s < n; s += SUM_LOADS) {
        float4 p[SUM_LOADS];
#pragma unroll
        for (int j = 0; j < SUM_LOADS; j++)
            p[j] = *(const float4 *)(from + (int64_t)parts[min(s + j, n - 1)] * SHARED_COLUMNS);
#pragma unroll
        for (int j = 0; j < SUM_LOADS; j++)
            if (s + j < n) sum.x += p[j].x, sum.y += p[j].y, sum.z += p[j].z, sum.w += p[j].w;
    }
    if (!ends) {
        *to = sum;
        return;
    }
    bf16 *rounded = (entry ? a.dentry + row * a.ld_dentry : a.dkv + row * a.ld_dkv) + 4 * i;
    *(uint2 *)rounded = make_uint2(pack2(sum.x, sum.y), pack2(sum.z, sum.w));
}

/* ---- host ---- */

static struct shared_args args_of(struct tensor o, struct tensor lse, struct tensor q, struct tensor kv,
                                  struct tensor entry, struct tensor idx, const struct seqs *seqs,
                                  const struct shared_attn_shape *s)
{
    const int64_t n_tok = q.shape[0];
    struct shared_args a = {};
    a.cu = i32_ptr(seqs->cu);
    a.n_seq = (int)seqs->n_seq;
    a.n_tok = (int)n_tok;
    a.n_head = (int)s->n_head;
    a.dim = (int)s->head_dim;
    a.window = (int)MT_MIN(s->window, n_tok);
    a.ratio = entry.ndim ? (int)MT_MIN(s->ratio, INT32_MAX) : 0;
    a.n_entry = entry.ndim ? (int)entry.shape[0] : 0;
    a.scale = s->scale;
    a.n_sm = cuda.n_sm;
    a.q = bf16_ptr(q), a.ld_q = q.ld;
    a.kv = bf16_ptr(kv), a.ld_kv = kv.ld;
    a.entry = entry.ndim ? bf16_ptr(entry) : NULL, a.ld_entry = entry.ld;
    a.idx = idx.ndim ? i32_ptr(idx) : NULL, a.ld_idx = idx.ld;
    a.top = idx.ndim ? (int)idx.shape[1] : -1;
    a.o = bf16_ptr(o), a.ld_o = o.ld;
    a.lse = f32_ptr(lse), a.ld_lse = lse.ld;
    return a;
}

/* Kernels number the heads of tokens in 32 bits. */
static void want_countable(int64_t n_tok, const struct seqs *seqs, const struct shared_attn_shape *s)
{
    MT_REQUIRE(n_tok * s->n_head < INT32_MAX && seqs->n_seq < INT32_MAX, "%lld rows of %lld heads", (long long)n_tok,
               (long long)s->n_head);
}

static unsigned token_grid(const struct shared_args *a)
{
    return grid_x((int64_t)a->n_tok * ceil_div(a->n_head, WARPS));
}

static void want_aligned(const struct tensor *x, int n)
{
    for (int i = 0; i < n; i++)
        MT_REQUIRE(!x[i].ndim || rows_aligned(x[i]), "rows of attention must be aligned to 16 bytes");
}

/* The kernels that use tensor cores. variant() takes the first row whose kernels run on this GPU. */
static const struct shared_variant {
    unsigned archs;
    shared_fwd_run *fwd;
    shared_bwd_run *dq, *dkey;
} variants[] = {{ARCH_BIT(CUDA_SM90), shared_fwd_wgmma, shared_dq_wgmma, shared_dkey_wgmma},
                {EVERY_ARCH, shared_fwd_mma, shared_dq_mma, shared_dkey_mma}};

static const struct shared_variant *variant(void)
{
    const struct shared_variant *v = variants;
    while (!cuda_runs(v->archs)) v++;
    return v;
}

extern "C" void cuda_shared_attn_fwd(struct device *dev, struct tensor o, struct tensor lse, struct tensor q,
                                     struct tensor kv, struct tensor entry, struct tensor idx, struct tensor sinks,
                                     const struct seqs *seqs, const struct shared_attn_shape *shape)
{
    if (q.shape[0] == 0) return;
    want_countable(q.shape[0], seqs, shape);
    struct shared_args a = args_of(o, lse, q, kv, entry, idx, seqs, shape);
    a.sinks = sinks.ndim ? f32_ptr(sinks) : NULL;
    if (scratch_shared_tiles(shape)) {
        const struct tensor rows[] = {q, kv, entry, o};
        want_aligned(rows, MT_LEN(rows));
        variant()->fwd(&a);
        return;
    }
    shared_fwd_kernel<<<token_grid(&a), WARPS * 32, 0, cuda.stream>>>(a);
    CUDA_CHECK_LAUNCH();
}

static struct shared_chunk chunk_of(const struct scratch_shared_bwd *s)
{
    struct shared_chunk x = {};
    x.n_slot = (int)s->n_slot;
    x.n_window = (int)s->n_window;
    x.n_far = (int)s->n_far;
    x.n = (int)s->n_item * SHARED_TOKENS;
    x.p = (bf16 *)s->items;
    x.ds = x.p + s->n_item * s->weights;
    x.part = (float *)(x.ds + s->n_item * s->weights);
    x.dkv = f32_ptr(s->dkv);
    x.dentry = f32_ptr(s->dentry);
    return x;
}

static void bwd_in_chunks(const struct shared_args *a, struct shared_chunk x)
{
    const int n_chunk = x.n, n_row = a->ratio ? a->n_entry : 0;
    for (; x.first < a->n_tok; x.first += x.n) {
        x.n = MT_MIN(n_chunk, a->n_tok - x.first);
        const int row0 = MT_MAX(0, x.first - a->window + 1);
        variant()->dq(a, &x);
        variant()->dkey(a, &x);
        shared_sum_kernel<<<grid_x((int64_t)x.first + x.n - row0 + n_row), SUM_THREADS, 0, cuda.stream>>>(*a, x, row0);
        CUDA_CHECK_LAUNCH();
    }
}

static void bwd_any(struct shared_args *a, float *delta)
{
    shared_dq_kernel<<<token_grid(a), WARPS * 32, 0, cuda.stream>>>(*a, delta);
    CUDA_CHECK_LAUNCH();
    shared_dkey_kernel<<<grid_x(a->n_tok), WARPS * 32, 0, cuda.stream>>>(*a, delta, false);
    CUDA_CHECK_LAUNCH();
    if (!a->ratio) return;
    shared_dkey_kernel<<<grid_x(a->n_entry), WARPS * 32, 0, cuda.stream>>>(*a, delta, true);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_shared_attn_bwd(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dentry,
                                     struct tensor dout, struct tensor o, struct tensor lse, struct tensor q,
                                     struct tensor kv, struct tensor entry, struct tensor idx, const struct seqs *seqs,
                                     const struct shared_attn_shape *shape)
{
    const struct scratch_shared_bwd s = scratch_shared_attn_bwd(dev, q, entry, idx, seqs, shape);
    struct shared_args a = args_of(o, lse, q, kv, entry, idx, seqs, shape);
    a.dout = bf16_ptr(dout), a.ld_dout = dout.ld;
    a.dq = bf16_ptr(dq), a.ld_dq = dq.ld;
    a.dkv = bf16_ptr(dkv), a.ld_dkv = dkv.ld;
    a.dentry = dentry.ndim ? bf16_ptr(dentry) : NULL, a.ld_dentry = dentry.ld;
    want_countable(q.shape[0], seqs, shape);
    if (a.n_tok == 0) {
        if (dentry.ndim)
            CUDA_CHECK(cudaMemset2DAsync(dentry.data, (size_t)dentry.ld * 2, 0, (size_t)a.dim * 2, (size_t)a.n_entry,
                                         cuda.stream));
    } else if (s.tiles) {
        const struct tensor rows[] = {q, kv, entry, o, dout, dq, dkv, dentry};
        want_aligned(rows, MT_LEN(rows));
        bwd_in_chunks(&a, chunk_of(&s));
    } else {
        bwd_any(&a, f32_ptr(s.delta));
    }
}
