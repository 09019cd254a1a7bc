/* attn.c - causal grouped-query attention with window and sink, forward and backward, in blocks.
 *
 * A block is about ROWS query rows by at most KEYS keys. The G query heads of a kv head are stacked, row i*G + g for
 * head g of query i: one product computes the scores of all, and the products for dK and dV sum over them. Blocks
 * outside the window or the causal triangle are skipped; the memory is a few blocks per thread. Keys are numbered by
 * position: first those of the prefix, then the sequence's own.
 *
 * Forward: online softmax. With running maximum m and sum l, a new block rescales the earlier sums by exp(m - m'). The
 * sink is the initial state m = b, l = 1. Backward: p = exp(s - lse), ds = p (dO V^T - <dO, O>).
 *
 * A pass that samples (steady_rows) computes the forward in blocks of a page, as decoding does. */
#include "kernels/cpu/gemm.h"

#include <omp.h>
#include <string.h>

#include "kernels/cpu/seqs.h"

enum { ROWS = 128, KEYS = 256 };

struct head {
    const struct attn_shape *s;
    int64_t first, len;          /* rows of the sequence */
    int64_t base, prefix;        /* rows that it continues */
    int64_t kv, group;           /* the kv head; query heads kv * group .. */
    int64_t q_col, k_col, v_col; /* its columns in a row of qkv */
    int64_t o_col, value_dim;    /* its columns in a row of o; width of a value */
    int64_t n_query;             /* queries in a block */
};

static int64_t group_of(const struct attn_shape *s) { return s->n_head / s->n_kv; }
static int64_t block_queries(const struct attn_shape *s) { return MT_MAX(1, ROWS / group_of(s)); }

static struct head head_of(const struct seqs *seqs, const struct attn_shape *s, int64_t seq, int64_t kv)
{
    const int32_t *cu = seqs->cu.data;
    int64_t g = group_of(s), value_dim = attn_value_dim(s);
    return (struct head){.s = s,
                         .first = cu[seq],
                         .len = cu[seq + 1] - cu[seq],
                         .base = cu[seq_base(seqs, seq)],
                         .prefix = seq_prefix(seqs, seq),
                         .kv = kv,
                         .group = g,
                         .q_col = kv * g * s->head_dim,
                         .k_col = (s->n_head + kv) * s->head_dim,
                         .v_col = (s->n_head + s->n_kv) * s->head_dim + kv * value_dim,
                         .o_col = kv * g * value_dim,
                         .value_dim = value_dim,
                         .n_query = block_queries(s)};
}

/* The first key that query i attends to; the last is key prefix + i, its own. */
static int64_t first_key(const struct head *h, int64_t i)
{
    return h->s->window ? MT_MAX(0, h->prefix + i - h->s->window + 1) : 0;
}
/* The number of keys of the block that begins at key k0. Keys of a block are before `end` and in consecutive rows: a
 * block ends where the prefix ends. */
static int64_t block_keys(const struct head *h, int64_t k0, int64_t end)
{
    return MT_MIN(KEYS, (k0 < h->prefix ? h->prefix : end) - k0);
}
static int64_t key_row(const struct head *h, int64_t k)
{
    return k < h->prefix ? h->base + k : h->first + k - h->prefix;
}

/* Copies `width` columns of n queries from i0 on, times factor: a dense [n * group, width / group]. */
static void load_rows(const struct head *h, real *dst, struct tensor src, int64_t col, int64_t width, int64_t i0,
                      int64_t n, real factor)
{
    for (int64_t i = 0; i < n; i++) {
        const real *row = real_row(src, h->first + i0 + i) + col;
        for (int64_t c = 0; c < width; c++) dst[i * width + c] = factor * row[c];
    }
}

/* Turns the scores of one row against a block of keys, of which it attends to [lo, hi), into weights; updates m, l and
 * acc. */
static void softmax_row(real *p, int64_t n_key, int64_t lo, int64_t hi, real *m, real *l, real *acc, int64_t dim)
{
    real max = *m, sum = 0;
    for (int64_t j = 0; j < MT_MIN(lo, n_key); j++) p[j] = 0;
    for (int64_t j = MT_MAX(hi, 0); j < n_key; j++) p[j] = 0;
    if (lo >= hi) return;
#pragma omp simd reduction(max : max)
    for (int64_t j = lo; j < hi; j++) max = p[j] > max ? p[j] : max;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = lo; j < hi; j++) {
        p[j] = real_exp(p[j] - max);
        sum += p[j];
    }
    real factor = real_exp(*m - max);
    *l = *l * factor + sum;
    *m = max;
    for (int64_t c = 0; c < dim; c++) acc[c] *= factor;
}

