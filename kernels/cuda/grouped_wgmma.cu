/* grouped_wgmma.cu - the grouped GEMM of grouped.h on Hopper: wgmma fed by TMA.
 *
 * Math: v = scale * la lb_e + a b_e + bias_e per expert, then the epilogue of grouped_epilogue.cuh. The adapter extends
 *   the depth of the same accumulators: steps of la and lb, a multiplication by scale, then steps of a and b.
 * Shapes: grouped.h. Tiles of 128 rows x COLS columns (256, or 192 where that divides better), 64 of depth per step.
 * Needs: sm_90a; n_in, n_out, lda, r multiples of 8, 16-byte aligned bases, at most 512 experts per launch.
 * Grid: persistent, one block per SM: a producer warpgroup and two consumer warpgroups of 64 rows each, with 4 (COLS
 *   192: 5) pipeline stages between them: 197 KiB (205). 168 registers at launch, then 56 and 224; no spills.
 * Moves: a is read once per COLS columns and b once per 128 rows, mostly from L2; 2 M n_in n_out FLOP: compute-bound.
 * Numerics: f32 sums in one fixed order, no atomics: bitwise repeatable.
 *
 * TMA loads b, and a when its rows are contiguous; rows of the next expert at the end of a tile are computed but not
 * stored. Gathered rows are loaded by cp.async of all 128 producer threads, into the same swizzle. Out-of-bounds
 * elements are zeros: depth that is no multiple of 64, columns, LoRA ranks.
 *
 * Measured: H100 80GB HBM3, kernels of commit cfa73e2, kernels alone, means of 20 in five runs, 32 experts,
 *   65536 rows, D = F = 2880, r 16; the power limit keeps the SM clock at 1.2 .. 1.5 of 1.98 GHz:
 *     up forward with GLU and gather   3.7 .. 3.9 ms, 560 .. 595 TFLOP/s     half the rows 1.89 .. 2.26
 *     down forward                     1.6 .. 1.7     640 .. 680                            0.77 .. 0.89
 *     down backward with GLU backward  2.4 .. 2.6     415 .. 455                            1.22 .. 1.28
 *     up backward                      3.2 .. 3.4     635 .. 675                            1.60 .. 1.79
 *   Clocks per tile: up forward 59.7 k, of which products 49.8 (45.7 with contiguous rows; the tensor cores alone need
 *   46.1), pipeline drain 0.9, GLU 7.4; down backward (192 columns) 58.6 k, products 39.6, GLU 14.9.
 * H200, commit f084213, qwen3.5-35b-a3b (256 experts of width 512), T 16384, r 8, kernels alone inside a step of 4
 *   layers, ms: up forward with SwiGLU 1.08 (product, then a kernel for SwiGLU 1.18), down backward by the distance of
 *   the prefetch, whole tile, 8, 4, 2 steps: 0.83, 0.80, 0.77, 0.76 (general epilogue, whole tile: 0.88).
 * H200, gpt-oss-20b, T 16384, r 16, commit 31162e7, hardware counters: with blocks that begin their tiles together
 *   (begin_tile) up backward takes 2.80 instead of 3.31 ms. DRAM delivers 3.9 instead of 9.8 GB, and the SM clock is
 *   1.62 instead of 1.51 GHz, as the card is at its power limit. The other products, the step, what was tried:
 *   tests/RESULTS.md, "Grouped products whose blocks begin their tiles together".
 * Tried and dropped, ms of the four ops up forward, down forward, down backward, up backward:
 *   - a separate epilogue warpgroup, which receives tiles in bf16 through shared memory and overlaps with the next tile
 *     (192 columns, one stage less, tokens copied into expert order before). gpt-oss-20b 4.48 2.15 3.39 4.92 ->
 *     4.32 2.13 3.12 4.76, its step 620 -> 605; but qwen3-30b-a3b 2.18 1.01 2.02 2.51 -> 2.29 1.07 2.69 2.64.
 *     The epilogue overlaps (1.4 k clocks remain) and the SM clock falls.
 *   - that, with clusters of two blocks that share b by multicast: 3 k clocks per tile more, products no faster
 *   - such clusters in this kernel, with blocks that begin together (81e663b, H200): up forward 1 % faster, down
 *     backward 2 and up backward 4 % slower
 *   - that, with the lead of a warpgroup enforced by a barrier at each tile: up to 1.7 k clocks more
 *   - in that variant, the gather costs 5.6 k clocks: zeros instead of reads save nothing, no arrivals 0.5 k, no copies
 *     all of it. The cost is cp.async writing to shared memory. One arrival per warp: 1.3 k more.
 *   - in this kernel: epilogues without stores 0.4 .. 1.8 k less, without reading pre 2.7 k less; LEAD 0: 0.2 .. 0.5 k
 *     more. */
