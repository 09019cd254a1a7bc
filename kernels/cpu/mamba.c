/* mamba.c - the state space of Mamba-2 (arXiv 2405.21060), forward and backward, in chunks.
 *
 * Per head, the state S [A, B] begins as 0:  S = e^g S + b v^T;  y = S^T c + D x,  v = step x,  g = -step exp(A_log).
 * A chunk of up to CHUNK tokens is computed at once; in passes that sample one token, as the bits of a token must not
 * depend on how many follow in the pass. With s = the sum of g inside the chunk, M_ij = e^(s_i - s_j)
 * <c_i, b_j> for j < i, p_i = <c_i, b_i>:
 *   W = M V + (e^s C) S;  Y = W + p V + D X;  S = e^(s_C) S + (e^(s_C - s) B)^T V, where C is the last token.
 * No exponent is positive. The backward computes the states at the starts of the chunks again, then goes from the last
 * chunk to the first with E, the gradient of the state after the chunk:
 *   U = M^T dY + (e^(s_C - s) B) E;  dV = U + p dY;  dX = step dV + D dY;  K_ij = e^(s_i - s_j) <dY_i, V_j> for j <= i
 *   dC = K B + e^s dY S^T;  dB = K^T C + e^(s_C - s) V E^T;  E = e^(s_C) E + (e^s C)^T dY
 *   ds_i = <W_i, dY_i> - <V_i, U_i>, and for the last token + <S, E>, S after the chunk. M and W have no diagonal,
 * whose two terms would only cancel there.
 *
 * A thread computes a group of one segment (struct segments), with its heads one after another. Where others continue a
 * segment, `ends` has the state after it, and E begins as the sum of their gradients (`grads`) in their order. The
 * levels of segments (ops.h) are computed one after another, in the backward from the last. */
#include "kernels/cpu/gemm.h"

#include <omp.h>
#include <string.h>

#include "kernels/cpu/seqs.h"

enum { CHUNK = MT_MAMBA_CHUNK };

/* One head of one segment. */
struct head {
    const struct mamba *m;
    struct segment at;
    int64_t n;                   /* its number */
    int64_t step;                /* tokens of a chunk */
    int64_t x_col, b_col, c_col; /* its columns in xbc; x_col is also that in y */
    double decay, dt_bias, d;    /* exp(A_log) */
};

/* One chunk: n rows from `row` on. Matrices [CHUNK, A], [CHUNK, B] or [CHUNK, CHUNK]. */
struct chunk {
    int64_t row, n;
    const real *x, *b, *c; /* rows of xbc, ld apart */
    int64_t ld;
    real *v, *m, *tmp;             /* tmp: [CHUNK, A] */
    real step[CHUNK], p[CHUNK];    /* as above */
    double s[CHUNK], slope[CHUNK]; /* s: in f64, as differences may be small beside it; slope: dstep/ddt */
    real up[CHUNK], tail[CHUNK];   /* e^s, e^(s_C - s) */
    real *w, *u, *k, *of_state;    /* backward; of_state: [CHUNK, A] */
};

static struct head head_of(const struct seqs *seqs, const struct mamba *m, int64_t segment, int64_t n, int64_t step)
{
    const int64_t group = n / (m->n_head / m->n_group), b = m->n_head * m->head_dim;
    return (struct head){.m = m,
                         .at = segment_of(seqs, segment),
                         .n = n,
                         .step = step,
                         .x_col = n * m->head_dim,
                         .b_col = b + group * m->state,
                         .c_col = b + (m->n_group + group) * m->state,
                         .decay = exp((double)((const float *)m->a_log.data)[n]),
                         .dt_bias = (double)((const float *)m->dt_bias.data)[n],
                         .d = (double)((const float *)m->d.data)[n]};
}

static real *take(real **at, int64_t n)
{
    real *p = *at;
    *at += n;
    return p;
}

static int64_t chunk_reals(const struct mamba *m) { return CHUNK * (2 * m->state + 3 * m->head_dim + 2 * CHUNK); }

