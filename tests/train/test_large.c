/* test_large.c - GPU ops on tensors of more than 2^31 elements and 2^32 bytes, where 32-bit indices would address wrong
 * elements. Every op runs on all rows and then on the last few rows, passed as a view. The results have the same bits
 * when a row depends only on itself, and are close when cuBLASLt may use another algorithm for another shape. Outputs
 * start as NaN. Hopper and portable kernels both run. */
#include <math.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "tests/gpu_check.h"

#ifdef MT_CUDA
/* kernels/cuda/core/cuda.h */
void cuda_dequant(uint16_t *out, const struct weight *w, int64_t first, int64_t count, const int32_t *ids,
                  const int32_t *offs);
#endif

enum { LAST = 67, N_TOK = (1 << 20) + 37, DIM = 2112 };
_Static_assert(1LL * N_TOK * DIM > INT32_MAX, "a [T, D] tensor has more than 2^31 elements");

/* Allowed difference between cuBLASLt's results for two shapes: each is a sum in f32, rounded once to bf16. */
#define ROUNDINGS 0x1p-8
#define F32_SUMS  1e-5 /* the same for f32 sums in two orders */

static struct tensor last(struct tensor x) { return tensor_rows(x, x.shape[0] - LAST, LAST); }

/* ---- rows of the residual stream ---- */

static void rmsnorm_large_on_the_gpu(void **state)
{
    (void)state;
    const struct norm norm = {1e-5f, false};
    gpu_begin(16, 1, false);
    struct tensor x = gpu_random(DT_BF16, 1, N_TOK, DIM, -1), w = gpu_random(DT_F32, 2, DIM, -1, -1);
    struct tensor y = gpu_empty(DT_BF16, N_TOK, DIM, -1), rstd = gpu_empty(DT_F32, N_TOK, -1, -1);
    struct tensor dx = gpu_random(DT_BF16, 3, N_TOK, DIM, -1), few_dx = gpu_copy(last(dx));
    struct tensor few_y = gpu_empty(DT_BF16, LAST, DIM, -1), few_rstd = gpu_empty(DT_F32, LAST, -1, -1);
    op_rmsnorm_fwd(&gpu, y, rstd, x, w, &norm);
    op_rmsnorm_fwd(&gpu, few_y, few_rstd, last(x), w, &norm);
    expect_same("y", last(y), few_y);
    expect_same("rstd", last(rstd), few_rstd);
    op_rmsnorm_bwd(&gpu, dx, y, x, rstd, w);
    op_rmsnorm_bwd(&gpu, few_dx, few_y, last(x), few_rstd, w);
    expect_same("dx", last(dx), few_dx);
}

static void qk_norm_large_on_the_gpu(void **state)
{
    (void)state;
    const struct norm norm = {1e-6f, true};
    const struct attn_shape shape = {.n_head = 31, .n_kv = 1, .head_dim = 64, .scale = 0.125f};
    enum { HEADS = 32, QK = HEADS * 64 };
    gpu_begin(16, 1, false);
    struct tensor qkv = gpu_random(DT_BF16, 1, N_TOK, DIM, -1), few_qkv = gpu_copy(last(qkv));
    struct tensor raw = gpu_empty(DT_BF16, N_TOK, QK, -1), few_raw = gpu_empty(DT_BF16, LAST, QK, -1);
    struct tensor rstd = gpu_empty(DT_F32, N_TOK, HEADS, -1), few_rstd = gpu_empty(DT_F32, LAST, HEADS, -1);
    struct tensor wq = gpu_random(DT_F32, 2, 64, -1, -1), wk = gpu_random(DT_F32, 3, 64, -1, -1);
    struct tensor dqkv = gpu_random(DT_BF16, 4, N_TOK, DIM, -1), few_dqkv = gpu_copy(last(dqkv));
    op_qk_norm_fwd(&gpu, qkv, raw, rstd, wq, wk, (struct tensor){0}, &shape, &norm);
    op_qk_norm_fwd(&gpu, few_qkv, few_raw, few_rstd, wq, wk, (struct tensor){0}, &shape, &norm);
    expect_same("qkv", last(qkv), few_qkv);
    expect_same("raw", last(raw), few_raw);
    expect_same("rstd", last(rstd), few_rstd);
    op_qk_norm_bwd(&gpu, dqkv, raw, rstd, wq, wk, (struct tensor){0}, &shape);
    op_qk_norm_bwd(&gpu, few_dqkv, few_raw, few_rstd, wq, wk, (struct tensor){0}, &shape);
    expect_same("dqkv", last(dqkv), few_dqkv);
}

static void rope_large_on_the_gpu(void **state)
{
    (void)state;
    enum { POSITIONS = 4096, HEADS = 32, HEAD = 64 };
    gpu_begin(8, 1, false);
    int32_t *at = mem_array(N_TOK, sizeof(*at));
    for (int32_t t = 0; t < N_TOK; t++) at[t] = t % POSITIONS;
    struct tensor pos = gpu_i32(at, N_TOK), table = gpu_random(DT_F32, 2, POSITIONS, HEAD, -1);
    struct tensor qkv = gpu_random(DT_BF16, 1, N_TOK, DIM, -1), few = gpu_copy(last(qkv));
    mem_free(at);
    op_rope_fwd(&gpu, qkv, pos, table, HEADS, HEAD);
    op_rope_fwd(&gpu, few, last(pos), table, HEADS, HEAD);
    expect_same("forward", last(qkv), few);
    op_rope_bwd(&gpu, qkv, pos, table, HEADS, HEAD);
    op_rope_bwd(&gpu, few, last(pos), table, HEADS, HEAD);
    expect_same("backward", last(qkv), few);
}

