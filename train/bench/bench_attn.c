/* bench_attn.c - `moetrain bench attn`: attention forward and backward on random bf16 values, for heads of published
 * models and for the layers of DeepSeek-V4, whose heads share one key. */
#include "train/bench/bench_attn.h"

#include <math.h>
#include <stdio.h>

#include "train/bench/bench_kernel.h"
#include "train/report/profile.h"

/* shared: all heads share one key, which is also the value. A token sees a window of keys and `top` entries (0: all).
 * An entry stands for `ratio` tokens (0: there are no entries). */
static const struct heads {
    const char *name;
    int64_t n_head, n_kv, head_dim, value_dim;
    bool shared;
    int64_t window, ratio, top; /* of `shared`; others have the window of the options */
} models[] = {
    {"gpt-oss-20b", 64, 8, 64, 64, .shared = false},
    {"qwen3-30b-a3b", 32, 4, 128, 128, .shared = false},
    {"glm-4.5-air", 96, 8, 128, 128, .shared = false},
    {"qwen3.5-35b-a3b", 16, 2, 256, 256, .shared = false},
    {"glm-4.7-flash", 20, 20, 256, 256, .shared = false},
    {"gemma-4-26b-a4b", 16, 2, 512, 512, .shared = false}, /* its global layers */
    {"deepseek-v3", 128, 128, 192, 128, .shared = false},
    {"v4 window", 64, 1, 512, 512, true, .window = 128},
    {"v4 1 in 128", 64, 1, 512, 512, true, .window = 128, .ratio = 128},
    {"v4 1 in 4", 64, 1, 512, 512, true, .window = 128, .ratio = 4},
    {"v4 1 in 4, 512", 64, 1, 512, 512, true, .window = 128, .ratio = 4, .top = 512},
};
enum { AT_128 = 1 }; /* the row of head width 128, with which the others are compared */

struct bench {
    struct bench_attn_options o;
    struct device dev;
    double rate_128[2]; /* TFLOP/s, forward and backward */
    struct json_out out;
};
struct layer {
    const struct heads *heads;
    bool backward; /* the pass that runs */
    float scale;
    int64_t window;
    struct seqs seqs;
    /* q: [T, (H+K)*A+K*B] act, queries, keys and values; if shared: [T, H*A], queries only. dq as q. o, dout: [T, H*B]
     * act. lse: [T, H] stat. Only if shared: kv, dkv [T, A] act; entry, dentry [N, A] act; idx [T, top] i32. */
    struct tensor q, o, dout, dq, lse, kv, dkv, entry, dentry, idx;
};

static struct tensor push_act(struct device *dev, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&dev->state, dev->act_dtype, rows, cols);
}

static struct seqs push_seqs(struct device *dev, int64_t n, int64_t len)
{
    const int64_t n_seq = (n + len - 1) / len;
    struct seqs s = {.cu = arena_tensor_1d(&dev->state, DT_I32, n_seq + 1), .n_seq = n_seq, .max_len = len};
    int32_t *cu = mem_array(n_seq + 1, sizeof(*cu));
    for (int64_t i = 0; i <= n_seq; i++) cu[i] = (int32_t)MT_MIN(i * len, n);
    for (int64_t i = 0; i < n_seq; i++) {
        const double own = cu[i + 1] - cu[i];
        s.pairs += own * (own + 1) / 2;
    }
    if (!dev->dry_run) dev->ops->upload(s.cu.data, cu, tensor_bytes(s.cu));
    mem_free(cu);
    return s;
}

/* Fills the list of entries that each token sees, in sequences of len tokens: `top` evenly spaced entries, or all if
 * there are fewer. */
static void fill_idx(struct device *dev, struct tensor idx, int64_t len, int64_t ratio)
{
    const int64_t top = idx.shape[1];
    int32_t *list = mem_array(tensor_count(idx), sizeof(*list));
    for (int64_t t = 0; t < idx.shape[0]; t++) {
        const int64_t n = (t % len + 1) / ratio, kept = MT_MIN(n, top);
        for (int64_t p = 0; p < top; p++) list[t * top + p] = p < kept ? (int32_t)(p * n / kept) : -1;
    }
    dev->ops->upload(idx.data, list, tensor_bytes(idx));
    mem_free(list);
}

static void push_shared(struct layer *l, struct device *dev, int64_t n)
{
    const struct heads *h = l->heads;
    struct tensor *of_entries[] = {&l->entry, &l->dentry};
    l->kv = push_act(dev, n, h->head_dim);
    l->dkv = push_act(dev, n, h->head_dim);
    for (int i = 0; h->ratio && i < MT_LEN(of_entries); i++)
        *of_entries[i] = push_act(dev, MT_MAX(1, n / h->ratio), h->head_dim);
    if (h->top) l->idx = arena_tensor_2d(&dev->state, DT_I32, n, h->top);
    if (h->top && !dev->dry_run) fill_idx(dev, l->idx, l->seqs.max_len, h->ratio);
}

