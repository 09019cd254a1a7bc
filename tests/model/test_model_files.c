/* test_model_files.c - files of a model as they are on a disk: pointers of Git LFS, incomplete downloads, weights in
 * other formats, an adapter in place of a model. */
#include "tests/process.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "model/stored/published.h"
#include "tests/checkpoints.h"

#define POINTER                                                                                                        \
    "version https://git-lfs.github.com/spec/v1\n"                                                                     \
    "oid sha256:b6ea5b0a40c3f1e2a35b4b1d1c9cd4ab0bd4c7bf2b32e8a9fbc6f1f8a8f00cb5\nsize 4792272488\n"

static const char *path_in(const char *dir, const char *name)
{
    static char paths[8][MT_PATH];
    static int n;
    char *path = paths[n++ % 8];
    if (str_format(path, MT_PATH, NULL, "path", "%s/%s", dir, name)) fail_msg("%s/%s is too long", dir, name);
    return path;
}

static void put_text(const char *path, const char *text)
{
    struct err err;
    if (file_write_atomic(path, text, (int64_t)strlen(text), &err)) fail_msg("%s", err.msg);
}

/* A copy of the parity checkpoint with its tokenizer. */
static const char *make_model(void)
{
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"};
    const char *dir = scratch_dir();
    struct err err;
    for (int i = 0; i < MT_LEN(files); i++) {
        struct file_map map;
        char name[64];
        snprintf(name, sizeof(name), "parity/case_a/%s", files[i]);
        if (file_map_open(&map, fixture(name), &err) ||
            file_write_atomic(path_in(dir, files[i]), map.data, map.size, &err))
            fail_msg("%s", err.msg);
        file_map_close(&map);
    }
    return dir;
}

/* One step of training with key = path ends with an error that has both words. */
static void assert_refused(const char *key, const char *path, const char *word, const char *other)
{
    char set[MT_PATH + 64];
    snprintf(set, sizeof(set), "%s=%s", key, path);
    assert_int_equal(RUN("train", process_config(""), "--set", set), 1);
    assert_says(said.err, word);
    assert_says(said.err, other);
    assert_says(said.err, "moetrain: error: ");
}

static void git_lfs(void **state)
{
    (void)state;
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"};
    for (int i = 0; i < MT_LEN(files); i++) {
        const char *dir = make_model();
        put_text(path_in(dir, files[i]), POINTER);
        assert_refused("model.path", dir, files[i], "a pointer of Git LFS, not the file itself: run `git lfs pull`");
    }
    const char *rows = path_in(scratch_dir(), "rows.jsonl");
    put_text(rows, POINTER);
    assert_refused("data.train", rows, "rows.jsonl", "a pointer of Git LFS");
}

static void in_place_of_a_model(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *gguf = path_in(dir, "a.gguf"), *torch = path_in(dir, "a.pt");
    put_text(gguf, "GGUF    ");
    put_text(torch, "PK");
    assert_refused("model.path", gguf, "a.gguf is a GGUF file, not the directory of a model", "original checkpoint");
    assert_refused("model.path", torch, "a.pt is a PyTorch file", "convert the model to safetensors");
    assert_refused("model.path", fixture("parity/case_a/model.safetensors"), "is a safetensors file",
                   "set model.path to its directory");
    assert_refused("model.path", dir, "is a directory of GGUF files, not a model", "original checkpoint");
    const char *config = process_trained("train.steps=1");
    char run[MT_PATH];
    snprintf(run, sizeof(run), "%s", process_output(config, ""));
    assert_refused("model.path", path_in(run, "adapter"), "is an adapter, not a model: set model.path to the base",
                   "by its adapter_config.json that is ");
    run[strlen(run) - 1] = 0;
    assert_refused("model.path", run, "is the directory of a run, not a model", "lora.init_from");
    assert_int_equal(RUN("plan", config, "--set", "model.path=/dev/null"), 1);
    assert_says(said.err, "/dev/null: not a directory");
    dir = make_model();
    assert_int_equal(rename(path_in(dir, "model.safetensors"), path_in(dir, "pytorch_model.bin")), 0);
    assert_refused("model.path", dir, "pytorch_model.bin: weights of PyTorch: convert them", "no model.safetensors");
}