static void mla_qkv_large_on_the_gpu(void **state)
{
    (void)state;
    enum { POSITIONS = 4096, HEADS = 5, NOPE = 128, ROPE = 64, VALUE = 128 };
    enum { Q = HEADS * (NOPE + ROPE), KV = HEADS * (NOPE + VALUE), QKV = 2 * Q + HEADS * VALUE };
    const struct mla_shape shape = {HEADS, NOPE, ROPE, VALUE, true, 0, 0};
    gpu_begin(18, 1, false);
    int32_t *at = mem_array(N_TOK, sizeof(*at));
    for (int32_t t = 0; t < N_TOK; t++) at[t] = t % POSITIONS;
    struct tensor pos = gpu_i32(at, N_TOK), table = gpu_random(DT_F32, 4, POSITIONS, ROPE, -1);
    struct tensor q = gpu_random(DT_BF16, 1, N_TOK, Q, -1), kv = gpu_random(DT_BF16, 2, N_TOK, KV, -1);
    struct tensor rope = gpu_random(DT_BF16, 3, N_TOK, ROPE, -1), qkv = gpu_empty(DT_BF16, N_TOK, QKV, -1);
    struct tensor few = gpu_empty(DT_BF16, LAST, QKV, -1), few_q = gpu_empty(DT_BF16, LAST, Q, -1);
    struct tensor few_kv = gpu_empty(DT_BF16, LAST, KV, -1), few_rope = gpu_empty(DT_BF16, LAST, ROPE, -1);
    mem_free(at);
    op_mla_qkv_fwd(&gpu, qkv, q, kv, rope, pos, table, &shape);
    op_mla_qkv_fwd(&gpu, few, last(q), last(kv), last(rope), last(pos), table, &shape);
    expect_same("q | k | v", last(qkv), few);
    op_mla_qkv_bwd(&gpu, q, kv, rope, qkv, pos, table, &shape);
    op_mla_qkv_bwd(&gpu, few_q, few_kv, few_rope, few, last(pos), table, &shape);
    expect_same("dq", last(q), few_q);
    expect_same("dkv", last(kv), few_kv);
    expect_same("dk_rope", last(rope), few_rope);
}

/* y[t] = w[(t + LAST) % V]: the last rows of the table, then the first ones, are the last rows of y. */
static void embed_large_on_the_gpu(void **state)
{
    (void)state;
    gpu_begin(12, 1, false);
    int32_t *ids = mem_array(N_TOK, sizeof(*ids));
    for (int32_t t = 0; t < N_TOK; t++) ids[t] = (t + LAST) % N_TOK;
    const struct weight w = gpu_weight(1, 1, N_TOK, DIM);
    const struct tensor tok = gpu_i32(ids, N_TOK), table = tensor_2d((void *)w.data, DT_BF16, N_TOK, DIM);
    const struct tensor y = gpu_empty(DT_BF16, N_TOK, DIM, -1);
    mem_free(ids);
    op_embed_fwd(&gpu, y, &w, tok);
    expect_same("last rows", last(y), tensor_rows(table, 0, LAST));
    expect_same("rows before them", tensor_rows(y, N_TOK - 2 * LAST, LAST), last(table));
}

/* dy is zero except in the last rows, so that the adapter's gradients are those of the small problem. */
static void linear_large_on_the_gpu(void **state)
{
    (void)state;
    enum { R = 8 };
    gpu_begin(28, 1, false);
    const struct proj proj = {.w = gpu_weight(1, 1, DIM, DIM),
                              .bias = gpu_random(DT_F32, 6, DIM, -1, -1),
                              .lora = {.a = gpu_random(DT_BF16, 2, R, DIM, -1),
                                       .b = gpu_random(DT_BF16, 3, DIM, R, -1),
                                       .r = R,
                                       .scale = {0.5f},
                                       .n_seg = 1,
                                       .seg_cols = {DIM}},
                              .grad = {gpu_zero(DT_F32, R, DIM, -1), gpu_zero(DT_F32, DIM, R, -1)}};
    struct proj few = proj;
    few.grad = (struct lora_grad){gpu_zero(DT_F32, R, DIM, -1), gpu_zero(DT_F32, DIM, R, -1)};
    struct tensor x = gpu_random(DT_BF16, 4, N_TOK, DIM, -1), res = gpu_random(DT_BF16, 5, N_TOK, DIM, -1);
    struct tensor y = gpu_empty(DT_BF16, N_TOK, DIM, -1), few_y = gpu_empty(DT_BF16, LAST, DIM, -1);
    struct tensor xa = gpu_empty(DT_BF16, N_TOK, R, -1), few_xa = gpu_empty(DT_BF16, LAST, R, -1);
    op_linear_fwd(&gpu, y, xa, x, &proj, res);
    op_linear_fwd(&gpu, few_y, few_xa, last(x), &few, last(res));
    expect_near("y", last(y), few_y, ROUNDINGS);
    expect_near("xa", last(xa), few_xa, ROUNDINGS);

    struct tensor dy = gpu_zero(DT_BF16, N_TOK, DIM, -1), few_dy = gpu_random(DT_BF16, 7, LAST, DIM, -1);
    struct tensor dx = gpu_empty(DT_BF16, N_TOK, DIM, -1), few_dx = gpu_empty(DT_BF16, LAST, DIM, -1);
    gpu.ops->copy(last(dy).data, few_dy.data, tensor_bytes(few_dy));
    op_linear_bwd(&gpu, dx, dy, x, xa, &proj);
    op_linear_bwd(&gpu, few_dx, few_dy, last(x), few_xa, &few);
    expect_near("dx", last(dx), few_dx, ROUNDINGS);
    expect_near("dA", proj.grad.a, few.grad.a, ROUNDINGS);
    expect_near("dB", proj.grad.b, few.grad.b, ROUNDINGS);
}

