/* grouped_wgmma.cu - the grouped GEMM of grouped.h on Hopper: wgmma fed by TMA.
 *
 * Math: v = scale * la lb_e + a b_e + bias_e per expert, then the epilogue of grouped_epilogue.cuh. The adapter extends
 *   the depth of the same accumulators: steps of la and lb, a multiplication by scale, then steps of a and b.
 * Shapes: grouped.h. Tiles of 128 rows x 192 columns, 64 of depth per step.
 * Needs: sm_90a; n_in, n_out, lda, r multiples of 8, 16-byte aligned bases, at most 512 experts per launch.
 * Grid: persistent, one block per SM: a loading warpgroup and two consumer warpgroups, which alternate between the
 *   tiles of the block (ping-pong): while one multiplies, the other is in its epilogue. Between them 5 stages of the
 *   pipeline, 206 KiB; in the GLU's backward 4 stages and 48 KiB for sums, 214 KiB. 168 registers at launch, then 40
 *   and 232; at most 8 bytes of spills.
 * Moves: a is read once per 192 columns and b once per 128 rows, mostly from L2; 2 M n_in n_out FLOP: compute-bound.
 * Numerics: f32 sums in one fixed order, no atomics: bitwise repeatable.
 *
 * TMA loads b, and a when its rows are contiguous; rows of the next expert at the end of a tile are computed but not
 * stored. Gathered rows are loaded by cp.async of all 128 loading threads, into the same swizzle. Out-of-bounds
 * elements are zeros: depth that is no multiple of 64, columns, LoRA ranks.
 *
 * Compiling: ptxas makes wgmmas wait for each other, and says so (C7515), when it cannot see that only wgmmas write
 * sums between the first product of a tile and the last: so r > 0 stands before the loop over r, and clear() is not
 * moved.
 *
 * Measured: H200, r 16, 16,384 tokens, random router, hardware counters: clocks of a launch, tensor cores
 *   busy. Before, in another call: 448bdac, where both warpgroups shared a tile. Now: ff7cfa7.
 *     gpt-oss-20b, up forward with GLU         5.42 M, 78 %  ->  4.64 M, 89 %
 *     down forward                             2.48 M, 84 %  ->  2.29 M, 91 %
 *     down backward with GLU backward          3.37 M, 62 %  ->  2.89 M, 72 %
 *     up backward                              4.58 M, 91 %  ->  4.43 M, 93 %
 *   The card is at its power limit, so that other ops then run at a lower clock. Steps, ops, and the wait in
 *   begin_tile: tests/RESULTS.md, "Grouped products whose ...".
 * Tried and dropped (H200; those without a commit are not in the history):
 *   - a separate epilogue warpgroup, which receives tiles in bf16 through shared memory: 2 % of a step of gpt-oss-20b,
 *     but qwen3-30b-a3b slower; with clusters of two blocks that share b by multicast, or these alone (81e663b): slower
 *   - GLU's backward with all sums in registers: 100 to 400 bytes of spills. With a loader that spilled too, down
 *     backward took 2.77 instead of 2.49 ms
 *   - gathered rows of qwen3-30b-a3b's up forward, instead of a copy in expert order (moe.cu): 2.32 instead of 1.52 ms;
 *     with their numbers in registers of the loader, which then spills: 3.00
 *   - 128 columns for widths of 512 and 1024, which 192 does not divide: up to 4 % slower */
#include <string.h>

#include "kernels/cuda/turn_wgmma.cuh"

enum {
    BUFFER_BYTES = HALF_ROWS * COLS * 4,
    PREFETCHED = 4, /* steps before the end of a tile in which the first columns of pre are prefetched */
    PREFETCHED_COLUMNS = 96
};
/* Of the pipeline. The GLU's backward also needs a buffer for sums. */
static __device__ __host__ constexpr int stages(int epilogue) { return is_glu_bwd(epilogue) ? 4 : 5; }

