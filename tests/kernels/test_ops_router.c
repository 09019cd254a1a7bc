/* test_ops_router.c - routing: top-k choice, ties, order, gradients, auxiliary loss, dispatch and combine; the ops of
 * the optimizer. */
#include "tests/packed.h"

#include <math.h>
#include <string.h>

static struct device f64;
static int begin(void **state) { return *state = NULL, op_check_begin(&f64, true), 0; }
static int end(void **state) { return *state = NULL, op_check_end(&f64), 0; }

enum { D = 16, E = 9, J = 3 };

struct routing {
    struct device *dev;
    struct weight w;
    struct tensor x, bias, logits;
    struct route r;
    struct aux aux;
    struct router how;
};

static struct routing make_router(struct device *dev, int64_t n_tok, int64_t n_exp, int64_t top_k, float coef)
{
    struct routing s = {.dev = dev, .w = make_weight(WF_BF16, 1, 1, 1, n_exp, D)};
    s.aux = (struct aux){.coef = coef, .pooled = true, .rows = n_tok};
    s.x = make_random(dev->act_dtype, 2, 1, n_tok, D, -1);
    s.bias = make_random(DT_F32, 3, 1, n_exp, -1, -1);
    s.logits = make_empty(dev->stat_dtype, n_tok, n_exp, -1);
    s.r.idx = make_empty(DT_I32, n_tok, top_k, -1);
    s.r.gate = make_empty(dev->stat_dtype, n_tok, top_k, -1);
    s.r.offs = make_empty(DT_I32, n_exp + 1, -1, -1);
    s.r.row_slot = make_empty(DT_I32, n_tok * top_k, -1, -1);
    s.r.slot_row = make_empty(DT_I32, n_tok, top_k, -1);
    s.aux.count = make_zero(dev->stat_dtype, n_exp, -1, -1);
    s.aux.prob = make_zero(dev->stat_dtype, n_exp, -1, -1);
    return s;
}

static void route(struct routing *s)
{
    op_router_fwd(s->dev, &s->r, s->logits, s->x, &s->w, s->bias, &s->how);
    op_route_sort(s->dev, &s->r, s->w.n_out);
}

static int64_t chosen(const struct routing *s, int64_t t, int64_t j)
{
    return (int64_t)value_at(s->r.idx, t * s->r.idx.shape[1] + j);
}

/* Checks that the chosen experts are in range, ascending, and top_k in number. */
static void check_choice(const struct routing *s)
{
    for (int64_t t = 0; t < s->x.shape[0]; t++) {
        for (int64_t j = 0; j < s->r.idx.shape[1]; j++) {
            assert_in_range(chosen(s, t, j), 0, s->w.n_out - 1);
            if (j) assert_true(chosen(s, t, j) > chosen(s, t, j - 1));
        }
    }
}

/* Gives experts other than those that the logits choose. Where only the given experts matter, the bias of the last
 * expert makes its logit 200 larger than the others. */
static void give_experts(struct routing *s)
{
    s->how.given = true;
    for (int64_t i = 0; i < tensor_count(s->r.idx); i++) set_value(s->r.idx, i, (double)(i / J % (E - J + 1) + i % J));
    if (s->how.kind == ROUTER_CHOSEN && s->aux.coef == 0) set_value(s->bias, E - 1, 200);
}

static void check_gates(enum router_kind kind, bool given)
{
    struct routing s = make_router(&f64, 50, E, J, 0);
    s.how.kind = kind;
    if (given) give_experts(&s);
    route(&s);
    check_choice(&s);
    for (int64_t t = 0; t < 50; t++) {
        double logit[E], best_out = -INFINITY, worst_in = INFINITY, sum = 0;
        bool in[E] = {false};
        for (int64_t e = 0; e < E; e++) {
            logit[e] = value_at(s.bias, e);
            for (int64_t i = 0; i < D; i++)
                logit[e] += (double)bf16_to_f32(((const uint16_t *)s.w.data)[e * D + i]) * value_at(s.x, t * D + i);
            assert_close(value_at(s.logits, t * E + e), logit[e], 1e-13);
        }
        for (int64_t j = 0; j < J; j++) in[chosen(&s, t, j)] = true;
        for (int64_t e = 0; e < E; e++) {
            if (in[e])
                worst_in = fmin(worst_in, logit[e]);
            else
                best_out = fmax(best_out, logit[e]);
            if (in[e] || kind == ROUTER_PROBABILITY) sum += exp(logit[e]);
        }
        assert_true(given ? chosen(&s, t, 0) == t % (E - J + 1) : worst_in > best_out);
        for (int64_t j = 0; j < J; j++)
            assert_close(value_at(s.r.gate, t * J + j), exp(logit[chosen(&s, t, j)]) / sum, 1e-13);
    }
}

static void test_choice(void **state)
{
    for (int given = 0; given < 2; given++) {
        check_gates(ROUTER_CHOSEN, given);
        check_gates(ROUTER_PROBABILITY, given);
    }
    (void)state;
}

