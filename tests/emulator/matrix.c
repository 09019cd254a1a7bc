/* matrix.c - instructions of a whole warp: shuffles, votes, reductions, and products on tensor cores.
 *
 * A product of tensor cores sums in f32, in the order of k, with one rounding per product (fma); a GPU's order and
 * rounding differ. wgmma runs when a warp issues it: warp j of the warpgroup computes its rows 16 j to 16 j + 15.
 * Fragments are those of the PTX ISA, section "Warp Level Matrix Multiply-Accumulate Instructions". */
#include <math.h>
#include <string.h>

#include "tests/emulator/warp.h"

/* ---- shuffles: operands d, a, b, c [, member] ---- */

#define SHUFFLE(name, place, ok)                                                                                       \
    void ptx_shfl_##name(struct warp *w, const struct ins *i, uint32_t m)                                              \
    {                                                                                                                  \
        const int at = i->has_pred;                                                                                    \
        uint32_t from[LANES], *d = row(w, i, 0), *p = at ? row(w, i, 1) : NULL;                                        \
        const uint32_t *b = row(w, i, at + 2), *c = row(w, i, at + 3);                                                 \
        memcpy(from, row(w, i, at + 1), sizeof(from));                                                                 \
        for (uint32_t rest = m; rest; rest &= rest - 1) {                                                              \
            const int l = __builtin_ctz(rest);                                                                         \
            const int mask = (int)(c[l] >> 8 & 31), clamp = (int)(c[l] & 31), n = (int)(b[l] & 31);                    \
            const int last = (l & mask) | (clamp & ~mask), first = l & mask;                                           \
            const int j = place;                                                                                       \
            const bool valid = ok;                                                                                     \
            (void)last, (void)first;                                                                                   \
            if (valid && !(m >> j & 1)) fault(w, l, "shfl reads lane %d, which does not take part", j);                \
            d[l] = from[valid ? j : l];                                                                                \
            if (p) p[l] = valid ? ~0u : 0;                                                                             \
        }                                                                                                              \
    }
SHUFFLE(bfly, l ^ n, j <= last)
SHUFFLE(idx, first | (n & ~mask), j <= last)
SHUFFLE(up, l - n, j >= last)
SHUFFLE(down, l + n, j <= last)

void ptx_vote_ballot(struct warp *w, const struct ins *i, uint32_t m)
{
    uint32_t *d = row(w, i, 0), set = 0;
    const uint32_t *a = row(w, i, 1);
    for (int l = 0; l < LANES; l++) set |= (a[l] & 1) << l;
    set &= m;
    FOR_LANES(m, d[l] = set);
}
void ptx_vote_any(struct warp *w, const struct ins *i, uint32_t m)
{
    uint32_t *d = row(w, i, 0), any = 0;
    const uint32_t *a = row(w, i, 1);
    for (int l = 0; l < LANES; l++) any |= m >> l & 1 ? a[l] : 0;
    FOR_LANES(m, d[l] = any);
}
void ptx_vote_all(struct warp *w, const struct ins *i, uint32_t m)
{
    uint32_t *d = row(w, i, 0), all = ~0u;
    const uint32_t *a = row(w, i, 1);
    for (int l = 0; l < LANES; l++) all &= m >> l & 1 ? a[l] : ~0u;
    FOR_LANES(m, d[l] = all);
}

#define REDUCTION(name, T, first, expr)                                                                                \
    void ptx_redux_##name(struct warp *w, const struct ins *i, uint32_t m)                                             \
    {                                                                                                                  \
        T *d = row(w, i, 0), x = first;                                                                                \
        const T *a = row(w, i, 1);                                                                                     \
        for (int l = 0; l < LANES; l++)                                                                                \
            if (m >> l & 1) x = (T)(expr);                                                                             \
        FOR_LANES(m, d[l] = x);                                                                                        \
    }
