/* lora.c - plans, allocates and initialises the adapters.
 *
 * Flat layout of a layer, trained targets only:
 *     [q.a k.a v.a] [q.b k.b v.b] [o.a] [o.b] [gate_up.a] [gate_up.b] [down.a] [down.b]
 * Latent attention has [q_a.a kv_a.a] [q_a.b kv_a.b] [o.a] [o.b] [kv_b.a] [kv_b.b] [q_b.a] [q_b.b] before the experts.
 * Compressed attention has [q_a.a kv.a] [q_a.b kv.b] [o_b.a] [o_b.b] [q_b.a] [q_b.b] before the experts.
 * Gated DeltaNet has [in_qkv.a in_z.a] [in_qkv.b in_z.b] [in_b.a in_a.a] [in_b.b in_a.b] [out.a] [out.b] before the
 * experts; with fused matrices [in_qkvz.a] [in_qkvz.b] [in_ba.a] [in_ba.b] [out.a] [out.b].
 * - Layers follow each other. With expert parallelism the attention of all layers comes first, then all experts.
 * - Each bracket begins at a multiple of 64 elements. The padding is zero, so that ops can read whole cache lines and
 *   the gradient norm can run over the whole array.
 * - Members of a bracket are contiguous: q, k and v share one fused product, and their adapters are one struct lora.
 * If the device layout and the logical layout (lora.h) are equal, there is one table and no conversion. */
#include "model/lora.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/threads.h"
#include "model/layer.h"
#include "optim/host_update.h"

#define GROUP_ALIGN 64
enum { FACTOR_A, FACTOR_B, FACTOR_M, FACTORS };
#define PARAMS_PER_LAYER (FACTORS * LORA_TARGETS)

int64_t lora_param_count(const struct lora_param *p) { return p->n_exp * p->rows * p->cols; }

void lora_param_name(const struct lora_param *p, char name[64])
{
    snprintf(name, 64, "layers.%lld.%s.%s", (long long)p->layer, lora_target_name(p->target),
             p->is_m   ? "magnitude"
             : p->is_b ? "lora_B"
                       : "lora_A");
}

void layer_products(const struct arch *a, int64_t layer, struct product p[LAYER_PRODUCTS])
{
    memset(p, 0, LAYER_PRODUCTS * sizeof(*p));
    if (a->mixer[layer]) a->mixer[layer]->products(a, layer, p);
    if (a->ffn[layer]) a->ffn[layer]->products(a, layer, p + MIXER_PRODUCTS);
}

bool lora_find_product(const struct arch *a, int64_t layer, enum lora_target t, struct product *out, int64_t *rows)
{
    struct product p[LAYER_PRODUCTS];
    layer_products(a, layer, p);
    for (int i = 0; i < LAYER_PRODUCTS; i++)
        for (int k = 0; k < p[i].n_target; k++)
            if (p[i].target[k] == t) {
                *out = p[i];
                *rows = p[i].rows[k];
                return true;
            }
    return false;
}

/* Finds the targets that share a product; the device layout gives them one lora rank. */
static void find_fused(struct adapters *ad, const struct arch *a)
{
    struct product p[LAYER_PRODUCTS];
    for (int64_t l = 0; l < a->n_layer; l++) {
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++)
            for (int k = 0; k < p[i].n_target * p[i].n_target; k++)
                ad->fused[p[i].target[k / p[i].n_target]] |= 1u << p[i].target[k % p[i].n_target];
    }
}

int64_t adapters_padded_rank(const struct adapters *ad, enum lora_target t, int64_t multiple)
{
    const unsigned others = ad->fused[t] & ~(1u << t);
    int64_t r = others ? 0 : ad->rank[t];
    for (enum lora_target s = LORA_Q; s < LORA_TARGETS && others; s++)
        if (ad->target[s] && ad->fused[t] & 1u << s) r = MT_MAX(r, ad->rank[s]);
    return (r + multiple - 1) / multiple * multiple;
}

static void pad_ranks(struct adapters *ad, int64_t multiple)
{
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) ad->padded_rank[t] = adapters_padded_rank(ad, t, multiple);
}

int64_t adapters_trained_ranks(const struct adapters *ad, const struct product *q, enum lora_target t)
{
    const int64_t all = q->n_exp * (ad->init ? ad->rank[t] / 2 : ad->rank[t]);
    if (!q->experts || !(ad->budget > 0)) return all;
    return MT_MAX(1, (int64_t)floor(ad->budget * (double)all + 1e-9)); /* 0.29 * 100 is below 29 */
}

