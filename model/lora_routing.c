/* lora_routing.c - see lora_routing.h. */
#include "model/lora_routing.h"

#include <string.h>

void lora_routing_ranks(int64_t *rank, const int64_t *rows, int64_t n_exp, int64_t r, int64_t n_rank)
{
    memset(rank, 0, (size_t)n_exp * sizeof(*rank));
    while (n_rank > 0) {
        int64_t most = -1;
        for (int64_t e = 0; e < n_exp; e++)
            if (!rank[e] && (most < 0 || rows[e] > rows[most])) most = e;
        MT_REQUIRE(most >= 0, "%lld more ranks than %lld experts of rank %lld have", (long long)n_rank,
                   (long long)n_exp, (long long)r);
        rank[most] = MT_MIN(r, n_rank);
        n_rank -= rank[most];
    }
}

double lora_routing_apply(struct adapters *ad, struct device *dev, const struct arch *a, const int64_t *rows)
{
    const struct adapters *whole = adapters_logical(ad);
    float *values = mem_array(whole->n_flat, sizeof(*values));
    int64_t *rank = mem_array(a->n_exp, sizeof(*rank));
    double adapted = 0, all = 0;
    adapters_get(ad, dev, ad->opt.param, DT_F32, values);
    for (const struct lora_param *p = whole->params; p < whole->params + whole->n_params; p++) {
        const int64_t *of_layer = rows + p->layer * a->n_exp, r = p->rows;
        struct product q;
        int64_t n_out;
        if (!p->experts || p->is_b || !lora_find_product(a, p->layer, p->target, &q, &n_out)) continue;
        lora_routing_ranks(rank, of_layer, p->n_exp, r, adapters_trained_ranks(ad, &q, p->target));
        for (int64_t e = 0; e < p->n_exp; e++) {
            memset(values + p->off + (e * r + rank[e]) * p->cols, 0,
                   (size_t)((r - rank[e]) * p->cols) * sizeof(*values));
            all += (double)of_layer[e];
            if (rank[e]) adapted += (double)of_layer[e];
        }
    }
    adapters_put(ad, dev, ad->opt.param, DT_F32, values);
    adapters_refresh(ad, dev);
    mem_free(rank);
    mem_free(values);
    return all > 0 ? adapted / all : 0;
}
