/* fp8.c - e4m3 codes of MXFP4 experts, which FP8 products read, and the range of their scales. */
#include "kernels/cpu/real.h"
#include "kernels/format/minifloat.h"
#include "kernels/format/quant.h"

enum { BLOCK = 32 };

static bool is_zero(const uint8_t *nibbles)
{
    uint8_t any = 0;
    for (int i = 0; i < BLOCK / 2; i++) any |= nibbles[i] & 0x77;
    return !any;
}

void CPU(mx_range)(struct device *dev, struct tensor range, const struct weight *w)
{
    const int64_t n_block = w->n_out * w->n_in / BLOCK;
    if (dev->dry_run) return;
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t e = 0; e < w->n_exp; e++) {
        const uint8_t *scale = w->scale + e * n_block, *nibbles = (const uint8_t *)w->data + e * n_block * BLOCK / 2;
        int32_t low = 255, high = -1;
        for (int64_t b = 0; b < n_block; b++) {
            if (is_zero(nibbles + b * BLOCK / 2)) continue;
            low = MT_MIN(low, scale[b]);
            high = MT_MAX(high, scale[b]);
        }
        ((int32_t *)range.data)[2 * e] = low;
        ((int32_t *)range.data)[2 * e + 1] = high;
    }
}

static uint8_t code_of(float x, float step)
{
    const float a = fabsf(x) / step;
    return (uint8_t)(e4m3_code(e4m3_round(a)) | (signbit(x) ? 0x80u : 0));
}

void CPU(expert_codes)(struct device *dev, struct tensor y, const struct weight *w, struct tensor step)
{
    const int64_t n = w->n_out * w->n_in, each = tensor_count(y) / w->n_exp;
    if (dev->dry_run) return;
#pragma omp parallel for collapse(2) schedule(static) num_threads(dev->n_threads)
    for (int64_t e = 0; e < w->n_exp; e++)
        for (int64_t i = 0; i < w->n_out; i++) {
            const float s = ((const float *)step.data)[e];
            uint8_t *codes = (uint8_t *)y.data + e * each, *transposed = codes + each - n;
            for (int64_t j = 0; j < w->n_in; j++) {
                const float x = quant_value(w, e, i * w->n_in + j);
                if (s > 0) transposed[j * w->n_out + i] = code_of(x, s);
                if (s > 0 && each > n)
                    codes[i * w->n_in + j] = transposed[j * w->n_out + i];
                else if (each > n)
                    ((uint16_t *)(void *)codes)[i * w->n_in + j] = f32_to_bf16(x);
            }
        }
}
