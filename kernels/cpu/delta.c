/* delta.c - gated delta rule, forward and backward, in chunks (arXiv 2412.06464).
 *
 * Per value head, with queries and keys of norm 1 (queries times A^-1/2), the state S [A, B] begins as 0:
 *   S' = e^g S;  delta = beta (v - S'^T k);  S = S' + k delta^T;  o = S^T q.
 * A chunk of up to CHUNK tokens is computed at once; in passes that sample one token, as the bits of a token must not
 * depend on how many follow in the pass. With G = the sum of g inside the chunk, D_ij = e^(G_i - G_j):
 *   kk_ij = D_ij <k_i, k_j> for j < i;  m_ij = D_ij <q_i, k_j> for j <= i;  L_ij = beta_i kk_ij
 *   (I + L) U = beta V;  (I + L) W = beta e^G K;  X = U - W S (the deltas)
 *   O = (e^G Q) S + m X;  S = e^(G_C) S + (e^(G_C - G) K)^T X, where C is the last token.
 * No exponent is positive. The backward recomputes the states at the starts of the chunks, then goes from the last
 * chunk to the first with E, the gradient of the state after the chunk.
 *
 * A thread computes a key head of one segment (struct segments), with its value heads one after another. Where others
 * continue a segment, `ends` has the state after it, and E begins as the sum of their gradients (`grads`) in their
 * order. The levels of segments (ops.h) are computed one after another, in the backward from the last. */
#include "kernels/cpu/gemm.h"

#include <omp.h>
#include <string.h>

#include "kernels/cpu/seqs.h"

enum { CHUNK = MT_DELTA_CHUNK };
static const real l2_eps = (real)1e-6;

struct head {
    const struct delta_shape *s;
    struct segment at;
    int64_t step;                              /* tokens of a chunk */
    int64_t q_col, k_col, v_col, o_col, b_col; /* its columns in qkv, o and ba */
    int64_t a_col;
    double decay, dt; /* exp(A_log), dt_bias */
};

/* One chunk: n rows from `row` on. Matrices [CHUNK, A], [CHUNK, B] or [CHUNK, CHUNK]. */
struct chunk {
    int64_t row, n;
    real *q, *k, *v;          /* normalised, q scaled; v */
    real *kk, *m, *u, *w, *x; /* as above */
    real *tmp;                /* [CHUNK, A] */
    real beta[CHUNK];
    double g[CHUNK];             /* G, in f64: where states decay fast, differences are small beside it */
    real up[CHUNK], tail[CHUNK]; /* e^G, e^(G_C - G) */
    real rq[CHUNK], rk[CHUNK];   /* 1 / norm of q and k */
    real slope[CHUNK];           /* dg/da of every token */
};

struct grads {
    real *x, *w, *q, *k;          /* [CHUNK, B], [CHUNK, A] */
    real *m, *kk;                 /* [CHUNK, CHUNK] */
    real *qg, *kg;                /* [CHUNK, A]: gradients of e^G Q and e^(G_C - G) K */
    double beta[CHUNK], g[CHUNK]; /* g: of G; sums of terms that cancel */
};

static struct head head_of(const struct seqs *seqs, const struct delta_shape *s, struct tensor a_log,
                           struct tensor dt_bias, int64_t segment, int64_t n, int64_t step)
{
    const int64_t key = n / (s->n_value / s->n_key), width = s->n_key * s->key_dim;
    return (struct head){.s = s,
                         .at = segment_of(seqs, segment),
                         .step = step,
                         .q_col = key * s->key_dim,
                         .k_col = width + key * s->key_dim,
                         .v_col = 2 * width + n * s->value_dim,
                         .o_col = n * s->value_dim,
                         .b_col = n,
                         .a_col = s->n_value + n,
                         .decay = exp((double)((const float *)a_log.data)[n]),
                         .dt = (double)((const float *)dt_bias.data)[n]};
}

static real *take(real **at, int64_t n)
{
    real *p = *at;
    *at += n;
    return p;
}

static int64_t chunk_reals(const struct delta_shape *s)
{
    return CHUNK * (4 * s->key_dim + 3 * s->value_dim + 2 * CHUNK);
}

static int64_t grads_reals(const struct delta_shape *s) { return CHUNK * (5 * s->key_dim + s->value_dim + 2 * CHUNK); }

