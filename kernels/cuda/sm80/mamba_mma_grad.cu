/* mamba_mma_grad.cu - Mamba-2 in chunks (math: mamba_mma.cuh): the gradients of all chunks, after the states.
 *
 * Shapes: dxbc, ddt, dy as in kernels/ops/recurrence.h, bf16.
 * Needs: A and B at most 128.
 * Grid: a block per chunk and group, which loops over the group's items, so that dB and dC are sums in registers. Four
 *   warps have 16 rows of x each; they hold B C^T and the sum of K^T, and write dx. Four other warps have 16 rows of b
 *   and c each and hold dB and dC. Two stages, 136 KiB, where a block may have them, else one, 88 KiB; and 5 KiB of
 *   sums. One block per SM.
 * Bound: memory and its latency. Bytes: the states and gradients, 4 A C T / 64, and 2 T (3 C + 4 G A), C = N B; FLOPs:
 *   2 T (3 * 64 G A + N B (2 * 64 + 3 A)).
 * Numerics: f32; the factors e^(s_C - s) step x and K summed over heads are rounded to bf16 for products. Sums over
 *   rows have a fixed order, and a chunk's sum of ds begins with <S, E>: errors of other chunks do not add up. */
#include "kernels/cuda/sm80/mamba_mma.cuh"

enum { THREADS = 256, HALF = THREADS / 2 };
/* Byte offsets: AT_ in shared memory, IN_ in a stage, which holds the tiles of one item. After the last item, K^T, dB
 * and dC overwrite x, E and S of the first stage. */
enum {
    AT_B = 0,
    AT_C = WIDE_TILE,
    AT_DX = 2 * WIDE_TILE,
    AT_STAGES = AT_DX + ROW_TILE,
    IN_E = 0,
    IN_S = WIDE_TILE,
    IN_X = 2 * WIDE_TILE,
    IN_DY = IN_X + ROW_TILE,
    STAGE_BYTES = IN_DY + ROW_TILE
};

/* Sums of a head, over its items; row: parts of the sum of K_ij <c_i, b_j> over j; column: over i; direct: <dV_i, x_i>.
 */
struct sums {
    float row[4][ROWS], column[ROWS], r[ROWS], q[ROWS], direct[ROWS];
    float across[4], last; /* parts of <S, E>; e^(s_C) */
};

/* A barrier of all warps of the block, which may be in different places of the code. */
static __device__ __forceinline__ void meet(void)
{
    asm volatile("barrier.sync 1, %0;" ::"n"((int)THREADS) : "memory");
}

struct place {
    struct chunk c;
    int group, n_item, b_col, c_col, warp, lane; /* warp: of its half of the block */
    char *smem, *stage;
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
            smem,
            smem + AT_STAGES};
}
static __device__ __forceinline__ uint32_t wide_rows(const struct place &p, int at)
{
    return lane_rows<WIDTH>(shared_address(p.smem + at + p.warp * 16 * WIDTH * 2));
}
static __device__ __forceinline__ char *own_rows(const struct place &p, int at)
{
    return p.stage + at + p.warp * 16 * COLS * 2;
}

static __device__ __forceinline__ void grad_load(const struct mamba_job &job, const struct place &p, int i)
{
    const struct item item = find_item(job, i);
    fetch<ROWS, COLS, THREADS>(p.stage + IN_X, job.xbc.at(p.c.row) + item.col, job.xbc.ld, p.c.n, item.width, job.wide);
    fetch<ROWS, COLS, THREADS>(p.stage + IN_DY, job.dy.at(p.c.row) + item.col, job.dy.ld, p.c.n, item.width, job.wide);
    if (p.c.before >= 0)
        fetch<WIDTH, COLS, THREADS>(p.stage + IN_S, state_at(job, job.states, p.c.before, i), COLS, job.state, COLS,
                                    true);
    if (p.c.after >= 0)
        fetch<WIDTH, COLS, THREADS>(p.stage + IN_E, state_at(job, job.grads, p.c.after, i), COLS, job.state, COLS,
                                    true);
    copy_commit();
}

/* kt [j, i] = <x_j, dy_i> becomes M^T. Adds K^T to `sum`. Adds the row and column sums of K^T times bc = B C^T,
 * elementwise and without the diagonal, to `sums`. */
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