/* Reals of scratch per thread: for each query row three vectors as wide as a key or value (the wider), two of KEYS, two
 * scalars. */
static int64_t scratch_reals(const struct attn_shape *s)
{
    return block_queries(s) * group_of(s) * (3 * MT_MAX(s->head_dim, attn_value_dim(s)) + 2 * KEYS + 2);
}

/* ---- passes that sample: the bits of a row do not depend on the other rows, nor on whether its keys are in rows of
 * the pass or in the cache ---- */

/* Rows, each a query and head, that see the keys of one kv head page by page. */
enum { LANES = 32 / sizeof(real), N_LANES = 2, SUMS = 4 };
typedef real lanes __attribute__((vector_size(LANES * sizeof(real))));
struct rows {
    int64_t n, group;       /* rows; row r is of the query at position pos + r / group */
    int64_t pos, window;    /* window 0: a query sees all keys up to its position */
    int64_t dim, value_dim; /* of a key, of a value */
    real scale;
    const real *q;     /* [n, dim] */
    real *acc, *m, *l; /* [n, value_dim] sums of values; [n] largest score, sum of exp(score - m) */
    real *p;           /* [n, MT_PAGE]: scratch */
};

/* sink [group]: the sinks of the heads, from row 0's head on; NULL: none. */
static void rows_begin(const struct rows *r, const float *sink)
{
    for (int64_t i = 0; i < r->n; i++) {
        r->m[i] = sink ? (real)sink[i % r->group] : -INFINITY;
        r->l[i] = sink ? 1 : 0;
    }
    for (int64_t c = 0; c < r->n * r->value_dim; c++) r->acc[c] = 0;
}

/* Scores p [lo, hi) become weights; the sums over earlier keys are divided by e^(new m - old m). Maximum and sum run
 * over LANES keys of the page at a time, always in one order. */
static void weigh(real *p, int64_t lo, int64_t hi, real *m, real *l, real *acc, int64_t dim)
{
    const int64_t first = lo / LANES * LANES, end = (hi + LANES - 1) / LANES * LANES;
    real most[LANES], part[LANES] = {0}, max = *m, sum = 0;
    for (int64_t j = first; j < lo; j++) p[j] = -INFINITY;
    for (int64_t j = hi; j < end; j++) p[j] = -INFINITY;
    for (int e = 0; e < LANES; e++) most[e] = max;
    for (int64_t j = first; j < end; j += LANES)
        for (int e = 0; e < LANES; e++) most[e] = p[j + e] > most[e] ? p[j + e] : most[e];
    for (int e = 0; e < LANES; e++) max = most[e] > max ? most[e] : max;
    for (int64_t j = first; j < end; j += LANES)
        for (int e = 0; e < LANES; e++) {
            p[j + e] = real_exp(p[j + e] - max);
            part[e] += p[j + e];
        }
    for (int e = 0; e < LANES; e++) sum += part[e];
    if (max > *m) {
        const real factor = real_exp(*m - max);
        for (int64_t c = 0; c < dim; c++) acc[c] *= factor;
        *l *= factor;
        *m = max;
    }
    *l += sum;
}

/* acc += p times the values of keys [lo, hi), in the order of the keys: n rows, 1 or SUMS, share the loads. acc [n,
 * dim], p [n, MT_PAGE] */
static inline __attribute__((always_inline)) void add_values(int n, real *acc, const real *p, int64_t lo, int64_t hi,
                                                             const real *value, int64_t ld, int64_t dim)
{
    int64_t c = 0;
    for (; c + N_LANES * LANES <= dim; c += N_LANES * LANES) {
        lanes sum[SUMS][N_LANES], v;
        for (int i = 0; i < n; i++) memcpy(sum[i], acc + i * dim + c, sizeof(sum[i]));
        for (int64_t j = lo; j < hi; j++)
            for (int e = 0; e < N_LANES; e++) {
                memcpy(&v, value + j * ld + c + e * LANES, sizeof(v));
                for (int i = 0; i < n; i++) sum[i][e] += p[i * MT_PAGE + j] * v;
            }
        for (int i = 0; i < n; i++) memcpy(acc + i * dim + c, sum[i], sizeof(sum[i]));
    }
    for (int64_t j = lo; j < hi; j++)
        for (int i = 0; i < n; i++)
            for (int64_t e = c; e < dim; e++) acc[i * dim + e] += p[i * MT_PAGE + j] * value[j * ld + e];
}

