/* test_device.c - opens devices; arenas, copies between host and device, shape checks of the op wrappers. */
#include "tests/test.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/op_check.h"
#include "tests/process.h"

static void open_says_what_is_wrong(void **state)
{
    (void)state;
    struct device dev;
    struct err err;
    assert_int_equal(device_open(&dev, "gpu", "auto", &err), -1);
    assert_non_null(strstr(err.msg, "\"gpu\": choose auto, cpu, cuda or cuda-portable"));
    assert_int_equal(device_open(&dev, "cpu", "fp16", &err), -1);
    assert_non_null(strstr(err.msg, "\"fp16\": choose auto, fp32 or bf16"));
    device_close(&dev); /* valid after a failure, and a second time */
    device_close(&dev);
}

static void open_cuda_without_cuda(void **state)
{
    (void)state;
    struct device dev;
    struct err err;
    if (ops_cuda(false, &err)) {
        print_message("skip: this machine has a GPU\n");
        skip();
    }
    assert_int_equal(device_open(&dev, "cuda", "auto", &err), -1);
    assert_true(strstr(err.msg, "built without CUDA") || strstr(err.msg, "no NVIDIA GPU"));
    assert_int_equal(device_open(&dev, "auto", "auto", &err), 0);
    assert_ptr_equal(dev.ops, ops_cpu());
}

/* Runs LD_LIBRARY_PATH=BUILD/fake_driver/NAME moetrain ...; false: the build has no fake drivers. */
static bool play_driver(const char *name)
{
    char dir[MT_PATH], file[MT_PATH + 32];
    const char *binary = moetrain_binary(), *slash = strrchr(binary, '/');
    snprintf(dir, sizeof(dir), "%.*s/fake_driver/%s", (int)(slash - binary), binary, name);
    snprintf(file, sizeof(file), "%s/libcuda.so.1", dir);
    return !access(file, R_OK) && !setenv("LD_LIBRARY_PATH", dir, 1);
}

/* When the GPU is unusable, auto trains on the CPU and gives the reason; cuda is an error with the same reason. */
static void why_no_gpu(void **state)
{
    (void)state;
    static const struct {
        const char *driver, *says;
    } machines[] = {
        {"none", "no NVIDIA GPU was found: the driver sees none"},
        {"old", "the NVIDIA driver is too old: it supports CUDA 11.8, and this program needs CUDA 1"},
        {"turing", "Fake GPU has compute capability 7.5, and the CUDA kernels need 8.0"},
        {"broken", "Fake GPU cannot be used: "},
    };
    for (int i = 0; i < MT_LEN(machines); i++) {
        const char *config = process_config("");
        if (!play_driver(machines[i].driver)) {
            print_message("skip: why_no_gpu: this build has no fake drivers\n");
            skip();
        }
        const int automatic = RUN(config, "--set", "train.device=auto");
        assert_says(said.err, "train.device = auto takes the CPU: ");
        assert_says(said.err, machines[i].says);
        assert_int_equal(automatic, 0);
        assert_int_equal(RUN(config, "--set", "train.device=cuda"), 1);
        assert_says(said.err, "train.device = cuda: ");
        assert_says(said.err, machines[i].says);
        unsetenv("LD_LIBRARY_PATH");
    }
}

/* Training and evaluation say once that they run on the CPU, and a plan says that it is for the CPU; other commands do
 * not. */
static void the_cpu_is_named_where_it_matters(void **state)
{
    (void)state;
    const char *config = process_config(""), *automatic = "train.device=auto", *says = "takes the CPU";
    struct err err;
    if (ops_cuda(false, &err)) {
        print_message("skip: this machine has a GPU\n");
        skip();
    }
    assert_int_equal(RUN(config, "--set", automatic, "--set", "train.steps=1"), 0);
    assert_says(said.err, says);
    assert_null(strstr(strstr(said.err, says) + 1, says));
    assert_int_equal(RUN("eval", config, "--set", automatic, "--base"), 0);
    assert_says(said.err, says);
    assert_int_equal(RUN("bench", "step", "--steps", "1"), 0);
    assert_says(said.err, says);
    assert_int_equal(RUN("plan", config, "--set", automatic), 0);
    assert_null(strstr(said.err, says));
    assert_says(said.out, "for the CPU: ");
    assert_int_equal(RUN("generate", config, "--set", automatic, "--base", "--prompt", "a", "--tokens", "1"), 0);
    assert_null(strstr(said.err, says));
}

/* The executable is not linked with CUDA, NCCL or curl, which it opens at first use. Checked with the loader, like ldd.
 */
static void starts_without_cuda(void **state)
{
    (void)state;
    static const char *const opened_later[] = {"cublas", "cudart", "libcuda", "nccl", "cupti", "nvrtc", "curl"};
    setenv("LD_TRACE_LOADED_OBJECTS", "1", 1);
    const int code = RUN("--version");
    unsetenv("LD_TRACE_LOADED_OBJECTS");
    assert_int_equal(code, 0);
    assert_says(said.out, "libc.so");
    for (int i = 0; i < MT_LEN(opened_later); i++)
        if (strstr(said.out, opened_later[i])) fail_msg("%s is among:\n%s", opened_later[i], said.out);
}