static void chunk_init(struct chunk *c, const struct mamba *m, real **at)
{
    c->tmp = take(at, CHUNK * m->state);
    c->of_state = take(at, CHUNK * m->state);
    c->v = take(at, CHUNK * m->head_dim);
    c->w = take(at, CHUNK * m->head_dim);
    c->u = take(at, CHUNK * m->head_dim);
    c->m = take(at, CHUNK * CHUNK);
    c->k = take(at, CHUNK * CHUNK);
}

static real dot(const real *a, const real *b, int64_t n)
{
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Steps, s and its exponentials. softplus(x) = max(x, 0) + log1p(e^-|x|). */
static void steps(const struct head *h, struct chunk *c, struct tensor dt)
{
    double sum = 0;
    for (int64_t i = 0; i < c->n; i++) {
        const double a = (double)real_row(dt, c->row + i)[h->n] + h->dt_bias;
        const double plus = fmax(a, 0) + log1p(exp(-fabs(a)));
        const double low = (double)h->m->dt_min, high = (double)h->m->dt_max;
        const double step = plus < low ? low : plus > high ? high : plus; /* NaN stays */
        c->step[i] = (real)step;
        c->slope[i] = step == plus ? 1 / (1 + exp(-a)) : 0;
        sum -= h->decay * step;
        c->s[i] = sum;
        c->up[i] = (real)exp(sum);
    }
    for (int64_t i = 0; i < c->n; i++) c->tail[i] = real_exp((real)(c->s[c->n - 1] - c->s[i]));
}

/* out [n, dim] = factor of the row * in, rows ld apart */
static void scale_rows(real *out, const real *in, int64_t ld, const real *factor, int64_t n, int64_t dim)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < dim; j++) out[i * dim + j] = factor[i] * in[i * ld + j];
}

/* a [n, n] *= e^(s_i - s_j) below the diagonal, and on it if `diagonal`; 0 elsewhere. */
static void decay_lower(real *a, const struct chunk *c, bool diagonal)
{
    for (int64_t i = 0; i < c->n; i++)
        for (int64_t j = 0; j < c->n; j++) {
            real *v = &a[i * CHUNK + j];
            *v = j < i || (diagonal && j == i) ? *v * real_exp((real)(c->s[i] - c->s[j])) : 0;
        }
}

/* Chunk i of the head; inside: also M and p. */
static void chunk_load(const struct head *h, struct chunk *c, struct tensor xbc, struct tensor dt, int64_t i,
                       bool inside)
{
    const int64_t a = h->m->state;
    c->row = h->at.first + i * h->step;
    c->n = MT_MIN(h->step, h->at.len - i * h->step);
    const real *row = real_row(xbc, c->row);
    c->ld = xbc.ld;
    c->x = row + h->x_col;
    c->b = row + h->b_col;
    c->c = row + h->c_col;
    steps(h, c, dt);
    scale_rows(c->v, c->x, c->ld, c->step, c->n, h->m->head_dim);
    if (!inside) return;
    gemm_serial(false, true, c->n, c->n, a, 1, c->c, c->ld, c->b, c->ld, 0, c->m, CHUNK);
    for (int64_t t = 0; t < c->n; t++) c->p[t] = c->m[t * CHUNK + t];
    decay_lower(c->m, c, false);
}

/* w [n, B], ld apart, = W, given the state that enters the chunk */
static void chunk_inside(const struct head *h, struct chunk *c, const real *state, real *w, int64_t ld)
{
    const int64_t a = h->m->state, b = h->m->head_dim;
    scale_rows(c->tmp, c->c, c->ld, c->up, c->n, a);
    gemm_serial(false, false, c->n, b, a, 1, c->tmp, a, state, b, 0, w, ld);
    gemm_serial(false, false, c->n, b, c->n, 1, c->m, CHUNK, c->v, b, 1, w, ld);
}

static void chunk_advance(const struct head *h, struct chunk *c, real *state)
{
    const int64_t a = h->m->state, b = h->m->head_dim;
    scale_rows(c->tmp, c->b, c->ld, c->tail, c->n, a);
    gemm_serial(true, false, a, b, c->n, 1, c->tmp, a, c->v, b, c->up[c->n - 1], state, b);
}

