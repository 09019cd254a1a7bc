/* moe.cu - the experts' ops, made of grouped products, and the small kernels between them.
 * Math: kernels/ops/ops.h; kernels/cpu/moe.c does the same in plain loops. A launch decodes the matrices of
 *   expert_group experts (struct device) to bf16 and multiplies them by these experts' rows; bf16 weights are used in
 *   place. With fewer rows than experts (M < E), the experts that have rows are listed on the device first, and only
 *   they are decoded, into a buffer of min(E, M) matrices. On Hopper, products of few rows per expert decode MXFP4
 *   inside (grouped_packed_wgmma.cu, grouped_decode_wgmma.cu): no buffer. Those of very many rows decode it into a
 *   ring, while the products of earlier experts run (grouped_ahead_wgmma.cu). Adapters: forward xa = x A^T (thin); the
 *   main product then adds scale * xa B^T in its accumulators. Backward db = dy B (thin), dx = dy W + scale * db A, dA
 *   += scale * db^T x, dB += scale * dy^T xa. The rows dout of the down product do not contain the gate: the thin
 *   operands of its gradients, db and ha = act A^T, are multiplied by the gate in f32 and rounded once, and the
 *   epilogue of the activation's gradient multiplies by the gate. On Hopper with r <= 16 one pass over dy computes dy B
 *   and dB, and the thin product before a bf16 product of tokens writes the rows that it gathers, which the main
 *   product reads by TMA (push_copy in kernels/scratch/).
 * Needs: D, F, r and row strides multiples of 8; r <= 256; contiguous tensors except x, dx, dout, out, res and the y
 *   of combine; all 16-byte aligned.
 * Grid: the small kernels have 256 threads; a thread handles 8 columns of a row, or (dgate) a warp one row.
 * Bound: memory: combine 2*T*D*(J + 2) bytes, dx from rows 2*T*D*(J + 1); where the product has no epilogue, GLU of
 *   separate halves (cuda_grouped_swiglu) 6*M*F, GLU_RELU2 4*M*F and, backward, 8*M*F.
 * Numerics: f32 sums in an order that depends only on the shapes and the routing. */
#include "kernels/cuda/parts/few_rows.h"
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/grouped_fp8.h"
#include "kernels/cuda/parts/rows.cuh"

enum { THREADS = OCTET_THREADS, WARP = 32 };

static const struct tensor absent = {};

/* ---- the grouped products ---- */

/* A contiguous tensor's data; NULL when it is absent. */
static void *whole(struct tensor x)
{
    MT_REQUIRE(!x.ndim || x.ld == x.shape[x.ndim - 1],
               "a tensor of the experts is not contiguous: rows of %lld, %lld apart", (long long)x.shape[x.ndim - 1],
               (long long)x.ld);
    return x.data;
}

/* A product over the rows of all experts. tokens: `a` has one row per token and is gathered; else it is in expert
 * order. */
static struct grouped rows_of(struct tensor a, bool tokens, const struct route *r)
{
    struct grouped g = {};
    g.n_row = r->row_slot.shape[0];
    g.n_exp = g.count = r->offs.shape[0] - 1;
    g.offs = i32_ptr(r->offs);
    g.a = bf16_ptr(a);
    g.lda = a.ld;
    g.slot = tokens ? i32_ptr(r->row_slot) : NULL;
    g.token = quotient_by(r->idx.shape[1]);
    g.epilogue = GROUPED_STORE;
    return g;
}

/* What a product with one factor of an adapter writes; absent: not written. */
struct thin {
    struct tensor product; /* [M, r] */
    struct tensor gated;   /* [M, r], backward only: the product times the gate of each row */
    struct tensor rows;    /* [M, in] the rows that it reads, in expert order; r <= THIN_RANK */
};
enum { THIN_RANK = 64 }; /* of cuda_grouped_thin */