/* With a weight of zeros the logits are the bias. */
static void check_bias(const float bias[E], const int64_t want[J])
{
    struct routing s = make_router(&f64, 2, E, J, 0);
    s.w = (struct weight){
        .format = WF_BF16, .n_exp = 1, .n_out = E, .n_in = D, .data = make_zero(DT_BF16, E, D, -1).data};
    memcpy(s.bias.data, bias, E * sizeof(*bias));
    route(&s);
    check_choice(&s);
    for (int64_t j = 0; want && j < 2 * J; j++) assert_int_equal(chosen(&s, 0, j), want[j % J]);
}

static void test_ties(void **state)
{
    check_bias((float[E]){0}, (int64_t[J]){0, 1, 2});
    check_bias((float[E]){1, 2, 2, 2, 2, 0, 0, 0, 0}, (int64_t[J]){1, 2, 3});
    check_bias((float[E]){1, 1, 1, 5, 1, 1, 1, 6, 1}, (int64_t[J]){0, 3, 7});
    check_bias((float[E]){0, 1, 0, 0, 0, 0, 0, 0, 1}, (int64_t[J]){0, 1, 8});
    check_bias((float[E]){-INFINITY, -INFINITY, -INFINITY, -INFINITY, 1, -INFINITY, -INFINITY, -INFINITY, -INFINITY},
               (int64_t[J]){0, 1, 4});
    (void)state;
}

static void test_nan_logits(void **state)
{
    struct routing s = make_router(&f64, 1, E, J, 0);
    for (int mask = 0; mask < 1 << E; mask++) {
        for (int e = 0; e < E; e++) set_value(s.bias, e, mask >> e & 1 ? (double)NAN : e * 5 % E);
        route(&s);
        check_choice(&s);
    }
    (void)state;
}

/* When top-k is the number of experts, both kinds of router are the same function, forward and backward. */
static void test_all_experts(void **state)
{
    struct routing s = make_router(&f64, 4, E, E, 0);
    struct tensor dx[2], gate[2];
    for (int kind = 0; kind < 2; kind++) {
        s.how.kind = kind ? ROUTER_PROBABILITY : ROUTER_CHOSEN;
        route(&s);
        for (int64_t i = 0; i < 4 * E; i++) assert_int_equal(value_at(s.r.idx, i), i % E);
        gate[kind] = make_copy(s.r.gate);
        dx[kind] = make_zero(f64.act_dtype, 4, D, -1);
        op_router_bwd(&f64, dx[kind], make_probe(s.r.gate, 5), &s.r, s.logits, &s.w, &s.aux, &s.how);
    }
    assert_true(tensor_error(gate[1], gate[0]) < 1e-15);
    assert_true(tensor_error(dx[1], dx[0]) < 1e-14);
    (void)state;
}

/* Logits far outside the range of exp: probabilities stay finite, and one expert gets all weight. */
static void test_large_logits(void **state)
{
    struct routing s = make_router(&f64, 3, E, J, 0);
    for (int64_t e = 0; e < E; e++) set_value(s.bias, e, e == 4 ? 1e5 : -1e5);
    s.how.kind = ROUTER_PROBABILITY;
    route(&s);
    check_choice(&s);
    for (int64_t i = 0; i < 3 * J; i++) assert_close(value_at(s.r.gate, i), value_at(s.r.idx, i) == 4, 0);
    (void)state;
}

static void test_sort(void **state)
{
    static const int64_t n_tok[] = {0, 1, 101};
    for (int c = 0; c < MT_LEN(n_tok); c++) {
        struct routing s = make_router(&f64, n_tok[c], E, J, 0);
        route(&s);
        assert_int_equal(value_at(s.r.offs, 0), 0);
        assert_int_equal(value_at(s.r.offs, E), n_tok[c] * J);
        for (int64_t e = 0, before = -1; e < E; e++, before = -1) {
            for (int64_t m = (int64_t)value_at(s.r.offs, e); m < (int64_t)value_at(s.r.offs, e + 1); m++) {
                int64_t slot = (int64_t)value_at(s.r.row_slot, m);
                assert_int_equal(value_at(s.r.idx, slot), e);
                assert_int_equal(value_at(s.r.slot_row, slot), m);
                assert_true(slot > before); /* token order */
                before = slot;
            }
        }
    }
    (void)state;
}

/* ---- gradients ---- */

/* probe(gate) plus the auxiliary loss of this layer's rows: coef * E * sum_i F_i p_i with F fixed by aux, or per layer
 * coef * sum_i f_i p_i with f_i = E / (J T) * rows of i. */
static double router_loss(void *arg)
{
    struct routing *s = arg;
    double loss, aux = 0;
    op_router_fwd(s->dev, &s->r, s->logits, s->x, &s->w, s->bias, &s->how);
    loss = probe(s->r.gate, 5);
    struct aux now = {.coef = s->aux.coef, .rows = s->aux.rows};
    now.count = make_zero(s->dev->stat_dtype, E, -1, -1);
    now.prob = make_zero(s->dev->stat_dtype, E, -1, -1);
    op_aux_stats(s->dev, &now, s->logits, &s->r);
    for (int64_t e = 0; e < E; e++) aux += value_at(s->aux.count, e) * value_at(now.prob, e);
    double rows = (double)s->aux.rows, per_slot = s->aux.pooled ? 1 : J;
    return loss + (double)s->aux.coef * E / per_slot * aux / (rows * rows);
}