struct wgmma_args {
    CUtensorMap a, b, la, lb; /* boxes: rows or columns of one tile by 64 of depth; zeroed when unused */
    struct grouped g;
    int counter; /* index in tiles_begun */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Steps of depth of a tile. */
static __device__ __forceinline__ int count_steps(const struct grouped &g)
{
    return ((int)g.r + DEPTH - 1) / DEPTH + ((int)g.n_in + DEPTH - 1) / DEPTH;
}

/* ---- loading ---- */

/* rows [128] in shared memory: the row of a for each row of a tile. A warp copies rows 4 w .. 4 w + 3 of every 16, and
 * finds them itself. Rows beyond the expert's last repeat it and are not stored. */
static __device__ __forceinline__ void find_rows(int *rows, const struct grouped &g, const struct tile &t, int thread)
{
    const int lane = thread % 32, row = thread / 32 * 4 + lane % 4 + lane / 4 * 16;
    __syncwarp(); /* all lanes have read those of the tile before */
    rows[row] = quotient_of(g.token, g.slot[t.m + MT_MIN(row, t.n_row - 1)]);
    __syncwarp();
}
/* Starts the copy of this thread's chunks of 64 of depth from k on: 8 threads per row, 16 rows apart. */
static __device__ __forceinline__ void copy_rows(uint32_t to, const int *rows, const struct grouped &g, int k,
                                                 int thread)
{
    const int chunk = k + thread % 8 * 8;
    const bf16 *a = g.a + chunk;
    to += sm90_swizzle(thread / 8, thread % 8);
#pragma unroll
    for (int i = 0; i < 8; i++) cp_async_16(to + i * 2048, a + rows[thread / 8 + 16 * i] * g.lda, chunk < (int)g.n_in);
}

template <int EPILOGUE, bool KN>
static __device__ __forceinline__ void load_tiles(const struct wgmma_args &p, const struct tiles *tiles,
                                                  struct ring ring, int *rows)
{
    const struct grouped &g = p.g;
    const int half = EPILOGUE == SWIGLU ? (int)g.n_out / 2 : 0, thread = threadIdx.x % LOADERS;
    const bool gathered = g.slot != NULL;
    const int n_thin = ((int)g.r + DEPTH - 1) / DEPTH, n_block = count_steps(g);
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    bool waits = true;
    if (!gathered && thread != 0) return;

    if (thread == 0 && (int)blockIdx.x < n_tile) announce_tile(p.counter);
    for (int at = blockIdx.x, e = 0, turn = 0; at < n_tile; at += gridDim.x, turn ^= 1) {
        const struct tile t = tile_at(tiles, at, &e);
        if (thread == 0) begin_tile(p.counter, at, n_tile, 0, 1, &waits);
        if (gathered) find_rows(rows, g, t, thread);
        for (int block = 0; block < n_block; block++) {
            const bool thin = block < n_thin, a_by_tma = thin || !gathered;
            const int k = DEPTH * (thin ? block : block - n_thin);
            const uint32_t to = ring.data + ring.stage * STAGE_BYTES,
                           full = ring.full + 8 * (ring.stage + turn * stages(EPILOGUE));
            mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            if (thread == 0) {
                if (block == MT_MAX(0, n_block - ANNOUNCED) && at + (int)gridDim.x < n_tile) announce_tile(p.counter);
                mbarrier_arrive_expect(full, STAGE_BYTES - (a_by_tma ? 0 : A_BYTES));
                if (a_by_tma) tma_load(to, thin ? &p.la : &p.a, full, k, t.m, 0);
                load_b<KN>(to + A_BYTES, thin ? &p.lb : &p.b, full, k, t.n,
                           thin ? (int)grouped_expert(g, g.first + t.e) : t.e, half);
            }
            if (!thin && gathered) copy_rows(to, rows, g, k, thread);
            if (gathered) cp_async_arrive(full);
            if (++ring.stage == stages(EPILOGUE)) ring.stage = 0, ring.parity ^= 1;
        }
    }
}

/* ---- products ---- */

template <int STAGES, bool KN, int HALVES, typename Prefetch>
static __device__ __forceinline__ int multiply_tile(float (&sums)[2][COLS / 2], struct ring *ring,
                                                    const struct grouped &g, const Prefetch &prefetch)
{
    const int r = (int)g.r;
    if (r > 0) {
        multiply_thin<STAGES, KN, HALVES>(sums, ring, r, 1);
        scale_sums<HALVES>(sums, g.scale);
    }
    return multiply<STAGES, KN, HALVES>(sums, ring, (int)g.n_in, r > 0, g.slot != NULL, PREFETCHED, prefetch);
}

/* ---- epilogues of plain SwiGLU ----
 *
 * GLU_SWIGLU without interleaving has two special epilogues. In the forward one a tile has equal numbers of gate and
 * up columns, and one thread computes both columns of a pair. The backward one needs half the instructions of the
 * general epilogue. */

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
            row_of_sums(of_gate, sums, c / 2, half);
            row_of_sums(of_up, sums, COLS / 4 + c / 2, half);
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
            if (!live || t.n / 2 + c >= half_row) continue;
            store16(pre + c, make_uint4(gate[0], gate[1], gate[2], gate[3]));
            store16(pre + half_row + c, make_uint4(up[0], up[1], up[2], up[3]));
            store16(act + c, make_uint4(h[0], h[1], h[2], h[3]));
        }
    }
}

