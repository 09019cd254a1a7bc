/* conv.c - short causal convolutions of every column: with SiLU after it; LFM2's, between two gates. A thread computes
 * a few columns of a sequence and of those that continue its prefixes, whose gradients it adds in their order. */
#include "kernels/cpu/seqs.h"

enum { COLS = 64 };

/* A sequence: first row and number of rows; the first row of its base, and how many rows of the base it continues. */
struct rows {
    int64_t row, len, base, prefix;
};

static struct rows rows_of(const struct seqs *seqs, int64_t seq)
{
    const int32_t *cu = seqs->cu.data;
    return (struct rows){
        .row = cu[seq], .len = cu[seq + 1] - cu[seq], .base = cu[seq_base(seqs, seq)], .prefix = seq_prefix(seqs, seq)};
}

static int64_t row_number(const struct rows *r, int64_t t) { return t < 0 ? r->base + r->prefix + t : r->row + t; }

/* The tap of output t that reads the first row of the sequence, or of its prefix. */
static int64_t first_tap(const struct rows *r, int64_t n_tap, int64_t t)
{
    return MT_MAX(0, n_tap - 1 - t - r->prefix);
}

/* The first sequence after s that does not continue s. */
static int64_t family_end(const struct seqs *seqs, int64_t s)
{
    do s++;
    while (s < seqs->n_seq && seq_prefix(seqs, s));
    return s;
}

/* Columns first .. first+n-1 of one sequence. tap: a row for each tap. before: in decoding, the n_tap - 1 input rows
 * before the sequence, n_col apart; NULL: they are 0. */
struct block {
    struct rows at;
    int64_t first, n, n_tap, n_col;
    const real *before;
    real tap[MT_MAX_TAPS][COLS], bias[COLS];
};

static struct block block_of(const struct seqs *seqs, struct tensor w, struct tensor bias, int64_t seq, int64_t first,
                             int64_t n_col)
{
    struct block b = {.at = rows_of(seqs, seq), .first = first, .n_tap = w.shape[1], .n_col = n_col};
    b.n = MT_MIN(COLS, n_col - first);
    for (int64_t j = 0; j < b.n_tap; j++)
        for (int64_t c = 0; c < b.n; c++) b.tap[j][c] = (real)((const float *)w.data)[(first + c) * w.ld + j];
    for (int64_t c = 0; bias.ndim && c < b.n; c++) b.bias[c] = (real)((const float *)bias.data)[first + c];
    return b;
}

/* Row t of the sequence. t >= -(n_tap - 1): negative rows precede the sequence. NULL: the row is 0. */
static const real *row_at(const struct block *b, struct tensor x, int64_t t)
{
    if (t >= -b->at.prefix) return real_row(x, row_number(&b->at, t)) + b->first;
    return b->before ? b->before + (b->n_tap - 1 + t) * b->n_col + b->first : NULL;
}

static void convolve(const struct block *b, real *u, struct tensor x, int64_t t)
{
    for (int64_t c = 0; c < b->n; c++) u[c] = b->bias[c];
    for (int64_t j = 0; j < b->n_tap; j++) {
        const real *row = row_at(b, x, t - (b->n_tap - 1) + j);
        for (int64_t c = 0; row && c < b->n; c++) u[c] += b->tap[j][c] * row[c];
    }
}

static void block_fwd(const struct block *b, struct tensor y, struct tensor x)
{
    real u[COLS];
    for (int64_t t = 0; t < b->at.len; t++) {
        real *out = real_row(y, b->at.row + t) + b->first;
        convolve(b, u, x, t);
        for (int64_t c = 0; c < b->n; c++) out[c] = u[c] / (1 + real_exp(-u[c]));
    }
}

/* after = the last n_tap - 1 rows of the sequence. It may be the same memory as b->before: row i is read before it is
 * written. */
static void keep_tail(const struct block *b, struct tensor x, real *after)
{
    for (int64_t i = 0; i < b->n_tap - 1; i++) {
        const real *row = row_at(b, x, b->at.len - (b->n_tap - 1) + i);
        real *to = after + i * b->n_col + b->first;
        for (int64_t c = 0; c < b->n; c++) to[c] = row ? row[c] : 0;
    }
}

/* Step t zeroes row t of dx, which no earlier output read, then adds the gradient of output t to the rows that it
 * read. */
