/* test_export_mixers.c - exports of gated DeltaNet, latent attention and DeepSeek-V4: names and order of rows in the
 * files of vLLM and llama.cpp; layout and copied tensors of merged checkpoints; targets that a reader does not apply
 * are refused. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/gguf.h"
#include "tests/checkpoints.h"
#include "tests/process.h"
#include "train/export/cpu_adapter.h"
#include "train/export/export.h"
#include "train/adapter/peft.h"
#include "train/synth/synth.h"

#define OK(rc)                                                                                                         \
    do {                                                                                                               \
        if (rc) fail_msg("line %d: %s", __LINE__, err.msg);                                                            \
    } while (0)

#define DELTANET "parity/qwen3_5"
#define V4       "parity/deepseek_v4"
/* The text part of that case, whose layer types are derived. */
static const char text_config[] =
    "{\"model_type\": \"qwen3_5_moe_text\", \"num_hidden_layers\": 4, \"hidden_size\": 40, \"num_attention_heads\": 4, "
    "\"num_key_value_heads\": 2, \"head_dim\": 16, \"num_experts\": 6, \"num_experts_per_tok\": 3, "
    "\"moe_intermediate_size\": 16, \"shared_expert_intermediate_size\": 24, \"vocab_size\": 1024, "
    "\"linear_num_key_heads\": 2, \"linear_num_value_heads\": 4, \"linear_key_head_dim\": 16, "
    "\"linear_value_head_dim\": 12, \"rope_theta\": 10000000}";
enum { KEY_ROWS = 2 * 2 * 16, VALUE_DIM = 12, VALUE_HEADS = 4, RANK = 3 };
/* The order of value heads in llama.cpp: the first value head of each key head, then the second ones. */
static const int64_t llama_head[VALUE_HEADS] = {0, 2, 1, 3};