/* out.product = a A_e^T (forward) or a B_e (backward); factor [E, r, in] or [E, out, r]. */
static void thin_product(const struct thin *out, struct tensor a, bool tokens, struct tensor factor, bool backward,
                         const struct route *r)
{
    struct grouped g = rows_of(a, tokens, r);
    g.n_out = factor.shape[backward ? 2 : 1];
    g.n_in = factor.shape[backward ? 1 : 2];
    g.b = (const bf16 *)whole(factor);
    g.kn = backward;
    g.out = (bf16 *)whole(out->product);
    g.rows = (bf16 *)whole(out->rows);
    if (out->gated.ndim) {
        g.epilogue = GROUPED_GATED;
        g.act = (bf16 *)whole(out->gated);
        g.row_slot = i32_ptr(r->row_slot);
        g.gate = (const float *)whole(r->gate);
    }
    if (g.n_out <= THIN_RANK)
        cuda_grouped_thin(&g);
    else
        cuda_grouped_mma(&g);
}

/* Sets the adapter of g. A merged adapter is already part of the matrix. */
static void take_adapter(struct grouped *g, const struct lora *lora, struct tensor la, struct tensor lb)
{
    if (!lora->r || lora->merged) return;
    g->r = lora->r;
    g->scale = lora->scale[0];
    g->la = (const bf16 *)whole(la);
    g->lb = (const bf16 *)whole(lb);
}

/* ---- few rows per expert */

static struct few_rows few_of(const struct grouped *g, const struct weight *w)
{
    struct few_rows f = {.w = *w, .n_row = g->n_row, .offs = g->offs, .a = g->a, .lda = g->lda};
    f.slot = g->slot;
    f.token = g->token;
    f.bias = g->bias;
    f.out = g->out;
    f.ld_out = w->n_out;
    f.act = g->epilogue == GROUPED_GLU ? g->act : NULL;
    f.form = g->form;
    if (!g->r) return f;
    f.r = f.ld_la = g->r;
    f.la = g->la;
    f.lb = g->lb;
    f.n_part = 1;
    f.part[0] = {0, (int)w->n_out, 0, 0, g->scale};
    return f;
}

static void few_product(const struct grouped *g, const struct proj *proj)
{
    const struct few_rows f = few_of(g, &proj->w);
    cuda_few_rows(&f);
}

/* xa = a A_e^T */
static void few_factor(struct tensor xa, struct tensor a, bool tokens, const struct route *r, const struct proj *proj)
{
    const struct lora *lora = &proj->lora;
    struct weight w = {.format = WF_BF16, .n_exp = proj->w.n_exp, .n_out = lora->r, .n_in = proj->w.n_in};
    struct grouped g = rows_of(a, tokens, r);
    w.data = whole(lora->a);
    g.out = (bf16 *)whole(xa);
    const struct few_rows f = few_of(&g, &w);
    if (lora->r) cuda_few_rows(&f);
}

/* Kernels of products with bf16 experts. variant_of takes the first row that runs on this GPU and accepts n_out. */
static const struct grouped_variant {
    unsigned archs;
    int64_t n_out; /* at least */
    void (*run)(const struct grouped *g);
    bool (*has_glu)(const struct grouped *g); /* whether run has GROUPED_GLU for gates and ups in separate halves */
} variants[] = {{ARCH_BIT(CUDA_SM90), GROUPED_TMA_OUT, cuda_grouped_wgmma, cuda_grouped_swiglu},
                {EVERY_ARCH, 0, cuda_grouped_mma, NULL}};

static const struct grouped_variant *variant_of(int64_t n_out)
{
    const struct grouped_variant *v = variants;
    while (!cuda_runs(v->archs) || n_out < v->n_out) v++;
    return v;
}

/* ids = the experts that have rows, ascending; to = their row offsets. Later elements of `to` say that there are no
 * rows; those of ids are not written. One block. */
static __global__ void __launch_bounds__(GROUPED_EXPERTS)
    list_kernel(int32_t *ids, int32_t *to, int n_place, const int32_t *offs, int n_exp)
{
    __shared__ int own[GROUPED_EXPERTS / WARP]; /* experts with rows in each warp */
    const int e = (int)threadIdx.x, lane = e % WARP, warp = e / WARP;
    const int32_t first = offs[min(e, n_exp)];
    const bool has = e < n_exp && first < offs[e + 1];
    const unsigned same = __ballot_sync(~0u, has);
    if (lane == 0) own[warp] = __popc(same);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < GROUPED_EXPERTS / WARP; w++) {
        if (w < warp) before += own[w];
        all += own[w];
    }
    const int place = before + __popc(same & ((1u << lane) - 1));
    if (has) ids[place] = e, to[place] = first;
    if (e >= all && e <= n_place) to[e] = offs[n_exp];
}

