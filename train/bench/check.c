/* check.c - runs one batch three times: on the configured device, on the CPU in the device's dtype, on the CPU in f64.
 *
 * It compares the residual stream after the embedding, every attention and every layer, the final norm, the loss, and
 * the gradient of every adapter. The error is |device - f64| / |f64|.
 *
 * Bound in bf16: twice the error of a CPU that rounds every activation to bf16, plus one rounding. Bound in f32:
 * F32_BOUND, or twice the error of a CPU in f32 if that is larger.
 *
 * The norm of gated DeltaNet divides by outputs that may be near zero. A few tokens then dominate an error, so errors
 * vary much between runs. Such models run NEAR_RUNS times on the CPU in the device's dtype; in all but the first run
 * the embedding differs in the last bit of some elements. The largest error of each quantity counts.
 *
 * With train.expert_dtype = fp8 the run in f64 is without FP8, so that the errors include those of the quantisation.
 * The CPU in the device's dtype quantises as the device does. In f32 the bound is that of bf16; with fp8-backward only
 * for gradients. A fourth run, on the CPU in the device's dtype without FP8, shows what FP8 adds to the errors.
 *
 * Routing is discontinuous: when the logits of two experts nearly tie, rounding decides, and all later values differ.
 * Both CPU runs therefore use the device's experts, with gates from their own logits. `check` counts the tokens for
 * which f64 would choose other experts. For each it computes the logit difference between the best expert that the
 * device did not choose and the worst that it chose, in standard deviations of the token's logits. This difference may
 * be at most MARGIN times the bound for the error of the router's input, in the layer or for the token. In compressed
 * attention each token chooses entries, each of which stands for several tokens; `check` compares these choices in the
 * same way, by the scores of the entries. */
#include "train/bench/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/run/run.h"

#define F32_BOUND 1e-4
#define ROUNDING  0x1p-9 /* of bf16 */
#define MARGIN    8
enum { MAX_SEQ = 192, N_SEQ = 2, KINDS = 2 * LORA_TARGETS }; /* longer than gpt-oss' window, and packed */
enum { NEAR_RUNS = 8, NUDGED = 16 };                         /* one of NUDGED elements differs */

/* Results of one side; f32 on the host. */
struct capture {
    float *x, *h;     /* [(L+1), T, D] input of every layer and of the final norm; [L, T, D] after attention */
    float *norm;      /* [T, D] */
    float *grad;      /* [n_flat] in the logical layout (model/lora.h), without padding */
    int32_t *idx;     /* [L, T, J] the chosen experts of the layers with several */
    int32_t *entries; /* [L, T, K] the chosen entries of the layers in which tokens choose entries */
    double loss;
};

struct error {
    double device, near, allowed; /* errors of the device and of the CPU in the device's dtype; the bound */
};

struct check {
    struct config cfg;
    int64_t n_layer;       /* of check_run */
    const struct ops *ops; /* of check_run */
    FILE *out;
    struct run device;
    struct run cpu; /* one after the other: CPU in the device's dtype, in F64 */
    struct config cpu_cfg;
    struct batch batch;
    float *params; /* [n_flat] the adapters of all sides, in the logical layout */
    struct capture got, near[NEAR_RUNS], want;
    struct capture plain;      /* only with fp8: the results of the CPU in the device's dtype without FP8 */
    bool bf16, fp8, quantised; /* FP8 products in the backward; quantised: in the forward too */
    float embed_factor;        /* rounded as on the device */
    struct arch arch;
    struct adapters plan; /* its logical layout: parameters and offsets */
    int64_t n_bad;
};

/* ---- an embedding that differs in the last bits, for the CPU runs ---- */

static struct {
    embed_fwd_fn *real;
    uint64_t key; /* 0: the embedding as it is */
} nudge;

static void nudged_embedding(struct device *dev, struct tensor y, const struct weight *w, struct tensor tok)
{
    const double step = dev->round_bf16 ? 0x1.1p-8 : 0x1.1p-24; /* a little more than half an ulp */
    nudge.real(dev, y, w, tok);
    if (!nudge.key || dev->dry_run) return;
    MT_REQUIRE(y.dtype == DT_F32, "the embedding of a CPU in f32");
    for (int64_t i = 0; i < tensor_count(y); i++) {
        if (rng_uniform(nudge.key, (uint64_t)i) >= 1.0 / NUDGED) continue;
        float *x = (float *)y.data + i / y.shape[1] * y.ld + i % y.shape[1];
        *x = (float)((double)*x * (1 + step));
        if (dev->round_bf16) *x = bf16_to_f32(f32_to_bf16(*x));
    }
}

/* ---- the device's routing, for the CPU runs ---- */

static struct {
    router_fwd_fn *real;
    const struct arch *arch;
    const int32_t *idx;            /* routing of the next layer with several experts */
    int64_t layer;                 /* the next layer */
    int64_t differ[MT_MAX_LAYERS]; /* tokens for which f64 would choose other experts */
    float *apart;                  /* [L, T] their logit differences in spreads; other tokens: 0 */
} forced;

