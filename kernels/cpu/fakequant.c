/* fakequant.c - fake quantisation, its packed form and its gradient, and the largest magnitudes. PIECE values at a time
 * become fp32, whatever the backend's precision: kernels/format/fakequant.h defines each rounding. */
#include "kernels/format/fakequant.h"

#include <string.h>

#include "kernels/cpu/real.h"

enum { PIECE = 4096 }; /* whole blocks of every format */

static void load(float *v, struct tensor x, int64_t at, int64_t n)
{
    const uint16_t *half = (const uint16_t *)x.data + at;
    if (x.dtype == DT_F32)
        memcpy(v, (const float *)x.data + at, (size_t)n * sizeof(*v));
    else if (x.dtype == DT_F64)
        for (int64_t i = 0; i < n; i++) v[i] = (float)((const double *)x.data)[at + i];
    else if (x.dtype == DT_F16)
        for (int64_t i = 0; i < n; i++) v[i] = f16_to_f32(half[i]);
    else
        for (int64_t i = 0; i < n; i++) v[i] = bits_float((uint32_t)half[i] << 16);
}

static void store(struct tensor y, const float *v, int64_t at, int64_t n)
{
    uint16_t *half = (uint16_t *)y.data + at;
    if (y.dtype == DT_F32)
        memcpy((float *)y.data + at, v, (size_t)n * sizeof(*v));
    else if (y.dtype == DT_F64)
        for (int64_t i = 0; i < n; i++) ((double *)y.data)[at + i] = (double)v[i];
    else if (y.dtype == DT_F16)
        for (int64_t i = 0; i < n; i++) half[i] = f32_to_f16(v[i]);
    else
        for (int64_t i = 0; i < n; i++) half[i] = f32_to_bf16(v[i]);
}

/* The bits of a positive float compare like integers. */
static float largest(const float *x, int64_t n, int64_t *n_bad)
{
    uint32_t most = 0;
    int64_t bad = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
        bad += bits >= 0x7f800000u;
        const uint32_t finite = bits < 0x7f800000u ? bits : 0;
        most = finite > most ? finite : most;
    }
    if (n_bad) *n_bad += bad;
    return bits_float(most);
}

/* ---- pieces: part p of expert e; every op walks over them ---- */

struct walk {
    int64_t n, per, count; /* elements and pieces of an expert; all pieces */
};

static struct walk walk_of(struct tensor x)
{
    struct walk w = {.n = x.shape[0] ? tensor_count(x) / x.shape[0] : 0};
    w.per = (w.n + PIECE - 1) / PIECE;
    w.count = w.per * x.shape[0];
    return w;
}

/* Of piece p: its expert, its first element in the whole tensor and its size. */
static int64_t walk_at(const struct walk *w, int64_t p, int64_t *expert, int64_t *first)
{
    const int64_t inside = p % w->per * PIECE;
    *expert = p / w->per;
    *first = *expert * w->n + inside;
    return MT_MIN(PIECE, w->n - inside);
}

static float amax_at(struct tensor amax, int64_t e)
{
    return amax.ndim ? ((const float *)amax.data)[amax.shape[0] > 1 ? e : 0] : 0;
}

static float top_at(const struct fakequant *f, struct tensor amax, int64_t e)
{
    return f->kind == FQ_NVFP4 ? fakequant_global(f, amax_at(amax, e)) : amax_at(amax, e);
}

/* ---- values ---- */

static inline __attribute__((always_inline)) void round_block(const struct fakequant *f, enum fakequant_kind kind,
                                                              const struct fakequant_scale *s, float *q, int64_t n)
{
    struct fakequant g = *f;
    g.kind = kind; /* known to the compiler */
    for (int64_t i = 0; i < n; i++) q[i] = fakequant_round(&g, s, q[i]);
}

/* x [n] becomes the values of its codes, block by block; returns the scale of the last block. */
static struct fakequant_scale round_values(const struct fakequant *f, float top, float *x, int64_t n)
{
    const float bmax = f->block ? largest(x, n, NULL) : 0;
    const struct fakequant_scale s = fakequant_scale(f, top, bmax);
    switch (f->kind) {
    case FQ_INT: round_block(f, FQ_INT, &s, x, n); break;
    case FQ_FP8: round_block(f, FQ_FP8, &s, x, n); break;
    case FQ_FP8_STORED: round_block(f, FQ_FP8_STORED, &s, x, n); break;
    case FQ_NVFP4: round_block(f, FQ_NVFP4, &s, x, n); break;
    case FQ_MXFP4: round_block(f, FQ_MXFP4, &s, x, n); break;
    }
    return s;
}