int64_t adapters_max_rank(const struct adapters *ad)
{
    int64_t most = 0;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (ad->target[t]) most = MT_MAX(most, ad->rank[t]);
    return most;
}

void adapters_ranks_text(const struct adapters *ad, char text[LORA_RANKS_TEXT])
{
    int n = 0;
    text[0] = '\0';
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (ad->target[t] && ad->rank[t] != ad->r)
            n += snprintf(text + n, (size_t)(LORA_RANKS_TEXT - n), "%s%s=%lld", n ? "," : "", lora_target_name(t),
                          (long long)ad->rank[t]);
}

void adapters_alphas_text(const struct adapters *ad, char text[LORA_RANKS_TEXT])
{
    int n = 0;
    text[0] = '\0';
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (ad->target[t] && fabs(ad->alpha_of[t] - ad->alpha) > 0)
            n += snprintf(text + n, (size_t)(LORA_RANKS_TEXT - n), "%s%s=%.17g", n ? "," : "", lora_target_name(t),
                          ad->alpha_of[t]);
}

/* Reads targets, ranks and scales. */
static int read_options(struct adapters *ad, const struct arch *a, const struct lora_options *opt, struct err *err)
{
    struct lora_model model = {.family = a->family};
    struct lora_choice c;
    struct product q;
    int64_t n;
    for (int64_t l = 0; l < a->n_layer; l++)
        for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
            if (lora_find_product(a, l, t, &q, &n) && q.n_exp > 0)
                *(q.frozen ? &model.frozen[t] : &model.has[t]) = true;
    if (lora_options_read(&c, &model, opt, err)) return -1;
    ad->init = opt->init;
    ad->dora = opt->dora;
    ad->budget = opt->budget;
    const int64_t parts = ad->init ? 2 : 1; /* of the ranks: trained, frozen */
    const double more = ad->rslora ? sqrt((double)parts) : (double)parts;
    ad->r *= parts;
    ad->alpha *= more;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
        const double r = (double)c.rank[t];
        ad->target[t] = c.target[t];
        ad->rank[t] = parts * c.rank[t];
        ad->alpha_of[t] = more * c.alpha[t];
        ad->scale[t] = (float)(c.alpha[t] / (ad->rslora ? sqrt(r) : r));
    }
    return 0;
}

/* Adds A, B or the magnitudes of target i of product q. */
static void add_param(struct adapters *ad, const struct comm *ep, int64_t layer, const struct product *q, int i,
                      int factor)
{
    const enum lora_target t = q->target[i];
    const bool is_b = factor != FACTOR_A;
    if (!ad->target[t] || (factor == FACTOR_M && !ad->dora)) return;
    const int64_t held = q->experts ? q->n_exp / ep->world : q->n_exp;
    struct lora_param *p = &ad->params[ad->n_params++];
    *p = (struct lora_param){.target = t, .is_b = is_b, .layer = layer, .off = ad->n_flat, .n_exp = held};
    p->is_m = factor == FACTOR_M;
    p->experts = q->experts;
    p->first_exp = q->experts ? held * ep->rank : 0;
    p->rows = is_b ? q->rows[i] : ad->padded_rank[t];
    p->cols = p->is_m ? 1 : is_b ? ad->padded_rank[t] : q->n_in;
    if (is_b) p->order = q->order;
    ad->n_values += p->is_m ? q->rows[i] : adapters_trained_ranks(ad, q, t) * (is_b ? q->rows[i] : q->n_in);
    ad->n_flat += lora_param_count(p);
}

static void end_group(struct adapters *ad) { ad->n_flat = (ad->n_flat + GROUP_ALIGN - 1) / GROUP_ALIGN * GROUP_ALIGN; }

/* Adds the parameters of a layer: replicated ones (common), experts, or both. */
static void plan_layer(struct adapters *ad, const struct arch *a, const struct comm *ep, int64_t layer, bool common,
                       bool experts)
{
    struct product q[LAYER_PRODUCTS];
    layer_products(a, layer, q);
    for (int i = 0; i < FACTORS * LAYER_PRODUCTS; i++) {
        const struct product *one = &q[i / FACTORS];
        if (one->experts ? !experts : !common) continue;
        for (int k = 0; k < one->n_target; k++) add_param(ad, ep, layer, one, k, i % FACTORS);
        end_group(ad);
    }
}

