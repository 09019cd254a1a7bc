/* grouped_wgmma.cuh - what grouped_wgmma.cu, grouped_ahead_wgmma.cu and grouped_decode_wgmma.cu share: products,
 * epilogues and kernel of the grouped GEMM in bf16. They differ in who writes the stages of the pipeline, and in how
 * the two consumer warpgroups share tiles. A struct PLAN has these choices as members:
 *
 *   LOADER, CONSUMER       registers of a thread, for setmaxnreg
 *   IN_TURNS               the warpgroups take tiles in turns; else each has half of the rows of every tile
 *   pipe                   the pipeline
 *   SCRATCH_BYTES          of shared memory for the loading warpgroup
 *   arrivals(g)            the number of arrivals that the full barrier of a stage waits for
 *   tile_loaded(p, e)      called by a thread when all loads of a tile of expert e are complete
 *   load<EPILOGUE, KN>(p, tiles, ring, scratch)    called by the 128 threads of the loading warpgroup */
#ifndef MT_CUDA_GROUPED_WGMMA_H
#define MT_CUDA_GROUPED_WGMMA_H

#include <string.h>

#include "kernels/cuda/sm90/pingpong.cuh"

enum {
    PREFETCHED = 4, /* steps before the end of a tile in which the first columns of pre are prefetched */
    PREFETCHED_COLUMNS = 96,
    PUT_SUMS = 36 /* sums of a thread in put_sums: with fewer, registers do not suffice; more would cost a stage */
};

struct wgmma_args {
    CUtensorMap a, b, la, lb; /* boxes: rows, or all columns, of a tile by 64 of depth; zeroed when unused */
    struct grouped g;
    const uint8_t *data, *scale; /* of experts in MXFP4, as struct weight has them; else NULL */
    bf16 *ring;  /* experts that grouped_ahead_wgmma.cu decodes, or NULL. b maps ring if set, else data if set */
    int counter; /* index in tiles_begun */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Steps of depth of a tile: of the adapter, and of both. */
static __device__ __forceinline__ int count_thin(const struct grouped &g) { return ((int)g.r + DEPTH - 1) / DEPTH; }
static __device__ __forceinline__ int count_steps(const struct grouped &g)
{
    return count_thin(g) + ((int)g.n_in + DEPTH - 1) / DEPTH;
}

/* ---- products ---- */

template <typename PIPE, bool KN, int HALVES, typename Prefetch>
static __device__ __forceinline__ int multiply_tile(float (&sums)[2][COLS / 2], struct ring *ring,
                                                    const struct grouped &g, const Prefetch &prefetch)
{
    const int r = (int)g.r;
    if (r > 0) {
        multiply_thin<PIPE, KN, HALVES>(sums, ring, r, 1);
        scale_sums<HALVES>(sums, g.scale);
    }
    return multiply<PIPE, KN, HALVES>(sums, ring, (int)g.n_in, r > 0, g.slot != NULL, PREFETCHED, prefetch);
}

/* ---- epilogue of plain SwiGLU, forward, with gates and ups in separate halves: a tile has equal numbers of gate and
 * up columns, and one thread computes both columns of a pair. ---- */

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
        load_pre<layout_of(EPILOGUE)>(&rows, g, t);
        finish_glu_bwd<is_quant_bwd(EPILOGUE), layout_of(EPILOGUE), PREFETCHED_COLUMNS>(sums, g, t, &rows);
    } else if constexpr (EPILOGUE == SWIGLU) {
        finish_swiglu(sums, g, t);
    } else {
        finish<EPILOGUE>(sums, g, t, bias);
    }
}

/* While a warpgroup computes the GLU's backward of a tile's first half, registers do not suffice for the sums of the
 * second. Warpgroups that take tiles in turns put the last PUT_SUMS of these into a buffer in shared memory; each
 * thread reads what it wrote. A warpgroup waits until the other has finished with the buffer. Each has a barrier: with
 * a common one, a warp could skip a phase. Warpgroups that share tiles finish together and would need two buffers: they
 * keep all sums of the second half in local memory, which volatile forces. */
