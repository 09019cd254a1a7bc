/* distill.c - the [distill] section: the teacher is the model itself with other adapters or none, or rows with a
 * teacher's tokens. */
#include "train/objective/distill.h"

#include <stdio.h>
#include <string.h>

#include "data/json/text.h"
#include "train/objective/run_objective.h"

const char *distill_adapter(const char *teacher)
{
    static const char adapter[] = "adapter:";
    const size_t n = sizeof(adapter) - 1;
    return strncmp(teacher, adapter, n) ? NULL : teacher + n;
}

static const char *adapter_of(const struct config *c) { return distill_adapter(c->distill.teacher); }

static enum distill_from from(const struct config *c)
{
    return !strcmp(c->distill.teacher, "rows")                    ? DISTILL_ROWS
           : !strcmp(c->distill.teacher, "base") || adapter_of(c) ? DISTILL_MODEL
                                                                  : DISTILL_NONE;
}

static int check(const struct config *c, struct err *err)
{
    const char *dir = adapter_of(c);
    if (from(c) == DISTILL_NONE || (dir && !*dir))
        return err_set(err, "distill.teacher = \"%.80s\": expected none, base, rows or adapter:DIR",
                       c->distill.teacher);
    if (from(c) == DISTILL_ROWS && c->distill.kl == CFG_KL_REVERSE)
        return err_set(err,
                       "distill.kl = reverse needs the teacher's whole distribution, and distill.teacher = rows has "
                       "only the likeliest tokens: set forward, or distill.teacher = base or adapter:DIR");
    return 0;
}

struct distill distill_options(const struct config *c, const struct arch *a)
{
    return (struct distill){.from = from(c),
                            .kl = c->distill.kl == CFG_KL_REVERSE ? KL_REVERSE : KL_FORWARD,
                            .alpha = c->distill.alpha,
                            .temperature = c->distill.temperature,
                            .n_top = from(c) == DISTILL_ROWS ? MT_MIN(c->distill.topk, a->vocab) : 0};
}

static void options(struct model_options *opt, const struct config *c, const struct arch *a)
{
    opt->distill = distill_options(c, a);
    opt->has_reference = opt->distill.from == DISTILL_MODEL;
}

/* Warns of a distillation without gradient. B of a new adapter is zero, so the student equals the base model, with any
 * A and any dropout. */
static void warn(const struct config *c)
{
    if (strcmp(c->distill.teacher, "base") || c->distill.alpha > 0 || c->lora.init_from[0] || config_quantises(c) ||
        c->train.aux_loss_coef > 0)
        return;
    log_warn(
        "distill.teacher = base with distill.alpha = 0: a new adapter is the base model, so nothing is learnt: set "
        "distill.alpha above 0, lora.init_from, quant.weights or quant.activations");
}

static void describe(struct text_buf *text, const struct config *c)
{
    char losses[128];
    snprintf(losses, sizeof(losses), "; the losses are %g CE + %g KL, perplexity is that of CE", c->distill.alpha,
             (1 - c->distill.alpha) * c->distill.temperature * c->distill.temperature);
    text_put(text, "teacher ");
    text_put(text, c->distill.teacher);
    text_put(text, losses);
}

const struct run_objective run_objective_distill = {.kind = &objective_distill,
                                                    .check = check,
                                                    .options = options,
                                                    .reference = adapter_of,
                                                    .reference_key = "distill.teacher = adapter:",
                                                    .warn = warn,
                                                    .name = "distillation",
                                                    .describe = describe};