/* The case as a text-only checkpoint. */
static const char *text_only(void)
{
    static const char nested[] = "model.language_model.";
    struct draft d;
    draft_open_case(&d, DELTANET);
    for (int64_t i = d.n - 1; i >= 0; i--) {
        char name[256];
        const struct st_entry *e = &d.entries[i];
        const int64_t bytes = safetensors_entry_bytes(e);
        if (!strcmp(e->name, "lm_head.weight")) continue;
        if (!strncmp(e->name, nested, strlen(nested))) {
            void *copy = mem_alloc(bytes);
            memcpy(copy, e->data, (size_t)bytes);
            snprintf(name, sizeof(name), "model.%s", e->name + strlen(nested));
            draft_put(&d, name, e->dtype, e->ndim, e->shape, copy);
        }
        snprintf(name, sizeof(name), "%s", d.entries[i].name);
        draft_remove(&d, name);
    }
    mem_free(d.config);
    d.config = mem_strdup(text_config);
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

/* Saves adapters of these targets; values depend on the parameter, and B is multiplied by this factor. */
static const char *adapter(const char *model, const char *targets, float b)
{
    static char dir[8][MT_PATH];
    static int next;
    char *out = dir[next++ % 8];
    struct cpu_adapter h;
    struct adapters ad;
    struct arch a;
    struct err err = {.msg = ""};
    const struct lora_options opt = {.r = RANK, .alpha = 6, .targets = targets, .layers = ""};
    OK(arch_load(&a, model, &err));
    OK(adapters_plan(&ad, &a, &opt, &err));
    const struct shape shape = cpu_adapter_shape(&ad);
    OK(cpu_adapter_open(&h, &a, &shape, &err));
    for (int64_t i = 0; i < h.ad.n_params; i++) {
        const struct lora_param *p = &h.ad.params[i];
        for (int64_t k = 0; k < lora_param_count(p); k++)
            cpu_adapter_at(&h, p, 0, 0, 0)[k] = (p->is_b ? b : 0.1f) * (float)test_value((uint64_t)i + 1, (uint64_t)k);
    }
    snprintf(out, MT_PATH, "%s/adapter", scratch_dir());
    OK(peft_save(&h.ad, &h.dev, out, NULL, NULL, &err));
    adapters_free(&ad);
    cpu_adapter_close(&h);
    return out;
}

static void copy_file(const char *from, const char *to)
{
    struct file_map map;
    struct err err = {.msg = ""};
    OK(file_map_open(&map, from, &err));
    OK(file_write_atomic(to, map.data, map.size, &err));
    file_map_close(&map);
}

/* Exports, verified on one row of the case; the output directory, or NULL and the error in `said`. */
static const char *export_set(const char *model, const char *name, const char *lora, const char *format,
                              const char *set)
{
    static char out[8][MT_PATH], rows[1 << 14];
    static int next;
    char from[MT_PATH], path[MT_PATH], text[4 * MT_PATH], *to = out[next++ % 8];
    struct err err = {.msg = ""};
    const char *dir = scratch_dir();
    snprintf(from, sizeof(from), "%s/eval.jsonl", fixture(name));
    process_read(from, rows, sizeof(rows));
    strchr(rows, '\n')[1] = 0;
    snprintf(path, sizeof(path), "%s/eval.jsonl", dir);
    OK(file_write_atomic(path, rows, (int64_t)strlen(rows), &err));
    snprintf(text, sizeof(text),
             "[model]\npath = %s\n[data]\neval = %s\nformat = text\nseq_len = 24\n[output]\ndir = %s/run\n", model,
             path, dir);
    snprintf(path, sizeof(path), "%s/run.ini", dir);
    OK(file_write_atomic(path, text, (int64_t)strlen(text), &err));
    snprintf(to, MT_PATH, "%s/out", dir);
    return RUN("export", path, "--adapter", lora, "--to", format, "--out", to, "--set", set) ? NULL : to;
}

static const char *export(const char *model, const char *name, const char *lora, const char *format)
{
    return export_set(model, name, lora, format, "model.quantize=none");
}

static void copy_tokenizer(const char *dir)
{
    char to[MT_PATH];
    snprintf(to, sizeof(to), "%s/tokenizer.json", dir);
    copy_file(fixture(DELTANET "/tokenizer.json"), to);
    snprintf(to, sizeof(to), "%s/tokenizer_config.json", dir);
    copy_file(fixture(DELTANET "/tokenizer_config.json"), to);
}

static void open_tensors(struct safetensors *st, const char *dir)
{
    char path[MT_PATH];
    struct err err = {.msg = ""};
    if (!dir) fail_msg("%s", said.err);
    snprintf(path, sizeof(path), "%s/adapter_model.safetensors", dir);
    OK(safetensors_open(st, path, &err));
}

/* Element [row, col] of a matrix of an adapter file. */
static float value(const struct safetensors *st, const char *name, int64_t row, int64_t col)
{
    float v;
    const struct st_tensor *t = safetensors_find(st, name);
    if (!t) fail_msg("no tensor %s", name);
    assert_true(row < t->shape[0] && col < t->shape[1]);
    memcpy(&v, t->data + 4 * (row * t->shape[1] + col), 4);
    return v;
}

static float gguf_value_at(const struct gguf *g, const char *name, int64_t row, int64_t col)
{
    const struct gguf_tensor *t = gguf_tensor(g, name);
    if (!t) fail_msg("no tensor %s", name);
    assert_true(t->ndim == 2 && row < t->shape[0] && col < t->shape[1]);
    return ((const float *)t->data)[row * t->shape[1] + col];
}

/* ---- gated DeltaNet */

#define KEY  "base_model.model.model.layers.0."
#define DEEP "base_model.model.model.language_model.layers.0."

/* The class with a vision tower has fused experts in vLLM, the text class a pair per expert. */
static void vllm_has_the_names_of_each_class(void **state)
{
    (void)state;
    const char *targets = "in_proj_z,down_proj,shared_up_proj", *text = text_only();
    struct safetensors st;
    open_tensors(&st, export(fixture(DELTANET), DELTANET, adapter(fixture(DELTANET), targets, 0.1f), "vllm"));
    for (int64_t row = 0; row < KEY_ROWS + VALUE_HEADS * VALUE_DIM; row++) /* needed by vLLM, not trained */
        assert_true(value(&st, DEEP "linear_attn.in_proj_qkv.lora_B.weight", row, 0) == 0);
    assert_true(value(&st, DEEP "mlp.experts.base_layer.lora_B.weight", 0, 0) == 0);
    assert_true(value(&st, DEEP "mlp.experts.lora_B.weight", 0, 0) != 0);
    assert_true(value(&st, DEEP "linear_attn.in_proj_z.lora_B.weight", 0, 0) != 0);
    assert_non_null(safetensors_find(&st, DEEP "mlp.shared_expert.up_proj.lora_A.weight"));
    safetensors_close(&st);
    copy_tokenizer(text);
    open_tensors(&st, export(text, DELTANET, adapter(text, targets, 0.1f), "vllm"));
    assert_true(value(&st, KEY "linear_attn.in_proj_qkv.lora_B.weight", 0, 0) == 0);
    assert_true(value(&st, KEY "mlp.experts.5.gate_proj.lora_B.weight", 0, 0) == 0);
    assert_true(value(&st, KEY "mlp.experts.5.down_proj.lora_B.weight", 0, 0) != 0);
    assert_null(safetensors_find(&st, KEY "mlp.experts.lora_B.weight"));
    safetensors_close(&st);
}

/* The row of the checkpoint for a row of llama.cpp: `before` other rows, then value heads of `dim` rows each. */
static int64_t row_in_checkpoint(int64_t row, int64_t before, int64_t dim)
{
    return row < before ? row : before + llama_head[(row - before) / dim] * dim + (row - before) % dim;
}

static void gguf_has_llamas_value_heads(void **state)
{
    (void)state;
    static const struct {
        const char *matrix, *module;
        int64_t before, dim;
    } rows[] = {{"attn_qkv", "in_proj_qkv", KEY_ROWS, VALUE_DIM},
                {"attn_gate", "in_proj_z", 0, VALUE_DIM},
                {"ssm_beta", "in_proj_b", 0, 1},
                {"ssm_alpha", "in_proj_a", 0, 1}};
    const char *lora = adapter(fixture(DELTANET), "all-linear", 0.1f);
    const char *out = export(fixture(DELTANET), DELTANET, lora, "gguf");
    struct safetensors st;
    struct gguf g;
    struct err err = {.msg = ""};
    char path[MT_PATH], a[128], b[128];
    if (!out) fail_msg("%s", said.err);
    snprintf(path, sizeof(path), "%s/adapter.gguf", out);
    OK(gguf_open(&g, path, &err));
    open_tensors(&st, lora);
    assert_string_equal(gguf_value(&g, "general.architecture")->text, "qwen35moe");
    for (int i = 0; i < MT_LEN(rows); i++) {
        snprintf(a, sizeof(a), "blk.0.%s.weight.lora_b", rows[i].matrix);
        snprintf(b, sizeof(b), DEEP "linear_attn.%s.lora_B.weight", rows[i].module);
        for (int64_t row = 0; row < rows[i].before + VALUE_HEADS * rows[i].dim; row++)
            if (gguf_value_at(&g, a, row, 1) != value(&st, b, row_in_checkpoint(row, rows[i].before, rows[i].dim), 1))
                fail_msg("%s: row %lld", a, (long long)row);
    }
    for (int64_t col = 0; col < VALUE_HEADS * VALUE_DIM; col++)
        assert_true(gguf_value_at(&g, "blk.0.ssm_out.weight.lora_a", 2, col) ==
                    value(&st, DEEP "linear_attn.out_proj.lora_A.weight", 2, row_in_checkpoint(col, 0, VALUE_DIM)));
    for (int64_t row = 0; row < 40; row++)
        assert_true(gguf_value_at(&g, "blk.0.ssm_out.weight.lora_b", row, 0) ==
                    value(&st, DEEP "linear_attn.out_proj.lora_B.weight", row, 0));
    assert_non_null(gguf_tensor(&g, "blk.3.attn_q.weight.lora_b"));
    gguf_close(&g);
    safetensors_close(&st);
}

/* Layout and values of every tensor, those of the vision tower and of multi-token prediction too. */
static void merged_has_the_layout_of_the_source(void **state)
{
    (void)state;
    struct safetensors source, merged;
    struct err err = {.msg = ""};
    OK(safetensors_open(&source, fixture(DELTANET), &err));
    for (int zero = 0; zero < 2; zero++) {
        const char *lora = adapter(fixture(DELTANET), "all-linear", zero ? 0 : 0.1f);
        const char *out = export(fixture(DELTANET), DELTANET, lora, "merged-bf16");
        int64_t n_changed = 0;
        if (!out) fail_msg("%s", said.err);
        assert_says(said.err, "22 tensors of the vision tower and of multi-token prediction are copied unchanged");
        OK(safetensors_open(&merged, out, &err));
        assert_int_equal(source.n_tensors, merged.n_tensors);
        for (int64_t i = 0; i < source.n_tensors; i++) {
            const struct st_tensor *a = &source.tensors[i], *b = safetensors_find(&merged, a->name);
            if (!b || a->dtype != b->dtype || a->bytes != b->bytes || memcmp(a->shape, b->shape, sizeof(a->shape)))
                fail_msg("%s has another layout", a->name);
            const bool changed = memcmp(a->data, b->data, (size_t)a->bytes);
            const bool adapted = strstr(a->name, "proj") && strstr(a->name, "language_model");
            if (changed != (adapted && !zero)) fail_msg("%s: %s", a->name, changed ? "changed" : "unchanged");
            n_changed += changed;
        }
        assert_int_equal(n_changed, zero ? 0 : 3 * 5 + 4 + 4 * 5); /* mixers; shared and routed experts */
        safetensors_close(&merged);
    }
    safetensors_close(&source);
}

/* In a merge of a checkpoint in F16 or F32, matrices that loading joins with an adapted one also become bf16; others
 * are copied. */
static void merged_can_be_loaded_when_a_part_is_adapted(void **state)
{
    (void)state;
    static const struct {
        const char *rest;
        bool bf16;
    } rows[] = {{"layers.0.mlp.shared_expert.gate_proj.weight", true},
                {"layers.0.mlp.shared_expert.up_proj.weight", true},
                {"layers.0.mlp.shared_expert.down_proj.weight", false},
                {"layers.0.mlp.gate.weight", false},
                {"layers.0.linear_attn.in_proj_qkv.weight", true},
                {"layers.0.linear_attn.out_proj.weight", false},
                {"layers.3.self_attn.k_proj.weight", true},
                {"layers.3.self_attn.o_proj.weight", false}};
    for (int f16 = 0; f16 < 2; f16++) {
        struct draft d;
        struct safetensors merged;
        struct err err = {.msg = ""};
        const enum dtype stored = f16 ? DT_F16 : DT_F32;
        draft_open_case(&d, DELTANET);
        draft_dense(&d, stored);
        const char *model = draft_save(&d, 1);
        draft_free(&d);
        copy_tokenizer(model);
        const char *out =
            export(model, DELTANET, adapter(model, "q_proj,in_proj_z,shared_gate_proj", 0.1f), "merged-bf16");
        if (!out) fail_msg("%s", said.err);
        OK(safetensors_open(&merged, out, &err));
        for (int i = 0; i < MT_LEN(rows); i++) {
            char name[256];
            snprintf(name, sizeof(name), "model.language_model.%s", rows[i].rest);
            const struct st_tensor *t = safetensors_find(&merged, name);
            if (!t || t->dtype != (rows[i].bf16 ? DT_BF16 : stored)) fail_msg("%s has another dtype", name);
        }
        safetensors_close(&merged);
    }
}

/* Stacked experts become a matrix per expert. config.json names every matrix that is not quantised, also those of the
 * vision tower and of multi-token prediction. */
static void fp8_has_a_matrix_per_expert(void **state)
{
    (void)state;
    static const char *const ignored[] = {"\"model.language_model.layers.0.linear_attn.in_proj_qkv\"",
                                          "\"model.language_model.layers.0.mlp.shared_expert.up_proj\"",
                                          "\"model.visual.blocks.0.attn.qkv\"", "\"mtp.fc\"", "\"lm_head\""};
    static char config[1 << 16];
    const char *out = export(fixture(DELTANET), DELTANET, adapter(fixture(DELTANET), "experts", 1), "merged-fp8");
    struct safetensors st;
    struct err err = {.msg = ""};
    char path[MT_PATH];
    if (!out) fail_msg("%s", said.err);
    OK(safetensors_open(&st, out, &err));
    const struct st_tensor *t = safetensors_find(&st, "model.language_model.layers.3.mlp.experts.5.up_proj.weight");
    assert_true(t && !strcmp(t->st_dtype, "F8_E4M3") && t->shape[0] == 16 && t->shape[1] == 40);
    assert_null(safetensors_find(&st, "model.language_model.layers.3.mlp.experts.gate_up_proj"));
    assert_non_null(safetensors_find(&st, "mtp.fc.weight"));
    safetensors_close(&st);
    snprintf(path, sizeof(path), "%s/config.json", out);
    process_read(path, config, sizeof(config));
    for (int i = 0; i < MT_LEN(ignored); i++) assert_says(config, ignored[i]);
    assert_null(strstr(config, "mlp.experts.0"));
}

/* ---- gated DeltaNet with fused matrices */

#define FUSED "parity/qwen3_next"
/* FUSED_KEYS key heads. The rows of a key head in in_proj_qkvz are q, k, then v and z of its two value heads. */
enum { FUSED_KEYS = 3, FUSED_DIM = 16, FUSED_VALUES = 24, FUSED_GROUP = 2 * FUSED_DIM + 2 * FUSED_VALUES };

/* The row of in_proj_qkvz for a row of q | k | v | z. */
static int64_t fused_row(int64_t row)
{
    const int64_t keys = 2 * FUSED_KEYS * FUSED_DIM, q = row % (FUSED_KEYS * FUSED_DIM), v = row - keys;
    if (row < keys) return q / FUSED_DIM * FUSED_GROUP + (row >= keys / 2 ? FUSED_DIM : 0) + q % FUSED_DIM;
    const int64_t z = v / (FUSED_KEYS * FUSED_VALUES), at = v % (FUSED_KEYS * FUSED_VALUES);
    return at / FUSED_VALUES * FUSED_GROUP + 2 * FUSED_DIM + z * FUSED_VALUES + at % FUSED_VALUES;
}

/* vLLM reads the matrices as the checkpoint has them, llama.cpp in_proj_qkvz in two parts without groups. */
static void fused_rows_have_the_order_of_each_reader(void **state)
{
    (void)state;
    enum { QKV = 2 * FUSED_KEYS * FUSED_DIM + FUSED_KEYS * FUSED_VALUES, ROWS = FUSED_KEYS * FUSED_GROUP };
    const char *lora = adapter(fixture(FUSED), "all-linear", 0.1f);
    const char *vllm = export(fixture(FUSED), FUSED, lora, "vllm"), *out = export(fixture(FUSED), FUSED, lora, "gguf");
    struct safetensors st, other;
    struct gguf g;
    struct err err = {.msg = ""};
    char path[MT_PATH];
    if (!out) fail_msg("%s", said.err);
    snprintf(path, sizeof(path), "%s/adapter.gguf", out);
    OK(gguf_open(&g, path, &err));
    open_tensors(&st, lora);
    open_tensors(&other, vllm);
    assert_string_equal(gguf_value(&g, "general.architecture")->text, "qwen3next");
    for (int64_t row = 0; row < ROWS; row++) {
        const char *name = row < QKV ? "blk.0.attn_qkv.weight.lora_b" : "blk.0.attn_gate.weight.lora_b";
        const float want = value(&st, KEY "linear_attn.in_proj_qkvz.lora_B.weight", fused_row(row), 1);
        if (gguf_value_at(&g, name, row < QKV ? row : row - QKV, 1) != want) fail_msg("%s: %d", name, (int)row);
        assert_true(value(&other, KEY "linear_attn.in_proj_qkvz.lora_B.weight", row, 2) ==
                    value(&st, KEY "linear_attn.in_proj_qkvz.lora_B.weight", row, 2));
    }
    for (int64_t row = 0; row < 4 * FUSED_KEYS; row++) {
        const float want = value(&st, KEY "linear_attn.in_proj_ba.lora_B.weight", row, 0);
        assert_true(gguf_value_at(&g, "blk.0.ssm_ba.weight.lora_b", row, 0) == want);
        assert_true(value(&other, KEY "linear_attn.in_proj_ba.lora_B.weight", row, 0) == want);
    }
    for (int64_t col = 0; col < FUSED_KEYS * FUSED_VALUES; col++)
        assert_true(gguf_value_at(&g, "blk.0.ssm_out.weight.lora_a", 2, col) ==
                    value(&st, KEY "linear_attn.out_proj.lora_A.weight", 2, col));
    assert_non_null(gguf_tensor(&g, "blk.0.attn_gate.weight.lora_a"));
    gguf_close(&g);
    safetensors_close(&st);
    safetensors_close(&other);
}

/* The adapter changes each row of in_proj_qkvz differently. Rows in a wrong order would differ by more than the bound.
 */
static void fused_rows_are_merged_in_their_places(void **state)
{
    (void)state;
    const char *lora = adapter(fixture(FUSED), "in_proj_qkvz", 0.1f);
    const char *out = export(fixture(FUSED), FUSED, lora, "merged-bf16");
    const char *name = "model.layers.0.linear_attn.in_proj_qkvz.weight";
    struct safetensors source, merged, ab;
    struct err err = {.msg = ""};
    if (!out) fail_msg("%s", said.err);
    OK(safetensors_open(&source, fixture(FUSED), &err));
    OK(safetensors_open(&merged, out, &err));
    open_tensors(&ab, lora);
    assert_int_equal(source.n_tensors, merged.n_tensors);
    const struct st_tensor *a = safetensors_find(&source, name), *b = safetensors_find(&merged, name);
    for (int64_t row = 0; row < FUSED_KEYS * FUSED_GROUP; row++)
        for (int64_t col = 0; col < 40; col++) {
            uint16_t from, to;
            double delta = 0;
            memcpy(&from, a->data + 2 * (40 * row + col), 2);
            memcpy(&to, b->data + 2 * (40 * row + col), 2);
            for (int64_t k = 0; k < RANK; k++)
                delta += 2.0 * (double)value(&ab, KEY "linear_attn.in_proj_qkvz.lora_B.weight", row, k) *
                         (double)value(&ab, KEY "linear_attn.in_proj_qkvz.lora_A.weight", k, col);
            const double want = (double)bf16_to_f32(from) + delta;
            assert_true(fabs((double)bf16_to_f32(to) - want) <= 0x1p-8 * fabs(want) + 1e-6);
        }
    safetensors_close(&source);
    safetensors_close(&merged);
    safetensors_close(&ab);
}

/* ---- latent attention */

static void targets_that_are_not_applied_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *format, *targets, *says;
    } rows[] = {{"vllm", "q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj,experts,shared_experts", NULL},
                {"vllm", "kv_b_proj,experts", "--to vllm: vLLM does not apply adapters of kv_b_proj in deepseek_v3: "},
                {"gguf", "o_proj,experts,shared_experts", NULL},
                {"gguf", "all-linear",
                 "--to gguf: llama.cpp does not apply adapters of q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj in "
                 "deepseek_v3: "}};
    const char *model = fixture("parity/deepseek_v3");
    for (int i = 0; i < MT_LEN(rows); i++) {
        const char *out = export(model, "parity/deepseek_v3", adapter(model, rows[i].targets, 0.1f), rows[i].format);
        if (!rows[i].says != !!out) fail_msg("%s: %s", rows[i].targets, said.err);
        if (rows[i].says) assert_says(said.err, rows[i].says);
    }
}

