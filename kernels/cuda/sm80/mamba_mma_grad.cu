/* mamba_mma_grad.cu - Mamba-2 in chunks (math: mamba_mma.cuh): the gradients of all chunks, after the states.
 *
 * Shapes: dxbc, ddt, dy as in kernels/ops/recurrence.h, bf16.
 * Needs: A and B at most 128.
 * Grid: a block per chunk and group, which loops over the group's items, so that dB and dC are sums in registers. Four
 *   warps have 16 rows j of x, b, dt each; they keep B C^T, the sum of K^T and dB. Four warps have 16 rows i of c and
 *   keep dC. One stage, 88 KiB and 4 KiB of sums, so one block per SM where it has 100 KiB.
 * Bound: memory and its latency. Bytes: the states and gradients, 4 A C T / 64, and 2 T (3 C + 4 G A), C = N B; FLOPs:
 *   2 T (3 * 64 G A + N B (2 * 64 + 3 A)).
 * Numerics: f32; the factors e^(s_C - s) step x and K summed over heads are rounded to bf16 for products. Sums over
 *   rows have a fixed order, and a chunk's sum of ds begins with <S, E>: errors of other chunks do not add up. */
#include "kernels/cuda/sm80/mamba_mma.cuh"

enum { THREADS = 256, HALF = THREADS / 2 };
/* Byte offsets of tiles; K^T is where x was, dB and dC where E and S were. */
enum {
    AT_B = 0,
    AT_C = WIDE_TILE,
    AT_E = 2 * WIDE_TILE,
    AT_S = 3 * WIDE_TILE,
    AT_X = 4 * WIDE_TILE,
    AT_DY = AT_X + ROW_TILE,
    AT_DX = AT_DY + ROW_TILE,
    GRAD_BYTES = AT_DX + ROW_TILE
};

/* Sums of a head, over its items; row: parts of the sum of K_ij <c_i, b_j> over j. */
struct sums {
    float row[4][ROWS], column[ROWS], r[ROWS], q[ROWS], direct[ROWS];
    float across[4], last; /* parts of <S, E>; e^(s_C) */
};

struct place {
    struct chunk c;
    int group, n_item, b_col, c_col, warp, lane; /* warp: of its half of the block */
    char *smem;
};
static __device__ __forceinline__ struct place find_place(const struct mamba_job &job, char *smem)
{
    const int group = (int)(blockIdx.x % job.n_group), b = mamba_b_column(job, group);
    return {find_chunk(job, (int)(blockIdx.x / job.n_group)),
            group,
            job.n_head / job.n_group * items_of(job),
            b,
            b + job.n_group * job.state,
            (int)threadIdx.x % HALF / 32,
            (int)threadIdx.x % 32,
            smem};
}
static __device__ __forceinline__ uint32_t wide_rows(const struct place &p, int at)
{
    return lane_rows<WIDTH>(shared_address(p.smem + at + p.warp * 16 * WIDTH * 2));
}
static __device__ __forceinline__ char *own_rows(const struct place &p, int at)
{
    return p.smem + at + p.warp * 16 * COLS * 2;
}

static __device__ __forceinline__ void grad_load(const struct mamba_job &job, const struct place &p, int i)
{
    const struct item item = find_item(job, i);
    fetch<ROWS, COLS, THREADS>(p.smem + AT_X, job.xbc.at(p.c.row) + item.col, job.xbc.ld, p.c.n, item.width, job.wide);
    fetch<ROWS, COLS, THREADS>(p.smem + AT_DY, job.dy.at(p.c.row) + item.col, job.dy.ld, p.c.n, item.width, job.wide);
    if (!p.c.first)
        fetch<WIDTH, COLS, THREADS>(p.smem + AT_S, state_at(job, job.states, p.c.row, i), COLS, job.state, COLS, true);
    if (!p.c.last)
        fetch<WIDTH, COLS, THREADS>(p.smem + AT_E, state_at(job, job.grads, p.c.row + ROWS, i), COLS, job.state, COLS,
                                    true);
    copy_commit();
}

