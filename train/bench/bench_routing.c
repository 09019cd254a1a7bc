/* bench_routing.c - see bench_routing.h. A table per layer replaces the choice of the router.
 *
 * Loads depend on the place of an expert in a random order of the layer's experts: all equal (balanced), 1 / place
 * (zipf), equal for the first top_k and 0 for others (one), or those of a run. Rows are numbered expert after expert;
 * the token of number p has the experts of rows p, p + T, p + 2 T, ... These experts differ, because no expert has more
 * than T rows. */
#include "train/bench/bench_routing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "train/report/history.h"

void routing_counts(int64_t *count, const double *load, int64_t n_exp, int64_t n_tok, int64_t top_k)
{
    double *rest = mem_array(n_exp + 1, sizeof(*rest)); /* sum of the loads from e on; exactly 0 after the last */
    int64_t n_row = n_tok * top_k;
    for (int64_t e = n_exp - 1; e >= 0; e--) rest[e] = rest[e + 1] + load[e];
    for (int64_t e = 0; e < n_exp; e++) {
        const double share = rest[e] > 0 ? load[e] / rest[e] : 1;
        count[e] = MT_MIN(n_tok, (int64_t)floor((double)n_row * share + 0.5));
        n_row -= count[e];
    }
    MT_REQUIRE(n_row == 0, "%lld rows without an expert", (long long)n_row);
    mem_free(rest);
}

/* A random order of 0 .. n-1. */
static int64_t *shuffled(int64_t n, uint64_t key)
{
    int64_t *order = mem_array(n, sizeof(*order));
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = (int64_t)(rng_u64(key, (uint64_t)i) % (uint64_t)(i + 1));
        order[i] = order[at];
        order[at] = i;
    }
    return order;
}

void routing_table(int32_t *idx, const int64_t *count, int64_t n_tok, int64_t top_k, uint64_t key)
{
    int64_t *token = shuffled(n_tok, key), left = 0;
    int32_t e = -1;
    for (int64_t row = 0; row < n_tok * top_k; row++, left--) {
        while (left == 0) left = count[++e];
        idx[token[row % n_tok] * top_k + row / n_tok] = e;
    }
    mem_free(token);
}

void routing_resample(double *to, int64_t n, const double *from, int64_t m)
{
    for (int64_t i = 0; i < n; i++) { /* the loads of the experts i m / n to (i + 1) m / n in `from` */
        to[i] = 0;
        for (int64_t k = 0; k < m; k++) {
            const int64_t first = MT_MAX(i * m, k * n), end = MT_MIN((i + 1) * m, (k + 1) * n);
            if (end > first) to[i] += from[k] * (double)(end - first) / (double)n;
        }
    }
}

/* ---- loads by rank ---- */

/* The loads of a run: of its n layers with routed experts, [n, n_exp], each layer descending. */
struct recorded {
    double *load;
    int64_t n, n_exp;
};

static int descending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

static int read_run(struct recorded *run, const char *dir, struct err *err)
{
    struct history h;
    int rc = history_read(&h, dir, err);
    struct history_experts *x = &h.experts;
    if (rc)
        err_prefix(err, "--routing %.200s: neither %s, nor the output.dir of a run", dir, ROUTING_NAMES);
    else if (!x->rows)
        rc = err_set(
            err, "--routing %.200s: its metrics.jsonl has no event `experts`, which a run writes when it saves", dir);
    *run = (struct recorded){.load = x->rows, .n_exp = x->n_exp};
    for (int64_t l = 0; l < x->n_layer && !rc; l++) {
        double sum = 0, *to = run->load + run->n * x->n_exp;
        for (int64_t e = 0; e < x->n_exp; e++) sum += to[e] = x->rows[l * x->n_exp + e];
        qsort(to, (size_t)x->n_exp, sizeof(*to), descending);
        run->n += sum > 0; /* a dense layer has no rows; the next layer takes its place */
    }
    if (!rc && run->n == 0) rc = err_set(err, "--routing %.200s: no expert of this run had rows", dir);
    x->rows = NULL;
    history_free(&h);
    return rc;
}

/* load [E] of routed layer i of n. */
static void fill_loads(double *load, const char *name, const struct recorded *run, int64_t i, int64_t n,
                       const struct arch *a)
{
    if (run->n) {
        routing_resample(load, a->n_exp, run->load + i * run->n / n * run->n_exp, run->n_exp);
        return;
    }
    for (int64_t e = 0; e < a->n_exp; e++)
        load[e] = !strcmp(name, "zipf") ? 1 / (double)(e + 1) : !strcmp(name, "one") ? e < a->top_k : 1;
}

/* ---- the device ---- */

static void routed_fwd(struct device *dev, struct route *r, struct tensor logits, struct tensor x,
                       const struct weight *w, struct tensor bias, const struct router *router)
{
    const struct routing *own = (const struct routing *)(const void *)dev->ops;
    own->router_fwd(dev, r, logits, x, w, bias, router);
    for (int64_t l = 0; l < own->n_layer && !dev->dry_run; l++) {
        if (w != &own->model->weights.layers[l].router || !own->idx[l]) continue;
        MT_REQUIRE(r->idx.shape[0] == own->n_tok, "%lld tokens, routed are %lld", (long long)r->idx.shape[0],
                   (long long)own->n_tok);
        dev->ops->copy(r->idx.data, own->idx[l], 4 * tensor_count(r->idx));
    }
}

