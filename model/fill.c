/* fill.c - copies tensors of a layer into dev->weights: vectors, and matrices in any format. It drops each mapped page
 * after reading it, so that the host needs little more than one copy. Matrices keep their bytes from disk, unless
 * model.quantize packs them (model/stored/quantize.h). Some change their layout: bitsandbytes' per-expert matrices
 * become stacks, transposed bf16 stacks become [out, in], and q, k, v become one matrix. */
#include "model/fill.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/ops/ops.h"
#include "model/stored/finite.h"
#include "model/layer.h"

enum dtype fill_decoded_dtype(const struct device *dev) { return dev->act_dtype == DT_BF16 ? DT_BF16 : DT_F32; }

struct name fill_name(const struct fill *f, const char *rest, const char *suffix)
{
    struct name n;
    snprintf(n.s, sizeof(n.s), "%slayers.%lld.%s%s", f->prefix, (long long)f->layer, rest, suffix);
    return n;
}

char *fill_alloc(struct fill *f, int64_t bytes) { return arena_push(f->arena, bytes); }

int fill_put(struct fill *f, char *dst, const struct st_tensor *t)
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

/* Warns of the first magnitude that no trained norm, bias or sink has: it is finite, and may hide what is damaged. */
static void warn_of_magnitude(struct fill *f, const struct st_tensor *t, const float *x, int64_t n)
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

int fill_put_f32(struct fill *f, void *dst, const struct st_tensor *t, int64_t n, float plus)
{
    if (f->dev->dry_run) return 0;
    checkpoint_hash(&f->ck, t, 0, t->bytes);
    if (finite_check(f->ck.st, t, 0, n * dtype_size(t->dtype), f->err)) return -1;
    float *host = mem_array(n, sizeof(float));
    source_f32(t, n, host);
    warn_of_magnitude(f, t, host, n);
    for (int64_t i = 0; plus > 0 && i < n; i++) host[i] += plus;
    device_upload(f->dev, dst, host, n * (int64_t)sizeof(float));
    mem_free(host);
    safetensors_drop(f->ck.st, t);
    return 0;
}

static int vector(struct fill *f, struct tensor *out, const char *name, int64_t n, float plus)
{
    const struct st_tensor *t = checkpoint_take(&f->ck, name, false, 1, &n, f->err);
    if (!t) return -1;
    *out = arena_tensor_1d(&f->dev->weights, DT_F32, n);
    return fill_put_f32(f, out->data, t, n, plus);
}

int fill_norm(struct fill *f, struct tensor *out, const char *name, int64_t n)
{
    return vector(f, out, name, n, f->a->norm_plus_one ? 1 : 0);
}

/* For the log of what was packed, and for errors. */
static const char *what_of(const struct fill *f, enum role role)
{
    if (role == ROLE_EXPERTS) return "routed experts";
    if (role == ROLE_NETWORK) return arch_is_routed(f->a, f->layer) ? "shared experts" : "dense layers";
    return "attention";
}

static int formats_differ(struct fill *f, const struct source *s, const struct source *other, enum role role)
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

/* Checks that all sources of a stack have the same format and equal code tables. */
static int same_tables(struct fill *f, const struct source *s, int64_t n, enum role role)
{
    for (int64_t i = 1; i < n; i++) {
        bool same = s[i].format == s[0].format && s[i].block == s[0].block && s[i].group == s[0].group &&
                    !s[i].nested_absmax == !s[0].nested_absmax && s[i].scale2_divides == s[0].scale2_divides;
        const bool tables = !f->ck.st->headers; /* tables are data, and only headers were read */
        if (same && tables && s[0].code) same = !memcmp(s[i].code->data, s[0].code->data, 64);
        if (same && tables && s[0].nested_map) same = !memcmp(s[i].nested_map->data, s[0].nested_map->data, 1024);
        if (!same) return formats_differ(f, &s[0], &s[i], role);
    }
    return 0;
}

static int64_t absmax_room(const struct source *s, int64_t n)
{
    int64_t blocks = 0;
    for (int64_t i = 0; i < n; i++) blocks += source_blocks(&s[i]);
    return blocks;
}

/* Copies absmax as stored when every source is one expert. Several sources that form one matrix get absmax in f32,
 * because a nested absmax has one offset per matrix. */
