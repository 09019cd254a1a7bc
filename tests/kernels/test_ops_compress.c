/* test_ops_compress.c - attention to compressed keys, all ops but the softmax: compression, the indexer that chooses
 * compressed keys, RoPE of the last columns, the block-diagonal product. */
#include "tests/test.h"

#include <math.h>
#include <string.h>

#include "tests/gpu_check.h"
#include "tests/packed.h"

enum { MAX_SEQ = 8 };

struct lens {
    int n_seq;
    int64_t len[MAX_SEQ];
};

static int64_t total(const struct lens *l)
{
    int64_t n = 0;
    for (int i = 0; i < l->n_seq; i++) n += l->len[i];
    return n;
}

static struct seqs make_seqs(const struct lens *l)
{
    int32_t cu[MAX_SEQ + 1] = {0};
    struct seqs seqs = {.n_seq = l->n_seq};
    for (int i = 0; i < l->n_seq; i++) {
        cu[i + 1] = cu[i] + (int32_t)l->len[i];
        seqs.max_len = MT_MAX(seqs.max_len, l->len[i]);
        seqs.pairs += (double)l->len[i] * (double)(l->len[i] + 1) / 2;
    }
    seqs.cu = make_i32(cu, l->n_seq + 1);
    return seqs;
}

static int64_t entry_rows(int64_t n_tok, int64_t ratio) { return MT_MAX(1, n_tok / ratio); }
static void put(struct op_outputs *o, struct tensor x) { o->out[o->n++] = x; }

/* ---- entries ---- */

struct shape {
    struct compress_shape s;
    struct lens l;
};
static const struct shape shapes[] = {
    {{4, 5, true}, {5, {1, 3, 4, 5, 20}}},
    {{4, 6, true}, {7, {3, 3, 3, 3, 0, 12, 7}}},
    {{8, 3, false}, {4, {7, 8, 9, 26}}},
    {{4, 8, true}, {1, {3}}},
    {{4, 8, false}, {0, {0}}},
    {{1, 4, true}, {2, {3, 1}}},
};
static const struct shape large_shapes[] = {
    {{4, 32, true}, {5, {1, 3, 4, 5, 200}}},
    {{8, 24, false}, {5, {1, 3, 4, 5, 200}}},
    {{128, 16, false}, {5, {1, 200, 127, 5, 300}}},
};
/* DeepSeek-V4-Flash's entries of both kinds and of its indexer; small and odd widths; no token, no entry. */
static const struct shape gpu_shapes[] = {
    {{4, 512, true}, {6, {1, 3, 4, 5, 200, 90}}},
    {{4, 128, true}, {5, {200, 1, 130, 7, 64}}},
    {{128, 512, false}, {4, {300, 127, 1, 200}}},
    {{8, 24, false}, {5, {1, 3, 4, 5, 200}}},
    {{4, 16, true}, {5, {1, 3, 4, 5, 20}}},
    {{8, 5, true}, {4, {9, 3, 40, 8}}},
    {{4, 8, true}, {0, {0}}},
    {{128, 512, false}, {2, {100, 20}}},
};

struct compress {
    struct device *dev;
    const struct compress_shape *s;
    struct seqs seqs;
    struct tensor kg, bias, y, pos, dkg;
};

static struct compress compress_make(struct device *dev, const struct shape *p)
{
    const int64_t n_tok = total(&p->l), n_part = p->s.overlap ? 2 : 1, n = entry_rows(n_tok, p->s.ratio);
    return (struct compress){.dev = dev,
                             .s = &p->s,
                             .seqs = make_seqs(&p->l),
                             .kg = make_random(dev->act_dtype, 1, 3, n_tok, 2 * n_part * p->s.width, -1),
                             .bias = make_random(DT_F32, 2, 1, p->s.ratio, n_part * p->s.width, -1),
                             .y = make_empty(dev->act_dtype, n, p->s.width, -1),
                             .pos = make_empty(DT_I32, n, -1, -1),
                             .dkg = make_empty(dev->act_dtype, n_tok, 2 * n_part * p->s.width, -1)};
}

static void compress_fwd(struct compress *c) { op_compress_fwd(c->dev, c->y, c->pos, c->kg, c->bias, &c->seqs, c->s); }
static void compress_bwd(struct compress *c)
{
    op_compress_bwd(c->dev, c->dkg, make_probe(c->y, 3), c->kg, c->bias, &c->seqs, c->s);
}
static void compress_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct compress c = compress_make(dev, params);
    compress_fwd(&c);
    compress_bwd(&c);
    put(o, c.y);
    put(o, c.pos);
    put(o, c.dkg);
}
static double compress_loss(void *arg)
{
    struct compress *c = arg;
    compress_fwd(c);
    return probe(c->y, 3);
}