/* Dropout depends on the index in x. The small problem has no dropout; in its x the dropped elements are zeros and the
 * others doubled. */
static void dropout_large_on_the_gpu(void **state)
{
    (void)state;
    enum { R = 8, OUT = 64, FIRST = N_TOK - LAST };
    gpu_begin(12, 5, false);
    struct proj proj = {.w = gpu_weight(1, 1, OUT, DIM),
                        .lora = {.a = gpu_random(DT_BF16, 2, R, DIM, -1),
                                 .b = gpu_random(DT_BF16, 3, OUT, R, -1),
                                 .r = R,
                                 .scale = {0.5f},
                                 .n_seg = 1,
                                 .seg_cols = {OUT},
                                 .dropout = 0.5f,
                                 .dropout_key = 11}};
    const struct tensor none = {0};
    struct tensor x = gpu_random(DT_BF16, 4, N_TOK, DIM, -1), few_x = gpu_copy(last(x)), host = gpu_host(few_x);
    struct tensor y = gpu_empty(DT_BF16, N_TOK, OUT, -1), few_y = gpu_empty(DT_BF16, LAST, OUT, -1);
    struct tensor xa = gpu_empty(DT_BF16, N_TOK, R, -1), few_xa = gpu_empty(DT_BF16, LAST, R, -1);
    for (int64_t i = 0; i < tensor_count(host); i++) {
        const bool kept = rng_uniform(proj.lora.dropout_key, (uint64_t)(1LL * FIRST * DIM + i)) >= 0.5;
        set_value(host, i, kept ? 2 * value_at(host, i) : 0);
    }
    gpu.ops->upload(few_x.data, host.data, tensor_bytes(host));
    mem_free(host.data);
    op_linear_fwd(&gpu, y, xa, x, &proj, none);
    proj.lora.dropout = 0;
    op_linear_fwd(&gpu, few_y, few_xa, few_x, &proj, none);
    expect_near("xa", last(xa), few_xa, ROUNDINGS);
}

/* ---- attention: many short sequences; the small problem is the last three ---- */

static void attention(int64_t n_head, int64_t head_dim, int64_t value_dim)
{
    enum { LEN = 41, N_SEQ = (N_TOK + LEN - 1) / LEN };
    const int64_t work = head_dim == 64 ? 9 : 1; /* GiB; the Hopper backward of heads of 64 has sums of dq in f32 */
    gpu_begin(21 + work, work, false);
    const struct attn_shape shape = {n_head, 1, head_dim, 0, head_dim == 64 ? 0.125f : 0.0884f, value_dim};
    const int64_t width = (n_head + 1) * head_dim + value_dim, first = (N_SEQ - 3) * LEN, n = N_TOK - first;
    const int32_t few_cu[] = {0, LEN, 2 * LEN, (int32_t)n};
    int32_t *cu = mem_array(N_SEQ + 1, sizeof(*cu));
    for (int32_t s = 0; s <= N_SEQ; s++) cu[s] = MT_MIN(s * LEN, N_TOK);
    const struct seqs seqs = {gpu_i32(cu, N_SEQ + 1), .n_seq = N_SEQ, .max_len = LEN, .pairs = 1};
    const struct seqs few_seqs = {gpu_i32(few_cu, 4), .n_seq = 3, .max_len = LEN, .pairs = 1};
    mem_free(cu);
    struct tensor qkv = gpu_random(DT_BF16, 1, N_TOK, width, -1), dqkv = gpu_empty(DT_BF16, N_TOK, width, -1);
    struct tensor o = gpu_empty(DT_BF16, N_TOK, n_head * value_dim, -1), lse = gpu_empty(DT_F32, N_TOK, n_head, -1);
    struct tensor dout = gpu_random(DT_BF16, 2, N_TOK, n_head * value_dim, -1);
    struct tensor sinks = gpu_random(DT_F32, 3, n_head, -1, -1), few_qkv = tensor_rows(qkv, first, n);
    struct tensor few_o = gpu_empty(DT_BF16, n, n_head * value_dim, -1), few_lse = gpu_empty(DT_F32, n, n_head, -1);
    struct tensor few_dqkv = gpu_empty(DT_BF16, n, width, -1);
    op_attn_fwd(&gpu, o, lse, qkv, sinks, &seqs, &shape);
    op_attn_fwd(&gpu, few_o, few_lse, few_qkv, sinks, &few_seqs, &shape);
    expect_same("o", tensor_rows(o, first, n), few_o);
    expect_same("lse", tensor_rows(lse, first, n), few_lse);
    op_attn_bwd(&gpu, dqkv, dout, o, lse, qkv, &seqs, &shape);
    op_attn_bwd(&gpu, few_dqkv, tensor_rows(dout, first, n), few_o, few_lse, few_qkv, &few_seqs, &shape);
    expect_same("dqkv", tensor_rows(dqkv, first, n), few_dqkv);
    gpu_end(NULL);
}

static void attention_large_on_the_gpu(void **state)
{
    (void)state;
    attention(32, 64, 64);
    attention(16, 128, 128);
    attention(10, 192, 128);
    attention(8, 256, 256);
}

/* ---- loss: logits [chunk, V]; the last rows of x are labelled, and every other one is parallel to its label's row
 * ----
 */

