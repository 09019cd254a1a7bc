/* bench_dequant.c - `moetrain bench dequant`: speed of decoding packed experts to bf16: all experts, or only those with
 * tokens.
 *
 * When each of T tokens chooses J of E experts at random, about E (1 - (1 - J/E)^T) experts have tokens. Between two
 * timed calls a copy evicts the data from the caches. */
#include <math.h>

#include "train/bench/bench_experts.h"
#include "train/report/profile.h"

struct stack {
    const struct expert_shape *s;
    const struct expert_quant *q;
    const char *name;
    struct weight w;
    struct tensor out;  /* [E, out, in], output of op_decode */
    struct tensor offs; /* of the routing; ndim 0: all experts */
};
/* n_tok 0: all experts, without a routing. */
struct result {
    const struct stack *stack;
    int64_t n_tok, n_active;
    double expected, ms, all_ms;
    double out_bytes, bytes; /* decoded bytes; bytes read and written */
};

static struct stack push_stack(struct device *dev, const struct expert_shape *s, const struct expert_quant *q, bool up)
{
    struct stack k = {.s = s, .q = q, .name = up ? "gate_up" : "down"};
    const int64_t n_out = up ? 2 * s->width : s->dim, n_in = up ? s->dim : s->width;
    k.w = bench_weight(dev, q, s->n_exp, n_out, n_in, 1);
    k.out = arena_tensor_3d(&dev->state, dev->act_dtype == DT_BF16 ? DT_BF16 : DT_F32, s->n_exp, n_out, n_in);
    bench_uniform(dev, k.out, 1, 2);
    return k;
}

/* Evicts the data from the caches: copies one half of the decoded weights over the other, at most 256 MiB. */
static void sweep(struct device *dev, const void *arg)
{
    const struct tensor out = ((const struct stack *)arg)->out;
    const int64_t half = tensor_bytes(out) / 2, bytes = MT_MIN(half, 256 << 20);
    dev->ops->copy(out.data, (char *)out.data + half, bytes);
}

static void decode(struct device *dev, const void *arg)
{
    const struct stack *k = arg;
    op_decode(dev, k->out, &(struct proj){.w = k->w}, k->offs);
}

/* ---- output ---- */

static double rate(const struct result *r) { return r->bytes / r->ms / 1e6; } /* GB/s */
static double share(const struct result *r) { return 100 * (double)r->n_active / (double)r->stack->s->n_exp; }
static double of_copy(const struct bench_experts *b, const struct result *r)
{
    return 100 * 1e9 * rate(r) / b->dev.roofs.bytes;
}

static void print_legend(const struct bench_experts *b)
{
    char roofs[256];
    printf("%s\n"
           "median of %lld after %d, caches swept before each. T tokens choose J of E experts at random: expected are\n"
           "E (1 - (1 - J/E)^T) with tokens; MB decoded are written, MB moved the packed bytes as well\n",
           profile_roofs(roofs, &b->dev), (long long)b->o.repeats, BENCH_WARM_UP);
}

static void print_head(const struct stack *k)
{
    printf("\n%s %s [%lld, %lld, %lld], top %lld, %s\n%8s %8s %9s %6s %11s %10s %9s %8s %7s %8s\n", k->s->name, k->name,
           (long long)k->w.n_exp, (long long)k->w.n_out, (long long)k->w.n_in, (long long)k->s->top_k, k->q->name,
           "tokens", "experts", "expected", "share", "MB decoded", "MB moved", "ms", "GB/s", "% copy", "speed-up");
}

static void print_result(const struct bench_experts *b, const struct result *r)
{
    char tokens[32];
    snprintf(tokens, sizeof(tokens), r->n_tok ? "%lld" : "all", (long long)r->n_tok);
    printf("%8s %8lld %9.1f %5.1f%% %11.1f %10.1f %9.4f %8.0f %7.1f %8.2f\n", tokens, (long long)r->n_active,
           r->expected, share(r), r->out_bytes / 1e6, r->bytes / 1e6, r->ms, rate(r), of_copy(b, r), r->all_ms / r->ms);
}