#include <string.h>

#include "kernels/cuda/grouped_wgmma.cuh"

enum { MAX_POLLS = 2000 }; /* after them a block waits no more (begin_tile); 100 were too few */

struct wgmma_args {
    CUtensorMap a, b, la, lb; /* boxes: rows or columns of one tile by 64 of depth; zeroed when unused */
    struct grouped g;
    int counter; /* index in tiles_begun */
};

/* Tiles that all blocks have begun: one counter for this launch, the other is set to 0 for the next. */
static __device__ uint32_t tiles_begun[2];

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- blocks begin their tiles together ----
 * Tiles that run at the same time share rows of a and columns of b. What one block has loaded is in L2 for the others
 * only while all are at about the same depth. Without the wait blocks drift apart, and DRAM delivers the same bytes up
 * to three times. No block depends on another: where others do not run at the same time, because another process uses
 * multiprocessors, a wait ends after MAX_POLLS and the block waits no more in this launch. */

static __device__ __forceinline__ void begin_launch(int counter)
{
    if (blockIdx.x == 0 && threadIdx.x == 0) tiles_begun[counter ^ 1] = 0;
}
/* One thread of a block, before it loads tile `at` of n_tile. *waits: true at first. */
static __device__ __forceinline__ void begin_tile(int counter, int at, int n_tile, bool *waits)
{
    const uint32_t together = MT_MIN(at - blockIdx.x + gridDim.x, (uint32_t)n_tile);
    uint32_t begun = atomicAdd(&tiles_begun[counter], 1u) + 1;
    for (int i = 1; *waits && begun < together; i++) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(begun) : "l"(&tiles_begun[counter]) : "memory");
        *waits = i < MAX_POLLS;
    }
}

/* ---- loading ---- */

/* The rows whose chunks this thread copies: 8 threads per row, 16 rows apart. Rows beyond the expert's last repeat it
 * and are not stored. */
static __device__ __forceinline__ void gather_rows(const bf16 *row[8], const struct grouped &g, const struct tile &t,
                                                   int thread)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int m = t.m + MT_MIN(thread / 8 + 16 * i, t.n_row - 1);
        row[i] = g.a + (int64_t)quotient_of(g.token, g.slot[m]) * g.lda + thread % 8 * 8;
    }
}

