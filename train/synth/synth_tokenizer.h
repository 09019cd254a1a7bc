/* synth_tokenizer.h - the tokenizer and the chat template of a synthetic checkpoint. */
#ifndef MT_SYNTH_TOKENIZER_H
#define MT_SYNTH_TOKENIZER_H

#include "train/synth/presets.h"

/* Writes dir/tokenizer.json and dir/tokenizer_config.json. Every byte is a token, so it encodes any text; the family's
 * special tokens have the ids of preset_token. chat_template.jinja writes messages as "ROLE: CONTENT" and eos;
 * DeepSeek-V4 has none, as published. */
int synth_tokenizer(const char *dir, const struct preset *p, struct err *err) MT_CHECK;

#endif
