/* quant.h - weights of any format on the host: values, decoding, packing. quant_value defines the formats: tests
 * compare the decoders of the backends with it. */
#ifndef MT_QUANT_H
#define MT_QUANT_H

#include "kernels/format/format.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Values of the sixteen codes. FP4 has bitsandbytes' order, not that of e2m1; in both, bit 3 is the sign. */
extern const float quant_nf4_code[16], quant_fp4_code[16], quant_e2m1_code[16];
/* bitsandbytes' signed dynamic map, ascending: the values of q8 in a nested absmax. */
void quant_dynamic_map(float map[256]);
void quant_dynamic_map_unsigned(float map[256]); /* of values from 0 on */

float quant_absmax(const struct weight *w, int64_t e, int64_t block); /* of one block of expert e, nested or plain */
/* Element i of expert e's flat matrix (value of struct format). */
float quant_value(const struct weight *w, int64_t e, int64_t i);

/* Encoders, also those below, return the number of inputs that are not finite, which are encoded as 0. */

/* nibbles [n/2], scales [n/32], n a multiple of 32. The scale of a block is a quarter of the power of two at or below
 * its largest magnitude. Magnitudes above 6 times the scale become 6 times the scale; others round to nearest, ties to
 * the even code. */
int64_t quant_mxfp4_encode(uint8_t *nibbles, uint8_t *scales, const float *x, int64_t n);
/* format WF_NF4 or WF_FP4; nibbles [ceil(n/2)], absmax [ceil(n/block)], block even. Writes the bytes of bitsandbytes'
 * CUDA kernels, whose thresholds between codes are sometimes an ulp away from the middle of two values. */
int64_t quant_bnb_encode(enum weight_format format, uint8_t *nibbles, float *absmax, const float *x, int64_t n,
                         int64_t block);
/* Packs a dense matrix with n_threads threads, which call pack for pieces of whole blocks: n values from element `at`
 * on. The bytes do not depend on n_threads. */
typedef int64_t quant_piece_fn(void *const plane[PLANES], int64_t at, const float *x, int64_t n);
int64_t quant_pieces(quant_piece_fn *pack, void *const plane[PLANES], const struct weight *dense, int n_threads);
float quant_dense_absmax(const struct weight *dense, int n_threads); /* the largest finite magnitude */
enum { QUANT_BLOCK = 64 };                                           /* of NF4 as model.quantize packs it */
/* Elements [first, first + n) of expert e's flat matrix, with the values of quant_value. */
void quant_decode(float *out, const struct weight *w, int64_t e, int64_t first, int64_t n, int n_threads);
void quant_fp8_values(float value[256]); /* of every FP8 byte */
/* FP8 codes (e4m3) [n_out, n_in] as bf16, in out, which may be unaligned: code * scale, rounded to f32 and then to
 * bf16, with a scale per block of `rows` x `cols`, smaller at the edges. */
void quant_fp8_decode(char *out, const uint8_t *codes, const float *scale, int64_t n_out, int64_t n_in, int64_t rows,
                      int64_t cols, int n_threads);
/* Groups of 4-bit integers as bf16, in out, which may be unaligned: (nibble - 8) * scale, the low nibble first. */
void quant_int4_decode(char *out, const uint8_t *nibbles, const float *scale, int64_t n_group, int64_t group,
                       int n_threads);
/* MXFP4 for x that replaces packed values (old_*; NULL: none). A block takes its old shared exponent or that of
 * quant_mxfp4_encode, whichever gives the smaller sum of squared errors; on a tie the old one. An element whose nearest
 * value is its old value keeps its code, so x = the old values gives the old bytes. */
int64_t quant_mxfp4_merge(uint8_t *nibbles, uint8_t *scales, const float *x, const uint8_t *old_nibbles,
                          const uint8_t *old_scales, int64_t n, int n_threads);
/* FP8 codes (e4m3) of x [n_out, n_in], and scales [ceil(n_out/128), ceil(n_in/128)] e8m0, one per block of 128 x 128:
 * the least power of two with largest magnitude / scale <= 448; 1 for a block of zeros. */
int64_t quant_fp8_blocks(uint8_t *codes, uint8_t *scales, const float *x, int64_t n_out, int64_t n_in, int n_threads);
/* Packs the n absmax of one expert: q8 [n], nested_absmax [ceil(n/256)]; *offset = the mean of absmax. map:
 * quant_dynamic_map. */
void quant_nested_encode(uint8_t *q8, float *nested_absmax, float *offset, const float *absmax, int64_t n,
                         const float map[256]);

#ifdef __cplusplus
}
#endif
#endif
