/* test_fakequant.c - the quantised formats against an oracle that rounds in another way: products and quotients in f64
 * and then once to f32, codes by search in the table of all values. Every bf16 and f16 value, midpoints and their
 * neighbours in f32, in every format and with every kind of amax, give equal bits. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/format/fakequant.h"
#include "tests/op_check.h"

/* ---- the oracle */

struct form {
    const char *name;
    char kind;    /* i, f, n, m */
    char variant; /* r: reciprocal, s: stored, k: kernel, c: ceil, n: narrow */
    int block;
    int top; /* largest integer code */
};
static const struct form forms[] = {
    {"int8", 'i', 0, 0, 127},
    {"int8-narrow", 'i', 'n', 0, 127},
    {"int8-32", 'i', 0, 32, 127},
    {"int8-128", 'i', 0, 128, 127},
    {"int4", 'i', 0, 0, 7},
    {"int4-narrow", 'i', 'n', 0, 7},
    {"int4-32", 'i', 0, 32, 7},
    {"int4-128", 'i', 0, 128, 7},
    {"int4-32-narrow", 'i', 'n', 32, 7},
    {"fp8", 'f', 0, 0, 0},
    {"fp8-recip", 'f', 'r', 0, 0},
    {"fp8-stored", 'f', 's', 0, 0},
    {"nvfp4", 'n', 0, 16, 0},
    {"nvfp4-fake", 'n', 'k', 16, 0},
    {"mxfp4", 'm', 0, 32, 0},
    {"mxfp4-ceil", 'm', 'c', 32, 0},
};

static double e2m1_table[8], e4m3_table[127];

static void make_tables(void)
{
    for (int i = 0; i < 8; i++) e2m1_table[i] = i < 2 ? i * 0.5 : ldexp(1 + i % 2 * 0.5, i / 2 - 1);
    for (int i = 0; i < 127; i++) e4m3_table[i] = i < 8 ? ldexp(i, -9) : ldexp(1 + i % 8 * 0.125, i / 8 - 7);
}

static double fl(double v) { return (double)(float)v; }

/* The index of the nearest entry of an ascending table; of two equally near ones the even index. */
static int nearest(const double *table, int n, double v)
{
    int low = 0, high = n - 1;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        *(table[middle] <= v ? &low : &high) = middle;
    }
    const double below = v - table[low], above = table[high] - v;
    if (below != above) return below < above ? low : high;
    return low % 2 ? high : low;
}

static double nearest_integer(double v)
{
    const double low = floor(v), part = v - low;
    if (part < 0.5) return low;
    return part > 0.5 || fmod(low, 2) != 0 ? low + 1 : low;
}

/* Expected values of one block or, in formats with one scale per expert, of one element. */
struct expected {
    double y[128];
    int code[128];
    int byte;           /* of the block's scale */
    double factor, top; /* scale of the block's codes; scale of the expert */
};

static void oracle_int(struct expected *o, const struct form *f, double amax, const double *x, int n)
{
    const double s = amax > ldexp(1, -24) ? fl(f->top / amax) : 0, least = f->variant == 'n' ? -f->top : -f->top - 1;
    o->factor = s > 0 ? fl(1 / s) : 1;
    for (int i = 0; i < n; i++) {
        const double q = s > 0 ? fmax(fmin(nearest_integer(fl(x[i] * s)), f->top), least) : 0;
        o->code[i] = (int)q & (f->top == 7 ? 15 : 255);
        o->y[i] = s > 0 ? fl(q / s) + 0.0 : 0;
    }
}

static void oracle_fp8(struct expected *o, const struct form *f, double amax, const double *x, int n)
{
    const double a = amax > ldexp(1, -24) ? amax : 1, stored = fl(amax / 448);
    double s = f->variant == 'r' ? fl(448 * fl(1 / a)) : fl(448 / a);
    o->factor = f->variant == 's' ? (stored > 0 ? stored : 1) : fl(1 / s);
    for (int i = 0; i < n; i++) {
        const double v = f->variant == 's' ? fl(x[i] / o->factor) : fl(x[i] * s);
        const int code = nearest(e4m3_table, 127, fmin(fabs(v), 448));
        o->code[i] = code | (signbit(x[i]) ? 128 : 0);
        o->y[i] = copysign(fl(e4m3_table[code] * o->factor), x[i]);
    }
}

static void oracle_nvfp4(struct expected *o, const struct form *f, double amax, double bmax, const double *x)
{
    double g = fl(amax / 2688), r;
    if (f->variant == 'k' && g <= 0) g = (double)1e-12f;
    r = g > 0 ? fl(bmax / fl(6 * g)) : 0;
    if (f->variant != 'k') r = r > 0 ? fmax(r, ldexp(1, -9)) : 1;
    o->byte = nearest(e4m3_table, 127, fmin(r, 448));
    double t = fl(e4m3_table[o->byte] * g);
    if (f->variant == 'k' && t < (double)1e-5f) t = 1;
    o->top = g;
    for (int i = 0; i < 16; i++) {
        const double v = x[i] != 0 ? fabs(fl(x[i] / t)) : 0;
        const int code = nearest(e2m1_table, 8, fmin(v, 6));
        o->code[i] = code | (signbit(x[i]) ? 8 : 0);
        o->y[i] = copysign(fl(e2m1_table[code] * t), x[i]);
    }
}

