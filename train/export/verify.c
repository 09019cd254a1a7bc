/* verify.c - compares trainer and export as models over held-out rows.
 *
 * Seven models run together: the base model; the trained model with the whole adapter, with its attention part, with
 * its experts part; the export with the same three. One layer is in memory at a time, or two if the export has separate
 * weights. All models run on the CPU in f32, the reference; equal adapters give equal bits.
 *
 * Allowed, in nats per token (KL of the trainer's distribution from the export's), for the whole and for each part:
 *   adapter formats  largest KL 1e-6, and every value must be the trained one
 *   merged-bf16      mean KL 1e-3, or 25 % of the part's effect (mean KL of the trainer's part from the base)
 *   merged-mxfp4, -nvfp4, -fp8
 *                    mean KL 1e-3, or 100 %: an export that differs more from the trained model than the base model
 *                    does has lost the adapter. After quantisation-aware training in the export's format: mean KL 1e-5
 *                    for the quantised parts, the others as merged-bf16
 *   gguf-model       mean KL 1e-2, of Q4_0 0.2, or 100 %: all matrices of the base model are rounded too
 *
 * Each merged weight must also be base + adapter within the format's rounding (verify_merged.c). */
#include "train/export/verify.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/layers/dora.h"
#include "train/adapter/base_check.h"
#include "train/export/export_packed.h"
#include "train/export/export_quant.h"

enum { MAX_TOKENS = 256, HEAD_ROWS = 64 };
#define MOST_LOST 0.5 /* warn when rounding loses more of the change to the experts */
enum part { PART_ALL, PART_ATTENTION, PART_EXPERTS, PARTS };
enum { SIDES = 1 + 2 * PARTS }; /* base; trainer with each part; export with each part */

static const char *const part_names[PARTS] = {"whole adapter", "attention only", "experts only"};

/* One of the seven models. */
struct side {
    bool exported, attention, experts;
    struct lora_layer *layers; /* [L] owned by `on`; switched-off parts have r == 0 */
    struct adapters on;        /* this struct owns only `layers`; the other members belong to the compared adapter */
    struct tensor x;           /* [T, D] */
};

struct kl {
    double sum, max;
};

struct stream {
    struct export *x;
    const struct cpu_adapter *read; /* of adapter formats, else NULL */
    struct merged *merged;          /* of the other formats, else NULL */
    struct weights_source from[2];  /* the base model, the export */
    struct base_hash hash;          /* of the base model */
    struct export_diff *diff;
    struct device dev;
    struct side sides[SIDES];
    struct acts acts;
    int64_t n_tok, n_seq, max_len;
    int32_t *ids, *at, *starts; /* host: [T], [T], [S+1] */
    struct tensor tok, pos, cu, rope[ATTN_KINDS];
    struct kl part[PARTS], effect[PARTS]; /* KL of trainer from export, of trainer from base */
};

/* ---- rows ---- */

static bool is_gguf(const struct stream *s) { return s->x->format == EXPORT_GGUF_MODEL; }

static bool has_rows(const struct export *x) { return x->run.eval.n_docs > 0; }

/* Takes the first documents, up to MAX_TOKENS. Without documents it takes one token, so that the weights are still
 * compared layer by layer; the output of that token is not compared. */
static void take_rows(struct stream *s)
{
    const struct dataset *ds = &s->x->run.eval;
    s->ids = mem_array(MAX_TOKENS, sizeof(int32_t));
    s->at = mem_array(MAX_TOKENS, sizeof(int32_t));
    s->starts = mem_array(MAX_TOKENS + 1, sizeof(int32_t));
    if (!has_rows(s->x)) s->n_tok = s->n_seq = s->max_len = s->starts[1] = 1;
    for (int64_t d = 0; d < ds->n_docs && s->n_tok < MAX_TOKENS; d++) {
        const int64_t len = MT_MIN(ds->doc_off[d + 1] - ds->doc_off[d], MAX_TOKENS - s->n_tok);
        memcpy(s->ids + s->n_tok, ds->ids + ds->doc_off[d], (size_t)len * sizeof(int32_t));
        for (int64_t i = 0; i < len; i++) s->at[s->n_tok + i] = (int32_t)i;
        s->n_tok += len;
        s->starts[++s->n_seq] = (int32_t)s->n_tok;
        s->max_len = MT_MAX(s->max_len, len);
    }
}

