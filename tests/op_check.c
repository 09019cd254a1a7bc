/* op_check.c - guarded tensors, random inputs and finite differences for the tests of the ops. */
#include "tests/op_check.h"

#include <math.h>
#include <string.h>

#ifdef MT_CUDA
#include <cuda_runtime_api.h>
#endif

enum { GUARD = 64, MAX_BLOCKS = 4096 };

static bool on_gpu;            /* tensors are made in memory that the GPU and the host share */
static bool bf16_inputs;       /* make_random gives values that are exact in bf16 */
static struct device *running; /* the GPU on which a case runs; NULL: none does */
static struct recorder issued; /* without room for calls: it counts them */

/* A wait takes microseconds also where there is nothing to wait for, and cases read millions of values. */
void op_settle(void)
{
    static int64_t settled;
    if (!running || issued.n_lost == settled) return;
    running->ops->wait();
    settled = issued.n_lost;
}

/* Memory for the tensors of the device under test. */
static void *shared_alloc(int64_t bytes)
{
#ifdef MT_CUDA
    void *p = NULL;
    if (on_gpu) {
        const cudaError_t rc = cudaMallocManaged(&p, (size_t)bytes, cudaMemAttachGlobal);
        MT_REQUIRE(rc == cudaSuccess, "managed memory: %s", cudaGetErrorString(rc));
        return p;
    }
#endif
    return mem_alloc(bytes);
}

static void shared_free(void *p, bool gpu)
{
#ifdef MT_CUDA
    if (gpu) {
        MT_REQUIRE(cudaFree(p) == cudaSuccess, "cudaFree");
        return;
    }
#endif
    MT_REQUIRE(!gpu, "no CUDA in this build");
    mem_free(p);
}

static struct {
    unsigned char *base;
    int64_t bytes;
    bool gpu;
} blocks[MAX_BLOCKS];
static int n_blocks;

/* `bytes` of 0xff (NaN in every float dtype, -1 in the integers) between two guards. */
static void *guarded(int64_t bytes)
{
    MT_REQUIRE(n_blocks < MAX_BLOCKS, "more than %d test tensors", MAX_BLOCKS);
    unsigned char *base = shared_alloc(bytes + 2 * GUARD);
    memset(base, 0xa5, (size_t)(bytes + 2 * GUARD));
    memset(base + GUARD, 0xff, (size_t)bytes);
    blocks[n_blocks].base = base;
    blocks[n_blocks].gpu = on_gpu;
    blocks[n_blocks++].bytes = bytes;
    return base + GUARD;
}

void op_check_begin(struct device *dev, bool oracle)
{
    struct err err = {{0}};
    if (oracle) {
        device_open_oracle(dev);
    } else if (device_open(dev, "cpu", "fp32", &err)) {
        fail_msg("%s", err.msg);
    }
    dev->n_threads = 2;
    if (device_reserve(dev, &dev->work, "work", (int64_t)256 << 20, &err)) fail_msg("%s", err.msg);
}

void op_check_end(struct device *dev)
{
    int64_t broken = 0;
    for (int b = 0; b < n_blocks; b++) {
        for (int i = 0; i < GUARD; i++) {
            broken += blocks[b].base[i] != 0xa5;
            broken += blocks[b].base[GUARD + blocks[b].bytes + i] != 0xa5;
        }
        shared_free(blocks[b].base, blocks[b].gpu);
    }
    n_blocks = 0;
    int64_t left = dev->work.used;
    device_close(dev);
    assert_int_equal(broken, 0);
    assert_int_equal(left, 0);
}

struct tensor make_empty(enum dtype t, int64_t n0, int64_t n1, int64_t n2)
{
    int64_t count = n0 * (n1 < 0 ? 1 : n1) * (n2 < 0 ? 1 : n2);
    void *data = guarded(count * dtype_size(t));
    if (n1 < 0) return tensor_1d(data, t, n0);
    return n2 < 0 ? tensor_2d(data, t, n0, n1) : tensor_3d(data, t, n0, n1, n2);
}

struct tensor make_zero(enum dtype t, int64_t n0, int64_t n1, int64_t n2)
{
    struct tensor x = make_empty(t, n0, n1, n2);
    memset(x.data, 0, (size_t)tensor_bytes(x));
    return x;
}

struct tensor make_i32(const int32_t *values, int64_t n)
{
    struct tensor x = make_empty(DT_I32, n, -1, -1);
    if (n) memcpy(x.data, values, (size_t)n * sizeof(*values));
    return x;
}

void copy_on(struct device *dev, struct tensor y, struct tensor x)
{
    if (!dev->dry_run) dev->ops->copy(y.data, x.data, tensor_bytes(x));
}

