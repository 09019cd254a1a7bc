/* attn_shared.c - attention whose heads share one key, which is the value too: over a window of tokens, entries (each a
 * sum of several tokens: compress.c), and a sink.
 *
 * In passes that sample (steady_rows) the forward gathers the keys of a token, as decoding does.
 *
 * All heads of a token see the same keys, so one product computes the scores of all heads. Forward and dq go token by
 * token. Gradients of keys go by blocks of BLOCK keys or entries, each over its tokens in ascending order, with any
 * number of threads. */
#include "kernels/cpu/gemm.h"

#include <omp.h>
#include <string.h>

#include "kernels/cpu/seqs.h"

enum { BLOCK = 32 };

struct attn {
    const struct shared_attn_shape *s;
    struct tensor o, lse, q, kv, entry, idx, sinks;
    struct tensor dq, dkv, dentry, dout, delta; /* backward; delta [T,H]: <dout, o> */
    int64_t n_key;                              /* of a token, at most */
    int64_t first, len, first_entry;            /* the sequence: rows, and the row of its entry 0 */
};

/* The keys of a token in one tensor: n rows of kv, or of the entries; with `list`, the n rows that it names. row: the
 * first of them, or a gathered copy of all in scratch. */
struct keys {
    const real *row;
    int64_t ld, n, lo; /* lo: number of the first in the sequence, without list */
    const int32_t *list;
};

/* What a thread needs: weights p and dp [H, n_key], gathered keys and their gradients [n_key, A]. */
struct scratch {
    real *p, *dp, *row, *grad;
};
static int64_t scratch_reals(const struct attn *a) { return 2 * a->n_key * (a->s->n_head + a->s->head_dim); }
static struct scratch scratch_of(const struct attn *a, struct tensor all)
{
    real *at = real_row(all, omp_get_thread_num());
    const int64_t weights = a->s->n_head * a->n_key, rows = a->n_key * a->s->head_dim;
    return (struct scratch){at, at + weights, at + 2 * weights, at + 2 * weights + rows};
}

static void use_sequence(struct attn *a, const struct seqs *seqs, int64_t seq)
{
    const int32_t *cu = seqs->cu.data;
    a->first = cu[seq];
    a->len = cu[seq + 1] - cu[seq];
    a->first_entry = a->entry.ndim ? cu[seq] / a->s->ratio : 0;
}

static struct keys window_keys(const struct attn *a, int64_t i, int64_t lo, int64_t hi)
{
    lo = MT_MAX(lo, i - a->s->window + 1);
    hi = MT_MIN(hi, i + 1);
    return (struct keys){.row = real_row(a->kv, a->first + lo), .ld = a->kv.ld, .n = MT_MAX(0, hi - lo), .lo = lo};
}

/* Entries lo .. hi-1, as far as token i sees them. */
static struct keys entry_keys(const struct attn *a, int64_t i, int64_t lo, int64_t hi, struct scratch *x)
{
    const int64_t dim = a->s->head_dim, n_visible = a->entry.ndim ? (i + 1) / a->s->ratio : 0;
    hi = MT_MIN(hi, n_visible);
    if (lo >= hi) return (struct keys){.n = 0};
    if (!a->idx.ndim)
        return (struct keys){.row = real_row(a->entry, a->first_entry + lo), .ld = a->entry.ld, .n = hi - lo, .lo = lo};
    const int32_t *list = (const int32_t *)a->idx.data + (a->first + i) * a->idx.ld, *end = list + a->idx.shape[1];
    while (list < end && *list >= 0 && *list < lo) list++;
    struct keys k = {.row = x->row, .ld = dim, .list = list};
    for (; list < end && *list >= 0 && *list < hi; list++, k.n++)
        memcpy(x->row + k.n * dim, real_row(a->entry, a->first_entry + *list), (size_t)dim * sizeof(real));
    return k;
}

/* p [H, n] = rows of all heads of a token (q or dout) by its keys */
static void scores(const struct attn *a, real *p, int64_t ld, struct tensor rows, int64_t i, const struct keys *k)
{
    const int64_t dim = a->s->head_dim;
    if (k->n)
        gemm_serial(false, true, a->s->n_head, k->n, dim, 1, real_row(rows, a->first + i), dim, k->row, k->ld, 0, p,
                    ld);
}
/* out [H, A] (= or +=) p times keys */
static void sum_keys(const struct attn *a, real *out, const real *p, int64_t ld, const struct keys *k, bool add)
{
    const int64_t dim = a->s->head_dim;
    if (k->n) gemm_serial(false, false, a->s->n_head, dim, k->n, 1, p, ld, k->row, k->ld, add, out, dim);
}

