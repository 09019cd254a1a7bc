/* layer_costs.c - see layer_costs.h. */
#include "model/layer_costs.h"

#include <string.h>

/* Views have no data in a dry run, so equal bytes mean equal shapes, formats and adapters. */
static bool equal(const struct arch *a, const struct layer_weights *w, const struct layer_pass *pass, int64_t x,
                  int64_t y)
{
    return arch_same_layer(a, x, y) && (x < pass->lowest_layer) == (y < pass->lowest_layer) &&
           !memcmp(&w[x], &w[y], sizeof(*w));
}

static int64_t pass_of(struct layer_costs *c, const struct arch *a, const struct layer_weights *w,
                       const struct layer_pass *pass)
{
    int64_t i = 0;
    while (i < c->n_pass && memcmp(&c->passes[i].pass, pass, sizeof(*pass)) != 0) i++;
    if (i < c->n_pass || i == LAYER_PASSES) return i;
    c->passes[c->n_pass++].pass = *pass;
    for (int64_t l = 0; l < a->n_layer; l++) {
        int16_t like = 0;
        while (like < l && !equal(a, w, pass, l, like)) like++;
        c->passes[i].like[l] = like;
    }
    return i;
}

int64_t layer_costs_find(struct layer_costs *c, const struct arch *a, const struct layer_weights *w,
                         const struct layer_pass *pass, int64_t l, int groups, int64_t *layer)
{
    const int64_t p = pass_of(c, a, w, pass);
    int64_t i = 0;
    *layer = l;
    if (p == LAYER_PASSES) return -1;
    const int64_t like = c->passes[p].like[l];
    while (i < c->n && (c->costs[i].pass != p || c->costs[i].like != like || c->costs[i].groups != groups)) i++;
    if (i == LAYER_COSTS) return -1;
    if (i == c->n) {
        c->costs[c->n].pass = p;
        c->costs[c->n].like = like;
        c->costs[c->n].groups = groups;
        c->costs[c->n].layer = l;
        for (int s = 0; s < LAYER_STEPS; s++) c->costs[c->n].of[s].work = -1;
        c->n++;
    }
    *layer = c->costs[i].layer;
    return i;
}

static void add(struct device *dev, const struct layer_cost *c)
{
    dev->work.peak = MT_MAX(dev->work.peak, dev->work.used + c->work);
    dev->flops += c->flops;
    dev->floor_ms += c->floor_ms;
}

bool layer_cost_known(const struct layer_costs *c, int64_t place, enum layer_step step, struct device *dev)
{
    if (place < 0 || c->costs[place].of[step].work < 0) return false;
    add(dev, &c->costs[place].of[step]);
    return true;
}

struct layer_cost layer_cost_begin(struct device *dev)
{
    const struct layer_cost before = {dev->work.peak, dev->flops, dev->floor_ms};
    dev->work.peak = dev->work.used;
    dev->flops = dev->floor_ms = 0;
    return before;
}

/* Adds the measured cost with the same additions as layer_cost_known, so that the sums have the same bits. */
void layer_cost_end(struct layer_costs *c, int64_t place, enum layer_step step, struct device *dev,
                    const struct layer_cost *before)
{
    const struct layer_cost own = {dev->work.peak - dev->work.used, dev->flops, dev->floor_ms};
    dev->work.peak = before->work;
    dev->flops = before->flops;
    dev->floor_ms = before->floor_ms;
    add(dev, &own);
    if (place >= 0) c->costs[place].of[step] = own;
}
