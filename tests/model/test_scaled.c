/* test_scaled.c - NVFP4 and FP8 checkpoints: the values that ModelOpt and compressed-tensors read from them, every
 * layout against the same values in f32 or bf16, packing to NVFP4 at load, and errors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "model/stored/source.h"
#include "tests/checkpoints.h"
#include "train/tools/inspect.h"

#define UP0 "model.layers.0.mlp.experts.gate_up_projs.0.weight"

static const struct linear_form modelopt = {.format = WF_NVFP4};
static const struct linear_form compressed = {.format = WF_NVFP4, .nested = true};
static const struct linear_form dense = {.format = WF_BF16};

static const char *saved(struct linear_form experts, struct linear_form attention, bool decoded)
{
    struct draft d;
    draft_open(&d);
    experts.decoded = attention.decoded = decoded;
    draft_per_expert(&d, &experts);
    draft_attention(&d, &attention);
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

/* ---- vectors of the libraries: tests/parity/make_scaled_vectors.py */

static void test_published(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t n_out;
        enum weight_format format;
    } rows[] = {{"modelopt_nvfp4", 20, WF_NVFP4},   {"compressed_nvfp4", 20, WF_NVFP4}, {"modelopt_fp8", 20, WF_BF16},
                {"modelopt_fp8_rows", 20, WF_BF16}, {"compressed_fp8", 20, WF_BF16},    {"block_fp8", 132, WF_BF16}};
    struct safetensors st;
    struct err err;
    assert_int_equal(safetensors_open(&st, fixture("quant/scaled.safetensors"), &err), 0);
    struct checkpoint ck = {.st = &st, .used = mem_array(st.n_tensors, sizeof(bool))};
    for (int k = 0; k < MT_LEN(rows); k++) {
        char name[64];
        struct source s;
        snprintf(name, sizeof(name), "%s.weight", rows[k].name);
        if (source_find(&s, &ck, name, rows[k].n_out, 144, &err)) fail_msg("%s", err.msg);
        assert_int_equal(s.format, rows[k].format);
        struct weight w;
        char *planes = source_read(&w, &s, s.format, 2);
        snprintf(name, sizeof(name), "%s.decoded", rows[k].name);
        const struct st_tensor *want = safetensors_find(&st, name);
        for (int64_t i = 0; i < rows[k].n_out * 144; i++) {
            uint16_t h;
            memcpy(&h, want->data + 2 * i, 2);
            const uint16_t have = f32_to_bf16(quant_value(&w, 0, i));
            /* libraries drop the sign of some zeros */
            if (have != h && ((have | h) & 0x7fff)) fail_msg("%s, element %d: %04x, not %04x", name, (int)i, have, h);
        }
        mem_free(planes);
    }
    mem_free(ck.used);
    safetensors_close(&st);
}

/* ---- whole checkpoints */

static void assert_loads_as(const char *dir, const struct quantize *q, enum weight_format format, const char *text)
{
    struct loaded l;
    loaded_open_as(&l, dir, q);
    assert_string_equal(l.model.weights.experts, text);
    assert_int_equal(l.model.weights.layers[0].up.w.format, format);
    assert_int_equal(l.model.weights.layers[1].down.w.format, format);
    assert_int_equal(l.model.weights.n_unused, 0); /* scales of activations do not count */
    loaded_close(&l);
}

static void every_layout_loads_as_its_values(void **state)
{
    (void)state;
    for (const struct linear_form *form = linear_forms; form->format; form++)
        assert_same_model(saved(*form, *form, false), saved(*form, *form, true));
}

/* q, k and v have different global scales and become one matrix. */
static void test_nvfp4(void **state)
{
    (void)state;
    const struct quantize none = {0}, same = {.format = WF_NVFP4};
    assert_same_model(saved(modelopt, modelopt, false), saved(modelopt, modelopt, true));
    assert_same_model(saved(compressed, compressed, false), saved(compressed, compressed, true));
    assert_same_model(saved(modelopt, dense, false), saved(modelopt, dense, true));
    assert_loads_as(saved(modelopt, compressed, false), &none, WF_NVFP4, "nvfp4");
    assert_loads_as(saved(compressed, dense, false), &same, WF_NVFP4, "nvfp4, as in the checkpoint");
}

static void test_nvfp4_stacks(void **state)
{
    (void)state;
    for (int each = 0; each < 2; each++) {
        const char *dir[2];
        for (int decoded = 0; decoded < 2; decoded++) {
            struct draft d;
            draft_open(&d);
            draft_nvfp4_stacks(&d, each, decoded);
            dir[decoded] = draft_save(&d, 1);
            draft_free(&d);
        }
        assert_same_model(dir[0], dir[1]);
    }
}

