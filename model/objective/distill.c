/* distill.c - distillation: alpha CE + (1 - alpha) temperature^2 KL to a teacher: the model itself with other adapters
 * or none, or the likeliest tokens in the data. */
#include "model/model.h"

static void begin(struct model *m, const struct model_batch *b)
{
    const struct distill *d = &m->distill;
    m->kl = (struct teacher){.kind = d->kl, .alpha = (float)d->alpha, .temperature = (float)d->temperature};
    if (d->from == DISTILL_MODEL) {
        m->kl.hidden = model_reference(m, b->n_tok);
        return;
    }
    m->kl.id = arena_tensor_2d(&m->dev->work, DT_I32, b->n_label, d->n_top);
    m->kl.logprob = arena_tensor_2d(&m->dev->work, m->dev->stat_dtype, b->n_label, d->n_top);
    if (m->dev->dry_run) return;
    device_upload(m->dev, m->kl.id.data, b->topk_id, tensor_bytes(m->kl.id));
    device_set_f32(m->dev, m->kl.logprob, b->topk_logprob);
}

static struct tensor loss(struct model *m, struct tensor nll, struct tensor hit)
{
    struct tensor kl = arena_tensor_1d(&m->dev->work, m->dev->stat_dtype, nll.shape[0]);
    op_linear_kl(m->dev, nll, kl, hit, m->dfinal, m->final_norm, &m->weights.head, m->arch.logit_cap, m->label_row,
                 m->label_id, &m->kl, (float)m->pass.loss_scale, m->ce_chunk);
    return kl;
}

static double value(const struct model *m, const struct model_sums *t, int64_t n_label)
{
    const struct distill *d = &m->distill;
    return (d->alpha * t->nll + (1 - d->alpha) * d->temperature * d->temperature * t->kl) / (double)MT_MAX(n_label, 1);
}

static void parts(struct objective_means *e, const struct model *m, const struct model_sums *t, int64_t n_label)
{
    (void)m;
    objective_put(e, "ce", "ce", "%.4f", t->nll, (double)MT_MAX(n_label, 1));
    objective_put(e, "kl", "kl", "%.4g", t->kl, (double)MT_MAX(n_label, 1));
}

const struct objective objective_distill = {.begin = begin, .loss = loss, .value = value, .parts = parts};