void CPU(fake_quant)(struct device *dev, struct tensor y, struct tensor x, struct tensor amax,
                     const struct fakequant *f)
{
    const struct walk w = walk_of(x);
    if (dev->dry_run) return;
#pragma omp parallel for if (w.count > 16) num_threads(dev->n_threads)
    for (int64_t p = 0; p < w.count; p++) {
        float v[PIECE];
        int64_t e, at;
        const int64_t n = walk_at(&w, p, &e, &at), block = f->block ? f->block : n;
        const float top = top_at(f, amax, e);
        progress();
        load(v, x, at, n);
        for (int64_t b = 0; b < n; b += block) {
            const struct fakequant_scale s = round_values(f, top, v + b, block);
            for (int64_t i = b; i < b + block; i++) v[i] = fakequant_value(f, &s, v[i]);
        }
        store(y, v, at, n);
    }
}

/* The f64 compilation does not round gradients. It compares x with amax in f32, as the quantiser does. */
static void pass_f64(struct tensor dx, struct tensor dy, const float *x, float most, int64_t at, int64_t n)
{
    const double *from = (const double *)dy.data + at;
    double *to = (double *)dx.data + at;
    for (int64_t i = 0; i < n; i++) to[i] = fakequant_passes(x[i], most) ? from[i] : 0;
}

void CPU(fake_quant_bwd)(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor amax)
{
    const struct walk w = walk_of(x);
    if (dev->dry_run) return;
#pragma omp parallel for if (w.count > 16) num_threads(dev->n_threads)
    for (int64_t p = 0; p < w.count; p++) {
        float v[PIECE], d[PIECE];
        int64_t e, at;
        const int64_t n = walk_at(&w, p, &e, &at);
        const float most = amax_at(amax, e);
        load(v, x, at, n);
        if (dx.dtype == DT_F64) {
            pass_f64(dx, dy, v, most, at, n);
            continue;
        }
        load(d, dy, at, n);
        for (int64_t i = 0; i < n; i++) d[i] = fakequant_passes(v[i], most) ? d[i] : 0;
        store(dx, d, at, n);
    }
}

/* ---- the packed form ---- */

static void put_codes(const struct fakequant *f, uint8_t *codes, const float *q, int64_t n)
{
    if (f->bits == 8)
        for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)fakequant_code(f, q[i]);
    else
        for (int64_t i = 0; i < n; i += 2)
            codes[i / 2] = (uint8_t)(fakequant_code(f, q[i]) | fakequant_code(f, q[i + 1]) << 4);
}

void CPU(quant_pack)(struct device *dev, struct tensor codes, struct tensor scales, struct tensor top, struct tensor x,
                     struct tensor amax, const struct fakequant *f)
{
    const struct walk w = walk_of(x);
    if (dev->dry_run) return;
    for (int64_t e = 0; e < x.shape[0] && top.ndim; e++) {
        const float own = top_at(f, amax, e);
        const struct fakequant_scale s = fakequant_scale(f, own, 0);
        ((float *)top.data)[e] = f->kind == FQ_NVFP4 ? own : fakequant_multiplier(f, &s);
    }
#pragma omp parallel for if (w.count > 16) num_threads(dev->n_threads)
    for (int64_t p = 0; p < w.count; p++) {
        float v[PIECE];
        int64_t e, at;
        const int64_t n = walk_at(&w, p, &e, &at), block = f->block ? f->block : n;
        const float own = top_at(f, amax, e);
        progress();
        load(v, x, at, n);
        for (int64_t b = 0; b < n; b += block) {
            const struct fakequant_scale s = round_values(f, own, v + b, block);
            const int64_t i = (at + b) / block;
            if (f->kind == FQ_INT && f->block) ((float *)scales.data)[i] = fakequant_multiplier(f, &s);
            if (f->kind != FQ_INT && f->block) ((uint8_t *)scales.data)[i] = (uint8_t)s.byte;
        }
        put_codes(f, (uint8_t *)codes.data + at * f->bits / 8, v, n);
    }
}

/* ---- largest magnitudes ---- */

void CPU(amax)(struct device *dev, struct tensor amax, struct tensor n_bad, struct tensor x)
{
    const struct walk w = walk_of(x);
    const int64_t mark = arena_mark(&dev->work);
    struct tensor most = arena_tensor_1d(&dev->work, DT_F32, w.count);
    struct tensor bad = arena_tensor_1d(&dev->work, DT_I64, w.count);
    if (!dev->dry_run) {
        float *m = most.data, *out = amax.data;
        int64_t *b = bad.data;
#pragma omp parallel for if (w.count > 16) num_threads(dev->n_threads)
        for (int64_t p = 0; p < w.count; p++) {
            float v[PIECE];
            int64_t e, at;
            const int64_t n = walk_at(&w, p, &e, &at);
            progress();
            load(v, x, at, n);
            b[p] = 0;
            m[p] = largest(v, n, &b[p]);
        }
        for (int64_t i = 0; i < amax.shape[0]; i++) {
            const int64_t per = w.count / amax.shape[0]; /* of one expert, or of all */
            int64_t sum = 0;
            out[i] = 0;
            for (int64_t p = i * per; p < (i + 1) * per; p++) {
                out[i] = MT_MAX(out[i], m[p]);
                sum += b[p];
            }
            ((double *)n_bad.data)[i] = (double)sum;
        }
    }
    arena_release(&dev->work, mark);
}
