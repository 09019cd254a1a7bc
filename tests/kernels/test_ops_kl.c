/* test_ops_kl.c - the loss head of a distillation, and a teacher's likeliest tokens. */
#include "tests/op_check.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* The sizes of a case; n_top 0: the teacher gives hidden states, not rows. */
struct kl_shape {
    int64_t n_tok, dim, n_vocab, n_label, chunk, n_top;
    enum kl_kind kind;
    double alpha, temperature;
    bool want_dx;
};
static const struct kl_shape shapes[] = {
    {0, 4, 5, 0, 8, 0, KL_FORWARD, 0, 1, true},
    {3, 4, 5, 0, 8, 2, KL_FORWARD, 0, 1, true},
    {6, 8, 11, 6, 4, 0, KL_FORWARD, 0, 1, true},
    {6, 8, 11, 6, 4, 0, KL_REVERSE, 0, 1, true},
    {6, 8, 11, 4, 1, 0, KL_FORWARD, 0.3, 2.5, true},
    {6, 8, 11, 4, 100, 0, KL_REVERSE, 0.3, 0.5, true},
    {6, 8, 11, 4, 3, 0, KL_FORWARD, 1, 2, true},
    {6, 8, 11, 6, 4, 3, KL_FORWARD, 0, 1, true},
    {6, 8, 11, 4, 1, 1, KL_FORWARD, 0.25, 3, true},
    {6, 8, 11, 4, 3, 11, KL_FORWARD, 0.5, 0.7, true},
    {7, 6, 9, 5, 100, 4, KL_FORWARD, 0.5, 2, false},
    {7, 6, 9, 5, 100, 0, KL_REVERSE, 0.5, 2, false},
    {150, 64, 2500, 111, 32, 0, KL_FORWARD, 0.2, 2, true},
    {150, 64, 2500, 111, 32, 0, KL_REVERSE, 0, 1, true},
    {150, 64, 2500, 111, 32, 16, KL_FORWARD, 0.2, 2, true},
};

struct kl_case {
    struct device *dev;
    const struct kl_shape *s;
    struct weight w;
    struct tensor x, of_teacher, rows, ids, nll, kl, hit, dx; /* of_teacher [N, D] */
    struct teacher t;
};

/* Caps of the logits for all cases of a test: none, and one that many logits exceed. */
static const float caps[] = {1.5f, 0};
static float cap;

static struct weight head(const struct kl_shape *s) { return make_weight(WF_BF16, 1, 0.5, 1, s->n_vocab, s->dim); }

/* The k likeliest tokens of the teacher by the op, the last of every third row left out. */
static void make_topk(struct kl_case *c, int64_t k)
{
    const struct kl_shape *s = c->s;
    struct tensor all = make_empty(DT_I32, s->n_label, -1, -1);
    c->t.id = make_empty(DT_I32, s->n_label, k, -1);
    c->t.logprob = make_empty(c->dev->stat_dtype, s->n_label, k, -1);
    for (int64_t i = 0; i < s->n_label; i++) set_value(all, i, (double)i);
    op_linear_topk(c->dev, c->t.id, c->t.logprob, c->of_teacher, &c->w, cap, all, (float)s->temperature, s->chunk);
    for (int64_t i = 0; i < s->n_label && k > 1 && k < s->n_vocab; i += 3) set_value(c->t.id, i * k + k - 1, -1);
}

static struct kl_case kl_make(struct device *dev, const struct kl_shape *s)
{
    struct kl_case c = {.dev = dev,
                        .s = s,
                        .w = head(s),
                        .x = make_random(dev->act_dtype, 2, 2, s->n_tok, s->dim, -1),
                        .of_teacher = make_random(dev->act_dtype, 3, 2, s->n_label, s->dim, -1),
                        .rows = make_empty(DT_I32, s->n_label, -1, -1),
                        .ids = make_empty(DT_I32, s->n_label, -1, -1),
                        .nll = make_empty(dev->stat_dtype, s->n_label, -1, -1),
                        .kl = make_empty(dev->stat_dtype, s->n_label, -1, -1),
                        .hit = make_empty(DT_I32, s->n_label, -1, -1)};
    if (s->want_dx) c.dx = make_empty(dev->act_dtype, s->n_tok, s->dim, -1);
    for (int64_t i = 0; i < s->n_label; i++) {
        set_value(c.rows, i, (double)(i * s->n_tok / s->n_label));
        set_value(c.ids, i, (double)(i * 7 % s->n_vocab));
    }
    c.t = (struct teacher){.kind = s->kind, .alpha = (float)s->alpha, .temperature = (float)s->temperature};
    if (s->n_top)
        make_topk(&c, s->n_top);
    else
        c.t.hidden = c.of_teacher;
    return c;
}