static void chunk_init(struct chunk *c, const struct delta_shape *s, real **at)
{
    const int64_t a = CHUNK * s->key_dim, b = CHUNK * s->value_dim;
    c->q = take(at, a);
    c->k = take(at, a);
    c->w = take(at, a);
    c->tmp = take(at, a);
    c->v = take(at, b);
    c->u = take(at, b);
    c->x = take(at, b);
    c->kk = take(at, CHUNK * CHUNK);
    c->m = take(at, CHUNK * CHUNK);
}

static void grads_init(struct grads *d, const struct delta_shape *s, real **at)
{
    const int64_t a = CHUNK * s->key_dim;
    d->w = take(at, a);
    d->q = take(at, a);
    d->k = take(at, a);
    d->qg = take(at, a);
    d->kg = take(at, a);
    d->x = take(at, CHUNK * s->value_dim);
    d->m = take(at, CHUNK * CHUNK);
    d->kk = take(at, CHUNK * CHUNK);
}

static real dot(const real *a, const real *b, int64_t n)
{
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* out[n, dim] = factor * x, each row of norm 1; r = 1 / norm. */
static void normalise(real *out, real *r, struct tensor x, int64_t row, int64_t n, int64_t col, int64_t dim,
                      real factor)
{
    for (int64_t i = 0; i < n; i++) {
        const real *in = real_row(x, row + i) + col;
        r[i] = 1 / real_sqrt(dot(in, in, dim) + l2_eps);
        for (int64_t c = 0; c < dim; c++) out[i * dim + c] = factor * r[i] * in[c];
    }
}

/* beta, G and their exponentials. softplus(x) = max(x, 0) + log1p(e^-|x|). */
static void gates(const struct head *h, struct chunk *c, struct tensor ba)
{
    double sum = 0;
    for (int64_t i = 0; i < c->n; i++) {
        const real *row = real_row(ba, c->row + i);
        const double a = (double)row[h->a_col] + h->dt;
        c->beta[i] = (real)(1 / (1 + exp(-(double)row[h->b_col])));
        sum -= h->decay * (fmax(a, 0) + log1p(exp(-fabs(a))));
        c->g[i] = sum;
        c->up[i] = (real)exp(sum);
        c->slope[i] = (real)(-h->decay / (1 + exp(-a)));
    }
    for (int64_t i = 0; i < c->n; i++) c->tail[i] = real_exp((real)(c->g[c->n - 1] - c->g[i]));
}

/* rows[i] *= factor[i] */
static void scale_rows(real *out, const real *in, const real *factor, int64_t n, int64_t dim)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < dim; j++) out[i * dim + j] = factor[i] * in[i * dim + j];
}

/* a[n, n] *= D below the diagonal, and on it if `diagonal`; 0 elsewhere. */
static void decay_lower(real *a, const struct chunk *c, bool diagonal)
{
    for (int64_t i = 0; i < c->n; i++)
        for (int64_t j = 0; j < c->n; j++) {
            real *v = &a[i * CHUNK + j];
            *v = j < i || (diagonal && j == i) ? *v * real_exp((real)(c->g[i] - c->g[j])) : 0;
        }
}

/* y = (I + L)^-1 y */
static void solve(const struct chunk *c, real *y, int64_t dim)
{
    for (int64_t i = 1; i < c->n; i++)
        for (int64_t j = 0; j < i; j++) {
            const real factor = c->beta[i] * c->kk[i * CHUNK + j];
#pragma omp simd
            for (int64_t e = 0; e < dim; e++) y[i * dim + e] -= factor * y[j * dim + e];
        }
}

/* y = (I + L)^-T y */
static void solve_transposed(const struct chunk *c, real *y, int64_t dim)
{
    for (int64_t i = c->n - 1; i > 0; i--)
        for (int64_t j = 0; j < i; j++) {
            const real factor = c->beta[i] * c->kk[i * CHUNK + j];
#pragma omp simd
            for (int64_t e = 0; e < dim; e++) y[j * dim + e] -= factor * y[i * dim + e];
        }
}

