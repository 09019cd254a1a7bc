/* test_gguf_model.c - export --to gguf-model: bytes of the blocks, the tensors of each family, keys, refusals, and
 * files that were changed. tests/parity/gguf_model.py compares llama.cpp with transformers on the same files. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "kernels/format/quant.h"
#include "model/layer.h"
#include "tests/process.h"
#include "train/gguf/ggml_blocks.h"
#include "train/gguf/gguf_items.h"
#include "train/gguf/gguf_meta.h"

/* ---- blocks */

enum { N = 96 };

/* zlib's CRC-32 of bytes, by a file. */
static uint32_t crc_of(const uint8_t *bytes, int64_t n)
{
    const char *dir = scratch_dir();
    char path[MT_PATH];
    uint32_t crc;
    int64_t size;
    struct err err;
    snprintf(path, sizeof(path), "%s/bytes", dir);
    assert_int_equal(file_write_atomic(path, bytes, n, &err), 0);
    assert_int_equal(file_crc32(path, &crc, &size, &err), 0);
    return crc;
}

static void values_of(float x[N])
{
    for (int i = 0; i < N; i++) x[i] = (float)(((i * 37) % 64 - 31) / 16.0 * (1 + i / 32 * 0.37));
}

/* The bytes of gguf.quants.quantize of llama.cpp's gguf package 0.19. */
static void blocks_are_those_of_ggml(void **state)
{
    (void)state;
    static const struct {
        enum ggml_type type;
        int bytes;
        uint32_t crc;
    } rows[] = {{GGML_Q8_0, 102, 3920945598}, {GGML_Q4_0, 54, 253973041}, {GGML_F16, 192, 2174814014}};
    float x[N], y[N];
    uint8_t out[4 * N], nibbles[N / 2], scales[N / 32], again[N / 2 + N / 32];
    values_of(x);
    for (int r = 0; r < MT_LEN(rows); r++) {
        const struct ggml_layout *l = ggml_layout(rows[r].type);
        assert_int_equal(N / l->block * l->bytes, rows[r].bytes);
        assert_int_equal(ggml_encode(out, rows[r].type, x, N), 0);
        assert_int_equal(crc_of(out, rows[r].bytes), rows[r].crc);
        ggml_decode(y, rows[r].type, out, N);
        double most = 0;
        for (int i = 0; i < N; i++) {
            const double allowed = ggml_error(rows[r].type, x + i / l->block * l->block);
            assert_true(fabs((double)x[i] - (double)y[i]) <= allowed);
            most = fmax(most, fabs((double)x[i] - (double)y[i]) / allowed);
        }
        assert_true(most > (rows[r].type == GGML_F16 ? 0 : 0.4)); /* the limit is not far away */
    }
    assert_int_equal(quant_mxfp4_encode(nibbles, scales, x, N), 0);
    ggml_mxfp4_pack(out, nibbles, scales, N);
    for (int i = 0; i < N;
         i++) { /* value i of a block is in byte i % 16 after its scale, from 16 on in the upper half */
        const int at = i % 32 % 16, shift = i % 32 / 16 * 4;
        assert_int_equal(out[i / 32 * 17], scales[i / 32]);
        assert_int_equal(out[i / 32 * 17 + 1 + at] >> shift & 15, nibbles[i / 2] >> i % 2 * 4 & 15);
    }
    ggml_mxfp4_unpack(again, again + N / 2, out, N);
    assert_memory_equal(again, nibbles, N / 2);
    assert_memory_equal(again + N / 2, scales, N / 32);
}

static void values_that_no_block_holds(void **state)
{
    (void)state;
    static const float bad[] = {INFINITY, -INFINITY, NAN, 1e9f, -3e38f};
    uint8_t out[4 * N];
    float x[N];
    for (int i = 0; i < MT_LEN(bad); i++) {
        values_of(x);
        x[40] = bad[i];
        assert_int_equal(ggml_encode(out, GGML_Q8_0, x, N), 1);
        assert_int_equal(ggml_encode(out, GGML_Q4_0, x, N), 1);
        assert_int_equal(ggml_encode(out, GGML_F16, x, N), 1);
        assert_int_equal(ggml_encode(out, GGML_F32, x, N), !isfinite(bad[i]));
    }
    memset(x, 0, sizeof(x));
    x[3] = 1e-42f; /* the inverse of its scale is infinite */
    assert_int_equal(ggml_encode(out, GGML_Q8_0, x, N) + ggml_encode(out, GGML_Q4_0, x, N), 0);
}