static void block_bwd(const struct block *b, struct tensor dx, struct tensor dy, struct tensor x)
{
    real u[COLS];
    for (int64_t t = 0; t < b->at.len; t++) {
        const real *d = real_row(dy, b->at.row + t) + b->first;
        real *own = real_row(dx, b->at.row + t) + b->first;
        convolve(b, u, x, t);
        for (int64_t c = 0; c < b->n; c++) {
            const real s = 1 / (1 + real_exp(-u[c]));
            u[c] = d[c] * s * (1 + u[c] * (1 - s));
            own[c] = 0;
        }
        for (int64_t j = first_tap(&b->at, b->n_tap, t); j < b->n_tap; j++) {
            real *row = real_row(dx, row_number(&b->at, t - (b->n_tap - 1) + j)) + b->first;
            for (int64_t c = 0; c < b->n; c++) row[c] += b->tap[j][c] * u[c];
        }
    }
}

/* Forward: out = y, dy is absent. Backward: out = dx. */
static void each_block(struct device *dev, struct tensor out, struct tensor dy, struct tensor x, struct tensor w,
                       struct tensor bias, const struct seqs *seqs)
{
    if (dev->dry_run) return;
    check_seqs(seqs, x.shape[0]);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t s = 0; s < seqs->n_seq; s++) {
        for (int64_t c = 0; c < x.shape[1]; c += COLS) {
            for (int64_t q = s; q < (seq_prefix(seqs, s) ? s : family_end(seqs, s)); q++) {
                const struct block b = block_of(seqs, w, bias, q, c, x.shape[1]);
                if (dy.ndim)
                    block_bwd(&b, out, dy, x);
                else
                    block_fwd(&b, out, x);
            }
        }
    }
}

void CPU(conv_silu_fwd)(struct device *dev, struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                        const struct seqs *seqs)
{
    each_block(dev, y, (struct tensor){0}, x, w, bias, seqs);
}

void CPU(conv_silu_bwd)(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor w,
                        struct tensor bias, const struct seqs *seqs)
{
    each_block(dev, dx, dy, x, w, bias, seqs);
}

void CPU(conv_decode)(struct device *dev, struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                      const struct states *tail)
{
    const struct seqs *seqs = tail->seqs;
    if (dev->dry_run) return;
    check_seqs(seqs, x.shape[0]);
    check_slots(tail);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t s = 0; s < seqs->n_seq; s++) {
        for (int64_t c = 0; c < x.shape[1]; c += COLS) {
            struct block b = block_of(seqs, w, bias, s, c, x.shape[1]);
            b.before = state_before(tail, s);
            block_fwd(&b, y, x);
            if (state_after(tail, s)) keep_tail(&b, x, state_after(tail, s));
        }
    }
}

/* ---- the gated short convolution ---- */

/* Columns first .. first+n-1 of one sequence. before: in decoding, the n_tap - 1 rows of v before the sequence, n_col
 * apart; NULL: they are 0. */
struct gated {
    struct rows at;
    int64_t first, n, n_tap, n_col;
    const real *before;
    struct tensor bcx, w, bias;
};

/* Row t of v = B * x. t >= -(n_tap - 1): negative rows precede the sequence. False: the row is 0. */
static bool gated_row(const struct gated *g, int64_t t, real v[COLS])
{
    const bool kept = t < -g->at.prefix;
    if (kept && !g->before) return false;
    const real *b = kept ? g->before + (g->n_tap - 1 + t) * g->n_col : real_row(g->bcx, row_number(&g->at, t));
    for (int64_t c = 0; c < g->n; c++) {
        v[c] = b[g->first + c];
        if (!kept) v[c] *= b[2 * g->n_col + g->first + c];
    }
    return true;
}

static real tap(const struct gated *g, int64_t c, int64_t j)
{
    return (real)((const float *)g->w.data)[(g->first + c) * g->w.ld + j];
}

static void gated_convolve(const struct gated *g, int64_t t, real u[COLS])
{
    real v[COLS];
    for (int64_t c = 0; c < g->n; c++) u[c] = g->bias.ndim ? (real)((const float *)g->bias.data)[g->first + c] : 0;
    for (int64_t j = 0; j < g->n_tap; j++) {
        if (!gated_row(g, t - (g->n_tap - 1) + j, v)) continue;
        for (int64_t c = 0; c < g->n; c++) u[c] += tap(g, c, j) * v[c];
    }
}

static void gated_fwd(const struct gated *g, struct tensor y)
{
    real u[COLS];
    for (int64_t t = 0; t < g->at.len; t++) {
        const real *gate = real_row(g->bcx, g->at.row + t) + g->n_col + g->first;
        real *out = real_row(y, g->at.row + t) + g->first;
        gated_convolve(g, t, u);
        for (int64_t c = 0; c < g->n; c++) out[c] = gate[c] * u[c];
    }
}

