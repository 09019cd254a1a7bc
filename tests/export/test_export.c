/* test_export.c - writes every export format of every family, reads it back and compares the values with the adapter's.
 * The verification detects missing, exchanged and wrongly scaled values; a failed export leaves no files. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/gguf.h"
#include "data/safetensors.h"
#include "kernels/format/quant.h"
#include "tests/checkpoints.h"
#include "tests/process.h"
#include "train/export/export.h"
#include "train/export/verify.h"
#include "train/adapter/peft.h"

#define LAYER "base_model.model.model.layers.1."
#define OK(rc)                                                                                                         \
    do {                                                                                                               \
        if (rc) fail_msg("line %d: %s", __LINE__, err.msg);                                                            \
    } while (0)

/* A family and its case in fixtures/parity. */
struct family {
    const char *name;
    const char *gate, *up, *down; /* vLLM's names of an expert's matrices; NULL: fused */
    int64_t n_exp, r, d_ff;
    bool interleaved;
};
static const struct family families[] = {
    {"case_a", NULL, NULL, NULL, 8, 8, 96, true},
    {"case_b", NULL, NULL, NULL, 32, 4, 160, true},
    {"qwen3", "mlp.experts.%d.gate_proj", "mlp.experts.%d.up_proj", "mlp.experts.%d.down_proj", 6, 4, 24, false},
    {"olmoe", "mlp.experts.%d.gate_proj", "mlp.experts.%d.up_proj", "mlp.experts.%d.down_proj", 7, 4, 24, false},
    {"mixtral", "block_sparse_moe.experts.%d.w1", "block_sparse_moe.experts.%d.w3", "block_sparse_moe.experts.%d.w2", 5,
     4, 56, false},
    {"minimax_m2", "block_sparse_moe.experts.%d.w1", "block_sparse_moe.experts.%d.w3", "block_sparse_moe.experts.%d.w2",
     6, 4, 24, false},
};
static const char *const formats[] = {"peft", "vllm", "gguf", "merged-bf16", "merged-mxfp4"};

static char report[1 << 16];

static const char *case_path(const char *name, const char *file)
{
    char path[256];
    snprintf(path, sizeof(path), "parity/%s%s%s", name, *file ? "/" : "", file);
    return fixture(path);
}

/* A configuration with the case's rows and a checkpoint (NULL: the case's own). */
static void make_config(struct config *cfg, const char *name, const char *checkpoint)
{
    char text[4 * MT_PATH];
    struct err err = {.msg = ""};
    const int n = snprintf(text, sizeof(text),
                           "[model]\npath = %s\n[data]\neval = %s\nformat = text\nseq_len = 24\n[output]\ndir = %s\n",
                           checkpoint ? checkpoint : case_path(name, ""), case_path(name, "eval.jsonl"), scratch_dir());
    config_defaults(cfg);
    OK(config_parse(cfg, text, n, "case", &err));
}

/* Verifies the export in `dir`, or writes `out` when dir is NULL; `report` receives the output. */
static int run(const struct config *cfg, const char *adapter, const char *format, const char *out, const char *dir,
               struct err *err)
{
    FILE *f = tmpfile();
    assert_non_null(f);
    const int rc = dir ? export_check(cfg, adapter, format, NULL, dir, (struct export_accept){0}, f, err)
                       : export_run(cfg, adapter, format, NULL, out, (struct export_accept){0}, f, err);
    rewind(f);
    report[fread(report, 1, sizeof(report) - 1, f)] = 0;
    fclose(f);
    return rc;
}

/* The path `out` in a new directory. */
static const char *new_path(void)
{
    static char path[8][MT_PATH];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, MT_PATH, "%s/out", scratch_dir());
    return p;
}

static const char *export_case(const char *name, const char *format)
{
    struct config cfg;
    struct err err = {.msg = ""};
    const char *out = new_path();
    make_config(&cfg, name, NULL);
    OK(run(&cfg, case_path(name, "adapter_final"), format, out, NULL, &err));
    return out;
}

static const char *in(const char *dir, const char *name)
{
    static char path[8][MT_PATH];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, MT_PATH, "%s/%s", dir, name);
    return p;
}

/* The mean KL in the report's row of a part, such as "experts only". */
static double kl_of(const char *part)
{
    double max = NAN, mean = NAN;
    const char *at = strstr(report, part);
    if (!at || sscanf(at + strlen(part), "%lf %lf", &max, &mean) != 2) fail_msg("no \"%s\" in\n%s", part, report);
    return mean;
}

/* ---- every format of every family ---- */

static void every_format_is_written_and_read_back(void **state)
{
    (void)state;
    for (int64_t f = 0; f < MT_LEN(families); f++)
        for (int64_t k = 0; k < MT_LEN(formats); k++) {
            if (k == 4 && families[f].gate) continue; /* merged-mxfp4 is for gpt-oss only */
            const char *out = export_case(families[f].name, formats[k]);
            assert_true(file_is_dir(out));
            for (int i = 0; i < 3; i++) {
                static const char *const parts[] = {"whole adapter", "attention only", "experts only"};
                if (k < 3 && kl_of(parts[i]) != 0) fail_msg("%s %s:\n%s", families[f].name, formats[k], report);
            }
        }
}