static bool holds(const int32_t *set, int64_t n, int32_t id)
{
    for (int64_t i = 0; i < n; i++)
        if (set[i] == id) return true;
    return false;
}

static double spread(const double *logits, int64_t n)
{
    double sum = 0, squares = 0;
    for (int64_t e = 0; e < n; e++) sum += logits[e];
    for (int64_t e = 0; e < n; e++) squares += (logits[e] - sum / (double)n) * (logits[e] - sum / (double)n);
    return sqrt(squares / (double)n);
}

/* Difference between the highest logit of `own` that `taken` lacks and the lowest of `taken` that `own` lacks; 0 if the
 * sets are equal. */
static double distance(const double *logits, const int32_t *own, const int32_t *taken, int64_t n)
{
    double best = -INFINITY, least = INFINITY;
    for (int64_t j = 0; j < n; j++) {
        if (!holds(taken, n, own[j])) best = fmax(best, logits[own[j]]);
        if (!holds(own, n, taken[j])) least = fmin(least, logits[taken[j]]);
    }
    return best > least ? best - least : 0;
}

static double sum_of_best_two(const double *value, int64_t n)
{
    double first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (value[i] > first)
            second = first, first = value[i];
        else
            second = fmax(second, value[i]);
    }
    return first + second;
}

/* As `distance`, for routers that choose groups of experts first: a small difference between the values of two groups
 * may exchange experts whose logits differ much. Returns the largest difference between groups that only one choice
 * has; infinite if both have the same groups. */
static double group_distance(const double *value, const int32_t *own, const int32_t *taken, int64_t n, int64_t n_exp,
                             const struct router *router)
{
    const int64_t n_group = router->n_group, size = n_exp / n_group;
    double worst = 0, *sum = mem_array(n_group, sizeof(*sum));
    double least = INFINITY, best = -INFINITY; /* of the groups that F64 chooses in, of the others */
    bool any = false;
    for (int64_t g = 0; g < n_group; g++) sum[g] = sum_of_best_two(value + g * size, size);
    for (int side = 0; side < 3; side++)
        for (int64_t g = 0; g < n_group; g++) {
            int64_t better = 0;
            bool in_own = false, in_taken = false;
            for (int64_t h = 0; h < n_group; h++) better += sum[h] > sum[g] || (h < g && sum[h] >= sum[g]);
            const bool kept = better < router->top_group;
            for (int64_t j = 0; j < n; j++) in_own |= own[j] / size == g, in_taken |= taken[j] / size == g;
            if (side == 0 && kept) least = fmin(least, sum[g]);
            if (side == 1 && !kept) best = fmax(best, sum[g]);
            if (side < 2 || in_own == in_taken) continue;
            any |= kept ? best > -INFINITY && in_own : in_taken;
            if (!kept) worst = fmax(worst, least - sum[g]);
            if (kept && in_own && best > -INFINITY) worst = fmax(worst, sum[g] - best);
        }
    mem_free(sum);
    return any ? worst : INFINITY;
}

/* The score of an expert from its logit; the same as in kernels/cpu/router.c, in F64. */
static double score_of(double logit, enum router_kind kind)
{
    if (kind != ROUTER_SQRT_CHOSEN) return 1 / (1 + exp(-logit));
    return logit < -40 ? exp(logit / 2) : sqrt(fmax(logit, 0) + log1p(exp(-fabs(logit))));
}

static void weigh_sigmoid(double *gate, const double *logits, const int32_t *idx, int64_t n_top,
                          const struct router *router)
{
    double sum = (double)router_floor(router);
    for (int64_t j = 0; j < n_top; j++) sum += gate[j] = score_of(logits[idx[j]], router->kind);
    for (int64_t j = 0; j < n_top; j++) gate[j] *= (double)router->scale / (router_divides(router) ? sum : 1);
}

static void weigh(double *gate, const double *logits, const int32_t *idx, int64_t n_top, int64_t n_exp,
                  const struct router *router)
{
    const bool chosen = router->kind == ROUTER_CHOSEN;
    double most = -INFINITY, sum = 0;
    if (router_is_sigmoid(router)) {
        weigh_sigmoid(gate, logits, idx, n_top, router);
        return;
    }
    for (int64_t e = 0; e < n_exp; e++) most = fmax(most, logits[e]);
    for (int64_t e = 0; e < (chosen ? n_top : n_exp); e++) sum += exp(logits[chosen ? idx[e] : e] - most);
    for (int64_t j = 0; j < n_top; j++) gate[j] = exp(logits[idx[j]] - most) / sum;
}

/* Replaces the CPU's router: keeps its logits and takes the device's experts. With one expert, the gate of a shared
 * expert, there is no choice. */
