/* added_config.h - the added tokens that tokenizer_config.json names, as transformers 5 adds them. */
#ifndef MT_ADDED_CONFIG_H
#define MT_ADDED_CONFIG_H

#include "data/tokenizer/added.h"
#include "data/tokenizer/bpe.h"

/* Adds the tokens of `added_tokens_decoder` by ascending id. A token that the list already has gets the flags of this
 * file. A new token gets the id of the vocabulary's item with its text, or else the next unused id; its key does not
 * matter. With keys_are_ids it always gets its key, as in tokenizers without a tokenizer.json. A key that is another id
 * than the token's is a warning. */
int added_config_decoder(struct added_list *list, const struct bpe *bpe, bool keys_are_ids, struct json config,
                         struct err *err) MT_CHECK;
/* Adds, after the tokens of `added_tokens_decoder`, bos_token, eos_token and the like, and the list of extra special
 * tokens; all of them are special tokens. */
int added_config_named(struct added_list *list, const struct bpe *bpe, struct json config, struct err *err) MT_CHECK;

#endif