static void oracle_mxfp4(struct expected *o, const struct form *f, double bmax, const double *x)
{
    int e = -127;
    if (f->variant == 'c')
        while (ldexp(1, e) < fl(bmax / 6)) e++;
    else
        while (bmax > 0 && ldexp(1, e + 3) <= bmax) e++;
    o->byte = e + 127;
    for (int i = 0; i < 32; i++) {
        const int code = nearest(e2m1_table, 8, fmin(fabs(ldexp(x[i], -e)), 6));
        o->code[i] = code | (signbit(x[i]) ? 8 : 0);
        o->y[i] = copysign(ldexp(e2m1_table[code], e), x[i]);
    }
}

static void oracle(struct expected *o, const struct form *f, double amax, const double *x, int n)
{
    double bmax = 0;
    for (int i = 0; i < n; i++) bmax = fmax(bmax, fabs(x[i]));
    switch (f->kind) {
    case 'i': oracle_int(o, f, f->block ? bmax : amax, x, n); break;
    case 'f': oracle_fp8(o, f, amax, x, n); break;
    case 'n': oracle_nvfp4(o, f, amax, bmax, x); break;
    default: oracle_mxfp4(o, f, bmax, x);
    }
}

/* The bits of v in a 16- or 32-bit float: of the two neighbours the nearer one, on a tie the even one. */
static uint32_t narrowed(double v, enum dtype t)
{
    const float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    if (t == DT_F32) return bits;
    if (isinf(f)) return (t == DT_BF16 ? 0x7f80u : 0x7c00u) | (signbit(f) ? 0x8000u : 0);
    uint16_t low = t == DT_BF16 ? (uint16_t)(bits >> 16) : 0;
    if (t == DT_F16) {
        int top = 0x7bff; /* the largest magnitude not above |v| */
        while (low < top) {
            const int middle = (low + top + 1) / 2;
            if ((double)f16_to_f32((uint16_t)middle) <= fabs(v))
                low = (uint16_t)middle;
            else
                top = middle - 1;
        }
        low |= signbit(v) ? 0x8000 : 0;
    }
    const uint16_t high = (uint16_t)(low + 1);
    double a = t == DT_BF16 ? bf16_to_f32(low) : f16_to_f32(low),
           b = t == DT_BF16 ? bf16_to_f32(high) : f16_to_f32(high);
    if (isinf(b)) b = copysign(t == DT_BF16 ? ldexp(1, 128) : 65536, a);
    const double below = fabs((double)f - a), above = fabs(b - (double)f);
    if (below != above) return below < above ? low : high;
    return low & 1 ? high : low;
}

/* ---- values to quantise */

enum { N_EXP = 2, N_ROW = 8, N_IN = 8192, N = N_ROW * N_IN }; /* N: all patterns of 16 bits */

/* In f32: values round the midpoints of the codes for amax, else random magnitudes of 2^-20 .. 2^20. */
static float hard_value(int i, float amax)
{
    const float unit = amax > 0 ? amax : 1;
    const double base[] = {unit / 448, unit / 127, unit / 7, unit / 6, unit / 2688, 1, 0.25, 0x1p-126};
    if (i % 4 == 3) return (float)(test_value(5, (uint64_t)i) * exp2(40 * test_value(6, (uint64_t)i) - 20));
    const int code = i / 32 % 126;
    const double middle = i / 4 % 2 ? (e4m3_table[code] + e4m3_table[code + 1]) / 2 : code + 0.5;
    const float v = (float)fmin(middle * base[i / 8 % MT_LEN(base)], FLT_MAX);
    return copysignf(i % 4 == 0 ? v : nextafterf(v, i % 4 == 1 ? 0 : FLT_MAX), i / 4096 % 2 ? -1.0f : 1.0f);
}

/* Expert 0: patterns in order, so that those of a block have one exponent. Expert 1: mixed. */
static void fill(struct tensor x, float amax)
{
    for (int e = 0; e < N_EXP; e++)
        for (int i = 0; i < N; i++) {
            const uint16_t p = (uint16_t)(e ? (unsigned)i * 40503u + 7u : (unsigned)i);
            if (x.dtype == DT_F32)
                ((float *)x.data)[e * N + i] = hard_value(e ? p : i, amax);
            else
                ((uint16_t *)x.data)[e * N + i] =
                    isfinite(x.dtype == DT_BF16 ? bf16_to_f32(p) : f16_to_f32(p)) ? p : 0x8000;
        }
}

static const enum dtype types[] = {DT_BF16, DT_F16, DT_F32};
/* amax of 0; around the limit below which amax counts as 0; with ties (a scale of 1 or a power of two); with clipping;
 * of the data; the largest. */
static const float amaxes[] = {0,   0x1p-25f, 0x1p-24f, 0x1.000002p-24f, 1e-40f, 1e-3f,       1,      7, 63.5,
                               127, 448,      2688,     65504,           1e30f,  0x1.fep127f, FLT_MAX};

struct packed_form {
    struct tensor codes, scales, top;
};

static struct packed_form make_packed(const struct fakequant *f, int64_t n_exp, int64_t n_row, int64_t n_in)
{
    struct packed_form p = {.codes = make_empty(DT_U8, n_exp, n_row, n_in * f->bits / 8)};
    if (f->block) p.scales = make_empty(f->kind == FQ_INT ? DT_F32 : DT_U8, n_exp, n_row, n_in / f->block);
    if (fakequant_reads_amax(f)) p.top = make_empty(DT_F32, n_exp, -1, -1);
    return p;
}

