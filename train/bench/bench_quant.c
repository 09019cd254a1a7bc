/* bench_quant.c - `moetrain bench quant`: the ops of fake quantisation on bf16 experts, in one call for all experts and
 * in one call per expert. It compares them with two copies: one of the same size, measured in the same way, and a large
 * one.
 *
 * Calls run back to back on one stack of experts after another, of IN_TURN bytes in all, more than any GPU's cache
 * holds. So every call reads from memory, and bytes that a call leaves in a write cache cost time in the next call. */
#include "train/bench/bench_quant.h"

#include <stdio.h>

#include "kernels/format/fakequant.h"
#include "train/bench/bench_kernel.h"
#include "train/report/profile.h"

static const int64_t gpu_shapes[][2] = {{5120, 8192}, {3712, 2688}, {2688, 1856}}, cpu_shapes[][2] = {{256, 384}};
static const char *const formats[] = {NULL, "int8", "int4-32", "int4-128", "fp8", "nvfp4", "mxfp4"}; /* NULL: amax */

enum { IN_TURN = 512 << 20, IN_TURN_CPU = 2 << 20, LEAD = 256 << 20 };

/* n_turn stacks of E experts, one after the other in memory. */
struct stacks {
    int64_t n_exp, n_turn;
    struct tensor x, y, amax, bad; /* [n_turn * E, out, in] bf16, n_turn * E */
};
/* The work that is timed: fake quantisation, the largest magnitudes (amax), or a copy of `copy` bytes of each stack. */
struct work {
    const struct fakequant *format; /* NULL: amax */
    bool loop;                      /* one call per expert */
    int64_t copy;                   /* 0: no copy */
    const struct stacks *s;
};
struct row {
    const char *format;
    int64_t n_exp, n_out, n_in, launches; /* launches -1: not counted */
    double ms, loop_ms, copy_ms, bytes;   /* copy_ms: of as many bytes, read and written together */
};
struct bench {
    struct device dev;
    int64_t n_run;
    bool json;
    struct json_out out;
};

static int in_turn(const struct device *dev) { return dev->ops->own_memory ? IN_TURN : IN_TURN_CPU; }

static struct stacks push_stacks(struct device *dev, int64_t n_exp, int64_t n_out, int64_t n_in)
{
    const int64_t bytes = n_exp * n_out * n_in * 2, n_turn = (in_turn(dev) + bytes - 1) / bytes, n = n_turn * n_exp;
    struct stacks s = {.n_exp = n_exp,
                       .n_turn = n_turn,
                       .x = arena_tensor_3d(&dev->state, DT_BF16, n, n_out, n_in),
                       .y = arena_tensor_3d(&dev->state, DT_BF16, n, n_out, n_in),
                       .amax = arena_tensor_1d(&dev->state, DT_F32, n),
                       .bad = arena_tensor_1d(&dev->state, DT_F64, n)};
    bench_uniform(dev, s.x, 0.02, 1);
    op_amax(dev, s.amax, s.bad, s.x);
    return s;
}

/* Works on the stack that begins at expert `first`. */
static void run_work(struct device *dev, const struct work *w, int64_t first)
{
    const struct stacks *s = w->s;
    const int64_t step = w->loop ? 1 : s->n_exp;
    if (w->copy) {
        dev->ops->copy(tensor_rows(s->y, first, 1).data, tensor_rows(s->x, first, 1).data, w->copy);
        return;
    }
    for (int64_t e = first; e < first + s->n_exp; e += step) {
        const struct tensor x = tensor_rows(s->x, e, step), amax = tensor_rows(s->amax, e, step);
        if (w->format)
            op_fake_quant(dev, tensor_rows(s->y, e, step), x, amax, w->format);
        else
            op_amax(dev, amax, tensor_rows(s->bad, e, step), x);
    }
}

static void run_stacks(struct device *dev, const void *arg)
{
    const struct work *w = arg;
    for (int64_t t = 0; t < w->s->n_turn; t++) run_work(dev, w, t * w->s->n_exp);
}