/* Fills the rows that an FP8 product with proj reads instead of x. x has one row per token (`tokens`) or is in expert
 * order. Without FP8 products it fills nothing. */
static struct fp8_rows fill_fp8_rows(const struct scratch_fp8_rows *to, const struct proj *proj, struct tensor x,
                                     bool tokens, const struct route *r)
{
    const struct fp8_rows rows = {to->codes, bf16_ptr(to->values), to->step};
    if (!proj->fp8.step.ndim) return rows;
    const struct fp8_source from = {bf16_ptr(x),
                                    x.ld,
                                    x.shape[1],
                                    r->row_slot.shape[0],
                                    i32_ptr(r->offs),
                                    r->offs.shape[0] - 1,
                                    (const float *)proj->fp8.step.data,
                                    tokens ? i32_ptr(r->slot_row) : NULL,
                                    r->idx.shape[0],
                                    r->idx.shape[1]};
    cuda_fp8_rows(&rows, &from);
    return rows;
}

/* The main product where e4m3 codes of experts are in memory (struct proj_fp8): one launch for each run of neighbouring
 * experts that e4m3 holds exactly, or does not; most often it holds all exactly. */
static void product_of_codes(struct grouped *g, const struct proj *proj, const struct fp8_rows *rows)
{
    const struct weight *w = &proj->w;
    const int64_t n = w->n_out * w->n_in;
    const uint8_t *codes =
        proj->fp8.pair ? (const uint8_t *)w->data + g->kn * n : (const uint8_t *)proj->fp8.transposed.data;
    struct grouped_fp8 f = {*g, rows->codes, rows->step, NULL, proj->fp8.pair ? 2 * n : n, f32_ptr(proj->fp8.step)};
    f.g.slot = NULL;
    for (int64_t i = 0, end; i < w->n_exp; i = end) {
        const bool exact = proj->fp8.host_step[i] > 0;
        for (end = i + 1; end < w->n_exp && (proj->fp8.host_step[end] > 0) == exact;) end++;
        f.g.first = g->first = i;
        f.g.count = g->count = end - i;
        f.b = codes + i * f.apart;
        g->b = (const bf16 *)w->data + i * n;
        if (exact)
            cuda_grouped_fp8(&f);
        else
            cuda_grouped_wgmma(g);
    }
}

/* The main product with proj, in launches of d->count experts. Sets ids, offs, n_out, n_in, first, count and b of g. */
static void product(struct grouped *g, const struct proj *proj, const struct scratch_experts *d, struct fp8_rows rows)
{
    const struct weight *w = &proj->w;
    bf16 *decoded = bf16_ptr(d->data);
    g->n_out = g->kn ? w->n_in : w->n_out;
    g->n_in = g->kn ? w->n_out : w->n_in;
    if (rows.codes && g->n_row) product_of_codes(g, proj, &rows);
    if (rows.codes) return;
    if (rows.values) g->a = rows.values, g->lda = g->n_in, g->slot = NULL;
    if (grouped_is_packed(d->way)) return cuda_grouped_packed(g, w, d->way);
    if (d->way == GROUPED_AHEAD) return cuda_grouped_ahead(g, w, decoded);
    if (d->ids && g->n_row) {
        MT_REQUIRE(w->n_exp <= GROUPED_EXPERTS, "%lld experts", (long long)w->n_exp);
        list_kernel<<<1, GROUPED_EXPERTS, 0, cuda.stream>>>(d->ids, d->offs, (int)d->n_place, g->offs, (int)w->n_exp);
        CUDA_CHECK_LAUNCH();
        g->ids = d->ids;
        g->offs = d->offs;
    }
    for (int64_t i = 0; i < d->n_place && g->n_row; i += d->count) {
        g->first = i;
        g->count = MT_MIN(d->count, d->n_place - i);
        g->b = decoded ? decoded : (const bf16 *)w->data + i * w->n_out * w->n_in;
        if (decoded) cuda_decode_proj(decoded, proj, i, g->count, g->ids, g->offs);
        variant_of(g->n_out)->run(g);
    }
}