static void forced_router(struct device *dev, struct route *r, struct tensor logits, struct tensor x,
                          const struct weight *w, struct tensor bias, const struct router *router)
{
    const int64_t n_tok = r->idx.shape[0], n_top = r->idx.shape[1], n_exp = w->n_out;
    if (n_exp == 1) {
        forced.real(dev, r, logits, x, w, bias, router);
        return;
    }
    while (!arch_is_routed(forced.arch, forced.layer)) forced.layer++;
    const int64_t l = forced.layer++;
    double *choice = mem_array(n_exp, sizeof(double));
    double *value = mem_array(n_tok * n_exp, sizeof(double)), *gate = mem_array(n_tok * n_top, sizeof(double));
    forced.real(dev, r, logits, x, w, bias, router);
    device_get(dev, value, logits);
    for (int64_t t = 0; t < n_tok; t++) {
        const int32_t *own = (const int32_t *)r->idx.data + t * n_top, *taken = forced.idx + t * n_top;
        const double *row = value + t * n_exp;
        for (int64_t e = 0; e < n_exp; e++)
            choice[e] = router_is_sigmoid(router)
                            ? score_of(row[e], router->kind) + (bias.ndim ? (double)((const float *)bias.data)[e] : 0)
                            : row[e];
        double apart = distance(choice, own, taken, n_top);
        if (router->n_group > 1 && apart > 0)
            apart = fmin(apart, group_distance(choice, own, taken, n_top, n_exp, router));
        forced.differ[l] += memcmp(own, taken, (size_t)n_top * sizeof(*own)) != 0;
        if (apart > 0) forced.apart[l * n_tok + t] = (float)(apart / spread(choice, n_exp));
        weigh(gate + t * n_top, row, taken, n_top, n_exp, router);
    }
    device_set(dev, r->gate, gate);
    device_upload(dev, r->idx.data, forced.idx, tensor_bytes(r->idx));
    forced.idx += n_tok * n_top;
    mem_free(choice);
    mem_free(value);
    mem_free(gate);
}

/* ---- the device's choice of entries, for the CPU runs ---- */

static struct {
    index_topk_fn *real;
    const struct arch *arch;
    const int32_t *idx; /* choice of the next layer whose tokens choose */
    int64_t layer;      /* the next layer */
    int64_t n_differ;   /* tokens for which f64 would choose other entries, summed over layers */
    float *apart;       /* [L, T] their score differences in spreads; other tokens: 0 */
} chosen;

/* Scores of the first n entries of a sequence, which begin at row `first` of k. */
static void score_entries(double *score, const double *q, const double *k, const double *w, int64_t first, int64_t n,
                          int64_t n_head, int64_t dim)
{
    for (int64_t e = 0; e < n; e++) {
        score[e] = 0;
        for (int64_t h = 0; h < n_head; h++) {
            double dot = 0;
            for (int64_t c = 0; c < dim; c++) dot += q[h * dim + c] * k[(first + e) * dim + c];
            score[e] += w[h] * fmax(dot, 0);
        }
    }
}

/* Replaces the CPU's choice of entries by the device's. */
static void forced_entries(struct device *dev, struct tensor idx, struct tensor q, struct tensor k, struct tensor w,
                           const struct seqs *seqs, int64_t ratio)
{
    const int64_t n_tok = q.shape[0], n_top = idx.shape[1], n_head = w.shape[1], dim = k.shape[1];
    while (chosen.arch->compress.kind[chosen.layer] != COMPRESS_SPARSE) chosen.layer++;
    float *apart = chosen.apart + n_tok * chosen.layer++;
    double *at = mem_array(tensor_count(q) + tensor_count(k) + tensor_count(w) + k.shape[0], sizeof(double));
    double *keys = at + tensor_count(q), *weights = keys + tensor_count(k), *score = weights + tensor_count(w);
    const int32_t *cu = seqs->cu.data;
    chosen.real(dev, idx, q, k, w, seqs, ratio);
    device_get(dev, at, q);
    device_get(dev, keys, k);
    device_get(dev, weights, w);
    for (int64_t s = 0; s < seqs->n_seq; s++)
        for (int64_t t = cu[s]; t < cu[s + 1]; t++) {
            const int32_t *own = (const int32_t *)idx.data + t * n_top, *taken = chosen.idx + t * n_top;
            const int64_t n = (t - cu[s] + 1) / ratio; /* visible entries */
            if (!memcmp(own, taken, (size_t)n_top * sizeof(*own))) continue;
            chosen.n_differ++;
            score_entries(score, at + t * n_head * dim, keys, weights + t * n_head, cu[s] / ratio, n, n_head, dim);
            apart[t] = n > n_top ? (float)(distance(score, own, taken, n_top) / spread(score, n)) : INFINITY;
        }
    device_upload(dev, idx.data, chosen.idx, tensor_bytes(idx));
    chosen.idx += n_tok * n_top;
    mem_free(at);
}

/* ---- one side ---- */

/* B of a new adapter is 0, so A would have no gradient: B is drawn too. Trained values are rounded to bf16, so that all
 * runs have the same values. */