struct tensor make_copy(struct tensor x)
{
    struct tensor y = make_empty(x.dtype, x.shape[0], x.ndim > 1 ? x.shape[1] : -1, x.ndim > 2 ? x.shape[2] : -1);
    for (int64_t i = 0; i < tensor_count(x); i++) set_value(y, i, value_at(x, i));
    return y;
}

/* The f16 bits of a normal number that f16 represents exactly (at most 10 bits after the leading one). */
static uint16_t exact_f16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    if (f == 0) return (uint16_t)(bits >> 16 & 0x8000);
    int exponent = (int)(bits >> 23 & 255) - 112;
    MT_REQUIRE(exponent > 0 && exponent < 31 && !(bits & 0x1fff), "%g is not an f16", (double)f);
    return (uint16_t)((bits >> 16 & 0x8000) | (uint32_t)exponent << 10 | (bits >> 13 & 1023));
}

struct weight make_weight(enum weight_format f, uint64_t stream, double amplitude, int64_t n_exp, int64_t n_out,
                          int64_t n_in)
{
    int64_t n = n_exp * n_out * n_in;
    void *data = guarded(n * (f == WF_F32 ? 4 : 2));
    for (int64_t i = 0; i < n; i++) {
        /* Eight bits of a value above 2^-14: exact in bf16 and in f16. */
        float v = bf16_to_f32(f32_to_bf16((float)(amplitude * test_value(stream, (uint64_t)i))));
        if (fabsf(v) < 1.0f / 8192) v = 0;
        if (f == WF_F32) ((float *)data)[i] = v;
        if (f == WF_BF16) ((uint16_t *)data)[i] = f32_to_bf16(v);
        if (f == WF_F16) ((uint16_t *)data)[i] = exact_f16(v);
    }
    return (struct weight){.format = f, .n_exp = n_exp, .n_out = n_out, .n_in = n_in, .data = data};
}

static void *element(struct tensor x, int64_t i)
{
    int64_t cols = x.shape[x.ndim - 1];
    return (char *)x.data + (i / cols * x.ld + i % cols) * dtype_size(x.dtype);
}

double value_at(struct tensor x, int64_t i)
{
    const void *p = element(x, i);
    op_settle();
    switch (x.dtype) {
    case DT_F32: return *(const float *)p;
    case DT_F64: return *(const double *)p;
    case DT_BF16: return bf16_to_f32(*(const uint16_t *)p);
    case DT_F16: return f16_to_f32(*(const uint16_t *)p);
    case DT_U8: return *(const uint8_t *)p;
    case DT_I32: return *(const int32_t *)p;
    default: break;
    }
    MT_REQUIRE(false, "no values of dtype %s", dtype_name(x.dtype));
}

static void put_value(struct tensor x, int64_t i, double v)
{
    void *p = element(x, i);
    switch (x.dtype) {
    case DT_F32: *(float *)p = (float)v; return;
    case DT_F64: *(double *)p = v; return;
    case DT_BF16: *(uint16_t *)p = f32_to_bf16((float)v); return;
    case DT_I32: *(int32_t *)p = (int32_t)v; return;
    default: break;
    }
    MT_REQUIRE(false, "no values of dtype %s", dtype_name(x.dtype));
}

void set_value(struct tensor x, int64_t i, double v)
{
    op_settle();
    put_value(x, i, v);
}

struct tensor make_random(enum dtype t, uint64_t stream, double amplitude, int64_t n0, int64_t n1, int64_t n2)
{
    struct tensor x = make_empty(t, n0, n1, n2);
    const int64_t n = tensor_count(x);
    for (int64_t i = 0; i < n; i++) {
        const double v = amplitude * test_value(stream, (uint64_t)i);
        put_value(x, i, bf16_inputs ? (double)bf16_to_f32(f32_to_bf16((float)v)) : v);
    }
    return x;
}

void assert_finite(struct tensor x)
{
    for (int64_t i = 0; i < tensor_count(x); i++) {
        if (!isfinite(value_at(x, i))) fail_msg("element %lld is %g", (long long)i, value_at(x, i));
    }
}

void assert_same_bits(struct tensor a, struct tensor b)
{
    assert_int_equal(a.dtype, b.dtype);
    assert_int_equal(tensor_count(a), tensor_count(b));
    op_settle();
    const int64_t n = tensor_count(a);
    for (int64_t i = 0; i < n; i++) {
        if (memcmp(element(a, i), element(b, i), (size_t)dtype_size(a.dtype)))
            fail_msg("element %lld: %.17g and %.17g", (long long)i, value_at(a, i), value_at(b, i));
    }
}

