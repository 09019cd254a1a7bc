/* test_ops_mamba.c - Mamba-2: the chunked form against the recurrence, several passes against one, the gated norm. */
#include "tests/test.h"

#include <math.h>

#include "tests/op_check.h"

enum { MAX_SEQ = 8, MAX_TOK = 1024 };

struct shape {
    int64_t n_head, head_dim, n_group, state;
    float dt_min, dt_max;
    int n_seq;
    int64_t len[MAX_SEQ];
};
#define FREE 0, INFINITY
/* Lengths around the chunk; 1, 2 and 3 heads per group; heads and states of different widths; limits of the step that
 * many tokens reach. */
static const struct shape shapes[] = {
    {1, 3, 1, 4, FREE, 1, {1}},
    {2, 4, 1, 6, FREE, 1, {63}},
    {2, 8, 2, 4, 0.001f, INFINITY, 1, {64}},
    {3, 4, 1, 8, FREE, 1, {65}},
    {4, 5, 2, 7, 0.2f, 0.9f, 1, {127}},
    {1, 4, 1, 4, FREE, 1, {129}},
    {3, 5, 3, 3, 0.3f, INFINITY, 1, {300}},
    {4, 6, 2, 8, FREE, 7, {1, 63, 64, 65, 200, 0, 7}},
    {6, 4, 2, 4, 0, 1, 4, {65, 1, 1, 129}},
    {2, 2, 1, 2, FREE, 0, {0}},
};

struct bed {
    struct device *dev;
    const struct shape *s;
    struct mamba m;
    struct seqs seqs;
    struct tensor xbc, dt, y, dxbc, ddt;
};

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

static struct bed bed_make(struct device *dev, const struct shape *s)
{
    const int64_t n_tok = total(s->len, s->n_seq), n_y = s->n_head * s->head_dim,
                  n_col = n_y + 2 * s->n_group * s->state;
    struct bed b = {.dev = dev,
                    .s = s,
                    .m = {.n_head = s->n_head,
                          .head_dim = s->head_dim,
                          .n_group = s->n_group,
                          .state = s->state,
                          .dt_min = s->dt_min,
                          .dt_max = s->dt_max,
                          .a_log = make_random(DT_F32, 3, 1, s->n_head, -1, -1),
                          .dt_bias = make_random(DT_F32, 4, 1, s->n_head, -1, -1),
                          .d = make_random(DT_F32, 5, 1, s->n_head, -1, -1)},
                    .seqs = make_seqs(s->len, s->n_seq),
                    .xbc = make_random(dev->act_dtype, 1, 1, n_tok, n_col, -1),
                    .dt = make_random(dev->act_dtype, 2, 3, n_tok, s->n_head, -1),
                    .y = make_empty(dev->act_dtype, n_tok, n_y, -1),
                    .dxbc = make_empty(dev->act_dtype, n_tok, n_col, -1),
                    .ddt = make_empty(dev->act_dtype, n_tok, s->n_head, -1)};
    set_value(b.m.a_log, 0, -4); /* forgets slowly: states matter over several chunks */
    return b;
}

static void fwd(struct bed *b) { op_mamba_fwd(b->dev, b->y, b->xbc, b->dt, &b->seqs, &b->m); }
static void bwd(struct bed *b)
{
    op_mamba_bwd(b->dev, b->dxbc, b->ddt, make_probe(b->y, 5), b->xbc, b->dt, &b->seqs, &b->m);
}

static void put(struct op_outputs *o, struct tensor x) { o->out[o->n++] = x; }

static void run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct bed b = bed_make(dev, params);
    fwd(&b);
    bwd(&b);
    put(o, b.y);
    put(o, b.dxbc);
    put(o, b.ddt);
}

static double loss(void *arg)
{
    fwd(arg);
    return probe(((struct bed *)arg)->y, 5);
}