/* GROUPED_GLU_BWD for plain SwiGLU whose gates and ups are in separate halves. */
static __device__ __forceinline__ void finish_swiglu_bwd(float (&sums)[COLS / 2], const struct grouped &g,
                                                         const struct tile &t, struct two_rows *rows)
{
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
    for (int i = 0; i < COLS && t.n + i < n_out; i += GROUPED_PART) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < GROUPED_PART; c += 32) {
            const struct pre8 pre[2] = {rows->pre[0], rows->pre[1]};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bf16 *next = out[half] + from_out + c + 32;
                rows->pre[half] = {};
                if (i + c + PREFETCHED_COLUMNS < COLS && c + PREFETCHED_COLUMNS < cols[half]) {
                    prefetch_line(next + PREFETCHED_COLUMNS - 32);
                    prefetch_line(next + PREFETCHED_COLUMNS - 32 + n_out);
                }
                if (i + c + 32 >= COLS || c + 32 >= cols[half]) continue;
                rows->pre[half].x = __ldg((const uint4 *)next);
                rows->pre[half].y = __ldg((const uint4 *)(next + n_out));
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[4][2], x[8], gate[8], up[8], h[8];
                row_of_sums(v, sums, c / 2, half);
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
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float all = quad_sum(sum[half]);
            if (threadIdx.x % 4 == 0 && row + 8 * half < t.n_row)
                g.dgate_part[(t.n + i) / GROUPED_PART * g.n_row + t.m + row + 8 * half] = all;
            act[half] += GROUPED_PART;
            out[half] += GROUPED_PART;
            cols[half] -= GROUPED_PART;
        }
        shift_down(sums);
    }
}

/* ---- a warpgroup's tile ---- */

/* Prefetches the first columns of a tile's part of pre into L2, a row per thread. */
static __device__ __forceinline__ void prefetch_rows(const struct grouped &g, const struct tile &t)
{
    const bool pairs = g.glu.interleaved;
    const int row = threadIdx.x % ROWS;
    if (row >= t.n_row) return;
    const uint32_t bytes = (uint32_t)MT_MIN((int64_t)PREFETCHED_COLUMNS, g.n_out - t.n) * (pairs ? 4 : 2);
    const bf16 *pre = g.pre + pre_start(g, t.m + row, t.n);
    prefetch_l2(pre, bytes);
    if (!pairs) prefetch_l2(pre + g.n_out, bytes);
}
/* weight[h][i]: the gate of row 64 h + 8 i + row_of_thread() of t. */
static __device__ __forceinline__ void load_gates(float weight[2][2], const struct grouped &g, const struct tile &t)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = MT_MIN(row_of_thread() + i / 2 * HALF_ROWS + i % 2 * 8, t.n_row - 1);
        weight[i / 2][i % 2] = __ldg(g.gate + __ldg(g.row_slot + t.m + row));
    }
}

template <int EPILOGUE>
static __device__ __forceinline__ void finish_half(float (&sums)[COLS / 2], const struct grouped &g,
                                                   const struct tile &t, const float *bias, const float weight[2])
{
    if constexpr (is_glu_bwd(EPILOGUE)) {
        struct two_rows rows = {{0, 0}, {weight[0], weight[1]}, {}};
        load_pre(&rows, g, t, 0);
        if constexpr (EPILOGUE == SWIGLU_BWD)
            finish_swiglu_bwd(sums, g, t, &rows);
        else
            finish_glu_bwd<EPILOGUE == GROUPED_GLU_BWD_QUANT, PREFETCHED_COLUMNS>(sums, g, t, &rows);
    } else if constexpr (EPILOGUE == SWIGLU) {
        finish_swiglu(sums, g, t);
    } else {
        finish<EPILOGUE>(sums, g, t, bias);
    }
}

/* The GLU's backward of a tile's first half needs registers. Meanwhile the sums of the second half are in a buffer in
 * shared memory; a thread reads what it has written. A warpgroup waits until the tile before, which the other computes,
 * no longer uses the buffer. With one barrier for both, a warp could skip a phase. */
