/* source.c - finds a matrix in a checkpoint, in the layouts of stored_rows; copies the planes of a weight from its
 * tensors. */
#include "model/stored/source.h"

#include <stddef.h>
#include <string.h>

_Static_assert(offsetof(struct source, scale2) == offsetof(struct source, plane[PLANE_SCALE2]), "names as plane_index");

int source_find(struct source *s, struct checkpoint *ck, const char *name, int64_t n_out, int64_t n_in, struct err *err)
{
    *s = (struct source){.n_out = n_out, .n_in = n_in};
    int found = 0;
    for (int i = 0; !found; i++) { /* the last row finds or fails */
        s->stored = stored_rows[i];
        found = s->stored->find(s, ck, name, err);
    }
    return found < 0 ? -1 : 0;
}

int source_find_stack(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp, struct err *err)
{
    int found = 0;
    for (int i = 0; stored_rows[i] && !found; i++) {
        s->stored = stored_rows[i];
        if (s->stored->find_stack) found = s->stored->find_stack(s, ck, name, n_exp, err);
    }
    return found;
}

/* A tensor with one value for all matrices stays whole. */
struct source source_of_stack(const struct source *all, int64_t i, int64_t n_exp, struct st_tensor part[PLANES])
{
    struct source s = *all;
    for (int p = 0; p < PLANES; p++) {
        const struct st_tensor *t = all->plane[p];
        if (!t || (p != PLANE_DATA && t->bytes == dtype_size(t->dtype))) continue;
        part[p] = *t;
        part[p].bytes = t->bytes / n_exp;
        part[p].data += i * part[p].bytes;
        part[p].offset += i * part[p].bytes;
        s.plane[p] = &part[p];
    }
    return s;
}

bool source_exists(const struct checkpoint *ck, const char *name)
{
    for (int i = 0; stored_layouts[i]; i++)
        if (stored_has(ck, name, stored_layouts[i]->data.suffix)) return true;
    return false;
}

/* Whether a plane is stored row after row, so that some rows are one part of its tensor. */
static bool is_by_rows(const struct format *f, int plane)
{
    const struct plane *p = &f->plane[plane];
    return p->bits && (p->unit == PLANE_PER_VALUE || (p->unit == PLANE_PER_BLOCK && f->block));
}

struct source *source_runs(const struct source *s, const struct row_order *o, int64_t *n)
{
    const struct format *f = format_row(s->format, false);
    int n_part = 0;
    while (n_part < ROW_PARTS && o->part[n_part]) n_part++;
    *n = n_part * o->n_group;
    struct source *runs = mem_array(*n, sizeof(*runs) + PLANES * sizeof(struct st_tensor));
    struct st_tensor *tensors = (struct st_tensor *)(void *)(runs + *n);
    for (int64_t i = 0, row = 0; i < *n; row += runs[i++].n_out) {
        const int64_t rows = o->part[i / o->n_group], first = arch_stored_row(o, row);
        runs[i] = *s;
        runs[i].n_out = rows;
        runs[i].first_row = first;
        for (int p = 0; p < PLANES; p++) {
            struct st_tensor *part = &tensors[i * PLANES + p];
            if (!s->plane[p] || !is_by_rows(f, p)) continue;
            *part = *s->plane[p];
            const int64_t row_bytes = part->bytes / s->n_out;
            part->bytes = row_bytes * rows;
            part->data += row_bytes * first;
            part->offset += row_bytes * first;
            runs[i].plane[p] = part;
        }
    }
    return runs;
}

const char *source_decoded(const struct source *s) { return weight_is_dense(s->format) ? s->stored->name : NULL; }

enum weight_format source_held(const struct source *s, int64_t n, bool keep)
{
    const enum weight_format codes = s->stored->codes;
    for (int64_t i = 0; i < n; i++)
        keep = keep && codes && s[i].stored->codes == codes && s[i].scale_cols == s->scale_cols;
    return keep ? codes : s->format;
}

int64_t source_block(const struct source *s, const struct format *to)
{
    return to->dense ? 0 : s->scale_cols ? s->scale_cols : s->block;
}

int64_t source_bytes(const struct source *s, const struct format *to, int plane)
{
    const struct weight shape = {.n_out = s->n_out, .n_in = s->n_in, .block = source_block(s, to)};
    return format_plane_bytes(to, &shape, plane);
}

bool source_is_plane(const struct source *s, const struct format *to, int plane)
{
    const struct st_tensor *t = s->plane[plane];
    return t && !s->transposed && t->bytes == source_bytes(s, to, plane);
}

int source_check(const struct source *s, struct err *err) { return s->stored->check ? s->stored->check(s, err) : 0; }

/* dst [n_out, n_in] = src [n_in, n_out] transposed, elements of `size` 1, 2 or 4 bytes; a tile fits the L1 cache. */
static void transpose(char *dst, const uint8_t *src, int64_t n_out, int64_t n_in, int64_t size)
{
    const int64_t tile = 32;
    for (int64_t o0 = 0; o0 < n_out; o0 += tile)
        for (int64_t i0 = 0; i0 < n_in; i0 += tile)
            for (int64_t o = o0; o < MT_MIN(o0 + tile, n_out); o++)
                for (int64_t i = i0; i < MT_MIN(i0 + tile, n_in); i++) {
                    char *to = dst + (o * n_in + i) * size;
                    const uint8_t *from = src + (i * n_out + o) * size;
                    if (size == 1)
                        *to = (char)*from;
                    else if (size == 2)
                        memcpy(to, from, 2);
                    else
                        memcpy(to, from, 4);
                }
}

void source_copy(const struct source *s, const struct format *to, int plane, char *out, int n_threads)
{
    const struct st_tensor *t = s->plane[plane];
    const int64_t bytes = source_bytes(s, to, plane), size = MT_MAX(to->plane[plane].bits / 8, 1);
    if (!t || t->bytes != bytes)
        s->stored->copy(s, plane, out, n_threads);
    else if (s->transposed)
        transpose(out, t->data, s->n_out, bytes / size / s->n_out, size);
    else
        memcpy(out, t->data, (size_t)bytes);
}

char *source_read(struct weight *w, const struct source *s, enum weight_format f, int n_threads)
{
    const struct format *to = format_row(f, false);
    int64_t at[PLANES + 1] = {0};
    for (int p = 0; p < PLANES; p++) at[p + 1] = at[p] + (source_bytes(s, to, p) + 63) / 64 * 64;
    char *planes = mem_alloc(at[PLANES]);
    *w = (struct weight){.format = f,
                         .n_exp = 1,
                         .n_out = s->n_out,
                         .n_in = s->n_in,
                         .block = source_block(s, to),
                         .scale2_divides = s->scale2_divides};
    for (int p = 0; p < PLANES; p++) {
        if (!to->plane[p].bits) continue;
        w->plane[p] = planes + at[p];
        source_copy(s, to, p, planes + at[p], n_threads);
    }
    return planes;
}

void source_drop(const struct safetensors *st, const struct st_tensor *t, int64_t at, int64_t n)
{
    struct st_tensor part = *t;
    part.offset += at;
    part.bytes = n;
    safetensors_drop(st, &part);
}

bool source_is_activation_scale(const char *name)
{
    static const char *const suffixes[] = {"activation_scale", "input_scale", "input_scale_ub", "input_global_scale",
                                           ".output_scale",    ".k_scale",    ".v_scale",       ".q_scale"};
    for (int i = 0; i < MT_LEN(suffixes); i++)
        if (str_ends(name, suffixes[i])) return true;
    return false;
}
