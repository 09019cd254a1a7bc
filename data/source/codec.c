/* codec.c - decompresses blocks whose size is known. */
#include "data/source/codec.h"

#include <stdio.h>
#include <string.h>
#include <zstd.h>

#include "data/file/file.h"
#include "data/source/brotli.h"
#include "data/source/thrift.h"

/* Appends n bytes from `back` bytes before the end, which may overlap it. */
static bool copy(uint8_t *out, int64_t *at, int64_t size, int64_t back, int64_t n)
{
    if (back < 1 || back > *at || n > size - *at) return false;
    for (int64_t i = 0; i < n; i++, ++*at) out[*at] = out[*at - back];
    return true;
}

/* Decodes Snappy's format: the size, then literals and copies of earlier bytes; the low two bits of a tag say which. */
static bool unpack_snappy(uint8_t *out, int64_t size, const uint8_t *p, int64_t n)
{
    const uint8_t *end = p + n;
    bool bad = false;
    int64_t at = 0;
    if (thrift_varint(&p, end, &bad) != (uint64_t)size || bad) return false;
    while (p < end) {
        const uint8_t tag = *p++;
        const int kind = tag & 3, extra = kind ? kind == 3 ? 4 : kind : tag >> 2 >= 60 ? (tag >> 2) - 59 : 0;
        int64_t more = 0;
        if (end - p < extra) return false;
        for (int i = 0; i < extra; i++) more |= (int64_t)p[i] << 8 * i;
        p += extra;
        if (kind == 1) {
            if (!copy(out, &at, size, (tag >> 5) << 8 | more, 4 + (tag >> 2 & 7))) return false;
        } else if (kind) {
            if (!copy(out, &at, size, more, 1 + (tag >> 2))) return false;
        } else {
            const int64_t literal = 1 + (extra ? more : tag >> 2);
            if (literal > end - p || literal > size - at) return false;
            memcpy(out + at, p, (size_t)literal);
            p += literal;
            at += literal;
        }
    }
    return at == size;
}

/* A length of LZ4: n, of four bits, and bytes that continue it; -1: damaged. */
static int64_t lz4_length(const uint8_t **p, const uint8_t *end, int64_t n)
{
    uint8_t more = n == 15 ? 255 : 0;
    while (more == 255) {
        if (*p == end) return -1;
        n += more = *(*p)++;
    }
    return n;
}

/* Decodes a block of LZ4's format to out + *at: literals and copies of earlier bytes in turn; it ends with literals. */
static bool unpack_lz4(uint8_t *out, int64_t *at, int64_t size, const uint8_t *p, int64_t n)
{
    const uint8_t *end = p + n;
    while (p < end) {
        const uint8_t tag = *p++;
        const int64_t literal = lz4_length(&p, end, tag >> 4);
        if (literal < 0 || literal > end - p || literal > size - *at) return false;
        if (literal) memcpy(out + *at, p, (size_t)literal);
        p += literal;
        *at += literal;
        if (p == end) return true;
        if (end - p < 2) return false;
        const int64_t back = p[0] | p[1] << 8;
        p += 2;
        const int64_t more = lz4_length(&p, end, tag & 15);
        if (more < 0 || !copy(out, at, size, back, more + 4)) return false;
    }
    return false;
}

/* Decodes LZ4's frame format: a header, then blocks, each after its size. Checksums are not compared. */
static bool unpack_lz4_frame(uint8_t *out, int64_t size, const uint8_t *p, int64_t n)
{
    const uint8_t *end = p + n, flags = n < 7 ? 0 : p[4];
    const int64_t header = 7 + (flags & 8 ? 8 : 0) + (flags & 1 ? 4 : 0), check = flags & 16 ? 4 : 0;
    int64_t at = 0;
    if (n < header || memcmp(p, "\x04\x22\x4d\x18", 4) || flags >> 6 != 1) return false;
    for (p += header; end - p >= 4;) {
        uint32_t block;
        memcpy(&block, p, 4);
        p += 4;
        const int64_t bytes = block & INT32_MAX;
        if (!block) return at == size;
        if (bytes > end - p - check) return false;
        if (block > INT32_MAX) { /* not compressed */
            if (bytes > size - at) return false;
            memcpy(out + at, p, (size_t)bytes);
            at += bytes;
        } else if (!unpack_lz4(out, &at, size, p, bytes)) {
            return false;
        }
        p += bytes + check;
    }
    return false;
}

bool codec_unpack(enum codec codec, uint8_t *out, int64_t size, const uint8_t *in, int64_t n)
{
    int64_t at = 0;
    switch (codec) {
    case CODEC_NONE:
        if (n != size) return false;
        if (n) memcpy(out, in, (size_t)n);
        return true;
    case CODEC_SNAPPY: return unpack_snappy(out, size, in, n);
    case CODEC_GZIP: return file_gunzip(out, size, in, n);
    case CODEC_LZ4: return unpack_lz4(out, &at, size, in, n) && at == size;
    case CODEC_LZ4_FRAME: return unpack_lz4_frame(out, size, in, n);
    case CODEC_BROTLI: return brotli_unpack(out, size, in, n);
    case CODEC_ZSTD: return ZSTD_decompress(out, (size_t)size, in, (size_t)n) == (size_t)size;
    }
    return false;
}

const char *codec_library(char name[64])
{
    char brotli[32];
    snprintf(name, 64, "zstd %.20s, %s", ZSTD_versionString(), brotli_library(brotli));
    return name;
}
