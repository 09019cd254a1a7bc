/* quant.c - the formats as defined by their publishers: tables, decoding of one element, encoding of blocks. */
#include "kernels/format/quant.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/format/fakequant.h"

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

/* Thresholds between the codes. The code of a normalised value is the number of thresholds below it (NF4), or
 * fp4_code_at of the number below its magnitude (FP4). */
static const float nf4_above[15] = {
    -0.8480964004993439f,  -0.6106329262256622f,   -0.4599952697753906f, -0.33967943489551544f, -0.23460740596055984f,
    -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f, 0.1202552504837513f,   0.2035212516784668f,
    0.2920137718319893f,   0.3893125355243683f,    0.5016634166240692f,  0.6427869200706482f,   0.8614784181118011f,
};
static const float fp4_above[7] = {0.00260417f, 0.0859375f, 0.20833333f, 0.29166667f,
                                   0.4166667f,  0.583333f,  0.8333333f};
static const uint8_t fp4_code_at[8] = {0, 1, 6, 7, 4, 5, 2, 3};

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Edge k of [0.1, 1] divided into `cells` equal cells. Computed from the nearer end, for the f32 value of
 * torch.linspace. */
static float cell_edge(int k, int cells)
{
    double step = (1.0f - 0.1f) / (float)cells;
    return (float)(k < (cells + 1) / 2 ? 0.1f + step * k : 1 - step * (cells - k));
}

/* The centres of 2^i cells in the decade 10^(i-6) [0.1, 1] for i = 0..6, with both signs; 0; and 1. */
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
    const int64_t n = (w->n_out * w->n_in + w->block - 1) / w->block; /* weight_blocks, which checks for overflow */
    if (!w->scale) return w->absmax[e * n + block];
    float outer = w->nested_absmax[e * ((n + 255) / 256) + block / 256];
    float centred = w->nested_map[w->scale[e * n + block]] * outer; /* a separate statement: no fused multiply-add */
    return centred + w->nested_offset[e];
}

/* Of element `flat` of the whole stack. */
static float nvfp4_step_at(const struct weight *w, int64_t flat)
{
    return nvfp4_step(w->scale[flat / 16], w->scale2[flat / w->n_in], w->scale2_divides);
}

/* Of element i of expert e. */
static float fp8_step_at(const struct weight *w, int64_t e, int64_t i)
{
    return w->scale2[(e * w->n_out + i / w->n_in) * weight_row_scales(w) + i % w->n_in / w->block];
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
    case WF_NVFP4:
        byte = nibbles[flat / 2];
        return quant_e2m1_code[i & 1 ? byte >> 4 : byte & 15] * nvfp4_step_at(w, flat);
    case WF_FP8: return fl_mul(e4m3_value(((const uint8_t *)w->data)[flat]), fp8_step_at(w, e, i));
    case WF_NF4:
    case WF_FP4:
        byte = nibbles[e * ((n + 1) / 2) + i / 2];
        return w->code[i & 1 ? byte & 15 : byte >> 4] * quant_absmax(w, e, i / w->block);
    }
    MT_REQUIRE(false, "a weight without format");
}

/* ---- encoders ---- */

/* The loops below use integers and arrays of a block, so that a compiler can vectorise them. */
enum { CHUNK = 64 };

/* The largest magnitude among the finite values, as the bits of a positive float, which compare like integers; counts
 * the others. */
static float block_absmax(const float *x, int64_t n, int64_t *n_bad)
{
    const int32_t infinity = 0x7f800000;
    int32_t largest = 0, bad = 0, bits;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&bits, x + i, sizeof(bits));
        bits &= INT32_MAX;
        bad += bits >= infinity;
        bits = bits < infinity ? bits : 0;
        largest = bits > largest ? bits : largest;
    }
    float out;
    memcpy(&out, &largest, sizeof(out));
    *n_bad += bad;
    return out;
}