static void kl_op(struct kl_case *c)
{
    op_linear_kl(c->dev, c->nll, c->kl, c->hit, c->dx, c->x, &c->w, cap, c->rows, c->ids, &c->t, 0.25f, c->s->chunk);
}

static void put(struct op_outputs *o, struct tensor x)
{
    if (x.ndim) o->out[o->n++] = x;
}

static void kl_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct kl_case c = kl_make(dev, params);
    kl_op(&c);
    put(o, c.nll);
    put(o, c.kl);
    put(o, c.dx);
    put(o, c.hit);
}

/* The loss whose gradient dx is, in doubles from nll and kl. */
static double kl_loss(void *arg)
{
    struct kl_case *c = arg;
    const double alpha = (double)c->t.alpha, t = (double)c->t.temperature;
    double sum = 0;
    kl_op(c);
    for (int64_t i = 0; i < c->s->n_label; i++)
        sum += 0.25 * (alpha * value_at(c->nll, i) + (1 - alpha) * t * t * value_at(c->kl, i));
    return sum;
}

/* log softmax(W x / T) of a row. */
static double *log_probs(const struct kl_case *c, struct tensor x, int64_t row, double t)
{
    const int64_t n = c->w.n_out, dim = c->w.n_in;
    double *v = mem_array(n, sizeof(*v)), sum = 0;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t d = 0; d < dim; d++)
            v[i] += value_at(x, row * dim + d) * (double)bf16_to_f32(((const uint16_t *)c->w.data)[i * dim + d]);
        v[i] = (cap > 0 ? (double)cap * tanh(v[i] / (double)cap) : v[i]) / t;
        sum += exp(v[i]);
    }
    for (int64_t i = 0; i < n; i++) v[i] -= log(sum);
    return v;
}

/* kl of label k by its definition. */
static double definition(const struct kl_case *c, int64_t k)
{
    const double t = (double)c->t.temperature;
    const int64_t n_top = c->s->n_top;
    double *p = log_probs(c, c->x, (int64_t)value_at(c->rows, k), t), *q = log_probs(c, c->of_teacher, k, t);
    double kl = 0, left = 1, others = 0;
    for (int64_t i = 0; i < c->w.n_out && !n_top; i++)
        kl += c->t.kind == KL_FORWARD ? exp(q[i]) * (q[i] - p[i]) : exp(p[i]) * (p[i] - q[i]);
    for (int64_t i = 0; i < c->w.n_out && n_top; i++) {
        bool top = false;
        for (int64_t j = 0; j < n_top; j++) top = top || (int64_t)value_at(c->t.id, k * n_top + j) == i;
        if (!top) others += exp(p[i]);
        if (!top) continue;
        kl += exp(q[i]) * (q[i] - p[i]);
        left -= exp(q[i]);
    }
    if (others > 0 && left > 0) kl += left * (log(left) - log(others));
    mem_free(p);
    mem_free(q);
    return kl;
}

static void kl_of_cap_is_the_definition(void)
{
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(kl_run, &shapes[i], 4e-6);
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct kl_case c = kl_make(&dev, &shapes[i]);
        kl_op(&c);
        for (int64_t k = 0; k < c.s->n_label; k++) {
            double *p = log_probs(&c, c.x, (int64_t)value_at(c.rows, k), 1);
            assert_close(value_at(c.nll, k), -p[(int64_t)value_at(c.ids, k)], 1e-13);
            assert_close(value_at(c.kl, k), definition(&c, k), 1e-12);
            mem_free(p);
        }
        op_check_end(&dev);
    }
}

static void kl_is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(caps); i++) {
        cap = caps[i];
        kl_of_cap_is_the_definition();
    }
}