/* Column c of entry e of the sequence that begins at row `first`, as the definition has it. */
static double entry_value(const struct compress *c, int64_t first, int64_t e, int64_t col)
{
    const int64_t r = c->s->ratio, w = c->s->width, n_part = c->s->overlap ? 2 : 1, ld = 2 * n_part * w;
    double top = -INFINITY, sum = 0, y = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t part = 0; part < n_part; part++) { /* with overlap part 0 is the entry before */
            const int64_t window = c->s->overlap ? e - 1 + part : e;
            for (int64_t j = 0; j < r && window >= 0; j++) {
                const int64_t at = (first + window * r + j) * ld + part * w + col;
                const double z = value_at(c->kg, at + n_part * w) + value_at(c->bias, j * n_part * w + part * w + col);
                if (!pass) {
                    top = fmax(top, z);
                    continue;
                }
                sum += exp(z - top);
                y += exp(z - top) * value_at(c->kg, at);
            }
        }
    return y / sum;
}

static void check_entries(const struct compress *c, const struct lens *l)
{
    const int64_t r = c->s->ratio, w = c->s->width;
    int64_t next = 0; /* row that has not been checked */
    for (int64_t s = 0, first = 0; s <= l->n_seq; first += s < l->n_seq ? l->len[s] : 0, s++) {
        const int64_t start = s < l->n_seq ? first / r : c->y.shape[0], n = s < l->n_seq ? l->len[s] / r : 0;
        for (; next < start && (n > 0 || s == l->n_seq); next++) {
            assert_int_equal(((const int32_t *)c->pos.data)[next], 0);
            for (int64_t i = 0; i < w; i++) assert_true(value_at(c->y, next * w + i) == 0);
        }
        for (int64_t e = 0; e < n; e++, next++) {
            assert_int_equal(next, start + e);
            assert_int_equal(((const int32_t *)c->pos.data)[next], e * r);
            for (int64_t i = 0; i < w; i++)
                assert_close(value_at(c->y, next * w + i), entry_value(c, first, e, i), 1e-13);
        }
    }
}

static void entries(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes) + MT_LEN(large_shapes); i++) {
        const struct shape *p = i < MT_LEN(shapes) ? &shapes[i] : &large_shapes[i - MT_LEN(shapes)];
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* thousands of tiny calls */
        struct compress c = compress_make(&dev, p);
        compress_fwd(&c);
        check_entries(&c, &p->l);
        compress_bwd(&c);
        const double error = !tensor_count(c.kg)  ? 0
                             : i < MT_LEN(shapes) ? gradient_error(compress_loss, &c, c.kg, c.dkg)
                                                  : slope_error(compress_loss, &c, c.kg, c.dkg);
        if (!(error <= 1e-6)) fail_msg("shape %d: off by %g", i, error);
        op_check_end(&dev);
    }
}

static void entries_run(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(compress_run, &shapes[i], 1e-5);
    for (int i = 0; i < MT_LEN(large_shapes); i++) op_check_case(compress_run, &large_shapes[i], 1e-5);
}

/* Each sequence alone gives the rows, and the gradient, that it has among others. */
static void packed_entries(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(large_shapes); i++) {
        const struct shape *p = &large_shapes[i];
        struct device dev;
        op_check_begin(&dev, false);
        struct compress all = compress_make(&dev, p);
        struct tensor dy = make_probe(all.y, 3);
        compress_fwd(&all);
        op_compress_bwd(&dev, all.dkg, dy, all.kg, all.bias, &all.seqs, all.s);
        for (int64_t s = 0, first = 0; s < p->l.n_seq; first += p->l.len[s++]) {
            const int64_t len = p->l.len[s], n = len / p->s.ratio;
            const struct shape one = {p->s, {1, {len}}};
            struct compress c = compress_make(&dev, &one);
            c.kg = tensor_rows(all.kg, first, len);
            compress_fwd(&c);
            struct tensor own = make_zero(DT_F32, c.y.shape[0], p->s.width, -1);
            if (n) {
                struct tensor rows = tensor_rows(dy, first / p->s.ratio, n);
                memcpy(own.data, rows.data, (size_t)tensor_bytes(rows));
                assert_same_bits(c.y, tensor_rows(all.y, first / p->s.ratio, n));
            }
            op_compress_bwd(&dev, c.dkg, own, c.kg, c.bias, &c.seqs, c.s);
            assert_same_bits(c.dkg, tensor_rows(all.dkg, first, len));
        }
        op_check_end(&dev);
    }
}