/* v [n] = x * factor, 0 where x is 0 or not finite: in a block of zeros 0 * infinity would be NaN. */
static void scaled(float *v, const float *x, int64_t n, float factor)
{
    for (int64_t i = 0; i < n; i++) v[i] = x[i] != 0 && fabsf(x[i]) <= FLT_MAX ? x[i] * factor : 0;
}

static void e2m1_codes(int32_t *code, const float *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++) code[i] = (int32_t)e2m1_code(e2m1_round(fabsf(v[i])));
}

int64_t quant_mxfp4_encode(uint8_t *nibbles, uint8_t *scales, const float *x, int64_t n)
{
    int64_t n_bad = 0;
    MT_REQUIRE(n % 32 == 0, "MXFP4 has blocks of 32: %lld values are not a multiple", (long long)n);
    for (int64_t b = 0; b < n; b += 32) {
        float largest = block_absmax(x + b, 32, &n_bad), v[32];
        int32_t code[32];
        int exponent = largest > 0 ? ilogbf(largest) - 2 : 0;
        exponent = MT_MAX(exponent, -127);
        scales[b / 32] = (uint8_t)(exponent + 127);
        scaled(v, x + b, 32, ldexpf(1, -exponent));
        e2m1_codes(code, v, 32);
        for (int i = 0; i < 32; i++) code[i] |= signbit(x[b + i]) && isfinite(x[b + i]) ? 8 : 0;
        for (int i = 0; i < 32; i += 2) nibbles[(b + i) / 2] = (uint8_t)(code[i] | code[i + 1] << 4);
    }
    return n_bad;
}

static void nf4_codes(int32_t *code, const float *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++) code[i] = 0;
    for (int k = 0; k < 15; k++)
        for (int64_t i = 0; i < n; i++) code[i] += v[i] > nf4_above[k];
}

static void fp4_codes(int32_t *code, const float *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int n_below = 0;
        for (int k = 0; k < 7; k++) n_below += fabsf(v[i]) > fp4_above[k];
        code[i] = v[i] < 0 ? fp4_code_at[n_below] | 8 : fp4_code_at[n_below];
    }
}

int64_t quant_bnb_encode(enum weight_format format, uint8_t *nibbles, float *absmax, const float *x, int64_t n,
                         int64_t block)
{
    int64_t n_bad = 0;
    MT_REQUIRE((format == WF_NF4 || format == WF_FP4) && block > 0 && block % 2 == 0, "format %d, block %lld",
               (int)format, (long long)block);
    for (int64_t first = 0; first < n; first += block) {
        int64_t end = MT_MIN(first + block, n);
        float largest = block_absmax(x + first, end - first, &n_bad), v[CHUNK];
        int32_t code[CHUNK + 1];
        absmax[first / block] = largest;
        for (int64_t at = first; at < end; at += CHUNK) {
            int64_t count = MT_MIN(CHUNK, end - at);
            scaled(v, x + at, count, 1 / largest);
            (format == WF_NF4 ? nf4_codes : fp4_codes)(code, v, count);
            code[count] = 0; /* an odd number of elements */
            for (int64_t i = 0; i < count; i += 2) nibbles[(at + i) / 2] = (uint8_t)(code[i] << 4 | code[i + 1]);
        }
    }
    return n_bad;
}

static const struct fakequant nvfp4 = {.kind = FQ_NVFP4, .block = 16, .bits = 4};

