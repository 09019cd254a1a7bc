/* weights_load.c - loads a checkpoint into dev->weights: embedding, layers, final norm, head; or one part of it. */
#include <stdio.h>
#include <string.h>

#include "kernels/choice.h"
#include "kernels/ops/ops.h"
#include "model/stored/formats.h"
#include "model/fp8_experts.h"
#include "model/layer.h"
#include "model/stored/unused.h"

#define TEXT_FIRST "language_model.model." /* the prefix beside language_model.lm_head */

struct expert_range weights_experts_here(const struct comm *ep, int64_t n_exp)
{
    const int64_t n = n_exp / ep->world;
    return (struct expert_range){.first = ep->rank * n, .count = n};
}

const char *weights_prefix(const struct safetensors *st)
{
    static const char *const known[][2] = {
        {"model.language_model.", "embed_tokens"}, {TEXT_FIRST, "embed_tokens"}, {"backbone.", "embeddings"}};
    char name[64];
    for (int i = 0; i < MT_LEN(known); i++) {
        snprintf(name, sizeof(name), "%s%s.weight", known[i][0], known[i][1]);
        if (safetensors_find(st, name)) return known[i][0];
    }
    return "model.";
}

static struct name end_name(const struct weights_read *f, const char *rest, const char *suffix)
{
    struct name n;
    snprintf(n.s, sizeof(n.s), "%s%s%s", f->prefix, rest, suffix);
    return n;
}

static void set_layer(struct weights_read *f, int64_t layer)
{
    f->layer = layer;
    f->ffn = arch_ffn(f->a, layer);
    f->own = arch_is_routed(f->a, layer) ? weights_experts_here(f->ep, f->ffn.n_exp)
                                         : (struct expert_range){0, f->ffn.n_exp};
}

static void describe_decoded(struct weights_read *f)
{
    const size_t n = strlen(f->w->experts);
    const bool backward = f->w->fp8_backward, codes = f->w->fp8 && choice_fp8_products(f->dev);
    if (f->w->n_decoded)
        snprintf(f->w->experts + n, sizeof(f->w->experts) - n, ", %lld of %lld layer%s decoded to %s",
                 (long long)f->w->n_decoded, (long long)f->a->n_layer, str_plural(f->a->n_layer),
                 !codes     ? weight_format_name(checkpoint_dense_format(weights_read_decoded_dtype(f->dev)))
                 : backward ? "bf16 and e4m3"
                            : "e4m3");
    else if (f->w->fp8)
        snprintf(f->w->experts + n, sizeof(f->w->experts) - n, ", %s in e4m3", backward ? "gradients" : "inputs");
}

static int load_site(struct weights_read *f, struct hyper *h, const char *site)
{
    static const char *const part[] = {".fn", ".base", ".scale"};
    struct name name[3];
    for (int i = 0; i < 3; i++) name[i] = weights_read_name(f, site, part[i]);
    return f->a->hyper.n_stream ? weights_read_hyper(f, h, name, false) : 0;
}

/* Loads the norms before and after the mixer and the network of the layer, in the order of enum norm_name. */
static int load_norms(struct weights_read *f, struct layer_weights *lw)
{
    struct tensor *const norm[NORM_NAMES] = {&lw->attn_norm,          &lw->mixer_post,      &lw->ffn_norm,
                                             &lw->ffn_post,           &lw->parallel.routed, &lw->parallel.routed_post,
                                             &lw->parallel.dense_post};
    for (enum norm_name n = NORM_MIXER; n < NORM_NAMES; n++) {
        const char *name = arch_norm_name(f->a, n);
        const bool has = n < NORM_FFN ? f->a->mixer[f->layer] != NULL : f->a->ffn[f->layer] != NULL;
        if (name && has && weights_norm(f, norm[n], name, f->a->d_model)) return -1;
    }
    return 0;
}

static int load_scale(struct weights_read *f, struct layer_weights *lw)
{
    lw->scale = 1;
    return f->a->names->layer_scale ? weights_number(f, &lw->scale, f->a->names->layer_scale) : 0;
}

static int load_layer(struct weights_read *f, struct layer_weights *lw)
{
    const struct arch *a = f->a;
    const struct mixer_kind *mixer = a->mixer[f->layer];
    const struct ffn_kind *ffn = a->ffn[f->layer];
    return load_norms(f, lw) || load_site(f, &lw->hyper_attn, "attn_hc") || load_site(f, &lw->hyper_ffn, "ffn_hc") ||
                   (mixer && mixer->load(f, a, f->layer, lw)) || (ffn && ffn->load(f, a, f->layer, lw)) ||
                   load_scale(f, lw)
               ? -1
               : 0;
}