/* ---- the seven ---- */

static void open_side(struct side *side, const struct stream *s, bool exported, bool attention, bool experts)
{
    const bool own_weights = exported && s->merged;
    const struct adapters *ad = exported && s->read ? &s->read->ad : &s->x->adapter.ad;
    *side = (struct side){.exported = exported, .attention = attention, .experts = experts, .on = *ad};
    side->layers = side->on.layers = mem_array(ad->n_layer, sizeof(*side->layers));
    for (int64_t l = 0; l < ad->n_layer && !own_weights; l++) {
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            struct adapter *of = &side->layers[l].of[i];
            if (!(i < MIXER_PRODUCTS ? attention : experts)) continue;
            *of = ad->layers[l].of[i];
            if (s->x->trained) continue; /* otherwise the trainer's products read W */
            of->quant = (struct proj_quant){.n_part = 0};
            of->lora.merged = false;
        }
    }
}

static void open_sides(struct stream *s)
{
    open_side(&s->sides[0], s, false, false, false);
    for (int e = 0; e < 2; e++)
        for (enum part p = PART_ALL; p < PARTS; p++)
            open_side(&s->sides[1 + e * PARTS + (int)p], s, e, p != PART_EXPERTS, p != PART_ATTENTION);
}

static struct tensor push_indices(struct device *dev, const int32_t *host, int64_t n)
{
    const struct tensor t = arena_tensor_1d(&dev->state, DT_I32, n);
    device_upload(dev, t.data, host, n * (int64_t)sizeof(*host));
    return t;
}

static struct tensor push_rope(struct stream *s, const struct rope_arch *r)
{
    const struct tensor table = arena_tensor_2d(&s->dev.state, DT_F32, s->max_len, r->width);
    if (!s->dev.dry_run) arch_rope_table(r, s->max_len, table.data);
    return table;
}

static void push_state(struct stream *s)
{
    struct device *dev = &s->dev;
    const struct arch *a = &s->x->run.arch;
    s->tok = push_indices(dev, s->ids, s->n_tok);
    s->pos = push_indices(dev, s->at, s->n_tok);
    s->cu = push_indices(dev, s->starts, s->n_seq + 1);
    for (int k = 0; k < ATTN_KINDS; k++)
        if (a->rope[k].width) s->rope[k] = push_rope(s, &a->rope[k]);
    for (int i = 0; i < SIDES; i++)
        s->sides[i].x = arena_tensor_2d(&dev->state, dev->act_dtype, s->n_tok, arch_stream_cols(a));
}

/* ---- forward pass ---- */

static void copy_ffn(struct layer_weights *to, const struct layer_weights *from)
{
    to->ffn_norm = from->ffn_norm, to->ffn_post = from->ffn_post;
    to->hyper_ffn = from->hyper_ffn;
    to->router = from->router, to->router_bias = from->router_bias;
    to->hash = from->hash;
    to->up = from->up;
    to->down = from->down;
    to->shared_up = from->shared_up, to->shared_down = from->shared_down;
    to->shared_gate = from->shared_gate;
    to->parallel = from->parallel;
    to->latent_down = from->latent_down, to->latent_up = from->latent_up;
}

/* The weights of a side: those of the export for the active part (attention, experts or both), those of the source for
 * the rest. */
static struct layer_weights weights_of(const struct side *side, const struct layer_weights *source,
                                       const struct layer_weights *exported)
{
    const bool changed = side->exported && exported;
    struct layer_weights w = changed && side->attention ? *exported : *source;
    if (changed && side->attention != side->experts) copy_ffn(&w, side->experts ? exported : source);
    return w;
}

