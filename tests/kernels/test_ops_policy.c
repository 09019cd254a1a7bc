/* test_ops_policy.c - online RL: log-probabilities and entropies of the loss head, losses and importance weights of
 * completions. */
#include "tests/op_check.h"

#include <float.h>
#include <math.h>

/* ---- the head ---- */

struct head_shape {
    int64_t n_tok, dim, n_vocab, n_label, chunk;
    double temperature;
    bool want_dx, weighted;
    float cap;
};
static const struct head_shape heads[] = {
    {1, 8, 2, 0, 4, 1, true, false, 0},           {5, 8, 17, 3, 2, 1, true, false, 0},
    {5, 8, 17, 3, 2, 0.7, true, true, 0},         {9, 16, 100, 9, 4, 1.7, true, true, 0},
    {9, 16, 100, 9, 4, 1, false, false, 0},       {40, 64, 1000, 31, 16, 1, true, false, 0},
    {150, 64, 2504, 111, 32, 0.9, true, true, 0}, {9, 16, 100, 9, 4, 1.7, true, true, 1.5f},
    {40, 64, 1000, 31, 16, 1, true, false, 2},
};

struct head_case {
    struct device *dev;
    const struct head_shape *s;
    struct weight w;
    struct tensor x, rows, ids, nll, entropy, hit, dx, weight;
};

static struct head_case head_make(struct device *dev, const struct head_shape *s)
{
    struct head_case c = {.dev = dev,
                          .s = s,
                          .w = make_weight(WF_BF16, 1, 0.5, 1, s->n_vocab, s->dim),
                          .x = make_random(dev->act_dtype, 2, 2, s->n_tok, s->dim, -1),
                          .rows = make_empty(DT_I32, s->n_label, -1, -1),
                          .ids = make_empty(DT_I32, s->n_label, -1, -1),
                          .nll = make_empty(dev->stat_dtype, s->n_label, -1, -1),
                          .entropy = make_empty(dev->stat_dtype, s->n_label, -1, -1),
                          .hit = make_empty(DT_I32, s->n_label, -1, -1)};
    if (s->want_dx) c.dx = make_empty(dev->act_dtype, s->n_tok, s->dim, -1);
    if (s->weighted) c.weight = make_random(dev->stat_dtype, 3, 1, s->n_label, 2, -1);
    for (int64_t i = 0; i < s->n_label; i++) {
        set_value(c.rows, i, (double)(i * s->n_tok / s->n_label));
        set_value(c.ids, i, (double)(i * 7 % s->n_vocab));
    }
    return c;
}

static void head_op(struct head_case *c)
{
    op_linear_policy(c->dev, c->nll, c->entropy, c->hit, c->dx, c->x, &c->w, c->s->cap, c->rows, c->ids, c->weight,
                     (float)c->s->temperature, c->s->chunk);
}

static void head_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct head_case c = head_make(dev, params);
    const struct tensor out[] = {c.nll, c.entropy, c.hit, c.dx};
    head_op(&c);
    for (int i = 0; i < MT_LEN(out); i++)
        if (out[i].ndim) o->out[o->n++] = out[i];
}

/* The loss whose gradient dx is. */
static double head_loss(void *arg)
{
    struct head_case *c = arg;
    double sum = 0;
    head_op(c);
    for (int64_t i = 0; i < c->s->n_label; i++) {
        const double a = c->weight.ndim ? value_at(c->weight, 2 * i) : 1;
        const double b = c->weight.ndim ? value_at(c->weight, 2 * i + 1) : 0;
        sum += a * value_at(c->nll, i) + b * value_at(c->entropy, i);
    }
    return sum;
}

static void check_head_values(const struct head_case *c)
{
    const int64_t n = c->w.n_out, dim = c->w.n_in;
    double *v = mem_array(n, sizeof(*v));
    for (int64_t k = 0; k < c->s->n_label; k++) {
        const int64_t row = (int64_t)value_at(c->rows, k), id = (int64_t)value_at(c->ids, k);
        double sum = 0, entropy = 0;
        for (int64_t i = 0; i < n; i++) {
            v[i] = 0;
            for (int64_t d = 0; d < dim; d++)
                v[i] += value_at(c->x, row * dim + d) * (double)bf16_to_f32(((const uint16_t *)c->w.data)[i * dim + d]);
            const double cap = (double)c->s->cap;
            if (cap > 0) v[i] = cap * tanh(v[i] / cap);
            v[i] /= (double)(float)c->s->temperature;
            sum += exp(v[i]);
        }
        for (int64_t i = 0; i < n; i++) entropy -= exp(v[i]) / sum * (v[i] - log(sum));
        assert_close(value_at(c->nll, k), log(sum) - v[id], 1e-7);
        assert_close(value_at(c->entropy, k), entropy, 1e-7);
    }
    mem_free(v);
}