/* Row i sees keys [first_seen, end_seen) of the n keys from position k0 on. */
static int64_t first_seen(const struct rows *r, int64_t i, int64_t k0)
{
    return r->window ? MT_MAX(0, r->pos + i / r->group - r->window + 1 - k0) : 0;
}
static int64_t end_seen(const struct rows *r, int64_t i, int64_t k0, int64_t n)
{
    return MT_MIN(n, r->pos + i / r->group + 1 - k0);
}

/* Continues the rows' softmax over n keys, at most MT_PAGE, from position k0 on; key, value: rows ld apart. Not
 * inlined, so that both callers get the same bits. */
static __attribute__((noinline)) void rows_page(const struct rows *r, int64_t k0, int64_t n, const real *key,
                                                const real *value, int64_t ld)
{
    rows_gemm(r->n, n, r->dim, r->scale, r->q, r->dim, key, ld, 0, r->p, MT_PAGE);
    for (int64_t i = 0, n_same; i < r->n; i += n_same) {
        const int64_t lo = first_seen(r, i, k0), hi = end_seen(r, i, k0, n), last = MT_MIN(i + SUMS, r->n) - 1;
        real *p = r->p + i * MT_PAGE, *acc = r->acc + i * r->value_dim;
        const bool all = last - i + 1 == SUMS && first_seen(r, last, k0) == lo && end_seen(r, last, k0, n) == hi;
        n_same = all ? SUMS : 1;
        if (lo >= hi) continue;
        for (int64_t k = 0; k < n_same; k++)
            weigh(p + k * MT_PAGE, lo, hi, &r->m[i + k], &r->l[i + k], acc + k * r->value_dim, r->value_dim);
        if (all)
            add_values(SUMS, acc, p, lo, hi, value, ld, r->value_dim);
        else
            add_values(1, acc, p, lo, hi, value, ld, r->value_dim);
    }
}

/* acc = the outputs. */
static void rows_end(const struct rows *r)
{
    for (int64_t i = 0; i < r->n; i++) {
        const real inverse = 1 / r->l[i];
        for (int64_t c = 0; c < r->value_dim; c++) r->acc[i * r->value_dim + c] *= inverse;
    }
}

/* Stores the outputs and m + log l of the block from query i0 on. acc [n_row, B]: the outputs before the division by
 * l. */
static void store_rows(const struct head *h, struct tensor o, struct tensor lse, const real *acc, const real *m,
                       const real *l, int64_t i0, int64_t n_row)
{
    for (int64_t r = 0; r < n_row; r++) {
        const int64_t t = h->first + i0 + r / h->group, head = h->kv * h->group + r % h->group;
        real *out = real_row(o, t) + head * h->value_dim;
        const real inverse = 1 / l[r];
        for (int64_t c = 0; c < h->value_dim; c++) out[c] = acc[r * h->value_dim + c] * inverse;
        real_row(lse, t)[head] = m[r] + (real)log((double)l[r]);
    }
}

