/* test_ops_mla.c - latent attention: the packed q | k | v, and decoding from latents, which needs no k and v. */
#include "tests/test.h"

#include <math.h>

#include "tests/op_check.h"

enum { POSITIONS = 50 };

/* pad: columns around every view, half of them before it; on a GPU a multiple of 16, as rows are aligned */
struct shape {
    int64_t n_tok;
    struct mla_shape s;
    int64_t pad;
};

static const struct shape shapes[] = {
    {0, {2, 4, 2, 3, true, 0, 0}, 0},    {1, {1, 2, 4, 2, true, 0, 0}, 0},  {7, {3, 4, 6, 5, true, 0, 0}, 0},
    {7, {3, 4, 6, 5, false, 0, 0}, 0},   {5, {4, 0, 8, 2, false, 0, 0}, 0}, {6, {2, 3, 2, 8, true, 0, 0}, 8},
    {9, {3, 4, 6, 5, true, 8, 0.5f}, 0},
};
/* GLM-4.7-Flash, DeepSeek-V3, sizes with which some threads of the sum over heads have no head or no pair of columns;
 * queries that grow with the position, as in Mistral Small 4. */
static const struct shape gpu_shapes[] = {
    {37, {20, 192, 64, 256, true, 0, 0}, 0},  {9, {128, 128, 64, 128, true, 0, 0}, 0},
    {5, {16, 64, 32, 64, false, 0, 0}, 16},   {3, {7, 8, 48, 16, true, 0, 0}, 16},
    {1, {1, 16, 16, 8, true, 0, 0}, 0},       {2, {33, 0, 256, 8, false, 0, 0}, 0},
    {4, {65, 24, 16, 40, true, 0, 0}, 16},    {0, {4, 64, 64, 64, true, 0, 0}, 0},
    {9, {32, 64, 64, 128, true, 8, 0.1f}, 0}, {5, {4, 8, 16, 8, false, 1, 0.7f}, 16},
};

struct mla {
    struct device *dev;
    const struct mla_shape *s;
    struct tensor q, kv, k_rope, qkv, pos, table;
    struct tensor dq, dkv, dk_rope;
};

static struct tensor view(struct tensor wide, int64_t pad)
{
    return pad ? tensor_cols(wide, pad / 2, wide.shape[1] - pad) : wide;
}
static struct tensor input(struct device *dev, const struct shape *p, uint64_t stream, int64_t cols)
{
    return view(make_random(dev->act_dtype, stream, 1, p->n_tok, cols + p->pad, -1), p->pad);
}
static struct tensor output(struct device *dev, const struct shape *p, int64_t cols)
{
    return view(make_empty(dev->act_dtype, p->n_tok, cols + p->pad, -1), p->pad);
}

static struct mla make(struct device *dev, const struct shape *p)
{
    const struct mla_shape *s = &p->s;
    const int64_t q = s->n_head * (s->nope + s->rope), kv = s->n_head * (s->nope + s->value), half = s->rope / 2;
    struct mla m = {.dev = dev,
                    .s = s,
                    .q = input(dev, p, 1, q),
                    .kv = input(dev, p, 2, kv),
                    .k_rope = input(dev, p, 3, s->rope),
                    .qkv = output(dev, p, 2 * q + s->n_head * s->value),
                    .dq = output(dev, p, q),
                    .dkv = output(dev, p, kv),
                    .dk_rope = output(dev, p, s->rope),
                    .pos = make_empty(DT_I32, p->n_tok, -1, -1),
                    .table = make_empty(DT_F32, POSITIONS, s->rope, -1)};
    for (int64_t k = 0; k < POSITIONS * half; k++) { /* with an attention factor of 1.25 */
        const double angle = (double)(k / half) / pow(1e4, (double)(k % half) / (double)half);
        set_value(m.table, k / half * s->rope + k % half, 1.25 * cos(angle));
        set_value(m.table, k / half * s->rope + half + k % half, 1.25 * sin(angle));
    }
    for (int64_t t = 0; t < p->n_tok; t++) ((int32_t *)m.pos.data)[t] = (int32_t)((49 + 13 * t) % POSITIONS);
    return m;
}

static void fwd(struct mla *m) { op_mla_qkv_fwd(m->dev, m->qkv, m->q, m->kv, m->k_rope, m->pos, m->table, m->s); }
static void bwd(struct mla *m)
{
    op_mla_qkv_bwd(m->dev, m->dq, m->dkv, m->dk_rope, make_probe(m->qkv, 4), m->pos, m->table, m->s);
}

static void run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct mla m = make(dev, params);
    fwd(&m);
    bwd(&m);
    const struct tensor all[] = {m.qkv, m.dq, m.dkv, m.dk_rope};
    for (int i = 0; i < MT_LEN(all); i++) o->out[o->n++] = all[i];
}

