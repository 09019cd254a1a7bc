/* weights_experts.c - loads the routed experts of a layer: one tensor for all, or one per expert, in any layout of
 * model/stored/. Experts of decoded layers are read into dev->work, and decoded from there to dev->weights. */
#include <stdio.h>
#include <string.h>

#include "kernels/ops/ops.h"
#include "model/fp8_experts.h"
#include "model/layer.h"

/* The name of one expert's tensor: pattern from struct tensor_names, suffix ".weight" or ".bias". */
static struct name expert_name(const struct weights_read *f, const char *pattern, int64_t expert, const char *suffix)
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

/* Sets which ranks read the tensors that follow: this rank's experts or, with `other`, those of other ranks. All ranks
 * read a dense layer. */
static void read_experts(struct weights_read *f, bool other)
{
    f->ck.reader = !arch_is_routed(f->a, f->layer) ? READ_BY_ALL : other ? READ_ELSEWHERE : READ_HERE;
}

/* The part of a tensor of all experts that this rank holds. */
static struct st_tensor own_part(const struct weights_read *f, const struct st_tensor *t)
{
    struct st_tensor part = *t;
    part.bytes = t->bytes / f->ffn.n_exp * f->own.count;
    part.data += t->bytes / f->ffn.n_exp * f->own.first;
    part.offset += t->bytes / f->ffn.n_exp * f->own.first;
    return part;
}

/* Finds whether the stack `name` is [E, in, out], as in published files of Qwen3-VL-MoE; transformers saves [E, out,
 * in], and decides by the shape. So the orientation of a square matrix is unknown. */
static int find_transposed(const struct weights_read *f, const char *name, int64_t n_out, int64_t n_in, bool *turned)
{
    const struct st_tensor *t = safetensors_find(f->ck.st, name);
    *turned = f->a->transposed_stacks;
    if (!*turned || f->a->transposed_experts || !t || t->ndim != 3) return 0;
    *turned = t->shape[1] != n_out || t->shape[2] != n_in;
    if (n_out != n_in) return 0;
    return err_set(
        f->err,
        "tensor %s has square matrices [%lld, %lld]: it may be [E, in, out] as published, or [E, out, in] as "
        "transformers saves it",
        name, (long long)n_out, (long long)n_in);
}

/* Loads one tensor for all experts; each expert is a source. Returns 1, 0 or -1, as source_find_stack. */
static int load_stack(struct weights_read *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in)
{
    const int64_t count = f->own.count;
    struct source all = {.n_out = n_out, .n_in = n_in};
    if (find_transposed(f, name, n_out, n_in, &all.transposed)) return -1;
    const int found = source_find_stack(&all, &f->ck, name, f->ffn.n_exp, f->err);
    if (found <= 0) return found;
    struct st_tensor *part = mem_array(count, PLANES * sizeof(*part));
    struct source *s = mem_array(count, sizeof(*s));
    for (int64_t i = 0; i < count; i++) s[i] = source_of_stack(&all, f->own.first + i, f->ffn.n_exp, part + i * PLANES);
    *w = (struct weight){.n_exp = count, .n_out = n_out, .n_in = n_in};
    read_experts(f, false);
    const int rc = weights_read_stack(f, w, s, count, ROLE_EXPERTS);
    mem_free(part);
    mem_free(s);
    return rc ? -1 : 1;
}

static int load_expert_biases(struct weights_read *f, struct tensor *bias, const struct stored_experts *p)
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
        if (weights_read_put_f32(f, f->dev->dry_run ? NULL : (float *)bias->data + at * p->n_out, t, p->n_out, 0))
            return -1;
    }
    return 0;
}

/* Loads experts with one or two matrices each, as bitsandbytes stores them. Checks all experts' matrices, and reads
 * those of this rank. On every rank the first expert's matrices enter the fingerprint. */
static int load_per_expert(struct weights_read *f, struct weight *w, struct tensor *bias,
                           const struct stored_experts *p)
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
    if (!rc) rc = weights_read_stack(f, w, s + f->own.first * n_part, f->own.count * n_part, ROLE_EXPERTS);
    if (!rc && f->a->expert_bias) rc = load_expert_biases(f, bias, p);
    mem_free(s);
    return rc;
}

static bool has_experts(const struct weights_read *f, const struct stored_experts *p)
{
    bool any = false;
    for (int i = 0; i < 2 && p->part[i]; i++)
        any = any || source_exists(&f->ck, expert_name(f, p->part[i], 0, ".weight").s) ||
              checkpoint_has(&f->ck, expert_name(f, p->part[i], 0, ".bias").s);
    return any;
}

/* Loads the bias [E, out] of a stack. */
static int load_stack_bias(struct weights_read *f, struct tensor *bias, const char *stack, int64_t n_out)
{
    char name[320];
    snprintf(name, sizeof(name), "%s_bias", stack);
    f->ck.reader = READ_BY_ALL;
    const struct st_tensor *t = checkpoint_take(&f->ck, name, false, 2, (int64_t[]){f->ffn.n_exp, n_out}, f->err);
    if (!t) return -1;
    const struct st_tensor own = own_part(f, t);
    read_experts(f, false);
    *bias = arena_tensor_2d(&f->dev->weights, DT_F32, f->own.count, n_out);
    return weights_read_put_f32(f, bias->data, &own, f->own.count * n_out, 0);
}

static int load_experts(struct weights_read *f, struct weight *w, struct tensor *bias, const struct stored_experts *p)
{
    const struct name name = weights_read_name(f, p->stack, "");
    if (has_experts(f, p)) return load_per_expert(f, w, bias, p);
    const int found = load_stack(f, w, name.s, p->n_out, p->n_in);
    if (!found && f->a->names->published) /* the error of this call names the missing tensor */
        return load_per_expert(f, w, bias, p);
    if (!found)
        return err_set(f->err,
                       "tensor %s is not in the checkpoint in any form: looked for %s_blocks (MXFP4), for %s and for "
                       "%s",
                       name.s, name.s, name.s, expert_name(f, p->part[0], 0, ".weight").s);
    if (found < 0 || !f->a->expert_bias) return found < 0 ? -1 : 0;
    return load_stack_bias(f, bias, name.s, p->n_out);
}

/* Decodes w from dev->work to dev->weights. */
static void decode(struct weights_read *f, struct weight *w)
{
    const enum dtype t = weights_read_decoded_dtype(f->dev);
    const enum weight_format format = checkpoint_dense_format(t);
    const struct tensor y = arena_tensor_3d(&f->dev->weights, t, w->n_exp, w->n_out, w->n_in);
    op_decode(f->dev, y, &(struct proj){.w = *w}, (struct tensor){0});
    if (w->format != format) {
        f->w->n_decoded++;
        f->w->decoded_bytes += tensor_bytes(y) - weight_bytes(w);
    }
    *w = (struct weight){.format = format, .n_exp = w->n_exp, .n_out = w->n_out, .n_in = w->n_in, .data = y.data};
}

static int load_product(struct weights_read *f, struct proj *proj, const struct stored_experts *p)
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
    const bool codes = decoded && fp8_experts_have_codes(f, proj);
    if (codes) fp8_experts_codes(f, proj);
    if (decoded && !proj->fp8.pair) decode(f, w);
    arena_release(work, mark);
    return 0;
}

int weights_experts(struct weights_read *f, struct proj *up, const struct stored_experts *stored_up, struct proj *down,
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
