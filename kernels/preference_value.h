/* preference_value.h - the loss of one pair of answers, or of one row of KTO, and its derivatives: the same code on the
 * CPU and on GPUs, in f64.
 *
 * p, r: log-probability of an answer by the model and by the reference, n its tokens; c chosen, j rejected;
 * L(x) = -log sigmoid(x)
 *   DPO:   (1 - e) L(x) + e L(-x), x = beta ((p_c - r_c) - (p_j - r_j)), e label smoothing
 *   IPO:   (d - 1 / (2 beta))^2, d = (p_c - r_c) / n_c - (p_j - r_j) / n_j
 *   SimPO: L(beta (p_c / n_c - p_j / n_j) - gamma)
 *   ORPO:  NLL + beta L(odds(p_c / n_c) - odds(p_j / n_j)), odds(m) = m - log(1 - e^m); NLL: mean over all labels of c
 *   KTO:   weight sigmoid(-x), x = beta (p - r - z), for a bad answer x = -beta (p - r - z); weight desirable or
 *          undesirable, z the baseline */
#ifndef MT_PREFERENCE_VALUE_H
#define MT_PREFERENCE_VALUE_H

#include "kernels/format/minifloat.h"
#include "kernels/ops/ops.h"

/* One answer. */
struct preference_answer {
    double logp, all, reference; /* of the completion; of all labels; of the completion by the reference */
    double n, n_all;             /* labels */
};
/* What a pair or row adds to the sums, and the weights of its answers (preference_fn). */
struct preference_unit {
    double sum[PREFERENCE_SUMS];
    double weight[2][2];
};

MT_BOTH double preference_sigmoid(double x)
{
    const double e = exp(-fabs(x));
    return (x < 0 ? e : 1) / (1 + e);
}

MT_BOTH double preference_log_loss(double x) { return log1p(exp(-fabs(x))) + (x < 0 ? -x : 0); }

MT_BOTH void preference_dpo(struct preference_unit *u, double d[2], const struct preference *p,
                            const struct preference_answer a[2])
{
    const double e = p->label_smoothing;
    const double x = p->beta * ((a[0].logp - a[0].reference) - (a[1].logp - a[1].reference));
    u->sum[PREFERENCE_LOSS] = (1 - e) * preference_log_loss(x) + e * preference_log_loss(-x);
    d[0] = p->beta * (e * preference_sigmoid(x) - (1 - e) * preference_sigmoid(-x));
    d[1] = -d[0];
}

MT_BOTH void preference_ipo(struct preference_unit *u, double d[2], const struct preference *p,
                            const struct preference_answer a[2])
{
    const double x = (a[0].logp - a[0].reference) / a[0].n - (a[1].logp - a[1].reference) / a[1].n;
    const double off = x - 1 / (2 * p->beta);
    u->sum[PREFERENCE_LOSS] = off * off;
    d[0] = 2 * off / a[0].n;
    d[1] = -2 * off / a[1].n;
}

MT_BOTH void preference_simpo(struct preference_unit *u, double d[2], const struct preference *p,
                              const struct preference_answer a[2])
{
    const double x = p->beta * (a[0].logp / a[0].n - a[1].logp / a[1].n) - p->gamma;
    const double slope = -p->beta * preference_sigmoid(-x);
    u->sum[PREFERENCE_LOSS] = preference_log_loss(x);
    d[0] = slope / a[0].n;
    d[1] = -slope / a[1].n;
}

/* other[i] = 1 - e^m, the probability of another token: the derivative of odds(m) is 1 / other[i]. */
MT_BOTH void preference_orpo(struct preference_unit *u, double d[2], const struct preference *p,
                             const struct preference_answer a[2])
{
    const double m[2] = {a[0].logp / a[0].n, a[1].logp / a[1].n}, other[2] = {-expm1(m[0]), -expm1(m[1])};
    const double x = (m[0] - m[1]) - (log(other[0]) - log(other[1]));
    const double slope = -p->beta * preference_sigmoid(-x);
    u->sum[PREFERENCE_NLL] = -a[0].all / a[0].n_all;
    u->sum[PREFERENCE_LOSS] = u->sum[PREFERENCE_NLL] + p->beta * preference_log_loss(x);
    d[0] = slope / other[0] / a[0].n - 1 / a[0].n_all;
    d[1] = -slope / other[1] / a[1].n;
    u->weight[0][1] = p->scale / a[0].n_all;
}

/* sum [5] of one side. */
MT_BOTH void preference_side(double *sum, const struct preference *p, const struct preference_answer *a, bool per_token)
{
    const double logp = per_token ? a->logp / a->n : a->logp;
    sum[PREFERENCE_REWARD] = p->beta * (logp - a->reference);
    sum[PREFERENCE_LOGP] = logp;
    sum[PREFERENCE_TOTAL] = a->logp;
    sum[PREFERENCE_TOKENS] = a->n;
    sum[PREFERENCE_ANSWERS] = 1;
}

MT_BOTH struct preference_unit preference_pair(const struct preference *p, const struct preference_answer a[2])
{
    const bool per_token = p->kind == PREFERENCE_SIMPO || p->kind == PREFERENCE_ORPO;
    struct preference_unit u = {{0}, {{0}}};
    double d[2] = {0, 0}; /* dloss/dlogp */
    if (p->kind == PREFERENCE_DPO) preference_dpo(&u, d, p, a);
    if (p->kind == PREFERENCE_IPO) preference_ipo(&u, d, p, a);
    if (p->kind == PREFERENCE_SIMPO) preference_simpo(&u, d, p, a);
    if (p->kind == PREFERENCE_ORPO) preference_orpo(&u, d, p, a);
    for (int side = 0; side < 2; side++) {
        preference_side(u.sum + side * PREFERENCE_SIDE, p, &a[side], per_token);
        u.weight[side][0] = -p->scale * d[side];
    }
    u.weight[0][0] += p->sft_scale;
    u.sum[PREFERENCE_RIGHT] = u.sum[PREFERENCE_REWARD] > u.sum[PREFERENCE_REWARD + PREFERENCE_SIDE];
    return u;
}

MT_BOTH struct preference_unit preference_row(const struct preference *p, const struct preference_answer *a, bool good)
{
    const double ratio = a->logp - a->reference, sign = good ? 1 : -1, weight = good ? p->desirable : p->undesirable;
    struct preference_unit u = {{0}, {{0}}};
    if (p->kind == PREFERENCE_KL) {
        u.sum[PREFERENCE_RATIO] = ratio;
        return u;
    }
    u.sum[PREFERENCE_RATIO] = p->baseline;
    const double low = preference_sigmoid(-sign * p->beta * (ratio - p->baseline));
    u.sum[PREFERENCE_LOSS] = weight * low;
    u.weight[0][0] = p->scale * weight * sign * p->beta * low * (1 - low);
    preference_side(u.sum + (good ? 0 : PREFERENCE_SIDE), p, a, false);
    return u;
}

#endif