static double loss(void *arg)
{
    struct mla *m = arg;
    fwd(m);
    return probe(m->qkv, 4);
}

/* Column c of the rotated part whose inputs begin at element `at` of x. */
static double rotated(const struct mla *m, struct tensor x, int64_t at, int64_t t, int64_t c)
{
    const int64_t half = m->s->rope / 2, i = c % half, row = ((const int32_t *)m->pos.data)[t] * m->s->rope;
    const double cosine = value_at(m->table, row + i), sine = value_at(m->table, row + half + i);
    const double lo = value_at(x, at + (m->s->interleaved ? 2 * i : i)),
                 hi = value_at(x, at + (m->s->interleaved ? 2 * i + 1 : i + half));
    return c < half ? lo * cosine - hi * sine : hi * cosine + lo * sine;
}

static double query_factor(const struct mla_shape *s, int32_t pos)
{
    return s->beta > 0 ? 1 + (double)s->beta * log(1 + floor((double)pos / (double)s->beta_len)) : 1;
}

static void check_token(const struct mla *m, int64_t t)
{
    const struct mla_shape *s = m->s;
    const int64_t n = s->nope, dim = n + s->rope, width = s->n_head * (2 * dim + s->value), row = t * width;
    for (int64_t h = 0; h < s->n_head; h++) {
        const int64_t q = (t * s->n_head + h) * dim, kv = (t * s->n_head + h) * (n + s->value);
        for (int64_t c = 0; c < dim; c++) {
            const double plain_q = c < n ? value_at(m->q, q + c) : rotated(m, m->q, q + n, t, c - n);
            const double want_q = plain_q * query_factor(s, ((const int32_t *)m->pos.data)[t]);
            const double want_k = c < n ? value_at(m->kv, kv + c) : rotated(m, m->k_rope, t * s->rope, t, c - n);
            assert_close(value_at(m->qkv, row + h * dim + c), want_q, 1e-15);
            assert_close(value_at(m->qkv, row + (s->n_head + h) * dim + c), want_k, 1e-15);
        }
        for (int64_t c = 0; c < s->value; c++)
            assert_true(value_at(m->qkv, row + 2 * s->n_head * dim + h * s->value + c) == value_at(m->kv, kv + n + c));
    }
}

static void is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct mla m = make(&dev, &shapes[i]);
        fwd(&m);
        for (int64_t t = 0; t < shapes[i].n_tok; t++) check_token(&m, t);
        op_check_end(&dev);
    }
}

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* hundreds of tiny calls */
        struct mla m = make(&dev, &shapes[i]);
        fwd(&m);
        bwd(&m);
        assert_true(gradient_error(loss, &m, m.q, m.dq) < 1e-9);
        assert_true(gradient_error(loss, &m, m.kv, m.dkv) < 1e-9);
        assert_true(gradient_error(loss, &m, m.k_rope, m.dk_rope) < 1e-9);
        op_check_end(&dev);
    }
}

static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 1e-6);
    for (int i = 2; i < MT_LEN(gpu_shapes); i++) op_check_case(run, &gpu_shapes[i], 1e-6);
}

static void on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_shapes); i++) op_check_cuda(run, &gpu_shapes[i]);
}

/* ---- decoding: queries to the latent, sums of latents to values ---- */

struct latent_shape {
    int64_t n_tok;
    struct mla_shape s;
    int64_t n_in, r, pad;
};
static const struct latent_shape latent_shapes[] = {
    {0, {2, 4, 2, 3, true, 0, 0}, 6, 2, 0},     {1, {1, 2, 4, 2, true, 0, 0}, 4, 0, 0},
    {7, {3, 4, 6, 5, false, 0, 0}, 8, 3, 8},    {5, {4, 0, 8, 2, false, 0, 0}, 6, 1, 0},
    {9, {3, 4, 6, 5, true, 8, 0.5f}, 10, 2, 0},
};
/* DeepSeek-V3 and GLM-4.7-Flash with fewer heads; tokens and columns that end inside a block. */
static const struct latent_shape latent_gpu_shapes[] = {
    {1, {4, 128, 64, 128, true, 0, 0}, 512, 16, 0},  {19, {2, 192, 64, 256, true, 0, 0}, 512, 0, 16},
    {8, {3, 64, 64, 128, true, 8, 0.1f}, 256, 8, 0}, {9, {2, 8, 16, 40, false, 1, 0.7f}, 136, 24, 16},
    {3, {1, 0, 16, 8, false, 0, 0}, 8, 8, 0},        {0, {4, 64, 64, 64, true, 0, 0}, 64, 8, 0},
};

struct latent {
    struct device *dev;
    const struct latent_shape *p;
    struct proj kv_b;
    struct tensor q, y, z, o, pos;
};

