/* finite.c - finds values that are not finite. The largest magnitude of some data, from a loop that the compiler
 * vectorises, shows whether they have such a value; only then its position is searched. Matrices with scales are
 * decoded value by value only if the largest scale times the largest code is not finite. */
#include "model/stored/finite.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/format/minifloat.h"
#include "kernels/format/quant.h"
#include "kernels/threads.h"

#define ADVICE "the checkpoint is damaged; download or convert it again"

/* How a value is stored: the bits of its magnitude, and the largest of a finite one. */
struct coding {
    int64_t size; /* bytes; 0: the dtype has no value that is not finite */
    uint32_t magnitude, largest;
};

static struct coding coding_of(const struct st_tensor *t)
{
    if (!strcmp(t->st_dtype, "F8_E4M3")) return (struct coding){1, 0x7f, 0x7e};
    if (!strcmp(t->st_dtype, "F8_E8M0")) return (struct coding){1, 0xff, 254};
    if (t->dtype == DT_F32) return (struct coding){4, 0x7fffffff, 0x7f7fffff};
    if (t->dtype == DT_BF16) return (struct coding){2, 0x7fff, 0x7f7f};
    if (t->dtype == DT_F16) return (struct coding){2, 0x7fff, 0x7bff};
    return (struct coding){0};
}

static uint32_t bits_at(const uint8_t *data, int64_t size)
{
    uint16_t half;
    uint32_t bits;
    if (size == 1) return *data;
    if (size == 2) return memcpy(&half, data, 2), half;
    return memcpy(&bits, data, 4), bits;
}

/* The largest magnitude of n values, as bits; the data may be unaligned. A magnitude's bits are a signed integer of its
 * size; every x86-64 CPU computes their maximum for 16 bytes at once. */
static uint32_t largest_of(const uint8_t *data, int64_t n, struct coding c)
{
    if (c.size == 1) {
        const uint8_t mask = (uint8_t)c.magnitude;
        uint8_t max = 0;
        for (int64_t i = 0; i < n; i++) max = MT_MAX(max, (uint8_t)(data[i] & mask));
        return max;
    }
    if (c.size == 2) {
        int16_t max = 0, bits;
        for (int64_t i = 0; i < n; i++) {
            memcpy(&bits, data + 2 * i, 2);
            bits &= 0x7fff;
            max = MT_MAX(max, bits);
        }
        return (uint32_t)max;
    }
    int32_t max = 0, bits;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&bits, data + 4 * i, 4);
        bits &= 0x7fffffff;
        max = MT_MAX(max, bits);
    }
    return (uint32_t)max;
}

/* Parts of the data, of PART values, in which threads find the largest magnitude. */
enum { PART = 1 << 18 };
struct parts {
    const uint8_t *data;
    int64_t n;
    struct coding c;
    uint32_t *largest;
};

static void largest_of_part(void *arg, int64_t i)
{
    const struct parts *p = arg;
    p->largest[i] = largest_of(p->data + i * PART * p->c.size, MT_MIN(p->n - i * PART, PART), p->c);
}

static uint32_t largest_bits(const uint8_t *data, int64_t bytes, struct coding c)
{
    const int64_t n = c.size ? bytes / c.size : 0, n_part = (n + PART - 1) / PART;
    struct parts p = {data, n, c, mem_array(n_part + 1, sizeof(uint32_t))};
    uint32_t max = 0;
    threads_run(n_part, 0, largest_of_part, &p);
    for (int64_t i = 0; i < n_part; i++) max = MT_MAX(max, p.largest[i]);
    mem_free(p.largest);
    return max;
}

static float value_of(const struct st_tensor *t, uint32_t bits)
{
    if (!strcmp(t->st_dtype, "F8_E4M3")) return e4m3_value(bits);
    if (!strcmp(t->st_dtype, "F8_E8M0")) return e8m0_scale((uint8_t)bits);
    if (t->dtype == DT_BF16) return bf16_to_f32((uint16_t)bits);
    if (t->dtype == DT_F16) return f16_to_f32((uint16_t)bits);
    return bits_float(bits);
}

/* For errors: "model.safetensors: tensor NAME", and the position of a byte in a tensor or a part of one: " at [3, 17]"
 * in its shape, "" in a scalar. */
