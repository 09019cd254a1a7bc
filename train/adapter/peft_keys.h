/* peft_keys.h - the names of tensors and modules in PEFT's adapters, of any family. */
#ifndef MT_PEFT_KEYS_H
#define MT_PEFT_KEYS_H

#include "model/lora_options.h"

#define PEFT_KEYS_FLAT   "base_model.model.model.layers."
#define PEFT_KEYS_NESTED "base_model.model.model.language_model.layers."

/* Whether a key is the module of a Linear, from `self_attn`, `mlp` or `mixer` on, or its weight. */
bool peft_keys_linear(const char *key, enum lora_target t);
bool peft_keys_stack(const char *key, enum lora_target t); /* "mlp.experts.gate_up_proj" */
bool peft_keys_nested(const char *key);
/* Parses a tensor name: the layer, and a bit per target. PEFT_KEYS_FUSED: the outer or only tensor of the experts.
 * PEFT_KEYS_SPLIT: a tensor of one matrix of one expert. PEFT_KEYS_MIXTRAL: the same with Mixtral's names. */
#define PEFT_KEYS_FUSED   (1u << LORA_TARGETS)
#define PEFT_KEYS_SPLIT   (2u << LORA_TARGETS)
#define PEFT_KEYS_MIXTRAL (4u << LORA_TARGETS)
_Static_assert(LORA_TARGETS <= 29, "three bits above the targets fit into 32");
unsigned peft_keys_parse(const char *key, int64_t *layer);

#endif