static struct latent make_latent(struct device *dev, const struct latent_shape *p)
{
    const struct mla_shape *s = &p->s;
    const struct shape cols = {.n_tok = p->n_tok, .pad = p->pad};
    const int64_t n_out = s->n_head * (s->nope + s->value);
    struct latent m = {.dev = dev,
                       .p = p,
                       .kv_b = {.w = make_weight(WF_BF16, 1, 1, 1, n_out, p->n_in)},
                       .q = input(dev, &cols, 2, s->n_head * (s->nope + s->rope)),
                       .y = output(dev, &cols, s->n_head * (p->n_in + s->rope)),
                       .z = input(dev, &cols, 3, s->n_head * p->n_in),
                       .o = output(dev, &cols, s->n_head * s->value),
                       .pos = make_empty(DT_I32, p->n_tok, -1, -1)};
    for (int64_t t = 0; t < p->n_tok; t++) ((int32_t *)m.pos.data)[t] = (int32_t)((49 + 13 * t) % POSITIONS);
    if (!p->r) return m;
    m.kv_b.lora = (struct lora){.r = p->r, .scale = {0.75f}, .n_seg = 1, .seg_cols = {n_out}};
    m.kv_b.lora.a = make_random(dev->act_dtype, 5, 1, p->r, p->n_in, -1);
    m.kv_b.lora.b = make_random(dev->act_dtype, 6, 1, n_out, p->r, -1);
    return m;
}

static void run_latent(struct device *dev, const void *params, struct op_outputs *o)
{
    struct latent m = make_latent(dev, params);
    op_mla_absorb(dev, m.y, m.q, m.pos, &m.kv_b, &m.p->s);
    op_mla_values(dev, m.o, m.z, &m.kv_b, &m.p->s);
    o->out[o->n++] = m.y;
    o->out[o->n++] = m.o;
}

/* Element [row, c] of W + scale B A. */
static double element_of(const struct latent *m, int64_t row, int64_t c)
{
    const struct lora *l = &m->kv_b.lora;
    double sum = (double)bf16_to_f32(((const uint16_t *)m->kv_b.w.data)[row * m->p->n_in + c]);
    for (int64_t k = 0; k < l->r; k++)
        sum += (double)l->scale[0] * value_at(l->b, row * l->r + k) * value_at(l->a, k * m->p->n_in + c);
    return sum;
}

static void check_latent(const struct latent *m, int64_t t, int64_t h)
{
    const struct mla_shape *s = &m->p->s;
    const int64_t n_in = m->p->n_in, head = t * s->n_head + h, row = h * (s->nope + s->value);
    const double factor = query_factor(s, ((const int32_t *)m->pos.data)[t]);
    for (int64_t c = 0; c < n_in + s->rope; c++) {
        double want = c < n_in ? 0 : value_at(m->q, head * (s->nope + s->rope) + s->nope + c - n_in);
        for (int64_t k = 0; k < s->nope && c < n_in; k++)
            want += value_at(m->q, head * (s->nope + s->rope) + k) * element_of(m, row + k, c);
        assert_close(value_at(m->y, head * (n_in + s->rope) + c), factor * want, 1e-14);
    }
    for (int64_t c = 0; c < s->value; c++) {
        double want = 0;
        for (int64_t k = 0; k < n_in; k++)
            want += value_at(m->z, head * n_in + k) * element_of(m, row + s->nope + c, k);
        assert_close(value_at(m->o, head * s->value + c), want, 1e-14);
    }
}

static void latent_is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(latent_shapes); i++) {
        const struct latent_shape *p = &latent_shapes[i];
        struct device dev;
        op_check_begin(&dev, true);
        struct latent m = make_latent(&dev, p);
        op_mla_absorb(&dev, m.y, m.q, m.pos, &m.kv_b, &p->s);
        op_mla_values(&dev, m.o, m.z, &m.kv_b, &p->s);
        for (int64_t t = 0; t < p->n_tok; t++)
            for (int64_t h = 0; h < p->s.n_head; h++) check_latent(&m, t, h);
        op_check_end(&dev);
    }
}

static void latent_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(latent_shapes); i++) op_check_case(run_latent, &latent_shapes[i], 1e-6);
    for (int i = 0; i < MT_LEN(latent_gpu_shapes); i++) op_check_case(run_latent, &latent_gpu_shapes[i], 1e-6);
}

static void latent_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(latent_gpu_shapes); i++) op_check_cuda(run_latent, &latent_gpu_shapes[i]);
}

int test_ops_mla(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_the_definition),         cmocka_unit_test(gradients),
        cmocka_unit_test(precision_threads_measure), cmocka_unit_test(on_the_gpu),
        cmocka_unit_test(latent_is_the_definition),  cmocka_unit_test(latent_runs),
        cmocka_unit_test(latent_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_mla", tests, NULL, NULL);
}
