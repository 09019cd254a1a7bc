/* export.h - `moetrain export`: converts a trained adapter for another program and verifies the result. */
#ifndef MT_EXPORT_H
#define MT_EXPORT_H

#include <stdio.h>

#include "data/safetensors.h"
#include "model/arch/arch.h"
#include "train/config/config.h"
#include "train/export/export_targets.h"

/* Writes the adapter of the PEFT directory adapter_dir (NULL: output.dir/adapter) to the directory `out` (NULL:
 * output.dir/export-FORMAT), which must be new or empty. `out` appears after all files were written and verified.
 * Prints the table of the verification to `report`. Errors: the model does not support the format, no held-out rows,
 * too little disk space, or a part that differs when read back. quantize: the type of the matrices of gguf-model; NULL:
 * q8_0. */
int export_run(const struct config *cfg, const char *adapter_dir, const char *format, const char *quantize,
               const char *out, struct export_accept accept, FILE *report, struct err *err) MT_CHECK;
/* The format that suits a run: the merged format with the weights that quantisation-aware training read, if the family
 * has it. Otherwise the first of vllm, merged-bf16 and peft whose reader applies all targets. st: the model's
 * tensors. */
const char *export_usual(const struct config *cfg, const struct arch *a, const struct safetensors *st);
/* export_targets_note for the targets of a configuration. */
bool export_note(char text[EXPORT_NOTE_TEXT], const struct config *cfg, const struct arch *a);
/* At the start of a run: says which exports refuse some of its targets, and warns if no export of this model can hold
 * the weights that quant.mode = merged quantises. */
void export_warn(const struct config *cfg, const struct arch *a, const struct safetensors *st);
/* Verifies an existing export in dir. Error: it has another format. */
int export_check(const struct config *cfg, const char *adapter_dir, const char *format, const char *quantize,
                 const char *dir, struct export_accept accept, FILE *report, struct err *err) MT_CHECK;

#endif
