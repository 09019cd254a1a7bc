/* grouped_decode_wgmma.cu - the grouped GEMM of grouped.h on Hopper with experts in MXFP4, for many rows per expert:
 * no decoded copy of an expert exists in global memory. The loading warpgroup decodes a step of b into a stage;
 * products and epilogues are those of grouped_wgmma.cuh.
 * Math: as in grouped_wgmma.cu. A decoded weight is the exact bf16 value that dequant.cu writes, and the sums have the
 *   same order. 32 weights with one scale are 16 bytes. Four registers hold the bytes of the values of codes 0 .. 7
 *   times the scale, which are exact; prmt looks up four bytes at a time.
 * Needs: sm_90a; n_in of w a multiple of 32, n_out of 8; fewer than 2^31 weights per expert; grouped_require; at most
 *   512 experts; rows in expert order.
 * Grid: persistent, one block per SM: a loading warpgroup and two consumer warpgroups, which share every tile of up to
 *   256 rows x 192 columns: 128 rows each, or 64. Experts with the largest tiles come first, since blocks take tiles
 *   with a fixed stride. TMA loads packed weights 4 steps ahead into 7 slots; a thread decodes three blocks of 32 in
 *   each step, its 16-byte stores have no bank conflicts. 3 stages, 211 KiB. In the epilogue of the GLU's backward,
 *   half of the sums are in local memory, 384 bytes per thread.
 * Bound: shared memory, at 128 bytes per clock: in a step of 192 rows, wgmma reads 96 KB, and decoding and TMA move 68
 *   KB. While the tensor cores are busy a scheduler issues at most 0.25 PRMT or LOP3 per clock; a step has about 225 of
 *   these. w is read once per 256 rows of its expert, 0.53 bytes a weight; rows once per 192 columns, from L2.
 * Numerics: f32 sums in one fixed order. */
#include "kernels/cuda/sm90/grouped/grouped_wgmma.cuh"
#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/format/mxfp4_words.cuh"

enum {
    BLOCK = 32,                              /* weights with one scale: 16 bytes */
    BLOCKS = COLS * DEPTH / BLOCK / LOADERS, /* of a thread in a step */
    DEEP = 3,                                /* stages */
    AHEAD = 4,                               /* steps by which packed weights are loaded ahead */
    SLOTS = AHEAD + DEEP,                    /* of packed weights: load_tiles */
    SLOT_BYTES = COLS * DEPTH / 2,
    BARRIER_BYTES = 128,
    PART_BYTES = 64 * 128,
    TILE = 2 * ROWS, /* rows of the largest tile */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- loading ---- */

/* The blocks of w that a thread decodes in each step. A stage has three parts of 64 rows of 128 bytes. A row of the
 * forward is one column at 64 inner indices, a row of the backward 64 columns at one inner index. A thread has one
 * block of each part: half of row thread / 2. Weights beyond the edges of w are 0, with the scale of the last block
 * inside. */
struct blocks {
    const uint8_t *scale; /* of the expert */
    uint32_t at[BLOCKS];  /* of step 0 */
    uint32_t step, most;  /* step i: at + min(i * step, most) */
};

template <bool KN>
static __device__ __forceinline__ struct blocks find_blocks(const struct wgmma_args &p, const struct tile &t,
                                                            int thread)
{
    const int n_in = (int)p.g.n_in, n_out = (int)p.g.n_out, per_row = (KN ? n_out : n_in) / BLOCK;
    const int row = thread / 2, side = thread % 2;
    struct blocks b = {p.scale + t.e * ((int64_t)per_row * (KN ? n_in : n_out)), {}, 0, 0};
    b.step = KN ? DEPTH * per_row : DEPTH / BLOCK;
    b.most = KN ? (n_in - 1 - row) * per_row : per_row - 1 - side;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        const int n = MT_MIN(t.n + 64 * j + (KN ? side * BLOCK : row), n_out - 1);
        b.at[j] = KN ? row * per_row + n / BLOCK : n * per_row + side;
    }
    return b;
}

/* The scales of a step, e8m0. */
static __device__ __forceinline__ void load_scales(uint32_t (&scale)[BLOCKS], const struct blocks &b, uint32_t step)
{
    const uint32_t before = MT_MIN(step * b.step, b.most);
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) scale[j] = __ldg(b.scale + (b.at[j] + before));
}

