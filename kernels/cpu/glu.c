/* glu.c - SwiGLU, its clamped forms, the squared ReLU and GeGLU: of one row, and the op for dense networks. Also y += x
 * and x *= factor.
 *
 * With s = sigmoid(alpha gate), alpha = 1 but in gpt-oss:
 *   plain    h = gate s up;  dgate = dh up s (1 + gate (1 - s));  dup = dh gate s
 *   clamped  h = (up + offset) gate s, of gate = min(gate, limit) and up = clamp(up, -limit, limit); offset is 1 in
 *            gpt-oss, 0 in DeepSeek-V4. Where a clamp takes effect (not at equality) its gradient is 0.
 *   relu2    h = max(0, up)^2;  dup = 2 max(0, up) dh
 *   gelu     h = gate s up, s = sigmoid(z), z = GELU_ALPHA (gate + GELU_CUBE gate^3);
 *            dgate = dh up s (1 + gate z' (1 - s))
 * A NaN passes through the clamps and the ReLU. Rows are processed in chunks, split into gates and ups, so that every
 * arithmetic loop runs over plain arrays. */
#include <string.h>

#include "kernels/cpu/glu.h"

enum { CHUNK = 64 };

struct pair {
    real gate[CHUNK], up[CHUNK];
};

/* Gates and ups first .. first+n-1 of a row of `width` pairs, or of ups alone: element i of each is i * step columns
 * further. */
struct columns {
    int64_t gate, up, step;
};
static struct columns columns_of(int64_t first, int64_t width, const struct glu *glu)
{
    if (!glu_gated(glu)) return (struct columns){first, first, 1};
    return glu->interleaved ? (struct columns){2 * first, 2 * first + 1, 2} : (struct columns){first, width + first, 1};
}

static void split(struct pair *p, const real *row, int64_t first, int64_t n, int64_t width, const struct glu *glu)
{
    const struct columns c = columns_of(first, width, glu);
    for (int64_t i = 0; i < n; i++) p->up[i] = row[c.up + c.step * i];
    for (int64_t i = 0; i < n && glu_gated(glu); i++) p->gate[i] = row[c.gate + c.step * i];
}

static void join(real *row, const struct pair *p, int64_t first, int64_t n, int64_t width, const struct glu *glu)
{
    const struct columns c = columns_of(first, width, glu);
    for (int64_t i = 0; i < n; i++) row[c.up + c.step * i] = p->up[i];
    for (int64_t i = 0; i < n && glu_gated(glu); i++) row[c.gate + c.step * i] = p->gate[i];
}

static inline real sigmoid(real x) { return 1 / (1 + real_exp(-x)); }
/* z of the gelu, and its derivative. */
static inline real gelu_arg(real x) { return (real)GELU_ALPHA * (x + (real)GELU_CUBE * x * x * x); }
static inline real gelu_slope(real x) { return (real)GELU_ALPHA * (1 + 3 * (real)GELU_CUBE * x * x); }
static inline real relu(real x) { return x < 0 ? 0 : x; }
static inline real clamp_high(real x, real limit) { return x > limit ? limit : x; }
static inline real clamp_both(real x, real limit) { return x > limit ? limit : x < -limit ? -limit : x; }

static real alpha_of(const struct glu *glu) { return glu->kind == GLU_CLAMPED ? glu->alpha : 1; }
static real offset_of(const struct glu *glu) { return glu->kind == GLU_CLAMPED ? 1 : 0; }

/* h = glu of n pairs */
static void glu_pairs(real *h, const struct pair *p, int64_t n, const struct glu *glu)
{
    const real alpha = alpha_of(glu), offset = offset_of(glu), limit = glu->limit;
    if (glu->kind == GLU_SWIGLU) {
        for (int64_t i = 0; i < n; i++) h[i] = p->gate[i] * sigmoid(p->gate[i]) * p->up[i];
    } else if (glu->kind == GLU_RELU2) {
        for (int64_t i = 0; i < n; i++) h[i] = relu(p->up[i]) * relu(p->up[i]);
    } else if (glu->kind == GLU_GELU) {
        for (int64_t i = 0; i < n; i++) h[i] = p->gate[i] * sigmoid(gelu_arg(p->gate[i])) * p->up[i];
    } else {
        for (int64_t i = 0; i < n; i++) {
            real gate = clamp_high(p->gate[i], limit), up = clamp_both(p->up[i], limit);
            h[i] = (up + offset) * gate * sigmoid(alpha * gate);
        }
    }
}

