/* presets_quant.h - quantization_config of config.json, as the publisher of each format of experts writes it. */
#ifndef MT_PRESETS_QUANT_H
#define MT_PRESETS_QUANT_H

#include "data/json/json.h"
#include "kernels/format/format.h"

/* The list of names at a key. names: up to NULL. */
void presets_names(struct json_out *o, const char *key, const char *const *names);
/* published: in the publisher's form of DeepSeek-V4. Nothing for experts in bf16. */
void presets_quantization(struct json_out *o, bool published, enum weight_format experts);

#endif
