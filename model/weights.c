/* weights.c - copies a checkpoint into dev->weights, tensor by tensor. It drops each mapped page after reading it, so
 * that the host needs little more than one copy. Experts keep their bytes from disk, unless model.quantize packs them
 * (model/quantize.h) or their layer is decoded. Some tensors change their layout here:
 * bitsandbytes' per-expert matrices become stacks, transposed bf16 stacks become [out, in], and q, k, v become one
 * matrix. */
#include "model/weights.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/ops.h"
#include "model/layer.h"
#include "model/unused.h"

#define TEXT_FIRST "language_model.model." /* the prefix beside language_model.lm_head */

struct fill {
    struct device *dev;
    struct arena *arena; /* destination of the next weight: dev->weights, dev->host, or dev->work before decoding */
    const struct arch *a;
    const struct comm *ep;
    struct checkpoint ck;
    const char *prefix; /* of all names but the head's: weights_prefix */
    struct err *err;
    int64_t layer;
    struct ffn_size ffn;     /* size of this layer's feed-forward network */
    struct expert_range own; /* this rank's experts of the layer */
    int64_t first_decoded;   /* first layer whose experts are decoded; so are those of all later layers */
    struct quantizer quantizer;
    bool described; /* weights.experts describes routed experts */
    struct weights *w;
};

struct expert_range weights_experts_here(const struct comm *ep, int64_t n_exp)
{
    const int64_t n = n_exp / ep->world;
    return (struct expert_range){.first = ep->rank * n, .count = n};
}

/* The dtype that op_decode writes. */
static enum dtype decoded_dtype(const struct device *dev) { return dev->act_dtype == DT_BF16 ? DT_BF16 : DT_F32; }

const char *weights_prefix(const struct safetensors *st)
{
    static const char *const prefixes[] = {"model.language_model.", TEXT_FIRST};
    char name[64];
    for (int i = 0; i < MT_LEN(prefixes); i++) {
        snprintf(name, sizeof(name), "%sembed_tokens.weight", prefixes[i]);
        if (safetensors_find(st, name)) return prefixes[i];
    }
    return "model.";
}

/* "model.layers.7." + rest + suffix, returned by value. */
struct name {
    char s[256];
};
static struct name layer_name(const struct fill *f, const char *rest, const char *suffix)
{
    struct name n;
    snprintf(n.s, sizeof(n.s), "%slayers.%lld.%s%s", f->prefix, (long long)f->layer, rest, suffix);
    return n;
}

/* A name outside the layers. */
static struct name end_name(const struct fill *f, const char *rest)
{
    struct name n;
    snprintf(n.s, sizeof(n.s), "%s%s", f->prefix, rest);
    return n;
}

/* The name of one expert's tensor: pattern from struct tensor_names, suffix ".weight" or ".bias". */
static struct name expert_name(const struct fill *f, const char *pattern, int64_t expert, const char *suffix)
{
    const size_t before = strcspn(pattern, "#");
    struct name n;
    if (pattern[before])
        snprintf(n.s, sizeof(n.s), "%slayers.%lld.%.*s%lld%s%s", f->prefix, (long long)f->layer, (int)before, pattern,
                 (long long)expert, pattern + before + 1, suffix);
    else
        snprintf(n.s, sizeof(n.s), "%slayers.%lld.%s%s", f->prefix, (long long)f->layer, pattern, suffix);
    return n;
}

static void set_layer(struct fill *f, int64_t layer)
{
    f->layer = layer;
    f->ffn = arch_ffn(f->a, layer);
    f->own =
        f->a->ffn[layer]->routed ? weights_experts_here(f->ep, f->ffn.n_exp) : (struct expert_range){0, f->ffn.n_exp};
}

/* The part of a tensor of all experts that this rank holds. */
static struct st_tensor own_part(const struct fill *f, const struct st_tensor *t)
{
    struct st_tensor part = *t;
    part.bytes = t->bytes / f->ffn.n_exp * f->own.count;
    part.data += t->bytes / f->ffn.n_exp * f->own.first;
    part.offset += t->bytes / f->ffn.n_exp * f->own.first;
    return part;
}

/* Allocates bytes of a weight; NULL in a dry run. */
static char *alloc(struct fill *f, int64_t bytes) { return arena_push(f->arena, bytes); }

