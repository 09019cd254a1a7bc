/* published.h - the tensor names of DeepSeek-V4's publisher, and transformers' names of the same tensors, in
 * checkpoints and in adapters. */
#ifndef MT_PUBLISHED_H
#define MT_PUBLISHED_H

#include "data/safetensors.h"
#include "model/arch/arch.h"

/* Renames the tensors of a checkpoint to transformers' names, which all other code uses, if the publisher of the family
 * has others (tensor_names.published). */
int published_rename(struct safetensors *st, const struct arch *a, struct err *err) MT_CHECK;
/* The publisher's name of transformers' `name`; false: they are equal. */
bool published_name(char *to, size_t size, const char *name);
/* published_rename for adapters: "base_model.model.layers.0.attn.wq_a.lora_A.weight" becomes transformers'
 * "base_model.model.model.layers.0.self_attn.q_a_proj.lora_A.weight". Adapters without a publisher's name do not
 * change. */
int published_rename_adapter(struct safetensors *st, struct err *err) MT_CHECK;
bool published_adapter_name(char *to, size_t size, const char *name);

#endif
