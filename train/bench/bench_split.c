/* bench_split.c - `moetrain bench lora --split`: products of the experts with their adapters, hybrid and split.
 *
 * hybrid  two launches, as training runs them: xa = x A^T; y = x W^T + s xa B^T
 * split   three launches: xa = x A^T; y = x W^T; y += s xa B^T
 *
 * The four products of a layer are measured: gate_up and down, forward and dX, with bf16 weights. None applies an
 * activation: the split form of a layer could apply it only after its third launch, while the hybrid form has it in the
 * second. The third launch reads and writes y. Because another kernel for it could be faster, the split form is also
 * given with a third launch at the speed of a copy. dA and dB are timed by themselves; they are the same in both. */
#include "kernels/moe_part.h"
#include "train/bench/bench_experts.h"
#include "train/report/profile.h"

enum { HYBRID_THIN, HYBRID_MAIN, SPLIT_THIN, SPLIT_BASE, SPLIT_ADD, GRAD, N_MARK = GRAD + 2 };

/* Decoding would add the same time to both forms. */
static const struct expert_quant dense = {"bf16", WF_BF16, false};

struct product {
    const char *name, *grad;
    bool down, backward;
};
static const struct product products[] = {
    {"gate_up", "dA", false, false},
    {"down", "dA", true, false},
    {"down dX", "dB", true, true},
    {"gate_up dX", "dB", false, true},
};

struct layer {
    struct device *dev;
    const struct expert_shape *s;
    struct proj up, down;
    struct route route;
};

/* Medians in ms. */
struct times {
    double thin, base, hybrid, split, add, best, grad; /* best: split, its third launch at the speed of a copy */
};

struct result {
    const struct expert_shape *s;
    const struct expert_quant *q;
    enum routing routing;
    int64_t n_tok, n_active, r;
};

/* ---- a layer ---- */

static int64_t push_case(struct layer *l, int64_t n_tok, int64_t r, enum routing routing)
{
    struct device *dev = l->dev;
    int64_t n_active;
    arena_release(&dev->state, 0);
    arena_release(&dev->work, 0);
    bench_adapter(dev, &l->up, r);
    bench_adapter(dev, &l->down, r);
    l->route = bench_route(dev, l->s, n_tok, routing, &n_active);
    op_route_sort(dev, &l->route, l->s->n_exp);
    return n_active;
}

static void run_part(struct layer *l, struct moe_part *p, enum moe_part_kind kind, int slot)
{
    p->kind = kind;
    if (!l->dev->dry_run) l->dev->ops->mark(slot);
    ops_moe_part(l->dev, p, &l->route);
}

/* Every form of a product, n times; run i records its marks from first + i * N_MARK on. */
static void run_product(struct layer *l, const struct product *kind, int64_t n)
{
    struct device *dev = l->dev;
    struct arena *work = &dev->work;
    const struct proj *proj = kind->down ? &l->down : &l->up;
    const int64_t mark = arena_mark(work), n_row = l->route.row_slot.shape[0], n_tok = l->route.idx.shape[0];
    const bool tokens = kind->down == kind->backward;
    const int64_t n_in = kind->backward ? proj->w.n_out : proj->w.n_in;
    const int64_t n_out = kind->backward ? proj->w.n_in : proj->w.n_out;
    struct moe_part p = {.backward = kind->backward, .tokens = tokens, .proj = proj};
    p.in = arena_tensor_2d(work, dev->act_dtype, tokens ? n_tok : n_row, n_in);
    p.thin = arena_tensor_2d(work, dev->act_dtype, n_row, proj->lora.r);
    p.out = arena_tensor_2d(work, dev->act_dtype, n_row, n_out);
    bench_uniform(dev, p.in, kind->backward ? 0.01 : 1, 9);
    for (int64_t i = 0; i < n; i++) {
        const int first = (int)i * N_MARK;
        run_part(l, &p, MOE_THIN, first + HYBRID_THIN);
        run_part(l, &p, MOE_HYBRID, first + HYBRID_MAIN);
        run_part(l, &p, MOE_THIN, first + SPLIT_THIN);
        run_part(l, &p, MOE_BASE, first + SPLIT_BASE);
        run_part(l, &p, MOE_ADD, first + SPLIT_ADD);
        run_part(l, &p, MOE_GRAD, first + GRAD);
        if (!dev->dry_run) dev->ops->mark(first + GRAD + 1);
    }
    arena_release(work, mark);
}

/* ---- measuring ---- */

static double median_between(const struct bench_experts *b, int from, int to)
{
    double ms[BENCH_RUNS];
    for (int i = 0; i < (int)b->n_run; i++) ms[i] = b->dev.ops->mark_ms(i * N_MARK + from, i * N_MARK + to);
    return prof_middle(ms, b->n_run);
}

static struct times time_product(struct bench_experts *b, struct layer *l, const struct product *kind)
{
    const struct proj *proj = kind->down ? &l->down : &l->up;
    const int64_t n_value = l->route.row_slot.shape[0] * (kind->backward ? proj->w.n_in : proj->w.n_out);
    run_product(l, kind, BENCH_WARM_UP);
    b->dev.ops->wait();
    run_product(l, kind, b->n_run);
    b->dev.ops->wait();
    struct times t = {.thin = median_between(b, SPLIT_THIN, SPLIT_BASE),
                      .base = median_between(b, SPLIT_BASE, SPLIT_ADD),
                      .hybrid = median_between(b, HYBRID_THIN, SPLIT_THIN),
                      .split = median_between(b, SPLIT_THIN, GRAD),
                      .add = median_between(b, SPLIT_ADD, GRAD),
                      .grad = median_between(b, GRAD, GRAD + 1)};
    t.best = median_between(b, SPLIT_THIN, SPLIT_ADD) + 1e3 * 4 * (double)n_value / b->dev.roofs.bytes;
    return t;
}

