/* moe_loop.cu - the experts as a host loop over experts, the baseline of `moetrain bench step --path`. Every expert
 * runs as a dense layer (linear.cu): each pass gathers its rows, decodes its matrix, computes the products with
 * cuBLASLt and adds the results to those of the other experts.
 *
 *   loop     selects the rows of each expert among all slots. The host reads their number, so it waits for the GPU once
 *            per expert, layer and pass. Experts without rows are decoded too.
 *   presort  reads the row offsets of all experts in the sorted order, and waits once per layer and pass. Experts
 *            without rows are skipped.
 *
 * Both compute the same products in the same order, so their results are bitwise equal. These ops wait and read back,
 * which kernels/ops/ops.h forbids; they follow the rest of its contract. No configuration can choose them.
 * Three properties favour the loop: the selected rows of a layer serve all its ops until another layer runs, the rows
 * of an expert stay contiguous between ops, and there is no interpreter.
 *
 * Math: kernels/ops/ops.h. dy = dout of an expert's rows, without the gate; g = dy W + LoRA. The adapter's gradients
 *   use gate * h and gate * ha where linear.cu has x and xa.
 * Needs: as linear.cu; E <= 512.
 * Grid: one warp per row, 8 per block; select_kernel: 1024 threads, one slot each, which count the earlier slots of the
 *   expert. Registers on sm_90a, no spills: 27 .. 62; shared memory: 256 bytes in select_kernel.
 * Numerics: as linear.cu, but g stays in f32; sums over a token's experts in f32, in ascending order, as in moe.cu.
 * Measured: H100 80GB HBM3, commit 81dcd77, gpt-oss-20b, 4096 tokens, r 16: a step of 340 ms (loop) and 313
 *   (presort), grouped 191. */
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/moe_loop.h"

enum { THREADS = 256, WARP = 32, WIDE = WARP * 8, SELECT = 1024, MAX_EXP = 512 };

static const struct tensor absent = {};

/* ---- kernels ---- */

static __device__ __forceinline__ int64_t warp_row()
{
    return (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
}
static __device__ __forceinline__ int64_t lane_col() { return threadIdx.x % WARP * 8; }

template <typename T> static __device__ __forceinline__ T warp_sum(T v)
{
    for (int i = WARP / 2; i > 0; i /= 2) v += __shfl_xor_sync(~0u, v, i);
    return v;
}

/* slots = the slots whose expert is e, ascending; *count = their number. */
static __global__ void __launch_bounds__(SELECT)
    select_kernel(int32_t *slots, int32_t *count, const int32_t *idx, int64_t n_slot, int32_t e)
{
    __shared__ int own[WARP], before[WARP]; /* slots of e in each warp; in earlier blocks, a partial count per warp */
    const int64_t first = (int64_t)blockIdx.x * SELECT, slot = first + threadIdx.x;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const bool mine = slot < n_slot && idx[slot] == e;
    const unsigned same = __ballot_sync(~0u, mine);
    int n = 0;
#pragma unroll 8
    for (int64_t s = threadIdx.x; s < first; s += SELECT) n += idx[s] == e;
    n = warp_sum(n);
    if (lane == 0) own[warp] = __popc(same), before[warp] = n;
    __syncthreads();
    n = warp_sum(before[lane] + (lane < warp ? own[lane] : 0));
    if (mine) slots[n + __popc(same & ((1u << lane) - 1))] = (int32_t)slot;
    if (first + SELECT >= n_slot && threadIdx.x == SELECT - 1) *count = n + __popc(same);
}

/* out[i] = in[row], row = slot[i] / top_k, or i when top_k is 0; times gate[slot[i]] unless that is NULL. */
static __global__ void __launch_bounds__(THREADS)
    take_kernel(bf16 *out, const bf16 *in, int64_t ld_in, int64_t n_row, int64_t n_col, const int32_t *slot, int top_k,
                const float *gate)
{
    const int64_t i = warp_row();
    if (i >= n_row) return;
    const bf16 *from = in + (top_k ? slot[i] / top_k : i) * ld_in;
    const float weight = gate ? gate[slot[i]] : 1.0f;
#pragma unroll 4
    for (int64_t n = lane_col(); n < n_col; n += WIDE) {
        float x[8];
        bf16_unpack8(x, *(const uint4 *)(from + n));
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] *= weight;
        *(uint4 *)(out + i * n_col + n) = bf16_pack8(x);
    }
}

