/* choices.h - the routers' choice of experts in a pass: recorded for the caller, or given by it. route.idx of the
 * layers are then views of one tensor.
 *
 * Layers of DeepSeek-V4 that choose by the token's id are not in struct choices. */
#ifndef MT_CHOICES_H
#define MT_CHOICES_H

#include "model/acts.h"

enum choices_use {
    CHOICES_OWN,      /* the routers choose */
    CHOICES_RECORDED, /* the routers choose, and choices_read returns their choice */
    CHOICES_GIVEN     /* the routers take given experts, and compute gates from their own logits */
};
struct choices {
    enum choices_use use;
    struct tensor idx; /* [choices_layers, T, J] i32 on dev->work; absent with CHOICES_OWN */
};

bool choices_has(const struct arch *a, int64_t layer); /* whether the layer is in struct choices */
int64_t choices_layers(const struct arch *a);          /* number of these layers */

/* Allocates idx. given: host [T, n_layer, J], distinct experts of each token and layer, ascending; NULL in a dry run,
 * and unless use is CHOICES_GIVEN. */
void choices_push(struct choices *c, struct device *dev, const struct arch *a, int64_t n_tok, enum choices_use use,
                  const uint16_t *given);
/* Call it after acts_push: makes the layers use idx. */
void choices_attach(const struct choices *c, const struct arch *a, struct acts *acts);
/* out: host [T, n_layer, J] = the recorded choice, ascending. Waits for the device. */
void choices_read(const struct choices *c, struct device *dev, uint16_t *out);

#endif