static float *draw_params(const struct adapters *ad, struct device *dev)
{
    const struct adapters *whole = adapters_logical(ad);
    float *value = mem_array(whole->n_flat, sizeof(float));
    const uint64_t key = rng_key(0, "check");
    adapters_get(ad, dev, ad->opt.param, DT_F32, value);
    for (int64_t i = 0; i < whole->n_params; i++) {
        const struct lora_param *p = &whole->params[i];
        for (int64_t k = p->off; k < p->off + lora_param_count(p); k++) {
            if (p->is_b) value[k] = (float)(0.04 * (rng_uniform(key, (uint64_t)k) - 0.5));
            value[k] = bf16_to_f32(f32_to_bf16(value[k]));
        }
    }
    return value;
}

static void capture_free(struct capture *c)
{
    mem_free(c->x);
    mem_free(c->h);
    mem_free(c->norm);
    mem_free(c->grad);
    mem_free(c->idx);
    mem_free(c->entries);
    *c = (struct capture){0};
}

/* Reads the chosen entries of the layers in which tokens choose: a document has more entries than a token may see. */
static void take_entries(struct model *m, struct capture *c, int64_t n_tok)
{
    const struct compress_arch *a = &m->arch.compress;
    int32_t *idx = c->entries = mem_array(MT_MAX(m->arch.n_layer * n_tok * a->index_top, 1), sizeof(int32_t));
    for (int64_t l = 0; l < m->arch.n_layer; l++) {
        const struct tensor t = m->acts.layers[l].compressed.idx;
        if (!t.ndim || m->seqs.max_len / a->ratio[COMPRESS_SPARSE] <= a->index_top) continue;
        device_download(m->dev, idx, t.data, tensor_bytes(t));
        idx += tensor_count(t);
    }
}

/* The residual between mixer and network. For a layer without mixer it is the layer's input, for a layer without
 * network the layer's output. */
static struct tensor residual_of(const struct model *m, int64_t layer)
{
    const struct layer_acts *a = &m->acts.layers[layer];
    return !m->arch.mixer[layer] ? a->x : !m->arch.ffn[layer] ? a[1].x : a->h;
}

static void take(struct model *m, struct capture *c)
{
    struct device *dev = m->dev;
    const int64_t n_layer = m->arch.n_layer, n_tok = m->acts.layers[0].x.shape[0], n = n_tok * m->arch.d_model;
    const int64_t n_top = MT_MAX(m->arch.top_k, 1);
    int32_t *idx = c->idx = mem_array(n_layer * n_tok * n_top, sizeof(int32_t));
    c->h = mem_array(n_layer * n, sizeof(float));
    c->grad = mem_array(adapters_logical(&m->adapters)->n_flat, sizeof(float));
    for (int64_t l = 0; l < n_layer; l++) {
        const struct layer_acts *a = &m->acts.layers[l];
        device_get_f32(dev, c->h + l * n, residual_of(m, l));
        if (!arch_is_routed(&m->arch, l)) continue;
        device_download(dev, idx, a->moe.route.idx.data, tensor_bytes(a->moe.route.idx));
        idx += tensor_count(a->moe.route.idx);
    }
    take_entries(m, c, n_tok);
    adapters_get(&m->adapters, dev, m->adapters.opt.grad, DT_F32, c->grad);
}

/* Forward and backward of the batch on an open model, with the adapters that all runs have. */
static void pass(struct run *r, const struct check *k, struct capture *c)
{
    struct model *m = &r->model;
    const struct model_pass p = {
        .backward = true, .loss_scale = 1 / (double)MT_MAX(k->batch.n_label, 1), .aux_share = 1, .dropout_key = 1};
    const int64_t n_layer = m->arch.n_layer;
    struct model_sums sum;
    adapters_put(&m->adapters, &r->dev, m->adapters.opt.param, DT_F32, k->params);
    adapters_refresh(&m->adapters, &r->dev);
    device_zero(&r->dev, m->adapters.opt.grad);
    model_clear(m);
    run_forward(r, &k->batch, &p);
    /* what the backward of the layers writes over */
    const int64_t n_x = tensor_count(m->acts.layers[0].x);
    c->norm = mem_array(tensor_count(m->final_norm), sizeof(float));
    device_get_f32(&r->dev, c->norm, m->final_norm);
    c->x = mem_array((n_layer + 1) * n_x, sizeof(float));
    host_ring_join(&m->acts.inputs, &r->dev);
    for (int64_t l = 0; l <= n_layer; l++) device_get_f32(&r->dev, c->x + l * n_x, model_forward_x(m, l));
    model_bwd(m);
    take(m, c);
    model_end(m);
    model_read(m, &sum);
    c->loss = sum.nll / (double)MT_MAX(sum.n_label, 1);
}

