/* proj.cu - the matrices that products of a projection read: decoded, or fake-quantised with the adapter merged (struct
 * proj_quant), for a run of experts in one launch; and the largest magnitudes, from which their scales follow.
 *
 * Math:     m = W_e + scale * sum over r, ascending, of B_e[i, r] A_e[r, j] (fused multiply-adds); out = bf16(Q(m)),
 *           Q as kernels/format/fakequant.h defines it. amax: largest bits of |m|, so a NaN stays a NaN.
 * Shapes:   out [count, n_out, n_in] bf16; A [E, r, n_in], B [E, n_out, r] f32; amax [E * n_part] f32.
 * Needs:    n_in a multiple of 8 and of the format's block; r a multiple of 8; 16-byte aligned memory.
 * Grid:     256 threads, 64 rows x 256 columns of one expert: a warp has 8 rows, a lane 8 columns side by side of each.
 *           A block along a row is at most 128 elements, so 16 lanes of one warp find its largest magnitude by
 *           shuffles. A and B pass through shared memory, 16 of r at a time: 20 KiB.
 * Bound:    as dequant.cu, and A once per 64 rows (from L2) -> memory bound without an adapter; with one 2 r FLOPs per
 *           value outside the tensor cores: bound by these from r = 16 on.
 * Numerics: exact: the bits of kernels/cpu/proj.c before the rounding to bf16. */
#include "kernels/cuda/format/formats.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, ROWS = 8, BAND = WARPS * ROWS, VECTOR = 8, COLS = 32 * VECTOR, DEPTH = 16 };

/* The rows of an expert that are quantised as one matrix: all, or one of q, k and v. */
struct part {
    int64_t row, n_row;   /* of the matrix */
    const float *a, *b;   /* [E, r, n_in], [E, n_row, r], strides below; r 0: absent */
    int64_t a_exp, b_exp; /* elements from one expert to the next */
    int r;
    float scale;
    float *amax; /* of expert e at e * amax_exp; or NULL */
    int64_t amax_exp;
};

struct adapter_tile {
    float4 a[DEPTH][2][32]; /* columns 8 lane .. +3 and + 4 .. + 7 */
    float2 b[BAND][DEPTH / 2];
};

/* acc [row][column] += the adapter's product for a warp's ROWS rows. All threads of the block call it. */
static __device__ __forceinline__ void adapter_product(float acc[ROWS][VECTOR], struct adapter_tile &t,
                                                       const struct part &p, int64_t e, int64_t row, int64_t col,
                                                       int64_t n_in)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int first = 0; first < p.r; first += DEPTH) {
        const int depth = min(DEPTH, p.r - first); /* 8 or 16 */
        __syncthreads();
        for (int i = threadIdx.x; i < depth * 64; i += THREADS) { /* float4 of A: 64 in a row of the tile */
            const int64_t c = col + i % 64 * 4;
            const float *from = p.a + e * p.a_exp + (first + i / 64) * n_in + c;
            t.a[i / 64][i % 2][i % 64 / 2] = c < n_in ? *(const float4 *)from : make_float4(0, 0, 0, 0);
        }
        for (int i = threadIdx.x; i < depth / 2 * BAND; i += THREADS) {
            const int at = i / (depth / 2), k = i % (depth / 2);
            const float *from = p.b + e * p.b_exp + (row + at) * p.r + first + 2 * k;
            t.b[at][k] = row + at < p.n_row ? *(const float2 *)from : make_float2(0, 0);
        }
        __syncthreads();
#pragma unroll 1
        for (int k = 0; k < depth; k += 2) {
            float2 b[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) b[i] = t.b[warp * ROWS + i][k / 2];
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const float4 lo = t.a[k + q][0][lane], hi = t.a[k + q][1][lane];
                const float a[VECTOR] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
                for (int i = 0; i < ROWS; i++)
#pragma unroll
                    for (int j = 0; j < VECTOR; j++) acc[i][j] = __fmaf_rn(q ? b[i].y : b[i].x, a[j], acc[i][j]);
            }
        }
    }
}

