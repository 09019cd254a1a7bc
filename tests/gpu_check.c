/* gpu_check.c - tensors in GPU memory, filled on the device from short patterns. */
#include "tests/gpu_check.h"

#include <string.h>

enum { PERIOD = 8 * ((1 << 19) - 1), MAX_BLOCKS = 64 };
#define GIB ((int64_t)1 << 30)

struct device gpu;
void *gpu_pattern[N_PATTERN];
static const int64_t value_bytes[N_PATTERN] = {2, 4, 1, 1, 1};
static void *blocks[MAX_BLOCKS];
static int n_blocks;

static void *gpu_block(int64_t bytes)
{
    assert_true(n_blocks < MAX_BLOCKS);
    void *p = gpu.ops->alloc(bytes);
    if (!p) fail_msg("no %lld bytes of device memory", (long long)bytes);
    return blocks[n_blocks++] = p;
}

void *gpu_bytes(const void *src, int64_t bytes)
{
    void *p = gpu_block(bytes);
    gpu.ops->upload(p, src, bytes);
    return p;
}

/* Patterns: the host computes them once, and every test that uses one uploads it. */
static void make_patterns(void)
{
    static float f32[PERIOD];
    static uint16_t bf16[PERIOD];
    static uint8_t bytes[PERIOD], scales[PERIOD], ones[PERIOD];
    static const void *const of[N_PATTERN] = {bf16, f32, bytes, scales, ones};
    for (int64_t i = 0; !ones[PERIOD - 1] && i < PERIOD; i++) {
        f32[i] = (float)test_value(1, (uint64_t)i);
        bf16[i] = f32_to_bf16(f32[i]);
        bytes[i] = (uint8_t)rng_u64(2, (uint64_t)i);
        scales[i] = (uint8_t)(120 + bytes[i] % 15);
        ones[i] = 0xff;
    }
    for (int p = 0; p < N_PATTERN; p++) gpu_pattern[p] = gpu_bytes(of[p], PERIOD * value_bytes[p]);
}

int gpu_end(void **state)
{
    (void)state;
    if (!gpu.ops) return 0;
    while (n_blocks) gpu.ops->free(blocks[--n_blocks]);
    device_close(&gpu);
    return 0;
}

void gpu_begin(int64_t gib, int64_t work_gib, bool portable)
{
    struct err err;
    char have[32];
    op_check_need_gpu();
    if (device_open(&gpu, portable ? "cuda-portable" : "cuda", "auto", &err)) fail_msg("%s", err.msg);
    const int64_t available = gpu.ops->free_bytes();
    if (available < gib * GIB) {
        print_message("skip: more than 2^31 elements: %lld GiB of device memory are needed, %s are free\n",
                      (long long)gib, str_bytes(have, available));
        gpu_end(NULL);
        skip();
    }
    if (device_reserve(&gpu, &gpu.work, "work", work_gib * GIB, &err)) fail_msg("%s", err.msg);
    make_patterns();
}

void *gpu_repeat(enum pattern p, uint64_t stream, int64_t bytes)
{
    char *dst = gpu_block(bytes);
    const int64_t period = PERIOD * value_bytes[p], start = (int64_t)stream * 30011 * 16 % period;
    for (int64_t at = 0, n; at < bytes; at += n) {
        const int64_t from = (start + at) % period;
        n = MT_MIN(period - from, bytes - at);
        gpu.ops->copy(dst + at, (char *)gpu_pattern[p] + from, n);
    }
    return dst;
}

static struct tensor gpu_tensor(enum dtype t, enum pattern p, uint64_t stream, int64_t n0, int64_t n1, int64_t n2)
{
    const int64_t count = n0 * (n1 < 0 ? 1 : n1) * (n2 < 0 ? 1 : n2);
    void *data = gpu_repeat(p, stream, count * dtype_size(t));
    if (n1 < 0) return tensor_1d(data, t, n0);
    return n2 < 0 ? tensor_2d(data, t, n0, n1) : tensor_3d(data, t, n0, n1, n2);
}

struct tensor gpu_empty(enum dtype t, int64_t n0, int64_t n1, int64_t n2)
{
    return gpu_tensor(t, OF_ONES, 0, n0, n1, n2);
}
struct tensor gpu_random(enum dtype t, uint64_t stream, int64_t n0, int64_t n1, int64_t n2)
{
    return gpu_tensor(t, t == DT_BF16 ? OF_BF16 : OF_F32, stream, n0, n1, n2);
}
struct tensor gpu_zero(enum dtype t, int64_t n0, int64_t n1, int64_t n2)
{
    struct tensor x = gpu_empty(t, n0, n1, n2);
    gpu.ops->zero(x.data, tensor_bytes(x));
    return x;
}
struct tensor gpu_i32(const int32_t *values, int64_t n) { return tensor_1d(gpu_bytes(values, 4 * n), DT_I32, n); }

struct tensor gpu_copy(struct tensor x)
{
    void *data = gpu_block(tensor_bytes(x));
    gpu.ops->copy(data, x.data, tensor_bytes(x));
    x.data = data;
    return x;
}

struct weight gpu_weight(uint64_t stream, int64_t n_exp, int64_t n_out, int64_t n_in)
{
    void *data = gpu_repeat(OF_BF16, stream, 2 * n_exp * n_out * n_in);
    return (struct weight){.format = WF_BF16, .n_exp = n_exp, .n_out = n_out, .n_in = n_in, .data = data};
}

struct tensor gpu_host(struct tensor x)
{
    void *data = mem_alloc(tensor_bytes(x));
    gpu.ops->download(data, x.data, tensor_bytes(x));
    x.data = data;
    return x;
}

void expect_near(const char *what, struct tensor got, struct tensor want, double bound)
{
    struct tensor a = gpu_host(got), b = gpu_host(want);
    const double error = tensor_error(a, b); /* NaN fails the comparison */
    const bool same = !memcmp(a.data, b.data, (size_t)tensor_bytes(a));
    if (!(error <= bound) || (bound <= 0 && !same)) fail_msg("%s: %g apart, allowed %g", what, error, bound);
    mem_free(a.data);
    mem_free(b.data);
}

void expect_same(const char *what, struct tensor got, struct tensor want) { expect_near(what, got, want, 0); }
