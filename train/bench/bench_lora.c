/* bench_lora.c - `moetrain bench lora`: cost of adapters on the experts of one layer.
 *
 * A step has these ops of a layer: sort, gate_up, down, combine; then the backward of down and of gate_up. It runs in
 * three variants: without adapters, with adapters but only dX, with adapters and their gradients. Device events before
 * and after each op measure its time. */
#include "train/bench/bench_experts.h"
#include "train/report/profile.h"

enum part { SORT, UP_FWD, DOWN_FWD, COMBINE, DOWN_BWD, UP_BWD, N_PART };
enum { N_MARK = N_PART + 1 }; /* device events of a step */

struct layer {
    struct device *dev;
    const struct expert_shape *s;
    enum routing routing;
    struct glu glu;
    struct proj up, down;
    struct route route;
    struct tensor x, dout; /* [T, D] */
};

/* Medians in ms of the parts of a step and of the whole step. */
struct times {
    double part[N_PART], step;
};

/* Times of one projection or of the layer. fwd, dx: forward and dX with adapters; fwd_base, dx_base: without. bwd: the
 * whole backward. all, base: forward and backward, with and without adapters. */
struct split {
    double fwd_base, fwd, dx_base, dx, bwd, base, all;
};
struct result {
    const struct expert_shape *s;
    const struct expert_quant *q;
    enum routing routing;
    int64_t n_tok, n_active, r;
    struct split up, down, layer;
    double floor_ms;                   /* of the step with adapters */
    int64_t base_peak, peak, adapters; /* bytes: the work arena without adapters and with; adapters and gradients */
};

/* ---- a layer ---- */

static void push_weights(struct layer *l, struct device *dev, const struct expert_shape *s,
                         const struct expert_quant *q)
{
    *l = (struct layer){.dev = dev, .s = s};
    l->glu = s->gpt_oss ? (struct glu){GLU_CLAMPED, 1.702f, 7, true} : (struct glu){.kind = GLU_SWIGLU};
    l->up = bench_proj(dev, s, q, false);
    l->down = bench_proj(dev, s, q, true);
}

/* Allocates adapters and inputs; frees the earlier ones. */
static int64_t push_case(struct layer *l, int64_t n_tok, int64_t r)
{
    struct device *dev = l->dev;
    int64_t n_active;
    arena_release(&dev->state, 0);
    arena_release(&dev->work, 0);
    bench_adapter(dev, &l->up, r);
    bench_adapter(dev, &l->down, r);
    l->route = bench_route(dev, l->s, n_tok, l->routing, &n_active);
    l->x = arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, l->s->dim);
    l->dout = arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, l->s->dim);
    bench_uniform(dev, l->x, 1, 9);
    bench_uniform(dev, l->dout, 0.01, 10);
    return n_active;
}

static void mark(const struct layer *l, int slot)
{
    if (!l->dev->dry_run) l->dev->ops->mark(slot);
}

static struct tensor push_rows(const struct layer *l, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&l->dev->work, l->dev->act_dtype, rows, cols);
}

/* Lifetimes are those of model/block.c without recompute. */
static void step(struct layer *l, bool grads, int slot)
{
    struct device *dev = l->dev;
    const int64_t n_tok = l->x.shape[0], n_row = n_tok * l->s->top_k, dim = l->s->dim, width = l->s->width;
    const int64_t saved = arena_mark(&dev->work), r = l->up.lora.r;
    struct proj up = l->up, down = l->down;
    struct tensor pre = push_rows(l, n_row, 2 * width), none = {0};
    if (!grads) up.grad = down.grad = (struct lora_grad){.a = none};
    struct tensor xa = r ? push_rows(l, n_row, r) : none, ha = r ? push_rows(l, n_row, r) : none;

    const int64_t scratch = arena_mark(&dev->work);
    struct tensor act = push_rows(l, n_row, width), y = push_rows(l, n_row, dim), out = push_rows(l, n_tok, dim);
    mark(l, slot + SORT);
    op_route_sort(dev, &l->route, l->s->n_exp);
    mark(l, slot + UP_FWD);
    op_moe_up_fwd(dev, act, pre, xa, l->x, &l->route, &l->up, &l->glu);
    mark(l, slot + DOWN_FWD);
    op_moe_down_fwd(dev, y, ha, act, &l->route, &l->down);
    mark(l, slot + COMBINE);
    op_moe_combine_fwd(dev, out, l->x, y, &l->route);
    arena_release(&dev->work, scratch);

    struct tensor dx = push_rows(l, n_tok, dim), dpre = push_rows(l, n_row, 2 * width);
    struct tensor dgate = arena_tensor_2d(&dev->work, dev->stat_dtype, n_tok, l->s->top_k);
    act = push_rows(l, n_row, width);
    mark(l, slot + DOWN_BWD);
    op_moe_down_bwd(dev, dpre, dgate, act, l->dout, pre, ha, &l->route, &down, &l->glu);
    mark(l, slot + UP_BWD);
    op_moe_up_bwd(dev, dx, dpre, l->x, xa, &l->route, &up);
    mark(l, slot + N_PART);
    arena_release(&dev->work, saved);
}