/* The gradient of A or B: with of_a, dA += scale db^T x, wide = x and thin = db; else dB += scale dy^T xa, wide = dy
 * and thin = xa. partial: scratch. beside: dy B, computed in the same pass over dy, or NULL. */
static void factor_grad(void *partial, const struct proj *proj, bool of_a, struct tensor wide, bool tokens,
                        struct tensor thin, const struct thin *beside, const struct route *r)
{
    const struct lora *lora = &proj->lora;
    struct grouped_wgrad g = {};
    g.n_row = r->row_slot.shape[0];
    g.n_exp = r->offs.shape[0] - 1;
    g.n_wide = wide.shape[1];
    g.r = lora->r;
    g.offs = i32_ptr(r->offs);
    g.wide = bf16_ptr(wide);
    g.ld_wide = wide.ld;
    g.slot = tokens ? i32_ptr(r->row_slot) : NULL;
    g.token = quotient_by(r->idx.shape[1]);
    g.thin = (const bf16 *)whole(thin);
    g.scale = lora->scale[0];
    g.thin_first = of_a;
    g.out = (float *)whole(of_a ? proj->grad.a : proj->grad.b);
    if (beside) {
        g.b = (const bf16 *)whole(lora->b);
        g.product_scale = 1;
        g.ld_thin = g.ld_product = g.r;
        g.product = (bf16 *)whole(beside->product);
        g.gated = (bf16 *)whole(beside->gated);
        g.rows = (bf16 *)whole(beside->rows);
        g.row_slot = i32_ptr(r->row_slot);
        g.gate = (const float *)whole(r->gate);
    }
    g.partial = partial;
    if (beside)
        cuda_grouped_pass(&g, 1);
    else
        cuda_grouped_wgrad(&g);
}

/* out->product = dy B; dB += scale dy^T xa unless the adapter is frozen. */
static void back_through_b(struct device *dev, void *partial, const struct thin *out, struct tensor dy, bool tokens,
                           struct tensor xa, const struct proj *proj, const struct route *r)
{
    const bool one_pass = scratch_one_pass(dev, proj);
    if (!one_pass) thin_product(out, dy, tokens, proj->lora.b, true, r);
    if (proj->grad.b.ndim) factor_grad(partial, proj, false, dy, tokens, xa, one_pass ? out : NULL, r);
}

/* ---- rows in expert order ---- */

/* y[i] = x[rows[i] / share], one warp per row; rows of x are `apart` words apart. */
template <typename word>
static __global__ void __launch_bounds__(THREADS)
    gather_kernel(word *y, const word *x, int64_t apart, const int32_t *rows, int64_t n_row, int n_word, int share)
{
    enum { UNROLL = 4 };
    const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP;
    if (row >= n_row) return;
    const word *from = x + rows[row] / share * apart;
    word *to = y + row * n_word;
    for (int w = threadIdx.x % WARP; w < n_word; w += WARP * UNROLL) {
        word v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (w + u * WARP < n_word) v[u] = from[w + u * WARP];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (w + u * WARP < n_word) to[w + u * WARP] = v[u];
    }
}

template <typename word> static void gather(struct tensor y, struct tensor x, struct tensor rows, int64_t share)
{
    const int64_t n_word = x.shape[1] * dtype_size(x.dtype) / (int64_t)sizeof(word);
    MT_REQUIRE(n_word <= INT32_MAX && share <= INT32_MAX, "rows of %lld words", (long long)n_word);
    gather_kernel<<<grid_x(ceil_div(y.shape[0] * WARP, THREADS)), THREADS, 0, cuda.stream>>>(
        (word *)y.data, (const word *)x.data, x.ld * dtype_size(x.dtype) / (int64_t)sizeof(word), i32_ptr(rows),
        y.shape[0], (int)n_word, (int)share);
    CUDA_CHECK_LAUNCH();
}

/* Whether a thin product with an adapter of this rank can write the rows that it reads. */
static bool writes_rows(int64_t rank) { return rank > 0 && rank <= THIN_RANK; }
/* Writes the rows of x in expert order to `copy`, unless a thin product does. */
static void fill_copy(struct tensor copy, struct tensor x, const struct proj *proj, const struct route *r)
{
    if (copy.ndim && copy.shape[0] && !writes_rows(proj->lora.r)) gather<uint4>(copy, x, r->row_slot, r->idx.shape[1]);
}

