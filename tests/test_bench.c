/* test_bench.c - `moetrain bench` on the CPU: both tables, JSON, sizes and errors; the checkpoint in memory. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json.h"
#include "tests/process.h"
#include "train/synth.h"

#define SMALL "--device", "cpu", "--threads", "2", "--tokens", "64", "--seq", "32", "--steps", "2", "--rank", "4"

static double number(struct json j, const char *key)
{
    struct err err;
    double v = NAN;
    if (json_get_f64(j, key, &v, &err)) fail_msg("%s", err.msg);
    return v;
}

/* Calls of an op, all parts together; every row is sound. */
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
        assert_true(ms >= number(root, "step_ms_min") && ms <= number(root, "step_ms_max") && floor_ms > 0);
        assert_close(number(root, "tok_s"), 64e3 / ms, 1e-9);
        assert_close(number(root, "roof_pct"), 100 * floor_ms / ms, 1e-9);
        assert_close(calls(root, "attn_fwd"), 8, 0); /* again in the backward */
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
    assert_says(said.out, "gpt-oss-tiny, 1 layers, experts nf4, LoRA r 4");
    assert_says(said.out, "64 tokens (2 x 32)");
    assert_says(said.out, "roofs of cpu: ");
    assert_says(said.out, " tok/s, ");
    assert_says(said.out, "peak memory ");
    assert_says(said.out, "between the ops");
    assert_int_equal(RUN("bench", "--help"), 0);
    assert_says(said.out, "--memory-gb");
}

static void test_errors(void **state)
{
    (void)state;
    assert_int_equal(RUN("bench"), 1);
    assert_says(said.err, "bench step");
    assert_int_equal(RUN("bench", "ops", "--frobnicate", "1"), 1);
    assert_says(said.err, "--frobnicate");
    assert_int_equal(RUN("bench", "ops", "--tokens"), 1);
    assert_says(said.err, "--tokens");
    assert_int_equal(RUN("bench", "ops", "--tokens", "0"), 1);
    assert_int_equal(RUN("bench", "ops", "--device", "cpu", "--tokens", "65", "--seq", "32"), 1);
    assert_says(said.err, "multiple");
    assert_int_equal(RUN("bench", "ops", "--device", "gpu"), 1);
    assert_says(said.err, "cuda");
    assert_int_equal(RUN("bench", "step", "--device", "cpu", "--arch", "gpt-oss-2b"), 1);
    assert_says(said.err, "gpt-oss-20b");
    assert_int_equal(RUN("bench", "step", "--device", "cpu", "--path", "loop,grouped"), 1);
    assert_says(said.err, "on a GPU; this device is cpu");
    assert_int_equal(RUN("bench", "ops", "--path", "loop"), 1);
    assert_says(said.err, "bench step");
    static const char *const paths[] = {"", "loop,", "loop,grouped,pre",
                                        "loop,loop,loop,loop,loop,loop,loop,loop,loop"};
    for (int i = 0; i < MT_LEN(paths); i++) {
        assert_int_equal(RUN("bench", "step", "--path", paths[i]), 1);
        assert_says(said.err, "of loop, presort, grouped");
    }
    assert_int_equal(RUN("bench", "step", "--device", "cpu", "--layers", "99"), 1);
    assert_says(said.err, "--layers 99");
    assert_int_equal(RUN("bench", "step", "--device", "cpu", "--memory-gb", "0.01"), 1);
    assert_says(said.err, "memory");
}

/* Layers share their bytes; names are found; the model is as large as ever. */
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
    safetensors_drop(&m.st, first); /* nothing to drop, nothing happens */
    synth_memory_close(&m);
    synth_memory_close(&m);
}

int test_bench(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ops),    cmocka_unit_test(test_step),   cmocka_unit_test(test_text),
        cmocka_unit_test(test_errors), cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests_name("bench", tests, NULL, NULL);
}
