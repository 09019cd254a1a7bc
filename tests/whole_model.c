/* whole_model.c - loss and gradient of a model; opens a model on a backend with separate memory. */
#include "tests/whole_model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/stored/published.h"
#include "tests/test.h"

double whole_model_loss(struct model *m, const struct model_batch *b, double *grad)
{
    const struct model_pass pass = {
        .backward = true, .loss_scale = 0.1, .aux_share = 1, .choices = b->choices ? CHOICES_GIVEN : CHOICES_OWN};
    struct model_sums loss;
    model_clear(m);
    model_begin(m, b, &pass);
    model_fwd(m);
    model_loss(m);
    model_read(m, &loss);
    if (grad) {
        device_zero(m->dev, m->adapters.opt.grad);
        model_bwd(m);
        device_get(m->dev, grad, m->adapters.opt.grad);
    }
    model_end(m);
    return 0.1 * loss.nll + m->aux_coef * loss.aux;
}

static void (*edit_arch)(struct arch *a);

void whole_model_edit(void (*edit)(struct arch *a)) { edit_arch = edit; }

void whole_model_open(struct run *r, struct config *cfg, const char *dir, const char *targets, enum cfg_recompute mode)
{
    struct err err = {.msg = ""};
    config_defaults(cfg);
    snprintf(cfg->model.path, sizeof(cfg->model.path), "%s", dir);
    cfg->lora.dora = !strncmp(targets, WHOLE_DORA, strlen(WHOLE_DORA));
    snprintf(cfg->lora.targets, sizeof(cfg->lora.targets), "%s", targets + (cfg->lora.dora ? strlen(WHOLE_DORA) : 0));
    cfg->lora.r = 3;
    cfg->data.seq_len = 512;
    cfg->train.device = CFG_DEVICE_CPU;
    cfg->train.recompute = (int)mode;
    if (run_open_headers(r, cfg, &err)) fail_msg("%s", err.msg);
    if (edit_arch) edit_arch(&r->arch);
    device_open_oracle(&r->dev);
    if (run_open_model(r, NULL, PLAN_TRAIN, &err)) fail_msg("%s", err.msg);
    const struct adapters *ad = &r->model.adapters;
    double *x = mem_array(ad->n_flat, sizeof(*x));
    device_get(&r->dev, x, ad->opt.param);
    for (int64_t i = 0; i < ad->n_params; i++)
        for (int64_t j = ad->params[i].off; j < ad->params[i].off + lora_param_count(&ad->params[i]); j++)
            x[j] += 0.1 * test_value(31, (uint64_t)j);
    device_set(&r->dev, ad->opt.param, x);
    adapters_refresh(&r->model.adapters, &r->dev);
    mem_free(x);
}

double whole_model_part_loss(struct model *m, int32_t first, int32_t last, double *grad)
{
    int32_t tok[WHOLE_TOKENS], pos[WHOLE_TOKENS], row[WHOLE_TOKENS], id[WHOLE_TOKENS], cu[3] = {0};
    int64_t n = 0, n_seq = 0;
    for (int32_t t = first; t < last; t++) {
        const bool ends = t == WHOLE_FIRST - 1 || t == WHOLE_TOKENS - 1;
        tok[t - first] = (7 * t + 3) % (int32_t)m->arch.vocab;
        pos[t - first] = t < WHOLE_FIRST ? t : t - WHOLE_FIRST;
        if (!ends) row[n] = t - first, id[n++] = (5 * t + 1) % (int32_t)m->arch.vocab;
        if (ends) cu[++n_seq] = t + 1 - first;
    }
    const struct model_batch b = {.n_tok = last - first,
                                  .n_seq = n_seq,
                                  .n_label = n,
                                  .max_len = WHOLE_TOKENS - WHOLE_FIRST,
                                  .tok = tok,
                                  .pos = pos,
                                  .cu = cu,
                                  .label_row = row,
                                  .label_id = id};
    return whole_model_loss(m, &b, grad);
}

