/* bench_kernel.c - see bench_kernel.h. */
#include "train/bench/bench_kernel.h"

#include <stdio.h>

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

double bench_marked_ms(const struct device *dev, int64_t n_run, int stride, int from, int to)
{
    double ms[BENCH_RUNS];
    dev->ops->wait();
    for (int i = 0; i < (int)n_run; i++) ms[i] = dev->ops->mark_ms(i * stride + from, i * stride + to);
    return prof_middle(ms, n_run);
}

struct bench_time bench_time(struct device *dev, int64_t n_run, bench_fn *prepare, bench_fn *run, const void *arg)
{
    struct bench_time t = {0};
    for (int i = -BENCH_WARM_UP; i < (int)n_run; i++) {
        const int slot = 2 * MT_MAX(i, 0);
        if (prepare) prepare(dev, arg);
        const double flops = dev->flops, floor_ms = dev->floor_ms;
        dev->ops->mark(slot);
        run(dev, arg);
        dev->ops->mark(slot + 1);
        t.flops = dev->flops - flops;
        t.floor_ms = dev->floor_ms - floor_ms;
    }
    t.ms = bench_marked_ms(dev, n_run, 2, 0, 1);
    return t;
}

void bench_json_begin(struct json_out *o, const char *name, const struct device *dev)
{
    json_out_open(o, NULL, '{');
    json_out_str(o, "bench", name);
    json_out_str(o, "device", dev->name);
}

void bench_json_print(struct json_out *o)
{
    json_out_close(o, '}');
    printf("%.*s\n", (int)o->size, o->text);
    json_out_free(o);
}

void bench_end(struct device *dev, struct json_out *o, bool print)
{
    if (print && o->size) {
        json_out_close(o, ']');
        bench_json_print(o);
    }
    json_out_free(o);
    device_close(dev);
}
