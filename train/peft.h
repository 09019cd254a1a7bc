/* peft.h - adapters <-> a PEFT directory (formats.md 6): adapter_config.json + adapter_model.safetensors. */
#ifndef MT_PEFT_H
#define MT_PEFT_H

#include "model/lora.h"

/* Writes dir in the PEFT >= 0.19.1 form (6.3): F32, target_parameters, rank-major B, key nesting. The directory is made as
 * dir + ".tmp", fsynced, and renamed over an older one. base_model: base_model_name_or_path. */
int peft_save(const struct adapters *ad, struct device *dev, const char *dir, const char *base_model,
              struct err *err) MT_CHECK;
/* Reads weights into ad's masters and refreshes the working copies. Rank, alpha, targets and layers of the file must agree
 * with ad; every tensor must be there with its shape, none may be left over. Experts' orientation by shapes, and by
 * peft_version where in == out hides it (6.3); per-expert keys of 6.2 are read too. */
int peft_load(struct adapters *ad, struct device *dev, const char *dir, struct err *err) MT_CHECK;

#endif
