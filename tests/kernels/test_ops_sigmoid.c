/* test_ops_sigmoid.c - sigmoid routers against their definition: choice with a bias, in groups or by the token's id,
 * gates, gradient; dense networks with a gate per token; the op that adds two tensors. */
#include "tests/op_check.h"

#include <math.h>
#include <string.h>

static struct device f64;
static int begin(void **state) { return *state = NULL, op_check_begin(&f64, true), 0; }
static int end(void **state) { return *state = NULL, op_check_end(&f64), 0; }

/* ---- routers */

struct router_case {
    int64_t n_tok, n_exp, top_k, dim;
    struct router how;
    bool bias, twins; /* twins: odd experts are copies of the one before */
};

#define DIVIDED ROUTER_SIGMOID_CHOSEN
#define PLAIN   ROUTER_SIGMOID
#define ROOT    ROUTER_SQRT_CHOSEN
enum { GROUPS = 1 }; /* a case with groups and a bias */
static const struct router_case cases[] = {
    {7, 9, 3, 16, {DIVIDED, 1, 0, 0, false, 0}, true, false},
    {7, 12, 3, 16, {DIVIDED, 2.5f, 4, 2, false, 0}, true, false},
    {7, 12, 3, 16, {PLAIN, 1.5f, 3, 1, false, 0}, true, false},
    {7, 9, 9, 16, {PLAIN, 2.5f, 1, 1, false, 0}, false, false},
    {7, 8, 2, 16, {DIVIDED, 1.8f, 2, 1, false, 0}, true, false},
    {7, 8, 8, 16, {DIVIDED, 1, 4, 4, false, 0}, true, false},
    {7, 1, 1, 16, {PLAIN, 1, 0, 0, false, 0}, false, false},
    {0, 12, 3, 16, {DIVIDED, 2.5f, 4, 2, false, 0}, true, false},
    {1, 12, 3, 16, {DIVIDED, 2.5f, 4, 2, false, 0}, true, true},
    {131, 128, 8, 64, {DIVIDED, 2.5f, 1, 1, false, 0}, true, false},
    {131, 32, 4, 64, {DIVIDED, 1, 8, 3, false, 0}, true, true},
    {65, 64, 4, 72, {DIVIDED, 1.8f, 0, 0, false, 0}, true, true},
    {65, 256, 8, 128, {DIVIDED, 2.5f, 8, 4, false, 0}, true, false},
    {33, 512, 10, 64, {PLAIN, 1, 32, 7, false, 0}, true, false},
    {33, 512, 22, 64, {DIVIDED, 5, 1, 1, false, 0}, true, false},
    {9, 80, 32, 72, {DIVIDED, 1, 0, 0, false, 0}, true, true},
    {70, 40, 4, 24, {PLAIN, 3, 5, 2, false, 0}, false, true},
    {300, 1, 1, 64, {PLAIN, 1, 0, 0, false, 0}, false, false},
    {9, 1, 1, 2048, {PLAIN, 1, 0, 0, false, 0}, false, false},
    {5, 1, 1, 2184, {PLAIN, 2.5f, 0, 0, false, 0}, false, false},
    {7, 1, 1, 40, {PLAIN, 1, 0, 0, false, 0}, true, false},
    {7, 9, 3, 16, {ROOT, 1.5f, 0, 0, false, 0}, true, false},
    {7, 12, 3, 16, {ROOT, 1.5f, 4, 2, false, 0}, true, false},
    {7, 9, 3, 16, {ROOT, 1.5f, 0, 0, true, 0}, false, false},
    {7, 9, 9, 16, {DIVIDED, 1, 0, 0, true, 0}, false, false},
    {7, 8, 2, 16, {ROOT, 2.5f, 0, 0, false, 0}, false, false},
    {0, 9, 3, 16, {ROOT, 1.5f, 0, 0, true, 0}, false, false},
    {65, 256, 6, 128, {ROOT, 1.5f, 0, 0, false, 0}, true, false},
    {65, 256, 6, 128, {ROOT, 1.5f, 0, 0, true, 0}, false, false},
    {7, 9, 3, 16, {DIVIDED, 1.5f, 0, 0, false, 0.5f}, true, false},
    {65, 32, 4, 64, {DIVIDED, 1, 0, 0, false, 1e-6f}, true, false},
};

struct routing {
    const struct router_case *c;
    struct device *dev;
    struct weight w;
    struct tensor x, bias, logits;
    struct tensor table, tok; /* of experts by the token's id */
    struct route r;
};

