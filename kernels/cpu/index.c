/* index.c - the indexer of compressed attention: for every token the entries (each a sum of several tokens: compress.c)
 * with the largest scores. A thread scores the entries of one token. */
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/seqs.h"

#include <omp.h>
#include <stdlib.h>

struct scored {
    real score;
    int32_t entry;
};

/* Whether x is chosen before y: larger scores first, of equal scores the lower entry. */
static bool before(struct scored x, struct scored y)
{
    return x.score > y.score || (x.score >= y.score && x.entry < y.entry);
}

/* Reorders the n entries so that the n_top that are chosen come first: quickselect. Their order is not defined. */
static void choose(struct scored *x, int64_t n, int64_t n_top)
{
    int64_t low = 0, high = n - 1; /* the boundary n_top is between them */
    while (low < high) {
        const struct scored pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (before(x[i], pivot)) i++;
            while (before(pivot, x[j])) j--;
            if (i > j) break;
            const struct scored swap = x[i];
            x[i++] = x[j];
            x[j--] = swap;
        }
        if (n_top <= j)
            high = j;
        else if (n_top > i)
            low = i;
        else
            return;
    }
}

static int by_entry(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

static void score(struct scored *out, const real *product, const real *w, int64_t n_head, int64_t n)
{
    for (int64_t e = 0; e < n; e++) out[e] = (struct scored){0, (int32_t)e};
    for (int64_t h = 0; h < n_head; h++)
        for (int64_t e = 0; e < n; e++) out[e].score += w[h] * MT_MAX(0, product[h * n + e]);
}

/* Writes the n_top chosen of n visible entries. If n <= n_top all are chosen, and `scores` is not read. */
static void write_chosen(int32_t *chosen, struct scored *scores, int64_t n, int64_t n_top)
{
    if (n > n_top) choose(scores, n, n_top);
    for (int64_t i = 0; i < n_top; i++) chosen[i] = n > n_top ? scores[i].entry : i < n ? (int32_t)i : -1;
    if (n > n_top) qsort(chosen, (size_t)n_top, sizeof(*chosen), by_entry);
}

/* The op: entries in rows k, or with past in its pages. */
struct index {
    struct tensor idx, q, k, w;
    const struct seqs *seqs;
    const struct past *past;
    int64_t ratio, dim, most;
    bool by_page; /* the scores in the products of decoding */
};

/* Token t of sequence s. */
static void choose_token(const struct index *x, int64_t s, int64_t t, struct scored *scores, real *product)
{
    const int32_t *cu = x->seqs->cu.data;
    const int64_t at = x->past ? ((const int32_t *)x->past->pos.data)[t] : t - cu[s];
    const int64_t n = (at + 1) / x->ratio, n_head = x->w.shape[1], n_top = x->idx.shape[1];
    const int64_t step = x->by_page ? MT_PAGE : MT_MAX(n, 1); /* rows that follow each other */
    MT_REQUIRE(n <= x->most, "%lld entries, at most %lld", (long long)n, (long long)x->most);
    for (int64_t e = 0; e < n && n > n_top; e += step)
        gemm_serial(false, true, n_head, MT_MIN(step, n - e), x->dim, 1, real_row(x->q, t), x->dim,
                    x->past ? page_row(x->past->pages, s, e) : real_row(x->k, cu[s] / x->ratio + e),
                    x->past ? x->past->pages->rows.ld : x->k.ld, 0, product + e, n);
    if (n > n_top) score(scores, product, real_row(x->w, t), n_head, n);
    write_chosen((int32_t *)x->idx.data + t * x->idx.ld, scores, n, n_top);
}

static void choose_all(struct device *dev, const struct index *x)
{
    const int64_t n_head = x->w.shape[1], mark = arena_mark(&dev->work);
    const struct tensor all_products = arena_tensor_3d(&dev->work, DT_REAL, dev->n_threads, n_head, x->most);
    struct scored *all = arena_push(&dev->work, dev->n_threads * x->most * (int64_t)sizeof(*all));
    if (!dev->dry_run) {
        const int32_t *cu = x->seqs->cu.data;
        check_seqs(x->seqs, x->q.shape[0]);
        for (int64_t s = 0; s < x->seqs->n_seq; s++) {
#pragma omp parallel for schedule(dynamic, 16) num_threads(dev->n_threads)
            for (int64_t t = cu[s]; t < cu[s + 1]; t++) {
                const int64_t thread = omp_get_thread_num();
                choose_token(x, s, t, all + thread * x->most, real_row(all_products, thread * n_head));
            }
        }
    }
    arena_release(&dev->work, mark);
}

void CPU(index_topk)(struct device *dev, struct tensor idx, struct tensor q, struct tensor k, struct tensor w,
                     const struct seqs *seqs, int64_t ratio)
{
    const struct index x = {.idx = idx,
                            .q = q,
                            .k = k,
                            .w = w,
                            .seqs = seqs,
                            .ratio = ratio,
                            .dim = k.shape[1],
                            .most = seqs->max_len / ratio,
                            .by_page = dev->steady_rows};
    choose_all(dev, &x);
}

void CPU(index_decode)(struct device *dev, struct tensor idx, struct tensor q, struct tensor w, const struct past *past,
                       int64_t ratio)
{
    const struct index x = {.idx = idx,
                            .q = q,
                            .w = w,
                            .seqs = past->seqs,
                            .past = past,
                            .ratio = ratio,
                            .dim = past->pages->rows.shape[1],
                            .most = past->seqs->max_len / ratio,
                            .by_page = true};
    choose_all(dev, &x);
}
