/* attn_wgmma_fwd.cu - attention forward on Hopper, heads of 64: the function of attn_fwd.cu with wgmma and TMA.
 *
 * Math: as attn_fwd.cu, with a lazy maximum: the maximum of the online softmax is only raised when a score exceeds it
 * by a factor of 2^8. So the sums are rescaled a few times per row, not at every tile. Shapes: as attn_fwd.cu. Needs:
 * sm_90a, A 64, at most 64 query heads to a kv head, rows aligned to 16 bytes. Grid: persistent, one block per SM,
 * which processes tiles of 192 rows (24 queries of a group of 8). Three consumer warpgroups of 64 rows each and one
 * producer warpgroup. TMA loads keys and values in tiles of 96, four stages, and the next tile of queries during the
 * current one. 128 registers at launch, then 160 for consumers (133 used) and 32 for the producer; 146 KiB; no spills.
 * Moves: as attn_fwd.cu, but keys and values are read once for the whole group: 12 KiB from L2 for 96 x 192 scores.
 * Bound, in clocks per SM for 96 keys by 192 rows: wgmma 1152, 2^x 1152 (16 per clock), issue 1020 per scheduler. All
 *   three are close, so the speed depends on how well a warpgroup's softmax overlaps with the products of the others.
 * Numerics: as attn_fwd.cu: f32 sums in one order, no atomics, bitwise repeatable. NaN and infinity stay in their
 *   sequence: values beyond its end are cleared.
 * Measured: H100 80GB HBM3, commit 4b2b765, T 16384, H 64, K 8: S 4096 1.13 ms, 485 TFLOP/s (inside a step
 *   1.43 ms, 384); S 8192 2.18 ms, 505; window 128 0.22 ms. The portable kernel: 1.76, 3.44, 0.33 ms.
 *   H200, inside a step: 1.50 ms at commit 14931fb, before NaN was confined to its document, 1.54 ms after (0765d1f);
 *   window 128 0.27 ms at both.
 * Tried and dropped, TFLOP/s at S 4096 and 8192: warpgroups without the order of TURN 466, 426; arithmetic after the
 *   wait, where the compiler puts it without before_wait, 463, 423; tiles of 128 keys 485, 460, and window 128 0.24 ms.
 * Source: FlashAttention-3, arXiv 2407.08608 (warpgroups in turns; softmax of a tile overlaps with the next scores). */
#include "kernels/cuda/attn_wgmma.cuh"

enum {
    GROUPS = 3, /* consumer warpgroups, 64 rows each */
    ROWS = GROUPS * 64,
    THREADS = GROUPS * 128 + LOADER,
    STAGES = 4,
    Q_BYTES = ROWS * ROW_BYTES,
    BYTES = 2 * Q_BYTES + STAGES * 2 * KEY_BYTES + 1024, /* 1024: alignment */
    LOADER_REGISTERS = 32,                               /* 32 + 3 * 160 = 512, the SM's registers per 128 threads */
    REGISTERS = 160,
    TURN = 1,             /* named barriers TURN + g: warpgroup g may issue its products */
    WHOLE = TURN + GROUPS /* WHOLE + g: the threads of warpgroup g */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct barriers {
    uint64_t q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};
/* Shared-memory addresses. A stage of kv holds keys, then values. */
struct memory {
    uint32_t q, kv, q_full, q_empty, k_full, k_empty, v_full, v_empty;
    char *q_bytes; /* generic address of q */
};

static __device__ __forceinline__ void load(const struct attn_wgmma_args &p, const struct memory &m)
{
    struct stage_at q = {0, 0}, kv = {0, 0};
    const int rounds = n_round(p), head = p.a.n_head;
    for (int round = 0; round < rounds; round++) {
        struct item item;
        if (!item_at(&item, p, round)) continue;
        mbarrier_wait(m.q_empty + 8 * q.stage, q.parity ^ 1);
        mbarrier_arrive_expect(m.q_full + 8 * q.stage, p.n_query * p.group * ROW_BYTES);
        tma_load(m.q + q.stage * Q_BYTES, &p.q, m.q_full + 8 * q.stage, 0, item.kv * p.group,
                 (int)item.first + item.q0);
        q = next_stage<2>(q);
        for (int t = 0; t < item.n_tile; t++) {
            const int row = (int)item.first + item.begin + t * KEYS, bar = 8 * kv.stage;
            const uint32_t to = m.kv + kv.stage * 2 * KEY_BYTES;
            mbarrier_wait(m.k_empty + bar, kv.parity ^ 1);
            mbarrier_arrive_expect(m.k_full + bar, KEY_BYTES);
            tma_load(to, &p.kv, m.k_full + bar, 0, head + item.kv, row);
            mbarrier_wait(m.v_empty + bar, kv.parity ^ 1);
            mbarrier_arrive_expect(m.v_full + bar, KEY_BYTES);
            tma_load(to + KEY_BYTES, &p.kv, m.v_full + bar, 0, head + p.a.n_kv + item.kv, row);
            kv = next_stage<STAGES>(kv);
        }
    }
}

/* Online softmax of this thread's two rows: maximum, sum over this thread's columns, factor of the last rescaling. */
struct softmax {
    float max[2], sum[2], factor[2];
};

/* Scores become weights 2^(c (s - max)), c = scale / ln 2. max is raised only when a score exceeds it by more than
 * `slack`: weights stay below 2^8, and sums rarely change. The caller multiplies earlier sums by factor. A row without
 * a key so far has max = -inf and weights 0. */
static __device__ __forceinline__ void online_softmax(float (&s)[KEYS / 2], struct softmax *x, float c, float slack)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = s[2 * h];
#pragma unroll
        for (int i = 2 * h; i < KEYS / 2; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const bool grown = top > x->max[h] + slack;
        top = grown ? top : x->max[h];
        x->factor[h] = grown ? exp2_fast((x->max[h] - top) * c) : 1.0f;
        x->max[h] = top;
        const float shift = top == -INFINITY ? 0.0f : top * c;
        float total[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 2 * h; i < KEYS / 2; i += 4) {
            s[i] = exp2_fast(s[i] * c - shift);
            s[i + 1] = exp2_fast(s[i + 1] * c - shift);
            total[0] += s[i];
            total[1] += s[i + 1];
        }
        x->sum[h] = x->sum[h] * x->factor[h] + (total[0] + total[1]);
    }
}

