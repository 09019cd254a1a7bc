/* weights_experts.c - loads the routed experts of a layer from any layout: one tensor for all, or one per expert;
 * dense, MXFP4, NVFP4, FP8 or bitsandbytes. Layers that weights_options decodes are packed in dev->work first. */
#include <stdio.h>
#include <string.h>

#include "kernels/ops/ops.h"
#include "model/stored/finite.h"
#include "model/fp8_experts.h"
#include "model/layer.h"

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

/* Who reads what is read from now on: this rank's experts or, with `other`, those of other ranks. Every rank reads a
 * dense layer. */
static void read_experts(struct fill *f, bool other)
{
    f->ck.reader = !arch_is_routed(f->a, f->layer) ? READ_BY_ALL : other ? READ_ELSEWHERE : READ_HERE;
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
    const bool stays = f->quantizer.q.attention; /* as wants_packing of fill.c */
    if (!stays && quantizer_wants(&f->quantizer, WF_MXFP4, false, blocks, f->err) < 0) return -1;
    fill_describe(f, WF_MXFP4, false, NULL, false);
    const struct st_tensor own_b = own_part(f, b), own_s = own_part(f, s);
    *w = (struct weight){.format = WF_MXFP4, .n_exp = f->own.count, .n_out = n_out, .n_in = n_in};
    char *data = fill_alloc(f, own_b.bytes), *scale = fill_alloc(f, own_s.bytes);
    w->data = data;
    w->scale = (const uint8_t *)scale;
    const struct source all = {
        .format = WF_MXFP4, .n_out = f->own.count * n_out, .n_in = n_in, .data = &own_b, .scale = &own_s};
    if (!f->dev->dry_run && finite_check_scaled(f->ck.st, &all, f->err)) return -1;
    read_experts(f, false);
    return fill_put(f, data, &own_b) || fill_put(f, scale, &own_s) ? -1 : 0;
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
    read_experts(f, false);
    const int rc = fill_stack(f, w, s, count, ROLE_EXPERTS);
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
    if (checkpoint_check_matrix(&f->ck, name, 3, shape, f->err)) return -1;
    const struct st_tensor *t = checkpoint_take(&f->ck, name, false, 3, shape, f->err);
    if (!t) return -1;
    const struct st_tensor own = own_part(f, t);
    struct st_tensor *slice = mem_array(e, sizeof(*slice));
    struct source *s = mem_array(e, sizeof(*s));
    for (int64_t i = 0; i < e; i++) {
        slice[i] = expert_part(&own, i, e);
        s[i] = (struct source){.format = checkpoint_dense_format(t->dtype),
                               .n_out = n_out,
                               .n_in = n_in,
                               .data = &slice[i],
                               .transposed = transposed};
    }
    *w = (struct weight){.n_exp = e, .n_out = n_out, .n_in = n_in};
    read_experts(f, false);
    const int rc = fill_stack(f, w, s, e, ROLE_EXPERTS);
    mem_free(slice);
    mem_free(s);
    return rc;
}

static int load_expert_biases(struct fill *f, struct tensor *bias, const struct stored_experts *p)
{
    *bias = arena_tensor_2d(&f->dev->weights, DT_F32, f->own.count, p->n_out);
    for (int64_t x = 0; x < f->ffn.n_exp; x++) {
        const int64_t at = x - f->own.first;
        const bool other = at < 0 || at >= f->own.count;
        read_experts(f, other);
        const struct st_tensor *t =
            checkpoint_take(&f->ck, expert_name(f, p->part[0], x, ".bias").s, false, 1, &p->n_out, f->err);
        if (!t) return -1;
        if (other) continue;
        if (fill_put_f32(f, f->dev->dry_run ? NULL : (float *)bias->data + at * p->n_out, t, p->n_out, 0)) return -1;
    }
    return 0;
}

/* One or two matrices per expert, the layout of bitsandbytes. Checks those of all experts, reads this rank's. Those of
 * the first expert enter the fingerprint, on every rank. */