static __device__ __forceinline__ void put_sums(float4 *buffer, const float (&sums)[COLS / 2])
{
#pragma unroll
    for (int i = 0; i < PUT_SUMS / 4; i++) {
        const float *x = sums + COLS / 2 - PUT_SUMS + 4 * i;
        buffer[i * 128 + threadIdx.x % 128] = make_float4(x[0], x[1], x[2], x[3]);
    }
}
static __device__ __forceinline__ void take_sums(float (&sums)[2][COLS / 2], const float4 *buffer)
{
#pragma unroll
    for (int i = 0; i < COLS / 2 - PUT_SUMS; i++) sums[0][i] = sums[1][i];
#pragma unroll
    for (int i = 0; i < PUT_SUMS / 4; i++) {
        const float4 x = buffer[i * 128 + threadIdx.x % 128];
        float *to = sums[0] + COLS / 2 - PUT_SUMS + 4 * i;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
}

/* Sets sums to 0 by instructions that the compiler cannot move, so that it keeps no sums in registers after
 * put_sums. */
static __device__ __forceinline__ void clear(float (&sums)[COLS / 2])
{
#pragma unroll
    for (int i = 0; i < COLS / 2; i++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(sums[i]));
}

struct extra {
    float *bias;    /* [2, 2, COLS]: two buffers for each warpgroup, used alternately. A warp may write the bias of the
                     * next tile while another warp still reads that of this tile; the barrier before the next read
                     * prevents a lead of two tiles */
    float4 *buffer; /* [PUT_SUMS / 4, 128]; only of a GLU's backward, in turns */
    uint32_t buffer_free; /* barrier w counts the tiles of warpgroup w that no longer use it */
};

/* Reduces t to the rows of this warpgroup and sets ring->rows to their offset in a stage; false when it has none. */
static __device__ __forceinline__ bool take_rows(struct tile *t, struct ring *ring, int group)
{
    const int before = t->n_row > ROWS ? group * ROWS : group * HALF_ROWS, most = t->n_row > ROWS ? ROWS : HALF_ROWS;
    ring->rows = before * DEPTH * 2;
    t->m += before;
    t->n_row = MT_MIN(most, t->n_row - before);
    return t->n_row > 0;
}
/* Waits for and releases the stages of a tile in which this warpgroup has no rows. */
template <typename PIPE> static __device__ __forceinline__ void skip_tile(struct ring *ring, int n_step)
{
    for (int i = 0; i < n_step; i++) {
        wait_full(*ring);
        release(*ring, ring->stage);
        advance<PIPE>(ring);
    }
}

/* Runs the epilogue on both halves of the rows of a warpgroup's tile, its `own`-th. half: the tile cut to its first
 * half of rows. Overwrites sums. */
template <typename PLAN, int EPILOGUE>
static __device__ __forceinline__ void finish_tile(float (&sums)[2][COLS / 2], const struct grouped &g,
                                                   struct tile half, int group, int own, const float *bias,
                                                   float (&weight)[2][2], const struct extra &x)
{
    constexpr bool stored = is_glu_bwd(EPILOGUE), local = stored && !PLAN::IN_TURNS;
    const int first_row = group * HALF_ROWS;
    volatile float kept[local ? COLS / 2 : 1];
    if (stored && !local) {
        mbarrier_wait(x.buffer_free + 8 * (group ^ 1), own % 2 ^ group ^ 1);
        put_sums(x.buffer, sums[1]);
    }
#pragma unroll
    for (int j = 0; local && j < COLS / 2; j++) kept[j] = sums[1][j];
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
        if (h && stored && !local) {
            take_sums(sums, x.buffer);
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(x.buffer_free + 8 * group);
        }
#pragma unroll
        for (int j = 0; local && j < COLS / 2; j++)
            if (h) sums[0][j] = kept[j];
        if (first_row < half.n_row) finish_half<EPILOGUE>(sums[0], g, half, bias, weight[0]);
        half.m += HALF_ROWS;
        half.n_row -= HALF_ROWS;
        weight[0][0] = weight[1][0], weight[0][1] = weight[1][1];
#pragma unroll
        for (int j = 0; !stored && j < COLS / 2; j++) sums[0][j] = sums[1][j];
    }
}

