/* test_ops_delta.c - gated DeltaNet, whose chunked form must equal the recurrence, and gated outputs. */
#include "tests/test.h"

#include <math.h>
#include <string.h>

#include "tests/op_check.h"

enum { MAX_SEQ = 8 };

static struct seqs make_seqs(const int64_t *len, int n_seq)
{
    int32_t cu[MAX_SEQ + 1] = {0};
    int64_t max_len = 0;
    for (int i = 0; i < n_seq; i++) {
        cu[i + 1] = cu[i] + (int32_t)len[i];
        max_len = MT_MAX(max_len, len[i]);
    }
    return (struct seqs){.cu = make_i32(cu, n_seq + 1), .n_seq = n_seq, .max_len = max_len};
}

static int64_t total(const int64_t *len, int n_seq)
{
    int64_t n = 0;
    for (int i = 0; i < n_seq; i++) n += len[i];
    return n;
}

static void put(struct op_outputs *o, struct tensor x) { o->out[o->n++] = x; }

static const struct tensor absent = {0};

/* ---- convolution ---- */

struct conv_shape {
    bool bias;
    int64_t n_col, n_tap;
    int n_seq;
    int64_t len[MAX_SEQ];
};
static const struct conv_shape conv_shapes[] = {
    {false, 3, 4, 1, {1}},       {true, 5, 4, 4, {2, 0, 5, 3}}, {false, 2, 1, 2, {3, 2}}, {true, 70, 4, 3, {1, 9, 4}},
    {false, 8, 8, 3, {7, 8, 9}}, {true, 4, 3, 0, {0}},          {false, 130, 2, 1, {6}},
};

struct conv {
    struct device *dev;
    struct seqs seqs;
    struct tensor x, y, w, bias, dx;
};

static struct conv conv_make(struct device *dev, const struct conv_shape *s)
{
    const int64_t n_tok = total(s->len, s->n_seq);
    return (struct conv){.dev = dev,
                         .seqs = make_seqs(s->len, s->n_seq),
                         .x = make_random(dev->act_dtype, 1, 2, n_tok, s->n_col, -1),
                         .y = make_empty(dev->act_dtype, n_tok, s->n_col, -1),
                         .w = make_random(DT_F32, 2, 1, s->n_col, s->n_tap, -1),
                         .bias = s->bias ? make_random(DT_F32, 6, 1, s->n_col, -1, -1) : absent,
                         .dx = make_empty(dev->act_dtype, n_tok, s->n_col, -1)};
}

static void conv_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct conv n = conv_make(dev, params);
    op_conv_silu_fwd(dev, n.y, n.x, n.w, n.bias, &n.seqs);
    op_conv_silu_bwd(dev, n.dx, make_probe(n.y, 3), n.x, n.w, n.bias, &n.seqs);
    put(o, n.y);
    put(o, n.dx);
}

static double conv_loss(void *arg)
{
    struct conv *n = arg;
    op_conv_silu_fwd(n->dev, n->y, n->x, n->w, n->bias, &n->seqs);
    return probe(n->y, 3);
}

/* The definition, and the gradient of every input. */
static void conv(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(conv_shapes); i++) {
        const struct conv_shape *s = &conv_shapes[i];
        struct device dev;
        op_check_begin(&dev, true);
        struct conv n = conv_make(&dev, s);
        op_conv_silu_fwd(&dev, n.y, n.x, n.w, n.bias, &n.seqs);
        for (int64_t seq = 0, first = 0; seq < s->n_seq; first += s->len[seq++])
            for (int64_t t = 0; t < s->len[seq]; t++)
                for (int64_t c = 0; c < s->n_col; c++) {
                    double u = s->bias ? value_at(n.bias, c) : 0;
                    for (int64_t j = 0; j < s->n_tap; j++)
                        if (t - (s->n_tap - 1) + j >= 0)
                            u += value_at(n.w, c * s->n_tap + j) *
                                 value_at(n.x, (first + t - (s->n_tap - 1) + j) * s->n_col + c);
                    assert_close(value_at(n.y, (first + t) * s->n_col + c), u / (1 + exp(-u)), 1e-14);
                }
        op_conv_silu_bwd(&dev, n.dx, make_probe(n.y, 3), n.x, n.w, n.bias, &n.seqs);
        const double error = tensor_count(n.x) ? gradient_error(conv_loss, &n, n.x, n.dx) : 0;
        if (!(error <= 1e-6)) fail_msg("shape %d: off by %g", i, error);
        op_check_end(&dev);
    }
}

