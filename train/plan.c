/* plan.c - measures a run with the very code that will run it, and picks the least recomputation that fits. */
#include "train/plan.h"

#include <string.h>

#include "data/loader.h"
#include "train/peft.h"

struct model_options plan_model_options(const struct config *cfg, enum recompute recompute)
{
    return (struct model_options){.max_len = cfg->data.seq_len,
                                  .recompute = recompute,
                                  .aux_coef = cfg->train.aux_loss_coef,
                                  .aux_pooled = cfg->train.aux_convention == CFG_AUX_TRANSFORMERS};
}

int plan_adapters(struct adapters *ad, const struct arch *a, const struct config *cfg, const char *adapter_dir,
                  struct err *err)
{
    const struct lora_options opt = {.r = cfg->lora.r,
                                     .alpha = cfg->lora.alpha,
                                     .dropout = cfg->lora.dropout,
                                     .rslora = cfg->lora.rslora,
                                     .targets = cfg->lora.targets,
                                     .layers = cfg->lora.layers};
    return adapter_dir ? peft_plan(ad, a, adapter_dir, err) : adapters_plan(ad, a, &opt, err);
}

/* The largest micro-batch: one document of seq_len per row, every token labelled. */
static struct model_batch largest_batch(const struct plan *p, const struct config *cfg)
{
    return (struct model_batch){
        .n_tok = p->n_tok, .n_seq = p->n_tok, .n_label = p->n_tok, .max_len = MT_MIN(cfg->data.seq_len, p->n_tok)};
}

/* One micro-batch on a measuring model: peak of the work arena, FLOPs. */
static int64_t measure_pass(struct model *m, const struct model_batch *b, bool backward, double *flops)
{
    const struct model_pass pass = {.backward = backward, .loss_scale = 1, .aux_share = 1};
    m->dev->work = arena_measure("work");
    m->dev->flops = 0;
    model_begin(m, b, &pass);
    model_fwd(m);
    model_loss(m);
    if (backward) model_bwd(m);
    model_end(m);
    *flops = m->dev->flops / (double)b->n_tok;
    return m->dev->work.peak;
}

static int measure(struct plan *p, const struct device *dev, const struct arch *a, const struct safetensors *st,
                   const struct config *cfg, const char *adapter_dir, struct err *err)
{
    const struct model_options opt = plan_model_options(cfg, RECOMPUTE_NONE);
    const struct model_batch b = largest_batch(p, cfg);
    struct device measuring;
    struct adapters ad;
    struct model m;
    double flops[PLAN_MODES];
    device_measure(&measuring, dev);
    if (plan_adapters(&ad, a, cfg, adapter_dir, err) || model_open(&m, &measuring, a, st, &ad, &opt, 0, err)) return -1;
    p->weights = measuring.weights.peak;
    p->experts = m.weights.expert_bytes;
    p->dense = p->weights - p->experts;
    p->state = measuring.state.peak;
    p->trainable = m.adapters.n_values;
    p->ce_chunk = m.ce_chunk;
    p->work_eval = measure_pass(&m, &b, false, &p->flops_fwd);
    for (int r = 0; r < PLAN_MODES; r++) {
        m.recompute = (enum recompute)r;
        p->work[r] = measure_pass(&m, &b, true, &flops[r]);
    }
    if (cfg->train.recompute != CFG_RECOMPUTE_AUTO)
        p->recompute = (enum recompute)(cfg->train.recompute - 1);
    else
        p->chosen = true;
    while (p->chosen && p->recompute < RECOMPUTE_FULL && plan_peak(p, true) > p->budget) p->recompute++;
    p->flops_train = flops[p->recompute];
    model_close(&m);
    return 0;
}