static void entries_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_shapes); i++) op_check_cuda(compress_run, &gpu_shapes[i]);
}

/* ---- RoPE of the last columns ---- */

enum { POSITIONS = 50 };
struct tail_shape {
    int64_t n_tok, rope;
    struct tail_rope r;
    bool norm, in_place;
    int64_t pad; /* columns around every view, half of them before it */
};
static const struct tail_shape tail_shapes[] = {
    {0, 4, {2, 6, 1e-6f, false}, true, false, 0},     {7, 4, {3, 10, 1e-6f, false}, true, false, 0},
    {5, 6, {2, 6, 1e-6f, true}, false, false, 0},     {6, 2, {1, 5, 0.1f, true}, true, false, 8},
    {6, 4, {2, 16, 1e-6f, true}, false, true, 8},     {3, 2, {4, 8, 1e-6f, false}, false, false, 0},
    {1, 64, {64, 512, 1e-6f, false}, true, false, 0},
};
/* DeepSeek-V4-Flash's queries, output, keys and indexer; the tiny model; sizes that are no multiples of eight. */
static const struct tail_shape tail_gpu_shapes[] = {
    {9, 64, {64, 512, 1e-6f, false}, true, false, 0}, {9, 64, {64, 512, 1e-6f, true}, false, true, 0},
    {7, 64, {1, 512, 1e-6f, false}, false, false, 0}, {7, 64, {64, 128, 1e-6f, false}, false, true, 16},
    {5, 8, {2, 16, 1e-6f, false}, true, false, 0},    {6, 6, {3, 10, 1e-6f, true}, true, false, 16},
    {3, 2, {5, 7, 1e-6f, false}, false, true, 16},    {0, 64, {64, 512, 1e-6f, false}, true, false, 0},
};

struct tail {
    struct device *dev;
    const struct tail_shape *p;
    struct tensor x, y, rstd, pos, table, dx;
};

static struct tensor view(struct tensor wide, int64_t pad)
{
    return pad ? tensor_cols(wide, pad / 2, wide.shape[1] - pad) : wide;
}

static struct tail tail_make(struct device *dev, const struct tail_shape *p)
{
    const int64_t n_col = p->r.n_head * p->r.head_dim + p->pad, half = p->rope / 2;
    struct tail m = {.dev = dev,
                     .p = p,
                     .x = view(make_random(dev->act_dtype, 1, 1, p->n_tok, n_col, -1), p->pad),
                     .y = view(make_empty(dev->act_dtype, p->n_tok, n_col, -1), p->pad),
                     .dx = view(make_empty(dev->act_dtype, p->n_tok, n_col, -1), p->pad),
                     .pos = make_empty(DT_I32, p->n_tok, -1, -1),
                     .table = make_empty(DT_F32, POSITIONS, p->rope, -1)};
    if (p->norm) m.rstd = make_empty(dev->stat_dtype, p->n_tok, p->r.n_head, -1);
    for (int64_t k = 0; k < POSITIONS * half; k++) { /* with an attention factor of 1.25 */
        const double angle = (double)(k / half) / pow(1e4, (double)(k % half) / (double)half);
        set_value(m.table, k / half * p->rope + k % half, 1.25 * cos(angle));
        set_value(m.table, k / half * p->rope + half + k % half, 1.25 * sin(angle));
    }
    for (int64_t t = 0; t < p->n_tok; t++) ((int32_t *)m.pos.data)[t] = (int32_t)((49 + 13 * t) % POSITIONS);
    return m;
}

static void copy_values(struct tensor to, struct tensor from)
{
    for (int64_t i = 0; i < tensor_count(to); i++) set_value(to, i, value_at(from, i));
}

