/* weights_read.c - copies tensors of a layer into dev->weights: vectors, and matrices in any format. It drops each
 * mapped page after reading it, so that the host needs little more than one copy. Matrices keep their bytes from disk,
 * unless model.quantize packs them (model/stored/quantize.h) or their layout changes: bitsandbytes' per-expert matrices
 * become stacks, transposed bf16 stacks become [out, in], and q, k, v become one matrix. */
#include "model/weights_read.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/ops/ops.h"
#include "model/stored/finite.h"
#include "model/layer.h"

enum dtype weights_read_decoded_dtype(const struct device *dev) { return dev->act_dtype == DT_BF16 ? DT_BF16 : DT_F32; }

struct name weights_read_name(const struct weights_read *f, const char *rest, const char *suffix)
{
    struct name n;
    snprintf(n.s, sizeof(n.s), "%slayers.%lld.%s%s", f->prefix, (long long)f->layer, rest, suffix);
    return n;
}

char *weights_read_alloc(struct weights_read *f, int64_t bytes) { return arena_push(f->arena, bytes); }

int weights_read_put(struct weights_read *f, char *dst, const struct st_tensor *t)
{
    const int64_t piece = 8 << 20; /* hashed by all threads, then checked and copied: it fits the L3 cache */
    for (int64_t at = 0; at < t->bytes && !f->dev->dry_run; at += piece) {
        const int64_t n = MT_MIN(piece, t->bytes - at);
        checkpoint_hash(&f->ck, t, at, n);
        if (finite_check(f->ck.st, t, at, n, f->err)) return -1;
        device_upload(f->dev, dst + at, t->data + at, n);
        source_drop(f->ck.st, t, at, n);
    }
    return 0;
}

/* Warns of the first value that is finite, but larger than any trained norm, bias or sink, so that it suppresses all
 * others. */
static void warn_of_magnitude(struct weights_read *f, const struct st_tensor *t, const float *x, int64_t n)
{
    const float usual = 1e6f;
    float max = 0;
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) max = MT_MAX(max, fabsf(x[i]));
    if (max <= usual || f->warned) return;
    while (fabsf(x[at]) <= usual) at++;
    f->warned = true;
    log_warn("tensor %s has the value %g at element %lld: above 1e6 it suppresses all other values. Compare the "
             "checkpoint with its source",
             safetensors_stored(t), (double)x[at], (long long)at);
}

int weights_read_put_f32(struct weights_read *f, void *dst, const struct st_tensor *t, int64_t n, float plus)
{
    if (f->dev->dry_run) return 0;
    checkpoint_hash(&f->ck, t, 0, t->bytes);
    if (finite_check(f->ck.st, t, 0, n * dtype_size(t->dtype), f->err)) return -1;
    float *host = mem_array(n, sizeof(float));
    checkpoint_f32(t, n, host);
    warn_of_magnitude(f, t, host, n);
    for (int64_t i = 0; plus > 0 && i < n; i++) host[i] += plus;
    device_upload(f->dev, dst, host, n * (int64_t)sizeof(float));
    mem_free(host);
    safetensors_drop(f->ck.st, t);
    return 0;
}

int weights_scaled(struct weights_read *f, struct tensor *out, const char *name, int64_t n, double factor)
{
    const struct st_tensor *t =
        checkpoint_take(&f->ck, weights_read_name(f, name, "").s, false, 1, (int64_t[]){n}, f->err);
    if (!t) return -1;
    *out = arena_tensor_1d(&f->dev->weights, DT_F32, n);
    if (weights_read_put_f32(f, out->data, t, n, 0)) return -1;
    if (f->dev->dry_run) return 0;
    float *host = mem_array(n, sizeof(float));
    device_download(f->dev, host, out->data, tensor_bytes(*out));
    for (int64_t i = 0; i < n; i++) host[i] = (float)(host[i] * factor);
    device_upload(f->dev, out->data, host, tensor_bytes(*out));
    mem_free(host);
    return 0;
}

