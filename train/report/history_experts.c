/* history_experts.c - the events `experts` of metrics.jsonl: how rows, gates and adapters spread over the experts. */
#include "train/report/history_experts.h"

#include <math.h>

#define MAX_CELLS (1 << 20) /* layers x experts */

void history_experts_free(struct history_experts *x)
{
    struct series *all[] = {&x->step, &x->entropy, &x->idle, &x->hottest};
    for (int i = 0; i < MT_LEN(all); i++) mem_free(all[i]->v);
    mem_free(x->rows);
    mem_free(x->gates);
    mem_free(x->norms);
    *x = (struct history_experts){0};
}

/* Adds the values of an array of arrays to out [n_layer, n_exp]. */
static int add_cells(double *out, struct json layers, int64_t n_layer, int64_t n_exp, struct err *err)
{
    for (int64_t l = 0; l < n_layer; l++) {
        struct json row = json_at(layers, l);
        if (json_count(layers) != n_layer || json_count(row) != n_exp)
            return json_error(layers, err, "rows of unequal length");
        for (int64_t e = 0; e < n_exp; e++) {
            double v;
            const struct json cell = json_at(row, e);
            if (json_f64(cell, &v, err)) return -1;
            if (!(v >= 0 && isfinite(v))) return json_error(cell, err, "must be at least 0, but is %g", v);
            out[l * n_exp + e] += v;
        }
    }
    return 0;
}

/* Appends what the rows of one event say of all layers. */
static void summarise(struct history_experts *x, const double *rows, double step)
{
    double entropy = 0, hottest = 0, idle = 0, layers = 0;
    for (int64_t l = 0; l < x->n_layer; l++) {
        const double *row = rows + l * x->n_exp;
        double sum = 0, most = 0, h = 0;
        for (int64_t e = 0; e < x->n_exp; e++) sum += row[e], most = fmax(most, row[e]);
        if (!(sum > 0)) continue;
        for (int64_t e = 0; e < x->n_exp; e++) {
            if (row[e] > 0) h -= row[e] / sum * log(row[e] / sum);
            idle += !(row[e] > 0);
        }
        entropy += x->n_exp > 1 ? h / log((double)x->n_exp) : 1;
        hottest += most / sum * (double)x->n_exp;
        layers++;
    }
    if (!(layers > 0)) return;
    series_push(&x->step, step);
    series_push(&x->entropy, entropy / layers);
    series_push(&x->hottest, hottest / layers);
    series_push(&x->idle, idle / layers / (double)x->n_exp);
}

/* An optional array of the event, zero where it is absent; *found. */
static int optional_cells(double *out, bool *found, struct json event, const char *key, int64_t n_layer, int64_t n_exp,
                          struct err *err)
{
    struct json layers;
    *found = json_has(event, key);
    if (!*found) return 0;
    return json_get_array(event, key, &layers, err) || add_cells(out, layers, n_layer, n_exp, err) ? -1 : 0;
}

int history_experts_add(struct history_experts *x, struct json event, double step, struct err *err)
{
    struct json counts;
    bool has_gates, has_norms;
    if (json_get_array(event, "counts", &counts, err)) return -1;
    const int64_t n_layer = json_count(counts), n_exp = json_count(json_at(counts, 0));
    int64_t cells;
    if (!i64_mul(n_layer, n_exp, &cells) || cells < 1 || cells > MAX_CELLS ||
        (x->rows && (n_layer != x->n_layer || n_exp != x->n_exp)))
        return json_error(counts, err, "%lld layer%s of %lld experts", (long long)n_layer, str_plural(n_layer),
                          (long long)n_exp);
    double *add = mem_array(3 * cells, (int64_t)sizeof(double)), *gates = add + cells, *norms = gates + cells;
    const int rc = add_cells(add, counts, n_layer, n_exp, err) ||
                   optional_cells(gates, &has_gates, event, "gates", n_layer, n_exp, err) ||
                   optional_cells(norms, &has_norms, event, "norms", n_layer, n_exp, err);
    if (!rc && !x->rows) {
        x->rows = mem_array(cells, (int64_t)sizeof(double));
        x->gates = mem_array(cells, (int64_t)sizeof(double));
        x->n_layer = n_layer;
        x->n_exp = n_exp;
    }
    if (!rc && has_norms && !x->norms) x->norms = mem_array(cells, (int64_t)sizeof(double));
    for (int64_t i = 0; !rc && i < cells; i++) {
        x->rows[i] += add[i];
        x->gates[i] += gates[i];
        if (has_norms) x->norms[i] = norms[i];
    }
    if (!rc) summarise(x, add, step);
    mem_free(add);
    return rc ? -1 : 0;
}
