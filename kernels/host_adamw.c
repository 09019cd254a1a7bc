/* host_adamw.c - AdamW on the CPU (host_adamw.h): one pass over the arrays, in blocks. */
#include "kernels/host_adamw.h"

#include "kernels/adamw_value.h"

enum { BLOCK = 16384 };

/* f32_to_bf16 in a form that a loop over values inlines, with the NaN of cuda_cast. */
static uint16_t bf16_of(float x)
{
    const uint32_t bits = float_bits(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded >> 16);
}

static void update_block(float *restrict p, float *restrict m, float *restrict v, const float *restrict g,
                         uint16_t *restrict working, int64_t n, const struct adamw_step *step)
{
    const struct adamw_step s = *step;
    const float decay = adamw_decay(&s);
    for (int64_t i = 0; i < n; i++) {
        adamw_value(&p[i], &m[i], &v[i], g[i], &s, decay);
        working[i] = bf16_of(p[i]);
    }
}

void host_adamw(float *p, float *m, float *v, const float *g, uint16_t *working, int64_t n,
                const struct adamw_step *step, int n_threads)
{
#pragma omp parallel for schedule(static) num_threads(n_threads)
    for (int64_t i = 0; i < n; i += BLOCK)
        update_block(p + i, m + i, v + i, g + i, working + i, MT_MIN(BLOCK, n - i), step);
}