static __device__ __forceinline__ void put_sums(float4 *buffer, const float (&sums)[COLS / 2])
{
#pragma unroll
    for (int i = 0; i < COLS / 8; i++)
        buffer[i * 128 + threadIdx.x % 128] =
            make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
}
static __device__ __forceinline__ void take_sums(float (&sums)[COLS / 2], const float4 *buffer)
{
#pragma unroll
    for (int i = 0; i < COLS / 8; i++) {
        const float4 x = buffer[i * 128 + threadIdx.x % 128];
        sums[4 * i] = x.x, sums[4 * i + 1] = x.y, sums[4 * i + 2] = x.z, sums[4 * i + 3] = x.w;
    }
}

/* Zeros whose place the compiler does not change, so that sums are not kept in registers from put_sums on. */
static __device__ __forceinline__ void clear(float (&sums)[COLS / 2])
{
#pragma unroll
    for (int i = 0; i < COLS / 2; i++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sums[i]));
}

/* What the warpgroups have in shared memory beside the stages. */
struct extra {
    float *bias;    /* [2, 2, COLS]: two buffers for each warpgroup, used alternately. A warp may write the bias of the
                     * next tile while another warp still reads that of this tile; the barrier before the next read
                     * prevents a lead of two tiles */
    float4 *buffer; /* [COLS / 8, 128]; only of a GLU's backward */
    uint32_t buffer_free; /* barrier w counts the tiles of warpgroup w that no longer use it */
};

template <int EPILOGUE, bool KN>
static __device__ __forceinline__ void multiply_tiles(const struct wgmma_args &p, const struct tiles *tiles,
                                                      struct ring ring, const struct extra &x)
{
    constexpr int STAGES = stages(EPILOGUE);
    constexpr bool biased = !is_glu_bwd(EPILOGUE) && EPILOGUE != SWIGLU;
    const struct grouped &g = p.g;
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col, n_block = count_steps(g);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* the shuffle tells the compiler that it is uniform */
    float sums[2][COLS / 2];
    if (is_glu_bwd(EPILOGUE)) clear(sums[1]);
    ring.full += group * STAGES * 8;
    for (int at = blockIdx.x, e = 0, i = 0; at < n_tile; at += gridDim.x, i++) {
        if (i % 2 != group) { /* the other warpgroup's */
            ring.stage = (ring.stage + n_block) % STAGES;
            continue;
        }
        const struct tile t = tile_at(tiles, at, &e);
        struct tile half = t; /* row_of_thread counts the rows of both warpgroups */
        half.m -= group * HALF_ROWS;
        half.n_row += group * HALF_ROWS;
        float2 columns;
        float weight[2][2] = {};
        float *bias = x.bias + (i / 2 % 2 * 2 + group) * COLS;
        if (biased) columns = load_bias(g, t);
        if (is_glu_bwd(EPILOGUE)) load_gates(weight, g, half);
        const auto prefetch = [&] {
            if (is_glu_bwd(EPILOGUE)) prefetch_rows(g, t);
        };
        const int last = t.n_row > HALF_ROWS ? multiply_tile<STAGES, KN, 2>(sums, &ring, g, prefetch)
                                             : multiply_tile<STAGES, KN, 1>(sums, &ring, g, prefetch);
        wgmma_wait<0>();
        wgmma_use(sums[0]);
        wgmma_use(sums[1]);
        release(ring, last);
        if (biased) {
            if (threadIdx.x % 128 < COLS / 2) *(float2 *)(bias + threadIdx.x % 128 * 2) = columns;
            warpgroup_barrier(1 + group);
        }
        if (is_glu_bwd(EPILOGUE)) {
            mbarrier_wait(x.buffer_free + 8 * (group ^ 1), i / 2 % 2 ^ group ^ 1);
            put_sums(x.buffer, sums[1]);
        }
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
            if (h && is_glu_bwd(EPILOGUE)) {
                take_sums(sums[0], x.buffer);
                __syncwarp();
                if (threadIdx.x % 32 == 0) mbarrier_arrive(x.buffer_free + 8 * group);
            }
            if (h * HALF_ROWS < t.n_row) finish_half<EPILOGUE>(sums[0], g, half, bias, weight[0]);
            half.m += HALF_ROWS;
            half.n_row -= HALF_ROWS;
            weight[0][0] = weight[1][0], weight[0][1] = weight[1][1];
#pragma unroll
            for (int j = 0; !is_glu_bwd(EPILOGUE) && j < COLS / 2; j++) sums[0][j] = sums[1][j];
        }
        if (is_glu_bwd(EPILOGUE)) clear(sums[1]);
    }
}
#endif

