/* adapter_norms.c - see adapter_norms.h. */
#include "train/adapter/adapter_norms.h"

#include <math.h>
#include <string.h>

#include "kernels/lowrank.h"

bool adapter_norms(const struct adapters *ad, const float *values, int64_t n_exp, double *norms)
{
    bool any = false;
    double *one = mem_array(n_exp, sizeof(*one));
    memset(norms, 0, (size_t)(ad->n_layer * n_exp) * sizeof(*norms));
    for (int64_t i = 0; i + 1 < ad->n_params; i++) {
        const struct lora_param *a = &ad->params[i], *b = a + 1;
        if (!a->experts || a->is_b) continue;
        MT_REQUIRE(b->is_b && b->target == a->target && b->layer == a->layer, "A without its B");
        const double scale = (double)ad->scale[a->target];
        memset(one, 0, (size_t)n_exp * sizeof(*one));
        lowrank_norms(one, values + a->off, values + b->off, a->n_exp, a->rows, a->cols, b->rows);
        for (int64_t e = 0; e < a->n_exp; e++) norms[a->layer * n_exp + e] += scale * scale * one[e];
        any = true;
    }
    for (int64_t i = 0; i < ad->n_layer * n_exp; i++) norms[i] = sqrt(fmax(norms[i], 0));
    mem_free(one);
    return any;
}

static bool is_zero(const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (x[i] > 0 || x[i] < 0) return false;
    return true;
}

void adapter_ranks(const struct adapters *ad, const float *values, int64_t n_exp, double *ranks)
{
    memset(ranks, 0, (size_t)(ad->n_layer * n_exp) * sizeof(*ranks));
    for (const struct lora_param *p = ad->params; p < ad->params + ad->n_params; p++)
        for (int64_t e = 0; e < p->n_exp && p->experts && !p->is_b; e++) {
            int64_t n = 0;
            for (int64_t k = 0; k < p->rows; k++) n += !is_zero(values + p->off + (e * p->rows + k) * p->cols, p->cols);
            ranks[p->layer * n_exp + e] = fmax(ranks[p->layer * n_exp + e], (double)n);
        }
}
