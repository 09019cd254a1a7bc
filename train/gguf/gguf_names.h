/* gguf_names.h - llama.cpp's names. */
#ifndef MT_GGUF_NAMES_H
#define MT_GGUF_NAMES_H

#include "model/lora.h"

const char *gguf_names_arch(const struct arch *a); /* of the architecture; NULL: none */
bool gguf_names_fused(const struct arch *a);       /* gate and up of the experts are one tensor */
/* The name of a Linear's tensor; NULL: llama.cpp does not apply adapters of this tensor. */
const char *gguf_names_matrix(const struct arch *a, enum lora_target t);
/* The row or column of the checkpoint for row or column i of the file, where the value heads of gated DeltaNet are the
 * last of n, with d rows each. llama.cpp has the first value head of every key head, then the second of each; a
 * checkpoint has the value heads of a key head together. */
int64_t gguf_names_value_row(const struct delta_shape *s, int64_t d, int64_t i, int64_t n);

#endif
