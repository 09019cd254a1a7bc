/* bench_quant.c - `moetrain bench quant`: the ops of fake quantisation on bf16 experts, in one call for all and in one
 * call per expert, against a copy of the same bytes. */
#include "train/bench/bench_quant.h"

#include <stdio.h>

#include "data/json.h"
#include "kernels/fakequant.h"
#include "train/bench/bench_experts.h"
#include "train/report/profile.h"

static const int64_t gpu_shapes[][2] = {{5120, 8192}, {3712, 2688}, {2688, 1856}}, cpu_shapes[][2] = {{256, 384}};
static const char *const formats[] = {NULL, "int8", "int4-32", "int4-128", "fp8", "nvfp4", "mxfp4"}; /* NULL: amax */

struct stack {
    struct tensor x, y, amax, bad; /* [E, out, in] bf16, E */
};
struct row {
    const char *format;
    int64_t n_exp, n_out, n_in, launches; /* launches -1: not counted */
    double ms, loop_ms, bytes;
};
struct bench {
    struct device dev;
    int64_t n_run;
    bool json;
    struct json_out out;
};

static struct stack push_stack(struct device *dev, int64_t n_exp, int64_t n_out, int64_t n_in)
{
    struct stack s = {.x = arena_tensor_3d(&dev->state, DT_BF16, n_exp, n_out, n_in),
                      .y = arena_tensor_3d(&dev->state, DT_BF16, n_exp, n_out, n_in),
                      .amax = arena_tensor_1d(&dev->state, DT_F32, n_exp),
                      .bad = arena_tensor_1d(&dev->state, DT_F64, n_exp)};
    bench_uniform(dev, s.x, 0.02, 1);
    op_amax(dev, s.amax, s.bad, s.x);
    return s;
}

/* One call for all experts, or one per expert. */
static void run_op(struct device *dev, const struct stack *s, const struct fakequant *f, bool loop)
{
    const int64_t n = s->x.shape[0], step = loop ? 1 : n;
    for (int64_t e = 0; e < n; e += step) {
        const struct tensor x = tensor_rows(s->x, e, step), amax = tensor_rows(s->amax, e, step);
        if (f)
            op_fake_quant(dev, tensor_rows(s->y, e, step), x, amax, f);
        else
            op_amax(dev, amax, tensor_rows(s->bad, e, step), x);
    }
}

/* A copy of at most 256 MiB evicts the caches before each timed run. */
static double time_op(struct bench *b, const struct stack *s, const struct fakequant *f, bool loop)
{
    double ms[BENCH_RUNS];
    const int64_t half = tensor_bytes(s->y) / 2;
    for (int64_t i = -BENCH_WARM_UP; i < b->n_run; i++) {
        const int slot = (int)(2 * MT_MAX(i, 0));
        b->dev.ops->copy(s->y.data, (char *)s->y.data + half, MT_MIN(half, 256 << 20));
        b->dev.ops->mark(slot);
        run_op(&b->dev, s, f, loop);
        b->dev.ops->mark(slot + 1);
    }
    b->dev.ops->wait();
    for (int i = 0; i < (int)b->n_run; i++) ms[i] = b->dev.ops->mark_ms(2 * i, 2 * i + 1);
    return bench_median(ms, b->n_run);
}

static void put_row(struct bench *b, const struct row *r)
{
    const double rate = r->bytes / r->ms / 1e6, share = 1e11 * rate / b->dev.roofs.bytes;
    char launches[32] = "?";
    if (!b->json) {
        if (r->launches >= 0) snprintf(launches, sizeof(launches), "%lld", (long long)r->launches);
        printf("%-8s %7lld %6lld x %-6lld %10.1f %9.4f %8.0f %7.1f %9.4f %8.2f %9s\n", r->format, (long long)r->n_exp,
               (long long)r->n_out, (long long)r->n_in, r->bytes / 1e6, r->ms, rate, share, r->loop_ms,
               r->loop_ms / r->ms, launches);
        fflush(stdout);
        return;
    }
    json_out_open(&b->out, NULL, '{');
    json_out_str(&b->out, "op", r->format);
    json_out_i64(&b->out, "experts", r->n_exp);
    json_out_i64(&b->out, "out", r->n_out);
    json_out_i64(&b->out, "in", r->n_in);
    json_out_f64(&b->out, "bytes", r->bytes);
    json_out_f64(&b->out, "ms", r->ms);
    json_out_f64(&b->out, "gbs", rate);
    json_out_f64(&b->out, "copy_pct", share);
    json_out_f64(&b->out, "loop_ms", r->loop_ms);
    json_out_f64(&b->out, "loop_ratio", r->loop_ms / r->ms);
    if (r->launches >= 0) json_out_i64(&b->out, "launches", r->launches);
    json_out_close(&b->out, '}');
}

