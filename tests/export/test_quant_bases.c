/* test_quant_bases.c - quantised checkpoints as sources of merged exports, and such exports as the base of a new run:
 * from NVFP4, FP8 and model.quantize = nvfp4 to merged-bf16, merged-nvfp4 and merged-fp8. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/safetensors.h"
#include "tests/checkpoints.h"
#include "tests/process.h"

#define EXPERTS "model.layers.0.mlp.experts."

/* Runs a command with assignments that spaces separate. */
static int run(const char *const *command, const char *sets)
{
    static char text[8 * MT_PATH];
    const char *words[48];
    int n = 0;
    for (; command[n]; n++) words[n] = command[n];
    snprintf(text, sizeof(text), "%s", sets);
    for (char *set = strtok(text, " "); set; set = strtok(NULL, " ")) {
        words[n++] = "--set";
        words[n++] = set;
    }
    words[n] = NULL;
    return process_run(words);
}
#define COMMAND(...)                                                                                                   \
    (const char *const[]) { __VA_ARGS__, NULL }

static double number_after(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    if (!at) fail_msg("no %s in:\n%s", key, text);
    return strtod(at + strlen(key), NULL);
}

static double eval_loss(const char *const *command, const char *sets)
{
    if (run(command, sets)) fail_msg("%s: %s", sets, said.err);
    return number_after(said.out, "\"loss\":");
}

/* A configuration of two steps on the first layers of a small model, with experts in this format. */
static const char *two_steps_of(const char *arch, const char *layers, const char *format)
{
    static char ini[4][MT_PATH];
    static int next;
    char *path = ini[next++ % 4], model[MT_PATH], text[4 * MT_PATH];
    const char *dir = scratch_dir(), *data = fixture("parity/qwen3/eval.jsonl");
    struct err err;
    snprintf(model, sizeof(model), "%s/model", dir);
    snprintf(path, MT_PATH, "%s/run.ini", dir);
    if (RUN("synth", arch, model, "--layers", layers, "--quant", format)) fail_msg("%s", said.err);
    const int n = snprintf(text, sizeof(text),
                           "[model]\npath = %s\n[data]\ntrain = %s\neval = %s\nformat = text\nseq_len = 24\n"
                           "[lora]\nr = 2\ntargets = all-linear\n[optim]\nlr = 0.02\nschedule = "
                           "constant\n[train]\ndevice = cpu\nsteps = 2\n"
                           "[output]\ndir = %s/out\n",
                           model, data, data, dir);
    assert_int_equal(file_write_atomic(path, text, n, &err), 0);
    return path;
}

static const char *two_steps(const char *format) { return two_steps_of("qwen3-tiny", "1", format); }

static const char *exported(const char *ini, const char *to, const char *sets)
{
    static char out[4][MT_PATH];
    static int next;
    char *dir = out[next++ % 4];
    snprintf(dir, MT_PATH, "%s/model", scratch_dir());
    if (run(COMMAND("export", ini, "--to", to, "--out", dir), sets)) fail_msg("%s: %s%s", to, said.out, said.err);
    return dir;
}

/* The held-out loss of the export is that of the trained model: its weights are those that training read. The export
 * trains like any other checkpoint, in its format. */
