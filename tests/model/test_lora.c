/* test_lora.c - adapters: the printed table, layout, views, initial values. */
#include <math.h>
#include <stdio.h>

#include "model/lora_table.h"
#include "tests/tiny_lora.h"
#include "train/config/config.h"

static void plan_fails(const char *targets, const char *layers, const char *word)
{
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(targets);
    struct adapters ad;
    struct err err = {.msg = ""};
    opt.layers = layers;
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
    if (!strstr(err.msg, word)) fail_msg("\"%s\" does not say \"%s\"", err.msg, word);
}

static void unknown_targets_are_errors(void **state)
{
    (void)state;
    plan_fails("q_proj,k_prj", "", "did you mean k_proj?");
    plan_fails("expert", "", "did you mean experts?");
    plan_fails("q_proj,router", "", "the router is no target");
    plan_fails("mlp.gate", "", "the router is no target");
    plan_fails("q_proj,lm_head", "", "\"lm_head\" is no target: this matrix stays frozen; remove the word");
    plan_fails("embed_tokens", "", "this matrix stays frozen");
    plan_fails("wq_a", "", "write q_a_proj, its name in transformers");
    plan_fails("wo_b", "", "write o_b_proj, its name in transformers");
    plan_fails("o_a_proj", "", "this matrix stays frozen");
    plan_fails("lm_head_and_more", "", "unknown target \"lm_head_and_more\"");
    plan_fails("", "", "nothing would be trained");
    plan_fails("q_proj", "3", "layers 0 to 2");
    plan_fails("q_proj", "2-1", "neither a layer nor a range");
    plan_fails("q_proj", "first", "neither a layer nor a range");
    plan_fails("q_proj", "1-", "neither a layer nor a range");
    plan_fails("q_proj", "99999999999999999999", "layers 0 to 2");
}

/* The default of lora.targets. In families whose attention has q_proj it gives the same parameters as the list `same`.
 */
static void default_targets_fit_every_family(void **state)
{
    (void)state;
    static const struct {
        const char *fixture, *same;
    } rows[] = {{"case_a", ALL_TARGETS},
                {"qwen3", ALL_TARGETS},
                {"qwen3_vl", ALL_TARGETS},
                {"olmoe", ALL_TARGETS},
                {"mixtral", ALL_TARGETS},
                {"minimax_m2", ALL_TARGETS},
                {"lfm2", ALL_TARGETS},
                {"glm4", ALL_TARGETS},
                {"qwen3_5", ALL_TARGETS},
                {"qwen3_next", ALL_TARGETS},
                {"glm4_lite", "mixers,experts"},
                {"deepseek_v3", "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj,experts"},
                {"mistral4", "mixers,experts"},
                {"deepseek_v4", "q_a_proj,q_b_proj,kv_proj,o_b_proj,experts"},
                {"nemotron", ALL_TARGETS},

                {"gemma4", ALL_TARGETS}};
    struct config *cfg = mem_alloc(sizeof(*cfg));
    config_defaults(cfg);
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct adapters ad[2];
        struct arch a;
        struct err err = {.msg = ""};
        char name[64];
        snprintf(name, sizeof(name), "parity/%s", rows[i].fixture);
        if (arch_load(&a, fixture(name), &err)) fail_msg("%s", err.msg);
        for (int k = 0; k < 2; k++) {
            const struct lora_options opt = tiny_options(k ? rows[i].same : cfg->lora.targets);
            if (adapters_plan(&ad[k], &a, &opt, &err)) fail_msg("%s: %s", name, err.msg);
        }
        assert_int_equal(ad[0].n_params, ad[1].n_params);
        for (int64_t k = 0; k < ad[0].n_params; k++) {
            const struct lora_param *p = &ad[0].params[k], *q = &ad[1].params[k];
            assert_true(p->target == q->target && p->layer == q->layer && p->off == q->off && p->is_b == q->is_b);
        }
        adapters_free(&ad[0]);
        adapters_free(&ad[1]);
    }
    mem_free(cfg);
}

