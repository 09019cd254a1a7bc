/* seqs.h - checks the packed sequences of a micro-batch; in decoding finds their pages and states. */
#ifndef MT_CPU_SEQS_H
#define MT_CPU_SEQS_H

#include "kernels/cpu/real.h"

/* Rows of its base that sequence s continues. */
static inline int64_t seq_prefix(const struct seqs *seqs, int64_t s)
{
    return seqs->prefix.ndim ? ((const int32_t *)seqs->prefix.data)[s] : 0;
}
/* The sequence with the prefix of s; s itself without one. */
static inline int64_t seq_base(const struct seqs *seqs, int64_t s)
{
    while (seq_prefix(seqs, s)) s--;
    return s;
}

/* Checks cu and prefix, which the host packed: a wrong value would index outside the tensors. */
static inline void check_seqs(const struct seqs *seqs, int64_t n_tok)
{
    const int32_t *cu = seqs->cu.data;
    bool right = cu[0] == 0 && cu[seqs->n_seq] == n_tok;
    int64_t base = 0; /* rows of the last sequence without prefix */
    for (int64_t s = 0; s < seqs->n_seq; s++) {
        const int64_t prefix = seq_prefix(seqs, s);
        right = right && cu[s] <= cu[s + 1];
        if (!prefix) base = cu[s + 1] - cu[s];
        MT_REQUIRE(prefix >= 0 && prefix <= base, "sequence %lld continues %lld rows of %lld", (long long)s,
                   (long long)prefix, (long long)base);
    }
    MT_REQUIRE(right, "%lld sequences do not cover %lld rows", (long long)seqs->n_seq, (long long)n_tok);
}

/* A segment: its rows, and its links as in ops.h. */
struct segment {
    int64_t first, len, level, in, own, out, n_out;
};
static inline int64_t n_segments(const struct seqs *seqs) { return seqs->segments.n ? seqs->segments.n : seqs->n_seq; }
static inline struct segment segment_of(const struct seqs *seqs, int64_t i)
{
    const struct segments *s = &seqs->segments;
    const int32_t *cu = s->n ? s->cu.data : seqs->cu.data;
    struct segment x = {.first = cu[i], .len = cu[i + 1] - cu[i], .in = -1, .own = -1, .out = -1};
    if (!s->n) return x;
    const int32_t *links = (const int32_t *)s->links.data + i * SEGMENT_LINKS;
    x.level = links[SEGMENT_LEVEL];
    x.in = links[SEGMENT_IN];
    x.own = links[SEGMENT_OWN];
    x.out = links[SEGMENT_OUT];
    x.n_out = links[SEGMENT_N_OUT];
    return x;
}

static inline real *page_row(const struct pages *pages, int64_t s, int64_t p)
{
    const struct tensor table = pages->table;
    const int32_t page = ((const int32_t *)table.data)[s * table.ld + p / MT_PAGE % table.shape[1]];
    MT_REQUIRE(p >= 0 && page >= 0 && page < pages->rows.shape[0] / MT_PAGE, "position %lld, page %lld of %lld",
               (long long)p, (long long)page, (long long)(pages->rows.shape[0] / MT_PAGE));
    return real_row(pages->rows, (int64_t)page * MT_PAGE + p % MT_PAGE);
}

/* Finds what a decoding pass writes to output row `row`: entry *e of sequence *seq. False: nothing, as the pass
 * completes no such entry. */
static inline bool complete_entry(const struct past *p, int64_t ratio, int64_t row, int64_t *seq, int64_t *e)
{
    const int32_t *cu = p->seqs->cu.data, *pos = p->pos.data;
    int64_t low = 0, high = p->seqs->n_seq - 1; /* the last sequence whose rows begin at row or before */
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (cu[middle] / ratio + middle <= row)
            low = middle;
        else
            high = middle - 1;
    }
    if (!p->seqs->n_seq || cu[low] == cu[low + 1]) return false;
    *seq = low;
    *e = pos[cu[low]] / ratio + row - (cu[low] / ratio + low);
    return (*e + 1) * ratio <= pos[cu[low]] + cu[low + 1] - cu[low];
}

/* The state of a sequence before its tokens of this pass; NULL: it begins as zero, or there are no tokens. */
static inline const real *state_before(const struct states *s, int64_t seq)
{
    const int32_t *cu = s->seqs->cu.data, *pos = s->pos.data, *slot = s->slot.data;
    if (!s->values.ndim || cu[seq] == cu[seq + 1] || !pos[cu[seq]]) return NULL;
    return real_row(s->values, slot[seq]);
}
/* Where the state of a sequence after its tokens is stored; NULL: it is not stored. */
static inline real *state_after(const struct states *s, int64_t seq)
{
    const int32_t *cu = s->seqs->cu.data, *slot = s->slot.data;
    if (!s->values.ndim || cu[seq] == cu[seq + 1]) return NULL;
    return real_row(s->values, slot[seq]);
}

static inline void check_slots(const struct states *s)
{
    const int32_t *slot = s->slot.data;
    for (int64_t i = 0; s->values.ndim && i < s->seqs->n_seq; i++)
        MT_REQUIRE(slot[i] >= 0 && slot[i] < s->values.shape[0], "state %d of %lld", slot[i],
                   (long long)s->values.shape[0]);
}

#endif