double tensor_error(struct tensor a, struct tensor b)
{
    int64_t n = tensor_count(a);
    assert_int_equal(n, tensor_count(b));
    double *x = mem_array(2 * n, sizeof(*x)), *y = x + n;
    for (int64_t i = 0; i < n; i++) {
        x[i] = value_at(a, i);
        y[i] = value_at(b, i);
    }
    double error = relative_error(x, y, n);
    mem_free(x);
    return error;
}

double probe(struct tensor y, uint64_t stream)
{
    double sum = 0;
    for (int64_t i = 0; i < tensor_count(y); i++) sum += test_value(stream, (uint64_t)i) * value_at(y, i);
    return sum;
}

struct tensor make_probe(struct tensor y, uint64_t stream)
{
    return make_random(y.dtype, stream, 1, y.shape[0], y.ndim > 1 ? y.shape[1] : -1, y.ndim > 2 ? y.shape[2] : -1);
}

double gradient_error(double (*loss)(void *arg), void *arg, struct tensor x, struct tensor dx)
{
    const double step = 1e-5;
    int64_t n = tensor_count(x);
    assert_int_equal(x.dtype, DT_F64);
    assert_int_equal(n, tensor_count(dx));
    double *numeric = mem_array(2 * n, sizeof(*numeric)), *analytic = numeric + n;
    for (int64_t i = 0; i < n; i++) {
        double v = value_at(x, i);
        set_value(x, i, v + step);
        double up = loss(arg);
        set_value(x, i, v - step);
        numeric[i] = (up - loss(arg)) / (2 * step);
        set_value(x, i, v);
        analytic[i] = value_at(dx, i);
    }
    double error = relative_error(analytic, numeric, n);
    mem_free(numeric);
    return error;
}

double slope_error(double (*loss)(void *arg), void *arg, struct tensor x, struct tensor dx)
{
    const double step = 1e-6;
    struct tensor start = make_copy(x), along = make_probe(x, 77);
    double analytic = 0, value[2];
    assert_int_equal(x.dtype, DT_F64);
    assert_int_equal(tensor_count(x), tensor_count(dx));
    for (int64_t i = 0; i < tensor_count(x); i++) analytic += value_at(along, i) * value_at(dx, i);
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < tensor_count(x); i++)
            set_value(x, i, value_at(start, i) + (side ? -step : step) * value_at(along, i));
        value[side] = loss(arg);
    }
    for (int64_t i = 0; i < tensor_count(x); i++) set_value(x, i, value_at(start, i));
    double numeric = (value[0] - value[1]) / (2 * step);
    return fabs(numeric - analytic) / fmax(fabs(numeric), 1e-30);
}

/* Runs the case on each device in turn. Its outputs are valid until op_check_end. */
void op_check_case(op_case_fn *run, const void *params, double bound)
{
    struct device exact, dev, measure;
    struct op_outputs want = {.n = 0}, first = {.n = 0}, again = {.n = 0};
    op_check_begin(&exact, true);
    run(&exact, params, &want);
    struct err err = {{0}};
    if (device_open(&dev, "cpu", "fp32", &err)) fail_msg("%s", err.msg);
    if (device_reserve(&dev, &dev.work, "work", (int64_t)256 << 20, &err)) fail_msg("%s", err.msg);
    for (int threads = 1; threads <= 3; threads++) {
        dev.n_threads = threads;
        dev.work.peak = again.n = 0;
        run(&dev, params, threads == 1 ? &first : &again);
        for (int i = 0; threads > 1 && i < first.n; i++) assert_same_bits(first.out[i], again.out[i]);
    }
    for (int i = 0; i < want.n; i++) {
        assert_finite(want.out[i]);
        assert_finite(first.out[i]);
        double error = tensor_error(first.out[i], want.out[i]);
        if (!(error <= bound)) fail_msg("output %d: f32 is %g away from f64, allowed %g", i, error, bound);
    }
    device_dry_run(&measure, &dev);
    again.n = 0;
    run(&measure, params, &again);
    assert_int_equal(measure.work.peak, dev.work.peak);
    assert_close(3 * measure.flops, dev.flops, 1e-15); /* a dry run counts the same FLOPs */
    assert_int_equal(dev.work.used, 0);
    device_close(&dev);
    op_check_end(&exact);
}

void op_check_need_gpu(void)
{
    struct device dev;
    struct err err;
    if (!device_open(&dev, "cuda", "auto", &err)) return;
    if (test_needs_gpu()) fail_msg("kernels of the GPU: %s", err.msg);
    print_message("skip: kernels of the GPU: %s\n", err.msg);
    skip();
}

enum gpu_kind { GPU_HOPPER, GPU_PORTABLE, GPU_KINDS };