static void bad_numbers_are_refused(void **state)
{
    (void)state;
    static const struct {
        int64_t r;
        double alpha, dropout;
        const char *word;
    } rows[] = {{0, 1, 0, "lora.r"},        {-4, 1, 0, "lora.r"},      {65537, 1, 0, "lora.r"},
                {1, 0, 0, "lora.alpha"},    {1, NAN, 0, "lora.alpha"}, {1, 1, 1, "lora.dropout"},
                {1, 1, NAN, "lora.dropout"}};
    struct arch a = tiny_arch();
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct lora_options opt = tiny_options("q_proj");
        struct adapters ad;
        struct err err = {.msg = ""};
        opt.r = rows[i].r, opt.alpha = rows[i].alpha, opt.dropout = rows[i].dropout;
        assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
        assert_non_null(strstr(err.msg, rows[i].word));
    }
    struct lora_options opt = tiny_options("experts");
    struct adapters ad;
    struct err err;
    a.n_exp = 0;
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
    assert_non_null(strstr(err.msg, "matches nothing"));
    opt.targets = "q_proj,shared_experts";
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
    assert_non_null(strstr(err.msg, "has no shared experts"));
}

/* The shared experts of a layer are three Linears; gate and up share a product. */
static void shared_experts_have_three_targets(void **state)
{
    (void)state;
    static const struct tensor_names names = {.shared = "mlp.shared_experts"};
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("shared_experts");
    struct tiny t;
    char module[LORA_MODULE_TEXT];
    a.names = &names;
    a.d_shared = 7;
    for (int64_t l = 1; l < a.n_layer; l++) a.ffn[l] = &ffn_shared;
    opt.ranks = "shared_up_proj=1";
    tiny_open(&t, &a, &opt, "fp32");
    assert_int_equal(t.ad.n_params, 2 * 6);
    assert_true(!t.ad.layer_on[0] && t.ad.layer_on[1] && t.ad.lowest_layer == 1);
    static const struct {
        enum lora_target target;
        int64_t rank, n_in, n_out;
        const char *module;
    } rows[] = {{LORA_SHARED_GATE, 2, 8, 7, "mlp.shared_experts.gate_proj"},
                {LORA_SHARED_UP, 1, 8, 7, "mlp.shared_experts.up_proj"},
                {LORA_SHARED_DOWN, 2, 7, 8, "mlp.shared_experts.down_proj"}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        const struct lora_param *pa = adapters_find(adapters_logical(&t.ad), 1, rows[i].target, false);
        const struct lora_param *pb = adapters_find(adapters_logical(&t.ad), 1, rows[i].target, true);
        assert_true(pa && pb && pa->n_exp == 1 && !pa->experts && pa->rows == rows[i].rank && pa->cols == rows[i].n_in);
        assert_true(pb->rows == rows[i].n_out && pb->cols == rows[i].rank);
        lora_target_module(t.ad.names, rows[i].target, module);
        assert_string_equal(module, rows[i].module);
        assert_false(lora_target_is_stack(rows[i].target));
    }
    const struct lora *up = &t.ad.layers[1].of[MIXER_PRODUCTS + 2].lora;
    assert_true(up->n_seg == 2 && up->seg_first[1] == 7 && up->seg_cols[1] == 7);
    tiny_close(&t);
}

