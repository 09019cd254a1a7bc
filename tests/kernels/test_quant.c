/* test_quant.c - MXFP4, NVFP4, NF4 and FP4: published vectors, bitsandbytes' bytes, every byte and every bf16 input.
 * The fast decoders (tiles on the CPU in f32 and f64, bf16 on the GPU) are compared with the definition, element by
 * element. */
#include "tests/packed.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/gemm.h"

/* The decoder compiled for f64. */
void cpu64_weight_tile(const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col, int64_t n_col,
                       double *out, int64_t ldo);

static struct device dev;
static int begin(void **state) { return *state = NULL, op_check_begin(&dev, true), 0; }
static int end(void **state) { return *state = NULL, op_check_end(&dev), 0; }

/* Equal as bits, or both NaN. */
static void assert_same_float(float a, float b, const char *what, int64_t i)
{
    uint32_t x, y;
    memcpy(&x, &a, sizeof(x));
    memcpy(&y, &b, sizeof(y));
    if (x != y && !(isnan(a) && isnan(b))) fail_msg("%s, element %lld: %.9g, not %.9g", what, (long long)i, a, b);
}

static void check_values(const struct weight *w, const float *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++) assert_same_float(quant_value(w, 0, i), want[i], weight_format_name(w->format), i);
}

static void test_mxfp4_vector(void **state)
{
    static const uint8_t bytes[16] = {0xa0, 0xa8, 0xec, 0x4a, 0xad, 0xaf, 0x42, 0xaa}, scale[1] = {0x78};
    static const float units[16] = {0, -1, -0.0f, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1};
    struct weight w = {.format = WF_MXFP4, .n_exp = 1, .n_out = 1, .n_in = 32, .data = bytes, .scale = scale};
    float want[16];
    for (int i = 0; i < 16; i++) want[i] = units[i] * 0x1p-7f;
    check_values(&w, want, 16);
    (void)state;
}

static void test_bnb_vectors(void **state)
{
    static const float x[8] = {1, -1, 0.5f, -0.25f, 0, 0.04f, -0.05f, 2};
    static const struct {
        enum weight_format format;
        const float *code;
        uint8_t bytes[4];
        float values[8];
    } cases[] = {
        {WF_NF4,
         quant_nf4_code,
         {0xc2, 0xa6, 0x77, 0x7f},
         {0.881419659f, -1.0501461f, 0.492224604f, -0.182100073f, 0, 0, 0, 2}},
        {WF_FP4,
         quant_fp4_code,
         {0x5d, 0x7e, 0x01, 0x93},
         {1, -1, 0.5f, -0.333333343f, 0, 0.0104166667f, -0.0104166667f, 2}},
    };
    for (int i = 0; i < 2; i++) {
        uint8_t bytes[4];
        float absmax[1];
        assert_int_equal(quant_bnb_encode(cases[i].format, bytes, absmax, x, 8, 64), 0);
        assert_memory_equal(bytes, cases[i].bytes, 4);
        assert_same_float(absmax[0], 2, "absmax", 0);
        struct weight w = {.format = cases[i].format, .n_exp = 1, .n_out = 1, .n_in = 8, .data = bytes};
        w.absmax = absmax;
        w.code = cases[i].code;
        w.block = 64;
        check_values(&w, cases[i].values, 8);
    }
    (void)state;
}

/* ---- bitsandbytes' own results (fixtures/quant/bnb.txt, made by parity/make_quant_vectors.py) ---- */

static float signal(int64_t i)
{
    uint32_t h = (uint32_t)i * 2654435761u;
    h = (h ^ h >> 15) * 2246822519u;
    return (float)((int64_t)(h >> 14) - (1 << 17)) * (float)(1 + i / 16 % 61) / (1 << 17);
}

/* The next word must be `name`. */
static void want_word(FILE *f, const char *name)
{
    char word[16];
    assert_int_equal(fscanf(f, "%15s", word), 1);
    assert_string_equal(word, name);
}

static uint8_t *read_bytes(FILE *f, const char *name, int64_t n)
{
    uint8_t *out = mem_alloc(n);
    want_word(f, name);
    fgetc(f);
    for (int64_t i = 0; i < n; i++) {
        unsigned byte;
        assert_int_equal(fscanf(f, "%2x", &byte), 1);
        out[i] = (uint8_t)byte;
    }
    return out;
}

static float *read_floats(FILE *f, const char *name, int64_t n)
{
    float *out = mem_array(n, sizeof(*out));
    want_word(f, name);
    for (int64_t i = 0; i < n; i++) {
        unsigned bits;
        assert_int_equal(fscanf(f, "%8x", &bits), 1);
        memcpy(&out[i], &bits, sizeof(*out));
    }
    return out;
}

static void same_floats(const float *a, const float *b, int64_t n, const char *what)
{
    for (int64_t i = 0; i < n; i++) assert_same_float(a[i], b[i], what, i);
}