static struct fakequant parsed(const char *name)
{
    struct fakequant f;
    struct err err;
    if (fakequant_parse(&f, name, &err)) fail_msg("%s", err.msg);
    return f;
}

/* Element i of expert e. */
struct place {
    const char *name;
    float amax;
    enum dtype dtype;
    int e, i;
};

static void expect(const struct place *p, const char *what, double got, double want, uint32_t got_bits, uint32_t bits)
{
    if (got_bits != bits)
        fail_msg("%s, amax %g, %s, expert %d, element %d: %s %.9g (%08x), must be %.9g (%08x)", p->name,
                 (double)p->amax, dtype_name(p->dtype), p->e, p->i, what, got, got_bits, want, bits);
}

static uint32_t bits_at(struct tensor x, int64_t i)
{
    uint32_t bits;
    if (x.dtype != DT_F32) return ((const uint16_t *)x.data)[i];
    memcpy(&bits, (const float *)x.data + i, sizeof(bits));
    return bits;
}

static void expect_f32(const struct place *p, const char *what, struct tensor x, int64_t i, double want)
{
    expect(p, what, value_at(x, i), want, bits_at(x, i), narrowed(want, DT_F32));
}

static void check_block(const struct form *f, struct place p, const double *x, int n, struct tensor y,
                        const struct packed_form *k)
{
    static struct expected o;
    const int64_t at = (int64_t)p.e * N + p.i;
    const uint8_t *codes = k->codes.data;
    oracle(&o, f, (double)p.amax, x, n);
    if (f->block && f->kind == 'i') expect_f32(&p, "factor", k->scales, at / n, o.factor);
    if (f->block && f->kind != 'i') {
        const uint32_t byte = ((const uint8_t *)k->scales.data)[at / n];
        expect(&p, "scale", byte, o.byte, byte, (uint32_t)o.byte);
    }
    if (k->top.ndim) expect_f32(&p, "factor of the expert", k->top, p.e, f->kind == 'n' ? o.top : o.factor);
    const bool four = k->codes.shape[2] < N_IN;
    for (int i = 0; i < n; i++, p.i++) {
        const int code = !four ? codes[at + i] : (at + i) % 2 ? codes[(at + i) / 2] >> 4 : codes[(at + i) / 2] & 15;
        expect(&p, "value", value_at(y, at + i), o.y[i], bits_at(y, at + i), narrowed(o.y[i], y.dtype));
        expect(&p, "code", code, o.code[i], (uint32_t)code, (uint32_t)o.code[i]);
    }
}

/* Expert e has the amax amax[e]. */
static void check_form(struct device *dev, const struct form *f, enum dtype t, const float amax[N_EXP])
{
    const struct fakequant q = parsed(f->name);
    const struct tensor x = make_empty(t, N_EXP, N_ROW, N_IN), y = make_empty(t, N_EXP, N_ROW, N_IN);
    const struct packed_form k = make_packed(&q, N_EXP, N_ROW, N_IN);
    struct tensor given = make_empty(DT_F32, N_EXP, -1, -1);
    double v[128];
    fill(x, amax[0]);
    memcpy(given.data, amax, N_EXP * sizeof(*amax));
    if (!fakequant_reads_amax(&q)) given = (struct tensor){0};
    op_fake_quant(dev, y, x, given, &q);
    op_quant_pack(dev, k.codes, k.scales, k.top, x, given, &q);
    const int n = f->block ? f->block : 1;
    for (int e = 0; e < N_EXP; e++)
        for (int i = 0; i < N; i += n) {
            for (int j = 0; j < n; j++) v[j] = value_at(x, (int64_t)e * N + i + j);
            check_block(f, (struct place){f->name, amax[e], t, e, i}, v, n, y, &k);
        }
}

static void test_every_pattern(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(forms); i++) {
        const struct fakequant q = parsed(forms[i].name);
        for (int a = 0; a < MT_LEN(amaxes) && (a == 0 || fakequant_reads_amax(&q)); a += N_EXP)
            for (int t = 0; t < MT_LEN(types) && (t == 0 || a % 8 == 0); t++) {
                struct device dev;
                op_check_begin(&dev, false);
                check_form(&dev, &forms[i], types[t], amaxes + a);
                op_check_end(&dev);
            }
    }
}

/* ---- the device's division, largest magnitudes, grouping, gradient */

/* fl_by on a GPU: dividends up to 512 times the divisor, mantissas of all kinds. */
static void test_division(void **state)
{
    (void)state;
    static const uint32_t edges[] = {0, 1, 2, 0x3fffff, 0x400000, 0x400001, 0x7ffffe, 0x7fffff};
    for (uint64_t i = 0; i < 1000000; i++) {
        const uint64_t r = rng_u64(3, i);
        uint32_t m = r & 0x7fffff, k = r >> 23 & 0x7fffff;
        if (r >> 62 == 0) m = edges[r >> 46 & 7];
        if ((r >> 60 & 3) == 0) k = edges[r >> 49 & 7];
        const float b = bits_float((uint32_t)(67 + i % 120) << 23 | m); /* 2^-60 .. 2^60 */
        const float a = bits_float((float_bits(b) >> 23) + 9 - (uint32_t)(i % 24) > 254
                                       ? 0
                                       : ((float_bits(b) >> 23) + 9 - (uint32_t)(i % 24)) << 23 | k);
        assert_true(fl_inverse(b) > 0);
        if (float_bits(fl_by_inverse(a, b, fl_inverse(b))) != float_bits(a / b))
            fail_msg("%a / %a is %a, by its inverse %a", (double)a, (double)b, (double)(a / b),
                     (double)fl_by_inverse(a, b, fl_inverse(b)));
    }
}