/* Elements [at, at+n) of dense values. */
static void dense_values(float *out, const void *x, enum weight_format dense, int64_t at, int64_t n)
{
    const uint16_t *half = (const uint16_t *)x + at;
    if (dense == WF_F32)
        memcpy(out, (const float *)x + at, (size_t)n * sizeof(float));
    else if (dense == WF_BF16)
        for (int64_t i = 0; i < n; i++) out[i] = bf16_to_f32(half[i]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = f16_to_f32(half[i]);
}

/* The global scale of a matrix from its largest finite magnitude. */
static float nvfp4_scale2(const void *x, enum weight_format dense, int64_t n, int n_threads)
{
    enum { PIECE = 4096 };
    float amax = 0;
#pragma omp parallel for if (n > 16 * PIECE) num_threads(n_threads) reduction(max : amax)
    for (int64_t at = 0; at < n; at += PIECE) {
        float piece[PIECE];
        int64_t n_bad = 0;
        const int64_t count = MT_MIN(PIECE, n - at);
        progress();
        dense_values(piece, x, dense, at, count);
        amax = fmaxf(amax, block_absmax(piece, count, &n_bad));
    }
    return fakequant_global(&nvfp4, amax);
}

static int64_t nvfp4_encode(uint8_t *nibbles, uint8_t *scales, const float *x, int64_t n, float scale2)
{
    int64_t n_bad = 0;
    for (int64_t b = 0; b < n; b += 16) {
        const struct fakequant_scale s = fakequant_scale_nvfp4(&nvfp4, scale2, block_absmax(x + b, 16, &n_bad));
        uint32_t code[16];
        for (int i = 0; i < 16; i++) {
            const float v = fabsf(x[b + i]) <= FLT_MAX ? x[b + i] : 0;
            code[i] = fakequant_code(&nvfp4, fakequant_round(&nvfp4, &s, v));
        }
        scales[b / 16] = (uint8_t)s.byte;
        for (int i = 0; i < 16; i += 2) nibbles[(b + i) / 2] = (uint8_t)(code[i] | code[i + 1] << 4);
    }
    return n_bad;
}

int64_t quant_encode(enum weight_format format, uint8_t *nibbles, uint8_t *scales, float *absmax, const void *x,
                     enum weight_format dense, int64_t n, int n_threads)
{
    enum { BLOCK = 64, PIECE = 64 * BLOCK }; /* whole blocks of every format */
    int64_t n_bad = 0;
    if (format == WF_NVFP4) {
        MT_REQUIRE(n % 16 == 0, "NVFP4 has blocks of 16: %lld values are not a multiple", (long long)n);
        *absmax = nvfp4_scale2(x, dense, n, n_threads);
    }
#pragma omp parallel for if (n > 16 * PIECE) num_threads(n_threads) reduction(+ : n_bad)
    for (int64_t at = 0; at < n; at += PIECE) {
        float piece[PIECE];
        const int64_t count = MT_MIN(PIECE, n - at);
        progress();
        dense_values(piece, x, dense, at, count);
        if (format == WF_MXFP4)
            n_bad += quant_mxfp4_encode(nibbles + at / 2, scales + at / 32, piece, count);
        else if (format == WF_NVFP4)
            n_bad += nvfp4_encode(nibbles + at / 2, scales + at / 16, piece, count, *absmax);
        else
            n_bad += quant_bnb_encode(format, nibbles + at / 2, absmax + at / BLOCK, piece, count, BLOCK);
    }
    return n_bad;
}

/* The index of the entry nearest to v; on a tie the lower one. */
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

/* Whole blocks of MXFP4 or NVFP4 from element `flat` of the whole stack, a byte at a time. */
static void blocks_decode(float *out, const struct weight *w, int64_t flat, int64_t n)
{
    const int64_t block = weight_scale_block(w->format);
    for (int64_t at = flat; at < flat + n; at += block) {
        const float step = w->format == WF_MXFP4 ? quant_e8m0(w->scale[at / 32]) : nvfp4_step_at(w, at);
        const uint8_t *nibbles = (const uint8_t *)w->data + at / 2;
        for (int64_t i = 0; i < block / 2; i++, out += 2) {
            out[0] = quant_e2m1_code[nibbles[i] & 15] * step;
            out[1] = quant_e2m1_code[nibbles[i] >> 4] * step;
        }
    }
}

void quant_fp8_values(float value[256])
{
    for (int i = 0; i < 256; i++) value[i] = e4m3_value((uint32_t)i);
}

/* Elements [first, first + n) of expert e, a run with one scale at a time. */
static void fp8_decode(float *out, const struct weight *w, int64_t e, int64_t first, int64_t n, const float value[256])
{
    const uint8_t *codes = (const uint8_t *)w->data + e * w->n_out * w->n_in;
    for (int64_t i = first, end; i < first + n; i = end) {
        const int64_t col = i % w->n_in, row_end = i - col + w->n_in;
        const float step = fp8_step_at(w, e, i);
        end = MT_MIN(MT_MIN(i - col + (col / w->block + 1) * w->block, row_end), first + n);
        for (int64_t j = i; j < end; j++) *out++ = fl_mul(value[codes[j]], step);
    }
}

void quant_decode(float *out, const struct weight *w, int64_t e, int64_t first, int64_t n, int n_threads)
{
    enum { PIECE = 4096 };
    const int64_t flat = e * w->n_out * w->n_in + first, block = weight_scale_block(w->format);
    const bool blocks = block && flat % block == 0 && n % block == 0;
    float fp8[256];
    if (w->format == WF_FP8) quant_fp8_values(fp8);
#pragma omp parallel for if (n > 16 * PIECE) num_threads(n_threads)
    for (int64_t at = 0; at < n; at += PIECE) {
        const int64_t count = MT_MIN(PIECE, n - at);
        if (blocks)
            blocks_decode(out + at, w, flat + at, count);
        else if (w->format == WF_FP8)
            fp8_decode(out + at, w, e, first + at, count, fp8);
        else
            for (int64_t i = at; i < at + count; i++) out[i] = quant_value(w, e, first + i);
    }
}

void quant_fp8_decode(char *out, const uint8_t *codes, const float *scale, int64_t n_out, int64_t n_in, int64_t rows,
                      int64_t cols, int n_threads)
{
    const int64_t per_row = (n_in + cols - 1) / cols;
    float value[256];
    quant_fp8_values(value);
#pragma omp parallel for num_threads(n_threads)
    for (int64_t o = 0; o < n_out; o++)
        for (int64_t first = 0; first < n_in; first += cols) {
            const float step = scale[o / rows * per_row + first / cols];
            for (int64_t i = o * n_in + first; i < o * n_in + MT_MIN(first + cols, n_in); i++) {
                const uint16_t h = f32_to_bf16(fl_mul(value[codes[i]], step));
                memcpy(out + 2 * i, &h, sizeof(h));
            }
        }
}

enum { FP8_BLOCK = 128 };

/* The exponent of a block; 127 for zeros. */
static uint8_t fp8_exponent(float amax)
{
    int e = 0;
    if (!(amax > 0)) return 127;
    frexpf(amax / 448, &e); /* amax / 448 = f 2^e, f in [0.5, 1) */
    if (amax <= ldexpf(448, e - 1)) e--;
    return (uint8_t)MT_MIN(MT_MAX(e + 127, 0), 254);
}

int64_t quant_fp8_blocks(uint8_t *codes, uint8_t *scales, const float *x, int64_t n_out, int64_t n_in, int n_threads)
{
    const int64_t cols = (n_in + FP8_BLOCK - 1) / FP8_BLOCK, n = (n_out + FP8_BLOCK - 1) / FP8_BLOCK * cols;
    int64_t n_bad = 0;
#pragma omp parallel for num_threads(n_threads) reduction(+ : n_bad)
    for (int64_t b = 0; b < n; b++) {
        const int64_t o0 = b / cols * FP8_BLOCK, o1 = MT_MIN(o0 + FP8_BLOCK, n_out);
        const int64_t i0 = b % cols * FP8_BLOCK, i1 = MT_MIN(i0 + FP8_BLOCK, n_in);
        float amax = 0;
        for (int64_t o = o0; o < o1; o++)
            for (int64_t i = i0; i < i1; i++) {
                n_bad += !isfinite(x[o * n_in + i]);
                amax = fmaxf(amax, fabsf(x[o * n_in + i]));
            }
        scales[b] = fp8_exponent(amax);
        const float step = quant_e8m0(scales[b]);
        for (int64_t o = o0; o < o1; o++)
            for (int64_t i = i0; i < i1; i++) {
                const float v = x[o * n_in + i] / step;
                codes[o * n_in + i] = (uint8_t)(e4m3_code(e4m3_round(fabsf(v))) | (signbit(v) ? 128 : 0));
            }
    }
    return n_bad;
}

void quant_int4_decode(char *out, const uint8_t *nibbles, const float *scale, int64_t n_group, int64_t group,
                       int n_threads)
{
#pragma omp parallel for num_threads(n_threads)
    for (int64_t g = 0; g < n_group; g++)
        for (int64_t i = g * group; i < (g + 1) * group; i++) {
            const int code = (nibbles[i / 2] >> (i % 2 * 4) & 15) - 8;
            const uint16_t h = f32_to_bf16(fl_mul((float)code, scale[g]));
            memcpy(out + 2 * i, &h, sizeof(h));
        }
}

/* ---- MXFP4 for values that replace packed MXFP4 values ---- */

struct mxfp4_block {
    uint8_t scale, code[32];
};

/* The nearest codes to x under one shared exponent; returns the sum of squared errors. */
static double mxfp4_try(struct mxfp4_block *b, uint8_t scale, const float x[32])
{
    const float step = quant_e8m0(scale);
    int32_t code[32];
    float v[32];
    double sum = 0;
    b->scale = scale;
    scaled(v, x, 32, ldexpf(1, 127 - scale));
    e2m1_codes(code, v, 32);
    for (int i = 0; i < 32; i++) {
        b->code[i] = (uint8_t)(code[i] | (signbit(x[i]) ? 8 : 0));
        const double error = (double)x[i] - (double)(quant_e2m1_code[b->code[i]] * step);
        sum += error * error;
    }
    return sum;
}

/* With the same shared exponent: elements with an unchanged value keep their code, as 0 has two. */
static void keep_codes(struct mxfp4_block *b, const struct mxfp4_block *old)
{
    for (int i = 0; i < 32; i++)
        if (quant_e2m1_code[b->code[i]] == quant_e2m1_code[old->code[i]]) b->code[i] = old->code[i];
}

static struct mxfp4_block mxfp4_best(const float x[32], const struct mxfp4_block *old)
{
    struct mxfp4_block own, kept;
    int64_t n_bad = 0;
    const float largest = block_absmax(x, 32, &n_bad);
    const int exponent = largest > 0 ? ilogbf(largest) - 2 : 0;
    const double error = mxfp4_try(&own, (uint8_t)(MT_MAX(exponent, -127) + 127), x);
    if (!old) return own;
    if (mxfp4_try(&kept, old->scale, x) > error) return own;
    keep_codes(&kept, old);
    return kept;
}

int64_t quant_mxfp4_merge(uint8_t *nibbles, uint8_t *scales, const float *x, const uint8_t *old_nibbles,
                          const uint8_t *old_scales, int64_t n, int n_threads)
{
    int64_t n_bad = 0;
    MT_REQUIRE(n % 32 == 0, "MXFP4 has blocks of 32: %lld values are not a multiple", (long long)n);
#pragma omp parallel for num_threads(n_threads) reduction(+ : n_bad)
    for (int64_t b = 0; b < n / 32; b++) {
        struct mxfp4_block old;
        float values[32];
        block_absmax(x + 32 * b, 32, &n_bad);
        for (int i = 0; i < 32; i++) values[i] = fabsf(x[32 * b + i]) <= FLT_MAX ? x[32 * b + i] : 0;
        for (int i = 0; i < 32 && old_nibbles; i++) {
            const uint8_t byte = old_nibbles[16 * b + i / 2];
            old.code[i] = i % 2 ? byte >> 4 : byte & 15;
        }
        if (old_nibbles) old.scale = old_scales[b];
        const struct mxfp4_block best = mxfp4_best(values, old_nibbles ? &old : NULL);
        scales[b] = best.scale;
        for (int i = 0; i < 32; i += 2) nibbles[16 * b + i / 2] = (uint8_t)(best.code[i] | best.code[i + 1] << 4);
    }
    return n_bad;
}