/* sum = v, or with `more` += v, for rows lane / 4 and lane / 4 + 8 of the warp. The first of the four lanes of a row
 * stores it. */
static __device__ __forceinline__ void keep(float *sum, const float v[2], const struct place &p, bool more)
{
    const int row = 16 * p.warp + p.lane / 4;
    for (int h = 0; h < 2 && p.lane % 4 == 0; h++) sum[row + 8 * h] = (more ? sum[row + 8 * h] : 0) + v[h];
}

/* e^(s_C - s) of a row */
static __device__ __forceinline__ float tail_of(const float2 *gates, int row)
{
    return exp2_fast(gates[ROWS - 1].x - gates[row].x);
}

/* e^(s_C - s) (B E), and q; zero without E. */
static __device__ __forceinline__ void of_state(float dv[1][COLS / 8][4], const float2 *gates, const struct place &p,
                                                struct sums *sums, bool more)
{
    const int row = 16 * p.warp + p.lane / 4;
    float q[2] = {0, 0};
    if (p.c.after >= 0) {
        add_state<WIDTH>(dv, wide_rows(p, AT_B), lane_rows<COLS>(shared_address(p.stage + IN_E)));
        scale_rows<COLS / 8>(dv[0], tail_of(gates, row), tail_of(gates, row + 8));
        dot_tile<COLS / 8>(q, dv[0], own_rows(p, IN_X));
        q[0] *= gates[row].y, q[1] *= gates[row + 8].y;
    }
    keep(sums->q, q, p, more);
}

/* For an item and this warp's rows of x: writes dx, adds to the sum of K^T. */
static __device__ __forceinline__ void rows_in(const struct mamba_job &job, const struct item &item,
                                               const struct place &p, const float2 *gates, struct sums *sums,
                                               const float bc[ROWS / 8][4], float sum[ROWS / 8][4])
{
    const int row = 16 * p.warp + p.lane / 4;
    const uint32_t dy = shared_address(p.stage + IN_DY);
    float kt[1][ROWS / 8][4] = {}, dv[1][COLS / 8][4] = {}, direct[2];
    dot_rows<1, ROWS / 8, COLS>(kt, lane_rows<COLS>(shared_address(own_rows(p, IN_X))), lane_cols<COLS>(dy));
    weigh(kt[0], sum, bc, gates, p, sums, item.half > 0);
    of_state(dv, gates, p, sums, item.half > 0);
    add_product<1, ROWS / 8, COLS>(dv, kt, lane_rows<COLS>(dy));
    dot_tile<COLS / 8>(direct, dv[0], own_rows(p, IN_X));
    keep(sums->direct, direct, p, item.half > 0);
    scale_rows<COLS / 8>(dv[0], gates[row].y, gates[row + 8].y);
    add_tile<COLS / 8>(dv[0], job.d[item.head], own_rows(p, IN_DY));
    put_rows<COLS>(job.dxbc.at(p.c.row + 16 * p.warp) + item.col, job.dxbc.ld, p.c.n - 16 * p.warp, item.width, dv,
                   p.smem + AT_DX + p.warp * 16 * COLS * 2, job.wide);
    if (threadIdx.x == 0) sums->last = exp2_fast(gates[ROWS - 1].x);
}

/* db += (e^(s_C - s) step x) E^T */
static __device__ __forceinline__ void add_db(float db[1][WIDTH / 8][4], const float2 *gates, const struct place &p)
{
    const int row = 16 * p.warp + p.lane / 4;
    const uint32_t x = lane_rows<COLS>(shared_address(own_rows(p, IN_X))),
                   e = lane_cols<COLS>(shared_address(p.stage + IN_E));
    float factor[2];
    for (int h = 0; h < 2; h++) factor[h] = tail_of(gates, row + 8 * h) * gates[row + 8 * h].y;
#pragma unroll
    for (int step = 0; step < COLS / 16; step++) {
        uint32_t a[1][4];
        load_rows<1, COLS>(a, x, step);
#pragma unroll
        for (int i = 0; i < 4; i++) a[0][i] = scale2(a[0][i], factor[i % 2], factor[i % 2]);
        dot_step<1, WIDTH / 8, COLS>(db, a, e, step);
    }
}

