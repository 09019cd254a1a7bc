/* test_inspect.c - the summary that `moetrain inspect` prints. */
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/safetensors.h"
#include "train/tools/inspect.h"

/* The output of inspect_run for path; the caller frees it. NULL with err: inspect_run failed. */
static char *inspect(const char *path, struct err *err)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    assert_non_null(out);
    int rc = inspect_run(path, out, err);
    fclose(out);
    if (!rc) return text;
    free(text);
    return NULL;
}

static void assert_line(const char *text, const char *line)
{
    const char *at = strstr(text, line);
    if (!at || (at != text && at[-1] != '\n') || at[strlen(line)] != '\n') fail_msg("no line `%s` in\n%s", line, text);
}

/* A bitsandbytes weight of 6 x 4, nested in layer 1; MXFP4 of 2 experts 3 x 64; a layer norm. */
static int write_checkpoint(const char *path, const char *state0, struct err *err)
{
    static const uint8_t zero[256];
    static const char state1[] = "{\"quant_type\": \"nf4\", \"shape\": [6, 4]}";
    const struct st_entry e[] = {
        {"layers.0.up.weight", DT_U8, 2, {12, 1}, zero, NULL},
        {"layers.0.up.weight.absmax", DT_F32, 1, {1}, zero, NULL},
        {"layers.0.up.weight.quant_map", DT_F32, 1, {16}, zero, NULL},
        {"layers.0.up.weight.quant_state.bitsandbytes__fp4", DT_U8, 1, {(int64_t)strlen(state0)}, state0, NULL},
        {"layers.1.up.weight", DT_U8, 2, {12, 1}, zero, NULL},
        {"layers.1.up.weight.absmax", DT_U8, 1, {1}, zero, NULL},
        {"layers.1.up.weight.nested_absmax", DT_F32, 1, {1}, zero, NULL},
        {"layers.1.up.weight.nested_quant_map", DT_F32, 1, {2}, zero, NULL}, /* a real one has 256 values */
        {"layers.1.up.weight.quant_map", DT_F32, 1, {16}, zero, NULL},
        {"layers.1.up.weight.quant_state.bitsandbytes__nf4", DT_U8, 1, {sizeof(state1) - 1}, state1, NULL},
        {"layers.0.experts.down_proj_blocks", DT_U8, 4, {2, 3, 2, 16}, zero, NULL},
        {"layers.0.experts.down_proj_scales", DT_U8, 3, {2, 3, 2}, zero, NULL},
        {"layers.0.norm.weight", DT_BF16, 1, {5}, zero, NULL},
        {"layers.1.norm.weight", DT_BF16, 1, {5}, zero, NULL},
        {"layers.12.x.7.y.3a", DT_F32, 0, {0}, zero, NULL},
        {"lonely_scales", DT_U8, 1, {3}, zero, NULL},
        {"nasty\033[2J", DT_U8, 1, {0}, zero, NULL},
    };
    return safetensors_write(path, e, MT_LEN(e), err);
}

static void packed(void **state)
{
    (void)state;
    char path[256];
    struct err err;
    snprintf(path, sizeof(path), "%s/model.safetensors", scratch_dir());
    assert_int_equal(write_checkpoint(path, "{\"quant_type\": \"fp4\", \"shape\": [6, 4]}", &err), 0);
    char *text = inspect(path, &err);
    if (!text) fail_msg("%s", err.msg);
    assert_line(text, "  tensor                         count  shape       format      parameters       bytes");
    assert_line(text, "  layers.{n}.up.weight               1  6 x 4       FP4                 24       118 B");
    assert_line(text, "  layers.{n}.up.weight               1  6 x 4       NF4 nested          24       127 B");
    assert_line(text, "  layers.{n}.experts.down_proj       1  2 x 3 x 64  MXFP4              384       204 B");
    assert_line(text, "  layers.{n}.norm.weight             2  5           BF16                10        20 B");
    assert_line(text, "  layers.{n}.x.{e}.y.3a              1  scalar      F32                  1         4 B");
    assert_line(text, "  lonely_scales                      1  3           U8                   3         3 B");
    assert_line(text, "  nasty?[2J                          1  0           U8                   0         0 B");
    assert_line(text, "  MXFP4              1              384       204 B             4.25");
    assert_line(text, "  BF16               2               10        20 B            16.00");
    assert_line(text, "  total              8              446       476 B             8.54");
    free(text);

    static const struct {
        const char *state, *error;
    } bad[] = {{"{", "quant_state.bitsandbytes__fp4: not valid JSON"},
               {"{}", "key `shape`: is missing"},
               {"{\"shape\": [6, 5]}", "key `shape`: 30 elements of 4 bits, but the weight has 12 bytes"},
               {"{\"shape\": [6, -4]}", "key `shape[1]`: -4 is not between"},
               {"{\"shape\": [2000000000, 2000000000, 2000000000]}", "the number of elements exceeds 64 bits"},
               {"{\"shape\": [1,1,1,1,1,1,1,1,1]}", "more than 8 axes"}};
    for (int64_t i = 0; i < MT_LEN(bad); i++) {
        assert_int_equal(write_checkpoint(path, bad[i].state, &err), 0);
        assert_null(inspect(path, &err));
        if (!strstr(err.msg, bad[i].error)) fail_msg("%s gives: %s", bad[i].state, err.msg);
    }
    assert_null(inspect("/none", &err));
}

