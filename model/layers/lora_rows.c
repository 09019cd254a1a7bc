/* lora_rows.c - see lora_rows.h. */
#include "model/layers/lora_rows.h"

#include <string.h>

bool lora_rows_takes(const struct adapters *ad, int64_t n_layer)
{
    for (int64_t l = 0; l < n_layer; l++)
        for (int i = 0; i < LAYER_PRODUCTS; i++)
            if (ad->layers[l].of[i].lora.r && ad->layers[l].of[i].lora.merged) return false;
    return !ad->dora;
}

static int64_t width(const struct lora *l) { return l->n_seg * l->r; }

static void fill(struct adapter *wide, struct lora_set *set, const struct adapters *const *of, int n, int64_t layer,
                 int product)
{
    *wide = (struct adapter){.lora = {.r = 0}};
    set->n = n;
    for (int g = 0; g < n; g++) {
        const struct lora *one = &of[g]->layers[layer].of[product].lora;
        set->of[g] = *one;
        set->of[g].dropout = 0;
        if (one->r) wide->rows.set = set;
        if (width(one) > width(&wide->lora)) wide->lora = *one;
    }
}

bool lora_rows_fill(struct lora_beside *s, const struct arch *a, const struct adapters *const *of, int n)
{
    MT_REQUIRE(n >= 1 && n <= LORA_SET, "%d adapters beside each other", n);
    if (s->n == n && !memcmp(s->of, of, (size_t)n * sizeof(*of))) return false;
    memcpy(s->of, of, (size_t)n * sizeof(*of));
    s->n = n;
    if (!s->sets) s->sets = mem_array(a->n_layer * LAYER_PRODUCTS, sizeof(*s->sets));
    if (!s->wide.layers) s->wide.layers = mem_array(a->n_layer, sizeof(*s->wide.layers));
    for (int64_t l = 0; l < a->n_layer; l++)
        for (int i = 0; i < LAYER_PRODUCTS; i++)
            fill(&s->wide.layers[l].of[i], &s->sets[l * LAYER_PRODUCTS + i], of, n, l, i);
    return true;
}

void lora_rows_forget(struct lora_beside *s) { s->n = 0; }

void lora_rows_free(struct lora_beside *s)
{
    mem_free(s->sets);
    mem_free(s->wide.layers);
    *s = (struct lora_beside){.sets = NULL};
}

struct proj lora_rows_one(const struct proj *p, int g)
{
    struct proj one = *p;
    if (!p->rows.set) return one;
    one.lora = g < p->rows.set->n ? p->rows.set->of[g] : (struct lora){.r = 0};
    one.rows = (struct lora_rows){.set = NULL};
    return one;
}

const struct proj *lora_rows_base(struct proj *base, const struct proj *p)
{
    if (!p->rows.set) return p;
    *base = lora_rows_one(p, p->rows.set->n);
    return base;
}
