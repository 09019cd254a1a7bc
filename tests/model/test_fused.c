/* test_fused.c - Qwen3-Next: config.json; fused matrices of gated DeltaNet, whose rows are grouped by key head, in
 * every stored format; the order of rows in files of adapters; gradients, packed documents, ranks, resuming. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "model/layer.h"
#include "model/stored/source.h"
#include "model/stored/unused.h"
#include "tests/checkpoints.h"
#include "tests/process.h"
#include "tests/whole_model.h"

#define CASE    "parity/qwen3_next"
#define TARGETS "q_proj,k_proj,v_proj,o_proj,in_proj_qkvz,in_proj_ba,out_proj,experts,shared_experts"
#define QKVZ    "model.layers.0.linear_attn.in_proj_qkvz"
#define BA      "model.layers.0.linear_attn.in_proj_ba"

/* The sizes of the case: key heads, value heads, their widths. */
enum { KEYS = 3, VALUES = 6, KEY_DIM = 16, VALUE_DIM = 12, HIDDEN = 40 };
enum { GROUP = 2 * KEY_DIM + 2 * VALUES / KEYS * VALUE_DIM, ROWS = KEYS * GROUP };

/* ---- the order of rows */

/* The row of in_proj_qkvz that is row i of q | k | v | z, as in fix_query_key_value_ordering of transformers. */
static int64_t stored_qkvz(int64_t i)
{
    const int64_t k = KEYS * KEY_DIM, v = VALUES * VALUE_DIM, of_group = VALUES / KEYS * VALUE_DIM;
    if (i < k) return i / KEY_DIM * GROUP + i % KEY_DIM;
    if (i < 2 * k) return (i - k) / KEY_DIM * GROUP + KEY_DIM + (i - k) % KEY_DIM;
    const int64_t j = (i - 2 * k) % v, z = i >= 2 * k + v ? of_group : 0;
    return j / of_group * GROUP + 2 * KEY_DIM + z + j % of_group;
}

static void products_of(const struct arch *a, struct product p[LAYER_PRODUCTS]) { layer_products(a, 0, p); }

static void rows_are_grouped_by_key_head(void **state)
{
    (void)state;
    struct product p[LAYER_PRODUCTS];
    struct arch a;
    struct err err = {.msg = ""};
    static const int64_t ba[] = {0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11};
    if (arch_load(&a, fixture(CASE), &err)) fail_msg("%s", err.msg);
    products_of(&a, p);
    assert_true(p[0].n_out == ROWS && p[0].n_target == 1 && p[0].target[0] == LORA_IN_QKVZ);
    assert_true(p[1].n_out == 2 * VALUES && p[1].n_target == 1 && p[1].target[0] == LORA_IN_BA);
    assert_int_equal(p[2].order.n_group, 0);
    for (int64_t i = 0; i < ROWS; i++) {
        assert_int_equal(arch_stored_row(&p[0].order, i), stored_qkvz(i));
        assert_int_equal(arch_row_in_memory(&p[0].order, stored_qkvz(i)), i);
    }
    for (int64_t i = 0; i < MT_LEN(ba); i++) {
        assert_int_equal(arch_stored_row(&p[1].order, i), ba[i]);
        assert_int_equal(arch_row_in_memory(&p[1].order, ba[i]), i);
    }
    assert_int_equal(arch_stored_row(&p[2].order, 7), 7);
}

/* ---- stored formats */

/* The planes of `run` equal those of the rows of the whole matrix from `first` on. */
static void compare_run(const struct source *whole, const struct source *run, int64_t first)
{
    const enum weight_format held[] = {whole->format, source_held(whole, 1, true)};
    for (int i = 0; i < MT_LEN(held); i++) {
        const struct format *to = format_row(held[i], false);
        struct weight a, b;
        char *x = source_read(&a, whole, held[i], 1), *y = source_read(&b, run, held[i], 1);
        for (int p = 0; p < PLANES; p++) {
            const bool shared = to->plane[p].unit == PLANE_SHARED;
            const int64_t row = shared ? 0 : source_bytes(whole, to, p) / whole->n_out;
            if (!to->plane[p].bits) continue;
            assert_memory_equal(b.plane[p], (const char *)a.plane[p] + first * row,
                                (size_t)(shared ? source_bytes(whole, to, p) : run->n_out * row));
        }
        mem_free(x);
        mem_free(y);
    }
}