static void test_fp8(void **state)
{
    (void)state;
    const struct quantize none = {0}, nf4 = {.format = WF_NF4};
    for (int k = FP8_TENSOR; k < FP8_SCALES; k++) {
        const struct linear_form form = {.fp8 = (enum fp8_scales)k};
        assert_same_model(saved(form, form, false), saved(form, form, true));
    }
    const struct linear_form blocks = {.fp8 = FP8_BLOCKS_INV};
    assert_loads_as(saved(blocks, dense, false), &none, WF_FP8, "fp8");
    assert_loads_as(saved(blocks, dense, false), &nf4, WF_NF4, "nf4, packed from fp8");
}

/* ---- packing at load */

static void assert_packs(const char *from, const char *packed)
{
    const struct quantize none = {0}, nvfp4 = {.format = WF_NVFP4};
    struct loaded a, b;
    loaded_open_as(&a, from, &nvfp4);
    loaded_open_as(&b, packed, &none);
    assert_int_equal(a.model.weights.layers[0].up.w.format, WF_NVFP4);
    assert_int_equal(a.model.weights.expert_bytes, b.model.weights.expert_bytes);
    assert_same_loaded(&a, &b);
    loaded_close(&a);
    loaded_close(&b);
}

static void test_packs(void **state)
{
    (void)state;
    const struct linear_form fp8 = {.format = WF_BF16, .fp8 = FP8_BLOCKS_INV};
    assert_packs(saved(dense, dense, false), saved(modelopt, dense, false));
    struct loaded a, b;
    const struct quantize nvfp4 = {.format = WF_NVFP4};
    loaded_open_as(&a, saved(fp8, dense, false), &nvfp4);
    loaded_open_as(&b, saved(fp8, dense, true), &nvfp4);
    assert_same_loaded(&a, &b);
    loaded_close(&a);
    loaded_close(&b);
}

/* ---- inspect */

static void assert_inspects(const char *dir, const char *says)
{
    char *text = NULL;
    size_t size = 0;
    struct err err;
    FILE *out = open_memstream(&text, &size);
    assert_int_equal(inspect_run(dir, out, &err), 0);
    fclose(out);
    if (!strstr(text, says)) fail_msg("\"%s\" is not in\n%s", says, text);
    free(text);
}

/* `inspect` prints one row per weight, with its logical shape; the bytes include its scales. */
static void test_inspect_rows(void **state)
{
    (void)state;
    const struct linear_form fp8 = {.fp8 = FP8_BLOCKS_INV};
    assert_inspects(saved(modelopt, dense, false), "192 x 128   NVFP4        393 k     216 KiB\n");
    assert_inspects(saved(compressed, dense, false), "192 x 128   NVFP4        393 k     216 KiB\n");
    assert_inspects(saved(fp8, dense, false), "192 x 128   FP8          393 k     384 KiB\n");
}

static void inspect_counts_scales_of_stacks(void **state)
{
    (void)state;
    struct draft d;
    draft_begin(&d, "{}");
    draft_put_as(&d, "x.up_proj", "F8_E4M3", 3, (int64_t[]){2, 128, 128}, mem_alloc(2 * 128 * 128));
    draft_put(&d, "x.up_proj_scale_inv", DT_F32, 3, (int64_t[]){2, 16, 16}, mem_array(512, 4));
    assert_inspects(draft_save(&d, 1), "x.up_proj       1  2 x 128 x 128  FP8         32.8 k    34.0 KiB\n");
    draft_free(&d);
}

/* ---- errors */

static void put_ones(struct draft *d, const char *name, const char *dtype, int ndim, int64_t rows, int64_t cols)
{
    draft_put_as(d, name, dtype, ndim, (int64_t[]){rows, cols}, mem_array(rows * cols, 4));
}

