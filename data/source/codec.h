/* codec.h - decompresses blocks whose size is known: gzip, snappy, LZ4, zstd, Brotli. The only user of zstd. */
#ifndef MT_CODEC_H
#define MT_CODEC_H

#include "kernels/base.h"

enum codec { CODEC_NONE, CODEC_SNAPPY, CODEC_GZIP, CODEC_ZSTD, CODEC_LZ4, CODEC_LZ4_FRAME, CODEC_BROTLI };

/* in[n] -> out[size], all of it. False: damaged, or of another size. */
bool codec_unpack(enum codec codec, uint8_t *out, int64_t size, const uint8_t *in, int64_t n);
const char *codec_library(char name[64]); /* "zstd 1.5.4, brotli 1.0.9" */

#endif