static void kl_gradients_of_cap(void)
{
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        if (!shapes[i].want_dx || !shapes[i].n_label) continue;
        op_check_begin(&dev, true);
        dev.n_threads = shapes[i].n_tok < 10 ? 1 : 2;
        struct kl_case c = kl_make(&dev, &shapes[i]);
        kl_op(&c);
        struct tensor dx = make_copy(c.dx);
        const double error = c.s->n_tok < 10 ? gradient_error(kl_loss, &c, c.x, dx) : slope_error(kl_loss, &c, c.x, dx);
        if (!(error < 1e-6)) fail_msg("case %d: gradient error %.1e", i, error);
        op_check_end(&dev);
    }
}

static void kl_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(caps); i++) {
        cap = caps[i];
        kl_gradients_of_cap();
    }
}

/* The student has the teacher's hidden states: no divergence and no gradient, to the bit. */
static void teacher_is_student(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct device dev;
        op_check_begin(&dev, i % 2);
        const struct kl_shape s = {37, 24, 1301, 37, 16, 0, i & 2 ? KL_REVERSE : KL_FORWARD, 0, i & 4 ? 2 : 1, true};
        struct kl_case c = kl_make(&dev, &s);
        c.t.hidden = c.x;
        kl_op(&c);
        for (int64_t k = 0; k < s.n_label; k++) assert_close(value_at(c.kl, k), 0, 0);
        for (int64_t k = 0; k < tensor_count(c.dx); k++) assert_close(value_at(c.dx, k), 0, 0);
        op_check_end(&dev);
    }
}

/* Rows with every token of the vocabulary give what the teacher's hidden states give. */
static void whole_rows_are_hidden_states(void **state)
{
    (void)state;
    static const struct kl_shape hidden = {40, 16, 301, 33, 7, 0, KL_FORWARD, 0.3, 2, true};
    struct kl_shape rows = hidden;
    struct device dev;
    op_check_begin(&dev, true);
    rows.n_top = rows.n_vocab;
    struct kl_case a = kl_make(&dev, &hidden), b = kl_make(&dev, &rows);
    kl_op(&a);
    kl_op(&b);
    assert_true(tensor_error(b.kl, a.kl) < 1e-12);
    assert_true(tensor_error(b.dx, a.dx) < 1e-12);
    assert_same_bits(b.nll, a.nll);
    op_check_end(&dev);
}

/* Temperature 2 on logits is temperature 1 on halves of them; the factor T^2 is not in kl. */
static void temperature_divides_logits(void **state)
{
    (void)state;
    static const struct kl_shape warm = {20, 16, 101, 20, 7, 0, KL_FORWARD, 0, 2, true};
    struct kl_shape plain = warm;
    struct device dev;
    op_check_begin(&dev, true);
    plain.temperature = 1;
    struct kl_case a = kl_make(&dev, &warm), b = kl_make(&dev, &plain);
    for (int64_t i = 0; i < tensor_count(b.x); i++) set_value(b.x, i, value_at(b.x, i) / 2);
    for (int64_t i = 0; i < tensor_count(b.of_teacher); i++) set_value(b.of_teacher, i, value_at(b.of_teacher, i) / 2);
    kl_op(&a);
    kl_op(&b);
    assert_true(tensor_error(a.kl, b.kl) < 1e-13);
    for (int64_t i = 0; i < tensor_count(b.dx); i++) set_value(b.dx, i, 2 * value_at(b.dx, i)); /* T^2 / T */
    assert_true(tensor_error(a.dx, b.dx) < 1e-13);
    op_check_end(&dev);
}

/* The size of the chunks changes no result. */
static void chunks_do_not_matter(void **state)
{
    (void)state;
    for (int64_t n_top = 0; n_top < 6; n_top += 5) {
        struct kl_shape one = {40, 16, 301, 33, 1, n_top, KL_FORWARD, 0.3, 2, true}, all = one;
        struct device dev;
        op_check_begin(&dev, true);
        all.chunk = 64;
        struct kl_case a = kl_make(&dev, &one), b = kl_make(&dev, &all);
        kl_op(&a);
        kl_op(&b);
        assert_true(tensor_error(a.kl, b.kl) < 1e-13);
        assert_true(tensor_error(a.dx, b.dx) < 1e-12);
        op_check_end(&dev);
    }
}