static void run_layer(struct stream *s, struct side *side, const struct layer_weights *w, int64_t l)
{
    const struct arch *a = &s->x->run.arch;
    struct device *dev = &s->dev;
    const int64_t mark = arena_mark(&dev->work);
    const struct seqs seqs = {.cu = s->cu, .n_seq = s->n_seq, .max_len = s->max_len};
    struct aux no_aux = {.coef = 0};
    const struct block b = {
        .dev = dev,
        .a = a,
        .layer = l,
        .w = w,
        .experts = s->acts.experts,
        .offload = s->acts.offload,
        .seqs = &seqs,
        .tok = s->tok,
        .pos = s->pos,
        .rope = s->rope[arch_attn(a, l)->rope],
        .aux = &no_aux,
    };
    acts_push(&s->acts, dev, a, &side->on, s->n_tok, false, false);
    struct layer_acts *acts = &s->acts.layers[l];
    acts->x = side->x;
    const struct tensor y = s->acts.layers[l + 1].x;
    block_fwd(&b, acts, y);
    if (!dev->dry_run) memcpy(side->x.data, y.data, (size_t)tensor_bytes(y));
    arena_release(&dev->work, mark);
}

static int run_embed(struct stream *s, struct err *err)
{
    struct device *dev = &s->dev;
    struct weight embed, other;
    const struct arch *a = &s->x->run.arch;
    const int64_t mark = arena_mark(&dev->weights);
    if (weights_load_embed(&embed, dev, &s->from[0], err)) return -1;
    other = embed;
    if (is_gguf(s))
        merged_read_embed(s->merged, dev, &other);
    else if (s->merged && weights_load_embed(&other, dev, &s->from[1], err))
        return -1;
    for (int i = 0; i < SIDES; i++)
        for (int64_t at = 0; at < arch_stream_cols(a); at += a->d_model) {
            const struct tensor x = tensor_cols(s->sides[i].x, at, a->d_model);
            op_embed_fwd(dev, x, s->sides[i].exported ? &other : &embed, s->tok);
            if (a->embed_scaled) op_scale(dev, x, arch_embed_factor(a, dev));
        }
    arena_release(&dev->weights, mark);
    return 0;
}

/* A layer of the export; NVFP4, FP8 and GGUF as F32. */
static int load_merged(struct layer_weights *lw, struct stream *s, int64_t l, struct err *err)
{
    const struct quantize as_it_is = {.format = WF_NONE};
    struct packed_view v;
    if (is_gguf(s)) { /* its layer has the tensors of the base model's */
        const struct weights_source base = {.arch = s->from[0].arch, .st = s->from[0].st};
        if (weights_load_layer(lw, &s->dev, &base, &s->x->quantize, l, err)) return -1;
        return merged_read_layer(s->merged, &s->dev, lw, l), 0;
    }
    if (s->x->format <= EXPORT_MERGED_MXFP4) return weights_load_layer(lw, &s->dev, &s->from[1], &as_it_is, l, err);
    if (packed_view_open(&v, &s->merged->st, l, !s->dev.dry_run, err)) return -1;
    const struct weights_source from = {.arch = &s->merged->arch, .st = &v.st};
    const int rc = weights_load_layer(lw, &s->dev, &from, &as_it_is, l, err);
    packed_view_close(&v);
    return rc;
}

static int run_layers(struct stream *s, struct err *err)
{
    struct device *dev = &s->dev;
    const struct arch *a = &s->x->run.arch;
    struct progress progress = progress_start("verifying", a->n_layer + 1); /* the head counts as a layer */
    for (int64_t l = 0; l < a->n_layer; l++) {
        const int64_t mark = arena_mark(&dev->weights);
        struct layer_weights source, other;
        if (weights_load_layer(&source, dev, &s->from[0], &s->x->quantize, l, err)) return -1;
        if (s->merged) {
            if (load_merged(&other, s, l, err)) return -1;
            struct layer_weights adapted = source;
            export_quant_layer(s->x, dev, &adapted, l);
            merged_compare(s->merged, dev, s->x, s->diff, l, &adapted, &other);
        }
        for (int i = 0; i < SIDES; i++) {
            struct layer_weights w = weights_of(&s->sides[i], &source, s->merged ? &other : NULL);
            layer_adapt(&w, a, l, &s->sides[i].layers[l]);
            dora_layer_norms(dev, a, l, &s->sides[i].layers[l], &source);
            run_layer(s, &s->sides[i], &w, l);
        }
        arena_release(&dev->weights, mark);
        if (!dev->dry_run) progress_tell(&progress, l + 1);
    }
    return 0;
}