void weights_ones(struct weights_read *f, struct tensor *out, int64_t n)
{
    *out = arena_tensor_1d(&f->dev->weights, DT_F32, n);
    if (f->dev->dry_run) return;
    float *host = mem_array(n, sizeof(float));
    for (int64_t i = 0; i < n; i++) host[i] = 1;
    device_upload(f->dev, out->data, host, tensor_bytes(*out));
    mem_free(host);
}

int weights_number(struct weights_read *f, float *out, const char *name)
{
    const struct st_tensor *t =
        checkpoint_take(&f->ck, weights_read_name(f, name, "").s, false, 1, (int64_t[]){1}, f->err);
    *out = 1;
    if (!t) return -1;
    if (f->dev->dry_run) return 0;
    checkpoint_hash(&f->ck, t, 0, t->bytes);
    if (finite_check(f->ck.st, t, 0, t->bytes, f->err)) return -1;
    checkpoint_f32(t, 1, out);
    return 0;
}

static int vector(struct weights_read *f, struct tensor *out, const char *name, int64_t n, float plus)
{
    const struct st_tensor *t = checkpoint_take(&f->ck, name, false, 1, &n, f->err);
    if (!t) return -1;
    *out = arena_tensor_1d(&f->dev->weights, DT_F32, n);
    return weights_read_put_f32(f, out->data, t, n, plus);
}

int weights_read_norm(struct weights_read *f, struct tensor *out, const char *name, int64_t n)
{
    return vector(f, out, name, n, f->a->norm_plus_one ? 1 : 0);
}

static const char *what_of(const struct weights_read *f, enum role role)
{
    if (role == ROLE_EXPERTS) return "routed experts";
    if (role == ROLE_NETWORK) return arch_is_routed(f->a, f->layer) ? "shared experts" : "dense layers";
    return "attention";
}

static int formats_differ(struct weights_read *f, const struct source *s, const struct source *other, enum role role)
{
    const char *a = safetensors_stored(s->data), *b = safetensors_stored(other->data);
    const bool experts = role == ROLE_EXPERTS;
    if (experts && arch_is_routed(f->a, f->layer))
        return err_set(
            f->err, "tensors %s and %s are quantised in different ways: all experts of a layer need one format", a, b);
    return err_set(f->err,
                   "tensors %s and %s have different formats: matrices of %s that are joined in memory need one format",
                   a, b, experts ? "dense layers" : what_of(f, role));
}

static bool is_alike(const struct source *a, const struct source *b, bool tables)
{
    const struct format *f = format_row(a->format, a->nested_absmax);
    bool same = a->format == b->format && a->block == b->block && !a->nested_absmax == !b->nested_absmax &&
                a->scale2_divides == b->scale2_divides;
    for (int p = 0; p < PLANES && same && tables; p++)
        if (f->plane[p].unit == PLANE_SHARED)
            same = !memcmp(a->plane[p]->data, b->plane[p]->data, (size_t)a->plane[p]->bytes);
    return same;
}

/* Checks that all sources of a stack have the same format and equal tables. */
static int check_alike(struct weights_read *f, const struct source *s, int64_t n, enum role role)
{
    const bool tables = !f->ck.st->headers; /* tables are data, and only headers were read */
    for (int64_t i = 1; i < n; i++)
        if (!is_alike(&s[0], &s[i], tables)) return formats_differ(f, &s[0], &s[i], role);
    return 0;
}

static int put_plane(struct weights_read *f, char *dst, const struct source *s, const struct format *to, int plane)
{
    const int64_t bytes = source_bytes(s, to, plane);
    const struct st_tensor *from = s->plane[plane];
    if (source_is_plane(s, to, plane)) {
        struct st_tensor t = *from;
        if (to->plane[plane].bits < 8) t.dtype = DT_U8, t.st_dtype = "U8"; /* bitsandbytes' nibbles have any dtype */
        return weights_read_put(f, dst, &t);
    }
    if (from) checkpoint_hash(&f->ck, from, 0, from->bytes);
    if (plane == PLANE_DATA && finite_check_data(f->ck.st, s, f->err)) return -1;
    char *host = mem_alloc(bytes);
    source_copy(s, to, plane, host, f->dev->n_threads);
    device_upload(f->dev, dst, host, bytes);
    if (from) source_drop(f->ck.st, from, 0, from->bytes);
    mem_free(host);
    return 0;
}

