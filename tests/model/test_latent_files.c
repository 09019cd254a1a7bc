/* test_latent_files.c - checkpoints as DeepSeek, Moonshot and Mistral publish them: FP8 with a scale per block in every
 * Linear, INT4 experts, a text part under another name. Each loads to the values of the same model in bf16, dense and
 * packed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "tests/checkpoints.h"
#include "train/synth/synth.h"

#define UP0 "model.layers.1.mlp.experts.0.up_proj.weight"

static void open_synth(struct draft *d, const char *arch)
{
    struct err err;
    char dir[MT_PATH];
    snprintf(dir, sizeof(dir), "%s/model", scratch_dir());
    if (synth_run(&(struct synth_options){.arch = arch, .dir = dir, .n_layer = 2}, &err)) fail_msg("%s", err.msg);
    draft_open_dir(d, dir);
}

/* Two layers, the first of them dense, with latent attention and a shared expert; bf16. */
static void open_kimi(struct draft *d) { open_synth(d, "kimi-tiny"); }

/* Calls change for every Linear whose name has `part`. */
static void each_linear(struct draft *d, const char *part,
                        void (*change)(struct draft *, const struct st_entry *, const float *, bool), bool decoded)
{
    const int64_t n = d->n;
    char(*names)[128] = mem_array(n, sizeof(*names));
    for (int64_t i = 0; i < n; i++) snprintf(names[i], sizeof(*names), "%s", d->entries[i].name);
    for (int64_t i = 0; i < n; i++) {
        if (!strstr(names[i], "_proj") || !strstr(names[i], part)) continue;
        const struct st_entry e = *draft_find(d, names[i]);
        float *x = draft_values(d, names[i]);
        change(d, &(struct st_entry){.name = names[i], .shape = {e.shape[0], e.shape[1]}}, x, decoded);
        mem_free(x);
    }
    mem_free(names);
}

static void to_fp8(struct draft *d, const struct st_entry *e, const float *x, bool decoded)
{
    const struct linear_form form = {.format = WF_BF16, .fp8 = FP8_BLOCKS_INV, .decoded = decoded};
    draft_linear(d, e->name, x, e->shape[0], e->shape[1], &form);
}

static void to_int4(struct draft *d, const struct st_entry *e, const float *x, bool decoded)
{
    const struct linear_form form = {.format = WF_BF16, .int4 = true, .decoded = decoded};
    draft_linear(d, e->name, x, e->shape[0], e->shape[1], &form);
}

static const char *saved(const char *part, void (*change)(struct draft *, const struct st_entry *, const float *, bool),
                         bool decoded)
{
    struct draft d;
    open_kimi(&d);
    each_linear(&d, part, change, decoded);
    const char *dir = draft_save(&d, decoded ? 1 : 3);
    draft_free(&d);
    return dir;
}

static void assert_same_packed(const char *stored, const char *decoded, const struct quantize *q, const char *says)
{
    struct loaded a, b;
    loaded_open_as(&a, stored, q);
    loaded_open_as(&b, decoded, q);
    assert_same_loaded(&a, &b);
    assert_string_equal(a.model.weights.experts, says);
    assert_int_equal(a.model.weights.n_unused, 0);
    const struct layer_weights *dense = &a.model.weights.layers[0], *moe = &a.model.weights.layers[1];
    const struct weight *ffn[] = {&dense->up.w, &dense->down.w, &moe->up.w, &moe->shared_up.w, &moe->shared_down.w};
    const struct weight *attention[] = {&moe->mla.a.w, &moe->mla.q_b.w, &moe->mla.kv_b.w, &moe->mla.out.w};
    for (int i = 0; i < MT_LEN(ffn) && q->format != WF_NONE; i++) assert_int_equal(ffn[i]->format, q->format);
    for (int i = 0; i < MT_LEN(attention) && q->attention; i++) assert_int_equal(attention[i]->format, q->format);
    loaded_close(&a);
    loaded_close(&b);
}

/* Every Linear, those of latent attention, dense layers and shared experts too, packs from FP8 as from bf16. */
static void fp8_packs(void **state)
{
    (void)state;
    const char *stored = saved("", to_fp8, false), *decoded = saved("", to_fp8, true);
    assert_same_packed(stored, decoded, &(struct quantize){.format = WF_NF4, .attention = true},
                       "nf4, packed from fp8");
    assert_same_packed(stored, decoded, &(struct quantize){.format = WF_MXFP4, .attention = true},
                       "mxfp4, packed from fp8");
}

/* Experts in INT4, the rest in bf16. */
static void int4_is_read(void **state)
{
    (void)state;
    const char *stored = saved("experts.", to_int4, false), *decoded = saved("experts.", to_int4, true);
    assert_same_packed(stored, decoded, &(struct quantize){.format = WF_NONE}, "bf16, decoded from int4");
    assert_same_packed(stored, decoded, &(struct quantize){.format = WF_NF4}, "nf4, packed from int4");
}

