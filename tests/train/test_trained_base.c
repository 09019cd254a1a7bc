/* test_trained_base.c - an adapter file records the base model that it was trained on. With other weights merging and
 * continuing a run are refused, other uses warn; the same weights in another folder or other files are accepted. */
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "tests/checkpoints.h"
#include "tests/process.h"

#define EXPERTS "lora.targets=experts optim.lr=0.02"
#define OTHER   "was trained with another base model: the weights in model.path = "

/* SAMPLED: in the first 64 KiB of a tensor, which is noticed before the weights are read; REST: elsewhere. */
enum change { NOTHING, SAMPLED, REST, CONFIG, CHANGES };
static const char *const whats[CHANGES] = {"", OTHER, OTHER, " has other values (rms_norm_eps: 1e-05 -> 0.001)"};

/* Sets the bytes of a tensor from `from` on. */
static void change_bytes(struct draft *d, const char *name, int64_t from, int value)
{
    const struct st_entry *e = draft_find(d, name);
    const int64_t bytes = safetensors_entry_bytes(e);
    assert_true(from < bytes);
    memset((uint8_t *)(uintptr_t)e->data + from, value, (size_t)(bytes - from));
}

/* Saves the parity case with this change; returns "model.path=DIR". */
static const char *model(enum change change)
{
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json"};
    static char set[8][MT_PATH];
    static int next;
    char *text = set[next++ % 8], path[MT_PATH + 32];
    struct draft d;
    struct err err = {.msg = ""};
    draft_open(&d);
    if (change == SAMPLED) change_bytes(&d, "model.norm.weight", 250, 0x40);
    if (change == REST) change_bytes(&d, "model.embed_tokens.weight", 1 << 16, 0);
    if (change == REST) change_bytes(&d, "model.layers.1.mlp.experts.gate_up_proj_blocks", 98303, 0x77);
    if (change == CONFIG) draft_config(&d, "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 0.001");
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

/* Standard error must name the difference, or for NOTHING no other base model. */
static void assert_notices(enum change c)
{
    if (c == NOTHING && strstr(said.err, "another base model")) fail_msg("%s", said.err);
    if (c != NOTHING) assert_says(said.err, " was trained with another base model: ");
    if (c != NOTHING) assert_says(said.err, whats[c]);
    if (c == REST) assert_says(said.err, " are not the same (layers.1, embedding): set model.path to that model");
}

static char out[MT_PATH]; /* of the last export */
static int export(const char *ini, const char *path, const char *format, const char *more)
{
    snprintf(out, sizeof(out), "%s/out", scratch_dir());
    return RUN("export", ini, "--set", path, "--to", format, "--out", out, more);
}

static void another_base_model_is_noticed(void **state)
{
    static const char *const formats[] = {"merged-bf16", "merged-mxfp4", "peft", "vllm", "gguf"};
    char rows[MT_PATH];
    (void)state;
    const char *ini = process_output(process_trained(EXPERTS), "config.ini");
    for (enum change c = NOTHING; c < CHANGES; c++) {
        const char *path = model(c);
        for (int i = 0; i < MT_LEN(formats); i++) {
            const bool refused = c && i < 2;
            if (export(ini, path, formats[i], NULL) != refused) fail_msg("%s: %s", formats[i], said.err);
            assert_notices(c);
            assert_int_equal(refused, strstr(said.err, "set model.path to that model; --force merges") != NULL);
            assert_int_equal(c == REST && refused, strstr(said.err, "exporting ") && !file_exists(out));
        }
        if (export(ini, path, "merged-bf16", "--force")) fail_msg("%s", said.err);
        assert_notices(c);
        if (RUN("eval", ini, "--set", path)) fail_msg("%s", said.err);
        assert_notices(c);
        if (RUN("generate", ini, "--set", path, "--prompt", "a", "--tokens", "1")) fail_msg("%s", said.err);
        assert_notices(c);
        snprintf(rows, sizeof(rows), "%s/rows.jsonl", scratch_dir());
        if (RUN("teach", ini, "--set", path, "--topk", "4", "--out", rows)) fail_msg("%s", said.err);
        assert_notices(c);
    }
}

/* A continued run compares all bytes of the weights, and config.json, and names what differs. A finished run does not
 * load the model and compares only the beginnings of tensors. */
static void a_run_does_not_continue_with_another(void **state)
{
    (void)state;
    const char *config = process_trained(EXPERTS " train.steps=2 output.save_every=1");
    for (enum change c = NOTHING; c < CHANGES; c++) {
        const char *path = model(c);
        const int complete = RUN(config, "--set", path, "--set", "lora.targets=experts", "--set", "optim.lr=0.02",
                                 "--set", "train.steps=2");
        if (complete != (c == SAMPLED || c == CONFIG)) fail_msg("%d: %s", (int)c, said.err);
        const int further = RUN(config, "--set", path, "--set", "lora.targets=experts", "--set", "optim.lr=0.02",
                                "--set", c ? "train.steps=3" : "train.steps=2");
        if (further != (c != NOTHING)) fail_msg("%d: %s", (int)c, said.err);
        if (c == SAMPLED) assert_says(said.err, "was made with another base model, model.path: ");
        if (c == REST) assert_says(said.err, "are not the same (layers.1, embedding): set it back");
        if (c == CONFIG) assert_says(said.err, "rms_norm_eps: 1e-05 -> 0.001");
    }
}

/* A run that starts from an adapter of another base model records the base model on which it trains, and so does its
 * export for PEFT. */
static void a_run_from_such_an_adapter_has_its_own(void **state)
{
    char init[MT_PATH + 32], adapter[MT_PATH];
    const char *path = model(REST), *config = process_config("");
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
    if (RUN("eval", ini, "--adapter", adapter, "--set", model(NOTHING))) fail_msg("%s", said.err);
    assert_says(said.err, OTHER);
}

/* The hash in a checkpoint covers the teacher and the packing format. The record in an adapter does not: with another
 * teacher or packing the base model counts as the same. */
static void a_teacher_and_packing_are_no_other_base_model(void **state)
{
    char sets[MT_PATH], path[MT_PATH];
    (void)state;
    snprintf(sets, sizeof(sets), EXPERTS " distill.teacher=adapter:%s", fixture("parity/case_a/adapter_final"));
    const char *ini = process_output(process_trained(sets), "config.ini");
    if (export(ini, model(NOTHING), "merged-bf16", NULL)) fail_msg("%s", said.err);
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
        cmocka_unit_test(a_run_does_not_continue_with_another),
        cmocka_unit_test(a_run_from_such_an_adapter_has_its_own),
        cmocka_unit_test(a_teacher_and_packing_are_no_other_base_model),
    };
    return cmocka_run_group_tests_name("trained_base", tests, NULL, NULL);
}
