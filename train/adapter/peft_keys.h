/* peft_keys.h - the names of tensors and modules in PEFT's adapters, of any family. */
#ifndef MT_PEFT_KEYS_H
#define MT_PEFT_KEYS_H

#include "model/lora_options.h"

#define PEFT_KEYS_FLAT   "base_model.model.model.layers."
#define PEFT_KEYS_NESTED "base_model.model.model.language_model.layers."

/* Whether a key names the Linear of target t, or its weight, by the part of the name from `self_attn`, `mlp` or `mixer`
 * on. */
bool peft_keys_linear(const char *key, enum lora_target t);
bool peft_keys_stack(const char *key, enum lora_target t); /* "mlp.experts.gate_up_proj" */
bool peft_keys_nested(const char *key);
/* Parses a tensor name: sets *layer and returns a bit per target and the bits below. FUSED: the name has no base_layer,
 * and its tensor is of all experts. SPLIT: the tensor is of one matrix of one expert. MIXTRAL: as SPLIT, with Mixtral's
 * names. EACH: as SPLIT, of experts without a gate matrix. */
#define PEFT_KEYS_FUSED   ((uint64_t)1 << LORA_TARGETS)
#define PEFT_KEYS_SPLIT   ((uint64_t)2 << LORA_TARGETS)
#define PEFT_KEYS_MIXTRAL ((uint64_t)4 << LORA_TARGETS)
#define PEFT_KEYS_EACH    ((uint64_t)8 << LORA_TARGETS)
_Static_assert(LORA_TARGETS <= 32, "a bit of each is in struct adapters.fused");
uint64_t peft_keys_parse(const char *key, int64_t *layer);

#endif