/* Head h of the sequence at row `first`, token by token. */
static void recurrence(const struct bed *b, int64_t first, int64_t len, int64_t h)
{
    const struct mamba *m = &b->m;
    const int64_t n_y = m->n_head * m->head_dim, group = h / (m->n_head / m->n_group), n_col = b->xbc.shape[1];
    double state[16 * 16] = {0};
    for (int64_t t = first; t < first + len; t++) {
        const double plus = log1p(exp(value_at(b->dt, t * m->n_head + h) + value_at(m->dt_bias, h)));
        const double step = fmin(fmax(plus, (double)m->dt_min), (double)m->dt_max);
        const double decay = exp(-exp(value_at(m->a_log, h)) * step);
        for (int64_t e = 0; e < m->head_dim; e++) {
            const double x = value_at(b->xbc, t * n_col + h * m->head_dim + e);
            double out = value_at(m->d, h) * x;
            for (int64_t i = 0; i < m->state; i++) {
                const int64_t col = t * n_col + n_y + group * m->state + i;
                double *s = &state[i * m->head_dim + e];
                *s = decay * *s + step * value_at(b->xbc, col) * x;
                out += *s * value_at(b->xbc, col + m->n_group * m->state);
            }
            assert_close(value_at(b->y, t * n_y + h * m->head_dim + e), out, 1e-12);
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
        struct bed b = bed_make(&dev, s);
        fwd(&b);
        for (int64_t seq = 0, first = 0; seq < s->n_seq; first += s->len[seq++])
            for (int64_t h = 0; h < s->n_head; h++) recurrence(&b, first, s->len[seq], h);
        op_check_end(&dev);
    }
}

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* many small calls */
        struct bed b = bed_make(&dev, &shapes[i]);
        bwd(&b);
        double (*const check)(double (*)(void *), void *, struct tensor, struct tensor) =
            tensor_count(b.xbc) < 1100 ? gradient_error : slope_error;
        const double of_xbc = tensor_count(b.xbc) ? check(loss, &b, b.xbc, b.dxbc) : 0;
        const double of_dt = tensor_count(b.dt) ? check(loss, &b, b.dt, b.ddt) : 0;
        if (!(of_xbc <= 1e-6 && of_dt <= 1e-6)) fail_msg("shape %d: off by %g and %g", i, of_xbc, of_dt);
        op_check_end(&dev);
    }
}

/* Steps inside the limits have a gradient, steps outside have none. */
static void limits_cut_gradients(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, true);
    struct bed b = bed_make(&dev, &shapes[4]);
    int64_t n_cut = 0;
    bwd(&b);
    for (int64_t i = 0; i < tensor_count(b.dt); i++) {
        const double plus = log1p(exp(value_at(b.dt, i) + value_at(b.m.dt_bias, i % b.s->n_head)));
        const bool cut = plus < (double)b.m.dt_min || plus > (double)b.m.dt_max;
        if (cut != (value_at(b.ddt, i) == 0)) fail_msg("step %g has gradient %g", plus, value_at(b.ddt, i));
        n_cut += cut;
    }
    assert_in_range(n_cut, tensor_count(b.dt) / 4, tensor_count(b.dt) * 3 / 4);
    op_check_end(&dev);
}

static void runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 1e-5);
}

/* States that decay by e^-50 per token, and tokens between that keep them: f32 stays close to f64. The gradient of a
 * step contains a sum multiplied by 50. */
static void fast_decay(void **state)
{
    (void)state;
    struct device exact, dev;
    struct err err = {{0}};
    op_check_begin(&exact, true);
    if (device_open(&dev, "cpu", "fp32", &err)) fail_msg("%s", err.msg);
    if (device_reserve(&dev, &dev.work, "work", (int64_t)64 << 20, &err)) fail_msg("%s", err.msg);
    struct bed a = bed_make(&exact, &shapes[6]), b = bed_make(&dev, &shapes[6]);
    struct bed *const both[] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        struct bed *n = both[i];
        n->m.dt_min = 0;
        for (int64_t k = 0; k < tensor_count(n->m.a_log); k++) set_value(n->m.a_log, k, 4);
        for (int64_t k = 0; k < tensor_count(n->dt); k++) set_value(n->dt, k, k % 7 ? value_at(n->dt, k) : -6);
        fwd(n);
        bwd(n);
    }
    const double error[] = {tensor_error(b.y, a.y), tensor_error(b.dxbc, a.dxbc), tensor_error(b.ddt, a.ddt)};
    for (int i = 0; i < MT_LEN(error); i++)
        if (!(error[i] <= (i == 2 ? 1e-5 : 2e-6))) fail_msg("output %d: f32 is %g away from f64", i, error[i]);
    device_close(&dev);
    op_check_end(&exact);
}

