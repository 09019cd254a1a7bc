/* bnb.c - NF4 and FP4 of bitsandbytes: codes of a table, an absmax per block of the flat matrix, in f32 or nested. */
#include <stdlib.h>

#include "kernels/format/pack.h"
#include "kernels/format/quant.h"

enum { CHUNK = 64 };

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

/* Edge k of [0.1, 1] divided into `cells` equal cells, computed from the nearer end as in torch.linspace, for the same
 * f32 value. */
static float cell_edge(int k, int cells)
{
    double step = (1.0f - 0.1f) / (float)cells;
    return (float)(k < (cells + 1) / 2 ? 0.1f + step * k : 1 - step * (cells - k));
}

/* bitsandbytes' dynamic map: 0, 1, and the centres of equal cells of the decades 10^(i-6) [0.1, 1], i = 0..6: 2^i cells
 * with both signs, or 2^(i+1) without signs. */
static void dynamic_map(float map[256], bool with_sign)
{
    int n = 0;
    for (int i = 0; i < 7; i++) {
        int cells = with_sign ? 1 << i : 2 << i;
        for (int k = 0; k < cells; k++) {
            map[n++] = (float)pow(10, i - 6) * ((cell_edge(k, cells) + cell_edge(k + 1, cells)) / 2);
            if (with_sign) map[n] = -map[n - 1], n++;
        }
    }
    map[n] = 0;
    map[n + 1] = 1;
    qsort(map, 256, sizeof(map[0]), by_value);
}

void quant_dynamic_map(float map[256]) { dynamic_map(map, true); }

void quant_dynamic_map_unsigned(float map[256]) { dynamic_map(map, false); }

float quant_absmax(const struct weight *w, int64_t e, int64_t block)
{
    const int64_t n = (w->n_out * w->n_in + w->block - 1) / w->block;
    if (!w->scale) return w->absmax[e * n + block];
    float outer = w->nested_absmax[e * ((n + 255) / 256) + block / 256];
    float centred = w->nested_map[w->scale[e * n + block]] * outer; /* a separate statement: no fused multiply-add */
    return centred + w->nested_offset[e];
}

static float value(const struct weight *w, int64_t e, int64_t i)
{
    const uint8_t byte = ((const uint8_t *)w->data)[e * ((w->n_out * w->n_in + 1) / 2) + i / 2];
    return w->code[i & 1 ? byte & 15 : byte >> 4] * quant_absmax(w, e, i / w->block);
}

/* A row may begin and end inside a block. */
static void tile(float *out, int64_t ldo, const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col,
                 int64_t n_col)
{
    const uint8_t *bytes = (const uint8_t *)w->data + e * ((w->n_out * w->n_in + 1) / 2);
    struct pack_pairs pairs;
    pack_pairs_init(&pairs, w->code, false);
    for (int64_t r = row; r < row + n_row; r++, out += ldo) {
        const int64_t first = r * w->n_in + col;
        for (int64_t i = first, end; i < first + n_col; i = end) {
            const int64_t block = i / w->block;
            end = MT_MIN(first + n_col, (block + 1) * w->block);
            pack_pairs_scale(out + (i - first), &pairs, bytes + i / 2, (end - i) / 2, quant_absmax(w, e, block));
        }
    }
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
        float largest = pack_absmax(x + first, end - first, &n_bad), v[CHUNK];
        int32_t code[CHUNK + 1];
        absmax[first / block] = largest;
        for (int64_t at = first; at < end; at += CHUNK) {
            int64_t count = MT_MIN(CHUNK, end - at);
            pack_scaled(v, x + at, count, 1 / largest);
            (format == WF_NF4 ? nf4_codes : fp4_codes)(code, v, count);
            code[count] = 0; /* an odd number of elements */
            for (int64_t i = 0; i < count; i += 2) nibbles[(at + i) / 2] = (uint8_t)(code[i] << 4 | code[i + 1]);
        }
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

static int64_t pack(void *const plane[PLANES], int64_t at, const float *x, int64_t n)
{
    return quant_bnb_encode(WF_NF4, (uint8_t *)plane[PLANE_DATA] + at / 2,
                            (float *)plane[PLANE_ABSMAX] + at / QUANT_BLOCK, x, n, QUANT_BLOCK);
}

static int64_t encode(void *const plane[PLANES], const struct weight *dense, int n_threads)
{
    return quant_pieces(pack, plane, dense, n_threads);
}

static int64_t encode_nested(void *const plane[PLANES], const struct weight *dense, int n_threads)
{
    const int64_t n = (dense->n_out * dense->n_in + QUANT_BLOCK - 1) / QUANT_BLOCK;
    float *absmax = mem_array(n, sizeof(float)), map[256];
    void *const plain[PLANES] = {[PLANE_DATA] = plane[PLANE_DATA], [PLANE_ABSMAX] = absmax};
    const int64_t n_bad = encode(plain, dense, n_threads);
    quant_dynamic_map(map);
    quant_nested_encode(plane[PLANE_SCALE], plane[PLANE_NESTED_ABSMAX], plane[PLANE_NESTED_OFFSET], absmax, n, map);
    mem_free(absmax);
    return n_bad;
}

static void tables(void *const plane[PLANES])
{
    memcpy(plane[PLANE_CODE], quant_nf4_code, sizeof(quant_nf4_code));
    if (plane[PLANE_NESTED_MAP]) quant_dynamic_map(plane[PLANE_NESTED_MAP]);
}

#define TABLE(n)                                                                                                       \
    {                                                                                                                  \
        NULL, PLANE_SHARED, 32, n                                                                                      \
    }
#define PLAIN                                                                                                          \
    {                                                                                                                  \
        [PLANE_DATA] = {".data", PLANE_PER_VALUE, 4}, [PLANE_ABSMAX] = {".absmax", PLANE_PER_BLOCK, 32},               \
        [PLANE_CODE] = TABLE(16)                                                                                       \
    }
#define NESTED                                                                                                         \
    {                                                                                                                  \
        [PLANE_DATA] = {".data", PLANE_PER_VALUE, 4}, [PLANE_SCALE] = {".scale", PLANE_PER_BLOCK, 8},                  \
        [PLANE_NESTED_ABSMAX] = {".nested_absmax", PLANE_PER_256_BLOCKS, 32},                                          \
        [PLANE_NESTED_OFFSET] = {".nested_offset", PLANE_PER_MATRIX, 32}, [PLANE_CODE] = TABLE(16),                    \
        [PLANE_NESTED_MAP] = TABLE(256)                                                                                \
    }
static const struct format nf4_nested = {.name = "nf4-nested",
                                         .bits = 4,
                                         .plane = NESTED,
                                         .value = value,
                                         .tile = tile,
                                         .encode = encode_nested,
                                         .tables = tables};
static const struct format fp4_nested = {
    .name = "fp4-nested", .bits = 4, .plane = NESTED, .value = value, .tile = tile};
const struct format format_nf4 = {.name = "nf4",
                                  .bits = 4,
                                  .plane = PLAIN,
                                  .nested = &nf4_nested,
                                  .value = value,
                                  .tile = tile,
                                  .encode = encode,
                                  .tables = tables};
const struct format format_fp4 = {
    .name = "fp4", .bits = 4, .plane = PLAIN, .nested = &fp4_nested, .value = value, .tile = tile};
