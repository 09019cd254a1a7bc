/* router.c - router: logits, top-k choice, gates, and the gradient. */
#include "kernels/cpu/gemm.h"

#include <omp.h>
#include <string.h>

#define I32(t) ((int32_t *)(t).data)

/* The k largest of n logits into idx, ascending ids; of equal logits the lower id wins. For any logits, NaN included,
 * the ids are distinct and in range. */
static void top_k(int32_t *idx, const real *logits, int64_t n, int64_t k)
{
    for (int64_t e = 0; e < n; e++) { /* idx[0 .. e) by descending logit */
        int64_t at = MT_MIN(e, k);
        while (at > 0 && logits[e] > logits[idx[at - 1]]) at--;
        if (at == k) continue;
        for (int64_t j = MT_MIN(e, k - 1); j > at; j--) idx[j] = idx[j - 1];
        idx[at] = (int32_t)e;
    }
    for (int64_t j = 1; j < k; j++) {
        int32_t id = idx[j];
        int64_t at = j;
        for (; at > 0 && idx[at - 1] > id; at--) idx[at] = idx[at - 1];
        idx[at] = id;
    }
}

/* p = softmax(x) over n values; when ids is given, over x[ids[i]]. p may be x if ids is NULL. */
static void softmax(real *p, const real *x, const int32_t *ids, int64_t n)
{
    real max = ids ? x[ids[0]] : x[0], sum = 0;
    for (int64_t i = 0; i < n; i++) {
        real v = ids ? x[ids[i]] : x[i];
        p[i] = v;
        if (v > max) max = v;
    }
    for (int64_t i = 0; i < n; i++) {
        p[i] = real_exp(p[i] - max);
        sum += p[i];
    }
    for (int64_t i = 0; i < n; i++) p[i] /= sum;
}

/* p[j] = softmax(x)[ids[j]], the softmax over all n values */
static void softmax_at(real *p, const real *x, const int32_t *ids, int64_t k, int64_t n)
{
    real max = x[0], sum = 0;
    for (int64_t i = 1; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int64_t i = 0; i < n; i++) sum += real_exp(x[i] - max);
    for (int64_t j = 0; j < k; j++) p[j] = real_exp(x[ids[j]] - max) / sum;
}

static real sigmoid(real x) { return 1 / (1 + real_exp(-x)); }

/* The score of an expert: sigmoid(l), or sqrt(softplus(l)). Below -40, log(1 + e^l) is e^l in f64 too; its root e^(l/2)
 * is representable where e^l is not. */
static real score(real l, enum router_kind kind)
{
    if (kind != ROUTER_SQRT_CHOSEN) return sigmoid(l);
    if (l < -40) return real_exp(l / 2);
    return real_sqrt((l > 0 ? l : 0) + real_log1p(real_exp(l > 0 ? -l : l)));
}

static real sqrt_slope(real l, real s) { return l < -40 ? s / 2 : sigmoid(l) / (2 * s); }

static real best_two(const real *v, int64_t n)
{
    real first = v[0], second = v[1];
    if (second > first) first = v[1], second = v[0];
    for (int64_t i = 2; i < n; i++) {
        if (v[i] > first)
            second = first, first = v[i];
        else if (v[i] > second)
            second = v[i];
    }
    return first + second;
}

/* Limits the choice to experts of the top_group best groups: sets the values of all others to -inf. of_group [n_group]
 * is scratch. */
static void limit_groups(real *value, real *of_group, int64_t n_exp, const struct router *router)
{
    const int64_t n_group = router->n_group, size = n_exp / n_group;
    for (int64_t g = 0; g < n_group; g++) of_group[g] = best_two(value + g * size, size);
    for (int64_t g = 0; g < n_group; g++) {
        int64_t better = 0;
        for (int64_t h = 0; h < n_group; h++)
            better += of_group[h] > of_group[g] || (h < g && of_group[h] >= of_group[g]);
        for (int64_t e = g * size; better >= router->top_group && e < (g + 1) * size; e++) value[e] = -(real)INFINITY;
    }
}

/* One token of a sigmoid router: chooses the experts unless router->given, and computes the gates. value [2 E] is
 * scratch. */
