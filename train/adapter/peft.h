/* peft.h - adapters <-> a PEFT directory: adapter_config.json + adapter_model.safetensors. */
#ifndef MT_PEFT_H
#define MT_PEFT_H

#include "model/lora.h"

/* Writes dir as PEFT >= 0.19.1 reads it: F32, experts by target_parameters. Replaces an existing dir in one step
 * (data/file/atomic_dir.h). base_model: base_model_name_or_path or NULL. card: the text of README.md; NULL: no
 * README.md. The weights' metadata has ad->base and ad->step. Also writes amax_file.h's file if ad keeps magnitudes.
 * Rank 0 writes; the other ranks call it to send their parts. */
int peft_save(const struct adapters *ad, struct device *dev, const char *dir, const char *base_model, const char *card,
              struct err *err) MT_CHECK;
/* Reads weights (F32, BF16 or F16) into ad's masters and working copies; sets ad->base and ad->step. r, alpha, rsLoRA,
 * targets and layers of the file must agree with ad. If only alpha_pattern differs, peft_load scales B. The file must
 * have exactly the tensors of ad, with the right shapes and finite values. Experts may be fused, in the orientation and
 * nesting of any PEFT version, or one tensor per expert. When the file has gate and up as separate matrices (gate_proj,
 * up_proj or w1, w3), r of ad must be twice that of the file, and alpha must give the same scale. Ranks that the file
 * does not fill keep the A of ad and get B = 0. */
int peft_load(struct adapters *ad, struct device *dev, const char *dir, struct err *err) MT_CHECK;
/* Checks the settings, layers and layout of experts of dir as peft_load does, for adapters that adapters_plan filled;
 * not each tensor's presence, shape, type or values. */
int peft_check(const struct adapters *ad, const char *dir, struct err *err) MT_CHECK;
/* adapters.step of the file in dir; 0: unknown, or no readable file. */
int64_t peft_step(const char *dir);
/* adapters.base of the file in dir; zeroed where it has none. */
int peft_base(struct base_model *base, const char *dir, struct err *err) MT_CHECK;
/* As adapters_plan, but r, alpha, patterns, rsLoRA, DoRA, targets and layers come from dir's adapter_config.json, not
 * from the [lora] section. Follow with adapters_alloc and peft_load. */
int peft_plan(struct adapters *ad, const struct arch *a, const char *dir, struct err *err) MT_CHECK;

#endif