template <int COLS, bool KN>
static __device__ __forceinline__ void load_tiles(const struct wgmma_args &p, const struct tiles *tiles,
                                                  struct ring ring, bool halves)
{
    const struct grouped &g = p.g;
    const int half = halves ? (int)g.n_out / 2 : 0;
    const int thread = threadIdx.x % LOADERS, n_in = (int)g.n_in, chunk = thread % 8 * 8;
    const bool gathered = g.slot != NULL;
    const int n_thin = ((int)g.r + DEPTH - 1) / DEPTH, n_block = n_thin + (n_in + DEPTH - 1) / DEPTH;
    const uint32_t mine = sm90_swizzle(thread / 8, thread % 8);
    bool waits = true;
    if (!gathered && thread != 0) return;

    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    for (int at = blockIdx.x, e = 0; at < n_tile; at += gridDim.x) {
        const struct tile t = tile_at(tiles, at, COLS, &e);
        const bf16 *row[8];
        if (thread == 0) begin_tile(p.counter, at, n_tile, &waits);
        if (gathered) gather_rows(row, g, t, thread);
        for (int block = 0; block < n_block; block++) {
            const bool thin = block < n_thin, a_by_tma = thin || !gathered;
            const int k = DEPTH * (thin ? block : block - n_thin);
            const uint32_t to = ring.data + ring.stage * shape<COLS>::STAGE_BYTES, full = ring.full + 8 * ring.stage;
            mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            if (thread == 0) {
                mbarrier_arrive_expect(full, shape<COLS>::B_BYTES + (a_by_tma ? A_BYTES : 0));
                if (a_by_tma) tma_load(to, thin ? &p.la : &p.a, full, k, t.m, 0);
                load_b<COLS, KN>(to + A_BYTES, thin ? &p.lb : &p.b, full, k, t.n,
                                 thin ? (int)grouped_expert(g, g.first + t.e) : t.e, half);
            }
            if (gathered) {
#pragma unroll
                for (int i = 0; i < 8 && !thin; i++) cp_async_16(to + mine + i * 2048, row[i] + k, k + chunk < n_in);
                cp_async_arrive(full);
            }
            ring_advance<COLS>(&ring);
        }
    }
}

/* ---- products ---- */

/* sums (+)= a b_e over n_in of depth. A stage is released one step later, when the products of the next stage have been
 * issued and its own are complete. before: the last stage of an earlier call for this tile, or -1. Returns the last
 * stage, whose products may still run. */
template <int COLS, bool KN>
static __device__ __forceinline__ int multiply(float (&sums)[COLS / 2], struct ring *ring, int n_in, bool accumulate,
                                               bool gathered, int before)
{
    for (int k0 = 0; k0 < n_in; k0 += DEPTH) {
        uint64_t a, b;
        operands<COLS, KN>(*ring, &a, &b);
        mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
        if (gathered) fence_proxy_async();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16)
            wgmma<KN>(sums, a + k_major(k), b + b_step<KN>(k), accumulate || k0 + k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (before >= 0) release(*ring, before);
        before = ring->stage;
        ring_advance<COLS>(ring);
    }
    return before;
}

/* ---- epilogues of plain SwiGLU ----
 *
 * GLU_SWIGLU without interleaving has two special epilogues. In the forward one a tile has equal numbers of gate and
 * up columns, and one thread computes both columns of a pair. The backward one needs half the instructions of the
 * general epilogue. It prefetches pre late, because L2 evicts lines that are prefetched earlier. */

template <int COLS>
static __device__ __forceinline__ void finish_swiglu(const float (&sums)[COLS / 2], const struct grouped &g,
                                                     const struct tile &t)
{
    const int64_t half_row = g.n_out / 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row_of_thread() + 8 * half;
        const bool live = row < t.n_row;
        bf16 *act = g.act + (t.m + row) * half_row + t.n / 2 + threadIdx.x % 4 * 8;
        bf16 *pre = g.out + (t.m + row) * 2 * half_row + t.n / 2 + threadIdx.x % 4 * 8;
#pragma unroll
        for (int c = 0; c < COLS / 2; c += 32) {
            float of_gate[4][2], of_up[4][2];
            uint32_t gate[4], up[4], h[4];
            row_of_sums<COLS>(of_gate, sums, c / 2, half);
            row_of_sums<COLS>(of_up, sums, COLS / 4 + c / 2, half);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                gate[i] = bf16_pack(of_gate[i][0], of_gate[i][1]);
                up[i] = bf16_pack(of_up[i][0], of_up[i][1]);
                h[i] = bf16_pack(swiglu_value(bf16_low(gate[i]), bf16_low(up[i])),
                                 swiglu_value(bf16_high(gate[i]), bf16_high(up[i])));
            }
            quad_transpose(gate);
            quad_transpose(up);
            quad_transpose(h);
            if (!live) continue;
            store16(pre + c, make_uint4(gate[0], gate[1], gate[2], gate[3]));
            store16(pre + half_row + c, make_uint4(up[0], up[1], up[2], up[3]));
            store16(act + c, make_uint4(h[0], h[1], h[2], h[3]));
        }
    }
}