static void exports_are_bases(void **state)
{
    (void)state;
    static const struct {
        const char *arch, *layers, *source, *quantise, *format, *targets, *held;
    } rows[] = {
        {"qwen3-tiny", "1", "nvfp4", "none", "nvfp4", "experts", "experts: nvfp4"},
        {"qwen3-tiny", "1", "fp8", "none", "fp8", "all", "experts: fp8"},
        {"qwen3-tiny", "1", "bf16", "nvfp4", "fp8", "experts", "experts: fp8"},
        {"qwen3-tiny", "1", "fp8", "none", "nvfp4", "experts", "experts: nvfp4"},
        {"gemma-tiny", "1", "bf16", "none", "nvfp4", "experts", "experts: nvfp4"},
        {"qwen3.5-tiny", "1", "bf16", "none", "fp8", "all", "experts: fp8"},        /* in_proj_a, in_proj_b */
        {"qwen3-next-tiny", "1", "bf16", "none", "fp8", "all", "experts: fp8"},     /* in_proj_ba */
        {"nemotron-super-tiny", "2", "bf16", "none", "fp8", "all", "experts: fp8"}, /* Mamba-2; experts in a latent */
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        char sets[256], base[2 * MT_PATH], next[3 * MT_PATH], to[32];
        const char *ini = two_steps_of(rows[i].arch, rows[i].layers, rows[i].source);
        snprintf(sets, sizeof(sets), "model.quantize=%s quant.weights=%s quant.targets=%s%s", rows[i].quantise,
                 rows[i].format, rows[i].targets, strcmp(rows[i].targets, "all") ? " lora.targets=experts" : "");
        if (run(COMMAND(ini), sets)) fail_msg("row %d: %s", i, said.err);
        const double trained = eval_loss(COMMAND("eval", ini), sets);
        snprintf(to, sizeof(to), "merged-%s", rows[i].format);
        const char *model = exported(ini, to, sets);
        assert_says(said.out, "are bit for bit those that training read");
        snprintf(base, sizeof(base), "model.path=%s", model);
        assert_close(eval_loss(COMMAND("eval", ini, "--base"), base), trained, 1e-6);
        if (i > 1) continue;
        snprintf(next, sizeof(next), "%s output.dir=%s train.steps=1", base, scratch_dir());
        if (run(COMMAND("plan", ini), next)) fail_msg("row %d: %s", i, said.err);
        assert_says(said.out, rows[i].held);
        if (run(COMMAND(ini), next)) fail_msg("row %d: %s", i, said.err);
    }
}

/* Exports of runs without quantisation-aware training are rounded to bf16, or quantised, within the limits of the
 * verification. */
static void quantised_sources_are_merged(void **state)
{
    (void)state;
    static const char *const sources[][2] = {{"nvfp4", "none"}, {"fp8", "none"}, {"bf16", "nvfp4"}};
    static const char *const formats[] = {"merged-bf16", "merged-nvfp4", "merged-fp8"};
    for (int i = 0; i < MT_LEN(sources); i++) {
        char sets[64], base[2 * MT_PATH];
        const char *ini = two_steps(sources[i][0]);
        snprintf(sets, sizeof(sets), "model.quantize=%s", sources[i][1]);
        if (run(COMMAND(ini), sets)) fail_msg("%s: %s", sources[i][0], said.err);
        const double trained = eval_loss(COMMAND("eval", ini), sets);
        const double before = eval_loss(COMMAND("eval", ini, "--base"), sets);
        for (int k = 0; k < MT_LEN(formats); k++) {
            snprintf(base, sizeof(base), "model.path=%s", exported(ini, formats[k], sets));
            assert_close(eval_loss(COMMAND("eval", ini, "--base"), base), trained, k ? 0.5 * (before - trained) : 1e-3);
        }
    }
}

/* The export copies the codes of experts without adapters: quantising their decoded values would round them again. */
static void experts_without_adapters_keep_their_codes(void **state)
{
    (void)state;
    static const char *const formats[] = {"nvfp4", "fp8"};
    for (int k = 0; k < MT_LEN(formats); k++) {
        char to[32], model[MT_PATH];
        struct safetensors a, b;
        struct err err;
        const char *ini = two_steps(formats[k]), *sets = "lora.targets=q_proj,v_proj";
        if (run(COMMAND(ini), sets)) fail_msg("%s", said.err);
        snprintf(to, sizeof(to), "merged-%s", formats[k]);
        snprintf(model, sizeof(model), "%.*smodel", (int)(strrchr(ini, '/') + 1 - ini), ini);
        assert_int_equal(safetensors_open(&a, model, &err), 0);
        assert_int_equal(safetensors_open(&b, exported(ini, to, sets), &err), 0);
        assert_true(number_after(said.out, "experts only") <= 0);
        int64_t n = 0;
        for (int64_t i = 0; i < a.n_tensors; i++) {
            const struct st_tensor *t = &a.tensors[i], *u = safetensors_find(&b, t->name);
            assert_non_null(u);
            if (!strstr(t->name, ".experts.")) continue;
            assert_string_equal(t->st_dtype, u->st_dtype);
            assert_int_equal(t->bytes, u->bytes);
            assert_memory_equal(t->data, u->data, (size_t)t->bytes);
            n++;
        }
        assert_int_equal(n, 16 * 3 * (k ? 2 : 3));
        safetensors_close(&a);
        safetensors_close(&b);
    }
}

