/* duplicates.c - see duplicates.h: compares hashes of documents' ids. */
#include "data/duplicates.h"

#include <stdlib.h>

struct fingerprint {
    uint64_t hash; /* of the ids */
    int64_t row;
};

static int compare_fingerprints(const void *a, const void *b)
{
    const struct fingerprint *x = a, *y = b;
    if (x->hash != y->hash) return x->hash > y->hash ? 1 : -1;
    return (x->row > y->row) - (x->row < y->row);
}

/* Returns the documents' fingerprints, sorted. */
static struct fingerprint *fingerprints(const struct dataset *ds)
{
    struct fingerprint *f = mem_array(ds->n_docs + 1, sizeof(*f));
    for (int64_t d = 0; d < ds->n_docs; d++) {
        const int64_t n = ds->doc_off[d + 1] - ds->doc_off[d];
        f[d].hash = rng_bytes((uint64_t)n, ds->ids + ds->doc_off[d], n * (int64_t)sizeof(*ds->ids));
        f[d].row = ds->doc_row[d];
    }
    qsort(f, (size_t)ds->n_docs, sizeof(*f), compare_fingerprints);
    return f;
}

int64_t duplicates_in(const struct dataset *ds)
{
    struct fingerprint *f = fingerprints(ds);
    int64_t n = 0, first = 0; /* the first of equal documents */
    for (int64_t d = 1; d < ds->n_docs; d++) {
        if (f[d].hash != f[d - 1].hash) first = d;
        n += f[d].row != f[first].row;
    }
    mem_free(f);
    return n;
}

int64_t duplicates_shared(const struct dataset *ds, const struct dataset *other)
{
    struct fingerprint *mine = fingerprints(ds), *others = fingerprints(other);
    int64_t n = 0;
    for (int64_t d = 0, o = 0; d < ds->n_docs; d++) {
        while (o < other->n_docs && others[o].hash < mine[d].hash) o++;
        n += o < other->n_docs && others[o].hash == mine[d].hash;
    }
    mem_free(mine);
    mem_free(others);
    return n;
}