template <typename PLAN, int EPILOGUE, bool KN>
static __device__ __forceinline__ void multiply_tiles(const struct wgmma_args &p, const struct tiles *tiles,
                                                      struct ring ring, const struct extra &x)
{
    using PIPE = typename PLAN::pipe;
    constexpr bool biased = !is_glu_bwd(EPILOGUE) && EPILOGUE != SWIGLU;
    const struct grouped &g = p.g;
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col, n_step = count_steps(g);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* the shuffle tells the compiler that it is uniform */
    float sums[2][COLS / 2];
    if (is_glu_bwd(EPILOGUE)) clear(sums[1]);
    if (PLAN::IN_TURNS) ring.full += group * PIPE::STAGES * 8;
    for (int at = blockIdx.x, e = 0, i = 0; at < n_tile; at += gridDim.x, i++) {
        if (PLAN::IN_TURNS && i % 2 != group) { /* the other warpgroup's */
            ring.stage = (ring.stage + n_step) % PIPE::STAGES;
            continue;
        }
        struct tile t = tile_at<PIPE::TILE_ROWS>(tiles, at, &e);
        if (!PLAN::IN_TURNS && !take_rows(&t, &ring, group)) {
            skip_tile<PIPE>(&ring, n_step);
            continue;
        }
        struct tile half = t; /* row_of_thread counts the rows of both warpgroups */
        half.m -= group * HALF_ROWS;
        half.n_row += group * HALF_ROWS;
        const int own = PLAN::IN_TURNS ? i / 2 : i;
        float2 columns;
        float weight[2][2] = {};
        float *bias = x.bias + (own % 2 * 2 + group) * COLS;
        t.e = tiles->place[t.e];
        if (biased) columns = load_bias(g, t);
        if (is_glu_bwd(EPILOGUE)) load_gates(weight, g, half);
        const auto prefetch = [&] {
            if (is_glu_bwd(EPILOGUE)) prefetch_rows(g, t);
        };
        const int last = t.n_row > HALF_ROWS ? multiply_tile<PIPE, KN, 2>(sums, &ring, g, prefetch)
                                             : multiply_tile<PIPE, KN, 1>(sums, &ring, g, prefetch);
        if (threadIdx.x % 128 == 0) PLAN::tile_loaded(p, t.e);
        wgmma_wait<0>();
        wgmma_use(sums[0]);
        wgmma_use(sums[1]);
        release(ring, last);
        if (biased) {
            if (threadIdx.x % 128 < COLS / 2) *(float2 *)(bias + threadIdx.x % 128 * 2) = columns;
            warpgroup_barrier(1 + group);
        }
        finish_tile<PLAN, EPILOGUE>(sums, g, half, group, own, bias, weight, x);
        if (is_glu_bwd(EPILOGUE)) clear(sums[1]);
    }
}
#endif

/* Bytes of shared memory for put_sums, in the GLU's backward. */
template <typename PLAN> static __device__ __host__ constexpr int buffer_bytes(int epilogue)
{
    return is_glu_bwd(epilogue) && PLAN::IN_TURNS ? PUT_SUMS * 128 * 4 : 0;
}