int adapters_plan(struct adapters *ad, const struct arch *a, const struct lora_options *opt, struct err *err)
{
    *ad = (struct adapters){.r = opt->r, .alpha = opt->alpha, .dropout = opt->dropout, .rslora = opt->rslora};
    find_fused(ad, a);
    if (read_options(ad, a, opt, err)) return -1;
    pad_ranks(ad, 1);
    ad->transposed = a->transposed_experts;
    ad->nested = a->nested;
    ad->names = a->names;
    ad->n_layer = ad->lowest_layer = a->n_layer;
    ad->layer_on = mem_array(a->n_layer, sizeof(*ad->layer_on));
    ad->params = mem_array(a->n_layer * PARAMS_PER_LAYER, sizeof(*ad->params));
    ad->layers = mem_array(a->n_layer, sizeof(*ad->layers));
    ad->groups = mem_array(a->n_layer * PARAMS_PER_LAYER, sizeof(*ad->groups));
    ad->opt.kind = &optimizer_adamw;
    if (lora_options_layers(ad->layer_on, ad->n_layer, opt->layers, err)) {
        adapters_free(ad);
        return -1;
    }
    for (int64_t n = 0; n < ad->n_layer; n++) {
        if (!ad->layer_on[n]) continue;
        const int64_t before = ad->n_params;
        plan_layer(ad, a, &comm_alone, n, true, true);
        ad->layer_on[n] = ad->n_params > before;
        if (ad->layer_on[n]) ad->lowest_layer = MT_MIN(ad->lowest_layer, n);
    }
    memcpy(ad->asked, ad->target, sizeof(ad->asked));
    memset(ad->target, 0, sizeof(ad->target));
    for (int64_t i = 0; i < ad->n_params; i++) ad->target[ad->params[i].target] = true;
    const bool any = ad->n_params > 0, routed = ad->target[LORA_UP] || ad->target[LORA_DOWN];
    if (any && (routed || !(ad->budget > 0))) return adapters_layout(ad, a, 1, &parallel_alone), 0;
    adapters_free(ad);
    if (any)
        return err_set(
            err,
            "lora.r_by = routing distributes ranks of routed experts, and lora.targets = %s adapts none: add "
            "experts, or set lora.r_by = target",
            opt->targets);
    return err_set(err,
                   "lora.targets: \"%s\" matches nothing in layers %s: set lora.layers, or lora.targets = all-linear",
                   opt->targets, opt->layers[0] ? opt->layers : "all");
}

/* Assigns offsets layer by layer. With expert parallelism, replicated parameters of all layers come first. */
static void assign_offsets(struct adapters *ad, const struct arch *a, const struct comm *ep)
{
    const bool divided = ep->world > 1;
    ad->n_params = ad->n_values = ad->n_flat = 0;
    for (int64_t n = 0; n < ad->n_layer; n++) {
        if (ad->layer_on[n]) plan_layer(ad, a, ep, n, true, !divided);
    }
    ad->n_common = ad->n_flat;
    for (int64_t n = 0; n < ad->n_layer; n++)
        if (ad->layer_on[n] && divided) plan_layer(ad, a, ep, n, false, true);
}

/* The logical layout, or NULL if it equals the device layout. */
static struct adapters *new_logical(const struct adapters *ad, const struct arch *a)
{
    bool same = !ad->ep;
    for (int64_t i = 0; i < ad->n_params; i++) same &= !ad->params[i].order.n_group;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        same &= !ad->target[t] || ad->padded_rank[t] == ad->rank[t];
    if (same) return NULL;
    struct adapters *logical = mem_alloc(sizeof(*logical));
    *logical = *ad;
    logical->logical = NULL;
    logical->ep = false;
    memcpy(logical->padded_rank, ad->rank, sizeof(logical->padded_rank));
    logical->params = mem_array(ad->n_layer * PARAMS_PER_LAYER, sizeof(*logical->params));
    assign_offsets(logical, a, &comm_alone);
    for (int64_t i = 0; i < logical->n_params; i++) logical->params[i].order = (struct row_order){.n_group = 0};
    return logical;
}

static void free_logical(struct adapters *ad)
{
    if (ad->logical) mem_free(ad->logical->params);
    mem_free(ad->logical);
    ad->logical = NULL;
}