/* Writes a plane of n sources, one after the other; of a table, which all share, only once. */
static int put_planes(struct weights_read *f, struct weight *w, const struct source *s, int64_t n,
                      const struct format *to, int plane)
{
    const bool shared = to->plane[plane].unit == PLANE_SHARED;
    char *dst = weights_read_alloc(f, (shared ? 1 : w->n_exp) * format_plane_bytes(to, w, plane));
    w->plane[plane] = dst;
    if (f->dev->dry_run) return 0;
    for (int64_t i = 0, at = 0; i < (shared ? 1 : n); at += source_bytes(&s[i++], to, plane)) {
        if (plane == PLANE_DATA && finite_check_scaled(f->ck.st, &s[i], f->err)) return -1;
        if (put_plane(f, dst + at, &s[i], to, plane)) return -1;
    }
    return 0;
}

void weights_read_describe(struct weights_read *f, enum weight_format held, bool nested, const char *stored,
                           bool packed)
{
    char *text = f->w->experts;
    const char *name = weight_format_name(held);
    const bool routed = arch_is_routed(f->a, f->layer);
    if (text[0] && (!routed || f->described)) return;
    f->described = routed;
    f->w->expert_format = packed ? f->quantizer.q.format : held;
    if (packed)
        snprintf(text, sizeof(f->w->experts), "%s, packed from %s", quantize_name(&f->quantizer.q),
                 stored ? stored : name);
    else if (stored && weight_is_dense(held))
        snprintf(text, sizeof(f->w->experts), "%s, decoded from %s", name, stored);
    else
        snprintf(text, sizeof(f->w->experts), "%s%s%s", name, nested ? "-nested" : "",
                 !f->quantizer.q.format || stored ? "" : ", as in the checkpoint");
}

/* 1 if model.quantize packs matrices of this role and this one is not packed yet, else 0; -1: an error. With
 * model.quantize_attention, experts packed in the checkpoint keep their format. */
static int wants_packing(struct weights_read *f, const struct source *s, enum role role)
{
    const bool attention = f->quantizer.q.attention, nested = s->nested_absmax != NULL;
    const bool stays = attention && role >= ROLE_NETWORK && weight_is_packed(s->format);
    const bool meant = (role >= ROLE_NETWORK && !stays) || (role == ROLE_ATTENTION && attention);
    return meant ? quantizer_wants(&f->quantizer, s->format, nested, safetensors_stored(s->data), f->err) : 0;
}

/* Checks that each of several sources of one matrix ends where a block of the matrix ends. */
static int check_ends(struct weights_read *f, const struct weight *w, const struct source *s, int64_t n)
{
    for (int64_t i = 0; i < n && n != w->n_exp; i++)
        if (s[i].block && s[i].n_out * s[i].n_in % s[i].block)
            return err_set(f->err, "tensor %s ends inside a block of %lld: it cannot be joined with its neighbours",
                           safetensors_stored(s[i].data), (long long)s[i].block);
    return 0;
}

int weights_read_stack(struct weights_read *f, struct weight *w, const struct source *s, int64_t n, enum role role)
{
    if (check_alike(f, s, n, role)) return -1;
    const int packing = wants_packing(f, s, role);
    if (packing < 0) return -1;
    const enum weight_format held = source_held(s, n, !packing && role != ROLE_OTHER);
    if (role >= ROLE_NETWORK) weights_read_describe(f, held, s->nested_absmax, source_decoded(s), packing);
    f->quantizer.arena = f->arena;
    if (packing)
        return quantizer_stack(&f->quantizer, w, s, n, what_of(f, role), (double)f->layer / (double)f->a->n_layer,
                               f->err);
    /* A nested absmax has one offset per matrix: where several sources form one, it becomes f32. */
    const struct format *to = format_row(held, s->nested_absmax && n == w->n_exp);
    w->format = held;
    w->block = source_block(s, to);
    w->scale2_divides = s->scale2_divides;
    if (check_ends(f, w, s, n)) return -1;
    for (int p = 0; p < PLANES; p++)
        if (to->plane[p].bits && put_planes(f, w, s, n, to, p)) return -1;
    return 0;
}