static void the_usual_format_applies_all_targets(void **state)
{
    (void)state;
    static const char *const rows[][4] = {
        {"parity/deepseek_v3", "all-linear", "experts", "merged-bf16"},
        {"parity/deepseek_v3", "o_proj,experts", "experts", "vllm"},
        {DELTANET, "all-linear", "experts", "vllm"},
        {V4, "all-linear", "experts", "vllm"}, /* after quantisation-aware training; its experts are bf16 */
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct config cfg;
        struct arch a;
        struct safetensors st;
        struct err err = {.msg = ""};
        config_defaults(&cfg);
        OK(arch_load(&a, fixture(rows[i][0]), &err));
        OK(safetensors_open(&st, fixture(rows[i][0]), &err));
        snprintf(cfg.lora.targets, sizeof(cfg.lora.targets), "%s", rows[i][1]);
        char set[64];
        if (!strcmp(rows[i][0], V4)) OK(config_set(&cfg, "quant.weights=mxfp4", &err));
        snprintf(set, sizeof(set), "quant.targets=%s", rows[i][2]);
        OK(config_set(&cfg, set, &err));
        assert_string_equal(export_usual(&cfg, &a, &st), rows[i][3]);
        safetensors_close(&st);
    }
}

static void verify_format(const char *out, const char *lora, bool packed)
{
    static const char *const format[] = {"merged-bf16", "merged-mxfp4"};
    char ini[MT_PATH], line[64];
    snprintf(ini, sizeof(ini), "%.*s/run.ini", (int)(strrchr(out, '/') - out), out);
    assert_int_equal(RUN("export", ini, "--adapter", lora, "--to", format[!packed], "--verify", out), 1);
    snprintf(line, sizeof(line), "has the format %s, not %s: ", format[packed], format[!packed]);
    assert_says(said.err, line);
}

