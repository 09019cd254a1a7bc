/* fp8.c - FP8 in memory (e4m3 bytes and a scale per row and block of columns) and in checkpoints. */
#include "kernels/format/pack.h"
#include "kernels/format/quant.h"

/* The factor of the code of element i of expert e. */
static float fp8_step_at(const struct weight *w, int64_t e, int64_t i)
{
    return w->scale2[(e * w->n_out + i / w->n_in) * weight_row_scales(w) + i % w->n_in / w->block];
}

static float value(const struct weight *w, int64_t e, int64_t i)
{
    const uint8_t code = ((const uint8_t *)w->data)[e * w->n_out * w->n_in + i];
    return fl_mul(e4m3_value(code), fp8_step_at(w, e, i));
}

void quant_fp8_values(float value[256])
{
    for (int i = 0; i < 256; i++) value[i] = e4m3_value((uint32_t)i);
}

static void tile(float *out, int64_t ldo, const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col,
                 int64_t n_col)
{
    const int64_t per_row = weight_row_scales(w);
    float value_of[256];
    quant_fp8_values(value_of);
    for (int64_t r = e * w->n_out + row; r < e * w->n_out + row + n_row; r++, out += ldo) {
        const uint8_t *codes = (const uint8_t *)w->data + r * w->n_in;
        const float *step = w->scale2 + r * per_row;
        for (int64_t i = col, end; i < col + n_col; i = end) {
            const int64_t block = i / w->block;
            end = MT_MIN(col + n_col, (block + 1) * w->block);
            for (int64_t j = i; j < end; j++) out[j - col] = value_of[codes[j]] * step[block];
        }
    }
}

const struct format format_fp8 = {
    .name = "fp8",
    .bits = 8,
    .plane = {[PLANE_DATA] = {NULL, PLANE_PER_VALUE, 8}, [PLANE_SCALE2] = {NULL, PLANE_PER_ROW_BLOCK, 32}},
    .value = value,
    .tile = tile};

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
        const float step = e8m0_scale(scales[b]);
        for (int64_t o = o0; o < o1; o++)
            for (int64_t i = i0; i < i1; i++) {
                const float v = x[o * n_in + i] / step;
                codes[o * n_in + i] = (uint8_t)(e4m3_code(e4m3_round(fabsf(v))) | (signbit(v) ? 128 : 0));
            }
    }
    return n_bad;
}