/* Reads q8, outer and offset of a case, compares them with moetrain's packing of absmax, and sets w's nested fields. */
static void check_nested(FILE *f, struct weight *w, const float *absmax)
{
    int64_t n = weight_blocks(w), n_outer = (n + 255) / 256;
    uint8_t *q8 = read_bytes(f, "q8", n), *our_q8 = mem_alloc(n);
    float *outer = read_floats(f, "outer", n_outer), *our_outer = mem_array(n_outer, sizeof(float));
    float *offset = read_floats(f, "offset", 1), our_offset, *map = mem_array(256, sizeof(*map));
    quant_dynamic_map(map);
    quant_nested_encode(our_q8, our_outer, &our_offset, absmax, n, map);
    for (int64_t i = 0; i < n;
         i++) { /* bitsandbytes' CPU code searches with 16 bits, so its value is not always the nearest */
        double t = (double)((absmax[i] - *offset) / outer[i / 256]);
        double our_error = fabs(t - (double)map[our_q8[i]]), error = fabs(t - (double)map[q8[i]]);
        if (our_q8[i] != q8[i]) assert_true(our_error < error && error < our_error + 1e-4);
    }
    same_floats(our_outer, outer, n_outer, "nested absmax");
    assert_same_float(our_offset, *offset, "nested offset", 0);
    w->scale = q8;
    w->nested_absmax = outer;
    w->nested_offset = offset;
    w->nested_map = map;
    mem_free(our_q8);
    mem_free(our_outer);
}

static void check_bnb_case(FILE *f, const char *kind, int64_t block, int64_t n, bool nested)
{
    struct weight w = {.format = !strcmp(kind, "nf4") ? WF_NF4 : WF_FP4, .n_exp = 1, .n_out = 1, .n_in = n};
    w.block = block;
    w.code = w.format == WF_NF4 ? quant_nf4_code : quant_fp4_code;
    int64_t n_block = weight_blocks(&w);
    uint8_t *packed = read_bytes(f, "packed", n / 2), *ours = mem_alloc(n / 2);
    float *absmax = read_floats(f, "absmax", n_block), *our_absmax = mem_array(n_block, sizeof(float));
    float *x = mem_array(n, sizeof(*x));
    for (int64_t i = 0; i < n; i++) x[i] = signal(i);
    assert_int_equal(quant_bnb_encode(w.format, ours, our_absmax, x, n, block), 0);
    for (int64_t i = 0; i < n;
         i++) { /* the sign of FP4's zero, codes 0 and 8, differs between bitsandbytes' CPU and CUDA code */
        int shift = i & 1 ? 0 : 4, code = ours[i / 2] >> shift & 15, theirs = packed[i / 2] >> shift & 15;
        if (code != theirs) assert_true(w.format == WF_FP4 && (code | theirs) == 8 && (code & theirs) == 0);
    }
    if (nested)
        check_nested(f, &w, our_absmax);
    else
        w.absmax = our_absmax;
    for (int64_t b = 0; b < n_block; b++) assert_same_float(quant_absmax(&w, 0, b), absmax[b], "absmax", b);
    float *decoded = read_floats(f, "decoded", 256);
    w.data = packed;
    check_values(&w, decoded, 256);
    void *owned[] = {packed,
                     ours,
                     absmax,
                     our_absmax,
                     x,
                     decoded,
                     (void *)w.scale,
                     (void *)w.nested_absmax,
                     (void *)w.nested_offset,
                     (void *)w.nested_map};
    for (int i = 0; i < MT_LEN(owned); i++) mem_free(owned[i]);
}

static void test_bitsandbytes(void **state)
{
    FILE *f = fopen(fixture("quant/bnb.txt"), "r");
    assert_non_null(f);
    char kind[8];
    int block, n, nested, n_case = 0;
    for (; fscanf(f, " case %7s %d %d %d", kind, &block, &n, &nested) == 4; n_case++)
        check_bnb_case(f, kind, block, n, nested);
    assert_int_equal(n_case, 5);
    fclose(f);
    (void)state;
}

/* ---- tiles ---- */

/* Compares a tile of expert e, in f32 and f64, with the definition; values beside the tile stay unchanged. */
static void check_tile(const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col, int64_t n_col)
{
    int64_t ld = n_col + 3;
    struct tensor a = make_empty(DT_F32, n_row, ld, -1), b = make_empty(DT_F64, n_row, ld, -1);
    weight_tile(w, e, row, n_row, col, n_col, a.data, ld);
    cpu64_weight_tile(w, e, row, n_row, col, n_col, b.data, ld);
    for (int64_t i = 0; i < n_row; i++) {
        for (int64_t j = 0; j < ld; j++) {
            float want = j < n_col ? quant_value(w, e, (row + i) * w->n_in + col + j) : NAN;
            assert_same_float((float)value_at(a, i * ld + j), want, "f32 tile", i * ld + j);
            double have = value_at(b, i * ld + j);
            if (have != (double)want && !(isnan(have) && isnan(want))) fail_msg("f64 tile: %g, not %g", have, want);
        }
    }
}