struct place {
    char tensor[640], at[128];
};
static struct place place_of(const struct safetensors *st, const struct st_tensor *t, int64_t byte)
{
    const struct st_tensor *whole = safetensors_find(st, t->name);
    const char *file = t->shard < st->n_shards && st->maps ? st->shard_names[t->shard] : NULL;
    struct place p = {.at = ""};
    int64_t count = 1, index[8];
    snprintf(p.tensor, sizeof(p.tensor), "%s%stensor %s", file ? file : "", file ? ": " : "", safetensors_stored(t));
    if (!whole) whole = t;
    for (int i = 0; i < whole->ndim; i++) count *= whole->shape[i];
    int64_t rest = (t->data - whole->data + byte) / MT_MAX(whole->bytes / MT_MAX(count, 1), 1);
    for (int i = whole->ndim - 1; i >= 0; i--) {
        index[i] = rest % whole->shape[i];
        rest /= whole->shape[i];
    }
    for (int i = 0; i < whole->ndim; i++)
        snprintf(p.at + strlen(p.at), sizeof(p.at) - strlen(p.at), "%s%lld%s", i ? ", " : " at [", (long long)index[i],
                 i == whole->ndim - 1 ? "]" : "");
    return p;
}

int finite_check(const struct safetensors *st, const struct st_tensor *t, int64_t at, int64_t n, struct err *err)
{
    const struct coding c = coding_of(t);
    if (largest_bits(t->data + at, n, c) <= c.largest) return 0;
    while ((bits_at(t->data + at, c.size) & c.magnitude) <= c.largest) at += c.size;
    const struct place p = place_of(st, t, at);
    const float x = value_of(t, bits_at(t->data + at, c.size));
    return err_set(err, "%s has the value %s%s: " ADVICE, p.tensor, isnan(x) ? "nan" : x < 0 ? "-inf" : "inf", p.at);
}

int finite_check_data(const struct safetensors *st, const struct source *s, struct err *err)
{
    return s->block ? 0 : finite_check(st, s->data, 0, s->data->bytes, err); /* nibbles have any dtype */
}

/* ---- matrices with scales ---- */

float finite_largest(const struct st_tensor *t) { return value_of(t, largest_bits(t->data, t->bytes, coding_of(t))); }

static bool fits_bf16(float x) { return isfinite(bf16_to_f32(f32_to_bf16(x))); }

/* The byte that has the code of element i. */
static int64_t byte_of(const struct source *s, int64_t i)
{
    const int64_t in_byte = s->n_out * s->n_in / s->data->bytes;
    return s->transposed ? i % s->n_in / in_byte * s->n_out + i / s->n_in : i / in_byte;
}

static int check_products(const struct safetensors *st, const struct source *s, const struct st_tensor *scale,
                          struct err *err)
{
    struct weight w;
    char *planes = source_read(&w, s, s->format, 1);
    int rc = 0;
    for (int64_t i = 0; i < s->n_out * s->n_in && !rc; i++) {
        const float x = quant_value(&w, 0, i);
        if (fits_bf16(x)) continue;
        const struct place p = place_of(st, s->data, byte_of(s, i));
        rc = err_set(err, "%s decodes to %s%s, with the scales of tensor %s: " ADVICE, p.tensor,
                     isnan(x) ? "nan"
                     : x < 0  ? "-inf"
                              : "inf",
                     p.at, safetensors_stored(scale));
    }
    mem_free(planes);
    return rc;
}

int finite_check_scaled(const struct safetensors *st, const struct source *s, struct err *err)
{
    const struct st_tensor *scale = s->nested_absmax ? s->nested_absmax : s->absmax ? s->absmax : s->scale;
    const struct st_tensor *const tables[] = {scale, s->scale2, s->code};
    if (!scale) return 0;
    const bool fits = fits_bf16(s->stored->bound(s));
    for (int i = 0; i < MT_LEN(tables) && !fits; i++)
        if (tables[i] && finite_check(st, tables[i], 0, tables[i]->bytes, err)) return -1;
    if (source_check(s, err)) return -1;
    return fits ? 0 : check_products(st, s, scale, err);
}