/* Chunk i of the head, up to U and W. */
static void chunk_load(const struct head *h, struct chunk *c, struct tensor qkv, struct tensor ba, int64_t i)
{
    const int64_t a = h->s->key_dim, b = h->s->value_dim;
    c->row = h->at.first + i * h->step;
    c->n = MT_MIN(h->step, h->at.len - i * h->step);
    normalise(c->q, c->rq, qkv, c->row, c->n, h->q_col, a, 1 / real_sqrt((real)a));
    normalise(c->k, c->rk, qkv, c->row, c->n, h->k_col, a, 1);
    gates(h, c, ba);
    gemm_serial(false, true, c->n, c->n, a, 1, c->k, a, c->k, a, 0, c->kk, CHUNK);
    gemm_serial(false, true, c->n, c->n, a, 1, c->q, a, c->k, a, 0, c->m, CHUNK);
    decay_lower(c->kk, c, false);
    decay_lower(c->m, c, true);
    for (int64_t t = 0; t < c->n; t++) {
        memcpy(c->v + t * b, real_row(qkv, c->row + t) + h->v_col, (size_t)b * sizeof(real));
        for (int64_t e = 0; e < b; e++) c->u[t * b + e] = c->beta[t] * c->v[t * b + e];
        for (int64_t e = 0; e < a; e++) c->w[t * a + e] = c->beta[t] * c->up[t] * c->k[t * a + e];
    }
    solve(c, c->u, b);
    solve(c, c->w, a);
}

/* X, given the state that enters the chunk. */
static void chunk_deltas(const struct head *h, struct chunk *c, const real *state)
{
    const int64_t a = h->s->key_dim, b = h->s->value_dim;
    memcpy(c->x, c->u, (size_t)(c->n * b) * sizeof(real));
    gemm_serial(false, false, c->n, b, a, -1, c->w, a, state, b, 1, c->x, b);
}

static void chunk_advance(const struct head *h, struct chunk *c, real *state)
{
    const int64_t a = h->s->key_dim, b = h->s->value_dim;
    scale_rows(c->tmp, c->k, c->tail, c->n, a);
    gemm_serial(true, false, a, b, c->n, 1, c->tmp, a, c->x, b, c->up[c->n - 1], state, b);
}

/* before, after: the state before and after the segment's rows; NULL: 0, not kept. */
static void head_fwd(const struct head *h, struct tensor o, struct tensor qkv, struct tensor ba, real *scratch,
                     const real *before, real *after)
{
    const int64_t a = h->s->key_dim, b = h->s->value_dim;
    const size_t bytes = (size_t)(a * b) * sizeof(real);
    struct chunk c;
    real *state = take(&scratch, a * b);
    chunk_init(&c, h->s, &scratch);
    if (before)
        memcpy(state, before, bytes);
    else
        memset(state, 0, bytes);
    for (int64_t i = 0; i * h->step < h->at.len; i++) {
        chunk_load(h, &c, qkv, ba, i);
        chunk_deltas(h, &c, state);
        real *out = real_row(o, c.row) + h->o_col;
        scale_rows(c.tmp, c.q, c.up, c.n, a);
        gemm_serial(false, false, c.n, b, a, 1, c.tmp, a, state, b, 0, out, o.ld);
        gemm_serial(false, false, c.n, b, c.n, 1, c.m, CHUNK, c.x, b, 1, out, o.ld);
        chunk_advance(h, &c, state);
    }
    if (after) memcpy(after, state, bytes);
}

/* ---- backward ---- */

/* The gradients with respect to X, m, e^G Q, e^(G_C - G) K and W; E becomes the gradient of the state before the chunk.
 * Returns dL/dG_C through the state. */
static real state_grads(const struct head *h, struct chunk *c, struct grads *d, const real *state, real *e,
                        const real *dout, int64_t ld)
{
    const int64_t a = h->s->key_dim, b = h->s->value_dim, n = c->n;
    const real last = c->up[n - 1], through = last * dot(state, e, a * b);
    scale_rows(c->tmp, c->k, c->tail, n, a);
    gemm_serial(false, false, n, b, a, 1, c->tmp, a, e, b, 0, d->x, b);
    gemm_serial(true, false, n, b, n, 1, c->m, CHUNK, dout, ld, 1, d->x, b);
    gemm_serial(false, true, n, n, b, 1, dout, ld, c->x, b, 0, d->m, CHUNK);
    gemm_serial(false, true, n, a, b, 1, dout, ld, state, b, 0, d->qg, a);
    gemm_serial(false, true, n, a, b, 1, c->x, b, e, b, 0, d->kg, a);
    gemm_serial(false, true, n, a, b, -1, d->x, b, state, b, 0, d->w, a);
    scale_rows(c->tmp, c->q, c->up, n, a);
    gemm_serial(true, false, a, b, n, 1, c->tmp, a, dout, ld, last, e, b);
    gemm_serial(true, false, a, b, n, -1, c->w, a, d->x, b, 1, e, b);
    return through;
}