/* ---- measuring ---- */

static struct times time_steps(struct bench_experts *b, struct layer *l, bool grads)
{
    struct times t;
    for (int i = 0; i < BENCH_WARM_UP; i++) step(l, grads, 0);
    b->dev.ops->wait();
    b->dev.floor_ms = 0;
    for (int i = 0; i < (int)b->o.repeats; i++) step(l, grads, i * N_MARK);
    for (int p = 0; p < N_PART; p++) t.part[p] = bench_marked_ms(&b->dev, b->o.repeats, N_MARK, p, p + 1);
    t.step = bench_marked_ms(&b->dev, b->o.repeats, N_MARK, 0, N_PART);
    return t;
}

static struct split split_of(const struct times *base, const struct times *dx, const struct times *all, enum part fwd,
                             enum part bwd)
{
    return (struct split){.fwd_base = base->part[fwd],
                          .fwd = all->part[fwd],
                          .dx_base = base->part[bwd],
                          .dx = dx->part[bwd],
                          .bwd = all->part[bwd],
                          .base = base->part[fwd] + base->part[bwd],
                          .all = all->part[fwd] + all->part[bwd]};
}

/* The times of the layer: sums over the projections and the other ops, except that forward and backward together are
 * the measured step. */
static struct split layer_split(const struct result *r, const struct times *base, const struct times *all)
{
    return (struct split){
        .fwd_base = r->up.fwd_base + r->down.fwd_base + base->part[SORT] + base->part[COMBINE],
        .fwd = r->up.fwd + r->down.fwd + all->part[SORT] + all->part[COMBINE],
        .dx_base = r->up.dx_base + r->down.dx_base,
        .dx = r->up.dx + r->down.dx,
        .bwd = r->up.bwd + r->down.bwd,
        .base = base->step,
        .all = all->step,
    };
}

/* Returns the bytes of the work arena that a step needs; *adapters: bytes of the adapters and their gradients. Raises
 * the peaks of planned->dev. */
static int64_t measure_case(struct layer *planned, int64_t n_tok, int64_t r, int64_t *adapters)
{
    struct device *plan = planned->dev;
    const int64_t before = plan->work.peak;
    plan->work.peak = 0;
    push_case(planned, n_tok, r);
    step(planned, true, 0);
    const int64_t peak = plan->work.peak;
    plan->work.peak = MT_MAX(before, peak);
    if (adapters) *adapters = plan->state.used;
    return peak;
}

/* ---- output ---- */

static double over(double with, double without) { return 100 * (with / without - 1); }

static void print_legend(const struct bench_experts *b)
{
    char roofs[256];
    printf("%s\n"
           "ms, median of %lld after %d. gate_up: with gather and activation, its dX with the sum over a token's rows; "
           "down:\n"
           "its dX with the gradients of activation and gates. dX LoRA: adapters without their gradients; "
           "dA,dB:\n"
           "by difference, backward - dX LoRA. layer: with sort and combine, fwd+bwd as timed from end to end\n",
           profile_roofs(roofs, &b->dev), (long long)b->o.repeats, BENCH_WARM_UP);
}

static void print_head(const struct result *r)
{
    printf("\n%s: %lld experts, D %lld, F %lld, top %lld, %s; %lld tokens reach %lld experts (routing %s)\n"
           "%4s  %-8s %8s %8s %6s %8s %8s %6s %8s %8s %9s %9s %6s\n",
           r->s->name, (long long)r->s->n_exp, (long long)r->s->dim, (long long)r->s->width, (long long)r->s->top_k,
           r->q->name, (long long)r->n_tok, (long long)r->n_active, routing_names[r->routing], "r", "", "forward",
           "LoRA", "+%", "dX", "dX LoRA", "+%", "dA,dB", "backward", "fwd+bwd", "LoRA", "+%");
}

static void print_split(const char *name, const struct split *s, int64_t r)
{
    printf("%4lld  %-8s %8.3f %8.3f %6.1f %8.3f %8.3f %6.1f %8.3f %8.3f %9.3f %9.3f %6.1f\n", (long long)r, name,
           s->fwd_base, s->fwd, over(s->fwd, s->fwd_base), s->dx_base, s->dx, over(s->dx, s->dx_base), s->bwd - s->dx,
           s->bwd, s->base, s->all, over(s->all, s->base));
}

static void print_result(const struct result *r)
{
    char base[32], peak[32], adapters[32];
    print_split("gate_up", &r->up, r->r);
    print_split("down", &r->down, r->r);
    print_split("layer", &r->layer, r->r);
    printf("      %.1f %% of the roof; memory %s without LoRA, %s with, and %s of adapters\n",
           100 * r->floor_ms / r->layer.all, str_bytes(base, r->base_peak), str_bytes(peak, r->peak),
           str_bytes(adapters, r->adapters));
}