/* <S, E>, in a part per warp. */
static __device__ __forceinline__ void dot_states(struct sums *sums, const struct place &p, bool more)
{
    float sum = 0;
    for (int i = (int)threadIdx.x % HALF; i < WIDE_TILE / 16 && p.c.before >= 0 && p.c.after >= 0; i += HALF) {
        float s[8], e[8];
        unpack8(s, *(const uint4 *)(p.stage + IN_S + 16 * i));
        unpack8(e, *(const uint4 *)(p.stage + IN_E + 16 * i));
#pragma unroll
        for (int k = 0; k < 8; k++) sum += s[k] * e[k];
    }
    sum = warp_sum(sum);
    if (p.lane == 0) sums->across[p.warp] = (more ? sums->across[p.warp] : 0) + sum;
}

/* For an item and this warp's rows of b and c: adds to db and dc. */
static __device__ __forceinline__ void rows_out(const struct item &item, const struct place &p, const float2 *gates,
                                                struct sums *sums, float db[1][WIDTH / 8][4], float dc[1][WIDTH / 8][4])
{
    const int row = 16 * p.warp + p.lane / 4;
    const float up[2] = {exp2_fast(gates[row].x), exp2_fast(gates[row + 8].x)};
    float r[2] = {0, 0};
    dot_states(sums, p, item.half > 0);
    if (p.c.after >= 0) add_db(db, gates, p);
    if (p.c.before >= 0) {
        float of[1][WIDTH / 8][4] = {};
        dot_rows<1, WIDTH / 8, COLS>(of, lane_rows<COLS>(shared_address(own_rows(p, IN_DY))),
                                     lane_cols<COLS>(shared_address(p.stage + IN_S)));
        scale_rows<WIDTH / 8>(of[0], up[0], up[1]);
        dot_tile<WIDTH / 8>(r, of[0], p.smem + AT_C + p.warp * 16 * WIDTH * 2);
#pragma unroll
        for (int k = 0; k < WIDTH / 2; k++) dc[0][k / 4][k % 4] += of[0][k / 4][k % 4];
    }
    keep(sums->r, r, p, item.half > 0);
}

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

static __device__ __forceinline__ void load_group(const struct mamba_job &job, const struct place &p)
{
    const bf16 *row = job.xbc.at(p.c.row);
    fetch<ROWS, WIDTH, THREADS>(p.smem + AT_B, row + p.b_col, job.xbc.ld, p.c.n, job.state, job.wide);
    fetch<ROWS, WIDTH, THREADS>(p.smem + AT_C, row + p.c_col, job.xbc.ld, p.c.n, job.state, job.wide);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
}

/* K^T of all heads, in bf16, rows of 64. */
static __device__ __forceinline__ void store_sum(const float sum[ROWS / 8][4], const struct place &p)
{
    char *tile = own_rows(p, IN_X);
#pragma unroll
    for (int k = 0; k < ROWS / 4; k++)
        *(uint32_t *)(tile + tile_offset<ROWS / 8>(p.lane / 4 + k % 2 * 8, k / 2) + p.lane % 4 * 4) =
            pack2(sum[k / 2][k % 2 * 2], sum[k / 2][k % 2 * 2 + 1]);
}

/* dB += K^T C and dC += K B, with K^T in shared memory; stores both. */
static __device__ __forceinline__ void store_group(const struct mamba_job &job, const struct place &p,
                                                   float db[1][WIDTH / 8][4], float dc[1][WIDTH / 8][4])
{
    const uint32_t kt = lane_cols<ROWS>(shared_address(p.stage + IN_X)) ^ (p.warp << 5);
    bf16 *to = job.dxbc.at(p.c.row + 16 * p.warp);
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        uint32_t a[1][4];
        load_rows<1, ROWS>(a, lane_rows<ROWS>(shared_address(own_rows(p, IN_X))), step);
        add_step<1, WIDTH>(db, a, lane_rows<WIDTH>(shared_address(p.smem + AT_C)), step);
        load_matrix4_trans(a[0], kt + step * 16 * ROWS * 2);
        add_step<1, WIDTH>(dc, a, lane_rows<WIDTH>(shared_address(p.smem + AT_B)), step);
    }
    put_rows<WIDTH>(to + p.b_col, job.dxbc.ld, p.c.n - 16 * p.warp, job.state, db,
                    p.stage + IN_E + p.warp * 16 * WIDTH * 2, job.wide);
    put_rows<WIDTH>(to + p.c_col, job.dxbc.ld, p.c.n - 16 * p.warp, job.state, dc,
                    p.stage + IN_S + p.warp * 16 * WIDTH * 2, job.wide);
}

