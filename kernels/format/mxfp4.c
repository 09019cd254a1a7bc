/* mxfp4.c - MXFP4: e2m1 codes and an e8m0 byte per 32; an encoder for values that replace those of a packed weight. */
#include "kernels/format/pack.h"
#include "kernels/format/quant.h"

const float quant_e2m1_code[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static float value(const struct weight *w, int64_t e, int64_t i)
{
    const int64_t flat = e * w->n_out * w->n_in + i;
    return quant_e2m1_code[pack_low_first(w->data, flat)] * e8m0_scale(w->scale[flat / 32]);
}

static void tile(float *out, int64_t ldo, const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col,
                 int64_t n_col)
{
    struct pack_pairs pairs;
    pack_pairs_init(&pairs, quant_e2m1_code, true);
    for (int64_t r = row; r < row + n_row; r++, out += ldo) {
        const int64_t at = (e * w->n_out + r) * w->n_in + col;
        const uint8_t *bytes = (const uint8_t *)w->data + at / 2, *scale = w->scale + at / 32;
        for (int64_t b = 0; b < n_col / 32; b++)
            pack_pairs_scale(out + 32 * b, &pairs, bytes + 16 * b, 16, e8m0_scale(scale[b]));
    }
}

int64_t quant_mxfp4_encode(uint8_t *nibbles, uint8_t *scales, const float *x, int64_t n)
{
    int64_t n_bad = 0;
    MT_REQUIRE(n % 32 == 0, "MXFP4 has blocks of 32: %lld values are not a multiple", (long long)n);
    for (int64_t b = 0; b < n; b += 32) {
        float largest = pack_absmax(x + b, 32, &n_bad), v[32];
        int32_t code[32];
        int exponent = largest > 0 ? ilogbf(largest) - 2 : 0;
        exponent = MT_MAX(exponent, -127);
        scales[b / 32] = (uint8_t)(exponent + 127);
        pack_scaled(v, x + b, 32, ldexpf(1, -exponent));
        pack_e2m1(code, v, 32);
        for (int i = 0; i < 32; i++) code[i] |= signbit(x[b + i]) && isfinite(x[b + i]) ? 8 : 0;
        for (int i = 0; i < 32; i += 2) nibbles[(b + i) / 2] = (uint8_t)(code[i] | code[i + 1] << 4);
    }
    return n_bad;
}

static int64_t pack(void *const plane[PLANES], int64_t at, const float *x, int64_t n)
{
    return quant_mxfp4_encode((uint8_t *)plane[PLANE_DATA] + at / 2, (uint8_t *)plane[PLANE_SCALE] + at / 32, x, n);
}

static int64_t encode(void *const plane[PLANES], const struct weight *dense, int n_threads)
{
    return quant_pieces(pack, plane, dense, n_threads);
}

const struct format format_mxfp4 = {
    .name = "mxfp4",
    .bits = 4,
    .block = 32,
    .binary = true,
    .plane = {[PLANE_DATA] = {".data", PLANE_PER_VALUE, 4}, [PLANE_SCALE] = {".scale", PLANE_PER_BLOCK, 8}},
    .value = value,
    .tile = tile,
    .encode = encode};

/* ---- MXFP4 for values that replace packed MXFP4 values ---- */

struct mxfp4_block {
    uint8_t scale, code[32];
};

/* The nearest codes to x under one shared exponent; returns the sum of squared errors. */
static double mxfp4_try(struct mxfp4_block *b, uint8_t scale, const float x[32])
{
    const float step = e8m0_scale(scale);
    int32_t code[32];
    float v[32];
    double sum = 0;
    b->scale = scale;
    pack_scaled(v, x, 32, ldexpf(1, 127 - scale));
    pack_e2m1(code, v, 32);
    for (int i = 0; i < 32; i++) {
        b->code[i] = (uint8_t)(code[i] | (signbit(x[i]) ? 8 : 0));
        const double error = (double)x[i] - (double)(quant_e2m1_code[b->code[i]] * step);
        sum += error * error;
    }
    return sum;
}

/* For blocks with the same shared exponent: elements with an unchanged value keep their code, as 0 has two codes. */
static void keep_codes(struct mxfp4_block *b, const struct mxfp4_block *old)
{
    for (int i = 0; i < 32; i++)
        if (quant_e2m1_code[b->code[i]] == quant_e2m1_code[old->code[i]]) b->code[i] = old->code[i];
}

static struct mxfp4_block mxfp4_best(const float x[32], const struct mxfp4_block *old)
{
    struct mxfp4_block own, kept;
    int64_t n_bad = 0;
    const float largest = pack_absmax(x, 32, &n_bad);
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
        pack_absmax(x + 32 * b, 32, &n_bad);
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