/* DeepSeek-V4: the publisher's names in every merged export, as transformers reads no others. In MXFP4, each tensor has
 * the layout of the source, and only adapted ones change; in bf16 nothing is packed, not even what has no adapter. */
static void merged_has_the_names_of_the_publisher(void **state)
{
    char model[MT_PATH];
    struct err err = {.msg = ""};
    struct safetensors source;
    (void)state;
    snprintf(model, sizeof(model), "%s/model", scratch_dir());
    OK(synth_run(&(struct synth_options){.arch = "deepseek-v4-tiny", .dir = model, .seed = 2}, &err));
    OK(safetensors_open(&source, model, &err));
    const char *lora = adapter(model, "all-linear", 1);
    for (int packed = 0; packed < 2; packed++) {
        struct safetensors merged;
        int64_t n_changed = 0, n = 0;
        const char *out = export(model, DELTANET, lora, packed ? "merged-mxfp4" : "merged-bf16");
        if (!out) fail_msg("%s", said.err);
        OK(safetensors_open(&merged, out, &err));
        for (int64_t i = 0; i < source.n_tensors; i++) {
            const struct st_tensor *a = &source.tensors[i], *b = safetensors_find(&merged, a->name);
            const size_t len = strlen(a->name);
            const bool scale = len > 6 && !strcmp(a->name + len - 6, ".scale");
            if (!packed && scale) continue;
            n++;
            if (!b || (packed && (a->bytes != b->bytes || strcmp(a->st_dtype, b->st_dtype)))) fail_msg("%s", a->name);
            if (!packed && (!strcmp(a->st_dtype, "I8") || !strcmp(a->st_dtype, "F8_E4M3")))
                assert_string_equal(b->st_dtype, "BF16");
            if (!packed || !memcmp(a->data, b->data, (size_t)a->bytes)) continue;
            if (strstr(a->name, "wo_a") || strstr(a->name, "indexer") || strstr(a->name, "gate."))
                fail_msg("%s", a->name);
            n_changed++;
        }
        if (packed) {
            assert_says(said.out, "rounding to MXFP4 removes ");
            assert_says(said.out, "rounding to FP8 removes ");
            assert_says(said.out, "change to attention and shared experts");
        }
        assert_int_equal(merged.n_tensors, n);
        verify_format(out, lora, packed);
        assert_true(!packed || n_changed >= 4 * (4 + 3 + 16 * 3)); /* attention, shared and routed experts */
        safetensors_close(&merged);
    }
    safetensors_close(&source);
    if (!export_set(model, DELTANET, adapter(model, "all-linear", 1e-3f), "merged-mxfp4", "quant.weights=mxfp4"))
        fail_msg("%s", said.err);
    assert_says(said.err, "train with lora.targets = experts, whose change this export keeps");
    assert_null(strstr(said.err, "export merged-bf16"));
    assert_null(export(model, DELTANET, lora, "gguf"));
    assert_says(said.err, "use peft or merged-bf16");
    assert_null(export(model, DELTANET, lora, "merged-fp8"));
    assert_says(said.err, "use merged-mxfp4 or merged-bf16");
}