/* ---- comparing outputs ---- */

static double log_sum_exp(const float *x, int64_t n)
{
    double most = (double)x[0], sum = 0;
    for (int64_t i = 1; i < n; i++) most = MT_MAX(most, (double)x[i]);
    for (int64_t i = 0; i < n; i++) sum += exp((double)x[i] - most);
    return most + log(sum);
}

static void add_kl(struct kl *kl, double value)
{
    kl->sum += value;
    if (!(value <= kl->max)) kl->max = value; /* NaN too */
}

/* Adds one token to the KL sums: sum p (log p - log q). p: a part of the trained model; q: the export, and the base. */
static void compare_token(struct stream *s, const float *const row[SIDES], int64_t n)
{
    double norm[SIDES];
    for (int i = 0; i < SIDES; i++) norm[i] = log_sum_exp(row[i], n);
    for (int part = 0; part < PARTS; part++) {
        const int p = 1 + part, q = 1 + PARTS + part;
        double exported = 0, base = 0;
        for (int64_t i = 0; i < n; i++) {
            const double log_p = (double)row[p][i] - norm[p], share = exp(log_p);
            exported += share * (log_p - ((double)row[q][i] - norm[q]));
            base += share * (log_p - ((double)row[0][i] - norm[0]));
        }
        add_kl(&s->part[part], exported);
        add_kl(&s->effect[part], base);
    }
}

static void cap_logits(struct tensor logits, float cap)
{
    float *z = logits.data;
    for (int64_t i = 0; cap > 0 && i < tensor_count(logits); i++) z[i] = cap * tanhf(z[i] / cap);
}

static void compare_logits(struct stream *s, const struct tensor logits[SIDES])
{
    const int64_t n = logits[0].shape[1];
    for (int64_t t = 0; t < logits[0].shape[0]; t++) {
        const float *row[SIDES];
        for (int i = 0; i < SIDES; i++) row[i] = (const float *)logits[i].data + t * n;
        compare_token(s, row, n);
    }
}

/* The input of the final norm: x, or the sum of its streams. */
static struct tensor sum_streams(struct device *dev, struct tensor x, const struct hyper *h)
{
    if (!h->n_stream) return x;
    struct tensor y = arena_tensor_2d(&dev->work, dev->act_dtype, x.shape[0], x.shape[1] / h->n_stream);
    struct tensor m = arena_tensor_2d(&dev->work, dev->stat_dtype, x.shape[0], hyper_values(h));
    struct tensor rstd = arena_tensor_1d(&dev->work, dev->stat_dtype, x.shape[0]);
    op_hyper_pre_fwd(dev, y, m, rstd, x, h);
    return y;
}