/* ---- output ---- */

static void print_legend(const struct bench_experts *b)
{
    char roofs[256];
    printf("%s\n"
           "ms, median of %lld after %d. base: without adapter. hybrid, as training: x A^T, then one product. split: x "
           "A^T,\n"
           "base, y += s xa B^T (add); at copy: the same with the bytes of add at the speed of a copy. Ratios are to "
           "hybrid\n",
           profile_roofs(roofs, &b->dev), (long long)b->n_run, BENCH_WARM_UP);
}

static void print_head(const struct result *r)
{
    printf("\n%s: %lld experts, D %lld, F %lld, top %lld, %s; %lld tokens reach %lld experts (routing %s)\n"
           "%4s  %-10s %8s %8s %8s %8s %8s %6s %8s %6s %11s\n",
           r->s->name, (long long)r->s->n_exp, (long long)r->s->dim, (long long)r->s->width, (long long)r->s->top_k,
           r->q->name, (long long)r->n_tok, (long long)r->n_active, routing_names[r->routing], "r", "", "x A^T", "base",
           "hybrid", "add", "split", "ratio", "at copy", "ratio", "dA or dB");
}

static void print_times(const struct product *kind, const struct times *t, int64_t r)
{
    printf("%4lld  %-10s %8.3f %8.3f %8.3f %8.3f %8.3f %6.2f %8.3f %6.2f %8.3f %s\n", (long long)r, kind->name, t->thin,
           t->base, t->hybrid, t->add, t->split, t->split / t->hybrid, t->best, t->best / t->hybrid, t->grad,
           kind->grad);
}

static void put_times(struct json_out *o, const struct product *kind, const struct times *t)
{
    json_out_open(o, NULL, '{');
    json_out_str(o, "product", kind->name);
    json_out_f64(o, "thin_ms", t->thin);
    json_out_f64(o, "base_ms", t->base);
    json_out_f64(o, "hybrid_ms", t->hybrid);
    json_out_f64(o, "add_ms", t->add);
    json_out_f64(o, "split_ms", t->split);
    json_out_f64(o, "split_at_copy_ms", t->best);
    json_out_f64(o, kind->backward ? "db_ms" : "da_ms", t->grad);
    json_out_close(o, '}');
}

static void put_head(struct json_out *o, const struct result *r)
{
    json_out_open(o, NULL, '{');
    json_out_str(o, "arch", r->s->name);
    json_out_str(o, "quant", r->q->name);
    json_out_str(o, "routing", routing_names[r->routing]);
    json_out_i64(o, "tokens", r->n_tok);
    json_out_i64(o, "active_experts", r->n_active);
    json_out_i64(o, "rank", r->r);
    json_out_open(o, "products", '[');
}

/* ---- the bench ---- */

static void run_case(struct bench_experts *b, struct layer *l, struct result *r, bool head)
{
    r->n_active = push_case(l, r->n_tok, r->r, r->routing);
    if (b->json) put_head(&b->rows, r);
    if (!b->json && head) print_head(r);
    for (int i = 0; i < MT_LEN(products); i++) {
        const struct times t = time_product(b, l, &products[i]);
        if (b->json)
            put_times(&b->rows, &products[i], &t);
        else
            print_times(&products[i], &t, r->r);
    }
    if (!b->json) return;
    json_out_close(&b->rows, ']');
    json_out_close(&b->rows, '}');
}

static void push_layer(struct layer *l, struct device *dev, const struct expert_shape *s, const struct expert_quant *q)
{
    *l = (struct layer){.dev = dev, .s = s};
    l->up = bench_proj(dev, s, q, false);
    l->down = bench_proj(dev, s, q, true);
}

static int run_layer(struct bench_experts *b, const struct expert_shape *s, const struct expert_quant *q,
                     struct err *err)
{
    struct device plan;
    struct layer l;
    struct result r = {.s = s, .q = q};
    device_dry_run(&plan, &b->dev);
    push_layer(&l, &plan, s, q);
    for (int64_t t = 0; t < b->n_tokens; t++)
        for (int64_t i = 0; i < b->n_rank; i++) {
            push_case(&l, b->tokens[t], b->ranks[i], ROUTING_UNIFORM);
            for (int k = 0; k < MT_LEN(products); k++) run_product(&l, &products[k], 1);
        }
    if (bench_reserve(&b->dev, &plan, err)) return err_prefix(err, "%s", s->name);
    push_layer(&l, &b->dev, s, q);
    for (int64_t t = 0; t < b->n_tokens; t++)
        for (int64_t i = 0; i < b->n_routing; i++)
            for (int64_t k = 0; k < b->n_rank; k++) {
                r.n_tok = b->tokens[t];
                r.routing = b->routings[i];
                r.r = b->ranks[k];
                run_case(b, &l, &r, k == 0);
            }
    return 0;
}

int bench_split(const struct bench_experts_options *o, struct err *err)
{
    static struct bench_experts b;
    int rc = bench_experts_open(&b, "lora", o, err);
    if (!rc && !b.dev.ops->own_memory)
        rc = err_set(err, "--split times products of a GPU; this device is %s", b.dev.name);
    if (!rc && !b.json) print_legend(&b);
    for (int64_t i = 0; !rc && i < b.n_shape; i++)
        for (int64_t q = 0; !rc && q < MT_MAX(b.n_quant, 1); q++)
            rc = run_layer(&b, &b.shapes[i], b.n_quant ? &b.quants[q] : &dense, err);
    bench_experts_close(&b, !rc);
    return rc;
}
