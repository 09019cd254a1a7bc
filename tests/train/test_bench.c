/* test_bench.c - `moetrain bench` on the CPU: the tables of `step` and `ops`, JSON, sizes, errors; the checkpoint in
 * memory. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json/json.h"
#include "tests/op_check.h"
#include "tests/process.h"
#include "train/synth/synth.h"

#define SMALL "--device", "cpu", "--threads", "2", "--tokens", "64", "--seq", "32", "--steps", "2", "--rank", "4"

static double number(struct json j, const char *key)
{
    struct err err;
    double v = NAN;
    if (json_get_f64(j, key, &v, &err)) fail_msg("%s", err.msg);
    return v;
}

/* Number of calls of an op, summed over its rows; checks every row. */
static double calls(struct json root, const char *op)
{
    const struct json rows = json_find(root, "ops");
    double n = 0;
    for (int64_t i = 0; i < json_count(rows); i++) {
        const struct json row = json_at(rows, i);
        const char *name;
        struct err err;
        assert_int_equal(json_get_str(row, "op", &name, &err), 0);
        assert_true(number(row, "us") >= 0 && number(row, "bytes") >= 0 && number(row, "floor_us") >= 0);
        if (!strcmp(name, op)) n += number(row, "calls");
    }
    return n;
}

static void test_ops(void **state)
{
    (void)state;
    struct err err;
    assert_int_equal(RUN("bench", "ops", "--arch", "gpt-oss-tiny", "--recompute", "none", "--json", SMALL), 0);
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "bench", &err);
    if (!doc) fail_msg("%s", err.msg);
    struct json root = json_root(doc);
    assert_close(number(root, "layers"), 2, 0);
    assert_close(number(root, "tokens"), 64, 0);
    assert_close(number(root, "decoded_layers"), 0, 0);
    assert_true(number(root, "roof_tflops") > 0 && number(root, "roof_gbs") > 0);
    assert_close(calls(root, "attn_fwd"), 2, 0);
    assert_close(calls(root, "linear_fwd"), 4, 0); /* qkv and out of two layers */
    assert_close(calls(root, "moe_up_bwd"), 2, 0);
    assert_close(calls(root, "linear_ce"), 1, 0);
    assert_close(calls(root, "embed_fwd"), 1, 0);
    assert_close(calls(root, "adamw"), 1, 0);
    assert_false(json_has(root, "step_ms"));
    json_free(doc);
}

/* Without --layers and --targets: both mixers of Qwen3.5, every projection, and a row for each gate. */
static void test_ops_of_each_kind(void **state)
{
    (void)state;
    struct err err;
    assert_int_equal(RUN("bench", "ops", "--arch", "qwen3.5-tiny", "--json", SMALL), 0);
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "bench", &err);
    if (!doc) fail_msg("%s", err.msg);
    struct json root = json_root(doc);
    assert_close(number(root, "layers"), 4, 0);
    assert_close(calls(root, "conv_silu_bwd"), 3, 0);
    assert_close(calls(root, "gated_norm_bwd"), 3, 0);
    assert_close(calls(root, "attn_gate_bwd"), 1, 0);
    assert_close(calls(root, "glu_bwd"), 4, 0);
    json_free(doc);
    assert_int_equal(RUN("bench", "ops", "--arch", "qwen3.5-tiny", SMALL), 0);
    assert_says(said.out, "qwen3.5-tiny, 4 layers, experts bf16, LoRA r 4 on all-linear: ");
    assert_says(said.out, "router_bwd 1 ");
    assert_says(said.out, "router_bwd 16 ");
    assert_int_equal(RUN("bench", "ops", "--arch", "qwen3.5-tiny", "--targets", "q_proj", SMALL), 0);
    assert_says(said.out, "LoRA r 4 on q_proj: ");
}

