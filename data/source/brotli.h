/* brotli.h - decompresses Brotli; brotli_none.c is in builds without libbrotlidec. */
#ifndef MT_BROTLI_H
#define MT_BROTLI_H

#include "kernels/base.h"

bool brotli_built(void);
/* As codec_unpack. */
bool brotli_unpack(uint8_t *out, int64_t size, const uint8_t *in, int64_t n);
const char *brotli_library(char name[32]); /* "brotli 1.0.9", "no brotli" */

#endif