void adapters_layout(struct adapters *ad, const struct arch *a, int64_t multiple, const struct parallel *par)
{
    free_logical(ad);
    ad->par = *par;
    ad->ep = par->ep->world > 1;
    pad_ranks(ad, multiple);
    assign_offsets(ad, a, par->ep);
    ad->logical = new_logical(ad, a);
}

/* A view of a flat array at off: [rows, cols], or [n, rows, cols] if n > 0; data is NULL in a dry run. */
static struct tensor view(struct tensor flat, int64_t off, int64_t n, int64_t rows, int64_t cols)
{
    void *data = flat.data ? (char *)flat.data + off * dtype_size(flat.dtype) : NULL;
    return n ? tensor_3d(data, flat.dtype, n, rows, cols) : tensor_2d(data, flat.dtype, rows, cols);
}

const struct lora_param *adapters_find(const struct adapters *ad, int64_t layer, enum lora_target t, bool is_b)
{
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        if (p->layer == layer && p->target == t && p->is_b == is_b && !p->is_m) return p;
    }
    return NULL;
}

const struct lora_param *adapters_find_magnitude(const struct adapters *ad, int64_t layer, enum lora_target t)
{
    const struct lora_param *b = ad->dora ? adapters_find(ad, layer, t, true) : NULL;
    while (b && !(b->is_m && b->target == t)) b++; /* the magnitudes of a product follow its B */
    return b;
}

const struct lora_param *adapters_match(const struct adapters *other, const struct lora_param *p)
{
    return p->is_m ? adapters_find_magnitude(other, p->layer, p->target)
                   : adapters_find(other, p->layer, p->target, p->is_b);
}

/* Rows of the magnitudes of parameters before p. */
static int64_t rows_before(const struct adapters *ad, const struct lora_param *p)
{
    int64_t n = 0;
    for (const struct lora_param *q = ad->params; q < p; q++) n += q->is_m ? q->rows : 0;
    return n;
}

static struct tensor column(struct tensor flat, int64_t off, int64_t n)
{
    return tensor_1d(flat.data ? (char *)flat.data + off * dtype_size(flat.dtype) : NULL, flat.dtype, n);
}

/* The views of one product's adapter: its targets are consecutive output columns. */
static struct adapter view_adapter(struct adapters *ad, int64_t layer, const struct product *q)
{
    const struct lora_param *pa = NULL, *pb = NULL;
    struct adapter out = {.lora = {.r = 0}};
    struct lora *l = &out.lora;
    int64_t col = 0, rows = 0;
    for (int i = 0; i < q->n_target; col += q->rows[i++]) {
        const struct lora_param *p = adapters_find(ad, layer, q->target[i], false);
        if (!p) continue;
        if (!pa) pa = p, pb = adapters_find(ad, layer, q->target[i], true);
        l->scale[l->n_seg] = ad->scale[q->target[i]];
        l->seg_first[l->n_seg] = col;
        l->seg_cols[l->n_seg++] = q->rows[i];
        rows += q->rows[i];
    }
    if (!pa) return out;
    const int64_t r = l->r = ad->padded_rank[q->target[0]], n_exp = q->experts ? pa->n_exp : 0;
    l->dropout = q->experts ? 0 : (float)ad->dropout;
    l->a = view(ad->working, pa->off, n_exp, l->n_seg * r, pa->cols);
    l->b = view(ad->working, pb->off, n_exp, rows, r);
    l->master_a = view(ad->opt.param, pa->off, n_exp, l->n_seg * r, pa->cols);
    l->master_b = view(ad->opt.param, pb->off, n_exp, rows, r);
    out.grad.a = view(ad->opt.grad, pa->off, n_exp, l->n_seg * r, pa->cols);
    out.grad.b = view(ad->opt.grad, pb->off, n_exp, rows, r);
    if (ad->dora) {
        const struct lora_param *m = adapters_find_magnitude(ad, layer, pb->target);
        out.dora = (struct dora){.m = column(ad->opt.param, m->off, rows),
                                 .norm = column(ad->norms, rows_before(ad, m), rows)};
        if (ad->opt.grad.ndim) out.dora.grad = column(ad->opt.grad, m->off, rows);
    }
    return out;
}