static void fwd_pages(const struct head *h, struct tensor o, struct tensor lse, struct tensor qkv, struct tensor sinks,
                      int64_t i0, real *scratch)
{
    const int64_t dim = h->s->head_dim, value_dim = h->value_dim, n = MT_MIN(h->n_query, h->len - i0);
    const int64_t n_row = n * h->group, end = h->prefix + i0 + n; /* end: of the keys */
    real *q = scratch, *acc = q + n_row * dim, *p = acc + n_row * value_dim, *m = p + n_row * MT_PAGE, *l = m + n_row;
    const struct rows rows = {.n = n_row,
                              .group = h->group,
                              .pos = h->prefix + i0,
                              .window = h->s->window,
                              .dim = dim,
                              .value_dim = value_dim,
                              .scale = (real)h->s->scale,
                              .q = q,
                              .acc = acc,
                              .m = m,
                              .l = l,
                              .p = p};
    load_rows(h, q, qkv, h->q_col, h->group * dim, i0, n, 1);
    rows_begin(&rows, sinks.ndim ? (const float *)sinks.data + h->kv * h->group : NULL);
    for (int64_t k0 = first_key(h, i0) / MT_PAGE * MT_PAGE, n_key; k0 < end; k0 += n_key) {
        n_key = MT_MIN(MT_PAGE - k0 % MT_PAGE, block_keys(h, k0, end));
        const real *row = real_row(qkv, key_row(h, k0));
        rows_page(&rows, k0, n_key, row + h->k_col, row + h->v_col, qkv.ld);
    }
    store_rows(h, o, lse, acc, m, l, i0, n_row);
}

static void fwd_block(const struct head *h, struct tensor o, struct tensor lse, struct tensor qkv, struct tensor sinks,
                      int64_t i0, real *scratch)
{
    int64_t dim = h->s->head_dim, value_dim = h->value_dim, n = MT_MIN(h->n_query, h->len - i0), n_row = n * h->group;
    const int64_t end = h->prefix + i0 + n; /* of the keys */
    real *q = scratch, *acc = q + n_row * dim, *p = acc + n_row * value_dim, *m = p + n_row * KEYS, *l = m + n_row;
    load_rows(h, q, qkv, h->q_col, h->group * dim, i0, n, (real)h->s->scale);
    for (int64_t r = 0; r < n_row; r++) {
        m[r] = sinks.ndim ? (real)((const float *)sinks.data)[h->kv * h->group + r % h->group] : -INFINITY;
        l[r] = sinks.ndim ? 1 : 0;
    }
    for (int64_t c = 0; c < n_row * value_dim; c++) acc[c] = 0;
    for (int64_t k0 = first_key(h, i0), n_key; k0 < end; k0 += n_key) {
        n_key = block_keys(h, k0, end);
        const real *row = real_row(qkv, key_row(h, k0));
        gemm_serial(false, true, n_row, n_key, dim, 1, q, dim, row + h->k_col, qkv.ld, 0, p, KEYS);
        for (int64_t r = 0; r < n_row; r++) {
            int64_t i = i0 + r / h->group;
            softmax_row(p + r * KEYS, n_key, MT_MAX(first_key(h, i) - k0, 0), MT_MIN(h->prefix + i + 1 - k0, n_key),
                        &m[r], &l[r], acc + r * value_dim, value_dim);
        }
        gemm_serial(false, false, n_row, value_dim, n_key, 1, p, KEYS, row + h->v_col, qkv.ld, 1, acc, value_dim);
    }
    store_rows(h, o, lse, acc, m, l, i0, n_row);
}

void CPU(attn_fwd)(struct device *dev, struct tensor o, struct tensor lse, struct tensor qkv, struct tensor sinks,
                   const struct seqs *seqs, const struct attn_shape *shape)
{
    int64_t mark = arena_mark(&dev->work), n_query = block_queries(shape);
    struct tensor scratch = arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, scratch_reals(shape));
    if (!dev->dry_run) {
        check_seqs(seqs, qkv.shape[0]);
#pragma omp parallel num_threads(dev->n_threads)
        for (int64_t seq = 0; seq < seqs->n_seq; seq++) {
            int64_t len = head_of(seqs, shape, seq, 0).len;
#pragma omp for collapse(2) schedule(dynamic) nowait
            for (int64_t i0 = 0; i0 < len; i0 += n_query) {
                for (int64_t kv = 0; kv < shape->n_kv; kv++) {
                    struct head h = head_of(seqs, shape, seq, kv);
                    (dev->steady_rows ? fwd_pages : fwd_block)(&h, o, lse, qkv, sinks, i0,
                                                               real_row(scratch, omp_get_thread_num()));
                }
            }
        }
    }
    arena_release(&dev->work, mark);
}