static void conv_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(conv_shapes); i++) op_check_case(conv_run, &conv_shapes[i], 1e-6);
}

/* Columns of wider tensors, as the model passes them: same bits, and the columns beside them stay unchanged. */
static void conv_takes_views(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    struct conv n = conv_make(&dev, &conv_shapes[3]), v = conv_make(&dev, &conv_shapes[3]);
    const int64_t n_tok = n.x.shape[0], n_col = n.x.shape[1];
    struct tensor wide_x = make_random(DT_F32, 5, 1, n_tok, n_col + 6, -1), wide_dx = make_copy(wide_x);
    v.x = tensor_cols(wide_x, 2, n_col);
    v.dx = tensor_cols(wide_dx, 2, n_col);
    for (int64_t i = 0; i < tensor_count(n.x); i++) set_value(v.x, i, value_at(n.x, i));
    struct tensor before = make_copy(wide_dx), dy = make_probe(n.y, 3);
    op_conv_silu_fwd(&dev, n.y, n.x, n.w, n.bias, &n.seqs);
    op_conv_silu_fwd(&dev, v.y, v.x, v.w, v.bias, &v.seqs);
    op_conv_silu_bwd(&dev, n.dx, dy, n.x, n.w, n.bias, &n.seqs);
    op_conv_silu_bwd(&dev, v.dx, dy, v.x, v.w, v.bias, &v.seqs);
    assert_same_bits(n.y, v.y);
    assert_same_bits(n.dx, v.dx);
    assert_same_bits(tensor_cols(wide_dx, 0, 2), tensor_cols(before, 0, 2));
    assert_same_bits(tensor_cols(wide_dx, n_col + 2, 4), tensor_cols(before, n_col + 2, 4));
    op_check_end(&dev);
}

/* ---- gated delta rule ---- */

struct shape {
    struct delta_shape d;
    int n_seq;
    int64_t len[MAX_SEQ];
};
/* Lengths around the chunk; 1, 2 and 3 value heads per key head; key and value heads of different widths. */
static const struct shape shapes[] = {
    {{1, 1, 4, 3}, 1, {1}},
    {{2, 4, 5, 6}, 1, {63}},
    {{1, 2, 8, 8}, 1, {64}},
    {{2, 2, 6, 4}, 1, {65}},
    {{1, 3, 7, 5}, 1, {200}},
    {{2, 4, 8, 6}, 7, {1, 63, 64, 65, 200, 0, 7}},
    {{1, 2, 4, 4}, 4, {65, 1, 1, 129}},
    {{2, 2, 4, 4}, 0, {0}},
};

struct delta {
    struct device *dev;
    struct delta_shape shape;
    struct seqs seqs;
    struct tensor qkv, ba, a_log, dt_bias, o, dqkv, dba;
};

static struct delta delta_make(struct device *dev, const struct shape *s)
{
    const struct delta_shape *d = &s->d;
    const int64_t n_tok = total(s->len, s->n_seq), n_col = 2 * d->n_key * d->key_dim + d->n_value * d->value_dim;
    struct delta n = {.dev = dev,
                      .shape = *d,
                      .seqs = make_seqs(s->len, s->n_seq),
                      .qkv = make_random(dev->act_dtype, 1, 1, n_tok, n_col, -1),
                      .ba = make_random(dev->act_dtype, 2, 3, n_tok, 2 * d->n_value, -1),
                      .a_log = make_random(DT_F32, 3, 2, d->n_value, -1, -1),
                      .dt_bias = make_random(DT_F32, 4, 1, d->n_value, -1, -1),
                      .o = make_empty(dev->act_dtype, n_tok, d->n_value * d->value_dim, -1),
                      .dqkv = make_empty(dev->act_dtype, n_tok, n_col, -1),
                      .dba = make_empty(dev->act_dtype, n_tok, 2 * d->n_value, -1)};
    /* The first head forgets slowly, so that states matter over several chunks. */
    if (d->n_value > 0) set_value(n.a_log, 0, -4);
    return n;
}

