/* added_config.h - the added tokens that tokenizer_config.json names, as transformers 5 adds them. */
#ifndef MT_ADDED_CONFIG_H
#define MT_ADDED_CONFIG_H

#include "data/tokenizer/added.h"
#include "data/tokenizer/bpe.h"

/* Adds the tokens of `added_tokens_decoder` by ascending key. A token that the list already has gets the flags of this
 * file. A new token gets the id of the vocabulary entry with its text, else the next unused id. With keys_are_ids its
 * id is its key, as in tokenizers without a tokenizer.json. A key that differs from the token's id is a warning. */
int added_config_decoder(struct added_list *list, const struct bpe *bpe, bool keys_are_ids, struct json config,
                         struct err *err) MT_CHECK;
/* Call it after added_config_decoder: adds bos_token, eos_token and the like, and the extra special tokens, all as
 * special tokens. */
int added_config_named(struct added_list *list, const struct bpe *bpe, struct json config, struct err *err) MT_CHECK;

#endif