/* kt [j, i] = <x_j, dy_i> becomes M^T; K^T is added to `sum`, and to the sums of its products with bc = B C^T. */
static __device__ __forceinline__ void weigh(float kt[ROWS / 8][4], float sum[ROWS / 8][4], const float bc[ROWS / 8][4],
                                             const float2 *gates, const struct place &p, struct sums *sums, bool more)
{
    const int row = 16 * p.warp + p.lane / 4;
    const float2 of[2] = {gates[row], gates[row + 8]};
    float column[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        const int i = 8 * n + p.lane % 4 * 2;
        const float s[2] = {gates[i].x, gates[i + 1].x};
        float over[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int distance = i + e % 2 - (row + e / 2 * 8);
            const float w = exp2_fast(s[e % 2] - of[e / 2].x), k = distance >= 0 ? w * of[e / 2].y * kt[n][e] : 0;
            const float product = distance > 0 ? k * bc[n][e] : 0;
            sum[n][e] += k;
            column[e / 2] += product;
            over[e % 2] += product;
            kt[n][e] = distance >= 0 ? w * bc[n][e] : 0;
        }
        for (int step = 4; step < 32; step *= 2)
            for (int e = 0; e < 2; e++) over[e] += __shfl_xor_sync(0xffffffffu, over[e], step);
        for (int e = 0; e < 2 && p.lane < 4; e++)
            sums->row[p.warp][i + e] = (more ? sums->row[p.warp][i + e] : 0) + over[e];
    }
    for (int h = 0; h < 2; h++) {
        column[h] = warp_sum(column[h], 4);
        if (p.lane % 4 == 0) sums->column[row + 8 * h] = (more ? sums->column[row + 8 * h] : 0) + column[h];
    }
}

/* What a lane of four has of rows lane / 4 and + 8 of the warp, added to a sum. */
static __device__ __forceinline__ void keep(float *sum, const float v[2], const struct place &p, bool more)
{
    const int row = 16 * p.warp + p.lane / 4;
    for (int h = 0; h < 2 && p.lane % 4 == 0; h++) sum[row + 8 * h] = (more ? sum[row + 8 * h] : 0) + v[h];
}

/* e^(s_C - s) (B E), and q; zero without E. tail: e^(s_C - s) of this lane's rows. */
static __device__ __forceinline__ void of_state(float dv[1][COLS / 8][4], const float tail[2], const float2 *gates,
                                                const struct place &p, struct sums *sums, bool more)
{
    const int row = 16 * p.warp + p.lane / 4;
    float q[2] = {0, 0};
    if (!p.c.last) {
        add_state<WIDTH>(dv, wide_rows(p, AT_B), lane_rows<COLS>(shared_address(p.smem + AT_E)));
        scale_rows<COLS / 8>(dv[0], tail[0], tail[1]);
        dot_tile<COLS / 8>(q, dv[0], own_rows(p, AT_X));
        q[0] *= gates[row].y, q[1] *= gates[row + 8].y;
    }
    keep(sums->q, q, p, more);
}

/* db += (factor x) E^T, factor of this lane's rows. */
static __device__ __forceinline__ void add_db(float db[1][WIDTH / 8][4], const float factor[2], const struct place &p)
{
    const uint32_t x = lane_rows<COLS>(shared_address(own_rows(p, AT_X))),
                   e = lane_cols<COLS>(shared_address(p.smem + AT_E));
#pragma unroll
    for (int step = 0; step < COLS / 16; step++) {
        uint32_t a[1][4];
        load_rows<1, COLS>(a, x, step);
#pragma unroll
        for (int i = 0; i < 4; i++) a[0][i] = scale2(a[0][i], factor[i % 2], factor[i % 2]);
        dot_step<1, WIDTH / 8, COLS>(db, a, e, step);
    }
}