/* short_quotient for e2m1: dividends a few units in the last place away from every midpoint of two values, and from the
 * middle between that midpoint and the next float. Divisors of all kinds, also those that e2m1_inverse excludes. */
static void test_e2m1_quotient(void **state)
{
    (void)state;
    static const float midpoints[] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5};
    static const uint32_t edges[] = {0, 0x400000, 0x800000};
    int64_t left_out = 0;
    for (uint64_t i = 0; i < 400000; i++) {
        const uint64_t r = rng_u64(5, i);
        uint32_t mantissa = r & 0x7fffff;
        if (i & 1) mantissa = (edges[r >> 40 & 1 ? 1 : (r >> 41 & 1) * 2] + (uint32_t)(r >> 48 & 63) - 32) & 0x7fffff;
        const float b = bits_float((uint32_t)(67 + i % 120) << 23 | mantissa), inverse = e2m1_inverse(b);
        left_out += !(inverse > 0);
        for (int k = 0; k < MT_LEN(midpoints) && inverse > 0; k++) {
            for (int step = -3; step <= 3; step++) {
                const float a = bits_float(float_bits(b * midpoints[k]) + (uint32_t)step);
                const float by = short_quotient(a, b, inverse);
                if (float_bits(e2m1_round(by)) != float_bits(e2m1_round(a / b)))
                    fail_msg("%a / %a is %a, by its inverse %a", (double)a, (double)b, (double)(a / b), (double)by);
            }
        }
    }
    assert_in_range(left_out, 1, 100000);
}

/* fl_whole_by on a GPU: every mantissa of the divisor, with three whole numbers each. */
static void test_whole_quotient(void **state)
{
    (void)state;
    for (uint32_t m = 0; m < 1u << 23; m++) {
        const float b = bits_float((67 + m % 120) << 23 | m), inverse = fl_inverse(b); /* 2^-60 .. 2^60 */
        const float numbers[] = {7, 127, (float)(1 + m * 2654435761u % 256)};
        for (int i = 0; i < MT_LEN(numbers); i++)
            if (short_quotient(numbers[i], b, inverse) != numbers[i] / b)
                fail_msg("%a / %a is %a, by its inverse %a", (double)numbers[i], (double)b, (double)(numbers[i] / b),
                         (double)short_quotient(numbers[i], b, inverse));
    }
}

static void test_amax(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    for (int t = 0; t < MT_LEN(types); t++) {
        struct tensor x = make_zero(types[t], 4, 7, 1201), amax = make_empty(DT_F32, 4, -1, -1);
        struct tensor bad = make_empty(DT_F64, 4, -1, -1), whole = make_empty(DT_F32, 1, -1, -1);
        struct tensor all_bad = make_empty(DT_F64, 1, -1, -1);
        const int64_t n = 7 * 1201;
        uint16_t *half = x.data;
        float *f32 = x.data;
        if (t == 2) { /* expert 0 stays zero; 1: the smallest denormal, negative; 2: not finite; 3: the last value */
            f32[n + 5] = -0x1p-149f;
            f32[2 * n] = NAN, f32[2 * n + 1] = -INFINITY, f32[3 * n - 1] = INFINITY, f32[2 * n + 9] = -3;
            f32[4 * n - 1] = -FLT_MAX;
        } else {
            const uint16_t inf = t ? 0x7c00 : 0x7f80, three = t ? 0xc200 : 0xc040;
            half[n + 5] = 0x8001;
            half[2 * n] = inf | 1, half[2 * n + 1] = inf | 0x8000, half[3 * n - 1] = inf, half[2 * n + 9] = three;
            half[4 * n - 1] = (uint16_t)(0x8000 | (inf - 1));
        }
        op_amax(&dev, amax, bad, x);
        op_amax(&dev, whole, all_bad, x);
        const double most = t == 0 ? 0x1.fep127 : t == 1 ? 65504 : (double)FLT_MAX;
        const double least = t == 0 ? 0x1p-133 : t == 1 ? 0x1p-24 : 0x1p-149;
        const double want[] = {0, least, 3, most}, want_bad[] = {0, 0, 3, 0};
        for (int e = 0; e < 4; e++) {
            if (value_at(amax, e) != want[e] || value_at(bad, e) != want_bad[e])
                fail_msg("%s, expert %d: %g, %g not finite; must be %g, %g", dtype_name(types[t]), e, value_at(amax, e),
                         value_at(bad, e), want[e], want_bad[e]);
        }
        assert_true(value_at(whole, 0) == most && value_at(all_bad, 0) == 3);
    }
    op_check_end(&dev);
}

/* One call for all experts, in place, gives the bytes of one call per expert, and one amax for all experts those of the
 * same amax for each. */