/* Forward and backward on the CPU with the device's experts and entries. */
static void cpu_pass(struct check *k, struct run *r, uint64_t nudge_key, struct capture *c)
{
    mem_free(forced.apart);
    forced.apart = mem_array(k->arch.n_layer * k->batch.n_tok, sizeof(float));
    memset(forced.differ, 0, sizeof(forced.differ));
    forced.idx = k->got.idx;
    forced.layer = 0;
    mem_free(chosen.apart);
    chosen.apart = mem_array(k->arch.n_layer * k->batch.n_tok, sizeof(float));
    chosen.n_differ = 0;
    chosen.idx = k->got.entries;
    chosen.layer = 0;
    nudge.key = nudge_key;
    pass(r, k, c);
}

/* Runs the CPU n times in the device's dtype, or once in f64 (oracle). fp8: with the FP8 products of the device. */
static int cpu_side(struct check *k, bool oracle, bool fp8, struct capture *c, int n, struct err *err)
{
    struct config *cfg = &k->cpu_cfg;
    struct run *r = &k->cpu;
    struct ops table;
    *cfg = k->cfg;
    cfg->train.expert_dtype = fp8 ? k->cfg.train.expert_dtype : CFG_EXPERTS_IN_BF16;
    cfg->train.device = CFG_DEVICE_CPU;
    cfg->train.dtype = k->bf16 ? CFG_DTYPE_BF16 : CFG_DTYPE_FP32;
    cfg->train.memory_gb = 0;
    cfg->train.decoded_layers = 0;
    if (run_open_headers(r, cfg, err)) return -1;
    if (oracle) device_open_oracle(&r->dev);
    if (cfg->train.threads) r->dev.n_threads = (int)cfg->train.threads;
    r->arch.n_layer = k->arch.n_layer;
    if (run_open_model(r, NULL, PLAN_TRAIN, err)) {
        run_close(r);
        return err_prefix(err, "the CPU's side of the check (--layers N takes the first N layers)");
    }
    r->model.embed_factor = k->embed_factor;
    forced.real = r->dev.ops->router_fwd;
    forced.arch = chosen.arch = &k->arch;
    chosen.real = r->dev.ops->index_topk;
    nudge.real = r->dev.ops->embed_fwd;
    table = *r->dev.ops;
    table.router_fwd = forced_router;
    table.index_topk = forced_entries;
    table.embed_fwd = nudged_embedding;
    r->dev.ops = &table;
    for (int i = 0; i < n; i++) cpu_pass(k, r, i ? rng_key((uint64_t)i, "check") : 0, &c[i]);
    run_close(r);
    return 0;
}

/* The plan advises options that check sets itself. */
static int in_check(const struct run *r, struct err *err)
{
    const struct plan *p = &r->plan;
    char need[32], have[32], others[PLAN_TEXT], host[PLAN_TEXT];
    if (!p->too_large) return -1;
    return err_set(err, "check needs %s%s, the budget is %s (%s): use fewer layers (--layers N)%s%s",
                   str_bytes(need, plan_peak(p, true)), plan_others(others, p), str_bytes(have, p->budget), p->limit,
                   p->capped ? ", or raise train.memory_gb" : "", plan_host_advice(host, p));
}

static int device_side(struct check *k, struct err *err)
{
    const struct loader_options lo = run_loader_options(&k->cfg, false);
    struct run *r = &k->device;
    if (run_open_headers(r, &k->cfg, err)) return -1;
    device_log_choice();
    if (k->ops) r->dev.ops = k->ops;
    if (k->n_layer > r->arch.n_layer)
        return err_set(err, "--layers %lld: the model has %lld", (long long)k->n_layer, (long long)r->arch.n_layer);
    if (k->n_layer) r->arch.n_layer = k->n_layer;
    log_info("the batch: %d sequences; check truncates documents to %lld tokens and puts loss on every token", N_SEQ,
             (long long)k->cfg.data.seq_len);
    if (run_open_data(r, true, err)) return -1;
    r->train.pairs = false; /* both answers of a pair are documents like others */
    if (run_open_model(r, NULL, PLAN_TRAIN, err)) return in_check(r, err);
    struct loader *l = loader_open(&r->train, &lo, (struct loader_pos){0, 0});
    loader_next(l, &k->batch, NULL);
    loader_close(l);
    k->arch = r->arch;
    k->bf16 = r->dev.act_dtype == DT_BF16 || r->dev.round_bf16;
    k->params = draw_params(&r->model.adapters, &r->dev);
    pass(r, k, &k->got);
    fprintf(k->out, "%s against the CPU in F64: %lld layer%s, %lld tokens in %lld documents, %lld with loss\n",
            r->dev.name, (long long)k->arch.n_layer, str_plural(k->arch.n_layer), (long long)k->batch.n_tok,
            (long long)k->batch.n_seq, (long long)k->batch.n_label);
    return 0;
}

/* ---- comparison ---- */

static double error_of(const float *a, const float *b, int64_t n)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return diff == 0 ? 0 : sqrt(diff / norm);
}