/* Divides the parameters, which are sorted by offset, into as few groups as possible. */
static void find_groups(struct adapters *ad)
{
    struct optimizer *opt = &ad->opt;
    opt->n_group = 0;
    for (const struct lora_param *p = ad->params; p < ad->params + ad->n_params; p++) {
        const struct param_group g = {p->off, lora_param_count(p), p->layer, ad->ep && p->experts,
                                      p->is_b && opt->lr_ratio_b > 0 ? opt->lr_ratio_b : 1};
        struct param_group *last = opt->n_group ? &ad->groups[opt->n_group - 1] : NULL;
        if (last && last->layer == g.layer && last->divided == g.divided && last->lr_factor == g.lr_factor)
            last->n = g.first + g.n - last->first;
        else
            ad->groups[opt->n_group++] = g;
    }
    opt->group = ad->groups;
}

static struct tensor flat_array(struct device *dev, struct arena *arena, enum dtype dtype, int64_t n)
{
    const struct tensor flat = arena_tensor_1d(arena, dtype, n);
    if (!dev->dry_run) device_zero(dev, flat);
    return flat;
}

/* Allocates masters and working copies; with `training` also gradients and moments. */
static void alloc(struct adapters *ad, struct device *dev, const struct arch *a, bool training)
{
    struct optimizer *opt = &ad->opt;
    const bool copy = dev->act_dtype != dev->stat_dtype || dev->round_bf16;
    if (!opt->n_state) opt->n_state = ad->n_flat;
    opt->param = flat_array(dev, opt->cpu_update ? &dev->host : &dev->state, dev->stat_dtype, ad->n_flat);
    if (training) {
        opt->grad = flat_array(dev, &dev->state, dev->stat_dtype, ad->n_flat);
        optimizer_alloc(opt, dev);
    }
    if (ad->dora) ad->norms = flat_array(dev, &dev->state, dev->stat_dtype, rows_before(ad, ad->params + ad->n_params));
    ad->working = copy ? flat_array(dev, &dev->state, dev->act_dtype, ad->n_flat) : opt->param;
    if (opt->cpu_update) host_update_open(opt, dev, ad->working, ad->n_layer);
    find_groups(ad);
    for (int64_t n = 0; n < ad->n_layer; n++) {
        struct product q[LAYER_PRODUCTS];
        layer_products(a, n, q);
        for (int i = 0; i < LAYER_PRODUCTS; i++) ad->layers[n].of[i] = view_adapter(ad, n, &q[i]);
    }
}

void adapters_alloc(struct adapters *ad, struct device *dev, const struct arch *a) { alloc(ad, dev, a, true); }

void adapters_alloc_frozen(struct adapters *ad, struct device *dev, const struct arch *a) { alloc(ad, dev, a, false); }

/* The random values of an A. */
struct random_a {
    const struct lora_param *p;
    int64_t r; /* rows of an expert that have values; the others are padding */
    uint64_t key;
    float *values; /* of all adapters */
};

static void fill_expert(void *arg, int64_t e)
{
    const struct random_a *a = arg;
    const struct lora_param *p = a->p;
    const double bound = 1 / sqrt((double)p->cols);
    const int64_t filled = a->r * p->cols, padded = p->rows * p->cols;
    for (int64_t j = 0; j < filled; j++) {
        const double u = rng_uniform(a->key, (uint64_t)((p->first_exp + e) * filled + j));
        a->values[p->off + e * padded + j] = (float)(bound * (2 * u - 1));
    }
}

void adapters_init(struct adapters *ad, struct device *dev, uint64_t seed)
{
    if (dev->dry_run) return;
    float *values = mem_array(ad->n_flat, sizeof(*values));
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        char name[64];
        if (p->is_b) continue;
        lora_param_name(p, name);
        struct random_a a = {p, ad->rank[p->target], rng_key(seed, name), values};
        threads_run(p->n_exp, lora_param_count(p) < THREADS_GRAIN ? 1 : dev->n_threads, fill_expert, &a);
    }
    device_set_f32(dev, ad->opt.param, values);
    mem_free(values);
    adapters_refresh(ad, dev);
}

void lora_unquantised(struct lora_layer *lora)
{
    for (int i = 0; i < LAYER_PRODUCTS; i++) {
        lora->of[i].quant = (struct proj_quant){0};
        lora->of[i].lora.merged = false;
    }
}

