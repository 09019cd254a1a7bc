/* attn_decode.c - decoding: rows of tokens in pages, and attention to them. */
#include "kernels/cpu/seqs.h"

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

/* Online softmax, as in attn.c: m is the largest score so far, l the sum of exp(score - m). */
static void decode_head(real *o, const real *q, const struct pages *pages, int64_t seq, int64_t pos, int64_t head,
                        const float *sink, const struct attn_shape *s)
{
    const int64_t dim = s->head_dim, value_dim = attn_value_dim(s), kv = head / (s->n_head / s->n_kv);
    const bool shared = pages->rows.shape[1] == s->n_kv * dim; /* values are columns of keys */
    real m = sink ? (real)*sink : -INFINITY, l = sink ? 1 : 0;
    for (int64_t c = 0; c < value_dim; c++) o[c] = 0;
    for (int64_t j = s->window ? MT_MAX(0, pos - s->window + 1) : 0; j <= pos; j++) {
        const real *row = page_row(pages, seq, j), *key = row + kv * dim;
        const real *value = shared ? key : row + s->n_kv * dim + kv * value_dim;
        real score = 0;
#pragma omp simd reduction(+ : score)
        for (int64_t c = 0; c < dim; c++) score += q[c] * key[c];
        score *= (real)s->scale;
        if (score > m) {
            const real factor = real_exp(m - score);
            for (int64_t c = 0; c < value_dim; c++) o[c] *= factor;
            l *= factor;
            m = score;
        }
        const real p = real_exp(score - m);
        for (int64_t c = 0; c < value_dim; c++) o[c] += p * value[c];
        l += p;
    }
    for (int64_t c = 0; c < value_dim; c++) o[c] /= l;
}

void CPU(attn_decode)(struct device *dev, struct tensor o, struct tensor q, const struct pages *pages,
                      struct tensor sinks, struct tensor pos, const struct seqs *seqs, const struct attn_shape *shape)
{
    const int32_t *cu = seqs->cu.data, *at = pos.data;
    if (dev->dry_run) return;
    check_seqs(seqs, q.shape[0]);
#pragma omp parallel num_threads(dev->n_threads)
    for (int64_t s = 0; s < seqs->n_seq; s++) {
#pragma omp for collapse(2) schedule(dynamic) nowait
        for (int64_t t = cu[s]; t < cu[s + 1]; t++)
            for (int64_t h = 0; h < shape->n_head; h++)
                decode_head(real_row(o, t) + h * attn_value_dim(shape), real_row(q, t) + h * shape->head_dim, pages, s,
                            at[t], h, sinks.ndim ? (const float *)sinks.data + h : NULL, shape);
    }
}