static const struct router_case {
    int64_t n_tok;
    enum router_kind kind;
    float coef;
    bool pooled, given;
} router_cases[] = {
    {7, ROUTER_CHOSEN, 0, true, false},
    {7, ROUTER_CHOSEN, 0.5f, true, false},
    {7, ROUTER_CHOSEN, 0.5f, false, false},
    {7, ROUTER_PROBABILITY, 0, true, false},
    {7, ROUTER_PROBABILITY, 0.5f, true, false},
    {7, ROUTER_PROBABILITY, 0.5f, false, false},
    {0, ROUTER_CHOSEN, 0.5f, true, false},
    {0, ROUTER_PROBABILITY, 0, true, false},
    {0, ROUTER_PROBABILITY, 0.5f, false, false},
    {1, ROUTER_CHOSEN, 0, true, false},
    {1, ROUTER_CHOSEN, 0.5f, false, false},
    {1, ROUTER_PROBABILITY, 0.5f, true, false},
    {700, ROUTER_CHOSEN, 0.5f, true, false},
    {700, ROUTER_PROBABILITY, 0, true, false},
    {700, ROUTER_PROBABILITY, 0.5f, false, false},
    {7, ROUTER_CHOSEN, 0, true, true},
    {7, ROUTER_CHOSEN, 0.5f, true, true},
    {7, ROUTER_PROBABILITY, 0.5f, false, true},
    {0, ROUTER_CHOSEN, 0, true, true},
    {700, ROUTER_CHOSEN, 0, true, true},
    {700, ROUTER_PROBABILITY, 0, true, true},
};

static struct routing make_case(struct device *dev, const struct router_case *c)
{
    struct routing s = make_router(dev, c->n_tok, E, J, c->coef);
    s.how.kind = c->kind;
    s.how.given = c->given;
    s.aux.pooled = c->pooled;
    for (int64_t i = 0; c->given && i < c->n_tok * J; i++) set_value(s.r.idx, i, (double)(i / J % (E - J + 1) + i % J));
    if (c->given && c->kind == ROUTER_CHOSEN && c->coef == 0) set_value(s.bias, E - 1, 200);
    return s;
}

static void check_gradients(bool given)
{
    for (int c = 0; c < MT_LEN(router_cases); c++) {
        const struct router_case *rc = &router_cases[c];
        if (rc->n_tok != 7 || rc->given != given) continue;
        struct routing s = make_case(&f64, rc);
        route(&s);
        op_aux_stats(&f64, &s.aux, s.logits, &s.r);
        if (rc->pooled) { /* as if another layer had the same statistics */
            s.aux.rows = 14;
            for (int64_t e = 0; e < E; e++) set_value(s.aux.count, e, 2 * value_at(s.aux.count, e));
        }
        struct tensor dx = make_zero(f64.act_dtype, 7, D, -1);
        f64.flops = 0;
        op_router_bwd(&f64, dx, make_probe(s.r.gate, 5), &s.r, s.logits, &s.w, &s.aux, &s.how);
        bool dense = rc->kind == ROUTER_PROBABILITY || rc->coef > 0;
        assert_close(f64.flops, 2.0 * 7 * D * (dense ? E : J), 0);
        double error = gradient_error(router_loss, &s, s.x, dx);
        if (!(error <= 1e-6)) fail_msg("case %d: off by %g", c, error);
        struct tensor twice = make_copy(dx);
        route(&s);
        op_router_bwd(&f64, twice, make_probe(s.r.gate, 5), &s.r, s.logits, &s.w, &s.aux, &s.how);
        for (int64_t i = 0; i < 7 * D; i++) assert_close(value_at(twice, i), 2 * value_at(dx, i), 1e-14);
    }
}
static void test_gradient(void **state) { (void)state, check_gradients(false); }
static void test_gradient_of_given(void **state) { (void)state, check_gradients(true); }

static void test_aux_stats(void **state)
{
    struct routing s = make_router(&f64, 31, E, J, 1);
    route(&s);
    double count = 0, prob = 0;
    for (int layer = 0; layer < 2; layer++) op_aux_stats(&f64, &s.aux, s.logits, &s.r);
    for (int64_t e = 0; e < E; e++) {
        double rows = value_at(s.r.offs, e + 1) - value_at(s.r.offs, e);
        assert_close(value_at(s.aux.count, e), 2 * rows, 0);
        count += value_at(s.aux.count, e);
        prob += value_at(s.aux.prob, e);
    }
    assert_close(count, 2 * 31 * J, 0);
    assert_close(prob, 2 * 31, 1e-13);
    (void)state;
}

