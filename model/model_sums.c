/* model_sums.c - losses, counts and gradients of a step: their sums over micro-batches and ranks, and reading them. */
#include <math.h>
#include <string.h>

#include "model/model.h"

void model_clear(struct model *m)
{
    device_zero(m->dev, m->sums);
    grad_sums_clear(&m->grad_sums, m->dev);
    if (m->sums_in_order.ndim) device_zero(m->dev, m->sums_in_order);
    m->n_label = 0;
}

void model_add(struct model *m)
{
    struct device *dev = m->dev;
    const int64_t world = m->par.all->world, mark = arena_mark(&dev->work);
    const struct tensor mine = tensor_rows(m->sums, 0, SUM_GRAD);
    if (!m->sums_in_order.ndim) return;
    grad_sums_add(&m->grad_sums, dev, m->adapters.opt.grad);
    const struct tensor all = arena_tensor_2d(&dev->work, DT_F64, world, SUM_GRAD);
    comm_all_gather(m->par.all, dev, tensor_1d(all.data, DT_F64, world * SUM_GRAD), mine);
    op_add_in_order(dev, m->sums_in_order, all);
    device_zero(dev, mine);
    arena_release(&dev->work, mark);
}

void model_sum(struct model *m) { comm_all_reduce_sum(m->par.all, m->dev, tensor_rows(m->sums, 0, SUM_GRAD)); }

void model_sum_step(struct model *m)
{
    if (!m->sums_in_order.ndim) {
        model_sum(m);
        return;
    }
    grad_sums_end(&m->grad_sums, m->dev, m->adapters.opt.grad);
    for (int64_t l = 0; l < m->arch.n_layer; l++) adapters_freeze(&m->adapters, m->dev, l);
    op_add_in_order(m->dev, tensor_rows(m->sums, 0, SUM_GRAD), /* which model_add left 0 */
                    tensor_2d(m->sums_in_order.data, DT_F64, 1, SUM_GRAD));
}

/* Counts each gradient element once: replicated elements on this rank, elements of divided experts on the rank that
 * holds the expert. */
void model_norm(struct model *m)
{
    const struct tensor grad = m->adapters.opt.grad;
    const bool ep = m->adapters.ep;
    const int64_t n = ep ? m->adapters.n_common : grad.shape[0];
    op_sumsq(m->dev, tensor_rows(m->sums, SUM_GRAD, 2), tensor_rows(grad, 0, n));
    if (!ep) return;
    op_sumsq(m->dev, tensor_rows(m->sums, SUM_GRAD + 2, 2), tensor_rows(grad, n, grad.shape[0] - n));
    comm_all_reduce_sum(m->par.ep, m->dev, tensor_rows(m->sums, SUM_GRAD + 2, 2));
}

void model_read(struct model *m, struct model_sums *out)
{
    double sum[MODEL_SUMS], *grad = sum + SUM_GRAD;
    device_get(m->dev, sum, m->sums);
    *out = (struct model_sums){.nll = f64_unsigned_nan(sum[0]),
                               .kl = f64_unsigned_nan(sum[2]),
                               .aux = sum[SUM_AUX],
                               .n_label = m->n_label,
                               .n_hit = (int64_t)sum[1],
                               .grad_norm = f64_unsigned_nan(sqrt(grad[0] + grad[2])),
                               .n_bad_grad = (int64_t)(grad[1] + grad[3])};
    for (int i = 0; i < PREFERENCE_SUMS; i++) out->preference[i] = f64_unsigned_nan(sum[SUM_PREFERENCE + i]);
    for (int i = 0; i < POLICY_SUMS; i++) out->policy[i] = f64_unsigned_nan(sum[SUM_POLICY + i]);
    for (int i = 0; i < IMPORTANCE_SUMS; i++) out->importance[i] = f64_unsigned_nan(sum[SUM_IMPORTANCE + i]);
    memcpy(out->policy_most, sum + SUM_POLICY_MOST, sizeof(out->policy_most));
    memcpy(out->importance_most, sum + SUM_IMPORTANCE_MOST, sizeof(out->importance_most));
}

double model_objective(const struct model *m, const struct model_sums *t, int64_t n_label)
{
    return m->objective->value(m, t, n_label);
}

struct objective_means model_parts(const struct model *m, const struct model_sums *t, int64_t n_label)
{
    struct objective_means e = {.n = 0};
    m->objective->parts(&e, m, t, n_label);
    return e;
}

void model_read_experts(struct model *m, int64_t *rows, double *gates)
{
    const int64_t n = m->arch.n_layer * m->arch.n_exp;
    double *sum = mem_array(2 * n, sizeof(*sum));
    comm_all_reduce_sum(m->par.all, m->dev, m->expert_sums);
    device_get(m->dev, sum, m->expert_sums);
    for (int64_t i = 0; i < n; i++) rows[i] = (int64_t)sum[i];
    if (gates) memcpy(gates, sum + n, (size_t)n * sizeof(*gates));
    device_zero(m->dev, m->expert_sums);
    mem_free(sum);
}