static void test_step(void **state)
{
    (void)state;
    static const char *const archs[] = {"gpt-oss-tiny", "qwen3-tiny", "olmoe-tiny", "mixtral-tiny"};
    struct err err;
    for (int i = 0; i < MT_LEN(archs); i++) {
        assert_int_equal(RUN("bench", "step", "--arch", archs[i], "--recompute", "full", "--json", SMALL), 0);
        struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "bench", &err);
        if (!doc) fail_msg("%s", err.msg);
        struct json root = json_root(doc);
        const double ms = number(root, "step_ms"), floor_ms = number(root, "floor_ms");
        assert_close(number(root, "layers"), 4, 0);
        const double fast = number(root, "step_ms_min"), slow = number(root, "step_ms_max");
        assert_true(ms >= fast && ms <= slow && floor_ms > 0);
        assert_close(ms, (fast + slow) / 2, 1e-9); /* of two steps */
        assert_close(number(root, "tok_s"), 64e3 / ms, 1e-9);
        assert_close(number(root, "roof_pct"), 100 * floor_ms / ms, 1e-9);
        assert_close(calls(root, "attn_fwd"), 8, 0); /* recomputed in the backward pass */
        assert_close(calls(root, "attn_bwd"), 4, 0);
        assert_true(json_has(root, "not_counted"));
        double floor_us = 0;
        for (int64_t k = 0; k < json_count(json_find(root, "ops")); k++)
            floor_us += number(json_at(json_find(root, "ops"), k), "floor_us");
        assert_close(floor_us / 1e3, floor_ms, 1e-9 + 1e-3 * floor_ms);
        json_free(doc);
    }
}

static void test_text(void **state)
{
    (void)state;
    assert_int_equal(
        RUN("bench", "step", "--arch", "gpt-oss-tiny", "--quant", "nf4", "--layers", "1", "--dtype", "bf16", SMALL), 0);
    assert_says(said.out, "gpt-oss-tiny, 1 layer, experts nf4, LoRA r 4");
    assert_says(said.out, "64 tokens (2 x 32)");
    assert_says(said.out, "roofs of cpu: ");
    assert_says(said.out, " tok/s, ");
    assert_says(said.out, "peak memory ");
    assert_says(said.out, "between the ops");
    assert_int_equal(
        RUN("bench", "ops", "--arch", "gpt-oss-tiny", "--quant", "nf4", "--decoded", "1", "--dtype", "bf16", SMALL), 0);
    assert_says(said.out, "gpt-oss-tiny, 2 layers, experts nf4, 1 of 2 layers decoded to f32, LoRA r 4");
    assert_int_equal(RUN("bench", "step", "--help"), 0);
    assert_says(said.out, "--memory-gb");
    assert_int_equal(RUN("bench", "step", "--layers", "1", "--qat", "nvfp4", "--qat-inputs", "nvfp4", SMALL), 0);
    assert_says(said.out,
                "quantisation-aware training: experts read weights quantised to nvfp4, with the adapter merged, "
                "and inputs quantised to nvfp4\n");
    assert_says(said.out, "glu_quant_fwd");
}