/* ---- exports */

static const char *path_in(const char *dir, const char *name)
{
    static char path[4][MT_PATH];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, MT_PATH, "%s/%s", dir, name);
    return p;
}

/* A configuration with a model, or the model and the adapter of a case of the parity tests. */
static const char *config_of(const char *model, const char *rows)
{
    static char path[4][MT_PATH];
    static int next;
    char *p = path[next++ % 4];
    const char *dir = scratch_dir();
    snprintf(p, MT_PATH, "%s/run.ini", dir);
    FILE *f = fopen(p, "w");
    assert_non_null(f);
    fprintf(f,
            "[model]\npath = %s\n[data]\ntrain = %s\neval = %s\nformat = text\nseq_len = 24\n[train]\ndevice = cpu\n"
            "steps = 3\n[optim]\nlr = 5e-3\n[lora]\nr = 3\ntargets = all-linear\n[output]\ndir = %s/run\n",
            model, rows, rows, dir);
    assert_int_equal(fclose(f), 0);
    return p;
}

static const char *case_path(const char *name, const char *file)
{
    char path[256];
    snprintf(path, sizeof(path), "parity/%s/%s", name, file);
    return fixture(path);
}

/* Exports with a type of the matrices and opens the file; the caller closes it. */
static const char *exported(struct gguf *g, const char *config, const char *adapter, const char *type)
{
    static char out[4][MT_PATH];
    static int next;
    char *dir = out[next++ % 4];
    struct err err;
    snprintf(dir, MT_PATH, "%s/out", scratch_dir());
    if (RUN("export", config, "--to", "gguf-model", "--quantize", type, "--adapter", adapter, "--out", dir))
        fail_msg("%s%s", said.out, said.err);
    assert_says(said.out, "whole adapter ");
    if (gguf_open(g, path_in(dir, "model.gguf"), &err)) fail_msg("%s", err.msg);
    return dir;
}

static void assert_type(const struct gguf *g, const char *name, enum ggml_type type)
{
    const struct gguf_tensor *t = gguf_tensor(g, name);
    if (!t) fail_msg("no tensor %s", name);
    assert_int_equal(t->type, type);
}

static void assert_keys(const struct gguf *g, const char *arch, int64_t n_vocab)
{
    char key[64];
    const struct gguf_value *v = gguf_value(g, "general.architecture");
    assert_true(v && !strcmp(v->text, arch));
    snprintf(key, sizeof(key), "%s.block_count", arch);
    assert_non_null(gguf_value(g, key));
    v = gguf_value(g, "tokenizer.ggml.tokens");
    assert_true(v && v->of == GGUF_STRING && v->n == n_vocab);
    v = gguf_value(g, "tokenizer.ggml.pre");
    assert_true(v && !strcmp(v->text, "gpt-4o"));
    assert_non_null(gguf_value(g, "tokenizer.ggml.eos_token_id"));
}

/* The adapters of the parity cases; export verifies values and outputs. In F32 nothing is lost. */
static void each_family(void **state)
{
    (void)state;
    static const struct {
        const char *name, *arch;
        int64_t vocab;
    } cases[] = {{"case_a", "gpt-oss", 4096},
                 {"qwen3", "qwen3moe", 1024},
                 {"olmoe", "olmoe", 1024},
                 {"mixtral", "llama", 1024},
                 {"glm4_lite", "deepseek2", 1024},
                 {"glm4", "glm4moe", 1024},
                 {"minimax_m2", "minimax-m2", 1024},
                 {"lfm2", "lfm2moe", 1024},
                 {"nemotron_latent", "nemotron_h_moe", 1024},
                 {"gemma4", "gemma4", 1024}};
    static const char *const types[] = {"f32", "q8_0"};
    for (int i = 0; i < MT_LEN(cases); i++)
        for (int t = 0; t < MT_LEN(types); t++) {
            struct gguf g;
            const char *name = cases[i].name;
            const char *config = config_of(case_path(name, ""), case_path(name, "eval.jsonl"));
            const char *dir = exported(&g, config, case_path(name, "adapter_final"), types[t]);
            assert_keys(&g, cases[i].arch, gguf_tensor(&g, "token_embd.weight")->shape[0]);
            assert_type(&g, "blk.0.attn_norm.weight", GGML_F32);
            if (!t) assert_type(&g, "blk.1.ffn_down_exps.weight", GGML_F32);
            if (t && !i) assert_type(&g, "blk.1.ffn_up_exps.weight", GGML_MXFP4);
            if (t && !i) assert_type(&g, "blk.1.attn_q.weight", GGML_Q8_0);
            gguf_close(&g);
            assert_true(file_exists_in(dir, "Modelfile") && file_exists_in(dir, "README.md"));
            if (!i && RUN("export", config, "--to", "gguf-model", "--quantize", types[t], "--adapter",
                          case_path(name, "adapter_final"), "--verify", dir))
                fail_msg("%s", said.err);
        }
}

