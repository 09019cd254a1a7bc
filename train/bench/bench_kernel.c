/* bench_kernel.c - what the benchmarks of kernels share: memory of the device, random tensors, times. */
#include "train/bench/bench_kernel.h"

int bench_reserve(struct device *dev, const struct device *plan, struct err *err)
{
    struct arena *have[] = {&dev->weights, &dev->state, &dev->work};
    const struct arena *need[] = {&plan->weights, &plan->state, &plan->work};
    for (int i = 0; i < 3; i++) {
        dev->ops->free(have[i]->base);
        *have[i] = (struct arena){0};
    }
    for (int i = 0; i < 3; i++)
        if (device_reserve(dev, have[i], need[i]->name, MT_MAX(need[i]->peak, 1), err)) return -1;
    return 0;
}

void bench_repeat(struct device *dev, struct tensor x, int64_t n)
{
    const int64_t count = tensor_count(x), size = dtype_size(x.dtype);
    for (int64_t at = n; at < count; at *= 2)
        dev->ops->copy((char *)x.data + at * size, x.data, MT_MIN(at, count - at) * size);
}

void bench_uniform(struct device *dev, struct tensor x, double amplitude, uint64_t key)
{
    const int64_t n = MT_MIN(tensor_count(x), BENCH_RANDOM / 4);
    if (dev->dry_run || !n) return;
    float *host = mem_array(n, sizeof(float));
    for (int64_t i = 0; i < n; i++) host[i] = (float)(amplitude * (2 * rng_uniform(key, (uint64_t)i) - 1));
    device_set_f32(dev, tensor_1d(x.data, x.dtype, n), host);
    bench_repeat(dev, x, n);
    mem_free(host);
}

double bench_marked_ms(const struct device *dev, int64_t n_run)
{
    double ms[BENCH_RUNS];
    dev->ops->wait();
    for (int i = 0; i < (int)n_run; i++) ms[i] = dev->ops->mark_ms(2 * i, 2 * i + 1);
    return prof_middle(ms, n_run);
}