static int load_embed(struct weights_read *f, struct weight *embed)
{
    const char *own = f->a->names->embed;
    return weights_read_matrix(f, embed, end_name(f, own ? own : "embed_tokens", ".weight").s, f->a->vocab,
                               f->a->d_model, ROLE_OTHER);
}

static struct name head_name(const struct weights_read *f)
{
    struct name n;
    snprintf(n.s, sizeof(n.s), "%slm_head.weight", strcmp(f->prefix, TEXT_FIRST) ? "" : "language_model.");
    return n;
}

static bool has_head(const struct weights_read *f) { return source_exists(&f->ck, head_name(f).s); }

/* Loads the head; without it and with tied embeddings it stays the embedding. */
static int load_head(struct weights_read *f, struct weight *head)
{
    const struct name name = head_name(f);
    if (has_head(f)) return weights_read_matrix(f, head, name.s, f->a->vocab, f->a->d_model, ROLE_OTHER);
    if (f->a->tied) return 0;
    char full[512];
    return err_set(f->err, "tensor %s is not in the checkpoint, and tie_word_embeddings is false",
                   checkpoint_name(&f->ck, full, sizeof(full), name.s));
}

static int load_hyper_head(struct weights_read *f, struct hyper *h)
{
    const struct name name[] = {end_name(f, "hc_head.hc_fn", ""), end_name(f, "hc_head.hc_base", ""),
                                end_name(f, "hc_head.hc_scale", "")};
    *h = (struct hyper){0};
    return f->a->hyper.n_stream ? weights_read_hyper(f, h, name, true) : 0;
}

static int load_last_norm(struct weights_read *f, struct tensor *norm)
{
    const char *own = f->a->names->last_norm;
    return weights_read_norm(f, norm, end_name(f, own ? own : "norm", ".weight").s, f->a->d_model);
}

/* Loads embedding, head and final norm. The embedding may be in host memory, because a step reads few of its rows,
 * unless it is also the head. */
static int load_ends(struct weights_read *f, struct weights *w, bool embed_on_host)
{
    f->arena = embed_on_host && has_head(f) ? &f->dev->host : &f->dev->weights;
    if (load_embed(f, &w->embed)) return -1;
    f->arena = &f->dev->weights;
    w->head = w->embed;
    return load_head(f, &w->head) || load_last_norm(f, &w->norm) || load_hyper_head(f, &w->hyper_head) ? -1 : 0;
}

/* Spreads opt->host_layers evenly over the routed layers that are not decoded. */
static void open_host_experts(struct weights_read *f, const struct weights_options *opt)
{
    bool in_host[MT_MAX_LAYERS] = {false};
    int64_t n = 0, seen = 0;
    for (int64_t l = 0; l < f->first_decoded; l++) n += arch_is_routed(f->a, l);
    const int64_t wanted = MT_MIN(opt->host_layers, n);
    for (int64_t l = 0; l < f->first_decoded; l++) {
        if (!arch_is_routed(f->a, l)) continue;
        in_host[l] = (seen + 1) * wanted / n > seen * wanted / n;
        seen++;
    }
    if (!wanted) return;
    struct host_ring *r = &f->w->host;
    host_ring_open(r, f->dev,
                   &(struct host_ring_use){.n_layer = f->a->n_layer,
                                           .in_host = in_host,
                                           .n_slot = MT_MIN(wanted, HOST_EXPERT_SLOTS),
                                           .n_host = wanted,
                                           .bytes = opt->host_bytes,
                                           .frozen = true});
    for (int64_t s = 0; s < r->n_slot; s++) r->slot[s] = arena_push(&f->dev->weights, opt->host_bytes);
}

/* If the cause of an error is a missing file or an unsupported format, replaces it by an error that says so. */
static void explain(const struct weights_read *f, struct err *err)
{
    if (!checkpoint_check_missing(&f->ck, err)) (void)!formats_check(f->ck.st, f->a, err);
}