/* Reads a Modelfile as Ollama's documentation has it: comments, and lines "INSTRUCTION argument". Returns the number of
 * instructions; from, adapter: their arguments, which are files beside the Modelfile. */
static int read_modelfile(const char *dir, char from[64], char adapter[64])
{
    char text[2048], *rest = NULL;
    int n = 0;
    from[0] = adapter[0] = 0;
    process_read(path_in(dir, "Modelfile"), text, sizeof(text));
    assert_true(text[0] && text[strlen(text) - 1] == '\n');
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (line[0] == '#') continue;
        n++;
        if (sscanf(line, "FROM ./%63s", from) != 1 && sscanf(line, "ADAPTER ./%63s", adapter) != 1)
            fail_msg("%s", line);
    }
    return n;
}

static void modelfiles(void **state)
{
    (void)state;
    char from[64], adapter[64];
    struct gguf g;
    const char *config = config_of(case_path("case_a", ""), case_path("case_a", "eval.jsonl"));
    const char *dir = exported(&g, config, case_path("case_a", "adapter_final"), "q8_0");
    gguf_close(&g);
    assert_int_equal(read_modelfile(dir, from, adapter), 1);
    assert_true(file_exists_in(dir, from));
    dir = path_in(scratch_dir(), "adapter");
    if (RUN("export", config, "--to", "gguf", "--adapter", case_path("case_a", "adapter_final"), "--out", dir))
        fail_msg("%s", said.err);
    assert_int_equal(read_modelfile(dir, from, adapter), 2);
    assert_string_equal(from, "MODEL.gguf"); /* the user's */
    assert_true(file_exists_in(dir, adapter));
}

/* Models whose rows have whole blocks; a trained adapter. */
static void each_type(void **state)
{
    (void)state;
    static const char *const models[][2] = {
        {"qwen3-tiny", "blk.1.attn_output.weight"},     {"glm-tiny", "blk.1.attn_output.weight"},
        {"glm-flash-tiny", "blk.1.attn_output.weight"}, {"qwen3-next-tiny", "blk.1.ssm_out.weight"},
        {"qwen3.5-tiny", "blk.1.ssm_out.weight"},       {"nemotron-super-tiny", "blk.0.ssm_in.weight"}};
    for (int i = 0; i < MT_LEN(models); i++) {
        const char *model = path_in(scratch_dir(), "model");
        if (RUN("synth", models[i][0], model, "--layers", "2")) fail_msg("%s", said.err);
        const char *config = config_of(model, case_path("case_a", "eval.jsonl"));
        char adapter[MT_PATH];
        snprintf(adapter, sizeof(adapter), "%.*s/run/adapter", (int)(strrchr(config, '/') - config), config);
        if (RUN(config)) fail_msg("%s", said.err);
        for (int t = 0; t < 2; t++) {
            struct gguf g;
            exported(&g, config, adapter, t ? "q4_0" : "q8_0");
            assert_says(said.out, t ? "rounding to Q4_0 removes " : "rounding to Q8_0 removes ");
            assert_type(&g, models[i][1], t ? GGML_Q4_0 : GGML_Q8_0);
            assert_type(&g, "blk.1.ffn_down_exps.weight", t ? GGML_Q4_0 : GGML_Q8_0);
            gguf_close(&g);
        }
    }
}

/* After training for MXFP4 the experts have the codes that training read. */
static void trained_codes(void **state)
{
    (void)state;
    const char *config = config_of(case_path("case_a", ""), case_path("case_a", "eval.jsonl"));
    const char *qat = "quant.weights=mxfp4";
    char dir[MT_PATH];
    snprintf(dir, sizeof(dir), "%s/out", scratch_dir());
    if (RUN(config, "--set", qat, "--set", "optim.lr=3e-2")) fail_msg("%s", said.err);
    if (RUN("export", config, "--set", qat, "--to", "gguf-model", "--out", dir)) fail_msg("%s%s", said.out, said.err);
    assert_says(said.out, "quantised weights are bit for bit those that training read");
    assert_null(strstr(said.err, "does not contain"));
    if (RUN("export", config, "--set", qat, "--set", "quant.targets=all", "--to", "gguf-model", "--out",
            path_in(scratch_dir(), "all")))
        fail_msg("%s%s", said.out, said.err);
    assert_says(said.err, "gguf-model does not contain them");
}

