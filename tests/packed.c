/* packed.c - test weights in every format. */
#include "tests/packed.h"

#include <math.h>
#include <string.h>

#include "kernels/format/minifloat.h"

static void *bytes(int64_t n) { return make_empty(DT_U8, n, -1, -1).data; }
static float *floats(int64_t n) { return make_empty(DT_F32, n, -1, -1).data; }

int64_t packed_encode(enum weight_format format, uint8_t *nibbles, uint8_t *scales, float *absmax, const void *x,
                      enum weight_format dense, int64_t n, int n_threads)
{
    const struct weight w = {.format = dense, .n_exp = 1, .n_out = 1, .n_in = n, .data = x};
    void *const plane[PLANES] = {
        [PLANE_DATA] = nibbles, [PLANE_SCALE] = scales, [PLANE_ABSMAX] = absmax, [PLANE_SCALE2] = absmax};
    return format_row(format, false)->encode(plane, &w, n_threads);
}

/* Encodes each expert with the encoder of the format, into the planes that the format's row lists. */
static void pack_as_row(struct weight *w, const float *x)
{
    const struct format *f = format_row(w->format, false);
    const int64_t n = w->n_out * w->n_in;
    void *plane[PLANES] = {NULL};
    for (int i = 0; i < PLANES; i++)
        if (f->plane[i].bits) w->plane[i] = bytes(w->n_exp * format_plane_bytes(f, w, i));
    for (int64_t e = 0; e < w->n_exp; e++) {
        const struct weight dense = {
            .format = WF_F32, .n_exp = 1, .n_out = w->n_out, .n_in = w->n_in, .data = x + e * n};
        for (int i = 0; i < PLANES; i++)
            if (w->plane[i]) plane[i] = (uint8_t *)(uintptr_t)w->plane[i] + e * format_plane_bytes(f, w, i);
        assert_int_equal(f->encode(plane, &dense, 1), 0);
    }
}

/* Each third of the rows has a separate global scale. With `divides` the stored scale is the reciprocal, by which
 * values are divided. */
static void pack_nvfp4(struct weight *w, const float *x, bool divides)
{
    const int64_t n = w->n_out * w->n_in, third = (w->n_out + 2) / 3;
    uint8_t *nibbles = bytes(w->n_exp * n / 2), *scales = bytes(w->n_exp * n / 16);
    float *scale2 = floats(w->n_exp * w->n_out), g;
    for (int64_t e = 0; e < w->n_exp; e++)
        for (int64_t row = 0; row < w->n_out; row += third) {
            const int64_t n_row = MT_MIN(third, w->n_out - row), at = e * n + row * w->n_in;
            assert_int_equal(
                packed_encode(WF_NVFP4, nibbles + at / 2, scales + at / 16, &g, x + at, WF_F32, n_row * w->n_in, 1), 0);
            for (int64_t i = 0; i < n_row; i++) scale2[e * w->n_out + row + i] = divides ? 1 / g : g;
        }
    w->data = nibbles;
    w->scale = scales;
    w->scale2 = scale2;
    w->scale2_divides = divides;
}

/* Every row and block of columns has another scale; block 0: one per row. */
static void pack_fp8(struct weight *w, const float *x)
{
    if (!w->block) w->block = w->n_in;
    const int64_t per_row = weight_row_scales(w), n_row = w->n_exp * w->n_out;
    uint8_t *codes = bytes(n_row * w->n_in);
    float *scale = floats(n_row * per_row);
    for (int64_t i = 0; i < n_row * per_row; i++) scale[i] = (float)(1 + test_value(31, (uint64_t)i) / 2) / 64;
    for (int64_t i = 0; i < n_row * w->n_in; i++) {
        const float a = fabsf(x[i]) / scale[i / w->n_in * per_row + i % w->n_in / w->block];
        codes[i] = (uint8_t)(e4m3_code(e4m3_round(a)) | (x[i] < 0 ? 128 : 0));
    }
    w->data = codes;
    w->scale2 = scale;
}

static void pack_bnb(struct weight *w, const float *x, bool nested)
{
    int64_t n = w->n_out * w->n_in, n_block = weight_blocks(w), n_outer = (n_block + 255) / 256;
    uint8_t *nibbles = bytes(w->n_exp * n / 2), *q8 = bytes(w->n_exp * n_block);
    float *absmax = floats(w->n_exp * n_block), *outer = floats(w->n_exp * n_outer), *offset = floats(w->n_exp);
    float *map = floats(256), *code = floats(16);
    quant_dynamic_map(map);
    memcpy(code, w->format == WF_NF4 ? quant_nf4_code : quant_fp4_code, 16 * sizeof(*code));
    for (int64_t e = 0; e < w->n_exp; e++) {
        float *of_expert = absmax + e * n_block;
        assert_int_equal(quant_bnb_encode(w->format, nibbles + e * n / 2, of_expert, x + e * n, n, w->block), 0);
        quant_nested_encode(q8 + e * n_block, outer + e * n_outer, offset + e, of_expert, n_block, map);
    }
    w->data = nibbles;
    w->code = code;
    if (!nested) {
        w->absmax = absmax;
        return;
    }
    w->scale = q8;
    w->nested_absmax = outer;
    w->nested_offset = offset;
    w->nested_map = map;
}

struct weight make_packed(struct weight_packing p, uint64_t stream, double amplitude, int64_t n_exp, int64_t n_out,
                          int64_t n_in)
{
    if (p.format < WF_MXFP4) return make_weight(p.format, stream, amplitude, n_exp, n_out, n_in);
    struct weight w = {.format = p.format, .n_exp = n_exp, .n_out = n_out, .n_in = n_in, .block = p.block};
    struct tensor x = make_random(DT_F32, stream, amplitude, n_exp, n_out, n_in);
    if (p.format == WF_NVFP4)
        pack_nvfp4(&w, x.data, p.nested);
    else if (p.format == WF_FP8)
        pack_fp8(&w, x.data);
    else if (format_row(p.format, false)->nested)
        pack_bnb(&w, x.data, p.nested);
    else
        pack_as_row(&w, x.data);
    return w;
}

struct weight make_unpacked(const struct weight *w)
{
    int64_t n = w->n_out * w->n_in;
    float *x = floats(w->n_exp * n);
    for (int64_t i = 0; i < w->n_exp * n; i++) x[i] = quant_value(w, i / n, i % n);
    return (struct weight){.format = WF_F32, .n_exp = w->n_exp, .n_out = w->n_out, .n_in = w->n_in, .data = x};
}
