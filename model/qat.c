/* qat.c - fake quantisation of the projections of a model. */
#include "model/qat.h"

#include <math.h>

#include "model/layer.h"

/* Matrices of a product on this rank, and the values of amax that belong to them. */
static int64_t n_held(const struct adapters *ad, const struct product *p)
{
    return p->experts ? p->n_exp / ad->par.ep->world : p->n_exp;
}
static int64_t n_amax(const struct adapters *ad, const struct product *p)
{
    return n_held(ad, p) * MT_MAX(p->n_target, 1);
}

static bool is_quantised(const struct qat_options *opt, const struct product *p)
{
    return opt->weights.bits && p->n_out && (p->experts || opt->all);
}

static const char *product_name(const struct product *p)
{
    return p->n_target ? lora_target_name(p->target[0]) : "the feed-forward network";
}

static int check(const struct qat_options *opt, const struct adapters *ad, const struct product *p, int64_t layer,
                 struct err *err)
{
    if (opt->weights.block && p->n_in % opt->weights.block)
        return err_set(err,
                       "quant.weights: %s of layer %lld has rows of %lld elements, which blocks of %d do not divide: "
                       "choose a format with other blocks",
                       product_name(p), (long long)layer, (long long)p->n_in, opt->weights.block);
    if (opt->merged && !p->experts && ad->dropout > 0)
        return err_set(err,
                       "lora.dropout = %g with quant.targets = all: a merged adapter has no input of its own to drop; "
                       "set lora.dropout = 0 or quant.mode = base",
                       ad->dropout);
    return 0;
}

/* The quantisation of one product; its amax are the next of q->amax. */
static struct proj_quant describe(struct qat *q, const struct adapters *ad, const struct product *p)
{
    struct proj_quant out = {.format = q->opt.weights, .n_part = MT_MAX(p->n_target, 1)};
    for (int i = 0; i < out.n_part; i++) out.part_rows[i] = p->n_target ? p->rows[i] : p->n_out;
    const int64_t n = n_amax(ad, p);
    float *data = q->amax.data;
    out.amax = tensor_1d(data ? data + q->n_amax : NULL, DT_F32, n);
    q->n_amax += n;
    return out;
}

int qat_open(struct qat *q, struct device *dev, const struct arch *a, struct adapters *ad,
             const struct qat_options *opt, struct err *err)
{
    struct product p[LAYER_PRODUCTS];
    int64_t n = 0;
    *q = (struct qat){.opt = *opt};
    for (int64_t l = 0; l < a->n_layer && opt->weights.bits; l++) {
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            if (!is_quantised(opt, &p[i])) continue;
            if (check(opt, ad, &p[i], l, err)) return -1;
            n += n_amax(ad, &p[i]);
        }
    }
    if (!n) return 0;
    q->amax = arena_tensor_1d(&dev->state, DT_F32, n);
    for (int64_t l = 0; l < a->n_layer; l++) {
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            struct adapter *one = &ad->layers[l].of[i];
            if (!is_quantised(opt, &p[i])) continue;
            one->quant = describe(q, ad, &p[i]);
            one->lora.merged = opt->merged;
        }
    }
    return 0;
}

void qat_refresh(struct qat *q, struct device *dev, const struct arch *a, const struct adapters *ad,
                 struct layer_weights *layers)
{
    const bool moves = q->opt.merged && !q->opt.fixed;
    if (!q->amax.ndim || !fakequant_reads_amax(&q->opt.weights)) return;
    if (q->version && (!moves || q->version == ad->version)) return;
    for (int64_t l = 0; l < a->n_layer; l++) {
        struct product p[LAYER_PRODUCTS];
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            const struct proj *proj = layer_proj(&layers[l], &p[i]);
            if (is_quantised(&q->opt, &p[i])) op_proj_amax(dev, proj->quant.amax, proj);
        }
    }
    q->version = ad->version;
}

int qat_check(const struct qat *q, struct device *dev, const struct arch *a, const struct adapters *ad, struct err *err)
{
    if (!q->version || dev->dry_run) return 0;
    float *amax = mem_array(q->n_amax, sizeof(*amax)), *at = amax;
    int status = 0;
    device_get_f32(dev, amax, q->amax);
    for (int64_t l = 0; l < a->n_layer && !status; l++) {
        struct product p[LAYER_PRODUCTS];
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS && !status; i++) {
            if (!is_quantised(&q->opt, &p[i])) continue;
            for (int64_t e = 0; e < n_amax(ad, &p[i]) && !status; e++)
                if (!isfinite(at[e]))
                    status = err_set(err,
                                     "quant.weights: %s of layer %lld has a weight that is not finite (matrix %lld): "
                                     "the checkpoint or the adapter is damaged",
                                     product_name(&p[i]), (long long)l, (long long)e);
            at += n_amax(ad, &p[i]);
        }
    }
    mem_free(amax);
    return status;
}
