/* bench_kernel.h - what the benchmarks of kernels share: memory of the device, random tensors, times. */
#ifndef MT_BENCH_KERNEL_H
#define MT_BENCH_KERNEL_H

#include "kernels/prof.h"

/* Untimed and timed runs, the latter at most; bytes of a tensor that are random. */
enum { BENCH_WARM_UP = 5, BENCH_RUNS = 1000, BENCH_RANDOM = 4 << 20 };

/* Allocates the three arenas of dev with the sizes of the dry run `plan`; frees the earlier ones. */
int bench_reserve(struct device *dev, const struct device *plan, struct err *err) MT_CHECK;

/* Uniform in +-amplitude; a large tensor repeats its first BENCH_RANDOM bytes: a GPU's speed depends on how random
 * nearby values are, not on distant ones. */
void bench_uniform(struct device *dev, struct tensor x, double amplitude, uint64_t key);
void bench_repeat(struct device *dev, struct tensor x, int64_t n); /* fills x with copies of its first n elements */

/* Median of the times from mark 2 i to mark 2 i + 1, i = 0 .. n_run - 1. Waits for the device. */
double bench_marked_ms(const struct device *dev, int64_t n_run);

#endif
