/* synth_tokenizer.h - the tokenizer of a synthetic checkpoint: 256 bytes and the family's special tokens. */
#ifndef MT_SYNTH_TOKENIZER_H
#define MT_SYNTH_TOKENIZER_H

#include "train/synth/presets.h"

/* Writes dir/tokenizer.json and dir/tokenizer_config.json. Every byte is a token, so it encodes any text; special
 * tokens have the ids of preset_token. */
int synth_tokenizer(const char *dir, const struct preset *p, struct err *err) MT_CHECK;

#endif