enum { IDS = 37 };

static double eighths(double v) { return round(8 * v) / 8; }

/* Inputs are multiples of 1/8, so that logits are exact in every precision. */
static struct routing make_routing(struct device *dev, const struct router_case *c)
{
    struct routing s = {.c = c, .dev = dev, .w = make_weight(WF_BF16, 1, 1, 1, c->n_exp, c->dim)};
    struct tensor w = tensor_2d((void *)(uintptr_t)s.w.data, DT_BF16, c->n_exp, c->dim);
    for (int64_t i = 0; i < tensor_count(w); i++)
        set_value(w, i, eighths(value_at(w, c->twins ? i - i / c->dim % 2 * c->dim : i)));
    s.x = make_random(dev->act_dtype, 2, 1, c->n_tok, c->dim, -1);
    for (int64_t i = 0; i < tensor_count(s.x); i++) set_value(s.x, i, eighths(value_at(s.x, i)));
    if (c->bias) s.bias = make_random(DT_F32, 3, 0.3, c->n_exp, -1, -1);
    for (int64_t e = 1; c->bias && c->twins && e < c->n_exp; e += 2) set_value(s.bias, e, value_at(s.bias, e - 1));
    s.logits = make_empty(dev->stat_dtype, c->n_tok, c->n_exp, -1);
    s.table = make_zero(DT_I32, IDS, c->top_k, -1);
    s.tok = make_zero(DT_I32, c->n_tok, -1, -1);
    for (int64_t i = 0; i < tensor_count(s.table); i++) /* distinct, in no order */
        set_value(s.table, i, (double)((i / c->top_k * 5 + 7 * (c->top_k - i % c->top_k)) % c->n_exp));
    for (int64_t t = 0; t < c->n_tok; t++) set_value(s.tok, t, (double)(t * 11 % IDS));
    s.r.idx = make_empty(DT_I32, c->n_tok, c->top_k, -1);
    s.r.gate = make_empty(dev->stat_dtype, c->n_tok, c->top_k, -1);
    s.r.offs = make_zero(DT_I32, c->n_exp + 1, -1, -1);
    s.r.row_slot = make_zero(DT_I32, c->n_tok * c->top_k, -1, -1);
    s.r.slot_row = make_zero(DT_I32, c->n_tok, c->top_k, -1);
    return s;
}