/* Logits of 1e4 neither overflow nor hide a divergence; a NaN stays in its row. */
static void kl_extremes(void **state)
{
    (void)state;
    static const float weights[] = {1e4f, -1e4f, 0, 0};
    static const int32_t rows[] = {0, 1, 2}, ids[] = {0, 1, 2};
    struct device dev;
    op_check_begin(&dev, false);
    struct weight w = {.format = WF_F32, .n_exp = 1, .n_out = 4, .n_in = 1, .data = weights};
    struct tensor x = make_empty(DT_F32, 3, 1, -1), y = make_empty(DT_F32, 3, 1, -1), dx = make_empty(DT_F32, 3, 1, -1);
    struct tensor nll = make_empty(DT_F32, 3, -1, -1), kl = make_empty(DT_F32, 3, -1, -1);
    struct tensor hit = make_empty(DT_I32, 3, -1, -1);
    struct teacher t = {.temperature = 1, .hidden = y};
    for (int i = 0; i < 3; i++) {
        set_value(x, i, i ? 1 : -1);
        set_value(y, i, 1);
    }
    op_linear_kl(&dev, nll, kl, hit, dx, x, &w, 0, make_i32(rows, 3), make_i32(ids, 3), &t, 1, 2);
    assert_close(value_at(kl, 0), 2e4, 1e-6);
    assert_true(value_at(kl, 1) == 0 && value_at(kl, 2) == 0);
    assert_finite(dx);
    set_value(x, 1, NAN);
    op_linear_kl(&dev, nll, kl, hit, dx, x, &w, 0, make_i32(rows, 3), make_i32(ids, 3), &t, 1, 2);
    assert_true(isnan(value_at(kl, 1)) && isnan(value_at(dx, 1)) && value_at(kl, 2) == 0 && value_at(dx, 2) == 0);
    op_check_end(&dev);
}

/* The teacher's log-probabilities in the data give some tokens a probability that is 0 in double, or nearly 0. These
 * tokens add nothing to kl. */
static void far_tokens_of_rows(void **state)
{
    (void)state;
    static const float weights[] = {0, 0, 0, -3}, far[] = {-700, -715, -740, -1e5f, -FLT_MAX};
    static const int32_t zero = 0, top[] = {0, 1, 2};
    for (int i = 0; i < 2 * MT_LEN(far); i++) {
        struct device dev;
        op_check_begin(&dev, i % 2);
        struct weight w = {.format = WF_F32, .n_exp = 1, .n_out = 4, .n_in = 1, .data = weights};
        struct tensor x = make_empty(dev.act_dtype, 1, 1, -1), dx = make_empty(dev.act_dtype, 1, 1, -1);
        struct tensor nll = make_empty(dev.stat_dtype, 1, -1, -1), kl = make_empty(dev.stat_dtype, 1, -1, -1);
        struct teacher t = {.temperature = 1, .logprob = make_empty(dev.stat_dtype, 1, 3, -1)};
        t.id = make_empty(DT_I32, 1, 3, -1);
        for (int k = 0; k < 3; k++) {
            set_value(t.id, k, top[k]);
            set_value(t.logprob, k, k ? far[i / 2] : 0);
        }
        set_value(x, 0, 1);
        op_linear_kl(&dev, nll, kl, make_empty(DT_I32, 1, -1, -1), dx, x, &w, 0, make_i32(&zero, 1), make_i32(&zero, 1),
                     &t, 1, 1);
        const double p = 1 / (3 + exp(-3)); /* probability of token 0, the teacher's only token */
        assert_close(value_at(kl, 0), -log(p), 1e-6);
        assert_close(value_at(dx, 0), p * -3 * exp(-3), 1e-6);
        op_check_end(&dev);
    }
}

/* ---- the likeliest tokens ---- */

