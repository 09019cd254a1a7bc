/* prefix.c - see prefix.h. Rows only move to lower numbers, so all is done in place. */
#include "data/prefix.h"

#include <string.h>

#include "kernels/memory.h"

/* A document: its first row and its size. */
struct rows {
    int64_t first, n;
};

static int64_t common(const int32_t *tok, struct rows a, struct rows b, int64_t most)
{
    int64_t n = 0;
    most = MT_MIN(most, MT_MIN(a.n, b.n));
    while (n < most && tok[a.first + n] == tok[b.first + n]) n++;
    return n;
}

void prefix_share(struct batch *b, int64_t group, int64_t least)
{
    struct rows base = {0}, next = {0};
    int64_t n_tok = 0, label = 0;
    MT_REQUIRE(group > 0 && !b->prefix, "groups of %lld documents", (long long)group);
    b->prefix = mem_array(b->n_seq, sizeof(*b->prefix));
    for (int64_t s = 0; s < b->n_seq; s++) {
        next.n = b->cu[s + 1] - next.first;
        const int64_t end = next.first + next.n;
        const bool labelled = label < b->n_label && b->label_row[label] < end;
        int64_t shared = 0;
        if (s % group == 0)
            base = (struct rows){n_tok, next.n};
        else if (labelled)
            shared = common(b->tok, base, next, b->label_row[label] - next.first);
        if (shared < least) shared = 0;
        const int64_t from = next.first + shared, kept = next.n - shared;
        memmove(b->tok + n_tok, b->tok + from, (size_t)kept * sizeof(*b->tok));
        memmove(b->pos + n_tok, b->pos + from, (size_t)kept * sizeof(*b->pos));
        for (; label < b->n_label && b->label_row[label] < end; label++) b->label_row[label] -= (int32_t)(from - n_tok);
        b->prefix[s] = (int32_t)shared;
        b->cu[s] = (int32_t)n_tok;
        n_tok += kept;
        next.first = end;
    }
    if (n_tok == b->n_tok) { /* nothing in common */
        mem_free(b->prefix);
        b->prefix = NULL;
    }
    b->n_tok = n_tok;
    b->cu[b->n_seq] = (int32_t)n_tok;
}
