/* test_dora.c - lora.dora in whole models and runs: gradients, initial magnitudes, continued runs, ranks, packed
 * weights, a teacher, exports, errors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/safetensors.h"
#include "tests/process.h"
#include "tests/whole_model.h"

#define TARGETS "lora.dora=true lora.targets=q_proj,v_proj,o_proj "

/* Biases, shared experts, latent attention, gated DeltaNet, compressed attention. */
static const char *const cases[][2] = {{"parity/glm4", "dora:mixers"},
                                       {"parity/qwen3_5", "dora:q_proj,v_proj,out_proj"},
                                       {"parity/deepseek_v3", "dora:q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj"},
                                       {"parity/deepseek_v4", "dora:mixers"}};

static void slopes(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct run r;
        struct config cfg;
        whole_model_open(&r, &cfg, fixture(cases[i][0]), cases[i][1], CFG_RECOMPUTE_NONE);
        assert_true(r.model.adapters.dora);
        whole_model_check_slopes(&r);
        run_close(&r);
    }
}

static void recomputation(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) whole_model_check_recomputation(fixture(cases[i][0]), cases[i][1]);
}

static void packed_documents(void **state)
{
    (void)state;
    whole_model_check_packing(fixture(cases[0][0]), cases[0][1]);
}

static void open_adapter(struct safetensors *st, const char *config)
{
    struct err err;
    if (safetensors_open(st, process_output(config, ADAPTER), &err)) fail_msg("%s", err.msg);
}

static float at(const struct st_tensor *t, int64_t i)
{
    float v;
    memcpy(&v, t->data + 4 * i, 4);
    return v;
}

/* The loss in the last line of metrics.jsonl with this event. */
static double last_loss(const char *config, const char *event)
{
    static char text[1 << 16];
    char begin[64];
    const char *line = NULL;
    snprintf(begin, sizeof(begin), "{\"event\":\"%s\"", event);
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    for (const char *s = text; (s = strstr(s, begin)); s++) line = s;
    const char *loss = line ? strstr(line, "\"loss\":") : NULL;
    assert_non_null(loss);
    return strtod(loss + strlen("\"loss\":"), NULL);
}

/* A new adapter's magnitudes are the norms of the rows of W, and its function is that of the base model. */
static void magnitudes_begin_as_norms(void **state)
{
    (void)state;
    struct safetensors st, base;
    struct err err;
    const char *config = process_trained(TARGETS "optim.lr=0 train.steps=1");
    assert_close(last_loss(config, "step"),
                 last_loss(process_trained("lora.targets=q_proj optim.lr=0 train.steps=1"), "step"), 1e-5);
    open_adapter(&st, config);
    if (safetensors_open(&base, fixture("parity/case_a"), &err)) fail_msg("%s", err.msg);
    assert_int_equal(st.n_tensors, 2 * 9);
    const struct st_tensor *m =
        safetensors_find(&st, "base_model.model.model.layers.1.self_attn.v_proj.lora_magnitude_vector");
    const struct st_tensor *w = safetensors_find(&base, "model.layers.1.self_attn.v_proj.weight");
    assert_true(m && w && m->ndim == 1 && m->shape[0] == w->shape[0] && w->dtype == DT_BF16);
    for (int64_t o = 0; o < w->shape[0]; o++) {
        double sum = 0;
        for (int64_t i = 0; i < w->shape[1]; i++) {
            uint16_t bits;
            memcpy(&bits, w->data + 2 * (o * w->shape[1] + i), 2);
            sum += pow((double)bf16_to_f32(bits), 2);
        }
        assert_close((double)at(m, o), sqrt(sum), 1e-6);
    }
    safetensors_close(&base);
    safetensors_close(&st);
}

static void runs_continue(void **state)
{
    (void)state;
    static const char *const kinds[] = {"optim.lr_ratio_b=4 optim.weight_decay=0.1 lora.layers=1", "optim.kind=adamw8",
                                        "parallel.cpu_ranks=2 train.grad_accum=2 parallel.zero=true",
                                        "train.dtype=bf16 distill.teacher=base",
                                        "parallel.cpu_ranks=2 train.grad_accum=2 parallel.ep=2"};
    for (int i = 0; i < MT_LEN(kinds); i++) {
        char four[512], two[512];
        snprintf(four, sizeof(four),
                 TARGETS "%s optim.schedule=constant optim.warmup_ratio=0 output.save_every=1 train.steps=4", kinds[i]);
        snprintf(two, sizeof(two), "%s train.steps=2", four);
        const char *whole = process_trained(four), *parts = process_trained(two);
        assert_int_equal(process_run_sets(parts, four), 0);
        assert_says(said.err, "continuing after step 2 of 4");
        assert_same_output(whole, parts, ADAPTER);
        assert_same_output(whole, parts, "checkpoints/step-000004/optimizer.safetensors");
    }
}