/* Four shards and their index, without one shard, whose name it returns. */
static const char *lose_shard(const char *dir, const char *tensor)
{
    static char file[64];
    char text[1 << 16], key[256];
    process_read(path_in(dir, "model.safetensors.index.json"), text, sizeof(text));
    snprintf(key, sizeof(key), "\"%s\":", tensor);
    const char *at = strstr(text, key);
    assert_non_null(at);
    assert_int_equal(sscanf(at + strlen(key), " \"%63[^\"]", file), 1);
    assert_int_equal(unlink(path_in(dir, file)), 0);
    return file;
}

static void missing_shards(void **state)
{
    (void)state;
    static const char *const others[] = {"tokenizer.json", "tokenizer_config.json"};
    struct draft d;
    draft_open(&d);
    draft_random(&d, "", -1, "mtp.fc.weight", 8, 8);
    const char *dir = draft_save(&d, 4), *model = make_model(), *file;
    for (int i = 0; i < MT_LEN(others); i++)
        assert_int_equal(symlink(path_in(model, others[i]), path_in(dir, others[i])), 0);
    file = lose_shard(dir, "lm_head.weight");
    assert_refused("model.path", dir, file, "that file is missing: the download is incomplete, download it again");
    assert_int_equal(RUN("inspect", dir), 0);
    assert_says(said.out, "missing, such as ");
    assert_int_equal(RUN("quant", "int8", dir, path_in(scratch_dir(), "q.safetensors")), 1);
    assert_says(said.err, "the download is incomplete");
    draft_free(&d);
}

/* Only a tensor that is not read is missing. */
static void missing_predictions(void **state)
{
    (void)state;
    const char *dir = make_model();
    char set[MT_PATH + 64], index[1 << 16], *to = index;
    struct safetensors st;
    struct err err;
    if (safetensors_open(&st, dir, &err)) fail_msg("%s", err.msg);
    to += snprintf(to, 64, "{\"weight_map\": {\"mtp.fc.weight\": \"model-mtp.safetensors\"");
    for (int64_t i = 0; i < st.n_tensors; i++)
        to += snprintf(to, 512, ", \"%s\": \"model.safetensors\"", st.tensors[i].name);
    safetensors_close(&st);
    snprintf(to, 64, "}}");
    put_text(path_in(dir, "model.safetensors.index.json"), index);
    snprintf(set, sizeof(set), "model.path=%s", dir);
    if (RUN("train", process_config(""), "--set", set)) fail_msg("%s", said.err);
    assert_says(said.err,
                "1 tensor of the index is not in the checkpoint, and not needed, such as mtp.fc.weight of model-mtp");
}

/* Bytes that were never written read as zeros. */
static void holes(void **state)
{
    (void)state;
    const char *dir = make_model(), *path = path_in(dir, "model.safetensors");
    char set[MT_PATH + 64], copy[2 * MT_PATH];
    struct err err;
    snprintf(copy, sizeof(copy), "%s", path);
    snprintf(set, sizeof(set), "model.path=%s", dir);
    if (RUN("eval", process_config(""), "--set", set, "--base")) fail_msg("%s", said.err);
    assert_null(strstr(said.err, "has a hole at"));
    const int64_t size = file_size(copy);
    assert_int_equal(truncate(copy, 64 << 10), 0);
    assert_int_equal(truncate(copy, size), 0);
    if (!file_check_holes(copy, &err)) {
        print_message("skip: this file system does not tell holes\n");
        skip();
    }
    if (RUN("eval", process_config(""), "--set", set, "--base")) fail_msg("%s", said.err);
    assert_says(said.err, "has a hole at 64.0 KiB, where nothing was written");
}

/* ---- quantised formats */

#define MATRIX "model.layers.1.self_attn.k_proj"