/* Packed sequences have the bits of each sequence alone, also when the last one has NaN and infinity. */
static void packed_run(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct shape *s = params;
    struct bed all = bed_make(dev, s);
    struct tensor dy = make_probe(all.y, 5);
    const int64_t n_good = total(s->len, s->n_seq - 1);
    for (int64_t i = n_good * all.xbc.shape[1]; i < tensor_count(all.xbc); i += 3)
        set_value(all.xbc, i, i % 2 ? (double)NAN : (double)INFINITY);
    for (int64_t i = n_good * dy.shape[1]; i < tensor_count(dy); i += 3) set_value(dy, i, (double)NAN);
    for (int64_t i = n_good * all.dt.shape[1]; i < tensor_count(all.dt); i += 3) set_value(all.dt, i, (double)NAN);
    fwd(&all);
    op_mamba_bwd(dev, all.dxbc, all.ddt, dy, all.xbc, all.dt, &all.seqs, &all.m);
    for (int64_t i = 0, first = 0; i + 1 < s->n_seq; first += s->len[i++]) {
        struct shape alone = *s;
        alone.n_seq = 1;
        alone.len[0] = s->len[i];
        struct bed n = bed_make(dev, &alone);
        struct tensor x = tensor_rows(all.xbc, first, s->len[i]), dt = tensor_rows(all.dt, first, s->len[i]);
        op_mamba_fwd(dev, n.y, x, dt, &n.seqs, &all.m);
        op_mamba_bwd(dev, n.dxbc, n.ddt, tensor_rows(dy, first, s->len[i]), x, dt, &n.seqs, &all.m);
        if (dev->dry_run) continue;
        dev->ops->wait();
        assert_same_bits(n.y, tensor_rows(all.y, first, s->len[i]));
        assert_same_bits(n.dxbc, tensor_rows(all.dxbc, first, s->len[i]));
        assert_same_bits(n.ddt, tensor_rows(all.ddt, first, s->len[i]));
    }
    put(outputs, tensor_rows(all.y, 0, n_good));
    put(outputs, tensor_rows(all.dxbc, 0, n_good));
    put(outputs, tensor_rows(all.ddt, 0, n_good));
}

static void packed_is_separate(void **state)
{
    (void)state;
    struct device dev;
    struct op_outputs outputs = {.n = 0};
    op_check_begin(&dev, false);
    packed_run(&dev, &shapes[7], &outputs);
    op_check_end(&dev);
}

/* ---- decoding ---- */

static const int64_t pieces[] = {1, 2, 64, 1, 0, 70, 3, 5}; /* of a sequence, in turn */

struct decoding {
    struct bed b;
    struct tensor state, slot;               /* [S + 2, ..]: two more slots than sequences */
    int32_t cu[MAX_SEQ + 1], first[MAX_SEQ]; /* first: tokens so far of a sequence */
};

static struct decoding decoding_make(struct device *dev, const struct shape *s)
{
    struct decoding d = {.b = bed_make(dev, s)};
    int32_t slot[MAX_SEQ];
    for (int i = 0; i < s->n_seq; i++) {
        d.cu[i + 1] = d.cu[i] + (int32_t)s->len[i];
        slot[i] = s->n_seq - i;
    }
    assert_true(d.cu[s->n_seq] <= MAX_TOK);
    d.state = make_empty(dev->stat_dtype, s->n_seq + 2, s->n_head * s->head_dim * s->state, -1);
    d.slot = make_i32(slot, s->n_seq);
    return d;
}