static void delta_fwd(struct delta *n)
{
    op_delta_fwd(n->dev, n->o, n->qkv, n->ba, n->a_log, n->dt_bias, &n->seqs, &n->shape);
}

static void delta_bwd(struct delta *n)
{
    op_delta_bwd(n->dev, n->dqkv, n->dba, make_probe(n->o, 5), n->qkv, n->ba, n->a_log, n->dt_bias, &n->seqs,
                 &n->shape);
}

static void delta_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct delta n = delta_make(dev, params);
    delta_fwd(&n);
    delta_bwd(&n);
    put(o, n.o);
    put(o, n.dqkv);
    put(o, n.dba);
}

static double delta_loss(void *arg)
{
    delta_fwd(arg);
    return probe(((struct delta *)arg)->o, 5);
}

/* n values of x from `at` on, with norm 1 and times factor. */
static void unit(double *out, struct tensor x, int64_t at, int64_t n, double factor)
{
    double sum = 1e-6;
    for (int64_t i = 0; i < n; i++) sum += value_at(x, at + i) * value_at(x, at + i);
    for (int64_t i = 0; i < n; i++) out[i] = factor * value_at(x, at + i) / sqrt(sum);
}

/* Value head h of the sequence at row `first`, token by token. */
static void recurrence(const struct delta *n, int64_t first, int64_t len, int64_t h)
{
    const struct delta_shape *s = &n->shape;
    const int64_t a = s->key_dim, b = s->value_dim, n_key = s->n_key * a, key = h / (s->n_value / s->n_key);
    double state[16 * 16] = {0}, q[16], k[16];
    for (int64_t t = first; t < first + len; t++) {
        const int64_t row = t * n->qkv.shape[1];
        const double x = value_at(n->ba, t * 2 * s->n_value + s->n_value + h) + value_at(n->dt_bias, h);
        const double beta = 1 / (1 + exp(-value_at(n->ba, t * 2 * s->n_value + h)));
        const double decay = exp(-exp(value_at(n->a_log, h)) * log1p(exp(x)));
        unit(q, n->qkv, row + key * a, a, 1 / sqrt((double)a));
        unit(k, n->qkv, row + n_key + key * a, a, 1);
        for (int64_t e = 0; e < b; e++) {
            double mem = 0, out = 0;
            for (int64_t i = 0; i < a; i++) mem += k[i] * (state[i * b + e] *= decay);
            const double delta = beta * (value_at(n->qkv, row + 2 * n_key + h * b + e) - mem);
            for (int64_t i = 0; i < a; i++) out += q[i] * (state[i * b + e] += k[i] * delta);
            assert_close(value_at(n->o, t * n->o.shape[1] + h * b + e), out, 1e-12);
        }
    }
}

static void chunks_are_the_recurrence(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        const struct shape *s = &shapes[i];
        struct device dev;
        op_check_begin(&dev, true);
        struct delta n = delta_make(&dev, s);
        delta_fwd(&n);
        for (int64_t seq = 0, first = 0; seq < s->n_seq; first += s->len[seq++])
            for (int64_t h = 0; h < s->d.n_value; h++) recurrence(&n, first, s->len[seq], h);
        op_check_end(&dev);
    }
}

static void delta_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* many small calls */
        struct delta n = delta_make(&dev, &shapes[i]);
        delta_bwd(&n);
        const bool small = tensor_count(n.qkv) < 700;
        double (*const check)(double (*)(void *), void *, struct tensor, struct tensor) =
            small ? gradient_error : slope_error;
        const double of_qkv = tensor_count(n.qkv) ? check(delta_loss, &n, n.qkv, n.dqkv) : 0;
        const double of_ba = tensor_count(n.ba) ? check(delta_loss, &n, n.ba, n.dba) : 0;
        if (!(of_qkv <= 1e-6 && of_ba <= 1e-6)) fail_msg("shape %d: off by %g and %g", i, of_qkv, of_ba);
        op_check_end(&dev);
    }
}

