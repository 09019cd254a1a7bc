/* export_quant.h - the quantisation of merged weights, and whether training read exactly these weights. */
#ifndef MT_EXPORT_QUANT_H
#define MT_EXPORT_QUANT_H

#include "model/stored/stored.h"
#include "train/export/export_job.h"

/* Fills x->qat, x->trained and the quantisation of x->adapter's products; after the adapter was loaded. Warns when the
 * run was trained for another format than that of the export. Error: a matrix that the format's blocks do not divide,
 * or an adapter of quant.amax = static or quant.activations without its magnitudes. */
int export_quant_open(struct export *x, struct err *err) MT_CHECK;
/* Whether a merged export in this format has the values of f. */
bool export_quant_has(enum export_format to, const struct fakequant *f);
/* The publisher's layout that the matrix `name` has, MXFP4 or FP8; NULL: it has another. */
const struct stored_layout *export_quant_layout(const struct safetensors *st, const char *name);
/* Whether the experts of this layer are in MXFP4 as DeepSeek-V4's publisher has them: merged-mxfp4 writes no others. */
bool export_quant_published(const struct safetensors *st, int64_t layer);
/* Whether the checkpoint can be exported in this format after such a run. */
bool export_quant_writes(enum export_format to, const struct arch *a, const struct safetensors *st,
                         const struct qat_options *run);
/* The merged export with exactly the weights and the input scales that such a run reads; NULL: there is none. */
const char *export_quant_exact(const struct arch *a, const struct safetensors *st, const struct qat_options *run);
void export_quant_close(struct export *x); /* zeroed is valid */
/* The scale of an input that a file has: a reader multiplies FP8 codes with it, or the scales of NVFP4's blocks. */
float export_quant_input_scale(const struct fakequant *f, float amax);
/* Gives a layer that was loaded on dev the adapters with their quantisation, and computes the largest magnitudes. */
void export_quant_layer(struct export *x, struct device *dev, struct layer_weights *lw, int64_t layer);

#endif
