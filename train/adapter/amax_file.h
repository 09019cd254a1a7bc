/* amax_file.h - quant_amax.safetensors beside an adapter: the largest magnitudes that a run keeps (struct amax_table).
 * Its tensors are f32: [1] for each quantised matrix, [E] for the experts of a layer, in the model's order. With
 * quant.amax = static their names are as "layers.3.gate_up_proj.amax", with quant.activations as
 * "layers.3.gate_up_proj.input_amax", whose values are all equal. */
#ifndef MT_AMAX_FILE_H
#define MT_AMAX_FILE_H

#include "model/lora.h"

#define AMAX_FILE "quant_amax.safetensors"

/* Writes the file into dir. values: from qat_gather; NULL: writes nothing. */
int amax_file_write(const struct adapters *ad, const float *values, const char *dir, struct err *err) MT_CHECK;
/* Reads the file into ad->amax. ad must keep magnitudes (amax.flat). Error: no such file; other tensors than those of
 * ad; a value that is not a finite magnitude. */
int amax_file_load(struct adapters *ad, struct device *dev, const char *dir, struct err *err) MT_CHECK;

#endif