/* Through the solved systems: d->w and d->x become the gradients of beta e^G K and of beta V, d->kk becomes the
 * gradient of L. */
static void solve_grads(const struct head *h, struct chunk *c, struct grads *d)
{
    const int64_t a = h->s->key_dim, b = h->s->value_dim, n = c->n;
    solve_transposed(c, d->w, a);
    solve_transposed(c, d->x, b);
    gemm_serial(false, true, n, n, a, -1, d->w, a, c->w, a, 0, d->kk, CHUNK);
    gemm_serial(false, true, n, n, b, -1, d->x, b, c->u, b, 1, d->kk, CHUNK);
}

/* The gradients of beta and G. `through` is dL/dG_C through the state. */
static void gate_grads(const struct head *h, struct chunk *c, struct grads *d, real through)
{
    const int64_t a = h->s->key_dim, b = h->s->value_dim, n = c->n;
    for (int64_t i = 0; i < n; i++) d->g[i] = 0;
    d->g[n - 1] = (double)through;
    for (int64_t i = 0; i < n; i++) {
        const double of_k = (double)c->up[i] * (double)dot(d->w + i * a, c->k + i * a, a);
        const double tail = (double)c->tail[i] * (double)dot(d->kg + i * a, c->k + i * a, a);
        d->beta[i] = (double)dot(d->x + i * b, c->v + i * b, b) + of_k;
        d->g[i] += (double)c->beta[i] * of_k + (double)(c->up[i] * dot(d->qg + i * a, c->q + i * a, a)) - tail;
        d->g[n - 1] += tail;
        for (int64_t j = 0; j <= i; j++) {
            const double of_l = j < i ? (double)d->kk[i * CHUNK + j] * (double)c->kk[i * CHUNK + j] : 0;
            const double of_m = (double)d->m[i * CHUNK + j] * (double)c->m[i * CHUNK + j];
            const double both = of_m + (double)c->beta[i] * of_l;
            d->beta[i] += of_l;
            d->g[i] += both;
            d->g[j] -= both;
        }
    }
    for (int64_t i = n - 1; i > 0; i--) d->g[i - 1] += d->g[i]; /* dg = the sum of dG over the tokens after */
}

/* d->q, d->k: the gradients of the normalised, scaled queries and keys; overwrites d->m and d->kk. */
static void vector_grads(const struct head *h, struct chunk *c, struct grads *d)
{
    const int64_t a = h->s->key_dim, n = c->n;
    decay_lower(d->m, c, true);
    decay_lower(d->kk, c, false);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j++) d->kk[i * CHUNK + j] *= c->beta[i];
    scale_rows(d->q, d->qg, c->up, n, a);
    for (int64_t i = 0; i < n; i++)
        for (int64_t e = 0; e < a; e++)
            d->k[i * a + e] = c->beta[i] * c->up[i] * d->w[i * a + e] + c->tail[i] * d->kg[i * a + e];
    gemm_serial(false, false, n, a, n, 1, d->m, CHUNK, c->k, a, 1, d->q, a);
    gemm_serial(true, false, n, a, n, 1, d->m, CHUNK, c->q, a, 1, d->k, a);
    gemm_serial(false, false, n, a, n, 1, d->kk, CHUNK, c->k, a, 1, d->k, a);
    gemm_serial(true, false, n, a, n, 1, d->kk, CHUNK, c->k, a, 1, d->k, a);
}

/* out (= or +=) factor r (dy - y <dy, y>), y = x r */
static void l2norm_bwd(real *out, const real *dy, const real *x, real r, int64_t n, real factor, bool accumulate)
{
    const real along = r * r * dot(dy, x, n);
    for (int64_t i = 0; i < n; i++) out[i] = (accumulate ? out[i] : 0) + factor * r * (dy[i] - x[i] * along);
}

static void write_grads(const struct head *h, const struct chunk *c, const struct grads *d, struct tensor dqkv,
                        struct tensor dba, struct tensor qkv, bool accumulate)
{
    const int64_t a = h->s->key_dim, b = h->s->value_dim;
    for (int64_t i = 0; i < c->n; i++) {
        real *out = real_row(dqkv, c->row + i), *gate = real_row(dba, c->row + i);
        const real *in = real_row(qkv, c->row + i), beta = c->beta[i];
        l2norm_bwd(out + h->q_col, d->q + i * a, in + h->q_col, c->rq[i], a, 1 / real_sqrt((real)a), accumulate);
        l2norm_bwd(out + h->k_col, d->k + i * a, in + h->k_col, c->rk[i], a, 1, accumulate);
        for (int64_t e = 0; e < b; e++) out[h->v_col + e] = beta * d->x[i * b + e];
        gate[h->b_col] = (real)d->beta[i] * beta * (1 - beta);
        gate[h->a_col] = (real)d->g[i] * c->slope[i];
    }
}

