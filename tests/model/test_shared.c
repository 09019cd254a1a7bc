/* test_shared.c - whole models with shared experts, sigmoid routers and partial RoPE: gradients, with and without a
 * gate per token; adapters of shared experts and dense layers in PEFT's files; exports; tensors of multi-token
 * prediction. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "tests/process.h"
#include "tests/test.h"
#include "tests/whole_model.h"
#include "train/adapter/peft.h"
#include "train/run/run.h"

#define TARGETS "mixers,experts,shared_experts,dense"

static struct config case_config(const char *model, const char *targets)
{
    struct config cfg;
    config_defaults(&cfg);
    snprintf(cfg.model.path, sizeof(cfg.model.path), "%s", model);
    snprintf(cfg.lora.targets, sizeof(cfg.lora.targets), "%s", targets);
    cfg.data.seq_len = 16;
    cfg.train.device = CFG_DEVICE_CPU;
    return cfg;
}

/* ---- the gradient */

/* Writes the fixture with a gate of the shared experts and a tensor of a layer of multi-token prediction, packed or
 * not. */
static const char *gated_model(bool config_says, bool packed)
{
    static struct st_entry entries[600];
    static char names[16][96];
    static float values[16][64];
    struct safetensors st;
    struct err err = {.msg = ""};
    char path[MT_PATH];
    int64_t n = 0, size;
    int n_names = 0;
    if (safetensors_open(&st, fixture("parity/glm4"), &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < st.n_tensors; i++) {
        const struct st_tensor *t = &st.tensors[i];
        entries[n] = (struct st_entry){.name = t->name, .dtype = t->dtype, .ndim = t->ndim, .data = t->data};
        memcpy(entries[n++].shape, t->shape, sizeof(t->shape));
    }
    for (int l = 1; l <= 3; l++) {
        for (int i = 0; i < 40; i++) values[l][i] = (float)test_value(40 + (uint64_t)l, (uint64_t)i);
        snprintf(names[n_names], 96, "model.layers.%d.%s", l, l == 3 ? "eh_proj.weight" : "mlp.shared_gate.weight");
        entries[n++] = (struct st_entry){.name = names[n_names++],
                                         .dtype = l == 3 && packed ? DT_U8 : DT_F32,
                                         .ndim = 2,
                                         .shape = {1, 40},
                                         .data = values[l]};
    }
    const char *dir = scratch_dir();
    snprintf(path, sizeof(path), "%s/config.json", fixture("parity/glm4"));
    char *text = file_read(path, 1 << 20, &size, &err), *key = strstr(text, "\"num_nextn_predict_layers\": 0");
    assert_non_null(key);
    if (config_says) key[strlen("\"num_nextn_predict_layers\": ")] = '1';
    snprintf(path, sizeof(path), "%s/config.json", dir);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    if (safetensors_write(path, entries, n, &err)) fail_msg("%s", err.msg);
    mem_free(text);
    for (int i = 0; i < 2; i++) {
        const char *file = i ? "tokenizer_config.json" : "tokenizer.json";
        snprintf(path, sizeof(path), "%s/%s", fixture("parity/glm4"), file);
        text = file_read(path, 1 << 20, &size, &err);
        snprintf(path, sizeof(path), "%s/%s", dir, file);
        assert_int_equal(file_write_atomic(path, text, size, &err), 0);
        mem_free(text);
    }
    safetensors_close(&st);
    return dir;
}

/* Compares the F64 loss along a random direction with the gradient; the step keeps the choice of experts. */
static double check_slope(struct config *cfg, bool gated)
{
    struct tensor_names names;
    struct run r;
    struct err err = {.msg = ""};
    if (run_open_headers(&r, cfg, &err)) fail_msg("%s", err.msg);
    names = *r.arch.names;
    names.shared_gate = "mlp.shared_gate";
    if (gated) r.arch.names = &names, r.arch.shared_gate = true;
    device_open_oracle(&r.dev);
    if (run_open_model(&r, NULL, PLAN_TRAIN, &err)) fail_msg("%s", err.msg);
    struct adapters *ad = &r.model.adapters;
    const int64_t n = ad->n_flat;
    double *x = mem_array(4 * n, sizeof(*x)), *g = x + n, *dir = x + 2 * n, *at = x + 3 * n, slope = 0, loss[2];
    device_get(&r.dev, x, ad->opt.param);
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        for (int64_t j = p->off; j < p->off + lora_param_count(p); j++) {
            x[j] += 0.1 * test_value(31, (uint64_t)j);
            dir[j] = test_value(32, (uint64_t)j);
        }
    }
    device_set(&r.dev, ad->opt.param, x);
    adapters_refresh(ad, &r.dev);
    const double value = whole_model_loss_of_12(&r.model, g);
    for (int64_t i = 0; i < n; i++) slope += g[i] * dir[i];
    for (int s = 0; s < 2; s++) {
        for (int64_t i = 0; i < n; i++) at[i] = x[i] + (s ? 1e-6 : -1e-6) * dir[i];
        device_set(&r.dev, ad->opt.param, at);
        adapters_refresh(ad, &r.dev);
        loss[s] = whole_model_loss_of_12(&r.model, NULL);
    }
    const double numeric = (loss[1] - loss[0]) / 2e-6;
    if (!(fabs(slope - numeric) <= 1e-6 * fabs(numeric))) fail_msg("slope %.9g, not %.9g", slope, numeric);
    mem_free(x);
    run_close(&r);
    return value;
}

