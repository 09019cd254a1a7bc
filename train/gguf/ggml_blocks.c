/* ggml_blocks.c - the blocks of ggml: 32 values with a scale. Q8_0: f16 scale, 32 int8. Q4_0: f16 scale, 16 bytes; byte
 * j has value j + 8 in its lower half and value (j + 16) + 8 in its upper half. MXFP4: e8m0 scale, halves in the order
 * of Q4_0. Source: ggml, src/ggml-common.h, src/ggml-quants.c (quantize_row_*_ref). */
#include "train/gguf/ggml_blocks.h"

#include <math.h>
#include <string.h>

#include "kernels/tensor.h"

enum { BLOCK = 32, HALF = BLOCK / 2 };

/* The value with the largest magnitude, with its sign. */
static float extreme(const float *x)
{
    float most = 0;
    for (int i = 0; i < BLOCK; i++)
        if (fabsf(x[i]) > fabsf(most)) most = x[i];
    return most;
}

static void put_scale(uint8_t *out, float d)
{
    const uint16_t h = f32_to_f16(d);
    memcpy(out, &h, sizeof(h));
}

static float scale_of(const uint8_t *in)
{
    uint16_t h;
    memcpy(&h, in, sizeof(h));
    return f16_to_f32(h);
}

/* The inverse of a scale; 0 if the scale is 0, or so small that its inverse is infinite. */
static float inverse_of(float d) { return d != 0 && isfinite(1 / d) ? 1 / d : 0; }

static void encode_q8_0(uint8_t *out, const float *x)
{
    const float d = fabsf(extreme(x)) / 127, inverse = inverse_of(d);
    put_scale(out, d);
    for (int i = 0; i < BLOCK; i++) out[2 + i] = (uint8_t)(int8_t)roundf(x[i] * inverse);
}

static void encode_q4_0(uint8_t *out, const float *x)
{
    const float d = extreme(x) / -8, inverse = inverse_of(d);
    put_scale(out, d);
    for (int i = 0; i < HALF; i++) {
        const int low = MT_MIN(15, (int)(x[i] * inverse + 8.5f)),
                  high = MT_MIN(15, (int)(x[HALF + i] * inverse + 8.5f));
        out[2 + i] = (uint8_t)(low | high << 4);
    }
}

/* A scale that f16 does not hold is infinite. */
static bool fits(enum ggml_type type, const float *x, int n)
{
    for (int i = 0; i < n; i++)
        if (!isfinite(type == GGML_F16 ? f16_to_f32(f32_to_f16(x[i])) : x[i])) return false;
    if (type == GGML_F32 || type == GGML_F16) return true;
    return isfinite(f16_to_f32(f32_to_f16(extreme(x) / (type == GGML_Q8_0 ? 127 : 8))));
}

int64_t ggml_encode(uint8_t *out, enum ggml_type type, const float *x, int64_t n)
{
    const struct ggml_layout *l = ggml_layout(type);
    int64_t bad = 0;
    MT_REQUIRE(l && type != GGML_MXFP4 && n % l->block == 0, "type %d, %lld values", (int)type, (long long)n);
    for (int64_t i = 0; i < n; i += l->block, x += l->block, out += l->bytes) {
        if (!fits(type, x, l->block)) {
            memset(out, 0, (size_t)l->bytes);
            bad++;
        } else if (type == GGML_F32) {
            memcpy(out, x, 4);
        } else if (type == GGML_F16) {
            put_scale(out, *x);
        } else if (type == GGML_Q8_0) {
            encode_q8_0(out, x);
        } else {
            encode_q4_0(out, x);
        }
    }
    return bad;
}

static void decode_block(float *out, enum ggml_type type, const uint8_t *in)
{
    const float d = scale_of(in);
    for (int i = 0; i < BLOCK && type == GGML_Q8_0; i++) out[i] = d * (float)(int8_t)in[2 + i];
    for (int i = 0; i < HALF && type == GGML_Q4_0; i++) {
        out[i] = d * (float)((in[2 + i] & 15) - 8);
        out[HALF + i] = d * (float)((in[2 + i] >> 4) - 8);
    }
}

void ggml_decode(float *out, enum ggml_type type, const uint8_t *in, int64_t n)
{
    const struct ggml_layout *l = ggml_layout(type);
    MT_REQUIRE(l && type != GGML_MXFP4 && n % l->block == 0, "type %d, %lld values", (int)type, (long long)n);
    for (int64_t i = 0; i < n; i += l->block, in += l->bytes, out += l->block) {
        if (type == GGML_F32)
            memcpy(out, in, 4);
        else if (type == GGML_F16)
            *out = scale_of(in);
        else
            decode_block(out, type, in);
    }
}

static uint8_t nibble(const uint8_t *nibbles, int64_t i) { return nibbles[i / 2] >> (i % 2 * 4) & 15; }

void ggml_mxfp4_pack(uint8_t *out, const uint8_t *nibbles, const uint8_t *scales, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK) {
        *out++ = scales[i / BLOCK];
        for (int k = 0; k < HALF; k++) *out++ = (uint8_t)(nibble(nibbles, i + k) | nibble(nibbles, i + HALF + k) << 4);
    }
}

void ggml_mxfp4_unpack(uint8_t *nibbles, uint8_t *scales, const uint8_t *in, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK, in += 1 + HALF) {
        scales[i / BLOCK] = in[0];
        for (int k = 0; k < HALF; k++) {
            const uint8_t low = in[1 + k] & 15, high = in[1 + k] >> 4;
            uint8_t *a = &nibbles[(i + k) / 2], *b = &nibbles[(i + HALF + k) / 2];
            *a = (uint8_t)(k % 2 ? (*a & 15) | low << 4 : low);
            *b = (uint8_t)(k % 2 ? (*b & 15) | high << 4 : high);
        }
    }
}

double ggml_error(enum ggml_type type, const float *x)
{
    const double half = 0x1p-25; /* the smallest steps of f16 */
    if (type == GGML_F32) return 0;
    if (type == GGML_F16) return fabs((double)*x) * 0x1p-11 + half;
    const double most = fabs((double)extreme(x));
    if (type == GGML_Q8_0) return most / 254 + 127 * (most / 127 * 0x1p-11 + half);
    return most / 8 + 8 * (most / 8 * 0x1p-11 + half); /* eight steps up saturate at seven */
}