static int run_head(struct stream *s, struct err *err)
{
    struct device *dev = &s->dev;
    const struct arch *a = &s->x->run.arch;
    struct weight head[2];
    struct tensor norm[2], logits[SIDES];
    struct hyper hyper[2];
    if (weights_load_head(&head[0], &norm[0], &hyper[0], dev, &s->from[0], err)) return -1;
    head[1] = head[0], norm[1] = norm[0], hyper[1] = hyper[0];
    if (is_gguf(s))
        merged_read_head(s->merged, dev, &head[1], &norm[1]);
    else if (s->merged && weights_load_head(&head[1], &norm[1], &hyper[1], dev, &s->from[1], err))
        return -1;
    for (int64_t t = 0; t < s->n_tok; t += HEAD_ROWS) {
        const int64_t n = MT_MIN(HEAD_ROWS, s->n_tok - t), mark = arena_mark(&dev->work);
        for (int i = 0; i < SIDES; i++) {
            const bool other = s->sides[i].exported;
            struct tensor y = arena_tensor_2d(&dev->work, dev->act_dtype, n, a->d_model);
            struct tensor rstd = arena_tensor_1d(&dev->work, dev->stat_dtype, n);
            logits[i] = arena_tensor_2d(&dev->work, dev->act_dtype, n, a->vocab);
            op_rmsnorm_fwd(dev, y, rstd, sum_streams(dev, tensor_rows(s->sides[i].x, t, n), &hyper[other]), norm[other],
                           &a->norm);
            const struct proj proj = {.w = head[other]};
            op_linear_fwd(dev, logits[i], (struct tensor){0}, y, &proj, (struct tensor){0});
            if (!dev->dry_run) cap_logits(logits[i], a->logit_cap);
        }
        if (!dev->dry_run) compare_logits(s, logits);
        arena_release(&dev->work, mark);
    }
    arena_release(&dev->weights, 0);
    return 0;
}

static int run_all(struct stream *s, struct err *err)
{
    push_state(s);
    return run_embed(s, err) || run_layers(s, err) || run_head(s, err) ? -1 : 0;
}

static int run_measured(struct stream *s, struct err *err)
{
    struct device *dev = &s->dev, *cpu = &s->x->run.dev;
    device_dry_run(dev, cpu);
    if (run_all(s, err)) return -1;
    const int64_t weights = dev->weights.peak, state = dev->state.peak, work = dev->work.peak;
    if (device_open(dev, "cpu", "fp32", err)) return -1;
    dev->n_threads = cpu->n_threads;
    if (device_reserve(dev, &dev->weights, "weights", weights, err) ||
        device_reserve(dev, &dev->state, "state", state, err) || device_reserve(dev, &dev->work, "work", work, err))
        return -1;
    return run_all(s, err);
}

/* Sets the hashes of x->run.base. */
static int stream_run(struct stream *s, struct err *err)
{
    struct run *r = &s->x->run;
    base_hash_open(&s->hash, r->arch.n_layer);
    s->from[0] = (struct weights_source){.arch = &r->arch, .st = &r->st, .hash = &s->hash};
    if (s->merged) s->from[1] = (struct weights_source){.arch = &s->merged->arch, .st = &s->merged->st};
    take_rows(s);
    open_sides(s);
    acts_init(&s->acts, r->arch.n_layer, &(struct ep_options){.n_tok = 0}, 1);
    const int rc = run_measured(s, err);
    if (!rc) base_check_record(&r->base, r->base.sample, &s->hash, &r->arch);
    base_hash_close(&s->hash);
    device_close(&s->dev);
    acts_free(&s->acts);
    for (int i = 0; i < SIDES; i++) mem_free(s->sides[i].layers);
    mem_free(s->ids);
    mem_free(s->at);
    mem_free(s->starts);
    return rc;
}

/* ---- the verdict ---- */

/* Whether training quantised all adapted weights of a part, attention or experts. With quant.targets = experts training
 * reads shared experts and dense layers unquantised, and the export rounds their merged weights to bf16. */
static bool is_quantised(const struct stream *s, int part)
{
    const struct adapters *ad = &s->x->adapter.ad;
    if (s->x->qat.opt.all || part != PART_EXPERTS) return s->x->qat.opt.all;
    for (int64_t l = 0; l < ad->n_layer; l++)
        for (int i = MIXER_PRODUCTS; i < LAYER_PRODUCTS; i++)
            if (ad->layers[l].of[i].lora.r && !ad->layers[l].of[i].quant.format.bits) return false;
    return true;
}