static void heads_are_their_definitions(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(heads); i++) op_check_case(head_run, &heads[i], 4e-6);
    for (int i = 0; i < MT_LEN(heads); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct head_case c = head_make(&dev, &heads[i]);
        head_op(&c);
        check_head_values(&c);
        op_check_end(&dev);
    }
}

static void heads_have_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(heads); i++) {
        struct device dev;
        if (!heads[i].want_dx || !heads[i].n_label) continue;
        op_check_begin(&dev, true);
        struct head_case c = head_make(&dev, &heads[i]);
        head_loss(&c);
        const struct tensor dx = make_copy(c.dx);
        const double error =
            heads[i].n_tok > 10 ? slope_error(head_loss, &c, c.x, dx) : gradient_error(head_loss, &c, c.x, dx);
        if (!(error < 1e-6)) fail_msg("case %d: gradient error %.1e", i, error);
        op_check_end(&dev);
    }
}

/* Logits of -inf and far apart: no NaN. */
static void far_logits(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    const struct head_shape s = {1, 8, 16, 1, 1, 0.05, true, true, 0};
    struct head_case c = head_make(&dev, &s);
    for (int64_t i = 0; i < 8; i++) set_value(c.x, i, 1e4);
    head_op(&c);
    assert_finite(c.nll);
    assert_finite(c.dx);
    assert_close(value_at(c.entropy, 0), 0, 1e-6);
    op_check_end(&dev);
}

/* ---- losses ---- */

enum { NO_OLD = 1, NO_REFERENCE = 2, NO_WEIGHT = 4 };
struct policy_shape {
    enum policy_ratio ratio;
    int64_t n_row, n_label; /* rows of n_label + i % 3 labels, row 2 without any */
    bool detached;
    double delta, beta;
    enum policy_kl kl;
    double entropy_from, entropy_scale;
    unsigned lacks;
};
static const struct policy_shape shapes[] = {
    {POLICY_TOKEN, 0, 1, false, 0, 0, POLICY_K3, 0, 0, 0},
    {POLICY_TOKEN, 5, 4, false, 0, 0, POLICY_K3, 0, 0, NO_REFERENCE | NO_WEIGHT},
    {POLICY_TOKEN, 5, 4, false, 0, 0.3, POLICY_K3, 0, 0, NO_WEIGHT},
    {POLICY_TOKEN, 6, 4, false, 1.6, 0.3, POLICY_K3_RATIO, 0, 0, 0},
    {POLICY_TOKEN, 6, 4, false, 0, 0.2, POLICY_K3, 0.5, 0.25, 0},
    {POLICY_TOKEN, 6, 4, true, 0, 0, POLICY_K3, 0, 0, 0},
    {POLICY_TOKEN, 6, 4, true, 0, 0.3, POLICY_K3_RATIO, 0.5, 0, 0},
    {POLICY_MEAN, 6, 4, false, 0, 0, POLICY_K3, 0, 0, 0},
    {POLICY_MEAN, 6, 4, false, 1.3, 0.3, POLICY_K3_RATIO, 0.5, 0.25, 0},
    {POLICY_MEAN, 6, 4, false, 0, 0.3, POLICY_K3, 0, 0, 0},
    {POLICY_SUM, 6, 4, false, 0, 0, POLICY_K3, 0, 0, 0},
    {POLICY_SUM, 6, 1, false, 0, 0, POLICY_K3, 0, 0, NO_OLD},
    {POLICY_TOKEN, 40, 700, false, 0, 0.3, POLICY_K3, 0.5, 0.1, 0},
    {POLICY_MEAN, 40, 300, false, 0, 0.3, POLICY_K3_RATIO, 0.5, 0.1, 0},
    {POLICY_TOKEN, 7, 9, false, 0, 0.3, POLICY_K3_RATIO, 0, 0, NO_OLD},
};

