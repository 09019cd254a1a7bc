/* grouped_ahead_wgmma.cu - the grouped GEMM of grouped.h on Hopper with experts in MXFP4, for very many rows per
 * expert: three warps of every block decode the matrices of the next experts into a ring in global memory, while the
 * products with those before run.
 *
 * Math: as in grouped_wgmma.cu, with the same products in the same order: a decoded weight is the bf16 value that
 *   dequant.cu writes.
 * Shapes: grouped.h; ring [AHEAD_SLOTS, n_out, n_in] bf16 as w has them; expert e is in slot e % AHEAD_SLOTS.
 * Needs: grouped_require; sm_90a; rows in expert order, no list of experts; choice_grouped_fits.
 * Grid: as grouped_wgmma.cu, a cooperative launch. Of the loading warpgroup one thread loads; warps 1 .. 3 decode
 *   pieces of PIECE words, which the warps of all blocks take with a fixed stride. At most 32 bytes of spills.
 * Bound: as grouped_wgmma.cu, and w once, packed, and decoded into the ring: 0.53 bytes in, 2 out for a weight.
 * Numerics: as in grouped_wgmma.cu.
 *
 * Order: experts_decoded counts the warps that have decoded an expert, tiles_done its tiles whose loads are complete. A
 * tile waits until all warps have decoded its expert. Before a warp decodes an expert into a slot, all tiles of the
 * slot's previous expert must be done. All blocks run at the same time, so that there is no deadlock. TMA sees what the
 * warps have written after a proxy fence of the thread that loads (PTX ISA, causality order). */
#include "kernels/cuda/sm90/grouped/grouped_wgmma.cuh"
#include "kernels/cuda/format/mxfp4_words.cuh"

enum {
    DECODERS = LOADERS / 32 - 1, /* warps of a block */
    PIECE = 4 * 32,              /* words of eight weights that a warp decodes at a time; four have one scale */
    AHEAD = 3                    /* pieces between the prefetch of a piece into L2 and its decoding */
};

/* [launches, experts]: counters of this launch, and zeros for the next. */
static __device__ uint32_t experts_decoded[2][MAX_EXPERTS], tiles_done[2][MAX_EXPERTS];

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* One thread waits until a counter is `full`; what was written before the last addition is then visible to it. */
static __device__ __forceinline__ void wait_count(const uint32_t *counter, uint32_t full)
{
    uint32_t n;
    while (true) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
        if (n >= full) return;
        asm volatile("nanosleep.u32 100;" ::: "memory");
    }
}
static __device__ __forceinline__ void add_one(uint32_t *counter)
{
    asm volatile("{\n.reg .u32 before;\natom.release.gpu.global.add.u32 before, [%0], 1;\n}\n" ::"l"(counter)
                 : "memory");
}

/* ---- decoding ---- */

/* A lane's words of a piece: word lane % 4 of four blocks, of eight weights each, and the scales of these blocks. */
struct words {
    uint32_t code[4], scale;
};
/* The lane's first word is `at`; beyond the expert it reads the first words instead. */
static __device__ __forceinline__ struct words load_words(const uint8_t *data, const uint8_t *scale, uint32_t at,
                                                          uint32_t n_word)
{
    const uint32_t from = at < n_word ? at : 0;
    struct words x;
    x.scale = __ldg((const uint32_t *)scale + from / 16);
#pragma unroll
    for (int i = 0; i < 4; i++) x.code[i] = __ldg((const uint32_t *)data + from + 4 * i);
    return x;
}

/* Decodes a warp's pieces of an expert, at a fixed stride. A piece is loaded while the warp decodes the one before it,
 * and prefetched to L2 AHEAD pieces earlier. */