static void topk_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct kl_shape *s = params;
    struct weight w = head(s);
    struct tensor x = make_random(dev->act_dtype, 2, 2, s->n_tok, s->dim, -1);
    struct tensor rows = make_empty(DT_I32, s->n_label, -1, -1), id = make_empty(DT_I32, s->n_label, s->n_top, -1);
    struct tensor logprob = make_empty(dev->stat_dtype, s->n_label, s->n_top, -1);
    for (int64_t i = 0; i < s->n_label; i++) set_value(rows, i, (double)(i * s->n_tok / s->n_label));
    op_linear_topk(dev, id, logprob, x, &w, 0, rows, (float)s->temperature, s->chunk);
    put(o, id);
    put(o, logprob);
}

static const struct kl_shape topk_shapes[] = {
    {0, 4, 5, 0, 8, 2, KL_FORWARD, 0, 1, false},        {6, 8, 11, 6, 4, 1, KL_FORWARD, 0, 1, false},
    {6, 8, 11, 6, 4, 11, KL_FORWARD, 0, 2, false},      {60, 64, 2500, 50, 16, 37, KL_FORWARD, 0, 0.5, false},
    {9, 16, 5000, 9, 16, 600, KL_FORWARD, 0, 1, false},
};

static void topk_is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(topk_shapes); i++) {
        const struct kl_shape *s = &topk_shapes[i];
        struct op_outputs o = {.n = 0};
        struct device dev;
        op_check_begin(&dev, true);
        topk_run(&dev, s, &o);
        struct kl_case c = {.w = head(s), .x = make_random(DT_F64, 2, 2, s->n_tok, s->dim, -1)};
        for (int64_t k = 0; k < s->n_label; k++) {
            double *p = log_probs(&c, c.x, k * s->n_tok / s->n_label, s->temperature), least = INFINITY;
            int64_t larger = 0, before = -1;
            for (int64_t j = k * s->n_top; j < (k + 1) * s->n_top; j++) {
                const int64_t id = (int64_t)value_at(o.out[0], j);
                assert_true(id > before && id < s->n_vocab); /* ascending, so distinct */
                assert_close(value_at(o.out[1], j), p[id], 1e-12);
                least = fmin(least, p[id]);
                before = id;
            }
            for (int64_t v = 0; v < s->n_vocab; v++) larger += p[v] > least;
            assert_int_equal(larger, s->n_top - 1);
            mem_free(p);
        }
        op_check_end(&dev);
    }
}

/* Of equal logits the lower ids are taken. */
static void ties_take_the_lower_id(void **state)
{
    (void)state;
    static const float weights[] = {1, 3, 2, 2, 3, 2, 2, 0};
    static const int32_t want[] = {1, 2, 3, 4};
    struct device dev;
    op_check_begin(&dev, false);
    struct weight w = {.format = WF_F32, .n_exp = 1, .n_out = 8, .n_in = 1, .data = weights};
    struct tensor x = make_empty(DT_F32, 1, 1, -1), id = make_empty(DT_I32, 1, 4, -1);
    struct tensor logprob = make_empty(DT_F32, 1, 4, -1);
    set_value(x, 0, 1);
    op_linear_topk(&dev, id, logprob, x, &w, 0, make_i32((const int32_t[]){0}, 1), 1, 8);
    for (int i = 0; i < 4; i++) assert_int_equal((int64_t)value_at(id, i), want[i]);
    op_check_end(&dev);
}

/* ---- on the GPU ---- */

static const struct kl_shape gpu_shapes[] = {
    {80, 64, 1000, 0, 16, 0, KL_FORWARD, 0, 1, true},       {80, 8, 5, 5, 1, 0, KL_REVERSE, 0, 1, true},
    {80, 72, 50257, 5, 16, 0, KL_FORWARD, 0, 1, true},      {80, 72, 1000, 70, 64, 0, KL_FORWARD, 0.3, 2, true},
    {80, 64, 50257, 40, 16, 0, KL_REVERSE, 0.5, 0.5, true}, {80, 200, 1001, 70, 16, 0, KL_REVERSE, 0.5, 2, false},
    {80, 64, 1000, 0, 16, 3, KL_FORWARD, 0, 1, true},       {80, 8, 5, 5, 1, 5, KL_FORWARD, 0, 1, true},
    {80, 64, 50257, 40, 16, 64, KL_FORWARD, 0.3, 2, true},  {80, 72, 1001, 70, 64, 700, KL_FORWARD, 0, 1, true},
    {80, 200, 1000, 70, 16, 1, KL_FORWARD, 0.5, 2, false},
};

