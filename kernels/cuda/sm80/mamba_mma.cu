/* mamba_mma.cu - Mamba-2 in chunks (math: mamba_mma.cuh): steps, states and outputs; the ops.
 *
 * Shapes: as in kernels/ops/recurrence.h, bf16; gates [N, T] f32 pairs; states [T / 64, items, A, 64] bf16 (items:
 *   mamba_mma.cuh). T may be 0.
 * Needs: A and B at most 128. Columns that are not aligned to 16 bytes are slower.
 * Grid: gates: a warp per chunk and head. states: a block of 4 warps per segment, item and direction, a launch for each
 *   level of segments; a warp has 32 rows of the state in 64 registers; three cp.async stages, 88 KiB. outputs: a block
 *   of 4 warps per chunk and group, which computes C B^T once and loops over the group's items with two stages; 72 KiB,
 *   so three blocks per SM.
 * Bound: memory. With N B = C columns, forward: 2 T (2 C + 2 G A) bytes for states and outputs each, and 4 A C T / 64
 *   for the states, written and read; FLOPs: 2 T (64 G A + N B (64 + 2 A)).
 * Numerics: f32 sums and states; the states are rounded to bf16 for memory and products. Fixed order. Rows beyond the
 *   end of a sequence are loaded as zeros, so NaN and infinity stay in their sequence, and packed sequences have the
 *   bits of each alone. */
#include "kernels/cuda/sm80/mamba_mma.cuh"

/* ---- gates ---- */

static __global__ void __launch_bounds__(TILE_THREADS) chunk_gates(const struct mamba_job job)
{
    const int64_t at = (int64_t)blockIdx.x * (TILE_THREADS / 32) + threadIdx.x / 32;
    const int head = (int)(at % job.n_head);
    if (at / job.n_head >= job.n_tok / ROWS + job.n_seq) return;
    const struct chunk c = find_chunk(job, (int)(at / job.n_head));
    const float decay = -LOG2_E * expf(job.a_log[head]);
    float before = 0, slope;
    for (int i = (int)threadIdx.x % 32; i - (int)threadIdx.x % 32 < c.n; i += 32) {
        const float step = i < c.n ? mamba_step(&slope, job, c.row + i, head) : 0;
        const float sum = before + warp_prefix(decay * step);
        before = __shfl_sync(0xffffffffu, sum, 31);
        if (i < c.n) job.gates[head * job.n_tok + c.row + i] = make_float2(sum, step);
    }
}

/* ---- states ---- */

enum { STAGES = 3, SCAN_STAGE = WIDE_TILE + ROW_TILE, SCAN_BYTES = STAGES * SCAN_STAGE + WIDE_TILE };

/* The scan of a segment and an item in one direction: n_step chunks, without the last one if no other segment reads the
 * state after it. It begins with the sum of n_from states, from segment slot `from` on; the state after the last chunk
 * goes to segment slot `to`. */
struct scan {
    int64_t first;
    int len, n_chunk, n_step, from, n_from, to, col; /* col: of b or c */
    struct item item;
    bool back;
};
static __device__ __forceinline__ struct scan find_scan(const struct mamba_job &job)
{
    const int64_t first = job.cu[blockIdx.x];
    const int len = (int)(job.cu[blockIdx.x + 1] - first);
    const struct item item = find_item(job, (int)blockIdx.y);
    const bool back = blockIdx.z;
    const int b = mamba_b_column(job, item.head / (job.n_head / job.n_group)), n_chunk = (len + ROWS - 1) / ROWS;
    const int in = link_of(job, (int)blockIdx.x, SEGMENT_IN), out = link_of(job, (int)blockIdx.x, SEGMENT_OUT);
    const int to = back ? link_of(job, (int)blockIdx.x, SEGMENT_OWN) : out;
    const int n_from = back ? max(0, link_of(job, (int)blockIdx.x, SEGMENT_N_OUT)) : in >= 0;
    const int col = b + (back ? job.n_group * job.state : 0);
    return {first, len, n_chunk, n_chunk - (to < 0), back ? out : in, n_from, to, col, item, back};
}
/* The slot of the state that the k-th chunk of the scan leaves. */
static __device__ __forceinline__ int scan_slot(const struct mamba_job &job, const struct scan &s, int64_t row, int k)
{
    return k + 1 == s.n_chunk ? segment_slot(job, s.to) : chunk_slot(row + (s.back ? 0 : ROWS));
}
static __device__ __forceinline__ int64_t scan_row(const struct scan &s, int k)
{
    return s.first + (s.back ? s.n_chunk - 1 - k : k) * ROWS;
}
static __device__ __forceinline__ int scan_rows(const struct scan &s, int k)
{
    return min((int)ROWS, (int)(s.first + s.len - scan_row(s, k)));
}