/* Starts moving this lane's values of the stored matrix to L2 while the adapter's product is computed. */
static __device__ __forceinline__ void prefetch(const struct source &s, int bits, int64_t at)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"((const char *)s.w.data + (uint64_t)at * bits / 8));
}

static __device__ __forceinline__ float largest(const float x[VECTOR])
{
    float most = 0;
#pragma unroll
    for (int j = 0; j < VECTOR; j++) most = fmaxf(most, fabsf(x[j]));
    return most;
}

/* Eight values of a row; the lanes of a block along the row share their largest magnitude. All lanes call it. */
static __device__ __forceinline__ void quantise(float x[VECTOR], const struct fakequant &f, float top)
{
    float most = 0;
    if (f.block) {
        most = largest(x);
        for (int lanes = f.block / VECTOR / 2; lanes; lanes /= 2)
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    }
    const struct fakequant_scale s = fakequant_scale(&f, top, most);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) x[j] = fakequant_value(&f, &s, fakequant_round(&f, &s, x[j]));
}

/* AMAX: stores the largest magnitudes in p.amax. Otherwise stores the fake-quantised matrices in out, as cuda_dequant
 * does (cuda.h). */
template <typename FORMAT, bool AMAX>
static __global__ void __launch_bounds__(THREADS, 2)
    proj_kernel(bf16 *__restrict__ out, const struct source s, const struct fakequant f, const struct part p,
                int64_t first, const int32_t *__restrict__ ids, const int32_t *__restrict__ offs)
{
    __shared__ struct adapter_tile tile;
    __shared__ float code[16];
    if (!has_rows(offs, first + blockIdx.z)) return;
    const int64_t e = expert_at(ids, first + blockIdx.z), n_in = s.w.n_in, row = (int64_t)blockIdx.y * BAND;
    const int64_t col = (int64_t)blockIdx.x * COLS, c = col + threadIdx.x % 32 * VECTOR;
    if constexpr (FORMAT::coded)
        if (threadIdx.x < 16) code[threadIdx.x] = FORMAT::code(s, threadIdx.x);
    for (int i = 0; i < ROWS; i++) {
        const int64_t r = row + threadIdx.x / 32 * ROWS + i;
        if (r < p.n_row && c < n_in) prefetch(s, FORMAT::bits, e * s.n + (p.row + r) * n_in + c);
    }
    float acc[ROWS][VECTOR] = {};
    adapter_product(acc, tile, p, e, row, col, n_in);
    __syncthreads();
    const float amax = !AMAX && p.amax ? p.amax[e * p.amax_exp] : 0;
    const float top = f.kind == FQ_NVFP4 ? fakequant_global(&f, amax) : amax;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int64_t r = row + threadIdx.x / 32 * ROWS + i;
        if (r >= p.n_row) break; /* the whole warp */
        float x[VECTOR] = {};
        const int64_t at = (p.row + r) * n_in + c;
        if (c < n_in) FORMAT::values8(x, s, code, e, (uint32_t)(at / VECTOR));
#pragma unroll
        for (int j = 0; j < VECTOR && p.r; j++) x[j] = __fadd_rn(x[j], __fmul_rn(p.scale, acc[i][j]));
        if (AMAX) {
#pragma unroll
            for (int j = 0; j < VECTOR; j++) most = max(most, c < n_in ? __float_as_uint(x[j]) & 0x7fffffffu : 0);
        } else {
            quantise(x, f, top);
            if (c < n_in) *(uint4 *)(out + (int64_t)blockIdx.z * s.n + at) = pack8(x);
        }
    }
    if (!AMAX) return;
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) atomicMax((uint32_t *)p.amax + e * p.amax_exp, most);
}

