/* qat.c - fake quantisation of the projections of a model. */
#include "model/qat.h"

#include <math.h>
#include <stdio.h>

#include "model/layers/input_quant.h"
#include "model/layer.h"

/* Matrices of a product on this rank, and the values of amax that belong to them. */
static int64_t n_held(const struct adapters *ad, const struct product *p)
{
    return p->experts ? p->n_exp / ad->par.ep->world : p->n_exp;
}
static int64_t n_amax(const struct adapters *ad, const struct product *p) { return n_held(ad, p) * p->n_target; }

static bool is_chosen(const struct qat_options *opt, const struct product *p)
{
    return p->n_out && (p->experts || opt->all);
}
static bool is_quantised(const struct qat_options *opt, const struct product *p)
{
    return opt->weights.bits && is_chosen(opt, p);
}
static bool has_input(const struct qat_options *opt, const struct product *p)
{
    return opt->inputs.bits && is_chosen(opt, p);
}

static const char *product_name(const struct product *p) { return lora_target_name(p->target[0]); }

static int check(const struct qat_options *opt, const struct adapters *ad, const struct product *p, int64_t layer,
                 struct err *err)
{
    const struct fakequant *const formats[] = {&opt->weights, &opt->inputs};
    for (int i = 0; i < MT_LEN(formats); i++)
        if (formats[i]->block && p->n_in % formats[i]->block)
            return err_set(err,
                           "quant.%s: %s of layer %lld has rows of %lld elements, which blocks of %d do not divide: "
                           "choose a format with other blocks",
                           i ? "activations" : "weights", product_name(p), (long long)layer, (long long)p->n_in,
                           formats[i]->block);
    if (ad->dora)
        return err_set(err, "quant.weights or quant.activations with DoRA (lora.dora): the magnitudes are not in the "
                            "quantised matrix; set both to none");
    if (opt->weights.bits && opt->merged && !p->experts && ad->dropout > 0)
        return err_set(err,
                       "lora.dropout = %g with quant.targets = all: a merged adapter has no separate input to drop; "
                       "set lora.dropout = 0 or quant.mode = base",
                       ad->dropout);
    return 0;
}

/* Whether a run keeps the weights' amax. Otherwise it computes them again, from the adapters or the weights. */
static bool keeps(const struct qat_options *opt)
{
    return opt->fixed && opt->merged && opt->weights.bits && fakequant_reads_amax(&opt->weights);
}

/* Adds a product's rows to the table; `off`: its first amax. Targets of one product share their input's amax. */
static void keep(const struct adapters *ad, struct amax_table *t, const struct product *p, int64_t layer, int64_t off,
                 bool input)
{
    for (int k = 0; k < p->n_target; k++) {
        struct amax_row *row = &t->rows[t->n_rows++];
        *row = (struct amax_row){.input = input,
                                 .n_held = n_held(ad, p),
                                 .n_exp = p->n_exp,
                                 .off = input ? off : off + k,
                                 .stride = input ? 0 : p->n_target};
        snprintf(row->name, sizeof(row->name), "layers.%lld.%s.%s", (long long)layer, lora_target_name(p->target[k]),
                 input ? "input_amax" : "amax");
    }
}

static int count(struct qat *q, const struct arch *a, const struct adapters *ad, struct err *err)
{
    struct product p[LAYER_PRODUCTS];
    for (int64_t l = 0; l < a->n_layer; l++) {
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            if (!is_quantised(&q->opt, &p[i]) && !has_input(&q->opt, &p[i])) continue;
            if (check(&q->opt, ad, &p[i], l, err)) return -1;
            if (is_quantised(&q->opt, &p[i])) q->n_amax += n_amax(ad, &p[i]);
            q->n_input += has_input(&q->opt, &p[i]);
        }
    }
    return 0;
}

/* The quantisation of one product, whose amax begins at element `at`. */
static struct proj_quant describe(const struct qat *q, const struct adapters *ad, const struct product *p, int64_t at)
{
    struct proj_quant out = {.format = q->opt.weights, .n_part = p->n_target};
    for (int i = 0; i < out.n_part; i++) out.part_rows[i] = p->rows[i];
    out.amax = tensor_rows(q->amax, at, n_amax(ad, p));
    return out;
}