static void test_grouped(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(forms); i++) {
        struct device dev;
        const struct fakequant q = parsed(forms[i].name);
        op_check_begin(&dev, false);
        struct tensor x = make_random(DT_BF16, 1, 3, 5, 24, 384), y = make_copy(x), z = make_copy(x);
        struct tensor amax = make_empty(DT_F32, 5, -1, -1), bad = make_empty(DT_F64, 5, -1, -1);
        struct tensor one = make_empty(DT_F32, 1, -1, -1), five = make_copy(amax);
        const struct packed_form k = make_packed(&q, 5, 24, 384), l = make_packed(&q, 1, 24, 384);
        memset((uint16_t *)x.data + 2 * 24 * 384, 0, 24 * 384 * 2); /* an expert of zeros */
        op_amax(&dev, amax, bad, x);
        op_fake_quant(&dev, x, x, amax, &q);
        op_quant_pack(&dev, k.codes, k.scales, k.top, z, amax, &q);
        memset((uint16_t *)y.data + 2 * 24 * 384, 0, 24 * 384 * 2);
        for (int e = 0; e < 5; e++) {
            const struct tensor own = tensor_rows(y, e, 1), a = tensor_rows(amax, e, 1);
            op_fake_quant(&dev, own, own, a, &q);
            op_quant_pack(&dev, l.codes, l.scales, l.top, tensor_rows(z, e, 1), a, &q);
            assert_same_bits(l.codes, tensor_rows(k.codes, e, 1));
            if (q.block) assert_same_bits(l.scales, tensor_rows(k.scales, e, 1));
            if (l.top.ndim) assert_same_bits(l.top, tensor_rows(k.top, e, 1));
        }
        assert_same_bits(x, y);
        set_value(one, 0, 2);
        for (int e = 0; e < 5; e++) set_value(five, e, 2);
        op_fake_quant(&dev, x, z, one, &q);
        op_fake_quant(&dev, y, z, five, &q);
        assert_same_bits(x, y);
        op_check_end(&dev);
    }
}

static void test_nothing(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {{0, 4, 256}, {3, 0, 256}, {3, 4, 0}};
    struct device dev;
    op_check_begin(&dev, false);
    for (int i = 0; i < MT_LEN(forms); i++)
        for (int s = 0; s < MT_LEN(shapes); s++) {
            const struct fakequant q = parsed(forms[i].name);
            const struct tensor x = make_empty(DT_F32, shapes[s][0], shapes[s][1], shapes[s][2]);
            const struct packed_form k = make_packed(&q, shapes[s][0], shapes[s][1], shapes[s][2]);
            struct tensor amax = make_empty(DT_F32, shapes[s][0], -1, -1);
            op_amax(&dev, amax, make_empty(DT_F64, shapes[s][0], -1, -1), x);
            for (int64_t e = 0; e < shapes[s][0]; e++) assert_true(value_at(amax, e) == 0);
            op_fake_quant(&dev, x, x, amax, &q);
            op_fake_quant_bwd(&dev, x, x, x, amax);
            op_quant_pack(&dev, k.codes, k.scales, k.top, x, amax, &q);
        }
    op_check_end(&dev);
}

/* The gradient is dy where |x| <= amax and zero elsewhere. */
static void test_gradient(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    struct tensor x = make_random(DT_F32, 1, 1, 2, 3, 37), dy = make_random(DT_F32, 2, 1, 2, 3, 37);
    struct tensor amax = make_empty(DT_F32, 2, -1, -1), dx = make_copy(dy);
    const float most[2] = {0.5f, 0.25f};
    for (int e = 0; e < 2; e++) {
        set_value(amax, e, (double)most[e]);
        ((float *)x.data)[e * 111] = most[e], ((float *)x.data)[e * 111 + 1] = -most[e];
        ((float *)x.data)[e * 111 + 2] = nextafterf(most[e], 1);
    }
    op_fake_quant_bwd(&dev, dx, dx, x, amax);
    for (int i = 0; i < 222; i++) {
        const bool passes = fabs(value_at(x, i)) <= (double)most[i / 111];
        assert_true(value_at(dx, i) == (passes ? value_at(dy, i) : 0));
    }
    assert_true(value_at(dx, 0) != 0 && value_at(dx, 1) != 0 && value_at(dx, 2) == 0);
    op_check_end(&dev);
}

/* Threads, precisions and dry runs, as for every op. */
static void ops_case(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct fakequant q = parsed(params);
    const struct tensor x = make_random(DT_F32, 1, 3, 3, 40, 384), dy = make_random(DT_F32, 2, 1, 3, 40, 384);
    const struct tensor amax = make_zero(DT_F32, 3, -1, -1), bad = make_zero(DT_F64, 3, -1, -1);
    struct packed_form k = make_packed(&q, 3, 40, 384);
    struct tensor y = make_zero(DT_F32, 3, 40, 384), dx = make_zero(DT_F32, 3, 40, 384);
    if (dev->dry_run && k.codes.ndim) memset(k.codes.data, 0, (size_t)tensor_bytes(k.codes));
    op_amax(dev, amax, bad, x);
    op_fake_quant(dev, y, x, amax, &q);
    op_fake_quant_bwd(dev, dx, dy, x, amax);
    op_quant_pack(dev, k.codes, k.scales, k.top, x, amax, &q);
    const struct tensor out[] = {amax, y, dx, k.codes, k.scales, k.top};
    for (int i = 0; i < MT_LEN(out); i++)
        if (out[i].ndim) o->out[o->n++] = out[i];
}