static void delta_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(delta_run, &shapes[i], 1e-5);
}

/* A state that decays by e^-40 per token: f32 stays as close to f64 as elsewhere, although the sum of the decays over a
 * chunk is in the thousands. */
static void fast_decay(void **state)
{
    (void)state;
    struct device exact, dev;
    struct err err = {{0}};
    op_check_begin(&exact, true);
    if (device_open(&dev, "cpu", "fp32", &err)) fail_msg("%s", err.msg);
    if (device_reserve(&dev, &dev.work, "work", (int64_t)64 << 20, &err)) fail_msg("%s", err.msg);
    struct delta a = delta_make(&exact, &shapes[4]), b = delta_make(&dev, &shapes[4]);
    struct delta *const both[] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        struct delta *n = both[i];
        for (int64_t k = 0; k < tensor_count(n->a_log); k++) set_value(n->a_log, k, 4);
        for (int64_t k = 0; k < tensor_count(n->ba); k++)
            set_value(n->ba, k, k % 7 ? value_at(n->ba, k) : -6); /* some tokens keep the state */
        delta_fwd(n);
        delta_bwd(n);
    }
    const double error[] = {tensor_error(b.o, a.o), tensor_error(b.dqkv, a.dqkv), tensor_error(b.dba, a.dba)};
    for (int i = 0; i < MT_LEN(error); i++)
        if (!(error[i] <= 2e-6)) fail_msg("output %d: f32 is %g away from f64", i, error[i]);
    device_close(&dev);
    op_check_end(&exact);
}

/* Convolution and delta rule of packed sequences have the bits of each sequence alone. */
static void packed_is_separate(void **state)
{
    (void)state;
    const struct shape *s = &shapes[5];
    struct device dev;
    op_check_begin(&dev, false);
    struct delta all = delta_make(&dev, s);
    delta_fwd(&all);
    delta_bwd(&all);
    struct tensor dy = make_probe(all.qkv, 6), dout = make_probe(all.o, 5),
                  w = make_random(DT_F32, 7, 1, dy.shape[1], 4, -1);
    struct tensor y = make_empty(DT_F32, dy.shape[0], dy.shape[1], -1), dx = make_copy(y);
    op_conv_silu_fwd(&dev, y, all.qkv, w, absent, &all.seqs);
    op_conv_silu_bwd(&dev, dx, dy, all.qkv, w, absent, &all.seqs);
    for (int64_t i = 0, first = 0; i < s->n_seq; first += s->len[i++]) {
        const int64_t len = s->len[i];
        struct seqs one = make_seqs(&len, 1);
        struct delta n = delta_make(&dev, &(struct shape){s->d, 1, {len}});
        struct tensor x = tensor_rows(all.qkv, first, len), ba = tensor_rows(all.ba, first, len),
                      out = make_copy(n.qkv);
        op_delta_fwd(&dev, n.o, x, ba, all.a_log, all.dt_bias, &one, &s->d);
        op_delta_bwd(&dev, n.dqkv, n.dba, tensor_rows(dout, first, len), x, ba, all.a_log, all.dt_bias, &one, &s->d);
        assert_same_bits(n.o, tensor_rows(all.o, first, len));
        assert_same_bits(n.dqkv, tensor_rows(all.dqkv, first, len));
        assert_same_bits(n.dba, tensor_rows(all.dba, first, len));
        op_conv_silu_fwd(&dev, out, x, w, absent, &one);
        assert_same_bits(out, tensor_rows(y, first, len));
        op_conv_silu_bwd(&dev, out, tensor_rows(dy, first, len), x, w, absent, &one);
        assert_same_bits(out, tensor_rows(dx, first, len));
    }
    op_check_end(&dev);
}

/* ---- gated outputs ---- */

static const struct norm norm = {.eps = 1e-5f, .round_twice = true};