static void route(struct routing *s)
{
    if (s->c->how.given) op_hash_route(s->dev, s->r.idx, s->table, s->tok);
    op_router_fwd(s->dev, &s->r, s->logits, s->x, &s->w, s->bias, &s->c->how);
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static double score(const struct routing *s, double logit)
{
    return s->c->how.kind == ROOT ? sqrt(fmax(logit, 0) + log1p(exp(-fabs(logit)))) : sigmoid(logit);
}

/* How many of n values come before value i: larger ones, and equal ones of a lower index. gap: the smallest distance to
 * another value on the other side of rank `limit`. */
static int64_t rank_of(const double *v, int64_t n, int64_t i)
{
    int64_t rank = 0;
    for (int64_t k = 0; k < n; k++) rank += v[k] > v[i] || (k < i && v[k] >= v[i]);
    return rank;
}

/* The least difference between a value that is among the first k and one that is not, equal values left out. */
static double margin(const double *v, int64_t n, int64_t k)
{
    double least = INFINITY;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            if (rank_of(v, n, i) < k && rank_of(v, n, j) >= k && v[i] > v[j]) least = fmin(least, v[i] - v[j]);
    return least;
}

/* The choice values of a token by the definition: -inf outside the best groups. Returns the margin of the groups. */
static double choice_values(const struct routing *s, int64_t t, double *value)
{
    const struct router_case *c = s->c;
    const int64_t n_group = MT_MAX(c->how.n_group, 1), size = c->n_exp / n_group;
    double of_group[32], gap = INFINITY;
    bool kept[32];
    for (int64_t e = 0; e < c->n_exp; e++)
        value[e] = score(s, value_at(s->logits, t * c->n_exp + e)) + (c->bias ? value_at(s->bias, e) : 0);
    for (int64_t e = 0; c->how.given && e < c->n_exp; e++) value[e] = 0;
    for (int64_t j = 0; c->how.given && j < c->top_k; j++)
        value[(int64_t)value_at(s->table, (int64_t)value_at(s->tok, t) * c->top_k + j)] = 1;
    if (n_group == 1) return gap;
    for (int64_t g = 0; g < n_group; g++) {
        of_group[g] = 0;
        for (int64_t e = g * size; e < (g + 1) * size; e++)
            if (rank_of(value + g * size, size, e - g * size) < 2) of_group[g] += value[e];
    }
    for (int64_t g = 0; g < n_group; g++) kept[g] = rank_of(of_group, n_group, g) < c->how.top_group;
    for (int64_t e = 0; e < c->n_exp; e++)
        if (!kept[e / size]) value[e] = -INFINITY;
    return margin(of_group, n_group, c->how.top_group);
}

/* Compares the choice and the gates with the definition. The margin keeps the choice equal in every precision. */
static void check_routing(const struct routing *s)
{
    const struct router_case *c = s->c;
    double value[512];
    for (int64_t t = 0; t < c->n_tok; t++) {
        double sum = 0, gap = choice_values(s, t, value);
        gap = fmin(gap, margin(value, c->n_exp, c->top_k));
        if (gap < 1e-6) fail_msg("token %lld: the choice hangs on %g", (long long)t, gap);
        for (int64_t e = 0, j = 0; e < c->n_exp; e++) {
            if (rank_of(value, c->n_exp, e) >= c->top_k) continue;
            assert_int_equal(value_at(s->r.idx, t * c->top_k + j++), e);
            sum += score(s, value_at(s->logits, t * c->n_exp + e));
        }
        for (int64_t j = 0; j < c->top_k; j++) {
            const int64_t e = (int64_t)value_at(s->r.idx, t * c->top_k + j);
            const double gate = score(s, value_at(s->logits, t * c->n_exp + e));
            assert_close(value_at(s->r.gate, t * c->top_k + j),
                         (double)c->how.scale *
                             (c->how.kind == PLAIN ? gate : gate / (sum + (double)router_floor(&c->how))),
                         1e-12);
        }
    }
}

static void test_choice(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct routing s = make_routing(&f64, &cases[i]);
        route(&s);
        check_routing(&s);
    }
    /* groups of equal sums, of which a later one has the best expert: the lower groups are chosen */
    struct routing s = make_routing(&f64, &cases[GROUPS]);
    const int64_t size = s.c->n_exp / s.c->how.n_group;
    for (int64_t k = 0; k < s.c->dim; k++) set_value(s.x, k, 0);
    for (int64_t e = 0; e < s.c->n_exp; e++) {
        const double step = 0.125 * (double)(e / size);
        set_value(s.bias, e, e % size == 0 ? step : e % size == 1 ? -step : -1);
    }
    route(&s);
    check_routing(&s);
}

static double router_loss(void *arg)
{
    struct routing *s = arg;
    route(s);
    return probe(s->r.gate, 5);
}

static void test_gradient(void **state)
{
    const struct aux none = {.coef = 0};
    (void)state;
    for (int i = 0; i < MT_LEN(cases); i++) {
        if (cases[i].n_tok != 7) continue;
        struct routing s = make_routing(&f64, &cases[i]);
        struct tensor dx = make_zero(f64.act_dtype, 7, cases[i].dim, -1);
        route(&s);
        op_router_bwd(&f64, dx, make_probe(s.r.gate, 5), &s.r, s.logits, &s.w, &none, &cases[i].how);
        const double error = gradient_error(router_loss, &s, s.x, dx);
        if (!(error <= 1e-6)) fail_msg("case %d: off by %g", i, error);
    }
}

/* Logits far outside the range of exp, and NaN: the choice is distinct experts in range. */
static void test_extremes(void **state)
{
    static const struct router_case c = {3, 12, 4, 16, {DIVIDED, 1, 4, 2, false, 0}, true, false};
    struct routing s = make_routing(&f64, &c);
    (void)state;
    for (int mask = 0; mask < 1 << 12; mask += 5) {
        for (int e = 0; e < 12; e++) set_value(s.bias, e, mask >> e & 1 ? (double)NAN : e % 3 ? -INFINITY : 1e30);
        route(&s);
        for (int64_t i = 0; i < 12; i++) {
            assert_in_range((int64_t)value_at(s.r.idx, i), 0, 11);
            if (i % 4) assert_true(value_at(s.r.idx, i) > value_at(s.r.idx, i - 1));
        }
    }
    for (int64_t i = 0; i < tensor_count(s.x); i++) set_value(s.x, i, i < 16 ? 1e4 : -1e4);
    memset(s.bias.data, 0, 12 * sizeof(float));
    route(&s);
    for (int64_t i = 0; i < 12; i++) assert_true(value_at(s.r.gate, i) >= 0 && value_at(s.r.gate, i) <= 1);
}