/* An item, rows of x: dx, and what it adds to K^T and db. */
static __device__ __forceinline__ void rows_in(const struct mamba_job &job, const struct item &item,
                                               const struct place &p, const float2 *gates, struct sums *sums,
                                               const float bc[ROWS / 8][4], float sum[ROWS / 8][4],
                                               float db[1][WIDTH / 8][4])
{
    const int row = 16 * p.warp + p.lane / 4;
    const float step[2] = {gates[row].y, gates[row + 8].y}, end = gates[ROWS - 1].x, d = job.d[item.head];
    const float tail[2] = {exp2_fast(end - gates[row].x), exp2_fast(end - gates[row + 8].x)};
    const float factor[2] = {tail[0] * step[0], tail[1] * step[1]};
    const uint32_t dy = shared_address(p.smem + AT_DY);
    float kt[1][ROWS / 8][4] = {}, dv[1][COLS / 8][4] = {}, direct[2];
    dot_rows<1, ROWS / 8, COLS>(kt, lane_rows<COLS>(shared_address(own_rows(p, AT_X))), lane_cols<COLS>(dy));
    weigh(kt[0], sum, bc, gates, p, sums, item.half > 0);
    of_state(dv, tail, gates, p, sums, item.half > 0);
    add_product<1, ROWS / 8, COLS>(dv, kt, lane_rows<COLS>(dy));
    dot_tile<COLS / 8>(direct, dv[0], own_rows(p, AT_X));
    keep(sums->direct, direct, p, item.half > 0);
    scale_rows<COLS / 8>(dv[0], step[0], step[1]);
    add_tile<COLS / 8>(dv[0], d, own_rows(p, AT_DY));
    put_rows<COLS>(job.dxbc.at(p.c.row + 16 * p.warp) + item.col, job.dxbc.ld, p.c.n - 16 * p.warp, item.width, dv,
                   own_rows(p, AT_DX), job.wide);
    if (!p.c.last) add_db(db, factor, p);
    if (threadIdx.x == 0) sums->last = exp2_fast(end);
}

/* <S, E>, in a part per warp. */
static __device__ __forceinline__ void dot_states(struct sums *sums, const struct place &p, bool more)
{
    float sum = 0;
    for (int i = (int)threadIdx.x % HALF; i < WIDE_TILE / 16 && !p.c.first && !p.c.last; i += HALF) {
        float s[8], e[8];
        unpack8(s, *(const uint4 *)(p.smem + AT_S + 16 * i));
        unpack8(e, *(const uint4 *)(p.smem + AT_E + 16 * i));
#pragma unroll
        for (int k = 0; k < 8; k++) sum += s[k] * e[k];
    }
    sum = warp_sum(sum);
    if (p.lane == 0) sums->across[p.warp] = (more ? sums->across[p.warp] : 0) + sum;
}

/* An item, rows of c: what it adds to dc. */
static __device__ __forceinline__ void rows_out(const struct item &item, const struct place &p, const float2 *gates,
                                                struct sums *sums, float dc[1][WIDTH / 8][4])
{
    const int row = 16 * p.warp + p.lane / 4;
    const float up[2] = {exp2_fast(gates[row].x), exp2_fast(gates[row + 8].x)};
    float r[2] = {0, 0};
    dot_states(sums, p, item.half > 0);
    if (!p.c.first) {
        float of[1][WIDTH / 8][4] = {};
        dot_rows<1, WIDTH / 8, COLS>(of, lane_rows<COLS>(shared_address(own_rows(p, AT_DY))),
                                     lane_cols<COLS>(shared_address(p.smem + AT_S)));
        scale_rows<WIDTH / 8>(of[0], up[0], up[1]);
        dot_tile<WIDTH / 8>(r, of[0], p.smem + AT_C + p.warp * 16 * WIDTH * 2);
#pragma unroll
        for (int k = 0; k < WIDTH / 2; k++) dc[0][k / 4][k % 4] += of[0][k / 4][k % 4];
    }
    keep(sums->r, r, p, item.half > 0);
}

/* The gradient of dt of a head, by one warp. */
static __device__ __forceinline__ void finish_head(const struct mamba_job &job, const struct place &p, int head,
                                                   const struct sums *s)
{
    const float decay = expf(job.a_log[head]);
    float carry = warp_sum(s->q[p.lane] + s->q[p.lane + 32]), slope;
    carry += s->last * ((s->across[0] + s->across[1]) + (s->across[2] + s->across[3]));
    for (int end = ROWS; end > 0; end -= 32) {
        const int i = end - 1 - p.lane;
        const float ds =
            (s->row[0][i] + s->row[1][i]) + (s->row[2][i] + s->row[3][i]) + s->r[i] - s->column[i] - s->q[i];
        const float sum = carry + warp_prefix(ds);
        carry = __shfl_sync(0xffffffffu, sum, 31);
        if (i >= p.c.n) continue;
        mamba_step(&slope, job, p.c.row + i, head);
        job.ddt.at(p.c.row + i)[head] = __float2bfloat16_rn(slope * (s->direct[i] - decay * sum));
    }
}