static void test_tiles(void **state)
{
    static const struct {
        struct weight_packing packing;
        int64_t n_out, n_in, step;
    } cases[] = {
        {{WF_F32, 0, false}, 7, 10, 2},    {{WF_BF16, 0, false}, 7, 10, 2},   {{WF_F16, 0, false}, 7, 10, 2},
        {{WF_MXFP4, 0, false}, 9, 96, 32}, {{WF_NF4, 64, false}, 13, 40, 2},  {{WF_NF4, 64, true}, 13, 40, 2},
        {{WF_NF4, 32, true}, 131, 70, 2},  {{WF_FP4, 64, false}, 13, 40, 2},  {{WF_FP4, 128, true}, 13, 50, 2},
        {{WF_NF4, 4096, false}, 3, 20, 2}, {{WF_NF4, 64, false}, 4, 128, 64}, {{WF_NVFP4, 0, false}, 9, 96, 16},
        {{WF_NVFP4, 0, true}, 7, 48, 16},  {{WF_FP8, 0, false}, 7, 41, 1},    {{WF_FP8, 128, false}, 5, 300, 1},
    };
    for (int c = 0; c < MT_LEN(cases); c++) {
        int64_t n_out = cases[c].n_out, n_in = cases[c].n_in, step = cases[c].step;
        struct weight w = make_packed(cases[c].packing, 100 + (uint64_t)c, 3, 3, n_out, n_in);
        for (int64_t e = 0; e < 3; e++) {
            check_tile(&w, e, 0, n_out, 0, n_in);
            check_tile(&w, e, 1, 0, 0, n_in);
            for (uint64_t k = 0; k < 8; k++) {
                int64_t row = (int64_t)(rng_u64(k, 0) % (uint64_t)n_out);
                int64_t col = (int64_t)(rng_u64(k, 1) % (uint64_t)(n_in / step)) * step;
                int64_t n_col = (1 + (int64_t)(rng_u64(k, 2) % (uint64_t)((n_in - col) / step))) * step;
                check_tile(&w, e, row, MT_MIN(3, n_out - row), col, n_col);
            }
        }
    }
    (void)state;
}

/* Every byte with every scale: 256 rows, one per scale, that hold all 256 bytes. */
static void test_mxfp4_all(void **state)
{
    uint8_t *bytes = mem_alloc(256 * 256), *scales = mem_alloc(256 * 16);
    for (int s = 0; s < 256; s++) {
        for (int b = 0; b < 256; b++) bytes[256 * s + b] = (uint8_t)b;
        memset(scales + 16 * s, s, 16);
    }
    struct weight w = {.format = WF_MXFP4, .n_exp = 1, .n_out = 256, .n_in = 512, .data = bytes, .scale = scales};
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (int64_t i = 0; i < 256 * 512; i++) {
        int s = (int)(i / 512), byte = (int)(i % 512 / 2), code = i % 2 ? byte >> 4 : byte & 15;
        double v = s == 255 ? NAN : ldexp(magnitude[code & 7], s - 127);
        assert_same_float(quant_value(&w, 0, i), (float)(code & 8 ? -v : v), "mxfp4", i);
    }
    check_tile(&w, 0, 0, 256, 0, 512);
    mem_free(bytes);
    mem_free(scales);
    (void)state;
}

/* Every byte with every scale, under factors and divisors: as ModelOpt and compressed-tensors read them. */
static void test_nvfp4_all(void **state)
{
    enum { N = 512 };
    static const float scale2[] = {1, 0x1.234568p-9f, 0x1.fffffep-20f, 3e-38f};
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    uint8_t *bytes = mem_alloc(256 * N / 2), *scales = mem_alloc(256 * N / 16);
    float rows[256];
    for (int s = 0; s < 256; s++) {
        for (int b = 0; b < N / 2; b++) bytes[N / 2 * s + b] = (uint8_t)b;
        memset(scales + N / 16 * s, s, N / 16);
    }
    for (int k = 0; k < 2 * MT_LEN(scale2); k++) {
        for (int s = 0; s < 256; s++) rows[s] = scale2[k / 2];
        const struct weight w = {.format = WF_NVFP4,
                                 .n_exp = 1,
                                 .n_out = 256,
                                 .n_in = N,
                                 .data = bytes,
                                 .scale = scales,
                                 .scale2 = rows,
                                 .scale2_divides = k % 2};
        for (int64_t i = 0; i < 256 * N; i++) {
            const int s = (int)(i / N), byte = (int)(i % N / 2), code = i % 2 ? byte >> 4 : byte & 15;
            const int exponent = s >> 3 & 15, mantissa = s & 7;
            double e4m3 = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
            if ((s & 127) == 127) e4m3 = NAN;
            if (s & 128) e4m3 = -e4m3;
            const double g = (double)scale2[k / 2];
            const float step = (float)(k % 2 ? e4m3 / g : e4m3 * g);
            const double value = (double)step * magnitude[code & 7];
            assert_same_float(quant_value(&w, 0, i), (float)(code & 8 ? -value : value), "nvfp4", i);
        }
        check_tile(&w, 0, 0, 256, 0, N);
        float *all = mem_array(256 * N, sizeof(*all));
        quant_decode(all, &w, 0, 0, 256 * N, 2);
        for (int64_t i = 0; i < 256 * N; i++) assert_same_float(all[i], quant_value(&w, 0, i), "quant_decode", i);
        mem_free(all);
    }
    mem_free(bytes);
    mem_free(scales);
    (void)state;
}