template <typename PLAN, int EPILOGUE, bool KN>
static __global__ void __launch_bounds__(THREADS, 1) grouped_wgmma_kernel(const __grid_constant__ struct wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using PIPE = typename PLAN::pipe;
    enum { STAGES = PIPE::STAGES, RINGS = PLAN::IN_TURNS ? 2 : 1 };
    extern __shared__ unsigned char memory[];
    __shared__ struct tiles tiles;
    __shared__ uint64_t full[RINGS * STAGES], empty[STAGES], buffer_free[2];
    __shared__ __align__(16) float bias[is_glu_bwd(EPILOGUE) ? 1 : 2 * 2 * COLS];
    if (PLAN::IN_TURNS) begin_launch(p.counter);
    if (threadIdx.x < 32) count_tiles<PIPE::TILE_ROWS>(&tiles, p.g);
    if (threadIdx.x == 32) {
        for (int i = 0; i < RINGS * STAGES; i++) mbarrier_init(sm90_shared(&full[i]), PLAN::arrivals(p.g));
        for (int i = 0; i < STAGES; i++) mbarrier_init(sm90_shared(&empty[i]), CONSUMERS / RINGS / 32);
        for (int w = 0; w < 2; w++) mbarrier_init(sm90_shared(&buffer_free[w]), CONSUMERS / 2 / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
    unsigned char *const data = memory + (1024 - sm90_shared(memory) % 1024) % 1024;
    unsigned char *const buffer = data + STAGES * PIPE::BYTES;
    const struct ring ring = {sm90_shared(data), sm90_shared(full), sm90_shared(empty), 0, 0, 0};
    if (threadIdx.x >= CONSUMERS) {
        sm90_registers_less<PLAN::LOADER>();
        PLAN::template load<EPILOGUE, KN>(p, &tiles, ring, buffer + buffer_bytes<PLAN>(EPILOGUE));
    } else {
        sm90_registers_more<PLAN::CONSUMER>();
        const struct extra x = {bias, (float4 *)buffer, sm90_shared(buffer_free)};
        multiply_tiles<PLAN, EPILOGUE, KN>(p, &tiles, ring, x);
    }
#else
    __trap();
#endif
}

/* ---- host ---- */

/* Boxes of the bytes of experts in MXFP4, not swizzled. */
static CUtensorMap packed_map(const struct weight *w, int box_rows, int box_bytes)
{
    const cuuint64_t row = (cuuint64_t)w->n_in / 2, size[] = {row, (cuuint64_t)w->n_out, (cuuint64_t)w->n_exp};
    const cuuint64_t stride[] = {row, row * size[1]};
    const cuuint32_t box[] = {(cuuint32_t)box_bytes, (cuuint32_t)box_rows, 1};
    const struct sm90_map map = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, w->data, size, stride, box, false};
    return sm90_encode(&map);
}

template <int EPILOGUE, bool KN> static CUtensorMap bf16_map(const struct grouped *g, const bf16 *b, int64_t n_mat)
{
    return KN ? tensor_map(b, n_mat, g->n_in, g->n_out, g->n_out, DEPTH)
              : tensor_map(b, n_mat, g->n_out, g->n_in, g->n_in, EPILOGUE == SWIGLU ? COLS / 2 : COLS);
}

/* w: packed experts; NULL: g->b has them in bf16. ring: of grouped_ahead_wgmma.cu, whose blocks wait for each other. */
template <typename PLAN, int EPILOGUE, bool KN>
static void launch(const struct grouped *g, const struct weight *w, bf16 *ring)
{
    constexpr int box = EPILOGUE == SWIGLU ? COLS / 2 : COLS, box_rows = PLAN::IN_TURNS ? (int)ROWS : (int)HALF_ROWS;
    using PIPE = typename PLAN::pipe;
    constexpr int bytes = 1024 + PIPE::STAGES * PIPE::BYTES + buffer_bytes<PLAN>(EPILOGUE) + PLAN::SCRATCH_BYTES;
    const auto kernel = grouped_wgmma_kernel<PLAN, EPILOGUE, KN>;
    static bool configured;
    struct wgmma_args p;
    memset(&p, 0, sizeof(p));
    p.g = *g;
    p.counter = next_counter();
    if (!g->slot) p.a = tensor_map(g->a, 1, g->n_row, g->n_in, g->lda, box_rows);
    if (w) p.data = (const uint8_t *)w->data, p.scale = w->scale;
    p.ring = ring;
    p.b = ring ? bf16_map<EPILOGUE, KN>(g, ring, AHEAD_SLOTS)
          : w  ? packed_map(w, KN ? DEPTH : COLS, KN ? COLS / 2 : DEPTH / 2)
               : bf16_map<EPILOGUE, KN>(g, g->b, g->count);
    if (g->r > 0) {
        p.la = tensor_map(g->la, 1, g->n_row, g->r, g->r, box_rows);
        p.lb = KN ? tensor_map(g->lb, g->n_exp, g->r, g->n_out, g->n_out, DEPTH)
                  : tensor_map(g->lb, g->n_exp, g->n_out, g->r, g->r, box);
    }
    if (!configured) CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    configured = true;
    void *args[] = {&p};
    if (ring)
        CUDA_CHECK(cudaLaunchCooperativeKernel(kernel, dim3(cuda.n_sm), dim3(THREADS), args, bytes, cuda.stream));
    else
        kernel<<<cuda.n_sm, THREADS, bytes, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

static bool has_tiles(const struct grouped *g)
{
    const int64_t n_tile = (ceil_div(g->n_row, ROWS) + g->count) * ceil_div(g->n_out, COLS);
    grouped_require(g);
    MT_REQUIRE(g->count <= MAX_EXPERTS && n_tile + cuda.n_sm <= INT32_MAX, "%lld experts, %lld tiles",
               (long long)g->count, (long long)n_tile);
    MT_REQUIRE(g->epilogue == GROUPED_STORE || g->kn == grouped_is_glu_bwd(g->epilogue), "epilogue %d with%s kn",
               (int)g->epilogue, g->kn ? "" : "out");
    return g->n_row > 0 && g->count > 0;
}

template <typename PLAN> static void launch_epilogue(const struct grouped *g, const struct weight *w, bf16 *ring)
{
    if (g->epilogue == GROUPED_GLU_BWD && g->glu.interleaved) {
        launch<PLAN, GROUPED_GLU_BWD, true>(g, w, ring);
    } else if (g->epilogue == GROUPED_GLU_BWD) {
        g->glu.kind == GLU_SWIGLU ? launch<PLAN, SWIGLU_BWD, true>(g, w, ring)
                                  : launch<PLAN, HALVES_BWD, true>(g, w, ring);
    } else if (g->epilogue == GROUPED_GLU_BWD_QUANT) {
        g->glu.interleaved ? launch<PLAN, GROUPED_GLU_BWD_QUANT, true>(g, w, ring)
                           : launch<PLAN, HALVES_BWD_QUANT, true>(g, w, ring);
    } else if (g->epilogue == GROUPED_GLU && !g->glu.interleaved) {
        MT_REQUIRE(cuda_grouped_swiglu(g), "GROUPED_GLU of separate gates and ups: %lld columns", (long long)g->n_out);
        launch<PLAN, SWIGLU, false>(g, w, ring);
    } else if (g->epilogue == GROUPED_GLU) {
        launch<PLAN, GROUPED_GLU, false>(g, w, ring);
    } else {
        MT_REQUIRE(g->epilogue == GROUPED_STORE, "epilogue %d", (int)g->epilogue);
        g->kn ? launch<PLAN, GROUPED_STORE, true>(g, w, ring) : launch<PLAN, GROUPED_STORE, false>(g, w, ring);
    }
}

#endif