static float value(const struct st_tensor *t, int64_t row, int64_t col)
{
    float v;
    assert_int_equal(t->dtype, DT_F32);
    assert_true(row < t->shape[0] && col < t->shape[1]);
    memcpy(&v, t->data + 4 * (row * t->shape[1] + col), 4);
    return v;
}

static const struct st_tensor *tensor(const struct safetensors *st, const char *module, char half)
{
    char name[200];
    snprintf(name, sizeof(name), LAYER "%s.lora_%c.weight", module, half);
    const struct st_tensor *t = safetensors_find(st, name);
    if (!t) fail_msg("no tensor %s", name);
    return t;
}

/* Compares one expert's A and B in a vLLM file with PEFT's fused tensors: A row e*r + k, B column k*E + e. */
static void compare_pair(const struct family *f, const struct safetensors *got, const struct safetensors *peft,
                         const char *pattern, const char *fused, int e, int64_t row)
{
    char module[64];
    snprintf(module, sizeof(module), pattern, e);
    const struct st_tensor *a = tensor(got, module, 'A'), *b = tensor(got, module, 'B');
    const struct st_tensor *pa = tensor(peft, fused, 'A'), *pb = tensor(peft, fused, 'B');
    assert_int_equal(a->shape[0], f->r);
    assert_int_equal(b->shape[1], f->r);
    for (int64_t k = 0; k < f->r; k++) {
        for (int64_t i = 0; i < a->shape[1]; i++) assert_true(value(a, k, i) == value(pa, e * f->r + k, i));
        for (int64_t o = 0; o < b->shape[0]; o++) assert_true(value(b, o, k) == value(pb, row + o, k * f->n_exp + e));
    }
}

static void vllm_has_a_pair_per_expert_and_projection(void **state)
{
    (void)state;
    struct err err = {.msg = ""};
    for (int64_t i = 0; i < MT_LEN(families); i++) {
        const struct family *f = &families[i];
        struct safetensors got, peft;
        if (!f->gate) continue;
        OK(safetensors_open(&got, in(export_case(f->name, "vllm"), "adapter_model.safetensors"), &err));
        OK(safetensors_open(&peft, case_path(f->name, "adapter_final/adapter_model.safetensors"), &err));
        assert_int_equal(got.n_tensors, 2 * (8 + 6 * f->n_exp)); /* two layers */
        for (int e = 0; e < f->n_exp; e++) {
            compare_pair(f, &got, &peft, f->gate, "mlp.experts.base_layer", e, 0);
            compare_pair(f, &got, &peft, f->up, "mlp.experts.base_layer", e, f->d_ff);
            compare_pair(f, &got, &peft, f->down, "mlp.experts", e, 0);
        }
        safetensors_close(&got);
        safetensors_close(&peft);
    }
}

static float gguf_at(const struct gguf_tensor *t, int64_t e, int64_t row, int64_t col)
{
    const int64_t *shape = t->shape + t->ndim - 2;
    assert_true(row < shape[0] && col < shape[1] && (t->ndim == 2 ? !e : e < t->shape[0]));
    return ((const float *)t->data)[(e * shape[0] + row) * shape[1] + col];
}

static void compare_gguf_experts(const struct family *f, const struct gguf *g, const struct safetensors *peft, bool up)
{
    const struct gguf_tensor *a =
        gguf_tensor(g, up ? "blk.1.ffn_up_exps.weight.lora_a" : "blk.1.ffn_gate_exps.weight.lora_a");
    const struct gguf_tensor *b =
        gguf_tensor(g, up ? "blk.1.ffn_up_exps.weight.lora_b" : "blk.1.ffn_gate_exps.weight.lora_b");
    const struct st_tensor *pa = tensor(peft, "mlp.experts.base_layer", 'A'),
                           *pb = tensor(peft, "mlp.experts.base_layer", 'B');
    assert_true(a && b && a->ndim == 3 && b->shape[1] == f->d_ff && b->shape[2] == f->r);
    for (int64_t e = 0; e < f->n_exp; e++)
        for (int64_t k = 0; k < f->r; k++) {
            for (int64_t i = 0; i < a->shape[2]; i++) assert_true(gguf_at(a, e, k, i) == value(pa, e * f->r + k, i));
            for (int64_t o = 0; o < f->d_ff; o++) {
                const int64_t row = f->interleaved ? 2 * o + up : o + (up ? f->d_ff : 0);
                assert_true(gguf_at(b, e, o, k) == value(pb, row, k * f->n_exp + e));
            }
        }
}

