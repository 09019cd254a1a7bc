/* dense.c - the formats without scales: F32, BF16, F16. */
#include "kernels/format/format.h"
#include "kernels/format/minifloat.h"

static float f32_of(const void *data, int64_t i) { return ((const float *)data)[i]; }
static float bf16_of(const void *data, int64_t i) { return bits_float((uint32_t)((const uint16_t *)data)[i] << 16); }
static float f16_of(const void *data, int64_t i) { return f16_to_f32(((const uint16_t *)data)[i]); }

#define FORMAT(type, n)                                                                                                \
    static float type##_value(const struct weight *w, int64_t e, int64_t i)                                            \
    {                                                                                                                  \
        return type##_of(w->data, e * w->n_out * w->n_in + i);                                                         \
    }                                                                                                                  \
    static void type##_tile(float *out, int64_t ldo, const struct weight *w, int64_t e, int64_t row, int64_t n_row,    \
                            int64_t col, int64_t n_col)                                                                \
    {                                                                                                                  \
        for (int64_t r = row; r < row + n_row; r++, out += ldo) {                                                      \
            const int64_t at = (e * w->n_out + r) * w->n_in + col;                                                     \
            for (int64_t i = 0; i < n_col; i++) out[i] = type##_of(w->data, at + i);                                   \
        }                                                                                                              \
    }                                                                                                                  \
    const struct format format_##type = {.name = #type,                                                                \
                                         .bits = n,                                                                    \
                                         .dense = true,                                                                \
                                         .plane = {[PLANE_DATA] = {NULL, PLANE_PER_VALUE, n}},                         \
                                         .value = type##_value,                                                        \
                                         .tile = type##_tile};
FORMAT(f32, 32)
FORMAT(bf16, 16)
FORMAT(f16, 16)