struct gated_shape {
    int64_t n_tok, n_head, dim;
};
static const struct gated_shape gated_shapes[] = {{0, 2, 4}, {1, 1, 3}, {5, 3, 6}, {3, 4, 16}};

struct gated {
    struct device *dev;
    struct tensor x, z, w, y, rstd, dx, dz;
};

static struct gated gated_make(struct device *dev, const struct gated_shape *s)
{
    const int64_t n_col = s->n_head * s->dim;
    return (struct gated){.dev = dev,
                          .x = make_random(dev->act_dtype, 1, 2, s->n_tok, n_col, -1),
                          .z = make_random(dev->act_dtype, 2, 3, s->n_tok, n_col, -1),
                          .w = make_random(DT_F32, 3, 1, s->dim, -1, -1),
                          .y = make_empty(dev->act_dtype, s->n_tok, n_col, -1),
                          .rstd = make_empty(dev->stat_dtype, s->n_tok, s->n_head, -1),
                          .dx = make_empty(dev->act_dtype, s->n_tok, n_col, -1),
                          .dz = make_empty(dev->act_dtype, s->n_tok, n_col, -1)};
}

static double gated_loss(void *arg)
{
    struct gated *n = arg;
    op_gated_norm_fwd(n->dev, n->y, n->rstd, n->x, n->z, n->w, &norm);
    return probe(n->y, 4);
}

static void gated_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct gated n = gated_make(dev, params);
    op_gated_norm_fwd(dev, n.y, n.rstd, n.x, n.z, n.w, &norm);
    op_gated_norm_bwd(dev, n.dx, n.dz, make_probe(n.y, 4), n.x, n.rstd, n.z, n.w);
    put(o, n.y);
    put(o, n.rstd);
    put(o, n.dx);
    put(o, n.dz);
}

static void gated_norm(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(gated_shapes); i++) {
        const int64_t dim = gated_shapes[i].dim;
        struct device dev;
        op_check_begin(&dev, true);
        struct gated n = gated_make(&dev, &gated_shapes[i]);
        op_gated_norm_fwd(&dev, n.y, n.rstd, n.x, n.z, n.w, &norm);
        for (int64_t k = 0; k < tensor_count(n.y); k++) {
            double sum = 0, z = value_at(n.z, k);
            for (int64_t c = k / dim * dim; c < k / dim * dim + dim; c++) sum += value_at(n.x, c) * value_at(n.x, c);
            const double r = 1 / sqrt(sum / (double)dim + (double)norm.eps);
            assert_close(value_at(n.y, k), value_at(n.x, k) * r * value_at(n.w, k % dim) * z / (1 + exp(-z)), 1e-14);
        }
        struct tensor dy = make_probe(n.y, 4);
        op_gated_norm_bwd(&dev, n.dx, n.dz, dy, n.x, n.rstd, n.z, n.w);
        if (tensor_count(n.x)) {
            assert_in_range((int64_t)(1e9 * gradient_error(gated_loss, &n, n.x, n.dx)), 0, 1000);
            assert_in_range((int64_t)(1e9 * gradient_error(gated_loss, &n, n.z, n.dz)), 0, 1000);
        }
        op_gated_norm_bwd(&dev, dy, n.dz, dy, n.x, n.rstd, n.z, n.w); /* in place */
        assert_same_bits(dy, n.dx);
        op_check_end(&dev);
    }
}

static void gated_norm_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(gated_shapes); i++) op_check_case(gated_run, &gated_shapes[i], 1e-6);
}

struct gate_shape {
    int64_t n_tok, n_head, n_kv, dim, rotated;
    bool round_twice;
};
static const struct gate_shape gate_shapes[] = {
    {0, 2, 1, 4, 2, false}, {1, 1, 1, 2, 2, false}, {5, 4, 2, 6, 4, false}, {3, 1, 1, 8, 0, true}};

struct gate {
    struct device *dev;
    struct attn_shape shape;
    struct norm norm;
    struct tensor wide, wq, wk, pos, table, qkv, rstd, o, y, dwide, dout;
};