/* A changed byte of a tensor, of each kind, is found. */
static void changed_files(void **state)
{
    (void)state;
    static const char *const names[] = {"blk.1.ffn_gate_exps.weight", "blk.0.attn_k.weight", "blk.1.attn_output.weight",
                                        "blk.0.ffn_down_exps.weight"};
    struct gguf g;
    const char *config = config_of(case_path("case_a", ""), case_path("case_a", "eval.jsonl"));
    const char *adapter = case_path("case_a", "adapter_final"), *dir = exported(&g, config, adapter, "q8_0");
    const char *file = path_in(dir, "model.gguf");
    for (int i = 0; i < MT_LEN(names); i++) {
        const struct gguf_tensor *t = gguf_tensor(&g, names[i]);
        const int64_t at =
            (const uint8_t *)t->data - g.map.data + (t->type == GGML_MXFP4 ? 17 * 5 : 34 * 5 + 1); /* a scale */
        FILE *f = fopen(file, "r+b");
        assert_true(f && !fseek(f, (long)at, SEEK_SET));
        const int byte = fgetc(f);
        assert_true(!fseek(f, (long)at, SEEK_SET) && fputc(byte ^ 3, f) != EOF && !fclose(f));
        assert_int_equal(RUN("export", config, "--to", "gguf-model", "--adapter", adapter, "--verify", dir), 1);
        assert_says(said.err, "weights are not base + adapter");
        f = fopen(file, "r+b");
        assert_true(f && !fseek(f, (long)at, SEEK_SET) && fputc(byte, f) != EOF && !fclose(f));
    }
    gguf_close(&g);
    assert_int_equal(
        RUN("export", config, "--to", "gguf-model", "--quantize", "f16", "--adapter", adapter, "--verify", dir), 1);
    assert_says(said.err, "has another type: verify with the --quantize that wrote this export");
}

static void refusals(void **state)
{
    (void)state;
    static const char *const families[] = {"deepseek_v4"};
    for (int i = 0; i < MT_LEN(families); i++) {
        const char *config = config_of(case_path(families[i], ""), case_path("case_a", "eval.jsonl"));
        assert_int_equal(RUN("export", config, "--to", "gguf-model", "--adapter", case_path("case_a", "adapter_final")),
                         1);
        assert_says(said.err,
                    "--to gguf-model writes gpt_oss, qwen3_moe, olmoe, mixtral, minimax_m2, glm4_moe, glm4_moe_lite, ");
    }
    const char *yarn = config_of(case_path("deepseek_v3", ""), case_path("case_a", "eval.jsonl"));
    assert_int_equal(RUN("export", yarn, "--to", "gguf-model", "--adapter", case_path("case_a", "adapter_final")), 1);
    assert_says(said.err, "other factors of YaRN");
    const char *config = config_of(case_path("case_a", ""), case_path("case_a", "eval.jsonl"));
    assert_int_equal(
        RUN("export", config, "--to", "gguf", "--quantize", "q8_0", "--adapter", case_path("case_a", "adapter_final")),
        1);
    assert_says(said.err, "--quantize q8_0 is only for --to gguf-model");
}

/* The export refuses a model that differs from what llama.cpp's code fixes for its family. */
static void other_models(void **state)
{
    (void)state;
    struct err err;
    struct arch *a = test_malloc(sizeof(*a)), *b = test_malloc(sizeof(*b));
    if (arch_load(a, case_path("qwen3", ""), &err) || arch_load(b, case_path("case_a", ""), &err))
        fail_msg("%s", err.msg);
    assert_int_equal(gguf_items_check(a, &err) | gguf_items_check(b, &err), 0);
    a->router.kind = ROUTER_PROBABILITY;
    assert_int_equal(gguf_items_check(a, &err), -1);
    assert_says(err.msg, "norm_topk_prob");
    a->router.kind = ROUTER_CHOSEN;
    a->dense[1] = true;
    assert_int_equal(gguf_items_check(a, &err), -1);
    assert_says(err.msg, "dense layers");
    b->attn_of[0] = b->attn_of[1];
    assert_int_equal(gguf_items_check(b, &err), -1);
    assert_says(err.msg, "sliding windows");
    test_free(a);
    test_free(b);
}

