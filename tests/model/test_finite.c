/* test_finite.c - values of a checkpoint that are not finite: every tensor of every family, every format with scales,
 * and what the error says. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/stored/published.h"
#include "model/weights.h"
#include "tests/checkpoints.h"

struct opened {
    struct arch arch;
    struct safetensors st;
    struct device dev;
};

static void open_dir(struct opened *o, const char *dir)
{
    struct err err;
    struct weights w;
    struct device plan;
    if (arch_load(&o->arch, dir, &err) || safetensors_open(&o->st, dir, &err) ||
        published_rename(&o->st, &o->arch, &err) || device_open(&o->dev, "cpu", "fp32", &err))
        fail_msg("%s", err.msg);
    device_dry_run(&plan, &o->dev);
    if (weights_load(&w, &plan, &o->arch, &o->st, &(struct weights_options){0}, &err)) fail_msg("%s", err.msg);
    weights_free(&w);
    assert_int_equal(device_reserve(&o->dev, &o->dev.weights, "weights", plan.weights.peak, &err), 0);
}

static void close_dir(struct opened *o)
{
    device_close(&o->dev);
    safetensors_close(&o->st);
}

static int load(struct opened *o, struct err *err)
{
    struct weights w;
    *err = (struct err){.msg = ""};
    arena_release(&o->dev.weights, 0);
    const int rc = weights_load(&w, &o->dev, &o->arch, &o->st, &(struct weights_options){0}, err);
    if (!rc) weights_free(&w);
    return rc;
}

/* "[3, 17]" of element i. */
static void place(char text[64], const struct st_tensor *t, int64_t i)
{
    int64_t rest = i, index[8];
    assert_in_range(t->ndim, 1, 8);
    for (int k = t->ndim - 1; k >= 0; k--) {
        index[k] = rest % t->shape[k];
        rest /= t->shape[k];
    }
    strcpy(text, "[");
    for (int k = 0; k < t->ndim; k++)
        snprintf(text + strlen(text), 64 - strlen(text), "%s%lld", k ? ", " : "", (long long)index[k]);
    strcat(text, "]");
}

/* Tensors that moetrain does not read. */
static bool is_unread(const char *name)
{
    static const char *const parts[] = {"visual", "vision_tower", "embed_vision", "multi_modal", "mtp."};
    for (int i = 0; i < MT_LEN(parts); i++)
        if (strstr(name, parts[i])) return true;
    return false;
}

/* One value of one tensor at a time: NaN, infinity or minus infinity. */
static void every_tensor_of_every_family(void **state)
{
    (void)state;
    static const char *const fixtures[] = {"case_a",     "qwen3",       "olmoe",      "mixtral",  "glm4",
                                           "glm4_lite",  "deepseek_v3", "mistral4",   "qwen3_vl", "qwen3_5",
                                           "qwen3_next", "deepseek_v4", "minimax_m2", "nemotron", "nemotron_latent",
                                           "gemma4",     "lfm2"};
    static const struct {
        uint32_t f32;
        const char *says;
    } bad[] = {{0x7fc00000, "nan"}, {0x7f800000, "inf"}, {0xff800000, "-inf"}};
    for (int f = 0; f < MT_LEN(fixtures); f++) {
        char name[64], says[512], at[64];
        struct opened o;
        struct err err;
        snprintf(name, sizeof(name), "parity/%s", fixtures[f]);
        open_dir(&o, fixture(name));
        for (int64_t i = 0; i < o.st.n_tensors; i++) {
            struct st_tensor *t = &o.st.tensors[i];
            if (t->dtype != DT_BF16 && t->dtype != DT_F32) continue;
            const struct st_tensor before = *t;
            const int64_t size = dtype_size(t->dtype), n = t->bytes / size, k = (n * 5 + i) / 7 % n;
            const uint16_t half = (uint16_t)(bad[i % 3].f32 >> 16);
            uint8_t *copy = mem_alloc(t->bytes);
            memcpy(copy, t->data, (size_t)t->bytes);
            memcpy(copy + k * size, size == 2 ? (const void *)&half : (const void *)&bad[i % 3].f32, (size_t)size);
            t->data = copy;
            const int rc = load(&o, &err);
            place(at, t, k);
            snprintf(says, sizeof(says),
                     ".safetensors: tensor %s has the value %s at %s: the checkpoint is damaged; download or",
                     safetensors_stored(t), bad[i % 3].says, at);
            if (is_unread(t->name) ? rc != 0 : rc == 0 || !strstr(err.msg, says)) fail_msg("%s, not %s", err.msg, says);
            *t = before;
            mem_free(copy);
        }
        close_dir(&o);
    }
}

/* ---- matrices with scales ---- */

#define DOWN  "model.layers.1.mlp.experts.down_projs."
#define DOWN2 DOWN "2.weight"

/* Replaces element `at` of a tensor of expert 2 by a float, or its byte `at`. Tables that all experts share are changed
 * too. */
struct damage {
    struct linear_form form;
    const char *suffix;
    int64_t at;
    bool byte;
    double value;
    const char *says;
};

static uint8_t damaged[8][1 << 16];