static __device__ __forceinline__ void decode_expert(uint4 *to, const uint8_t *data, const uint8_t *scale,
                                                     uint32_t n_word)
{
    const uint32_t step = gridDim.x * DECODERS * PIECE, lane = threadIdx.x % 32;
    uint32_t first = (blockIdx.x + gridDim.x * (threadIdx.x % LOADERS / 32 - 1)) * PIECE;
    struct words x = load_words(data, scale, first + lane / 4 * 16 + lane % 4, n_word);
#pragma unroll 1
    for (; first < n_word; first += step) {
        const uint32_t at = first + lane / 4 * 16 + lane % 4, soon = first + AHEAD * step;
        const struct words next = load_words(data, scale, at + step, n_word);
        if (lane <= 16 && soon + lane % 16 * 8 < n_word)
            prefetch_line(lane < 16 ? data + soon * 4 + lane * 32 : scale + soon / 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t pair[4];
            decode_word(pair, scaled_values(x.scale >> 8 * i & 255), x.code[i]);
            if (at < n_word) to[at + 4 * i] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
        x = next;
    }
}

/* All experts that have rows. */
static __device__ __forceinline__ void decode_experts(const struct wgmma_args &p, const struct tiles *tiles)
{
    const int64_t n_word = p.g.n_out * p.g.n_in / 8; /* of eight weights */
    for (int e = 0; e < tiles->n_exp; e++) {
        int before = e - AHEAD_SLOTS; /* reduced to the last expert with rows that had this slot */
        if (tiles->first[e] == tiles->first[e + 1]) continue;
        while (before >= 0 && tiles->first[before] == tiles->first[before + 1]) before -= AHEAD_SLOTS;
        if (before >= 0 && threadIdx.x % 32 == 0)
            wait_count(&tiles_done[p.counter][before],
                       (uint32_t)((tiles->first[before + 1] - tiles->first[before]) * tiles->n_col));
        __syncwarp();
        decode_expert((uint4 *)p.ring + e % AHEAD_SLOTS * n_word, p.data + e * n_word * 4, p.scale + e * (n_word / 4),
                      (uint32_t)n_word);
        __syncwarp();
        if (threadIdx.x % 32 == 0) add_one(&experts_decoded[p.counter][e]);
    }
}

/* ---- loading, by one thread ---- */

/* Waits until expert e is in its slot, for TMA too. */
static __device__ __forceinline__ void wait_decoded(const struct wgmma_args &p, int e)
{
    wait_count(&experts_decoded[p.counter][e], gridDim.x * DECODERS);
    fence_proxy_async_all();
}

template <typename PIPE, int EPILOGUE, bool KN>
static __device__ __forceinline__ void load_tiles(const struct wgmma_args &p, const struct tiles *tiles,
                                                  struct ring ring)
{
    const struct grouped &g = p.g;
    const int half = EPILOGUE == SWIGLU ? (int)g.n_out / 2 : 0, n_thin = count_thin(g), n_step = count_steps(g);
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    bool waits = waits_for_tiles();
    int decoded = -1; /* the last expert that was waited for */
    if ((int)blockIdx.x < n_tile) announce_tile(p.counter);
    for (int at = blockIdx.x, e = 0, turn = 0; at < n_tile; at += gridDim.x, turn ^= 1) {
        const struct tile t = tile_at(tiles, at, &e);
        begin_tile(p.counter, at, n_tile, 0, 1, &waits);
        for (int i = 0; i < n_step; i++) {
            const bool thin = i < n_thin;
            const int k = DEPTH * (thin ? i : i - n_thin);
            const uint32_t to = ring.data + ring.stage * PIPE::BYTES,
                           full = ring.full + 8 * (ring.stage + turn * PIPE::STAGES);
            if (!thin && t.e != decoded) wait_decoded(p, decoded = t.e);
            mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            if (i == MT_MAX(0, n_step - ANNOUNCED) && at + (int)gridDim.x < n_tile) announce_tile(p.counter);
            mbarrier_arrive_expect(full, PIPE::BYTES);
            tma_load(to, thin ? &p.la : &p.a, full, k, t.m, 0);
            load_b<KN>(to + PIPE::ROW_BYTES, thin ? &p.lb : &p.b, full, k, t.n, thin ? t.e : t.e % AHEAD_SLOTS, half);
            ring_advance<PIPE::STAGES>(&ring);
        }
    }
}
#endif

struct loads_ahead {
    enum { LOADER = LOADER_REGISTERS, CONSUMER = CONSUMER_REGISTERS, IN_TURNS = true, SCRATCH_BYTES = 0 };
    using pipe = struct pipeline<5>;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static __device__ __forceinline__ int arrivals(const struct grouped &) { return 1; }
    /* Called by one thread of a warpgroup when the loads of a tile are complete. */
    static __device__ __forceinline__ void tile_loaded(const struct wgmma_args &p, int e)
    {
        add_one(&tiles_done[p.counter][e]);
    }
    template <int EPILOGUE, bool KN>
    static __device__ __forceinline__ void load(const struct wgmma_args &p, const struct tiles *tiles,
                                                const struct ring &ring, void *)
    {
        const int thread = threadIdx.x % LOADERS;
        if (thread == 0) load_tiles<pipe, EPILOGUE, KN>(p, tiles, ring);
        if (thread < 32) return;
        if (blockIdx.x == 0)
            for (int i = thread - 32; i < MAX_EXPERTS; i += 32 * DECODERS)
                experts_decoded[p.counter ^ 1][i] = tiles_done[p.counter ^ 1][i] = 0;
        decode_experts(p, tiles);
    }
#endif
};

/* ---- host ---- */

void cuda_grouped_ahead(const struct grouped *g, const struct weight *w, bf16 *ring)
{
    MT_REQUIRE(!g->slot && !g->ids && g->first == 0 && g->count == w->n_exp && choice_grouped_fits(GROUPED_AHEAD, w) &&
                   (uintptr_t)w->data % 4 == 0 && (uintptr_t)w->scale % 4 == 0,
               "a product with packed experts of %lld x %lld", (long long)w->n_out, (long long)w->n_in);
    if (has_tiles(g)) launch_epilogue<loads_ahead>(g, w, ring);
}