/* Waits for the k-th item of the group in `stage`, and begins to load the next one. */
static __device__ __forceinline__ void next_item(const struct mamba_job &job, struct place *p, int k, int n_stage)
{
    p->stage = p->smem + AT_STAGES + k % n_stage * STAGE_BYTES;
    if (n_stage == 1) {
        meet(); /* the item before is complete */
        grad_load(job, *p, p->group * p->n_item + k);
    }
    copy_wait<0>();
    meet();
    if (n_stage == 1 || k + 1 == p->n_item) return;
    struct place next = *p;
    next.stage = p->smem + AT_STAGES + (k + 1) % n_stage * STAGE_BYTES;
    grad_load(job, next, p->group * p->n_item + k + 1);
}

/* Calls compute(place, item, gates, sums) for each item, between barriers of the block. sums: for two heads in turn, so
 * that one warp finishes those of a head while the others compute the next head. Returns when all results are in shared
 * memory. */
template <typename COMPUTE>
static __device__ __forceinline__ void each_item(const struct mamba_job &job, struct place p, int n_stage,
                                                 float2 (*gates)[ROWS], struct sums *sums, const COMPUTE &compute)
{
    const int first = p.group * p.n_item;
    const bool finishes = threadIdx.x / 32 == THREADS / 32 - 1;
    int head = 0;
    for (int k = 0; k < p.n_item; k++) {
        const struct item item = find_item(job, first + k);
        if (threadIdx.x < ROWS) gates[k % 2][threadIdx.x] = load_gate(job, item.head, p.c.row, p.c.n);
        next_item(job, &p, k, n_stage);
        if (k && item.half == 0 && finishes) finish_head(job, p, head, &sums[head % 2]);
        head = item.head;
        compute(p, item, gates[k % 2], &sums[head % 2]);
    }
    meet();
    if (finishes) finish_head(job, p, head, &sums[head % 2]);
}

static __global__ void __launch_bounds__(THREADS) chunk_grads(const struct mamba_job job, int n_stage)
{
    extern __shared__ __align__(1024) char smem[];
    __shared__ __align__(16) float2 gates[2][ROWS];
    __shared__ struct sums sums[2];
    const struct place p = find_place(job, smem);
    if (p.c.n <= 0) return;
    if (n_stage > 1) grad_load(job, p, p.group * p.n_item);
    load_group(job, p);
    if (threadIdx.x < HALF) {
        float bc[1][ROWS / 8][4] = {}, sum[ROWS / 8][4] = {};
        dot_rows<1, ROWS / 8, WIDTH>(bc, wide_rows(p, AT_B), lane_cols<WIDTH>(shared_address(p.smem + AT_C)));
        each_item(job, p, n_stage, gates, sums,
                  [&](const struct place &at, const struct item &item, const float2 *g, struct sums *to) {
                      rows_in(job, item, at, g, to, bc[0], sum);
                  });
        store_sum(sum, p);
        meet();
    } else {
        float db[1][WIDTH / 8][4] = {}, dc[1][WIDTH / 8][4] = {};
        each_item(job, p, n_stage, gates, sums,
                  [&](const struct place &at, const struct item &item, const float2 *g, struct sums *to) {
                      rows_out(item, at, g, to, db, dc);
                  });
        meet();
        store_group(job, p, db, dc);
    }
}

void mamba_grads_mma(const struct mamba_job *job)
{
    static int n_stage, bytes;
    if (!n_stage) {
        CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda.index));
        n_stage = bytes >= AT_STAGES + 2 * STAGE_BYTES + 8192 ? 2 : 1;
    }
    bytes = AT_STAGES + n_stage * STAGE_BYTES;
    allow_shared<chunk_grads>(bytes);
    chunk_grads<<<grid_x(chunk_slots(job) * job->n_group), THREADS, bytes, cuda.stream>>>(*job, n_stage);
    CUDA_CHECK_LAUNCH();
}
