/* eos_ids.h - the tokens that end generation, as a checkpoint lists them. */
#ifndef MT_EOS_IDS_H
#define MT_EOS_IDS_H

#include "data/tokenizer/tokenizer.h"

struct eos_ids {
    int32_t ids[16]; /* further ones are ignored */
    int64_t n;
};

/* Reads eos_token_id, a number or a list, of dir/generation_config.json, else of dir/config.json. Empty if both lack
 * it. */
int eos_ids_load(struct eos_ids *out, const char *dir, struct err *err) MT_CHECK;
/* Finds the token after a document: eos_token of dir/tokenizer_config.json or, if that lacks eos_token or
 * added_tokens_decoder, of special_tokens_map.json, as in transformers; else the first id of eos_ids_load. */
int eos_ids_main(int32_t *out, const char *dir, const struct tokenizer *tok, struct err *err) MT_CHECK;

#endif