/* ---- small kernels ---- */

/* out[t] = res[t] + sum over ascending j of gate[t, j] y[slot_row[t, j]]; an absent res is 0, absent gates are 1. */
static __global__ void __launch_bounds__(THREADS)
    sum_slots_kernel(row_view<> out, row_view<> res, const float *gate, row_view<> y, const int32_t *slot_row,
                     int64_t n_tok, int64_t n_col, int top_k)
{
    const struct octet o = find_octet(n_col);
    if (o.row >= n_tok) return;
    float sum[8] = {}, x[8];
    for (int64_t s = o.row * top_k; s < (o.row + 1) * top_k; s++) {
        const float weight = gate ? gate[s] : 1.0f;
        unpack8(x, *(const uint4 *)(y.at(slot_row[s]) + o.col));
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += weight * x[i];
    }
    if (res.p) {
        unpack8(x, *(const uint4 *)(res.at(o.row) + o.col));
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += x[i];
    }
    *(uint4 *)(out.at(o.row) + o.col) = bf16_pack8(sum);
}

static void sum_slots(struct tensor out, struct tensor res, const float *gate, struct tensor y, const struct route *r)
{
    const int64_t n_tok = out.shape[0], n_col = out.shape[1];
    MT_REQUIRE(n_col % 8 == 0, "rows of %lld", (long long)n_col);
    if (n_tok == 0) return;
    sum_slots_kernel<<<octet_grid(n_tok, n_col), THREADS, 0, cuda.stream>>>(
        aligned_rows(out, "a sum of slots"), aligned_rows(res, "a sum of slots"), gate,
        aligned_rows(y, "a sum of slots"), i32_ptr(r->slot_row), n_tok, n_col, (int)r->idx.shape[1]);
    CUDA_CHECK_LAUNCH();
}

/* gated[m] = gate of row m times ha[m].  [M, rank] */
static __global__ void __launch_bounds__(THREADS)
    gate_kernel(bf16 *gated, const bf16 *ha, const float *gate, const int32_t *row_slot, int64_t n_row, int64_t rank)
{
    const struct octet o = find_octet(rank);
    if (o.row >= n_row) return;
    const float weight = gate[row_slot[o.row]];
    float x[8];
    unpack8(x, *(const uint4 *)(ha + o.row * rank + o.col));
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= weight;
    *(uint4 *)(gated + o.row * rank + o.col) = bf16_pack8(x);
}

static void gate_rows(struct tensor gated, struct tensor ha, const struct route *r)
{
    const int64_t n_row = gated.shape[0], rank = gated.shape[1];
    if (n_row == 0) return;
    gate_kernel<<<octet_grid(n_row, rank), THREADS, 0, cuda.stream>>>(
        bf16_ptr(gated), (const bf16 *)whole(ha), (const float *)whole(r->gate), i32_ptr(r->row_slot), n_row, rank);
    CUDA_CHECK_LAUNCH();
}

/* dgate[t, j] = sum of part[:, m] + <bias of its expert, dout[t]>, m = slot_row[t, j]; one warp per token, which
 * reads its row of dout once for every four j. */
static __global__ void __launch_bounds__(THREADS)
    dgate_kernel(float *dgate, const float *part, int64_t n_part, const float *bias, const bf16 *dout, int64_t ld_dout,
                 int64_t n_col, const int32_t *slot_row, const int32_t *idx, int top_k, int64_t n_tok)
{
    const int64_t t = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP, n_row = n_tok * top_k;
    const int lane = threadIdx.x % WARP;
    if (t >= n_tok) return;
    for (int first = 0; first < top_k; first += 4) {
        const float *b[4];
        float sum[4] = {};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int64_t slot = t * top_k + min(first + k, top_k - 1), m = slot_row[slot];
            b[k] = bias + (bias ? idx[slot] * n_col : 0);
            for (int64_t p = lane; p < n_part; p += WARP) sum[k] += part[p * n_row + m];
        }
        for (int64_t n = lane * 8; bias && n < n_col; n += WARP * 8) {
            float x[8];
            unpack8(x, *(const uint4 *)(dout + t * ld_dout + n));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float4 low = __ldg((const float4 *)(b[k] + n)), high = __ldg((const float4 *)(b[k] + n + 4));
                sum[k] += low.x * x[0] + low.y * x[1] + low.z * x[2] + low.w * x[3];
                sum[k] += high.x * x[4] + high.y * x[5] + high.z * x[6] + high.w * x[7];
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            for (int i = WARP / 2; i > 0; i /= 2) sum[k] += __shfl_xor_sync(~0u, sum[k], i);
            if (lane == 0 && first + k < top_k) dgate[t * top_k + first + k] = sum[k];
        }
    }
}

