/* quant.c - MXFP4, NF4 and FP4 as their publishers define them: tables, decoding of one element, encoding of blocks. */
#include "kernels/quant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const float quant_nf4_code[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
const float quant_fp4_code[16] = {
    0.0f,  0.0625f / 12,  8.0f / 12,  12.0f / 12,  4.0f / 12,  6.0f / 12,  2.0f / 12,  3.0f / 12,
    -0.0f, -0.0625f / 12, -8.0f / 12, -12.0f / 12, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12,
};
const float quant_e2m1_code[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* A normalised value's code: how many thresholds it exceeds (NF4), or its magnitude exceeds (FP4, looked up). */
static const float nf4_above[15] = {
    -0.8480964004993439f,  -0.6106329262256622f,   -0.4599952697753906f, -0.33967943489551544f, -0.23460740596055984f,
    -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f, 0.1202552504837513f,   0.2035212516784668f,
    0.2920137718319893f,   0.3893125355243683f,    0.5016634166240692f,  0.6427869200706482f,   0.8614784181118011f,
};
static const float fp4_above[7] = {0.00260417f, 0.0859375f, 0.20833333f, 0.29166667f,
                                   0.4166667f,  0.583333f,  0.8333333f};
static const uint8_t fp4_rank[8] = {0, 1, 6, 7, 4, 5, 2, 3};

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Edge k of the `cells` equal cells of [0.1, 1], counted from the nearer end: the f32 that torch.linspace gives. */
static float cell_edge(int k, int cells)
{
    double step = (1.0f - 0.1f) / (float)cells;
    return (float)(k < (cells + 1) / 2 ? 0.1f + step * k : 1 - step * (cells - k));
}

/* The middles of 2^i cells in the decade 10^(i-6) [0.1, 1] for i = 0..6, with both signs; 0; and 1. */
void quant_dynamic_map(float map[256])
{
    int n = 0;
    for (int i = 0; i < 7; i++) {
        int cells = 1 << i;
        for (int k = 0; k < cells; k++, n += 2) {
            map[n] = (float)pow(10, i - 6) * ((cell_edge(k, cells) + cell_edge(k + 1, cells)) / 2);
            map[n + 1] = -map[n];
        }
    }
    map[n] = 0;
    map[n + 1] = 1;
    qsort(map, 256, sizeof(map[0]), by_value);
}

float quant_e8m0(uint8_t scale) { return scale == 255 ? NAN : ldexpf(1.0f, scale - 127); }

float quant_absmax(const struct weight *w, int64_t e, int64_t block)
{
    int64_t n = weight_blocks(w);
    if (!w->scale) return w->absmax[e * n + block];
    float outer = w->nested_absmax[e * ((n + 255) / 256) + block / 256];
    float centred = w->nested_map[w->scale[e * n + block]] * outer; /* a statement of its own: no fused multiply-add */
    return centred + w->nested_offset[e];
}

float quant_value(const struct weight *w, int64_t e, int64_t i)
{
    int64_t n = w->n_out * w->n_in, flat = e * n + i;
    const uint8_t *nibbles = w->data;
    uint8_t byte;
    switch (w->format) {
    case WF_NONE: break;
    case WF_F32: return ((const float *)w->data)[flat];
    case WF_BF16: return bf16_to_f32(((const uint16_t *)w->data)[flat]);
    case WF_F16: return f16_to_f32(((const uint16_t *)w->data)[flat]);
    case WF_MXFP4:
        byte = nibbles[flat / 2];
        return quant_e2m1_code[i & 1 ? byte >> 4 : byte & 15] * quant_e8m0(w->scale[flat / 32]);
    case WF_NF4:
    case WF_FP4:
        byte = nibbles[e * ((n + 1) / 2) + i / 2];
        return w->code[i & 1 ? byte & 15 : byte >> 4] * quant_absmax(w, e, i / w->block);
    }
    MT_REQUIRE(false, "a weight without format");
}

/* ---- encoders ---- */

/* The largest magnitude among the finite values; counts the others. */
static float block_absmax(const float *x, int64_t n, int64_t *n_bad)
{
    float largest = 0;
    for (int64_t i = 0; i < n; i++) {
        *n_bad += !isfinite(x[i]);
        if (isfinite(x[i])) largest = fmaxf(largest, fabsf(x[i]));
    }
    return largest;
}

/* The nearest code; a tie, exactly between two, goes to the even one: >= into an even code, > into an odd one. */
static uint8_t e2m1(float v)
{
    float a = fabsf(v);
    int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return (uint8_t)(signbit(v) ? code | 8 : code);
}

int64_t quant_mxfp4_encode(uint8_t *nibbles, uint8_t *scales, const float *x, int64_t n)
{
    int64_t n_bad = 0;
    MT_REQUIRE(n % 32 == 0, "%lld values are not blocks of 32", (long long)n);
    for (int64_t b = 0; b < n; b += 32) {
        float largest = block_absmax(x + b, 32, &n_bad);
        int exponent = largest > 0 ? ilogbf(largest) - 2 : 0;
        exponent = MT_MAX(exponent, -127);
        scales[b / 32] = (uint8_t)(exponent + 127);
        for (int64_t i = b; i < b + 32; i += 2) {
            uint8_t low = isfinite(x[i]) ? e2m1(ldexpf(x[i], -exponent)) : 0;
            uint8_t high = isfinite(x[i + 1]) ? e2m1(ldexpf(x[i + 1], -exponent)) : 0;
            nibbles[i / 2] = (uint8_t)(low | high << 4);
        }
    }
    return n_bad;
}

static uint8_t nf4(float v)
{
    uint8_t code = 0;
    for (int k = 0; k < 15; k++) code = (uint8_t)(code + (v > nf4_above[k]));
    return code;
}

static uint8_t fp4(float v)
{
    int rank = 0;
    for (int k = 0; k < 7; k++) rank += fabsf(v) > fp4_above[k];
    return (uint8_t)(v < 0 ? fp4_rank[rank] | 8 : fp4_rank[rank]);
}

int64_t quant_bnb_encode(enum weight_format format, uint8_t *nibbles, float *absmax, const float *x, int64_t n,
                         int64_t block)
{
    int64_t n_bad = 0;
    MT_REQUIRE((format == WF_NF4 || format == WF_FP4) && block > 0 && block % 2 == 0, "format %d, block %lld",
               (int)format, (long long)block);
    memset(nibbles, 0, (size_t)((n + 1) / 2));
    for (int64_t first = 0; first < n; first += block) {
        int64_t end = MT_MIN(first + block, n);
        float largest = block_absmax(x + first, end - first, &n_bad), inverse = 1 / largest;
        absmax[first / block] = largest;
        for (int64_t i = first; i < end; i++) {
            float v = x[i] != 0 && isfinite(x[i]) ? x[i] * inverse : 0; /* 0 * inverse is NaN in a block of zeros */
            uint8_t code = format == WF_NF4 ? nf4(v) : fp4(v);
            nibbles[i / 2] = (uint8_t)(nibbles[i / 2] | (i & 1 ? code : code << 4));
        }
    }
    return n_bad;
}

/* The index of the entry nearest to v; exactly between two, the lower. */
static uint8_t nearest(const float map[256], float v)
{
    int below = 0, above = 255;
    while (above - below > 1) {
        int middle = (below + above) / 2;
        *(v > map[middle] ? &below : &above) = middle;
    }
    return (uint8_t)(v > (map[below] + map[above]) / 2 ? above : below);
}

void quant_nested_encode(uint8_t *q8, float *nested_absmax, float *offset, const float *absmax, int64_t n,
                         const float map[256])
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += absmax[i];
    *offset = n ? (float)(sum / (double)n) : 0;
    for (int64_t first = 0; first < n; first += 256) {
        int64_t end = MT_MIN(first + 256, n);
        float largest = 0;
        for (int64_t i = first; i < end; i++) largest = fmaxf(largest, fabsf(absmax[i] - *offset));
        nested_absmax[first / 256] = largest;
        float inverse = largest > 0 ? 1 / largest : 0;
        for (int64_t i = first; i < end; i++) q8[i] = nearest(map, (absmax[i] - *offset) * inverse);
    }
}