/* sqrt(softplus) far from 0, where softplus underflows: every gate and every gradient is finite, in F32 and F64. */
static void check_far(struct device *dev, double far)
{
    static const struct router_case c = {2, 6, 2, 16, {ROOT, 1.5f, 0, 0, true, 0}, false, false};
    const struct aux none = {.coef = 0};
    struct routing s = make_routing(dev, &c);
    struct tensor w = tensor_2d((void *)(uintptr_t)s.w.data, DT_BF16, c.n_exp, c.dim),
                  dx = make_zero(dev->act_dtype, 2, 16, -1);
    for (int64_t i = 0; i < tensor_count(w); i++) set_value(w, i, i % 16 ? 0 : i / 16 % 2 ? 1 : 0.75);
    for (int64_t i = 0; i < tensor_count(s.x); i++) set_value(s.x, i, i % 16 ? 0.5 : far);
    route(&s);
    op_router_bwd(dev, dx, make_random(dev->stat_dtype, 5, 1, 2, 2, -1), &s.r, s.logits, &s.w, &none, &c.how);
    for (int64_t i = 0; i < tensor_count(dx); i++) assert_true(isfinite(value_at(dx, i)));
    for (int64_t t = 0; t < 2; t++) {
        const double sum = value_at(s.r.gate, 2 * t) + value_at(s.r.gate, 2 * t + 1);
        if (far > -60) assert_close(sum, 1.5, 1e-5);
        assert_true(isfinite(sum) && sum >= 0);
    }
}

static void test_far_logits(void **state)
{
    static const double far[] = {-1e4, -200, -104, -90, -50, -40.1, -39.9, -20, 0, 20, 90, 200, 1e4};
    struct device f32;
    (void)state;
    op_check_begin(&f32, false);
    for (int i = 0; i < MT_LEN(far); i++) check_far(&f64, far[i]), check_far(&f32, far[i]);
    device_close(&f32);
}

/* The gates of the chosen experts have the same bits when these are given. */
static void check_given(const struct routing *s)
{
    struct router how = s->c->how;
    struct route again = s->r;
    how.given = true;
    again.idx = make_empty(DT_I32, s->r.idx.shape[0], s->r.idx.shape[1], -1);
    again.gate = make_empty(s->dev->stat_dtype, s->r.gate.shape[0], s->r.gate.shape[1], -1);
    copy_on(s->dev, again.idx, s->r.idx);
    op_router_fwd(s->dev, &again, s->logits, s->x, &s->w, s->bias, &how);
    if (s->dev->dry_run) return;
    assert_same_bits(again.idx, s->r.idx);
    assert_same_bits(again.gate, s->r.gate);
}

static void run_router(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct router_case *c = params;
    const struct aux none = {.coef = 0};
    struct routing s = make_routing(dev, c);
    struct tensor dx = make_random(dev->act_dtype, 6, 1, c->n_tok, c->dim, -1);
    route(&s);
    check_given(&s);
    op_router_bwd(dev, dx, make_random(dev->stat_dtype, 5, 1, c->n_tok, c->top_k, -1), &s.r, s.logits, &s.w, &none,
                  &c->how);
    struct tensor all[] = {s.logits, s.r.idx, s.r.gate, dx};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

static void test_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(cases); i++) op_check_case(run_router, &cases[i], 2e-6);
}

static void router_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(cases); i++)
        if (cases[i].n_exp < 64) op_check_cuda(run_router, &cases[i]);
}

/* cuBLASLt computes the logits of 64 experts and more. */
static void router_on_the_gpu_by_cublas(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(cases); i++)
        if (cases[i].n_exp >= 64) op_check_cuda(run_router, &cases[i]);
}

/* ---- the activation */

struct glu_case {
    int64_t n_tok, width;
    struct glu glu;
    bool gate;
    int64_t pad; /* columns around the view */
};