/* dW of expert e. */
static double delta(const struct cpu_adapter *h, const struct lora_param *b, int64_t e, int64_t row, int64_t col)
{
    const struct lora_param *a = adapters_find(&h->ad, b->layer, b->target, false);
    double sum = 0;
    for (int64_t k = 0; k < b->cols; k++)
        sum += (double)*cpu_adapter_at(h, b, e, row, k) * (double)*cpu_adapter_at(h, a, e, k, col);
    return (double)h->ad.scale[b->target] * sum;
}

/* Fails unless both directories have the same adapters of a model. */
static void assert_same_adapters(const char *model, const char *one, const char *other)
{
    struct arch arch;
    struct cpu_adapter x, y;
    struct err err = {.msg = ""};
    OK(arch_load(&arch, model, &err));
    OK(cpu_adapter_load(&x, &arch, one, &err));
    OK(cpu_adapter_load(&y, &arch, other, &err));
    assert_int_equal(x.ad.n_params, y.ad.n_params);
    for (int64_t i = 0; i < x.ad.n_params; i++) {
        const struct lora_param *p = &x.ad.params[i], *q = adapters_find(&y.ad, p->layer, p->target, p->is_b);
        if (!p->is_b) continue;
        assert_true(q && p->rows == q->rows && p->n_exp == q->n_exp);
        const int64_t cols = adapters_find(&x.ad, p->layer, p->target, false)->cols;
        for (int64_t at = 0; at < p->n_exp * p->rows * cols; at++) {
            const int64_t e = at / (p->rows * cols), row = at / cols % p->rows, col = at % cols;
            const double want = delta(&x, p, e, row, col);
            if (!(fabs(delta(&y, q, e, row, col) - want) <= 1e-6 * fabs(want) + 1e-9))
                fail_msg("layer %d, %s: another dW", (int)p->layer, lora_target_name(p->target));
        }
    }
    cpu_adapter_close(&x);
    cpu_adapter_close(&y);
}