/* Recomputation gives the same loss; the gate changes it. */
static void test_gradient(void **state)
{
    (void)state;
    struct config cfg = case_config(gated_model(true, false), TARGETS);
    double value[2];
    for (int gated = 0; gated < 2; gated++) {
        cfg.train.recompute = CFG_RECOMPUTE_NONE;
        value[gated] = check_slope(&cfg, gated);
        cfg.train.recompute = CFG_RECOMPUTE_FULL;
        assert_close(check_slope(&cfg, gated), value[gated], 0);
        cfg.train.recompute = CFG_RECOMPUTE_SELECTIVE;
        assert_close(check_slope(&cfg, gated), value[gated], 0);
    }
    assert_true(value[0] != value[1]);
}

static void test_aux_is_refused(void **state)
{
    (void)state;
    struct config cfg = case_config(fixture("parity/glm4"), TARGETS);
    struct run r;
    struct err err = {.msg = ""};
    cfg.train.aux_loss_coef = 0.01;
    if (run_open_headers(&r, &cfg, &err)) fail_msg("%s", err.msg);
    assert_int_equal(run_open_model(&r, NULL, PLAN_TRAIN, &err), -1);
    assert_non_null(strstr(err.msg, "train.aux_loss_coef = 0.01: a correction bias balances the router of glm4_moe"));
    run_close(&r);
}

/* ---- tensors of multi-token prediction */

static void test_prediction_is_ignored(void **state)
{
    (void)state;
    for (int says = 0; says < 2; says++) {
        struct config cfg = case_config(gated_model(says, false), "q_proj");
        struct run r;
        struct err err = {.msg = ""};
        if (run_open_headers(&r, &cfg, &err) || run_open_model(&r, NULL, PLAN_TRAIN, &err)) fail_msg("%s", err.msg);
        assert_int_equal(r.model.weights.n_unused, says ? 2 : 3); /* the two gates, which this family does not have */
        assert_int_equal(arch_is_prediction(&r.arch, "model.layers.3.eh_proj.weight"), says);
        assert_false(arch_is_prediction(&r.arch, "model.layers.2.mlp.gate.weight"));
        assert_false(arch_is_prediction(&r.arch, "model.norm.weight"));
        run_close(&r);
    }
}