static void parameter_layout(void **state)
{
    (void)state;
    /* r 2: a [2, in], b [out, 2]; groups from multiples of 64. */
    static const struct {
        enum lora_target target;
        bool is_b;
        int64_t off, n_exp, rows, cols;
    } rows[] = {
        {LORA_Q, 0, 0, 1, 2, 8},     {LORA_K, 0, 16, 1, 2, 8},     {LORA_V, 0, 32, 1, 2, 8},
        {LORA_Q, 1, 64, 1, 12, 2},   {LORA_K, 1, 88, 1, 6, 2},     {LORA_V, 1, 100, 1, 6, 2},
        {LORA_O, 0, 128, 1, 2, 12},  {LORA_O, 1, 192, 1, 8, 2},    {LORA_UP, 0, 256, 3, 2, 8},
        {LORA_UP, 1, 320, 3, 10, 2}, {LORA_DOWN, 0, 384, 3, 2, 5}, {LORA_DOWN, 1, 448, 3, 8, 2},
    };
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(" experts, q_proj ,k_proj,v_proj,o_proj");
    struct adapters ad;
    struct err err;
    opt.layers = "2, 0";
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), 0);
    assert_int_equal(ad.n_params, 24);
    assert_int_equal(ad.n_flat, 2 * 512);
    assert_int_equal(ad.n_values, 2 * (48 + 48 + 24 + 16 + 48 + 60 + 30 + 48));
    assert_int_equal(ad.lowest_layer, 0);
    assert_false(ad.layer_on[1]);
    for (int64_t i = 0; i < ad.n_params; i++) {
        const struct lora_param *p = &ad.params[i];
        assert_int_equal(p->layer, i < 12 ? 0 : 2);
        assert_int_equal(p->target, rows[i % 12].target);
        assert_int_equal(p->is_b, rows[i % 12].is_b);
        assert_int_equal(p->off, rows[i % 12].off + i / 12 * 512);
        assert_int_equal(p->n_exp, rows[i % 12].n_exp);
        assert_int_equal(p->rows, rows[i % 12].rows);
        assert_int_equal(p->cols, rows[i % 12].cols);
    }
    char name[64];
    lora_param_name(&ad.params[21], name);
    assert_string_equal(name, "layers.2.gate_up_proj.lora_B");
    adapters_free(&ad);
}

static void assert_view(struct tensor x, struct tensor flat, int64_t off, int64_t n, int64_t rows, int64_t cols)
{
    assert_ptr_equal(x.data, (char *)flat.data + off * dtype_size(flat.dtype));
    assert_int_equal(x.dtype, flat.dtype);
    assert_int_equal(x.ndim, n ? 3 : 2);
    if (n) assert_int_equal(x.shape[0], n);
    assert_int_equal(x.shape[x.ndim - 2], rows);
    assert_int_equal(x.shape[x.ndim - 1], cols);
    assert_int_equal(x.ld, cols);
}

static void views_show_the_arrays(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("k_proj,v_proj,o_proj,down_proj");
    struct tiny t;
    opt.layers = "1-2";
    opt.dropout = 0.25;
    opt.rslora = true;
    tiny_open(&t, &a, &opt, "fp32");
    struct tensor param = t.ad.opt.param, grad = t.ad.opt.grad;
    const struct layer_weights w[] = {tiny_layer(&t, 0), tiny_layer(&t, 1), tiny_layer(&t, 2)}, *l = &w[1];
    assert_ptr_equal(t.ad.working.data, param.data);
    assert_int_equal(t.ad.lowest_layer, 1);
    assert_int_equal(l->attention.qkv.lora.n_seg, 2);
    assert_int_equal(l->attention.qkv.lora.seg_first[0], 12);
    assert_int_equal(l->attention.qkv.lora.seg_cols[0], 6);
    assert_int_equal(l->attention.qkv.lora.seg_first[1], 18);
    assert_int_equal(l->attention.qkv.lora.seg_cols[1], 6);
    assert_view(l->attention.qkv.lora.a, param, 0, 0, 4, 8);
    assert_view(l->attention.qkv.lora.b, param, 64, 0, 12, 2);
    assert_view(l->attention.qkv.grad.a, grad, 0, 0, 4, 8);
    assert_view(l->attention.qkv.grad.b, grad, 64, 0, 12, 2);
    assert_view(l->attention.out.lora.a, param, 128, 0, 2, 12);
    assert_view(l->attention.out.grad.b, grad, 192, 0, 8, 2);
    assert_view(l->down.lora.a, param, 256, 3, 2, 5);
    assert_view(l->down.lora.b, param, 320, 3, 8, 2);
    assert_view(w[2].down.grad.b, grad, 384 + 320, 3, 8, 2);
    assert_int_equal(l->up.lora.r, 0);
    assert_int_equal(l->up.lora.a.ndim, 0);
    assert_int_equal(l->up.grad.b.ndim, 0);
    assert_int_equal(w[0].attention.qkv.lora.r, 0);
    assert_int_equal(w[0].attention.out.grad.a.ndim, 0);
    assert_close(l->down.lora.scale[0], 6 / sqrt(2.0), 1e-6);
    assert_close(l->attention.qkv.lora.dropout, 0.25, 0);
    assert_close(l->attention.out.lora.dropout, 0.25, 0);
    assert_close(l->down.lora.dropout, 0, 0); /* PEFT supports no dropout on experts */
    tiny_close(&t);
}

