/* bench_kernel.h - what the benchmarks of kernels share: memory of the device, random tensors, times, and the JSON
 * document. */
#ifndef MT_BENCH_KERNEL_H
#define MT_BENCH_KERNEL_H

#include "data/json/json.h"
#include "kernels/prof.h"

/* Untimed runs; most timed runs; bytes of a tensor that are random, which then repeat. */
enum { BENCH_WARM_UP = 5, BENCH_RUNS = 1000, BENCH_RANDOM = 4 << 20 };

/* Allocates the three arenas of dev with the sizes of the dry run `plan`; frees the earlier ones. */
int bench_reserve(struct device *dev, const struct device *plan, struct err *err) MT_CHECK;

/* Uniform in +-amplitude; a large tensor repeats its first BENCH_RANDOM bytes: a GPU's speed depends on how random
 * nearby values are, not on distant ones. */
void bench_uniform(struct device *dev, struct tensor x, double amplitude, uint64_t key);
void bench_repeat(struct device *dev, struct tensor x, int64_t n); /* fills x with copies of its first n elements */

/* Median of the times of n_run steps between two of their marks: from mark i * stride + from to i * stride + to. Waits
 * for the device. */
double bench_marked_ms(const struct device *dev, int64_t n_run, int stride, int from, int to);

/* One call of an op: its median time, its FLOPs and its shortest time. */
struct bench_time {
    double ms, flops, floor_ms;
};
typedef void bench_fn(struct device *dev, const void *arg);
/* Calls `run` BENCH_WARM_UP times, then n_run times, at most BENCH_RUNS, that are timed. `prepare` runs before each
 * call and is not timed; NULL: nothing. arg: for both. */
struct bench_time bench_time(struct device *dev, int64_t n_run, bench_fn *prepare, bench_fn *run, const void *arg);

/* The document of --json: an object that names the bench and the device, and the caller's members after them. */
void bench_json_begin(struct json_out *o, const char *name, const struct device *dev);
void bench_json_print(struct json_out *o); /* closes the object, prints it and frees o */
/* Ends a bench: with `print` prints the document, if there is one, whose array of rows is open. Closes dev. */
void bench_end(struct device *dev, struct json_out *o, bool print);

#endif