static void refuse_arch(const struct arch *a, const char *words)
{
    struct err err;
    assert_int_equal(gguf_items_check(a, &err), -1);
    assert_says(err.msg, words);
}

/* The keys of a family have these values, for each layer or one for all. */
static void assert_values(const struct arch *a, const char *const (*rows)[2], int n)
{
    struct gguf_meta m;
    const struct gguf_meta_model model = {a, "x", NULL, NULL, GGML_F32};
    gguf_meta_open(&m, &model);
    for (int i = 0; i < n; i++) {
        char text[64] = "";
        for (int64_t k = 0; k < m.n; k++) {
            const struct gguf_value *v = &m.values[k];
            const char *dot = strchr(v->key, '.');
            if (strcmp(dot + 1, rows[i][0])) continue;
            if (v->type != GGUF_ARRAY) snprintf(text, sizeof(text), "%u", v->u32);
            for (int64_t l = 0; v->type == GGUF_ARRAY && l < v->n; l++)
                snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%d", l ? " " : "",
                         ((const int32_t *)v->array)[l]);
        }
        assert_string_equal(text, rows[i][1]);
    }
    gguf_meta_close(&m);
}

/* Layers with a convolution have 0 key heads, by which llama.cpp recognises them. */
static void lfm2(void **state)
{
    (void)state;
    static const char *const keys[][2] = {
        {"shortconv.l_cache", "3"}, {"leading_dense_block_count", "1"}, {"attention.head_count_kv", "0 2 0 2"}};
    struct err err;
    struct arch *a = test_malloc(sizeof(*a));
    if (arch_load(a, case_path("lfm2", ""), &err) || gguf_items_check(a, &err)) fail_msg("%s", err.msg);
    assert_values(a, keys, MT_LEN(keys));
    a->router.scale = 2;
    refuse_arch(a, "routed_scaling_factor");
    a->router.scale = 1;
    a->conv.bias = true;
    refuse_arch(a, "conv_bias");
    test_free(a);
}

/* llama.cpp recognises a layer with a state space by 0 key heads and a network of width 0. */
static void nemotron(void **state)
{
    (void)state;
    static const char *const keys[][2] = {{"attention.head_count_kv", "0 0 2 0"},
                                          {"feed_forward_length", "0 16 0 16"},
                                          {"moe_latent_size", "24"},
                                          {"expert_shared_feed_forward_length", "32"},
                                          {"ssm.conv_kernel", "4"},
                                          {"ssm.state_size", "16"},
                                          {"ssm.group_count", "2"},
                                          {"ssm.time_step_rank", "4"},
                                          {"ssm.inner_size", "48"},
                                          {"rope.freq_base", ""}};
    struct err err;
    struct gguf_items list;
    struct arch *a = test_malloc(sizeof(*a));
    if (arch_load(a, case_path("nemotron_latent", ""), &err) || gguf_items_check(a, &err)) fail_msg("%s", err.msg);
    assert_values(a, keys, MT_LEN(keys));
    gguf_items_list(&list, a, GGML_F32);
    for (int64_t i = 0; i < list.n; i++) {
        const struct gguf_tensor t = gguf_items_tensor(&list.items[i]);
        assert_null(strstr(t.name, "gate_exps"));
        if (!strcmp(t.name, "blk.0.ssm_norm.weight")) assert_true(t.shape[0] == 2 && t.shape[1] == 24);
        if (!strcmp(t.name, "blk.0.ssm_a")) assert_true(list.items[i].decay && t.shape[0] == 4 && t.shape[1] == 1);
    }
    gguf_items_free(&list);
    a->mamba.bias = true;
    refuse_arch(a, "use_bias");
    a->mamba.bias = false;
    a->mamba.dt_min = 0.002;
    refuse_arch(a, "time_step_min");
    if (arch_load(a, case_path("nemotron", ""), &err)) fail_msg("%s", err.msg);
    refuse_arch(a, "dense layers");
    test_free(a);
}