static const struct glu_case glu_cases[] = {
    {7, 8, {GLU_SWIGLU, 0, 0, false}, true, 0},
    {5, 72, {GLU_SWIGLU, 0, 0, false}, false, 8},
    {3, 136, {GLU_SWIGLU, 0, 0, true}, true, 16},
    {3, 24, {GLU_CLAMPED, 1.702f, 0.7f, true}, true, 0},
    {2, 64, {GLU_CLAMPED, 1.702f, 0.7f, false}, false, 0},
    {0, 16, {GLU_SWIGLU, 0, 0, false}, true, 0},
    {3, 24, {GLU_SWIGLU_CLAMPED, 0, 0.7f, true}, true, 0},
    {5, 72, {GLU_SWIGLU_CLAMPED, 0, 1, false}, false, 8},
    {1, 2816, {GLU_SWIGLU, 0, 0, false}, true, 8},
    {257, 1408, {GLU_SWIGLU, 0, 0, false}, true, 0},
    {65, 2048, {GLU_SWIGLU_CLAMPED, 0, 1, false}, false, 0},
    {5, 72, {GLU_RELU2, 0, 0, false}, true, 8},
    {7, 8, {GLU_RELU2, 0, 0, false}, false, 0},
    {0, 16, {GLU_RELU2, 0, 0, false}, true, 0},
    {257, 1856, {GLU_RELU2, 0, 0, false}, false, 0},
    {3, 2112, {GLU_RELU2, 0, 0, false}, true, 8},
    {5, 72, {GLU_GELU, 0, 0, false}, true, 8},
    {3, 24, {GLU_GELU, 0, 0, true}, false, 0},
    {33, 2112, {GLU_GELU, 0, 0, false}, false, 0},
};

struct activation {
    const struct glu_case *c;
    struct device *dev;
    struct tensor pre, gate, act;
};

static struct tensor padded(struct tensor x, int64_t pad) { return tensor_cols(x, pad, x.shape[1] - 2 * pad); }

static struct activation make_activation(struct device *dev, const struct glu_case *c)
{
    struct activation s = {.c = c, .dev = dev};
    s.pre = padded(make_random(dev->act_dtype, 1, 1.5, c->n_tok, glu_cols(&c->glu, c->width) + 2 * c->pad, -1), c->pad);
    s.act = padded(make_zero(dev->act_dtype, c->n_tok, c->width + 2 * c->pad, -1), c->pad);
    if (c->gate) s.gate = make_random(dev->stat_dtype, 2, 1, c->n_tok, 1, -1);
    return s;
}

static double activation_loss(void *arg)
{
    struct activation *s = arg;
    op_glu_fwd(s->dev, s->act, s->pre, s->gate, &s->c->glu);
    return probe(s->act, 3);
}

static void backward(const struct activation *s, struct tensor dact, struct tensor *dpre, struct tensor *dgate)
{
    *dpre = s->c->pad ? make_empty(s->dev->act_dtype, s->c->n_tok, s->pre.shape[1], -1) : make_copy(s->pre);
    *dgate = s->c->gate ? make_empty(s->dev->stat_dtype, s->c->n_tok, 1, -1) : (struct tensor){0};
    op_glu_bwd(s->dev, *dpre, *dgate, dact, s->c->pad ? s->pre : *dpre, s->gate, &s->c->glu);
}

#define PI 3.14159265358979323846
static double glu_of(const struct glu *glu, double gate, double up)
{
    const double limit = (double)glu->limit;
    if (glu->kind == GLU_SWIGLU) return gate * sigmoid(gate) * up;
    if (glu->kind == GLU_RELU2) return fmax(up, 0) * fmax(up, 0);
    if (glu->kind == GLU_GELU) return gate * (1 + tanh(sqrt(2 / PI) * (gate + 0.044715 * pow(gate, 3)))) / 2 * up;
    gate = fmin(gate, limit);
    if (glu->kind == GLU_SWIGLU_CLAMPED) return fmax(fmin(up, limit), -limit) * gate * sigmoid(gate);
    return (fmax(fmin(up, limit), -limit) + 1) * gate * sigmoid((double)glu->alpha * gate);
}

static void test_activation(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(glu_cases); i++) {
        const struct glu_case *c = &glu_cases[i];
        struct activation s = make_activation(&f64, c);
        struct tensor dpre, dgate;
        activation_loss(&s);
        for (int64_t k = 0; k < c->n_tok * c->width; k++) {
            const int64_t t = k / c->width, col = k % c->width, row = t * s.pre.shape[1],
                          last = s.pre.shape[1] - c->width;
            const double gate = value_at(s.pre, row + (c->glu.interleaved ? 2 * col : col));
            const double up = value_at(s.pre, row + (c->glu.interleaved ? 2 * col + 1 : last + col));
            assert_close(value_at(s.act, k), (c->gate ? value_at(s.gate, t) : 1) * glu_of(&c->glu, gate, up), 1e-12);
        }
        if (c->n_tok > 7 || c->width > 200) continue;
        backward(&s, make_probe(s.act, 3), &dpre, &dgate);
        const double error = gradient_error(activation_loss, &s, s.pre, dpre);
        if (!(error <= 1e-6)) fail_msg("case %d: dpre is off by %g", i, error);
        const double of_gate = c->gate ? gradient_error(activation_loss, &s, s.gate, dgate) : 0;
        if (!(of_gate <= 1e-6)) fail_msg("case %d: dgate is off by %g", i, of_gate);
    }
}

