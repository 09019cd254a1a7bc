/* test_ops_preference.c - preference losses over whole answers. */
#include "tests/op_check.h"

#include <math.h>

/* Answer i of a case has n_label + i % 3 labels, of which i % 4 are in the prompt where prompts have loss. */
struct answer_shape {
    enum preference_kind kind;
    int64_t n_answer, n_label;
    bool prompts;
    double smoothing, sft;
};
static const struct answer_shape shapes[] = {
    {PREFERENCE_DPO, 0, 1, false, 0, 0},      {PREFERENCE_DPO, 2, 3, false, 0, 0},
    {PREFERENCE_DPO, 6, 4, false, 0.2, 0.7},  {PREFERENCE_IPO, 6, 4, false, 0, 0},
    {PREFERENCE_SIMPO, 6, 4, false, 0, 0},    {PREFERENCE_ORPO, 6, 4, false, 0, 0},
    {PREFERENCE_ORPO, 6, 5, true, 0, 0},      {PREFERENCE_KTO, 1, 3, false, 0, 0},
    {PREFERENCE_KTO, 7, 4, false, 0, 0},      {PREFERENCE_KL, 5, 4, false, 0, 0},
    {PREFERENCE_DPO, 602, 70, false, 0.1, 1}, {PREFERENCE_KTO, 301, 70, false, 0, 0},
    {PREFERENCE_ORPO, 20, 300, true, 0, 0},
};

struct answer_case {
    struct device *dev;
    const struct answer_shape *s;
    struct preference p;
    struct answers a;
    struct tensor nll, logps, reference, good, sums, weight, dx, rows;
};

static bool is_rows(const struct answer_shape *s) { return s->kind == PREFERENCE_KTO || s->kind == PREFERENCE_KL; }

static struct answer_case answers_make(struct device *dev, const struct answer_shape *s)
{
    struct answer_case c = {.dev = dev, .s = s};
    const int64_t n = s->n_answer;
    int64_t n_label = 0;
    c.a = (struct answers){make_empty(DT_I32, n + 1, -1, -1), make_empty(DT_I32, n, -1, -1)};
    set_value(c.a.cu, 0, 0);
    for (int64_t i = 0; i < n; i++) {
        set_value(c.a.first, i, (double)(n_label + (s->prompts && i % 2 == 0 ? i % 4 + 1 : 0)));
        n_label += s->n_label + i % 3;
        set_value(c.a.cu, i + 1, (double)n_label);
    }
    c.p = (struct preference){.kind = s->kind,
                              .beta = 0.3,
                              .gamma = 0.5,
                              .label_smoothing = s->smoothing,
                              .desirable = 1.25,
                              .undesirable = 0.5,
                              .sft_weight = s->sft,
                              .baseline = 0.2,
                              .scale = 0.25,
                              .sft_scale = s->sft / 16};
    c.nll = make_random(dev->stat_dtype, 5, 0.4, n_label, -1, -1);
    for (int64_t i = 0; i < n_label; i++) set_value(c.nll, i, 0.5 + value_at(c.nll, i));
    c.logps = make_empty(DT_F64, n, 2, -1);
    c.weight = make_empty(dev->stat_dtype, n, 2, -1);
    c.sums = make_zero(DT_F64, PREFERENCE_SUMS, -1, -1);
    c.dx = make_empty(dev->act_dtype, n_label, 8, -1);
    c.rows = make_empty(DT_I32, n_label, -1, -1);
    for (int64_t i = 0; i < n_label; i++) set_value(c.rows, i, (double)(n_label - 1 - i));
    if (s->kind != PREFERENCE_SIMPO && s->kind != PREFERENCE_ORPO) {
        c.reference = make_random(DT_F64, 6, 1, n, 2, -1);
        for (int64_t i = 0; i < 2 * n; i++)
            set_value(c.reference, i, value_at(c.reference, i) - (double)s->n_label / 2);
    }
    if (is_rows(s)) {
        c.good = make_empty(DT_I32, n, -1, -1);
        for (int64_t i = 0; i < n; i++) set_value(c.good, i, i % 3 != 1);
    }
    return c;
}

/* dx becomes the weight of each label. */
static void answers_op(struct answer_case *c)
{
    for (int64_t i = 0; i < tensor_count(c->dx); i++) set_value(c->dx, i, 1 + (double)(i % 8) / 8);
    op_answer_sums(c->dev, c->logps, c->nll, &c->a);
    op_preference(c->dev, c->sums, c->weight, &c->p, c->logps, c->reference, c->good, &c->a);
    op_scale_labels(c->dev, c->dx, c->rows, c->weight, &c->a);
}

static void answers_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct answer_case c = answers_make(dev, params);
    answers_op(&c);
    const struct tensor out[] = {c.logps, c.sums, c.weight, c.dx};
    for (int i = 0; i < MT_LEN(out); i++) o->out[o->n++] = out[i];
}

/* The loss whose gradient the weights are. */
static double answers_loss(void *arg)
{
    struct answer_case *c = arg;
    for (int64_t i = 0; i < PREFERENCE_SUMS; i++) set_value(c->sums, i, 0);
    answers_op(c);
    return c->p.scale * value_at(c->sums, PREFERENCE_LOSS) - c->p.sft_scale * value_at(c->sums, PREFERENCE_TOTAL);
}

static double log_loss(double x) { return -log(1 / (1 + exp(-x))); }

/* A log-probability and the number of tokens of answer i. */
static double sum_of(const struct answer_case *c, int64_t i, double *n, bool all)
{
    double sum = 0;
    const int64_t from = (int64_t)value_at(all ? c->a.cu : c->a.first, i), end = (int64_t)value_at(c->a.cu, i + 1);
    for (int64_t k = from; k < end; k++) sum -= value_at(c->nll, k);
    *n = (double)(end - from);
    return sum;
}