/* Query and head of this thread's two rows. */
struct rows {
    int query[2], head[2]; /* relative to the first query of the tile and the first head of the group */
};

static __device__ __forceinline__ void mask_tile(float (&s)[KEYS / 2], const struct attn_wgmma_args &p,
                                                 const struct item &item, const struct rows &rows, int t, int wg)
{
    const int first = query_of(wg * 64, p.inverse), n = query_of(wg * 64 + 63, p.inverse) - first + 1;
    const int k0 = item.begin + t * KEYS;
    if (none_masked(item.q0 + first, n, k0, KEYS, p.a.window)) return;
    const int corner = item.q0 - k0 - threadIdx.x % 4 * 2;
    const int d[2] = {corner + rows.query[0], corner + rows.query[1]};
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
        if (!attends_to(d, i, p.a.window)) s[i] = -INFINITY;
}

/* Stores o and lse of an item. o is rearranged into whole rows in the shared memory of the queries. */
static __device__ __forceinline__ void finish(const struct attn_wgmma_args &p, const struct item &item,
                                              const struct rows &rows, struct softmax *x, const float sink[2],
                                              const float (&o)[32], char *q_rows, int wg)
{
    const int n_live = min(p.n_query, item.len - item.q0), row = threadIdx.x / 32 * 16;
    const int64_t t0 = item.first + item.q0;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float total = x->sum[h];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (p.a.sinks) total += exp2_fast((sink[h] - x->max[h]) * p.a.scale_log2);
        inverse[h] = 1.0f / total;
        if (rows.query[h] < n_live && threadIdx.x % 4 == 0)
            p.a.lse[(t0 + rows.query[h]) * p.a.ld_lse + item.kv * p.group + rows.head[h]] =
                x->max[h] * p.a.scale + logf(total);
    }
    named_sync(WHOLE + wg, 128); /* the products that read these queries are complete */
    stage_rows(q_rows + row * ROW_BYTES, o, inverse);
    store_queries(p.a.o + t0 * p.a.ld_o + item.kv * p.group * HEAD, p.a.ld_o, q_rows + row * ROW_BYTES, row, p, n_live);
    fence_proxy_async(); /* before TMA writes there again */
}

/* The softmax of a tile overlaps with the products of the previous tile and of the other warpgroups. The warpgroups
 * take turns (TURN): each issues the scores of tile t, then o += weights of tile t - 1. */