/* The op of all heads. ends, grads: of value heads, by slots of segments. */
struct delta {
    struct tensor o, dqkv, dba, dout, qkv, ba, states, ends, grads;
    const struct states *kept; /* of decoding; else NULL */
};

static real *slot_of(struct tensor slots, const struct head *h, int64_t slot)
{
    return real_row(slots, slot * h->s->n_value + h->b_col);
}

/* The state that enters chunk i > 0 is in slot row / CHUNK - 1, row being the chunk's first row in the micro-batch: no
 * two such chunks have the same slot. */
static real *state_of(struct tensor states, const struct head *h, int64_t i)
{
    return slot_of(states, h, (h->at.first + i * CHUNK) / CHUNK - 1);
}

/* The state that enters chunk i; NULL: it is 0. */
static const real *state_in(const struct delta *d, const struct head *h, int64_t i)
{
    if (i) return state_of(d->states, h, i);
    return h->at.in < 0 ? NULL : slot_of(d->ends, h, h->at.in);
}

static void set_state(real *state, const real *from, size_t bytes)
{
    if (from)
        memcpy(state, from, bytes);
    else
        memset(state, 0, bytes);
}

/* The states after all chunks but the last, and after the last if other segments continue it. */
static void head_states(const struct head *h, const struct delta *d, real *scratch)
{
    const int64_t size = h->s->key_dim * h->s->value_dim, n_chunk = (h->at.len + CHUNK - 1) / CHUNK;
    const size_t bytes = (size_t)size * sizeof(real);
    struct chunk c;
    real *state = take(&scratch, size);
    chunk_init(&c, h->s, &scratch);
    set_state(state, state_in(d, h, 0), bytes);
    for (int64_t i = 0; i + 1 < n_chunk || (i < n_chunk && h->at.n_out); i++) {
        chunk_load(h, &c, d->qkv, d->ba, i);
        chunk_deltas(h, &c, state);
        chunk_advance(h, &c, state);
        memcpy(i + 1 < n_chunk ? state_of(d->states, h, i + 1) : slot_of(d->ends, h, h->at.out), state, bytes);
    }
}

static void head_grads(const struct head *h, const struct delta *all, real *scratch, bool accumulate)
{
    const int64_t size = h->s->key_dim * h->s->value_dim, n_chunk = (h->at.len + CHUNK - 1) / CHUNK;
    const size_t bytes = (size_t)size * sizeof(real);
    struct chunk c;
    struct grads d;
    real *state = take(&scratch, size), *e = take(&scratch, size);
    chunk_init(&c, h->s, &scratch);
    grads_init(&d, h->s, &scratch);
    memset(e, 0, bytes);
    for (int64_t k = 0; k < h->at.n_out; k++) {
        const real *of = slot_of(all->grads, h, h->at.out + k);
        for (int64_t i = 0; i < size; i++) e[i] += of[i];
    }
    for (int64_t i = n_chunk - 1; i >= 0; i--) {
        set_state(state, state_in(all, h, i), bytes);
        chunk_load(h, &c, all->qkv, all->ba, i);
        chunk_deltas(h, &c, state);
        const real through = state_grads(h, &c, &d, state, e, real_row(all->dout, c.row) + h->o_col, all->dout.ld);
        solve_grads(h, &c, &d);
        gate_grads(h, &c, &d, through);
        vector_grads(h, &c, &d);
        write_grads(h, &c, &d, all->dqkv, all->dba, all->qkv, accumulate);
    }
    if (h->at.own >= 0) memcpy(slot_of(all->grads, h, h->at.own), e, bytes);
}

/* ---- ops ---- */

/* A segment is a sequence in decoding. */
static void head_outputs(const struct delta *d, const struct head *h, int64_t segment, real *scratch)
{
    const int64_t first = h->b_col * h->s->key_dim * h->s->value_dim; /* of the head in a state */
    const real *before = d->kept ? state_before(d->kept, segment) : NULL;
    real *after = d->kept ? state_after(d->kept, segment) : NULL;
    if (d->kept)
        head_fwd(h, d->o, d->qkv, d->ba, scratch, before ? before + first : NULL, after ? after + first : NULL);
    else
        head_fwd(h, d->o, d->qkv, d->ba, scratch, state_in(d, h, 0),
                 h->at.n_out ? slot_of(d->ends, h, h->at.out) : NULL);
}