static void adapters(void **state)
{
    (void)state;
    struct err err;
    char *text = inspect(fixture("parity/case_a/adapter_init"), &err);
    if (!text) fail_msg("%s", err.msg);
    assert_non_null(strstr(text, "/adapter_init: adapter, 24 tensors in 1 file, 331 KiB\n"));
    assert_line(text, "  r             8");
    assert_line(text, "  alpha         16 (scale alpha/r = 2)");
    assert_line(text, "  parameters    mlp.experts.gate_up_proj, mlp.experts.down_proj");
    assert_non_null(strstr(text, "  base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.weight             2  "));
    free(text);

    char dir[128], path[256];
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    static const struct {
        const char *config, *line, *error;
    } rows[] = {
        {"{\"peft_type\":\"LORA\",\"r\":16,\"lora_alpha\":8,\"use_rslora\":true}",
         "  alpha         8 (scale alpha/sqrt(r), rsLoRA = 2)", NULL},
        {"{\"peft_type\":\"LORA\",\"r\":1,\"lora_alpha\":1,\"target_modules\":\"a.*\\u001b\"}",
         "  modules       a.*? (a regular expression)", NULL},
        {"{\"peft_type\":\"LORA\",\"r\":1,\"lora_alpha\":1,\"rank_pattern\":{\"q\":2}}",
         "  patterns      1 in rank_pattern and alpha_pattern", NULL},
        {"{\"peft_type\":\"LORA\",\"r\":0,\"lora_alpha\":1}", NULL, "key `r`: 0 is not between 1"},
        {"{\"r\":1,\"lora_alpha\":1}", NULL, "key `peft_type`: is missing"},
        {"[]", NULL, "key `peft_type`: is missing"},
        {"{", NULL, "adapter_config.json: not valid JSON"},
    };
    snprintf(path, sizeof(path), "%s/adapter_model.safetensors", dir);
    assert_int_equal(safetensors_write(path, NULL, 0, &err), 0);
    snprintf(path, sizeof(path), "%s/adapter_config.json", dir);
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(file_write_atomic(path, rows[i].config, (int64_t)strlen(rows[i].config), &err), 0);
        text = inspect(dir, &err);
        if (rows[i].line && !text) fail_msg("%s", err.msg);
        if (rows[i].line) assert_line(text, rows[i].line);
        if (rows[i].error && (text || !strstr(err.msg, rows[i].error)))
            fail_msg("%s gives: %s", rows[i].config, err.msg);
        free(text);
    }
}

/* With a config.json, `inspect` prints the size of the experts for each model.quantize, or why it is impossible. */
static void held(void **state)
{
    (void)state;
    struct err err;
    char *text = inspect(fixture("parity/qwen3"), &err); /* D 40, which blocks of 32 do not divide */
    if (!text) fail_msg("%s", err.msg);
    assert_line(text, "  model.quantize  experts held as                  experts   all weights");
    assert_line(text, "  none            bf16                            67.5 KiB       253 KiB");
    assert_line(text, "  nf4             nf4, packed from bf16           21.0 KiB       207 KiB");
    assert_line(text, "  nf4-nested      nf4-nested, packed from bf16    25.5 KiB       211 KiB");
    assert_non_null(strstr(text, "\n  mxfp4           not possible: tensor model.layers.0.mlp.experts.0.gate_proj"));
    free(text);
    text = inspect(fixture("parity/case_a"), &err);
    if (!text) fail_msg("%s", err.msg);
    assert_line(text, "  none            mxfp4                            326 KiB      2.52 MiB");
    assert_line(text, "  weights that the checkpoint stores packed stay packed");
    assert_null(strstr(text, "nf4-nested"));
    free(text);
}

int test_inspect(void)
{
    static const struct CMUnitTest tests[] = {cmocka_unit_test(packed), cmocka_unit_test(held),
                                              cmocka_unit_test(adapters)};
    return cmocka_run_group_tests_name("inspect", tests, NULL, NULL);
}