static void put(struct fill *f, char *dst, const struct st_tensor *t)
{
    const int64_t piece = 32 << 20; /* bytes between drops of mapped pages */
    for (int64_t at = 0; at < t->bytes && !f->dev->dry_run; at += piece) {
        const int64_t n = MT_MIN(piece, t->bytes - at);
        device_upload(f->dev, dst + at, t->data + at, n);
        source_drop(f->ck.st, t, at, n);
    }
}

/* Returns whether all values are finite. */
static bool put_f32(struct fill *f, void *dst, const struct st_tensor *t, int64_t n, float plus)
{
    bool finite = true;
    if (f->dev->dry_run) return true;
    float *host = mem_array(n, sizeof(float));
    source_f32(t, n, host);
    for (int64_t i = 0; i < n; i++) finite &= isfinite(host[i]) != 0;
    for (int64_t i = 0; plus > 0 && i < n; i++) host[i] += plus;
    device_upload(f->dev, dst, host, n * (int64_t)sizeof(float));
    mem_free(host);
    safetensors_drop(f->ck.st, t);
    return finite;
}

static int vector(struct fill *f, struct tensor *out, const char *name, int64_t n, float plus, bool finite)
{
    const struct st_tensor *t = checkpoint_take(&f->ck, name, false, 1, &n, f->err);
    if (!t) return -1;
    *out = arena_tensor_1d(&f->dev->weights, DT_F32, n);
    if (!put_f32(f, out->data, t, n, plus) && finite)
        return err_set(f->err, "tensor %s holds a value that is not finite", name);
    return 0;
}

static int norm(struct fill *f, struct tensor *out, const char *name, int64_t n)
{
    return vector(f, out, name, n, f->a->norm_plus_one ? 1 : 0, false);
}