static int load_per_expert(struct fill *f, struct weight *w, struct tensor *bias, const struct stored_experts *p)
{
    const int64_t e = f->ffn.n_exp, n_part = p->part[1] ? 2 : 1, n = e * n_part, n_find = f->checked ? n_part : n;
    struct source *s = mem_array(n, sizeof(*s));
    const bool hashed = f->ck.hashed;
    int rc = 0;
    for (int64_t i = 0; i < n_find && !rc; i++) {
        f->ck.hashed = hashed && i < n_part;
        read_experts(f, i / n_part < f->own.first || i / n_part >= f->own.first + f->own.count);
        rc = source_find(&s[i], &f->ck, expert_name(f, p->part[i % n_part], i / n_part, ".weight").s, p->n_out / n_part,
                         p->n_in, f->err);
    }
    f->ck.hashed = hashed;
    for (int64_t i = n_find; i < n; i++) s[i] = s[i - n_part];
    *w = (struct weight){.n_exp = f->own.count, .n_out = p->n_out, .n_in = p->n_in};
    read_experts(f, false);
    if (!rc) rc = fill_stack(f, w, s + f->own.first * n_part, f->own.count * n_part, ROLE_EXPERTS);
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
    const struct name name = fill_name(f, p->stack, "");
    int rc;
    if (has_experts(f, p)) return load_per_expert(f, w, bias, p);
    if (has(f, name.s, "_blocks") || has(f, name.s, "_scales"))
        rc = load_mxfp4(f, w, name.s, p->n_out, p->n_in);
    else if (has(f, name.s, "_weight_scale") || is_fp8(f, name.s))
        rc = load_scaled_stack(f, w, name.s, p->n_out, p->n_in);
    else if (has(f, name.s, ""))
        rc = load_stack(f, w, name.s, p->n_out, p->n_in);
    else if (f->a->names->published) /* its error names the tensor that is missing */
        return load_per_expert(f, w, bias, p);
    else
        return err_set(f->err,
                       "tensor %s is not in the checkpoint in any form: looked for %s_blocks (MXFP4), for %s and for "
                       "%s",
                       name.s, name.s, name.s, expert_name(f, p->part[0], 0, ".weight").s);
    if (rc || !f->a->expert_bias) return rc;
    snprintf(bias_name, sizeof(bias_name), "%s_bias", name.s);
    f->ck.reader = READ_BY_ALL;
    const struct st_tensor *t =
        checkpoint_take(&f->ck, bias_name, false, 2, (int64_t[]){f->ffn.n_exp, p->n_out}, f->err);
    if (!t) return -1;
    const struct st_tensor own = own_part(f, t);
    read_experts(f, false);
    *bias = arena_tensor_2d(&f->dev->weights, DT_F32, f->own.count, p->n_out);
    return fill_put_f32(f, bias->data, &own, f->own.count * p->n_out, 0);
}

/* Decodes w from dev->work to dev->weights. */
static void decode(struct fill *f, struct weight *w)
{
    const enum dtype t = fill_decoded_dtype(f->dev);
    const enum weight_format format = checkpoint_dense_format(t);
    const struct tensor y = arena_tensor_3d(&f->dev->weights, t, w->n_exp, w->n_out, w->n_in);
    op_decode(f->dev, y, &(struct proj){.w = *w}, (struct tensor){0});
    if (w->format != format) {
        f->w->n_decoded++;
        f->w->decoded_bytes += tensor_bytes(y) - weight_bytes(w);
    }
    *w = (struct weight){.format = format, .n_exp = w->n_exp, .n_out = w->n_out, .n_in = w->n_in, .data = y.data};
}

static int load_product(struct fill *f, struct proj *proj, const struct stored_experts *p)
{
    struct weight *w = &proj->w;
    struct tensor *bias = &proj->bias;
    struct arena *work = &f->dev->work;
    const int64_t mark = arena_mark(work);
    const bool decoded = f->layer >= f->first_decoded;
    f->arena = decoded ? work : f->experts;
    const int rc = p->stack ? load_experts(f, w, bias, p) : load_per_expert(f, w, bias, p);
    f->arena = &f->dev->weights;
    f->ck.reader = READ_BY_ALL;
    if (rc) return -1;
    const bool fp8 = f->w->fp8 && arch_is_routed(f->a, f->layer);
    if (fp8 && fp8_experts_open(f, proj)) return -1;
    if (decoded && fp8_experts_have_codes(f, proj))
        fp8_experts_decode(f, proj);
    else if (decoded)
        decode(f, w);
    arena_release(work, mark);
    return 0;
}

int weights_experts(struct fill *f, struct proj *up, const struct stored_experts *stored_up, struct proj *down,
                    const struct stored_experts *stored_down)
{
    const int64_t before = f->dev->weights.used, n_decoded = f->w->n_decoded;
    struct host_ring *ring = &f->w->host;
    const bool in_host = host_ring_has(ring, f->layer);
    struct arena slot = {.name = "packed experts"};
    if (in_host) slot.base = host_ring_place(ring, f->dev, f->layer);
    slot.cap = slot.base ? ring->host_bytes : INT64_MAX;
    f->experts = in_host ? &slot : &f->dev->weights;
    const int rc = load_product(f, up, stored_up) || load_product(f, down, stored_down);
    const int64_t bytes = f->dev->weights.used - before;
    const char *kept = in_host ? host_ring_keep(ring, f->dev, f->layer, slot.used) : NULL;
    if (kept) quantizer_moved(&f->quantizer, slot.base, slot.used, kept);
    if (arch_is_routed(f->a, f->layer) && f->layer < f->first_decoded && !in_host)
        f->w->packed_bytes = MT_MAX(f->w->packed_bytes, bytes);
    f->w->expert_bytes += bytes;
    f->w->n_decoded = MT_MIN(f->w->n_decoded, n_decoded + 1); /* the layer counts once */
    return rc ? -1 : 0;
}