void adapters_without_effect(struct adapters *like, const struct adapters *ad)
{
    like->layers = mem_array(ad->n_layer, sizeof(*like->layers));
    like->layer_on = mem_array(ad->n_layer, sizeof(*like->layer_on));
    for (int64_t l = 0; l < ad->n_layer; l++) {
        like->layer_on[l] = ad->layer_on[l];
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            struct lora lora = ad->layers[l].of[i].lora;
            lora.merged = false;
            memset(lora.scale, 0, sizeof(lora.scale));
            like->layers[l].of[i].lora = lora;
        }
    }
}

void adapters_round(struct adapters *ad, int64_t multiple)
{
    ad->n_flat = (ad->n_flat + multiple - 1) / multiple * multiple;
}

void adapters_shard_moments(struct adapters *ad)
{
    const struct comm *ranks = ad->par.dp;
    struct optimizer *opt = &ad->opt;
    adapters_round(ad, MT_MAX(64, opt->kind->block) * ranks->world); /* parts begin at multiples of 64 elements */
    MT_REQUIRE(opt->kind->elementwise, "ZeRO-1 with %s", opt->kind->name);
    opt->n_state = ad->n_flat / ranks->world;
    opt->first = opt->n_state * ranks->rank;
}

void adapters_freeze(struct adapters *ad, struct device *dev, int64_t layer)
{
    for (const struct lora_param *p = ad->params; ad->init && p < ad->params + ad->n_params; p++) {
        if (p->layer != layer) continue;
        const int64_t width = p->is_b ? 1 : p->cols, whole = p->is_b ? p->cols : p->rows; /* columns of a rank */
        const int64_t r = ad->rank[p->target] / 2, n = lora_param_count(p) / (whole * width);
        op_clear(dev, tensor_cols(view(ad->opt.grad, p->off, 0, n, whole * width), r * width, (whole - r) * width));
    }
}

void adapters_reduce(struct adapters *ad, struct device *dev, int64_t layer)
{
    for (const struct param_group *g = ad->opt.group; g < ad->opt.group + ad->opt.n_group; g++)
        if (g->layer == layer)
            comm_all_reduce_sum(g->divided ? ad->par.dp : ad->par.all, dev, tensor_rows(ad->opt.grad, g->first, g->n));
}

void adapters_update(struct adapters *ad, struct device *dev, double lr, double norm)
{
    const struct optimizer *opt = &ad->opt;
    if (opt->cpu_update) {
        host_update_note(&ad->opt, dev, lr, norm);
        ad->version++;
        return;
    }
    optimizer_update(&ad->opt, dev, lr, norm);
    if (opt->n_state < ad->n_flat)
        comm_all_gather(ad->par.dp, dev, opt->param, tensor_rows(opt->param, opt->first, opt->n_state));
    adapters_refresh(ad, dev);
}

int64_t adapters_host_bytes(const struct adapters *ad, bool cpu_update)
{
    const int64_t more = 2 * tensor_bytes(ad->opt.param) + tensor_bytes(ad->working); /* masters, gradients, copies */
    return optimizer_state_bytes(&ad->opt) + (cpu_update ? more : 0);
}

void adapters_complete(struct adapters *ad, struct device *dev, int64_t layer)
{
    host_update_complete(&ad->opt, dev, layer);
}

void adapters_need(const struct adapters *ad, struct device *dev, int64_t layer)
{
    host_update_need(&ad->opt, dev, layer);
}

void adapters_settle(const struct adapters *ad, struct device *dev) { host_update_settle(&ad->opt, dev); }

const struct adapters *adapters_logical(const struct adapters *ad) { return ad->logical ? ad->logical : ad; }

/* Copies between a host array in the logical layout and `part` [n_flat], the device layout of rank `rank` of par.ep.
 * The padding of lora ranks is neither read nor written. */
static void copy_part(const struct adapters *ad, int rank, char *logical, char *part, bool to_logical, int64_t width)
{
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i], *w = adapters_match(ad->logical, p);
        const int64_t first = w->n_exp > p->n_exp ? rank * p->n_exp : 0;
        const bool one_run = p->cols == w->cols && !p->order.n_group; /* a matrix is contiguous in both layouts */
        const int64_t n = one_run ? 1 : w->rows, run = (one_run ? w->rows : 1) * w->cols * width;
        for (int64_t e = 0; e < p->n_exp; e++)
            for (int64_t row = 0; row < n; row++) {
                const int64_t stored = (first + e) * w->rows + (one_run ? 0 : arch_stored_row(&p->order, row));
                char *in_logical = logical + (w->off + stored * w->cols) * width;
                char *in_part = part + (p->off + (e * p->rows + row) * p->cols) * width;
                memcpy(to_logical ? in_logical : in_part, to_logical ? in_part : in_logical, (size_t)run);
            }
    }
}

