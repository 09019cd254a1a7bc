/* model_head.c - what generation, teachers and comparisons read of a forward pass: logits, drawn tokens, likeliest
 * tokens, losses of tokens; the first activation or gradient that is not finite. */
#include <stdio.h>

#include "model/model.h"

static struct tensor push(struct device *dev, const void *host, int64_t rows, int64_t words)
{
    const struct tensor t = arena_tensor_2d(&dev->work, DT_I32, rows, words);
    if (!dev->dry_run) device_upload(dev, t.data, host, tensor_bytes(t));
    return t;
}

static struct tensor final_norm(struct model *m, struct tensor x)
{
    struct device *dev = m->dev;
    const struct tensor norm = arena_tensor_2d(&dev->work, dev->act_dtype, x.shape[0], m->arch.d_model);
    const struct tensor rstd = arena_tensor_1d(&dev->work, dev->stat_dtype, x.shape[0]);
    op_rmsnorm_fwd(dev, norm, rstd, model_sum_streams(m, &m->end, x), m->weights.norm, &m->arch.norm);
    return norm;
}

/* Logits [n, V] after n rows of the micro-batch. */
static struct tensor logits_of(struct model *m, const int32_t *row, int64_t n)
{
    struct device *dev = m->dev;
    const int64_t padded = (m->arch.vocab + 7) / 8 * 8;
    const struct tensor wide = arena_tensor_2d(&dev->work, dev->stat_dtype, n, padded);
    const struct tensor logits = tensor_cols(wide, 0, m->arch.vocab), rows = push(dev, row, n, 1);
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor x = arena_tensor_2d(&dev->work, dev->act_dtype, n, arch_stream_cols(&m->arch));
    op_gather(dev, x, m->acts.layers[m->arch.n_layer].x, tensor_1d(rows.data, DT_I32, n), 1);
    op_head_logits(dev, logits, final_norm(m, x), &m->weights.head, m->arch.logit_cap);
    arena_release(&dev->work, mark);
    return logits;
}

void model_logits(struct model *m, int64_t row, float *logits)
{
    const int64_t mark = arena_mark(&m->dev->work);
    const int32_t at = (int32_t)row;
    const struct tensor out = logits_of(m, &at, 1);
    device_get_f32(m->dev, logits, tensor_1d(out.data, out.dtype, m->arch.vocab));
    arena_release(&m->dev->work, mark);
}

void model_topk(struct model *m, int64_t k, double temperature, int32_t *id, float *logprob)
{
    struct device *dev = m->dev;
    const int64_t n_label = m->label_row.shape[0], mark = arena_mark(&dev->work);
    const struct tensor norm = final_norm(m, m->acts.layers[m->arch.n_layer].x);
    const struct tensor ids = arena_tensor_2d(&dev->work, DT_I32, n_label, k);
    const struct tensor values = arena_tensor_2d(&dev->work, dev->stat_dtype, n_label, k);
    op_linear_topk(dev, ids, values, norm, &m->weights.head, m->arch.logit_cap, m->label_row, (float)temperature,
                   m->ce_chunk);
    device_download(dev, id, ids.data, tensor_bytes(ids));
    device_get_f32(dev, logprob, values);
    arena_release(&dev->work, mark);
}

void model_nll(struct model *m, float *nll)
{
    struct device *dev = m->dev;
    const int64_t n_label = m->label_row.shape[0], mark = arena_mark(&dev->work);
    const struct tensor norm = final_norm(m, m->acts.layers[m->arch.n_layer].x);
    const struct tensor out = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label);
    const struct tensor hit = arena_tensor_1d(&dev->work, DT_I32, n_label), absent = {0};
    op_linear_ce(dev, out, hit, absent, norm, &m->weights.head, m->arch.logit_cap, m->label_row, m->label_id, 0,
                 m->ce_chunk);
    if (!dev->dry_run) device_get_f32(dev, nll, out);
    arena_release(&dev->work, mark);
}

