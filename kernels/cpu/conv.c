/* conv.c - short causal convolution of every column, then SiLU. A thread computes a few columns of one sequence. */
#include "kernels/cpu/seqs.h"

enum { COLS = 64 };

/* Columns first .. first+n-1 of one sequence, with their taps as rows. before: the n_tap - 1 rows before the
 * sequence's, n_col apart; NULL: they are 0. */
struct block {
    int64_t row, len, first, n, n_tap, n_col;
    const real *before;
    real tap[MT_MAX_TAPS][COLS], bias[COLS];
};

static struct block block_of(const struct seqs *seqs, struct tensor w, struct tensor bias, int64_t seq, int64_t first,
                             int64_t n_col)
{
    const int32_t *cu = seqs->cu.data;
    struct block b = {
        .row = cu[seq], .len = cu[seq + 1] - cu[seq], .first = first, .n_tap = w.shape[1], .n_col = n_col};
    b.n = MT_MIN(COLS, n_col - first);
    for (int64_t j = 0; j < b.n_tap; j++)
        for (int64_t c = 0; c < b.n; c++) b.tap[j][c] = (real)((const float *)w.data)[(first + c) * w.ld + j];
    for (int64_t c = 0; bias.ndim && c < b.n; c++) b.bias[c] = (real)((const float *)bias.data)[first + c];
    return b;
}

/* Row t of the sequence, from -(n_tap - 1) on; NULL: 0. */
static const real *row_at(const struct block *b, struct tensor x, int64_t t)
{
    if (t >= 0) return real_row(x, b->row + t) + b->first;
    return b->before ? b->before + (b->n_tap - 1 + t) * b->n_col + b->first : NULL;
}

/* u = the bias and the sum over the taps of row t */
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
    for (int64_t t = 0; t < b->len; t++) {
        real *out = real_row(y, b->row + t) + b->first;
        convolve(b, u, x, t);
        for (int64_t c = 0; c < b->n; c++) out[c] = u[c] / (1 + real_exp(-u[c]));
    }
}

/* after = the last n_tap - 1 rows of the sequence; may be before: row i is read before it is written. */
static void keep_tail(const struct block *b, struct tensor x, real *after)
{
    for (int64_t i = 0; i < b->n_tap - 1; i++) {
        const real *row = row_at(b, x, b->len - (b->n_tap - 1) + i);
        real *to = after + i * b->n_col + b->first;
        for (int64_t c = 0; c < b->n; c++) to[c] = row ? row[c] : 0;
    }
}

/* Row t adds to the gradients of the rows that it reads; its own is the first addition to row t. */
static void block_bwd(const struct block *b, struct tensor dx, struct tensor dy, struct tensor x)
{
    real u[COLS];
    for (int64_t t = 0; t < b->len; t++) {
        const real *d = real_row(dy, b->row + t) + b->first;
        real *own = real_row(dx, b->row + t) + b->first;
        convolve(b, u, x, t);
        for (int64_t c = 0; c < b->n; c++) {
            const real s = 1 / (1 + real_exp(-u[c]));
            u[c] = d[c] * s * (1 + u[c] * (1 - s));
            own[c] = 0;
        }
        for (int64_t j = MT_MAX(0, b->n_tap - 1 - t); j < b->n_tap; j++) {
            real *row = real_row(dx, b->row + t - (b->n_tap - 1) + j) + b->first;
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
            const struct block b = block_of(seqs, w, bias, s, c, x.shape[1]);
            if (dy.ndim)
                block_bwd(&b, out, dy, x);
            else
                block_fwd(&b, out, x);
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