static void loss_head_large_on_the_gpu(void **state)
{
    (void)state;
    enum { VOCAB = 201088, CHUNK = 10752 };
    _Static_assert(1LL * VOCAB * CHUNK > INT32_MAX, "more than 2^31 logits");
    gpu_begin(22, 9, false);
    const struct weight w = gpu_weight(1, 1, VOCAB, DIM);
    struct tensor x = gpu_random(DT_BF16, 2, N_TOK, DIM, -1);
    int32_t *rows = mem_array(CHUNK, sizeof(*rows)), *ids = mem_array(CHUNK, sizeof(*ids)), in_order[LAST];
    for (int32_t k = 0; k < CHUNK; k++) {
        rows[k] = N_TOK - CHUNK + k;
        ids[k] = (int32_t)(rng_u64(3, (uint64_t)k) % VOCAB);
        if (k % 2)
            gpu.ops->copy(tensor_rows(x, rows[k], 1).data, (const uint16_t *)w.data + (int64_t)ids[k] * DIM, 2 * DIM);
    }
    for (int32_t k = 0; k < LAST; k++) in_order[k] = k;
    struct tensor row = gpu_i32(rows, CHUNK), id = gpu_i32(ids, CHUNK), few_row = gpu_i32(in_order, LAST);
    struct tensor nll = gpu_empty(DT_F32, CHUNK, -1, -1), few_nll = gpu_empty(DT_F32, LAST, -1, -1);
    struct tensor hit = gpu_empty(DT_I32, CHUNK, -1, -1), few_hit = gpu_empty(DT_I32, LAST, -1, -1);
    struct tensor dx = gpu_empty(DT_BF16, N_TOK, DIM, -1), few_dx = gpu_empty(DT_BF16, LAST, DIM, -1);
    mem_free(rows);
    mem_free(ids);
    op_linear_ce(&gpu, nll, hit, dx, x, &w, 0, row, id, 1, CHUNK);
    op_linear_ce(&gpu, few_nll, few_hit, few_dx, last(x), &w, 0, few_row, last(id), 1, LAST);
    expect_near("nll", last(nll), few_nll, F32_SUMS);
    expect_same("hit", last(hit), few_hit);
    expect_near("dx", last(dx), few_dx, ROUNDINGS);
}

/* ---- the router ---- */

static struct route empty_route(int64_t n_tok, int64_t n_top, int64_t n_exp)
{
    return (struct route){.idx = gpu_empty(DT_I32, n_tok, n_top, -1),
                          .gate = gpu_empty(DT_F32, n_tok, n_top, -1),
                          .offs = gpu_empty(DT_I32, n_exp + 1, -1, -1),
                          .row_slot = gpu_empty(DT_I32, n_tok * n_top, -1, -1),
                          .slot_row = gpu_empty(DT_I32, n_tok, n_top, -1)};
}

/* Compares the complete sort with one on the host; sets count [E]. */
static void check_sort(const struct route *r, int64_t n_exp, int64_t *count)
{
    const struct tensor idx = gpu_host(r->idx), offs = gpu_host(r->offs), rows = gpu_host(r->row_slot);
    const struct tensor slots = gpu_host(r->slot_row);
    const int64_t n = tensor_count(idx);
    const int32_t *expert = idx.data, *start = offs.data, *row_slot = rows.data, *slot_row = slots.data;
    int64_t *next = mem_array(n_exp, sizeof(*next)), wrong = 0;
    for (int64_t s = 0; s < n; s++) {
        assert_in_range(expert[s], 0, n_exp - 1);
        count[expert[s]]++;
    }
    for (int64_t e = 0, before = 0; e < n_exp; before += count[e++]) {
        next[e] = before;
        wrong += start[e] != before;
    }
    for (int64_t s = 0; s < n; s++) {
        const int64_t row = next[expert[s]]++;
        wrong += slot_row[s] != row || row_slot[row] != s;
    }
    assert_int_equal(start[n_exp], n);
    assert_int_equal(wrong, 0);
    mem_free(next);
    mem_free(idx.data);
    mem_free(offs.data);
    mem_free(rows.data);
    mem_free(slots.data);
}

static struct aux empty_aux(int64_t n_exp, int64_t rows)
{
    const struct tensor count = gpu_zero(DT_F32, n_exp, -1, -1), prob = gpu_zero(DT_F32, n_exp, -1, -1);
    return (struct aux){.coef = 0.1f, .pooled = true, .count = count, .prob = prob, .rows = rows};
}

/* The statistics of all rows equal the sums of two parts; the counts equal those of the sort. */
static void check_stats(const struct aux *aux, struct tensor logits, const struct route *r, const int64_t *count)
{
    const int64_t n_exp = aux->count.shape[0], n_tok = logits.shape[0], half = n_tok / 2;
    struct aux parts = empty_aux(n_exp, n_tok);
    for (int64_t first = 0, n = half; first < n_tok; first += n, n = n_tok - half) {
        const int64_t n_top = r->idx.shape[1];
        const struct route part = {tensor_rows(r->idx, first, n), tensor_rows(r->gate, first, n), r->offs,
                                   tensor_rows(r->row_slot, first * n_top, n * n_top),
                                   tensor_rows(r->slot_row, first, n)};
        op_aux_stats(&gpu, &parts, tensor_rows(logits, first, n), &part);
    }
    expect_same("count", aux->count, parts.count);
    expect_near("prob", aux->prob, parts.prob, F32_SUMS);
    const struct tensor got = gpu_host(aux->count);
    for (int64_t e = 0; e < n_exp; e++) assert_int_equal((int64_t)value_at(got, e), count[e]);
    mem_free(got.data);
}