/* The gates of the chosen experts have the same bits when these are given. */
static void check_given(const struct routing *s)
{
    struct routing again = *s;
    again.how.given = true;
    again.r.idx = make_empty(DT_I32, s->r.idx.shape[0], s->r.idx.shape[1], -1);
    again.r.gate = make_empty(s->dev->stat_dtype, s->r.gate.shape[0], s->r.gate.shape[1], -1);
    copy_on(s->dev, again.r.idx, s->r.idx);
    op_router_fwd(s->dev, &again.r, again.logits, again.x, &again.w, again.bias, &again.how);
    if (s->dev->dry_run) return;
    assert_same_bits(again.r.idx, s->r.idx);
    assert_same_bits(again.r.gate, s->r.gate);
}

static void run_router(struct device *dev, const void *params, struct op_outputs *o)
{
    struct routing s = make_case(dev, params);
    route(&s);
    check_given(&s);
    op_aux_stats(dev, &s.aux, s.logits, &s.r);
    struct tensor dx = make_random(dev->act_dtype, 6, 1, s.x.shape[0], D, -1);
    op_router_bwd(dev, dx, make_probe(s.r.gate, 5), &s.r, s.logits, &s.w, &s.aux, &s.how);
    struct tensor all[] = {s.logits,     s.r.idx,     s.r.gate,   s.r.offs, s.r.row_slot,
                           s.r.slot_row, s.aux.count, s.aux.prob, dx};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

static void test_router_runs(void **state)
{
    for (int i = 0; i < MT_LEN(router_cases); i++) op_check_case(run_router, &router_cases[i], 2e-6);
    (void)state;
}

/* ---- combination, norm, update, copy ---- */

static void test_combine(void **state)
{
    struct routing s = make_router(&f64, 13, E, J, 0);
    route(&s);
    struct tensor y = make_random(f64.act_dtype, 7, 1, 13 * J, D, -1),
                  res = make_random(f64.act_dtype, 8, 1, 13, D, -1);
    struct tensor out = make_empty(f64.act_dtype, 13, D, -1);
    op_moe_combine_fwd(&f64, out, res, y, &s.r);
    for (int64_t t = 0; t < 13; t++) {
        for (int64_t i = 0; i < D; i++) {
            double sum = 0;
            for (int64_t j = 0; j < J; j++) {
                int64_t row = (int64_t)value_at(s.r.slot_row, t * J + j);
                sum += value_at(s.r.gate, t * J + j) * value_at(y, row * D + i);
            }
            assert_close(value_at(out, t * D + i), value_at(res, t * D + i) + sum, 1e-14);
        }
    }
    (void)state;
}

/* Dispatch of rows to expert order, and combine, as between ranks; values keep every bit. */
struct travel {
    int64_t n_tok, n_col;
};
static void run_travel(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct travel *p = params;
    const int64_t n_row = p->n_tok * J;
    struct routing s = make_router(dev, p->n_tok, E, J, 0);
    s.r.gate = make_random(dev->stat_dtype, 9, 1, p->n_tok, J, -1);
    for (int64_t i = 0; i < n_row; i++) ((int32_t *)s.r.idx.data)[i] = (int32_t)(rng_u64(7, (uint64_t)i) % E);
    op_route_sort(dev, &s.r, E);
    struct tensor x = make_random(dev->act_dtype, 7, 1, p->n_tok, p->n_col, -1);
    struct tensor rows = make_empty(dev->act_dtype, n_row, p->n_col, -1),
                  sum = make_empty(dev->act_dtype, p->n_tok, p->n_col, -1);
    struct tensor gates = make_empty(dev->stat_dtype, n_row, 1, -1), back = make_empty(dev->stat_dtype, n_row, 1, -1);
    op_gather(dev, rows, x, s.r.row_slot, J);
    op_gather(dev, gates, tensor_2d(s.r.gate.data, dev->stat_dtype, n_row, 1), s.r.row_slot, 1);
    op_gather(dev, back, gates, tensor_1d(s.r.slot_row.data, DT_I32, n_row), 1);
    struct route plain = s.r;
    plain.gate = (struct tensor){0};
    op_moe_combine_fwd(dev, sum, (struct tensor){0}, rows, &plain);
    struct tensor all[] = {x, s.r.gate, rows, gates, back, sum};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}
static const struct travel travels[] = {{0, 24}, {1, 8}, {31, 24}, {500, 40}};

static void test_dispatch_and_combine(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(travels); i++) op_check_case(run_travel, &travels[i], 2e-6);
    struct op_outputs o;
    run_travel(&f64, &travels[2], &o);
    const struct tensor x = o.out[0], gate = o.out[1], back = o.out[4], sum = o.out[5];
    for (int64_t i = 0; i < tensor_count(x); i++) assert_close(value_at(sum, i), J * value_at(x, i), 1e-14);
    for (int64_t i = 0; i < tensor_count(gate); i++) assert_true(value_at(back, i) == value_at(gate, i));
}

static void dispatch_and_combine_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(travels); i++) op_check_cuda(run_travel, &travels[i]);
}