/* b and x, or c and dy, of the k-th chunk. */
static __device__ __forceinline__ void scan_load(const struct mamba_job &job, const struct scan &s, char *stages, int k)
{
    if (k < s.n_step) {
        const int64_t row = scan_row(s, k);
        const row_view<> &values = s.back ? job.dy : job.xbc;
        char *stage = stages + k % STAGES * SCAN_STAGE;
        fetch<ROWS, WIDTH>(stage, job.xbc.at(row) + s.col, job.xbc.ld, scan_rows(s, k), job.state, job.wide);
        fetch<ROWS, COLS>(stage + WIDE_TILE, values.at(row) + s.item.col, values.ld, scan_rows(s, k), s.item.width,
                          job.wide);
    }
    copy_commit();
}
/* The gate of this thread's row, and of the last row, of the k-th chunk. */
static __device__ __forceinline__ float3 scan_gate(const struct mamba_job &job, const struct scan &s, int k)
{
    if (k >= s.n_step || threadIdx.x >= ROWS) return make_float3(0, 0, 0);
    const int n = scan_rows(s, k);
    const float2 gate = load_gate(job, s.item.head, scan_row(s, k), n);
    return make_float3(gate.x, gate.y, job.gates[s.item.head * job.n_tok + scan_row(s, k) + n - 1].x);
}

/* acc = the state after a chunk, given the state before. factor: a factor per row; tile: b and x, or c and dy. */
static __device__ __forceinline__ void scan_update(float acc[2][COLS / 8][4], const char *tile, const float *factor,
                                                   float decay)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const uint32_t in = lane_cols<WIDTH>(shared_address(tile)),
                   values = lane_rows<COLS>(shared_address(tile + WIDE_TILE));
#pragma unroll
    for (int m = 0; m < 2; m++) scale_rows<COLS / 8>(acc[m], decay, decay);
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        const float2 f = *(const float2 *)(factor + 16 * step + lane % 4 * 2),
                     g = *(const float2 *)(factor + 16 * step + lane % 4 * 2 + 8);
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            load_matrix4_trans(a[m], (in ^ ((2 * warp + m) << 5)) + step * 16 * WIDTH * 2);
            a[m][0] = scale2(a[m][0], f.x, f.y), a[m][1] = scale2(a[m][1], f.x, f.y);
            a[m][2] = scale2(a[m][2], g.x, g.y), a[m][3] = scale2(a[m][3], g.x, g.y);
        }
        add_step<2, COLS>(acc, a, values, step);
    }
}

/* acc = the sum of the states with which the scan begins. The backward stores it in slot s.from, where the gradients of
 * the segment's last chunk read it. */
static __device__ __forceinline__ void scan_begin(float acc[2][COLS / 8][4], const struct mamba_job &job,
                                                  const struct scan &s, bf16 *states)
{
    const int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * 32 + lane / 4, col = lane % 4 * 2;
    for (int i = s.n_from - 1; i >= 0; i--) {
        bf16 *state = state_at(job, states, segment_slot(job, s.from + i), (int)blockIdx.y);
#pragma unroll
        for (int k = 0; k < 4 * COLS / 8; k++) {
            float *of = &acc[k % 2][k / 4][k / 2 % 2 * 2];
            const int row = first + k % 2 * 16 + k / 2 % 2 * 8;
            uint32_t *w = (uint32_t *)(state + row * COLS + k / 4 * 8 + col);
            if (row >= job.state) continue;
            of[0] += low_half(*w), of[1] += high_half(*w);
            if (s.back && i == 0) *w = pack2(of[0], of[1]);
        }
    }
}

