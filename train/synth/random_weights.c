/* random_weights.c - random weights. One number of the counter-based generator gives eight bytes. */
#include "train/synth/random_weights.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#include "kernels/format/minifloat.h"
#include "kernels/format/quant.h"

#define FP8_STD    104   /* for RANDOM_FP8: with this std the largest of 65536 quantiles, 4.3, becomes 448 */
#define N_QUANTILE 65536 /* a normal value takes 16 random bits */

static float quantile[N_QUANTILE];    /* quantiles of the standard normal distribution, one in the middle of each of
                                         N_QUANTILE intervals */
static uint8_t fp8_codes[N_QUANTILE]; /* of the quantiles times FP8_STD */

/* Computes the quantiles by Newton's method on the upper tail. It starts at the previous root, so that it converges
 * from below. */
static void fill_quantiles(void)
{
    const double half_root = 0.70710678118654752440, density = 0.39894228040143267794; /* 1/sqrt(2), 1/sqrt(2 pi) */
    double x = 0;
    for (int i = N_QUANTILE / 2; i < N_QUANTILE; i++) {
        const double tail = 1 - (i + 0.5) / N_QUANTILE;
        for (int step = 0; step < 6; step++) x += (erfc(x * half_root) / 2 - tail) / (density * exp(-x * x / 2));
        quantile[i] = (float)x;
        quantile[N_QUANTILE - 1 - i] = (float)-x;
    }
}

static void fill_tables(void)
{
    fill_quantiles();
    for (int i = 0; i < N_QUANTILE; i++) {
        const float x = (float)(FP8_STD * (double)quantile[i]);
        fp8_codes[i] = (uint8_t)(e4m3_code(e4m3_round(fabsf(x))) | (x < 0 ? 128 : 0));
    }
}

static float normal(const struct random_weights *d, uint64_t bits)
{
    return (float)(d->mean + d->std * (double)quantile[bits & (N_QUANTILE - 1)]);
}

/* Copies `size` bytes, or n_left if that is less. If the compiler knows the size, memcpy is inlined. */
static inline void put(uint8_t *dst, const void *bytes, int64_t size, int64_t n_left)
{
    if (n_left >= size)
        memcpy(dst, bytes, (size_t)size);
    else
        memcpy(dst, bytes, (size_t)n_left);
}

/* For a part with many values, first rounds all possible values to bf16 in a table, so that drawing is a look-up. */
static void draw_normal(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    const bool many = n / 2 > N_QUANTILE;
    uint16_t *table = many ? mem_array(N_QUANTILE, sizeof(*table)) : NULL; /* 128 KiB: too much for a small stack */
    uint16_t four[4];
    for (uint64_t i = 0; many && i < N_QUANTILE; i++) table[i] = f32_to_bf16(normal(d, i));
    for (int64_t i = 0; i < n; i += 8) {
        const uint64_t bits = rng_u64(d->key, (uint64_t)(at + i) / 8);
        for (int k = 0; k < 4; k++)
            four[k] = many ? table[bits >> 16 * k & (N_QUANTILE - 1)] : f32_to_bf16(normal(d, bits >> 16 * k));
        put(dst + i, four, 8, n - i);
    }
    mem_free(table);
}

static void draw_rows(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    const uint64_t key = rng_key(d->key, "rows");
    struct random_weights row = *d;
    for (int64_t i = at / 2; i < (at + n) / 2; i++) {
        if (i == at / 2 || i % d->row == 0) row.std = d->std * (0.8 + 0.4 * rng_uniform(key, (uint64_t)(i / d->row)));
        const uint16_t value = f32_to_bf16(normal(&row, rng_u64(d->key, (uint64_t)i / 4) >> 16 * (i % 4)));
        memcpy(dst + 2 * i - at, &value, 2);
    }
}

static void draw_nibbles(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    for (int64_t i = 0; i < n; i += 8) {
        const uint64_t bits = rng_u64(d->key, (uint64_t)(at + i) / 8);
        put(dst + i, &bits, 8, n - i);
    }
}

/* The 16 values of NF4 sum to 0.374. Among the 512 nibbles of all 256 bytes, 32 encode 1. Six of these are changed to
 * -1, so that the mean is 0. */
static void draw_nf4(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    uint8_t map[256];
    for (int i = 0; i < 256; i++) map[i] = (uint8_t)i;
    for (int i = 6; i < 9; i++) map[0xf0 | i] = (uint8_t)i, map[i << 4 | 0xf] = (uint8_t)(i << 4);
    draw_nibbles(d, dst, at, n);
    for (int64_t i = 0; i < n; i++) dst[i] = map[dst[i]];
}