static void test_as_every_op(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(forms); i++) op_check_case(ops_case, forms[i].name, 0);
}

/* ---- names */

static void test_names(void **state)
{
    (void)state;
    struct fakequant f;
    struct err err;
    assert_int_equal(fakequant_parse(&f, "int4-128-narrow", &err), 0);
    assert_true(f.qmin == -7 && f.qmax == 7 && f.block == 128 && f.bits == 4);
    static const char *const bad[] = {"", "int", "int5", "nvfp4-narrow", "INT8", "int8-narrow-narrow", "-narrow"};
    for (int i = 0; i < MT_LEN(bad); i++) {
        assert_int_equal(fakequant_parse(&f, bad[i], &err), -1);
        assert_non_null(strstr(err.msg, "int4-128, fp8, fp8-recip, fp8-stored, nvfp4, nvfp4-fake, mxfp4, mxfp4-ceil"));
    }
}

/* ---- on a GPU: the CPU's bits, one launch */

enum { GUARD = 256 };

/* Copies x to the device, between guard bytes and `shift` bytes after a 16-byte aligned address. */
static struct tensor to_gpu(struct device *dev, struct tensor x, int shift)
{
    const int64_t bytes = x.ndim ? tensor_bytes(x) : 0;
    char *host = mem_alloc(bytes + 2 * GUARD + shift), *p = dev->ops->alloc(bytes + 2 * GUARD + shift);
    assert_non_null(p);
    memset(host, 0xa5, (size_t)(bytes + 2 * GUARD + shift));
    if (bytes) memcpy(host + GUARD + shift, x.data, (size_t)bytes);
    dev->ops->upload(p, host, bytes + 2 * GUARD + shift);
    mem_free(host);
    x.data = p + GUARD + shift;
    return x;
}

/* Fails unless `got`, on the device, has the bytes of `want` and unchanged guards; frees it. */
static void expect_gpu(struct device *dev, const char *name, const char *what, struct tensor got, struct tensor want,
                       int shift)
{
    const int64_t bytes = want.ndim ? tensor_bytes(want) : 0, all = bytes + 2 * GUARD + shift;
    char *host = mem_alloc(all), *p = (char *)got.data - GUARD - shift;
    dev->ops->download(host, p, all);
    dev->ops->free(p);
    for (int i = 0; i < GUARD; i++)
        if ((uint8_t)host[i] != 0xa5 || (uint8_t)host[all - 1 - i] != 0xa5)
            fail_msg("%s, %s: a guard changed", name, what);
    for (int64_t i = 0; i < bytes; i++)
        if (host[GUARD + shift + i] != ((char *)want.data)[i])
            fail_msg("%s, %s, %s, %d bytes off: byte %lld is %02x, must be %02x", name, what, dtype_name(want.dtype),
                     shift, (long long)i, (uint8_t)host[GUARD + shift + i], ((const uint8_t *)want.data)[i]);
    mem_free(host);
}

/* Everything that the ops write, on one device; inputs of all patterns, or of odd sizes. */
struct results {
    struct tensor x, dy, amax, bad, y, dx, own; /* own: amax computed from the values */
    struct packed_form k;
};

static void run_all(struct device *dev, const struct results *r, const struct fakequant *q)
{
    op_amax(dev, r->own, r->bad, r->x);
    op_fake_quant(dev, r->y, r->x, r->amax, q);
    op_quant_pack(dev, r->k.codes, r->k.scales, r->k.top, r->x, r->amax, q);
    op_fake_quant_bwd(dev, r->dx, r->dy, r->x, r->amax);
}

static struct results results_of(const struct form *f, enum dtype t, const float *amax, bool odd)
{
    const struct fakequant q = parsed(f->name);
    const int64_t n_in = odd ? (f->block ? 3 * f->block : 2 * 211) : N_IN, n_row = odd ? 5 : N_ROW;
    struct results r = {.amax = make_empty(DT_F32, N_EXP, -1, -1), .own = make_empty(DT_F32, N_EXP, -1, -1)};
    struct tensor all = make_empty(t, N_EXP, N_ROW, N_IN);
    fill(all, amax[0]);
    r.x = make_empty(t, N_EXP, n_row, n_in);
    memcpy(r.x.data, (char *)all.data + tensor_bytes(all) / 2, (size_t)tensor_bytes(r.x) / 2);
    memcpy((char *)r.x.data + tensor_bytes(r.x) / 2, all.data, (size_t)tensor_bytes(r.x) / 2);
    memcpy(r.amax.data, amax, N_EXP * sizeof(*amax));
    r.bad = make_empty(DT_F64, N_EXP, -1, -1);
    r.y = make_empty(t, N_EXP, n_row, n_in);
    r.dx = make_empty(t, N_EXP, n_row, n_in);
    r.dy = make_random(t == DT_F16 ? DT_BF16 : t, 9, 1, N_EXP, n_row, n_in); /* 16 bits of any kind */
    r.dy.dtype = t;
    r.k = make_packed(&q, N_EXP, n_row, n_in);
    return r;
}