static void larger_error(float *near, const float *other, const float *want, int64_t n)
{
    if (error_of(other, want, n) > error_of(near, want, n)) memcpy(near, other, (size_t)n * sizeof(*near));
}

/* Keeps the larger error of each quantity: where the error of `other` is larger, copies its values over those of the
 * first run. */
static void keep_larger(struct check *k, const struct capture *other)
{
    const struct adapters *layout = adapters_logical(&k->plan);
    const int64_t n = k->batch.n_tok * k->arch.d_model, n_x = k->batch.n_tok * arch_stream_cols(&k->arch);
    struct capture *near = k->near;
    for (int64_t l = 0; l < k->arch.n_layer; l++) {
        larger_error(near->h + l * n, other->h + l * n, k->want.h + l * n, n);
        larger_error(near->x + (l + 1) * n_x, other->x + (l + 1) * n_x, k->want.x + (l + 1) * n_x, n_x);
    }
    larger_error(near->norm, other->norm, k->want.norm, n);
    for (int64_t i = 0; i < layout->n_params; i++) {
        const int64_t at = layout->params[i].off;
        larger_error(near->grad + at, other->grad + at, k->want.grad + at, lora_param_count(&layout->params[i]));
    }
    if (fabs(other->loss - k->want.loss) > fabs(near->loss - k->want.loss)) near->loss = other->loss;
}

static bool beyond(const struct error *e) { return !(e->device <= e->allowed); }

/* fp8: FP8 products contribute to the error. */
static struct error error_bound(const struct check *k, bool fp8, const float *got, const float *near, const float *want,
                                int64_t n)
{
    struct error e = {.device = error_of(got, want, n), .near = error_of(near, want, n)};
    e.allowed = k->bf16 || fp8 ? 2 * e.near + ROUNDING : fmax(F32_BOUND, 2 * e.near);
    return e;
}

static struct error compare(struct check *k, bool fp8, const float *got, const float *near, const float *want,
                            int64_t n)
{
    const struct error e = error_bound(k, fp8, got, near, want, n);
    k->n_bad += beyond(&e);
    return e;
}

struct worst {
    struct error e;
    int64_t layer;
    bool any;
};
static void note(struct worst *w, struct error e, int64_t layer)
{
    if (!w->any || !(e.device / e.allowed <= w->e.device / w->e.allowed)) *w = (struct worst){e, layer, true};
}

static void print_cell(FILE *out, const struct error *e) { fprintf(out, " %7.1e%c", e->device, beyond(e) ? '!' : ' '); }

static void print_head(const struct check *k)
{
    fprintf(k->out, "\n  layer  rerouted  %-9s%-9s", "attn", "out");
    for (int kind = 0; kind < KINDS; kind++) {
        char name[16];
        snprintf(name, sizeof(name), "%s.%c", lora_target_short((enum lora_target)(kind / 2)), kind % 2 ? 'B' : 'A');
        if (k->plan.target[kind / 2]) fprintf(k->out, "%-9s", name);
    }
    fprintf(k->out, "\n");
}

/* A table of layers by quantities; "!" marks errors above the bound. */
static void print_layers(struct check *k, struct worst *worst, double *allowed_h)
{
    const struct adapters *layout = adapters_logical(&k->plan);
    const int64_t n = k->batch.n_tok * k->arch.d_model, n_x = k->batch.n_tok * arch_stream_cols(&k->arch);
    print_head(k);
    for (int64_t l = 0; l < k->arch.n_layer; l++) {
        const struct error h = compare(k, k->quantised, k->got.h + l * n, k->near->h + l * n, k->want.h + l * n, n);
        const int64_t at = (l + 1) * n_x;
        const struct error x = compare(k, k->quantised, k->got.x + at, k->near->x + at, k->want.x + at, n_x);
        note(&worst[0], h, l);
        note(&worst[1], x, l);
        allowed_h[l] = h.allowed;
        fprintf(k->out, "  %5lld  %8lld", (long long)l, (long long)forced.differ[l]);
        print_cell(k->out, &h);
        print_cell(k->out, &x);
        for (int kind = 0; kind < KINDS; kind++) {
            const struct lora_param *p = adapters_find(layout, l, (enum lora_target)(kind / 2), kind % 2);
            if (!p && layout->target[kind / 2]) fprintf(k->out, " %7s ", "-");
            if (!p) continue;
            const struct error g = compare(k, k->fp8, k->got.grad + p->off, k->near->grad + p->off,
                                           k->want.grad + p->off, lora_param_count(p));
            print_cell(k->out, &g);
            note(&worst[2 + kind], g, l);
        }
        fprintf(k->out, "\n");
    }
}

static void print_worst(FILE *out, const char *name, const struct worst *w)
{
    char where[32] = "";
    if (!w->any) return;
    if (w->layer >= 0) snprintf(where, sizeof(where), " (layer %lld)", (long long)w->layer);
    fprintf(out, "  %-32s%-11s %10.2e %12.2e %10.2e %s\n", name, where, w->e.device, w->e.near, w->e.allowed,
            beyond(&w->e) ? "beyond" : "ok");
}

