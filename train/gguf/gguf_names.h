/* gguf_names.h - llama.cpp's names. */
#ifndef MT_GGUF_NAMES_H
#define MT_GGUF_NAMES_H

#include "model/lora.h"

const char *gguf_names_arch(const struct arch *a); /* of the architecture; NULL: none */
bool gguf_names_fused(const struct arch *a);       /* gate and up of the experts are one tensor */
/* The name of a Linear's tensor; NULL: llama.cpp does not apply adapters of this tensor. */
const char *gguf_names_matrix(const struct arch *a, enum lora_target t);

#endif
