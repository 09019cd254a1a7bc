/* policy_value.h - the loss of one completion (row) in online RL, and its derivatives: the same code on the CPU and on
 * GPUs, in f64.
 *
 * lp, old, ref: log-probabilities of a token by the trained model, the old one, the reference; H its entropy, w its
 * weight, m 0 where H is below entropy_from, else 1; A the row's advantage, s its scale
 *   r = exp(lp - old) of a token, exp(mean(lp - old)) or exp(sum(lp - old)) of the row
 *   k = exp(ref - lp) - (ref - lp) - 1, with POLICY_K3_RATIO times r
 *   l = -min(min(r, delta) A, clip(r, low, high) A), in CISPO -min(r, high) A lp with min(r, high) a constant
 * loss of the row = s sum_t (m w l + beta k) - entropy_scale sum_t m H; with POLICY_SUM the first term is
 * s w l of the row */
#ifndef MT_POLICY_VALUE_H
#define MT_POLICY_VALUE_H

#include "kernels/format/minifloat.h"
#include "kernels/ops/ops.h"

/* A token: log-probabilities, entropy, weight. Without an old or a reference model theirs is logp. */
struct policy_token {
    double logp, old, reference, entropy, weight;
};
/* What the tokens of a row have in common. */
struct policy_row {
    double advantage, scale, weight, n;
    double log_ratio; /* of the row: sum of lp - old */
    double kept;      /* sum of m w */
    double kl;        /* sum of k, without r */
};
/* l as a function of r; r dl/dr; whether r is clipped. */
struct policy_clip {
    double loss, slope;
    bool low, high;
};
/* What a token adds to the sums of its row, and the derivatives of the row's loss. */
struct policy_share {
    double loss, kl, ratio, dnll, dentropy;
    bool low, high;
};

/* r A, also where r is infinite and A is 0. */
MT_BOTH double policy_times(double a, double b) { return a == 0 || b == 0 ? 0 : a * b; }

MT_BOTH struct policy_clip policy_clip(const struct policy *p, double r, double advantage)
{
    const bool bounded = p->delta > 0 && r > p->delta, above = r > p->high, below = r < p->low;
    const double plain = policy_times(bounded ? p->delta : r, advantage);
    const double clipped = policy_times(above ? p->high : below ? p->low : r, advantage);
    const bool flat = plain <= clipped ? bounded : above || below;
    struct policy_clip c = {plain <= clipped ? -plain : -clipped, flat ? 0 : -policy_times(r, advantage), false, false};
    c.low = below && advantage < 0;
    c.high = above && advantage > 0;
    return c;
}

MT_BOTH double policy_row_ratio(const struct policy *p, const struct policy_row *row)
{
    return exp(p->ratio == POLICY_MEAN ? row->log_ratio / (row->n > 0 ? row->n : 1) : row->log_ratio);
}

/* e^x - x - 1 without cancellation near 0. */
MT_BOTH double policy_k3(double x) { return expm1(x) - x; }

MT_BOTH double policy_keeps(const struct policy *p, const struct policy_token *t)
{
    return t->entropy < p->entropy_from ? 0 : 1;
}

/* Adds a token to the sums of its row, which policy_share reads. */
MT_BOTH void policy_row_add(struct policy_row *row, const struct policy *p, const struct policy_token *t)
{
    row->n += 1;
    row->log_ratio += t->logp - t->old;
    row->kept += policy_keeps(p, t) * t->weight;
    row->kl += policy_k3(t->reference - t->logp);
}

/* The KL of a token with ratio r, and its derivatives. */
MT_BOTH void policy_add_kl(struct policy_share *s, const struct policy *p, const struct policy_row *row,
                           const struct policy_token *t, double r)
{
    const double e = t->reference - t->logp, k = policy_k3(e), slope = -expm1(e); /* slope: dk/dlp */
    const bool with_ratio = p->kl == POLICY_K3_RATIO;
    double d = slope;
    s->kl = with_ratio ? policy_times(k, r) : k;
    if (with_ratio && p->ratio == POLICY_TOKEN) d = policy_times(slope + k, r);
    if (with_ratio && p->ratio == POLICY_MEAN) d = policy_times(slope + row->kl / row->n, r);
    if (!(p->beta > 0)) return;
    s->loss += row->scale * p->beta * s->kl;
    s->dnll -= row->scale * p->beta * d;
}