static double norm_of(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

/* The loss where the parameters p are x moved by `step` along g / norm. */
static double loss_along(struct run *r, const struct lora_param *p, const double *x, const double *g, double step)
{
    struct adapters *ad = &r->model.adapters;
    double *at = mem_array(ad->n_flat, sizeof(*at));
    memcpy(at, x, (size_t)ad->n_flat * sizeof(*x));
    const double norm = norm_of(g + p->off, lora_param_count(p));
    for (int64_t j = p->off; j < p->off + lora_param_count(p); j++) at[j] += step * g[j] / norm;
    device_set(&r->dev, ad->opt.param, at);
    adapters_refresh(ad, &r->dev);
    ad->norm_version = ad->version; /* DoRA's norms have no gradient: they stay those of x */
    mem_free(at);
    return whole_model_part_loss(&r->model, 0, WHOLE_TOKENS, NULL);
}

void whole_model_check_slopes(struct run *r)
{
    struct adapters *ad = &r->model.adapters;
    const int64_t n = ad->n_flat;
    double *x = mem_array(2 * n, sizeof(*x)), *g = x + n;
    device_get(&r->dev, x, ad->opt.param);
    whole_model_part_loss(&r->model, 0, WHOLE_TOKENS, g);
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        const double norm = norm_of(g + p->off, lora_param_count(p)), h = 2e-6;
        double slope = 0; /* fourth-order differences, since the norm of gated DeltaNet's output is strongly curved */
        char name[64];
        lora_param_name(p, name);
        if (!(norm > 1e-6)) fail_msg("%s: no gradient (%g)", name, norm);
        for (int s = -1; s <= 1; s += 2)
            slope += s * (8 * loss_along(r, p, x, g, s * h) - loss_along(r, p, x, g, 2 * s * h)) / (12 * h);
        if (!(fabs(slope - norm) <= 1e-6 * norm)) fail_msg("%s: slope %.9g, not %.9g", name, slope, norm);
    }
    device_set(&r->dev, ad->opt.param, x);
    adapters_refresh(ad, &r->dev);
    mem_free(x);
}

double whole_model_loss_of_12(struct model *m, double *grad) { return whole_model_part_loss(m, 0, WHOLE_TOKENS, grad); }

static void check_groups(struct run *r, const uint8_t *groups, int n_groups, double loss, const double *g)
{
    const int64_t n = r->model.adapters.n_flat;
    double *x = mem_array(n, sizeof(*x));
    for (int first = 0; first < n_groups; first++) {
        for (int64_t l = 0; l < r->arch.n_layer; l++) r->model.acts.save.groups[l] = groups[(first + l) % n_groups];
        assert_true(whole_model_loss_of_12(&r->model, x) == loss);
        assert_memory_equal(x, g, (size_t)n * sizeof(*g));
    }
    mem_free(x);
}

/* Each layer saves another set of groups of activations. The arena has room for all groups. */
static void check_mixtures(struct run *r, double loss, const double *g)
{
    static const uint8_t groups[] = {0,
                                     SAVE_CORE,
                                     SAVE_MIXER,
                                     SAVE_CORE | SAVE_MIXER,
                                     SAVE_FFN,
                                     SAVE_CORE | SAVE_FFN,
                                     SAVE_MIXER | SAVE_FFN | SAVE_NORMS,
                                     SAVE_NORMS,
                                     SAVE_CORE | SAVE_MIXER | SAVE_FFN};
    check_groups(r, groups, MT_LEN(groups), loss, g);
}

