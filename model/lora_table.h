/* lora_table.h - the table of adapters that is printed before step 1, and by `plan`. */
#ifndef MT_LORA_TABLE_H
#define MT_LORA_TABLE_H

#include "model/lora.h"

/* Layers, shapes and parameters per target, then, per kind of layer, the share of the parameters that adapters cover.
 * Free the text with mem_free. */
char *lora_table(const struct adapters *ad, const struct arch *a);
/* ad with r and alpha of its trained ranks, i.e. without the half that lora.init freezes. */
struct adapters lora_table_trained(const struct adapters *ad);
/* Share of the parameters of routed experts that adapters cover; 1 in a model without such experts. */
double lora_table_experts(const struct adapters *ad, const struct arch *a);
/* Whether one kind of mixer has adapters and another has none; the text says so and what to do. */
bool lora_table_missed(const struct adapters *ad, const struct arch *a, char *text, size_t size);

#endif
