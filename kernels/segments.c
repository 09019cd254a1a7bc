/* segments.c - cuts the rows of packed sequences where prefixes end. A base (struct seqs of ops.h) is cut where a
 * sequence continues it; each continuing sequence is one segment. */
#include "kernels/segments.h"

/* A base and the sequences that continue it: first .. end - 1. */
struct family {
    const int32_t *cu, *prefix;
    int64_t first, end;
};

static int64_t most(int64_t n_seq) { return 2 * n_seq; }

int64_t segments_ints(int64_t n_seq) { return most(n_seq) * (1 + SEGMENT_LINKS) + 1; }

struct segments segments_at(struct segments s, int32_t *data, int64_t n_seq)
{
    s.cu = tensor_1d(data, DT_I32, s.n + 1);
    s.links = tensor_2d(data + most(n_seq) + 1, DT_I32, s.n, SEGMENT_LINKS);
    return s;
}

static int32_t *links_of(const struct segments *s, int64_t i) { return (int32_t *)s->links.data + i * SEGMENT_LINKS; }

static void add(struct segments *s, int64_t row, int64_t level)
{
    int32_t *links = links_of(s, s->n);
    links[SEGMENT_LEVEL] = (int32_t)level;
    links[SEGMENT_IN] = links[SEGMENT_OWN] = links[SEGMENT_OUT] = -1;
    links[SEGMENT_N_OUT] = 0;
    ((int32_t *)s->cu.data)[s->n++] = (int32_t)row;
}

static bool continues_at(const struct family *f, int64_t seq, int64_t pos)
{
    return f->cu[seq + 1] > f->cu[seq] && f->prefix[seq] == pos;
}

/* The first position after `from` where another sequence continues the base, or the base ends. */
static int64_t next_cut(const struct family *f, int64_t from)
{
    int64_t at = f->cu[f->first + 1] - f->cu[f->first];
    for (int64_t q = f->first + 1; q < f->end; q++)
        if (f->prefix[q] > from && continues_at(f, q, f->prefix[q])) at = MT_MIN(at, f->prefix[q]);
    return at;
}

static void link(struct segments *s, int64_t before, int64_t after)
{
    int32_t *a = links_of(s, before), *b = links_of(s, after);
    if (!a[SEGMENT_N_OUT]++) a[SEGMENT_OUT] = (int32_t)s->n_slot;
    b[SEGMENT_IN] = a[SEGMENT_OUT];
    b[SEGMENT_OWN] = (int32_t)s->n_slot++;
    b[SEGMENT_LEVEL] = a[SEGMENT_LEVEL] + 1;
    s->n_level = MT_MAX(s->n_level, b[SEGMENT_LEVEL] + 1);
}

static void add_family(struct segments *s, const struct family *f)
{
    const int64_t row = f->cu[f->first], len = f->cu[f->first + 1] - row, base = s->n;
    int64_t from = 0;
    do add(s, row + from, 0);
    while ((from = next_cut(f, from)) < len);
    const int64_t others = s->n;
    for (int64_t q = f->first + 1; q < f->end; q++) add(s, f->cu[q], 0);
    from = 0;
    for (int64_t i = base; i < others; i++) {
        from = next_cut(f, from);
        if (i + 1 < others) link(s, i, i + 1);
        for (int64_t q = f->first + 1; q < f->end; q++)
            if (continues_at(f, q, from)) link(s, i, others + q - f->first - 1);
    }
}

struct segments segments_make(int32_t *data, const int32_t *cu, const int32_t *prefix, int64_t n_seq)
{
    struct segments s = segments_at((struct segments){.n_level = 1}, data, n_seq);
    for (int64_t seq = 0; seq < n_seq;) {
        struct family f = {.cu = cu, .prefix = prefix, .first = seq++};
        while (seq < n_seq && prefix[seq] > 0) {
            MT_REQUIRE(prefix[seq] <= cu[f.first + 1] - cu[f.first], "sequence %lld continues %d rows of %d",
                       (long long)seq, prefix[seq], cu[f.first + 1] - cu[f.first]);
            seq++;
        }
        f.end = seq;
        add_family(&s, &f);
    }
    data[s.n] = cu[n_seq];
    return segments_at(s, data, n_seq);
}
