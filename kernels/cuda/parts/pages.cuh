/* pages.cuh - decoding: rows in pages (struct pages), of tokens or of entries of compressed attention, which each sum
 * up several tokens; the entries that a pass completes. */
#ifndef MT_CUDA_PAGES_H
#define MT_CUDA_PAGES_H

#include <stdio.h>

#include "kernels/cuda/parts/rows.cuh"
#include "kernels/cuda/parts/seqs.cuh"

struct page_table {
    bf16 *rows;
    const int32_t *table;
    int64_t ld, ld_table, n_page;
    int n_of_seq; /* P */
};

static inline struct page_table table_of(const struct pages *p)
{
    return {bf16_ptr(p->rows), i32_ptr(p->table),          p->rows.ld,
            p->table.ld,       p->rows.shape[0] / MT_PAGE, (int)p->table.shape[1]};
}

/* The row of position p of sequence s. A position below 0 or a page that does not exist traps. */
static __device__ inline bf16 *page_row(const struct page_table &t, int64_t s, int p)
{
    const int page = p < 0 ? -1 : t.table[s * t.ld_table + p / MT_PAGE % t.n_of_seq];
    if (page < 0 || page >= t.n_page) {
        printf("position %d, page %d of %lld\n", p, page, (long long)t.n_page);
        __trap();
    }
    return t.rows + ((int64_t)page * MT_PAGE + p % MT_PAGE) * t.ld;
}

struct pass_tokens {
    const int32_t *cu, *pos;
    int n_seq;
};
static inline struct pass_tokens tokens_of(const struct past *p)
{
    return {i32_ptr(p->seqs->cu), i32_ptr(p->pos), (int)p->seqs->n_seq};
}

/* What a decoding pass writes to an output row: entry e of sequence seq, if the pass completes it (found). */
struct complete_entry {
    bool found;
    int seq, e;
};
static __device__ inline struct complete_entry complete_at(const struct pass_tokens &x, int ratio, int64_t row)
{
    const int seq = last_index(x.n_seq, [&](int s) { return x.cu[s] / ratio + s <= row; });
    const int start = x.cu[seq], n = x.cu[seq + 1] - start;
    if (n == 0) return {false, seq, 0};
    const int e = x.pos[start] / ratio + (int)row - (start / ratio + seq);
    return {(int64_t)(e + 1) * ratio <= (int64_t)x.pos[start] + n, seq, e};
}

#endif