/* level: SEGMENT_LEVEL of forward scans; backward scans begin with the last level */
static __global__ void __launch_bounds__(TILE_THREADS, 2) chunk_states(const struct mamba_job job, int level)
{
    extern __shared__ __align__(1024) char smem[];
    __shared__ __align__(16) float factors[2][ROWS];
    __shared__ float decays[2];
    const struct scan s = find_scan(job);
    const int warp = (int)threadIdx.x / 32;
    bf16 *states = s.back ? job.grads : job.states;
    float acc[2][COLS / 8][4] = {};
    if (job.links) {
        if (link_of(job, (int)blockIdx.x, SEGMENT_LEVEL) != (s.back ? job.n_level - 1 - level : level)) return;
        scan_begin(acc, job, s, states);
    }
    for (int k = 0; k < STAGES - 1; k++) scan_load(job, s, smem, k);
    float3 gate = scan_gate(job, s, 0);
    for (int k = 0; k < s.n_step; k++) {
        float *factor = factors[k % 2];
        if (threadIdx.x < ROWS) factor[threadIdx.x] = s.back ? exp2_fast(gate.x) : exp2_fast(gate.z - gate.x) * gate.y;
        if (threadIdx.x == 0) decays[k % 2] = exp2_fast(gate.z);
        copy_wait<STAGES - 2>();
        __syncthreads();
        scan_load(job, s, smem, k + STAGES - 1);
        gate = scan_gate(job, s, k + 1);
        scan_update(acc, smem + k % STAGES * SCAN_STAGE, factor, decays[k % 2]);
        const int slot = scan_slot(job, s, scan_row(s, k), k);
        bf16 *to = state_at(job, states, slot, (int)blockIdx.y) + 32 * warp * COLS;
        store_rows<2, COLS>(to, COLS, job.state - 32 * warp, COLS, acc, 1, smem + STAGES * SCAN_STAGE + warp * 4096);
    }
}

void mamba_states_mma(const struct mamba_job *job, bool back)
{
    const unsigned items = (unsigned)(job->n_head * ceil_div(job->head_dim, COLS));
    chunk_gates<<<grid_x(ceil_div(chunk_slots(job) * job->n_head, TILE_THREADS / 32)), TILE_THREADS, 0, cuda.stream>>>(
        *job);
    CUDA_CHECK_LAUNCH();
    allow_shared<chunk_states>(SCAN_BYTES);
    for (int level = 0; level < job->n_level; level++) {
        const dim3 grid(grid_x(job->n_seq), items, back ? 2 : 1);
        chunk_states<<<grid, TILE_THREADS, SCAN_BYTES, cuda.stream>>>(*job, level);
        CUDA_CHECK_LAUNCH();
    }
}

/* ---- outputs ---- */

/* shared memory: c; two states, the second in place of b, which is read earlier; two x; y before it is stored */
enum { OUT_STATE = WIDE_TILE, OUT_X = 3 * WIDE_TILE, OUT_Y = OUT_X + 2 * ROW_TILE, OUT_BYTES = OUT_Y + ROW_TILE };

/* The k-th item of a group: x, and the state before the chunk. */
static __device__ __forceinline__ void output_load(const struct mamba_job &job, const struct chunk &c, char *smem,
                                                   int i, int stage)
{
    const struct item item = find_item(job, i);
    fetch<ROWS, COLS>(smem + OUT_X + stage * ROW_TILE, job.xbc.at(c.row) + item.col, job.xbc.ld, c.n, item.width,
                      job.wide);
    if (c.before >= 0)
        fetch<WIDTH, COLS>(smem + OUT_STATE + stage * WIDE_TILE, state_at(job, job.states, c.before, i), COLS,
                           job.state, COLS, true);
    copy_commit();
}

/* Y of a warp's 16 rows. products: C B^T of these rows; gates: of the chunk. */
static __device__ __forceinline__ void output_item(float y[1][COLS / 8][4], const float products[ROWS / 8][4],
                                                   const float2 *gates, const char *smem, int stage, bool first,
                                                   float d)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, row = 16 * warp + lane / 4;
    const char *x = smem + OUT_X + stage * ROW_TILE;
    const float s[2] = {gates[row].x, gates[row + 8].x};
    float m[1][ROWS / 8][4];
    if (!first) {
        add_state<WIDTH>(y, lane_rows<WIDTH>(shared_address(smem + warp * 16 * WIDTH * 2)),
                         lane_rows<COLS>(shared_address(smem + OUT_STATE + stage * WIDE_TILE)));
        scale_rows<COLS / 8>(y[0], exp2_fast(s[0]), exp2_fast(s[1]));
    }
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        const int col = 8 * n + lane % 4 * 2;
        const float4 of = *(const float4 *)(gates + col); /* of two adjacent columns */
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float w = exp2_fast(s[e / 2] - (e % 2 ? of.z : of.x)) * (e % 2 ? of.w : of.y);
            m[0][n][e] = col + e % 2 <= row + e / 2 * 8 ? products[n][e] * w : 0;
        }
    }
    add_product<1, ROWS / 8, COLS>(y, m, lane_rows<COLS>(shared_address(x)));
    add_tile<COLS / 8>(y[0], d, x + warp * 16 * COLS * 2);
}

