/* layer_costs.h - memory and work of a layer's passes in dry runs, measured once for equal layers: plans make thousands
 * of dry runs of models with dozens of equal layers. */
#ifndef MT_LAYER_COSTS_H
#define MT_LAYER_COSTS_H

#include "model/arch/arch.h"
#include "model/weights.h"

enum layer_step { LAYER_FORWARD, LAYER_BACKWARD, LAYER_STEPS };
struct layer_cost {
    int64_t work; /* bytes of the work arena above those in use; -1: not measured */
    double flops, floor_ms;
};
/* What a layer's costs in a pass depend on, besides the layer and the groups that it saves. */
struct layer_pass {
    int64_t n_tok, n_seq, max_len, lowest_layer, expert_group;
    int64_t backward, unquantised, inputs, referring;
};
enum { LAYER_PASSES = 8, LAYER_COSTS = 256 };
struct layer_costs {
    bool adapted; /* the layers already have the adapters for a pass like adapted_for */
    struct layer_pass adapted_for;
    int64_t n_pass, n;
    struct {
        struct layer_pass pass;
        int16_t like[MT_MAX_LAYERS]; /* the first layer that is equal */
    } passes[LAYER_PASSES];
    struct {
        int64_t pass, like, groups, layer;
        struct layer_cost of[LAYER_STEPS];
    } costs[LAYER_COSTS];
};

/* Index of the costs of layer l if it saves `groups` (SAVE_*); -1: no room. *layer: the layer whose forward and
 * backward measure these costs for all equal ones. */
int64_t layer_costs_find(struct layer_costs *c, const struct arch *a, const struct layer_weights *w,
                         const struct layer_pass *pass, int64_t l, int groups, int64_t *layer);
/* Call them before and after the layer's pass. The end stores its cost, and adds it to dev. */
struct layer_cost layer_cost_begin(struct device *dev);
void layer_cost_end(struct layer_costs *c, int64_t place, enum layer_step step, struct device *dev,
                    const struct layer_cost *before);
/* Adds a measured cost to dev; false: not measured, run the pass. */
bool layer_cost_known(const struct layer_costs *c, int64_t place, enum layer_step step, struct device *dev);

#endif
