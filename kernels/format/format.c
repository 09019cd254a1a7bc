/* format.c - the table of formats, and what follows from their planes: sizes, parts of a stack. Readers of files have
 * checked that sizes fit int64; here an overflow is a bug and stops the process. */
#include "kernels/format/format.h"

#include <stddef.h>
#include <string.h>

_Static_assert(offsetof(struct weight, scale2) == offsetof(struct weight, plane[PLANE_SCALE2]), "names as plane_index");

static int64_t product(int64_t a, int64_t b)
{
    int64_t out;
    MT_REQUIRE(i64_mul(a, b, &out), "size %lld x %lld", (long long)a, (long long)b);
    return out;
}

static int64_t parts(int64_t n, int64_t of) { return (n + of - 1) / of; }

#define ROW(id, row) [WF_##id] = &format_##row,
static const struct format none = {.name = "none"};
static const struct format *const rows[] = {&none, FORMATS(ROW)};
#undef ROW

const struct format *format_row(enum weight_format f, bool nested)
{
    return nested && rows[f]->nested ? rows[f]->nested : rows[f];
}

/* In a dry run planes are NULL, and a nested absmax counts as plain. */
const struct format *format_of(const struct weight *w) { return format_row(w->format, w->scale != NULL); }

int64_t format_step(const struct format *f) { return f->block ? f->block : f->bits == 4 ? 2 : 1; }

int64_t format_plane_count(const struct format *f, const struct weight *w, int plane)
{
    const struct plane *p = &f->plane[plane];
    const int64_t n = product(w->n_out, w->n_in), block = f->block ? f->block : w->block;
    if (!p->bits) return 0;
    switch (p->unit) {
    case PLANE_PER_VALUE: return n;
    case PLANE_PER_BLOCK: return parts(n, block);
    case PLANE_PER_ROW: return w->n_out;
    case PLANE_PER_ROW_BLOCK: return product(w->n_out, parts(w->n_in, block));
    case PLANE_PER_256_BLOCKS: return parts(parts(n, block), 256);
    case PLANE_PER_MATRIX: return 1;
    case PLANE_SHARED: break;
    }
    return p->entries;
}

int64_t format_plane_bytes(const struct format *f, const struct weight *w, int plane)
{
    return parts(product(format_plane_count(f, w, plane), f->plane[plane].bits), 8);
}

const char *weight_format_name(enum weight_format f) { return format_row(f, false)->name; }

bool format_named(const char *name, enum weight_format *f, bool *nested)
{
    for (int i = 0; i < 2 * MT_LEN(rows); i++) {
        *f = (enum weight_format)(i / 2);
        *nested = i % 2;
        if (!strcmp(format_row(*f, *nested)->name, name)) return true;
    }
    return false;
}

bool weight_is_dense(enum weight_format f) { return format_row(f, false)->dense; }

bool weight_is_bf16(const struct weight *w) { return w->format == WF_BF16; }

bool weight_is_packed(enum weight_format f) { return f && !weight_is_dense(f); }

int64_t weight_scale_block(enum weight_format f) { return format_row(f, false)->block; }

int64_t weight_blocks(const struct weight *w)
{
    return format_plane_count(format_row(w->format, false), w, PLANE_ABSMAX);
}

int64_t weight_row_scales(const struct weight *w)
{
    const struct weight row = {.n_out = 1, .n_in = w->n_in, .block = w->block};
    return format_plane_count(format_of(w), &row, PLANE_SCALE2);
}

int64_t weight_bytes(const struct weight *w)
{
    const struct format *f = format_of(w);
    int64_t bytes = 0;
    for (int i = 0; i < PLANES; i++)
        bytes += product(f->plane[i].unit == PLANE_SHARED ? 1 : w->n_exp, format_plane_bytes(f, w, i));
    return bytes;
}

struct weight weight_matrix(const struct weight *w, int64_t e)
{
    const struct format *f = format_of(w);
    struct weight m = *w;
    m.n_exp = 1;
    for (int i = 0; i < PLANES; i++)
        if (m.plane[i] && f->plane[i].unit != PLANE_SHARED)
            m.plane[i] = (const char *)m.plane[i] + e * format_plane_bytes(f, w, i);
    return m;
}