/* model.quantize packs the shared experts, the dense layer and the routed experts. */
static void test_packing(void **state)
{
    (void)state;
    struct config cfg = case_config(gated_model(true, false), TARGETS);
    struct run r;
    struct err err = {.msg = ""};
    cfg.model.quantize = CFG_QUANTIZE_NF4;
    if (run_open_headers(&r, &cfg, &err) || run_open_model(&r, NULL, PLAN_TRAIN, &err)) fail_msg("%s", err.msg);
    const struct layer_weights *dense = &r.model.weights.layers[0], *shared = &r.model.weights.layers[1];
    assert_true(dense->up.w.format == WF_NF4 && dense->down.w.format == WF_NF4 && !dense->shared_up.w.n_out);
    assert_true(shared->up.w.format == WF_NF4 && shared->shared_up.w.format == WF_NF4);
    assert_true(shared->shared_down.w.format == WF_NF4 && shared->shared_up.w.n_out == 48);
    assert_true(shared->attention.qkv.w.format == WF_BF16 && shared->router.format == WF_BF16);
    assert_true(shared->attention.qkv.bias.ndim == 1 && !shared->attention.out.bias.ndim &&
                shared->router_bias.ndim == 1);
    run_close(&r);
}

/* ---- ranks */

static const char *train(const char *parallel)
{
    const char *config = process_config(parallel);
    char model[MT_PATH], data[MT_PATH], held_out[MT_PATH];
    snprintf(model, sizeof(model), "model.path=%s", fixture("parity/glm4"));
    snprintf(data, sizeof(data), "data.train=%s/train.jsonl", fixture("parity/glm4"));
    snprintf(held_out, sizeof(held_out), "data.eval=%s/eval.jsonl", fixture("parity/glm4"));
    if (RUN(config, "--set", model, "--set", data, "--set", held_out, "--set", "lora.targets=" TARGETS, "--set",
            "train.steps=2", "--set", "train.grad_accum=2", "--set", "lora.dropout=0.1", "--set", "train.threads=1"))
        fail_msg("%s", said.err);
    return config;
}

/* Shared experts are computed on the token's rank, routed ones on any. */
static void test_ranks(void **state)
{
    (void)state;
    const char *one = train("[parallel]\ncpu_ranks = 1\n");
    assert_true(adapter_error(train("[parallel]\ncpu_ranks = 2\nep = 2\n"), one) < 1e-4);
}

/* ---- files */

static void expect_tensor(const struct safetensors *st, const char *name, int64_t rows, int64_t cols)
{
    const struct st_tensor *t = safetensors_find(st, name);
    if (!t) fail_msg("%s is missing", name);
    assert_true(t->ndim == 2 && t->shape[0] == rows && t->shape[1] == cols);
}

