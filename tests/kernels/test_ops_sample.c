/* test_ops_sample.c - sampling of tokens: random numbers against published vectors, filters and penalties against a
 * sorted reference, the frequencies of draws, rows that are not finite. */
#include "tests/op_check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/sample_value.h"

enum { MAX_EDITS = 8 };

/* kat_vectors of Random123: counter, key, result. */
static void known_answers(void **state)
{
    (void)state;
    static const struct {
        struct philox counter;
        uint64_t key;
        struct philox want;
    } rows[] = {
        {{{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        {{{~0u, ~0u, ~0u, ~0u}}, ~(uint64_t)0, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
        {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         0x299f31d0a4093822,
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        const struct philox got = philox4x32(rows[i].key, rows[i].counter);
        assert_memory_equal(&got, &rows[i].want, sizeof(got));
    }
    assert_true(isfinite(sample_noise(0)) && isfinite(sample_noise(~0u)) && sample_noise(0) > SAMPLE_NOISE_MIN);
    assert_int_equal(sample_weight(0), (uint64_t)SAMPLE_UNIT);
    assert_int_equal(sample_weight(-INFINITY), 0);
}

/* Rows of one case; the logits are multiples of `step`, so that many are equal. */
struct sample_case {
    int64_t n_row, n_vocab, n_top;
    double amplitude, step;
    double temperature, top_p, min_p;
    int32_t top_k;
    int n_edit; /* edited tokens of each row, with repetition 1.3, frequency 0.25, presence 0.5, and a bias for some
                   tokens */
    double report;
};
static const struct sample_case cases[] = {
    {0, 5, 0, 3, 0.25, 1, 1, 0, 0, 0, 1},
    {1, 1, 1, 3, 0.25, 1, 1, 0, 0, 0, 1},
    {9, 7, 7, 3, 0.5, 0, 1, 0, 0, 0, 1},
    {9, 7, 0, 3, 3, 0, 1, 0, 0, 3, 2},
    {20, 37, 5, 4, 0.25, 1, 1, 0, 0, 0, 1},
    {20, 37, 5, 4, 0.25, 0.7, 1, 0, 5, 0, 0.7},
    {20, 37, 0, 4, 2, 1.5, 1, 0, 5, 8, 1},
    {20, 37, 37, 4, 2, 1, 1, 0, 1000, 0, 1},
    {20, 37, 0, 4, 0.25, 1, 0.5, 0, 0, 0, 1},
    {20, 37, 0, 4, 2, 1, 0.9, 0, 12, 8, 1},
    {20, 37, 0, 4, 0.25, 1, 1e-9, 0, 0, 0, 1},
    {20, 37, 0, 4, 0.25, 1, 1, 0.1, 0, 0, 1},
    {20, 37, 0, 4, 2, 1, 1, 1, 0, 8, 1},
    {20, 37, 0, 4, 0.25, 0.01, 0.99, 0.01, 30, 8, 1},
    {5, 1301, 20, 9, 0.03125, 1, 0.95, 0, 50, 0, 1},
    {5, 1301, 128, 9, 0, 0.8, 1, 0, 0, 8, 1},
    {3, 5003, 20, 12, 1, 1, 0.7, 0.001, 0, 8, 1},
    {2, 9001, 0, 30, 0, 100, 1, 0, 0, 0, 1},
};

struct sample_bed {
    struct device *dev;
    const struct sample_case *s;
    struct tensor logits, rows, edits, given; /* given: the logits before the op */
    struct sampled out;
};

static struct sample_row row_of(const struct sample_case *s, int64_t i)
{
    return (struct sample_row){.seed = 7 + (uint64_t)i / 3,
                               .temperature = s->temperature,
                               .top_p = s->top_p,
                               .min_p = s->min_p,
                               .top_k = s->top_k,
                               .repetition = s->n_edit ? 1.3 : 1,
                               .frequency = s->n_edit ? 0.25 : 0,
                               .presence = s->n_edit ? 0.5 : 0,
                               .report = s->report,
                               .place = (uint32_t)(i % 3),
                               .sample = (uint32_t)(i % 2),
                               .first_edit = (int32_t)i * MAX_EDITS,
                               .n_edit = s->n_edit};
}

static struct sample_edit edit_of(const struct sample_case *s, int64_t row, int64_t i)
{
    const bool seen = i % 3 > 0;
    return (struct sample_edit){.id = (int32_t)((i * MT_MAX(s->n_vocab / 8, 1) + row) % s->n_vocab),
                                .n_output = seen ? (int32_t)i % 4 : 0,
                                .seen = seen,
                                .bias = i == 3   ? -INFINITY
                                        : i == 6 ? 2
                                                 : 0};
}

static struct sample_bed bed_make(struct device *dev, const struct sample_case *s)
{
    const int64_t n = s->n_row, ld = (s->n_vocab + 7) / 8 * 8;
    struct sample_bed b = {
        .dev = dev,
        .s = s,
        .logits = tensor_cols(make_random(dev->stat_dtype, 3, s->amplitude, n, ld, -1), 0, s->n_vocab),
        .rows = make_empty(DT_I32, n, SAMPLE_ROW_WORDS, -1),
        .edits = make_empty(DT_I32, n * MAX_EDITS, SAMPLE_EDIT_WORDS, -1),
        .out = {.token = make_empty(DT_I32, n, -1, -1), .logprob = make_empty(dev->stat_dtype, n, 3, -1)}};
    for (int64_t i = 0; i < tensor_count(b.logits); i++) {
        const double v = value_at(b.logits, i);
        set_value(b.logits, i, s->step > 0 ? round(v / s->step) * s->step : (double)bf16_to_f32(f32_to_bf16((float)v)));
    }
    for (int64_t i = 0; i < n; i++) {
        ((struct sample_row *)b.rows.data)[i] = row_of(s, i);
        for (int64_t k = 0; k < MAX_EDITS; k++)
            ((struct sample_edit *)b.edits.data)[i * MAX_EDITS + k] = edit_of(s, i, k);
    }
    if (s->n_top) {
        b.out.top_id = make_empty(DT_I32, n, s->n_top, -1);
        b.out.top_logprob = make_empty(dev->stat_dtype, n, s->n_top, -1);
    }
    b.given = make_copy(b.logits);
    return b;
}

static void bed_run(struct sample_bed *b)
{
    op_sample(b->dev, &b->out, b->logits, b->rows, b->s->n_edit ? b->edits : (struct tensor){0});
}

static void run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct sample_bed b = bed_make(dev, params);
    bed_run(&b);
    o->out[o->n++] = b.out.token;
    o->out[o->n++] = b.out.logprob;
    if (b.s->n_top) o->out[o->n++] = b.out.top_id;
    if (b.s->n_top) o->out[o->n++] = b.out.top_logprob;
}

/* ---- the reference ---- */

static const double *sorted_z;
static int in_order(const void *a, const void *b)
{
    const int x = *(const int *)a, y = *(const int *)b;
    if (sorted_z[x] != sorted_z[y]) return sorted_z[x] > sorted_z[y] ? -1 : 1;
    return x - y;
}

static double log_softmax(const double *z, int64_t n, double t, int64_t id)
{
    double max = z[0], sum = 0;
    for (int64_t i = 0; i < n; i++) max = fmax(max, z[i]);
    for (int64_t i = 0; i < n; i++) sum += exp((z[i] - max) / t);
    return (z[id] - max) / t - log(sum);
}

/* How many of the ids in order are kept. */
static int64_t n_kept(const struct sample_case *s, const double *z, const int *order)
{
    int64_t n = s->top_k > 0 ? MT_MIN(s->top_k, s->n_vocab) : s->n_vocab, kept = 0;
    double total = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) total += exp((z[order[i]] - z[order[0]]) / s->temperature);
    while (s->top_p < 1 && sum < s->top_p * total) sum += exp((z[order[kept++]] - z[order[0]]) / s->temperature);
    if (s->top_p < 1) n = kept;
    while (s->min_p > 0 && exp((z[order[n - 1]] - z[order[0]]) / s->temperature) < s->min_p) n--;
    return n;
}

static void check_row(struct sample_bed *b, int64_t row, double *given, double *z, int *order)
{
    const struct sample_case *s = b->s;
    const struct sample_row r = row_of(s, row);
    const int64_t n = s->n_vocab;
    int token = 0;
    double best = -INFINITY, share = 0;
    for (int64_t i = 0; i < n; i++) {
        order[i] = (int)i;
        z[i] = given[i] = value_at(b->given, row * n + i);
    }
    sorted_z = z;
    qsort(order, (size_t)n, sizeof(*order), in_order);
    for (int64_t k = 0; k < s->n_top; k++) {
        assert_int_equal((int)value_at(b->out.top_id, row * s->n_top + k), order[k]);
        assert_close(value_at(b->out.top_logprob, row * s->n_top + k), log_softmax(z, n, s->report, order[k]), 1e-12);
    }
    for (int64_t k = 0; k < s->n_edit; k++) {
        const struct sample_edit e = edit_of(s, row, k);
        z[e.id] += e.bias;
        if (e.seen) z[e.id] = z[e.id] < 0 ? 1.3 * z[e.id] : z[e.id] / 1.3;
        z[e.id] -= 0.25 * e.n_output + (e.n_output ? 0.5 : 0);
    }
    qsort(order, (size_t)n, sizeof(*order), in_order);
    const int64_t kept = s->temperature > 0 ? n_kept(s, z, order) : 1;
    for (int64_t k = 0; k < kept; k++) {
        const int id = order[k];
        const struct philox counter = {{r.place, r.sample, (uint32_t)id / 4, r.stream}};
        const double u = ((double)philox4x32(r.seed, counter).word[id % 4] + 0.5) * 0x1p-32;
        const double value = s->temperature > 0 ? z[id] / s->temperature - log(-log(u)) : 0;
        if (value > best) best = value, token = id;
        share += s->temperature > 0 ? exp(log_softmax(z, n, s->temperature, id)) : 1;
    }
    assert_int_equal((int)value_at(b->out.token, row), token);
    assert_close(value_at(b->out.logprob, 3 * row), log_softmax(given, n, s->report, token), 1e-12);
    const double among = s->temperature > 0 ? log_softmax(z, n, s->temperature, token) - log(share) : 0;
    assert_close(value_at(b->out.logprob, 3 * row + 1), among, 1e-9);
    assert_close(value_at(b->out.logprob, 3 * row + 2), share, 1e-9);
}

static void is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct sample_bed b = bed_make(&dev, &cases[i]);
        double *z = mem_array(2 * b.s->n_vocab, sizeof(*z));
        int *order = mem_array(b.s->n_vocab, sizeof(*order));
        bed_run(&b);
        for (int64_t row = 0; row < b.s->n_row; row++) check_row(&b, row, z, z + b.s->n_vocab, order);
        mem_free(order);
        mem_free(z);
        op_check_end(&dev);
    }
    for (int i = 0; i < MT_LEN(cases); i++) op_check_case(run, &cases[i], 2e-6);
}

/* A row alone has the bits that it has beside others. */
static void neighbours_change_no_bits(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct device dev;
        op_check_begin(&dev, false);
        struct sample_bed b = bed_make(&dev, &cases[i]);
        struct sample_bed one = bed_make(&dev, &cases[i]);
        bed_run(&b);
        for (int64_t row = 0; row < b.s->n_row; row++) {
            const struct sampled out = {.token = make_empty(DT_I32, 1, -1, -1),
                                        .logprob = make_empty(dev.stat_dtype, 1, 3, -1)};
            op_sample(&dev, &out, tensor_rows(one.logits, row, 1), tensor_rows(one.rows, row, 1),
                      b.s->n_edit ? one.edits : (struct tensor){0});
            assert_same_bits(out.token, tensor_rows(b.out.token, row, 1));
            assert_same_bits(out.logprob, tensor_rows(b.out.logprob, row, 1));
        }
        op_check_end(&dev);
    }
}

