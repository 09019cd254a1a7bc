/* bench_attn.c - `moetrain bench attn`: attention forward and backward on random bf16 values, for heads of published
 * models. The rates of all widths come from one run, so that they can be compared. */
#include "train/bench/bench_attn.h"

#include <math.h>
#include <stdio.h>

#include "data/json/json.h"
#include "train/bench/bench_attn_shared.h"
#include "train/bench/bench_kernel.h"
#include "train/report/profile.h"

static const struct heads {
    const char *name;
    int64_t n_head, n_kv, head_dim, value_dim;
} models[] = {
    {"gpt-oss-20b", 64, 8, 64, 64},       {"qwen3-30b-a3b", 32, 4, 128, 128},  {"glm-4.5-air", 96, 8, 128, 128},
    {"qwen3.5-35b-a3b", 16, 2, 256, 256}, {"glm-4.7-flash", 20, 20, 256, 256}, {"deepseek-v3", 128, 128, 192, 128},
};
enum { AT_128 = 1 }; /* the row that the others are compared with */

struct bench {
    struct bench_attn_options o;
    struct device dev;
    double rate_128[2]; /* TFLOP/s, forward and backward */
    struct json_out out;
};
struct layer {
    struct attn_shape shape;
    struct seqs seqs;
    struct tensor qkv, o, lse, dout, dqkv; /* [T, (H+K)*A+K*B], [T, H*B] bf16; [T, H] f32; o; qkv */
};

static struct layer push_layer(struct device *dev, const struct bench_attn_options *o, const struct heads *h)
{
    const int64_t n = o->tokens, width = (h->n_head + h->n_kv) * h->head_dim + h->n_kv * h->value_dim;
    const int64_t n_seq = (n + o->seq - 1) / o->seq, out = h->n_head * h->value_dim;
    struct layer l = {
        .shape = {h->n_head, h->n_kv, h->head_dim, o->window, 1 / sqrtf((float)h->head_dim), h->value_dim},
        .seqs = {.cu = arena_tensor_1d(&dev->state, DT_I32, n_seq + 1), .n_seq = n_seq, .max_len = o->seq},
        .qkv = arena_tensor_2d(&dev->state, dev->act_dtype, n, width),
        .o = arena_tensor_2d(&dev->state, dev->act_dtype, n, out),
        .lse = arena_tensor_2d(&dev->state, dev->stat_dtype, n, h->n_head),
        .dout = arena_tensor_2d(&dev->state, dev->act_dtype, n, out),
        .dqkv = arena_tensor_2d(&dev->state, dev->act_dtype, n, width)};
    int32_t *cu = mem_array(n_seq + 1, sizeof(*cu));
    for (int64_t s = 0; s <= n_seq; s++) cu[s] = (int32_t)MT_MIN(s * o->seq, n);
    for (int64_t s = 0; s < n_seq; s++) {
        const double len = cu[s + 1] - cu[s];
        l.seqs.pairs += len * (len + 1) / 2;
    }
    if (!dev->dry_run) dev->ops->upload(l.seqs.cu.data, cu, tensor_bytes(l.seqs.cu));
    mem_free(cu);
    bench_uniform(dev, l.qkv, 1, 1);
    bench_uniform(dev, l.dout, 1, 2);
    return l;
}

static void run_op(struct device *dev, const struct layer *l, bool backward)
{
    const struct tensor no_sinks = {0};
    if (backward)
        op_attn_bwd(dev, l->dqkv, l->dout, l->o, l->lse, l->qkv, &l->seqs, &l->shape);
    else
        op_attn_fwd(dev, l->o, l->lse, l->qkv, no_sinks, &l->seqs, &l->shape);
}

/* floor_ms: the shortest time of this work. */
static void put_row(struct bench *b, const struct heads *h, bool backward, double ms, double flops, double floor_ms)
{
    const double rate = flops / ms / 1e9, *base = &b->rate_128[backward];
    if (h == &models[AT_128]) b->rate_128[backward] = rate;
    if (!b->o.json) {
        printf("%-16s %4lld %4lld %6lld %6lld  %-8s %9.3f %9.4g %8.1f %8.1f", h->name, (long long)h->n_head,
               (long long)h->n_kv, (long long)h->head_dim, (long long)h->value_dim, backward ? "backward" : "forward",
               ms, rate, 1e14 * rate / roofs_kernel_flops(&b->dev.roofs), 100 * floor_ms / ms);
        if (*base > 0) printf(" %8.1f", 100 * rate / *base);
        printf("\n");
        fflush(stdout);
        return;
    }
    json_out_open(&b->out, NULL, '{');
    json_out_str(&b->out, "heads_of", h->name);
    json_out_i64(&b->out, "heads", h->n_head);
    json_out_i64(&b->out, "kv_heads", h->n_kv);
    json_out_i64(&b->out, "head_dim", h->head_dim);
    json_out_i64(&b->out, "value_dim", h->value_dim);
    json_out_str(&b->out, "pass", backward ? "backward" : "forward");
    json_out_f64(&b->out, "ms", ms);
    json_out_f64(&b->out, "tflops", rate);
    json_out_f64(&b->out, "roof_pct", 1e14 * rate / roofs_kernel_flops(&b->dev.roofs));
    json_out_f64(&b->out, "floor_pct", 100 * floor_ms / ms);
    json_out_close(&b->out, '}');
}

