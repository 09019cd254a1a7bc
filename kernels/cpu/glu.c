/* glu.c - SwiGLU and its clamped form in gpt-oss, with s = sigmoid(alpha gate), and alpha = 1 in the plain form:
 *   plain    h = gate s up                     dgate = dh up s (1 + gate (1 - s))          dup = dh gate s
 *   clamped  h = (up + 1) gate s, of gate = min(gate, limit) and up = clamp(up, -limit, limit); dgate and dup are those
 * of the product where the clamp has no effect, equality included, and 0 elsewhere. A NaN passes through the clamps.
 * Rows are processed in chunks, split into gates and ups, so that every arithmetic loop runs over plain arrays. */
#include "kernels/cpu/glu.h"

enum { CHUNK = 64 };

struct pair {
    real gate[CHUNK], up[CHUNK];
};

/* Gates and ups first .. first+n-1 of a row of `width` pairs. */
static void split(struct pair *p, const real *row, int64_t first, int64_t n, int64_t width, bool interleaved)
{
    if (interleaved) {
        for (int64_t i = 0; i < n; i++) {
            p->gate[i] = row[2 * (first + i)];
            p->up[i] = row[2 * (first + i) + 1];
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            p->gate[i] = row[first + i];
            p->up[i] = row[width + first + i];
        }
    }
}

static void join(real *row, const struct pair *p, int64_t first, int64_t n, int64_t width, bool interleaved)
{
    if (interleaved) {
        for (int64_t i = 0; i < n; i++) {
            row[2 * (first + i)] = p->gate[i];
            row[2 * (first + i) + 1] = p->up[i];
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            row[first + i] = p->gate[i];
            row[width + first + i] = p->up[i];
        }
    }
}

static inline real sigmoid(real x) { return 1 / (1 + real_exp(-x)); }
static inline real clamp_high(real x, real limit) { return x > limit ? limit : x; }
static inline real clamp_both(real x, real limit) { return x > limit ? limit : x < -limit ? -limit : x; }

void glu_row_fwd(real *h, const real *pre, int64_t n, const struct glu *glu)
{
    struct pair p;
    real alpha = glu->alpha, limit = glu->limit;
    for (int64_t first = 0; first < n; first += CHUNK) {
        int64_t count = MT_MIN(CHUNK, n - first);
        split(&p, pre, first, count, n, glu->interleaved);
        if (glu->kind == GLU_SWIGLU) {
            for (int64_t i = 0; i < count; i++) h[first + i] = p.gate[i] * sigmoid(p.gate[i]) * p.up[i];
        } else {
            for (int64_t i = 0; i < count; i++) {
                real gate = clamp_high(p.gate[i], limit), up = clamp_both(p.up[i], limit);
                h[first + i] = (up + 1) * gate * sigmoid(alpha * gate);
            }
        }
    }
}

void glu_row_bwd(real *dpre, const real *pre, const real *g, real scale, int64_t n, const struct glu *glu)
{
    struct pair p, d;
    real alpha = glu->alpha, limit = glu->limit;
    for (int64_t first = 0; first < n; first += CHUNK) {
        int64_t count = MT_MIN(CHUNK, n - first);
        split(&p, pre, first, count, n, glu->interleaved);
        if (glu->kind == GLU_SWIGLU) {
            for (int64_t i = 0; i < count; i++) {
                real gate = p.gate[i], s = sigmoid(gate), dh = scale * g[first + i];
                d.gate[i] = dh * p.up[i] * s * (1 + gate * (1 - s));
                d.up[i] = dh * gate * s;
            }
        } else {
            for (int64_t i = 0; i < count; i++) {
                real gate = clamp_high(p.gate[i], limit), up = clamp_both(p.up[i], limit), dh = scale * g[first + i];
                real s = sigmoid(alpha * gate);
                real dgate = dh * (up + 1) * s * (1 + alpha * gate * (1 - s)), dup = dh * gate * s;
                d.gate[i] = p.gate[i] > limit ? 0 : dgate;
                d.up[i] = p.up[i] > limit || p.up[i] < -limit ? 0 : dup;
            }
        }
        join(dpre, &d, first, count, n, glu->interleaved);
    }
}