void glu_row_fwd(real *h, const real *pre, int64_t n, const struct glu *glu)
{
    struct pair p;
    for (int64_t first = 0; first < n; first += CHUNK) {
        int64_t count = MT_MIN(CHUNK, n - first);
        split(&p, pre, first, count, n, glu);
        glu_pairs(h + first, &p, count, glu);
    }
}

void glu_row_bwd(real *dpre, const real *pre, const real *g, real scale, int64_t n, const struct glu *glu)
{
    struct pair p, d;
    const real alpha = alpha_of(glu), offset = offset_of(glu), limit = glu->limit;
    for (int64_t first = 0; first < n; first += CHUNK) {
        int64_t count = MT_MIN(CHUNK, n - first);
        split(&p, pre, first, count, n, glu);
        if (glu->kind == GLU_SWIGLU) {
            for (int64_t i = 0; i < count; i++) {
                real gate = p.gate[i], s = sigmoid(gate), dh = scale * g[first + i];
                d.gate[i] = dh * p.up[i] * s * (1 + gate * (1 - s));
                d.up[i] = dh * gate * s;
            }
        } else if (glu->kind == GLU_RELU2) {
            for (int64_t i = 0; i < count; i++) d.up[i] = 2 * relu(p.up[i]) * (scale * g[first + i]);
        } else if (glu->kind == GLU_GELU) {
            for (int64_t i = 0; i < count; i++) {
                real gate = p.gate[i], s = sigmoid(gelu_arg(gate)), dh = scale * g[first + i];
                d.gate[i] = dh * p.up[i] * s * (1 + gate * gelu_slope(gate) * (1 - s));
                d.up[i] = dh * gate * s;
            }
        } else {
            for (int64_t i = 0; i < count; i++) {
                real gate = clamp_high(p.gate[i], limit), up = clamp_both(p.up[i], limit), dh = scale * g[first + i];
                real s = sigmoid(alpha * gate);
                real dgate = dh * (up + offset) * s * (1 + alpha * gate * (1 - s)), dup = dh * gate * s;
                d.gate[i] = p.gate[i] > limit ? 0 : dgate;
                d.up[i] = p.up[i] > limit || p.up[i] < -limit ? 0 : dup;
            }
        }
        join(dpre, &d, first, count, n, glu);
    }
}

void CPU(glu_fwd)(struct device *dev, struct tensor act, struct tensor pre, struct tensor gate, const struct glu *glu)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < act.shape[0]; t++) {
        real *h = real_row(act, t);
        glu_row_fwd(h, real_row(pre, t), act.shape[1], glu);
        for (int64_t i = 0; gate.ndim && i < act.shape[1]; i++) h[i] *= *real_row(gate, t);
    }
}

/* One row of the backward; returns <glu(pre), dact>. */
static real row_bwd(real *dpre, const real *dact, const real *pre, real gate, int64_t n, const struct glu *glu)
{
    real h[CHUNK], sum = 0;
    for (int64_t first = 0; first < n; first += CHUNK) {
        const int64_t count = MT_MIN(CHUNK, n - first);
        struct pair p;
        split(&p, pre, first, count, n, glu);
        glu_pairs(h, &p, count, glu);
        for (int64_t i = 0; i < count; i++) sum += h[i] * dact[first + i];
    }
    glu_row_bwd(dpre, pre, dact, gate, n, glu);
    return sum;
}

void CPU(glu_bwd)(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor dact, struct tensor pre,
                  struct tensor gate, const struct glu *glu)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < dact.shape[0]; t++) {
        const real sum = row_bwd(real_row(dpre, t), real_row(dact, t), real_row(pre, t),
                                 gate.ndim ? *real_row(gate, t) : 1, dact.shape[1], glu);
        if (dgate.ndim) *real_row(dgate, t) = sum;
    }
}

void CPU(add)(struct device *dev, struct tensor y, struct tensor x)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < y.shape[0]; t++) {
        real *to = real_row(y, t);
        for (int64_t i = 0; i < y.shape[1]; i++) to[i] += real_row(x, t)[i];
    }
}

void CPU(scale)(struct device *dev, struct tensor x, float factor)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++)
        for (int64_t i = 0; i < x.shape[1]; i++) real_row(x, t)[i] *= (real)factor;
}
