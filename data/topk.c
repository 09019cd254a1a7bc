/* topk.c - see topk.h. */
#include "data/topk.h"

#include <string.h>

static void reserve(struct topk *t, int64_t rows)
{
    t->doc = mem_reserve(t->doc, &t->cap_docs, t->n_docs + 1, sizeof(*t->doc));
    if (t->n_rows + rows <= t->cap_rows) return;
    const int64_t cap = MT_MAX(t->n_rows + rows, 2 * t->cap_rows);
    t->id = mem_grow(t->id, t->cap_rows * t->n_top, cap * t->n_top, sizeof(*t->id));
    t->logprob = mem_grow(t->logprob, t->cap_rows * t->n_top, cap * t->n_top, sizeof(*t->logprob));
    t->cap_rows = cap;
}

void topk_add(struct topk *t, const int32_t *id, const float *logprob, int64_t n)
{
    if (!t->n_top) return;
    reserve(t, n);
    t->doc[t->n_docs++] = t->n_rows;
    if (n) memcpy(t->id + t->n_rows * t->n_top, id, (size_t)(n * t->n_top) * sizeof(*id));
    if (n) memcpy(t->logprob + t->n_rows * t->n_top, logprob, (size_t)(n * t->n_top) * sizeof(*logprob));
    t->n_rows += n;
}

void topk_copy(struct topk *to, const struct topk *from, int64_t doc)
{
    to->n_top = from->n_top;
    if (!from->n_top) return;
    const int64_t begin = from->doc[doc], end = doc + 1 < from->n_docs ? from->doc[doc + 1] : from->n_rows;
    topk_add(to, from->id + begin * from->n_top, from->logprob + begin * from->n_top, end - begin);
}

uint64_t topk_hash(const struct topk *t)
{
    uint64_t h = 1;
    for (int64_t i = 0; i < t->n_rows * t->n_top; i++) {
        uint32_t bits;
        if (t->id[i] < 0) continue;
        memcpy(&bits, &t->logprob[i], sizeof(bits));
        h = rng_u64(h, (uint64_t)(uint32_t)t->id[i] << 32 | bits);
        h += (uint64_t)(i / t->n_top);
    }
    return h;
}

void topk_free(struct topk *t)
{
    mem_free(t->id);
    mem_free(t->logprob);
    mem_free(t->doc);
    *t = (struct topk){.n_top = 0};
}