int plan_make(struct plan *p, const struct device *dev, const struct arch *a, const struct safetensors *st,
              const struct config *cfg, const char *adapter_dir, bool train, struct err *err)
{
    const struct loader_options lo = {.seq_len = cfg->data.seq_len, .micro_batch = cfg->train.micro_batch};
    char need[32], have[32];
    *p = (struct plan){.n_tok = loader_max_tokens(&lo), .capped = cfg->train.memory_gb > 0};
    if (a->max_len < cfg->data.seq_len)
        return err_set(err, "data.seq_len %lld is above the model's max_position_embeddings %lld",
                       (long long)cfg->data.seq_len, (long long)a->max_len);
    p->budget = p->capped ? (int64_t)(cfg->train.memory_gb * (1 << 30)) : dev->ops->free_bytes() / 10 * 9;
    if (measure(p, dev, a, st, cfg, adapter_dir, err)) return -1;
    if (plan_peak(p, train) <= p->budget) return 0;
    return err_set(err,
                   "%s needs %s with recompute = %s, the budget is %s (%s): lower data.seq_len, train.micro_batch "
                   "or lora.r%s",
                   train ? "training" : "evaluation", str_bytes(need, plan_peak(p, train)),
                   recompute_name(p->recompute), str_bytes(have, p->budget),
                   p->capped ? "train.memory_gb" : "nine tenths of the free memory",
                   p->chosen ? "" : ", or set train.recompute = auto");
}

int64_t plan_work(const struct plan *p, bool train)
{
    return train ? MT_MAX(p->work[p->recompute], p->work_eval) : p->work_eval;
}

int64_t plan_peak(const struct plan *p, bool train) { return p->weights + p->state + plan_work(p, train); }

static void row(FILE *out, const char *name, int64_t load, int64_t train, int64_t optimizer, int64_t eval)
{
    char b[4][32];
    const int64_t bytes[4] = {load, train, optimizer, eval};
    for (int i = 0; i < 4; i++) str_bytes(b[i], bytes[i]);
    fprintf(out, "  %-34s %12s %12s %12s %12s\n", name, b[0], b[1], b[2], b[3]);
}

void plan_print(const struct plan *p, const struct adapters *ad, FILE *out)
{
    const int64_t work = p->work[p->recompute], fixed = p->weights + p->state;
    const int64_t flat = ad->n_flat, value = ad->opt.param.dtype ? dtype_size(ad->opt.param.dtype) : 4;
    char b[32], c[32];
    fprintf(out, "  %-34s %12s %12s %12s %12s\n", "memory", "load", "fwd + bwd", "optimizer", "evaluation");
    row(out, "experts, packed", p->experts, p->experts, p->experts, p->experts);
    row(out, "attention, embedding, head, norms", p->dense, p->dense, p->dense, p->dense);
    row(out, "adapters and working copies", p->state - 3 * flat * value, p->state - 3 * flat * value,
        p->state - 3 * flat * value, p->state - 3 * flat * value);
    row(out, "gradients", flat * value, flat * value, flat * value, flat * value);
    row(out, "AdamW moments", 2 * flat * value, 2 * flat * value, 2 * flat * value, 2 * flat * value);
    row(out, "activations and scratch", 0, work, 0, p->work_eval);
    row(out, "total", fixed, fixed + work, fixed, fixed + p->work_eval);
    fprintf(out, "\n  recompute = %s%s:", recompute_name(p->recompute), p->chosen ? " (chosen)" : "");
    for (int r = 0; r < PLAN_MODES; r++)
        fprintf(out, " %s %s%s", recompute_name((enum recompute)r), str_bytes(b, fixed + p->work[r]),
                r + 1 < PLAN_MODES ? "," : "");
    fprintf(out, "; budget %s (%s)\n", str_bytes(b, p->budget), p->capped ? "train.memory_gb" : "9/10 of what is free");
    fprintf(out, "  micro-batch of at most %lld tokens, loss head in chunks of %lld labelled tokens\n",
            (long long)p->n_tok, (long long)p->ce_chunk);
    fprintf(out, "  %s trainable parameters; %s FLOP per token forward, %s per token of training\n",
            str_count(b, p->trainable), str_count(c, (int64_t)p->flops_fwd),
            str_count((char[32]){0}, (int64_t)p->flops_train));
}