static real softmax(real *p, int64_t n, real scale, const float *sink)
{
    real max = sink ? (real)*sink : -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        p[j] *= scale;
        max = p[j] > max ? p[j] : max;
    }
    for (int64_t j = 0; j < n; j++) {
        p[j] = real_exp(p[j] - max);
        sum += p[j];
    }
    if (sink) sum += real_exp((real)*sink - max);
    for (int64_t j = 0; j < n; j++) p[j] /= sum;
    return max + (real)log((double)sum);
}

/* Computes o [H, A] of a token, and lse [H] unless NULL, from its n gathered keys `rows`. p [H, n]: scratch. */
static void attend(const struct shared_attn_shape *s, real *o, real *lse, const real *q, const real *rows, int64_t n,
                   struct tensor sinks, real *p)
{
    const int64_t dim = s->head_dim;
    gemm_serial(false, true, s->n_head, n, dim, 1, q, dim, rows, dim, 0, p, n);
    for (int64_t h = 0; h < s->n_head; h++) {
        const real of_head = softmax(p + h * n, n, (real)s->scale, sinks.ndim ? (const float *)sinks.data + h : NULL);
        if (lse) lse[h] = of_head;
    }
    gemm_serial(false, false, s->n_head, dim, n, 1, p, n, rows, dim, 0, o, dim);
}

/* fwd_token with the bits of decoding. */
static void fwd_gathered(const struct attn *a, int64_t i, struct scratch x)
{
    const int64_t dim = a->s->head_dim, t = a->first + i;
    const struct keys near = window_keys(a, i, 0, i + 1);
    struct scratch after = {.row = x.row + near.n * dim};
    const struct keys far = entry_keys(a, i, 0, a->len, &after);
    for (int64_t j = 0; j < near.n; j++) memcpy(x.row + j * dim, near.row + j * near.ld, (size_t)dim * sizeof(real));
    for (int64_t j = 0; j < far.n && far.row != after.row; j++)
        memcpy(after.row + j * dim, far.row + j * far.ld, (size_t)dim * sizeof(real));
    attend(a->s, real_row(a->o, t), real_row(a->lse, t), real_row(a->q, t), x.row, near.n + far.n, a->sinks, x.p);
}

static void fwd_token(const struct attn *a, int64_t i, struct scratch x)
{
    const struct keys near = window_keys(a, i, 0, i + 1), far = entry_keys(a, i, 0, a->len, &x);
    const int64_t n = near.n + far.n;
    real *out = real_row(a->o, a->first + i), *lse = real_row(a->lse, a->first + i);
    scores(a, x.p, n, a->q, i, &near);
    scores(a, x.p + near.n, n, a->q, i, &far);
    for (int64_t h = 0; h < a->s->n_head; h++)
        lse[h] = softmax(x.p + h * n, n, (real)a->s->scale, a->sinks.ndim ? (const float *)a->sinks.data + h : NULL);
    sum_keys(a, out, x.p, n, &near, false);
    sum_keys(a, out, x.p + near.n, n, &far, true);
}

/* p and dp = scale ds of token i and these keys, [H, n]. */
static void weigh(const struct attn *a, int64_t i, const struct keys *k, struct scratch *x)
{
    const real *lse = real_row(a->lse, a->first + i), *delta = real_row(a->delta, a->first + i);
    const real scale = (real)a->s->scale;
    scores(a, x->p, k->n, a->q, i, k);
    scores(a, x->dp, k->n, a->dout, i, k);
    for (int64_t h = 0; h < a->s->n_head; h++) {
        for (int64_t j = h * k->n; j < (h + 1) * k->n; j++) {
            x->p[j] = real_exp(scale * x->p[j] - lse[h]);
            x->dp[j] = scale * x->p[j] * (x->dp[j] - delta[h]);
        }
    }
}

static void dq_token(const struct attn *a, int64_t i, struct scratch x)
{
    const int64_t dim = a->s->head_dim;
    const real *dout = real_row(a->dout, a->first + i), *o = real_row(a->o, a->first + i);
    real *delta = real_row(a->delta, a->first + i), *dq = real_row(a->dq, a->first + i);
    for (int64_t h = 0; h < a->s->n_head; h++) {
        delta[h] = 0;
        for (int64_t c = h * dim; c < (h + 1) * dim; c++) delta[h] += dout[c] * o[c];
    }
    const struct keys near = window_keys(a, i, 0, i + 1), far = entry_keys(a, i, 0, a->len, &x);
    weigh(a, i, &near, &x);
    sum_keys(a, dq, x.dp, near.n, &near, false);
    weigh(a, i, &far, &x);
    sum_keys(a, dq, x.dp, far.n, &far, true);
}