struct policy_case {
    struct device *dev;
    const struct policy_shape *s;
    struct policy p;
    struct answers a;
    struct policy_tokens t;
    struct tensor values, part, sums, most, weight;
};

static struct tensor shifted(const struct policy_case *c, uint64_t stream, double amplitude, double by)
{
    const struct tensor x = make_random(c->dev->stat_dtype, stream, amplitude, c->t.nll.shape[0], -1, -1);
    for (int64_t i = 0; i < x.shape[0]; i++) set_value(x, i, value_at(x, i) + by);
    return x;
}

static struct policy_case policy_make(struct device *dev, const struct policy_shape *s)
{
    struct policy_case c = {.dev = dev, .s = s};
    const int64_t n = s->n_row;
    int64_t n_label = 0;
    c.a = (struct answers){make_empty(DT_I32, n + 1, -1, -1), make_empty(DT_I32, n, -1, -1)};
    set_value(c.a.cu, 0, 0);
    for (int64_t i = 0; i < n; i++) {
        set_value(c.a.first, i, (double)n_label);
        if (i != 2) n_label += s->n_label + i % 3;
        set_value(c.a.cu, i + 1, (double)n_label);
    }
    c.p = (struct policy){.ratio = s->ratio,
                          .detached = s->detached,
                          .low = s->detached ? 0 : 0.8,
                          .high = 1.28,
                          .delta = s->delta,
                          .beta = s->beta,
                          .kl = s->kl,
                          .entropy_from = s->entropy_from,
                          .entropy_scale = s->entropy_scale};
    c.t.nll = make_empty(dev->stat_dtype, n_label, -1, -1);
    c.t.nll = shifted(&c, 5, 0.8, 1);
    c.t.entropy = shifted(&c, 6, 0.5, 0.6);
    if (!(s->lacks & NO_OLD)) c.t.old = shifted(&c, 7, 0.8, 1);
    if (!(s->lacks & NO_REFERENCE)) c.t.reference = shifted(&c, 8, 0.8, 1);
    if (!(s->lacks & NO_WEIGHT)) c.t.weight = shifted(&c, 9, 0.5, 0.6);
    c.values = make_empty(DT_F64, n, POLICY_VALUES, -1);
    for (int64_t i = 0; i < n; i++) {
        set_value(c.values, i * POLICY_VALUES + POLICY_ADVANTAGE, i == 4 ? 0 : i % 2 ? -0.7 : 1.2);
        set_value(c.values, i * POLICY_VALUES + POLICY_SCALE, 1 / (double)(i + 3));
        set_value(c.values, i * POLICY_VALUES + POLICY_WEIGHT, 0.25 + (double)(i % 3));
    }
    c.part = make_empty(DT_F64, n, POLICY_PARTS, -1);
    c.sums = make_zero(DT_F64, POLICY_SUMS, -1, -1);
    c.most = make_zero(DT_F64, POLICY_EXTREMES, -1, -1);
    c.weight = make_empty(dev->stat_dtype, n_label, 2, -1);
    return c;
}

static void policy_op(struct policy_case *c)
{
    for (int64_t i = 0; i < POLICY_SUMS; i++) set_value(c->sums, i, 0);
    for (int64_t i = 0; i < POLICY_EXTREMES; i++) set_value(c->most, i, 0);
    op_policy(c->dev, c->part, c->weight, &c->p, &c->t, c->values, &c->a);
    op_policy_sum(c->dev, c->sums, c->most, c->part);
}

static void policy_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct policy_case c = policy_make(dev, params);
    policy_op(&c);
    const struct tensor rows = make_empty(DT_I32, c.weight.shape[0], -1, -1);
    const struct tensor dx = make_random(dev->act_dtype, 4, 1, c.weight.shape[0], 8, -1);
    for (int64_t i = 0; i < rows.shape[0]; i++) set_value(rows, i, (double)(rows.shape[0] - 1 - i));
    op_scale_rows(dev, dx, rows, c.weight);
    const struct tensor out[] = {c.part, c.sums, c.most, c.weight, dx};
    for (int i = 0; i < MT_LEN(out); i++) o->out[o->n++] = out[i];
}