static void check_gpu(struct device *gpu, const struct form *f, enum dtype t, const float *amax, int shift, bool odd)
{
    struct device cpu;
    const struct fakequant q = parsed(f->name);
    op_check_begin(&cpu, false);
    const struct results w = results_of(f, t, amax, odd);
    struct results g = w;
    const struct tensor *const from[] = {&w.x,  &w.dy,  &w.amax,    &w.bad,      &w.y,
                                         &w.dx, &w.own, &w.k.codes, &w.k.scales, &w.k.top};
    struct tensor *const to[] = {&g.x, &g.dy, &g.amax, &g.bad, &g.y, &g.dx, &g.own, &g.k.codes, &g.k.scales, &g.k.top};
    static const char *const what[] = {"x", "dy", "amax", "n_bad", "y", "dx", "amax of x", "codes", "scales", "top"};
    const int unit = t == DT_F32 ? 4 : 2;
    int off[MT_LEN(from)];
    for (int i = 0; i < MT_LEN(from); i++) {
        const int step = i < 2 || i == 4 || i == 5    ? unit
                         : i == 3                     ? 8
                         : i == 7                     ? 1
                         : i == 8 && q.kind != FQ_INT ? 1
                                                      : 4;
        off[i] = shift * step;
        *to[i] = to_gpu(gpu, *from[i], off[i]);
    }
    run_all(&cpu, &w, &q);
    run_all(gpu, &g, &q);
    run_all(gpu, &g, &q); /* a second time, over the first results */
    gpu->ops->wait();
    for (int i = 0; i < MT_LEN(from); i++) expect_gpu(gpu, f->name, what[i], *to[i], *from[i], off[i]);
    op_check_end(&cpu);
}

