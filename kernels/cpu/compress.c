/* compress.c - the entries of compressed attention, one per `ratio` tokens: in every column the sum of their values,
 * weighted by a softmax of their gates. A thread computes one entry. */
#include "kernels/cpu/seqs.h"

#include <string.h>

/* An entry: its row of y, its position, the row of its first token. before: it also sums up the tokens of the previous
 * entry. past: NULL but in decoding, where the pages of sequence seq have its tokens before row `start`. */
struct entry {
    int64_t row, pos, first;
    bool before;
    const struct past *past;
    int64_t seq, start;
};

/* The sequence that has an entry in this row of y; -1: no sequence has. */
static int64_t find_seq(const struct seqs *seqs, int64_t row, int64_t ratio)
{
    const int32_t *cu = seqs->cu.data;
    int64_t low = 0, high = seqs->n_seq; /* the first sequence whose entries end after the row */
    while (low < high) {
        const int64_t middle = (low + high) / 2, end = cu[middle] / ratio + (cu[middle + 1] - cu[middle]) / ratio;
        if (end > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low < seqs->n_seq && cu[low] / ratio <= row ? low : -1;
}

static bool find_entry(struct entry *e, const struct seqs *seqs, const struct compress_shape *s, int64_t row)
{
    const int32_t *cu = seqs->cu.data;
    const int64_t seq = find_seq(seqs, row, s->ratio);
    if (seq < 0) return false;
    *e = (struct entry){.row = row, .pos = (row - cu[seq] / s->ratio) * s->ratio};
    e->first = cu[seq] + e->pos;
    e->before = s->overlap && e->pos > 0;
    return true;
}

static bool find_complete(struct entry *e, const struct past *p, const struct compress_shape *s, int64_t row)
{
    int64_t seq, index;
    if (!complete_entry(p, s->ratio, row, &seq, &index)) return false;
    const int64_t start = ((const int32_t *)p->seqs->cu.data)[seq], pos = index * s->ratio;
    const int64_t first = start + pos - ((const int32_t *)p->pos.data)[start];
    *e = (struct entry){row, pos, first, s->overlap && pos > 0, p, seq, start};
    return true;
}

/* The values and gates of row t of kg. */
static const real *pair_at(const struct entry *e, struct tensor kg, int64_t t)
{
    return !e->past || t >= e->start ? real_row(kg, t) : page_row(e->past->pages, e->seq, e->pos + t - e->first);
}

/* Row and first column of the values of token j of an entry. Tokens -ratio .. -1 are those of the previous entry. gate:
 * distance from a value to its gate, in columns. */
struct slot {
    int64_t row, col, gate;
    const float *bias;
};
static struct slot slot_of(const struct entry *e, const struct compress_shape *s, struct tensor bias, int64_t j)
{
    const int64_t n_part = s->overlap ? 2 : 1, col = s->overlap && j >= 0 ? s->width : 0;
    const float *row = (const float *)bias.data + (j < 0 ? j + s->ratio : j) * bias.ld;
    return (struct slot){e->first + j, col, n_part * s->width, row + col};
}

/* top = the largest gate of every column, total = the sum of e^(gate - top). */
static void softmax(real *top, real *total, const struct entry *e, struct tensor kg, struct tensor bias,
                    const struct compress_shape *s)
{
    const int64_t start = e->before ? -s->ratio : 0;
    for (int64_t c = 0; c < s->width; c++) {
        top[c] = -INFINITY;
        total[c] = 0;
    }
    for (int64_t j = start; j < s->ratio; j++) {
        const struct slot p = slot_of(e, s, bias, j);
        const real *gate = pair_at(e, kg, p.row) + p.col + p.gate;
        for (int64_t c = 0; c < s->width; c++) top[c] = MT_MAX(top[c], gate[c] + (real)p.bias[c]);
    }
    for (int64_t j = start; j < s->ratio; j++) {
        const struct slot p = slot_of(e, s, bias, j);
        const real *gate = pair_at(e, kg, p.row) + p.col + p.gate;
        for (int64_t c = 0; c < s->width; c++) total[c] += real_exp(gate[c] + (real)p.bias[c] - top[c]);
    }
}

/* y of one entry. */
static void sum_up(real *y, const real *top, const real *total, const struct entry *e, struct tensor kg,
                   struct tensor bias, const struct compress_shape *s)
{
    memset(y, 0, (size_t)s->width * sizeof(*y));
    for (int64_t j = e->before ? -s->ratio : 0; j < s->ratio; j++) {
        const struct slot p = slot_of(e, s, bias, j);
        const real *value = pair_at(e, kg, p.row) + p.col, *gate = value + p.gate;
        for (int64_t c = 0; c < s->width; c++)
            y[c] += real_exp(gate[c] + (real)p.bias[c] - top[c]) / total[c] * value[c];
    }
}

/* Computes the rows of y and their positions. past NULL: kg has whole sequences. */
static void all_entries(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg, struct tensor bias,
                        const struct seqs *seqs, const struct past *past, const struct compress_shape *s)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor scratch = arena_tensor_3d(&dev->work, DT_REAL, y.shape[0], 2, s->width);
    if (!dev->dry_run) {
        check_seqs(seqs, kg.shape[0]);
#pragma omp parallel for num_threads(dev->n_threads)
        for (int64_t row = 0; row < y.shape[0]; row++) {
            struct entry e;
            const bool found = past ? find_complete(&e, past, s, row) : find_entry(&e, seqs, s, row);
            real *top = real_row(scratch, 2 * row), *total = real_row(scratch, 2 * row + 1);
            ((int32_t *)pos.data)[row] = found ? (int32_t)e.pos : 0;
            if (found) {
                softmax(top, total, &e, kg, bias, s);
                sum_up(real_row(y, row), top, total, &e, kg, bias, s);
            } else {
                memset(real_row(y, row), 0, (size_t)s->width * sizeof(real));
            }
        }
    }
    arena_release(&dev->work, mark);
}

void CPU(compress_fwd)(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg, struct tensor bias,
                       const struct seqs *seqs, const struct compress_shape *s)
{
    all_entries(dev, y, pos, kg, bias, seqs, NULL, s);
}

void CPU(compress_decode)(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg, struct tensor bias,
                          const struct past *past, const struct compress_shape *s)
{
    all_entries(dev, y, pos, kg, bias, past->seqs, past, s);
}

void CPU(entry_store)(struct device *dev, struct tensor x, const struct past *past, int64_t ratio)
{
    if (dev->dry_run) return;
    check_seqs(past->seqs, past->pos.shape[0]);
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t row = 0; row < x.shape[0]; row++) {
        int64_t seq, e;
        if (complete_entry(past, ratio, row, &seq, &e))
            memcpy(page_row(past->pages, seq, e), real_row(x, row), (size_t)x.shape[1] * sizeof(real));
    }
}