/* The packed bytes decode to what fake quantisation gives, with one scale per matrix. */
static void test_nvfp4_encode(void **state)
{
    enum { N = 16 * 4096 + 48 };
    struct fakequant f;
    struct err err;
    assert_int_equal(fakequant_parse(&f, "nvfp4", &err), 0);
    float *x = mem_array(N, sizeof(*x)), g, other;
    uint8_t *nibbles[2] = {mem_alloc(N / 2), mem_alloc(N / 2)}, *scales[2] = {mem_alloc(N / 16), mem_alloc(N / 16)};
    for (int64_t i = 0; i < N; i++)
        x[i] = (float)test_value(3, (uint64_t)i) * (i / 16 % 5 ? 1 : 1e-4f) * (i / 16 % 7 > 0);
    x[5] = INFINITY, x[N - 1] = NAN, x[77] = -0.0f;
    assert_int_equal(packed_encode(WF_NVFP4, nibbles[0], scales[0], &g, x, WF_F32, N, 1), 2);
    assert_int_equal(packed_encode(WF_NVFP4, nibbles[1], scales[1], &other, x, WF_F32, N, 3), 2);
    assert_memory_equal(nibbles[0], nibbles[1], N / 2);
    assert_memory_equal(scales[0], scales[1], N / 16);
    assert_memory_equal(&g, &other, sizeof(g));
    x[5] = x[N - 1] = 0;
    float amax = 0, bmax = 0;
    for (int64_t i = 0; i < N; i++) amax = fmaxf(amax, fabsf(x[i]));
    assert_true(g == amax / 2688);
    const struct weight w = {
        .format = WF_NVFP4, .n_exp = 1, .n_out = 1, .n_in = N, .data = nibbles[0], .scale = scales[0], .scale2 = &g};
    for (int64_t i = 0; i < N; i++) {
        if (i % 16 == 0) bmax = 0;
        for (int64_t k = i; i % 16 == 0 && k < i + 16; k++) bmax = fmaxf(bmax, fabsf(x[k]));
        const struct fakequant_scale s = fakequant_scale(&f, fakequant_global(&f, amax), bmax);
        assert_same_float(quant_value(&w, 0, i), fakequant_value(&f, &s, fakequant_round(&f, &s, x[i])), "nvfp4", i);
    }
    memset(x, 0, N * sizeof(*x));
    assert_int_equal(packed_encode(WF_NVFP4, nibbles[0], scales[0], &g, x, WF_F32, N, 1), 0);
    for (int64_t i = 0; i < N; i++) assert_true(quant_value(&w, 0, i) == 0);
    for (int i = 0; i < 2; i++) mem_free(nibbles[i]), mem_free(scales[i]);
    mem_free(x);
    (void)state;
}

/* ---- the GPU's decoder ---- */

#ifdef MT_CUDA
/* kernels/cuda/core/cuda.h: experts first .. first+count-1 as bf16; offs: NULL, or the experts' row offsets. */
void cuda_dequant(uint16_t *out, const struct weight *w, int64_t first, int64_t count, const int32_t *ids,
                  const int32_t *offs);
#endif

struct dequant_case {
    struct weight_packing packing; /* WF_NONE: all bytes of MXFP4; with block 4 all bytes of NVFP4, 8 of FP8; with 16 or
                                      32 random bits of F16 or F32 */
    int64_t n_exp, n_out, n_in, first, count;
    bool skips; /* every third expert has no rows */
};

/* A weight with all values: every byte under every scale, or random bits as floats. */
static struct weight make_bits(const struct dequant_case *c)
{
    const int64_t n = c->n_exp * c->n_out * c->n_in;
    struct weight w = {.n_exp = c->n_exp, .n_out = c->n_out, .n_in = c->n_in};
    const int64_t bits = c->packing.block;
    w.format = bits == 32 ? WF_F32 : bits == 16 ? WF_F16 : bits == 8 ? WF_FP8 : bits == 4 ? WF_NVFP4 : WF_MXFP4;
    if (w.format == WF_FP8) w.block = c->n_in;
    const int64_t block = weight_scale_block(w.format), n_scale = block ? n / block : 0;
    uint8_t *data = make_empty(DT_U8, 4 * n, -1, -1).data, *scale = make_empty(DT_U8, n_scale + 1, -1, -1).data;
    struct tensor scale2 = make_empty(DT_F32, c->n_exp * c->n_out, -1, -1);
    for (int64_t i = 0; i < 4 * n; i++) data[i] = block ? (uint8_t)i : (uint8_t)rng_u64(7, (uint64_t)i);
    for (int64_t i = 0; i < n_scale; i++) scale[i] = (uint8_t)(i * block / c->n_in);
    for (int64_t i = 0; i < c->n_exp * c->n_out; i++) set_value(scale2, i, test_value(8, (uint64_t)i));
    w.data = data;
    w.scale = block ? scale : NULL;
    w.scale2 = w.format == WF_NVFP4 || w.format == WF_FP8 ? scale2.data : NULL;
    w.scale2_divides = c->packing.nested;
    return w;
}