static void router_large_on_the_gpu(void **state)
{
    (void)state;
    enum { TOKENS = (1 << 22) + 37, N_EXP = 512, TOP = 4, WIDTH = 520 };
    _Static_assert(1LL * TOKENS * N_EXP > INT32_MAX, "more than 2^31 logits");
    static int64_t count[N_EXP];
    gpu_begin(27, 13, false);
    const struct weight w = gpu_weight(1, 1, N_EXP, WIDTH);
    struct tensor x = gpu_random(DT_BF16, 2, TOKENS, WIDTH, -1), bias = gpu_random(DT_F32, 3, N_EXP, -1, -1);
    struct tensor logits = gpu_empty(DT_F32, TOKENS, N_EXP, -1), few_logits = gpu_empty(DT_F32, LAST, N_EXP, -1);
    struct route r = empty_route(TOKENS, TOP, N_EXP), few = empty_route(LAST, TOP, N_EXP);
    const struct router how = {.kind = ROUTER_PROBABILITY};
    op_router_fwd(&gpu, &r, logits, x, &w, bias, &how);
    op_router_fwd(&gpu, &few, few_logits, last(x), &w, bias, &how);
    expect_same("logits", last(logits), few_logits);
    expect_same("idx", last(r.idx), few.idx);
    expect_same("gate", last(r.gate), few.gate);
    op_route_sort(&gpu, &r, N_EXP);
    memset(count, 0, sizeof(count));
    check_sort(&r, N_EXP, count);
    struct aux aux = empty_aux(N_EXP, TOKENS);
    op_aux_stats(&gpu, &aux, logits, &r);
    check_stats(&aux, logits, &r, count);

    struct tensor dgate = gpu_random(DT_F32, 4, TOKENS, TOP, -1), dx = gpu_random(DT_BF16, 5, TOKENS, WIDTH, -1);
    struct tensor few_dx = gpu_copy(last(dx));
    op_router_bwd(&gpu, dx, dgate, &r, logits, &w, &aux, &how);
    op_router_bwd(&gpu, few_dx, last(dgate), &few, few_logits, &w, &aux, &how);
    expect_near("dx", last(dx), few_dx, ROUNDINGS); /* cuBLASLt's algorithm may depend on the number of rows */
}

/* ---- the experts ----
 * Rows in expert order are [M, ...]; those of the last tokens are the last rows of every expert. The small problem is
 * these tokens with a separate route; slot by slot, its rows correspond to rows of the large problem. */

enum { N_EXP = 8, TOP = 2, N_ROW = TOP * N_TOK, FEW_ROW = TOP * LAST, WIDTH = 1056, RANK = 8 };
_Static_assert(1LL * N_ROW * WIDTH > INT32_MAX, "an [M, F] tensor has more than 2^31 elements");

static struct route all_rows, few_rows;
/* For each slot of the last tokens: its row in the large and in the small problem. */
static int32_t all_row[FEW_ROW], few_row[FEW_ROW];

static struct route sorted_route(int64_t first, int64_t n_tok)
{
    struct route r = empty_route(n_tok, TOP, N_EXP);
    int32_t *idx = mem_array(TOP * n_tok, sizeof(*idx));
    for (int64_t i = 0; i < n_tok; i++) {
        idx[TOP * i] = (int32_t)((first + i) % 4);
        idx[TOP * i + 1] = (int32_t)(4 + (first + i) / 4 % 4);
    }
    gpu.ops->upload(r.idx.data, idx, tensor_bytes(r.idx));
    mem_free(idx);
    op_route_sort(&gpu, &r, N_EXP);
    return r;
}

static void begin_experts(int64_t gib, int64_t work_gib, bool portable)
{
    gpu_begin(gib, work_gib, portable);
    all_rows = sorted_route(0, N_TOK);
    few_rows = sorted_route(N_TOK - LAST, LAST);
    all_rows.gate = gpu_random(DT_F32, 90, N_TOK, TOP, -1);
    few_rows.gate = last(all_rows.gate);
    gpu.ops->download(all_row, last(all_rows.slot_row).data, sizeof(all_row));
    gpu.ops->download(few_row, few_rows.slot_row.data, sizeof(few_row));
    bool reached = false;
    for (int i = 0; i < FEW_ROW; i++) reached |= all_row[i] == N_ROW - 1;
    assert_true(reached);
}

/* Copies rows of the last tokens from `all` [M, n] to `few` [m, n] or back. */
static void move_rows(struct tensor all, struct tensor few, bool back)
{
    const int64_t bytes = all.shape[1] * dtype_size(all.dtype);
    for (int s = 0; s < FEW_ROW; s++) {
        char *a = (char *)all.data + all_row[s] * bytes, *f = (char *)few.data + few_row[s] * bytes;
        gpu.ops->copy(back ? a : f, back ? f : a, bytes);
    }
}

static struct tensor few_of(struct tensor all)
{
    struct tensor few = gpu_empty(all.dtype, FEW_ROW, all.shape[1], -1);
    move_rows(all, few, false);
    return few;
}

static struct lora_grad zero_grad(int64_t n_in, int64_t n_out)
{
    return (struct lora_grad){gpu_zero(DT_F32, N_EXP, RANK, n_in), gpu_zero(DT_F32, N_EXP, n_out, RANK)};
}

/* Weight, bias and adapter from the streams 1, bias_stream, 2 and 3; no gradients. */
static struct proj expert_proj(int64_t n_in, int64_t n_out, uint64_t bias_stream)
{
    return (struct proj){.w = gpu_weight(1, N_EXP, n_out, n_in),
                         .bias = gpu_random(DT_F32, bias_stream, N_EXP, n_out, -1),
                         .lora = {.a = gpu_random(DT_BF16, 2, N_EXP, RANK, n_in),
                                  .b = gpu_random(DT_BF16, 3, N_EXP, n_out, RANK),
                                  .r = RANK,
                                  .scale = {0.5f},
                                  .n_seg = 1}};
}