template <int EPILOGUE, bool KN>
static __global__ void __launch_bounds__(THREADS, 1) grouped_wgmma_kernel(const __grid_constant__ struct wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int STAGES = stages(EPILOGUE);
    extern __shared__ unsigned char memory[];
    __shared__ struct tiles tiles;
    __shared__ uint64_t full[2][STAGES], empty[STAGES], buffer_free[2];
    __shared__ __align__(16) float bias[2 * 2 * COLS];
    __shared__ int rows[ROWS];
    begin_launch(p.counter);
    if (threadIdx.x < 32) count_tiles(&tiles, p.g);
    if (threadIdx.x == 32) {
        for (int i = 0; i < STAGES; i++) {
            for (int w = 0; w < 2; w++) mbarrier_init(sm90_shared(&full[w][i]), p.g.slot ? 1 + LOADERS : 1);
            mbarrier_init(sm90_shared(&empty[i]), CONSUMERS / 2 / 32);
        }
        for (int w = 0; w < 2; w++) mbarrier_init(sm90_shared(&buffer_free[w]), CONSUMERS / 2 / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
    const uint32_t skipped = (1024 - sm90_shared(memory) % 1024) % 1024;
    const struct ring ring = {sm90_shared(memory) + skipped, sm90_shared(full), sm90_shared(empty), 0, 0};
    if (threadIdx.x >= CONSUMERS) {
        sm90_registers_less<LOADER_REGISTERS>();
        load_tiles<EPILOGUE, KN>(p, &tiles, ring, rows);
    } else {
        sm90_registers_more<CONSUMER_REGISTERS>();
        const struct extra x = {bias, (float4 *)(memory + skipped + STAGES * STAGE_BYTES), sm90_shared(buffer_free)};
        multiply_tiles<EPILOGUE, KN>(p, &tiles, ring, x);
    }
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

/* ---- host ---- */

template <int EPILOGUE, bool KN> static void launch(const struct grouped *g)
{
    constexpr int box = EPILOGUE == SWIGLU ? COLS / 2 : COLS;
    constexpr int bytes = 1024 + stages(EPILOGUE) * STAGE_BYTES + (is_glu_bwd(EPILOGUE) ? BUFFER_BYTES : 0);
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
        CUDA_CHECK(cudaFuncSetAttribute(grouped_wgmma_kernel<EPILOGUE, KN>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        bytes));
    configured = true;
    grouped_wgmma_kernel<EPILOGUE, KN><<<cuda.n_sm, THREADS, bytes, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

bool cuda_grouped_swiglu(const struct grouped *g)
{
    return cuda.hopper && g->glu.kind == GLU_SWIGLU && !g->glu.interleaved && g->n_out % 256 == 0 && !g->bias && !g->kn;
}

void cuda_grouped_wgmma(const struct grouped *g)
{
    const int64_t n_tile = (ceil_div(g->n_row, ROWS) + g->count) * ceil_div(g->n_out, COLS);
    grouped_require(g);
    MT_REQUIRE(g->count <= MAX_EXPERTS && n_tile + cuda.n_sm <= INT32_MAX, "%lld experts, %lld tiles",
               (long long)g->count, (long long)n_tile);
    if (g->n_row == 0 || g->count == 0) return;
    MT_REQUIRE(g->kn || !grouped_is_glu_bwd(g->epilogue), "GROUPED_GLU_BWD needs kn");
    if (g->epilogue == GROUPED_GLU_BWD && g->glu.kind == GLU_SWIGLU && !g->glu.interleaved) {
        launch<SWIGLU_BWD, true>(g);
    } else if (g->epilogue == GROUPED_GLU_BWD) {
        launch<GROUPED_GLU_BWD, true>(g);
    } else if (g->epilogue == GROUPED_GLU_BWD_QUANT) {
        launch<GROUPED_GLU_BWD_QUANT, true>(g);
    } else if (g->epilogue == GROUPED_GLU && !g->glu.interleaved) {
        MT_REQUIRE(cuda_grouped_swiglu(g), "GROUPED_GLU of separate gates and ups: %lld columns", (long long)g->n_out);
        launch<SWIGLU, false>(g);
    } else if (g->epilogue == GROUPED_GLU) {
        MT_REQUIRE(!g->kn, "GROUPED_GLU with kn");
        launch<GROUPED_GLU, false>(g);
    } else if (g->kn) {
        launch<GROUPED_STORE, true>(g);
    } else {
        launch<GROUPED_STORE, false>(g);
    }
}
