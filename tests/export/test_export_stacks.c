/* test_export_stacks.c - merged exports of families whose experts transformers reads from one tensor only: the shape of
 * the stacks, also where the source has a tensor for each expert, and single experts in quantised formats. Also
 * exports that rounding changes more than the adapter does. */
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/safetensors.h"
#include "tests/process.h"
#include "train/synth/synth.h"

/* A model with random weights, trained for two steps with the lines `more`; the path of its configuration. */
static const char *two_steps(const char *arch, const char *quant, const char *more)
{
    static char path[MT_PATH];
    char text[4 * MT_PATH];
    struct err err;
    const char *dir = scratch_dir();
    char model[MT_PATH];
    snprintf(model, sizeof(model), "%s/model", dir);
    if (synth_run(&(struct synth_options){.arch = arch, .dir = model, .quant = quant}, &err)) fail_msg("%s", err.msg);
    snprintf(path, sizeof(path), "%s/run.ini", dir);
    const char *data = fixture("parity/case_a");
    const int n = snprintf(text, sizeof(text),
                           "[model]\npath = %s\n[data]\ntrain = %s/train.jsonl\neval = %s/eval.jsonl\nformat = text\n"
                           "seq_len = 32\n[lora]\nr = 4\n[optim]\nlr = 2e-3\n[train]\nsteps = 2\nmicro_batch = 1\n"
                           "grad_accum = 1\ndevice = cpu\n[output]\ndir = %s/out\n%s",
                           model, data, data, dir, more);
    if (file_write_atomic(path, text, n, &err)) fail_msg("%s", err.msg);
    if (RUN(path)) fail_msg("%s: %s", arch, said.err);
    return path;
}

/* Opens the export in a new directory, whose path is `dir`. */
static void open_export(struct safetensors *st, const char *ini, const char *format, char dir[MT_PATH])
{
    struct err err;
    snprintf(dir, MT_PATH, "%s/export", scratch_dir());
    if (RUN("export", ini, "--to", format, "--out", dir)) fail_msg("%s: %s%s", format, said.out, said.err);
    if (safetensors_open(st, dir, &err)) fail_msg("%s", err.msg);
}

#define VL    "model.language_model.layers.1.mlp.experts"
#define GEMMA "model.language_model.layers.1.experts"

/* merged-bf16 has the stacks that transformers reads: of Qwen3-VL [E, in, out], of others [E, out, in]. */
static void stacks_as_published(void **state)
{
    (void)state;
    static const struct {
        const char *arch, *quant, *stack;
        int64_t rows, cols;
    } all[] = {{"qwen3-vl-tiny", "bf16", VL, 128, 256},
               {"qwen3-vl-tiny", "nvfp4", VL, 128, 256},
               {"gemma-tiny", "nvfp4", GEMMA, 256, 128}};
    for (int i = 0; i < MT_LEN(all); i++) {
        struct safetensors st;
        char name[128], dir[MT_PATH];
        open_export(&st, two_steps(all[i].arch, all[i].quant, ""), "merged-bf16", dir);
        snprintf(name, sizeof(name), "%s.down_proj", all[i].stack);
        const struct st_tensor *t = safetensors_find(&st, name);
        if (!t || t->ndim != 3 || t->shape[1] != all[i].rows || t->shape[2] != all[i].cols) fail_msg("row %d", i);
        snprintf(name, sizeof(name), "%s.0.down_proj.weight", all[i].stack);
        assert_null(safetensors_find(&st, name));
        safetensors_close(&st);
    }
}

/* Gemma-4 in FP8 has a matrix per expert. In layers whose values are keys the configuration excludes v_proj too: vLLM
 * joins q, k and v there, and wants one format for the three names. Only every other layer of the model is such. */
static void single_experts_in_fp8(void **state)
{
    (void)state;
    static char text[1 << 16];
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    struct safetensors st;
    char name[128], dir[MT_PATH], path[MT_PATH + 32];
    open_export(&st, two_steps("gemma-tiny", "bf16", "[quant]\nweights = fp8\ntargets = experts\n"), "merged-fp8", dir);
    for (int i = 0; i < 16 * 3; i++) {
        snprintf(name, sizeof(name), "%s.%d.%s.weight", GEMMA, i / 3, parts[i % 3]);
        const struct st_tensor *t = safetensors_find(&st, name);
        if (!t || strcmp(t->st_dtype, "F8_E4M3")) fail_msg("%s", name);
    }
    assert_null(safetensors_find(&st, GEMMA ".down_proj"));
    assert_null(safetensors_find(&st, "model.language_model.layers.1.self_attn.v_proj.weight"));
    safetensors_close(&st);
    snprintf(path, sizeof(path), "%s/config.json", dir);
    process_read(path, text, sizeof(text));
    assert_null(strstr(text, ".experts.0."));
    for (int l = 0; l < 4; l++) {
        snprintf(name, sizeof(name), "\"model.language_model.layers.%d.self_attn.v_proj\"", l);
        assert_says(text, name);
    }
}

/* Rounding of LFM2-tiny to NVFP4 changes the model more than an adapter after two steps does. The error has both
 * numbers, and --accept-rounding exports; but with this option too a weight that is not base + adapter is an error. */
static void rounding_that_outweighs_the_adapter(void **state)
{
    (void)state;
    char dir[MT_PATH], file[MT_PATH + 32];
    struct safetensors st;
    struct err err;
    const char *ini = two_steps("lfm2-tiny", "bf16", "");
    snprintf(dir, sizeof(dir), "%s/export", scratch_dir());
    assert_int_equal(RUN("export", ini, "--to", "merged-nvfp4", "--out", dir), 1);
    assert_says(said.err, "correctly rounded, but rounding to this format changes the model by ");
    assert_says(said.err, ", the adapter by ");
    assert_says(said.err, "or accept this loss with --accept-rounding");
    if (RUN("export", ini, "--to", "merged-nvfp4", "--out", dir, "--accept-rounding")) fail_msg("%s", said.err);
    assert_says(said.err, "warning: merged-nvfp4, ");
    assert_says(said.err, ": accepted (--accept-rounding)");
    assert_says(said.out, "too far");
    if (safetensors_open(&st, dir, &err)) fail_msg("%s", err.msg);
    const struct st_tensor *t = safetensors_find(&st, "model.layers.1.feed_forward.experts.3.w2.weight");
    assert_non_null(t);
    snprintf(file, sizeof(file), "%s/model.safetensors", dir);
    FILE *f = fopen(file, "r+b");
    assert_true(f && !fseek(f, (long)t->offset + 5, SEEK_SET) && fputc(t->data[5] ^ 0x77, f) >= 0 && !fclose(f));
    safetensors_close(&st);
    assert_int_equal(RUN("export", ini, "--to", "merged-nvfp4", "--verify", dir, "--accept-rounding"), 1);
    assert_says(said.err, "parts of the adapter that differ");
}

int test_export_stacks(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(stacks_as_published), cmocka_unit_test(single_experts_in_fp8),
                                       cmocka_unit_test(rounding_that_outweighs_the_adapter)};
    return cmocka_run_group_tests_name("export_stacks", tests, NULL, NULL);
}