static void expect_grad(const struct proj *got, const struct proj *want)
{
    expect_near("dA", got->grad.a, want->grad.a, F32_SUMS);
    expect_near("dB", got->grad.b, want->grad.b, F32_SUMS);
}

static void moe_up_fwd(bool portable, bool interleaved)
{
    begin_experts(portable ? 24 : 33, portable ? 1 : 10, portable); /* Hopper: a copy of the rows */
    const struct glu glu = {GLU_CLAMPED, 1.702f, 7, interleaved};
    const struct proj up = expert_proj(DIM, 2 * WIDTH, 5);
    struct tensor x = gpu_random(DT_BF16, 4, N_TOK, DIM, -1);
    struct tensor act = gpu_empty(DT_BF16, N_ROW, WIDTH, -1), few_act = gpu_empty(DT_BF16, FEW_ROW, WIDTH, -1);
    struct tensor pre = gpu_empty(DT_BF16, N_ROW, 2 * WIDTH, -1), few_pre = gpu_empty(DT_BF16, FEW_ROW, 2 * WIDTH, -1);
    struct tensor xa = gpu_empty(DT_BF16, N_ROW, RANK, -1), few_xa = gpu_empty(DT_BF16, FEW_ROW, RANK, -1);
    op_moe_up_fwd(&gpu, act, pre, xa, x, &all_rows, &up, &glu);
    op_moe_up_fwd(&gpu, few_act, few_pre, few_xa, last(x), &few_rows, &up, &glu);
    expect_same("xa", few_of(xa), few_xa);
    expect_same("pre", few_of(pre), few_pre);
    expect_same("act", few_of(act), few_act);
    gpu_end(NULL);
}

static void moe_up_fwd_large_on_the_gpu(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) moe_up_fwd(k / 2, k % 2);
}

static void moe_down_fwd(bool portable)
{
    begin_experts(28, 1, portable);
    const struct proj down = expert_proj(WIDTH, DIM, 5);
    struct tensor act = gpu_random(DT_BF16, 4, N_ROW, WIDTH, -1);
    struct tensor y = gpu_empty(DT_BF16, N_ROW, DIM, -1), few_y = gpu_empty(DT_BF16, FEW_ROW, DIM, -1);
    struct tensor ha = gpu_empty(DT_BF16, N_ROW, RANK, -1), few_ha = gpu_empty(DT_BF16, FEW_ROW, RANK, -1);
    op_moe_down_fwd(&gpu, y, ha, act, &all_rows, &down);
    op_moe_down_fwd(&gpu, few_y, few_ha, few_of(act), &few_rows, &down);
    expect_same("ha", few_of(ha), few_ha);
    expect_same("y", few_of(y), few_y);

    struct tensor res = gpu_random(DT_BF16, 6, N_TOK, DIM, -1);
    struct tensor out = gpu_empty(DT_BF16, N_TOK, DIM, -1), few_out = gpu_empty(DT_BF16, LAST, DIM, -1);
    op_moe_combine_fwd(&gpu, out, res, y, &all_rows);
    op_moe_combine_fwd(&gpu, few_out, last(res), few_y, &few_rows);
    expect_same("combined", last(out), few_out);
    gpu_end(NULL);
}

static void moe_down_fwd_and_combine_large_on_the_gpu(void **state)
{
    (void)state;
    for (int portable = 0; portable < 2; portable++) moe_down_fwd(portable);
}

/* In the backward passes the incoming gradient is zero except for the last tokens: then the adapter's gradients, which
 * are sums over all rows, are those of the small problem. */
static void moe_down_bwd(bool portable, struct glu glu)
{
    begin_experts(portable ? 32 : 41, portable ? 1 : 10, portable);
    struct proj down = expert_proj(WIDTH, DIM, 4), few = down;
    down.grad = zero_grad(WIDTH, DIM), few.grad = zero_grad(WIDTH, DIM);
    struct tensor pre = gpu_random(DT_BF16, 5, N_ROW, 2 * WIDTH, -1);
    struct tensor ha = gpu_random(DT_BF16, 6, N_ROW, RANK, -1), dout = gpu_zero(DT_BF16, N_TOK, DIM, -1);
    struct tensor few_dout = gpu_random(DT_BF16, 7, LAST, DIM, -1);
    struct tensor act = gpu_empty(DT_BF16, N_ROW, WIDTH, -1), few_act = gpu_empty(DT_BF16, FEW_ROW, WIDTH, -1);
    struct tensor dpre = gpu_empty(DT_BF16, N_ROW, 2 * WIDTH, -1);
    struct tensor few_dpre = gpu_empty(DT_BF16, FEW_ROW, 2 * WIDTH, -1);
    struct tensor dgate = gpu_empty(DT_F32, N_TOK, TOP, -1), few_dgate = gpu_empty(DT_F32, LAST, TOP, -1);
    gpu.ops->copy(last(dout).data, few_dout.data, tensor_bytes(few_dout));
    op_moe_down_bwd(&gpu, dpre, dgate, act, dout, pre, ha, &all_rows, &down, &glu);
    op_moe_down_bwd(&gpu, few_dpre, few_dgate, few_act, few_dout, few_of(pre), few_of(ha), &few_rows, &few, &glu);
    expect_same("dpre", few_of(dpre), few_dpre);
    expect_same("act", few_of(act), few_act);
    expect_same("dgate", last(dgate), few_dgate);
    expect_grad(&down, &few);
    gpu_end(NULL);
}