static int put_absmax(struct fill *f, struct weight *w, const struct source *s, int64_t n)
{
    const int64_t f32 = (int64_t)sizeof(float);
    const bool nested = s[0].nested_absmax && n == w->n_exp, dry_run = f->dev->dry_run;
    const int64_t blocks = absmax_room(s, n), outer = nested ? s[0].nested_absmax->bytes : 0;
    char *absmax = fill_alloc(f, nested ? blocks : blocks * f32);
    char *outer_scale = nested ? fill_alloc(f, n * outer) : NULL, *offset = nested ? fill_alloc(f, n * f32) : NULL;
    for (int64_t i = 0, at = 0; i < n && !dry_run; at += source_blocks(&s[i++])) {
        if (nested) {
            if (fill_put(f, absmax + at, s[i].absmax) || fill_put(f, outer_scale + i * outer, s[i].nested_absmax))
                return -1;
            device_upload(f->dev, offset + i * f32, &s[i].nested_offset, f32);
            continue;
        }
        float *host = mem_array(source_blocks(&s[i]), f32);
        source_absmax(&s[i], host);
        device_upload(f->dev, absmax + at * f32, host, source_blocks(&s[i]) * f32);
        mem_free(host);
    }
    char *code = fill_alloc(f, s[0].code->bytes), *map = nested ? fill_alloc(f, s[0].nested_map->bytes) : NULL;
    if (fill_put(f, code, s[0].code) || (nested && fill_put(f, map, s[0].nested_map))) return -1;
    w->block = s[0].block;
    w->code = (const float *)(void *)code;
    w->scale = nested ? (const uint8_t *)absmax : NULL;
    w->absmax = nested ? NULL : (const float *)(void *)absmax;
    w->nested_absmax = (const float *)(void *)outer_scale;
    w->nested_offset = (const float *)(void *)offset;
    w->nested_map = (const float *)(void *)map;
    return 0;
}

/* The rows of every source get its global scale. */
static int put_nvfp4(struct fill *f, struct weight *w, const struct source *s, int64_t n)
{
    const int64_t f32 = (int64_t)sizeof(float);
    char *scale = fill_alloc(f, w->n_exp * w->n_out * w->n_in / 16), *scale2 = fill_alloc(f, w->n_exp * w->n_out * f32);
    w->scale = (const uint8_t *)scale;
    w->scale2 = (const float *)(void *)scale2;
    w->scale2_divides = s[0].scale2_divides;
    int rc = 0;
    for (int64_t i = 0, at = 0; i < n && !rc && !f->dev->dry_run; at += s[i++].n_out) {
        uint8_t *host = mem_alloc(s[i].scale->bytes);
        float *rows = mem_array(s[i].n_out, f32);
        rc = source_scales(&s[i], host, rows, f->err);
        for (int64_t r = 1; r < s[i].n_out; r++) rows[r] = rows[0];
        device_upload(f->dev, scale + at * w->n_in / 16, host, s[i].scale->bytes);
        device_upload(f->dev, scale2 + at * f32, rows, s[i].n_out * f32);
        source_drop(f->ck.st, s[i].scale, 0, s[i].scale->bytes);
        mem_free(host);
        mem_free(rows);
    }
    return rc;
}

/* A byte per block, as stored. */
static int put_scales(struct fill *f, struct weight *w, const struct source *s, int64_t n)
{
    const int64_t row = w->n_in / weight_scale_block(w->format);
    char *scale = fill_alloc(f, w->n_exp * w->n_out * row);
    w->scale = (const uint8_t *)scale;
    for (int64_t i = 0, at = 0; i < n && !f->dev->dry_run; at += s[i++].n_out)
        if (fill_put(f, scale + at * row, s[i].scale)) return -1;
    return 0;
}

/* The rows of every source get its scales. */
static int put_fp8_scales(struct fill *f, struct weight *w, const struct source *s, int64_t n)
{
    const int64_t row = weight_row_scales(w) * (int64_t)sizeof(float);
    char *scale2 = fill_alloc(f, w->n_exp * w->n_out * row);
    w->scale2 = (const float *)(void *)scale2;
    int rc = 0;
    for (int64_t i = 0, at = 0; i < n && !rc && !f->dev->dry_run; at += s[i++].n_out) {
        float *host = mem_alloc(s[i].n_out * row);
        rc = source_fp8_scales(&s[i], host, f->err);
        device_upload(f->dev, scale2 + at * row, host, s[i].n_out * row);
        mem_free(host);
    }
    return rc;
}