int qat_open(struct qat *q, struct device *dev, const struct arch *a, struct adapters *ad,
             const struct qat_options *opt, struct err *err)
{
    struct product p[LAYER_PRODUCTS];
    *q = (struct qat){.opt = *opt};
    mem_free(ad->amax.rows); /* of an earlier call, which measured the memory */
    ad->amax = (struct amax_table){0};
    if (count(q, a, ad, err)) return -1;
    if (!q->n_amax && !q->n_input) return 0;
    q->amax = arena_tensor_1d(&dev->state, DT_F32, q->n_amax + q->n_input);
    if (keeps(opt) || q->n_input) {
        ad->amax.flat = q->amax;
        ad->amax.weights = keeps(opt);
        ad->amax.rows = mem_array(2 * a->n_layer * LAYER_PRODUCTS * PRODUCT_TARGETS, sizeof(*ad->amax.rows));
    }
    int64_t at = 0, input = q->n_amax;
    for (int64_t l = 0; l < a->n_layer; l++) {
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            struct adapter *one = &ad->layers[l].of[i];
            if (is_quantised(opt, &p[i])) {
                one->quant = describe(q, ad, &p[i], at);
                one->lora.merged = opt->merged;
                if (keeps(opt)) keep(ad, &ad->amax, &p[i], l, at, false);
                at += n_amax(ad, &p[i]);
            }
            if (has_input(opt, &p[i])) keep(ad, &ad->amax, &p[i], l, input++, true);
        }
    }
    qat_use_inputs(q, a, ad, QAT_INPUTS_QUANTISED);
    return 0;
}

bool qat_is_adapted(const struct qat *q, const struct arch *a, const struct adapters *ad)
{
    struct product p[LAYER_PRODUCTS];
    bool any = false;
    for (int64_t l = 0; l < a->n_layer; l++) {
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++)
            for (int k = 0; is_quantised(&q->opt, &p[i]) && k < p[i].n_target; k++)
                any = any || adapters_find(ad, l, p[i].target[k], false);
    }
    return any;
}

/* Every possible scale of an MXFP4 block has codes for the block's values, so they do not change. */
bool qat_is_identity(const struct qat *q, const struct arch *a, const struct adapters *ad, enum weight_format experts)
{
    const struct fakequant *w = &q->opt.weights;
    return w->bits && w->kind == FQ_MXFP4 && !q->opt.all && format_row(experts, false)->binary &&
           !(q->opt.merged && qat_is_adapted(q, a, ad));
}

void qat_free(struct qat *q)
{
    mem_free(q->seen);
    q->seen = NULL;
}

void qat_refresh(struct qat *q, struct device *dev, const struct arch *a, struct adapters *ad,
                 struct layer_weights *layers)
{
    if (!q->n_amax) return;
    const bool kept = ad->amax.weights && !q->waiting;
    const bool once = !q->opt.merged || !fakequant_reads_amax(&q->opt.weights); /* blocks: for qat_check alone */
    if (kept ? ad->amax.known : q->version && (once || q->version == ad->version)) return;
    for (int64_t l = 0; l < a->n_layer; l++) {
        struct product p[LAYER_PRODUCTS];
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            const struct proj *proj = layer_proj(&layers[l], &p[i]);
            if (is_quantised(&q->opt, &p[i])) op_proj_amax(dev, proj->quant.amax, proj);
        }
    }
    q->version = ad->version;
    ad->amax.known = true;
}

int qat_check(const struct qat *q, struct device *dev, const struct arch *a, const struct adapters *ad, struct err *err)
{
    if (!q->version || dev->dry_run) return 0;
    float *amax = mem_array(q->n_amax, sizeof(*amax)), *at = amax;
    int status = 0;
    device_get_f32(dev, amax, tensor_rows(q->amax, 0, q->n_amax));
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

/* ---- inputs ---- */

void qat_use_inputs(struct qat *q, const struct arch *a, struct adapters *ad, enum qat_inputs use)
{
    struct product p[LAYER_PRODUCTS];
    int64_t n = 0;
    for (int64_t l = 0; l < a->n_layer && q->n_input; l++) {
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            if (!has_input(&q->opt, &p[i])) continue;
            struct input_quant in = {.amax = tensor_rows(q->amax, q->n_amax + n, 1)};
            if (use == QAT_INPUTS_QUANTISED) in.format = q->opt.inputs;
            if (use == QAT_INPUTS_SEEN) in.seen = &q->seen[n];
            ad->layers[l].of[i].in = in;
            n++;
        }
    }
}

void qat_calibrate_begin(struct qat *q) { q->seen = mem_array(q->n_input, sizeof(*q->seen)); }

