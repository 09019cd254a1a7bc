/* index.c - the indexer of compressed attention: the entries of every token with the largest scores. A thread scores
 * the entries of one token. */
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/seqs.h"

#include <omp.h>
#include <stdlib.h>

struct scored {
    real score;
    int32_t entry;
};

/* Whether x is chosen before y: larger scores first, of equal ones the lower entry. */
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

/* The scores of n entries from row `first` of k on; product [H, n]. */
static void score(struct scored *out, real *product, const real *q, const real *w, int64_t n_head, struct tensor k,
                  int64_t first, int64_t n)
{
    gemm_serial(false, true, n_head, n, k.shape[1], 1, q, k.shape[1], real_row(k, first), k.ld, 0, product, n);
    for (int64_t e = 0; e < n; e++) out[e] = (struct scored){0, (int32_t)e};
    for (int64_t h = 0; h < n_head; h++)
        for (int64_t e = 0; e < n; e++) out[e].score += w[h] * MT_MAX(0, product[h * n + e]);
}

void CPU(index_topk)(struct device *dev, struct tensor idx, struct tensor q, struct tensor k, struct tensor w,
                     const struct seqs *seqs, int64_t ratio)
{
    const int64_t most = seqs->max_len / ratio, n_head = w.shape[1], n_top = idx.shape[1],
                  mark = arena_mark(&dev->work);
    const struct tensor products = arena_tensor_3d(&dev->work, DT_REAL, dev->n_threads, n_head, most);
    struct scored *all = arena_push(&dev->work, dev->n_threads * most * (int64_t)sizeof(*all));
    if (!dev->dry_run) {
        const int32_t *cu = seqs->cu.data;
        check_seqs(seqs, q.shape[0]);
        for (int64_t s = 0; s < seqs->n_seq; s++) {
#pragma omp parallel for schedule(dynamic, 16) num_threads(dev->n_threads)
            for (int64_t t = cu[s]; t < cu[s + 1]; t++) {
                const int64_t n = (t - cu[s] + 1) / ratio, thread = omp_get_thread_num();
                struct scored *scores = all + thread * most;
                int32_t *chosen = (int32_t *)idx.data + t * idx.ld;
                if (n > n_top) {
                    score(scores, real_row(products, thread * n_head), real_row(q, t), real_row(w, t), n_head, k,
                          cu[s] / ratio, n);
                    choose(scores, n, n_top);
                }
                for (int64_t i = 0; i < n_top; i++) chosen[i] = n > n_top ? scores[i].entry : i < n ? (int32_t)i : -1;
                if (n > n_top) qsort(chosen, (size_t)n_top, sizeof(*chosen), by_entry);
            }
        }
    }
    arena_release(&dev->work, mark);
}