static void choose_sigmoid(int32_t *idx, real *gate, const real *l, const float *bias, real *value, int64_t n_exp,
                           int64_t k, const struct router *router)
{
    real sum = 0;
    for (int64_t e = 0; e < n_exp && !router->given; e++)
        value[e] = score(l[e], router->kind) + (bias ? (real)bias[e] : 0);
    if (router->n_group > 1 && !router->given) limit_groups(value, value + n_exp, n_exp, router);
    if (!router->given) top_k(idx, value, n_exp, k);
    for (int64_t j = 0; j < k; j++) sum += gate[j] = score(l[idx[j]], router->kind);
    const real scale = router_divides(router) ? router->scale / (sum + (real)router_floor(router)) : router->scale;
    for (int64_t j = 0; j < k; j++) gate[j] *= scale;
}

void CPU(router_fwd)(struct device *dev, struct route *r, struct tensor logits, struct tensor x, const struct weight *w,
                     struct tensor bias, const struct router *router)
{
    const int64_t n_exp = logits.shape[1], k = r->idx.shape[1], mark = arena_mark(&dev->work);
    const bool is_sigmoid = router_is_sigmoid(router);
    const float *of_expert = bias.ndim ? bias.data : NULL;
    gemm_fwd(dev, logits.data, logits.ld, x.data, x.ld, x.shape[0], w);
    struct tensor values = arena_tensor_2d(&dev->work, DT_REAL, is_sigmoid ? dev->n_threads : 0, 2 * n_exp);
    if (!dev->dry_run) {
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
        for (int64_t t = 0; t < x.shape[0]; t++) {
            real *l = real_row(logits, t), *gate = real_row(r->gate, t);
            int32_t *idx = I32(r->idx) + t * k;
            if (is_sigmoid) {
                real *value = real_row(values, omp_get_thread_num());
                choose_sigmoid(idx, gate, l, of_expert, value, n_exp, k, router);
                continue;
            }
            for (int64_t e = 0; of_expert && e < n_exp; e++) l[e] += of_expert[e];
            if (!router->given) top_k(idx, l, n_exp, k);
            if (router->kind == ROUTER_CHOSEN) softmax(gate, l, idx, k);
            if (router->kind == ROUTER_PROBABILITY) softmax_at(gate, l, idx, k, n_exp);
        }
    }
    arena_release(&dev->work, mark);
}

void CPU(hash_route)(struct device *dev, struct tensor idx, struct tensor table, struct tensor tok)
{
    const int64_t k = idx.shape[1];
    if (dev->dry_run) return;
    for (int64_t t = 0; t < idx.shape[0]; t++) {
        const int32_t *from = I32(table) + I32(tok)[t] * k;
        int32_t *to = I32(idx) + t * k;
        for (int64_t j = 0; j < k; j++) {
            int64_t at = 0;
            for (int64_t i = 0; i < k; i++) at += from[i] < from[j];
            to[at] = from[j];
        }
    }
}

void CPU(scale_gates)(struct device *dev, struct tensor y, struct tensor x, struct tensor idx, struct tensor scale)
{
    const float *s = scale.data;
    if (dev->dry_run) return;
    for (int64_t t = 0; t < x.shape[0]; t++)
        for (int64_t j = 0; j < x.shape[1]; j++)
            real_row(y, t)[j] = real_row(x, t)[j] * (real)s[I32(idx)[t * idx.ld + j]];
}

void CPU(route_sort)(struct device *dev, struct route *r, int64_t n_exp)
{
    if (dev->dry_run) return;
    int64_t n_slot = r->idx.shape[0] * r->idx.shape[1];
    int32_t *offs = I32(r->offs), *next = offs + 1; /* next[e]: number of rows of e, then position of the next one */
    memset(offs, 0, (size_t)(n_exp + 1) * sizeof(*offs));
    for (int64_t s = 0; s < n_slot; s++) next[I32(r->idx)[s]]++;
    for (int64_t e = 0, sum = 0; e < n_exp; e++) {
        int32_t count = next[e];
        next[e] = (int32_t)sum;
        sum += count;
    }
    for (int64_t s = 0; s < n_slot; s++) {
        int32_t row = next[I32(r->idx)[s]]++;
        I32(r->row_slot)[row] = (int32_t)s;
        I32(r->slot_row)[s] = row;
    }
}

void CPU(aux_stats)(struct device *dev, struct aux *aux, struct tensor logits, const struct route *r)
{
    int64_t mark = arena_mark(&dev->work), n_tok = logits.shape[0], n_exp = logits.shape[1];
    struct tensor prob = arena_tensor_2d(&dev->work, DT_REAL, n_tok, n_exp);
    if (!dev->dry_run) {
        real *sum = aux->prob.data, *count = aux->count.data;
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
        for (int64_t t = 0; t < n_tok; t++) softmax(real_row(prob, t), real_row(logits, t), NULL, n_exp);
        for (int64_t t = 0; t < n_tok; t++) {
            for (int64_t e = 0; e < n_exp; e++) sum[e] += real_row(prob, t)[e];
        }
        for (int64_t s = 0; s < tensor_count(r->idx); s++) count[I32(r->idx)[s]] += 1;
    }
    arena_release(&dev->work, mark);
}

