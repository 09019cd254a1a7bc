/* test_lora_init.c - lora.init: A and B of every matrix and expert follow the definitions of PiSSA and OLoRA; the
 * frozen copy cancels them at the start and never changes; runs continue with the same bytes. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/safetensors.h"
#include "kernels/format/quant.h"
#include "model/layer.h"
#include "model/lora_init.h"
#include "model/stored/published.h"
#include "tests/process.h"

struct begun {
    struct arch arch;
    struct safetensors st;
    struct device dev;
    struct adapters ad;
};

static void begin(struct begun *b, const char *dir, enum lora_init init, int64_t r, bool rslora)
{
    struct err err = {.msg = ""};
    struct device measure;
    const struct lora_options opt = {
        .r = r, .alpha = 3, .rslora = rslora, .init = init, .targets = "all-linear", .layers = ""};
    const struct quantize plain = {.format = WF_NONE};
    const struct weights_source from = {.arch = &b->arch, .st = &b->st};
    if (arch_load(&b->arch, dir, &err) || safetensors_open(&b->st, dir, &err) ||
        published_rename(&b->st, &b->arch, &err) || device_open(&b->dev, "cpu", "fp32", &err) ||
        adapters_plan(&b->ad, &b->arch, &opt, &err) || lora_init_check(&b->ad, &b->arch, &err))
        fail_msg("%s: %s", dir, err.msg);
    device_dry_run(&measure, &b->dev);
    adapters_alloc_frozen(&b->ad, &measure, &b->arch);
    if (device_reserve(&b->dev, &b->dev.state, "state", measure.state.peak, &err)) fail_msg("%s", err.msg);
    adapters_alloc_frozen(&b->ad, &b->dev, &b->arch);
    if (lora_init_values(&b->ad, &b->dev, &from, &plain, &err)) fail_msg("%s: %s", dir, err.msg);
}

static void end(struct begun *b)
{
    adapters_free(&b->ad);
    device_close(&b->dev);
    safetensors_close(&b->st);
}

/* One matrix: w [m, n]; a [2r, n]; b [m, 2r]; scale of the adapter. */
struct matrix {
    int64_t m, n, r;
    const float *a, *b;
    float *w;
    double scale;
};

static double along(const struct matrix *x, int64_t j, int64_t c) /* (B^T W) [j, c] */
{
    double sum = 0;
    for (int64_t o = 0; o < x->m; o++) sum += (double)x->b[o * 2 * x->r + j] * (double)x->w[o * x->n + c];
    return sum;
}

static double product_a(const struct matrix *x, int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t c = 0; c < x->n; c++) sum += (double)x->a[i * x->n + c] * (double)x->a[j * x->n + c];
    return sum;
}

static double product_b(const struct matrix *x, int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t o = 0; o < x->m; o++) sum += (double)x->b[o * 2 * x->r + i] * (double)x->b[o * 2 * x->r + j];
    return sum;
}

/* The largest singular value of W - scale B A, by power iteration from any vector. */
static double rest(const struct matrix *x)
{
    double *v = mem_array(x->n, sizeof(*v)), *u = mem_array(x->m, sizeof(*u)), size = 0;
    for (int64_t c = 0; c < x->n; c++) v[c] = test_value(5, (uint64_t)c);
    for (int step = 0; step < 30; step++) {
        double length = 0;
        for (int64_t c = 0; c < x->n; c++) length += v[c] * v[c];
        for (int64_t c = 0; c < x->n; c++) v[c] /= sqrt(length);
        for (int64_t o = 0; o < x->m; o++) u[o] = 0;
        for (int64_t o = 0; o < x->m; o++)
            for (int64_t c = 0; c < x->n; c++) {
                double w = (double)x->w[o * x->n + c];
                for (int64_t j = 0; j < x->r; j++)
                    w -= x->scale * (double)x->b[o * 2 * x->r + j] * (double)x->a[j * x->n + c];
                u[o] += w * v[c];
            }
        size = 0;
        for (int64_t o = 0; o < x->m; o++) size += u[o] * u[o];
        size = sqrt(size);
        for (int64_t c = 0; c < x->n; c++) v[c] = 0;
        for (int64_t o = 0; o < x->m; o++)
            for (int64_t c = 0; c < x->n; c++) {
                double w = (double)x->w[o * x->n + c];
                for (int64_t j = 0; j < x->r; j++)
                    w -= x->scale * (double)x->b[o * 2 * x->r + j] * (double)x->a[j * x->n + c];
                v[c] += w * u[o];
            }
    }
    mem_free(v);
    mem_free(u);
    return size;
}

