/* test_export_stacks.c - merged exports of families whose experts transformers reads only from one stacked tensor: its
 * shape, also where the source has a tensor for each expert; single experts in quantised formats; exports that rounding
 * changes more than the adapter does. */
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/safetensors.h"
#include "tests/checkpoints.h"
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
    } all[] = {{"qwen3-vl-tiny", "bf16", VL, 192, 256},
               {"qwen3-vl-tiny", "nvfp4", VL, 192, 256},
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

static const char *const stacks[] = {
    "model.language_model.layers.0.mlp.experts.gate_up_proj", "model.language_model.layers.0.mlp.experts.down_proj",
    "model.language_model.layers.2.mlp.experts.gate_up_proj", "model.language_model.layers.2.mlp.experts.down_proj"};

/* The held-out loss of a checkpoint, as text; NULL: the error is in `said`. */
static const char *loss_of(const char *model)
{
    static char text[4][128];
    static int next;
    char path[MT_PATH], ini[3 * MT_PATH], *out = text[next++ % 4];
    struct err err;
    const char *dir = scratch_dir();
    snprintf(path, sizeof(path), "%s/run.ini", dir);
    const int n = snprintf(ini, sizeof(ini),
                           "[model]\npath = %s\n[data]\neval = %s/eval.jsonl\nformat = text\nseq_len = 48\n"
                           "[train]\ndevice = cpu\n[output]\ndir = %s/out\n",
                           model, fixture("parity/qwen3_vl"), dir);
    if (file_write_atomic(path, ini, n, &err)) fail_msg("%s", err.msg);
    if (RUN("eval", path, "--base")) return NULL;
    const char *loss = strstr(said.out, "\"loss\":");
    snprintf(out, sizeof(text[0]), "%.*s", (int)strcspn(loss ? loss : "", ","), loss ? loss : "");
    return out;
}

/* Saves the checkpoint, with the tokenizer of the case. */
static const char *save(const struct draft *d)
{
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json"};
    const char *dir = draft_save(d, 1);
    for (int i = 0; i < MT_LEN(files); i++) {
        char from[MT_PATH], to[MT_PATH];
        snprintf(from, sizeof(from), "%s/%s", fixture("parity/qwen3_vl"), files[i]);
        snprintf(to, sizeof(to), "%s/%s", dir, files[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    return dir;
}

/* transformers saves the stacks of Qwen3-VL as [E, out, in], and reads them by their shape. Square matrices are
 * refused: transformers would read them as it saves them, vLLM as they are published. */
static void stacks_as_transformers_saves_them(void **state)
{
    (void)state;
    struct draft d;
    draft_open_case(&d, "parity/qwen3_vl");
    for (int i = 0; i < MT_LEN(stacks); i++) {
        const struct st_entry *e = draft_find(&d, stacks[i]);
        const int64_t n = e->shape[0], rows = e->shape[1], cols = e->shape[2];
        const uint16_t *from = e->data;
        uint16_t *to = mem_array(n * rows * cols, sizeof(*to));
        for (int64_t k = 0; k < n * rows * cols; k++)
            to[k / (rows * cols) * rows * cols + k % cols * rows + k / cols % rows] = from[k];
        draft_put(&d, stacks[i], DT_BF16, 3, (int64_t[]){n, cols, rows}, to);
    }
    const char *published = loss_of(fixture("parity/qwen3_vl")), *saved = loss_of(save(&d));
    if (!published || !saved) fail_msg("%s", said.err);
    assert_true(strlen(published) > 10);
    assert_string_equal(published, saved);
    draft_config(&d, "\"moe_intermediate_size\": 24", "\"moe_intermediate_size\": 20");
    draft_put(&d, stacks[0], DT_BF16, 3, (int64_t[]){6, 40, 40}, mem_array(6 * 40 * 40, 2));
    assert_null(loss_of(save(&d)));
    assert_says(said.err, "gate_up_proj has square matrices [40, 40]: it may be [E, in, out] as published, or ");
    draft_free(&d);
}

/* Gemma-4 in FP8 has a matrix per expert. In layers whose values are keys the configuration excludes v_proj too: vLLM
 * joins q, k and v there, and wants one format for the three names. Only every other layer of the model is of this
 * kind. */
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stacks_as_published), cmocka_unit_test(stacks_as_transformers_saves_them),
        cmocka_unit_test(single_experts_in_fp8), cmocka_unit_test(rounding_that_outweighs_the_adapter)};
    return cmocka_run_group_tests_name("export_stacks", tests, NULL, NULL);
}