/* The mean KL for merged weights, the largest for adapters. */
static double allowed_kl(const struct stream *s, int part)
{
    const bool trained =
        s->effect[part].sum >
        0; /* false: only the other part was trained; the export may have rounded this one nevertheless */
    const double effect = s->effect[trained ? part : PART_ALL].sum / (double)s->n_tok;
    switch (s->x->format) {
    case EXPORT_MERGED_MXFP4:
    case EXPORT_MERGED_NVFP4:
    case EXPORT_MERGED_FP8:
        if (!s->x->trained) return fmax(1e-3, effect);
        if (is_quantised(s, part)) return 1e-5;
        return fmax(1e-3, 0.25 * effect);
    case EXPORT_GGUF_MODEL: return fmax(s->x->ggml == GGML_Q4_0 ? 0.2 : 1e-2, effect);
    case EXPORT_MERGED_BF16: return fmax(1e-3, 0.25 * effect);
    default: return 1e-6;
    }
}

static double judged_kl(const struct stream *s, int part)
{
    return s->merged ? s->part[part].sum / (double)s->n_tok : s->part[part].max;
}

/* The part that failed; attention or experts take precedence over the whole. PARTS: none failed. */
static int find_bad(const struct stream *s)
{
    for (int p = PARTS - 1; p >= 0; p--)
        if (!(judged_kl(s, p) <= allowed_kl(s, p))) return p;
    return PARTS;
}

static void print_table(const struct stream *s)
{
    const double n = (double)s->n_tok;
    FILE *out = s->x->report;
    fprintf(out, "  %lld held-out tokens, KL of the trainer from  %13s%29s\n", (long long)s->n_tok, "the export",
            "the base");
    fprintf(out, "  %-17s %12s %12s %12s %12s\n", "", "max", "mean", s->merged ? "allowed mean" : "allowed max",
            "mean");
    for (int p = 0; p < PARTS; p++)
        fprintf(out, "  %-17s %12.3g %12.3g %12.3g %12.3g%s\n", part_names[p], s->part[p].max, s->part[p].sum / n,
                allowed_kl(s, p), s->effect[p].sum / n, judged_kl(s, p) <= allowed_kl(s, p) ? "" : "   too far");
}

/* Whether the export has rounded weights that training did not read. */
static bool is_rounded(const struct export *x) { return x->format > EXPORT_MERGED_BF16 && !x->trained; }

/* Why a merged export whose weights are all correct has other outputs, and what to do. */
static void advice_on(char text[512], const struct stream *s, int part)
{
    const struct export *x = s->x;
    text[0] = 0;
    if (is_rounded(x))
        snprintf(
            text, 512,
            "; every weight is base + adapter, correctly rounded, but rounding to this format changes the model by "
            "%.3g, the adapter by %.3g: train with quant.weights, export merged-bf16 or peft, or accept this loss "
            "with --accept-rounding",
            judged_kl(s, part), s->effect[part].sum / (double)s->n_tok);
    else if (x->format >= EXPORT_MERGED_BF16)
        snprintf(
            text, 512,
            "; every weight is the rounded sum, but rounding moves tokens whose router is nearly undecided to other "
            "experts: export peft");
}
static const char *advice_on_rows(const struct stream *s)
{
    const bool more = s->x->format >= EXPORT_MERGED_BF16 && s->n_tok < MAX_TOKENS;
    return more ? "; more held-out rows make the mean surer: verification reads up to 256 tokens" : "";
}

static int judge(const struct stream *s, struct err *err)
{
    char advice[512];
    if (s->diff->n_exact && !s->diff->n)
        fprintf(s->x->report, "  %lld quantised weights are bit for bit %s\n", (long long)s->diff->n_exact,
                s->x->trained ? "those that training read" : "base + adapter, quantised");
    const int bad = has_rows(s->x) ? find_bad(s) : PARTS;
    if (has_rows(s->x))
        print_table(s);
    else
        fprintf(s->x->report,
                "  no held-out tokens: not verified on data; values compared one by one, different: %lld\n",
                (long long)s->diff->n);
    if (s->diff->n)
        return err_set(err, "verification: parts of the adapter that differ: %lld, in %s, the first: %s",
                       (long long)s->diff->n, export_format_name(s->x->format), s->diff->first);
    if (bad == PARTS) return 0;
    if (s->x->accept.rounding && is_rounded(s->x)) {
        log_warn(
            "%s, %s: rounding changes the model by a KL of %.3g, the adapter by %.3g: accepted (--accept-rounding)",
            export_format_name(s->x->format), part_names[bad], judged_kl(s, bad),
            s->effect[bad].sum / (double)s->n_tok);
        return 0;
    }
    advice_on(advice, s, bad);
    return err_set(err, "verification: %s, %s: the KL to the trainer is %.3g, allowed is %.3g%s%s",
                   export_format_name(s->x->format), part_names[bad], judged_kl(s, bad), allowed_kl(s, bad), advice,
                   advice_on_rows(s));
}