/* C B^T of a warp's 16 rows. */
static __device__ __forceinline__ void output_products(float products[1][ROWS / 8][4], const char *smem)
{
    copy_wait<0>();
    __syncthreads();
    dot_rows<1, ROWS / 8, WIDTH>(products, lane_rows<WIDTH>(shared_address(smem + threadIdx.x / 32 * 16 * WIDTH * 2)),
                                 lane_cols<WIDTH>(shared_address(smem + OUT_STATE + WIDE_TILE)));
}

static __global__ void __launch_bounds__(TILE_THREADS, 3) chunk_outputs(const struct mamba_job job)
{
    extern __shared__ __align__(1024) char smem[];
    __shared__ __align__(16) float2 gates[2][ROWS];
    const struct chunk c = find_chunk(job, (int)(blockIdx.x / job.n_group));
    const int group = (int)(blockIdx.x % job.n_group), n_item = job.n_head / job.n_group * items_of(job);
    const int first = group * n_item, b = mamba_b_column(job, group), warp = (int)threadIdx.x / 32;
    if (c.n <= 0) return;
    const bf16 *row = job.xbc.at(c.row);
    fetch<ROWS, WIDTH>(smem, row + b + job.n_group * job.state, job.xbc.ld, c.n, job.state, job.wide);
    fetch<ROWS, WIDTH>(smem + OUT_STATE + WIDE_TILE, row + b, job.xbc.ld, c.n, job.state, job.wide);
    output_load(job, c, smem, first, 0);
    float2 gate = {0, 0};
    if (threadIdx.x < ROWS) gate = load_gate(job, find_item(job, first).head, c.row, c.n);
    float products[1][ROWS / 8][4] = {};
    output_products(products, smem);
    for (int k = 0; k < n_item; k++) {
        const struct item item = find_item(job, first + k);
        if (threadIdx.x < ROWS) gates[k % 2][threadIdx.x] = gate;
        copy_wait<0>();
        __syncthreads();
        if (k + 1 < n_item) {
            output_load(job, c, smem, first + k + 1, (k + 1) % 2);
            if (threadIdx.x < ROWS) gate = load_gate(job, find_item(job, first + k + 1).head, c.row, c.n);
        }
        float y[1][COLS / 8][4] = {};
        output_item(y, products[0], gates[k % 2], smem, k % 2, c.before < 0, job.d[item.head]);
        put_rows<COLS>(job.y.at(c.row + 16 * warp) + item.col, job.y.ld, c.n - 16 * warp, item.width, y,
                       smem + OUT_Y + warp * 16 * COLS * 2, job.wide);
    }
}

/* ---- ops ---- */

/* Whether the columns of heads and groups are aligned in the rows of x. */
static bool aligned(struct tensor x, const struct mamba *m)
{
    return rows_aligned(x) && m->head_dim % 8 == 0 && m->state % 8 == 0;
}

extern "C" void cuda_mamba_fwd(struct device *dev, struct tensor y, struct tensor xbc, struct tensor dt,
                               const struct seqs *seqs, const struct mamba *m)
{
    const struct scratch_mamba s = scratch_mamba(dev, xbc, seqs, m, false);
    if (xbc.shape[0] == 0) return;
    struct mamba_job job = mamba_job_of(xbc, dt, seqs, m);
    job.y = rows_of(y);
    job.gates = (float2 *)s.gates.data, job.states = bf16_ptr(s.states);
    job.wide = aligned(xbc, m) && aligned(y, m);
    mamba_states_mma(&job, false);
    allow_shared<chunk_outputs>(OUT_BYTES);
    chunk_outputs<<<grid_x(chunk_slots(&job) * m->n_group), TILE_THREADS, OUT_BYTES, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_mamba_bwd(struct device *dev, struct tensor dxbc, struct tensor ddt, struct tensor dy,
                               struct tensor xbc, struct tensor dt, const struct seqs *seqs, const struct mamba *m)
{
    const struct scratch_mamba s = scratch_mamba(dev, xbc, seqs, m, true);
    if (xbc.shape[0] == 0) return;
    struct mamba_job job = mamba_job_of(xbc, dt, seqs, m);
    job.dy = rows_of(dy), job.dxbc = rows_of(dxbc), job.ddt = rows_of(ddt);
    job.gates = (float2 *)s.gates.data, job.states = bf16_ptr(s.states), job.grads = bf16_ptr(s.grads);
    job.wide = aligned(xbc, m) && aligned(dy, m) && aligned(dxbc, m);
    mamba_states_mma(&job, true);
    mamba_grads_mma(&job);
}