/* p = scores, dp = dO V^T  ->  p = exp(p - lse), dp = p (dp - delta), zero outside [lo, hi) */
static void grad_row(real *p, real *dp, int64_t n_key, int64_t lo, int64_t hi, real lse, real delta)
{
    for (int64_t j = 0; j < MT_MIN(lo, n_key); j++) p[j] = dp[j] = 0;
    for (int64_t j = MT_MAX(hi, 0); j < n_key; j++) p[j] = dp[j] = 0;
#pragma omp simd
    for (int64_t j = lo; j < hi; j++) {
        p[j] = real_exp(p[j] - lse);
        dp[j] = p[j] * (dp[j] - delta);
    }
}

static void bwd_block(const struct head *h, struct tensor dqkv, struct tensor dout, struct tensor o, struct tensor lse,
                      struct tensor qkv, int64_t i0, real *scratch)
{
    int64_t dim = h->s->head_dim, value_dim = h->value_dim, n = MT_MIN(h->n_query, h->len - i0), n_row = n * h->group,
            width = h->group * dim;
    const int64_t end = h->prefix + i0 + n; /* of the keys */
    real *q = scratch, *d = q + n_row * dim, *dq = d + n_row * value_dim, *p = dq + n_row * MT_MAX(dim, value_dim),
         *dp = p + n_row * KEYS, *delta = dp + n_row * KEYS, scale = (real)h->s->scale;
    load_rows(h, q, qkv, h->q_col, width, i0, n, scale);
    load_rows(h, d, dout, h->o_col, h->group * value_dim, i0, n, 1);
    load_rows(h, dq, o, h->o_col, h->group * value_dim, i0, n, 1); /* only for delta */
    for (int64_t r = 0; r < n_row; r++) {
        delta[r] = 0;
        for (int64_t c = 0; c < value_dim; c++) delta[r] += d[r * value_dim + c] * dq[r * value_dim + c];
    }
    for (int64_t c = 0; c < n_row * dim; c++) dq[c] = 0;
    for (int64_t k0 = first_key(h, i0), n_key; k0 < end; k0 += n_key) {
        n_key = block_keys(h, k0, end);
        const real *row = real_row(qkv, key_row(h, k0));
        real *drow = real_row(dqkv, key_row(h, k0));
        gemm_serial(false, true, n_row, n_key, dim, 1, q, dim, row + h->k_col, qkv.ld, 0, p, KEYS);
        gemm_serial(false, true, n_row, n_key, value_dim, 1, d, value_dim, row + h->v_col, qkv.ld, 0, dp, KEYS);
        for (int64_t r = 0; r < n_row; r++) {
            int64_t i = i0 + r / h->group;
            grad_row(p + r * KEYS, dp + r * KEYS, n_key, MT_MAX(first_key(h, i) - k0, 0),
                     MT_MIN(h->prefix + i + 1 - k0, n_key),
                     real_row(lse, h->first + i)[h->kv * h->group + r % h->group], delta[r]);
        }
        gemm_serial(true, false, n_key, value_dim, n_row, 1, p, KEYS, d, value_dim, 1, drow + h->v_col, dqkv.ld);
        gemm_serial(true, false, n_key, dim, n_row, 1, dp, KEYS, q, dim, 1, drow + h->k_col, dqkv.ld);
        gemm_serial(false, false, n_row, dim, n_key, scale, dp, KEYS, row + h->k_col, qkv.ld, 1, dq, dim);
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < width; c++) real_row(dqkv, h->first + i0 + i)[h->q_col + c] = dq[i * width + c];
}

static void bwd_head(const struct head *h, struct tensor dqkv, struct tensor dout, struct tensor o, struct tensor lse,
                     struct tensor qkv, real *scratch)
{
    for (int64_t i = 0; i < h->len; i++) {
        real *row = real_row(dqkv, h->first + i);
        for (int64_t c = 0; c < h->s->head_dim; c++) row[h->k_col + c] = 0;
        for (int64_t c = 0; c < h->value_dim; c++) row[h->v_col + c] = 0;
    }
    for (int64_t i0 = 0; i0 < h->len; i0 += h->n_query) bwd_block(h, dqkv, dout, o, lse, qkv, i0, scratch);
}