/* A A^T = B^T B = S / scale, B^T W = S A, and what is left has no larger singular value. */
static void check_pissa(const struct matrix *x, bool exact)
{
    const double first = x->scale * product_a(x, 0, 0), last = x->scale * product_a(x, x->r - 1, x->r - 1);
    for (int64_t i = 0; i < x->r; i++) {
        const double s = x->scale * product_a(x, i, i);
        for (int64_t j = 0; j < x->r; j++) {
            assert_true(fabs(product_a(x, i, j) * x->scale - (i == j ? s : 0)) < 1e-5 * first);
            assert_true(fabs(product_b(x, i, j) * x->scale - (i == j ? s : 0)) < 1e-5 * first);
        }
        for (int64_t c = 0; c < x->n && exact; c++)
            assert_true(fabs(along(x, i, c) - s * (double)x->a[i * x->n + c]) < 1e-5 * first * sqrt(first));
    }
    assert_true(rest(x) < last * (exact ? 1.00001 : 1.05));
}

/* B is orthonormal, A = B^T W, and the first r columns of W are those of B A. */
static void check_olora(const struct matrix *x)
{
    double most = 0;
    for (int64_t i = 0; i < x->m * x->n; i++) most = fmax(most, fabs((double)x->w[i]));
    for (int64_t i = 0; i < x->r; i++) {
        for (int64_t j = 0; j < x->r; j++) assert_true(fabs(product_b(x, i, j) - (i == j)) < 1e-5);
        for (int64_t c = 0; c < x->n; c++)
            assert_true(fabs(along(x, i, c) - (double)x->a[i * x->n + c]) < 1e-5 * most * sqrt((double)x->m));
    }
    for (int64_t o = 0; o < x->m; o++)
        for (int64_t c = 0; c < x->r; c++) {
            double sum = 0;
            for (int64_t j = 0; j < x->r; j++) sum += (double)x->b[o * 2 * x->r + j] * (double)x->a[j * x->n + c];
            assert_true(fabs(sum - (double)x->w[o * x->n + c]) < 1e-5 * most * sqrt((double)x->m));
        }
}

/* Expert e of the parameters a and b, whose weight is w from row `first` on. */
static void check_matrix(const struct begun *g, const struct weight *w, int64_t first, const struct lora_param *a,
                         const struct lora_param *b, int64_t e, bool exact)
{
    const float *values = g->ad.opt.param.data;
    struct matrix x = {.m = b->rows,
                       .n = a->cols,
                       .r = a->rows / 2,
                       .a = values + a->off + e * a->rows * a->cols,
                       .b = values + b->off + e * b->rows * b->cols,
                       .w = mem_array(b->rows * a->cols, sizeof(float)),
                       .scale = (double)g->ad.scale[a->target]};
    quant_decode(x.w, w, e, first * x.n, x.m * x.n, 1);
    assert_memory_equal(x.a, x.a + x.r * x.n, (size_t)(x.r * x.n) * sizeof(float));
    for (int64_t o = 0; o < x.m; o++)
        for (int64_t j = 0; j < x.r; j++) assert_true(x.b[o * 2 * x.r + j] == -x.b[o * 2 * x.r + x.r + j]);
    if (g->ad.init == LORA_INIT_PISSA)
        check_pissa(&x, exact);
    else
        check_olora(&x);
    mem_free(x.w);
}

static void check_layer(struct begun *g, int64_t layer, bool exact)
{
    const struct quantize plain = {.format = WF_NONE};
    const struct weights_source from = {.arch = &g->arch, .st = &g->st};
    struct device cpu, measure;
    struct layer_weights lw;
    struct product q[LAYER_PRODUCTS];
    struct err err = {.msg = ""};
    assert_int_equal(device_open(&cpu, "cpu", "fp32", &err), 0);
    device_dry_run(&measure, &cpu);
    assert_int_equal(weights_load_layer(&lw, &measure, &from, &plain, layer, &err), 0);
    assert_int_equal(device_reserve(&cpu, &cpu.weights, "weights", measure.weights.peak, &err), 0);
    assert_int_equal(device_reserve(&cpu, &cpu.work, "work", measure.work.peak, &err), 0);
    assert_int_equal(weights_load_layer(&lw, &cpu, &from, &plain, layer, &err), 0);
    layer_products(&g->arch, layer, q);
    for (int i = 0; i < LAYER_PRODUCTS; i++)
        for (int64_t t = 0, first = 0; t < q[i].n_target; first += q[i].rows[t++]) {
            const struct proj *p = (const struct proj *)((const char *)&lw + q[i].proj);
            const struct lora_param *a = adapters_find(&g->ad, layer, q[i].target[t], false);
            const struct lora_param *b = adapters_find(&g->ad, layer, q[i].target[t], true);
            for (int64_t e = 0; a && e < a->n_exp; e += 7) check_matrix(g, &p->w, first, a, b, e, exact);
        }
    device_close(&cpu);
}

static void values_are_the_definition(void **state)
{
    (void)state;
    static const char *const cases[] = {"parity/case_a", "parity/qwen3_next", "parity/deepseek_v3"};
    for (int i = 0; i < MT_LEN(cases); i++)
        for (enum lora_init init = LORA_INIT_PISSA; init <= LORA_INIT_OLORA; init++) {
            struct begun g;
            begin(&g, fixture(cases[i]), init, 3, i == 1);
            check_layer(&g, g.arch.n_layer - 1, true);
            end(&g);
        }
}

