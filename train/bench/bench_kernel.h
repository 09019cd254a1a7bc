/* bench_kernel.h - what the benchmarks of kernels share: memory of the device, random tensors, times, and the JSON
 * document. */
#ifndef MT_BENCH_KERNEL_H
#define MT_BENCH_KERNEL_H

#include "data/json/json.h"
#include "kernels/prof.h"

/* Number of untimed runs; largest number of timed runs; length in bytes after which the random content of a tensor
 * repeats. */
enum { BENCH_WARM_UP = 5, BENCH_RUNS = 1000, BENCH_RANDOM = 4 << 20 };

/* Allocates the three arenas of dev with the sizes of the dry run `plan`; frees the earlier ones. */
int bench_reserve(struct device *dev, const struct device *plan, struct err *err) MT_CHECK;

/* Fills x with uniform values in [-amplitude, amplitude]; a large tensor repeats its first BENCH_RANDOM bytes. The
 * repetition does not change a GPU's speed, which depends only on how random nearby values are. */
void bench_uniform(struct device *dev, struct tensor x, double amplitude, uint64_t key);
void bench_repeat(struct device *dev, struct tensor x, int64_t n); /* fills x with copies of its first n elements */

/* Each of n_run steps has recorded `stride` device events. Returns the median time from event `from` to event `to` of a
 * step. Waits for the device. */
double bench_marked_ms(const struct device *dev, int64_t n_run, int stride, int from, int to);

/* One call of an op: its median time, its FLOPs and its floor. */
struct bench_time {
    double ms, flops, floor_ms;
};
typedef void bench_fn(struct device *dev, const void *arg);
/* Calls `run` BENCH_WARM_UP times, then n_run times (at most BENCH_RUNS), which it times. `prepare` (may be NULL) runs
 * untimed before each call. */
struct bench_time bench_time(struct device *dev, int64_t n_run, bench_fn *prepare, bench_fn *run, const void *arg);

/* Begins the document of --json: an object that names the bench and the device. The caller adds further members. */
void bench_json_begin(struct json_out *o, const char *name, const struct device *dev);
void bench_json_print(struct json_out *o); /* closes the object, prints it and frees o */
/* Ends a bench and closes dev. print: closes the array of rows of the document, if there is one, and prints it. */
void bench_end(struct device *dev, struct json_out *o, bool print);

#endif
