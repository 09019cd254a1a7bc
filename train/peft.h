/* peft.h - adapters <-> a PEFT directory: adapter_config.json + adapter_model.safetensors. */
#ifndef MT_PEFT_H
#define MT_PEFT_H

#include "model/lora.h"

/* Writes dir as PEFT >= 0.19.1 reads it: F32, experts by target_parameters. An older dir is replaced whole, in one step
 * (train/atomic_dir.h). base_model: base_model_name_or_path, NULL for none; card: the text of
 * README.md, NULL for no such file. Rank 0 writes; the others call it for their parts. */
int peft_save(const struct adapters *ad, struct device *dev, const char *dir, const char *base_model, const char *card,
              struct err *err) MT_CHECK;
/* Reads weights (F32, BF16 or F16) into ad's masters and refreshes the working copies. Rank, alpha, rsLoRA, targets and
 * layers of the file must agree with ad; every tensor must be there with its shape, finite, and none left over. Experts
 * may be fused, in the orientation and nesting of any PEFT version, or one tensor per expert. With gate and up apart
 * (gate_proj, up_proj or w1, w3) the rank of ad must be twice the file's and the scale the same; ranks that the file
 * does not fill keep ad's A and get B = 0. */
int peft_load(struct adapters *ad, struct device *dev, const char *dir, struct err *err) MT_CHECK;
/* adapters_plan with what dir itself says of rank, alpha, rsLoRA, targets and layers: for an adapter that is used as it
 * is, without a [lora] section. Follow with adapters_alloc and peft_load. */
int peft_plan(struct adapters *ad, const struct arch *a, const char *dir, struct err *err) MT_CHECK;

#endif