template <bool AMAX>
static void launch(bf16 *out, const struct proj *proj, const struct part &p, int64_t first, int64_t count,
                   const int32_t *ids, const int32_t *offs)
{
    const struct source s = source_of(&proj->w);
    const struct fakequant f = proj->quant.format;
    const dim3 grid(grid_x(ceil_div(s.w.n_in, COLS)), (unsigned)ceil_div(p.n_row, BAND), (unsigned)count);
    MT_REQUIRE(grid.y <= 65535 && grid.z <= 65535, "%lld rows of %lld experts", (long long)p.n_row, (long long)count);
    with_decoder(s.w.format, [&](auto decoder) {
        proj_kernel<decltype(decoder), AMAX><<<grid, THREADS, 0, cuda.stream>>>(out, s, f, p, first, ids, offs);
    });
    CUDA_CHECK_LAUNCH();
}

/* Part i of the rows, with the segment of the adapter that adapts it. */
static struct part part_of(const struct proj *proj, int i)
{
    const struct lora *l = &proj->lora;
    const struct weight *w = &proj->w;
    struct part p = {};
    for (int k = 0; k < i; k++) p.row += proj->quant.part_rows[k];
    p.n_row = proj->quant.part_rows[i];
    p.amax = f32_ptr(proj->quant.amax);
    if (p.amax) p.amax += i;
    p.amax_exp = proj->quant.n_part;
    int64_t b_row = 0;
    for (int s = 0; l->r && l->merged && s < l->n_seg; b_row += l->seg_cols[s++]) {
        if (l->seg_first[s] != p.row) continue;
        MT_REQUIRE(l->seg_cols[s] == p.n_row && l->r % 8 == 0, "an adapter of %lld rows and rank %lld on %lld rows",
                   (long long)l->seg_cols[s], (long long)l->r, (long long)p.n_row);
        p.r = (int)l->r;
        p.scale = l->scale[s];
        p.a = f32_ptr(l->master_a) + s * l->r * w->n_in;
        p.b = f32_ptr(l->master_b) + b_row * l->r;
        p.a_exp = l->r * w->n_in;
        p.b_exp = p.n_row * l->r;
    }
    return p;
}

static void want_vectors(const struct proj *proj)
{
    const struct weight *w = &proj->w;
    MT_REQUIRE(weight_loads8(w), "fake quantisation of rows of %lld %s", (long long)w->n_in,
               weight_format_name(w->format));
}

void cuda_decode_proj(bf16 *out, const struct proj *proj, int64_t first, int64_t count, const int32_t *ids,
                      const int32_t *offs)
{
    if (!proj->quant.format.bits) {
        cuda_dequant(out, &proj->w, first, count, ids, offs);
        return;
    }
    want_vectors(proj);
    if (count)
        for (int i = 0; i < proj->quant.n_part; i++)
            launch<false>(out, proj, part_of(proj, i), first, count, ids, offs);
}

extern "C" void cuda_decode(struct device *dev, struct tensor y, const struct proj *proj, struct tensor offs)
{
    cuda_decode_proj(bf16_ptr(y), proj, 0, proj->w.n_exp, NULL, i32_ptr(offs));
}

extern "C" void cuda_proj_amax(struct device *dev, struct tensor amax, const struct proj *proj)
{
    if (!tensor_count(amax)) return;
    want_vectors(proj);
    CUDA_CHECK(cudaMemsetAsync(amax.data, 0, (size_t)tensor_bytes(amax), cuda.stream));
    for (int i = 0; i < proj->quant.n_part; i++) {
        struct part p = part_of(proj, i);
        p.amax = f32_ptr(amax) + i;
        launch<true>(NULL, proj, p, 0, proj->w.n_exp, NULL, NULL);
    }
}

void cuda_fill_dense(struct tensor dense, const struct proj *proj)
{
    if (dense.data != proj->w.data) cuda_decode_proj(bf16_ptr(dense), proj, 0, 1, NULL, NULL);
}
