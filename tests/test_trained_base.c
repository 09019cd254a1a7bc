/* test_trained_base.c - an adapter file records the weights that it was trained on: a merge with others is refused, and
 * other uses are a warning; the same weights in another place or other files pass. */
#include <stdio.h>
#include <string.h>

#include "data/file.h"
#include "tests/checkpoints.h"
#include "tests/process.h"

#define EXPERTS "lora.targets=experts optim.lr=0.02"
#define OTHER   "was trained with another base model: the weights in model.path = "

/* The parity case in other files, with another final norm or not; "model.path=DIR". */
static const char *model(bool changed)
{
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json"};
    static char set[8][MT_PATH];
    static int next;
    char *text = set[next++ % 8], path[MT_PATH + 32];
    struct draft d;
    struct err err = {.msg = ""};
    draft_open(&d);
    if (changed) {
        const struct st_entry *e = draft_find(&d, "model.norm.weight");
        float *x = draft_values(&d, e->name);
        x[0] += 1;
        draft_put(&d, "model.norm.weight", DT_F32, 1, (int64_t[]){e->shape[0]}, x);
    }
    const char *dir = draft_save(&d, 3);
    draft_free(&d);
    for (int i = 0; i < MT_LEN(files); i++) {
        struct file_map map;
        char from[64];
        snprintf(from, sizeof(from), "parity/case_a/%s", files[i]);
        if (file_map_open(&map, fixture(from), &err)) fail_msg("%s", err.msg);
        snprintf(path, sizeof(path), "%s/%s", dir, files[i]);
        if (file_write_atomic(path, map.data, map.size, &err)) fail_msg("%s", err.msg);
        file_map_close(&map);
    }
    snprintf(text, MT_PATH, "model.path=%s", dir);
    return text;
}

static int export(const char *ini, const char *path, const char *format, const char *more)
{
    char out[MT_PATH];
    snprintf(out, sizeof(out), "%s/out", scratch_dir());
    return RUN("export", ini, "--set", path, "--to", format, "--out", out, more);
}

static void another_base_model_is_noticed(void **state)
{
    static const char *const formats[] = {"merged-bf16", "merged-mxfp4", "peft", "vllm", "gguf"};
    (void)state;
    const char *ini = process_output(process_trained(EXPERTS), "config.ini");
    for (int changed = 0; changed < 2; changed++) {
        const char *path = model(changed);
        for (int i = 0; i < MT_LEN(formats); i++) {
            const bool refused = changed && i < 2;
            if (export(ini, path, formats[i], NULL) != refused) fail_msg("%s: %s", formats[i], said.err);
            assert_int_equal(changed, strstr(said.err, OTHER) != NULL);
            assert_int_equal(refused, strstr(said.err, "set model.path to that model; --force merges") != NULL);
        }
        if (export(ini, path, "merged-bf16", "--force")) fail_msg("%s", said.err);
        assert_int_equal(changed, strstr(said.err, OTHER) != NULL);
        if (RUN("eval", ini, "--set", path)) fail_msg("%s", said.err);
        assert_int_equal(changed, strstr(said.err, OTHER) != NULL);
        if (RUN("generate", ini, "--set", path, "--prompt", "a", "--tokens", "1")) fail_msg("%s", said.err);
        assert_int_equal(changed, strstr(said.err, OTHER) != NULL);
    }
}

/* A run that begins with such an adapter records its own base model, and so does its export for PEFT. */
static void a_run_from_such_an_adapter_has_its_own(void **state)
{
    char init[MT_PATH + 32], adapter[MT_PATH], out[MT_PATH];
    const char *path = model(true), *config = process_config("");
    (void)state;
    snprintf(init, sizeof(init), "lora.init_from=%s", process_output(process_trained(EXPERTS), "adapter"));
    if (RUN(config, "--set", path, "--set", init, "--set", "lora.targets=experts")) fail_msg("%s", said.err);
    assert_says(said.err, OTHER);
    const char *ini = process_output(config, "config.ini");
    if (export(ini, path, "merged-bf16", NULL)) fail_msg("%s", said.err);
    snprintf(out, sizeof(out), "%s/out", scratch_dir());
    if (RUN("export", ini, "--to", "peft", "--out", out)) fail_msg("%s", said.err);
    snprintf(adapter, sizeof(adapter), "%s", out);
    if (RUN("eval", ini, "--adapter", adapter)) fail_msg("%s", said.err);
    assert_null(strstr(said.err, OTHER));
    if (RUN("eval", ini, "--adapter", adapter, "--set", model(false))) fail_msg("%s", said.err);
    assert_says(said.err, OTHER);
}

/* A teacher and the format that the weights were packed to are part of the hash that a checkpoint has. */
static void a_teacher_and_packing_are_no_other_base_model(void **state)
{
    char sets[MT_PATH], path[MT_PATH];
    (void)state;
    snprintf(sets, sizeof(sets), EXPERTS " distill.teacher=adapter:%s", fixture("parity/case_a/adapter_final"));
    const char *ini = process_output(process_trained(sets), "config.ini");
    if (export(ini, model(false), "merged-bf16", NULL)) fail_msg("%s", said.err);
    assert_null(strstr(said.err, OTHER));
    const char *config = process_config("");
    snprintf(path, sizeof(path), "model.path=%s", fixture("parity/qwen3"));
    if (RUN(config, "--set", path, "--set", "model.quantize=nf4", "--set", "data.format=text", "--set",
            "lora.targets=experts", "--set", "train.steps=1"))
        fail_msg("%s", said.err);
    if (RUN("eval", process_output(config, "config.ini"), "--set", "model.quantize=none")) fail_msg("%s", said.err);
    assert_null(strstr(said.err, OTHER));
    if (export(process_output(config, "config.ini"), path, "merged-bf16", NULL)) fail_msg("%s", said.err);
}

int test_trained_base(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_base_model_is_noticed),
        cmocka_unit_test(a_run_from_such_an_adapter_has_its_own),
        cmocka_unit_test(a_teacher_and_packing_are_no_other_base_model),
    };
    return cmocka_run_group_tests_name("trained_base", tests, NULL, NULL);
}