int weights_read_matrix(struct weights_read *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in,
                        enum role role)
{
    struct source s;
    *w = (struct weight){.n_exp = 1, .n_out = n_out, .n_in = n_in};
    return source_find(&s, &f->ck, name, n_out, n_in, f->err) || weights_read_stack(f, w, &s, 1, role) ? -1 : 0;
}

static int stack_in_order(struct weights_read *f, struct weight *w, const struct source *s, const struct row_order *o,
                          enum role role)
{
    int64_t n;
    struct source *runs = source_runs(s, o, &n);
    const int rc = weights_read_stack(f, w, runs, n, role);
    mem_free(runs);
    return rc;
}

int weights_rows(struct weights_read *f, struct proj *p, const struct stored_rows *r, bool biased)
{
    struct source s[STORED_PARTS];
    int64_t n_out = 0, at = 0;
    for (int i = 0; i < r->n_part; n_out += r->rows[i++]) {
        const struct name name = weights_read_name(f, r->part[i], ".weight");
        if (source_find(&s[i], &f->ck, name.s, r->rows[i], r->n_in, f->err)) return -1;
    }
    p->w = (struct weight){.n_exp = 1, .n_out = n_out, .n_in = r->n_in};
    const enum role role = r->plain ? ROLE_OTHER : r->unpacked ? ROLE_UNPACKED : r->ffn ? ROLE_NETWORK : ROLE_ATTENTION;
    if (r->order.n_group ? stack_in_order(f, &p->w, s, &r->order, role)
                         : weights_read_stack(f, &p->w, s, r->n_part, role))
        return -1;
    if (!biased) return 0;
    p->bias = arena_tensor_1d(&f->dev->weights, DT_F32, n_out);
    for (int i = 0; i < r->n_part; at += r->rows[i++]) {
        const struct name name = weights_read_name(f, r->part[i], ".bias");
        const struct st_tensor *t = checkpoint_take(&f->ck, name.s, false, 1, &r->rows[i], f->err);
        if (!t) return -1;
        if (weights_read_put_f32(f, f->dev->dry_run ? NULL : (float *)p->bias.data + at, t, r->rows[i], 0)) return -1;
    }
    return 0;
}

bool weights_has(const struct weights_read *f, const char *name, const char *suffix)
{
    return checkpoint_has(&f->ck, weights_read_name(f, name, suffix).s);
}

int weights_refuse(struct weights_read *f, const char *name, const char *suffix, const char *what, const char *keys)
{
    const struct name of_layer = weights_read_name(f, name, suffix);
    char stored[256];
    if (!checkpoint_has(&f->ck, of_layer.s)) return 0;
    return err_set(f->err, "by config.json layer %lld has no %s, but the checkpoint has %s: correct %s",
                   (long long)f->layer, what, checkpoint_name(&f->ck, stored, sizeof(stored), of_layer.s), keys);
}

int weights_vector(struct weights_read *f, struct tensor *out, const char *name, const char *suffix, int64_t n)
{
    return vector(f, out, weights_read_name(f, name, suffix).s, n, 0);
}

int weights_norm(struct weights_read *f, struct tensor *out, const char *name, int64_t n)
{
    return weights_read_norm(f, out, weights_read_name(f, name, ".weight").s, n);
}

/* Reads a tensor whose values are [n_row, n_col]. */
static int table(struct weights_read *f, struct tensor *out, const char *name, int ndim, const int64_t *shape,
                 int64_t n_row, int64_t n_col)
{
    const struct st_tensor *t = checkpoint_take(&f->ck, name, false, ndim, shape, f->err);
    if (!t) return -1;
    *out = arena_tensor_2d(&f->dev->weights, DT_F32, n_row, n_col);
    return weights_read_put_f32(f, out->data, t, n_row * n_col, 0);
}