/* A copy of an adapter without tensor `name`, or with the tensor under a second name. */
static const char *changed(const char *dir, const struct safetensors *st, const char *name, const char *second)
{
    static char out[MT_PATH];
    char from[MT_PATH + 32], to[MT_PATH + 32];
    struct err err = {.msg = ""};
    struct st_entry *entries = mem_array(st->n_tensors + 1, sizeof(*entries));
    int64_t n = 0;
    for (int64_t i = 0; i <= st->n_tensors; i++) {
        const struct st_tensor *t = i < st->n_tensors ? &st->tensors[i] : safetensors_find(st, name);
        if (!second && !strcmp(t->name, name)) continue;
        entries[n++] = (struct st_entry){.name = i < st->n_tensors ? t->name : second,
                                         .dtype = t->dtype,
                                         .ndim = 2,
                                         .shape = {t->shape[0], t->shape[1]},
                                         .data = t->data};
    }
    assert_int_equal(n, second ? st->n_tensors + 1 : st->n_tensors - 1);
    snprintf(out, sizeof(out), "%s", scratch_dir());
    snprintf(to, sizeof(to), "%s/adapter_model.safetensors", out);
    OK(safetensors_write(to, entries, n, &err));
    snprintf(from, sizeof(from), "%s/adapter_config.json", dir);
    snprintf(to, sizeof(to), "%s/adapter_config.json", out);
    copy_file(from, to);
    mem_free(entries);
    return out;
}

/* DeepSeek-V4: the publisher's names, which the class in vLLM has too, and a pair of matrices per expert and
 * projection. The reader of adapters accepts the publisher's names and transformers'; its errors give the names of the
 * file. */