/* grad of keys += what token i adds: scale ds^T q + p^T dout. `grad` points to the gradient of the sequence's first key
 * or entry. */
static void add_token(const struct attn *a, real *grad, int64_t ld, int64_t i, const struct keys *k, struct scratch *x)
{
    const int64_t dim = a->s->head_dim, n_head = a->s->n_head;
    if (!k->n) return;
    real *to = k->list ? x->grad : grad + k->lo * ld;
    const int64_t ld_to = k->list ? dim : ld;
    if (k->list) memset(to, 0, (size_t)(k->n * dim) * sizeof(real));
    weigh(a, i, k, x);
    gemm_serial(true, false, k->n, dim, n_head, 1, x->dp, k->n, real_row(a->q, a->first + i), dim, 1, to, ld_to);
    gemm_serial(true, false, k->n, dim, n_head, 1, x->p, k->n, real_row(a->dout, a->first + i), dim, 1, to, ld_to);
    for (int64_t j = 0; k->list && j < k->n; j++)
        for (int64_t c = 0; c < dim; c++) grad[k->list[j] * ld + c] += to[j * dim + c];
}

static void zero_rows(struct tensor x, int64_t first, int64_t n)
{
    for (int64_t t = first; t < first + n; t++) memset(real_row(x, t), 0, (size_t)x.shape[1] * sizeof(real));
}

static void dkv_block(const struct attn *a, int64_t j0, struct scratch x)
{
    const int64_t j1 = MT_MIN(j0 + BLOCK, a->len);
    zero_rows(a->dkv, a->first + j0, j1 - j0);
    for (int64_t i = j0; i < MT_MIN(a->len, j1 - 1 + a->s->window); i++) {
        const struct keys k = window_keys(a, i, j0, j1);
        add_token(a, real_row(a->dkv, a->first), a->dkv.ld, i, &k, &x);
    }
}

static void dentry_block(const struct attn *a, int64_t e0, struct scratch x)
{
    for (int64_t i = (e0 + 1) * a->s->ratio - 1; i < a->len; i++) {
        const struct keys k = entry_keys(a, i, e0, e0 + BLOCK, &x);
        add_token(a, real_row(a->dentry, a->first_entry), a->dentry.ld, i, &k, &x);
    }
}

static int64_t most_keys(const struct attn *a)
{
    const int64_t window = MT_MIN(a->s->window, a->q.shape[0]);
    return MT_MAX(1, window + (a->entry.ndim ? a->entry.shape[0] : 0));
}

void CPU(shared_attn_fwd)(struct device *dev, struct tensor o, struct tensor lse, struct tensor q, struct tensor kv,
                          struct tensor entry, struct tensor idx, struct tensor sinks, const struct seqs *seqs,
                          const struct shared_attn_shape *shape)
{
    const int64_t mark = arena_mark(&dev->work);
    struct attn all = {.s = shape, .o = o, .lse = lse, .q = q, .kv = kv, .entry = entry, .idx = idx, .sinks = sinks};
    all.n_key = most_keys(&all);
    const struct tensor scratch = arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, scratch_reals(&all));
    if (!dev->dry_run) {
        check_seqs(seqs, q.shape[0]);
#pragma omp parallel num_threads(dev->n_threads)
        for (int64_t seq = 0; seq < seqs->n_seq; seq++) {
            struct attn a = all;
            use_sequence(&a, seqs, seq);
#pragma omp for schedule(dynamic) nowait
            for (int64_t i = 0; i < a.len; i++)
                (dev->steady_rows ? fwd_gathered : fwd_token)(&a, i, scratch_of(&a, scratch));
        }
    }
    arena_release(&dev->work, mark);
}

/* dq of all tokens, then the gradients of keys and entries, which read the delta of all tokens. */
static void bwd_sequences(struct device *dev, const struct attn *all, const struct seqs *seqs, struct tensor scratch)
{
#pragma omp parallel num_threads(dev->n_threads)
    for (int64_t seq = 0; seq < seqs->n_seq; seq++) {
        struct attn a = *all;
        use_sequence(&a, seqs, seq);
        const int64_t n_entry = a.entry.ndim ? a.len / a.s->ratio : 0;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a.len; i++) dq_token(&a, i, scratch_of(&a, scratch));
#pragma omp for schedule(dynamic) nowait
        for (int64_t j0 = 0; j0 < a.len; j0 += BLOCK) dkv_block(&a, j0, scratch_of(&a, scratch));
#pragma omp for schedule(dynamic) nowait
        for (int64_t e0 = 0; e0 < n_entry; e0 += BLOCK) dentry_block(&a, e0, scratch_of(&a, scratch));
    }
}