/* The backward of GLU_RELU2. For activations with a gate the epilogue of the product does it. g.out has dact. */
static void relu2_bwd(const struct grouped *g, struct tensor dpre, bool quant)
{
    const int64_t width = g->n_out;
    const struct relu2_rows r = {.n_row = g->n_row,
                                 .width = width,
                                 .pre = {(bf16 *)g->pre, width},
                                 .dact = {g->out, width},
                                 .dpre = {(bf16 *)whole(dpre), width},
                                 .gate = {(float *)g->gate, 1},
                                 .row_slot = g->row_slot,
                                 .dgate = {g->dgate_part, 1},
                                 .act = g->act,
                                 .in_amax = quant ? g->in_amax : NULL};
    cuda_relu2_bwd(&r);
}

/* ---- the ops ---- */

extern "C" void cuda_moe_up_fwd(struct device *dev, struct tensor act, struct tensor pre, struct tensor xa,
                                struct tensor x, const struct route *r, const struct proj *up, const struct glu *glu)
{
    const struct lora *lora = &up->lora;
    const struct scratch_moe_fwd s = scratch_moe_up_fwd(dev, x, r, up);
    const struct thin thin = {xa, absent, s.copy};
    const struct fp8_rows rows = fill_fp8_rows(&s.rows, up, x, true, r);
    if (s.few)
        few_factor(xa, x, true, r, up);
    else if (lora->r)
        thin_product(&thin, x, true, lora->a, false, r);
    fill_copy(s.copy, x, up, r);
    struct grouped g = rows_of(s.copy.ndim ? s.copy : x, !s.copy.ndim, r);
    take_adapter(&g, lora, xa, lora->b);
    g.bias = (const float *)whole(up->bias);
    g.out = (bf16 *)whole(pre);
    g.act = (bf16 *)whole(act);
    g.glu = *glu;
    g.form = glu_form_of(*glu);
    g.n_out = up->w.n_out;
    const struct grouped_variant *v = variant_of(g.n_out);
    const bool halves = !s.few && !rows.codes && !grouped_is_packed(s.experts.way) && v->has_glu && v->has_glu(&g);
    const bool fused = glu->interleaved || halves;
    g.epilogue = fused ? GROUPED_GLU : GROUPED_STORE;
    if (s.few)
        few_product(&g, up);
    else
        product(&g, up, &s.experts, rows);
    if (!fused) cuda_glu_fwd(dev, act, pre, absent, glu);
}

extern "C" void cuda_moe_down_fwd(struct device *dev, struct tensor y, struct tensor ha, struct tensor act,
                                  const struct route *r, const struct proj *down)
{
    const struct lora *lora = &down->lora;
    const struct scratch_moe_fwd s = scratch_moe_down_fwd(dev, y, act, r, down);
    const struct thin thin = {ha, absent, absent};
    if (s.few)
        few_factor(ha, act, false, r, down);
    else if (lora->r)
        thin_product(&thin, act, false, lora->a, false, r);
    if (!y.ndim) return;
    const struct fp8_rows rows = fill_fp8_rows(&s.rows, down, act, false, r);
    struct grouped g = rows_of(act, false, r);
    take_adapter(&g, lora, ha, lora->b);
    g.bias = (const float *)whole(down->bias);
    g.out = (bf16 *)whole(y);
    if (s.few)
        few_product(&g, down);
    else
        product(&g, down, &s.experts, rows);
}