/* GROUPED_GLU_BWD for plain SwiGLU whose gates and ups are in separate halves. Steps of 128 columns where they divide a
 * tile: fewer moves of sums. */
template <int COLS>
static __device__ __forceinline__ void finish_swiglu_bwd(float (&sums)[COLS / 2], const struct grouped &g,
                                                         const struct tile &t, struct two_rows *rows)
{
    constexpr int STEP = COLS % 128 ? 64 : 128;
    const int row = row_of_thread(), first = t.n + threadIdx.x % 4 * 8, n_out = (int)g.n_out;
    const int64_t from_out = g.pre - g.out;
    bf16 *out[2], *act[2];
    int cols[2]; /* of the thread in its rows: those below */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t m = t.m + row + 8 * half;
        cols[half] = row + 8 * half < t.n_row ? n_out - first : 0;
        act[half] = g.act + m * n_out + first;
        out[half] = g.out + m * 2 * n_out + first;
    }
#pragma unroll 1
    for (int i = 0; i < COLS && t.n + i < n_out; i += STEP) {
        float sum[2];
#pragma unroll
        for (int c = 0; c < STEP; c += 32) {
            const struct pre8 pre[2] = {rows->pre[0], rows->pre[1]};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bf16 *next = out[half] + from_out + c + 32;
                if (c % GROUPED_PART == 0) sum[half] = 0.0f;
                rows->pre[half] = {};
                if (i + c + 32 >= COLS || c + 32 >= cols[half]) continue;
                rows->pre[half].x = __ldg((const uint4 *)next);
                rows->pre[half].y = __ldg((const uint4 *)(next + n_out));
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[4][2], x[8], gate[8], up[8], h[8];
                row_of_sums<COLS>(v, sums, c / 2, half);
                quad_columns(x, v);
                bf16_unpack8(gate, pre[half].x);
                bf16_unpack8(up, pre[half].y);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    h[j] = swiglu_gradient(gate[j], up[j], rows->weight[half] * x[j], &gate[j], &up[j]);
                    sum[half] += h[j] * x[j];
                }
                if (c >= cols[half]) continue;
                store16(act[half] + c, bf16_pack8(h));
                store16(out[half] + c, bf16_pack8(gate));
                store16(out[half] + n_out + c, bf16_pack8(up));
            }
            if (c % GROUPED_PART == 0 || t.n + i + c - 32 >= n_out) continue;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float all = quad_sum(sum[half]);
                if (threadIdx.x % 4 == 0 && row + 8 * half < t.n_row)
                    g.dgate_part[(t.n + i + c) / GROUPED_PART * g.n_row + t.m + row + 8 * half] = all;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            act[half] += STEP;
            out[half] += STEP;
            cols[half] -= STEP;
        }
#pragma unroll
        for (int j = 0; j + STEP / 2 < COLS / 2; j++) sums[j] = sums[j + STEP / 2];
    }
}

/* bias: [2, 2, COLS] f32 of shared memory, two buffers for each warpgroup, used alternately. A warp may write the bias
 * of the next tile while another warp still reads that of this tile; the barrier before the next read prevents a lead
 * of two tiles. */
