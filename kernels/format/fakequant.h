/* fakequant.h - the formats of fake quantisation, element by element, for the host and for GPUs: y = Q(x), the value
 * that a quantised x decodes to. kernels/format/README.md has the formulas, minifloat.h the roundings.
 *
 * x [E, out, in]. amax[e] is the largest magnitude of expert e, or a smaller bound to which larger values are clipped.
 * A block is `block` elements along `in`, bmax its largest magnitude. Everything is fp32, without NaN and
 * infinities. */
#ifndef MT_FAKEQUANT_H
#define MT_FAKEQUANT_H

#include "kernels/base.h"
#include "kernels/format/minifloat.h"

#ifdef __cplusplus
extern "C" {
#endif

/* FQ_FP8_STORED: FP8 with a scale as in files, which divides x and multiplies codes. */
enum fakequant_kind { FQ_INT, FQ_FP8, FQ_FP8_STORED, FQ_NVFP4, FQ_MXFP4 };
/* As in Model-Optimizer: FQ_RECIP its scale of FP8, FQ_KERNEL its kernel for fake NVFP4, FQ_CEIL its scale of MXFP4. */
enum fakequant_rule { FQ_USUAL, FQ_RECIP, FQ_KERNEL, FQ_CEIL };

/* One format. 4-bit codes lie two in a byte, the element with the even index in the low half. */
struct fakequant {
    enum fakequant_kind kind;
    enum fakequant_rule rule;
    int32_t block;      /* 0: one scale per expert */
    int32_t bits;       /* 4 or 8 */
    int32_t qmin, qmax; /* FQ_INT: smallest and largest code */
};

/* Finds a format by its name. Integer formats also take the suffix -narrow: codes from -qmax. */
int fakequant_parse(struct fakequant *f, const char *name, struct err *err) MT_CHECK;

/* M of struct proj_quant (ops.h): w [n_row, in] += scale * b a, rounded as stated there. b [n_row, r], a [r, in] */
void fakequant_merge(float *w, const float *b, const float *a, int64_t r, float scale, int64_t n_row, int64_t n_in,
                     int n_threads);

/* Whether the format reads amax; otherwise bmax alone decides. */
MT_BOTH bool fakequant_reads_amax(const struct fakequant *f)
{
    return f->kind != FQ_MXFP4 && !(f->kind == FQ_INT && f->block);
}

/* The scale of one block or expert: `up` takes x to units of the codes, `down` codes to values, each as factor or
 * divisor. */
struct fakequant_scale {
    float up, down;
    float inverse; /* fl_inverse of the divisor; FQ_NVFP4: e2m1_inverse */
    uint32_t byte; /* FQ_NVFP4: e4m3; FQ_MXFP4: e8m0 */
};

/* FQ_NVFP4: the expert's scale, weight_scale_2 in a file. */
MT_BOTH float fakequant_global(const struct fakequant *f, float amax)
{
    const float g = fl_div(amax, 2688); /* 6 * 448 */
    return f->rule == FQ_KERNEL && g <= 0 ? 1e-12f : g;
}

MT_BOTH struct fakequant_scale fakequant_scale_int(const struct fakequant *f, float amax)
{
    struct fakequant_scale s = {0, 1, 1, 0}; /* everything becomes 0 */
    if (amax <= 0x1p-24f) return s;
    s.up = s.down = fl_div((float)f->qmax, amax);
    s.inverse = fl_inverse(s.down);
    return s;
}

MT_BOTH struct fakequant_scale fakequant_scale_fp8(const struct fakequant *f, float amax)
{
    const float a = amax <= 0x1p-24f ? 1 : amax;
    struct fakequant_scale s = {0, 0, 0, 0};
    s.up = f->rule == FQ_RECIP ? fl_mul(448, fl_div(1, a)) : fl_div(448, a);
    s.down = fl_div(1, s.up);
    return s;
}

MT_BOTH struct fakequant_scale fakequant_scale_stored(float amax)
{
    const float scale = fl_div(amax, 448);
    struct fakequant_scale s = {scale, scale, 0, 0};
    if (!(scale > 0)) s.up = s.down = 1;
    s.inverse = fl_inverse(s.up);
    return s;
}

/* g: fakequant_global; r: bmax / (6 g), 0 where g is 0. */
MT_BOTH struct fakequant_scale fakequant_scale_nvfp4_of(const struct fakequant *f, float g, float r)
{
    struct fakequant_scale s = {0, 0, 0, 0};
    if (f->rule == FQ_USUAL) r = r > 0 ? (r > 0x1p-9f ? r : 0x1p-9f) : 1;
    r = e4m3_round(r);
    s.byte = e4m3_code(r);
    s.up = fl_mul(r, g);
    if (f->rule == FQ_KERNEL && s.up < 1e-5f) s.up = 1;
    s.down = s.up;
    s.inverse = e2m1_inverse(s.up);
    return s;
}

MT_BOTH struct fakequant_scale fakequant_scale_nvfp4(const struct fakequant *f, float g, float bmax)
{
    return fakequant_scale_nvfp4_of(f, g, g > 0 ? fl_div(bmax, fl_mul(6, g)) : 0);
}

MT_BOTH struct fakequant_scale fakequant_scale_mxfp4(const struct fakequant *f, float bmax)
{
    struct fakequant_scale s = {0, 0, 0, 0};
    s.byte = f->rule == FQ_CEIL ? e8m0_ceil(fl_div(bmax, 6)) : e8m0_floor(bmax, 2);
    s.up = e8m0_inverse(s.byte);
    s.down = e8m0_value(s.byte);
    return s;
}

/* top: fakequant_global for FQ_NVFP4, else amax. */
MT_BOTH struct fakequant_scale fakequant_scale(const struct fakequant *f, float top, float bmax)
{
    switch (f->kind) {
    case FQ_INT: return fakequant_scale_int(f, f->block ? bmax : top);
    case FQ_FP8: return fakequant_scale_fp8(f, top);
    case FQ_FP8_STORED: return fakequant_scale_stored(top);
    case FQ_NVFP4: return fakequant_scale_nvfp4(f, top, bmax);
    case FQ_MXFP4: break;
    }
    return fakequant_scale_mxfp4(f, bmax);
}

/* For e2m1_round; on a host a division is faster. */
MT_BOTH float fakequant_quotient(float a, const struct fakequant_scale *s)
{
#ifdef __CUDA_ARCH__
    return short_quotient(a, s->up, s->inverse);
#else
    return a / s->up;
#endif
}

/* The value of the code of x: x divided by the scale, and rounded. Integers have no -0. */
MT_BOTH float fakequant_round(const struct fakequant *f, const struct fakequant_scale *s, float x)
{
    const uint32_t sign = float_bits(x) & 0x80000000u;
    float a = fabsf(x);
    if (f->kind == FQ_INT) {
        return round_even(fl_clamp(fl_mul(x, s->up), (float)f->qmin, (float)f->qmax));
    }
    if (f->kind == FQ_MXFP4) return bits_float(float_bits(e2m1_round(fl_mul(a, s->up))) | sign);
    if (f->kind == FQ_FP8) return bits_float(float_bits(e4m3_round(fl_mul(a, s->up))) | sign);
    /* A quotient. Where it overflows it may be NaN, which rounds to the largest value as infinity does. */
    if (!(s->inverse > 0))
        a = a > 0 ? fl_div(a, s->up) : 0;
    else
        a = f->kind == FQ_NVFP4 ? fakequant_quotient(a, s) : fl_by(a, s->up, s->inverse);
    return bits_float(float_bits(f->kind == FQ_NVFP4 ? e2m1_round(a) : e4m3_round(a)) | sign);
}

/* The value that a code decodes to; q: fakequant_round. */
MT_BOTH float fakequant_value(const struct fakequant *f, const struct fakequant_scale *s, float q)
{
    return f->kind == FQ_INT ? fl_whole_by(q, s->down, s->inverse) : fl_mul(q, s->down);
}

/* The code of q: two's complement, or a sign bit and a magnitude. */
MT_BOTH uint32_t fakequant_code(const struct fakequant *f, float q)
{
    const uint32_t sign = float_bits(q) >> 31;
    if (f->kind == FQ_INT) return (uint32_t)(int32_t)q & (f->bits == 4 ? 15u : 255u);
    return f->bits == 8 ? e4m3_code(fabsf(q)) | sign << 7 : e2m1_code(fabsf(q)) | sign << 3;
}

/* By which a reader multiplies codes of integers and FP8. FQ_INT: q * fl(1 / s) may be an ulp from q / s. */
MT_BOTH float fakequant_multiplier(const struct fakequant *f, const struct fakequant_scale *s)
{
    return f->kind == FQ_INT && s->up > 0 ? fl_div(1, s->up) : s->down;
}

/* Whether the straight-through gradient passes: x is not clipped. */
MT_BOTH bool fakequant_passes(float x, float amax) { return fabsf(x) <= amax; }

#ifdef __cplusplus
}
#endif
#endif