/* As check_mixtures, with groups in host memory. */
static void check_host(struct run *r, double loss, const double *g)
{
    enum { MIXER = SAVE_MIXER | SAVE_MIXER_HOST, FFN = SAVE_FFN | SAVE_FFN_HOST };
    static const uint8_t groups[] = {SAVE_CORE | MIXER, MIXER | FFN, SAVE_CORE | MIXER | FFN,      FFN,
                                     SAVE_CORE | FFN,   MIXER,       MIXER | SAVE_FFN | SAVE_NORMS};
    const int64_t n = r->arch.n_layer, bytes = 1 << 20;
    struct err err;
    r->dev.ops->free(r->dev.work.base); /* the arena of the run has no room for the rings */
    if (device_reserve(&r->dev, &r->dev.work, "work", 64 << 20, &err) ||
        device_reserve_host(&r->dev, OFFLOAD_KINDS * n * bytes, &err))
        fail_msg("%s", err.msg);
    for (enum offload_kind k = 0; k < OFFLOAD_KINDS; k++) {
        struct host_ring *ring = &r->model.acts.offload[k];
        host_ring_close(ring);
        host_ring_open(ring, &r->dev,
                       &(struct host_ring_use){.n_layer = n, .n_slot = OFFLOAD_SLOTS, .n_host = n, .bytes = bytes});
        host_ring_end(ring, r->model.adapters.lowest_layer);
        for (int64_t l = 0; l < n; l++) ring->bytes[l] = bytes; /* an earlier micro-batch needed more than a slot */
    }
    check_groups(r, groups, MT_LEN(groups), loss, g);
}

void whole_model_check_recomputation(const char *dir, const char *targets)
{
    static const enum cfg_recompute modes[] = {CFG_RECOMPUTE_NONE, CFG_RECOMPUTE_SELECTIVE, CFG_RECOMPUTE_FULL};
    double *g[3], loss[3];
    int64_t n = 0;
    for (int i = 0; i < 3; i++) {
        struct config cfg;
        struct run r;
        whole_model_open(&r, &cfg, dir, targets, modes[i]);
        n = r.model.adapters.n_flat;
        g[i] = mem_array(n, sizeof(double));
        loss[i] = whole_model_loss_of_12(&r.model, g[i]);
        if (modes[i] == CFG_RECOMPUTE_NONE) check_mixtures(&r, loss[i], g[i]);
        if (modes[i] == CFG_RECOMPUTE_NONE) check_host(&r, loss[i], g[i]);
        run_close(&r);
    }
    for (int i = 1; i < 3; i++) {
        assert_true(loss[i] == loss[0]);
        assert_memory_equal(g[i], g[0], (size_t)n * sizeof(double));
    }
    for (int i = 0; i < 3; i++) mem_free(g[i]);
}

void whole_model_check_packing(const char *dir, const char *targets)
{
    struct config cfg;
    struct run r;
    whole_model_open(&r, &cfg, dir, targets, CFG_RECOMPUTE_NONE);
    const int64_t n = r.model.adapters.n_flat;
    double *g = mem_array(3 * n, sizeof(*g));
    const double both = whole_model_loss_of_12(&r.model, g);
    const double sum = whole_model_part_loss(&r.model, 0, WHOLE_FIRST, g + n) +
                       whole_model_part_loss(&r.model, WHOLE_FIRST, WHOLE_TOKENS, g + 2 * n);
    assert_close(both, sum, 1e-13);
    for (int64_t k = 0; k < n; k++) g[n + k] += g[2 * n + k];
    assert_true(relative_error(g, g + n, n) < 1e-12);
    mem_free(g);
    run_close(&r);
}

int whole_model_open_gpu(const char *dir, const char *targets, struct err *err)
{
    const struct lora_options lora = {.r = 8, .alpha = 8, .targets = targets, .layers = ""};
    const struct model_options opt = {.max_len = 64};
    struct ops gpu = *ops_cpu();
    struct device dev, measure;
    struct safetensors st;
    struct adapters ad;
    struct arch a;
    struct model m;
    gpu.own_memory = true;
    if (arch_load(&a, dir, err) || safetensors_open(&st, dir, err) || published_rename(&st, &a, err) ||
        device_open(&dev, "cpu", "bf16", err) || adapters_plan(&ad, &a, &lora, err))
        fail_msg("%s", err->msg);
    dev.ops = &gpu;
    device_dry_run(&measure, &dev);
    const int rc = model_open(&m, &measure, &a, &st, &ad, &opt, 1, err);
    model_close(&m);
    device_close(&dev);
    safetensors_close(&st);
    return rc;
}