/* One pass: the next piece of every sequence, at most `most` tokens of it. False: all are complete. */
static bool next_piece(struct decoding *d, int pass, int64_t most)
{
    const struct shape *s = d->b.s;
    struct device *dev = d->b.dev;
    int32_t cu[MAX_SEQ + 1] = {0}, pos[MAX_TOK];
    for (int i = 0; i < s->n_seq; i++) {
        const int64_t left = s->len[i] - d->first[i], piece = MT_MIN(pieces[(pass + i) % MT_LEN(pieces)], most);
        cu[i + 1] = cu[i] + (int32_t)MT_MIN(piece, left);
        for (int32_t t = cu[i]; t < cu[i + 1]; t++) pos[t] = d->first[i] + t - cu[i];
    }
    const int64_t n_tok = cu[s->n_seq];
    const struct seqs seqs = {.cu = make_i32(cu, s->n_seq + 1), .n_seq = s->n_seq, .max_len = n_tok};
    const struct states states = {.values = d->state, .slot = d->slot, .pos = make_i32(pos, n_tok), .seqs = &seqs};
    struct tensor xbc = make_empty(d->b.xbc.dtype, n_tok, d->b.xbc.shape[1], -1),
                  dt = make_empty(d->b.dt.dtype, n_tok, d->b.dt.shape[1], -1),
                  y = make_empty(d->b.y.dtype, n_tok, d->b.y.shape[1], -1);
    bool more = false;
    for (int i = 0; i < s->n_seq; i++) {
        const int64_t from = d->cu[i] + d->first[i], n = cu[i + 1] - cu[i];
        copy_on(dev, tensor_rows(xbc, cu[i], n), tensor_rows(d->b.xbc, from, n));
        copy_on(dev, tensor_rows(dt, cu[i], n), tensor_rows(d->b.dt, from, n));
    }
    op_mamba_decode(dev, y, xbc, dt, &states, &d->b.m);
    for (int i = 0; i < s->n_seq; i++) {
        const int64_t to = d->cu[i] + d->first[i], n = cu[i + 1] - cu[i];
        copy_on(dev, tensor_rows(d->b.y, to, n), tensor_rows(y, cu[i], n));
        d->first[i] += (int32_t)n;
        more = more || d->first[i] < s->len[i];
    }
    return more;
}

static struct decoding in_pieces(struct device *dev, const struct shape *s, int64_t most)
{
    struct decoding d = decoding_make(dev, s);
    for (int pass = 0; next_piece(&d, pass, most); pass++) {
    }
    return d;
}

/* Outputs, and the rows of sequences in slots 1 .. S; slots 0 and S + 1 stay as they were. */
static void run_decode(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct shape *s = params;
    const struct decoding d = in_pieces(dev, s, INT64_MAX);
    const int64_t n = d.state.shape[1];
    for (int i = 0; i < s->n_seq; i++) /* a sequence without tokens has no state */
        for (int64_t c = 0; !dev->dry_run && !s->len[i] && c < n; c++) set_value(d.state, (s->n_seq - i) * n + c, 0);
    put(outputs, d.b.y);
    put(outputs, tensor_rows(d.state, 1, s->n_seq));
    for (int64_t c = 0; !dev->dry_run && c < n; c++)
        assert_true(isnan(value_at(d.state, c)) && isnan(value_at(d.state, (s->n_seq + 1) * n + c)));
}

static void pieces_are_the_whole(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        const struct decoding d = in_pieces(&dev, &shapes[i], INT64_MAX);
        struct bed whole = bed_make(&dev, &shapes[i]);
        fwd(&whole);
        for (int64_t k = 0; k < tensor_count(whole.y); k++)
            assert_close(value_at(d.b.y, k), value_at(whole.y, k), 1e-12);
        op_check_end(&dev);
        op_check_case(run_decode, &shapes[i], 1e-5);
    }
}