/* A matrix whose sides are both above 128: its singular vectors come from a subspace iteration. */
static void large_matrices(void **state)
{
    (void)state;
    struct begun g;
    begin(&g, fixture("../../configs/tiny-gptoss"), LORA_INIT_PISSA, 4, false);
    check_layer(&g, 0, false);
    end(&g);
}

static void too_large_ranks_are_errors(void **state)
{
    (void)state;
    const char *config = process_config("[lora]\ninit = pissa\ntargets = experts\n");
    assert_int_equal(RUN(config, "--set", "lora.r=97"), 1);
    assert_says(said.err, "lora.init with r = 97: down_proj of layer 0 is [128, 96] and has no more than 96 ranks");
    static const char *const rows[][2] = {
        {"lora.dropout=0.1", "lora.init = pissa and lora.dropout exclude each other"},
        {"lora.init_from=somewhere", "lora.init = pissa and lora.init_from exclude each other"},
        {"optim.weight_decay=0.1", "lora.init = pissa and optim.weight_decay exclude each other"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(RUN(config, "--set", rows[i][0]), 1);
        assert_says(said.err, rows[i][1]);
    }
}

/* The frozen half of a run's adapter, as it was at the end of a step. */
static void frozen_half(const char *config, const char *name, struct safetensors *st)
{
    struct err err;
    if (safetensors_open(st, process_output(config, name), &err)) fail_msg("%s", err.msg);
}

static void runs_continue(void **state)
{
    (void)state;
    static const char *const inits[] = {"pissa", "olora", "pissa optim.kind=adamw8"};
    for (int i = 0; i < MT_LEN(inits); i++) {
        struct safetensors first, last;
        char sets[256], text[1 << 14];
        snprintf(sets, sizeof(sets),
                 "lora.init=%s lora.targets=q_proj,v_proj,o_proj lora.rank_pattern=v_proj=1 optim.schedule=constant "
                 "optim.warmup_ratio=0 output.save_every=1 train.steps=",
                 inits[i]);
        char four[300], two[300];
        snprintf(four, sizeof(four), "%s4", sets);
        snprintf(two, sizeof(two), "%s2", sets);
        const char *whole = process_trained(four), *parts = process_trained(two);
        assert_says(said.err, "LoRA r 2 (v_proj=1), alpha 32, scale alpha/r, ");
        assert_says(said.err, "; exported at r 4 (lora.init)\n");
        assert_says(said.err, "     2  [2, 128] "); /* A of q_proj */
        assert_int_equal(process_run_sets(parts, four), 0);
        assert_says(said.err, "continuing after step 2 of 4");
        assert_null(strstr(said.err, "from the weights in"));
        assert_same_output(whole, parts, ADAPTER);
        assert_same_output(whole, parts, "checkpoints/step-000004/optimizer.safetensors");
        process_read(process_output(whole, "adapter/adapter_config.json"), text, sizeof(text));
        assert_says(text, "\"r\": 4");
        assert_says(text, "\"lora_alpha\": 64");
        frozen_half(whole, "checkpoints/step-000002/" ADAPTER, &first);
        frozen_half(whole, ADAPTER, &last);
        assert_int_equal(first.n_tensors, 12);
        for (int64_t t = 0; t < first.n_tensors; t++) {
            const struct st_tensor *x = &first.tensors[t], *y = safetensors_find(&last, x->name);
            const bool is_b = strstr(x->name, "lora_B") != NULL;
            const int64_t r = x->shape[is_b], n = x->shape[!is_b];
            int64_t changed = 0;
            for (int64_t k = 0; k < r; k++)
                for (int64_t c = 0; c < n; c++) {
                    const int64_t at = 4 * (is_b ? c * r + k : k * n + c);
                    const bool same = !memcmp(x->data + at, y->data + at, 4);
                    changed += !same && k < r / 2;
                    assert_true(same || k < r / 2);
                }
            assert_true(changed > r / 2 * n / 2);
        }
        safetensors_close(&first);
        safetensors_close(&last);
    }
}

/* With expert parallel, each rank begins with the values of its own experts. */
static void ranks_begin_alike(void **state)
{
    (void)state;
    static const char sets[] = "lora.init=pissa optim.lr=0 train.steps=1 train.grad_accum=2 output.save_every=1";
    char two[256];
    snprintf(two, sizeof(two), "%s parallel.cpu_ranks=2 parallel.ep=2", sets);
    assert_same_output(process_trained(sets), process_trained(two), ADAPTER);
}

int test_lora_init(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_are_the_definition),  cmocka_unit_test(large_matrices),
        cmocka_unit_test(too_large_ranks_are_errors), cmocka_unit_test(runs_continue),
        cmocka_unit_test(ranks_begin_alike),
    };
    return cmocka_run_group_tests_name("lora_init", tests, NULL, NULL);
}