/* act = glu(pre) */
static __global__ void __launch_bounds__(THREADS) glu_kernel(const __grid_constant__ struct grouped p)
{
    const int64_t m = warp_row();
    for (int64_t n = lane_col(); m < p.n_row && n < p.n_out; n += WIDE) {
        float gate[8], up[8];
        pre_unpack(gate, up, p.glu.interleaved, grouped_pre(p, m, n, true));
#pragma unroll
        for (int k = 0; k < 8; k++) gate[k] = glu_value(p.form, gate[k], up[k]);
        store16(p.act + m * p.n_out + n, bf16_pack8(gate));
    }
}

/* GROUPED_GLU_BWD with v = g; dgate[slot] = <h, g> + <bias, dy>.  p.bias [n_dim], dy [n_row, n_dim] */
static __global__ void __launch_bounds__(THREADS) glu_bwd_kernel(const __grid_constant__ struct grouped p, float *dgate,
                                                                 const float *g, const bf16 *dy, int64_t n_dim)
{
    const int64_t m = warp_row();
    if (m >= p.n_row) return;
    const int32_t slot = p.row_slot[m];
    float x[8], sum = 0.0f;
    for (int64_t n = lane_col(); n < p.n_out; n += WIDE) {
        const float4 low = *(const float4 *)(g + m * p.n_out + n), high = *(const float4 *)(g + m * p.n_out + n + 4);
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
        sum += grouped_glu_bwd8<false>(p, m, n, x, p.gate[slot], grouped_pre(p, m, n, true));
    }
    for (int64_t n = lane_col(); p.bias && n < n_dim; n += WIDE) {
        bf16_unpack8(x, *(const uint4 *)(dy + m * n_dim + n));
#pragma unroll
        for (int k = 0; k < 8; k++) sum += p.bias[n + k] * x[k];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) dgate[slot] = sum;
}

/* sum[slot[i] / top_k] += gate[slot[i]] y[i]; without gate 1. A token has an expert at most once, so no two rows of an
 * expert add to the same row. */
static __global__ void __launch_bounds__(THREADS) add_kernel(float *sum, const bf16 *y, int64_t n_row, int64_t n_col,
                                                             const int32_t *slot, int top_k, const float *gate)
{
    const int64_t i = warp_row();
    if (i >= n_row) return;
    const float weight = gate ? gate[slot[i]] : 1.0f;
    float *to = sum + slot[i] / top_k * n_col;
#pragma unroll 2
    for (int64_t n = lane_col(); n < n_col; n += WIDE) {
        float4 low = *(const float4 *)(to + n), high = *(const float4 *)(to + n + 4);
        float x[8];
        bf16_unpack8(x, *(const uint4 *)(y + i * n_col + n));
        low.x += weight * x[0], low.y += weight * x[1], low.z += weight * x[2], low.w += weight * x[3];
        high.x += weight * x[4], high.y += weight * x[5], high.z += weight * x[6], high.w += weight * x[7];
        *(float4 *)(to + n) = low;
        *(float4 *)(to + n + 4) = high;
    }
}