/* On a GPU in the same bits, here of one token. */
static void run_singly(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct shape *s = params;
    const struct decoding d = in_pieces(dev, s, INT64_MAX), single = in_pieces(dev, s, 1);
    put(outputs, d.b.y);
    if (!dev->ops->own_memory || dev->dry_run) return;
    assert_same_bits(single.b.y, d.b.y);
    assert_same_bits(tensor_rows(single.state, 1, s->n_seq), tensor_rows(d.state, 1, s->n_seq));
}

static void work_is_counted(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    struct bed b = bed_make(&dev, &shapes[4]);
    const double flops = 2 * 127.0 * (2 * 64 * 7 + 4 * (64 * 5 + 2 * 5 * 7));
    fwd(&b);
    assert_close(dev.flops, flops, 1e-15);
    op_check_end(&dev);
}

/* ---- the gated norm ---- */

struct norm_shape {
    int64_t n_tok, n_group, dim;
    bool round_twice;
};
static const struct norm_shape norm_shapes[] = {{0, 2, 4, true}, {1, 1, 3, true}, {5, 3, 6, false}, {3, 2, 40, true}};

struct gated {
    struct device *dev;
    struct norm norm;
    struct tensor x, z, w, y, rstd, dx, dz;
};

static struct gated gated_make(struct device *dev, const struct norm_shape *s)
{
    const int64_t n_col = s->n_group * s->dim;
    return (struct gated){.dev = dev,
                          .norm = {.eps = 1e-5f, .round_twice = s->round_twice},
                          .x = make_random(dev->act_dtype, 1, 2, s->n_tok, n_col, -1),
                          .z = make_random(dev->act_dtype, 2, 3, s->n_tok, n_col, -1),
                          .w = make_random(DT_F32, 3, 1, n_col, -1, -1),
                          .y = make_empty(dev->act_dtype, s->n_tok, n_col, -1),
                          .rstd = make_empty(dev->stat_dtype, s->n_tok, s->n_group, -1),
                          .dx = make_empty(dev->act_dtype, s->n_tok, n_col, -1),
                          .dz = make_empty(dev->act_dtype, s->n_tok, n_col, -1)};
}

static double gated_loss(void *arg)
{
    struct gated *n = arg;
    op_silu_norm_fwd(n->dev, n->y, n->rstd, n->x, n->z, n->w, &n->norm);
    return probe(n->y, 4);
}

static void gated_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct gated n = gated_make(dev, params);
    op_silu_norm_fwd(dev, n.y, n.rstd, n.x, n.z, n.w, &n.norm);
    op_silu_norm_bwd(dev, n.dx, n.dz, make_probe(n.y, 4), n.x, n.rstd, n.z, n.w);
    put(o, n.y);
    put(o, n.rstd);
    put(o, n.dx);
    put(o, n.dz);
}

static double gated_value(const struct gated *n, int64_t i)
{
    const double z = value_at(n->z, i);
    return value_at(n->x, i) * z / (1 + exp(-z));
}

static void gated_norm(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(norm_shapes); i++) {
        const int64_t dim = norm_shapes[i].dim, n_col = norm_shapes[i].n_group * dim;
        struct device dev;
        op_check_begin(&dev, true);
        struct gated n = gated_make(&dev, &norm_shapes[i]);
        gated_loss(&n);
        for (int64_t k = 0; k < tensor_count(n.y); k++) {
            double sum = 0;
            for (int64_t c = k / dim * dim; c < k / dim * dim + dim; c++)
                sum += gated_value(&n, c) * gated_value(&n, c);
            const double r = 1 / sqrt(sum / (double)dim + (double)n.norm.eps);
            assert_close(value_at(n.y, k), gated_value(&n, k) * r * value_at(n.w, k % n_col), 1e-13);
        }
        struct tensor dy = make_probe(n.y, 4);
        op_silu_norm_bwd(&dev, n.dx, n.dz, dy, n.x, n.rstd, n.z, n.w);
        if (tensor_count(n.x)) {
            assert_in_range((int64_t)(1e9 * gradient_error(gated_loss, &n, n.x, n.dx)), 0, 1000);
            assert_in_range((int64_t)(1e9 * gradient_error(gated_loss, &n, n.z, n.dz)), 0, 1000);
        }
        gated_loss(&n);                                              /* the differences changed rstd */
        op_silu_norm_bwd(&dev, dy, n.dz, dy, n.x, n.rstd, n.z, n.w); /* in place */
        assert_same_bits(dy, n.dx);
        op_check_end(&dev);
        op_check_case(gated_run, &norm_shapes[i], 1e-6);
    }
}