static int put_source(struct fill *f, char *dst, const struct source *s)
{
    const int64_t bytes = source_bytes(s);
    struct st_tensor codes = *s->data;
    if (s->block) codes.dtype = DT_U8, codes.st_dtype = "U8"; /* bitsandbytes stores nibbles as any dtype */
    if (!s->transposed && bytes == s->data->bytes) return fill_put(f, dst, &codes);
    if (f->dev->dry_run) return 0;
    checkpoint_hash(&f->ck, s->data, 0, s->data->bytes);
    if (finite_check_data(f->ck.st, s, f->err)) return -1;
    char *host = mem_alloc(bytes);
    const int rc = source_copy(s, host, f->dev->n_threads, f->err);
    if (!rc) device_upload(f->dev, dst, host, bytes);
    source_drop(f->ck.st, s->data, 0, s->data->bytes);
    mem_free(host);
    return rc;
}

void fill_describe(struct fill *f, enum weight_format held, bool nested, const char *stored, bool packed)
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

/* 1 when model.quantize packs matrices of this role and this one is not packed yet, else 0; -1 is an error. With
 * attention, experts that are packed keep their format. */
static int wants_packing(struct fill *f, const struct source *s, enum role role)
{
    const bool attention = f->quantizer.q.attention, nested = s->nested_absmax != NULL;
    const bool stays = attention && role >= ROLE_NETWORK && weight_is_packed(s->format);
    const bool meant = (role >= ROLE_NETWORK && !stays) || (role == ROLE_ATTENTION && attention);
    return meant ? quantizer_wants(&f->quantizer, s->format, nested, safetensors_stored(s->data), f->err) : 0;
}

/* Whether sources stay FP8 in memory: all have scales for as many columns. Others, and embedding, head, router and the
 * compressors of DeepSeek-V4, are decoded to bf16. */
static bool stays_fp8(const struct source *s, int64_t n, enum role role)
{
    bool same = role != ROLE_OTHER;
    for (int64_t i = 0; i < n; i++) same = same && s[i].scale_rows && s[i].scale_cols == s[0].scale_cols;
    return same;
}

int fill_stack(struct fill *f, struct weight *w, const struct source *s, int64_t n, enum role role)
{
    int64_t bytes = 0;
    if (same_tables(f, s, n, role)) return -1;
    const int packing = wants_packing(f, s, role);
    if (packing < 0) return -1;
    const bool fp8 = !packing && stays_fp8(s, n, role);
    const enum weight_format held = fp8 ? WF_FP8 : s[0].format;
    if (role >= ROLE_NETWORK) fill_describe(f, held, s->nested_absmax, source_decoded(s), packing);
    f->quantizer.arena = f->arena;
    if (packing)
        return quantizer_stack(&f->quantizer, w, s, n, what_of(f, role), (double)f->layer / (double)f->a->n_layer,
                               f->err);
    w->format = held;
    if (fp8) w->block = s[0].scale_cols;
    for (int64_t i = 0; i < n; i++) {
        bytes += fp8 ? s[i].data->bytes : source_bytes(&s[i]);
        if (s[i].block && n != w->n_exp && s[i].n_out * s[i].n_in % s[i].block)
            return err_set(f->err, "tensor %s ends inside a block of %lld: it cannot be joined with its neighbours",
                           safetensors_stored(s[i].data), (long long)s[i].block);
    }
    char *data = fill_alloc(f, bytes);
    w->data = data;
    for (int64_t i = 0, at = 0; i < n; i++) {
        char *dst = data ? data + at : NULL;
        if (!f->dev->dry_run && finite_check_scaled(f->ck.st, &s[i], f->err)) return -1;
        if (fp8 ? fill_put(f, dst, s[i].data) : put_source(f, dst, &s[i])) return -1;
        at += fp8 ? s[i].data->bytes : source_bytes(&s[i]);
    }
    if (s[0].block) return put_absmax(f, w, s, n);
    if (fp8) return put_fp8_scales(f, w, s, n);
    if (s[0].scale2) return put_nvfp4(f, w, s, n);
    return weight_scale_block(held) ? put_scales(f, w, s, n) : 0;
}

int fill_matrix(struct fill *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in, enum role role)
{
    struct source s;
    *w = (struct weight){.n_exp = 1, .n_out = n_out, .n_in = n_in};
    return source_find(&s, &f->ck, name, n_out, n_in, f->err) || fill_stack(f, w, &s, 1, role) ? -1 : 0;
}

/* Puts the rows of one source in the order of memory. */
static int stack_in_order(struct fill *f, struct weight *w, const struct source *s, const struct row_order *o,
                          enum role role)
{
    int64_t n;
    struct source *runs = source_runs(s, o, &n);
    const int rc = fill_stack(f, w, runs, n, role);
    mem_free(runs);
    return rc;
}