static int verify_adapter(struct export *x, struct export_diff *diff, struct err *err)
{
    struct cpu_adapter read;
    if (verify_read(&read, x, err)) return err_prefix(err, "verification");
    struct stream s = {.x = x, .read = &read, .diff = diff};
    verify_values(diff, &x->adapter, &read);
    int rc = has_rows(x) ? stream_run(&s, err) : 0;
    if (!rc) rc = judge(&s, err);
    cpu_adapter_close(&read);
    return rc;
}

/* The part of the change that rounding adds orthogonally to the trained change: its norm / norm of the trained
 * change. */
static double noise_of(const struct rounded *r)
{
    const double kept = r->arrived / r->delta2;
    return sqrt(fmax(0, r->step2 / r->delta2 - kept * kept));
}

/* Warns when rounding to a format removes much of the change to some matrices: 1 - (exported change * trained change) /
 * |trained change|^2. If training quantised experts to this format, other exports do not have the trained experts; the
 * advice is then to train adapters of experts only. Also prints to the report. */
static void warn_of_rounding(const struct export *x, const struct export_diff *l, const struct rounded *r,
                             const char *format, const char *matrices)
{
    if (!(r->delta2 > 0)) return;
    const double lost = fmax(0, 1 - r->arrived / r->delta2);
    fprintf(l->report,
            "rounding to %s removes %.0f %% of the adapter's change to %s and adds noise of %.3g times its norm%s\n",
            format, 100 * lost, matrices, noise_of(r),
            lost > MOST_LOST && !x->trained ? "; merged-bf16 and peft keep the change" : "");
    if (lost <= MOST_LOST) return;
    log_warn("the rounding of %s to %s loses %.0f %% of the adapter's change to %s (limit of this warning: %.0f %%): "
             "%s",
             export_format_name(x->format), format, 100 * lost, matrices, 100 * MOST_LOST,
             x->trained ? "train with lora.targets = experts, whose change this export keeps"
                        : "export merged-bf16, or peft to keep a separate adapter");
}

static void warn_of_roundings(const struct export *x, const struct export_diff *l)
{
    static const char *const names[EXPORT_FORMATS] = {
        [EXPORT_MERGED_MXFP4] = "MXFP4", [EXPORT_MERGED_NVFP4] = "NVFP4", [EXPORT_MERGED_FP8] = "FP8"};
    const bool gguf = x->format == EXPORT_GGUF_MODEL, mxfp4 = x->run.arch.transposed_experts;
    const char *blocks = ggml_layout(x->ggml)->name;
    warn_of_rounding(x, l, &l->experts, !gguf ? names[x->format] : mxfp4 ? "MXFP4" : blocks, "the experts");
    warn_of_rounding(x, l, &l->others, gguf ? blocks : "FP8", "attention and shared experts");
}

static int verify_merged(struct export *x, struct export_diff *diff, struct err *err)
{
    struct merged merged;
    if (merged_open(&merged, x, err)) return err_prefix(err, "verification");
    struct stream s = {.x = x, .merged = &merged, .diff = diff};
    int rc = stream_run(&s, err);
    if (!rc) rc = verify_inputs(x, &merged.st, diff, err);
    if (!rc) warn_of_roundings(x, diff);
    if (!rc) rc = judge(&s, err);
    merged_close(&merged);
    return rc;
}

int verify_export(struct export *x, struct err *err)
{
    struct export_diff diff = {.report = x->report};
    return x->format < EXPORT_MERGED_BF16 ? verify_adapter(x, &diff, err) : verify_merged(x, &diff, err);
}