static void tail_fwd(struct tail *m)
{
    if (m->p->in_place) copy_values(m->y, m->x);
    op_tail_rope_fwd(m->dev, m->y, m->rstd, m->p->in_place ? m->y : m->x, m->pos, m->table, &m->p->r);
}
static void tail_bwd(struct tail *m)
{
    const struct tensor dy = make_probe(m->y, 4);
    if (m->p->in_place) copy_values(m->dx, dy);
    op_tail_rope_bwd(m->dev, m->dx, m->p->in_place ? m->dx : dy, m->p->norm ? m->x : (struct tensor){0}, m->rstd,
                     m->pos, m->table, &m->p->r);
}
static void tail_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct tail m = tail_make(dev, params);
    tail_fwd(&m);
    put(o, m.y);
    if (m.rstd.ndim) put(o, m.rstd);
    tail_bwd(&m);
    put(o, m.dx);
}
static double tail_loss(void *arg)
{
    struct tail *m = arg;
    tail_fwd(m);
    return probe(m->y, 4);
}

static void check_head(const struct tail *m, int64_t t, int64_t h)
{
    const struct tail_rope *r = &m->p->r;
    const int64_t at = (t * r->n_head + h) * r->head_dim, first = r->head_dim - m->p->rope, half = m->p->rope / 2;
    const int64_t row = ((const int32_t *)m->pos.data)[t] * m->p->rope;
    double factor = 1, sum = 0;
    for (int64_t c = 0; c < r->head_dim; c++) sum += pow(value_at(m->x, at + c), 2);
    if (m->p->norm) {
        factor = 1 / sqrt(sum / (double)r->head_dim + (double)r->eps);
        assert_close(value_at(m->rstd, t * r->n_head + h), factor, 1e-14);
    }
    for (int64_t c = 0; c < first; c++) assert_close(value_at(m->y, at + c), factor * value_at(m->x, at + c), 1e-14);
    for (int64_t i = 0; i < half; i++) {
        const double cosine = value_at(m->table, row + i), sine = value_at(m->table, row + half + i);
        const double n = r->inverse ? -sine : sine;
        const double lo = value_at(m->x, at + first + 2 * i), hi = value_at(m->x, at + first + 2 * i + 1);
        assert_close(value_at(m->y, at + first + 2 * i), factor * (lo * cosine - hi * n), 1e-14);
        assert_close(value_at(m->y, at + first + 2 * i + 1), factor * (hi * cosine + lo * n), 1e-14);
    }
}

static void tail(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(tail_shapes); i++) {
        const struct tail_shape *p = &tail_shapes[i];
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1;
        struct tail m = tail_make(&dev, p);
        tail_fwd(&m);
        for (int64_t k = 0; k < p->n_tok * p->r.n_head; k++) check_head(&m, k / p->r.n_head, k % p->r.n_head);
        tail_bwd(&m);
        const bool many = tensor_count(m.x) > 1000;
        const double error = !tensor_count(m.x) ? 0
                             : many             ? slope_error(tail_loss, &m, m.x, m.dx)
                                                : gradient_error(tail_loss, &m, m.x, m.dx);
        if (!(error <= 1e-6)) fail_msg("shape %d: off by %g", i, error);
        op_check_end(&dev);
    }
}

static void tail_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(tail_shapes); i++) op_check_case(tail_run, &tail_shapes[i], 1e-6);
}

static void tail_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(tail_gpu_shapes); i++) op_check_cuda(tail_run, &tail_gpu_shapes[i]);
}

/* ---- indexer ---- */

struct index_shape {
    int64_t ratio, n_head, dim, n_top;
    struct lens l;
    bool whole; /* whole numbers: scores are exact and many are equal */
};
static const struct index_shape index_shapes[] = {
    {4, 3, 8, 4, {5, {1, 3, 4, 5, 200}}, true},
    {4, 2, 16, 3, {3, {50, 0, 61}}, false},
    {8, 4, 8, 100, {2, {40, 90}}, true},
    {4, 64, 128, 8, {1, {70}}, false},
    {1, 1, 2, 1, {2, {9, 5}}, true},
    {4, 2, 8, 4, {0, {0}}, true},
};
/* The heads of DeepSeek-V4-Flash's indexer; the tiny model; fewer entries than K and many more; sizes with partly empty
 * tiles. */
static const struct index_shape index_gpu_shapes[] = {
    {1, 64, 128, 16, {3, {70, 7, 310}}, true}, {4, 2, 16, 4, {5, {1, 3, 4, 5, 200}}, true},
    {8, 3, 24, 5, {3, {90, 0, 201}}, true},    {4, 5, 7, 4, {2, {40, 77}}, true},
    {1, 8, 128, 30, {2, {90, 20}}, true},      {1, 1, 4, 9, {2, {600, 70}}, true},
    {4, 64, 128, 512, {0, {0}}, true},
};
/* DeepSeek-V4-Flash's indexer; long sequences. */
static const struct index_shape large_index_gpu_shapes[] = {
    {4, 64, 128, 16, {3, {300, 7, 410}}, true},
    {1, 64, 128, 512, {2, {700, 90}}, true},
    {1, 8, 128, 300, {2, {4100, 200}}, true}, /* two chunks of tokens */
    {1, 1, 4, 9, {1, {11500}}, true},         /* more entries than fit into shared memory */
};