static void test_errors(void **state)
{
    (void)state;
    assert_int_equal(RUN("bench"), 2);
    assert_says(said.err, "step|ops|decode|lora|dequant");
    assert_int_equal(RUN("bench", "ops", "--frobnicate", "1"), 2);
    assert_says(said.err, "--frobnicate");
    assert_int_equal(RUN("bench", "ops", "--tokens"), 2);
    assert_says(said.err, "--tokens");
    assert_int_equal(RUN("bench", "ops", "--tokens", "0"), 2);
    assert_int_equal(RUN("bench", "ops", "--device", "cpu", "--tokens", "65", "--seq", "32"), 1);
    assert_says(said.err, "multiple");
    assert_int_equal(RUN("bench", "ops", "--device", "cpu", "--tokens", "16", "--seq", "32"), 1);
    assert_says(said.err, "--tokens 16 is not a multiple of --seq 32");
    assert_int_equal(RUN("bench", "ops", "--device", "gpu"), 2);
    assert_says(said.err, "cuda");
    assert_int_equal(RUN("bench", "step", "--device", "cpu", "--arch", "gpt-oss-2b"), 1);
    assert_says(said.err, "gpt-oss-20b");
    static const char *const quantised[] = {"--qat", "--qat-inputs"};
    for (int i = 0; i < MT_LEN(quantised); i++) {
        assert_int_equal(RUN("bench", "step", "--expert-dtype", "fp8", quantised[i], "nvfp4", SMALL), 1);
        assert_says(said.err, "--expert-dtype fp8 excludes --qat and --qat-inputs");
        assert_int_equal(RUN("bench", "step", "--expert-dtype", "fp8-backward", quantised[i], "nvfp4", SMALL), 1);
        assert_says(said.err, "--expert-dtype fp8-backward excludes --qat and --qat-inputs");
    }
    assert_int_equal(RUN("bench", "step", "--device", "cpu", "--layers", "99"), 1);
    assert_says(said.err, "--layers 99");
    assert_int_equal(RUN("bench", "step", "--device", "cpu", "--memory-gb", "0.01"), 1);
    assert_says(said.err, "--memory-gb 0.01: a step needs ");
    assert_null(strstr(said.err, "train.memory_gb"));
    assert_int_equal(RUN("bench", "step", "--device", "cpu", "--memory-gb", "4.9e-324"), 1);
    assert_says(said.err, "--memory-gb 4.9");
}

/* ---- the experts' kernels alone ---- */

#define ON_CPU "--device", "cpu", "--threads", "1", "--repeats", "3", "--json"

static struct json_doc *said_json(void)
{
    struct err err;
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "bench", &err);
    if (!doc) fail_msg("%s", err.msg);
    return doc;
}

static void check_text(struct json j, const char *key, const char *want)
{
    struct err err;
    const char *have = "";
    assert_int_equal(json_get_str(j, key, &have, &err), 0);
    assert_string_equal(have, want);
}

/* Checks the derived numbers of a row against the measured ones. */
static void check_split(struct json row, const char *name, bool projection)
{
    const struct json s = json_find(row, name);
    const double fwd = number(s, "fwd_ms"), fwd_base = number(s, "fwd_base_ms"), dx = number(s, "dx_ms");
    const double dx_base = number(s, "dx_base_ms"), bwd = number(s, "bwd_ms"), base = number(s, "base_ms");
    assert_true(fwd > 0 && fwd_base > 0 && dx > 0 && dx_base > 0 && bwd > 0 && base > 0);
    assert_close(number(s, "fwd_overhead_pct"), 100 * (fwd / fwd_base - 1), 1e-9);
    assert_close(number(s, "dx_lora_ms"), dx - dx_base, 1e-9);
    assert_close(number(s, "dab_ms"), bwd - dx, 1e-9);
    assert_close(number(s, "overhead_pct"), 100 * (number(s, "ms") / base - 1), 1e-9);
    if (projection) assert_close(number(s, "ms"), fwd + bwd, 1e-9);
    if (projection) assert_close(base, fwd_base + dx_base, 1e-9);
}

/* Checks a row for the sizes of qwen3-tiny: D 256, F 128, 16 experts, top-8. */
static void check_lora_row(struct json row, int64_t n_tok, int64_t r)
{
    const int64_t n_row = 8 * n_tok, params = 16 * r * (256 + 256 + 128 + 256);
    assert_close(number(row, "tokens"), (double)n_tok, 0);
    assert_close(number(row, "rank"), (double)r, 0);
    check_split(row, "gate_up", true);
    check_split(row, "down", true);
    check_split(row, "layer", false);
    assert_close(number(row, "adapter_bytes"), (double)(2 * 4 * params), 1e-12); /* f32, and their gradients */
    /* saved for the backward: xa and ha; its scratch: dy B, and for down ha times the gates */
    const double more = number(row, "peak_bytes") - number(row, "base_peak_bytes");
    assert_true(more >= 4.0 * (double)(2 * n_row * r) && more <= 4.0 * (double)(4 * n_row * r) + 4 * 256);
    const double parts = number(json_find(row, "layer"), "fwd_ms") + number(json_find(row, "layer"), "bwd_ms");
    assert_true(parts >= number(json_find(row, "gate_up"), "ms") + number(json_find(row, "down"), "ms"));
    assert_close(number(row, "roof_pct"), 100 * number(row, "floor_ms") / number(json_find(row, "layer"), "ms"), 1e-9);
}

