/* brotli_none.c - brotli.h in a build without libbrotlidec. */
#include <stdio.h>

#include "data/source/brotli.h"

bool brotli_built(void) { return false; }

bool brotli_unpack(uint8_t *out, int64_t size, const uint8_t *in, int64_t n)
{
    (void)out, (void)size, (void)in, (void)n;
    return false;
}

const char *brotli_library(char name[32])
{
    snprintf(name, 32, "no brotli");
    return name;
}