static void dry_run_counts_the_exact_bytes(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS);
    struct tiny t;
    struct device measure;
    tiny_open(&t, &a, &opt, "bf16");
    assert_ptr_not_equal(t.ad.working.data, t.ad.opt.param.data);
    int64_t used = t.dev.state.used;
    device_dry_run(&measure, &t.dev);
    adapters_alloc(&t.ad, &measure, &a);
    assert_int_equal(measure.state.peak, used);
    assert_true(used >= 5 * 3 * 512 * 4);
    assert_int_equal(tiny_layer(&t, 0).up.lora.b.ndim, 3);
    assert_null(tiny_layer(&t, 0).up.lora.b.data);
    adapters_init(&t.ad, &measure, 1);
    tiny_close(&t);
}

/* The masters after adapters_init with a seed; the caller frees them with mem_free. */
static float *first_values(const char *targets, uint64_t seed, const char *dtype, struct tiny *t)
{
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(targets);
    opt.r = 4;
    a.d_model = 500;
    a.d_ff = 300;
    tiny_open(t, &a, &opt, dtype);
    adapters_init(&t->ad, &t->dev, seed);
    float *values = mem_array(t->ad.n_flat, sizeof(*values));
    device_get_f32(&t->dev, values, t->ad.opt.param);
    return values;
}

static void initial_values_are_uniform(void **state)
{
    (void)state;
    struct tiny t;
    float *values = first_values(ALL_TARGETS, 7, "fp32", &t);
    double all = 0, sum = 0;
    for (int64_t i = 0; i < t.ad.n_flat; i++) all += fabs((double)values[i]);
    for (int64_t i = 0; i < t.ad.n_params; i++) {
        const struct lora_param *p = &t.ad.params[i];
        int64_t n = lora_param_count(p);
        double mean = 0, square = 0, most = 0, bound = 1 / sqrt((double)p->cols);
        for (int64_t j = 0; j < n; j++) {
            double v = (double)values[p->off + j];
            mean += v / (double)n;
            square += v * v / (double)n;
            most = fmax(most, fabs(v));
            sum += fabs(v);
        }
        if (p->is_b) {
            assert_true(most == 0);
            continue;
        }
        if (p->cols < 300) continue; /* o_proj's input is narrow: too few values for statistics */
        assert_true(most <= bound * (1 + 1e-6));
        assert_true(most > bound * 0.98);
        assert_true(fabs(mean) < bound * 5 / sqrt(3.0 * (double)n));
        assert_close(square / (bound * bound / 3), 1, 0.12);
    }
    assert_close(sum, all, 1e-12); /* zeros between the parameters */
    mem_free(values);
    tiny_close(&t);
}

