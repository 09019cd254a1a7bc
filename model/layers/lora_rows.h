/* lora_rows.h - sequences of one decoding pass with different adapters. Products with the weights are made once for all
 * sequences, then each token's adapter is added (op_lora_rows). */
#ifndef MT_LORA_ROWS_H
#define MT_LORA_ROWS_H

#include "model/lora.h"

struct lora_beside {
    struct adapters wide;  /* for model_pass.adapters: of each product the adapter of largest rank, and the set */
    struct lora_set *sets; /* [n_layer * LAYER_PRODUCTS] */
    const struct adapters *of[LORA_SET];
    int n; /* 0: to be filled */
};

/* Whether ad can be one of several adapters. Not with DoRA, whose magnitudes scale the whole product, nor if merged. */
bool lora_rows_takes(const struct adapters *ad, int64_t n_layer);
/* Fills s with the adapters of[0] .. of[n-1], in the order of struct model_batch.group_cu; s may be zeroed. False: s
 * had them already. */
bool lora_rows_fill(struct lora_beside *s, const struct arch *a, const struct adapters *const *of, int n);
void lora_rows_forget(struct lora_beside *s); /* call it when adapters change their tensors */
void lora_rows_free(struct lora_beside *s);

/* If tokens have different adapters: the projection without adapter, stored in `base`; else p itself. */
const struct proj *lora_rows_base(struct proj *base, const struct proj *p);
/* The projection with only the adapter of group g, 0 to set->n. */
struct proj lora_rows_one(const struct proj *p, int g);

#endif