/* The case gives the teacher's tokens, since logits in bf16 would make the device choose other tokens. */
static void kl_run_gpu(struct device *dev, const void *params, struct op_outputs *o)
{
    struct kl_shape s = *(const struct kl_shape *)params;
    const int64_t n_top = s.n_top;
    s.n_top = 0;
    struct kl_case c = kl_make(dev, &s);
    if (n_top) {
        c.t.hidden = (struct tensor){0};
        c.t.id = make_empty(DT_I32, s.n_label, n_top, -1);
        c.t.logprob = make_empty(dev->stat_dtype, s.n_label, n_top, -1);
        for (int64_t i = 0; i < s.n_label * n_top;
             i++) { /* distinct ids, not ascending; their probabilities sum to 0.9 at most */
            set_value(c.t.id, i, (double)((i % n_top * 3 + i / n_top) % s.n_vocab));
            set_value(c.t.logprob, i,
                      i % 17 == 16 ? -1e4 : (double)(float)log(0.9 / (double)n_top * (i % 2 ? 0.5 : 1)));
        }
    }
    kl_op(&c);
    put(o, c.nll);
    put(o, c.kl);
    put(o, c.dx);
    put(o, c.hit);
}

static void kl_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_shapes); i++) op_check_cuda(kl_run_gpu, &gpu_shapes[i]);
    cap = 4;
    for (int i = 0; i < MT_LEN(gpu_shapes); i += 2) op_check_cuda(kl_run_gpu, &gpu_shapes[i]);
    cap = 0;
}

/* Weights with one entry per row make logits that are exact in bf16 products, many of them equal. */
static void topk_run_exact(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct kl_shape *s = params;
    struct tensor w = make_zero(DT_F32, s->n_vocab, s->dim, -1), x = make_zero(dev->act_dtype, s->n_tok, s->dim, -1);
    struct weight exact = {.format = WF_F32, .n_exp = 1, .n_out = s->n_vocab, .n_in = s->dim, .data = w.data};
    struct tensor rows = make_empty(DT_I32, s->n_label, -1, -1), id = make_empty(DT_I32, s->n_label, s->n_top, -1);
    struct tensor logprob = make_empty(dev->stat_dtype, s->n_label, s->n_top, -1);
    for (int64_t v = 0; v < s->n_vocab; v++) set_value(w, v * s->dim, (double)(v * 7919 % 251) / 16 - 8);
    for (int64_t t = 0; t < s->n_tok; t++) set_value(x, t * s->dim, t % 3 ? 1 : -0.5);
    for (int64_t i = 0; i < s->n_label; i++) set_value(rows, i, (double)(i * s->n_tok / s->n_label));
    op_linear_topk(dev, id, logprob, x, &exact, 0, rows, (float)s->temperature, s->chunk);
    put(o, id);
    put(o, logprob);
}

static void topk_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct kl_shape gpu[] = {
        {80, 8, 5, 5, 1, 5, KL_FORWARD, 0, 1, false},           {80, 64, 1000, 70, 16, 1, KL_FORWARD, 0, 2, false},
        {80, 64, 50257, 40, 16, 64, KL_FORWARD, 0, 0.5, false}, {80, 72, 1001, 70, 64, 1001, KL_FORWARD, 0, 1, false},
        {80, 72, 5000, 70, 64, 4096, KL_FORWARD, 0, 1, false},
    };
    for (int i = 0; i < MT_LEN(gpu); i++) op_check_cuda(topk_run_exact, &gpu[i]);
}

int test_ops_kl(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kl_is_the_definition),
        cmocka_unit_test(kl_gradients),
        cmocka_unit_test(teacher_is_student),
        cmocka_unit_test(whole_rows_are_hidden_states),
        cmocka_unit_test(temperature_divides_logits),
        cmocka_unit_test(chunks_do_not_matter),
        cmocka_unit_test(kl_extremes),
        cmocka_unit_test(far_tokens_of_rows),
        cmocka_unit_test(topk_is_the_definition),
        cmocka_unit_test(ties_take_the_lower_id),
        cmocka_unit_test(kl_on_the_gpu),
        cmocka_unit_test(topk_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_kl", tests, NULL, NULL);
}