struct index {
    struct device *dev;
    const struct index_shape *p;
    struct seqs seqs;
    struct tensor q, k, w, idx;
};

/* Values of -4 .. 4 in q and k and -8 .. 8 in w, if whole. */
static struct tensor index_input(struct device *dev, const struct index_shape *p, uint64_t stream, double amplitude,
                                 int64_t rows, int64_t cols)
{
    struct tensor x = make_random(dev->act_dtype, stream, p->whole ? amplitude : 1, rows, cols, -1);
    for (int64_t i = 0; p->whole && i < tensor_count(x); i++) set_value(x, i, rint(value_at(x, i)));
    return x;
}

static struct index index_make(struct device *dev, const struct index_shape *p)
{
    const int64_t n_tok = total(&p->l);
    return (struct index){.dev = dev,
                          .p = p,
                          .seqs = make_seqs(&p->l),
                          .q = index_input(dev, p, 1, 4, n_tok, p->n_head * p->dim),
                          .k = index_input(dev, p, 2, 4, entry_rows(n_tok, p->ratio), p->dim),
                          .w = index_input(dev, p, 3, 8, n_tok, p->n_head),
                          .idx = make_empty(DT_I32, n_tok, p->n_top, -1)};
}

static void index_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct index m = index_make(dev, params);
    op_index_topk(dev, m.idx, m.q, m.k, m.w, &m.seqs, m.p->ratio);
    put(o, m.idx);
}

/* Scratch for longer sequences than there are: two chunks of tokens, more entries than fit into shared memory. */
static void index_run_roomy(struct device *dev, const void *params, struct op_outputs *o)
{
    struct index m = index_make(dev, params);
    m.seqs.max_len = 100000;
    op_index_topk(dev, m.idx, m.q, m.k, m.w, &m.seqs, m.p->ratio);
    put(o, m.idx);
}

static double entry_score(const struct index *m, int64_t t, int64_t row)
{
    double score = 0;
    for (int64_t h = 0; h < m->p->n_head; h++) {
        double dot = 0;
        for (int64_t c = 0; c < m->p->dim; c++)
            dot += value_at(m->q, (t * m->p->n_head + h) * m->p->dim + c) * value_at(m->k, row * m->p->dim + c);
        score += value_at(m->w, t * m->p->n_head + h) * fmax(0, dot);
    }
    return score;
}

/* The chosen entries of every token ascend. A chosen entry has a larger score than an entry that was not chosen, or an
 * equal score and a smaller number. slack: by how much the score of an entry that was not chosen may be larger. */
static void check_choice(const struct index *m, int64_t t, int64_t first_row, int64_t n, double slack)
{
    const int32_t *chosen = (const int32_t *)m->idx.data + t * m->p->n_top;
    double *scores = mem_array(n + 1, sizeof(*scores)), worst = INFINITY;
    bool *taken = mem_array(n + 1, sizeof(*taken));
    for (int64_t e = 0; e < n; e++) scores[e] = entry_score(m, t, first_row + e);
    for (int64_t i = 0; i < m->p->n_top; i++) {
        if (i >= n) {
            assert_int_equal(chosen[i], -1);
            continue;
        }
        assert_in_range(chosen[i], i > 0 ? chosen[i - 1] + 1 : 0, n - 1);
        taken[chosen[i]] = true;
        worst = fmin(worst, scores[chosen[i]]);
    }
    int64_t last = -1; /* the last chosen entry with the worst score */
    for (int64_t e = 0; e < n; e++) last = taken[e] && scores[e] <= worst ? e : last;
    for (int64_t e = 0; e < n; e++)
        if (!taken[e] && !(scores[e] < worst || (scores[e] <= worst && e > last) || scores[e] < worst + slack))
            fail_msg("token %lld: entry %lld has score %g and was not chosen, %g was", (long long)t, (long long)e,
                     scores[e], worst);
    mem_free(scores);
    mem_free(taken);
}