/* The kinds of attention have other sizes; llama.cpp has 1 / sqrt(D) of the router's scale in its code. */
static void gemma(void **state)
{
    (void)state;
    static const char *const keys[][2] = {{"attention.sliding_window_pattern", "1 0 0"},
                                          {"attention.sliding_window", "8"},
                                          {"attention.key_length_swa", "16"},
                                          {"rope.dimension_count_swa", "16"},
                                          {"embedding_length_per_layer_input", "0"}};
    struct err err;
    struct gguf_items list;
    float rope[64];
    int found = 0;
    struct arch *a = test_malloc(sizeof(*a));
    if (arch_load(a, case_path("gemma4", ""), &err) || gguf_items_check(a, &err)) fail_msg("%s", err.msg);
    assert_values(a, keys, MT_LEN(keys));
    const int64_t n = a->attn[0].head_dim / 2;
    gguf_items_rope(a, rope);
    for (int64_t i = 0; i < n; i++) assert_true(i < n / 4 ? rope[i] <= 1 && rope[i] >= 1 : rope[i] > 1e29f);
    gguf_items_list(&list, a, GGML_F32);
    for (int64_t i = 0; i < list.n; i++) {
        const struct gguf_item *item = &list.items[i];
        const float two = 2, root = sqrtf((float)a->d_model);
        float out[2] = {0};
        if (strcmp(item->name, "blk.0.ffn_gate_inp.scale")) continue;
        struct gguf_item one = *item;
        one.n_col = 1;
        gguf_items_vector(&one, false, &out[0], &two);
        gguf_items_vector(&one, true, &out[1], &out[0]);
        assert_float_equal(out[0], 2 * root, 1e-5);
        assert_float_equal(out[1], 2, 1e-6);
        found++;
    }
    assert_int_equal(found, 1);
    gguf_items_free(&list);
    a->rope[a->attn[0].rope].n_pair = 0;
    refuse_arch(a, "rope_parameters");
    test_free(a);
}

/* A changed value of rope_freqs, which has no weight of the model, is found. */
static void changed_rope(void **state)
{
    (void)state;
    struct gguf g;
    const char *config = config_of(case_path("gemma4", ""), case_path("gemma4", "eval.jsonl"));
    const char *adapter = case_path("gemma4", "adapter_final"), *dir = exported(&g, config, adapter, "f32");
    const int64_t at = (const uint8_t *)gguf_tensor(&g, "rope_freqs.weight")->data - g.map.data;
    FILE *f = fopen(path_in(dir, "model.gguf"), "r+b");
    assert_true(f && !fseek(f, (long)at, SEEK_SET) && fputc(1, f) != EOF && !fclose(f));
    assert_int_equal(
        RUN("export", config, "--to", "gguf-model", "--quantize", "f32", "--adapter", adapter, "--verify", dir), 1);
    assert_says(said.err, "rope_freqs.weight has other values");
    gguf_close(&g);
}

/* ---- latent attention */

static bool has_item(const struct arch *a, const char *name)
{
    struct gguf_items list;
    bool found = false;
    gguf_items_list(&list, a, GGML_F32);
    for (int64_t i = 0; i < list.n; i++) found = found || !strcmp(list.items[i].name, name);
    gguf_items_free(&list);
    return found;
}

/* Without q_lora_rank, as in Moonlight, queries have one matrix; llama.cpp expects one in models with 27 layers. */
static void latent(void **state)
{
    (void)state;
    static const char *const with[][2] = {{"attention.q_lora_rank", "48"}}, *const without[][2] = {
                                                                                {"attention.q_lora_rank", "0"}};
    struct err err;
    struct arch *a = test_malloc(sizeof(*a));
    if (arch_load(a, case_path("glm4_lite", ""), &err) || gguf_items_check(a, &err)) fail_msg("%s", err.msg);
    assert_values(a, with, 1);
    assert_true(has_item(a, "blk.0.attn_q_a.weight") && has_item(a, "blk.0.attn_q_a_norm.weight"));
    assert_false(has_item(a, "blk.0.attn_q.weight"));
    a->mla.q_lora = 0;
    if (gguf_items_check(a, &err)) fail_msg("%s", err.msg);
    assert_values(a, without, 1);
    assert_true(has_item(a, "blk.0.attn_q.weight") && has_item(a, "blk.0.attn_kv_a_mqa.weight"));
    assert_false(has_item(a, "blk.0.attn_q_a.weight") || has_item(a, "blk.0.attn_q_a_norm.weight"));
    const struct arch small = *a;
    for (int64_t n = 25; n < 29; n++) {
        a->n_layer = n;
        for (int64_t l = 0; l < n; l++) { /* as layer 1 */
            a->mixer[l] = small.mixer[1], a->ffn[l] = small.ffn[1];
            a->dense[l] = false;
        }
        a->mla.q_lora = 0;
        if (gguf_items_check(a, &err)) fail_msg("%s", err.msg);
        a->mla.q_lora = 48;
        if (n == 26 || n == 27)
            refuse_arch(a, "q_lora_rank");
        else if (gguf_items_check(a, &err))
            fail_msg("%s", err.msg);
    }
    test_free(a);
}