/* The index of the optimizer's 8-bit state that `flat` is; -1: it is none. */
static int coded_state(const struct adapters *ad, struct tensor flat)
{
    for (int i = 0; i < OPTIMIZER_STATES && flat.dtype == DT_U8; i++)
        if (ad->opt.state[i].data == flat.data) return i;
    return -1;
}

static void read_flat(const struct adapters *ad, struct device *dev, void *host, struct tensor flat, enum dtype dtype)
{
    const int coded = coded_state(ad, flat);
    if (coded >= 0)
        optimizer_get_state(&ad->opt, dev, coded, host);
    else if (dtype == flat.dtype)
        device_download(dev, host, flat.data, tensor_bytes(flat));
    else
        device_get_f32(dev, host, flat);
}

/* Downloads flat to host. With ZeRO-1, rank 0 of par.dp receives all parts of a state. */
static void download(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, char *host)
{
    struct comm *dp = ad->par.dp;
    const int64_t bytes = flat.shape[0] * dtype_size(dtype);
    const bool shared = flat.shape[0] < ad->n_flat;
    if (shared || dp->rank == 0) read_flat(ad, dev, host, flat, dtype);
    for (int r = 1; r < dp->world && shared; r++) {
        if (dp->rank == 0) comm_recv(dp, r, host + r * bytes, bytes);
        if (dp->rank == r) comm_send(dp, 0, host, bytes);
    }
}

void adapters_gather(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, void *host)
{
    struct comm *ep = ad->par.ep;
    const int64_t width = dtype_size(dtype), bytes = ad->n_flat * width;
    char *part = host && !ad->logical ? host : mem_alloc(bytes);
    adapters_settle(ad, dev);
    download(ad, dev, flat, dtype, part);
    for (int r = 0; r < ep->world && ad->logical && ad->par.dp->rank == 0; r++) {
        if (ep->rank == 0 && r > 0) comm_recv(ep, r, part, bytes);
        if (ep->rank == 0) copy_part(ad, r, host, part, true, width);
        if (ep->rank == r && r > 0) comm_send(ep, 0, part, bytes);
    }
    if (part != host) mem_free(part);
}

void adapters_put(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, const void *host)
{
    const int64_t width = dtype_size(dtype), first = flat.shape[0] < ad->n_flat ? ad->opt.first : 0;
    char *from = (char *)(uintptr_t)host, *part = ad->logical ? mem_array(ad->n_flat, width) : from;
    adapters_settle(ad, dev);
    if (ad->logical) copy_part(ad, ad->par.ep->rank, from, part, false, width);
    const void *at = part + first * width;
    const int coded = coded_state(ad, flat);
    if (coded >= 0)
        optimizer_set_state(&ad->opt, dev, coded, at);
    else if (dtype == flat.dtype)
        device_upload(dev, flat.data, at, tensor_bytes(flat));
    else
        device_set_f32(dev, flat, at);
    if (part != from) mem_free(part);
}

void adapters_get(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, void *host)
{
    const int64_t width = dtype_size(dtype);
    char *part = ad->logical ? mem_array(ad->n_flat, width) : host;
    adapters_settle(ad, dev);
    read_flat(ad, dev, part, flat, dtype);
    if (!ad->logical) return;
    copy_part(ad, ad->par.ep->rank, host, part, true, width);
    mem_free(part);
}

void adapters_broadcast(struct adapters *ad, struct device *dev)
{
    adapters_settle(ad, dev);
    comm_broadcast(ad->par.dp, dev, ad->opt.param, 0);
    adapters_refresh(ad, dev);
}

void adapters_refresh(struct adapters *ad, struct device *dev)
{
    ad->version++;
    adapters_settle(ad, dev);
    if (ad->working.data != ad->opt.param.data) op_cast(dev, ad->working, ad->opt.param);
}

void adapters_free(struct adapters *ad)
{
    free_logical(ad);
    mem_free(ad->layer_on);
    mem_free(ad->params);
    mem_free(ad->layers);
    mem_free(ad->groups);
    mem_free(ad->amax.rows);
    base_model_free(&ad->base);
    host_update_close(&ad->opt);
    *ad = (struct adapters){0};
}