/* Trains two steps from the adapter of PEFT, and exports; every export is read back and compared by `export`. */
static void test_files(void **state)
{
    (void)state;
    static const char *const formats[] = {"peft", "vllm", "gguf", "merged-bf16", "merged-fp8"};
    const char *model = gated_model(true, false), *of = fixture("parity/glm4"), *dir = scratch_dir();
    char path[MT_PATH], run[MT_PATH], out[MT_PATH], text[4 * MT_PATH];
    struct safetensors st;
    struct err err = {.msg = ""};
    snprintf(run, sizeof(run), "%s/run", dir);
    snprintf(path, sizeof(path), "%s/case.ini", dir);
    snprintf(text, sizeof(text),
             "[model]\npath = %s\n[data]\ntrain = %s/train.jsonl\neval = %s/eval.jsonl\nformat = text\nseq_len = 48\n"
             "[lora]\nr = 4\nalpha = 16\ntargets = mixers,experts,shared_experts\ninit_from = %s/adapter_init\n"
             "rank_pattern =\n[train]\ndevice = cpu\ndtype = fp32\nsteps = 2\n[log]\nreport = false\n"
             "[output]\ndir = %s\n",
             model, of, of, of, run);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
    if (RUN(path)) fail_msg("%s", said.err);
    for (int i = 0; i < MT_LEN(formats); i++) {
        snprintf(out, sizeof(out), "%s/%s", dir, formats[i]);
        if (RUN("export", path, "--to", formats[i], "--out", out)) fail_msg("%s: %s", formats[i], said.err);
    }
    snprintf(out, sizeof(out), "%s/peft", dir);
    static char config[1 << 14];
    assert_int_equal(str_format(path, sizeof(path), &err, "path", "%s/adapter_config.json", out), 0);
    process_read(path, config, sizeof(config));
    assert_non_null(strstr(config, "\"mlp.shared_experts.gate_proj.weight\""));
    assert_non_null(strstr(config, "\"mlp.experts.down_proj\""));
    snprintf(out, sizeof(out), "%s/peft/adapter_model.safetensors", dir);
    if (safetensors_open(&st, out, &err)) fail_msg("%s", err.msg);
#define KEY "base_model.model.model.layers.1.mlp.shared_experts."
    expect_tensor(&st, KEY "gate_proj.lora_A.weight", 4, 40);
    expect_tensor(&st, KEY "up_proj.lora_B.weight", 24, 4);
    expect_tensor(&st, KEY "down_proj.lora_A.weight", 4, 24);
    assert_null(safetensors_find(&st, "base_model.model.model.layers.0.mlp.shared_experts.gate_proj.lora_A.weight"));
    safetensors_close(&st);
    snprintf(out, sizeof(out), "%s/merged-bf16", dir);
    if (safetensors_open(&st, out, &err)) fail_msg("%s", err.msg);
    expect_tensor(&st, "model.layers.3.eh_proj.weight", 1, 40); /* copied */
    expect_tensor(&st, "model.layers.2.mlp.shared_experts.up_proj.weight", 24, 40);
    safetensors_close(&st);
    snprintf(path, sizeof(path), "%s/case.ini", dir);
    snprintf(text, sizeof(text), "model.path=%s", gated_model(true, true));
    snprintf(out, sizeof(out), "%s/without", dir);
    if (RUN("export", path, "--set", text, "--to", "merged-bf16", "--out", out)) fail_msg("%s", said.err);
    assert_says(said.err, "multi-token prediction is quantised: the export leaves out its 1 tensor");
    if (safetensors_open(&st, out, &err)) fail_msg("%s", err.msg);
    assert_null(safetensors_find(&st, "model.layers.3.eh_proj.weight"));
    safetensors_close(&st);
}

/* Adapters of a dense layer: names that PEFT accepts, since mlp.gate_proj alone matches no module there; every export,
 * read back and compared. */
static void test_dense_files(void **state)
{
    (void)state;
    static const char *const formats[] = {"peft", "vllm", "gguf", "merged-bf16", "merged-fp8"};
    static char text[1 << 14];
    const char *ini = process_output(train(""), "config.ini"), *at;
    char out[MT_PATH], path[MT_PATH + 64];
    struct safetensors st;
    struct err err = {.msg = ""};
    for (int i = 0; i < MT_LEN(formats); i++) {
        snprintf(out, sizeof(out), "%s/%s", scratch_dir(), formats[i]);
        if (RUN("export", ini, "--to", formats[i], "--out", out)) fail_msg("%s: %s", formats[i], said.err);
        if (i > 1) continue;
        snprintf(path, sizeof(path), "%s/adapter_config.json", out);
        process_read(path, text, sizeof(text));
        at = strstr(text, i ? "\"gate_proj\"" : "\"mlp.gate_proj.weight\"");
        assert_non_null(at);
        assert_null(strstr(at + 1, "\"gate_proj\"")); /* dense, shared and routed experts have one name in vLLM */
        snprintf(path, sizeof(path), "%s/adapter_model.safetensors", out);
        if (safetensors_open(&st, path, &err)) fail_msg("%s", err.msg);
        expect_tensor(&st, "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight", 2, 40);
        expect_tensor(&st, "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight", 40, 2);
        assert_null(safetensors_find(&st, "base_model.model.model.layers.1.mlp.gate_proj.lora_A.weight"));
        safetensors_close(&st);
    }
}

int test_shared(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradient),
        cmocka_unit_test(test_aux_is_refused),
        cmocka_unit_test(test_prediction_is_ignored),
        cmocka_unit_test(test_packing),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_dense_files),
    };
    return cmocka_run_group_tests_name("shared", tests, NULL, NULL);
}