/* dvalue = p dy, dgate = p dy (value - y), p the softmax. */
static void entry_bwd(struct tensor dkg, const real *dy, const real *y, const real *top, const real *total,
                      const struct entry *e, struct tensor kg, struct tensor bias, const struct compress_shape *s)
{
    for (int64_t j = e->before ? -s->ratio : 0; j < s->ratio; j++) {
        const struct slot p = slot_of(e, s, bias, j);
        const real *value = real_row(kg, p.row) + p.col, *gate = value + p.gate;
        real *dvalue = real_row(dkg, p.row) + p.col, *dgate = dvalue + p.gate;
        for (int64_t c = 0; c < s->width; c++) {
            dvalue[c] = real_exp(gate[c] + (real)p.bias[c] - top[c]) / total[c] * dy[c];
            dgate[c] = dvalue[c] * (value[c] - y[c]);
        }
    }
}

void CPU(compress_bwd)(struct device *dev, struct tensor dkg, struct tensor dy, struct tensor kg, struct tensor bias,
                       const struct seqs *seqs, const struct compress_shape *s)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor scratch = arena_tensor_3d(&dev->work, DT_REAL, dy.shape[0], 3, s->width);
    if (!dev->dry_run) {
        check_seqs(seqs, kg.shape[0]);
#pragma omp parallel num_threads(dev->n_threads)
        {
#pragma omp for
            for (int64_t t = 0; t < kg.shape[0]; t++) memset(real_row(dkg, t), 0, (size_t)kg.shape[1] * sizeof(real));
#pragma omp for
            for (int64_t row = 0; row < dy.shape[0]; row++) {
                struct entry e;
                if (!find_entry(&e, seqs, s, row)) continue;
                real *top = real_row(scratch, 3 * row), *total = real_row(scratch, 3 * row + 1);
                real *y = real_row(scratch, 3 * row + 2);
                softmax(top, total, &e, kg, bias, s);
                sum_up(y, top, total, &e, kg, bias, s);
                entry_bwd(dkg, real_row(dy, row), y, top, total, &e, kg, bias, s);
            }
        }
    }
    arena_release(&dev->work, mark);
}