static void bad_int4_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *suffix;
        enum dtype dtype;
        int64_t rows, cols;
        const char *says;
    } rows[] = {
        {"_packed", DT_I32, 128, 64,
         UP0 "_packed has codes of 8 bits (pack-quantized of compressed-tensors, W8A16), of which only INT4"},
        {"_scale", DT_BF16, 128, 3, UP0 "_scale is BF16 [128, 3], expected a scale per group of columns, [128, 8]"},
        {"_scale", DT_I32, 128, 8, UP0 "_scale (I32), which is no supported quantisation"},
        {"_zero_point", DT_I32, 16, 8,
         UP0 "_zero_point: a checkpoint in the format compressed-tensors with zero points"},
        {"_g_idx", DT_I32, 16, 8, UP0 "_g_idx: a checkpoint in the format compressed-tensors with reordered groups"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct draft d;
        char name[160];
        open_kimi(&d);
        each_linear(&d, "mlp.experts.", to_int4, false);
        snprintf(name, sizeof(name), "%s%s", UP0, rows[i].suffix);
        draft_put(&d, name, rows[i].dtype, 2, (int64_t[]){rows[i].rows, rows[i].cols},
                  mem_array(rows[i].rows * rows[i].cols, 4));
        assert_draft_refused(&d, rows[i].says);
        draft_free(&d);
    }
}

/* How transformers stores the scales of FP8: one per matrix, of a stack of experts one per expert, one for all, or one
 * per block. */
enum stack_scales { EACH, ALL, BLOCKS };

/* FP8 with random codes, and the scale of an activation beside each matrix, which is not read. */
static void put_fp8(struct draft *d, const char *name, enum stack_scales kind, bool decoded)
{
    const struct st_entry e = *draft_find(d, name);
    const bool stack = e.ndim == 3;
    const int64_t n_exp = stack ? e.shape[0] : 1, out = e.shape[stack], in = e.shape[stack + 1], n = n_exp * out * in;
    const int64_t block = stack && kind == BLOCKS ? 128 : MT_MAX(out, in), rows = (out + block - 1) / block;
    const int64_t cols = (in + block - 1) / block, n_scale = stack && kind != ALL ? n_exp * rows * cols : 1;
    const int64_t shape[] = {n_exp, rows, cols};
    float table[256], *scale = mem_array(n_scale, sizeof(*scale));
    uint8_t *codes = mem_alloc(n);
    uint16_t *value = mem_array(n, sizeof(*value));
    const uint64_t key = rng_key(8, name);
    char full[160];
    quant_fp8_values(table);
    for (int64_t i = 0; i < n_scale; i++) scale[i] = (float)(1 + test_value(7, (uint64_t)i) / 2) / 4096;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i / (out * in) * rows * cols + i % (out * in) / in / block * cols + i % in / block;
        codes[i] = (uint8_t)(rng_u64(key, (uint64_t)i) % 127 + (i % 2 ? 128 : 0));
        value[i] = f32_to_bf16(table[codes[i]] * scale[n_scale > 1 ? at : 0]);
    }
    if (decoded) {
        draft_put(d, name, DT_BF16, e.ndim, e.shape, value);
        mem_free(codes);
        mem_free(scale);
        return;
    }
    draft_put_as(d, name, "F8_E4M3", e.ndim, (int64_t[]){e.shape[0], e.shape[1], in}, codes);
    snprintf(full, sizeof(full), "%s_scale_inv", name);
    draft_put(d, full, DT_F32, n_scale > 1 ? 3 : 0, shape, scale);
    if (stack)
        snprintf(full, sizeof(full), "%s_activation_scale", name);
    else
        snprintf(full, sizeof(full), "%.*s.activation_scale", (int)(strlen(name) - strlen(".weight")), name);
    draft_put(d, full, DT_F32, 0, shape, mem_array(1, sizeof(float)));
    mem_free(value);
}

static const char *saved_stacks(enum stack_scales kind, bool decoded)
{
    struct draft d;
    open_synth(&d, "mistral-small-tiny");
    const int64_t n = d.n;
    char(*names)[128] = mem_array(n, sizeof(*names));
    for (int64_t i = 0; i < n; i++) snprintf(names[i], sizeof(*names), "%s", d.entries[i].name);
    for (int64_t i = 0; i < n; i++)
        if (strstr(names[i], "_proj")) put_fp8(&d, names[i], kind, decoded);
    mem_free(names);
    const char *dir = draft_save(&d, decoded ? 1 : 2);
    draft_free(&d);
    return dir;
}

static void fp8_stacks_are_read(void **state)
{
    (void)state;
    for (enum stack_scales kind = EACH; kind <= BLOCKS; kind++) {
        const char *stored = saved_stacks(kind, false), *decoded = saved_stacks(kind, true);
        struct loaded a, b;
        const struct quantize nf4 = {.format = WF_NF4, .attention = true};
        loaded_open_as(&a, stored, &nf4);
        loaded_open_as(&b, decoded, &nf4);
        assert_same_loaded(&a, &b);
        assert_string_equal(a.model.weights.experts, "nf4, packed from fp8");
        assert_int_equal(a.model.weights.n_unused, 0);
        loaded_close(&a);
        loaded_close(&b);
        loaded_open(&a, stored); /* FP8 in memory */
        assert_int_equal(a.model.weights.layers[1].up.w.format, WF_FP8);
        loaded_close(&a);
    }
}

