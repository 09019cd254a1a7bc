/* fp8_experts.h - experts whose products run in e4m3 (train.expert_dtype = fp8 or fp8-backward), and their codes. An
 * expert in MXFP4 is exact if all its values are one power of two, the step, times values of e4m3. */
#ifndef MT_FP8_EXPERTS_H
#define MT_FP8_EXPERTS_H

#include "model/weights_read.h"

/* The step of an expert, from the smallest and largest scale byte of its blocks; 0: not exact, since the blocks span
 * more than 15 binades. */
float fp8_expert_step(int32_t low, int32_t high);
/* Sets proj->fp8 of a stack of experts, and counts the exact ones. Error: the experts are not in MXFP4. */
int fp8_experts_open(struct weights_read *f, struct proj *proj) MT_CHECK;
/* Whether this device's products read e4m3 codes of proj. */
bool fp8_experts_have_codes(const struct weights_read *f, const struct proj *proj);
/* Writes the codes of the packed weight in dev->work to dev->weights. They replace the weight, except with
 * FP8_BACKWARD. */
void fp8_experts_codes(struct weights_read *f, struct proj *proj);
/* Logs how many experts are exact. */
void fp8_experts_log(const struct weights *w);

#endif