static int run_stack(struct bench *b, int64_t n_exp, const int64_t shape[2], struct err *err)
{
    struct device plan, *dev = &b->dev;
    device_dry_run(&plan, dev);
    push_stack(&plan, n_exp, shape[0], shape[1]);
    if (bench_reserve(dev, &plan, err))
        return err_prefix(err, "%lld experts of %lld x %lld", (long long)n_exp, (long long)shape[0],
                          (long long)shape[1]);
    const struct stack s = push_stack(dev, n_exp, shape[0], shape[1]);
    for (int i = 0; i < MT_LEN(formats); i++) {
        struct fakequant f;
        struct dev_calls calls;
        if (formats[i] && fakequant_parse(&f, formats[i], err)) return -1;
        const struct fakequant *format = formats[i] ? &f : NULL;
        if (format && f.block && shape[1] % f.block) continue; /* this shape has no whole blocks */
        struct row r = {formats[i] ? formats[i] : "amax", n_exp, shape[0], shape[1], -1, 0, 0, 0};
        dev->ops->count_calls(true, &calls);
        run_op(dev, &s, format, false);
        dev->ops->count_calls(false, &calls);
        if (!calls.missing) r.launches = calls.launches;
        r.ms = time_op(b, &s, format, false);
        r.loop_ms = time_op(b, &s, format, true);
        r.bytes = (double)tensor_bytes(s.x) * (format ? 2 : 1);
        put_row(b, &r);
    }
    return 0;
}

static void print_legend(struct bench *b)
{
    char roofs[256];
    if (b->json) {
        json_out_open(&b->out, NULL, '{');
        json_out_str(&b->out, "bench", "quant");
        json_out_str(&b->out, "device", b->dev.name);
        json_out_f64(&b->out, "roof_gbs", b->dev.roofs.bytes / 1e9);
        json_out_open(&b->out, "rows", '[');
        return;
    }
    printf("%s\nbf16 experts, median of %lld after %d, caches evicted before each; loop: one call per expert\n"
           "%-8s %7s %15s %10s %9s %8s %7s %9s %8s %9s\n",
           profile_roofs(roofs, &b->dev), (long long)b->n_run, BENCH_WARM_UP, "op", "experts", "out x in", "MB", "ms",
           "GB/s", "% copy", "loop ms", "loop /", "launches");
}

int bench_quant_run(const struct bench_quant_options *o, struct err *err)
{
    static struct bench b;
    struct cli_list experts = o->experts;
    b = (struct bench){.n_run = o->repeats, .json = o->json, .out = {.indent = true}};
    int rc = device_open(&b.dev, o->device, "auto", err) || prof_measure_roofs(&b.dev, err) ? -1 : 0;
    if (!rc) {
        const bool gpu = b.dev.ops->own_memory;
        if (!experts.n) experts = gpu ? (struct cli_list){4, {4, 8, 32, 128}} : (struct cli_list){1, {4}};
        print_legend(&b);
        for (int64_t s = 0; s < (gpu ? MT_LEN(gpu_shapes) : MT_LEN(cpu_shapes)) && !rc; s++)
            for (int64_t e = 0; e < experts.n && !rc; e++)
                rc = run_stack(&b, experts.v[e], gpu ? gpu_shapes[s] : cpu_shapes[s], err);
    }
    if (!rc && b.json) {
        json_out_close(&b.out, ']');
        json_out_close(&b.out, '}');
        printf("%.*s\n", (int)b.out.size, b.out.text);
    }
    json_out_free(&b.out);
    device_close(&b.dev);
    return rc;
}