/* All NaNs are equal, except 0xffff, the fill value of unwritten elements. */
static int32_t same_nan(uint16_t bits) { return bits != 0xffff && (bits & 0x7fff) > 0x7f80 ? 0x7fc0 : bits; }

/* The bf16 bits of all values, decoded by the GPU or by the definition. */
static void dequant_run(struct device *d, const void *params, struct op_outputs *o)
{
    const struct dequant_case *c = params;
    struct weight w = c->packing.format ? make_packed(c->packing, 5, 3, c->n_exp, c->n_out, c->n_in) : make_bits(c);
    const int64_t n = c->n_out * c->n_in;
    struct tensor offs = make_zero(DT_I32, c->n_exp + 1, -1, -1), bits = make_empty(DT_I32, c->count * n, -1, -1);
    struct tensor out = make_empty(DT_BF16, c->count * n, -1, -1);
    for (int64_t e = 0; e < c->n_exp; e++) set_value(offs, e + 1, value_at(offs, e) + (c->skips && e % 3 == 1 ? 0 : 2));
    o->out[o->n++] = bits;
#ifdef MT_CUDA
    if (d->act_dtype == DT_BF16) {
        if (d->dry_run) return;
        cuda_dequant(out.data, &w, c->first, c->count, NULL, c->skips ? offs.data : NULL);
        d->ops->wait();
    }
#endif
    for (int64_t i = 0; i < c->count * n; i++) {
        const int64_t e = c->first + i / n;
        uint16_t *h = (uint16_t *)out.data + i;
        const float v = quant_value(&w, e, i % n);
        const bool written = !c->skips || e % 3 != 1;
        if (d->act_dtype != DT_BF16 && written) *h = isnan(v) ? 0x7fc0 : f32_to_bf16(v);
        set_value(bits, i, same_nan(*h));
    }
}

static void test_dequant_on_the_gpu(void **state)
{
    static const struct dequant_case cases[] = {
        {{WF_NONE, 0, false}, 1, 256, 512, 0, 1, false},   {{WF_NONE, 16, false}, 1, 64, 1024, 0, 1, false},
        {{WF_NONE, 32, false}, 1, 64, 1024, 0, 1, false},  {{WF_NONE, 32, false}, 2, 7, 11, 0, 2, false},
        {{WF_F32, 0, false}, 4, 40, 24, 1, 3, true},       {{WF_F16, 0, false}, 4, 40, 24, 0, 4, true},
        {{WF_F16, 0, false}, 3, 7, 11, 0, 3, true},        {{WF_BF16, 0, false}, 4, 40, 24, 1, 2, true},
        {{WF_BF16, 0, false}, 3, 5, 9, 1, 2, false},       {{WF_MXFP4, 0, false}, 5, 90, 96, 0, 5, true},
        {{WF_MXFP4, 0, false}, 5, 3, 32, 2, 3, false},     {{WF_NF4, 64, false}, 4, 72, 200, 0, 4, true},
        {{WF_NF4, 64, true}, 4, 144, 200, 1, 3, true},     {{WF_FP4, 64, false}, 4, 72, 200, 3, 1, false},
        {{WF_FP4, 128, true}, 2, 72, 200, 0, 2, false},    {{WF_NF4, 4096, true}, 2, 72, 200, 0, 2, false},
        {{WF_NF4, 64, false}, 3, 13, 10, 0, 3, true},      {{WF_NF4, 32, true}, 3, 131, 70, 0, 3, false},
        {{WF_FP4, 64, true}, 3, 13, 50, 1, 2, true},       {{WF_NF4, 36, false}, 2, 16, 24, 0, 2, false},
        {{WF_NF4, 64, false}, 1, 2880, 640, 0, 1, false},  {{WF_NF4, 64, true}, 3, 16, 8, 0, 0, false},
        {{WF_NONE, 4, false}, 1, 256, 512, 0, 1, false},   {{WF_NONE, 4, true}, 1, 256, 512, 0, 1, false},
        {{WF_NVFP4, 0, false}, 5, 90, 96, 0, 5, true},     {{WF_NVFP4, 0, true}, 5, 90, 48, 1, 3, true},
        {{WF_NVFP4, 0, false}, 1, 2880, 640, 0, 1, false}, {{WF_NVFP4, 0, true}, 3, 3, 16, 2, 1, false},
        {{WF_NONE, 8, false}, 1, 256, 512, 0, 1, false},   {{WF_FP8, 0, false}, 5, 90, 48, 0, 5, true},
        {{WF_FP8, 128, false}, 3, 20, 264, 1, 2, false},   {{WF_FP8, 128, false}, 2, 7, 131, 0, 2, true},
        {{WF_FP8, 128, false}, 1, 2880, 640, 0, 1, false}, {{WF_FP8, 0, false}, 3, 7, 11, 0, 3, false},
    };
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(dequant_run, &cases[i]);
    (void)state;
}

/* ---- op_decode ---- */