/* before, after: the state before and after the segment's rows; NULL: 0, not kept. */
static void head_fwd(const struct head *h, struct tensor y, struct tensor xbc, struct tensor dt, real *scratch,
                     const real *before, real *after)
{
    const int64_t b = h->m->head_dim, size = h->m->state * b;
    struct chunk c;
    real *state = take(&scratch, size);
    chunk_init(&c, h->m, &scratch);
    for (int64_t i = 0; i < size; i++) state[i] = before ? before[i] : 0;
    for (int64_t i = 0; i * h->step < h->at.len; i++) {
        chunk_load(h, &c, xbc, dt, i, true);
        real *out = real_row(y, c.row) + h->x_col;
        chunk_inside(h, &c, state, out, y.ld);
        for (int64_t t = 0; t < c.n; t++)
            for (int64_t e = 0; e < b; e++)
                out[t * y.ld + e] += c.p[t] * c.v[t * b + e] + (real)h->d * c.x[t * c.ld + e];
        chunk_advance(h, &c, state);
    }
    if (after) memcpy(after, state, (size_t)size * sizeof(real));
}

/* ---- backward ---- */

/* W, U, K. */
static void inner_grads(const struct head *h, struct chunk *c, const real *state, const real *e, const real *dy,
                        int64_t ld)
{
    const int64_t a = h->m->state, b = h->m->head_dim, n = c->n;
    chunk_inside(h, c, state, c->w, b);
    scale_rows(c->tmp, c->b, c->ld, c->tail, n, a);
    gemm_serial(false, false, n, b, a, 1, c->tmp, a, e, b, 0, c->u, b);
    gemm_serial(true, false, n, b, n, 1, c->m, CHUNK, dy, ld, 1, c->u, b);
    gemm_serial(false, true, n, n, b, 1, dy, ld, c->v, b, 0, c->k, CHUNK);
    decay_lower(c->k, c, true);
}

/* out [n, A], ld apart, (= or +=) product + factor of the row * of_state */
static void add_rows(real *out, int64_t ld, const real *product, const real *of_state, const real *factor, int64_t n,
                     int64_t dim, bool accumulate)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < dim; j++) {
            const real v = product[i * dim + j] + factor[i] * of_state[i * dim + j];
            out[i * ld + j] = accumulate ? out[i * ld + j] + v : v;
        }
}

/* dB and dC; the last also need V E^T and dY S^T. */
static void shared_grads(const struct head *h, struct chunk *c, const real *state, const real *e, const real *dy,
                         int64_t ld, struct tensor dxbc, bool accumulate)
{
    const int64_t a = h->m->state, b = h->m->head_dim, n = c->n;
    real *row = real_row(dxbc, c->row);
    gemm_serial(false, true, n, a, b, 1, dy, ld, state, b, 0, c->of_state, a);
    gemm_serial(false, false, n, a, n, 1, c->k, CHUNK, c->b, c->ld, 0, c->tmp, a);
    add_rows(row + h->c_col, dxbc.ld, c->tmp, c->of_state, c->up, n, a, accumulate);
    gemm_serial(false, true, n, a, b, 1, c->v, b, e, b, 0, c->of_state, a);
    gemm_serial(true, false, n, a, n, 1, c->k, CHUNK, c->c, c->ld, 0, c->tmp, a);
    add_rows(row + h->b_col, dxbc.ld, c->tmp, c->of_state, c->tail, n, a, accumulate);
}

/* dX and ddt; c->of_state is V E^T. */
static void own_grads(const struct head *h, const struct chunk *c, const real *state, const real *e, const real *dy,
                      int64_t ld, struct tensor dxbc, struct tensor ddt)
{
    const int64_t a = h->m->state, b = h->m->head_dim;
    double sum = (double)(c->up[c->n - 1] * dot(state, e, a * b)); /* of ds, from the last token on: first <S, E> */
    for (int64_t i = 0; i < c->n; i++) sum += (double)(c->tail[i] * dot(c->b + i * c->ld, c->of_state + i * a, a));
    for (int64_t i = c->n - 1; i >= 0; i--) {
        const real *x = c->x + i * c->ld, *u = c->u + i * b, *d = dy + i * ld;
        real *dx = real_row(dxbc, c->row + i) + h->x_col;
        sum += (double)dot(c->w + i * b, d, b) - (double)dot(c->v + i * b, u, b);
        const double of_step = -h->decay * sum + (double)dot(u, x, b) + (double)(c->p[i] * dot(d, x, b));
        real_row(ddt, c->row + i)[h->n] = (real)(of_step * c->slope[i]);
        for (int64_t k = 0; k < b; k++) dx[k] = c->step[i] * (u[k] + c->p[i] * d[k]) + (real)h->d * d[k];
    }
}

