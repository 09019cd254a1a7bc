/* source.cuh - what the decoders of all formats share: a weight with its derived sizes, and formats of 4-bit codes.
 *
 * The decoder of a format is a struct device_NAME, NAME as in FORMATS, with the members
 *   bits     of a value
 *   coded    whether a value is one of sixteen, code(s, c), times a scale
 *   values8  x [8] = values 8v .. 8v+7 of expert e. The values of codes are code[c]: those of codes_of, or a copy in
 *            shared memory. weight_loads8 must hold.
 *   value    element i of expert e, of any shape: the same bits as quant_value. */
#ifndef MT_CUDA_FORMAT_SOURCE_H
#define MT_CUDA_FORMAT_SOURCE_H

#include "kernels/cuda/core/cuda.h"
#include "kernels/format/minifloat.h"

/* A weight and sizes derived from it. w.block is the format's block, if the format fixes one. */
struct source {
    struct weight w;
    uint32_t row_blocks;         /* blocks of a row, if they begin with rows */
    int64_t n, n_block, n_outer; /* per expert: values, blocks, groups of 256 blocks */
};

static inline struct source source_of(const struct weight *w)
{
    struct source s = {*w, 0, w->n_out * w->n_in, 0, 0};
    const int64_t block = weight_scale_block(w->format);
    MT_REQUIRE(!block || w->n_in % block == 0, "%s rows of %lld", weight_format_name(w->format), (long long)w->n_in);
    if (block) s.w.block = block;
    if (!s.w.block) return s;
    s.row_blocks = (uint32_t)ceil_div(w->n_in, s.w.block);
    s.n_block = ceil_div(s.n, s.w.block);
    s.n_outer = ceil_div(s.n_block, 256);
    return s;
}

/* Whether eight values that begin at a multiple of eight share a row and a scale, in aligned memory. */
static inline bool weight_loads8(const struct weight *w)
{
    return w->n_in % 8 == 0 && w->block % 8 == 0 && (uintptr_t)w->data % 16 == 0;
}

template <typename FORMAT> struct codes_of {
    const struct source &s;
    __device__ __forceinline__ float operator[](uint32_t c) const { return FORMAT::code(s, c); }
};

/* Elements i .. i+7 of the flat matrix of s, n_exp = 1; i is a multiple of 8. */
template <typename FORMAT>
static __device__ __forceinline__ void weight_load8(float v[8], const struct source &s, int64_t i)
{
    __builtin_assume((i & 7) == 0);
    FORMAT::values8(v, s, codes_of<FORMAT>{s}, 0, i >> 3);
}

/* The base of a FORMAT with two codes per byte. FORMAT has code(s, c), and
 *   block         values per scale; 0: s.w.block
 *   high_first    whether an even element is in the high nibble
 *   scale(s,e,b)  of block b of expert e */
template <typename FORMAT> struct nibbles {
    static constexpr int bits = 4;
    static constexpr bool coded = true;

    template <typename CODES>
    static __device__ __forceinline__ void values8(float x[8], const struct source &s, CODES code, int64_t e,
                                                   uint32_t v)
    {
        const uint32_t word = *(const uint32_t *)((const uint8_t *)s.w.data + (e * s.n + (int64_t)v * 8) / 2);
        const float scale = FORMAT::scale(s, e, v / (uint32_t)((FORMAT::block ? FORMAT::block : s.w.block) / 8));
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = __fmul_rn(code[word >> 4 * (j ^ FORMAT::high_first) & 15], scale);
    }

    static __device__ __forceinline__ float value(const struct source &s, int64_t e, int64_t i)
    {
        const uint32_t byte = ((const uint8_t *)s.w.data)[e * ((s.n + 1) / 2) + i / 2];
        return __fmul_rn(FORMAT::code(s, byte >> 4 * ((int)(i & 1) ^ FORMAT::high_first) & 15),
                         FORMAT::scale(s, e, i / s.w.block));
    }
};

/* place: as in parts/grouped.h. offs: row offsets of places; NULL: all have rows. */
static __device__ __forceinline__ bool has_rows(const int32_t *offs, int64_t place)
{
    return !offs || offs[place] < offs[place + 1];
}
static __device__ __forceinline__ int64_t expert_at(const int32_t *ids, int64_t place)
{
    return ids ? ids[place] : place;
}

#endif