/* With c->skips, every third expert has no rows, and its matrix stays 0. */
static struct weight decode_into(struct tensor *out, struct device *d, const struct dequant_case *c)
{
    struct weight w = make_packed(c->packing, 5, 3, c->n_exp, c->n_out, c->n_in);
    struct tensor offs = {0};
    if (c->skips) {
        offs = make_zero(DT_I32, c->n_exp + 1, -1, -1);
        for (int64_t e = 0; e < c->n_exp; e++) set_value(offs, e + 1, value_at(offs, e) + (e % 3 == 1 ? 0 : 2));
    }
    *out = make_zero(d->act_dtype == DT_BF16 ? DT_BF16 : DT_F32, c->n_exp, c->n_out, c->n_in);
    op_decode(d, *out, &(struct proj){.w = w}, offs);
    return w;
}

static void decode_run(struct device *d, const void *params, struct op_outputs *o)
{
    decode_into(&o->out[o->n++], d, params);
}

static const struct dequant_case decodes[] = {
    {{WF_F32, 0, false}, 4, 40, 24, 0, 4, true},    {{WF_F16, 0, false}, 3, 7, 11, 0, 3, false},
    {{WF_BF16, 0, false}, 3, 5, 9, 0, 3, true},     {{WF_MXFP4, 0, false}, 5, 90, 96, 0, 5, true},
    {{WF_MXFP4, 0, false}, 1, 3, 32, 0, 1, false},  {{WF_NF4, 64, false}, 4, 72, 200, 0, 4, true},
    {{WF_NF4, 64, true}, 4, 144, 200, 0, 4, false}, {{WF_FP4, 128, true}, 2, 72, 200, 0, 2, true},
    {{WF_NF4, 64, true}, 3, 13, 10, 0, 3, true},    {{WF_NVFP4, 0, false}, 5, 90, 48, 0, 5, true},
    {{WF_NVFP4, 0, true}, 4, 7, 96, 0, 4, false},   {{WF_FP8, 0, false}, 5, 90, 48, 0, 5, true},
    {{WF_FP8, 128, false}, 4, 7, 300, 0, 4, false},
};

static void test_decode(void **state)
{
    for (int i = 0; i < MT_LEN(decodes); i++) {
        const struct dequant_case *c = &decodes[i];
        struct device d;
        struct tensor out;
        op_check_begin(&d, false);
        const struct weight w = decode_into(&out, &d, c);
        for (int64_t k = 0; k < tensor_count(out); k++) {
            const int64_t n = c->n_out * c->n_in, e = k / n;
            const float want = c->skips && e % 3 == 1 ? 0 : quant_value(&w, e, k % n), have = ((float *)out.data)[k];
            assert_memory_equal(&have, &want, sizeof(have));
        }
        op_check_end(&d);
        op_check_case(decode_run, c, 1e-6);
    }
    (void)state;
}

static void test_decode_on_the_gpu(void **state)
{
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(decodes); i++) op_check_cuda(decode_run, &decodes[i]);
    (void)state;
}

/* ---- encoders ---- */

static uint8_t code_of(enum weight_format f, float v, float absmax)
{
    float pair[2] = {absmax, v}, largest;
    uint8_t byte;
    assert_int_equal(quant_bnb_encode(f, &byte, &largest, pair, 2, 64), !isfinite(v));
    return byte & 15;
}

/* All bf16 values up to absmax: the code is the nearest one, except for values within an ulp of the middle of two
 * codes. */
static void test_bnb_all_inputs(void **state)
{
    static const float absmax[] = {1, 0.0123f, 6.5f, 3.0e38f, 1.0e-30f};
    for (int a = 0; a < MT_LEN(absmax); a++) {
        for (int f = WF_NF4; f <= WF_FP4; f++) {
            const float *table = f == WF_NF4 ? quant_nf4_code : quant_fp4_code;
            for (int32_t h = 0; h < 65536; h++) {
                float v = bf16_to_f32((uint16_t)h);
                if (fabsf(v) > absmax[a]) continue;
                uint8_t code = code_of((enum weight_format)f, v, absmax[a]);
                double x = isfinite(v) ? (double)v / (double)absmax[a] : 0, best = 2;
                for (int k = 0; k < 16; k++) best = fmin(best, fabs(x - (double)table[k]));
                if (fabs(x - (double)table[code]) > best + 2e-6)
                    fail_msg("%g of %g becomes code %d", v, absmax[a], code);
            }
        }
    }
    (void)state;
}