static double policy_loss(void *arg)
{
    struct policy_case *c = arg;
    policy_op(c);
    return value_at(c->sums, POLICY_LOSS);
}

static double clamp(double x, double low, double high) { return fmin(fmax(x, low), high); }

static double of_token(struct tensor x, int64_t k, double without) { return x.ndim ? value_at(x, k) : without; }

/* The loss of row i, term by term as the formulas of TRL's trainers have them. */
static double definition(const struct policy_case *c, int64_t i)
{
    const struct policy *p = &c->p;
    const int64_t from = (int64_t)value_at(c->a.cu, i), end = (int64_t)value_at(c->a.cu, i + 1);
    const double a = value_at(c->values, i * POLICY_VALUES), s = value_at(c->values, i * POLICY_VALUES + 1);
    const double n = (double)MT_MAX(end - from, 1);
    double sum = 0, difference = 0;
    for (int64_t k = from; k < end; k++)
        difference += of_token(c->t.old, k, value_at(c->t.nll, k)) - value_at(c->t.nll, k);
    for (int64_t k = from; k < end && p->ratio != POLICY_SUM; k++) {
        const double lp = -value_at(c->t.nll, k), r_token = exp(of_token(c->t.old, k, -lp) + lp);
        const double r = p->ratio == POLICY_MEAN ? exp(difference / n) : r_token;
        const double e = -of_token(c->t.reference, k, -lp) - lp, keeps = value_at(c->t.entropy, k) >= p->entropy_from;
        const double plain = p->delta > 0 ? fmin(r, p->delta) : r;
        double l = -fmin(plain * a, clamp(r, p->low, p->high) * a);
        if (p->detached) l = -fmin(r, p->high) * a * lp;
        sum += l * keeps * of_token(c->t.weight, k, 1);
        sum += p->beta * (exp(e) - e - 1) * (p->kl == POLICY_K3_RATIO ? r : 1);
        sum -= p->entropy_scale / s * keeps * value_at(c->t.entropy, k);
    }
    if (p->ratio == POLICY_SUM) {
        const double r = exp(difference);
        sum = -fmin(r * a, clamp(r, p->low, p->high) * a) * value_at(c->values, i * POLICY_VALUES + 2);
    }
    return s * sum;
}

static void losses_are_their_definitions(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(policy_run, &shapes[i], 4e-6);
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct policy_case c = policy_make(&dev, &shapes[i]);
        double sum = 0;
        policy_op(&c);
        for (int64_t k = 0; k < shapes[i].n_row; k++) sum += definition(&c, k);
        assert_close(value_at(c.sums, POLICY_LOSS), sum, 1e-12);
        assert_close(value_at(c.sums, POLICY_TOKENS), (double)c.t.nll.shape[0], 0);
        op_check_end(&dev);
    }
}

/* dloss/dnll and dloss/dentropy. CISPO, whose ratio is a constant, is tested below. */
static void weights_are_derivatives(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        if (!shapes[i].n_row || shapes[i].n_label > 10 || (shapes[i].lacks & NO_OLD) || shapes[i].detached) continue;
        op_check_begin(&dev, true);
        struct policy_case c = policy_make(&dev, &shapes[i]);
        policy_loss(&c);
        const int64_t n = c.t.nll.shape[0];
        const struct tensor d = make_empty(DT_F64, n, -1, -1), h = make_empty(DT_F64, n, -1, -1);
        for (int64_t k = 0; k < n; k++) set_value(d, k, value_at(c.weight, 2 * k));
        for (int64_t k = 0; k < n; k++) set_value(h, k, value_at(c.weight, 2 * k + 1));
        const double error = gradient_error(policy_loss, &c, c.t.nll, d);
        if (!(error < 1e-7)) fail_msg("case %d: gradient error %.1e", i, error);
        if (shapes[i].entropy_scale > 0) assert_true(gradient_error(policy_loss, &c, c.t.entropy, h) < 1e-7);
        op_check_end(&dev);
    }
}

/* CISPO's weight is the derivative of -c lp with a constant c. Without old log-probabilities r is 1, and has a
 * gradient. */