static void test_sumsq(void **state)
{
    static const int64_t sizes[] = {0, 1, 7, 16384, 16387, 100000};
    struct tensor out = make_empty(DT_F64, 2, -1, -1);
    for (int i = 0; i < MT_LEN(sizes); i++) {
        struct tensor g = make_random(f64.stat_dtype, 20, 3, sizes[i], -1, -1);
        double sum = 0;
        for (int64_t k = 0; k < sizes[i]; k++) sum += value_at(g, k) * value_at(g, k);
        op_sumsq(&f64, out, g);
        assert_close(value_at(out, 0), sum, 1e-12);
        assert_close(value_at(out, 1), 0, 0);
        if (sizes[i] < 7) continue;
        set_value(g, 0, NAN);
        set_value(g, sizes[i] / 2, -INFINITY);
        set_value(g, sizes[i] - 1, INFINITY);
        op_sumsq(&f64, out, g);
        assert_close(value_at(out, 1), 3, 0);
        assert_true(!isfinite(value_at(out, 0)));
    }
    (void)state;
}

static void test_adamw(void **state)
{
    enum { N = 1000, STEPS = 5 };
    struct tensor p = make_random(f64.stat_dtype, 30, 1, N, -1, -1), m = make_zero(f64.stat_dtype, N, -1, -1);
    struct tensor v = make_zero(f64.stat_dtype, N, -1, -1);
    double ref_p[N], ref_m[N] = {0}, ref_v[N] = {0};
    for (int64_t i = 0; i < N; i++) ref_p[i] = value_at(p, i);
    for (int step = 1; step <= STEPS; step++) {
        struct tensor g = make_random(f64.stat_dtype, 40 + (uint64_t)step, 2, N, -1, -1);
        struct adamw_step s = {.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.1f};
        double b1 = (double)s.beta1, b2 = (double)s.beta2, lr = (double)s.lr;
        s.grad_scale = 0.5f;
        s.correction1 = (float)(1 - pow(b1, step));
        s.correction2 = (float)(1 - pow(b2, step));
        op_adamw(&f64, p, m, v, g, &s);
        for (int64_t i = 0; i < N; i++) {
            double grad = 0.5 * value_at(g, i);
            ref_p[i] *= 1 - lr * (double)s.weight_decay;
            ref_m[i] = b1 * ref_m[i] + (1 - b1) * grad;
            ref_v[i] = b2 * ref_v[i] + (1 - b2) * grad * grad;
            double mean = ref_m[i] / (double)s.correction1, square = ref_v[i] / (double)s.correction2;
            ref_p[i] -= lr * mean / (sqrt(square) + (double)s.eps);
            assert_close(value_at(p, i), ref_p[i], 1e-13);
            assert_close(value_at(m, i), ref_m[i], 1e-13);
            assert_close(value_at(v, i), ref_v[i], 1e-13);
        }
    }
    (void)state;
}