/* One thread starts the load of the packed weights of a step into a slot. */
template <bool KN>
static __device__ __forceinline__ void load_packed(const struct wgmma_args &p, const struct tile &t,
                                                   const struct ring &slots, int ahead, int step)
{
    const int slot = (slots.stage + ahead) % SLOTS, k = step * DEPTH;
    mbarrier_arrive_expect(slots.full + 8 * slot, SLOT_BYTES);
    tma_load(slots.data + slot * SLOT_BYTES, &p.b, slots.full + 8 * slot, KN ? t.n / 2 : k / 2, KN ? k : t.n, t.e);
}

/* The address of this thread's first block in the current slot; load_block loads its block j. */
template <bool KN> static __device__ __forceinline__ uint32_t first_block(const struct ring &slots, int thread)
{
    return slots.data + slots.stage * SLOT_BYTES + (KN ? thread / 2 * (COLS / 2) + thread % 2 * 16 : thread * 16);
}
template <bool KN> static __device__ __forceinline__ void load_block(uint32_t (&c)[4], uint32_t first, int j)
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(first + j * (KN ? 32 : LOADERS * 16))
                 : "memory");
}

/* Decodes the blocks of a step from a slot into the stage's b at `to`. early: block 0. */
template <bool KN>
static __device__ __forceinline__ void decode_step(uint32_t to, uint32_t first, const uint32_t (&early)[4],
                                                   const uint32_t (&scale)[BLOCKS], int thread)
{
    uint32_t c[BLOCKS][4];
    to += sm90_swizzle(thread / 2, thread % 2 * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) c[0][i] = early[i];
#pragma unroll
    for (int j = 1; j < BLOCKS; j++) load_block<KN>(c[j], first, j);
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        const struct values v = scaled_values(scale[j]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t pair[4];
            decode_word(pair, v, c[j][i]);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"((to ^ i << 4) + j * PART_BYTES), "r"(pair[0]),
                         "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
                         : "memory");
        }
    }
}

/* Loads rows and, of an adapter, lb by TMA. */
template <typename PIPE, bool KN>
static __device__ __forceinline__ void load_by_tma(const struct wgmma_args &p, const struct tile &t,
                                                   const struct ring &ring, int k, bool thin)
{
    const uint32_t to = ring.data + ring.stage * PIPE::BYTES, full = ring.full + 8 * ring.stage;
    const int n_half = (t.n_row + HALF_ROWS - 1) / HALF_ROWS;
    const CUtensorMap *rows = thin ? &p.la : &p.a;
    mbarrier_arrive_expect(full, n_half * (A_BYTES / 2) + (thin ? COLS * DEPTH * 2 : 0));
    for (int i = 0; i < n_half; i++) tma_load(to + i * (A_BYTES / 2), rows, full, k, t.m + i * HALF_ROWS, 0);
    if (thin) load_b<KN>(to + PIPE::ROW_BYTES, &p.lb, full, k, t.n, t.e, 0);
}

/* Waits until the current stage is empty. say_full: this warp has filled the stage; moves to the next. */
static __device__ __forceinline__ void wait_empty(const struct ring &ring)
{
    mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
}
template <typename PIPE> static __device__ __forceinline__ void say_full(struct ring *ring)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring->full + 8 * ring->stage);
    ring_advance<PIPE::STAGES>(ring);
}

/* The slot of packed weights for step i + AHEAD is free when all warps have decoded step i - DEEP. That is so when the
 * stage of step i is empty, because the consumers release a stage only after all warps have filled it. The asm keeps
 * addresses in registers; otherwise the compiler computes them again in each step. */