/* Writes dC, and sums dv in the columns of dbcx that become dx. */
static void gated_sums(const struct gated *g, struct tensor dbcx, struct tensor dy)
{
    real u[COLS];
    for (int64_t t = 0; t < g->at.len; t++) {
        const int64_t row = g->at.row + t;
        const real *gate = real_row(g->bcx, row) + g->n_col + g->first, *d = real_row(dy, row) + g->first;
        real *own = real_row(dbcx, row) + g->first;
        gated_convolve(g, t, u);
        for (int64_t c = 0; c < g->n; c++) {
            own[g->n_col + c] = d[c] * u[c];
            own[2 * g->n_col + c] = 0;
        }
        for (int64_t j = first_tap(&g->at, g->n_tap, t); j < g->n_tap; j++) {
            real *dv = real_row(dbcx, row_number(&g->at, t - (g->n_tap - 1) + j)) + 2 * g->n_col + g->first;
            for (int64_t c = 0; c < g->n; c++) dv[c] += tap(g, c, j) * d[c] * gate[c];
        }
    }
}

/* Replaces dv by dx and writes dB. */
static void gated_products(const struct gated *g, struct tensor dbcx)
{
    for (int64_t t = 0; t < g->at.len; t++) {
        const real *b = real_row(g->bcx, g->at.row + t) + g->first;
        real *own = real_row(dbcx, g->at.row + t) + g->first;
        for (int64_t c = 0; c < g->n; c++) {
            const real dv = own[2 * g->n_col + c];
            own[c] = dv * b[2 * g->n_col + c];
            own[2 * g->n_col + c] = dv * b[c];
        }
    }
}

/* after = the last n_tap - 1 rows of v. It may be the same memory as g->before: row i is read before it is written. */
static void gated_tail(const struct gated *g, real *after)
{
    real v[COLS];
    for (int64_t i = 0; i < g->n_tap - 1; i++) {
        const bool any = gated_row(g, g->at.len - (g->n_tap - 1) + i, v);
        for (int64_t c = 0; c < g->n; c++) after[i * g->n_col + g->first + c] = any ? v[c] : 0;
    }
}

static struct gated gated_of(const struct seqs *seqs, int64_t seq, int64_t first, struct tensor bcx, struct tensor w,
                             struct tensor bias)
{
    const int64_t n_col = bcx.shape[1] / 3;
    return (struct gated){.at = rows_of(seqs, seq),
                          .first = first,
                          .n = MT_MIN(COLS, n_col - first),
                          .n_tap = w.shape[1],
                          .n_col = n_col,
                          .bcx = bcx,
                          .w = w,
                          .bias = bias};
}

void CPU(short_conv_fwd)(struct device *dev, struct tensor y, struct tensor bcx, struct tensor w, struct tensor bias,
                         const struct seqs *seqs)
{
    if (dev->dry_run) return;
    check_seqs(seqs, y.shape[0]);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t s = 0; s < seqs->n_seq; s++) {
        for (int64_t c = 0; c < y.shape[1]; c += COLS) {
            const struct gated g = gated_of(seqs, s, c, bcx, w, bias);
            gated_fwd(&g, y);
        }
    }
}

void CPU(short_conv_bwd)(struct device *dev, struct tensor dbcx, struct tensor dy, struct tensor bcx, struct tensor w,
                         struct tensor bias, const struct seqs *seqs)
{
    if (dev->dry_run) return;
    check_seqs(seqs, dy.shape[0]);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t s = 0; s < seqs->n_seq; s++) {
        for (int64_t c = 0; c < dy.shape[1]; c += COLS) {
            const int64_t end = seq_prefix(seqs, s) ? s : family_end(seqs, s);
            for (int64_t i = 0; i < 2 * (end - s); i++) {
                const struct gated g = gated_of(seqs, s + i % (end - s), c, bcx, w, bias);
                if (i < end - s)
                    gated_sums(&g, dbcx, dy);
                else
                    gated_products(&g, dbcx);
            }
        }
    }
}

void CPU(short_conv_decode)(struct device *dev, struct tensor y, struct tensor bcx, struct tensor w, struct tensor bias,
                            const struct states *tail)
{
    const struct seqs *seqs = tail->seqs;
    if (dev->dry_run) return;
    check_seqs(seqs, y.shape[0]);
    check_slots(tail);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t s = 0; s < seqs->n_seq; s++) {
        for (int64_t c = 0; c < y.shape[1]; c += COLS) {
            struct gated g = gated_of(seqs, s, c, bcx, w, bias);
            g.before = state_before(tail, s);
            gated_fwd(&g, y);
            if (state_after(tail, s)) gated_tail(&g, state_after(tail, s));
        }
    }
}