/* out = sum + res; without res 0 */
static __global__ void __launch_bounds__(THREADS)
    round_kernel(bf16 *out, int64_t ld_out, const float *sum, const bf16 *res, int64_t ld_res, int64_t n_row,
                 int64_t n_col)
{
    const int64_t i = warp_row();
    for (int64_t n = lane_col(); i < n_row && n < n_col; n += WIDE) {
        const float4 low = *(const float4 *)(sum + i * n_col + n), high = *(const float4 *)(sum + i * n_col + n + 4);
        float y[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, x[8];
        if (res) {
            bf16_unpack8(x, *(const uint4 *)(res + i * ld_res + n));
#pragma unroll
            for (int k = 0; k < 8; k++) y[k] += x[k];
        }
        *(uint4 *)(out + i * ld_out + n) = bf16_pack8(y);
    }
}

/* ---- the loop over the experts ---- */

/* Row offsets of one layer on the host: expert e has rows offs[e] .. offs[e+1]-1. */
static struct {
    bool presort;
    const void *layer; /* identified by its r->offs */
    int32_t offs[MAX_EXP + 1];
} routing;

/* Iterator over the experts: expert e has rows first .. first+n-1. */
struct expert_iter {
    struct device *dev;
    const struct route *r;
    bool find; /* the row offsets are not on the host yet */
    int64_t e, first, n;
};

/* fresh: the routing has changed. A dry run visits one expert, with the largest possible number of rows. */
static struct expert_iter begin_experts(struct device *dev, const struct route *r, bool fresh)
{
    MT_REQUIRE(r->offs.shape[0] <= MAX_EXP + 1, "%lld experts", (long long)r->offs.shape[0] - 1);
    const struct expert_iter t = {dev, r, fresh || routing.layer != r->offs.data, -1, 0, 0};
    if (dev->dry_run) return t;
    if (t.find && routing.presort) dev->ops->download(routing.offs, r->offs.data, tensor_bytes(r->offs));
    routing.layer = r->offs.data;
    return t;
}

/* Writes the slots of expert t->e to row_slot from t->first on: the values that route_sort has written there. */
static void select_rows(struct expert_iter *t)
{
    struct device *dev = t->dev;
    const int64_t mark = arena_mark(&dev->work), n_slot = tensor_count(t->r->idx);
    int32_t n = 0, *count = (int32_t *)arena_push(&dev->work, sizeof(*count));
    if (!dev->dry_run && n_slot) {
        select_kernel<<<grid_x(ceil_div(n_slot, SELECT)), SELECT, 0, cuda.stream>>>(
            i32_ptr(t->r->row_slot) + t->first, count, i32_ptr(t->r->idx), n_slot, (int32_t)t->e);
        CUDA_CHECK_LAUNCH();
        dev->ops->download(&n, count, sizeof(n));
    }
    if (!dev->dry_run) routing.offs[t->e] = (int32_t)t->first, routing.offs[t->e + 1] = (int32_t)t->first + n;
    arena_release(&dev->work, mark);
}

static bool next_expert(struct expert_iter *t)
{
    const int64_t n_exp = t->dev->dry_run ? 1 : t->r->offs.shape[0] - 1;
    do {
        if (++t->e == n_exp) return false;
        t->first += t->n;
        if (t->find && !routing.presort) select_rows(t);
        t->n = t->dev->dry_run ? t->r->idx.shape[0] : routing.offs[t->e + 1] - t->first;
    } while (routing.presort && t->n == 0);
    return true;
}

static const int32_t *slots(const struct expert_iter *t) { return i32_ptr(t->r->row_slot) + t->first; }

/* The rows of the current expert in a tensor in expert order. */
static struct tensor part(struct tensor x, const struct expert_iter *t)
{
    return x.ndim ? tensor_rows(x, t->first, t->n) : x;
}

static struct tensor matrix(struct tensor x, int64_t e)
{
    if (!x.ndim) return x;
    const struct tensor one = tensor_rows(x, e, 1);
    return tensor_2d(one.data, x.dtype, x.shape[1], x.shape[2]);
}

static struct weight weight_of(const struct weight *w, int64_t e)
{
    const int64_t n = w->n_out * w->n_in, block = weight_scale_block(w->format);
    const int64_t n_block = block ? n / block : weight_blocks(w);
    const int bits = w->format == WF_F32                           ? 32
                     : w->format == WF_BF16 || w->format == WF_F16 ? 16
                     : w->format == WF_FP8                         ? 8
                                                                   : 4;
    struct weight one = *w;
    one.n_exp = 1;
    one.data = (const char *)w->data + e * ((n * bits + 7) / 8);
    if (w->scale) one.scale += e * n_block;
    if (w->scale2) one.scale2 += e * w->n_out * weight_row_scales(w);
    if (w->absmax) one.absmax += e * n_block;
    if (w->nested_absmax) one.nested_absmax += e * ceil_div(n_block, 256);
    if (w->nested_offset) one.nested_offset += e;
    return one;
}

/* Expert e as a dense projection. */
static struct proj expert(const struct proj *all, int64_t e)
{
    const int64_t n_out = all->w.n_out;
    struct proj one = *all;
    one.w = weight_of(&all->w, e);
    if (all->bias.ndim) one.bias = tensor_1d(f32_ptr(all->bias) + e * n_out, DT_F32, n_out);
    one.lora.a = matrix(all->lora.a, e), one.lora.b = matrix(all->lora.b, e);
    one.grad.a = matrix(all->grad.a, e), one.grad.b = matrix(all->grad.b, e);
    return one;
}

static void linear_fwd(const struct expert_iter *t, struct tensor y, struct tensor xa, struct tensor x,
                       const struct proj *experts)
{
    const struct proj one = expert(experts, t->e);
    cuda_linear_fwd(t->dev, part(y, t), part(xa, t), x, &one, absent);
}

/* ---- rows ---- */

static unsigned rows_grid(int64_t n_row) { return grid_x(ceil_div(n_row, THREADS / WARP)); }

static void want_rows(struct tensor x)
{
    MT_REQUIRE(!x.ndim || (x.shape[1] % 8 == 0 && x.ld % 8 == 0 && (uintptr_t)x.data % 16 == 0),
               "rows of %lld, %lld apart", (long long)x.shape[1], (long long)x.ld);
}

/* Copies the expert's rows of x to the start of `out`. tokens: x has one row per token, else it is in expert order.
 * gated: times the gates. */
static struct tensor gather_rows(const struct expert_iter *t, struct tensor out, struct tensor x, bool tokens,
                                 bool gated)
{
    const struct tensor from = tokens ? x : part(x, t);
    out = tensor_rows(out, 0, t->n);
    if (t->dev->dry_run || !t->n) return out;
    want_rows(x);
    take_kernel<<<rows_grid(t->n), THREADS, 0, cuda.stream>>>(bf16_ptr(out), bf16_ptr(from), from.ld, t->n, x.shape[1],
                                                              slots(t), tokens ? (int)t->r->idx.shape[1] : 0,
                                                              gated ? f32_ptr(t->r->gate) : NULL);
    CUDA_CHECK_LAUNCH();
    return out;
}

/* Arguments of the activation kernels for the expert's rows; dpre is absent in the forward. */
static struct grouped glu_rows(const struct expert_iter *t, struct tensor act, struct tensor pre, struct tensor dpre,
                               const struct glu *glu)
{
    struct grouped p = {};
    p.n_row = t->n;
    p.n_out = act.shape[1];
    p.glu = *glu;
    p.form = glu_form_of(*glu);
    p.act = bf16_ptr(part(act, t));
    p.pre = bf16_ptr(part(pre, t));
    p.out = bf16_ptr(part(dpre, t));
    p.gate = f32_ptr(t->r->gate);
    p.row_slot = slots(t);
    return p;
}

static void glu_fwd(const struct expert_iter *t, struct tensor act, struct tensor pre, const struct glu *glu)
{
    if (t->dev->dry_run || !t->n) return;
    glu_kernel<<<rows_grid(t->n), THREADS, 0, cuda.stream>>>(glu_rows(t, act, pre, absent, glu));
    CUDA_CHECK_LAUNCH();
}

/* Sums over the experts of a token: begin_sum, add_rows per expert, end_sum, which rounds. */
static struct tensor begin_sum(struct device *dev, struct tensor out)
{
    const struct tensor sum = arena_tensor_2d(&dev->work, DT_F32, out.shape[0], out.shape[1]);
    if (!dev->dry_run) dev->ops->zero(sum.data, tensor_bytes(sum));
    return sum;
}

static void add_rows(const struct expert_iter *t, struct tensor sum, struct tensor y, bool gated)
{
    if (t->dev->dry_run || !t->n) return;
    want_rows(y);
    add_kernel<<<rows_grid(t->n), THREADS, 0, cuda.stream>>>(f32_ptr(sum), bf16_ptr(y), t->n, y.shape[1], slots(t),
                                                             (int)t->r->idx.shape[1],
                                                             gated ? f32_ptr(t->r->gate) : NULL);
    CUDA_CHECK_LAUNCH();
}

static void end_sum(struct device *dev, struct tensor out, struct tensor sum, struct tensor res)
{
    if (dev->dry_run || !out.shape[0]) return;
    want_rows(out), want_rows(res);
    round_kernel<<<rows_grid(out.shape[0]), THREADS, 0, cuda.stream>>>(
        bf16_ptr(out), out.ld, f32_ptr(sum), bf16_ptr(res), res.ld, out.shape[0], out.shape[1]);
    CUDA_CHECK_LAUNCH();
}

/* ---- the ops ---- */

static void up_fwd(struct device *dev, struct tensor act, struct tensor pre, struct tensor xa, struct tensor x,
                   const struct route *r, const struct proj *up, const struct glu *glu)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor rows = arena_tensor_2d(&dev->work, DT_BF16, x.shape[0], x.shape[1]);
    for (struct expert_iter t = begin_experts(dev, r, true); next_expert(&t);) {
        linear_fwd(&t, pre, xa, gather_rows(&t, rows, x, true, false), up);
        glu_fwd(&t, act, pre, glu);
    }
    arena_release(&dev->work, mark);
}