/* ---- gated DeltaNet */

enum { KEYS = 2, VALUES = 4, WIDTH = 32, TAPS = 4, CONV = (2 * KEYS + VALUES) * WIDTH }; /* of the tiny models */

/* n values of a tensor of the checkpoint, from row `row` of n on; the next call overwrites them. */
static const float *stored_row(const struct safetensors *st, const char *name, int64_t row, int64_t n)
{
    static float values[256];
    char full[128];
    snprintf(full, sizeof(full), "%slayers.0.linear_attn.%s", weights_prefix(st), name);
    const struct st_tensor *t = safetensors_find(st, full);
    if (!t) fail_msg("no tensor %s", full);
    struct st_tensor part = *t;
    part.data += row * n * dtype_size(t->dtype);
    checkpoint_f32(&part, n, values);
    return values;
}

static const float *written_row(const struct gguf *g, const char *name, int64_t row, int64_t n)
{
    char full[64];
    snprintf(full, sizeof(full), "blk.0.%s", name);
    const struct gguf_tensor *t = gguf_tensor(g, full);
    if (!t) fail_msg("no tensor %s", full);
    assert_int_equal(t->type, GGML_F32);
    return (const float *)(const void *)t->data + row * n;
}

/* Row `row` of the file is row `from` of the checkpoint. */
static void same_row(const struct gguf *g, const char *name, int64_t row, const struct safetensors *st,
                     const char *stored, int64_t from, int64_t n)
{
    assert_memory_equal(written_row(g, name, row, n), stored_row(st, stored, from, n), (size_t)n * sizeof(float));
}

/* Vectors, and the output's columns, by value head; head[i]: that of the checkpoint for head i of the file. */
static void same_heads(const struct gguf *g, const struct safetensors *st, const int64_t *head)
{
    for (int64_t i = 0; i < VALUES; i++) {
        assert_float_equal(*written_row(g, "ssm_a", i, 1), -expf(*stored_row(st, "A_log", head[i], 1)), 1e-6);
        same_row(g, "ssm_dt.bias", i, st, "dt_bias", head[i], 1);
    }
    for (int64_t i = 0; i < CONV; i++) {
        const int64_t v = i - 2 * KEYS * WIDTH, from = v < 0 ? i : i - v + head[v / WIDTH] * WIDTH + v % WIDTH;
        same_row(g, "ssm_conv1d.weight", i, st, "conv1d.weight", from, TAPS);
    }
    const float *to = written_row(g, "ssm_out.weight", 3, VALUES * WIDTH),
                *from = stored_row(st, "out_proj.weight", 3, VALUES * WIDTH);
    for (int64_t i = 0; i < VALUES * WIDTH; i++) assert_true(to[i] == from[head[i / WIDTH] * WIDTH + i % WIDTH]);
    same_row(g, "ssm_norm.weight", 0, st, "norm.weight", 0, WIDTH);
}

/* in_proj_qkvz has the rows of q, k, v, z of a key head together; the file has them apart, and in_proj_ba as it is. */
static void same_as_next(const struct gguf *g, const struct safetensors *st)
{
    static const int64_t head[] = {0, 1, 2, 3};
    const int64_t group = 6 * WIDTH;
    same_heads(g, st, head);
    for (int64_t i = 0; i < CONV; i++) {
        const int64_t part = MT_MIN(i / (KEYS * WIDTH), 2), n = part < 2 ? WIDTH : 2 * WIDTH,
                      at = i - part * KEYS * WIDTH;
        same_row(g, "attn_qkv.weight", i, st, "in_proj_qkvz.weight", at / n * group + part * WIDTH + at % n, 256);
    }
    for (int64_t i = 0; i < VALUES * WIDTH; i++)
        same_row(g, "attn_gate.weight", i, st, "in_proj_qkvz.weight",
                 i / (2 * WIDTH) * group + 4 * WIDTH + i % (2 * WIDTH), 256);
    for (int64_t i = 0; i < 2 * VALUES; i++) same_row(g, "ssm_ba.weight", i, st, "in_proj_ba.weight", i, 256);
}