/* Rows of q in the order of llama.cpp's converter: reshape(heads, 2, half, in), swapaxes(1, 2). */
static void compare_gguf_q(const struct family *f, const struct gguf *g, const struct safetensors *peft)
{
    const struct gguf_tensor *b = gguf_tensor(g, "blk.1.attn_q.weight.lora_b");
    const struct st_tensor *pb = tensor(peft, "self_attn.q_proj", 'B');
    const int64_t half = 6; /* mixtral's head_dim is 12 */
    int64_t row = 0;
    assert_non_null(b);
    if (strcmp(f->name, "mixtral")) {
        for (; row < b->shape[0]; row++) assert_true(gguf_at(b, 0, row, 0) == value(pb, row, 0));
        return;
    }
    for (int64_t head = 0; head < b->shape[0] / (2 * half); head++)
        for (int64_t j = 0; j < half; j++)
            for (int64_t s = 0; s < 2; s++, row++)
                assert_true(gguf_at(b, 0, row, 1) == value(pb, (head * 2 + s) * half + j, 1));
}

static void gguf_has_llamas_names_and_rows(void **state)
{
    (void)state;
    static const char *const archs[] = {"gpt-oss", "gpt-oss", "qwen3moe", "olmoe", "llama", "minimax-m2"};
    static const float alphas[] = {16, 4, 16, 16, 16, 16}; /* lora_alpha of adapter_final */
    struct err err = {.msg = ""};
    for (int64_t i = 0; i < MT_LEN(families); i++) {
        const struct family *f = &families[i];
        struct gguf g;
        struct safetensors peft;
        OK(gguf_open(&g, in(export_case(f->name, "gguf"), "adapter.gguf"), &err));
        OK(safetensors_open(&peft, case_path(f->name, "adapter_final/adapter_model.safetensors"), &err));
        assert_string_equal(gguf_value(&g, "general.architecture")->text, archs[i]);
        assert_string_equal(gguf_value(&g, "general.type")->text, "adapter");
        assert_string_equal(gguf_value(&g, "adapter.type")->text, "lora");
        assert_true(gguf_value(&g, "adapter.lora.alpha")->f32 == alphas[i]);
        assert_int_equal(gguf_value(&g, "general.quantization_version")->u32, 2);
        assert_int_equal(g.n_values, 5);
        compare_gguf_experts(f, &g, &peft, false);
        compare_gguf_experts(f, &g, &peft, true);
        compare_gguf_q(f, &g, &peft);
        gguf_close(&g);
        safetensors_close(&peft);
    }
}

/* Nemotron-H: up alone, below mixer; Mamba-2's projection. */
static void experts_without_a_gate(void **state)
{
    (void)state;
    static const struct family f = {"nemotron", NULL, "mixer.experts.%d.up_proj", "mixer.experts.%d.down_proj", 8, 4,
                                    16,         false};
    static const char *const all[] = {"peft", "vllm", "gguf", "merged-bf16", "merged-fp8"};
    const char *out[MT_LEN(all)];
    struct safetensors got, peft;
    struct gguf g;
    struct err err = {.msg = ""};
    for (int k = 0; k < MT_LEN(all); k++) {
        out[k] = export_case(f.name, all[k]);
        if (k < 3) assert_true(kl_of("whole adapter") == 0);
    }
    OK(safetensors_open(&got, in(out[1], "adapter_model.safetensors"), &err));
    OK(safetensors_open(&peft, case_path(f.name, "adapter_final/adapter_model.safetensors"), &err));
    OK(gguf_open(&g, in(out[2], "adapter.gguf"), &err));
    assert_int_equal(got.n_tensors, 2 * (2 + 4 + 2 + 2 + 2 * f.n_exp)); /* Mamba, attention, shared, dense, experts */
    assert_string_equal(gguf_value(&g, "general.architecture")->text, "nemotron_h_moe");
    const struct gguf_tensor *b = gguf_tensor(&g, "blk.1.ffn_up_exps.weight.lora_b");
    assert_true(b && b->shape[1] == f.d_ff && gguf_tensor(&g, "blk.0.ssm_in.weight.lora_a"));
    assert_null(gguf_tensor(&g, "blk.1.ffn_gate_exps.weight.lora_b"));
    for (int e = 0; e < f.n_exp; e++) {
        compare_pair(&f, &got, &peft, f.up, "mixer.experts.base_layer", e, 0);
        compare_pair(&f, &got, &peft, f.down, "mixer.experts", e, 0);
        assert_true(gguf_at(b, e, 3, 1) == value(tensor(&peft, "mixer.experts.base_layer", 'B'), 3, f.n_exp + e));
    }
    gguf_close(&g);
    safetensors_close(&got);
    safetensors_close(&peft);
}

/* ---- partial adapters */

/* Saves adapters of a case with these options; every value depends on the parameter's name, and B is scaled by this
 * factor. */