/* A matrix of 360 x 192 in groups of 120 rows. Blocks of FP8 scales and of nested absmax end inside runs of consecutive
 * rows. */
static void runs_have_their_scales(void **state)
{
    (void)state;
    enum { OUT = 360, IN = 192 };
    static const struct row_order order = {3, {16, 16, 44, 44}};
    static float x[OUT * IN];
    for (int64_t i = 0; i < OUT * IN; i++) x[i] = (float)((double)(1 + i / 5000) * test_value(3, (uint64_t)i));
    for (const struct linear_form *form = linear_forms; form->format; form++) {
        struct draft d;
        struct safetensors st;
        struct source whole;
        struct err err = {.msg = ""};
        int64_t n, row = 0;
        draft_open_case(&d, CASE);
        draft_linear(&d, "x.weight", x, OUT, IN, form);
        if (safetensors_open(&st, draft_save(&d, 1), &err)) fail_msg("%s", err.msg);
        struct checkpoint ck = {.st = &st, .used = mem_array(st.n_tensors, sizeof(bool))};
        if (source_find(&whole, &ck, "x.weight", OUT, IN, &err)) fail_msg("%s", err.msg);
        struct source *runs = source_runs(&whole, &order, &n);
        assert_int_equal(n, 12);
        for (int64_t i = 0; i < n; row += runs[i++].n_out) compare_run(&whole, &runs[i], arch_stored_row(&order, row));
        assert_int_equal(row, OUT);
        mem_free(runs);
        mem_free(ck.used);
        safetensors_close(&st);
        draft_free(&d);
    }
}

/* The case with in_proj_qkvz, and for FP8 in_proj_ba, of the first layer in another format, or with the decoded values
 * in F32. */
