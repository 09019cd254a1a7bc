/* op_check.h - for the tests of the ops: tensors with guard bytes around them, random inputs, finite differences.
 *
 * Tensors and weights made here live on the host until op_check_end, which fails the test when a guard byte has
 * changed. Outputs start as NaN (integers as -1), which reveals elements that an op does not write. */
#ifndef MT_OP_CHECK_H
#define MT_OP_CHECK_H

#include "kernels/ops/ops.h"
#include "tests/test.h"

/* A CPU device in F64 (oracle) or F32, with 2 threads and 256 MiB of work arena. */
void op_check_begin(struct device *dev, bool oracle);
/* Checks and frees every tensor, closes the device; the work arena must be empty. */
void op_check_end(struct device *dev);

/* A new tensor filled with NaN. Unused trailing sizes are -1: make_empty(DT_F32, 5, -1, -1) is a vector. */
struct tensor make_empty(enum dtype t, int64_t n0, int64_t n1, int64_t n2);
struct tensor make_zero(enum dtype t, int64_t n0, int64_t n1, int64_t n2);
/* amplitude * test_value(stream, i); the same numbers, rounded, for every float dtype. */
struct tensor make_random(enum dtype t, uint64_t stream, double amplitude, int64_t n0, int64_t n1, int64_t n2);
struct tensor make_i32(const int32_t *values, int64_t n);
struct tensor make_copy(struct tensor x);                           /* contiguous */
void copy_on(struct device *dev, struct tensor y, struct tensor x); /* y = x, contiguous, after the ops before */
/* A dense weight (F32, BF16 or F16) of n_exp matrices; values of BF16 and F16 are exact in every format. */
struct weight make_weight(enum weight_format f, uint64_t stream, double amplitude, int64_t n_exp, int64_t n_out,
                          int64_t n_in);

/* Waits for the ops of the case that runs on a GPU. Call it before the host accesses the data of a tensor; the
 * functions below do. */
void op_settle(void);
/* Element i of a contiguous tensor or of a view's concatenated rows; any dtype. */
double value_at(struct tensor x, int64_t i);
void set_value(struct tensor x, int64_t i, double v);

void assert_finite(struct tensor x);
void assert_same_bits(struct tensor a, struct tensor b); /* equal dtype, shape and bytes */
double tensor_error(struct tensor a,
                    struct tensor b); /* relative_error of two tensors of one shape, any float dtypes */

/* A scalar loss of a tensor, sum_i test_value(stream, i) * y_i, and its gradient (make_probe). */
double probe(struct tensor y, uint64_t stream);
struct tensor make_probe(struct tensor y, uint64_t stream); /* shaped like y, and of its dtype */

/* Relative error of dx against central differences of loss(arg) in every element of x (F64). Every call of
 * loss must read x. */
double gradient_error(double (*loss)(void *arg), void *arg, struct tensor x, struct tensor dx);

/* gradient_error along one random direction, for tensors with too many elements: |derivative - <dx, direction>| /
 * |derivative|. */
double slope_error(double (*loss)(void *arg), void *arg, struct tensor x, struct tensor dx);

/* Makes the inputs of one case on dev, runs the op (and its backward) and lists the outputs. */
enum { OP_MAX_OUTPUTS = 16 };
struct op_outputs {
    struct tensor out[OP_MAX_OUTPUTS];
    int n;
};
typedef void op_case_fn(struct device *dev, const void *params, struct op_outputs *outputs);

/* For every test of an op; fails unless all outputs are finite; f32 is within bound of f64; 1, 2 and 3 threads give the
 * same bits; a dry run gives the same peak of the work arena as a real run. */
void op_check_case(op_case_fn *run, const void *params, double bound);

/* Skips the test with a reason on a machine without a GPU or in a build without CUDA. */
void op_check_need_gpu(void);
/* The same for the GPU, with the portable kernels and, on Hopper, the Hopper kernels. Inputs are exact in bf16, scratch
 * starts as NaN. Fails unless each output is finite and, against F64, has at most twice the error of the CPU in bf16
 * plus one rounding of bf16 (2^-8); integers are equal; a second run, on fewer multiprocessors, gives the same bits;
 * guards are unchanged; the work arena's peak equals that of a dry run, and nothing is written beyond it. */
enum { OP_GPU_WORK = 3 << 29 };
void op_check_cuda(op_case_fn *run, const void *params);

#endif