void CPU(attn_bwd)(struct device *dev, struct tensor dqkv, struct tensor dout, struct tensor o, struct tensor lse,
                   struct tensor qkv, const struct seqs *seqs, const struct attn_shape *shape)
{
    int64_t mark = arena_mark(&dev->work);
    struct tensor scratch = arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, scratch_reals(shape));
    if (!dev->dry_run) {
        check_seqs(seqs, qkv.shape[0]);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
        for (int64_t base = 0; base < seqs->n_seq; base++) {
            for (int64_t kv = 0; kv < shape->n_kv; kv++) {
                /* one thread computes the base and the sequences that continue it, as all add to its gradients */
                for (int64_t seq = base; seq < seqs->n_seq && seq_base(seqs, seq) == base; seq++) {
                    const struct head h = head_of(seqs, shape, seq, kv);
                    bwd_head(&h, dqkv, dout, o, lse, qkv, real_row(scratch, omp_get_thread_num()));
                }
            }
        }
    }
    arena_release(&dev->work, mark);
}

/* ---- decoding: rows of tokens in pages, and attention to them ---- */

/* In order of tokens: when several tokens have the same row, the last one stays. */
void CPU(page_store)(struct device *dev, const struct pages *pages, struct tensor x, struct tensor pos,
                     const struct seqs *seqs)
{
    const int32_t *cu = seqs->cu.data, *at = pos.data;
    if (dev->dry_run) return;
    check_seqs(seqs, x.shape[0]);
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t s = 0; s < seqs->n_seq; s++)
        for (int64_t t = cu[s]; t < cu[s + 1]; t++) {
            real *row = page_row(pages, s, at[t]);
            for (int64_t c = 0; c < x.shape[1]; c++) row[c] = real_row(x, t)[c];
        }
}

enum { HEADS = 4 }; /* that a thread computes together */

/* The outputs o of the query at position pos: heads first .. first + n - 1, which share a kv head. */
static void decode_heads(real *o, const real *q, const struct pages *pages, int64_t seq, int64_t pos, int64_t first,
                         int64_t n, const float *sinks, const struct attn_shape *s)
{
    const int64_t kv = first / (s->n_head / s->n_kv), value_dim = attn_value_dim(s);
    const bool shared = pages->rows.shape[1] == s->n_kv * s->head_dim; /* values are columns of keys */
    const int64_t key = kv * s->head_dim, value = shared ? key : s->n_kv * s->head_dim + kv * value_dim;
    real m[HEADS], l[HEADS], p[HEADS * MT_PAGE];
    const struct rows rows = {.n = n,
                              .group = n,
                              .pos = pos,
                              .window = s->window,
                              .dim = s->head_dim,
                              .value_dim = value_dim,
                              .scale = (real)s->scale,
                              .q = q + first * s->head_dim,
                              .acc = o + first * value_dim,
                              .m = m,
                              .l = l,
                              .p = p};
    rows_begin(&rows, sinks ? sinks + first : NULL);
    const int64_t lo = s->window ? MT_MAX(0, pos - s->window + 1) : 0;
    for (int64_t k0 = lo / MT_PAGE * MT_PAGE; k0 <= pos; k0 += MT_PAGE) {
        const real *row = page_row(pages, seq, k0);
        rows_page(&rows, k0, MT_MIN(MT_PAGE, pos + 1 - k0), row + key, row + value, pages->rows.ld);
    }
    rows_end(&rows);
}

void CPU(attn_decode)(struct device *dev, struct tensor o, struct tensor q, const struct pages *pages,
                      struct tensor sinks, struct tensor pos, const struct seqs *seqs, const struct attn_shape *shape)
{
    const int32_t *cu = seqs->cu.data, *at = pos.data;
    const int64_t group = shape->n_head / shape->n_kv, n_part = (group + HEADS - 1) / HEADS; /* of a kv head */
    if (dev->dry_run) return;
    check_seqs(seqs, q.shape[0]);
#pragma omp parallel num_threads(dev->n_threads)
    for (int64_t s = 0; s < seqs->n_seq; s++) {
#pragma omp for collapse(2) schedule(dynamic) nowait
        for (int64_t t = cu[s]; t < cu[s + 1]; t++)
            for (int64_t part = 0; part < shape->n_kv * n_part; part++) {
                const int64_t in = part % n_part * HEADS, first = part / n_part * group + in;
                decode_heads(real_row(o, t), real_row(q, t), pages, s, at[t], first, MT_MIN(HEADS, group - in),
                             sinks.ndim ? sinks.data : NULL, shape);
            }
    }
}