/* Draws at many positions have the frequencies of the distribution: chi-square of 9 degrees of freedom, whose 99.99 %
 * quantile is 33.7. */
static void frequencies(void **state)
{
    (void)state;
    enum { N = 40000, V = 10 };
    static const struct sample_case s = {N, V, 0, 2, 0.25, 0.8, 1, 0, 0, 0, 1};
    struct device dev;
    double z[V], chi2 = 0;
    int64_t count[V] = {0};
    op_check_begin(&dev, false);
    struct sample_bed b = bed_make(&dev, &s);
    for (int64_t i = 0; i < V; i++) z[i] = value_at(b.logits, i);
    for (int64_t i = 0; i < N; i++) {
        for (int64_t v = 0; v < V; v++) set_value(b.logits, i * V + v, z[v]);
        ((struct sample_row *)b.rows.data)[i].place = (uint32_t)i;
        ((struct sample_row *)b.rows.data)[i].seed = 3;
    }
    bed_run(&b);
    for (int64_t i = 0; i < N; i++) count[(int)value_at(b.out.token, i)]++;
    for (int64_t v = 0; v < V; v++) {
        const double want = N * exp(log_softmax(z, V, s.temperature, v));
        chi2 += ((double)count[v] - want) * ((double)count[v] - want) / want;
    }
    if (!(chi2 < 33.7)) fail_msg("chi-square %g", chi2);
    op_check_end(&dev);
}

