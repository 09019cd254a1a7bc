/* run_banner.c - see run_banner.h. Also warns of settings that have little or no effect. */
#include "train/session/run_banner.h"

#include <stdio.h>

#include "model/lora_table.h"
#include "train/objective/run_objective.h"
#include "train/report/profile.h"

/* Warns of an unusual scale: a user who changes lora.r may forget that lora.alpha does not change with it. */
static void warn_of_scale(const struct adapters *all)
{
    const double usual[] = {1. / 4, 4};
    const struct adapters trained = lora_table_trained(all), *ad = &trained;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS && !ad->rslora; t++) {
        if (!ad->target[t] || ((double)ad->scale[t] >= usual[0] && (double)ad->scale[t] <= usual[1])) continue;
        log_warn("lora.alpha = %g with rank %lld scales the adapter of %s by %.3g; usual is 1 or 2: set lora.alpha to "
                 "the rank or twice the rank, as it does not follow lora.r",
                 ad->alpha_of[t], (long long)ad->rank[t], lora_target_name(t), (double)ad->scale[t]);
        return;
    }
}

/* Routed experts have no dropout, as in PEFT. */
static void warn_of_dropout(const struct adapters *ad)
{
    bool any = false;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) any |= ad->target[t] && !lora_target_is_stack(t);
    if (ad->dropout > 0 && !any)
        log_warn("lora.dropout = %g has no effect: lora.targets has only routed experts, which have no dropout in PEFT",
                 ad->dropout);
}

static void warn_of_mixers(const struct run *r)
{
    char text[200];
    if (lora_table_missed(&r->model.adapters, &r->arch, text, sizeof(text))) log_warn("lora.targets: %s", text);
}

/* Warns if a preference objective adapts no routed expert. Most parameters are experts, so the loss may then stay at
 * its first value. */
static void warn_of_experts(const struct run *r)
{
    if (run_objective(r->cfg)->format && !(lora_table_experts(&r->model.adapters, &r->arch) > 0))
        log_warn(
            "lora.targets adapts none of the routed experts, which have most of the parameters: add experts to it; "
            "the loss may stay where it begins");
}

static void print_quant(const struct run *r)
{
    const struct config *cfg = r->cfg;
    const struct model *m = &r->model;
    const bool weights = cfg->quant.weights != CFG_QUANT_NONE,
               adapted = qat_is_adapted(&m->qat, &m->arch, &m->adapters);
    char text[200], format[32], from[48] = "";
    if (!config_quantises(cfg)) return;
    if (cfg->quant.start) snprintf(from, sizeof(from), "; training steps after step %lld", (long long)cfg->quant.start);
    log_info("quantisation-aware training: %s%s%s", run_quant_text(text, cfg, adapted),
             weights && !adapted ? ", which have no adapter" : "", from);
    if (cfg->quant.activations != CFG_QUANT_NONE ||
        !qat_is_identity(&m->qat, &m->arch, &m->adapters, m->weights.expert_format))
        return;
    config_choice(QUANT_FORMATS, cfg->quant.weights, format);
    log_warn("quant.weights = %s has no effect: the experts are MXFP4 already, and %s, or set quant.weights = none",
             format,
             adapted ? "quant.mode = base adds their adapters afterwards: set quant.mode = merged"
                     : "lora.targets adapts none of them: add experts to it");
}

static void print_pairs(const struct run *r)
{
    const struct model *m = &r->model;
    const int64_t least = micro_batch_shares(m);
    if (run_objective(r->cfg)->format != DATA_PREFERENCE) return;
    if (least > 1)
        log_info("both answers of a pair share the rows of their prompt if it has more than %lld tokens",
                 (long long)least);
    else if (least)
        log_info("both answers of a pair share the rows of their prompt");
    else
        log_info("each answer of a pair has rows for its prompt: %s",
                 m->aux_coef > 0 ? "the auxiliary loss counts the tokens of both"
                                 : "not all layers of this model can share them");
}

void run_banner_print(const struct run *r, int64_t n_step)
{
    const struct arch *a = &r->arch;
    char *table = lora_table(&r->model.adapters, a), peak[32], roofs[256], text[PLAN_TEXT];
    log_info("%s", profile_roofs(roofs, &r->dev));
    log_info("%s: %lld layer%s, hidden %lld, %lld experts of width %lld, %lld per token; experts %s", r->model_name,
             (long long)a->n_layer, str_plural(a->n_layer), (long long)a->d_model, (long long)a->n_exp,
             (long long)a->d_ff, (long long)a->top_k, r->model.weights.experts);
    fprintf(stderr, "%s", table);
    print_quant(r);
    warn_of_mixers(r);
    warn_of_experts(r);
    warn_of_scale(&r->model.adapters);
    warn_of_dropout(&r->model.adapters);
    print_pairs(r);
    if (run_objective(r->cfg)->warn) run_objective(r->cfg)->warn(r->cfg);
    log_info("memory by plan: %s, recompute = %s%s", str_bytes(peak, plan_peak(&r->plan, true)),
             acts_save_name(&r->plan.opt.save, r->plan.n_layer), r->plan.chosen ? " (the least that fits)" : "");
    log_info("%s", plan_text(text, &r->plan.opt, &r->plan.memory, r->plan.n_layer));
    log_info("%lld step%s, %lld micro-batch%s each, at most %lld tokens per micro-batch", (long long)n_step,
             str_plural(n_step), (long long)r->cfg->train.grad_accum, r->cfg->train.grad_accum == 1 ? "" : "es",
             (long long)r->plan.n_tok);
    mem_free(table);
}