static const char *saved_as(struct linear_form form, bool decoded)
{
    struct draft d;
    static const char *const names[] = {QKVZ ".weight", BA ".weight"};
    form.decoded = decoded;
    draft_open_case(&d, CASE);
    for (int i = 0; i < 1 + (form.fp8 != FP8_NONE); i++) {
        float *x = draft_values(&d, names[i]);
        draft_linear(&d, names[i], x, i ? 2 * VALUES : ROWS, HIDDEN, &form);
        mem_free(x);
    }
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

static void formats_load_as_their_values(void **state)
{
    (void)state;
    const struct linear_form fp8 = {.fp8 = FP8_BLOCKS_INV};
    const struct linear_form nested = {.format = WF_NF4, .block = 64, .nested = true};
    assert_same_model(saved_as(fp8, false), saved_as(fp8, true));
    assert_same_model(saved_as(nested, false), saved_as(nested, true));
}

static float *decoded_rows(struct loaded *l)
{
    const struct weight *w = &l->model.weights.layers[0].deltanet.in.w;
    float *x = mem_array(ROWS * HIDDEN, sizeof(*x));
    for (int64_t i = 0; i < ROWS * HIDDEN; i++) x[i] = quant_value(w, 0, i);
    return x;
}

/* model.quantize_attention packs in_proj_qkvz and leaves in_proj_ba: every row stays near its values in the file. */
static void packing_keeps_the_rows(void **state)
{
    (void)state;
    const struct quantize nf4 = {.format = WF_NF4, .attention = true};
    struct loaded l;
    struct draft d;
    draft_open_case(&d, CASE);
    float *file = draft_values(&d, QKVZ ".weight");
    for (int packed = 0; packed < 2; packed++) {
        if (packed)
            loaded_open_as(&l, fixture(CASE), &nf4);
        else
            loaded_open(&l, fixture(CASE));
        const struct layer_weights *w = &l.model.weights.layers[0];
        assert_int_equal(w->deltanet.in.w.format, packed ? WF_NF4 : WF_BF16);
        assert_int_equal(w->deltanet.ba.w.format, WF_BF16);
        assert_int_equal(l.model.weights.n_unused, 0); /* multi-token prediction is known */
        float *x = decoded_rows(&l);
        for (int64_t i = 0; i < ROWS; i++) {
            double diff = 0, sum = 0;
            for (int64_t j = 0; j < HIDDEN; j++) {
                const double want = (double)file[stored_qkvz(i) * HIDDEN + j];
                diff += ((double)x[i * HIDDEN + j] - want) * ((double)x[i * HIDDEN + j] - want);
                sum += want * want;
            }
            if (!(diff <= (packed ? 0.03 : 0) * sum)) fail_msg("row %d: %g of %g", (int)i, diff, sum);
        }
        mem_free(x);
        loaded_close(&l);
    }
    mem_free(file);
    draft_free(&d);
}

/* ---- adapters */

/* A device that pads lora ranks has B in the order of memory; host arrays have the order of the checkpoint. */
static void files_have_the_stored_order(void **state)
{
    (void)state;
    enum { R = 3 };
    const struct lora_options opt = {.r = R, .alpha = 4, .targets = "all-linear", .layers = ""};
    struct arch a;
    struct err err = {.msg = ""};
    if (arch_load(&a, fixture(CASE), &err)) fail_msg("%s", err.msg);
    for (int64_t multiple = 1; multiple <= 8; multiple += 7) {
        struct adapters ad;
        struct device dev, measure;
        if (adapters_plan(&ad, &a, &opt, &err) || device_open(&dev, "cpu", "fp32", &err)) fail_msg("%s", err.msg);
        adapters_layout(&ad, &a, multiple, &parallel_alone);
        device_dry_run(&measure, &dev);
        adapters_alloc(&ad, &measure, &a);
        assert_int_equal(device_reserve(&dev, &dev.state, "state", measure.state.peak, &err), 0);
        adapters_alloc(&ad, &dev, &a);
        const struct adapters *whole = adapters_logical(&ad);
        const struct lora_param *file = adapters_find(whole, 0, LORA_IN_QKVZ, true);
        const struct lora_param *here = adapters_find(&ad, 0, LORA_IN_QKVZ, true);
        float *x = mem_array(whole->n_flat, sizeof(*x)), *back = mem_array(whole->n_flat, sizeof(*x));
        for (int64_t i = 0; i < whole->n_params; i++)
            for (int64_t k = 0; k < lora_param_count(&whole->params[i]); k++)
                x[whole->params[i].off + k] = (float)(2 + test_value(9, (uint64_t)(whole->params[i].off + k)));
        adapters_put(&ad, &dev, ad.opt.param, DT_F32, x);
        adapters_get(&ad, &dev, ad.opt.param, DT_F32, back);
        assert_memory_equal(back, x, (size_t)whole->n_flat * sizeof(*x));
        const float *b = (const float *)ad.opt.param.data + here->off;
        assert_true(file->rows == ROWS && file->cols == R && here->cols == (multiple == 1 ? R : 8));
        for (int64_t i = 0; i < ROWS; i++)
            assert_memory_equal(b + i * here->cols, x + file->off + stored_qkvz(i) * R, R * sizeof(*x));
        mem_free(x);
        mem_free(back);
        adapters_free(&ad);
        device_close(&dev);
    }
}

/* Targets of Qwen3.5, in which the matrices that are fused here are separate. */
static void other_targets_are_refused(void **state)
{
    (void)state;
    const struct lora_options opt = {.r = 2, .alpha = 4, .targets = "o_proj,in_proj_z", .layers = ""};
    struct arch a;
    struct adapters ad;
    struct err err = {.msg = ""};
    if (arch_load(&a, fixture(CASE), &err)) fail_msg("%s", err.msg);
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
    assert_says(err.msg, "\"in_proj_z\" matches nothing: the targets of qwen3_next are");
    assert_says(err.msg, "o_proj, in_proj_qkvz, in_proj_ba, out_proj");
}

/* ---- gradients in F64 */

static void gradients(void **state)
{
    (void)state;
    struct config cfg;
    struct run r;
    whole_model_open(&r, &cfg, fixture(CASE), TARGETS, CFG_RECOMPUTE_NONE);
    whole_model_check_slopes(&r);
    run_close(&r);
}

static void recomputation_and_packing(void **state)
{
    (void)state;
    whole_model_check_recomputation(fixture(CASE), TARGETS);
    whole_model_check_packing(fixture(CASE), TARGETS);
}

/* ---- processes */

static const char *train(const char *parallel, int steps, const char *config)
{
    char model[MT_PATH], data[MT_PATH], held_out[MT_PATH], init[MT_PATH], n[64];
    if (!config) config = process_config(parallel);
    snprintf(model, sizeof(model), "model.path=%s", fixture(CASE));
    snprintf(data, sizeof(data), "data.train=%s/train.jsonl", fixture(CASE));
    snprintf(held_out, sizeof(held_out), "data.eval=%s/eval.jsonl", fixture(CASE));
    snprintf(init, sizeof(init), "lora.init_from=%s/adapter_init", fixture(CASE));
    snprintf(n, sizeof(n), "train.steps=%d", steps);
    if (RUN(config, "--set", model, "--set", data, "--set", held_out, "--set", "lora.targets=" TARGETS, "--set", n,
            "--set", init, "--set", "lora.r=4", "--set", "lora.alpha=16", "--set", "train.grad_accum=2", "--set",
            "lora.dropout=0.1", "--set", "train.threads=1", "--set", "optim.schedule=constant", "--set",
            "optim.warmup_ratio=0", "--set", "output.save_every=1"))
        fail_msg("%s", said.err);
    return config;
}

/* Data parallel, expert parallel and a resumed run; checkpoints are independent of the number of ranks. */
static void ranks_and_resuming(void **state)
{
    (void)state;
    const char *one = train("[parallel]\ncpu_ranks = 1\n", 2, NULL);
    assert_true(adapter_error(train("[parallel]\ncpu_ranks = 2\n", 2, NULL), one) < 1e-4);
    assert_true(adapter_error(train("[parallel]\ncpu_ranks = 2\nep = 2\n", 2, NULL), one) < 1e-4);
    assert_says(said.err, "2 tensors of multi-token prediction (mtp.*) are not used: the adapter does not train it");
    const char *resumed = train("[parallel]\ncpu_ranks = 1\n", 1, NULL);
    train(NULL, 2, resumed);
    assert_says(said.err, "continuing after step 1 of 2");
    assert_same_output(resumed, one, ADAPTER);
    assert_same_output(resumed, one, "checkpoints/step-000002/optimizer.safetensors");
}

/* ---- config.json */

static void config_is_read(void **state)
{
    (void)state;
    static const struct {
        const char *more;
        enum router_kind router;
        int64_t n_dense, n_linear;
    } rows[] = {{"\"eos_token_id\": 1", ROUTER_CHOSEN, 0, 3},
                {"\"norm_topk_prob\": false", ROUTER_PROBABILITY, 0, 3},
                {"\"full_attention_interval\": 2", ROUTER_CHOSEN, 0, 2},
                {"\"intermediate_size\": 32, \"decoder_sparse_step\": 2", ROUTER_CHOSEN, 2, 3},
                {"\"intermediate_size\": 32, \"mlp_only_layers\": [0]", ROUTER_CHOSEN, 1, 3},
                {"\"layer_types\": [\"full_attention\", \"full_attention\", \"linear_attention\", "
                 "\"full_attention\"]",
                 ROUTER_CHOSEN, 0, 1}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        char text[1024];
        struct arch a;
        struct err err = {.msg = ""};
        int64_t n_dense = 0, n_linear = 0;
        snprintf(text, sizeof(text),
                 "{\"model_type\": \"qwen3_next\", \"num_hidden_layers\": 4, \"hidden_size\": 64, "
                 "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"num_experts\": 6, "
                 "\"num_experts_per_tok\": 3, \"moe_intermediate_size\": 16, "
                 "\"shared_expert_intermediate_size\": 24, \"vocab_size\": 128, %s}",
                 rows[i].more);
        struct json_doc *doc = json_parse(text, (int64_t)strlen(text), "config.json", &err);
        if (!doc || arch_parse(&a, json_root(doc), &err)) fail_msg("%s", err.msg);
        json_free(doc);
        assert_true(a.attn_gate && a.norm_plus_one && a.shared_gate && a.delta.fused && !a.nested);
        assert_true(a.attn[0].head_dim == 256 && a.rope[0].width == 64 && a.delta.shape.n_value == 32 &&
                    a.delta.n_tap == 4);
        for (int l = 0; l < 4; l++) n_dense += a.dense[l], n_linear += a.mixer[l] == &mixer_deltanet;
        assert_true(a.router.kind == rows[i].router && n_dense == rows[i].n_dense && n_linear == rows[i].n_linear);
    }
}

int test_fused(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_grouped_by_key_head),
        cmocka_unit_test(runs_have_their_scales),
        cmocka_unit_test(formats_load_as_their_values),
        cmocka_unit_test(packing_keeps_the_rows),
        cmocka_unit_test(files_have_the_stored_order),
        cmocka_unit_test(other_targets_are_refused),
        cmocka_unit_test(gradients),
        cmocka_unit_test(recomputation_and_packing),
        cmocka_unit_test(ranks_and_resuming),
        cmocka_unit_test(config_is_read),
    };
    return cmocka_run_group_tests_name("fused", tests, NULL, NULL);
}