int weights_load(struct weights *w, struct device *dev, const struct arch *a, const struct safetensors *st,
                 const struct weights_options *opt, struct err *err)
{
    struct weights_read f = {.dev = dev, .arena = &dev->weights, .a = a, .err = err, .w = w};
    f.ep = opt->ep ? opt->ep : &comm_alone;
    const int64_t before = dev->weights.used;
    int rc = -1;
    *w = (struct weights){.layers = mem_array(a->n_layer, sizeof(*w->layers))};
    f.first_decoded = a->n_layer - opt->decoded_layers;
    f.checked = opt->checked;
    open_host_experts(&f, opt);
    w->expert_bytes = dev->weights.used - before;
    if (opt->fp8) w->fp8 = mem_array(a->n_layer, sizeof(*w->fp8));
    w->fp8_backward = opt->fp8 == FP8_BACKWARD;
    w->n_layer = a->n_layer;
    base_hash_open(&w->hash, a->n_layer);
    checkpoint_open(&f.ck, st, dev->dry_run ? NULL : &w->hash, dev->n_threads);
    f.ck.asked = mem_array(st->n_missing, sizeof(bool));
    f.prefix = weights_prefix(st);
    f.ck.hashed = !dev->dry_run || opt->hashed;
    quantizer_open(&f.quantizer, opt->quantize, dev, &f.ck);
    if (load_ends(&f, w, opt->embed_on_host)) goto out;
    for (int64_t l = 0; l < a->n_layer; l++) {
        set_layer(&f, l);
        if (load_layer(&f, &w->layers[l])) goto out;
    }
    w->dense_bytes = dev->weights.used - before - w->expert_bytes;
    describe_decoded(&f);
    if (w->fp8 && !dev->dry_run) fp8_experts_log(w);
    if (f.ck.hashed) w->base = f.ck.fingerprint, w->fingerprint = quantize_key(&f.quantizer.q, f.ck.fingerprint);
    host_ring_join(&w->host, dev);
    if (w->host.n && !dev->dry_run) dev->ops->wait();
    if (checkpoint_check_missing(&f.ck, err)) goto out;
    if (!f.checked) w->n_unused = unused_count(&f.ck, a, dev->dry_run, &w->unused);
    quantizer_finish(&f.quantizer);
    rc = 0;
out:
    quantizer_close(&f.quantizer);
    if (rc) explain(&f, err);
    checkpoint_close(&f.ck);
    if (rc) weights_free(w);
    return rc;
}

void weights_free(struct weights *w)
{
    for (int64_t l = 0; l < w->n_layer && w->fp8; l++)
        for (int i = 0; i < w->fp8[l].n_step; i++) mem_free(w->fp8[l].steps[i]);
    host_ring_close(&w->host);
    base_hash_close(&w->hash);
    mem_free(w->fp8);
    mem_free(w->layers);
    *w = (struct weights){0};
}

/* ---- loading one part ---- */

static void part_open(struct weights_read *f, struct weights *w, struct device *dev, const struct weights_source *from,
                      const struct quantize *q, struct err *err)
{
    *w = (struct weights){.layers = NULL};
    *f = (struct weights_read){.dev = dev, .arena = &dev->weights, .a = from->arch, .err = err, .w = w};
    f->ep = &comm_alone;
    f->first_decoded = from->arch->n_layer;
    f->prefix = weights_prefix(from->st);
    checkpoint_open(&f->ck, from->st, dev->dry_run ? NULL : from->hash, dev->n_threads);
    quantizer_open(&f->quantizer, q, dev, &f->ck);
}

static void part_close(struct weights_read *f)
{
    quantizer_close(&f->quantizer);
    checkpoint_close(&f->ck);
}

int weights_load_layer(struct layer_weights *lw, struct device *dev, const struct weights_source *from,
                       const struct quantize *q, int64_t layer, struct err *err)
{
    struct quantize packing = *q;
    struct weights w;
    struct weights_read f;
    packing.cache = NULL;
    part_open(&f, &w, dev, from, &packing, err);
    set_layer(&f, layer);
    *lw = (struct layer_weights){0};
    const int rc = load_layer(&f, lw);
    part_close(&f);
    return rc;
}

int weights_load_embed(struct weight *embed, struct device *dev, const struct weights_source *from, struct err *err)
{
    struct weights w;
    struct weights_read f;
    part_open(&f, &w, dev, from, NULL, err);
    const int rc = load_embed(&f, embed);
    part_close(&f);
    return rc;
}

int weights_load_head(struct weight *head, struct tensor *out, struct hyper *hyper, struct device *dev,
                      const struct weights_source *from, struct err *err)
{
    struct weights w;
    struct weights_read f;
    part_open(&f, &w, dev, from, NULL, err);
    int rc = load_head(&f, head);
    if (!rc && !has_head(&f))
        rc = weights_load_embed(head, dev, &(struct weights_source){from->arch, from->st, NULL}, err);
    if (!rc) rc = load_last_norm(&f, out);
    if (!rc) rc = load_hyper_head(&f, hyper);
    part_close(&f);
    return rc;
}
