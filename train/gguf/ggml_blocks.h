/* ggml_blocks.h - values of GGUF tensors: encoding, decoding, rounding errors. */
#ifndef MT_GGML_BLOCKS_H
#define MT_GGML_BLOCKS_H

#include "data/gguf.h"

/* Encodes x [n], whole blocks, in any type but MXFP4. Returns the number of values that are not finite or too large for
 * the type. */
int64_t ggml_encode(uint8_t *out, enum ggml_type type, const float *x, int64_t n) MT_CHECK;
void ggml_decode(float *out, enum ggml_type type, const uint8_t *in, int64_t n);
/* Packs MXFP4 from moetrain's layout: nibbles [n/2], the lower half first, and scales [n/32]. */
void ggml_mxfp4_pack(uint8_t *out, const uint8_t *nibbles, const uint8_t *scales, int64_t n);
void ggml_mxfp4_unpack(uint8_t *nibbles, uint8_t *scales, const uint8_t *in, int64_t n);
/* The largest rounding error of a value in the block x; F16: of the value x[0]; F32: 0. Not for MXFP4.
 */
double ggml_error(enum ggml_type type, const float *x);

#endif