static void put_result(struct bench_experts *b, const struct result *r)
{
    struct json_out *o = &b->rows;
    json_out_open(o, NULL, '{');
    json_out_str(o, "arch", r->stack->s->name);
    json_out_str(o, "stack", r->stack->name);
    json_out_str(o, "quant", r->stack->q->name);
    json_out_i64(o, "experts", r->stack->s->n_exp);
    json_out_i64(o, "tokens", r->n_tok);
    json_out_i64(o, "active_experts", r->n_active);
    json_out_f64(o, "expected_active", r->expected);
    json_out_f64(o, "active_pct", share(r));
    json_out_f64(o, "decoded_bytes", r->out_bytes);
    json_out_f64(o, "moved_bytes", r->bytes);
    json_out_f64(o, "ms", r->ms);
    json_out_f64(o, "gbs", rate(r));
    json_out_f64(o, "copy_pct", of_copy(b, r));
    json_out_f64(o, "speed_up", r->all_ms / r->ms);
    json_out_close(o, '}');
}

/* ---- the bench ---- */

/* n_tok 0: decodes all experts. all_ms: the time to decode all experts, for comparison; 0 if n_tok is 0. */
static double run_tokens(struct bench_experts *b, struct stack *k, int64_t n_tok, double all_ms)
{
    const double n_exp = (double)k->s->n_exp, miss = 1 - (double)k->s->top_k / n_exp;
    struct result r = {.stack = k, .n_tok = n_tok, .n_active = k->s->n_exp, .expected = n_exp};
    k->offs = (struct tensor){0};
    arena_release(&b->dev.work, 0);
    if (n_tok) {
        struct route route = bench_route(&b->dev, k->s, n_tok, ROUTING_UNIFORM, &r.n_active);
        op_route_sort(&b->dev, &route, k->s->n_exp);
        k->offs = route.offs;
        r.expected = n_exp * (1 - pow(miss, (double)n_tok));
    }
    r.ms = bench_time(&b->dev, b->o.repeats, sweep, decode, k).ms;
    r.all_ms = n_tok ? all_ms : r.ms;
    r.out_bytes = (double)r.n_active / n_exp * (double)tensor_bytes(k->out);
    r.bytes = r.out_bytes + (double)r.n_active / n_exp * (double)weight_bytes(&k->w);
    if (b->o.json)
        put_result(b, &r);
    else
        print_result(b, &r);
    return r.ms;
}

static int run_stack(struct bench_experts *b, const struct expert_shape *s, const struct expert_quant *q, bool up,
                     struct err *err)
{
    struct device plan;
    device_dry_run(&plan, &b->dev);
    push_stack(&plan, s, q, up);
    for (int64_t i = 0; i < b->o.tokens.n; i++) {
        arena_release(&plan.work, 0);
        struct route route = bench_route(&plan, s, b->o.tokens.v[i], ROUTING_UNIFORM, NULL);
        op_route_sort(&plan, &route, s->n_exp);
    }
    if (bench_reserve(&b->dev, &plan, err)) return err_prefix(err, "%s", s->name);
    struct stack k = push_stack(&b->dev, s, q, up);
    if (!b->o.json) print_head(&k);
    const double all_ms = run_tokens(b, &k, 0, 0);
    for (int64_t i = 0; i < b->o.tokens.n; i++) run_tokens(b, &k, b->o.tokens.v[i], all_ms);
    return 0;
}

int bench_dequant(const struct bench_experts_options *o, struct err *err)
{
    static struct bench_experts b;
    int rc = bench_experts_open(&b, "dequant", o, err);
    const struct cli_list packed = {5, {0, 1, 2, 3, 4}}, quants = o->quants.n ? o->quants : packed; /* BENCH_PACKED */
    if (!rc && !b.o.json) print_legend(&b);
    for (int64_t i = 0; !rc && i < b.n_shape; i++)
        for (int64_t q = 0; !rc && q < 2 * quants.n; q++)
            rc = run_stack(&b, &b.shapes[i], bench_quant(quants.v[q / 2]), q % 2 == 0, err);
    bench_end(&b.dev, &b.rows, !rc);
    return rc;
}