static void vllm_has_the_names_of_the_publisher(void **state)
{
    enum { LAYERS = 3, EXPERTS = 6, WIDTH = 16 };
    static const char *const linear[][2] = {{"attn.wq_a", "self_attn.q_a_proj"},
                                            {"attn.wq_b", "self_attn.q_b_proj"},
                                            {"attn.wkv", "self_attn.kv_proj"},
                                            {"attn.wo_b", "self_attn.o_b_proj"},
                                            {"ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"},
                                            {"ffn.shared_experts.w3", "mlp.shared_experts.up_proj"},
                                            {"ffn.shared_experts.w2", "mlp.shared_experts.down_proj"}};
    static const struct {
        const char *name, *peft;
        int64_t row, rows, cols;
    } expert[] = {{"w1", "mlp.experts.base_layer", 0, WIDTH, 32},
                  {"w3", "mlp.experts.base_layer", WIDTH, WIDTH, 32},
                  {"w2", "mlp.experts", 0, 32, WIDTH}};
    const char *model = fixture(V4), *lora = adapter(model, "all-linear", 0.1f);
    const char *out = export(model, V4, lora, "vllm");
    char got[160], want[160], config[4096];
    struct safetensors st, peft;
    struct cpu_adapter h;
    struct arch a;
    struct err err = {.msg = ""};
    (void)state;
    open_tensors(&st, out);
    open_tensors(&peft, lora);
    assert_int_equal(st.n_tensors, 2 * LAYERS * (MT_LEN(linear) + EXPERTS * MT_LEN(expert)));
    for (int n = 0; n < 2 * LAYERS * MT_LEN(linear); n++) {
        const int i = n / 2 % MT_LEN(linear), layer = n / 2 / MT_LEN(linear);
        snprintf(got, sizeof(got), "base_model.model.layers.%d.%s.lora_%c.weight", layer, linear[i][0], "AB"[n % 2]);
        snprintf(want, sizeof(want), "base_model.model.model.layers.%d.%s.lora_%c.weight", layer, linear[i][1],
                 "AB"[n % 2]);
        const struct st_tensor *g = safetensors_find(&st, got), *w = safetensors_find(&peft, want);
        if (!g || !w || memcmp(g->shape, w->shape, sizeof(g->shape)) || memcmp(g->data, w->data, (size_t)w->bytes))
            fail_msg("%s", got);
    }
    for (int n = 0; n < LAYERS * EXPERTS * MT_LEN(expert); n++) {
        const int i = n % MT_LEN(expert), e = n / MT_LEN(expert) % EXPERTS, layer = n / MT_LEN(expert) / EXPERTS;
        snprintf(got, sizeof(got), "base_model.model.layers.%d.ffn.experts.%d.%s.lora_A.weight", layer, e,
                 expert[i].name);
        snprintf(want, sizeof(want), "base_model.model.model.layers.%d.%s.lora_A.weight", layer, expert[i].peft);
        const struct st_tensor *t = safetensors_find(&st, got);
        assert_true(t && t->shape[0] == RANK && t->shape[1] == expert[i].cols);
        for (int64_t k = 0; k < RANK * expert[i].cols; k++)
            assert_true(value(&st, got, k / expert[i].cols, k % expert[i].cols) ==
                        value(&peft, want, e * RANK + k / expert[i].cols, k % expert[i].cols));
        *strstr(got, "lora_A") = *strstr(want, "lora_A") = '\0';
        strcat(got, "lora_B.weight");
        strcat(want, "lora_B.weight");
        t = safetensors_find(&st, got);
        assert_true(t && t->shape[0] == expert[i].rows && t->shape[1] == RANK);
        for (int64_t k = 0; k < RANK * expert[i].rows; k++)
            assert_true(value(&st, got, k / RANK, k % RANK) ==
                        value(&peft, want, expert[i].row + k / RANK, k % RANK * EXPERTS + e));
    }
    safetensors_close(&peft);
    snprintf(want, sizeof(want), "%s/adapter_config.json", out);
    process_read(want, config, sizeof(config));
    assert_says(config, "\"wq_a\"");
    assert_says(config, "\"w2\"");
    assert_null(strstr(config, "_proj"));
    snprintf(want, sizeof(want), "%s/README.md", out);
    process_read(want, config, sizeof(config));
    assert_says(config, "--to merged-mxfp4");
    assert_same_adapters(model, lora, out);
    OK(arch_load(&a, model, &err));
    static const char gone[] = "base_model.model.layers.2.attn.wkv.lora_B.weight";
    assert_int_equal(cpu_adapter_load(&h, &a, changed(out, &st, gone, NULL), &err), -1);
    assert_says(err.msg, "tensor \"base_model.model.layers.2.attn.wkv.lora_B.weight\" is missing");
    static const char both[] = "base_model.model.model.layers.2.self_attn.kv_proj.lora_B.weight";
    assert_int_equal(cpu_adapter_load(&h, &a, changed(out, &st, gone, both), &err), -1);
    assert_says(err.msg, "adapter_model.safetensors: tensors `");
    safetensors_close(&st);
    open_tensors(&st, export(model, V4, adapter(model, "down_proj,q_a_proj", 0.1f), "vllm")); /* w1, w3: not trained */
    assert_int_equal(st.n_tensors, 2 * LAYERS * (1 + EXPERTS * MT_LEN(expert)));
    assert_true(value(&st, "base_model.model.layers.1.ffn.experts.5.w3.lora_B.weight", 0, 0) == 0);
    assert_true(value(&st, "base_model.model.layers.1.ffn.experts.5.w2.lora_B.weight", 0, 0) != 0);
    safetensors_close(&st);
}

/* Whatever the shapes of their matrices. */
static void other_families_refuse_the_names_of_the_publisher(void **state)
{
    const char *model = fixture(V4);
    const char *out = export(model, V4, adapter(model, "q_a_proj", 0.1f), "vllm");
    struct cpu_adapter h;
    struct arch a;
    struct err err;
    (void)state;
    OK(arch_load(&a, fixture("parity/deepseek_v3"), &err));
    assert_int_equal(cpu_adapter_load(&h, &a, out, &err), -1);
    assert_says(err.msg, "the tensors have the names of DeepSeek-V4's publisher, and model.path is another model");
}

