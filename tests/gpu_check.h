/* gpu_check.h - large test tensors in GPU memory, filled on the device and compared on the host. (Tensors of op_check.h
 * are small: they are in managed memory, and the host fills them value by value.)
 *
 * Inputs repeat a pattern of 8 * (2^19 - 1) values. For bf16 the period is a prime number of 16-byte blocks, so rows
 * differ from each other, and so do values at a distance of a power of two. */
#ifndef MT_GPU_CHECK_H
#define MT_GPU_CHECK_H

#include "tests/op_check.h"

/* Fill patterns: test_value as bf16 or f32; arbitrary bytes; e8m0 exponents near 2^0; 0xff, which is NaN. */
enum pattern { OF_BF16, OF_F32, OF_BYTES, OF_SCALES, OF_ONES, N_PATTERN };

extern struct device gpu; /* open between gpu_begin and gpu_end */
extern void *gpu_pattern[N_PATTERN];

/* Opens the GPU with a work arena of work_gib. Skips the test with a reason when there is no GPU, or when its free
 * memory is below `gib`, the total that the test needs. */
void gpu_begin(int64_t gib, int64_t work_gib, bool portable);
/* Frees everything made since; also a cmocka teardown, for tests that fail. Returns 0; may be called twice. */
int gpu_end(void **state);

void *gpu_bytes(const void *src, int64_t bytes);                  /* copies from the host */
void *gpu_repeat(enum pattern p, uint64_t stream, int64_t bytes); /* `stream` selects the start in the pattern */

/* Like make_empty and the others of op_check.h; random tensors are BF16 or F32. */
struct tensor gpu_empty(enum dtype t, int64_t n0, int64_t n1, int64_t n2);
struct tensor gpu_zero(enum dtype t, int64_t n0, int64_t n1, int64_t n2);
struct tensor gpu_random(enum dtype t, uint64_t stream, int64_t n0, int64_t n1, int64_t n2);
struct tensor gpu_i32(const int32_t *values, int64_t n);
struct tensor gpu_copy(struct tensor x);                                               /* x is contiguous */
struct weight gpu_weight(uint64_t stream, int64_t n_exp, int64_t n_out, int64_t n_in); /* BF16 */

/* Copies the tensor to the host; the caller frees its data with mem_free. */
struct tensor gpu_host(struct tensor x);
/* Fails with `what` unless the two device tensors are finite and have the same bits, or tensor_error is at most
 * bound. */
void expect_same(const char *what, struct tensor got, struct tensor want);
void expect_near(const char *what, struct tensor got, struct tensor want, double bound);

#endif