static void down_fwd(struct device *dev, struct tensor y, struct tensor ha, struct tensor act, const struct route *r,
                     const struct proj *down)
{
    MT_REQUIRE(y.ndim, "%s", "the loop over experts cannot compute ha without y");
    for (struct expert_iter t = begin_experts(dev, r, false); next_expert(&t);)
        linear_fwd(&t, y, ha, part(act, &t), down);
}

static void combine_fwd(struct device *dev, struct tensor out, struct tensor res, struct tensor y,
                        const struct route *r)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor sum = begin_sum(dev, out);
    for (struct expert_iter t = begin_experts(dev, r, false); next_expert(&t);) add_rows(&t, sum, part(y, &t), true);
    end_sum(dev, out, sum, res);
    arena_release(&dev->work, mark);
}

static void down_bwd(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor act, struct tensor dout,
                     struct tensor pre, struct tensor ha, const struct route *r, const struct proj *down,
                     const struct glu *glu)
{
    const struct weight *w = &down->w;
    const struct lora *lora = &down->lora;
    const int64_t mark = arena_mark(&dev->work), n_tok = dout.shape[0];
    MT_REQUIRE(!down->in.format.bits, "the loop over experts quantises no inputs");
    const struct tensor dy_rows = arena_tensor_2d(&dev->work, DT_BF16, n_tok, w->n_out);
    const struct tensor g_rows = arena_tensor_2d(&dev->work, DT_F32, n_tok, w->n_in);
    const struct tensor h_rows = arena_tensor_2d(&dev->work, DT_BF16, n_tok, w->n_in);
    const struct tensor ha_rows = arena_tensor_2d(&dev->work, DT_BF16, n_tok, lora->r);
    for (struct expert_iter t = begin_experts(dev, r, false); next_expert(&t);) {
        const struct tensor dy = gather_rows(&t, dy_rows, dout, true, false), g = tensor_rows(g_rows, 0, t.n);
        struct tensor h = absent, ha_gated = absent;
        if (lora->r) {
            glu_fwd(&t, act, pre, glu);
            h = gather_rows(&t, h_rows, act, false, true);
            ha_gated = gather_rows(&t, ha_rows, ha, false, true);
        }
        const struct proj one = expert(down, t.e);
        cuda_linear_bwd(dev, g, dy, h, ha_gated, &one);
        if (dev->dry_run || !t.n) continue;
        struct grouped p = glu_rows(&t, act, pre, dpre, glu);
        p.bias = f32_ptr(one.bias);
        glu_bwd_kernel<<<rows_grid(t.n), THREADS, 0, cuda.stream>>>(p, f32_ptr(dgate), f32_ptr(g), bf16_ptr(dy),
                                                                    w->n_out);
        CUDA_CHECK_LAUNCH();
    }
    arena_release(&dev->work, mark);
}