/* Checks that all sources of a stack have the same format and equal code tables. */
static int same_tables(struct fill *f, const struct source *s, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        bool same = s[i].format == s[0].format && s[i].block == s[0].block && s[i].group == s[0].group &&
                    !s[i].nested_absmax == !s[0].nested_absmax && s[i].scale2_divides == s[0].scale2_divides;
        const bool tables = !f->ck.st->headers; /* tables are data, and only headers were read */
        if (same && tables && s[0].code) same = !memcmp(s[i].code->data, s[0].code->data, 64);
        if (same && tables && s[0].nested_map) same = !memcmp(s[i].nested_map->data, s[0].nested_map->data, 1024);
        if (!same)
            return err_set(f->err,
                           "tensors %s and %s are quantised in different ways: all experts of a layer need one format",
                           s[0].data->name, s[i].data->name);
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
static void put_absmax(struct fill *f, struct weight *w, const struct source *s, int64_t n)
{
    const int64_t f32 = (int64_t)sizeof(float);
    const bool nested = s[0].nested_absmax && n == w->n_exp, dry_run = f->dev->dry_run;
    const int64_t blocks = absmax_room(s, n), outer = nested ? s[0].nested_absmax->bytes : 0;
    char *absmax = alloc(f, nested ? blocks : blocks * f32);
    char *outer_scale = nested ? alloc(f, n * outer) : NULL, *offset = nested ? alloc(f, n * f32) : NULL;
    for (int64_t i = 0, at = 0; i < n && !dry_run; at += source_blocks(&s[i++])) {
        if (nested) {
            put(f, absmax + at, s[i].absmax);
            put(f, outer_scale + i * outer, s[i].nested_absmax);
            device_upload(f->dev, offset + i * f32, &s[i].nested_offset, f32);
            continue;
        }
        float *host = mem_array(source_blocks(&s[i]), f32);
        source_absmax(&s[i], host);
        device_upload(f->dev, absmax + at * f32, host, source_blocks(&s[i]) * f32);
        mem_free(host);
    }
    char *code = alloc(f, s[0].code->bytes), *map = nested ? alloc(f, s[0].nested_map->bytes) : NULL;
    put(f, code, s[0].code);
    if (nested) put(f, map, s[0].nested_map);
    w->block = s[0].block;
    w->code = (const float *)(void *)code;
    w->scale = nested ? (const uint8_t *)absmax : NULL;
    w->absmax = nested ? NULL : (const float *)(void *)absmax;
    w->nested_absmax = (const float *)(void *)outer_scale;
    w->nested_offset = (const float *)(void *)offset;
    w->nested_map = (const float *)(void *)map;
}

/* The rows of every source get its global scale. */
static int put_nvfp4(struct fill *f, struct weight *w, const struct source *s, int64_t n)
{
    const int64_t f32 = (int64_t)sizeof(float);
    char *scale = alloc(f, w->n_exp * w->n_out * w->n_in / 16), *scale2 = alloc(f, w->n_exp * w->n_out * f32);
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

/* The rows of every source get its scales. */
static int put_fp8_scales(struct fill *f, struct weight *w, const struct source *s, int64_t n)
{
    const int64_t row = weight_row_scales(w) * (int64_t)sizeof(float);
    char *scale2 = alloc(f, w->n_exp * w->n_out * row);
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
    if (!s->transposed && bytes == s->data->bytes) {
        put(f, dst, s->data);
        return 0;
    }
    if (f->dev->dry_run) return 0;
    char *host = mem_alloc(bytes);
    const int rc = source_copy(s, host, f->dev->n_threads, f->err);
    if (!rc) device_upload(f->dev, dst, host, bytes);
    source_drop(f->ck.st, s->data, 0, s->data->bytes);
    mem_free(host);
    return rc;
}

/* What a matrix is for: model.quantize packs experts, model.quantize_attention attention. */
enum role { ROLE_OTHER, ROLE_ATTENTION, ROLE_EXPERTS };

/* Writes weights.experts, from the first routed experts, or from dense layers where there are none. held: the format in
 * memory, unless they are packed; stored: that of a source which is decoded while it is loaded, else NULL. */
static void describe(struct fill *f, enum weight_format held, bool nested, const char *stored, bool packed)
{
    char *text = f->w->experts;
    const char *name = weight_format_name(held);
    const bool routed = f->a->ffn[f->layer]->routed;
    if (text[0] && (!routed || f->described)) return;
    f->described = routed;
    if (packed)
        snprintf(text, sizeof(f->w->experts), "%s, packed from %s", quantize_name(&f->quantizer.q),
                 stored ? stored : name);
    else if (stored && held != WF_FP8)
        snprintf(text, sizeof(f->w->experts), "%s, decoded from %s", name, stored);
    else
        snprintf(text, sizeof(f->w->experts), "%s%s%s", name, nested ? "-nested" : "",
                 f->quantizer.q.format == WF_NONE || stored ? "" : ", as in the checkpoint");
}

static void describe_decoded(struct fill *f)
{
    const size_t n = strlen(f->w->experts);
    if (f->w->n_decoded)
        snprintf(f->w->experts + n, sizeof(f->w->experts) - n, ", %lld of %lld layers decoded to %s",
                 (long long)f->w->n_decoded, (long long)f->a->n_layer,
                 weight_format_name(source_dense_format(decoded_dtype(f->dev))));
}

/* 1 when model.quantize packs matrices of this role and this one is not packed yet, else 0; -1 is an error. */
static int wants_packing(struct fill *f, const struct source *s, enum role role)
{
    const bool meant = role == ROLE_EXPERTS || (role == ROLE_ATTENTION && f->quantizer.q.attention);
    const bool nested = s->nested_absmax != NULL;
    return meant ? quantizer_wants(&f->quantizer, s->format, nested, s->data->name, f->err) : 0;
}

/* Whether sources stay FP8 in memory: all have scales for as many columns. Others, and embedding, head and router,
 * are decoded to bf16. */
static bool stays_fp8(const struct source *s, int64_t n, enum role role)
{
    bool same = role != ROLE_OTHER;
    for (int64_t i = 0; i < n; i++) same = same && s[i].scale_rows && s[i].scale_cols == s[0].scale_cols;
    return same;
}

/* Joins n sources into w: one per expert (n == w->n_exp), or n / w->n_exp blocks of rows per matrix. The caller has set
 * the shape of w. */
static int stack(struct fill *f, struct weight *w, const struct source *s, int64_t n, enum role role)
{
    int64_t bytes = 0;
    if (same_tables(f, s, n)) return -1;
    const int packing = wants_packing(f, s, role);
    if (packing < 0) return -1;
    const bool fp8 = !packing && stays_fp8(s, n, role);
    const enum weight_format held = fp8 ? WF_FP8 : s[0].format;
    if (role == ROLE_EXPERTS) describe(f, held, s->nested_absmax, source_decoded(s), packing);
    f->quantizer.arena = f->arena;
    if (packing) return quantizer_stack(&f->quantizer, w, s, n, (double)f->layer / (double)f->a->n_layer, f->err);
    w->format = held;
    if (fp8) w->block = s[0].scale_cols;
    for (int64_t i = 0; i < n; i++) {
        bytes += fp8 ? s[i].data->bytes : source_bytes(&s[i]);
        if (s[i].block && n != w->n_exp && s[i].n_out * s[i].n_in % s[i].block)
            return err_set(f->err, "tensor %s ends inside a block of %lld: it cannot be joined with its neighbours",
                           s[i].data->name, (long long)s[i].block);
    }
    char *data = alloc(f, bytes);
    w->data = data;
    for (int64_t i = 0, at = 0; i < n; i++) {
        char *dst = data ? data + at : NULL;
        if (fp8)
            put(f, dst, s[i].data);
        else if (put_source(f, dst, &s[i]))
            return -1;
        at += fp8 ? s[i].data->bytes : source_bytes(&s[i]);
    }
    if (s[0].block) put_absmax(f, w, s, n);
    return fp8 ? put_fp8_scales(f, w, s, n) : held == WF_NVFP4 ? put_nvfp4(f, w, s, n) : 0;
}

/* Adds the first bytes of a weight, or of its first expert, to the fingerprint; experts before they are decoded. */
static void add_to_fingerprint(struct fill *f, const struct weight *w)
{
    const int64_t nibbles = w->n_out * w->n_in / 2;
    const int64_t bytes = MT_MIN(w->format >= WF_MXFP4 ? nibbles : weight_bytes(w) / w->n_exp, 1 << 16);
    uint64_t bits;
    if (f->dev->dry_run) return;
    char *host = mem_alloc(bytes + 8);
    device_download(f->dev, host, w->data, bytes);
    for (int64_t at = 0; at < bytes; at += 8) {
        memcpy(&bits, host + at, sizeof(bits));
        f->w->fingerprint = rng_u64(f->w->fingerprint, bits);
    }
    mem_free(host);
}

static int matrix(struct fill *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in, enum role role)
{
    struct source s;
    *w = (struct weight){.n_exp = 1, .n_out = n_out, .n_in = n_in};
    return source_find(&s, &f->ck, name, n_out, n_in, f->err) || stack(f, w, &s, 1, role) ? -1 : 0;
}

/* Puts the rows of one source in the order of memory. */
static int stack_in_order(struct fill *f, struct weight *w, const struct source *s, const struct row_order *o,
                          enum role role)
{
    int64_t n;
    struct source *runs = source_runs(s, o, &n);
    const int rc = stack(f, w, runs, n, role);
    mem_free(runs);
    return rc;
}

int weights_rows(struct fill *f, struct proj *p, const struct stored_rows *r, bool biased, bool sampled)
{
    struct source s[STORED_PARTS];
    int64_t n_out = 0, at = 0;
    for (int i = 0; i < r->n_part; n_out += r->rows[i++]) {
        const struct name name = layer_name(f, r->part[i], ".weight");
        if (source_find(&s[i], &f->ck, name.s, r->rows[i], r->n_in, f->err)) return -1;
    }
    p->w = (struct weight){.n_exp = 1, .n_out = n_out, .n_in = r->n_in};
    const enum role role = r->plain ? ROLE_OTHER : r->ffn ? ROLE_EXPERTS : ROLE_ATTENTION;
    if (r->order.n_group ? stack_in_order(f, &p->w, s, &r->order, role) : stack(f, &p->w, s, r->n_part, role))
        return -1;
    if (sampled && f->layer == 0) add_to_fingerprint(f, &p->w);
    if (!biased) return 0;
    p->bias = arena_tensor_1d(&f->dev->weights, DT_F32, n_out);
    for (int i = 0; i < r->n_part; at += r->rows[i++]) {
        const struct name name = layer_name(f, r->part[i], ".bias");
        const struct st_tensor *t = checkpoint_take(&f->ck, name.s, false, 1, &r->rows[i], f->err);
        if (!t) return -1;
        put_f32(f, f->dev->dry_run ? NULL : (float *)p->bias.data + at, t, r->rows[i], 0);
    }
    return 0;
}

/* [E, out, in/32, 16] nibbles beside [E, out, in/32] exponents, as gpt-oss publishes them. */
static int load_mxfp4(struct fill *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in)
{
    const int64_t e = f->ffn.n_exp;
    char blocks[320], scales[320];
    snprintf(blocks, sizeof(blocks), "%s_blocks", name);
    snprintf(scales, sizeof(scales), "%s_scales", name);
    if (n_in % 32)
        return err_set(f->err, "%s: MXFP4 needs an input width that 32 divides, not %lld", name, (long long)n_in);
    const struct st_tensor *b = checkpoint_take(&f->ck, blocks, true, 4, (int64_t[]){e, n_out, n_in / 32, 16}, f->err);
    if (!b) return -1;
    const struct st_tensor *s = checkpoint_take(&f->ck, scales, true, 3, (int64_t[]){e, n_out, n_in / 32}, f->err);
    if (!s) return -1;
    if (quantizer_wants(&f->quantizer, WF_MXFP4, false, blocks, f->err) < 0) return -1;
    describe(f, WF_MXFP4, false, NULL, false);
    const struct st_tensor own_b = own_part(f, b), own_s = own_part(f, s);
    *w = (struct weight){.format = WF_MXFP4, .n_exp = f->own.count, .n_out = n_out, .n_in = n_in};
    char *data = alloc(f, own_b.bytes), *scale = alloc(f, own_s.bytes);
    w->data = data;
    w->scale = (const uint8_t *)scale;
    if (f->dev->dry_run) return 0;
    if (memchr(own_s.data, 255, (size_t)own_s.bytes))
        return err_set(f->err, "tensor %s holds the scale byte 255 (NaN): the checkpoint is damaged", scales);
    put(f, data, &own_b);
    put(f, scale, &own_s);
    return 0;
}

/* The part of expert i of n. */
static struct st_tensor expert_part(const struct st_tensor *t, int64_t i, int64_t n)
{
    struct st_tensor part = *t;
    part.bytes = t->bytes / n;
    part.data += i * part.bytes;
    part.offset += i * part.bytes;
    return part;
}

static struct st_tensor one_or_part(const struct st_tensor *t, int64_t i, int64_t n)
{
    return t->bytes == dtype_size(t->dtype) ? *t : expert_part(t, i, n);
}

/* All experts in one tensor with scales: FP8; or ModelOpt's NVFP4, bytes [E, out, in/2], scales [E, out, in/16], one
 * global scale for all or each; the last two axes change places where transformers has [E, in, out]. */
static int load_scaled_stack(struct fill *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in)
{
    const int64_t e = f->ffn.n_exp, count = f->own.count;
    const bool turned = f->a->transposed_experts;
    struct source all = {.n_out = n_out, .n_in = n_in, .transposed = turned};
    if (source_find_stack(&all, &f->ck, name, e, f->err)) return -1;
    struct st_tensor *part = mem_array(3 * count, sizeof(*part));
    struct source *s = mem_array(count, sizeof(*s));
    for (int64_t i = 0; i < count; i++) {
        const int64_t x = f->own.first + i;
        s[i] = all;
        part[3 * i] = expert_part(all.data, x, e);
        s[i].data = &part[3 * i];
        part[3 * i + 1] = one_or_part(all.scale, x, e);
        s[i].scale = &part[3 * i + 1];
        if (!all.scale2) continue;
        part[3 * i + 2] = one_or_part(all.scale2, x, e);
        s[i].scale2 = &part[3 * i + 2];
    }
    *w = (struct weight){.n_exp = count, .n_out = n_out, .n_in = n_in};
    const int rc = stack(f, w, s, count, ROLE_EXPERTS);
    mem_free(part);
    mem_free(s);
    return rc;
}

/* One tensor for all experts, [E, out, in] or transformers' [E, in, out]; each expert is a source. */
static int load_stack(struct fill *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in)
{
    const int64_t e = f->own.count;
    const bool transposed = f->a->transposed_experts;
    const int64_t shape[] = {f->ffn.n_exp, transposed ? n_in : n_out, transposed ? n_out : n_in};
    const struct st_tensor *t = checkpoint_take(&f->ck, name, false, 3, shape, f->err);
    if (!t) return -1;
    const struct st_tensor own = own_part(f, t);
    struct st_tensor *slice = mem_array(e, sizeof(*slice));
    struct source *s = mem_array(e, sizeof(*s));
    for (int64_t i = 0; i < e; i++) {
        slice[i] = expert_part(&own, i, e);
        s[i] = (struct source){.format = source_dense_format(t->dtype),
                               .n_out = n_out,
                               .n_in = n_in,
                               .data = &slice[i],
                               .transposed = transposed};
    }
    *w = (struct weight){.n_exp = e, .n_out = n_out, .n_in = n_in};
    const int rc = stack(f, w, s, e, ROLE_EXPERTS);
    mem_free(slice);
    mem_free(s);
    return rc;
}

static int load_expert_biases(struct fill *f, struct tensor *bias, const struct stored_experts *p)
{
    *bias = arena_tensor_2d(&f->dev->weights, DT_F32, f->own.count, p->n_out);
    for (int64_t x = 0; x < f->ffn.n_exp; x++) {
        const struct st_tensor *t =
            checkpoint_take(&f->ck, expert_name(f, p->part[0], x, ".bias").s, false, 1, &p->n_out, f->err);
        const int64_t at = x - f->own.first;
        if (!t) return -1;
        if (at < 0 || at >= f->own.count) continue;
        put_f32(f, f->dev->dry_run ? NULL : (float *)bias->data + at * p->n_out, t, p->n_out, 0);
    }
    return 0;
}

/* One or two matrices per expert, the layout of bitsandbytes. Checks those of all experts, reads this rank's. */
static int load_per_expert(struct fill *f, struct weight *w, struct tensor *bias, const struct stored_experts *p)
{
    const int64_t e = f->ffn.n_exp, n_part = p->part[1] ? 2 : 1, n = e * n_part;
    struct source *s = mem_array(n, sizeof(*s));
    int rc = 0;
    for (int64_t i = 0; i < n && !rc; i++)
        rc = source_find(&s[i], &f->ck, expert_name(f, p->part[i % n_part], i / n_part, ".weight").s, p->n_out / n_part,
                         p->n_in, f->err);
    *w = (struct weight){.n_exp = f->own.count, .n_out = p->n_out, .n_in = p->n_in};
    if (!rc) rc = stack(f, w, s + f->own.first * n_part, f->own.count * n_part, ROLE_EXPERTS);
    if (!rc && f->a->expert_bias) rc = load_expert_biases(f, bias, p);
    mem_free(s);
    return rc;
}

static bool has(const struct fill *f, const char *name, const char *suffix)
{
    char full[320];
    snprintf(full, sizeof(full), "%s%s", name, suffix);
    return checkpoint_has(&f->ck, full);
}

/* Whether the checkpoint has a separate tensor for the first expert. */
static bool has_experts(const struct fill *f, const struct stored_experts *p)
{
    bool any = false;
    for (int i = 0; i < 2 && p->part[i]; i++)
        any = any || checkpoint_has(&f->ck, expert_name(f, p->part[i], 0, ".weight").s) ||
              checkpoint_has(&f->ck, expert_name(f, p->part[i], 0, ".weight_packed").s) ||
              checkpoint_has(&f->ck, expert_name(f, p->part[i], 0, ".bias").s);
    return any;
}

static bool is_fp8(const struct fill *f, const char *name)
{
    const struct st_tensor *t = safetensors_find(f->ck.st, name);
    return t && !strcmp(t->st_dtype, "F8_E4M3");
}

/* Loads the stack of one product from any layout: per expert, MXFP4, NVFP4, FP8, or one dense tensor. */
static int load_experts(struct fill *f, struct weight *w, struct tensor *bias, const struct stored_experts *p)
{
    char bias_name[320];
    const struct name name = layer_name(f, p->stack, "");
    int rc;
    if (has_experts(f, p)) return load_per_expert(f, w, bias, p);
    if (has(f, name.s, "_blocks") || has(f, name.s, "_scales"))
        rc = load_mxfp4(f, w, name.s, p->n_out, p->n_in);
    else if (has(f, name.s, "_weight_scale") || is_fp8(f, name.s))
        rc = load_scaled_stack(f, w, name.s, p->n_out, p->n_in);
    else if (has(f, name.s, ""))
        rc = load_stack(f, w, name.s, p->n_out, p->n_in);
    else
        return err_set(f->err,
                       "tensor %s is not in the checkpoint in any form: looked for %s_blocks (MXFP4), for %s and for "
                       "%s",
                       name.s, name.s, name.s, expert_name(f, p->part[0], 0, ".weight").s);
    if (rc || !f->a->expert_bias) return rc;
    snprintf(bias_name, sizeof(bias_name), "%s_bias", name.s);
    const struct st_tensor *t =
        checkpoint_take(&f->ck, bias_name, false, 2, (int64_t[]){f->ffn.n_exp, p->n_out}, f->err);
    if (!t) return -1;
    const struct st_tensor own = own_part(f, t);
    *bias = arena_tensor_2d(&f->dev->weights, DT_F32, f->own.count, p->n_out);
    put_f32(f, bias->data, &own, f->own.count * p->n_out, 0);
    return 0;
}

bool weights_has(const struct fill *f, const char *name, const char *suffix)
{
    return checkpoint_has(&f->ck, layer_name(f, name, suffix).s);
}

int weights_vector(struct fill *f, struct tensor *out, const char *name, const char *suffix, int64_t n)
{
    return vector(f, out, layer_name(f, name, suffix).s, n, 0, true);
}

int weights_norm(struct fill *f, struct tensor *out, const char *name, int64_t n)
{
    return norm(f, out, layer_name(f, name, ".weight").s, n);
}

int weights_conv(struct fill *f, struct tensor *out, const char *name, int64_t n_col, int64_t n_tap)
{
    const struct st_tensor *t =
        checkpoint_take(&f->ck, layer_name(f, name, ".weight").s, false, 3, (int64_t[]){n_col, 1, n_tap}, f->err);
    if (!t) return -1;
    *out = arena_tensor_2d(&f->dev->weights, DT_F32, n_col, n_tap);
    put_f32(f, out->data, t, n_col * n_tap, 0);
    return 0;
}

int weights_matrix(struct fill *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in)
{
    return matrix(f, w, layer_name(f, name, ".weight").s, n_out, n_in, ROLE_OTHER);
}

/* Decodes w from dev->work to dev->weights. */
static void decode(struct fill *f, struct weight *w)
{
    const enum dtype t = decoded_dtype(f->dev);
    const enum weight_format format = source_dense_format(t);
    const struct tensor y = arena_tensor_3d(&f->dev->weights, t, w->n_exp, w->n_out, w->n_in);
    op_decode(f->dev, y, &(struct proj){.w = *w}, (struct tensor){0});
    if (w->format != format) {
        f->w->n_decoded++;
        f->w->decoded_bytes += tensor_bytes(y) - weight_bytes(w);
    }
    *w = (struct weight){.format = format, .n_exp = w->n_exp, .n_out = w->n_out, .n_in = w->n_in, .data = y.data};
}

/* sampled: its first bytes enter the fingerprint. */
static int load_product(struct fill *f, struct proj *proj, const struct stored_experts *p, bool sampled)
{
    struct weight *w = &proj->w;
    struct tensor *bias = &proj->bias;
    struct arena *work = &f->dev->work;
    const int64_t mark = arena_mark(work);
    const bool decoded = f->layer >= f->first_decoded;
    if (decoded) f->arena = work;
    const int rc = p->stack ? load_experts(f, w, bias, p) : load_per_expert(f, w, bias, p);
    f->arena = &f->dev->weights;
    if (rc) return -1;
    if (sampled) add_to_fingerprint(f, w);
    if (decoded) decode(f, w);
    arena_release(work, mark);
    return 0;
}

int weights_experts(struct fill *f, struct proj *up, const struct stored_experts *stored_up, struct proj *down,
                    const struct stored_experts *stored_down)
{
    const int64_t before = f->dev->weights.used, n_decoded = f->w->n_decoded;
    const int rc = load_product(f, up, stored_up, f->layer == 0) || load_product(f, down, stored_down, false);
    f->w->expert_bytes += f->dev->weights.used - before;
    f->w->n_decoded = MT_MIN(f->w->n_decoded, n_decoded + 1); /* the layer counts once */
    return rc ? -1 : 0;
}

static int load_layer(struct fill *f, struct layer_weights *lw)
{
    const struct arch *a = f->a;
    return weights_norm(f, &lw->attn_norm, "input_layernorm", a->d_model) ||
                   weights_norm(f, &lw->ffn_norm, "post_attention_layernorm", a->d_model) ||
                   a->mixer[f->layer]->load(f, a, f->layer, lw) || a->ffn[f->layer]->load(f, a, f->layer, lw)
               ? -1
               : 0;
}

static int load_embed(struct fill *f, struct weight *embed)
{
    return matrix(f, embed, end_name(f, "embed_tokens.weight").s, f->a->vocab, f->a->d_model, ROLE_OTHER);
}

static struct name head_name(const struct fill *f, const char *suffix)
{
    struct name n;
    snprintf(n.s, sizeof(n.s), "%slm_head%s", strcmp(f->prefix, TEXT_FIRST) ? "" : "language_model.", suffix);
    return n;
}

static bool has_head(const struct fill *f)
{
    return checkpoint_has(&f->ck, head_name(f, ".weight").s) ||
           checkpoint_has(&f->ck, head_name(f, ".weight_packed").s);
}

/* Loads the head; without it and with tied embeddings it stays the embedding. */
static int load_head(struct fill *f, struct weight *head)
{
    const struct name name = head_name(f, ".weight");
    if (has_head(f)) return matrix(f, head, name.s, f->a->vocab, f->a->d_model, ROLE_OTHER);
    if (f->a->tied) return 0;
    return err_set(f->err, "tensor %s is not in the checkpoint, and tie_word_embeddings is false", name.s);
}

/* Loads the embedding, the head and the final norm. The embedding may be in host memory, because a step reads few of
 * its rows. An embedding that is also the head stays on the device. */
static int load_ends(struct fill *f, struct weights *w, bool embed_on_host)
{
    f->arena = embed_on_host && has_head(f) ? &f->dev->host : &f->dev->weights;
    if (load_embed(f, &w->embed)) return -1;
    add_to_fingerprint(f, &w->embed);
    f->arena = &f->dev->weights;
    w->head = w->embed;
    return load_head(f, &w->head) || norm(f, &w->norm, end_name(f, "norm.weight").s, f->a->d_model) ? -1 : 0;
}

int weights_load(struct weights *w, struct device *dev, const struct arch *a, const struct safetensors *st,
                 const struct weights_options *opt, struct err *err)
{
    struct fill f = {.dev = dev, .arena = &dev->weights, .a = a, .err = err, .ck = {.st = st}, .w = w};
    f.ep = opt->ep ? opt->ep : &comm_alone;
    const int64_t before = dev->weights.used;
    int rc = -1;
    *w = (struct weights){.layers = mem_array(a->n_layer, sizeof(*w->layers))};
    f.first_decoded = a->n_layer - opt->decoded_layers;
    f.ck.used = mem_array(st->n_tensors, sizeof(bool));
    f.prefix = weights_prefix(st);
    quantizer_open(&f.quantizer, opt->quantize, dev, st);
    if (load_ends(&f, w, opt->embed_on_host)) goto out;
    for (int64_t l = 0; l < a->n_layer; l++) {
        set_layer(&f, l);
        if (load_layer(&f, &w->layers[l])) goto out;
    }
    w->dense_bytes = dev->weights.used - before - w->expert_bytes;
    describe_decoded(&f);
    w->n_unused = unused_count(&f.ck, a, dev->dry_run, &w->unused);
    quantizer_finish(&f.quantizer);
    rc = 0;
out:
    quantizer_close(&f.quantizer);
    mem_free(f.ck.used);
    if (rc) weights_free(w);
    return rc;
}

void weights_free(struct weights *w)
{
    mem_free(w->layers);
    *w = (struct weights){0};
}

/* ---- loading one part ---- */

static void part_open(struct fill *f, struct weights *w, struct device *dev, const struct arch *a,
                      const struct safetensors *st, const struct quantize *q, struct err *err)
{
    *w = (struct weights){.layers = NULL};
    *f = (struct fill){.dev = dev, .arena = &dev->weights, .a = a, .err = err, .ck = {.st = st}, .w = w};
    f->ep = &comm_alone;
    f->first_decoded = a->n_layer;
    f->ck.used = mem_array(st->n_tensors, sizeof(bool));
    f->prefix = weights_prefix(st);
    quantizer_open(&f->quantizer, q, dev, st);
}

static void part_close(struct fill *f)
{
    quantizer_close(&f->quantizer);
    mem_free(f->ck.used);
}

int weights_load_layer(struct layer_weights *lw, struct device *dev, const struct arch *a, const struct safetensors *st,
                       const struct quantize *q, int64_t layer, struct err *err)
{
    struct quantize packing = *q;
    struct weights w;
    struct fill f;
    packing.cache = NULL;
    part_open(&f, &w, dev, a, st, &packing, err);
    set_layer(&f, layer);
    *lw = (struct layer_weights){0};
    const int rc = load_layer(&f, lw);
    part_close(&f);
    return rc;
}

int weights_load_embed(struct weight *embed, struct device *dev, const struct arch *a, const struct safetensors *st,
                       struct err *err)
{
    struct weights w;
    struct fill f;
    part_open(&f, &w, dev, a, st, NULL, err);
    const int rc = load_embed(&f, embed);
    part_close(&f);
    return rc;
}

int weights_load_head(struct weight *head, struct tensor *out, struct device *dev, const struct arch *a,
                      const struct safetensors *st, struct err *err)
{
    struct weights w;
    struct fill f;
    part_open(&f, &w, dev, a, st, NULL, err);
    int rc = load_head(&f, head);
    if (!rc && !has_head(&f)) rc = load_embed(&f, head);
    if (!rc) rc = norm(&f, out, end_name(&f, "norm.weight").s, a->d_model);
    part_close(&f);
    return rc;
}