static struct gate gate_make(struct device *dev, const struct gate_shape *s)
{
    enum { POSITIONS = 7, MAX_TOK = 67 };
    const int64_t n_col = (2 * s->n_head + 2 * s->n_kv) * s->dim, n_o = s->n_head * s->dim;
    int32_t pos[MAX_TOK];
    assert_true(s->n_tok <= MAX_TOK);
    for (int32_t t = 0; t < s->n_tok; t++) pos[t] = 3 * t % POSITIONS;
    return (struct gate){.dev = dev,
                         .shape = {.n_head = s->n_head, .n_kv = s->n_kv, .head_dim = s->dim},
                         .norm = {.eps = 1e-5f, .round_twice = s->round_twice},
                         .wide = make_random(dev->act_dtype, 1, 2, s->n_tok, n_col, -1),
                         .wq = make_random(DT_F32, 3, 1, s->dim, -1, -1),
                         .wk = make_random(DT_F32, 4, 1, s->dim, -1, -1),
                         .pos = make_i32(pos, s->n_tok),
                         .table = make_random(DT_F32, 5, 1, POSITIONS, s->rotated, -1),
                         .rstd = make_empty(dev->stat_dtype, s->n_tok, s->n_head + s->n_kv, -1),
                         .qkv = make_empty(dev->act_dtype, s->n_tok, n_col - n_o, -1),
                         .o = make_random(dev->act_dtype, 2, 2, s->n_tok, n_o, -1),
                         .y = make_empty(dev->act_dtype, s->n_tok, n_o, -1),
                         .dwide = make_empty(dev->act_dtype, s->n_tok, n_col, -1),
                         .dout = make_empty(dev->act_dtype, s->n_tok, n_o, -1)};
}

static void gate_fwd(struct gate *n)
{
    op_attn_split_fwd(n->dev, n->qkv, n->rstd, n->wide, n->wq, n->wk, n->pos, n->table, &n->shape, &n->norm);
    op_attn_gate_fwd(n->dev, n->y, n->o, n->wide, &n->shape);
}

static void gate_bwd(struct gate *n)
{
    op_attn_gate_bwd(n->dev, n->dout, n->dwide, make_probe(n->y, 3), n->o, n->wide, &n->shape);
    op_attn_split_bwd(n->dev, n->dwide, make_probe(n->qkv, 4), n->wide, n->rstd, n->wq, n->wk, n->pos, n->table,
                      &n->shape);
}

static double gate_loss(void *arg)
{
    struct gate *n = arg;
    gate_fwd(n);
    return probe(n->y, 3) + probe(n->qkv, 4);
}

static void gate_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct gate n = gate_make(dev, params);
    gate_fwd(&n);
    gate_bwd(&n);
    put(o, n.qkv);
    put(o, n.rstd);
    put(o, n.y);
    put(o, n.dwide);
    put(o, n.dout);
}

/* Channel i of head h of q or k in row t, after its norm. */
static double normalised(const struct gate *n, int64_t t, int64_t h, int64_t i)
{
    const int64_t dim = n->shape.head_dim, n_head = n->shape.n_head;
    const int64_t first = t * n->wide.shape[1] + (h < n_head ? 2 * h : n_head + h) * dim;
    double sum = 0;
    for (int64_t k = 0; k < dim; k++) sum += value_at(n->wide, first + k) * value_at(n->wide, first + k);
    const double rstd = 1 / sqrt(sum / (double)dim + (double)n->norm.eps);
    assert_close(value_at(n->rstd, t * (n_head + n->shape.n_kv) + h), rstd, 1e-14);
    return value_at(n->wide, first + i) * rstd * value_at(h < n_head ? n->wq : n->wk, i);
}

/* Column c of row t of q | k, rotated. */
static double rotated(const struct gate *n, int64_t t, int64_t c)
{
    const int64_t h = c / n->shape.head_dim, i = c % n->shape.head_dim, half = n->table.shape[1] / 2;
    const double x = normalised(n, t, h, i);
    if (i >= 2 * half) return x;
    const int64_t angle = ((const int32_t *)n->pos.data)[t] * 2 * half + i % half;
    const double other = normalised(n, t, h, i < half ? i + half : i - half);
    return x * value_at(n->table, angle) + (i < half ? -other : other) * value_at(n->table, angle + half);
}

