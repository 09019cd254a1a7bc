/* ops_policy.c - the wrappers op_* of a policy: its loss head, the losses of completions. */
#include "kernels/ops/ops_check.h"

void op_linear_policy(struct device *dev, struct tensor nll, struct tensor entropy, struct tensor hit, struct tensor dx,
                      struct tensor x, const struct weight *w, float cap, struct tensor rows, struct tensor ids,
                      struct tensor weight, float temperature, int64_t chunk)
{
    const int64_t n_label = rows.shape[0];
    want_weight(__func__, w, 1, w->n_out, x.shape[1]);
    WANT(nll, dev->stat_dtype, n_label);
    WANT(entropy, dev->stat_dtype, n_label);
    WANT(hit, DT_I32, n_label);
    WANT_OPT(dx, dev->act_dtype, x.shape[0], w->n_in);
    WANT(x, dev->act_dtype, x.shape[0], w->n_in);
    WANT(rows, DT_I32, n_label);
    WANT(ids, DT_I32, n_label);
    WANT_OPT(weight, dev->stat_dtype, n_label, 2);
    MT_REQUIRE(chunk > 0 && temperature > 0, "a chunk of %lld rows, temperature %g", (long long)chunk,
               (double)temperature);
    count_dense(dev, n_label, w->n_out, w->n_in);              /* x W^T */
    if (dx.ndim) count_dense(dev, n_label, w->n_out, w->n_in); /* dlogits W */
    MOVES(dev, nll, entropy, hit, rows, ids, dx, weight, tensor_rows(x, 0, n_label));
    moves_weight(dev, w, n_label);
    RUN(0, linear_policy, nll, entropy, hit, dx, x, w, cap, rows, ids, weight, temperature, chunk);
    round_act(dev, dx);
}

void op_policy(struct device *dev, struct tensor part, struct tensor weight, const struct policy *p,
               const struct policy_tokens *t, struct tensor values, const struct answers *a)
{
    const int64_t n = a->first.shape[0], n_label = t->nll.shape[0];
    WANT(a->cu, DT_I32, n + 1);
    WANT(a->first, DT_I32, n);
    WANT(part, DT_F64, n, POLICY_PARTS);
    WANT(weight, dev->stat_dtype, n_label, 2);
    WANT(values, DT_F64, n, POLICY_VALUES);
    WANT(t->nll, dev->stat_dtype, n_label);
    WANT(t->entropy, dev->stat_dtype, n_label);
    WANT_OPT(t->old, dev->stat_dtype, n_label);
    WANT_OPT(t->reference, dev->stat_dtype, n_label);
    WANT_OPT(t->weight, dev->stat_dtype, n_label);
    MOVES(dev, part, weight, values, t->nll, t->entropy, t->old, t->reference, t->weight);
    RUN(0, policy, part, weight, p, t, values, a);
}

void op_importance(struct device *dev, struct tensor part, struct tensor weight, struct tensor values,
                   const struct importance *p, struct tensor nll, struct tensor sampler, const struct answers *a)
{
    const int64_t n = a->first.shape[0], n_label = nll.shape[0];
    WANT(a->cu, DT_I32, n + 1);
    WANT(part, DT_F64, n, IMPORTANCE_PARTS);
    WANT(weight, dev->stat_dtype, n_label);
    WANT(values, DT_F64, n, POLICY_VALUES);
    WANT(nll, dev->stat_dtype, n_label);
    WANT(sampler, dev->stat_dtype, n_label);
    MOVES(dev, part, weight, nll, sampler);
    RUN(0, importance, part, weight, values, p, nll, sampler, a);
}

void op_policy_sum(struct device *dev, struct tensor sums, struct tensor most, struct tensor part)
{
    WANT(sums, DT_F64, sums.shape[0]);
    WANT(most, DT_F64, most.shape[0]);
    WANT(part, DT_F64, part.shape[0], sums.shape[0] + most.shape[0]);
    MOVES(dev, part);
    RUN(0, policy_sum, sums, most, part);
}

void op_scale_rows(struct device *dev, struct tensor dx, struct tensor rows, struct tensor weight)
{
    const int64_t n_label = rows.shape[0];
    WANT(dx, dev->act_dtype, dx.shape[0], dx.shape[1]);
    WANT(rows, DT_I32, n_label);
    WANT(weight, dev->stat_dtype, n_label, 2);
    MOVES(dev, tensor_rows(dx, 0, n_label), tensor_rows(dx, 0, n_label), rows, weight);
    RUN(0, scale_rows, dx, rows, weight);
    round_act(dev, dx);
}
