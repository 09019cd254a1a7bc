/* sft.c - supervised fine-tuning: the cross-entropy of the labelled tokens. */
#include "model/model.h"

static struct tensor loss(struct model *m, struct tensor nll, struct tensor hit)
{
    op_linear_ce(m->dev, nll, hit, m->dfinal, m->final_norm, &m->weights.head, m->label_row, m->label_id,
                 (float)m->pass.loss_scale, m->ce_chunk);
    return (struct tensor){0};
}

static double value(const struct model *m, const struct model_sums *t)
{
    (void)m;
    return t->nll;
}

const struct objective objective_sft = {.loss = loss, .value = value};