/* dl [E] of one token: dl_i = gate_i (dgate_i - mean) for chosen i, mean = sum_j gate_j dgate_j. For other experts dl_i
 * = -p_i mean if the gates are probabilities p over all experts, else (p NULL) 0. */
static void gate_bwd(real *dl, const real *gate, const real *dgate, const int32_t *idx, int64_t k, const real *p,
                     int64_t n_exp)
{
    real mean = 0;
    for (int64_t j = 0; j < k; j++) mean += gate[j] * dgate[j];
    for (int64_t e = 0; e < n_exp; e++) dl[e] = p ? -p[e] * mean : 0;
    for (int64_t j = 0; j < k; j++) dl[idx[j]] = gate[j] * (dgate[j] - mean);
}

/* dl [E] of one token of a sigmoid router, from the token's logits. */
static void sigmoid_bwd(real *dl, const real *l, const real *dgate, const int32_t *idx, int64_t k, int64_t n_exp,
                        const struct router *router)
{
    const bool divided = router_divides(router);
    real sum = (real)router_floor(router), mean = 0;
    for (int64_t j = 0; j < k; j++) sum += score(l[idx[j]], router->kind);
    for (int64_t j = 0; j < k; j++) mean += score(l[idx[j]], router->kind) / sum * dgate[j];
    for (int64_t e = 0; e < n_exp; e++) dl[e] = 0;
    for (int64_t j = 0; j < k; j++) {
        const real at = l[idx[j]], s = score(at, router->kind);
        const real g = router->scale * (divided ? (dgate[j] - mean) / sum : dgate[j]);
        dl[idx[j]] = router->kind == ROUTER_SQRT_CHOSEN ? g * sqrt_slope(at, s) : g * s * (1 - s);
    }
}

/* dl += coef E / rows p_i (F_i - sum_j F_j p_j), F = count / rows held constant. F is also divided by J, except in the
 * pooled loss. */
static void aux_bwd(real *dl, const real *p, const struct aux *aux, int64_t k, int64_t n_exp)
{
    const real *count = aux->count.data;
    real rows = (real)aux->rows, mean = 0;
    real scale = aux->coef * (real)n_exp / rows / (aux->pooled ? 1 : (real)k);
    for (int64_t e = 0; e < n_exp; e++) mean += count[e] / rows * p[e];
    for (int64_t e = 0; e < n_exp; e++) dl[e] += scale * p[e] * (count[e] / rows - mean);
}

void CPU(router_bwd)(struct device *dev, struct tensor dx, struct tensor dgate, const struct route *r,
                     struct tensor logits, const struct weight *w, const struct aux *aux, const struct router *router)
{
    int64_t mark = arena_mark(&dev->work), n_tok = logits.shape[0], n_exp = logits.shape[1], k = dgate.shape[1];
    bool dense = router->kind == ROUTER_PROBABILITY || aux->coef != 0; /* the probabilities of all experts are needed */
    struct tensor dl = arena_tensor_2d(&dev->work, DT_REAL, n_tok, n_exp);
    struct tensor prob = arena_tensor_2d(&dev->work, DT_REAL, dense ? n_tok : 0, n_exp);
    if (!dev->dry_run) {
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
        for (int64_t t = 0; t < n_tok; t++) {
            real *d = real_row(dl, t), *p = dense ? real_row(prob, t) : NULL;
            const int32_t *idx = I32(r->idx) + t * k;
            if (dense) softmax(p, real_row(logits, t), NULL, n_exp);
            if (router_is_sigmoid(router))
                sigmoid_bwd(d, real_row(logits, t), real_row(dgate, t), idx, k, n_exp, router);
            else
                gate_bwd(d, real_row(r->gate, t), real_row(dgate, t), idx, k,
                         router->kind == ROUTER_PROBABILITY ? p : NULL, n_exp);
            if (aux->coef != 0) aux_bwd(d, p, aux, k, n_exp);
        }
    }
    gemm_bwd(dev, dx.data, dx.ld, dl.data, dl.ld, n_tok, w, true);
    arena_release(&dev->work, mark);
}