static void run_activation(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct glu_case *c = params;
    struct activation s = make_activation(dev, c);
    struct tensor dpre, dgate, sum = make_random(dev->act_dtype, 7, 1, c->n_tok, c->width, -1);
    op_glu_fwd(dev, s.act, s.pre, s.gate, &c->glu);
    backward(&s, padded(make_random(dev->act_dtype, 3, 1, c->n_tok, c->width + 2 * c->pad, -1), c->pad), &dpre, &dgate);
    op_add(dev, sum, s.act);
    op_scale(dev, sum, -0.75f);
    o->out[o->n++] = s.act;
    o->out[o->n++] = dpre;
    o->out[o->n++] = sum;
    if (c->gate) o->out[o->n++] = dgate;
}

static void test_activation_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(glu_cases); i++) op_check_case(run_activation, &glu_cases[i], 2e-6);
}

static void activation_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(glu_cases); i++) op_check_cuda(run_activation, &glu_cases[i]);
}

static void test_sum(void **state)
{
    (void)state;
    struct tensor y = make_random(f64.act_dtype, 1, 1, 5, 24, -1), x = make_random(f64.act_dtype, 2, 1, 5, 40, -1);
    struct tensor was = make_copy(y), view = tensor_cols(x, 8, 24);
    op_add(&f64, y, view);
    for (int64_t i = 0; i < 5 * 24; i++) assert_close(value_at(y, i), value_at(was, i) + value_at(view, i), 0);
}

/* ---- scales of gates ---- */

struct scale_case {
    int64_t n_tok, n_top, n_exp;
};
static const struct scale_case scale_cases[] = {{0, 2, 3}, {1, 1, 1}, {5, 3, 7}, {300, 8, 128}};

/* Into a view, and in place. */
static void run_scale(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct scale_case *c = params;
    const struct tensor x = make_random(dev->stat_dtype, 1, 1, c->n_tok, c->n_top, -1),
                        scale = make_random(DT_F32, 2, 1, c->n_exp, -1, -1),
                        idx = make_empty(DT_I32, c->n_tok, c->n_top, -1), own = make_copy(x),
                        y = tensor_cols(make_zero(dev->stat_dtype, c->n_tok, c->n_top + 3, -1), 2, c->n_top);
    for (int64_t i = 0; i < c->n_tok * c->n_top; i++) set_value(idx, i, (double)(i * 5 % c->n_exp));
    op_scale_gates(dev, y, x, idx, scale);
    op_scale_gates(dev, own, own, idx, scale);
    o->out[o->n++] = y;
    o->out[o->n++] = own;
    if (dev->dry_run || dev->act_dtype != DT_F64) return;
    for (int64_t i = 0; i < c->n_tok * c->n_top; i++) {
        const double want = value_at(x, i) * value_at(scale, (int64_t)value_at(idx, i));
        assert_true(value_at(y, i) == want && value_at(own, i) == want);
    }
}
static void gates_are_scaled(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(scale_cases); i++) op_check_case(run_scale, &scale_cases[i], 1e-6);
}
static void gates_are_scaled_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(scale_cases); i++) op_check_cuda(run_scale, &scale_cases[i]);
}

int test_ops_sigmoid(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_choice, begin, end),
        cmocka_unit_test_setup_teardown(test_gradient, begin, end),
        cmocka_unit_test_setup_teardown(test_extremes, begin, end),
        cmocka_unit_test_setup_teardown(test_far_logits, begin, end),
        cmocka_unit_test(test_runs),
        cmocka_unit_test_setup_teardown(test_activation, begin, end),
        cmocka_unit_test(test_activation_runs),
        cmocka_unit_test_setup_teardown(test_sum, begin, end),
        cmocka_unit_test(router_on_the_gpu),
        cmocka_unit_test(router_on_the_gpu_by_cublas),
        cmocka_unit_test(activation_on_the_gpu),
        cmocka_unit_test(gates_are_scaled),
        cmocka_unit_test(gates_are_scaled_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_sigmoid", tests, NULL, NULL);
}
