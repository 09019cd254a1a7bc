/* nvfp4.c - NVFP4: e2m1 codes, an e4m3 byte per 16 and a global scale per row. */
#include "kernels/format/fakequant.h"
#include "kernels/format/pack.h"
#include "kernels/format/quant.h"

static const struct fakequant nvfp4 = {.kind = FQ_NVFP4, .block = 16, .bits = 4};

/* The factor of the code of element `flat` of the whole stack. */
static float nvfp4_step_at(const struct weight *w, int64_t flat)
{
    return nvfp4_step(w->scale[flat / 16], w->scale2[flat / w->n_in], w->scale2_divides);
}

static float value(const struct weight *w, int64_t e, int64_t i)
{
    const int64_t flat = e * w->n_out * w->n_in + i;
    return quant_e2m1_code[pack_low_first(w->data, flat)] * nvfp4_step_at(w, flat);
}

static void tile(float *out, int64_t ldo, const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col,
                 int64_t n_col)
{
    struct pack_pairs pairs;
    pack_pairs_init(&pairs, quant_e2m1_code, true);
    for (int64_t r = e * w->n_out + row; r < e * w->n_out + row + n_row; r++, out += ldo) {
        const int64_t at = r * w->n_in + col;
        const uint8_t *bytes = (const uint8_t *)w->data + at / 2, *scale = w->scale + at / 16;
        for (int64_t b = 0; b < n_col / 16; b++)
            pack_pairs_scale(out + 16 * b, &pairs, bytes + 8 * b, 8,
                             nvfp4_step(scale[b], w->scale2[r], w->scale2_divides));
    }
}

static int64_t pack(void *const plane[PLANES], int64_t at, const float *x, int64_t n)
{
    uint8_t *nibbles = (uint8_t *)plane[PLANE_DATA] + at / 2, *scales = (uint8_t *)plane[PLANE_SCALE] + at / 16;
    const float scale2 = *(const float *)plane[PLANE_SCALE2];
    int64_t n_bad = 0;
    for (int64_t b = 0; b < n; b += 16) {
        const struct fakequant_scale s = fakequant_scale_nvfp4(&nvfp4, scale2, pack_absmax(x + b, 16, &n_bad));
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

/* The matrix has one global scale, a factor, which is written to each row. */
static int64_t encode(void *const plane[PLANES], const struct weight *dense, int n_threads)
{
    float *rows = plane[PLANE_SCALE2];
    MT_REQUIRE(dense->n_in % 16 == 0, "NVFP4 has blocks of 16: %lld values are not a multiple", (long long)dense->n_in);
    for (int64_t r = 0; r < dense->n_out; r++)
        rows[r] = r ? rows[0] : fakequant_global(&nvfp4, quant_dense_absmax(dense, n_threads));
    return quant_pieces(pack, plane, dense, n_threads);
}

const struct format format_nvfp4 = {.name = "nvfp4",
                                    .bits = 4,
                                    .block = 16,
                                    .plane = {[PLANE_DATA] = {".data", PLANE_PER_VALUE, 4},
                                              [PLANE_SCALE] = {".scale", PLANE_PER_BLOCK, 8},
                                              [PLANE_SCALE2] = {".scale2", PLANE_PER_ROW, 32}},
                                    .value = value,
                                    .tile = tile,
                                    .encode = encode};