/* A tensor beside or in place of a matrix names the format. */
static void foreign_formats(void **state)
{
    (void)state;
    static const struct {
        const char *suffix, *dtype, *beside, *scales, *says;
    } rows[] = {
        {".weight", "I8", ".SCB", "F32", "format bitsandbytes in 8 bits (LLM.int8) is not supported: use one in bf16"},
        {".weight", "I8", ".weight_scale", "BF16", "format INT8 (w8a8"},
        {".weight", "I8", ".weight_scales", "F16", "format EETQ"},
        {".weight", "I8", ".weight_scale_inv", "F32", "format INT8 with blocks"},
        {".weight", "I8", ".pre_quant_scale", "BF16", "scales of inputs (AWQ, SmoothQuant)"},
        {".weight", "U32", ".scales", "BF16", "format MLX"},
        {".switch_mlp.down_proj.weight", "BF16", ".other", "U8", "format MLX"},
        {".qweight", "I32", ".g_idx", "I32", "format GPTQ"},
        {".qweight", "I32", ".qzeros", "I32", "format AWQ (or GPTQ, AutoRound)"},
        {".W_q", "U8", ".zero", "F16", "format HQQ"},
        {".weight_packed", "U8", ".weight_scale", "U8", "format MXFP4 of compressed-tensors"},
        {".weight", "F8_E4M3", ".weight_scale", "U8", "format MXFP8"},
        {".weight_packed", "I32", ".scale_packed", "F16", "format 2:4 sparsity (marlin-24)"},
        {".compressed", "BF16", ".bitmask", "U8", "format sparse compressed-tensors"},
        {".weight", "I8", ".other", "U8", MATRIX ".weight is I8 [64, 128], expected BF16, F16, F32"},
        {".weight", "F8_E5M2", ".weight_scale", "F32", "this quantisation is not supported, use a checkpoint in bf16"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        const int64_t shape[] = {64, 128};
        char name[128], other[128];
        struct draft d;
        draft_open(&d);
        draft_remove(&d, MATRIX ".weight");
        snprintf(name, sizeof(name), "%s%s", MATRIX, rows[i].suffix);
        snprintf(other, sizeof(other), "%s%s", MATRIX, rows[i].beside);
        draft_put_as(&d, name, rows[i].dtype, 2, shape, mem_alloc(64 * 128 * 8));
        draft_put_as(&d, other, rows[i].scales, 2, shape, mem_alloc(64 * 128 * 8));
        assert_draft_refused(&d, rows[i].says);
        draft_free(&d);
    }
}

/* NVIDIA's NVFP4 of DeepSeek-V4 has the publisher's names with the suffixes of ModelOpt. */
static void nvfp4_of_deepseek_v4(void **state)
{
    (void)state;
    const char *dir = path_in(scratch_dir(), "model");
    struct draft d;
    if (RUN("synth", "deepseek-v4-tiny", dir, "--layers", "2", "--quant", "nvfp4")) fail_msg("%s", said.err);
    draft_open_dir(&d, dir);
    for (int64_t i = 0; i < d.n; i++) {
        char name[512];
        if (!published_name(name, sizeof(name), d.entries[i].name)) continue;
        mem_free((void *)(uintptr_t)d.entries[i].name);
        d.entries[i].name = mem_strdup(name);
    }
    assert_non_null(draft_find(&d, "layers.1.ffn.experts.0.w1.weight_scale_2"));
    assert_same_model(dir, draft_save(&d, 1));
    draft_free(&d);
}

/* Where a checkpoint with attention in NVFP4 does not fit, plan reports memory. */
static void nvfp4_attention_that_does_not_fit(void **state)
{
    (void)state;
    const struct linear_form form = {.format = WF_NVFP4};
    struct draft d;
    char set[MT_PATH + 64];
    draft_open(&d);
    draft_attention(&d, &form);
    draft_per_expert(&d, &form);
    snprintf(set, sizeof(set), "model.path=%s", draft_save(&d, 1));
    draft_free(&d);
    assert_int_equal(RUN("plan", process_config(""), "--set", set, "--set", "train.memory_gb=0.001"), 1);
    assert_says(said.err, "moetrain: error: training needs ");
    assert_says(said.out, "  memory  ");
    assert_null(strstr(said.err, "model.quantize"));
}

int test_model_files(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(git_lfs),
                                       cmocka_unit_test(in_place_of_a_model),
                                       cmocka_unit_test(missing_shards),
                                       cmocka_unit_test(missing_predictions),
                                       cmocka_unit_test(holes),
                                       cmocka_unit_test(foreign_formats),
                                       cmocka_unit_test(nvfp4_of_deepseek_v4),
                                       cmocka_unit_test(nvfp4_attention_that_does_not_fit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