/* The first value head of every key head comes first. */
static void same_as_3_5(const struct gguf *g, const struct safetensors *st)
{
    static const int64_t head[] = {0, 2, 1, 3};
    same_heads(g, st, head);
    for (int64_t i = 0; i < VALUES * WIDTH; i++) {
        const int64_t from = head[i / WIDTH] * WIDTH + i % WIDTH, q_and_k = 2 * KEYS * WIDTH;
        same_row(g, "attn_qkv.weight", i, st, "in_proj_qkv.weight", i, 256);
        same_row(g, "attn_qkv.weight", q_and_k + i, st, "in_proj_qkv.weight", q_and_k + from, 256);
        same_row(g, "attn_gate.weight", i, st, "in_proj_z.weight", from, 256);
    }
    for (int64_t i = 0; i < VALUES; i++) {
        same_row(g, "ssm_beta.weight", i, st, "in_proj_b.weight", head[i], 256);
        same_row(g, "ssm_alpha.weight", i, st, "in_proj_a.weight", head[i], 256);
    }
}

static uint32_t key_of(const struct gguf *g, const char *arch, const char *key)
{
    char full[64];
    snprintf(full, sizeof(full), "%s.%s", arch, key);
    const struct gguf_value *v = gguf_value(g, full);
    if (!v) fail_msg("no key %s", full);
    return v->u32;
}

/* The adapter has the experts alone, so that other tensors are those of the checkpoint. */
static void deltanet(void **state)
{
    static const struct {
        const char *model, *arch;
        void (*same)(const struct gguf *g, const struct safetensors *st);
    } rows[] = {{"qwen3-next-tiny", "qwen3next", same_as_next}, {"qwen3.5-tiny", "qwen35moe", same_as_3_5}};
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        const char *model = path_in(scratch_dir(), "model");
        char adapter[MT_PATH];
        struct safetensors st;
        struct err err;
        struct gguf g;
        if (RUN("synth", rows[i].model, model)) fail_msg("%s", said.err);
        const char *config = config_of(model, case_path("case_a", "eval.jsonl"));
        snprintf(adapter, sizeof(adapter), "%.*s/run/adapter", (int)(strrchr(config, '/') - config), config);
        if (RUN(config, "--set", "lora.targets=experts")) fail_msg("%s", said.err);
        exported(&g, config, adapter, "f32");
        if (safetensors_open(&st, model, &err)) fail_msg("%s", err.msg);
        rows[i].same(&g, &st);
        assert_int_equal(key_of(&g, rows[i].arch, "full_attention_interval"), 4);
        assert_int_equal(key_of(&g, rows[i].arch, "ssm.inner_size"), VALUES * WIDTH);
        assert_int_equal(key_of(&g, rows[i].arch, "ssm.time_step_rank"), VALUES);
        assert_int_equal(key_of(&g, rows[i].arch, "ssm.group_count"), KEYS);
        assert_int_equal(key_of(&g, rows[i].arch, "expert_shared_feed_forward_length"), 128);
        assert_non_null(gguf_tensor(&g, "blk.3.attn_q_norm.weight"));
        assert_null(gguf_tensor(&g, "blk.2.attn_q_norm.weight"));
        assert_int_equal(gguf_tensor(&g, "blk.0.ffn_gate_inp_shexp.weight")->ndim, 1);
        safetensors_close(&st);
        gguf_close(&g);
    }
}

static void deltanet_refused(void **state)
{
    struct err err;
    struct arch *a = test_malloc(sizeof(*a));
    (void)state;
    if (arch_load(a, case_path("qwen3_next", ""), &err)) fail_msg("%s", err.msg);
    refuse_arch(a, "linear_value_head_dim");
    a->delta.shape.value_dim = a->delta.shape.key_dim;
    refuse_arch(a, "dense layers");
    a->dense[1] = false;
    if (gguf_items_check(a, &err)) fail_msg("%s", err.msg);
    a->mixer[2] = &mixer_attention;
    refuse_arch(a, "layer_types");
    a->mixer[2] = &mixer_deltanet;
    a->attn_bias = true;
    refuse_arch(a, "attention_bias");
    test_free(a);
}

int test_gguf_model(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_those_of_ggml),
        cmocka_unit_test(values_that_no_block_holds),
        cmocka_unit_test(each_family),
        cmocka_unit_test(modelfiles),
        cmocka_unit_test(each_type),
        cmocka_unit_test(trained_codes),
        cmocka_unit_test(changed_files),
        cmocka_unit_test(refusals),
        cmocka_unit_test(other_models),
        cmocka_unit_test(lfm2),
        cmocka_unit_test(nemotron),
        cmocka_unit_test(gemma),
        cmocka_unit_test(changed_rope),
        cmocka_unit_test(latent),
        cmocka_unit_test(deltanet),
        cmocka_unit_test(deltanet_refused),
    };
    return cmocka_run_group_tests_name("gguf_model", tests, NULL, NULL);
}