static void print_single(struct check *k, const char *name, const float *got, const float *near, const float *want,
                         int64_t n)
{
    const struct worst w = {.e = compare(k, k->quantised, got, near, want, n), .layer = -1, .any = true};
    print_worst(k->out, name, &w);
}

/* Whether rounding explains the choice of a token. The bound of the token counts too: its input may have a larger error
 * than the layer's. */
static bool near_tie(const struct check *k, int64_t layer, int64_t token, double allowed)
{
    const double apart = (double)forced.apart[layer * k->batch.n_tok + token];
    const int64_t d = k->arch.d_model, at = (layer * k->batch.n_tok + token) * d;
    return apart <= MARGIN * allowed ||
           apart <= MARGIN * error_bound(k, k->quantised, k->got.h + at, k->near->h + at, k->want.h + at, d).allowed;
}

static void print_routing(struct check *k, const double *allowed_h)
{
    int64_t tokens = 0, rows = 0, bad = 0;
    double margin = 0;
    for (int64_t l = 0; l < k->arch.n_layer; l++) {
        if (!arch_is_routed(&k->arch, l)) continue;
        rows += k->batch.n_tok;
        tokens += forced.differ[l];
        for (int64_t t = 0; t < k->batch.n_tok; t++) {
            margin = fmax(margin, (double)forced.apart[l * k->batch.n_tok + t]);
            bad += !near_tie(k, l, t, allowed_h[l]);
        }
    }
    fprintf(
        k->out,
        "\n  routing: F64 would have sent %lld of %lld tokens to another set of experts; the logits differ by at most "
        "%.2g of\n  the token's standard deviation: %s\n",
        (long long)tokens, (long long)rows, margin,
        bad ? "more than rounding explains: beyond" : "near ties, which rounding decides: ok");
    k->n_bad += bad;
}

/* Whether rounding of the layer's input, or of the token's input, explains the choice of other entries. */
static bool near_entries(const struct check *k, int64_t layer, int64_t token)
{
    const double apart = (double)chosen.apart[layer * k->batch.n_tok + token];
    const int64_t n = arch_stream_cols(&k->arch), at = layer * k->batch.n_tok * n, row = at + token * n;
    const struct capture *near = k->near;
    return apart == 0 ||
           apart <= MARGIN * error_bound(k, k->quantised, k->got.x + row, near->x + row, k->want.x + row, n).allowed ||
           apart <=
               MARGIN * error_bound(k, k->quantised, k->got.x + at, near->x + at, k->want.x + at, k->batch.n_tok * n)
                            .allowed;
}

static void print_entries(struct check *k)
{
    int64_t rows = 0, bad = 0;
    double margin = 0;
    for (int64_t l = 0; l < k->arch.n_layer; l++) {
        if (k->arch.compress.kind[l] != COMPRESS_SPARSE) continue;
        rows += k->batch.n_tok;
        for (int64_t t = 0; t < k->batch.n_tok; t++) {
            margin = fmax(margin, (double)chosen.apart[l * k->batch.n_tok + t]);
            bad += !near_entries(k, l, t);
        }
    }
    if (!rows) return;
    fprintf(
        k->out,
        "  entries: F64 would have chosen other entries for %lld of %lld tokens; the scores differ by at most %.2g of\n"
        "  the token's standard deviation: %s\n",
        (long long)chosen.n_differ, (long long)rows, margin,
        bad ? "more than rounding explains: beyond" : "near ties, which rounding decides: ok");
    k->n_bad += bad;
}

/* Relative error of the loss and of all gradients together. */
static void print_quality(struct check *k, int expert_dtype, const char *side, const struct capture *c)
{
    const int64_t n = adapters_logical(&k->plan)->n_flat;
    char value[32], name[80];
    config_choice(EXPERT_DTYPES, expert_dtype, value);
    snprintf(name, sizeof(name), "train.expert_dtype = %s, %s", value, side);
    fprintf(k->out, "    %-52s loss %9.2e  gradients %9.2e\n", name, fabs(c->loss - k->want.loss) / k->want.loss,
            error_of(c->grad, k->want.grad, n));
}

static void print_fp8(struct check *k)
{
    const char *cpu = k->bf16 ? "CPU in bf16" : "CPU in f32";
    if (!k->fp8) return;
    fprintf(k->out, "  FP8 products: errors against F64 without them\n");
    print_quality(k, k->cfg.train.expert_dtype, "this device", &k->got);
    print_quality(k, k->cfg.train.expert_dtype, cpu, k->near);
    print_quality(k, CFG_EXPERTS_IN_BF16, cpu, &k->plain);
}