static void test_lora(void **state)
{
    (void)state;
    assert_int_equal(RUN("bench", "lora", "--arch", "qwen3-tiny", "--rank", "4,8", "--tokens", "3,32", "--quant",
                         "bf16,nf4", ON_CPU),
                     0);
    struct json_doc *doc = said_json();
    const struct json rows = json_find(json_root(doc), "rows");
    check_text(json_root(doc), "bench", "lora");
    assert_int_equal(json_count(rows), 8);
    for (int64_t i = 0; i < 8; i++) {
        const int64_t n_tok = i / 2 % 2 ? 32 : 3;
        check_text(json_at(rows, i), "arch", "qwen3-tiny");
        check_text(json_at(rows, i), "quant", i < 4 ? "bf16" : "nf4");
        check_lora_row(json_at(rows, i), n_tok, i % 2 ? 8 : 4);
        const double active = number(json_at(rows, i), "active_experts");
        assert_true(n_tok == 32 ? active == 16 : active >= 8 && active <= 16);
    }
    json_free(doc);
    assert_int_equal(RUN("bench", "lora", "--device", "cpu", "--tokens", "5", "--rank", "2", "--threads", "1"), 0);
    assert_says(said.out, "gpt-oss-tiny: 16 experts, D 256, F 256, top 4, mxfp4; 5 tokens reach ");
    assert_says(said.out, "by difference");
}

static void test_quant(void **state)
{
    (void)state;
    static const char *const ops[] = {"amax", "int8", "int4-32", "int4-128", "fp8", "nvfp4", "mxfp4"};
    assert_int_equal(RUN("bench", "quant", "--device", "cpu", "--experts", "1,3", "--repeats", "2", "--json"), 0);
    struct json_doc *doc = said_json();
    const struct json rows = json_find(json_root(doc), "rows");
    assert_int_equal(json_count(rows), 2 * MT_LEN(ops));
    for (int64_t i = 0; i < json_count(rows); i++) {
        const struct json row = json_at(rows, i);
        const double n_exp = i < MT_LEN(ops) ? 1 : 3, bytes = number(row, "bytes");
        check_text(row, "op", ops[i % MT_LEN(ops)]);
        assert_close(number(row, "experts"), n_exp, 0);
        assert_close(bytes, n_exp * 256 * 384 * (i % MT_LEN(ops) ? 4 : 2), 0); /* bf16, read and written */
        assert_close(number(row, "gbs"), bytes / number(row, "ms") / 1e6, 1e-9);
        assert_close(number(row, "copy_pct"), 100 * number(row, "gbs") / number(json_root(doc), "roof_gbs"), 1e-9);
        assert_close(number(row, "same_copy_pct"), 100 * number(row, "same_copy_ms") / number(row, "ms"), 1e-9);
        assert_close(number(row, "loop_ratio"), number(row, "loop_ms") / number(row, "ms"), 1e-9);
    }
    json_free(doc);
    assert_int_equal(RUN("bench", "quant", "--device", "cpu", "--repeats", "1"), 0);
    assert_says(said.out, "loop: one call per expert");
}