static struct layer push_layer(struct device *dev, const struct bench_attn_options *o, const struct heads *h)
{
    const int64_t n = o->tokens, out = h->n_head * h->value_dim;
    const int64_t width = h->shared ? out : (h->n_head + h->n_kv) * h->head_dim + h->n_kv * h->value_dim;
    struct layer l = {.heads = h,
                      .scale = 1 / sqrtf((float)h->head_dim),
                      .window = h->shared ? h->window : o->window,
                      .seqs = push_seqs(dev, n, o->seq),
                      .q = push_act(dev, n, width),
                      .o = push_act(dev, n, out),
                      .dout = push_act(dev, n, out),
                      .dq = push_act(dev, n, width),
                      .lse = arena_tensor_2d(&dev->state, dev->stat_dtype, n, h->n_head)};
    if (h->shared) push_shared(&l, dev, n);
    const struct tensor inputs[] = {l.q, l.dout, l.kv, l.entry};
    for (int i = 0; i < MT_LEN(inputs); i++)
        if (inputs[i].ndim) bench_uniform(dev, inputs[i], 1, (uint64_t)i + 1);
    return l;
}

static void run_shared(struct device *dev, const struct layer *l)
{
    const struct heads *h = l->heads;
    const struct shared_attn_shape shape = {h->n_head, h->head_dim, l->window, h->ratio, l->scale};
    const struct tensor no_sinks = {0};
    if (l->backward)
        op_shared_attn_bwd(dev, l->dq, l->dkv, l->dentry, l->dout, l->o, l->lse, l->q, l->kv, l->entry, l->idx,
                           &l->seqs, &shape);
    else
        op_shared_attn_fwd(dev, l->o, l->lse, l->q, l->kv, l->entry, l->idx, no_sinks, &l->seqs, &shape);
}

static void run_op(struct device *dev, const void *arg)
{
    const struct layer *l = arg;
    const struct heads *h = l->heads;
    const struct attn_shape shape = {h->n_head, h->n_kv, h->head_dim, l->window, l->scale, h->value_dim};
    const struct tensor no_sinks = {0};
    if (h->shared)
        run_shared(dev, l);
    else if (l->backward)
        op_attn_bwd(dev, l->dq, l->dout, l->o, l->lse, l->q, &l->seqs, &shape);
    else
        op_attn_fwd(dev, l->o, l->lse, l->q, no_sinks, &l->seqs, &shape);
}

static void put_row(struct bench *b, const struct heads *h, bool backward, const struct bench_time *t)
{
    const double rate = t->flops / t->ms / 1e9, *base = &b->rate_128[backward];
    if (h == &models[AT_128]) b->rate_128[backward] = rate;
    if (!b->o.json) {
        printf("%-16s %4lld %4lld %6lld %6lld  %-8s %9.3f %9.4g %8.1f %8.1f", h->name, (long long)h->n_head,
               (long long)h->n_kv, (long long)h->head_dim, (long long)h->value_dim, backward ? "backward" : "forward",
               t->ms, rate, 1e14 * rate / roofs_kernel_flops(&b->dev.roofs), 100 * t->floor_ms / t->ms);
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
    json_out_f64(&b->out, "ms", t->ms);
    json_out_f64(&b->out, "tflops", rate);
    json_out_f64(&b->out, "roof_pct", 1e14 * rate / roofs_kernel_flops(&b->dev.roofs));
    json_out_f64(&b->out, "floor_pct", 100 * t->floor_ms / t->ms);
    json_out_close(&b->out, '}');
}

static int run_heads(struct bench *b, const struct heads *h, struct err *err)
{
    struct device plan, *dev = &b->dev;
    device_dry_run(&plan, dev);
    struct layer l = push_layer(&plan, &b->o, h);
    l.backward = true;
    run_op(&plan, &l);
    if (bench_reserve(dev, &plan, err)) return err_prefix(err, "%s%s", h->shared ? "" : "heads of ", h->name);
    l = push_layer(dev, &b->o, h);
    for (int backward = 0; backward < 2; backward++) {
        l.backward = backward;
        const struct bench_time t = bench_time(dev, b->o.repeats, NULL, run_op, &l);
        put_row(b, h, backward, &t);
    }
    return 0;
}

static void print_legend(struct bench *b)
{
    char roofs[256];
    if (b->o.json) {
        bench_json_begin(&b->out, "attn", &b->dev);
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
    }
    bench_end(&b.dev, &b.out, !rc);
    return rc;
}