/* ---- what belongs to the quantisation of the source */

static void config_has(const char *dir, const char *word, bool has)
{
    static char text[1 << 14];
    char path[2 * MT_PATH];
    snprintf(path, sizeof(path), "%s/config.json", dir);
    process_read(path, text, sizeof(text));
    assert_int_equal(strstr(text, word) != NULL, has);
}

/* gpt-oss with ModelOpt's scales of activations and its quantisation files: a merge has neither. */
static void nothing_of_the_source_s_quantisation_stays(void **state)
{
    (void)state;
    static const char *const beside[] = {"tokenizer.json", "tokenizer_config.json", "hf_quant_config.json",
                                         "recipe.yaml"};
    static const char *const formats[] = {"merged-bf16", "merged-mxfp4"};
    const struct linear_form attention = {.format = WF_NVFP4};
    struct draft d;
    struct err err;
    char path[2 * MT_PATH], sets[4 * MT_PATH];
    draft_open(&d);
    draft_nvfp4_stacks(&d, false, false);
    draft_attention(&d, &attention);
    draft_put(&d, "model.layers.0.self_attn.k_proj.k_scale", DT_F32, 0, (int64_t[]){1}, mem_array(1, 4));
    draft_config(&d, "\"model_type\"", "\"compression_config\": {\"format\": \"other\"},\n  \"model_type\"");
    const char *model = draft_save(&d, 1);
    draft_free(&d);
    for (int i = 0; i < MT_LEN(beside); i++) {
        struct file_map map;
        snprintf(path, sizeof(path), "parity/case_a/%s", beside[i % 2]);
        assert_int_equal(file_map_open(&map, fixture(path), &err), 0);
        snprintf(path, sizeof(path), "%s/%s", model, beside[i]);
        assert_int_equal(file_write_atomic(path, map.data, map.size, &err), 0);
        file_map_close(&map);
    }
    const char *ini = process_config("");
    snprintf(sets, sizeof(sets), "model.path=%s data.format=text data.seq_len=24", model);
    for (int k = 0; k < MT_LEN(formats); k++) {
        struct safetensors st;
        char out[MT_PATH];
        snprintf(out, sizeof(out), "%s/model", scratch_dir());
        if (run(COMMAND("export", ini, "--to", formats[k], "--adapter", fixture("parity/case_a/adapter_final"), "--out",
                        out),
                sets))
            fail_msg("%s", said.err);
        assert_int_equal(safetensors_open(&st, out, &err), 0);
        for (int64_t i = 0; i < st.n_tensors; i++)
            if (strstr(st.tensors[i].name, "_scale") && !strstr(st.tensors[i].name, "_scales"))
                fail_msg("%s", st.tensors[i].name);
        safetensors_close(&st);
        for (int i = 0; i < MT_LEN(beside); i++) {
            snprintf(path, sizeof(path), "%s/%s", out, beside[i]);
            assert_int_equal(file_exists(path), i < 2);
        }
        config_has(out, "compression_config", false);
        config_has(out, "\"mxfp4\"", k == 1);
    }
}

/* ---- damaged weights */

