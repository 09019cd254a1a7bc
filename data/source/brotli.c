/* brotli.c - see brotli.h. The only user of libbrotlidec. */
#include "data/source/brotli.h"

#include <brotli/decode.h>
#include <stdio.h>

bool brotli_built(void) { return true; }

bool brotli_unpack(uint8_t *out, int64_t size, const uint8_t *in, int64_t n)
{
    size_t got = (size_t)size;
    return BrotliDecoderDecompress((size_t)n, in, &got, out) == BROTLI_DECODER_RESULT_SUCCESS && got == (size_t)size;
}

const char *brotli_library(char name[32])
{
    const unsigned v = BrotliDecoderVersion();
    snprintf(name, 32, "brotli %u.%u.%u", v >> 24, v >> 12 & 0xfff, v & 0xfff);
    return name;
}