template <int COLS, int EPILOGUE, bool KN>
static __device__ __forceinline__ void multiply_tiles(const struct wgmma_args &p, const struct tiles *tiles,
                                                      struct ring ring, float *bias)
{
    const struct grouped &g = p.g;
    const int r = (int)g.r, n_in = (int)g.n_in, n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    const int n_block = (r + DEPTH - 1) / DEPTH + (n_in + DEPTH - 1) / DEPTH;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* the shuffle tells the compiler that it is uniform */
    float sums[COLS / 2] = {0.0f};
    bias += group * COLS;
    if (group && (int)blockIdx.x < n_tile && n_block > LEAD) mbarrier_wait(ring.full + 8 * LEAD, 0);
    for (int at = blockIdx.x, e = 0, odd = 0; at < n_tile; at += gridDim.x) {
        const struct tile t = tile_at(tiles, at, COLS, &e);
        const bool idle = group * 64 >= t.n_row;
        if (EPILOGUE == SWIGLU_BWD ? idle : grouped_is_glu_bwd(EPILOGUE)) prefetch_pre<COLS>(g, t);
        if (idle) {
            skip_tile<COLS>(&ring, n_block);
            continue;
        }
        struct two_rows rows = {};
        float2 columns;
        if (is_glu_bwd(EPILOGUE))
            load_slots(&rows, g, t);
        else if (EPILOGUE != SWIGLU)
            columns = load_bias<COLS>(g, t);
        if (r > 0) {
            multiply_thin<COLS, KN>(sums, &ring, r);
#pragma unroll
            for (int i = 0; i < COLS / 2; i++) sums[i] *= g.scale;
        }
        const int early = EPILOGUE == SWIGLU_BWD ? MT_MAX(n_in / DEPTH - AHEAD, 0) * DEPTH : 0;
        int last = -1;
        if (early > 0) last = multiply<COLS, KN>(sums, &ring, early, r > 0, g.slot != NULL, -1);
        if (EPILOGUE == SWIGLU_BWD) prefetch_pre<COLS>(g, t);
        last = multiply<COLS, KN>(sums, &ring, n_in - early, r > 0 || early > 0, g.slot != NULL, last);
        if (is_glu_bwd(EPILOGUE)) {
            load_weights(&rows, g);
            load_pre(&rows, g, t, 0);
        }
        wgmma_wait<0>();
        wgmma_use(sums);
        release(ring, last);
        if constexpr (is_glu_bwd(EPILOGUE)) {
            if constexpr (EPILOGUE == SWIGLU_BWD)
                finish_swiglu_bwd<COLS>(sums, g, t, &rows);
            else
                finish_glu_bwd<COLS, EPILOGUE == GROUPED_GLU_BWD_QUANT>(sums, g, t, &rows);
        } else if constexpr (EPILOGUE == SWIGLU) {
            finish_swiglu<COLS>(sums, g, t);
        } else {
            float *own = bias + odd * 2 * COLS;
            if (threadIdx.x % 128 < COLS / 2) *(float2 *)(own + threadIdx.x % 128 * 2) = columns;
            warpgroup_barrier(1 + group);
            finish<COLS, EPILOGUE>(sums, g, t, own);
            odd ^= 1;
        }
    }
}
#endif