static void test_bnb_thresholds(void **state)
{
    static const float nf4[15] = {
        -0.8480964004993439f,  -0.6106329262256622f,  -0.4599952697753906f,   -0.33967943489551544f,
        -0.23460740596055984f, -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f,
        0.1202552504837513f,   0.2035212516784668f,   0.2920137718319893f,    0.3893125355243683f,
        0.5016634166240692f,   0.6427869200706482f,   0.8614784181118011f,
    };
    static const float fp4[7] = {0.00260417f, 0.0859375f, 0.20833333f, 0.29166667f, 0.4166667f, 0.583333f, 0.8333333f};
    static const uint8_t fp4_codes[8] = {0, 1, 6, 7, 4, 5, 2, 3};
    for (int k = 0; k < 15; k++) {
        assert_int_equal(code_of(WF_NF4, nf4[k], 1), k); /* a tie rounds down */
        assert_int_equal(code_of(WF_NF4, nextafterf(nf4[k], -2), 1), k);
        assert_int_equal(code_of(WF_NF4, nextafterf(nf4[k], 2), 1), k + 1);
    }
    for (int k = 0; k < 7; k++) {
        assert_int_equal(code_of(WF_FP4, fp4[k], 1), fp4_codes[k]);
        assert_int_equal(code_of(WF_FP4, nextafterf(fp4[k], 0), 1), fp4_codes[k]);
        assert_int_equal(code_of(WF_FP4, nextafterf(fp4[k], 2), 1), fp4_codes[k + 1]);
        assert_int_equal(code_of(WF_FP4, -fp4[k], 1), k ? fp4_codes[k] | 8 : 8);
        assert_int_equal(code_of(WF_FP4, nextafterf(-fp4[k], -2), 1), fp4_codes[k + 1] | 8);
    }
    (void)state;
}

/* A block whose largest value fixes the scale, and every bf16 value below it: nearest code, ties to the even one. */
static void test_mxfp4_all_inputs(void **state)
{
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    static const float largest[] = {6, 4, 7.5f, 1.0e-3f, 3.0e38f, 1.0e-38f, FLT_TRUE_MIN};
    for (int a = 0; a < MT_LEN(largest); a++) {
        int exponent = MT_MAX((int)floor(log2((double)largest[a])) - 2, -127);
        for (int32_t h = 0; h < 65536; h++) {
            float v = bf16_to_f32((uint16_t)h), x[32] = {largest[a], v};
            if (fabsf(v) > largest[a]) continue;
            uint8_t bytes[16], scale;
            assert_int_equal(quant_mxfp4_encode(bytes, &scale, x, 32), !isfinite(v));
            assert_int_equal(scale, exponent + 127);
            double step = isfinite(v) ? ldexp(fabs((double)v), -exponent) : 0;
            int best = 0;
            for (int k = 1; k < 8; k++) {
                double here = fabs(step - magnitude[k]), before = fabs(step - magnitude[best]);
                if (here < before || (here == before && k % 2 == 0)) best = k;
            }
            assert_int_equal(bytes[0] >> 4, isfinite(v) && signbit(v) ? best | 8 : best);
        }
    }
    (void)state;
}

static void test_not_finite(void **state)
{
    float x[64], absmax[1], bad[4] = {NAN, INFINITY, -INFINITY, 1};
    uint8_t bytes[32], scales[2];
    for (int i = 0; i < 64; i++) x[i] = bad[i % 4];
    assert_int_equal(quant_mxfp4_encode(bytes, scales, x, 64), 48);
    assert_int_equal(quant_bnb_encode(WF_NF4, bytes, absmax, x, 64, 64), 48);
    assert_same_float(absmax[0], 1, "absmax", 0);
    assert_int_equal(bytes[0], 0x77);
    assert_int_equal(bytes[1], 0x7f);
    (void)state;
}

static void test_zero_blocks(void **state)
{
    float x[64] = {0}, absmax[2];
    uint8_t bytes[32], scales[2];
    assert_int_equal(quant_mxfp4_encode(bytes, scales, x, 64), 0);
    struct weight w = {.format = WF_MXFP4, .n_exp = 1, .n_out = 1, .n_in = 64, .data = bytes, .scale = scales};
    check_values(&w, x, 64);
    for (int f = WF_NF4; f <= WF_FP4; f++) {
        assert_int_equal(quant_bnb_encode((enum weight_format)f, bytes, absmax, x, 64, 32), 0);
        w = (struct weight){.format = (enum weight_format)f, .n_exp = 1, .n_out = 1, .n_in = 64, .data = bytes};
        w.code = f == WF_NF4 ? quant_nf4_code : quant_fp4_code;
        w.absmax = absmax;
        w.block = 32;
        check_values(&w, x, 64); /* +0, as bits */
    }
    (void)state;
}

/* Encoding decoded values gives the same values, though not always the same bytes. */
static void test_idempotent(void **state)
{
    static const struct weight_packing packings[] = {{WF_MXFP4, 0, false}, {WF_NF4, 64, false}, {WF_FP4, 64, false}};
    for (int p = 0; p < 3; p++) {
        struct weight w = make_packed(packings[p], 7, 2, 1, 64, 128), again = w;
        struct weight x = make_unpacked(&w);
        uint8_t bytes[64 * 128 / 2], scales[64 * 128 / 32];
        float absmax[64 * 128 / 64];
        again.data = bytes;
        if (w.format == WF_MXFP4) {
            assert_int_equal(quant_mxfp4_encode(bytes, scales, x.data, 64 * 128), 0);
            again.scale = scales;
        } else {
            assert_int_equal(quant_bnb_encode(w.format, bytes, absmax, x.data, 64 * 128, 64), 0);
            again.absmax = absmax;
        }
        for (int64_t i = 0; i < 64 * 128; i++) {
            float a = quant_value(&again, 0, i), b = ((const float *)x.data)[i];
            if (a < b || a > b)
                fail_msg("%s, element %lld: %g, was %g", weight_format_name(w.format), (long long)i, a, b);
        }
    }
    (void)state;
}

