/* gguf_tokenizer.h - the keys tokenizer.*. */
#ifndef MT_GGUF_TOKENIZER_H
#define MT_GGUF_TOKENIZER_H

#include "train/gguf/gguf_meta.h"

/* Appends the keys of tokenizer and chat template. Error: llama.cpp has no name for the tokenizer. */
int gguf_tokenizer_put(struct gguf_meta *m, const struct gguf_meta_model *model, struct err *err) MT_CHECK;

#endif
