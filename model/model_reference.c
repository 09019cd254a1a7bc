/* model_reference.c - the reference of an objective: the weights with other adapters, or with none. */
#include "model/model.h"

#include "model/layers/dora.h"

struct tensor model_reference(struct model *m, int64_t n_tok)
{
    struct device *dev = m->dev;
    const struct arch *a = &m->arch;
    const struct model_pass pass = m->pass;
    const int64_t n_label = m->label_row.shape[0];
    struct tensor hidden = arena_tensor_2d(&dev->work, dev->act_dtype, n_label, a->d_model);
    const int64_t mark = arena_mark(&dev->work);
    struct tensor rows = arena_tensor_2d(&dev->work, dev->act_dtype, n_label, arch_stream_cols(a));
    struct tensor rstd = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label);
    dora_refresh(&m->reference, dev, a, m->weights.layers);
    m->referring = true;
    if (m->costs) m->costs->adapted = false;
    m->pass = (struct model_pass){.backward = false};
    for (int64_t l = 0; l < a->n_layer; l++) {
        m->aux[l] = (struct aux){0};
        layer_adapt(&m->weights.layers[l], a, l, &m->reference.layers[l]);
    }
    acts_push(&m->acts, dev, a, &m->reference, n_tok, false, false);
    model_fwd(m);
    op_gather(dev, rows, m->acts.layers[a->n_layer].x, m->label_row, 1);
    op_rmsnorm_fwd(dev, hidden, rstd, model_sum_streams(m, &m->end, rows), m->weights.norm, &a->norm);
    m->referring = false;
    m->pass = pass;
    arena_release(&dev->work, mark);
    return hidden;
}