/* ---- on the GPU: also the sizes of Nemotron-3 Nano ---- */

static void mamba_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct shape on_gpu[] = {
        {2, 8, 1, 8, FREE, 1, {65}},
        {4, 24, 2, 16, 0.1f, 0.8f, 4, {1, 64, 0, 63}},
        {2, 32, 2, 64, FREE, 2, {200, 65}},
        {4, 64, 2, 128, FREE, 2, {129, 127}},
        {2, 64, 1, 128, FREE, 7, {1, 63, 64, 65, 200, 0, 7}},
        {2, 128, 2, 96, 0.001f, INFINITY, 1, {130}},
        {3, 40, 1, 24, FREE, 2, {70, 5}},
        {8, 64, 1, 128, 0.001f, INFINITY, 3, {300, 1, 63}},
        {2, 72, 1, 128, FREE, 2, {64, 192}},
        {4, 12, 2, 16, FREE, 3, {64, 0, 129}},
        {3, 5, 3, 3, 0.3f, INFINITY, 2, {65, 127}},
    };
    static const struct shape packed[] = {{4, 64, 2, 128, FREE, 6, {65, 1, 0, 128, 191, 40}},
                                          {2, 128, 1, 64, FREE, 4, {127, 129, 64, 9}}};
    for (int i = 0; i < MT_LEN(on_gpu); i++) op_check_cuda(run, &on_gpu[i]);
    for (int i = 0; i < MT_LEN(packed); i++) op_check_cuda(packed_run, &packed[i]);
}

static void decode_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct shape on_gpu[] = {{4, 64, 2, 128, FREE, 3, {1, 70, 133}}, {3, 24, 1, 40, FREE, 2, {9, 66}}};
    static const struct shape singly = {4, 8, 2, 6, FREE, 3, {1, 20, 7}};
    for (int i = 0; i < MT_LEN(on_gpu); i++) op_check_cuda(run_decode, &on_gpu[i]);
    op_check_cuda(run_singly, &singly);
}

static void mamba_large_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct shape nano = {64, 64, 8, 128, 0.001f, INFINITY, 3, {1, 70, 200}};
    op_check_cuda(run, &nano);
}

static void norm_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct norm_shape norms[] = {{0, 2, 8, true},   {5, 3, 8, false},   {7, 4, 24, true},
                                              {3, 2, 264, true}, {33, 8, 512, true}, {5, 8, 1024, false},
                                              {2, 1, 4096, true}};
    for (int i = 0; i < MT_LEN(norms); i++) op_check_cuda(gated_run, &norms[i]);
}

int test_ops_mamba(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_are_the_recurrence),
        cmocka_unit_test(gradients),
        cmocka_unit_test(limits_cut_gradients),
        cmocka_unit_test(runs),
        cmocka_unit_test(fast_decay),
        cmocka_unit_test(packed_is_separate),
        cmocka_unit_test(pieces_are_the_whole),
        cmocka_unit_test(work_is_counted),
        cmocka_unit_test(gated_norm),
        cmocka_unit_test(mamba_on_the_gpu),
        cmocka_unit_test(decode_on_the_gpu),
        cmocka_unit_test(mamba_large_on_the_gpu),
        cmocka_unit_test(norm_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_mamba", tests, NULL, NULL);
}