static void constants(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, true);
    struct policy_shape s = {POLICY_TOKEN, 6, 4, true, 0, 0, POLICY_K3, 0, 0, 0};
    struct policy_case c = policy_make(&dev, &s);
    policy_op(&c);
    for (int64_t i = 0; i < 6; i++)
        for (int64_t k = (int64_t)value_at(c.a.cu, i); k < (int64_t)value_at(c.a.cu, i + 1); k++) {
            const double r = exp(value_at(c.t.old, k) - value_at(c.t.nll, k)), *v = (double *)c.values.data + 3 * i;
            assert_close(value_at(c.weight, 2 * k), v[1] * fmin(r, c.p.high) * v[0] * value_at(c.t.weight, k), 1e-14);
        }
    for (int ratio = 0; ratio < 3; ratio++) {
        s = (struct policy_shape){(enum policy_ratio)ratio, 6, 4, false, 0, 0.3, POLICY_K3_RATIO, 0, 0, NO_OLD};
        struct policy_case without = policy_make(&dev, &s), with = policy_make(&dev, &s);
        with.t.old = with.t.nll;
        policy_op(&without);
        policy_op(&with);
        assert_same_bits(without.weight, with.weight);
        assert_same_bits(without.part, with.part);
        assert_true(value_at(without.weight, 0) > 0 && value_at(without.most, POLICY_RATIO_MOST) == 1);
    }
    op_check_end(&dev);
}

/* A = 0 and weights of 0 beside ratios that overflow; all tokens of a row alike; counts of clipped ratios. */
static void extremes(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, true);
    const struct policy_shape s = {POLICY_TOKEN, 2, 2, false, 0, 0, POLICY_K3, 0, 0, NO_REFERENCE};
    struct policy_case c = policy_make(&dev, &s);
    const double nll[] = {0.5, 0.5, 0.5, 0.5, 0.5}, old[] = {2000, 2000, 0.5, 2.5, 0.1};
    for (int64_t k = 0; k < 5; k++) set_value(c.t.nll, k, nll[k]), set_value(c.t.old, k, old[k]);
    for (int64_t k = 0; k < 5; k++) set_value(c.t.weight, k, 1);
    set_value(c.values, 0, 0); /* the first row, r = inf */
    policy_op(&c);
    assert_finite(c.weight);
    assert_true(value_at(c.weight, 0) == 0 && isfinite(value_at(c.sums, POLICY_LOSS)));
    /* the second row, A < 0: r = 1, e^2 and e^-0.4: the last is below 0.8 and clipped, the others have gradients */
    assert_true(value_at(c.weight, 4) < 0 && value_at(c.weight, 6) < 0 && value_at(c.weight, 8) == 0);
    assert_true(value_at(c.sums, POLICY_LOW) == 1 && value_at(c.sums, POLICY_HIGH) == 0);
    assert_close(value_at(c.most, POLICY_NOT_LOW_MOST), 1, 0); /* no token of the first row is low */
    assert_close(value_at(c.most, POLICY_INVERSE_MOST), exp(0.4), 1e-14);
    set_value(c.values, 0, -1);
    set_value(c.t.weight, 0, 0);
    set_value(c.t.weight, 1, 0); /* the mask of the sampler's correction */
    policy_op(&c);
    assert_finite(c.weight);
    assert_true(isfinite(value_at(c.sums, POLICY_LOSS)));
    op_check_end(&dev);
}

/* ---- importance weights ---- */

static const struct importance bounds[] = {
    {true, false, 3, 0}, {true, true, 1.5, 0.5}, {false, false, 1.5, 0.5}, {false, true, 1.2, 0}, {true, false, 0.1, 0},
};

struct weights_case {
    struct policy_case c; /* without a policy: labels, rows, values */
    struct tensor sampler, weight, part, sums, most;
};