#define LORA "base_model.model.model.layers.0.mlp.experts.base_layer."
/* Overwrites the first n bytes of a tensor of the file; n 0: all its bytes, by repeating 4 bytes. */
static void damage_file(const char *path, const char *tensor, const void *bytes, size_t n)
{
    struct safetensors st;
    struct err err;
    assert_int_equal(safetensors_open(&st, path, &err), 0);
    const struct st_tensor *t = safetensors_find(&st, tensor);
    assert_non_null(t);
    int64_t size;
    char *file = file_read(path, (int64_t)1 << 30, &size, &err);
    assert_non_null(file);
    assert_true(t->offset >= 0 && t->offset + t->bytes <= size);
    for (int64_t at = 0; at < (n ? 1 : t->bytes); at += 4) memcpy(file + t->offset + at, bytes, n ? n : 4);
    safetensors_close(&st);
    assert_int_equal(file_write_atomic(path, file, size, &err), 0);
    mem_free(file);
}

static void damage(const char *ini, const char *tensor, const void *bytes, size_t n)
{
    char path[MT_PATH];
    snprintf(path, sizeof(path), "%.*smodel/model.safetensors", (int)(strrchr(ini, '/') + 1 - ini), ini);
    damage_file(path, tensor, bytes, n);
}

/* An adapter of finite values makes merged weights that are infinite, which have no code. */
static void weights_that_are_not_finite(void **state)
{
    (void)state;
    static const char *const formats[] = {"int8", "fp8", "nvfp4"};
    const char *ini = two_steps("bf16");
    const float huge = 1e30f;
    char adapter[MT_PATH], sets[4 * MT_PATH];
    if (run(COMMAND(ini), "train.steps=1")) fail_msg("%s", said.err);
    snprintf(adapter, sizeof(adapter), "%.*sout/adapter", (int)(strrchr(ini, '/') + 1 - ini), ini);
    for (int b = 0; b < 2; b++) {
        snprintf(sets, sizeof(sets), "%s/adapter_model.safetensors", adapter);
        damage_file(sets, b ? LORA "lora_B.weight" : LORA "lora_A.weight", &huge, 0);
    }
    for (int i = 0; i < MT_LEN(formats); i++) {
        snprintf(sets, sizeof(sets), "quant.weights=%s lora.init_from=%s output.dir=%s/out", formats[i], adapter,
                 scratch_dir());
        assert_int_equal(run(COMMAND(ini), sets), 1);
        assert_says(said.err, "gate_up_proj of layer 0 has a weight that is not finite (matrix 0)");
    }
}

/* Negative scales are refused: no quantiser writes them, and readers interpret them differently. */
static void scales_that_are_none(void **state)
{
    (void)state;
    static const float negative = -1, nan = NAN;
    static const struct {
        const char *source, *quantise, *tensor;
        const void *bytes;
        size_t n;
        const char *says;
    } rows[] = {
        {"fp8", "none", "down_proj.weight_scale", &negative, 4, "has the value -1, which is not a scale"},
        {"fp8", "nf4", "down_proj.weight_scale", &negative, 4, "has the value -1, which is not a scale"},
        {"fp8", "nf4", "down_proj.weight_scale", &nan, 4, "_scale has the value nan at [0]: the"},
        {"nvfp4", "none", "down_proj.weight_scale", "\xb8", 1, "has a scale that is NaN or negative"},
        {"nvfp4", "none", "down_proj.weight_scale", "\x7f", 1, "_scale has the value nan at [0, 0]: the"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        char tensor[256], set[64];
        const char *ini = two_steps(rows[i].source);
        snprintf(tensor, sizeof(tensor), EXPERTS "3.%s", rows[i].tensor);
        snprintf(set, sizeof(set), "model.quantize=%s", rows[i].quantise);
        damage(ini, tensor, rows[i].bytes, rows[i].n);
        assert_int_equal(run(COMMAND(ini), set), 1);
        assert_says(said.err, rows[i].says);
        assert_says(said.err, tensor);
    }
}

int test_quant_bases(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exports_are_bases),
        cmocka_unit_test(quantised_sources_are_merged),
        cmocka_unit_test(experts_without_adapters_keep_their_codes),
        cmocka_unit_test(nothing_of_the_source_s_quantisation_stays),
        cmocka_unit_test(weights_that_are_not_finite),
        cmocka_unit_test(scales_that_are_none),
    };
    return cmocka_run_group_tests_name("quant_bases", tests, NULL, NULL);
}