template <int COLS, int EPILOGUE, bool KN>
static __global__ void __launch_bounds__(THREADS, 1) grouped_wgmma_kernel(const __grid_constant__ struct wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char memory[];
    __shared__ struct tiles tiles;
    __shared__ uint64_t full[shape<COLS>::STAGES], empty[shape<COLS>::STAGES];
    __shared__ __align__(16) float bias[2 * 2 * COLS];
    begin_launch(p.counter);
    if (threadIdx.x < 32) count_tiles(&tiles, p.g, COLS);
    if (threadIdx.x == 32) {
        for (int i = 0; i < shape<COLS>::STAGES; i++) {
            mbarrier_init(sm90_shared(&full[i]), p.g.slot ? 1 + LOADERS : 1);
            mbarrier_init(sm90_shared(&empty[i]), CONSUMERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const struct ring ring = {(sm90_shared(memory) + 1023) / 1024 * 1024, sm90_shared(full), sm90_shared(empty), 0, 0};
    if (threadIdx.x >= CONSUMERS) {
        sm90_registers_less<LOADER_REGISTERS>();
        load_tiles<COLS, KN>(p, &tiles, ring, EPILOGUE == SWIGLU);
    } else {
        sm90_registers_more<CONSUMER_REGISTERS>();
        multiply_tiles<COLS, EPILOGUE, KN>(p, &tiles, ring, bias);
    }
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

/* ---- host ---- */

/* Which of tiles_begun the next launch uses. */
static int next_counter(void)
{
    static int counter;
    return counter ^= 1;
}

template <int COLS, int EPILOGUE, bool KN> static void launch(const struct grouped *g)
{
    constexpr int box = EPILOGUE == SWIGLU ? COLS / 2 : COLS;
    static bool configured;
    struct wgmma_args p;
    memset(&p, 0, sizeof(p));
    p.g = *g;
    p.counter = next_counter();
    if (!g->slot) p.a = tensor_map(g->a, 1, g->n_row, g->n_in, g->lda, ROWS);
    p.b = KN ? tensor_map(g->b, g->count, g->n_in, g->n_out, g->n_out, DEPTH)
             : tensor_map(g->b, g->count, g->n_out, g->n_in, g->n_in, box);
    if (g->r > 0) {
        p.la = tensor_map(g->la, 1, g->n_row, g->r, g->r, ROWS);
        p.lb = KN ? tensor_map(g->lb, g->n_exp, g->r, g->n_out, g->n_out, DEPTH)
                  : tensor_map(g->lb, g->n_exp, g->n_out, g->r, g->r, box);
    }
    if (!configured)
        CUDA_CHECK(cudaFuncSetAttribute(grouped_wgmma_kernel<COLS, EPILOGUE, KN>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, shape<COLS>::RING_BYTES));
    configured = true;
    grouped_wgmma_kernel<COLS, EPILOGUE, KN><<<cuda.n_sm, THREADS, shape<COLS>::RING_BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

bool cuda_grouped_swiglu(const struct grouped *g)
{
    return cuda.hopper && g->glu.kind == GLU_SWIGLU && !g->glu.interleaved && g->n_out % 256 == 0 && !g->bias && !g->kn;
}

void cuda_grouped_wgmma(const struct grouped *g)
{
    const int64_t n_tile = (ceil_div(g->n_row, ROWS) + g->count) * ceil_div(g->n_out, 192);
    grouped_require(g);
    MT_REQUIRE(g->count <= MAX_EXPERTS && n_tile + cuda.n_sm <= INT32_MAX, "%lld experts, %lld tiles",
               (long long)g->count, (long long)n_tile);
    if (g->n_row == 0 || g->count == 0) return;
    MT_REQUIRE(g->kn || !grouped_is_glu_bwd(g->epilogue), "GROUPED_GLU_BWD needs kn");
    if (g->epilogue == GROUPED_GLU_BWD && g->glu.kind == GLU_SWIGLU && !g->glu.interleaved) {
        narrow(g->n_out) ? launch<192, SWIGLU_BWD, true>(g) : launch<256, SWIGLU_BWD, true>(g);
    } else if (g->epilogue == GROUPED_GLU_BWD) {
        narrow(g->n_out) ? launch<192, GROUPED_GLU_BWD, true>(g) : launch<256, GROUPED_GLU_BWD, true>(g);
    } else if (g->epilogue == GROUPED_GLU_BWD_QUANT) {
        narrow(g->n_out) ? launch<192, GROUPED_GLU_BWD_QUANT, true>(g) : launch<256, GROUPED_GLU_BWD_QUANT, true>(g);
    } else if (g->epilogue == GROUPED_GLU && !g->glu.interleaved) {
        MT_REQUIRE(cuda_grouped_swiglu(g), "GROUPED_GLU of separate gates and ups: %lld columns", (long long)g->n_out);
        launch<256, SWIGLU, false>(g);
    } else if (g->epilogue == GROUPED_GLU) {
        MT_REQUIRE(!g->kn, "GROUPED_GLU with kn");
        narrow(g->n_out) ? launch<192, GROUPED_GLU, false>(g) : launch<256, GROUPED_GLU, false>(g);
    } else if (g->kn) {
        narrow(g->n_out) ? launch<192, GROUPED_STORE, true>(g) : launch<256, GROUPED_STORE, true>(g);
    } else {
        narrow(g->n_out) ? launch<192, GROUPED_STORE, false>(g) : launch<256, GROUPED_STORE, false>(g);
    }
}