/* lora.init_from, teachers and `eval` read magnitudes. Merged weights include them: the export compares its outputs
 * with the trainer's. */
static void adapters_are_read_and_merged(void **state)
{
    (void)state;
    char sets[MT_PATH + 64];
    const char *config = process_trained(TARGETS "optim.lr=0.05 train.steps=4");
    snprintf(sets, sizeof(sets), TARGETS "optim.lr=0 train.steps=1 lora.init_from=%s",
             process_output(config, "adapter"));
    assert_true(adapter_error(config, process_trained(sets)) <= 0);
    snprintf(sets, sizeof(sets), "lora.targets=q_proj distill.teacher=adapter:%s", process_output(config, "adapter"));
    process_trained(sets);
    assert_int_equal(RUN("eval", config), 0);
    const char *loss = strstr(said.out, "\"loss\":"); /* `eval` uses the norms of the last step, as the run did */
    assert_non_null(loss);
    assert_close(strtod(loss + strlen("\"loss\":"), NULL), last_loss(config, "eval"), 1e-6);
    static const char *const written[] = {"peft", "merged-bf16", "merged-mxfp4", "gguf-model"};
    for (int i = 0; i < MT_LEN(written); i++) {
        if (RUN("export", config, "--to", written[i])) fail_msg("%s: %s", written[i], said.err);
        assert_says(said.err, "written and verified");
    }
    assert_int_equal(RUN("eval", config, "--set", "lora.dora=false", "--set", "quant.weights=int8"), 1);
    assert_says(said.err, "quant.weights or quant.activations with DoRA");
    static const char *const refused[][2] = {{"vllm", "--to vllm: vLLM has no DoRA"},
                                             {"gguf", "--to gguf: llama.cpp has no DoRA"}};
    for (int i = 0; i < MT_LEN(refused); i++) {
        assert_int_equal(RUN("export", config, "--to", refused[i][0]), 1);
        assert_says(said.err, refused[i][1]);
    }
}

static void packed_attention(void **state)
{
    (void)state;
    const char *config = process_config("[lora]\ndora = true\ntargets = q_proj,o_proj\n");
    char model[MT_PATH + 16];
    snprintf(model, sizeof(model), "model.path=%s", fixture("parity/qwen3"));
    if (RUN(config, "--set", model, "--set", "model.quantize=nf4", "--set", "model.quantize_attention=true"))
        fail_msg("%s", said.err);
}

static void combinations_are_errors(void **state)
{
    (void)state;
    const char *config = process_config("[lora]\ndora = true\ntargets = q_proj\n");
    static const char *const rows[][2] = {
        {"lora.init=pissa", "lora.dora and lora.init exclude each other"},
        {"lora.dropout=0.1", "lora.dora and lora.dropout exclude each other"},
        {"quant.weights=int8", "lora.dora and quant.weights or quant.activations exclude each other"},
        {"lora.targets=attention,experts",
         "lora.dora with gate_up_proj in lora.targets: PEFT adapts routed experts as"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(RUN(config, "--set", rows[i][0]), 1);
        assert_says(said.err, rows[i][1]);
    }
    char plain[MT_PATH + 32];
    snprintf(plain, sizeof(plain), "lora.init_from=%s",
             process_output(process_trained("lora.targets=q_proj"), "adapter"));
    assert_int_equal(RUN(config, "--set", plain), 1);
    assert_says(said.err, "lora.dora = false, but true is configured");
}

int test_dora(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slopes),           cmocka_unit_test(recomputation),
        cmocka_unit_test(packed_documents), cmocka_unit_test(magnitudes_begin_as_norms),
        cmocka_unit_test(runs_continue),    cmocka_unit_test(adapters_are_read_and_merged),
        cmocka_unit_test(packed_attention), cmocka_unit_test(combinations_are_errors),
    };
    return cmocka_run_group_tests_name("dora", tests, NULL, NULL);
}