/* Every form and dtype, for the ranges of amaxes that begin at first, first + step, ... */
static void as_the_cpu(int first, int step)
{
    struct device gpu;
    struct err err;
    op_check_need_gpu();
    if (device_open(&gpu, "cuda", "auto", &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < 3 * MT_LEN(forms); i++)
        for (int a = first; a < MT_LEN(amaxes); a += step) {
            check_gpu(&gpu, &forms[i / 3], types[i % 3], amaxes + a, 0, false);
            if (a % 8 == 4) check_gpu(&gpu, &forms[i / 3], types[i % 3], amaxes + a, 1, true);
            if (a % 8 == 6) check_gpu(&gpu, &forms[i / 3], types[i % 3], amaxes + a, 0, true);
        }
    device_close(&gpu);
}
static void test_as_the_cpu_on_the_gpu(void **state) { (void)state, as_the_cpu(4, MT_LEN(amaxes)); }
static void test_as_the_cpu_large_on_the_gpu(void **state) { (void)state, as_the_cpu(0, N_EXP); }

/* Calls one after another, per expert and for all, in stacks of few and of many blocks, with smaller values each time:
 * no call sees what an earlier one left in memory. */
static void test_amax_again_on_the_gpu(void **state)
{
    (void)state;
    static const int64_t sizes[][3] = {{64, 64, 1024}, {3, 5, 7}, {1, 4096, 4096}, {512, 8, 16}, {2, 2048, 4104}};
    struct device gpu, cpu;
    struct err err;
    op_check_need_gpu();
    if (device_open(&gpu, "cuda", "auto", &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < 4 * MT_LEN(sizes); i++) {
        const int64_t *n = sizes[i % MT_LEN(sizes)], n_out = i / MT_LEN(sizes) % 2 ? 1 : n[0];
        op_check_begin(&cpu, false);
        const struct tensor x = make_random(DT_BF16, (uint64_t)i, ldexp(1, -i), n[0], n[1], n[2]);
        const struct tensor amax = make_empty(DT_F32, n_out, -1, -1), bad = make_empty(DT_F64, n_out, -1, -1);
        uint16_t *v = x.data;
        if (i % 3 == 0) v[tensor_count(x) / 2] = 0x7fc0, v[tensor_count(x) - 1] = 0xff80;
        const struct tensor gx = to_gpu(&gpu, x, 0), ga = to_gpu(&gpu, amax, 0), gb = to_gpu(&gpu, bad, 0);
        op_amax(&cpu, amax, bad, x);
        op_amax(&gpu, ga, gb, gx);
        gpu.ops->wait();
        expect_gpu(&gpu, "again", "amax", ga, amax, 0);
        expect_gpu(&gpu, "again", "n_bad", gb, bad, 0);
        gpu.ops->free((char *)gx.data - GUARD);
        op_check_end(&cpu);
    }
    device_close(&gpu);
}

/* Fails unless n bytes at a and b, on the device, are equal; `host` has room for 2 n. */
static void same_on_the_gpu(struct device *gpu, const char *name, const void *a, const void *b, int64_t n, char *host)
{
    gpu->ops->download(host, a, n);
    gpu->ops->download(host + n, b, n);
    if (memcmp(host, host + n, (size_t)n)) fail_msg("%s: grouped is not one call per expert", name);
}

/* Stacks as large as those of published models: one call for all experts gives the bytes of one call per expert, and
 * for the last expert those of the CPU. */
static void published_size(struct device *gpu, const char *name, int64_t n_exp, int64_t n_out, int64_t n_in)
{
    const struct fakequant q = parsed(name);
    const int64_t n = n_out * n_in, bytes = n * 2;
    struct device cpu;
    op_check_begin(&cpu, false);
    const struct tensor one = make_random(DT_BF16, 7, 1, 1, n_out, n_in), want = make_copy(one);
    const struct tensor amax = make_empty(DT_F32, n_exp, -1, -1), bad = make_empty(DT_F64, n_exp, -1, -1);
    char *host = mem_alloc(2 * bytes), *mem = gpu->ops->alloc(3 * n_exp * bytes);
    if (!mem) {
        print_message("skip: %s of %lld experts: too little device memory\n", name, (long long)n_exp);
    } else {
        struct tensor x = tensor_3d(mem, DT_BF16, n_exp, n_out, n_in), y = x, z = x;
        struct tensor top = to_gpu(gpu, amax, 0), rest = to_gpu(gpu, bad, 0);
        y.data = mem + n_exp * bytes;
        z.data = mem + 2 * n_exp * bytes;
        for (int64_t e = 0; e < n_exp; e++) /* rotated, so that no two experts are equal */
            for (int64_t k = 0, at = e * 64 * n_in % n; k < 2; k++, at = 0) {
                const int64_t to = k ? n - e * 64 * n_in % n : 0, len = k ? n - to : n - at;
                gpu->ops->upload((char *)x.data + e * bytes + 2 * to, (char *)one.data + 2 * at, 2 * len);
            }
        op_amax(gpu, top, rest, x);
        op_fake_quant(gpu, y, x, top, &q);
        for (int64_t e = 0; e < n_exp; e++)
            op_fake_quant(gpu, tensor_rows(z, e, 1), tensor_rows(x, e, 1), tensor_rows(top, e, 1), &q);
        for (int64_t e = 0; e < n_exp; e++)
            same_on_the_gpu(gpu, name, tensor_rows(y, e, 1).data, tensor_rows(z, e, 1).data, bytes, host);
        gpu->ops->download(one.data, tensor_rows(x, n_exp - 1, 1).data, bytes);
        op_amax(&cpu, tensor_rows(amax, 0, 1), tensor_rows(bad, 0, 1), one);
        op_fake_quant(&cpu, want, one, tensor_rows(amax, 0, 1), &q);
        gpu->ops->download(host, tensor_rows(y, n_exp - 1, 1).data, bytes);
        if (memcmp(host, want.data, (size_t)bytes)) fail_msg("%s: the last expert is not the CPU's", name);
        gpu->ops->free((char *)top.data - GUARD);
        gpu->ops->free((char *)rest.data - GUARD);
        gpu->ops->free(mem);
    }
    mem_free(host);
    op_check_end(&cpu);
}

static void test_published_sizes_large_on_the_gpu(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {{5120, 8192}, {3712, 2688}, {2688, 1856}}, counts[] = {4, 8, 32, 128};
    static const char *const names[] = {"int8", "nvfp4", "int4", "mxfp4", "fp8"};
    struct device gpu;
    struct err err;
    op_check_need_gpu();
    if (device_open(&gpu, "cuda", "auto", &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < 12; i++)
        published_size(&gpu, names[i % MT_LEN(names)], counts[i % 4], sizes[i / 4][0], sizes[i / 4][1]);
    device_close(&gpu);
}

static void test_one_launch_on_the_gpu(void **state)
{
    (void)state;
    struct device gpu, cpu;
    struct dev_calls calls;
    struct err err;
    op_check_need_gpu();
    if (device_open(&gpu, "cuda", "auto", &err)) fail_msg("%s", err.msg);
    op_check_begin(&cpu, false);
    for (int i = 0; i < MT_LEN(forms); i++) {
        const struct fakequant q = parsed(forms[i].name);
        const struct tensor x = make_random(DT_BF16, 1, 1, 32, 8, 384), a = make_zero(DT_F32, 32, -1, -1);
        const struct tensor b = make_zero(DT_F64, 32, -1, -1), gx = to_gpu(&gpu, x, 0), ga = to_gpu(&gpu, a, 0);
        const struct tensor gb = to_gpu(&gpu, b, 0);
        for (int op = 0; op < 2; op++) {
            gpu.ops->count_calls(true, &calls);
            if (op) op_fake_quant(&gpu, gx, gx, ga, &q);
            if (!op) op_amax(&gpu, ga, gb, gx);
            gpu.ops->count_calls(false, &calls);
            if (calls.missing) print_message("skip: launches are not counted: %s\n", calls.missing);
            if (!calls.missing) assert_int_equal(calls.launches, 1);
            if (!calls.missing) assert_int_equal(calls.waits, 0);
        }
        gpu.ops->wait();
        const struct tensor all[] = {gx, ga, gb};
        for (int k = 0; k < MT_LEN(all); k++) gpu.ops->free((char *)all[k].data - GUARD);
    }
    op_check_end(&cpu);
    device_close(&gpu);
}

int test_fakequant(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_pattern),
        cmocka_unit_test(test_division),
        cmocka_unit_test(test_e2m1_quotient),
        cmocka_unit_test(test_whole_quotient),
        cmocka_unit_test(test_amax),
        cmocka_unit_test(test_grouped),
        cmocka_unit_test(test_nothing),
        cmocka_unit_test(test_gradient),
        cmocka_unit_test(test_as_every_op),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_as_the_cpu_on_the_gpu),
        cmocka_unit_test(test_as_the_cpu_large_on_the_gpu),
        cmocka_unit_test(test_amax_again_on_the_gpu),
        cmocka_unit_test(test_published_sizes_large_on_the_gpu),
        cmocka_unit_test(test_one_launch_on_the_gpu),
    };
    make_tables();
    return cmocka_run_group_tests_name("fakequant", tests, NULL, NULL);
}