REDUCTION(max_u32, uint32_t, 0, a[l] > x ? a[l] : x)
REDUCTION(min_u32, uint32_t, UINT32_MAX, a[l] < x ? a[l] : x)
REDUCTION(max_s32, int32_t, INT32_MIN, a[l] > x ? a[l] : x)
REDUCTION(min_s32, int32_t, INT32_MAX, a[l] < x ? a[l] : x)
REDUCTION(add_s32, int32_t, 0, (uint32_t)x + (uint32_t)a[l])
REDUCTION(or_b32, uint32_t, 0, x | a[l])

void ptx_match_any(struct warp *w, const struct ins *i, uint32_t m)
{
    uint32_t *d = row(w, i, 0), a[LANES];
    memcpy(a, row(w, i, 1), sizeof(a));
    for (int l = 0; l < LANES; l++) {
        uint32_t same = 0;
        for (int k = 0; k < LANES; k++) same |= (uint32_t)(a[k] == a[l]) << k;
        if (m >> l & 1) d[l] = same & m;
    }
}

/* ---- 8 x 8 matrices of 16 bits in shared memory: lane 8 j + r has the address of row r of matrix j ---- */

static char *matrix_row(struct warp *w, const struct ins *i, int operand, int lane)
{
    return reach(w, lane, SHARED, ((uint32_t *)row(w, i, operand))[lane] + (uint32_t)i->imm, 16);
}

void ptx_ldmatrix(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)m;
    uint16_t x[4][8][8];
    for (int j = 0; j < i->vec; j++)
        for (int r = 0; r < 8; r++) memcpy(x[j][r], matrix_row(w, i, i->vec, 8 * j + r), 16);
    for (int j = 0; j < i->vec; j++) {
        uint32_t *d = row(w, i, j);
        for (int l = 0; l < LANES; l++) {
            const int r = l / 4, c = l % 4 * 2;
            d[l] = i->trans ? x[j][c][r] | (uint32_t)x[j][c + 1][r] << 16 : x[j][r][c] | (uint32_t)x[j][r][c + 1] << 16;
        }
    }
}

void ptx_stmatrix(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)m;
    for (int j = 0; j < i->vec; j++) {
        const uint32_t *a = row(w, i, 1 + j);
        uint16_t x[8][8];
        for (int l = 0; l < LANES; l++)
            for (int h = 0; h < 2; h++) {
                const uint16_t v = (uint16_t)(a[l] >> 16 * h);
                if (i->trans)
                    x[l % 4 * 2 + h][l / 4] = v;
                else
                    x[l / 4][l % 4 * 2 + h] = v;
            }
        for (int r = 0; r < 8; r++) {
            char *to = matrix_row(w, i, 0, 8 * j + r);
            if (memcmp(to, x[r], 16)) proxy_write(w, to, 16);
            memcpy(to, x[r], 16);
        }
    }
}

/* ---- products of one warp: operands d 4, a, b, c 4 ---- */

/* d [16, 8] = a [16, K] b [K, 8] + c */
static void multiply(struct warp *w, const struct ins *i, int c_at, int n_k, float (*a)[16], float (*b)[8])
{
    float d[16][8];
    for (int l = 0; l < LANES; l++)
        for (int k = 0; k < 4; k++) d[l / 4 + k / 2 * 8][l % 4 * 2 + k % 2] = ((float *)row(w, i, c_at + k))[l];
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < n_k; k++)
            for (int c = 0; c < 8; c++) d[r][c] = fmaf(a[r][k], b[k][c], d[r][c]);
    for (int l = 0; l < LANES; l++)
        for (int k = 0; k < 4; k++) ((float *)row(w, i, k))[l] = d[l / 4 + k / 2 * 8][l % 4 * 2 + k % 2];
}

/* Rows and columns of bf16 fragments: register j of lane l has row l / 4 (+ 8 for odd j) and two columns from
 * 8 (j / 2) + 2 (l % 4). */
static void fragment_a(struct warp *w, const struct ins *i, int at, int n, float (*a)[16])
{
    for (int j = 0; j < n; j++) {
        const uint32_t *x = row(w, i, at + j);
        for (int l = 0; l < LANES; l++) {
            float *p = &a[l / 4 + j % 2 * 8][j / 2 * 8 + l % 4 * 2];
            p[0] = bf16_value(x[l] & 0xffff);
            p[1] = bf16_value(x[l] >> 16);
        }
    }
}