extern "C" void cuda_gather(struct device *dev, struct tensor y, struct tensor x, struct tensor rows, int64_t share)
{
    const int64_t bytes = x.shape[1] * dtype_size(x.dtype);
    MT_REQUIRE(bytes % 4 == 0, "rows of %lld bytes", (long long)bytes);
    if (y.shape[0] == 0) return;
    if (bytes % 16 == 0)
        gather<uint4>(y, x, rows, share);
    else
        gather<uint32_t>(y, x, rows, share);
}

extern "C" void cuda_moe_combine_fwd(struct device *dev, struct tensor out, struct tensor res, struct tensor y,
                                     const struct route *r)
{
    sum_slots(out, res, (const float *)whole(r->gate), y, r);
}

extern "C" void cuda_moe_down_bwd(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor act,
                                  struct tensor dout, struct tensor pre, struct tensor ha, const struct route *r,
                                  const struct proj *down, const struct glu *glu)
{
    const struct lora *lora = &down->lora;
    const struct scratch_moe_bwd s = scratch_moe_down_bwd(dev, dpre, act, dout, r, down, glu);
    const struct tensor copy = s.fwd.copy;
    const bool quant = down->in.format.bits, trained = lora->r && down->grad.a.ndim;
    const struct thin thin = {s.db, s.gated, copy};
    if (trained) gate_rows(s.ha, ha, r);
    if (lora->r) back_through_b(dev, s.of_b, &thin, dout, true, s.ha, down, r);
    if (dpre.shape[0]) {
        const struct fp8_rows rows = fill_fp8_rows(&s.fwd.rows, down, dout, true, r);
        fill_copy(copy, dout, down, r);
        struct grouped g = rows_of(copy.ndim ? copy : dout, !copy.ndim, r);
        take_adapter(&g, lora, s.db, lora->a);
        g.kn = true;
        g.epilogue = !glu_gated(glu) ? GROUPED_STORE : quant ? GROUPED_GLU_BWD_QUANT : GROUPED_GLU_BWD;
        g.in_amax = f32_ptr(down->in.amax);
        g.out = (bf16 *)whole(glu_gated(glu) ? dpre : s.dact);
        g.act = (bf16 *)whole(act);
        g.glu = *glu;
        g.form = glu_form_of(*glu);
        g.pre = (const bf16 *)whole(pre);
        g.row_slot = i32_ptr(r->row_slot);
        g.gate = (const float *)whole(r->gate);
        g.dgate_part = f32_ptr(s.part);
        product(&g, down, &s.fwd.experts, rows);
        if (!glu_gated(glu)) relu2_bwd(&g, dpre, quant);
        dgate_kernel<<<grid_x(ceil_div(dout.shape[0], THREADS / WARP)), THREADS, 0, cuda.stream>>>(
            (float *)whole(dgate), g.dgate_part, s.part.shape[0], (const float *)whole(down->bias), bf16_ptr(dout),
            dout.ld, down->w.n_out, i32_ptr(r->slot_row), i32_ptr(r->idx), (int)r->idx.shape[1], dout.shape[0]);
        CUDA_CHECK_LAUNCH();
    }
    if (trained) factor_grad(s.of_a, down, true, act, false, s.gated, NULL, r);
}

extern "C" void cuda_moe_up_bwd(struct device *dev, struct tensor dx, struct tensor dpre, struct tensor x,
                                struct tensor xa, const struct route *r, const struct proj *up)
{
    const struct lora *lora = &up->lora;
    const struct scratch_moe_bwd s = scratch_moe_up_bwd(dev, dpre, x, r, up);
    const struct thin thin = {s.db, absent, absent};
    if (lora->r) back_through_b(dev, s.of_b, &thin, dpre, false, xa, up, r);
    if (lora->r && up->grad.a.ndim) factor_grad(s.of_a, up, true, x, true, s.db, NULL, r);
    const struct fp8_rows rows = fill_fp8_rows(&s.fwd.rows, up, dpre, false, r);
    struct grouped g = rows_of(dpre, false, r);
    take_adapter(&g, lora, s.db, lora->a);
    g.kn = true;
    g.out = bf16_ptr(s.out);
    product(&g, up, &s.fwd.experts, rows);
    sum_slots(dx, absent, NULL, s.out, r);
}