static void run_optim(struct device *dev, const void *params, struct op_outputs *o)
{
    int64_t n = *(const int64_t *)params;
    struct adamw_step s = {0.01f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.5f, 0.19f, 0.001999f};
    struct tensor p = make_random(dev->stat_dtype, 50, 1, n, -1, -1),
                  g = make_random(dev->stat_dtype, 51, 1, n, -1, -1);
    struct tensor m = make_random(dev->stat_dtype, 52, 1, n, -1, -1), v = make_zero(dev->stat_dtype, n, -1, -1);
    struct tensor sum = make_empty(DT_F64, 2, -1, -1), copy = make_empty(dev->act_dtype, n, -1, -1);
    op_sumsq(dev, sum, g);
    op_adamw(dev, p, m, v, g, &s);
    op_cast(dev, copy, p);
    if (!dev->dry_run) assert_same_bits(copy, p);
    struct tensor all[] = {sum, p, m, v, copy};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

static void test_optim_runs(void **state)
{
    static const int64_t sizes[] = {0, 1, 40001};
    for (int i = 0; i < MT_LEN(sizes); i++) op_check_case(run_optim, &sizes[i], 1e-6);
    (void)state;
}

/* ---- on the GPU ----
 * The choice must equal that of F64. On a grid of eighths every logit is exact in every precision: equal or well
 * separated. Otherwise the inputs are such that every choice is clear by more than CLEAR, a hundred roundings. */

#define CLEAR 1e-4

struct gpu_router {
    int64_t n_tok, n_exp, top_k, dim;
    struct weight_packing packing;
    enum router_kind kind;
    float coef;
    bool pooled, grid, twins; /* twins: odd experts copy the expert before; without grid only logits are compared */
    int64_t pad;              /* x, dx, logits, gate and dgate are columns of wider tensors */
};

static double eighths(double v) { return round(8 * v) / 8; }

/* W in the case's format; dense W is on the grid and may have twins. */
static struct weight gpu_router_weight(const struct gpu_router *p)
{
    struct weight w = make_packed(p->packing, 1, 1, 1, p->n_exp, p->dim);
    if (w.format != WF_BF16 && w.format != WF_F32) return w;
    struct tensor v = make_empty(w.format == WF_F32 ? DT_F32 : DT_BF16, p->n_exp, p->dim, -1);
    for (int64_t i = 0; i < tensor_count(v); i++) {
        int64_t e = i / p->dim, from = p->twins ? i - e % 2 * p->dim : i;
        double x = (double)quant_value(&w, 0, from);
        set_value(v, i, p->grid ? eighths(x) : x);
    }
    w.data = v.data;
    return w;
}

/* A tensor, or columns 8 .. of one `pad` wider, whose other columns are zeros. */
static struct tensor padded(enum dtype t, int64_t rows, int64_t cols, int64_t pad)
{
    return pad ? tensor_cols(make_zero(t, rows, cols + pad, -1), 8, cols) : make_empty(t, rows, cols, -1);
}

static void fill(struct tensor x, uint64_t stream, bool grid)
{
    for (int64_t i = 0; i < tensor_count(x); i++) {
        double v = (double)bf16_to_f32(f32_to_bf16((float)test_value(stream, (uint64_t)i)));
        set_value(x, i, grid ? eighths(v) : v);
    }
}

/* For every token, the smallest chosen logit is well above the largest of the others. */
static void check_clear(const struct routing *s)
{
    int64_t n_exp = s->w.n_out, n_top = s->r.idx.shape[1];
    for (int64_t t = 0; t < s->x.shape[0]; t++) {
        double in = INFINITY, out = -INFINITY;
        for (int64_t e = 0, j = 0; e < n_exp; e++) {
            double v = value_at(s->logits, t * n_exp + e);
            bool mine = j < n_top && chosen(s, t, j) == e;
            j += mine;
            if (mine)
                in = fmin(in, v);
            else
                out = fmax(out, v);
        }
        if (!(in - out >= CLEAR)) fail_msg("token %lld: the choice hangs on %g", (long long)t, in - out);
    }
}

static void gpu_router(struct device *dev, const struct gpu_router *p, bool bias, struct op_outputs *o)
{
    struct routing s = make_router(dev, p->n_tok, p->n_exp, p->top_k, p->coef);
    s.how.kind = p->kind;
    s.aux.pooled = p->pooled;
    s.w = gpu_router_weight(p);
    s.x = padded(dev->act_dtype, p->n_tok, p->dim, p->pad);
    s.logits = padded(dev->stat_dtype, p->n_tok, p->n_exp, p->pad);
    s.r.gate = padded(dev->stat_dtype, p->n_tok, p->top_k, p->pad);
    struct tensor dgate = padded(dev->stat_dtype, p->n_tok, p->top_k, p->pad);
    struct tensor dx = padded(dev->act_dtype, p->n_tok, p->dim, p->pad);
    fill(s.x, 2, p->grid);
    fill(dgate, 5, false);
    fill(dx, 6, false);
    for (int64_t e = 0; e < p->n_exp; e++) set_value(s.bias, e, eighths(value_at(s.bias, p->twins ? e - e % 2 : e)));
    if (!bias) s.bias = (struct tensor){0};
    route(&s);
    for (int layer = 0; layer < 2; layer++) op_aux_stats(dev, &s.aux, s.logits, &s.r);
    op_router_bwd(dev, dx, dgate, &s.r, s.logits, &s.w, &s.aux, &s.how);
    bool alone = p->twins && !p->grid;
    if (!dev->dry_run) check_choice(&s);
    if (dev->act_dtype == DT_F64 && !p->grid && !p->twins) check_clear(&s);
    for (int64_t i = 0; dev->act_dtype == DT_BF16 && !dev->dry_run && p->twins && i < tensor_count(s.logits); i++)
        if (i % p->n_exp % 2) assert_true(value_at(s.logits, i) == value_at(s.logits, i - 1));
    struct tensor all[] = {s.logits,     s.r.idx,     s.r.gate,   s.r.offs, s.r.row_slot,
                           s.r.slot_row, s.aux.count, s.aux.prob, dx};
    memcpy(o->out, all, sizeof(all));
    o->n = alone ? 1 : MT_LEN(all);
}

static void gpu_router_run(struct device *dev, const void *params, struct op_outputs *o)
{
    gpu_router(dev, params, true, o);
}

static void gpu_router_run_without_bias(struct device *dev, const void *params, struct op_outputs *o)
{
    gpu_router(dev, params, false, o);
}

#define BF16                                                                                                           \
    {                                                                                                                  \
        WF_BF16, 0, false                                                                                              \
    }
#define F32                                                                                                            \
    {                                                                                                                  \
        WF_F32, 0, false                                                                                               \
    }
#define F16                                                                                                            \
    {                                                                                                                  \
        WF_F16, 0, false                                                                                               \
    }
#define MXFP4                                                                                                          \
    {                                                                                                                  \
        WF_MXFP4, 0, false                                                                                             \
    }
#define NF4                                                                                                            \
    {                                                                                                                  \
        WF_NF4, 64, true                                                                                               \
    }

/* Few tokens and columns, but every kernel. */
static const struct gpu_router small_routers[] = {
    {0, 32, 4, 64, BF16, ROUTER_CHOSEN, 0.5f, true, true, false, 0},
    {1, 32, 4, 288, BF16, ROUTER_CHOSEN, 0, true, true, true, 0},
    {9, 512, 8, 72, F32, ROUTER_PROBABILITY, 0.5f, true, true, false, 8},
    {19, 60, 4, 64, F32, ROUTER_PROBABILITY, 0.5f, true, true, true, 8},
    {5, 1, 1, 64, F32, ROUTER_CHOSEN, 0, true, true, false, 0},
    {17, 128, 4, 96, MXFP4, ROUTER_CHOSEN, 0, true, true, false, 0},
    {130, 65, 16, 40, BF16, ROUTER_CHOSEN, 0, true, true, false, 8},
};
/* With dl of all experts and weights in bf16, cuBLASLt computes dx. */
static const struct gpu_router small_routers_of_all_experts[] = {
    {33, 32, 4, 288, BF16, ROUTER_CHOSEN, 0.5f, true, true, false, 16},
    {17, 64, 8, 256, BF16, ROUTER_PROBABILITY, 0.5f, false, true, false, 16},
    {19, 256, 8, 64, BF16, ROUTER_CHOSEN, 0.5f, false, true, true, 0},
    {70, 33, 3, 24, BF16, ROUTER_PROBABILITY, 0, true, true, true, 0},
    {9, 12, 4, 64, BF16, ROUTER_CHOSEN, 0, true, true, false, 8}, /* more than a quarter is chosen */
};
static const struct gpu_router routers[] = {
    {131, 32, 4, 2880, BF16, ROUTER_CHOSEN, 0, true, true, true, 0},
    {131, 32, 4, 2880, BF16, ROUTER_CHOSEN, 0.5f, true, true, false, 16},
    {65, 32, 1, 2880, BF16, ROUTER_CHOSEN, 0, true, false, false, 0},
    {65, 128, 8, 2048, BF16, ROUTER_CHOSEN, 0.5f, false, true, true, 0},
    {65, 128, 8, 2048, F32, ROUTER_CHOSEN, 0, true, false, false, 0},
    {130, 64, 8, 2048, BF16, ROUTER_PROBABILITY, 0.5f, false, true, false, 16},
    {63, 60, 4, 2048, BF16, ROUTER_PROBABILITY, 0, true, true, true, 0},
    {63, 60, 4, 64, F32, ROUTER_PROBABILITY, 0.5f, true, true, true, 8},
    {200, 8, 2, 4096, BF16, ROUTER_CHOSEN, 0, true, true, false, 0},
    {77, 256, 8, 64, BF16, ROUTER_CHOSEN, 0.5f, false, true, true, 0},
    {33, 512, 8, 72, F32, ROUTER_PROBABILITY, 0.5f, true, true, false, 8},
    {77, 256, 8, 64, F16, ROUTER_CHOSEN, 0, true, false, false, 0},
    {300, 33, 3, 24, BF16, ROUTER_PROBABILITY, 0, true, true, true, 0},
    {70, 9, 9, 8, BF16, ROUTER_PROBABILITY, 0.5f, true, true, false, 0},
    {70, 128, 4, 96, MXFP4, ROUTER_CHOSEN, 0, true, true, false, 0},
    {70, 40, 4, 192, NF4, ROUTER_PROBABILITY, 0.5f, true, false, false, 0},
    {70, 64, 4, 2880, BF16, ROUTER_CHOSEN, 0, true, false, true, 0},
    {70, 64, 4, 2880, F32, ROUTER_CHOSEN, 0, true, false, true, 0},
    {600, 65, 16, 136, BF16, ROUTER_CHOSEN, 0, true, true, false, 8},
};
static const struct gpu_router small_routers_without_bias[] = {
    {33, 256, 8, 256, BF16, ROUTER_CHOSEN, 0, true, true, false, 0},
    {9, 512, 10, 72, BF16, ROUTER_CHOSEN, 0, true, true, true, 8},
    {9, 512, 32, 72, BF16, ROUTER_CHOSEN, 0, true, true, false, 8},
    {5, 64, 4, 2880, BF16, ROUTER_CHOSEN, 0, true, false, true, 0},
};
static const struct gpu_router routers_without_bias[] = {
    {131, 256, 8, 2048, BF16, ROUTER_CHOSEN, 0, true, true, false, 0},
    {1, 256, 8, 2048, BF16, ROUTER_CHOSEN, 0, true, true, true, 0},
    {77, 512, 10, 72, BF16, ROUTER_CHOSEN, 0, true, true, true, 8},
    {300, 64, 6, 2880, BF16, ROUTER_CHOSEN, 0, true, true, false, 0},
    {70, 128, 8, 96, BF16, ROUTER_PROBABILITY, 0.5f, true, true, false, 0},
    {70, 64, 4, 2880, BF16, ROUTER_CHOSEN, 0, true, false, true, 0},
};

static void check_routers(op_case_fn *run, const struct gpu_router *cases, int n)
{
    op_check_need_gpu();
    for (int i = 0; i < n; i++) op_check_cuda(run, &cases[i]);
}
static void router_on_the_gpu(void **state)
{
    (void)state;
    check_routers(gpu_router_run, small_routers, MT_LEN(small_routers));
}
static void router_of_all_experts_on_the_gpu_by_cublas(void **state)
{
    (void)state;
    check_routers(gpu_router_run, small_routers_of_all_experts, MT_LEN(small_routers_of_all_experts));
}
static void router_large_on_the_gpu(void **state)
{
    (void)state;
    check_routers(gpu_router_run, routers, MT_LEN(routers));
}
static void router_without_bias_on_the_gpu_by_cublas(void **state)
{
    (void)state;
    check_routers(gpu_router_run_without_bias, small_routers_without_bias, MT_LEN(small_routers_without_bias));
}
static void given_experts_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(router_cases); i++)
        if (router_cases[i].given) op_check_cuda(run_router, &router_cases[i]);
}
static void router_without_bias_large_on_the_gpu(void **state)
{
    (void)state;
    check_routers(gpu_router_run_without_bias, routers_without_bias, MT_LEN(routers_without_bias));
}