enum pass { OUTPUTS, STATES, GRADS };

static void each_head(struct device *dev, const struct delta *d, enum pass pass, struct tensor a_log,
                      struct tensor dt_bias, const struct seqs *seqs, const struct delta_shape *shape,
                      struct tensor scratch)
{
    const int64_t group = shape->n_value / shape->n_key, step = dev->steady_rows ? 1 : CHUNK;
    const int64_t n_level = MT_MAX(1, seqs->segments.n_level);
    check_seqs(seqs, d->qkv.shape[0]);
    for (int64_t i = 0; i < n_level; i++) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
        for (int64_t segment = 0; segment < n_segments(seqs); segment++) {
            for (int64_t n = 0; n < shape->n_value; n += group) {
                for (int64_t v = n; v < n + group; v++) {
                    const struct head h = head_of(seqs, shape, a_log, dt_bias, segment, v, step);
                    real *own = real_row(scratch, omp_get_thread_num());
                    if (h.at.level != (pass == GRADS ? n_level - 1 - i : i)) continue;
                    if (pass == OUTPUTS) head_outputs(d, &h, segment, own);
                    if (pass == STATES) head_states(&h, d, own);
                    if (pass == GRADS) head_grads(&h, d, own, v > n);
                }
            }
        }
    }
}

static void all_fwd(struct device *dev, struct delta all, struct tensor a_log, struct tensor dt_bias,
                    const struct seqs *seqs, const struct delta_shape *shape)
{
    const int64_t mark = arena_mark(&dev->work), size = shape->key_dim * shape->value_dim;
    const struct tensor scratch = arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, size + chunk_reals(shape));
    all.ends = arena_tensor_2d(&dev->work, DT_REAL, seqs->segments.n_slot * shape->n_value, size);
    if (!dev->dry_run) each_head(dev, &all, OUTPUTS, a_log, dt_bias, seqs, shape, scratch);
    arena_release(&dev->work, mark);
}

void CPU(delta_fwd)(struct device *dev, struct tensor o, struct tensor qkv, struct tensor ba, struct tensor a_log,
                    struct tensor dt_bias, const struct seqs *seqs, const struct delta_shape *shape)
{
    all_fwd(dev, (struct delta){.o = o, .qkv = qkv, .ba = ba}, a_log, dt_bias, seqs, shape);
}

void CPU(delta_decode)(struct device *dev, struct tensor o, struct tensor qkv, struct tensor ba, struct tensor a_log,
                       struct tensor dt_bias, const struct states *states, const struct delta_shape *shape)
{
    if (!dev->dry_run) check_slots(states);
    all_fwd(dev, (struct delta){.o = o, .qkv = qkv, .ba = ba, .kept = states}, a_log, dt_bias, states->seqs, shape);
}

void CPU(delta_bwd)(struct device *dev, struct tensor dqkv, struct tensor dba, struct tensor dout, struct tensor qkv,
                    struct tensor ba, struct tensor a_log, struct tensor dt_bias, const struct seqs *seqs,
                    const struct delta_shape *shape)
{
    const int64_t mark = arena_mark(&dev->work), size = shape->key_dim * shape->value_dim;
    const int64_t n_real = 2 * size + chunk_reals(shape) + grads_reals(shape);
    const struct tensor scratch = arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, n_real);
    const int64_t n_slot = seqs->segments.n_slot * shape->n_value;
    const struct delta all = {
        .dqkv = dqkv,
        .dba = dba,
        .dout = dout,
        .qkv = qkv,
        .ba = ba,
        .states = arena_tensor_2d(&dev->work, DT_REAL, qkv.shape[0] / CHUNK * shape->n_value, size),
        .ends = arena_tensor_2d(&dev->work, DT_REAL, n_slot, size),
        .grads = arena_tensor_2d(&dev->work, DT_REAL, n_slot, size),
    };
    for (int pass = STATES; pass <= GRADS && !dev->dry_run; pass++)
        each_head(dev, &all, (enum pass)pass, a_log, dt_bias, seqs, shape, scratch);
    arena_release(&dev->work, mark);
}