/* 5 tokens in sequences of 3 and 2 have 6 + 3 pairs of query and key. */
static void test_attn(void **state)
{
    (void)state;
    assert_int_equal(RUN("bench", "attn", "--device", "cpu", "--tokens", "5", "--seq", "3", "--repeats", "1", "--json"),
                     0);
    struct json_doc *doc = said_json();
    const struct json rows = json_find(json_root(doc), "rows");
    bool narrow_values = false;
    assert_true(json_count(rows) >= 10);
    for (int64_t i = 0; i < json_count(rows); i++) {
        const struct json row = json_at(rows, i);
        const double keys = number(row, "head_dim"), values = number(row, "value_dim");
        const double width = i % 2 ? 3 * keys + 2 * values : keys + values;
        check_text(row, "pass", i % 2 ? "backward" : "forward");
        assert_close(number(row, "tflops") * number(row, "ms") * 1e9, 2 * 9 * number(row, "heads") * width, 1e-9);
        assert_close(number(row, "roof_pct"), 100 * number(row, "tflops") / number(json_root(doc), "roof_tflops"),
                     1e-9);
        narrow_values |= values < keys;
    }
    assert_true(narrow_values);
    json_free(doc);
    assert_int_equal(RUN("bench", "attn", "--device", "cpu", "--tokens", "2", "--seq", "2", "--repeats", "1"), 0);
    assert_says(said.out, "2 tokens in sequences of 2, window 0");
    assert_says(said.out, "% of 128");
}

/* in_proj_b and in_proj_a of qwen3.5-tiny have four rows each. */
static void every_projection_on_the_gpu(void **state)
{
    (void)state;
    static const char *const archs[] = {"qwen3.5-tiny", "glm-tiny", "glm-flash-tiny"};
    static const char *const devices[] = {"cuda", "cuda-portable"};
    op_check_need_gpu();
    for (int i = 0; i < 2 * MT_LEN(archs); i++)
        if (RUN("bench", "ops", "--arch", archs[i / 2], "--targets", "all-linear", "--device", devices[i % 2],
                "--tokens", "256", "--seq", "64", "--steps", "1"))
            fail_msg("%s on %s: %s", archs[i / 2], devices[i % 2], said.err);
}

static void test_dequant(void **state)
{
    (void)state;
    struct err err;
    assert_int_equal(RUN("bench", "dequant", "--arch", "olmoe-tiny", "--tokens", "1,2,200", ON_CPU), 0);
    struct json_doc *doc = said_json();
    const struct json rows = json_find(json_root(doc), "rows");
    double roof = number(json_root(doc), "roof_gbs"), all_ms = 0;
    assert_int_equal(json_count(rows), 5 * 2 * 4);
    for (int64_t i = 0; i < json_count(rows); i++) {
        const struct json row = json_at(rows, i);
        const double n_tok = number(row, "tokens"), active = number(row, "active_experts"), ms = number(row, "ms");
        const double values = active * (i / 4 % 2 ? 256 * 128 : 2 * 128 * 256), moved = number(row, "moved_bytes");
        const double n_in = i / 4 % 2 ? 128 : 256;
        const char *quant;
        assert_int_equal(json_get_str(row, "quant", &quant, &err), 0);
        check_text(row, "stack", i / 4 % 2 ? "down" : "gate_up");
        if (i % 4 == 0) all_ms = ms;
        assert_close(n_tok, i % 4 == 0 ? 0 : i % 4 == 1 ? 1 : i % 4 == 2 ? 2 : 200, 0);
        assert_true(i % 4 == 1 ? active == 8 : i % 4 == 2 ? active >= 8 && active <= 16 : active == 16);
        assert_close(number(row, "expected_active"), n_tok > 0 ? 16 * (1 - pow(0.5, n_tok)) : 16, 1e-12);
        assert_close(number(row, "active_pct"), 100 * active / 16, 1e-12);
        assert_close(number(row, "decoded_bytes"), 4 * values, 0); /* f32 */
        const double bits = !strcmp(quant, "mxfp4")   ? 4.25
                            : !strcmp(quant, "nf4")   ? 4.5
                            : !strcmp(quant, "nvfp4") ? 4.5 + 32.0 / n_in
                            : !strcmp(quant, "fp8")   ? 8 + 32.0 / n_in
                                                      : 4.127;
        assert_close(moved - 4 * values, values * bits / 8, 2e-2); /* 1 KiB of tables count here */
        assert_close(number(row, "gbs"), moved / ms / 1e6, 1e-9);
        assert_close(number(row, "copy_pct"), 100 * number(row, "gbs") / roof, 1e-9);
        assert_close(number(row, "speed_up"), all_ms / ms, 1e-9);
    }
    json_free(doc);
}