static void open_cpu(void **state)
{
    (void)state;
    struct device dev;
    struct err err;
    assert_int_equal(device_open(&dev, "cpu", "auto", &err), 0);
    assert_true(dev.act_dtype == DT_F32 && dev.stat_dtype == DT_F32 && !dev.round_bf16 && !dev.dry_run &&
                dev.n_threads >= 1);
    assert_int_equal(device_open(&dev, "cpu", "bf16", &err), 0);
    assert_true(dev.act_dtype == DT_F32 && dev.round_bf16);
    device_open_oracle(&dev);
    assert_true(dev.act_dtype == DT_F64 && dev.stat_dtype == DT_F64 && !dev.round_bf16);
}

static void reserve(void **state)
{
    (void)state;
    struct device dev, measure;
    struct err err;
    assert_int_equal(device_open(&dev, "cpu", "auto", &err), 0);
    assert_int_equal(device_reserve(&dev, &dev.state, "adapters", (int64_t)1 << 60, &err), -1);
    assert_non_null(strstr(err.msg, "adapters need"));
    assert_null(dev.state.base);
    assert_int_equal(device_reserve(&dev, &dev.work, "work", 1000, &err), 0);
    assert_int_equal(device_reserve(&dev, &dev.weights, "weights", 0, &err), 0);
    assert_true(dev.work.base && (uintptr_t)dev.work.base % 256 == 0 && dev.work.cap == 1000);
    device_dry_run(&measure, &dev);
    assert_true(measure.dry_run && measure.ops == dev.ops && measure.n_threads == dev.n_threads);
    assert_null(arena_push(&measure.work, (int64_t)1 << 50));
    device_close(&dev);
    assert_null(dev.work.base);
}

static void values_are_copied_both_ways(void **state)
{
    (void)state;
    static const enum dtype dtypes[] = {DT_F32, DT_F64, DT_BF16};
    struct device dev, measure;
    op_check_begin(&dev, false);
    device_dry_run(&measure, &dev);
    for (int d = 0; d < 3; d++) {
        double in[6] = {1, -2.5, 0.1, 1e30, 0, NAN}, out[6] = {0};
        float in32[6], out32[6] = {0};
        struct tensor x = make_empty(dtypes[d], 2, 3, -1);
        double eps = dtypes[d] == DT_BF16 ? 1.0 / 256 : dtypes[d] == DT_F32 ? 1e-7 : 0;
        device_set(&dev, x, in);
        device_get(&dev, out, x);
        for (int i = 0; i < 5; i++) assert_true(fabs(out[i] - in[i]) <= eps * fabs(in[i]));
        assert_true(isnan(out[5]));
        for (int i = 0; i < 6; i++) in32[i] = (float)in[i];
        device_set_f32(&dev, x, in32);
        device_get_f32(&dev, out32, x);
        for (int i = 0; i < 5; i++) assert_true(fabsf(out32[i] - in32[i]) <= (float)eps * fabsf(in32[i]));
        struct tensor nowhere = tensor_2d(NULL, dtypes[d], 2, 3);
        device_set(&measure, nowhere, in);
        device_zero(&measure, nowhere);
        device_get(&measure, out, nowhere);
        for (int i = 0; i < 6; i++) assert_true(out[i] == 0);
    }
    op_check_end(&dev);
}

static void zero_does_not_write_gaps(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    struct tensor x = make_random(DT_F32, 1, 1, 3, 5, -1);
    set_value(x, 4, 7);
    device_zero(&dev, tensor_cols(x, 1, 3));
    for (int64_t i = 0; i < 15; i++) assert_true((value_at(x, i) == 0) == (i % 5 >= 1 && i % 5 <= 3));
    device_zero(&dev, x);
    for (int64_t i = 0; i < 15; i++) assert_true(value_at(x, i) == 0);
    device_zero(&dev, make_empty(DT_F32, 0, 5, -1));
    device_zero(&dev, (struct tensor){0});
    op_check_end(&dev);
}

/* Whether op(dev) stops the process. */
static bool stops(void (*op)(struct device *dev), struct device *dev)
{
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        signal(SIGABRT, SIG_DFL);
        op(dev);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void norm_of(struct device *dev, int64_t dim_of_w, enum dtype dtype_of_rstd)
{
    const struct norm norm = {.eps = 1e-5f};
    op_rmsnorm_fwd(dev, tensor_2d(NULL, DT_F32, 3, 4), tensor_1d(NULL, dtype_of_rstd, 3), tensor_2d(NULL, DT_F32, 3, 4),
                   tensor_1d(NULL, DT_F32, dim_of_w), &norm);
}
static void right(struct device *dev) { norm_of(dev, 4, DT_F32); }
static void wrong_shape(struct device *dev) { norm_of(dev, 5, DT_F32); }
static void wrong_dtype(struct device *dev) { norm_of(dev, 4, DT_F64); }

/* Front doors check in a dry run too. */
static void wrong_shapes_stop(void **state)
{
    (void)state;
    struct device dev, measure;
    op_check_begin(&dev, false);
    device_dry_run(&measure, &dev);
    assert_false(stops(right, &measure));
    assert_true(stops(wrong_shape, &measure));
    assert_true(stops(wrong_dtype, &measure));
    op_check_end(&dev);
}

int test_device(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(open_says_what_is_wrong),
        cmocka_unit_test(open_cuda_without_cuda),
        cmocka_unit_test(why_no_gpu),
        cmocka_unit_test(the_cpu_is_named_where_it_matters),
        cmocka_unit_test(starts_without_cuda),
        cmocka_unit_test(open_cpu),
        cmocka_unit_test(reserve),
        cmocka_unit_test(values_are_copied_both_ways),
        cmocka_unit_test(zero_does_not_write_gaps),
        cmocka_unit_test(wrong_shapes_stop),
    };
    return cmocka_run_group_tests_name("device", tests, NULL, NULL);
}