/* For any logits, the choice is distinct experts in range. Gates may be NaN, so no output is compared. */
static void gpu_nan_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct routing s = make_router(dev, 3, 40, 4, 0);
    (void)params;
    for (int step = 1; step < 41; step += 3) {
        for (int64_t e = 0; e < 40; e++) set_value(s.bias, e, e % step ? (double)NAN : e % 3 ? -INFINITY : INFINITY);
        route(&s);
        if (!dev->dry_run) check_choice(&s);
    }
    o->n = 0;
}

static void nan_logits_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    op_check_cuda(gpu_nan_run, NULL);
}

struct gpu_sort {
    int64_t n_tok, n_exp, top_k, spread; /* experts below `spread` are chosen; 1: all rows go to one expert */
};

static void gpu_sort_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct gpu_sort *p = params;
    struct route r = {.idx = make_empty(DT_I32, p->n_tok, p->top_k, -1),
                      .gate = make_zero(dev->stat_dtype, p->n_tok, p->top_k, -1),
                      .offs = make_empty(DT_I32, p->n_exp + 1, -1, -1),
                      .row_slot = make_empty(DT_I32, p->n_tok * p->top_k, -1, -1),
                      .slot_row = make_empty(DT_I32, p->n_tok, p->top_k, -1)};
    for (int64_t i = 0; i < tensor_count(r.idx); i++) {
        double u = rng_uniform(7, (uint64_t)i); /* squared: the first experts get most of the rows */
        ((int32_t *)r.idx.data)[i] = (int32_t)(u * u * (double)p->spread) + (int32_t)(p->n_exp - p->spread);
    }
    op_route_sort(dev, &r, p->n_exp);
    struct tensor all[] = {r.offs, r.row_slot, r.slot_row};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

