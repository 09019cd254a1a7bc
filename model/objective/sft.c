/* sft.c - supervised fine-tuning: the cross-entropy of the labelled tokens. */
#include "model/model.h"

static struct tensor loss(struct model *m, struct tensor nll, struct tensor hit)
{
    op_linear_ce(m->dev, nll, hit, m->dfinal, m->final_norm, &m->weights.head, m->arch.logit_cap, m->label_row,
                 m->label_id, (float)m->pass.loss_scale, m->ce_chunk);
    return (struct tensor){0};
}

static double value(const struct model *m, const struct model_sums *t, int64_t n_label)
{
    (void)m;
    return t->nll / (double)MT_MAX(n_label, 1);
}

static void parts(struct objective_means *e, const struct model *m, const struct model_sums *t, int64_t n_label)
{
    (void)e, (void)m, (void)t, (void)n_label; /* the loss has one part */
}

const struct objective objective_sft = {.loss = loss, .value = value, .parts = parts};