static void moe_down_bwd_large_on_the_gpu(void **state)
{
    (void)state;
    static const struct glu glu[] = {
        {GLU_CLAMPED, 1.702f, 7, false}, {GLU_CLAMPED, 1.702f, 7, true}, {GLU_SWIGLU, 1, 0, false}};
    for (int k = 0; k < 6; k++) moe_down_bwd(k / 3, glu[k % 3]);
}

static void moe_up_bwd(bool portable)
{
    begin_experts(34, 9, portable);
    struct proj up = expert_proj(DIM, 2 * WIDTH, 7), few = up;
    up.bias = few.bias = (struct tensor){0};
    up.grad = zero_grad(DIM, 2 * WIDTH), few.grad = zero_grad(DIM, 2 * WIDTH);
    struct tensor x = gpu_random(DT_BF16, 4, N_TOK, DIM, -1), xa = gpu_random(DT_BF16, 5, N_ROW, RANK, -1);
    struct tensor dpre = gpu_zero(DT_BF16, N_ROW, 2 * WIDTH, -1);
    struct tensor few_dpre = gpu_random(DT_BF16, 6, FEW_ROW, 2 * WIDTH, -1);
    struct tensor dx = gpu_empty(DT_BF16, N_TOK, DIM, -1), few_dx = gpu_empty(DT_BF16, LAST, DIM, -1);
    move_rows(dpre, few_dpre, true);
    op_moe_up_bwd(&gpu, dx, dpre, x, xa, &all_rows, &up);
    op_moe_up_bwd(&gpu, few_dx, few_dpre, last(x), few_of(xa), &few_rows, &few);
    expect_same("dx", last(dx), few_dx);
    expect_grad(&up, &few);
    gpu_end(NULL);
}

static void moe_up_bwd_large_on_the_gpu(void **state)
{
    (void)state;
    for (int portable = 0; portable < 2; portable++) moe_up_bwd(portable);
}

/* ---- weights: the last values of the last expert against their definition ---- */

#ifdef MT_CUDA
struct stack {
    enum weight_format format;
    bool nested;
    int64_t n_exp, n_out, n_in;
};

/* Bytes of one expert's data. */
static int64_t data_bytes(const struct weight *w)
{
    return w->n_out * w->n_in * (w->format == WF_F32 ? 8 : w->format == WF_FP8 ? 2 : 1) / 2;
}

static struct weight make_stack(const struct stack *s)
{
    struct weight w = {.format = s->format, .n_exp = s->n_exp, .n_out = s->n_out, .n_in = s->n_in, .block = 64};
    const int64_t block = weight_scale_block(w.format), n_block = block ? w.n_out * w.n_in / block : weight_blocks(&w);
    float map[256];
    w.data = gpu_repeat(w.format == WF_F32 ? OF_F32 : OF_BYTES, 1, w.n_exp * data_bytes(&w));
    if (w.format == WF_MXFP4) w.scale = gpu_repeat(OF_SCALES, 2, w.n_exp * n_block);
    if (w.format == WF_NVFP4) w.scale = gpu_repeat(OF_SCALES, 2, w.n_exp * n_block);
    if (weight_row_scales(&w)) w.scale2 = gpu_repeat(OF_F32, 3, 4 * w.n_exp * w.n_out * weight_row_scales(&w));
    if (w.format != WF_NF4) return w;
    w.code = gpu_bytes(quant_nf4_code, sizeof(quant_nf4_code));
    if (!s->nested) {
        w.absmax = gpu_repeat(OF_F32, 3, 4 * w.n_exp * n_block);
        return w;
    }
    quant_dynamic_map(map);
    w.scale = gpu_repeat(OF_BYTES, 4, w.n_exp * n_block);
    w.nested_absmax = gpu_repeat(OF_F32, 5, 4 * w.n_exp * ((n_block + 255) / 256));
    w.nested_offset = gpu_repeat(OF_F32, 6, 4 * w.n_exp);
    w.nested_map = gpu_bytes(map, sizeof(map));
    return w;
}

/* Entry e of an array with entries of `bytes`, copied to the host; NULL for NULL. */
static void *fetch(const void *array, int64_t e, int64_t bytes)
{
    if (!array) return NULL;
    void *p = mem_alloc(bytes);
    gpu.ops->download(p, (const char *)array + e * bytes, bytes);
    return p;
}

static void dequant(const struct stack *s)
{
    enum { COMPARED = 100000 };
    gpu_begin(16, 1, false);
    const struct weight w = make_stack(s);
    const int64_t n = w.n_out * w.n_in, e = w.n_exp - 1, n_block = weight_blocks(&w);
    const int64_t block = weight_scale_block(w.format);
    struct tensor out = gpu_empty(DT_BF16, w.n_exp * n, -1, -1);
    assert_true(tensor_count(out) > INT32_MAX);
    cuda_dequant(out.data, &w, 0, w.n_exp, NULL, NULL);
    const struct weight host = {.format = w.format,
                                .n_exp = 1,
                                .n_out = w.n_out,
                                .n_in = w.n_in,
                                .data = fetch(w.data, e, data_bytes(&w)),
                                .scale = fetch(w.scale, e, block ? n / block : n_block),
                                .scale2 = fetch(w.scale2, e, 4 * w.n_out * weight_row_scales(&w)),
                                .absmax = fetch(w.absmax, e, 4 * n_block),
                                .nested_absmax = fetch(w.nested_absmax, e, 4 * ((n_block + 255) / 256)),
                                .nested_offset = fetch(w.nested_offset, e, 4),
                                .nested_map = fetch(w.nested_map, 0, 1024),
                                .code = fetch(w.code, 0, 64),
                                .block = w.block};
    const struct tensor got = gpu_host(tensor_rows(out, w.n_exp * n - COMPARED, COMPARED));
    for (int64_t i = 0; i < COMPARED; i++) {
        const float want = quant_value(&host, 0, n - COMPARED + i); /* a NaN where the scale's byte is one */
        const uint16_t bits = ((uint16_t *)got.data)[i];
        if (!isnan(want))
            assert_int_equal(bits, f32_to_bf16(want));
        else
            assert_true(isnan(bf16_to_f32(bits)));
    }
    const void *const parts[] = {host.data,          host.scale2,     host.scale, host.absmax, host.nested_absmax,
                                 host.nested_offset, host.nested_map, host.code,  got.data};
    for (int i = 0; i < MT_LEN(parts); i++) mem_free((void *)parts[i]);
    gpu_end(NULL);
}