static double mean_square(const float code[16])
{
    double sum = 0;
    for (int i = 0; i < 16; i++) sum += (double)code[i] * (double)code[i];
    return sum / 16;
}

/* Half of all blocks have the exponent e; the fraction a has e - 1, the fraction c has e + 1, and a + c = 1/2. The mean
 * square of the values is std^2 if a / 4 + 1/2 + 4 c = q, where q = std^2 / (mean square of the codes * 4^e). e is such
 * that q is in [0.625, 2.5); then c = (q - 0.625) / 3.75 is in [0, 1/2). */
static void draw_e8m0(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    double q = d->std * d->std / mean_square(quant_e2m1_code);
    int e = 127;
    for (; q >= 2.5; e++) q /= 4;
    for (; q < 0.625; e--) q *= 4;
    const uint64_t above = (uint64_t)((q - 0.625) / 3.75 * 256), same = above + 128; /* in 256ths */
    for (int64_t i = 0; i < n; i += 8) {
        uint64_t bits = rng_u64(d->key, (uint64_t)(at + i) / 8);
        for (int64_t k = i; k < MT_MIN(i + 8, n); k++, bits >>= 8)
            dst[k] = (uint8_t)((bits & 255) < above ? e + 1 : (bits & 255) < same ? e : e - 1);
    }
}

static void draw_e4m3(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    draw_nibbles(d, dst, at, n);
    for (int64_t i = 0; i < n; i++) dst[i] = (uint8_t)(0x38 + (dst[i] & 15));
}

static void draw_fp8(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    uint8_t four[4];
    for (int64_t i = 0; i < n; i += 4) {
        const uint64_t bits = rng_u64(d->key, (uint64_t)(at + i) / 4);
        for (int k = 0; k < 4; k++) four[k] = fp8_codes[bits >> 16 * k & (N_QUANTILE - 1)];
        put(dst + i, four, 4, n - i);
    }
}

float random_weights_scale(enum weight_format format, double std)
{
    double square = 0; /* of a scale byte */
    for (uint32_t i = 0; i < 16; i++) square += pow((double)e4m3_value(0x38 + i), 2) / 16;
    return (float)(format_row(format, false)->bits == 8 ? std / FP8_STD
                                                        : std / sqrt(square * mean_square(quant_e2m1_code)));
}

uint8_t random_weights_exponent(double std) { return (uint8_t)(127 + lround(log2(std / FP8_STD))); }

static void draw_f32(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    for (int64_t i = at / 4; i < (at + n) / 4; i++) {
        const float value = normal(d, rng_u64(d->key, (uint64_t)i));
        memcpy(dst + 4 * i - at, &value, 4);
    }
}

static void draw_hash(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    const int64_t stride = MT_MAX(d->n_exp / d->row, 1);
    for (int64_t i = at / 8; i < (at + n) / 8; i++) {
        const int64_t first = (int64_t)(rng_u64(d->key, (uint64_t)(i / d->row)) % (uint64_t)d->n_exp);
        const int64_t value = (first + i % d->row * stride) % d->n_exp;
        memcpy(dst + 8 * i - at, &value, 8);
    }
}

static void draw_absmax(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    const double spread = 1 + 0.25 / 12; /* mean square of a uniform value in [0.75, 1.25) */
    const double base = d->std / sqrt(mean_square(quant_nf4_code) * spread);
    for (int64_t i = at / 4; i < (at + n) / 4; i++) {
        const float value = (float)(base * (0.75 + 0.5 * rng_uniform(d->key, (uint64_t)i)));
        memcpy(dst + 4 * i - at, &value, 4);
    }
}

void random_weights_bytes(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_tables);
    switch (d->kind) {
    case RANDOM_NORMAL: draw_normal(d, dst, at, n); break;
    case RANDOM_ROWS: draw_rows(d, dst, at, n); break;
    case RANDOM_NIBBLES: draw_nibbles(d, dst, at, n); break;
    case RANDOM_NF4: draw_nf4(d, dst, at, n); break;
    case RANDOM_E8M0: draw_e8m0(d, dst, at, n); break;
    case RANDOM_E4M3: draw_e4m3(d, dst, at, n); break;
    case RANDOM_FP8: draw_fp8(d, dst, at, n); break;
    case RANDOM_ABSMAX: draw_absmax(d, dst, at, n); break;
    case RANDOM_F32: draw_f32(d, dst, at, n); break;
    case RANDOM_HASH: draw_hash(d, dst, at, n); break;
    case RANDOM_FILL: memset(dst, d->byte, (size_t)n); break;
    case RANDOM_BYTES: memcpy(dst, (const char *)d->bytes + at, (size_t)n); break;
    }
}