static void mma_bf16(struct warp *w, const struct ins *i, int n_k)
{
    const int n_a = n_k / 4, n_b = n_k / 8;
    float a[16][16], b[16][8];
    fragment_a(w, i, 4, n_a, a);
    for (int j = 0; j < n_b; j++) {
        const uint32_t *x = row(w, i, 4 + n_a + j);
        for (int l = 0; l < LANES; l++)
            for (int h = 0; h < 2; h++) b[j * 8 + l % 4 * 2 + h][l / 4] = bf16_value(x[l] >> 16 * h & 0xffff);
    }
    multiply(w, i, 4 + n_a + n_b, n_k, a, b);
}
void ptx_mma_16816(struct warp *w, const struct ins *i, uint32_t m) { (void)m, mma_bf16(w, i, 16); }
void ptx_mma_1688(struct warp *w, const struct ins *i, uint32_t m) { (void)m, mma_bf16(w, i, 8); }

/* tf32: f32 without the low 13 bits; register j of a has row l / 4 (+ 8 for odd j), column l % 4 (+ 4 from j = 2). */
void ptx_mma_1688_tf32(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)m;
    float a[16][16], b[16][8];
    for (int l = 0; l < LANES; l++) {
        for (int j = 0; j < 4; j++) {
            const uint32_t x = ((uint32_t *)row(w, i, 4 + j))[l] & 0xffffe000;
            memcpy(&a[l / 4 + j % 2 * 8][l % 4 + j / 2 * 4], &x, 4);
        }
        for (int j = 0; j < 2; j++) {
            const uint32_t x = ((uint32_t *)row(w, i, 8 + j))[l] & 0xffffe000;
            memcpy(&b[l % 4 + j * 4][l / 4], &x, 4);
        }
    }
    multiply(w, i, 10, 8, a, b);
}

/* ---- wgmma: operands d [N / 2], a (1 descriptor or 4 registers), b descriptor, accumulate, ... ---- */

static float e4m3_value(uint8_t x)
{
    const int exponent = x >> 3 & 15, fraction = x & 7;
    const float y = (x & 0x7f) == 0x7f ? NAN
                    : exponent         ? ldexpf((float)(8 + fraction), exponent - 10)
                                       : ldexpf((float)fraction, -9);
    return x & 0x80 ? -y : y;
}

/* A matrix in shared memory, with the 128-byte swizzle. */
struct tile {
    uint64_t start, lead, stride;
};
static struct tile describe(struct warp *w, uint64_t d)
{
    if (d >> 62 != 1) fault(w, 0, "a wgmma descriptor without the 128-byte swizzle");
    if (d >> 49 & 7) fault(w, 0, "a wgmma descriptor with a base offset");
    return (struct tile){(d & 0x3fff) << 4, (d >> 16 & 0x3fff) << 4, (d >> 32 & 0x3fff) << 4};
}
static const void *element(struct warp *w, uint64_t a, int64_t bytes)
{
    const char *p = reach(w, 0, SHARED, a ^ ((a >> 7 & 7) << 4), bytes);
    proxy_read(w, 0, p, bytes);
    return p;
}
/* 16 bytes at byte b of row r of a K-major tile: rows of 128 bytes in groups of 8 */
static const void *of_row(struct warp *w, struct tile t, int r, int b)
{
    return element(w, t.start + (uint64_t)(r / 8) * t.stride + (uint64_t)(r % 8) * 128 + (uint64_t)b, 16);
}

/* b [k, n] for columns 8 g to 8 g + 7 */
static void load_b(struct warp *w, struct tile t, bool mn_major, int g, float (*b)[8])
{
    uint16_t x[8];
    if (mn_major)
        for (int k = 0; k < 16; k++) {
            memcpy(x,
                   element(w,
                           t.start + (uint64_t)(g / 8) * t.lead + (uint64_t)(k / 8) * t.stride +
                               (uint64_t)(k % 8) * 128 + (uint64_t)(g % 8) * 16,
                           16),
                   16);
            for (int c = 0; c < 8; c++) b[k][c] = bf16_value(x[c]);
        }
    else
        for (int c = 0; c < 8; c++)
            for (int h = 0; h < 2; h++) {
                memcpy(x, of_row(w, t, 8 * g + c, 16 * h), 16);
                for (int k = 0; k < 8; k++) b[8 * h + k][c] = bf16_value(x[k]);
            }
}