static void report(struct check *k)
{
    const int64_t n = k->batch.n_tok * k->arch.d_model, n_x = k->batch.n_tok * arch_stream_cols(&k->arch);
    struct worst worst[2 + KINDS] = {{.any = false}};
    double *allowed_h = mem_array(k->arch.n_layer, sizeof(double));
    const float loss[3] = {(float)k->got.loss, (float)k->near->loss, (float)k->want.loss};
    print_layers(k, worst, allowed_h);
    fprintf(k->out, "\n  %-43s %10s %12s %10s\n", "worst of each", "device", k->bf16 ? "CPU in bf16" : "CPU in f32",
            "allowed");
    print_single(k, "embedding", k->got.x, k->near->x, k->want.x, n_x);
    print_worst(k->out, "after attention", &worst[0]);
    print_worst(k->out, "after the experts", &worst[1]);
    print_single(k, "final norm", k->got.norm, k->near->norm, k->want.norm, n);
    print_single(k, "loss", loss, loss + 1, loss + 2, 1);
    for (int kind = 0; kind < KINDS; kind++) {
        char name[64];
        snprintf(name, sizeof(name), "gradient of %s.lora_%c", lora_target_name((enum lora_target)(kind / 2)),
                 kind % 2 ? 'B' : 'A');
        print_worst(k->out, name, &worst[2 + kind]);
    }
    print_routing(k, allowed_h);
    print_entries(k);
    fprintf(k->out, "  loss %.6f, in F64 %.6f\n", k->got.loss, k->want.loss);
    print_fp8(k);
    if (k->fp8)
        fprintf(k->out,
                "  allowed%s: twice the error of the CPU that quantises the experts' rows in the same way, and one "
                "rounding, 2^-9.\n  F64 is without FP8 products. The CPU sides take the experts that the device "
                "chose\n",
                k->quantised ? "" : " for gradients");
    else if (k->bf16)
        fprintf(
            k->out,
            "  allowed: twice the error of the CPU that rounds every activation to bf16, and one rounding, 2^-9. The "
            "CPU sides\n  take the experts that the device chose, because a near tie would change all later values\n");
    else
        fprintf(
            k->out,
            "  allowed: %g, what sums in f32 lose, or twice the error of the CPU in f32 where that is more. The CPU "
            "sides\n  take the experts that the device chose\n",
            F32_BOUND);
    mem_free(allowed_h);
}

static void check_free(struct check *k)
{
    run_close(&k->device);
    batch_free(&k->batch);
    adapters_free(&k->plan);
    mem_free(k->params);
    capture_free(&k->got);
    for (int i = 0; i < NEAR_RUNS; i++) capture_free(&k->near[i]);
    capture_free(&k->want);
    capture_free(&k->plain);
    mem_free(forced.apart);
    mem_free(chosen.apart);
    forced.apart = chosen.apart = NULL;
}

static int run_sides(struct check *k, struct err *err)
{
    const int rc = device_side(k, err);
    k->embed_factor = k->device.model.embed_factor;
    run_close(&k->device);
    if (rc || plan_adapters(&k->plan, &k->arch, &k->cfg, NULL, err)) return -1;
    const int n_near = k->arch.delta.shape.n_value ? NEAR_RUNS : 1;
    if (k->fp8 && cpu_side(k, false, false, &k->plain, 1, err)) return -1;
    if (cpu_side(k, false, true, k->near, n_near, err) || cpu_side(k, true, false, &k->want, 1, err)) return -1;
    for (int i = 1; i < n_near; i++) keep_larger(k, &k->near[i]);
    return 0;
}

int check_run(const struct config *cfg, int64_t n_layer, const struct ops *ops, FILE *out, struct err *err)
{
    static struct check k;
    memset(&k, 0, sizeof(k));
    k.cfg = *cfg;
    k.n_layer = n_layer;
    k.ops = ops;
    k.out = out;
    k.fp8 = cfg->train.expert_dtype != CFG_EXPERTS_IN_BF16;
    k.quantised = cfg->train.expert_dtype == CFG_EXPERTS_IN_FP8;
    k.cfg.data.seq_len = MT_MIN(cfg->data.seq_len, MAX_SEQ);
    k.cfg.train.micro_batch = N_SEQ;
    k.cfg.data.packing = true;
    k.cfg.data.overlong = OVERLONG_CUT;
    k.cfg.data.loss_on = LOSS_ALL; /* the start of a conversation may have no answer */
    k.cfg.train.recompute = CFG_RECOMPUTE_NONE;
    k.cfg.quant.activations = CFG_QUANT_NONE;
    if (cfg->quant.activations != CFG_QUANT_NONE)
        log_info("check: inputs are not quantised here, as rounding differences would move codes (quant.activations)");
    int rc = run_sides(&k, err);
    if (!rc) {
        report(&k);
        fprintf(out, "  verdict: %s\n", k.n_bad ? "FAILED" : "ok");
        if (k.n_bad)
            rc = err_set(err,
                         "%lld quantities are further from F64 than rounding explains: this device, driver or "
                         "build computes wrongly; please report the table above",
                         (long long)k.n_bad);
    }
    check_free(&k);
    return rc;
}