/* The loss of the unit that begins with answer i. */
static double definition(const struct answer_case *c, int64_t i)
{
    const struct preference *p = &c->p;
    double n[3], r[2] = {0, 0};
    const double pc = sum_of(c, i, &n[0], false), pj = is_rows(c->s) ? 0 : sum_of(c, i + 1, &n[1], false);
    for (int k = 0; k < 2 && c->reference.ndim && i + k < c->s->n_answer; k++)
        r[k] = value_at(c->reference, 2 * (i + k));
    const double x = p->beta * ((pc - r[0]) - (pj - r[1])), mc = pc / n[0], mj = pj / n[1];
    const double sign = is_rows(c->s) && value_at(c->good, i) != 0 ? 1 : -1;
    switch (p->kind) {
    case PREFERENCE_DPO: return (1 - p->label_smoothing) * log_loss(x) + p->label_smoothing * log_loss(-x);
    case PREFERENCE_IPO: return pow((pc - r[0]) / n[0] - (pj - r[1]) / n[1] - 1 / (2 * p->beta), 2);
    case PREFERENCE_SIMPO: return log_loss(p->beta * (mc - mj) - p->gamma);
    case PREFERENCE_ORPO:
        return -sum_of(c, i, &n[2], true) / n[2] + p->beta * log_loss(mc - mj - log(1 - exp(mc)) + log(1 - exp(mj)));
    case PREFERENCE_KTO:
        return (sign > 0 ? p->desirable : p->undesirable) *
               (1 - 1 / (1 + exp(-sign * p->beta * (pc - r[0] - p->baseline))));
    case PREFERENCE_KL: break;
    }
    return 0;
}

static void losses_are_their_definitions(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(answers_run, &shapes[i], 4e-6);
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct answer_case c = answers_make(&dev, &shapes[i]);
        double sum = 0, ratio = 0, n, chosen = 0;
        answers_op(&c);
        for (int64_t k = 0; k < shapes[i].n_answer; k += is_rows(&shapes[i]) ? 1 : 2) {
            sum += definition(&c, k);
            if (is_rows(&shapes[i])) ratio += sum_of(&c, k, &n, false) - value_at(c.reference, 2 * k);
            if (!is_rows(&shapes[i]) || value_at(c.good, k) != 0) chosen += sum_of(&c, k, &n, false);
        }
        assert_close(value_at(c.sums, PREFERENCE_LOSS), sum, 1e-12);
        if (c.p.kind == PREFERENCE_KL) assert_close(value_at(c.sums, PREFERENCE_RATIO), ratio, 1e-12);
        if (c.p.kind != PREFERENCE_KL) assert_close(value_at(c.sums, PREFERENCE_TOTAL), chosen, 1e-12);
        op_check_end(&dev);
    }
}

static void weights_are_derivatives(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        if (!shapes[i].n_answer || shapes[i].n_label > 10 || shapes[i].kind == PREFERENCE_KL) continue;
        op_check_begin(&dev, true);
        struct answer_case c = answers_make(&dev, &shapes[i]);
        answers_loss(&c);
        const int64_t n = c.nll.shape[0];
        struct tensor d = make_empty(DT_F64, n, -1, -1);
        for (int64_t k = 0; k < n; k++) set_value(d, k, value_at(c.dx, 8 * (n - 1 - k)));
        const double error = gradient_error(answers_loss, &c, c.nll, d);
        if (!(error < 1e-7)) fail_msg("case %d: gradient error %.1e", i, error);
        op_check_end(&dev);
    }
}

/* If policy and reference give equal log-probabilities, DPO's loss is ln 2, KTO's without a baseline half of the
 * weights. */
static void equal_models(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, true);
    const struct answer_shape pairs = {PREFERENCE_DPO, 4, 3, false, 0.25, 0},
                              rows = {PREFERENCE_KTO, 4, 3, false, 0, 0};
    for (int i = 0; i < 2; i++) {
        struct answer_case c = answers_make(&dev, i ? &rows : &pairs);
        c.p.baseline = 0;
        op_answer_sums(&dev, c.logps, c.nll, &c.a);
        for (int64_t k = 0; k < 8; k++) set_value(c.reference, k, value_at(c.logps, k));
        answers_op(&c);
        assert_close(value_at(c.sums, PREFERENCE_LOSS), i ? (1.25 * 3 + 0.5) / 2 : 2 * log(2), 1e-15);
        assert_close(value_at(c.sums, PREFERENCE_REWARD), 0, 0);
        assert_close(value_at(c.sums, PREFERENCE_RIGHT), 0, 0);
    }
    op_check_end(&dev);
}

/* Margins beyond the range of exp give neither NaN nor infinity. */
static void far_margins(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct device dev;
        op_check_begin(&dev, false);
        const struct answer_shape s = {i & 1 ? PREFERENCE_KTO : PREFERENCE_DPO, 2, 3, false, 0, 0};
        struct answer_case c = answers_make(&dev, &s);
        for (int64_t k = 0; k < 4; k++) set_value(c.reference, k, (k < 2) == (i < 2) ? -1e5 : 1e5);
        answers_op(&c);
        assert_finite(c.sums);
        assert_finite(c.dx);
        op_check_end(&dev);
    }
}

static void preference_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_cuda(answers_run, &shapes[i]);
}

int test_ops_preference(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_are_their_definitions),
        cmocka_unit_test(weights_are_derivatives),
        cmocka_unit_test(equal_models),
        cmocka_unit_test(far_margins),
        cmocka_unit_test(preference_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_preference", tests, NULL, NULL);
}