void CPU(shared_attn_bwd)(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dentry,
                          struct tensor dout, struct tensor o, struct tensor lse, struct tensor q, struct tensor kv,
                          struct tensor entry, struct tensor idx, const struct seqs *seqs,
                          const struct shared_attn_shape *shape)
{
    const int64_t mark = arena_mark(&dev->work);
    struct attn all = {.s = shape, .o = o, .lse = lse, .q = q, .kv = kv, .entry = entry, .idx = idx};
    all.dq = dq, all.dkv = dkv, all.dentry = dentry, all.dout = dout;
    all.n_key = most_keys(&all);
    all.delta = arena_tensor_2d(&dev->work, DT_REAL, q.shape[0], shape->n_head);
    const struct tensor scratch = arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, scratch_reals(&all));
    if (!dev->dry_run) {
        check_seqs(seqs, q.shape[0]);
        if (dentry.ndim) zero_rows(dentry, 0, dentry.shape[0]);
        bwd_sequences(dev, &all, seqs, scratch);
    }
    arena_release(&dev->work, mark);
}

/* ---- decoding: the keys of a token are gathered from their pages */

struct attn_decode {
    const struct shared_attn_shape *s;
    struct tensor o, q, idx, sinks;
    const struct past *past;
    const struct pages *entries; /* or NULL */
    int64_t n_key;               /* of a token, at most */
};

/* The keys of token t in order: window, entries. Returns their number. */
static int64_t gather(const struct attn_decode *a, int64_t seq, int64_t t, real *rows)
{
    const int64_t dim = a->s->head_dim, pos = ((const int32_t *)a->past->pos.data)[t];
    const int64_t n_visible = a->entries ? (pos + 1) / a->s->ratio : 0;
    const int32_t *list = a->idx.ndim ? (const int32_t *)a->idx.data + t * a->idx.ld : NULL;
    const int64_t n_far = list ? MT_MIN(n_visible, a->idx.shape[1]) : n_visible;
    const size_t bytes = (size_t)dim * sizeof(*rows);
    int64_t n = 0;
    for (int64_t j = MT_MAX(0, pos - a->s->window + 1); j <= pos; j++)
        memcpy(rows + n++ * dim, page_row(a->past->pages, seq, j), bytes);
    for (int64_t k = 0; k < n_far && (!list || list[k] >= 0); k++)
        memcpy(rows + n++ * dim, page_row(a->entries, seq, list ? list[k] : k), bytes);
    return n;
}

/* scratch: weights [H, n_key], keys [n_key, A] */
static void decode_token(const struct attn_decode *a, int64_t seq, int64_t t, real *scratch)
{
    real *rows = scratch + a->s->n_head * a->n_key;
    const int64_t n = gather(a, seq, t, rows);
    attend(a->s, real_row(a->o, t), NULL, real_row(a->q, t), rows, n, a->sinks, scratch);
}

void CPU(shared_attn_decode)(struct device *dev, struct tensor o, struct tensor q, const struct past *past,
                             const struct pages *entries, struct tensor idx, struct tensor sinks,
                             const struct shared_attn_shape *shape)
{
    const int64_t mark = arena_mark(&dev->work), len = past->seqs->max_len;
    const int64_t n_far = !entries ? 0 : idx.ndim ? idx.shape[1] : len / shape->ratio;
    struct attn_decode a = {shape, o, q, idx, sinks, past, entries, MT_MIN(shape->window, len) + n_far};
    const struct tensor scratch =
        arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, a.n_key * (shape->n_head + shape->head_dim));
    if (!dev->dry_run) {
        const int32_t *cu = past->seqs->cu.data;
        check_seqs(past->seqs, q.shape[0]);
#pragma omp parallel num_threads(dev->n_threads)
        for (int64_t seq = 0; seq < past->seqs->n_seq; seq++) {
#pragma omp for schedule(dynamic) nowait
            for (int64_t t = cu[seq]; t < cu[seq + 1]; t++)
                decode_token(&a, seq, t, real_row(scratch, omp_get_thread_num()));
        }
    }
    arena_release(&dev->work, mark);
}