/* Column c of a row of `wide`: head c / 2A has A columns of q and A of the gate; k and v follow. */
static void attn_gate(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(gate_shapes); i++) {
        const struct gate_shape *s = &gate_shapes[i];
        const int64_t n_q = s->n_head * s->dim;
        struct device dev;
        op_check_begin(&dev, true);
        struct gate n = gate_make(&dev, s);
        gate_fwd(&n);
        for (int64_t k = 0; k < tensor_count(n.wide); k++) {
            const int64_t t = k / n.wide.shape[1], c = k % n.wide.shape[1],
                          own = c / (2 * s->dim) * s->dim + c % s->dim;
            const double v = value_at(n.wide, k);
            const int64_t qkv = t * n.qkv.shape[1], o = t * n_q + own;
            if (c >= 2 * n_q + s->n_kv * s->dim)
                assert_true(value_at(n.qkv, qkv + c - n_q) == v);
            else if (c >= 2 * n_q)
                assert_close(value_at(n.qkv, qkv + c - n_q), rotated(&n, t, c - n_q), 1e-14);
            else if (c / s->dim % 2 == 0)
                assert_close(value_at(n.qkv, qkv + own), rotated(&n, t, own), 1e-14);
            else
                assert_close(value_at(n.y, o), value_at(n.o, o) / (1 + exp(-v)), 1e-14);
        }
        gate_bwd(&n);
        if (s->n_tok) {
            assert_in_range((int64_t)(1e9 * gradient_error(gate_loss, &n, n.wide, n.dwide)), 0, 1000);
            assert_in_range((int64_t)(1e9 * gradient_error(gate_loss, &n, n.o, n.dout)), 0, 1000);
        }
        op_check_end(&dev);
    }
}

static void attn_gate_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(gate_shapes); i++) op_check_case(gate_run, &gate_shapes[i], 1e-6);
}

/* ---- on the GPU: also the sizes of Qwen3.5-35B-A3B ---- */

/* Packed sequences have the bits of each sequence alone, also when the last one has NaN and infinity. */
static void delta_packed_run(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct shape *s = params;
    struct delta all = delta_make(dev, s);
    struct tensor dout = make_probe(all.o, 5);
    const int64_t n_good = total(s->len, s->n_seq - 1);
    for (int64_t i = n_good * all.qkv.shape[1]; i < tensor_count(all.qkv); i += 3)
        set_value(all.qkv, i, i % 2 ? (double)NAN : (double)INFINITY);
    for (int64_t i = n_good * dout.shape[1]; i < tensor_count(dout); i += 3) set_value(dout, i, (double)NAN);
    for (int64_t i = n_good * all.ba.shape[1]; i < tensor_count(all.ba); i += 3) set_value(all.ba, i, (double)NAN);
    delta_fwd(&all);
    op_delta_bwd(dev, all.dqkv, all.dba, dout, all.qkv, all.ba, all.a_log, all.dt_bias, &all.seqs, &s->d);
    for (int64_t i = 0, first = 0; i + 1 < s->n_seq; first += s->len[i++]) {
        const int64_t len = s->len[i];
        struct seqs one = make_seqs(&len, 1);
        struct delta n = delta_make(dev, &(struct shape){s->d, 1, {len}});
        struct tensor x = tensor_rows(all.qkv, first, len), ba = tensor_rows(all.ba, first, len);
        op_delta_fwd(dev, n.o, x, ba, all.a_log, all.dt_bias, &one, &s->d);
        op_delta_bwd(dev, n.dqkv, n.dba, tensor_rows(dout, first, len), x, ba, all.a_log, all.dt_bias, &one, &s->d);
        dev->ops->wait();
        assert_same_bits(n.o, tensor_rows(all.o, first, len));
        assert_same_bits(n.dqkv, tensor_rows(all.dqkv, first, len));
        assert_same_bits(n.dba, tensor_rows(all.dba, first, len));
    }
    put(outputs, tensor_rows(all.o, 0, n_good));
    put(outputs, tensor_rows(all.dqkv, 0, n_good));
    put(outputs, tensor_rows(all.dba, 0, n_good));
}