/* B C^T of the warp's 16 rows of b. */
static __device__ __forceinline__ void load_group(float bc[1][ROWS / 8][4], const struct mamba_job &job,
                                                  const struct place &p)
{
    const bf16 *row = job.xbc.at(p.c.row);
    fetch<ROWS, WIDTH, THREADS>(p.smem + AT_B, row + p.b_col, job.xbc.ld, p.c.n, job.state, job.wide);
    fetch<ROWS, WIDTH, THREADS>(p.smem + AT_C, row + p.c_col, job.xbc.ld, p.c.n, job.state, job.wide);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    if (threadIdx.x < HALF)
        dot_rows<1, ROWS / 8, WIDTH>(bc, wide_rows(p, AT_B), lane_cols<WIDTH>(shared_address(p.smem + AT_C)));
}

/* K^T of all heads, in bf16, rows of 64. */
static __device__ __forceinline__ void store_sum(const float sum[ROWS / 8][4], const struct place &p)
{
    char *tile = own_rows(p, AT_X);
#pragma unroll
    for (int k = 0; k < ROWS / 4; k++)
        *(uint32_t *)(tile + tile_offset<ROWS / 8>(p.lane / 4 + k % 2 * 8, k / 2) + p.lane % 4 * 4) =
            pack2(sum[k / 2][k % 2 * 2], sum[k / 2][k % 2 * 2 + 1]);
}

/* dB += K^T C, or dC += K B; K^T is in shared memory. Both are stored. */
static __device__ __forceinline__ void store_group(const struct mamba_job &job, const struct place &p,
                                                   const float sum[1][ROWS / 8][4], float acc[1][WIDTH / 8][4], bool in)
{
    if (in) {
        add_product<1, ROWS / 8, WIDTH>(acc, sum, lane_rows<WIDTH>(shared_address(p.smem + AT_C)));
    } else {
        const uint32_t kt = lane_cols<ROWS>(shared_address(p.smem + AT_X)) ^ (p.warp << 5);
#pragma unroll
        for (int step = 0; step < ROWS / 16; step++) {
            uint32_t a[1][4];
            load_matrix4_trans(a[0], kt + step * 16 * ROWS * 2);
            add_step<1, WIDTH>(acc, a, lane_rows<WIDTH>(shared_address(p.smem + AT_B)), step);
        }
    }
    put_rows<WIDTH>(job.dxbc.at(p.c.row + 16 * p.warp) + (in ? p.b_col : p.c_col), job.dxbc.ld, p.c.n - 16 * p.warp,
                    job.state, acc, p.smem + (in ? AT_E : AT_S) + p.warp * 16 * WIDTH * 2, job.wide);
}

static __global__ void __launch_bounds__(THREADS) chunk_grads(const struct mamba_job job)
{
    extern __shared__ __align__(1024) char smem[];
    __shared__ __align__(16) float2 gates[ROWS];
    __shared__ struct sums sums;
    const struct place p = find_place(job, smem);
    const bool in = threadIdx.x < HALF;
    float bc[1][ROWS / 8][4] = {}, sum[1][ROWS / 8][4] = {}, acc[1][WIDTH / 8][4] = {}; /* acc: db or dc */
    if (p.c.n <= 0) return;
    load_group(bc, job, p);
    for (int k = 0; k < p.n_item; k++) {
        const struct item item = find_item(job, p.group * p.n_item + k);
        __syncthreads(); /* the item before is complete */
        grad_load(job, p, p.group * p.n_item + k);
        if (threadIdx.x < ROWS) gates[threadIdx.x] = load_gate(job, item.head, p.c.row, p.c.n);
        if (k && item.half == 0 && threadIdx.x / 32 == 7) finish_head(job, p, item.head - 1, &sums);
        copy_wait<0>();
        __syncthreads();
        if (in)
            rows_in(job, item, p, gates, &sums, bc[0], sum[0], acc);
        else
            rows_out(item, p, gates, &sums, acc);
    }
    __syncthreads();
    if (in) store_sum(sum[0], p);
    if (threadIdx.x / 32 == 7) finish_head(job, p, find_item(job, (p.group + 1) * p.n_item - 1).head, &sums);
    __syncthreads();
    store_group(job, p, sum, acc, in);
}

void mamba_grads_mma(const struct mamba_job *job)
{
    allow_shared<chunk_grads>(GRAD_BYTES);
    chunk_grads<<<grid_x(chunk_slots(job) * job->n_group), THREADS, GRAD_BYTES, cuda.stream>>>(*job);
    CUDA_CHECK_LAUNCH();
}