/* a [16, k] for the rows of this warp */
static void load_a(struct warp *w, const struct ins *i, struct tile t, float (*a)[32])
{
    const int first = w->id % 4 * 16;
    uint8_t x[16];
    if (i->trans_a)
        for (int k = 0; k < 16; k++)
            for (int h = 0; h < 2; h++) {
                const uint64_t at =
                    (uint64_t)(k / 8) * t.stride + (uint64_t)(k % 8) * 128 + (uint64_t)(first + 8 * h) * 2;
                memcpy(x, element(w, t.start + at, 16), 16);
                for (int r = 0; r < 8; r++) a[8 * h + r][k] = bf16_value(x[2 * r] | (uint32_t)x[2 * r + 1] << 8);
            }
    else
        for (int r = 0; r < 16; r++)
            for (int h = 0; h < 2; h++) {
                memcpy(x, of_row(w, t, first + r, 16 * h), 16);
                for (int k = 0; k < (i->e4m3 ? 16 : 8); k++)
                    a[r][(i->e4m3 ? 16 : 8) * h + k] =
                        i->e4m3 ? e4m3_value(x[k]) : bf16_value(x[2 * k] | (uint32_t)x[2 * k + 1] << 8);
            }
}

/* Adds a [16, n_k] b [n_k, 8] to columns 8 g.. of the rows of this warp. */
static void accumulate(struct warp *w, const struct ins *i, int g, bool add, int n_k, float (*a)[32], float (*b)[8])
{
    float d[16][8];
    for (int k = 0; k < 4; k++) {
        const float *x = row(w, i, 4 * g + k);
        for (int l = 0; l < LANES; l++) d[l / 4 + k / 2 * 8][l % 4 * 2 + k % 2] = add ? x[l] : 0;
    }
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < n_k; k++)
            for (int c = 0; c < 8; c++) d[r][c] = fmaf(a[r][k], b[k][c], d[r][c]);
    for (int k = 0; k < 4; k++) {
        float *x = row(w, i, 4 * g + k);
        for (int l = 0; l < LANES; l++) x[l] = d[l / 4 + k / 2 * 8][l % 4 * 2 + k % 2];
    }
}

void wgmma_run(struct warp *w, const struct product *p)
{
    const struct ins *i = p->ins;
    const int n_d = (int)i->imm / 2;
    const struct tile tb = describe(w, p->b);
    float a[16][32], b[32][8];
    if (i->a_registers) {
        float x[16][16];
        fragment_a(w, i, n_d, 4, x);
        for (int r = 0; r < 16; r++) memcpy(a[r], x[r], sizeof(x[r]));
    } else {
        load_a(w, i, describe(w, p->a), a);
    }
    for (int g = 0; g < n_d / 4; g++) {
        if (i->e4m3)
            for (int c = 0; c < 8; c++)
                for (int k = 0; k < 32; k++)
                    b[k][c] = e4m3_value(((const uint8_t *)of_row(w, tb, 8 * g + c, k / 16 * 16))[k % 16]);
        else
            load_b(w, tb, i->trans, g, b);
        accumulate(w, i, g, p->add, i->e4m3 ? 32 : 16, a, b);
    }
}

void ptx_wgmma(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)m;
    int at = (int)i->imm / 2;
    struct product p = {.ins = i, .a = i->a_registers ? 0 : *(uint64_t *)row(w, i, at)};
    at += i->a_registers ? 4 : 1;
    p.b = *(uint64_t *)row(w, i, at);
    p.add = *(uint32_t *)row(w, i, at + 1) != 0;
    wgmma_issue(w, &p);
}