/* A row with a logit of NaN or +infinity, or without a finite logit, gives token -1; other rows do not change. A token
 * with a logit of -infinity is never drawn. */
static void rows_that_are_not_finite(void **state)
{
    (void)state;
    static const struct sample_case s = {6, 12, 3, 3, 0.25, 1, 0.9, 0, 5, 0, 1};
    struct device dev;
    op_check_begin(&dev, false);
    struct sample_bed b = bed_make(&dev, &s), want = bed_make(&dev, &s);
    bed_run(&want);
    set_value(b.logits, 0 * 12 + 11, NAN);
    set_value(b.logits, 2 * 12, NAN);
    set_value(b.logits, 3 * 12 + 4, INFINITY);
    for (int64_t v = 0; v < 12; v++) set_value(b.logits, 4 * 12 + v, -INFINITY);
    for (int64_t v = 0; v < 12; v++)
        if (v != 7) set_value(b.logits, 5 * 12 + v, -INFINITY);
    bed_run(&b);
    for (int64_t i = 0; i < 5; i++) {
        const bool bad = i != 1;
        assert_int_equal((int)value_at(b.out.token, i), bad ? -1 : (int)value_at(want.out.token, i));
        assert_int_equal(isnan(value_at(b.out.logprob, 3 * i)) != 0, bad);
        assert_int_equal((int)value_at(b.out.top_id, 3 * i) == -1, bad);
    }
    assert_int_equal((int)value_at(b.out.token, 5), 7);
    assert_close(value_at(b.out.logprob, 15), 0, 1e-6);
    op_check_end(&dev);
}

