/* lora_table.h - the table of adapters that is printed before step 1, and by `plan`. */
#ifndef MT_LORA_TABLE_H
#define MT_LORA_TABLE_H

#include "model/lora.h"

/* Layers, shapes and parameters per target, then the share of each kind of layer's parameters that adapters cover.
 * mem_free the text. */
char *lora_table(const struct adapters *ad, const struct arch *a);
/* ad with r and alpha of its trained ranks, i.e. without the half that lora.init freezes. */
struct adapters lora_table_trained(const struct adapters *ad);
/* Share of the parameters of routed experts that adapters cover; 1 in a model without such experts. */
double lora_table_experts(const struct adapters *ad, const struct arch *a);
/* Whether one kind of mixer has adapters and another has none; the text says this and what to do. */
bool lora_table_missed(const struct adapters *ad, const struct arch *a, char *text, size_t size);

#endif