/* Call after policy_row_add of all tokens of the row. */
MT_BOTH struct policy_share policy_share(const struct policy *p, const struct policy_row *row,
                                         const struct policy_token *t)
{
    struct policy_share s = {0, 0, 0, 0, 0, false, false};
    const double r = p->ratio == POLICY_TOKEN ? exp(t->logp - t->old) : policy_row_ratio(p, row);
    const double keeps = policy_keeps(p, t), w = keeps * t->weight;
    const struct policy_clip c = policy_clip(p, r, row->advantage);
    s.ratio = r;
    s.low = c.low;
    s.high = c.high;
    if (p->detached) {
        const double d = row->scale * policy_times(w, policy_times(r > p->high ? p->high : r, row->advantage));
        s.loss = -d * t->logp;
        s.dnll = d;
    } else if (p->ratio == POLICY_SUM) {
        s.dnll = -row->scale * policy_times(row->weight, c.slope);
    } else {
        s.loss = row->scale * policy_times(w, c.loss);
        s.dnll = -row->scale * policy_times(p->ratio == POLICY_MEAN ? row->kept / row->n : w, c.slope);
    }
    if (p->ratio != POLICY_SUM) policy_add_kl(&s, p, row, t, r);
    s.loss -= p->entropy_scale * keeps * t->entropy;
    s.dentropy = -p->entropy_scale * keeps;
    return s;
}

MT_BOTH void policy_part_add(double *part, const struct policy *p, const struct policy_share *s,
                             const struct policy_token *t)
{
    part[POLICY_LOSS] += s->loss;
    part[POLICY_TOKENS] += 1;
    part[POLICY_ENTROPY] += t->entropy;
    part[POLICY_KL_SUM] += s->kl;
    if (p->ratio != POLICY_TOKEN) return;
    part[POLICY_UNITS] += 1;
    part[POLICY_RATIO] += s->ratio;
    part[POLICY_LOW] += s->low;
    part[POLICY_HIGH] += s->high;
    part[POLICY_SUMS + POLICY_RATIO_MOST] = fmax(part[POLICY_SUMS + POLICY_RATIO_MOST], s->ratio);
    part[POLICY_SUMS + POLICY_INVERSE_MOST] = fmax(part[POLICY_SUMS + POLICY_INVERSE_MOST], 1 / s->ratio);
}

/* After all tokens of a row: adds the terms that a row has once. */
MT_BOTH void policy_part_end(double *part, const struct policy *p, const struct policy_row *row)
{
    double *most = part + POLICY_SUMS;
    if (p->ratio != POLICY_TOKEN) {
        const double r = policy_row_ratio(p, row);
        const struct policy_clip c = policy_clip(p, r, row->advantage);
        if (p->ratio == POLICY_SUM) part[POLICY_LOSS] += row->scale * policy_times(row->weight, c.loss);
        part[POLICY_UNITS] = 1;
        part[POLICY_RATIO] = r;
        part[POLICY_LOW] = c.low;
        part[POLICY_HIGH] = c.high;
        most[POLICY_RATIO_MOST] = r;
        most[POLICY_INVERSE_MOST] = 1 / r;
    }
    if (!(part[POLICY_UNITS] > 0)) return;
    most[POLICY_NOT_LOW_MOST] = 1 - part[POLICY_LOW] / part[POLICY_UNITS];
    most[POLICY_HIGH_MOST] = part[POLICY_HIGH] / part[POLICY_UNITS];
}

/* ---- importance weights ---- */

/* The weight e^d within its bounds; d: log-probability by the old model minus that by the sampler. */
MT_BOTH double importance_weight(const struct importance *p, double d)
{
    const double w = exp(d);
    if (w <= p->cap && w >= p->floor) return w;
    return !p->limits ? 0 : w < p->floor ? p->floor : p->cap;
}

MT_BOTH void importance_add_weight(double *part, const struct importance *p, double w)
{
    double *most = part + IMPORTANCE_SUMS;
    part[IMPORTANCE_WEIGHTS] += 1;
    part[IMPORTANCE_WEIGHT] += w;
    most[IMPORTANCE_WEIGHT_MOST] = fmax(most[IMPORTANCE_WEIGHT_MOST], w);
    most[IMPORTANCE_BELOW_MOST] = fmax(most[IMPORTANCE_BELOW_MOST], p->cap - w);
}

/* Adds a label. Returns d; 0 if the sampler's log-probability is unknown. */
MT_BOTH double importance_add(double *part, double nll, double sampler)
{
    const double d = sampler - nll;
    double *most = part + IMPORTANCE_SUMS;
    if (isnan(sampler)) return 0;
    part[IMPORTANCE_KNOWN] += 1;
    part[IMPORTANCE_DIFFERENCE] += fabs(d);
    most[IMPORTANCE_DIFFERENCE_MOST] = fmax(most[IMPORTANCE_DIFFERENCE_MOST], fabs(d));
    return d;
}

#endif
