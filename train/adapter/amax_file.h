/* amax_file.h - the largest magnitudes that a run keeps (struct amax_table), beside an adapter: quant_amax.safetensors
 * has f32 tensors, [1] for each quantised matrix and [E] for each stack, in the order of the model's experts:
 * "layers.3.gate_up_proj.amax" with quant.amax = static, and "layers.3.gate_up_proj.input_amax", all values equal, with
 * quant.activations. */
#ifndef MT_AMAX_FILE_H
#define MT_AMAX_FILE_H

#include "model/lora.h"

#define AMAX_FILE "quant_amax.safetensors"

/* Writes values, of qat_gather, into dir; NULL: nothing. */
int amax_file_write(const struct adapters *ad, const float *values, const char *dir, struct err *err) MT_CHECK;
/* Reads the file into ad->amax, which must keep its amax. Error: no such file; other tensors than those of ad; a value
 * that is not a finite magnitude. */
int amax_file_load(struct adapters *ad, struct device *dev, const char *dir, struct err *err) MT_CHECK;

#endif