static void dequant_large_on_the_gpu(void **state)
{
    static const struct stack stacks[] = {
        {WF_MXFP4, false, 131, 5760, 2880},
        {WF_NVFP4, false, 131, 5760, 2880},
        {WF_NF4, false, 131, 5760, 2880},
        {WF_NF4, true, 131, 5760, 2880},
        {WF_FP8, false, 131, 5760, 2880},
        {WF_F32, false, 131, 5761, 2879}, /* odd sizes: no vector access is aligned */
    };
    (void)state;
    for (int i = 0; i < MT_LEN(stacks); i++) dequant(&stacks[i]);
}
#endif

/* ---- flat arrays ---- */

enum { TAIL = 1021 }; /* of N_FLAT: begins at a multiple of 16 */
#define N_FLAT (((int64_t)1 << 31) + (1 << 20) + 13)

static struct tensor tail(struct tensor x) { return tensor_rows(x, x.shape[0] - TAIL, TAIL); }

static void cast_large_on_the_gpu(void **state)
{
    (void)state;
    gpu_begin(16, 1, false);
    struct tensor src = gpu_random(DT_F32, 1, N_FLAT, -1, -1), dst = gpu_empty(DT_BF16, N_FLAT, -1, -1);
    struct tensor few_dst = gpu_empty(DT_BF16, TAIL, -1, -1);
    op_cast(&gpu, dst, src);
    op_cast(&gpu, few_dst, tail(src));
    expect_same("dst", tail(dst), few_dst);
}

static void adamw_large_on_the_gpu(void **state)
{
    (void)state;
    gpu_begin(38, 1, false);
    const struct adamw_step step = {1e-2f, 0.9f, 0.99f, 1e-8f, 0.1f, 0.5f, 0.1f, 0.01f};
    struct tensor p = gpu_random(DT_F32, 1, N_FLAT, -1, -1), m = gpu_random(DT_F32, 2, N_FLAT, -1, -1);
    struct tensor v = gpu_zero(DT_F32, N_FLAT, -1, -1), g = gpu_random(DT_F32, 3, N_FLAT, -1, -1);
    struct tensor few_p = gpu_copy(tail(p)), few_m = gpu_copy(tail(m)), few_v = gpu_copy(tail(v));
    op_adamw(&gpu, p, m, v, g, &step);
    op_adamw(&gpu, few_p, few_m, few_v, tail(g), &step);
    expect_same("p", tail(p), few_p);
    expect_same("m", tail(m), few_m);
    expect_same("v", tail(v), few_v);
}

static void sum_of_squares(double out[2], struct tensor g)
{
    struct tensor sum = gpu_empty(DT_F64, 2, -1, -1);
    op_sumsq(&gpu, sum, g);
    device_get(&gpu, out, sum);
}

/* The sum equals that of the parts; non-finite values in the last elements are counted. */
static void sumsq(enum dtype t)
{
    gpu_begin(12, 1, false);
    struct tensor g = gpu_random(t, 1, N_FLAT, -1, -1);
    const int64_t part = (int64_t)1 << 29, size = dtype_size(t);
    double all[2], some[2], sum = 0;
    sum_of_squares(all, g);
    for (int64_t first = 0; first < N_FLAT; first += part) {
        sum_of_squares(some, tensor_rows(g, first, MT_MIN(part, N_FLAT - first)));
        sum += some[0];
    }
    assert_close(all[0], sum, 1e-12);
    assert_int_equal((int64_t)all[1], 0);
    gpu.ops->copy(tensor_rows(g, N_FLAT - 1, 1).data, gpu_pattern[OF_ONES], size);
    sum_of_squares(all, g);
    assert_int_equal((int64_t)all[1], 1);
    gpu_end(NULL);
}

static void sumsq_large_on_the_gpu(void **state)
{
    (void)state;
    sumsq(DT_F32);
    sumsq(DT_BF16);
}

#define LARGE(name) cmocka_unit_test_teardown(name##_large_on_the_gpu, gpu_end)

int test_large(void)
{
    const struct CMUnitTest tests[] = {
        LARGE(rmsnorm),      LARGE(qk_norm),    LARGE(rope),       LARGE(mla_qkv),
        LARGE(embed),        LARGE(linear),     LARGE(dropout),    LARGE(attention),
        LARGE(loss_head),    LARGE(router),     LARGE(moe_up_fwd), LARGE(moe_down_fwd_and_combine),
        LARGE(moe_down_bwd), LARGE(moe_up_bwd),
#ifdef MT_CUDA
        LARGE(dequant),
#endif
        LARGE(cast),         LARGE(adamw),      LARGE(sumsq),
    };
    return cmocka_run_group_tests_name("large", tests, NULL, NULL);
}