/* A nested absmax is within half a quantization step for any block; a constant absmax is exact. */
static void test_nested_round_trip(void **state)
{
    enum { N = 700 };
    float absmax[N], outer[3], offset, map[256];
    uint8_t q8[N];
    quant_dynamic_map(map);
    struct weight w = {.format = WF_NF4, .n_exp = 1, .n_out = N, .n_in = 64, .scale = q8, .block = 64};
    w.nested_absmax = outer;
    w.nested_offset = &offset;
    w.nested_map = map;
    for (int i = 0; i < N; i++) absmax[i] = 0.02f + (float)fabs(test_value(3, (uint64_t)i));
    quant_nested_encode(q8, outer, &offset, absmax, N, map);
    for (int i = 0; i < N; i++) {
        double t = ((double)absmax[i] - (double)offset) / (double)outer[i / 256], best = 2;
        for (int k = 0; k < 256; k++) best = MT_MIN(best, fabs(t - (double)map[k]));
        double error = fabs((double)quant_absmax(&w, 0, i) - (double)absmax[i]);
        assert_true(error <= (best + 1e-6) * (double)outer[i / 256]);
    }
    for (int i = 0; i < N; i++) absmax[i] = 0.375f;
    quant_nested_encode(q8, outer, &offset, absmax, N, map);
    for (int i = 0; i < N; i++) assert_same_float(quant_absmax(&w, 0, i), 0.375f, "constant absmax", i);
    (void)state;
}

/* Encoding in several threads, from every dense format, gives the same bytes as one call, also for sizes that end
 * inside a thread's part. */
static void test_encode(void **state)
{
    enum { N = 64 * 64 * 20 + 64 * 3 };
    static const enum weight_format dense[] = {WF_F32, WF_BF16, WF_F16};
    float *x = mem_array(N, sizeof(*x)), *absmax[2] = {mem_array(N / 64, 4), mem_array(N / 64, 4)};
    uint16_t *half = mem_array(N, sizeof(*half));
    uint8_t *nibbles[2] = {mem_alloc(N / 2), mem_alloc(N / 2)}, *scales[2] = {mem_alloc(N / 32), mem_alloc(N / 32)};
    for (int d = 0; d < 3; d++)
        for (int threads = 1; threads <= 3; threads++) {
            for (int64_t i = 0; i < N; i++) {
                half[i] = (uint16_t)(rng_u64(5, (uint64_t)i) & 0xbbff); /* finite in both */
                x[i] = dense[d] == WF_F16 ? f16_to_f32(half[i]) : bf16_to_f32(half[i]);
            }
            half[N - 1] = dense[d] == WF_F16 ? 0x7c00 : 0x7f80;
            x[N - 1] = INFINITY;
            const void *in = dense[d] == WF_F32 ? (const void *)x : half;
            assert_int_equal(quant_bnb_encode(WF_NF4, nibbles[0], absmax[0], x, N, 64), 1);
            assert_int_equal(packed_encode(WF_NF4, nibbles[1], NULL, absmax[1], in, dense[d], N, threads), 1);
            assert_memory_equal(nibbles[0], nibbles[1], N / 2);
            assert_memory_equal(absmax[0], absmax[1], N / 64 * 4);
            assert_int_equal(quant_mxfp4_encode(nibbles[0], scales[0], x, N), 1);
            assert_int_equal(packed_encode(WF_MXFP4, nibbles[1], scales[1], NULL, in, dense[d], N, threads), 1);
            assert_memory_equal(nibbles[0], nibbles[1], N / 2);
            assert_memory_equal(scales[0], scales[1], N / 32);
        }
    for (int i = 0; i < 2; i++) mem_free(absmax[i]), mem_free(nibbles[i]), mem_free(scales[i]);
    mem_free(half);
    mem_free(x);
    (void)state;
}

int test_quant(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mxfp4_vector),
        cmocka_unit_test(test_bnb_vectors),
        cmocka_unit_test(test_bitsandbytes),
        cmocka_unit_test_setup_teardown(test_tiles, begin, end),
        cmocka_unit_test_setup_teardown(test_mxfp4_all, begin, end),
        cmocka_unit_test_setup_teardown(test_nvfp4_all, begin, end),
        cmocka_unit_test(test_nvfp4_encode),
        cmocka_unit_test(test_dequant_on_the_gpu),
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_decode_on_the_gpu),
        cmocka_unit_test(test_bnb_all_inputs),
        cmocka_unit_test(test_bnb_thresholds),
        cmocka_unit_test(test_mxfp4_all_inputs),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_zero_blocks),
        cmocka_unit_test_setup_teardown(test_idempotent, begin, end),
        cmocka_unit_test(test_nested_round_trip),
        cmocka_unit_test(test_encode),
    };
    return cmocka_run_group_tests_name("quant", tests, NULL, NULL);
}