static void test_errors(void **state)
{
    (void)state;
    static const struct {
        bool fp8;
        const char *removed, *added, *dtype;
        int64_t rows, cols;
        const char *says;
    } rows[] = {
        {false, "_scale_2", NULL, NULL, 0, 0, UP0 " is packed, but " UP0 "_scale_2 is not in the checkpoint"},
        {false, "_scale", "_scale", "F8_E4M3", 192, 4, UP0 "_scale is F8_E4M3 [192, 4], expected F8_E4M3 [192, 8]"},
        {false, "_scale", "_scale", "U8", 192, 4,
         "tensor " UP0 ": a checkpoint in the format MXFP4 of Quark is not supported"},
        {false, "_scale_2", "_scale_2", "F32", 192, 1, UP0 "_scale_2 is F32 [192, 1], expected BF16, F16 or F32 []"},
        {false, "", "", "U8", 192, 128, UP0 " is U8 [192, 128], expected U8 [192, 64]"},
        {true, "", "", "F8_E5M2", 192, 128,
         UP0
         " is F8_E5M2 [192, 128], expected BF16, F16, F32, F8_E4M3 with scales, or 4-bit codes with scales in U8 or "
         "I8, [192, 128]"},
        {false, NULL, ".pre_quant_scale", "BF16", 128, 1,
         "0.pre_quant_scale: a checkpoint in the format Model-Optimizer with scales of inputs"},
        {true, "_scale_inv", NULL, NULL, 0, 0, "neither " UP0 "_scale nor " UP0 "_scale_inv is in the checkpoint"},
        {true, "_scale_inv", "_scale_inv", "F32", 3, 1,
         "_scale_inv is F32 [3, 1], expected one scale, or one per 128 x"},
        {true, "_scale_inv", "_scale", "F32", 192, 4, "_scale is F32 [192, 4], expected one scale, one per row, or"},
        {true, "_scale_inv", "_scale", "F8_E8M0", 192, 4,
         "_scale is F8_E8M0 [192, 4], expected an exponent per row, or per 128 x 128 block, [2, 1]"},
        {true, "_scale_inv", "_scale", "U8", 192, 4,
         "tensor " UP0 ": a checkpoint in the format MXFP8 is not supported"},
    };
    for (int k = 0; k < MT_LEN(rows); k++) {
        const struct linear_form form = {.format = WF_NVFP4, .fp8 = rows[k].fp8 ? FP8_BLOCKS_INV : FP8_NONE};
        struct draft d;
        char name[256];
        draft_open(&d);
        draft_per_expert(&d, &form);
        if (rows[k].removed) {
            snprintf(name, sizeof(name), "%s%s", UP0, rows[k].removed);
            draft_remove(&d, name);
        }
        if (rows[k].added) {
            const int stem = (int)strlen(UP0) - (rows[k].added[0] == '.' ? (int)strlen(".weight") : 0);
            snprintf(name, sizeof(name), "%.*s%s", stem, UP0, rows[k].added);
            put_ones(&d, name, rows[k].dtype, 2, rows[k].rows, rows[k].cols);
        }
        assert_draft_refused(&d, rows[k].says);
        draft_free(&d);
    }
}

/* Bytes that no quantiser writes. */
static void test_damaged(void **state)
{
    (void)state;
    static const char *const says[] = {UP0 "_scale has the value nan at [0, 0]", UP0 "_scale_2 has the value inf: "};
    for (int k = 0; k < 2; k++) {
        struct draft d;
        struct arch a;
        struct safetensors st;
        struct device dev;
        struct weights w;
        struct err err;
        const float infinite = INFINITY;
        draft_open(&d);
        draft_per_expert(&d, &modelopt);
        const struct st_entry *e = draft_find(&d, k ? UP0 "_scale_2" : UP0 "_scale");
        memcpy((uint8_t *)(uintptr_t)e->data, k ? (const void *)&infinite : "\xff", k ? 4 : 1);
        const char *dir = draft_save(&d, 1);
        assert_int_equal(arch_load(&a, dir, &err), 0);
        assert_int_equal(safetensors_open(&st, dir, &err), 0);
        assert_int_equal(device_open(&dev, "cpu", "fp32", &err), 0);
        assert_int_equal(device_reserve(&dev, &dev.weights, "weights", 64 << 20, &err), 0);
        assert_int_equal(weights_load(&w, &dev, &a, &st, &(struct weights_options){0}, &err), -1);
        if (!strstr(err.msg, says[k])) fail_msg("\"%s\" does not say \"%s\"", err.msg, says[k]);
        device_close(&dev);
        safetensors_close(&st);
        draft_free(&d);
    }
}

int test_scaled(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout_loads_as_its_values),
        cmocka_unit_test(test_published),
        cmocka_unit_test(test_nvfp4),
        cmocka_unit_test(test_nvfp4_stacks),
        cmocka_unit_test(test_fp8),
        cmocka_unit_test(test_packs),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_inspect_rows),
        cmocka_unit_test(inspect_counts_scales_of_stacks),
    };
    return cmocka_run_group_tests_name("scaled", tests, NULL, NULL);
}