/* The op of all heads. ends, grads: of heads, by slots of segments. */
struct job {
    struct tensor y, dxbc, ddt, dy, xbc, dt, states, ends, grads;
    const struct states *kept; /* of decoding; else NULL */
};

static real *slot_of(struct tensor slots, const struct head *h, int64_t slot)
{
    return real_row(slots, slot * h->m->n_head + h->n);
}

/* The state that enters chunk i > 0 is in slot row / CHUNK - 1, row being the chunk's first row in the micro-batch: no
 * two such chunks have the same slot. */
static real *state_of(struct tensor states, const struct head *h, int64_t i)
{
    return slot_of(states, h, (h->at.first + i * CHUNK) / CHUNK - 1);
}

/* The state that enters chunk i; NULL: it is 0. */
static const real *state_in(const struct job *j, const struct head *h, int64_t i)
{
    if (i) return state_of(j->states, h, i);
    return h->at.in < 0 ? NULL : slot_of(j->ends, h, h->at.in);
}

static void set_state(real *state, const real *from, size_t bytes)
{
    if (from)
        memcpy(state, from, bytes);
    else
        memset(state, 0, bytes);
}

/* The states after all chunks but the last, and after the last if other segments continue it. */
static void head_states(const struct head *h, const struct job *j, real *scratch)
{
    const int64_t size = h->m->state * h->m->head_dim, n_chunk = (h->at.len + CHUNK - 1) / CHUNK;
    const size_t bytes = (size_t)size * sizeof(real);
    struct chunk c;
    real *state = take(&scratch, size);
    chunk_init(&c, h->m, &scratch);
    set_state(state, state_in(j, h, 0), bytes);
    for (int64_t i = 0; i + 1 < n_chunk || (i < n_chunk && h->at.n_out); i++) {
        chunk_load(h, &c, j->xbc, j->dt, i, false);
        chunk_advance(h, &c, state);
        memcpy(i + 1 < n_chunk ? state_of(j->states, h, i + 1) : slot_of(j->ends, h, h->at.out), state, bytes);
    }
}

static void head_grads(const struct head *h, const struct job *j, real *scratch, bool accumulate)
{
    const int64_t a = h->m->state, b = h->m->head_dim, n_chunk = (h->at.len + CHUNK - 1) / CHUNK;
    const size_t bytes = (size_t)(a * b) * sizeof(real);
    struct chunk c;
    real *state = take(&scratch, a * b), *e = take(&scratch, a * b);
    chunk_init(&c, h->m, &scratch);
    memset(e, 0, bytes);
    for (int64_t k = 0; k < h->at.n_out; k++) {
        const real *of = slot_of(j->grads, h, h->at.out + k);
        for (int64_t i = 0; i < a * b; i++) e[i] += of[i];
    }
    for (int64_t i = n_chunk - 1; i >= 0; i--) {
        set_state(state, state_in(j, h, i), bytes);
        chunk_load(h, &c, j->xbc, j->dt, i, true);
        const real *dy = real_row(j->dy, c.row) + h->x_col;
        inner_grads(h, &c, state, e, dy, j->dy.ld);
        shared_grads(h, &c, state, e, dy, j->dy.ld, j->dxbc, accumulate);
        own_grads(h, &c, state, e, dy, j->dy.ld, j->dxbc, j->ddt);
        scale_rows(c.tmp, c.c, c.ld, c.up, c.n, a);
        gemm_serial(true, false, a, b, c.n, 1, c.tmp, a, dy, j->dy.ld, c.up[c.n - 1], e, b);
    }
    if (h->at.own >= 0) memcpy(slot_of(j->grads, h, h->at.own), e, bytes);
}