/* Sequences that end at, before and after the rows that a thread loads together, and strips with several ends. */
static void conv_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct conv_shape shapes_on_gpu[] = {
        {false, 8, 4, 1, {1}},
        {true, 24, 4, 4, {2, 0, 5, 3}},
        {false, 16, 4, 8, {1, 1, 1, 4, 63, 0, 1, 130}},
        {true, 2056, 3, 4, {15, 1, 17, 64}},
        {false, 16, 1, 3, {5, 0, 9}},
        {true, 16, 8, 5, {1, 7, 8, 9, 40}},
        {false, 24, 6, 2, {70, 3}},
        {true, 8192, 4, 3, {65, 1, 130}},
        {false, 8192, 4, 4, {1000, 3, 1, 1100}},
    };
    for (int i = 0; i < MT_LEN(shapes_on_gpu); i++) op_check_cuda(conv_run, &shapes_on_gpu[i]);
}

static void delta_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct shape deltas[] = {
        {{1, 2, 8, 8}, 1, {65}},        {{2, 4, 16, 24}, 4, {1, 64, 0, 63}},
        {{2, 2, 64, 32}, 2, {200, 65}}, {{1, 2, 128, 128}, 1, {300}},
        {{1, 3, 128, 128}, 2, {1, 64}}, {{2, 2, 128, 128}, 7, {1, 63, 64, 65, 200, 0, 7}},
        {{1, 3, 16, 24}, 2, {70, 5}},   {{2, 8, 128, 128}, 1, {130}},
    };
    static const struct shape packed = {{1, 2, 128, 128}, 6, {65, 1, 0, 128, 191, 40}};
    for (int i = 0; i < MT_LEN(deltas); i++) op_check_cuda(delta_run, &deltas[i]);
    op_check_cuda(delta_packed_run, &packed);
}

static void delta_large_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct shape deltas[] = {{{16, 32, 128, 128}, 2, {65, 40}}, {{16, 32, 128, 128}, 3, {1, 70, 200}}};
    for (int i = 0; i < MT_LEN(deltas); i++) op_check_cuda(delta_run, &deltas[i]);
}

static void gates_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct gated_shape norms[] = {{0, 2, 8},   {5, 3, 8},     {7, 4, 24},  {9, 6, 96},
                                               {1, 1, 128}, {33, 32, 128}, {5, 3, 136}, {67, 2, 256}};
    static const struct gate_shape gates[] = {
        {0, 2, 1, 8, 8, false},      {1, 3, 1, 8, 4, false},   {5, 4, 2, 8, 0, false},  {6, 6, 3, 24, 24, true},
        {33, 16, 2, 256, 64, false}, {67, 2, 2, 48, 32, true}, {9, 1, 1, 48, 44, false}};
    for (int i = 0; i < MT_LEN(norms); i++) op_check_cuda(gated_run, &norms[i]);
    for (int i = 0; i < MT_LEN(gates); i++) op_check_cuda(gate_run, &gates[i]);
}

int test_ops_delta(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conv),
        cmocka_unit_test(conv_runs),
        cmocka_unit_test(conv_takes_views),
        cmocka_unit_test(chunks_are_the_recurrence),
        cmocka_unit_test(delta_gradients),
        cmocka_unit_test(delta_runs),
        cmocka_unit_test(fast_decay),
        cmocka_unit_test(packed_is_separate),
        cmocka_unit_test(gated_norm),
        cmocka_unit_test(gated_norm_runs),
        cmocka_unit_test(attn_gate),
        cmocka_unit_test(attn_gate_runs),
        cmocka_unit_test(conv_on_the_gpu),
        cmocka_unit_test(delta_on_the_gpu),
        cmocka_unit_test(delta_large_on_the_gpu),
        cmocka_unit_test(gates_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_delta", tests, NULL, NULL);
}
