/* export_quant.h - the quantisation of merged weights, and whether training read exactly these weights. */
#ifndef MT_EXPORT_QUANT_H
#define MT_EXPORT_QUANT_H

#include "model/stored/stored.h"
#include "train/export/export_job.h"

/* Fills x->qat, x->trained and the quantisation of x->adapter's products. Call it after the adapter was loaded. Warns
 * if the run was trained for another format than that of the export. Error: a matrix that the format's blocks do not
 * divide, or an adapter of quant.amax = static or quant.activations without its magnitudes. */
int export_quant_open(struct export *x, struct err *err) MT_CHECK;
/* Whether a merged export in this format has the values of f. */
bool export_quant_has(enum export_format to, const struct fakequant *f);
/* The layout of the matrix `name` if it is a published one, MXFP4 or FP8; NULL: another layout. */
const struct stored_layout *export_quant_layout(const struct safetensors *st, const char *name);
/* Whether the experts of this layer have the MXFP4 layout of DeepSeek-V4's publisher; merged-mxfp4 of this family
 * requires it. */
bool export_quant_published(const struct safetensors *st, int64_t layer);
/* Whether the checkpoint can be exported in this format after a run with these options. */
bool export_quant_writes(enum export_format to, const struct arch *a, const struct safetensors *st,
                         const struct qat_options *run);
/* The merged export with exactly the weights and the input scales of a run with these options; NULL: there is none. */
const char *export_quant_exact(const struct arch *a, const struct safetensors *st, const struct qat_options *run);
void export_quant_close(struct export *x); /* zeroed is valid */
/* The input_scale of a file: a reader multiplies FP8 codes, or the scales of NVFP4's blocks, by it. */
float export_quant_input_scale(const struct fakequant *f, float amax);
/* Attaches the adapters and their quantisation to a layer that was loaded on dev, and computes the largest
 * magnitudes. */
void export_quant_layer(struct export *x, struct device *dev, struct layer_weights *lw, int64_t layer);

#endif
