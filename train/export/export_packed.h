/* export_packed.h - NVFP4 and FP8 checkpoints: their configuration, and reading their weights back. */
#ifndef MT_EXPORT_PACKED_H
#define MT_EXPORT_PACKED_H

#include "data/json/json.h"
#include "data/safetensors.h"

/* Adds quantization_config to config.json, in the form of Model-Optimizer for NVFP4, of compressed-tensors for FP8.
 * inputs: the checkpoint has scales of quantised inputs. ignore [n]: modules that are not quantised. */
void export_packed_config(struct json_out *o, bool nvfp4, bool inputs, const char *const *ignore, int64_t n);
/* The text of Model-Optimizer's hf_quant_config.json for NVFP4. */
void export_packed_hf_config(struct json_out *o, bool inputs, const char *const *ignore, int64_t n);

/* A view of a checkpoint in which the quantised matrices of one layer are decoded to F32, under the same names. */
struct packed_view {
    struct safetensors st; /* in memory: tensors alone */
    void **decoded;
    int64_t n_decoded;
};
/* decode false: the values are not computed. Error: codes and scales whose shapes do not fit. */
int packed_view_open(struct packed_view *v, const struct safetensors *st, int64_t layer, bool decode,
                     struct err *err) MT_CHECK;
void packed_view_close(struct packed_view *v); /* zeroed is valid */

#endif