/* ---- logits ---- */

struct head_case {
    int64_t n, dim, n_vocab;
};
static const struct head_case heads[] = {{0, 8, 5}, {1, 8, 5}, {3, 64, 1001}, {70, 16, 264}};

static void run_head(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct head_case *h = params;
    const struct weight w = make_weight(WF_BF16, 1, 0.5, 1, h->n_vocab, h->dim);
    const struct tensor x = make_random(dev->act_dtype, 2, 2, h->n, h->dim, -1);
    const struct tensor wide = make_zero(dev->stat_dtype, h->n, (h->n_vocab + 7) / 8 * 8, -1);
    const struct tensor logits = tensor_cols(wide, 0, h->n_vocab);
    const double cap = h->n == 3 ? 2.5 : 0;
    op_head_logits(dev, logits, x, &w, (float)cap);
    o->out[o->n++] = logits;
    if (dev->dry_run || dev->ops->own_memory) return;
    for (int64_t i = 0; i < h->n * h->n_vocab; i += 7) {
        double sum = 0;
        for (int64_t d = 0; d < h->dim; d++)
            sum += value_at(x, i / h->n_vocab * h->dim + d) *
                   (double)bf16_to_f32(((const uint16_t *)w.data)[i % h->n_vocab * h->dim + d]);
        assert_close(value_at(logits, i), cap > 0 ? cap * tanh(sum / cap) : sum, 1e-4);
    }
}

static void logits(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(heads); i++) op_check_case(run_head, &heads[i], 2e-6);
}

static void on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(heads); i++) op_check_cuda(run_head, &heads[i]);
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(run, &cases[i]);
}

int test_ops_sample(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(is_the_definition),
        cmocka_unit_test(neighbours_change_no_bits),
        cmocka_unit_test(frequencies),
        cmocka_unit_test(rows_that_are_not_finite),
        cmocka_unit_test(logits),
        cmocka_unit_test(on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_sample", tests, NULL, NULL);
}
