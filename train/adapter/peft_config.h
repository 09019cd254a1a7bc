/* peft_config.h - adapter_config.json of PEFT, for train/adapter/peft.c. */
#ifndef MT_PEFT_CONFIG_H
#define MT_PEFT_CONFIG_H

#include "data/json/json.h"
#include "model/lora.h"

#define PEFT_CONFIG_NAME "adapter_config.json"
int peft_config_write(const struct adapters *ad, const char *dir, const char *base_model, struct err *err) MT_CHECK;
/* Whether PEFT 0.21 warns that keys of rank_pattern or alpha_pattern were ignored: it compares keys with modules only,
 * but applies keys of parameters too. */
bool peft_config_warns(const struct adapters *ad);
/* Error: the adapter_config.json has variants of LoRA that moetrain would compute differently. */
int peft_config_check(struct json root, struct err *err) MT_CHECK;

/* Of a text like "0.19.1"; -1: it begins otherwise. */
#define PEFT_VERSION(major, minor, patch) ((major)*1000000LL + (minor)*1000LL + (patch))
int64_t peft_config_version(const char *s);

#endif