/* Gives the host time to launch ahead of the GPU. */
static void copy_lead(struct device *dev, const void *arg)
{
    const struct stacks *s = ((const struct work *)arg)->s;
    dev->ops->copy(s->y.data, s->x.data, MT_MIN(tensor_bytes(s->x), LEAD));
}

/* Milliseconds per stack. */
static double time_work(struct bench *b, const struct work *w)
{
    return bench_time(&b->dev, b->n_run, copy_lead, run_stacks, w).ms / (double)w->s->n_turn;
}

static void put_row(struct bench *b, const struct row *r)
{
    const double rate = r->bytes / r->ms / 1e6, share = 1e11 * rate / b->dev.roofs.bytes;
    const double same = 100 * r->copy_ms / r->ms;
    char launches[32] = "?";
    if (!b->json) {
        if (r->launches >= 0) snprintf(launches, sizeof(launches), "%lld", (long long)r->launches);
        printf("%-8s %7lld %6lld x %-6lld %10.1f %9.4f %8.0f %9.1f %7.1f %9.4f %8.2f %9s\n", r->format,
               (long long)r->n_exp, (long long)r->n_out, (long long)r->n_in, r->bytes / 1e6, r->ms, rate, same, share,
               r->loop_ms, r->loop_ms / r->ms, launches);
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
    json_out_f64(&b->out, "same_copy_ms", r->copy_ms);
    json_out_f64(&b->out, "same_copy_pct", same);
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
    push_stacks(&plan, n_exp, shape[0], shape[1]);
    if (bench_reserve(dev, &plan, err))
        return err_prefix(err, "%lld experts of %lld x %lld", (long long)n_exp, (long long)shape[0],
                          (long long)shape[1]);
    const struct stacks s = push_stacks(dev, n_exp, shape[0], shape[1]);
    const int64_t bytes = tensor_bytes(s.x) / s.n_turn;
    for (int i = 0; i < MT_LEN(formats); i++) {
        struct fakequant f;
        struct dev_calls calls;
        if (formats[i] && fakequant_parse(&f, formats[i], err)) return -1;
        struct work w = {.s = &s, .format = formats[i] ? &f : NULL};
        if (w.format && f.block && shape[1] % f.block) continue; /* this shape has no whole blocks */
        struct row r = {formats[i] ? formats[i] : "amax", n_exp, shape[0], shape[1], -1, 0, 0, 0, 0};
        dev->ops->count_calls(true, &calls);
        run_work(dev, &w, 0);
        dev->ops->count_calls(false, &calls);
        if (!calls.missing) r.launches = calls.launches;
        /* measured together with the op, because a GPU is slower for some time after a large memory was freed */
        r.copy_ms = time_work(b, &(struct work){.s = &s, .copy = w.format ? bytes : bytes / 2});
        r.ms = time_work(b, &w);
        w.loop = true;
        r.loop_ms = time_work(b, &w);
        r.bytes = (double)bytes * (w.format ? 2 : 1);
        put_row(b, &r);
    }
    return 0;
}

static void print_legend(struct bench *b)
{
    char roofs[256];
    if (b->json) {
        bench_json_begin(&b->out, "quant", &b->dev);
        json_out_f64(&b->out, "roof_gbs", b->dev.roofs.bytes / 1e9);
        json_out_open(&b->out, "rows", '[');
        return;
    }
    printf("%s\nbf16 experts, median of %lld after %d; calls back to back on stacks of %d MiB together, in turn\n"
           "%% copy: of a copy of as many bytes (read and written), timed likewise; large: of a large copy\n"
           "loop: one call per expert\n"
           "%-8s %7s %15s %10s %9s %8s %9s %7s %9s %8s %9s\n",
           profile_roofs(roofs, &b->dev), (long long)b->n_run, BENCH_WARM_UP, in_turn(&b->dev) >> 20, "op", "experts",
           "out x in", "MB", "ms", "GB/s", "% copy", "large", "loop ms", "loop /", "launches");
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
    bench_end(&b.dev, &b.out, !rc);
    return rc;
}
