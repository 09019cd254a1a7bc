/* weight.c - decodes a tile of a frozen weight into reals, or a whole one into floats. In a tile each byte of nibbles
 * is looked up as a pair of values and scaled, a byte of FP8 as one. Values are rounded to f32 exactly as quant_value
 * defines, in both precisions. */
#include "kernels/cpu/gemm.h"

#include "kernels/format/minifloat.h"
#include "kernels/format/quant.h"

/* The values of each byte of two nibbles before scaling. */
struct pairs {
    float of[256][2];
};

static void pairs_init(struct pairs *p, const float code[16], bool low_first)
{
    for (int byte = 0; byte < 256; byte++) {
        p->of[byte][0] = code[low_first ? byte & 15 : byte >> 4];
        p->of[byte][1] = code[low_first ? byte >> 4 : byte & 15];
    }
}

static void scale_pairs(real *out, const struct pairs *p, const uint8_t *bytes, int64_t n_bytes, float scale)
{
    for (int64_t i = 0; i < n_bytes; i++) {
        out[2 * i] = p->of[bytes[i]][0] * scale;
        out[2 * i + 1] = p->of[bytes[i]][1] * scale;
    }
}

/* first: flat index in expert e, n values of one row; both are multiples of the block. */
static void decode_mxfp4(real *out, const struct weight *w, const struct pairs *p, int64_t e, int64_t first, int64_t n)
{
    int64_t at = e * w->n_out * w->n_in + first;
    const uint8_t *bytes = (const uint8_t *)w->data + at / 2, *scale = w->scale + at / 32;
    for (int64_t b = 0; b < n / 32; b++) scale_pairs(out + 32 * b, p, bytes + 16 * b, 16, quant_e8m0(scale[b]));
}

static void decode_nvfp4(real *out, const struct weight *w, const struct pairs *p, int64_t e, int64_t first, int64_t n)
{
    const int64_t row = e * w->n_out + first / w->n_in, at = e * w->n_out * w->n_in + first;
    const uint8_t *bytes = (const uint8_t *)w->data + at / 2, *scale = w->scale + at / 16;
    for (int64_t b = 0; b < n / 16; b++)
        scale_pairs(out + 16 * b, p, bytes + 8 * b, 8, nvfp4_step(scale[b], w->scale2[row], w->scale2_divides));
}

/* Blocks run over the flat matrix, so a row may begin and end inside a block. first and n are even. */
static void decode_bnb(real *out, const struct weight *w, const struct pairs *p, int64_t e, int64_t first, int64_t n)
{
    const uint8_t *bytes = (const uint8_t *)w->data + e * ((w->n_out * w->n_in + 1) / 2);
    for (int64_t i = first; i < first + n;) {
        int64_t block = i / w->block, end = MT_MIN(first + n, (block + 1) * w->block);
        scale_pairs(out + (i - first), p, bytes + i / 2, (end - i) / 2, quant_absmax(w, e, block));
        i = end;
    }
}

/* col: first column in the row, n values of it. */
static void decode_fp8(real *out, const struct weight *w, const float value[256], int64_t e, int64_t row, int64_t col,
                       int64_t n)
{
    const int64_t at = e * w->n_out + row;
    const uint8_t *codes = (const uint8_t *)w->data + at * w->n_in;
    const float *step = w->scale2 + at * weight_row_scales(w);
    for (int64_t i = col; i < col + n;) {
        const int64_t block = i / w->block, end = MT_MIN(col + n, (block + 1) * w->block);
        for (; i < end; i++) *out++ = value[codes[i]] * step[block];
    }
}

static void decode_bf16(real *out, const uint16_t *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = bits_float((uint32_t)x[i] << 16);
}

static void decode_f16(real *out, const uint16_t *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = f16_to_f32(x[i]);
}

static void decode_f32(real *out, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = x[i];
}

void weight_tile(const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col, int64_t n_col, real *out,
                 int64_t ldo)
{
    struct pairs pairs;
    float fp8[256];
    const bool bnb = w->format == WF_NF4 || w->format == WF_FP4;
    const int64_t block = weight_scale_block(w->format), step = block ? block : bnb ? 2 : 1;
    MT_REQUIRE(w->format != WF_NONE && w->n_in % step == 0 && col % step == 0 && n_col % step == 0,
               "columns %lld + %lld of %lld in %s", (long long)col, (long long)n_col, (long long)w->n_in,
               weight_format_name(w->format));
    if (block) pairs_init(&pairs, quant_e2m1_code, true);
    if (bnb) pairs_init(&pairs, w->code, false);
    if (w->format == WF_FP8) quant_fp8_values(fp8);
    for (int64_t r = row; r < row + n_row; r++, out += ldo) {
        int64_t first = r * w->n_in + col, flat = e * w->n_out * w->n_in + first;
        switch (w->format) {
        case WF_NONE: break;
        case WF_F32: decode_f32(out, (const float *)w->data + flat, n_col); break;
        case WF_BF16: decode_bf16(out, (const uint16_t *)w->data + flat, n_col); break;
        case WF_F16: decode_f16(out, (const uint16_t *)w->data + flat, n_col); break;
        case WF_MXFP4: decode_mxfp4(out, w, &pairs, e, first, n_col); break;
        case WF_NVFP4: decode_nvfp4(out, w, &pairs, e, first, n_col); break;
        case WF_FP8: decode_fp8(out, w, fp8, e, r, col, n_col); break;
        case WF_NF4:
        case WF_FP4: decode_bnb(out, w, &pairs, e, first, n_col); break;
        }
    }
}