static void open_cuda(struct device *dev, enum gpu_kind kind)
{
    struct err err = {{0}};
    if (device_open(dev, kind == GPU_PORTABLE ? "cuda-portable" : "cuda", "auto", &err)) fail_msg("%s", err.msg);
    if (device_reserve(dev, &dev->work, "work", OP_GPU_WORK, &err)) fail_msg("%s", err.msg);
}

/* Compares the GPU's outputs with F64: integers are equal; others have at most twice the error of the CPU in bf16 plus
 * one rounding. */
static void compare_gpu(const struct op_outputs *want, const struct op_outputs *near, const struct op_outputs *got)
{
    assert_int_equal(want->n, got->n);
    for (int i = 0; i < want->n; i++) {
        assert_finite(got->out[i]);
        const double allowed = 2 * tensor_error(near->out[i], want->out[i]) + 0x1p-8;
        const double error = tensor_error(got->out[i], want->out[i]);
        if (want->out[i].dtype == DT_I32 ? error > 0 : !(error <= allowed))
            fail_msg("output %d: %g away from f64, allowed %g", i, error, allowed);
    }
}

/* Returns the peak of the work arena in a dry run. Fills the arena with NaN up to the peak, to reveal scratch that is
 * read before it is written, and SCRATCH_GUARD bytes beyond, to reveal writes there. */
enum { SCRATCH_GUARD = 1 << 17 };
static int64_t prepare_scratch(op_case_fn *run, const void *params, struct device *dev)
{
    struct device measure;
    struct op_outputs none = {.n = 0};
    device_dry_run(&measure, dev);
    run(&measure, params, &none);
    const int64_t bytes = measure.work.peak + SCRATCH_GUARD;
    assert_in_range(bytes, 0, dev->work.cap);
    unsigned char *ones = mem_alloc(bytes);
    memset(ones, 0xff, (size_t)bytes);
    device_upload(dev, dev->work.base, ones, bytes);
    mem_free(ones);
    return measure.work.peak;
}

/* Checks that the peak of the work arena equals `peak`, and that nothing was written beyond it. */
static void check_scratch(struct device *dev, int64_t peak)
{
    static unsigned char guard[SCRATCH_GUARD];
    int64_t broken = 0;
    assert_int_equal(peak, dev->work.peak);
    device_download(dev, guard, dev->work.base + peak, SCRATCH_GUARD);
    for (int i = 0; i < SCRATCH_GUARD; i++) broken += guard[i] != 0xff;
    if (broken) fail_msg("%lld bytes beyond the scratch of the dry run were written", (long long)broken);
}

/* In turn half and ten elevenths of the multiprocessors of the GPU: 66 and 120 of 132. */
static int other_sms(void)
{
    static int turn;
    const int all = ops_cuda_sms(0);
    return MT_MAX(1, turn++ % 2 ? all * 10 / 11 : all / 2);
}

/* Runs the case on a GPU, with the launches for n of its multiprocessors; 0: all. */
static void run_on(struct device *dev, op_case_fn *run, const void *params, struct op_outputs *got, int n)
{
    ops_cuda_sms(n);
    running = dev;
    dev->recorder = &issued;
    run(dev, params, got);
    op_settle();
    dev->recorder = NULL;
    running = NULL;
    ops_cuda_sms(0);
}

void op_check_cuda(op_case_fn *run, const void *params)
{
    struct device exact, near_dev, dev;
    struct op_outputs want = {.n = 0}, near = {.n = 0};
    struct err err = {{0}};
    bf16_inputs = true;
    op_check_begin(&exact, true);
    run(&exact, params, &want);
    if (device_open(&near_dev, "cpu", "bf16", &err) ||
        device_reserve(&near_dev, &near_dev.work, "work", (int64_t)256 << 20, &err))
        fail_msg("%s", err.msg);
    run(&near_dev, params, &near);
    device_close(&near_dev);
    on_gpu = true;
    for (enum gpu_kind kind = GPU_HOPPER; kind < GPU_KINDS; kind++) {
        struct op_outputs got = {.n = 0}, again = {.n = 0};
        open_cuda(&dev, kind);
        const int64_t peak = prepare_scratch(run, params, &dev);
        run_on(&dev, run, params, &got, 0);
        run_on(&dev, run, params, &again, other_sms());
        compare_gpu(&want, &near, &got);
        for (int i = 0; i < got.n; i++) assert_same_bits(got.out[i], again.out[i]);
        check_scratch(&dev, peak);
        assert_int_equal(dev.work.used, 0);
        device_close(&dev);
    }
    on_gpu = bf16_inputs = false;
    op_check_end(&exact);
}