static void bad_fp8_stacks_are_refused(void **state)
{
    (void)state;
#define STACK "model.layers.0.mlp.experts.gate_up_proj"
    static const struct {
        int64_t rows; /* 0: without scales; -1: no FP8 either */
        const char *says;
    } rows[] = {
        {0, STACK " is FP8, but " STACK "_scale_inv is not in the checkpoint"},
        {5, STACK "_scale_inv is F32 [5, 1], expected one scale, one per expert, or blocks [16, 2, 2]"},
        {-1, " is I32 [2, 2], expected BF16, F16, F32, F8_E4M3 with scales, or 4-bit codes with scales in U8, ["}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct draft d;
        open_synth(&d, "mistral-small-tiny");
        put_fp8(&d, STACK, EACH, false);
        draft_remove(&d, STACK "_scale_inv");
        if (rows[i].rows < 0) {
            draft_remove(&d, STACK);
            draft_put(&d, STACK, DT_I32, 2, (int64_t[]){2, 2}, mem_array(4, 4));
        }
        if (rows[i].rows > 0)
            draft_put(&d, STACK "_scale_inv", DT_F32, 2, (int64_t[]){rows[i].rows, 1}, mem_array(rows[i].rows, 4));
        assert_draft_refused(&d, rows[i].says);
        draft_free(&d);
    }
}

/* The text part of a class with a vision tower: language_model.model.layers.0, language_model.lm_head, text_config. */
static void text_part_is_read(void **state)
{
    (void)state;
    struct draft d;
    struct loaded a, b;
    char text[160];
    open_kimi(&d);
    loaded_open(&a, draft_save(&d, 1));
    for (int64_t i = 0; i < d.n; i++) {
        snprintf(text, sizeof(text), "language_model.%s", d.entries[i].name);
        mem_free((void *)(uintptr_t)d.entries[i].name);
        d.entries[i].name = mem_strdup(text);
    }
    draft_put(&d, "vision_tower.patch_embed.proj.weight", DT_F32, 1, (int64_t[]){4}, mem_array(4, 4));
    draft_put(&d, "mm_projector.linear_1.weight", DT_F32, 1, (int64_t[]){4}, mem_array(4, 4));
    draft_config(&d, "{", "{\"model_type\": \"kimi_k25\", \"vision_config\": {}, \"text_config\": {");
    d.config = mem_grow(d.config, (int64_t)strlen(d.config), (int64_t)strlen(d.config) + 2, 1);
    strcat(d.config, "}");
    loaded_open(&b, draft_save(&d, 2));
    assert_same_loaded(&a, &b);
    assert_int_equal(b.model.weights.n_unused, 0);
    assert_true(b.arch.nested && !a.arch.nested);
    assert_string_equal(b.arch.family, "kimi_k2");
    loaded_close(&a);
    loaded_close(&b);
    draft_free(&d);
}

/* Kimi-K2 uses DeepSeek-V3's class: keys that its config.json lacks have the defaults of DeepSeek-V3. */
static void defaults_are_those_of_deepseek_v3(void **state)
{
    (void)state;
    static const char text[] =
        "{\"model_type\": \"kimi_k2\", \"vocab_size\": 64, \"hidden_size\": 32, \"num_hidden_layers\": 5, "
        "\"num_attention_heads\": 4, \"num_experts_per_tok\": 2, \"n_routed_experts\": 16, "
        "\"moe_intermediate_size\": 16, \"intermediate_size\": 16, \"q_lora_rank\": 8, \"kv_lora_rank\": 8, "
        "\"qk_nope_head_dim\": 8, \"qk_rope_head_dim\": 8, \"v_head_dim\": 8}";
    struct err err = {.msg = ""};
    struct arch a;
    struct json_doc *doc = json_parse(text, (int64_t)strlen(text), "config.json", &err);
    assert_non_null(doc);
    if (arch_parse(&a, json_root(doc), &err)) fail_msg("%s", err.msg);
    json_free(doc);
    assert_true(a.dense[2] && !a.dense[3] && a.router.scale == 2.5f && a.router.n_group == 8);
    assert_true(a.router.top_group == 4 && a.router.kind == ROUTER_SIGMOID_CHOSEN);
}

int test_latent_files(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8_packs),
        cmocka_unit_test(int4_is_read),
        cmocka_unit_test(bad_int4_is_refused),
        cmocka_unit_test(fp8_stacks_are_read),
        cmocka_unit_test(bad_fp8_stacks_are_refused),
        cmocka_unit_test(text_part_is_read),
        cmocka_unit_test(defaults_are_those_of_deepseek_v3),
    };
    return cmocka_run_group_tests_name("latent_files", tests, NULL, NULL);
}