static const char *save_adapter(const char *name, const struct lora_options *opt, float b)
{
    struct cpu_adapter h = {.ad = {0}};
    struct arch a;
    struct err err = {.msg = ""};
    const char *dir = new_path();
    OK(arch_load(&a, case_path(name, ""), &err));
    struct adapters ad;
    OK(adapters_plan(&ad, &a, opt, &err));
    const struct shape shape = cpu_adapter_shape(&ad);
    OK(cpu_adapter_open(&h, &a, &shape, &err));
    for (int64_t i = 0; i < h.ad.n_params; i++) {
        const struct lora_param *p = &h.ad.params[i];
        float *v = cpu_adapter_at(&h, p, 0, 0, 0);
        for (int64_t k = 0; k < lora_param_count(p); k++)
            v[k] = (p->is_b ? b : 0.1f) * (float)test_value((uint64_t)i, (uint64_t)k);
    }
    OK(peft_save(&h.ad, &h.dev, dir, NULL, NULL, &err));
    adapters_free(&ad);
    cpu_adapter_close(&h);
    return dir;
}

static void partial_adapters_ranks_and_rslora_are_exported(void **state)
{
    (void)state;
    static const struct lora_options options[] = {
        {.r = 3, .alpha = 5, .targets = "down_proj", .layers = "1"},
        {.r = 2, .alpha = 2.5, .rslora = true, .targets = "gate_up_proj,q_proj", .layers = "0"},
        {.r = 1, .alpha = 1, .targets = "v_proj,o_proj", .layers = ""},
        {.r = 5, .alpha = 3, .rslora = true, .targets = "experts", .layers = ""},
        {.r = 4,
         .alpha = 3,
         .targets = "q_proj,k_proj,v_proj,experts",
         .ranks = "k_proj=2,v_proj=6,down_proj=3",
         .alphas = "q_proj=6,gate_up_proj=1.5",
         .layers = ""},
        {.r = 3, .alpha = 2, .rslora = true, .targets = "q_proj,experts", .alphas = "experts=4", .layers = ""},
        {.r = 2, .alpha = 3, .rslora = true, .targets = "q_proj,experts", .ranks = "gate_up_proj=8", .layers = ""},
    };
    static const char *const cases[] = {"case_a", "qwen3", "mixtral"};
    for (int64_t c = 0; c < MT_LEN(cases); c++)
        for (int64_t o = 0; o < MT_LEN(options); o++)
            for (int64_t k = 0; k < 4; k++) {
                struct config cfg;
                struct err err = {.msg = ""};
                if (k == 2 && options[o].rslora && options[o].ranks) continue; /* GGUF has one alpha */
                make_config(&cfg, cases[c], NULL);
                OK(run(&cfg, save_adapter(cases[c], &options[o], 0.1f), formats[k], new_path(), NULL, &err));
                /* rsLoRA's alpha * sqrt(r) / r equals alpha / sqrt(r) except for rounding; with lora.rank_pattern the
                 * export for vLLM scales B, which also rounds */
                const bool rounds = options[o].rslora || (options[o].ranks && k == 1);
                if (k < 3) assert_true(kl_of("whole adapter") <= (rounds ? 1e-9 : 0));
            }
}

/* ---- damaged exports, which the verification must detect ---- */

struct parts {
    struct safetensors st;
    struct st_entry entries[600];
    char names[600][200];
    int64_t n;
};

static void parts_read(struct parts *p, const char *path)
{
    struct err err = {.msg = ""};
    OK(safetensors_open(&p->st, path, &err));
    assert_true(p->st.n_tensors <= 600);
    for (p->n = 0; p->n < p->st.n_tensors; p->n++) {
        const struct st_tensor *t = &p->st.tensors[p->n];
        void *copy = mem_alloc(t->bytes);
        memcpy(copy, t->data, (size_t)t->bytes);
        snprintf(p->names[p->n], sizeof(p->names[0]), "%s", t->name);
        p->entries[p->n] = (struct st_entry){.name = p->names[p->n], .dtype = t->dtype, .ndim = t->ndim, .data = copy};
        memcpy(p->entries[p->n].shape, t->shape, sizeof(t->shape));
    }
}

static void parts_write(struct parts *p, const char *path)
{
    struct err err = {.msg = ""};
    safetensors_close(&p->st);
    OK(safetensors_write(path, p->entries, p->n, &err));
    for (int64_t i = 0; i < p->n; i++) mem_free((void *)(uintptr_t)p->entries[i].data);
}