template <typename PIPE, bool KN>
static __device__ __forceinline__ void load_tiles(const struct wgmma_args &p, const struct tiles *tiles,
                                                  struct ring ring, struct ring slots)
{
    const struct grouped &g = p.g;
    const int thread = threadIdx.x % LOADERS, n_thin = count_thin(g), n_step = count_steps(g) - n_thin;
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    asm volatile("" : "+r"(ring.data), "+r"(ring.full), "+r"(ring.empty), "+r"(slots.data), "+r"(slots.full));
    for (int at = blockIdx.x, e = 0; at < n_tile; at += gridDim.x) {
        struct tile t = tile_at<PIPE::TILE_ROWS>(tiles, at, &e);
        t.e = tiles->place[t.e];
        const struct blocks b = find_blocks<KN>(p, t, thread);
        uint32_t scale[BLOCKS], early[4];
        for (int i = 0; i < MT_MIN(AHEAD, n_step) && thread == 0; i++) load_packed<KN>(p, t, slots, i, i);
        load_scales(scale, b, 0);
        for (int i = 0; i < n_thin; i++) {
            wait_empty(ring);
            if (thread == 0) load_by_tma<PIPE, KN>(p, t, ring, i * DEPTH, true);
            say_full<PIPE>(&ring);
        }
        for (int i = 0; i < n_step; i++) {
            const uint32_t first = first_block<KN>(slots, thread);
            uint32_t next[BLOCKS];
            mbarrier_wait(slots.full + 8 * slots.stage, slots.parity);
            load_block<KN>(early, first, 0);
            load_scales(next, b, i + 1);
            wait_empty(ring);
            if (thread == i % (LOADERS / 32) * 32) { /* the warps in turns */
                load_by_tma<PIPE, KN>(p, t, ring, i * DEPTH, false);
                if (i + AHEAD < n_step) load_packed<KN>(p, t, slots, AHEAD, i + AHEAD);
            }
            decode_step<KN>(ring.data + ring.stage * PIPE::BYTES + PIPE::ROW_BYTES, first, early, scale, thread);
            fence_proxy_async();
            say_full<PIPE>(&ring);
            ring_advance<SLOTS>(&slots);
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) scale[j] = next[j];
        }
    }
}
#endif

struct loads_packed {
    enum { LOADER = 56, CONSUMER = 224, IN_TURNS = false, SCRATCH_BYTES = BARRIER_BYTES + SLOTS * SLOT_BYTES };
    using pipe = struct pipeline<DEEP, TILE>;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static __device__ __forceinline__ int arrivals(const struct grouped &) { return 1 + LOADERS / 32; }
    static __device__ __forceinline__ void tile_loaded(const struct wgmma_args &, int) {}
    template <int EPILOGUE, bool KN>
    static __device__ __forceinline__ void load(const struct wgmma_args &p, const struct tiles *tiles,
                                                const struct ring &ring, void *scratch)
    {
        const struct ring slots = {sm90_shared(scratch) + BARRIER_BYTES, sm90_shared(scratch), 0, 0, 0, 0};
        if (threadIdx.x % LOADERS == 0) {
            for (int i = 0; i < SLOTS; i++) mbarrier_init(slots.full + 8 * i, 1);
            mbarrier_init_fence();
        }
        warpgroup_barrier(3);
        load_tiles<pipe, KN>(p, tiles, ring, slots);
    }
#endif
};

/* ---- host ---- */

void cuda_grouped_decode(const struct grouped *g, const struct weight *w)
{
    MT_REQUIRE(!g->slot && !g->ids && w->n_out * w->n_in <= INT32_MAX && (uintptr_t)w->scale % 4 == 0,
               "a product with packed experts of %lld x %lld", (long long)w->n_out, (long long)w->n_in);
    if (!has_tiles(g)) return;
    if (g->epilogue == GROUPED_GLU_BWD) {
        g->glu.interleaved ? launch<loads_packed, GROUPED_GLU_BWD, true>(g, w, NULL)
                           : launch<loads_packed, HALVES_BWD, true>(g, w, NULL);
    } else if (g->epilogue == GROUPED_GLU) {
        MT_REQUIRE(g->glu.interleaved, "GROUPED_GLU of separate gates and ups");
        launch<loads_packed, GROUPED_GLU, false>(g, w, NULL);
    } else {
        MT_REQUIRE(g->epilogue == GROUPED_STORE, "epilogue %d", (int)g->epilogue);
        g->kn ? launch<loads_packed, GROUPED_STORE, true>(g, w, NULL)
              : launch<loads_packed, GROUPED_STORE, false>(g, w, NULL);
    }
}