int weights_rows(struct fill *f, struct proj *p, const struct stored_rows *r, bool biased)
{
    struct source s[STORED_PARTS];
    int64_t n_out = 0, at = 0;
    for (int i = 0; i < r->n_part; n_out += r->rows[i++]) {
        const struct name name = fill_name(f, r->part[i], ".weight");
        if (source_find(&s[i], &f->ck, name.s, r->rows[i], r->n_in, f->err)) return -1;
    }
    p->w = (struct weight){.n_exp = 1, .n_out = n_out, .n_in = r->n_in};
    const enum role role = r->plain ? ROLE_OTHER : r->unpacked ? ROLE_UNPACKED : r->ffn ? ROLE_NETWORK : ROLE_ATTENTION;
    if (r->order.n_group ? stack_in_order(f, &p->w, s, &r->order, role) : fill_stack(f, &p->w, s, r->n_part, role))
        return -1;
    if (!biased) return 0;
    p->bias = arena_tensor_1d(&f->dev->weights, DT_F32, n_out);
    for (int i = 0; i < r->n_part; at += r->rows[i++]) {
        const struct name name = fill_name(f, r->part[i], ".bias");
        const struct st_tensor *t = checkpoint_take(&f->ck, name.s, false, 1, &r->rows[i], f->err);
        if (!t) return -1;
        if (fill_put_f32(f, f->dev->dry_run ? NULL : (float *)p->bias.data + at, t, r->rows[i], 0)) return -1;
    }
    return 0;
}

bool weights_has(const struct fill *f, const char *name, const char *suffix)
{
    return checkpoint_has(&f->ck, fill_name(f, name, suffix).s);
}

int weights_refuse(struct fill *f, const char *name, const char *suffix, const char *what, const char *keys)
{
    const struct name of_layer = fill_name(f, name, suffix);
    char stored[256];
    if (!checkpoint_has(&f->ck, of_layer.s)) return 0;
    return err_set(f->err, "by config.json layer %lld has no %s, but the checkpoint has %s: correct %s",
                   (long long)f->layer, what, checkpoint_name(&f->ck, stored, sizeof(stored), of_layer.s), keys);
}

int weights_vector(struct fill *f, struct tensor *out, const char *name, const char *suffix, int64_t n)
{
    return vector(f, out, fill_name(f, name, suffix).s, n, 0);
}

int weights_norm(struct fill *f, struct tensor *out, const char *name, int64_t n)
{
    return fill_norm(f, out, fill_name(f, name, ".weight").s, n);
}

/* A tensor whose values are [n_row, n_col]. */
static int table(struct fill *f, struct tensor *out, const char *name, int ndim, const int64_t *shape, int64_t n_row,
                 int64_t n_col)
{
    const struct st_tensor *t = checkpoint_take(&f->ck, name, false, ndim, shape, f->err);
    if (!t) return -1;
    *out = arena_tensor_2d(&f->dev->weights, DT_F32, n_row, n_col);
    return fill_put_f32(f, out->data, t, n_row * n_col, 0);
}

int weights_conv(struct fill *f, struct tensor *out, const char *name, int64_t n_col, int64_t n_tap)
{
    return table(f, out, fill_name(f, name, ".weight").s, 3, (int64_t[]){n_col, 1, n_tap}, n_col, n_tap);
}

int weights_table(struct fill *f, struct tensor *out, const char *name, int64_t n_row, int64_t n_col)
{
    return table(f, out, fill_name(f, name, "").s, 2, (int64_t[]){n_row, n_col}, n_row, n_col);
}

int fill_hyper(struct fill *f, struct hyper *h, const struct name name[3], bool head)
{
    const struct arch *a = f->a;
    const int64_t n = a->hyper.n_stream, n_value = head ? n : (2 + n) * n, n_col = arch_stream_cols(a);
    *h = (struct hyper){.n_stream = n, .n_iter = a->hyper.n_iter, .eps = (float)a->hyper.eps, .norm_eps = a->norm.eps};
    return table(f, &h->fn, name[0].s, 2, (int64_t[]){n_value, n_col}, n_value, n_col) ||
                   vector(f, &h->base, name[1].s, n_value, 0) || vector(f, &h->scale, name[2].s, head ? 1 : 3, 0)
               ? -1
               : 0;
}

int weights_matrix(struct fill *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in)
{
    return fill_matrix(f, w, fill_name(f, name, ".weight").s, n_out, n_in, ROLE_OTHER);
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

int weights_hash_table(struct fill *f, struct tensor *out, const char *name, int64_t n_top, int64_t n_exp)
{
    const int64_t vocab = f->a->vocab, n = vocab * n_top;
    const struct name full = fill_name(f, name, "");
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
