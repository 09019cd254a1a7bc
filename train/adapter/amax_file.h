/* amax_file.h - the largest magnitudes that a run keeps (struct amax_table), beside an adapter: quant_amax.safetensors
 * has, in the order of the model's experts, with quant.amax = static "layers.3.gate_up_proj.amax" [E] f32 for every
 * quantised matrix or stack, and with quant.activations "layers.3.gate_up_proj.input_amax" [E] f32, E equal values. */
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