static void damage_expert(struct opened *o, int e, const struct damage *d)
{
    const float value = (float)d->value;
    char name[128];
    snprintf(name, sizeof(name), DOWN "%d.weight%s", e, d->suffix);
    struct st_tensor *t = (struct st_tensor *)(uintptr_t)safetensors_find(&o->st, name);
    if (!t) fail_msg("%s", name);
    assert_in_range(t->bytes, 1, sizeof(damaged[e]));
    memcpy(damaged[e], t->data, (size_t)t->bytes);
    if (d->byte)
        damaged[e][d->at] = (uint8_t)d->value;
    else
        memcpy(damaged[e] + 4 * d->at, &value, 4);
    t->data = damaged[e];
}

static void scaled_experts(void **state)
{
    (void)state;
    static const struct linear_form nf4 = {.format = WF_NF4, .block = 64},
                                    nested = {.format = WF_NF4, .block = 64, .nested = true},
                                    modelopt = {.format = WF_NVFP4}, divided = {.format = WF_NVFP4, .nested = true},
                                    fp8 = {.format = WF_BF16, .fp8 = FP8_TENSOR},
                                    blocks = {.format = WF_BF16, .fp8 = FP8_BLOCKS_INV};
    const struct damage rows[] = {
        {fp8, "", 96 * 3 + 5, true, 0x7f, "tensor " DOWN2 " has the value nan at [3, 5]"},
        {fp8, "", 96 * 3 + 5, true, 0xff, "tensor " DOWN2 " has the value nan at [3, 5]"},
        {fp8, "_scale", 0, false, 3e38, "tensor " DOWN2 " decodes to "},
        {fp8, "_scale", 0, false, INFINITY, "tensor " DOWN2 "_scale has the value inf: "},
        {blocks, "_scale_inv", 0, false, 3e38, "tensor " DOWN2 " decodes to "},
        {blocks, "_scale_inv", 0, false, NAN, "tensor " DOWN2 "_scale_inv has the value nan at [0, 0]"},
        {nf4, ".absmax", 1, false, NAN, "tensor " DOWN2 ".absmax has the value nan at [1]"},
        {nf4, ".absmax", 1, false, 3.3e38, NULL},
        {nf4, ".quant_map", 7, false, INFINITY, "tensor " DOWN "0.weight.quant_map has the value inf at [7]"},
        {nested, ".nested_absmax", 0, false, -INFINITY, "tensor " DOWN2 ".nested_absmax has the value -inf at [0]"},
        {nested, ".nested_quant_map", 255, false, NAN, "tensor " DOWN "0.weight decodes to nan at ["},
        {modelopt, "_scale_2", 0, false, 1e37, "tensor " DOWN2 " decodes to "},
        {modelopt, "_scale", 7, true, 0x7f, "tensor " DOWN2 "_scale has the value nan at [1, 1]"},
        {divided, "_global_scale", 0, false, 1e-38, "tensor " DOWN2 "_packed decodes to "},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct draft draft;
        struct opened o;
        struct err err;
        draft_open(&draft);
        draft_per_expert(&draft, &rows[i].form);
        const char *dir = draft_save(&draft, 1);
        draft_free(&draft);
        open_dir(&o, dir);
        assert_int_equal(load(&o, &err), 0);
        for (int e = 0; e < 8; e++)
            if (e == 2 || strstr(rows[i].suffix, "map")) damage_expert(&o, e, &rows[i]);
        const int rc = load(&o, &err);
        if (rows[i].says ? !rc || !strstr(err.msg, rows[i].says) : rc) fail_msg("row %d: %s", i, err.msg);
        close_dir(&o);
    }
}

/* Exponents of MXFP4: 255 is NaN; 254 is too large for the codes from 2 on. */
static void exponents(void **state)
{
    (void)state;
#define ALL "model.layers.1.mlp.experts.down_proj_"
    static const struct {
        uint8_t exponent, code;
        const char *says;
    } rows[] = {
        {255, 0, "tensor " ALL "blocks decodes to nan at [2, 1, 0, 0], with the scales of tensor " ALL "scales"},
        {254, 0, NULL},
        {254, 0x22, NULL},
        {254, 0x4b, "tensor " ALL "blocks decodes to inf at [2, 1, 0, 0]"},
        {253, 0x55, NULL},
        {253, 0xe5, "tensor " ALL "blocks decodes to -inf at [2, 1, 0, 0]"},
        {252, 0x77, NULL}};
    struct opened o;
    struct err err;
    open_dir(&o, fixture("parity/case_a"));
    struct st_tensor *s = (struct st_tensor *)(uintptr_t)safetensors_find(&o.st, ALL "scales"),
                     *b = (struct st_tensor *)(uintptr_t)safetensors_find(&o.st, ALL "blocks");
    uint8_t *scales = mem_alloc(s->bytes), *nibbles = mem_alloc(b->bytes);
    memcpy(scales, s->data, (size_t)s->bytes);
    memcpy(nibbles, b->data, (size_t)b->bytes);
    s->data = scales;
    b->data = nibbles;
    for (int i = 0; i < MT_LEN(rows); i++) {
        const int64_t at = (2 * 128 + 1) * 3;
        scales[at] = rows[i].exponent;
        memset(nibbles + 16 * at, rows[i].code, 16);
        const int rc = load(&o, &err);
        if (rows[i].says ? !rc || !strstr(err.msg, rows[i].says) : rc) fail_msg("row %d: %s", i, err.msg);
    }
    close_dir(&o);
    mem_free(scales);
    mem_free(nibbles);
}

int test_finite(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tensor_of_every_family),
        cmocka_unit_test(scaled_experts),
        cmocka_unit_test(exponents),
    };
    return cmocka_run_group_tests_name("finite", tests, NULL, NULL);
}