static void index_choice(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(index_shapes); i++) {
        const struct index_shape *p = &index_shapes[i];
        struct device dev;
        op_check_begin(&dev, true);
        struct index m = index_make(&dev, p);
        op_index_topk(&dev, m.idx, m.q, m.k, m.w, &m.seqs, p->ratio);
        for (int64_t s = 0, first = 0; s < p->l.n_seq; first += p->l.len[s++])
            for (int64_t t = 0; t < p->l.len[s]; t++)
                check_choice(&m, first + t, first / p->ratio, (t + 1) / p->ratio, 0);
        op_check_end(&dev);
    }
}

static void index_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(index_shapes); i++) op_check_case(index_run, &index_shapes[i], 0);
}

static void index_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct index_shape roomy = {1, 1, 4, 9, {2, {100, 70}}, true};
    for (int i = 0; i < MT_LEN(index_gpu_shapes); i++) op_check_cuda(index_run, &index_gpu_shapes[i]);
    op_check_cuda(index_run_roomy, &roomy);
}
static void index_sizes_large_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(large_index_gpu_shapes); i++) op_check_cuda(index_run, &large_index_gpu_shapes[i]);
}

/* The GPU rounds scores: except for this rounding, the entries that it chose have scores at least as large as the
 * others. */
static void index_rounds(void **state)
{
    static const struct index_shape p = {2, 64, 128, 64, {2, {1500, 500}}, false};
    const int32_t cu[] = {0, 1500, 2000};
    struct index m = {.dev = &gpu, .p = &p};
    (void)state;
    for (int portable = 0; portable < 2; portable++) {
        gpu_begin(2, 1, portable);
        m.seqs = (struct seqs){.cu = gpu_i32(cu, 3), .n_seq = 2, .max_len = 1500};
        m.q = gpu_random(DT_BF16, 1, 2000, 64 * 128, -1);
        m.k = gpu_random(DT_BF16, 2, 1000, 128, -1);
        m.w = gpu_random(DT_BF16, 3, 2000, 64, -1);
        m.idx = gpu_empty(DT_I32, 2000, 64, -1);
        op_index_topk(&gpu, m.idx, m.q, m.k, m.w, &m.seqs, 2);
        struct tensor *all[] = {&m.q, &m.k, &m.w, &m.idx};
        for (int i = 0; i < MT_LEN(all); i++) *all[i] = gpu_host(*all[i]);
        for (int64_t t = 0; t < 2000; t += t < 140 ? 1 : 139)
            check_choice(&m, t, t < 1500 ? 0 : 750, (t < 1500 ? t + 1 : t - 1499) / 2, 1e-3);
        for (int i = 0; i < MT_LEN(all); i++) mem_free(all[i]->data);
        gpu_end(NULL);
    }
}

/* ---- block-diagonal product ---- */

struct group_shape {
    int64_t n_tok, n_group, n_out, n_in;
    struct weight_packing packing;
};
static const struct group_shape group_shapes[] = {
    {0, 2, 4, 8, {WF_F32, 0, false}},    {5, 3, 6, 7, {WF_F32, 0, false}},    {4, 2, 6, 8, {WF_BF16, 0, false}},
    {5, 3, 6, 64, {WF_MXFP4, 0, false}}, {5, 3, 6, 48, {WF_NVFP4, 0, false}}, {6, 2, 5, 48, {WF_FP8, 16, false}},
    {4, 3, 6, 64, {WF_NF4, 64, false}},  {4, 3, 6, 64, {WF_FP4, 64, true}},   {7, 1, 9, 10, {WF_BF16, 0, false}},
};
static const struct group_shape group_gpu_shapes[] = {
    {0, 2, 16, 32, {WF_BF16, 0, false}},   {70, 8, 64, 96, {WF_BF16, 0, false}},  {33, 3, 24, 64, {WF_MXFP4, 0, false}},
    {33, 2, 40, 48, {WF_NVFP4, 0, false}}, {9, 2, 16, 128, {WF_FP8, 128, false}}, {9, 2, 16, 64, {WF_NF4, 64, true}},
    {5, 2, 8, 16, {WF_F32, 0, false}},
};

struct group {
    struct device *dev;
    struct weight w;
    struct tensor x, y, dx;
};

static struct group group_make(struct device *dev, const struct group_shape *p)
{
    return (struct group){.dev = dev,
                          .w = make_packed(p->packing, 1, 1, p->n_group, p->n_out, p->n_in),
                          .x = make_random(dev->act_dtype, 2, 1, p->n_tok, p->n_group * p->n_in, -1),
                          .y = make_empty(dev->act_dtype, p->n_tok, p->n_group * p->n_out, -1),
                          .dx = make_empty(dev->act_dtype, p->n_tok, p->n_group * p->n_in, -1)};
}

