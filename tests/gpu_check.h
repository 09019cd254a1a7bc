/* gpu_check.h - tensors of a test in the GPU's own memory, as large as it holds, and their comparison on the host.
 * (Those of op_check.h are in managed memory, and filled by the host value by value.)
 *
 * Inputs repeat a pattern of 8 * (2^19 - 1) values, a prime number of 16-byte pieces or more: rows differ from each
 * other, and what lies a power of two further on is not the same. */
#ifndef MT_GPU_CHECK_H
#define MT_GPU_CHECK_H

#include "tests/op_check.h"

/* What memory is filled with: test_value as bf16 or f32; any bytes; exponents of e8m0 near 2^0; 0xff, which is NaN. */
enum pattern { OF_BF16, OF_F32, OF_BYTES, OF_SCALES, OF_ONES, N_PATTERN };

extern struct device gpu; /* open between gpu_begin and gpu_end */
extern void *gpu_pattern[N_PATTERN];

/* Opens the GPU with a work arena of work_gib. Skips the test, saying why, where there is none, or less free memory on
 * it than `gib`, which is for everything. */
void gpu_begin(int64_t gib, int64_t work_gib, bool portable);
/* Frees all that was made since; also a cmocka teardown, for tests that fail. Returns 0; once more is fine. */
int gpu_end(void **state);

void *gpu_bytes(const void *src, int64_t bytes);                  /* a copy of the host's */
void *gpu_repeat(enum pattern p, uint64_t stream, int64_t bytes); /* every stream begins elsewhere in the pattern */

/* As make_empty, ... of op_check.h; random ones are BF16 or F32. */
struct tensor gpu_empty(enum dtype t, int64_t n0, int64_t n1, int64_t n2);
struct tensor gpu_zero(enum dtype t, int64_t n0, int64_t n1, int64_t n2);
struct tensor gpu_random(enum dtype t, uint64_t stream, int64_t n0, int64_t n1, int64_t n2);
struct tensor gpu_i32(const int32_t *values, int64_t n);
struct tensor gpu_copy(struct tensor x);                                               /* of a contiguous view */
struct weight gpu_weight(uint64_t stream, int64_t n_exp, int64_t n_out, int64_t n_in); /* BF16 */

/* The tensor on the host; its data is the caller's to mem_free. */
struct tensor gpu_host(struct tensor x);
/* Fails, naming `what`, unless the two device tensors are finite and have the same bits, or tensor_error is at most
 * bound. */
void expect_same(const char *what, struct tensor got, struct tensor want);
void expect_near(const char *what, struct tensor got, struct tensor want, double bound);

#endif