static void initial_values_depend_only_on_name_and_seed(void **state)
{
    (void)state;
    static const char *const subsets[] = {"v_proj", "gate_up_proj", "q_proj,down_proj", ALL_TARGETS};
    struct tiny all, some;
    float *want = first_values(ALL_TARGETS, 7, "fp32", &all);
    for (int64_t s = 0; s < MT_LEN(subsets); s++) {
        float *got = first_values(subsets[s], 7, s % 2 ? "oracle" : "fp32", &some);
        int64_t seen = 0;
        for (int64_t i = 0; i < some.ad.n_params; i++)
            for (int64_t j = 0; j < all.ad.n_params; j++) {
                const struct lora_param *p = &some.ad.params[i], *q = &all.ad.params[j];
                if (p->layer != q->layer || p->target != q->target || p->is_b != q->is_b) continue;
                assert_memory_equal(got + p->off, want + q->off, (size_t)lora_param_count(p) * sizeof(float));
                seen++;
            }
        assert_int_equal(seen, some.ad.n_params);
        mem_free(got);
        tiny_close(&some);
    }
    float *other = first_values(ALL_TARGETS, 8, "fp32", &some);
    for (int64_t i = 0; i < all.ad.n_params; i++)
        if (!all.ad.params[i].is_b) assert_true(want[all.ad.params[i].off] != other[all.ad.params[i].off]);
    tiny_close(&some);
    tiny_close(&all);
    mem_free(other);
    mem_free(want);
}

static void working_copies_are_rounded(void **state)
{
    (void)state;
    struct tiny t;
    float *values = first_values(ALL_TARGETS, 7, "bf16", &t), *copy = mem_array(t.ad.n_flat, sizeof(*copy));
    device_get_f32(&t.dev, copy, t.ad.working);
    int64_t changed = 0;
    for (int64_t i = 0; i < t.ad.n_flat; i++) {
        assert_true(copy[i] == bf16_to_f32(f32_to_bf16(values[i])));
        changed += copy[i] != values[i];
    }
    assert_true(changed > 1000);
    mem_free(copy);
    mem_free(values);
    tiny_close(&t);
}

static void table_lists_the_trained_targets(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("o_proj,gate_up_proj");
    struct adapters ad;
    struct err err;
    opt.layers = "0-1";
    opt.dropout = 0.1;
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), 0);
    char *text = lora_table(&ad, &a);
    /* per layer: o [2,12] + [8,2], gate_up 3 x ([2,8] + [10,2]); base: 2*50*8 + 3*(24 + 96 + 48 + 48 + 96 + 240 + 120)
     */
    static const char *const words[] = {"r 2, alpha 6, scale 3, dropout 0.1 on attention",
                                        "[2, 12]",
                                        "[8, 2]",
                                        " 80\n",
                                        "3 x [2, 8]",
                                        "3 x [10, 2]",
                                        " 216\n",
                                        "2 of 3 layers, 296 parameters = 10.5 %"};
    for (int64_t i = 0; i < MT_LEN(words); i++)
        if (!strstr(text, words[i])) fail_msg("\"%s\" is not in\n%s", words[i], text);
    assert_null(strstr(text, "q_proj"));
    mem_free(text);
    adapters_free(&ad);
    adapters_free(&ad);
}

int test_lora(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_targets_fit_every_family),
        cmocka_unit_test(unknown_targets_are_errors),
        cmocka_unit_test(shared_experts_have_three_targets),
        cmocka_unit_test(bad_numbers_are_refused),
        cmocka_unit_test(parameter_layout),
        cmocka_unit_test(views_show_the_arrays),
        cmocka_unit_test(dry_run_counts_the_exact_bytes),
        cmocka_unit_test(initial_values_are_uniform),
        cmocka_unit_test(initial_values_depend_only_on_name_and_seed),
        cmocka_unit_test(working_copies_are_rounded),
        cmocka_unit_test(table_lists_the_trained_targets),
    };
    return cmocka_run_group_tests_name("lora", tests, NULL, NULL);
}