static void group_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct group m = group_make(dev, params);
    op_group_linear_fwd(dev, m.y, m.x, &m.w);
    op_group_linear_bwd(dev, m.dx, make_probe(m.y, 3), &m.w);
    put(o, m.y);
    put(o, m.dx);
}

static double group_loss(void *arg)
{
    struct group *m = arg;
    op_group_linear_fwd(m->dev, m->y, m->x, &m->w);
    return probe(m->y, 3);
}

static void group(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(group_shapes); i++) {
        const struct group_shape *p = &group_shapes[i];
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1;
        struct group m = group_make(&dev, p);
        const struct weight plain = make_unpacked(&m.w);
        op_group_linear_fwd(&dev, m.y, m.x, &m.w);
        for (int64_t k = 0; k < tensor_count(m.y); k++) {
            const int64_t col = k % m.y.shape[1], g = col / p->n_out, x = (k / m.y.shape[1] * p->n_group + g) * p->n_in;
            double sum = 0;
            for (int64_t c = 0; c < p->n_in; c++)
                sum += value_at(m.x, x + c) * (double)((const float *)plain.data)[col * p->n_in + c];
            assert_close(value_at(m.y, k), sum, 1e-12);
        }
        op_group_linear_bwd(&dev, m.dx, make_probe(m.y, 3), &m.w);
        const double error = tensor_count(m.x) ? gradient_error(group_loss, &m, m.x, m.dx) : 0;
        if (!(error <= 1e-6)) fail_msg("shape %d: off by %g", i, error);
        op_check_end(&dev);
    }
}

static void group_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(group_shapes); i++) op_check_case(group_run, &group_shapes[i], 1e-6);
}

static void group_on_the_gpu_by_cublas(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(group_gpu_shapes); i++) op_check_cuda(group_run, &group_gpu_shapes[i]);
}

/* ---- tensors of more than 2^31 elements: the last rows are those of a call with these rows alone ---- */

enum { LAST = 67, WIDE = 32768, N_WIDE = (1 << 16) + LAST, N_LONG = (1 << 20) + LAST };

static struct tensor last(struct tensor x) { return tensor_rows(x, x.shape[0] - LAST, LAST); }

/* Sequences of 64 tokens, then one of LAST. */
static struct seqs long_seqs(bool alone)
{
    const int64_t n_seq = alone ? 1 : (N_LONG - LAST) / 64 + 1;
    int32_t *cu = mem_array(n_seq + 1, sizeof(*cu));
    for (int64_t s = 0; s < n_seq; s++) cu[s] = (int32_t)s * 64;
    cu[n_seq] = alone ? LAST : N_LONG;
    const struct seqs seqs = {.cu = gpu_i32(cu, n_seq + 1), .n_seq = n_seq, .max_len = LAST};
    mem_free(cu);
    return seqs;
}

static void heads_large(void **state)
{
    const struct tail_rope r = {64, WIDE / 64, 1e-6f, false};
    (void)state;
    gpu_begin(18, 2, false);
    int32_t *at = mem_array(N_WIDE, sizeof(*at));
    for (int32_t t = 0; t < N_WIDE; t++) at[t] = t % POSITIONS;
    struct tensor pos = gpu_i32(at, N_WIDE), table = gpu_random(DT_F32, 2, POSITIONS, 64, -1);
    struct tensor x = gpu_random(DT_BF16, 1, N_WIDE, WIDE, -1), y = gpu_empty(DT_BF16, N_WIDE, WIDE, -1);
    struct tensor rstd = gpu_empty(DT_F32, N_WIDE, 64, -1), few_rstd = gpu_empty(DT_F32, LAST, 64, -1);
    struct tensor few = gpu_empty(DT_BF16, LAST, WIDE, -1), none = {0};
    mem_free(at);
    op_tail_rope_fwd(&gpu, y, rstd, x, pos, table, &r);
    op_tail_rope_fwd(&gpu, few, few_rstd, last(x), last(pos), table, &r);
    expect_same("y", last(y), few);
    expect_same("rstd", last(rstd), few_rstd);
    op_tail_rope_bwd(&gpu, y, y, x, rstd, pos, table, &r);
    op_tail_rope_bwd(&gpu, few, few, last(x), few_rstd, last(pos), table, &r);
    expect_same("dx", last(y), few);
    op_tail_rope_fwd(&gpu, y, none, y, pos, table, &r);
    op_tail_rope_fwd(&gpu, few, none, few, last(pos), table, &r);
    expect_same("in place", last(y), few);
    const struct weight w = gpu_weight(3, 8, 16, WIDE / 8);
    struct tensor out = gpu_empty(DT_BF16, N_WIDE, 128, -1), few_out = gpu_empty(DT_BF16, LAST, 128, -1);
    op_group_linear_fwd(&gpu, out, x, &w);
    op_group_linear_fwd(&gpu, few_out, last(x), &w);
    expect_near("product", last(out), few_out, 0x1p-8);
    op_group_linear_bwd(&gpu, y, out, &w);
    op_group_linear_bwd(&gpu, few, last(out), &w);
    expect_near("gradient of the product", last(y), few, 0x1p-8);
    gpu_end(NULL);
}