static void sort_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct gpu_sort cases[] = {
        {0, 32, 4, 32},      {1, 1, 1, 1},      {1, 60, 4, 60},      {128, 32, 4, 32},    {513, 8, 1, 3},
        {777, 9, 3, 1},      {4097, 60, 4, 17}, {5000, 128, 8, 128}, {9001, 512, 8, 512}, {3000, 33, 7, 5},
        {701, 512, 22, 512}, {512, 60, 4, 60},  {2049, 9, 1, 9},
    };
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(gpu_sort_run, &cases[i]);
}
static void sort_large_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    op_check_cuda(gpu_sort_run, &(struct gpu_sort){70001, 256, 4, 256});
}

int test_ops_router(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_choice, begin, end),
        cmocka_unit_test_setup_teardown(test_ties, begin, end),
        cmocka_unit_test_setup_teardown(test_nan_logits, begin, end),
        cmocka_unit_test_setup_teardown(test_all_experts, begin, end),
        cmocka_unit_test_setup_teardown(test_large_logits, begin, end),
        cmocka_unit_test_setup_teardown(test_sort, begin, end),
        cmocka_unit_test_setup_teardown(test_gradient, begin, end),
        cmocka_unit_test_setup_teardown(test_gradient_of_given, begin, end),
        cmocka_unit_test_setup_teardown(test_aux_stats, begin, end),
        cmocka_unit_test(test_router_runs),
        cmocka_unit_test_setup_teardown(test_combine, begin, end),
        cmocka_unit_test_setup_teardown(test_dispatch_and_combine, begin, end),
        cmocka_unit_test_setup_teardown(test_sumsq, begin, end),
        cmocka_unit_test_setup_teardown(test_adamw, begin, end),
        cmocka_unit_test(test_optim_runs),
        cmocka_unit_test(router_on_the_gpu),
        cmocka_unit_test(router_of_all_experts_on_the_gpu_by_cublas),
        cmocka_unit_test(router_large_on_the_gpu),
        cmocka_unit_test(router_without_bias_on_the_gpu_by_cublas),
        cmocka_unit_test(router_without_bias_large_on_the_gpu),
        cmocka_unit_test(given_experts_on_the_gpu),
        cmocka_unit_test(nan_logits_on_the_gpu),
        cmocka_unit_test(sort_on_the_gpu),
        cmocka_unit_test(sort_large_on_the_gpu),
        cmocka_unit_test(dispatch_and_combine_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_router", tests, NULL, NULL);
}