/* Takes the largest magnitudes over all ranks: with expert parallelism an input may have rows on one rank alone. */
static void share_seen(struct qat *q, struct comm *all)
{
    struct input_range *of = mem_array(q->n_input * all->world, sizeof(*of));
    comm_host_gather(all, of, q->seen, q->n_input * (int64_t)sizeof(*of));
    for (int64_t i = 0; i < q->n_input; i++) {
        q->seen[i] = of[i];
        for (int r = 1; r < all->world; r++) {
            const struct input_range *other = &of[r * q->n_input + i];
            q->seen[i].amax = MT_MAX(q->seen[i].amax, other->amax);
            q->seen[i].n_bad += other->n_bad;
        }
    }
    mem_free(of);
}

static int check_seen(const struct input_range *seen, const struct product *p, int64_t layer, int64_t n_batch,
                      struct err *err)
{
    if (seen->n_bad > 0)
        return err_set(err,
                       "quant.activations: %.0f inputs of %s in layer %lld are NaN or infinite in the calibration of "
                       "%lld micro-batches: check the base model's weights, the data and lora.init_from",
                       seen->n_bad, product_name(p), (long long)layer, (long long)n_batch);
    if (!(seen->amax > 0))
        return err_set(err,
                       "quant.activations: the inputs of %s in layer %lld had no rows, or zeros alone, in the "
                       "calibration of %lld micro-batches: raise quant.calibration, or check the model's "
                       "weights",
                       product_name(p), (long long)layer, (long long)n_batch);
    return 0;
}

int qat_calibrate_end(struct qat *q, struct device *dev, const struct arch *a, struct adapters *ad, int64_t n_batch,
                      struct err *err)
{
    struct product p[LAYER_PRODUCTS];
    float *amax = mem_array(q->n_input, sizeof(*amax));
    int64_t n = 0;
    int rc = 0;
    share_seen(q, ad->par.all);
    for (int64_t l = 0; l < a->n_layer && !rc; l++) {
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS && !rc; i++) {
            if (!has_input(&q->opt, &p[i])) continue;
            rc = check_seen(&q->seen[n], &p[i], l, n_batch, err);
            amax[n] = q->seen[n].amax;
            n++;
        }
    }
    if (!rc) device_set_f32(dev, tensor_rows(q->amax, q->n_amax, q->n_input), amax);
    ad->amax.calibrated = !rc;
    mem_free(amax);
    qat_use_inputs(q, a, ad, QAT_INPUTS_QUANTISED);
    qat_free(q);
    return rc;
}

/* ---- amax that a run keeps ---- */

int64_t qat_n_kept(const struct adapters *ad)
{
    int64_t n = 0;
    for (int64_t i = 0; i < ad->amax.n_rows; i++) n += ad->amax.rows[i].n_exp;
    return n;
}

/* Copies between a host array of all experts and `part`, the layout of flat on rank `rank` of par.ep. */
static void copy_part(const struct amax_table *t, int rank, float *whole, float *part, bool to_whole)
{
    for (int64_t i = 0; i < t->n_rows; whole += t->rows[i++].n_exp) {
        const struct amax_row *row = &t->rows[i];
        float *own = whole + (row->n_held < row->n_exp ? rank * row->n_held : 0);
        for (int64_t e = 0; e < row->n_held; e++) {
            float *at = part + row->off + e * row->stride;
            if (to_whole)
                own[e] = *at;
            else
                *at = own[e];
        }
    }
}

float *qat_gather(const struct adapters *ad, struct device *dev)
{
    struct comm *ep = ad->par.ep;
    if (!ad->amax.rows || ad->par.dp->rank != 0) return NULL;
    const int64_t n = tensor_count(ad->amax.flat), bytes = n * (int64_t)sizeof(float);
    float *host = ad->par.all->rank == 0 ? mem_array(qat_n_kept(ad), sizeof(*host)) : NULL;
    float *part = mem_array(n, sizeof(*part));
    device_get_f32(dev, part, ad->amax.flat);
    for (int r = 0; r < ep->world; r++) {
        if (ep->rank == 0 && r > 0) comm_recv(ep, r, part, bytes);
        if (ep->rank == 0) copy_part(&ad->amax, r, host, part, true);
        if (ep->rank == r && r > 0) comm_send(ep, 0, part, bytes);
    }
    mem_free(part);
    return host;
}

void qat_put(struct adapters *ad, struct device *dev, const float *host)
{
    float *part = mem_array(tensor_count(ad->amax.flat), sizeof(*part));
    device_get_f32(dev, part, ad->amax.flat);
    copy_part(&ad->amax, ad->par.ep->rank, (float *)(uintptr_t)host, part, false);
    device_set_f32(dev, ad->amax.flat, part);
    ad->amax.known = ad->amax.calibrated = true;
    mem_free(part);
}