static int run_heads(struct bench *b, const struct heads *h, struct err *err)
{
    struct device plan, *dev = &b->dev;
    device_dry_run(&plan, dev);
    const struct layer planned = push_layer(&plan, &b->o, h);
    run_op(&plan, &planned, true);
    if (bench_reserve(dev, &plan, err)) return err_prefix(err, "heads of %s", h->name);
    const struct layer l = push_layer(dev, &b->o, h);
    for (int backward = 0; backward < 2; backward++) {
        double before = 0, floor_before = 0;
        for (int64_t i = -BENCH_WARM_UP; i < b->o.repeats; i++) {
            const int slot = (int)(2 * MT_MAX(i, 0));
            before = dev->flops;
            floor_before = dev->floor_ms;
            dev->ops->mark(slot);
            run_op(dev, &l, backward);
            dev->ops->mark(slot + 1);
        }
        put_row(b, h, backward, bench_marked_ms(dev, b->o.repeats), dev->flops - before, dev->floor_ms - floor_before);
    }
    return 0;
}

static int run_shared(struct bench *b, struct err *err)
{
    struct bench_shared_row rows[BENCH_SHARED_ROWS];
    if (bench_attn_shared(&b->dev, b->o.tokens, b->o.seq, b->o.repeats, rows, err)) return -1;
    for (int i = 0; i < BENCH_SHARED_ROWS; i++) {
        const struct bench_shared_row *r = &rows[i];
        const struct heads h = {r->name, r->n_head, 1, r->head_dim, r->head_dim};
        for (int backward = 0; backward < 2; backward++)
            put_row(b, &h, backward, r->ms[backward], r->flops[backward], r->floor_ms[backward]);
    }
    return 0;
}

static void print_legend(struct bench *b)
{
    char roofs[256];
    if (b->o.json) {
        json_out_open(&b->out, NULL, '{');
        json_out_str(&b->out, "bench", "attn");
        json_out_str(&b->out, "device", b->dev.name);
        json_out_f64(&b->out, "roof_tflops", roofs_kernel_flops(&b->dev.roofs) / 1e12);
        json_out_i64(&b->out, "tokens", b->o.tokens);
        json_out_i64(&b->out, "seq", b->o.seq);
        json_out_i64(&b->out, "window", b->o.window);
        json_out_open(&b->out, "rows", '[');
        return;
    }
    printf("%s\n%lld tokens in sequences of %lld, window %lld (0: none), median of %lld after %d; FLOPs of 2 products "
           "forward, 5 backward\n%-16s %4s %4s %6s %6s  %-8s %9s %9s %8s %8s %8s\n",
           profile_roofs(roofs, &b->dev), (long long)b->o.tokens, (long long)b->o.seq, (long long)b->o.window,
           (long long)b->o.repeats, BENCH_WARM_UP, "heads of", "H", "K", "keys", "values", "pass", "ms", "TFLOP/s",
           "% roof", "% floor", "% of 128");
}

/* Smaller defaults on a CPU. */
static void choose_sizes(struct bench_attn_options *o, bool gpu)
{
    if (!o->tokens) o->tokens = gpu ? 16384 : 1024;
    if (!o->seq) o->seq = gpu ? 4096 : 512;
    if (!o->repeats) o->repeats = gpu ? 20 : 3;
}

int bench_attn_run(const struct bench_attn_options *o, struct err *err)
{
    static struct bench b;
    b = (struct bench){.o = *o, .out = {.indent = true}};
    int rc = device_open(&b.dev, o->device, "auto", err) || prof_measure_roofs(&b.dev, err) ? -1 : 0;
    if (!rc) {
        choose_sizes(&b.o, b.dev.ops->own_memory);
        print_legend(&b);
        for (int i = 0; i < MT_LEN(models) && !rc; i++) rc = run_heads(&b, &models[i], err);
        if (!rc) rc = run_shared(&b, err);
    }
    if (!rc && b.o.json) {
        json_out_close(&b.out, ']');
        json_out_close(&b.out, '}');
        printf("%.*s\n", (int)b.out.size, b.out.text);
    }
    json_out_free(&b.out);
    device_close(&b.dev);
    return rc;
}
