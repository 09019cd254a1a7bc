/* synth_tokenizer.h - the tokenizer and the chat template of a synthetic checkpoint. */
#ifndef MT_SYNTH_TOKENIZER_H
#define MT_SYNTH_TOKENIZER_H

#include "train/synth/presets.h"

/* Writes dir/tokenizer.json and dir/tokenizer_config.json. Every byte is a token. The family's special tokens have the
 * ids of preset_token. Also writes chat_template.jinja, which renders messages as "ROLE: CONTENT" and eos, except for
 * DeepSeek-V4, which is published without one. */
int synth_tokenizer(const char *dir, const struct preset *p, struct err *err) MT_CHECK;

#endif