/* The table of layer l, on the device. */
static int upload(struct routing *r, int64_t l, const double *load, const struct arch *a, struct err *err)
{
    const int64_t n_exp = a->n_exp, n_row = r->n_tok * a->top_k;
    const uint64_t key = rng_key((uint64_t)l, "bench routing");
    int64_t *by_rank = mem_array(n_exp, sizeof(*by_rank)), *count = mem_array(n_exp, sizeof(*count));
    int64_t *expert = shuffled(n_exp, rng_key(key, "experts"));
    int32_t *idx = mem_array(n_row, sizeof(*idx));
    routing_counts(by_rank, load, n_exp, r->n_tok, a->top_k);
    for (int64_t e = 0; e < n_exp; e++) count[expert[e]] = by_rank[e];
    routing_table(idx, count, r->n_tok, a->top_k, rng_key(key, "tokens"));
    r->idx[l] = r->ops.alloc(4 * n_row);
    if (r->idx[l]) r->ops.upload(r->idx[l], idx, 4 * n_row);
    mem_free(by_rank);
    mem_free(count);
    mem_free(expert);
    mem_free(idx);
    return r->idx[l] ? 0 : err_set(err, "--routing: no memory for a table of %lld rows", (long long)n_row);
}

static int upload_all(struct routing *r, const char *name, const struct recorded *run, const struct arch *a,
                      struct err *err)
{
    double *load = mem_array(a->n_exp, sizeof(*load));
    int64_t n = 0, i = 0;
    int rc = 0;
    for (int64_t l = 0; l < a->n_layer; l++) n += arch_is_routed(a, l);
    for (int64_t l = 0; l < a->n_layer && !rc; l++) {
        if (!arch_is_routed(a, l)) continue;
        fill_loads(load, name, run, i++, n, a);
        rc = upload(r, l, load, a, err);
    }
    mem_free(load);
    return rc;
}

int routing_open(struct routing *r, const char *name, struct device *dev, const struct arch *a,
                 const struct model *model, int64_t n_tok, struct err *err)
{
    static const char *const kinds[] = {"balanced", "zipf", "one"};
    struct recorded run = {.load = NULL};
    bool known = false;
    *r = (struct routing){.model = model, .n_tok = n_tok};
    if (!strcmp(name, "router")) return 0;
    for (int i = 0; i < MT_LEN(kinds); i++) known = known || !strcmp(name, kinds[i]);
    if (!known && read_run(&run, name, err)) {
        mem_free(run.load);
        return -1;
    }
    r->ops = *dev->ops;
    r->router_fwd = r->ops.router_fwd;
    r->ops.router_fwd = routed_fwd;
    r->n_layer = a->n_layer;
    r->idx = mem_array(a->n_layer, sizeof(*r->idx));
    const int rc = upload_all(r, name, &run, a, err);
    mem_free(run.load);
    if (!rc) dev->ops = &r->ops;
    return rc;
}

void routing_close(struct routing *r)
{
    for (int64_t l = 0; l < r->n_layer; l++)
        if (r->idx[l]) r->ops.free(r->idx[l]);
    mem_free(r->idx);
    r->idx = NULL;
    r->n_layer = 0;
}

/* ---- rows ---- */

static int64_t experts_with_rows(const int64_t *rows, int64_t n_exp)
{
    int64_t n = 0;
    for (int64_t e = 0; e < n_exp; e++) n += rows[e] > 0;
    return n;
}

struct routing_rows routing_measure(const struct arch *a, const int64_t *rows)
{
    struct routing_rows m = {.least = INFINITY, .n_active = a->n_exp, .n_exp = a->n_exp};
    int64_t n = 0;
    for (int64_t l = 0; l < a->n_layer; l++) {
        const int64_t *of = rows + l * a->n_exp, n_exp = a->n_exp;
        int64_t sum = 0, most = 0;
        for (int64_t e = 0; e < n_exp; e++) {
            sum += of[e];
            most = MT_MAX(most, of[e]);
        }
        if (!arch_is_routed(a, l) || !sum) continue;
        const double ratio = (double)(most * n_exp) / (double)sum;
        m.fullest += ratio;
        m.least = fmin(m.least, ratio);
        m.most = fmax(m.most, ratio);
        m.n_active = MT_MIN(m.n_active, experts_with_rows(of, n_exp));
        n++;
    }
    m.fullest /= (double)MT_MAX(n, 1);
    return m;
}

void routing_count_active(struct model *m, const int64_t *rows)
{
    const int64_t n_exp = m->arch.n_exp;
    for (int64_t l = 0; l < m->arch.n_layer; l++) {
        struct layer_weights *w = &m->weights.layers[l];
        if (arch_is_routed(&m->arch, l)) w->up.n_active = w->down.n_active = experts_with_rows(rows + l * n_exp, n_exp);
    }
}