static void up_bwd(struct device *dev, struct tensor dx, struct tensor dpre, struct tensor x, struct tensor xa,
                   const struct route *r, const struct proj *up)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor x_rows = arena_tensor_2d(&dev->work, DT_BF16, x.shape[0], up->w.n_in);
    const struct tensor dx_rows = arena_tensor_2d(&dev->work, DT_BF16, x.shape[0], up->w.n_in);
    const struct tensor sum = begin_sum(dev, dx);
    for (struct expert_iter t = begin_experts(dev, r, false); next_expert(&t);) {
        const struct tensor rows = up->lora.r ? gather_rows(&t, x_rows, x, true, false) : absent;
        const struct tensor part_dx = tensor_rows(dx_rows, 0, t.n);
        const struct proj one = expert(up, t.e);
        cuda_linear_bwd(dev, part_dx, part(dpre, &t), rows, part(xa, &t), &one);
        add_rows(&t, sum, part_dx, false);
    }
    end_sum(dev, dx, sum, absent);
    arena_release(&dev->work, mark);
}

extern "C" bool ops_loop_experts(struct ops *ops, bool presort)
{
    ops->moe_up_fwd = up_fwd;
    ops->moe_down_fwd = down_fwd;
    ops->moe_combine_fwd = combine_fwd;
    ops->moe_down_bwd = down_bwd;
    ops->moe_up_bwd = up_bwd;
    routing.presort = presort;
    routing.layer = NULL;
    return true;
}