/* Every seventh label is unknown to the sampler. */
static struct weights_case weights_make(struct device *dev)
{
    static const struct policy_shape s = {POLICY_SUM, 9, 300, false, 0, 0, POLICY_K3, 0, 0, NO_OLD | NO_WEIGHT};
    struct weights_case w = {.c = policy_make(dev, &s)};
    w.sampler = shifted(&w.c, 5, 0.8, 1);
    for (int64_t k = 0; k < w.sampler.shape[0]; k++)
        set_value(w.sampler, k, k % 7 == 3 ? NAN : value_at(w.sampler, k) + 0.25 * sin((double)k));
    w.weight = make_empty(dev->stat_dtype, w.sampler.shape[0], -1, -1);
    w.part = make_empty(DT_F64, s.n_row, IMPORTANCE_PARTS, -1);
    w.sums = make_zero(DT_F64, IMPORTANCE_SUMS, -1, -1);
    w.most = make_zero(DT_F64, IMPORTANCE_EXTREMES, -1, -1);
    return w;
}

static void weights_op(struct device *dev, struct weights_case *w, const struct importance *p)
{
    op_importance(dev, w->part, w->weight, w->c.values, p, w->c.t.nll, w->sampler, &w->c.a);
    op_policy_sum(dev, w->sums, w->most, w->part);
}

static void weights_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct weights_case w = weights_make(dev);
    weights_op(dev, &w, params);
    const struct tensor out[] = {w.part, w.sums, w.most, w.weight, w.c.values};
    for (int i = 0; i < MT_LEN(out); i++) o->out[o->n++] = out[i];
}

static double bounded(const struct importance *p, double w)
{
    if (p->limits) return clamp(w, p->floor, p->cap);
    return w > p->cap || w < p->floor ? 0 : w;
}

static double known_difference(const struct weights_case *w, int64_t k)
{
    const double sampler = value_at(w->sampler, k);
    return isnan(sampler) ? 0 : sampler - value_at(w->c.t.nll, k);
}

static void check_weights(const struct weights_case *w, const struct importance *p)
{
    double n = 0, sum = 0, least = DBL_MAX, differences = 0, n_known = 0;
    for (int64_t i = 0; i < w->part.shape[0]; i++) {
        const int64_t from = (int64_t)value_at(w->c.a.cu, i), end = (int64_t)value_at(w->c.a.cu, i + 1);
        double total = 0;
        for (int64_t k = from; k < end; k++) total += known_difference(w, k);
        for (int64_t k = from; k < end; k++) {
            const double want = bounded(p, exp(p->by_row ? total : known_difference(w, k)));
            assert_close(value_at(w->weight, k), want, 1e-12);
            differences += fabs(known_difference(w, k));
            n_known += !isnan(value_at(w->sampler, k));
            if (!p->by_row) n++, sum += want, least = fmin(least, want);
        }
        const double of_row = p->by_row ? bounded(p, exp(total)) : 1;
        assert_close(value_at(w->c.values, i * POLICY_VALUES + POLICY_WEIGHT), of_row, 1e-12);
        if (p->by_row) n++, sum += of_row, least = fmin(least, of_row);
    }
    assert_close(value_at(w->sums, IMPORTANCE_WEIGHTS), n, 0);
    assert_close(value_at(w->sums, IMPORTANCE_WEIGHT), sum, 1e-12);
    assert_close(value_at(w->sums, IMPORTANCE_KNOWN), n_known, 0);
    assert_close(value_at(w->sums, IMPORTANCE_DIFFERENCE), differences, 1e-12);
    assert_close(p->cap - value_at(w->most, IMPORTANCE_BELOW_MOST), least, 1e-12);
}

static void importance_weights(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(bounds); i++) {
        struct device dev;
        op_check_case(weights_run, &bounds[i], 4e-5);
        op_check_begin(&dev, true);
        struct weights_case w = weights_make(&dev);
        weights_op(&dev, &w, &bounds[i]);
        check_weights(&w, &bounds[i]);
        op_check_end(&dev);
    }
}

static void policy_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(heads); i++) op_check_cuda(head_run, &heads[i]);
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_cuda(policy_run, &shapes[i]);
    for (int i = 0; i < MT_LEN(bounds); i++) op_check_cuda(weights_run, &bounds[i]);
}

int test_ops_policy(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_are_their_definitions),
        cmocka_unit_test(heads_have_gradients),
        cmocka_unit_test(far_logits),
        cmocka_unit_test(losses_are_their_definitions),
        cmocka_unit_test(weights_are_derivatives),
        cmocka_unit_test(constants),
        cmocka_unit_test(extremes),
        cmocka_unit_test(importance_weights),
        cmocka_unit_test(policy_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_policy", tests, NULL, NULL);
}