void model_policy_values(struct model *m, float *nll, float *entropy)
{
    struct device *dev = m->dev;
    const int64_t n_label = m->label_row.shape[0], mark = arena_mark(&dev->work);
    const struct tensor norm = final_norm(m, m->acts.layers[m->arch.n_layer].x), absent = {0};
    const struct tensor out = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label);
    const struct tensor h = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label);
    const struct tensor hit = arena_tensor_1d(&dev->work, DT_I32, n_label);
    op_linear_policy(dev, out, h, hit, absent, norm, &m->weights.head, m->arch.logit_cap, m->label_row, m->label_id,
                     absent, (float)m->policy.temperature, m->ce_chunk);
    if (n_label) device_get_f32(dev, nll, out);
    if (n_label && entropy) device_get_f32(dev, entropy, h);
    arena_release(&dev->work, mark);
}

void model_policy_reference(struct model *m, float *nll)
{
    if (m->policy_tokens.reference.shape[0]) device_get_f32(m->dev, nll, m->policy_tokens.reference);
}

void model_read_reference(struct model *m, double *reference) { device_get(m->dev, reference, m->reference_logps); }

void model_sample(struct model *m, const struct model_draw *d)
{
    struct device *dev = m->dev;
    const int64_t mark = arena_mark(&dev->work);
    struct sampled out = {.token = arena_tensor_1d(&dev->work, DT_I32, d->n),
                          .logprob = arena_tensor_2d(&dev->work, dev->stat_dtype, d->n, 3)};
    struct tensor edits = {0};
    if (d->n_top) {
        out.top_id = arena_tensor_2d(&dev->work, DT_I32, d->n, d->n_top);
        out.top_logprob = arena_tensor_2d(&dev->work, dev->stat_dtype, d->n, d->n_top);
    }
    const struct tensor rows = push(dev, d->rows, d->n, SAMPLE_ROW_WORDS);
    if (d->n_edit) edits = push(dev, d->edits, d->n_edit, SAMPLE_EDIT_WORDS);
    op_sample(dev, &out, logits_of(m, d->row, d->n), rows, edits);
    if (!dev->dry_run) {
        device_download(dev, d->token, out.token.data, tensor_bytes(out.token));
        device_get_f32(dev, d->logprob, out.logprob);
        if (d->n_top) device_download(dev, d->top_id, out.top_id.data, tensor_bytes(out.top_id));
        if (d->n_top) device_get_f32(dev, d->top_logprob, out.top_logprob);
    }
    arena_release(&dev->work, mark);
}

static bool is_finite(struct device *dev, struct tensor x)
{
    double sum2[2];
    const int64_t mark = arena_mark(&dev->work);
    struct tensor out = arena_tensor_1d(&dev->work, DT_F64, 2);
    op_sumsq(dev, out, x);
    device_get(dev, sum2, out);
    arena_release(&dev->work, mark);
    return sum2[1] == 0;
}

struct tensor model_forward_x(const struct model *m, int64_t l)
{
    const struct host_ring *r = &m->acts.inputs;
    struct tensor x = m->acts.layers[l].x;
    if (r->on && l < r->n_host) x.data = r->host[l];
    return x;
}

void model_first_bad(struct model *m, char name[64])
{
    if (m->kl.hidden.ndim && !is_finite(m->dev, m->kl.hidden)) {
        snprintf(name, 64, "output of the teacher");
        return;
    }
    host_ring_join(&m->acts.inputs, m->dev);
    for (int64_t l = 0; l <= m->arch.n_layer; l++) {
        if (is_finite(m->dev, model_forward_x(m, l))) continue;
        if (l == 0)
            snprintf(name, 64, "embedding");
        else
            snprintf(name, 64, "output of layer %lld", (long long)(l - 1));
        return;
    }
    snprintf(name, 64, "%s", is_finite(m->dev, m->final_norm) ? "logits" : "final norm");
}

bool model_first_bad_grad(struct model *m, char name[64])
{
    struct adapters *ad = &m->adapters;
    for (int64_t i = 0; i < ad->n_params; i++) {
        struct tensor g = tensor_rows(ad->opt.grad, ad->params[i].off, lora_param_count(&ad->params[i]));
        if (is_finite(m->dev, g)) continue;
        lora_param_name(&ad->params[i], name);
        return true;
    }
    return false;
}