/* A segment is a sequence in decoding. */
static void head_outputs(const struct job *j, const struct head *h, int64_t segment, real *scratch)
{
    const int64_t first = h->n * h->m->state * h->m->head_dim; /* of the head in a state */
    const real *before = j->kept ? state_before(j->kept, segment) : NULL;
    real *after = j->kept ? state_after(j->kept, segment) : NULL;
    if (j->kept)
        head_fwd(h, j->y, j->xbc, j->dt, scratch, before ? before + first : NULL, after ? after + first : NULL);
    else
        head_fwd(h, j->y, j->xbc, j->dt, scratch, state_in(j, h, 0),
                 h->at.n_out ? slot_of(j->ends, h, h->at.out) : NULL);
}

enum pass { OUTPUTS, STATES, GRADS };

static void each_head(struct device *dev, const struct job *j, enum pass pass, const struct seqs *seqs,
                      const struct mamba *m, struct tensor scratch)
{
    const int64_t heads = m->n_head / m->n_group, step = dev->steady_rows ? 1 : CHUNK;
    const int64_t n_level = MT_MAX(1, seqs->segments.n_level);
    check_seqs(seqs, j->xbc.shape[0]);
    for (int64_t l = 0; l < n_level; l++) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
        for (int64_t segment = 0; segment < n_segments(seqs); segment++) {
            for (int64_t group = 0; group < m->n_group; group++) {
                for (int64_t i = 0; i < heads; i++) {
                    const struct head h = head_of(seqs, m, segment, group * heads + i, step);
                    real *own = real_row(scratch, omp_get_thread_num());
                    if (h.at.level != (pass == GRADS ? n_level - 1 - l : l)) continue;
                    if (pass == OUTPUTS) head_outputs(j, &h, segment, own);
                    if (pass == STATES) head_states(&h, j, own);
                    if (pass == GRADS) head_grads(&h, j, own, i > 0);
                }
            }
        }
    }
}

static void all_passes(struct device *dev, struct job j, enum pass first, enum pass last, const struct seqs *seqs,
                       const struct mamba *m)
{
    const int64_t mark = arena_mark(&dev->work), size = m->state * m->head_dim;
    const int64_t n_slot = seqs->segments.n_slot * m->n_head;
    const struct tensor scratch = arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, 2 * size + chunk_reals(m));
    j.ends = arena_tensor_2d(&dev->work, DT_REAL, n_slot, size);
    if (last == GRADS) {
        j.states = arena_tensor_2d(&dev->work, DT_REAL, j.xbc.shape[0] / CHUNK * m->n_head, size);
        j.grads = arena_tensor_2d(&dev->work, DT_REAL, n_slot, size);
    }
    for (int pass = (int)first; pass <= (int)last && !dev->dry_run; pass++)
        each_head(dev, &j, (enum pass)pass, seqs, m, scratch);
    arena_release(&dev->work, mark);
}

void CPU(mamba_fwd)(struct device *dev, struct tensor y, struct tensor xbc, struct tensor dt, const struct seqs *seqs,
                    const struct mamba *m)
{
    all_passes(dev, (struct job){.y = y, .xbc = xbc, .dt = dt}, OUTPUTS, OUTPUTS, seqs, m);
}

void CPU(mamba_decode)(struct device *dev, struct tensor y, struct tensor xbc, struct tensor dt,
                       const struct states *states, const struct mamba *m)
{
    const struct job j = {.y = y, .xbc = xbc, .dt = dt, .kept = states};
    if (!dev->dry_run) check_slots(states);
    all_passes(dev, j, OUTPUTS, OUTPUTS, states->seqs, m);
}

void CPU(mamba_bwd)(struct device *dev, struct tensor dxbc, struct tensor ddt, struct tensor dy, struct tensor xbc,
                    struct tensor dt, const struct seqs *seqs, const struct mamba *m)
{
    const struct job j = {.dxbc = dxbc, .ddt = ddt, .dy = dy, .xbc = xbc, .dt = dt};
    all_passes(dev, j, STATES, GRADS, seqs, m);
}