static void test_expert_errors(void **state)
{
    (void)state;
    static const struct {
        const char *option, *value, *says;
        int code;
    } cases[] = {
        {"--rank", "0", "--rank 0", 2},           {"--rank", "4,", "--rank 4,", 2},
        {"--rank", "", "--rank is empty", 2},     {"--rank", "257", "whole numbers in [1, 256]", 2},
        {"--tokens", "1,2x", "--tokens 1,2x", 2}, {"--tokens", "1,1,1,1,1,1,1,1,1", "at most 8", 2},
        {"--repeats", "2000", "1000", 2},         {"--repeats", "1,2", "a whole number", 2},
        {"--quant", "nf5", "--quant nf5", 2},     {"--arch", "olmoe-tinny", "olmoe-tiny", 1},
        {"--frobnicate", "1", "--frobnicate", 2}, {"--dtype", "fp16", "bf16", 2},
    };
    for (int i = 0; i < MT_LEN(cases); i++) {
        assert_int_equal(RUN("bench", "lora", "--threads", "1", "--device", "cpu", cases[i].option, cases[i].value),
                         cases[i].code);
        assert_says(said.err, cases[i].says);
    }
    assert_int_equal(RUN("bench", "lora", "--device", "gpu"), 2);
    assert_says(said.err, "cuda");
    assert_int_equal(RUN("bench", "dequant", "--tokens"), 2);
    assert_says(said.err, "bench dequant: --tokens");
    assert_int_equal(RUN("bench", "dequant", "--help"), 0);
    assert_says(said.out, "qwen3.5-35b-a3b");
}

/* The checkpoint in memory: layers share their bytes, every name is found, and the sizes are those of the model. */
static void test_memory(void **state)
{
    (void)state;
    const struct synth_options opt = {.arch = "gpt-oss-tiny"};
    struct synth_memory m;
    struct err err = {{0}};
    if (synth_memory_open(&m, &opt, &err)) fail_msg("%s", err.msg);
    const struct st_tensor *first = safetensors_find(&m.st, "model.layers.0.mlp.experts.gate_up_proj_blocks");
    const struct st_tensor *last = safetensors_find(&m.st, "model.layers.3.mlp.experts.gate_up_proj_blocks");
    const struct st_tensor *other = safetensors_find(&m.st, "model.layers.3.mlp.experts.down_proj_blocks");
    assert_true(first && last && other);
    assert_ptr_equal(first->data, last->data);
    assert_ptr_not_equal(first->data, other->data);
    assert_int_equal(m.arch.n_layer, 4);
    int64_t n = 0;
    while (n < m.n && m.buffers[n]) n++;
    assert_true(n < m.n / 3);
    safetensors_drop(&m.st, first); /* a second drop has no effect */
    synth_memory_close(&m);
    synth_memory_close(&m);
}

int test_bench(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ops),           cmocka_unit_test(test_ops_of_each_kind),
        cmocka_unit_test(test_step),          cmocka_unit_test(test_text),
        cmocka_unit_test(test_errors),        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_lora),          cmocka_unit_test(test_dequant),
        cmocka_unit_test(test_expert_errors), cmocka_unit_test(test_quant),
        cmocka_unit_test(test_attn),          cmocka_unit_test(every_projection_on_the_gpu),
    };
    return cmocka_run_group_tests_name("bench", tests, NULL, NULL);
}
