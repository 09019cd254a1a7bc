/* tensor.c - dtypes, views, the arena. Readers of files have checked that sizes fit int64; here an overflow is a bug
 * and stops the process. */
#include "kernels/tensor.h"

#include <math.h>

#include "kernels/format/minifloat.h"

static const struct {
    const char *name;
    int64_t size;
} dtypes[DT_COUNT] = {
    [DT_NONE] = {"none", 0}, [DT_F32] = {"f32", 4}, [DT_F64] = {"f64", 8}, [DT_BF16] = {"bf16", 2},
    [DT_F16] = {"f16", 2},   [DT_U8] = {"u8", 1},   [DT_I32] = {"i32", 4}, [DT_I64] = {"i64", 8},
};

int64_t dtype_size(enum dtype t) { return dtypes[t].size; }
const char *dtype_name(enum dtype t) { return dtypes[t].name; }

float bf16_to_f32(uint16_t h) { return bits_float((uint32_t)h << 16); }

uint16_t f32_to_bf16(float f)
{
    const uint32_t bits = float_bits(f);
    if (f != f)
        return (uint16_t)(bits >> 16 | 0x40); /* quiet NaN: a payload only in the low half must not become infinity */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float f16_to_f32(uint16_t h)
{
    float sign = h & 0x8000 ? -1.0f : 1.0f;
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexpf((float)mantissa, -24);
    return sign * ldexpf((float)(mantissa + 1024), exponent - 25);
}

uint16_t f32_to_f16(float f)
{
    uint32_t bits = float_bits(f);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const float a = fabsf(f);
    if (f != f) return sign | 0x7e00;
    if (a >= 65520) return sign | 0x7c00;
    if (a < 0x1p-14f) return (uint16_t)(sign | (uint32_t)rintf(a * 0x1p24f)); /* denormal; 1024 is 2^-14 */
    bits = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - (112u << 23)) >> 13);
}

/* ---- views ---- */

static int64_t product(int64_t a, int64_t b)
{
    int64_t out;
    MT_REQUIRE(i64_mul(a, b, &out), "size %lld x %lld", (long long)a, (long long)b);
    return out;
}

struct tensor tensor_1d(void *data, enum dtype t, int64_t n)
{
    return (struct tensor){.data = data, .dtype = t, .ndim = 1, .shape = {n}, .ld = n};
}

struct tensor tensor_2d(void *data, enum dtype t, int64_t rows, int64_t cols)
{
    return (struct tensor){.data = data, .dtype = t, .ndim = 2, .shape = {rows, cols}, .ld = cols};
}

struct tensor tensor_3d(void *data, enum dtype t, int64_t n, int64_t rows, int64_t cols)
{
    return (struct tensor){.data = data, .dtype = t, .ndim = 3, .shape = {n, rows, cols}, .ld = cols};
}

static void *advance(struct tensor x, int64_t elements)
{
    return x.data ? (char *)x.data + elements * dtype_size(x.dtype) : NULL;
}

struct tensor tensor_cols(struct tensor x, int64_t first, int64_t count)
{
    MT_REQUIRE(x.ndim >= 2, "columns of a tensor with %d dimensions", x.ndim);
    int64_t cols = x.shape[x.ndim - 1];
    MT_REQUIRE(first >= 0 && count >= 0 && first <= cols - count, "columns %lld + %lld of %lld", (long long)first,
               (long long)count, (long long)cols);
    x.data = advance(x, first);
    x.shape[x.ndim - 1] = count;
    return x;
}

struct tensor tensor_rows(struct tensor x, int64_t first, int64_t count)
{
    MT_REQUIRE(x.ndim >= 1 && first >= 0 && count >= 0 && first <= x.shape[0] - count, "rows %lld + %lld of %lld",
               (long long)first, (long long)count, (long long)x.shape[0]);
    int64_t stride = x.ndim == 1 ? 1 : x.ndim == 2 ? x.ld : x.shape[1] * x.ld;
    x.data = advance(x, first * stride);
    x.shape[0] = count;
    if (x.ndim == 1) x.ld = count;
    return x;
}

int64_t tensor_count(struct tensor x)
{
    if (x.ndim == 0) return 0; /* absent */
    int64_t n = 1;
    for (int i = 0; i < x.ndim; i++) n = product(n, x.shape[i]);
    return n;
}

int64_t tensor_bytes(struct tensor x) { return product(tensor_count(x), dtype_size(x.dtype)); }

/* ---- arena ---- */

#define MT_ARENA_ALIGN 256 /* alignment sufficient for cp.async, TMA and every vector load */

struct arena arena_measure(const char *name) { return (struct arena){.name = name, .cap = INT64_MAX}; }

void *arena_push(struct arena *a, int64_t bytes)
{
    int64_t padded, used;
    bool fits = i64_add(bytes, MT_ARENA_ALIGN - 1, &padded);
    padded -= padded % MT_ARENA_ALIGN;
    fits = fits && i64_add(a->used, padded, &used) && used <= a->cap;
    MT_REQUIRE(fits, "arena %s is full: %lld of %lld bytes used, %lld more requested", a->name, (long long)a->used,
               (long long)a->cap, (long long)bytes);
    void *p = a->base ? a->base + a->used : NULL;
    a->used = used;
    a->peak = MT_MAX(a->peak, used);
    return p;
}

struct tensor arena_tensor_1d(struct arena *a, enum dtype t, int64_t n)
{
    return tensor_1d(arena_push(a, product(n, dtype_size(t))), t, n);
}

struct tensor arena_tensor_2d(struct arena *a, enum dtype t, int64_t rows, int64_t cols)
{
    return tensor_2d(arena_push(a, product(product(rows, cols), dtype_size(t))), t, rows, cols);
}

struct tensor arena_tensor_3d(struct arena *a, enum dtype t, int64_t n, int64_t rows, int64_t cols)
{
    return tensor_3d(arena_push(a, product(product(product(n, rows), cols), dtype_size(t))), t, n, rows, cols);
}

int64_t arena_mark(const struct arena *a) { return a->used; }

void arena_release(struct arena *a, int64_t mark)
{
    MT_REQUIRE(mark >= 0 && mark <= a->used, "arena %s: mark %lld above %lld", a->name, (long long)mark,
               (long long)a->used);
    a->used = mark;
}
