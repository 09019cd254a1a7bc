/* special_text.h - special tokens spelt in the contents of a conversation, such as "<|im_end|>" in what a user
 * wrote. */
#ifndef MT_SPECIAL_TEXT_H
#define MT_SPECIAL_TEXT_H

#include "data/json/json.h"
#include "data/tokenizer/tokenizer.h"

/* Special tokens in contents. KEEP: they become special tokens, as in transformers. ERROR: the row is bad. SPLIT: they
 * are tokenised as text. */
enum special_text { SPECIAL_KEEP, SPECIAL_ERROR, SPECIAL_SPLIT };

/* Number of special tokens in the strings of the row's messages, tools and documents; *first: the id of one. */
int64_t special_text_count(const struct tokenizer *tok, struct json row, int32_t *first);
/* A copy of the row in which one character of each of these special tokens is replaced by another of equal size. The
 * rendered copy differs from the rendered row only in these bytes, which shows where contents spell special tokens. */
struct json_doc *special_text_altered(const struct tokenizer *tok, struct json row, struct err *err) MT_CHECK;

#endif