static void entries_large(void **state)
{
    static const struct compress_shape s = {4, 512, true};
    const int64_t n = N_LONG / 4, first = (N_LONG - LAST) / 4, n_last = LAST / 4;
    (void)state;
    gpu_begin(14, 1, false);
    struct seqs seqs = long_seqs(false), alone = long_seqs(true);
    struct tensor kg = gpu_random(DT_BF16, 1, N_LONG, 2048, -1), dkg = gpu_empty(DT_BF16, N_LONG, 2048, -1);
    struct tensor bias = gpu_random(DT_F32, 2, 4, 1024, -1), few_dkg = gpu_empty(DT_BF16, LAST, 2048, -1);
    struct tensor y = gpu_empty(DT_BF16, n, 512, -1), few = gpu_empty(DT_BF16, n_last, 512, -1);
    struct tensor pos = gpu_empty(DT_I32, n, -1, -1), few_pos = gpu_empty(DT_I32, n_last, -1, -1);
    op_compress_fwd(&gpu, y, pos, kg, bias, &seqs, &s);
    op_compress_fwd(&gpu, few, few_pos, last(kg), bias, &alone, &s);
    expect_same("entries", tensor_rows(y, first, n_last), few);
    expect_same("positions", tensor_rows(pos, first, n_last), few_pos);
    op_compress_bwd(&gpu, dkg, y, kg, bias, &seqs, &s);
    op_compress_bwd(&gpu, few_dkg, few, last(kg), bias, &alone, &s);
    expect_same("dkg", last(dkg), few_dkg);
    gpu_end(NULL);
}

static void index_large(void **state)
{
    const int64_t first = (N_LONG - LAST) / 4, n_last = LAST / 4;
    (void)state;
    for (int portable = 0; portable < 2; portable++) {
        gpu_begin(8, 1, portable);
        struct seqs seqs = long_seqs(false), alone = long_seqs(true);
        struct tensor q = gpu_random(DT_BF16, 1, N_LONG, 2048, -1), k = gpu_random(DT_BF16, 2, N_LONG / 4, 128, -1);
        struct tensor w = gpu_random(DT_BF16, 3, N_LONG, 16, -1), idx = gpu_empty(DT_I32, N_LONG, 8, -1);
        struct tensor few = gpu_empty(DT_I32, LAST, 8, -1);
        op_index_topk(&gpu, idx, q, k, w, &seqs, 4);
        op_index_topk(&gpu, few, last(q), tensor_rows(k, first, n_last), last(w), &alone, 4);
        expect_same("idx", last(idx), few);
        gpu_end(NULL);
    }
}

int test_ops_compress(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entries),
        cmocka_unit_test(entries_run),
        cmocka_unit_test(packed_entries),
        cmocka_unit_test(tail),
        cmocka_unit_test(tail_runs),
        cmocka_unit_test(index_choice),
        cmocka_unit_test(index_runs),
        cmocka_unit_test(group),
        cmocka_unit_test(group_runs),
        cmocka_unit_test(entries_on_the_gpu),
        cmocka_unit_test(tail_on_the_gpu),
        cmocka_unit_test(index_on_the_gpu),
        cmocka_unit_test(index_sizes_large_on_the_gpu),
        cmocka_unit_test_teardown(index_rounds, gpu_end),
        cmocka_unit_test(group_on_the_gpu_by_cublas),
        cmocka_unit_test_teardown(heads_large, gpu_end),
        cmocka_unit_test_teardown(entries_large, gpu_end),
        cmocka_unit_test_teardown(index_large, gpu_end),
    };
    return cmocka_run_group_tests_name("ops_compress", tests, NULL, NULL);
}