int weights_conv(struct weights_read *f, struct tensor *out, const char *name, int64_t n_col, int64_t n_tap)
{
    return table(f, out, weights_read_name(f, name, ".weight").s, 3, (int64_t[]){n_col, 1, n_tap}, n_col, n_tap);
}

int weights_table(struct weights_read *f, struct tensor *out, const char *name, int64_t n_row, int64_t n_col)
{
    return table(f, out, weights_read_name(f, name, "").s, 2, (int64_t[]){n_row, n_col}, n_row, n_col);
}

int weights_read_hyper(struct weights_read *f, struct hyper *h, const struct name name[3], bool head)
{
    const struct arch *a = f->a;
    const int64_t n = a->hyper.n_stream, n_value = head ? n : (2 + n) * n, n_col = arch_stream_cols(a);
    *h = (struct hyper){.n_stream = n, .n_iter = a->hyper.n_iter, .eps = (float)a->hyper.eps, .norm_eps = a->norm.eps};
    return table(f, &h->fn, name[0].s, 2, (int64_t[]){n_value, n_col}, n_value, n_col) ||
                   vector(f, &h->base, name[1].s, n_value, 0) || vector(f, &h->scale, name[2].s, head ? 1 : 3, 0)
               ? -1
               : 0;
}

int weights_matrix(struct weights_read *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in)
{
    return weights_read_matrix(f, w, weights_read_name(f, name, ".weight").s, n_out, n_in, ROLE_OTHER);
}

/* The first row of a table whose experts are not distinct and below n_exp; -1: none. */
static int64_t wrong_row(const int32_t *table, int64_t n_row, int64_t n_col, int64_t n_exp)
{
    for (int64_t i = 0; i < n_row * n_col; i++) {
        if (table[i] < 0 || table[i] >= n_exp) return i / n_col;
        for (int64_t k = i / n_col * n_col; k < i; k++)
            if (table[k] == table[i]) return i / n_col;
    }
    return -1;
}

int weights_hash_table(struct weights_read *f, struct tensor *out, const char *name, int64_t n_top, int64_t n_exp)
{
    const int64_t vocab = f->a->vocab, n = vocab * n_top;
    const struct name full = weights_read_name(f, name, "");
    char stored[256];
    if (!checkpoint_has(&f->ck, full.s))
        return err_set(f->err,
                       "by config.json layer %lld chooses experts by token id, but the checkpoint has no %s: correct "
                       "num_hash_layers or mlp_layer_types",
                       (long long)f->layer, checkpoint_name(&f->ck, stored, sizeof(stored), full.s));
    const struct st_tensor *t = checkpoint_take_ids(&f->ck, full.s, vocab, n_top, f->err);
    if (!t) return -1;
    *out = arena_tensor_2d(&f->dev->weights, DT_I32, vocab, n_top);
    if (f->dev->dry_run) return 0;
    int32_t *host = mem_array(n, sizeof(*host));
    for (int64_t i = 0; i < n; i++) {
        int64_t wide;
        memcpy(t->dtype == DT_I64 ? (void *)&wide : (void *)&host[i], t->data + i * dtype_size(t->dtype),
               (size_t)dtype_size(t->dtype));
        if (t->dtype == DT_I64) host[i] = wide < 0 || wide > INT32_MAX ? -1 : (int32_t)wide;
    }
    const int64_t row = wrong_row(host, vocab, n_top, n_exp);
    if (row < 0) device_upload(f->dev, out->data, host, n * (int64_t)sizeof(*host));
    mem_free(host);
    safetensors_drop(f->ck.st, t);
    if (row < 0) return 0;
    return err_set(f->err, "tensor %s: the experts of token %lld are not distinct numbers below %lld: it is damaged",
                   safetensors_stored(t), (long long)row, (long long)n_exp);
}
