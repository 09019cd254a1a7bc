/* test_latent_files.c - checkpoints as DeepSeek and Moonshot publish them: FP8 with a scale per block in every Linear,
 * INT4 experts, a text part under another name. Each loads as the same values in bf16 do, dense and packed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/checkpoints.h"
#include "train/synth/synth.h"

#define UP0 "model.layers.1.mlp.experts.0.up_proj.weight"

/* Two layers, the first of them dense, with latent attention and a shared expert; bf16. */
static void open_kimi(struct draft *d)
{
    struct err err;
    char dir[MT_PATH];
    snprintf(dir, sizeof(dir), "%s/model", scratch_dir());
    if (synth_run(&(struct synth_options){.arch = "kimi-tiny", .dir = dir, .n_layer = 2}, &err))
        fail_msg("%s", err.msg);
    draft_open_dir(d, dir);
}

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

/* Groups of 32 columns, as compressed-tensors stores symmetric 4-bit integers; the codes are random. */
static void to_int4(struct draft *d, const struct st_entry *e, const float *x, bool decoded)
{
    enum { GROUP = 32 };
    const int64_t out = e->shape[0], in = e->shape[1], n = out * in;
    uint8_t *nibbles = mem_alloc(n / 2);
    uint16_t *scale = mem_array(n / GROUP, sizeof(*scale)), *value = mem_array(n, sizeof(*value));
    int64_t *shape = mem_array(2, sizeof(*shape));
    char name[160];
    (void)x;
    shape[0] = out, shape[1] = in;
    for (int64_t i = 0; i < n; i++) {
        const int code = (int)(rng_u64(rng_key(5, e->name), (uint64_t)i) % 16);
        if (i % GROUP == 0) scale[i / GROUP] = f32_to_bf16((float)(0.02 + 0.01 * test_value(6, (uint64_t)i)));
        nibbles[i / 2] |= (uint8_t)(code << 4 * (i % 2));
        value[i] = f32_to_bf16((float)(code - 8) * bf16_to_f32(scale[i / GROUP]));
    }
    if (decoded) draft_put(d, e->name, DT_BF16, 2, (int64_t[]){out, in}, value);
    if (!decoded) {
        draft_remove(d, e->name);
        snprintf(name, sizeof(name), "%s_packed", e->name);
        draft_put(d, name, DT_I32, 2, (int64_t[]){out, in / 8}, nibbles);
        snprintf(name, sizeof(name), "%s_scale", e->name);
        draft_put(d, name, DT_BF16, 2, (int64_t[]){out, in / GROUP}, scale);
        snprintf(name, sizeof(name), "%s_shape", e->name);
        draft_put(d, name, DT_I64, 1, (int64_t[]){2}, shape);
        mem_free(value);
        return;
    }
    mem_free(nibbles);
    mem_free(scale);
    mem_free(shape);
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
    const struct weight *attention[] = {&moe->qkv.w, &moe->q_b.w, &moe->kv_b.w, &moe->out.w};
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
         UP0 "_packed is I32 [128, 64], expected I32 with 8 codes of 4 bits each, [128, 32]"},
        {"_scale", DT_BF16, 128, 3, UP0 "_scale is BF16 [128, 3], expected a scale per group of columns, [128, 8]"},
        {"_scale", DT_I32, 128, 8, UP0 "_scale (I32), which is no supported quantisation"},
        {"_zero_point", DT_I32, 16, 8, UP0 "_zero_point: this quantisation is not supported"},
        {"_g_idx", DT_I32, 16, 8, UP0 "_g_idx: integer codes with reordered groups are not supported"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct draft d;
        struct arch a;
        struct safetensors st;
        struct weights w;
        struct err err = {.msg = ""};
        struct device dev = {.dry_run = true, .weights = arena_measure("weights")};
        char name[160];
        open_kimi(&d);
        each_linear(&d, "mlp.experts.", to_int4, false);
        snprintf(name, sizeof(name), "%s%s", UP0, rows[i].suffix);
        draft_put(&d, name, rows[i].dtype, 2, (int64_t[]){rows[i].rows, rows[i].cols},
                  mem_array(rows[i].rows * rows[i].cols, 4));
        const char *dir = draft_save(&d, 1);
        if (arch_load(&a, dir, &err) || safetensors_open(&st, dir, &err)) fail_msg("%s", err.msg);
        assert_int_equal(weights_load(&w, &dev, &a, &st, &(struct weights_options){0}, &err), -1);
        if (!strstr(err.msg, rows[i].says)) fail_msg("\"%s\" does not say \"%s\"", err.msg, rows[i].says);
        safetensors_close(&st);
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

int test_latent_files(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8_packs),
        cmocka_unit_test(int4_is_read),
        cmocka_unit_test(bad_int4_is_refused),
        cmocka_unit_test(text_part_is_read),
    };
    return cmocka_run_group_tests_name("latent_files", tests, NULL, NULL);
}