static void put_split(struct json_out *o, const char *name, const struct split *s)
{
    json_out_open(o, name, '{');
    json_out_f64(o, "fwd_base_ms", s->fwd_base);
    json_out_f64(o, "fwd_ms", s->fwd);
    json_out_f64(o, "fwd_overhead_pct", over(s->fwd, s->fwd_base));
    json_out_f64(o, "dx_base_ms", s->dx_base);
    json_out_f64(o, "dx_ms", s->dx);
    json_out_f64(o, "dx_lora_ms", s->dx - s->dx_base);
    json_out_f64(o, "dab_ms", s->bwd - s->dx);
    json_out_f64(o, "bwd_ms", s->bwd);
    json_out_f64(o, "base_ms", s->base);
    json_out_f64(o, "ms", s->all);
    json_out_f64(o, "overhead_pct", over(s->all, s->base));
    json_out_close(o, '}');
}

static void put_result(struct json_out *o, const struct result *r)
{
    json_out_open(o, NULL, '{');
    json_out_str(o, "arch", r->s->name);
    json_out_str(o, "quant", r->q->name);
    json_out_str(o, "routing", routing_names[r->routing]);
    json_out_i64(o, "tokens", r->n_tok);
    json_out_i64(o, "active_experts", r->n_active);
    json_out_i64(o, "rank", r->r);
    put_split(o, "gate_up", &r->up);
    put_split(o, "down", &r->down);
    put_split(o, "layer", &r->layer);
    json_out_f64(o, "floor_ms", r->floor_ms);
    json_out_f64(o, "roof_pct", 100 * r->floor_ms / r->layer.all);
    json_out_i64(o, "base_peak_bytes", r->base_peak);
    json_out_i64(o, "peak_bytes", r->peak);
    json_out_i64(o, "adapter_bytes", r->adapters);
    json_out_close(o, '}');
}

/* ---- the bench ---- */

static void run_tokens(struct bench_experts *b, struct layer *l, struct layer *planned, const struct expert_quant *q,
                       int64_t n_tok)
{
    struct result r = {
        .s = l->s, .q = q, .routing = l->routing, .n_tok = n_tok, .base_peak = measure_case(planned, n_tok, 0, NULL)};
    push_case(l, n_tok, 0);
    const struct times base = time_steps(b, l, true);
    for (int64_t i = 0; i < b->o.ranks.n; i++) {
        r.r = b->o.ranks.v[i];
        r.peak = measure_case(planned, n_tok, r.r, &r.adapters);
        r.n_active = push_case(l, n_tok, r.r);
        const struct times dx = time_steps(b, l, false), all = time_steps(b, l, true);
        r.floor_ms = b->dev.floor_ms / (double)b->o.repeats;
        r.up = split_of(&base, &dx, &all, UP_FWD, UP_BWD);
        r.down = split_of(&base, &dx, &all, DOWN_FWD, DOWN_BWD);
        r.layer = layer_split(&r, &base, &all);
        if (b->o.json) {
            put_result(&b->rows, &r);
            continue;
        }
        if (i == 0) print_head(&r);
        print_result(&r);
    }
}

static int run_layer(struct bench_experts *b, const struct expert_shape *s, const struct expert_quant *q,
                     struct err *err)
{
    struct device plan;
    struct layer l, planned;
    device_dry_run(&plan, &b->dev);
    push_weights(&planned, &plan, s, q);
    for (int64_t t = 0; t < b->o.tokens.n; t++)
        for (int64_t i = -1; i < b->o.ranks.n; i++)
            measure_case(&planned, b->o.tokens.v[t], i < 0 ? 0 : b->o.ranks.v[i], NULL);
    if (bench_reserve(&b->dev, &plan, err)) return err_prefix(err, "%s", s->name);
    push_weights(&l, &b->dev, s, q);
    for (int64_t t = 0; t < b->o.tokens.n; t++)
        for (int64_t i = 0; i < b->o.routings.n; i++) {
            l.routing = (enum routing)b->o.routings.v[i];
            run_tokens(b, &l, &planned, q, b->o.tokens.v[t]);
        }
    return 0;
}

int bench_lora(const struct bench_experts_options *o, struct err *err)
{
    static struct bench_experts b;
    int rc = bench_experts_open(&b, "lora", o, err);
    if (!rc && !b.o.json) print_legend(&b);
    for (int64_t i = 0; !rc && i < b.n_shape; i++) {
        const struct cli_list own = {1, {b.shapes[i].gpt_oss ? 0 : 1}}; /* mxfp4, nf4: as published */
        const struct cli_list quants = o->quants.n ? o->quants : own;
        for (int64_t q = 0; !rc && q < quants.n; q++) rc = run_layer(&b, &b.shapes[i], bench_quant(quants.v[q]), err);
    }
    bench_end(&b.dev, &b.rows, !rc);
    return rc;
}
