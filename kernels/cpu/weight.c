/* weight.c - decodes a tile of a frozen weight into reals. Values are rounded to f32 exactly as quant_value defines,
 * also where reals are f64 (MT_F64). */
#include "kernels/cpu/gemm.h"

#include <string.h>

#ifdef MT_F64
/* In place: a row of n floats becomes one of reals. */
static void widen(real *row, int64_t n)
{
    for (int64_t i = n - 1; i >= 0; i--) {
        float x;
        memcpy(&x, (const char *)row + i * (int64_t)sizeof(x), sizeof(x));
        row[i] = x;
    }
}
#endif

void weight_tile(const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col, int64_t n_col, real *out,
                 int64_t ldo)
{
    const struct format *f = format_of(w);
    const int64_t step = format_step(f);
    MT_REQUIRE(f->tile && w->n_in % step == 0 && col % step == 0 && n_col % step == 0,
               "columns %lld + %lld of %lld in %s", (long long)col, (long long)n_col, (long long)w->n_in, f->name);
    f->tile((float *)(void *)out, ldo * (int64_t)(sizeof(real) / sizeof(float)), w, e, row, n_row, col, n_col);
#ifdef MT_F64
    for (int64_t r = 0; r < n_row; r++) widen(out + r * ldo, n_col);
#endif
}