/* DeepSeek-V4 trained with model.quantize: merged-mxfp4 has the packed matrices in the format of the source again.
 * Experts that model.quantize packed are refused. */
static void merged_undoes_the_packing_of_the_load(void **state)
{
    static const char *const formats[] = {NULL, "fp8", "bf16"};
    (void)state;
    for (int f = 0; f < MT_LEN(formats); f++) {
        char model[MT_PATH];
        struct err err = {.msg = ""};
        struct safetensors source, merged;
        snprintf(model, sizeof(model), "%s/model", scratch_dir());
        OK(synth_run(&(struct synth_options){.arch = "deepseek-v4-tiny", .dir = model, .quant = formats[f]}, &err));
        const char *lora = adapter(model, "all-linear", 1);
        const char *out = export_set(model, DELTANET, lora, "merged-mxfp4", "model.quantize=mxfp4");
        if (f) {
            assert_null(out);
            assert_null(strstr(said.err, "exporting"));
            assert_says(said.err, "packed by model.quantize, not in MXFP4 as published: use merged-bf16");
            assert_null(export_set(model, DELTANET, lora, "merged-mxfp4", "model.quantize=nf4"));
            assert_says(said.err, "training read the experts in nf4, not in MXFP4 as published: use merged-bf16");
            continue;
        }
        if (!out) fail_msg("%s", said.err);
        OK(safetensors_open(&source, model, &err));
        OK(safetensors_open(&merged, out, &err));
        assert_int_equal(merged.n_tensors, source.n_tensors);
        for (int64_t i = 0; i < source.n_tensors; i++) {
            const struct st_tensor *a = &source.tensors[i], *b = safetensors_find(&merged, a->name);
            if (!b || a->bytes != b->bytes || strcmp(a->st_dtype, b->st_dtype)) fail_msg("%s", a->name);
        }
        safetensors_close(&source);
        safetensors_close(&merged);
    }
}

/* A checkpoint with a quantised tensor of multi-token prediction. */
static const char *with_predictions(struct draft *d, const char *tensor)
{
    draft_put_as(d, tensor, "F8_E4M3", 2, (int64_t[]){4, 4}, mem_alloc(16));
    const char *dir = draft_save(d, 1);
    draft_free(d);
    copy_tokenizer(dir);
    return dir;
}

/* Where an export leaves out multi-token prediction, config.json has none. */
static void config_has_no_prediction_that_is_left_out(void **state)
{
    char model[MT_PATH], file[MT_PATH + 16];
    static char text[1 << 14];
    struct draft d;
    struct err err = {.msg = ""};
    (void)state;
    snprintf(model, sizeof(model), "%s/model", scratch_dir());
    OK(synth_run(&(struct synth_options){.arch = "deepseek-v4-tiny", .dir = model, .n_layer = 2}, &err));
    draft_open_dir(&d, model);
    draft_config(&d, "\"num_nextn_predict_layers\": 0",
                 "\"num_nextn_predict_layers\": 1, \"compress_ratios\": [0, 0, 4]");
    snprintf(model, sizeof(model), "%s", with_predictions(&d, "mtp.0.e_proj.weight"));
    const char *lora = adapter(model, "o_b_proj", 0.1f);
    for (int packed = 0; packed < 2; packed++) {
        const char *out = export(model, DELTANET, lora, packed ? "merged-mxfp4" : "merged-bf16");
        if (!out) fail_msg("%s", said.err);
        snprintf(file, sizeof(file), "%s/config.json", out);
        process_read(file, text, sizeof(text));
        assert_says(text, packed ? "\"num_nextn_predict_layers\": 1" : "\"num_nextn_predict_layers\": 0");
        const char *list = strstr(text, "\"compress_ratios\""), *end = strchr(list, ']');
        assert_true(end && !memchr(list, '4', (size_t)(end - list)) == !packed);
    }
    draft_open_case(&d, DELTANET);
    draft_config(&d, "\"text_config\": {", "\"text_config\": {\"mtp_num_hidden_layers\": 1,");
    const char *out = export(with_predictions(&d, "mtp.fc.weight"), DELTANET,
                             adapter(fixture(DELTANET), "o_proj", 0.1f), "merged-bf16");
    if (!out) fail_msg("%s", said.err);
    snprintf(file, sizeof(file), "%s/config.json", out);
    process_read(file, text, sizeof(text));
    assert_says(text, "\"mtp_num_hidden_layers\": 0");
    assert_says(text, "\"layer_types\"");
}

int test_export_mixers(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vllm_has_the_names_of_each_class),
        cmocka_unit_test(gguf_has_llamas_value_heads),
        cmocka_unit_test(merged_has_the_layout_of_the_source),
        cmocka_unit_test(merged_can_be_loaded_when_a_part_is_adapted),
        cmocka_unit_test(fp8_has_a_matrix_per_expert),
        cmocka_unit_test(fused_rows_have_the_order_of_each_reader),
        cmocka_unit_test(fused_rows_are_merged_in_their_places),
        cmocka_unit_test(merged_has_the_names_of_the_publisher),
        cmocka_unit_test(vllm_has_the_names_of_the_publisher),
        cmocka_unit_test(other_families_refuse_the_names_of_the_publisher),
        cmocka_unit_test(merged_undoes_the_packing_of_the_load),
        cmocka_unit_test(config_has_no_prediction_that_is_left_out),
        cmocka_unit_test(targets_that_are_not_applied_are_refused),
        cmocka_unit_test(the_usual_format_applies_all_targets),
    };
    return cmocka_run_group_tests_name("export_mixers", tests, NULL, NULL);
}