static __device__ __forceinline__ void attend(const struct attn_wgmma_args &p, const struct memory &m)
{
    const int wg = warpgroup_index(), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, rounds = n_round(p);
    const float c = p.a.scale_log2, slack = 8.0f / c;
    struct rows rows;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows.query[h] = query_of(row + 8 * h, p.inverse);
        rows.head[h] = row + 8 * h - rows.query[h] * p.group;
    }
    struct stage_at q = {0, 0}, kv = {0, 0};
    if (wg == 0) named_arrive(TURN, 256);
    for (int round = 0; round < rounds; round++) {
        struct item item;
        if (!item_at(&item, p, round)) continue;
        float s[KEYS / 2], o[32] = {}, sink[2];
        uint32_t w[KEYS / 16][4];
        struct softmax x;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sink[h] = p.a.sinks ? p.a.sinks[item.kv * p.group + rows.head[h]] / p.a.scale : -INFINITY;
            x.max[h] = sink[h];
            x.sum[h] = 0.0f;
        }
        const uint32_t q_rows = m.q + q.stage * Q_BYTES + wg * 64 * ROW_BYTES;
        mbarrier_wait(m.q_full + 8 * q.stage, q.parity);
        mbarrier_wait(m.k_full + 8 * kv.stage, kv.parity);
        wgmma_fence();
        dot_heads(s, q_rows, m.kv + kv.stage * 2 * KEY_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(s);
        release_stage(m.k_empty + 8 * kv.stage);
        mask_tile(s, p, item, rows, 0, wg);
        online_softmax(s, &x, c, slack);
        pack_rows(w, s);
        for (int t = 1; t < item.n_tile; t++) {
            const struct stage_at now = next_stage<STAGES>(kv);
            mbarrier_wait(m.k_full + 8 * now.stage, now.parity);
            mbarrier_wait(m.v_full + 8 * kv.stage, kv.parity);
            named_sync(TURN + wg, 256);
            wgmma_fence();
            dot_heads(s, q_rows, m.kv + now.stage * 2 * KEY_BYTES);
            wgmma_commit();
            add_rows(o, w, m.kv + kv.stage * 2 * KEY_BYTES + KEY_BYTES);
            wgmma_commit();
            named_arrive(TURN + (wg + 1) % GROUPS, 256);
            wgmma_wait<1>();
            wgmma_use(s);
            release_stage(m.k_empty + 8 * now.stage);
            mask_tile(s, p, item, rows, t, wg);
            online_softmax(s, &x, c, slack);
            before_wait(x.sum[0] + x.sum[1] < 0.0f);
            wgmma_wait<0>();
            wgmma_use(o);
            wgmma_use(s);
            release_stage(m.v_empty + 8 * kv.stage);
            if (__any_sync(~0u, x.factor[0] != 1.0f || x.factor[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < 32; i++) o[i] *= x.factor[i / 2 % 2];
            }
            pack_rows(w, s);
            kv = now;
        }
        mbarrier_wait(m.v_full + 8 * kv.stage, kv.parity);
        const int live = item.len - item.begin - (item.n_tile - 1) * KEYS; /* keys of the last tile */
        if (live < KEYS) {
            clear_rows(m.q_bytes + (m.kv - m.q) + kv.stage * 2 * KEY_BYTES + KEY_BYTES, live, KEYS);
            rows_cleared(WHOLE + wg);
        }
        wgmma_fence();
        add_rows(o, w, m.kv + kv.stage * 2 * KEY_BYTES + KEY_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(o);
        release_stage(m.v_empty + 8 * kv.stage);
        kv = next_stage<STAGES>(kv);
        finish(p, item, rows, &x, sink, o, m.q_bytes + q.stage * Q_BYTES, wg);
        release_stage(m.q_empty + 8 * q.stage);
        q = next_stage<2>(q);
    }
}
#endif

static __global__ void __launch_bounds__(THREADS, 1)
    attn_fwd_wgmma_kernel(const __grid_constant__ struct attn_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ struct barriers b;
    const uint32_t start = (sm90_shared(bytes) + 1023) / 1024 * 1024;
    const struct memory m = {start,
                             start + 2 * Q_BYTES,
                             sm90_shared(b.q_full),
                             sm90_shared(b.q_empty),
                             sm90_shared(b.k_full),
                             sm90_shared(b.k_empty),
                             sm90_shared(b.v_full),
                             sm90_shared(b.v_empty),
                             bytes + (start - sm90_shared(bytes))};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mbarrier_init(m.q_full + 8 * i, 1);
            mbarrier_init(m.q_empty + 8 * i, GROUPS * 4);
        }
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(m.k_full + 8 * i, 1);
            mbarrier_init(m.v_full + 8 * i, 1);
            mbarrier_init(m.k_empty + 8 * i, GROUPS * 4);
            mbarrier_init(m.v_empty + 8 * i, GROUPS * 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= GROUPS * 128) {
        sm90_registers_less<LOADER_REGISTERS>();
        if (threadIdx.x == GROUPS * 128) load(p, m);
    } else {
        sm90_registers_more<REGISTERS>();
        attend(p, m);
    }
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

void attn_fwd_wgmma(const struct attn_args *a)
{
    static bool ready;
    const struct attn_wgmma_args p = wgmma_args_of(a, ROWS, KEYS);
    if (!ready)
        CUDA_CHECK(cudaFuncSetAttribute(attn_fwd_wgmma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    ready = true;
    attn_fwd_wgmma_kernel<<<(unsigned)MT_MIN(p.n_item, cuda.n_sm), THREADS, BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}