static struct st_entry *part(struct parts *p, const char *name)
{
    for (int64_t i = 0; i < p->n; i++)
        if (!strcmp(p->names[i], name)) return &p->entries[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static void assert_found(const char *name, const char *format, const char *dir, const char *word)
{
    struct config cfg;
    struct err err = {.msg = ""};
    make_config(&cfg, name, NULL);
    assert_int_equal(run(&cfg, case_path(name, "adapter_final"), format, NULL, dir, &err), -1);
    if (!strstr(err.msg, word)) fail_msg("\"%s\" does not say \"%s\"", err.msg, word);
}

static void replace_text(const char *path, const char *old, const char *new)
{
    struct err err = {.msg = ""};
    int64_t size;
    char *text = file_read(path, 1 << 20, &size, &err), *at = text ? strstr(text, old) : NULL, out[1 << 14];
    if (!at) fail_msg("\"%s\" is not in %s", old, path);
    const int n = snprintf(out, sizeof(out), "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
    OK(file_write_atomic(path, out, n, &err));
    mem_free(text);
}

static void a_dropped_expert_is_named(void **state)
{
    (void)state;
    struct parts p;
    const char *dir = export_case("qwen3", "vllm"), *path = in(dir, "adapter_model.safetensors");
    parts_read(&p, path);
    struct st_entry *gone = part(&p, LAYER "mlp.experts.3.up_proj.lora_B.weight");
    void *data = (void *)(uintptr_t)gone->data;
    const int64_t at = gone - p.entries;
    p.n--;
    mem_free(data);
    memmove(&p.entries[at], &p.entries[at + 1], (size_t)(p.n - at) * sizeof(p.entries[0]));
    parts_write(&p, path);
    assert_found("qwen3", "vllm", dir, "mlp.experts.3.up_proj.lora_B");
}

/* An expert's B is zero: the file is complete, but the expert has no effect. */
static void a_zeroed_expert_is_named(void **state)
{
    (void)state;
    struct parts p;
    const char *dir = export_case("case_a", "peft"), *path = in(dir, "adapter_model.safetensors");
    parts_read(&p, path);
    struct st_entry *b = part(&p, LAYER "mlp.experts.lora_B.weight");
    for (int64_t row = 0; row < b->shape[0]; row++)
        for (int64_t k = 0; k < 8; k++) ((float *)(uintptr_t)b->data)[row * 64 + k * 8 + 5] = 0;
    parts_write(&p, path);
    assert_found("case_a", "peft", dir, "layers.1.down_proj.lora_B of expert 5: 1024 of 1024 values differ");
    assert_true(kl_of("experts only") > 1e-4 && kl_of("whole adapter") > 1e-4);
    assert_true(kl_of("attention only") == 0);
}

static void exchanged_projections_are_named(void **state)
{
    (void)state;
    struct parts p;
    const char *dir = export_case("olmoe", "vllm"), *path = in(dir, "adapter_model.safetensors");
    parts_read(&p, path);
    struct st_entry *gate = part(&p, LAYER "mlp.experts.2.gate_proj.lora_B.weight"),
                    *up = part(&p, LAYER "mlp.experts.2.up_proj.lora_B.weight");
    const void *data = gate->data;
    gate->data = up->data;
    up->data = data;
    parts_write(&p, path);
    assert_found("olmoe", "vllm", dir, "layers.1.gate_up_proj.lora_B of expert 2");
}

/* The names of A and B are exchanged. */
static void exchanged_a_and_b_are_detected(void **state)
{
    (void)state;
    struct parts p;
    const char *dir = export_case("mixtral", "vllm"), *path = in(dir, "adapter_model.safetensors");
    parts_read(&p, path);
    struct st_entry *a = part(&p, LAYER "self_attn.o_proj.lora_A.weight"),
                    *b = part(&p, LAYER "self_attn.o_proj.lora_B.weight");
    const char *name = a->name;
    a->name = b->name;
    b->name = name;
    parts_write(&p, path);
    assert_found("mixtral", "vllm", dir, "self_attn.o_proj.lora_A");
}

static void a_wrong_scale_is_detected(void **state)
{
    (void)state;
    const char *dir = export_case("case_b", "vllm");
    replace_text(in(dir, "adapter_config.json"), "\"lora_alpha\": ", "\"lora_alpha\": 3");
    assert_found("case_b", "vllm", dir, "the scale is");
    assert_true(kl_of("attention only") > 1e-3 && kl_of("experts only") > 1e-3);
    dir = export_case("olmoe", "vllm");
    replace_text(in(dir, "adapter_config.json"), "\"use_rslora\": false", "\"use_rslora\": true");
    assert_found("olmoe", "vllm", dir, "");
}

/* Changes one float of a GGUF tensor in the file. */
static void poke_gguf(const char *path, const char *name, int64_t at, float v)
{
    struct gguf g;
    struct err err = {.msg = ""};
    OK(gguf_open(&g, path, &err));
    const long where = (long)((const uint8_t *)(gguf_tensor(&g, name)->data + at) - g.map.data);
    gguf_close(&g);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, where, SEEK_SET), 0);
    assert_int_equal(fwrite(&v, 4, 1, f), 1);
    fclose(f);
}

static void one_wrong_value_of_a_gguf_is_named(void **state)
{
    (void)state;
    const char *dir = export_case("mixtral", "gguf"), *path = in(dir, "adapter.gguf");
    poke_gguf(path, "blk.0.attn_k.weight.lora_b", 4, 7);
    assert_found("mixtral", "gguf", dir, "layers.0.k_proj.lora_B: 1 of ");
    dir = export_case("case_a", "gguf");
    poke_gguf(in(dir, "adapter.gguf"), "blk.1.ffn_up_exps.weight.lora_a", 0, 7);
    assert_found("case_a", "gguf", dir, "layer 1, expert 0: gate and up have different lora_a");
}

/* The merged file has an expert of the base model, as if the merge had skipped it. */
static void an_expert_that_was_not_merged_is_named(void **state)
{
    (void)state;
    struct parts p;
    struct safetensors source;
    struct err err = {.msg = ""};
    const char *dir = export_case("qwen3", "merged-bf16"), *path = in(dir, "model.safetensors");
    const char *name = "model.layers.0.mlp.experts.4.down_proj.weight";
    OK(safetensors_open(&source, case_path("qwen3", ""), &err));
    parts_read(&p, path);
    const struct st_tensor *t = safetensors_find(&source, name);
    memcpy((void *)(uintptr_t)part(&p, name)->data, t->data, (size_t)t->bytes);
    parts_write(&p, path);
    safetensors_close(&source);
    assert_found("qwen3", "merged-bf16", dir, "layers.0.down_proj of expert 4");
    assert_true(kl_of("attention only") < 1e-3);
}

static void an_expert_that_was_not_encoded_again_is_named(void **state)
{
    (void)state;
    struct parts p;
    struct safetensors source;
    struct err err = {.msg = ""};
    const char *dir = export_case("case_a", "merged-mxfp4"), *path = in(dir, "model.safetensors");
    const char *name = "model.layers.1.mlp.experts.gate_up_proj_blocks";
    OK(safetensors_open(&source, case_path("case_a", ""), &err));
    parts_read(&p, path);
    const struct st_tensor *t = safetensors_find(&source, name);
    memcpy((char *)(uintptr_t)part(&p, name)->data + 2 * t->bytes / 8, t->data + 2 * t->bytes / 8,
           (size_t)(t->bytes / 8));
    parts_write(&p, path);
    safetensors_close(&source);
    assert_found("case_a", "merged-mxfp4", dir, "layers.1.gate_up_proj of expert 2");
}

/* ---- merged ---- */

static void an_adapter_that_does_nothing_leaves_the_bytes(void **state)
{
    (void)state;
    static const char *const cases[] = {"case_a", "case_b"};
    const struct lora_options opt = {
        .r = 4, .alpha = 8, .targets = "q_proj,k_proj,v_proj,o_proj,experts", .layers = ""};
    struct err err = {.msg = ""};
    for (int64_t c = 0; c < MT_LEN(cases); c++) {
        struct config cfg;
        struct safetensors source, merged;
        const char *out = new_path();
        make_config(&cfg, cases[c], NULL);
        OK(run(&cfg, save_adapter(cases[c], &opt, 0), "merged-mxfp4", out, NULL, &err));
        OK(safetensors_open(&source, case_path(cases[c], ""), &err));
        OK(safetensors_open(&merged, out, &err));
        assert_int_equal(source.n_tensors, merged.n_tensors);
        for (int64_t i = 0; i < source.n_tensors; i++) {
            const struct st_tensor *a = &source.tensors[i], *b = &merged.tensors[i];
            assert_string_equal(a->name, b->name);
            assert_int_equal(a->bytes, b->bytes);
            if (memcmp(a->data, b->data, (size_t)a->bytes)) fail_msg("%s: %s changed", cases[c], a->name);
        }
        safetensors_close(&source);
        safetensors_close(&merged);
    }
}

/* Checkpoints in bitsandbytes NF4 and with stacked bf16 experts are merged to the published layout, with tokenizer and
 * configuration. */
static void other_sources_merge(void **state)
{
    (void)state;
    const struct linear_form nf4 = {.format = WF_NF4, .block = 64, .nested = true};
    for (int i = 0; i < 3; i++) {
        struct draft d;
        struct config cfg;
        struct err err = {.msg = ""};
        const char *out = new_path();
        draft_open(&d);
        if (i == 0) draft_per_expert(&d, &nf4);
        if (i == 0) draft_attention(&d, &nf4);
        if (i > 0) draft_transposed(&d, i == 1 ? DT_BF16 : DT_F32);
        const char *dir = draft_save(&d, 2);
        draft_free(&d);
        struct file_map map;
        OK(file_map_open(&map, case_path("case_a", "tokenizer.json"), &err));
        OK(file_write_atomic(in(dir, "tokenizer.json"), map.data, map.size, &err));
        file_map_close(&map);
        OK(file_map_open(&map, case_path("case_a", "tokenizer_config.json"), &err));
        OK(file_write_atomic(in(dir, "tokenizer_config.json"), map.data, map.size, &err));
        file_map_close(&map);
        make_config(&cfg, "case_a", dir);
        OK(run(&cfg, case_path("case_a", "adapter_final"), "merged-bf16", out, NULL, &err));
        struct safetensors st;
        OK(safetensors_open(&st, out, &err));
        const struct st_tensor *t = safetensors_find(&st, "model.layers.1.mlp.experts.gate_up_proj");
        assert_true(t && t->dtype == DT_BF16 && t->ndim == 3 && t->shape[1] == 128 && t->shape[2] == 192);
        assert_non_null(safetensors_find(&st, "model.layers.1.mlp.router.weight"));
        assert_null(safetensors_find(&st, "model.layers.1.mlp.router.linear.weight"));
        safetensors_close(&st);
        assert_true(file_exists(in(out, "tokenizer.json")));
        char text[1 << 14];
        process_read(in(out, "config.json"), text, sizeof(text));
        assert_null(strstr(text, "quantization_config"));
        assert_int_equal(run(&cfg, case_path("case_a", "adapter_final"), "merged-mxfp4", new_path(), NULL, &err), 0);
    }
}

/* An adapter that was trained on weights packed at load is merged into the packed values, not into those of the file.
 */
static void weights_packed_at_load_are_merged(void **state)
{
    (void)state;
    struct config cfg;
    struct err err = {.msg = ""};
    const char *out = new_path();
    make_config(&cfg, "mixtral", NULL);
    OK(config_set(&cfg, "model.quantize=nf4", &err));
    OK(run(&cfg, case_path("mixtral", "adapter_final"), "merged-bf16", out, NULL, &err));
    OK(config_set(&cfg, "model.quantize=none", &err));
    assert_int_equal(run(&cfg, case_path("mixtral", "adapter_final"), "merged-bf16", NULL, out, &err), -1);
}

/* ---- the encoder ---- */

static void mxfp4_encodes_decoded_values_exactly(void **state)
{
    (void)state;
    enum { N = 64 * 32 };
    uint8_t old[N / 2], old_scale[N / 32], got[N / 2], scale[N / 32];
    float x[N];
    for (int i = 0; i < N / 2; i++) old[i] = (uint8_t)rng_u64(1, (uint64_t)i); /* every code, including -0 */
    for (int i = 0; i < N / 32; i++) old_scale[i] = (uint8_t)(110 + rng_u64(2, (uint64_t)i) % 20);
    old_scale[0] = 0, old_scale[1] = 251; /* one exponent more, and a value of 6 is infinite */
    const struct weight w = {.format = WF_MXFP4, .n_exp = 1, .n_out = 64, .n_in = 32, .data = old, .scale = old_scale};
    quant_decode(x, &w, 0, 0, N, 2);
    assert_int_equal(quant_mxfp4_merge(got, scale, x, old, old_scale, N, 2), 0);
    assert_memory_equal(got, old, sizeof(old));
    assert_memory_equal(scale, old_scale, sizeof(scale));
    for (int i = 2 * 32; i < N; i++)
        x[i] += (float)(0.3 * test_value(3, (uint64_t)i)) * ldexpf(1, old_scale[i / 32] - 127);
    assert_int_equal(quant_mxfp4_merge(got, scale, x, old, old_scale, N, 2), 0);
    uint8_t plain[N / 2], plain_scale[N / 32];
    quant_mxfp4_encode(plain, plain_scale, x, N);
    const struct weight merged = {.format = WF_MXFP4, .n_exp = 1, .n_out = 64, .n_in = 32, .data = got, .scale = scale},
                        encoded = {.format = WF_MXFP4,
                                   .n_exp = 1,
                                   .n_out = 64,
                                   .n_in = 32,
                                   .data = plain,
                                   .scale = plain_scale};
    for (int b = 2; b < N / 32; b++) {
        double error[2] = {0, 0};
        for (int i = 32 * b; i < 32 * b + 32; i++) {
            error[0] += pow((double)quant_value(&merged, 0, i) - (double)x[i], 2);
            error[1] += pow((double)quant_value(&encoded, 0, i) - (double)x[i], 2);
        }
        assert_true(error[0] <= error[1]);
        assert_true(scale[b] == old_scale[b] || scale[b] == plain_scale[b]);
    }
    x[5] = INFINITY;
    assert_int_equal(quant_mxfp4_merge(got, scale, x, old, old_scale, N, 1), 1);
}

/* ---- the command ---- */

static void errors_leave_no_files(void **state)
{
    (void)state;
    struct config cfg;
    struct err err = {.msg = ""};
    const char *adapter = case_path("qwen3", "adapter_final"), *out = new_path(), *full = scratch_dir();
    const char *link = new_path();
    make_config(&cfg, "qwen3", NULL);
    assert_int_equal(run(&cfg, adapter, "ggf", out, NULL, &err), -1);
    assert_says(err.msg, "did you mean gguf?");
    assert_int_equal(run(&cfg, adapter, "merged-mxfp4", out, NULL, &err), -1);
    assert_says(err.msg, "merged-mxfp4 is for gpt-oss");
    assert_int_equal(run(&cfg, case_path("case_a", "adapter_final"), "gguf", out, NULL, &err), -1);
    assert_int_equal(run(&cfg, NULL, "gguf", out, NULL, &err), -1); /* output.dir has no adapter */
    assert_says(err.msg, "/adapter/adapter_config.json");
    OK(file_write_atomic(in(full, "mine"), "x", 1, &err));
    assert_int_equal(run(&cfg, adapter, "peft", full, NULL, &err), -1);
    assert_says(err.msg, "is not empty");
    OK(symlink(scratch_dir(), link)); /* to an empty directory */
    assert_int_equal(run(&cfg, adapter, "peft", link, NULL, &err), -1);
    assert_says(err.msg, "is a symbolic link to /");
    cfg.data.eval[0] = 0;
    assert_int_equal(run(&cfg, adapter, "peft", out, NULL, &err), -1);
    assert_says(err.msg, "data.eval");
    assert_false(file_exists(out));
    assert_true(file_exists(in(full, "mine")));
    assert_int_equal(file_check_space(full, INT64_MAX, &err), -1);
    assert_says(err.msg, "of disk space are needed");
}

/* MXFP4 rounds away most of this adapter and adds rounding errors elsewhere. So the base model is closer to the trainer
 * than the merge is. */
static void a_failed_verification_leaves_no_files(void **state)
{
    (void)state;
    struct config cfg;
    struct err err = {.msg = ""};
    char parent[MT_PATH], **names;
    int64_t n;
    const char *out = new_path();
    make_config(&cfg, "case_a", NULL);
    const struct lora_options opt = {.r = 1, .alpha = 2, .targets = "experts", .layers = ""};
    assert_int_equal(run(&cfg, save_adapter("case_a", &opt, 0.22f), "merged-mxfp4", out, NULL, &err), -1);
    snprintf(parent, sizeof(parent), "%.*s", (int)(strrchr(out, '/') - out), out);
    struct err other;
    assert_int_equal(file_list(parent, &names, &n, &other), 0);
    file_list_free(names, n);
    assert_int_equal(n, 0);
    assert_says(err.msg, "verification: merged-mxfp4");
    assert_says(err.msg, "or accept this loss with --accept-rounding; more held-out rows");
}

static void rounding_away_the_adapter_is_a_warning(void **state)
{
    (void)state;
    static const float sizes[] = {0.01f, 8}; /* factors of B */
    const struct lora_options opt = {.r = 2, .alpha = 2, .targets = "experts", .layers = ""};
    for (int i = 0; i < MT_LEN(sizes); i++) {
        const char *adapter = save_adapter("case_a", &opt, sizes[i]);
        (void)RUN("export", process_config(""), "--adapter", adapter, "--to", "merged-mxfp4", "--out", new_path());
        const bool warned =
            strstr(said.err, "% of the adapter's change to the experts") && strstr(said.err, "merged-bf16, or peft");
        const bool reported = strstr(said.out, "; merged-bf16 and peft keep the change") != NULL;
        assert_says(said.out, "rounding to MXFP4 removes ");
        if (warned != !i || reported != !i) fail_msg("B of size %g: %s%s", (double)sizes[i], said.out, said.err);
    }
}

static void the_command_line_exports_and_verifies(void **state)
{
    (void)state;
    const char *config = process_config(""), *out = new_path();
    const char *adapter = case_path("case_a", "adapter_final");
    assert_int_equal(
        RUN("export", config, "--set", "data.format=text", "--adapter", adapter, "--to", "vllm", "--out", out), 0);
    assert_says(said.out, "experts only");
    assert_says(said.err, "written and verified");
    assert_int_equal(
        RUN("export", config, "--set", "data.format=text", "--adapter", adapter, "--to", "vllm", "--verify", out), 0);
    assert_int_equal(RUN("export", config, "--set", "data.format=text", "--adapter",
                         case_path("case_a", "adapter_init"), "--to", "vllm", "--verify", out),
                     1);
    assert_says(said.err, ", in vllm, the first: layers.0.");
    assert_int_equal(RUN("export", config), 2);
    assert_int_equal(RUN("eval", config, "--to", "vllm"), 2);
}

int test_export(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_is_written_and_read_back),
        cmocka_unit_test(vllm_has_a_pair_per_expert_and_projection),
        cmocka_unit_test(gguf_has_llamas_names_and_rows),
        cmocka_unit_test(experts_without_a_gate),
        cmocka_unit_test(partial_adapters_ranks_and_rslora_are_exported),
        cmocka_unit_test(a_dropped_expert_is_named),
        cmocka_unit_test(a_zeroed_expert_is_named),
        cmocka_unit_test(exchanged_projections_are_named),
        cmocka_unit_test(exchanged_a_and_b_are_detected),
        cmocka_unit_test(a_wrong_scale_is_detected),
        cmocka_unit_test(one_wrong_value_of_a_gguf_is_named),
        cmocka_unit_test(an_expert_that_was_not_merged_is_named),
        cmocka_unit_test(an_expert_that_was_not_encoded_again_is_named),
        cmocka_unit_test(an_adapter_that_does_nothing_leaves_the_bytes),
        cmocka_unit_test(other_sources_merge),
        cmocka_unit_test(weights_packed_at_load_are_merged),
        cmocka_unit_test(mxfp4_encodes_decoded_values_exactly),
        cmocka_unit_test(rounding_away_the_adapter_is_a_warning),
        cmocka_unit_test(errors_leave_no_files),
        cmocka_unit_test(a_failed_verification_leaves_no_files),
        cmocka_unit_test(the_command_line_exports_and_verifies),
    };
    return cmocka_run_group_tests_name("export", tests, NULL, NULL);
}
