/* tokenizer.h - text -> token ids: BPE of bytes or characters, with added tokens. An error names each feature of the
 * file that is not supported. Read-only after load: threads may share it. */
#ifndef MT_TOKENIZER_H
#define MT_TOKENIZER_H

#include "data/tokenizer/token_list.h"

struct tokenizer;

/* The tokenizer of a checkpoint's directory: tokenizer.json, else Kimi's tiktoken.model, with the added tokens of
 * tokenizer_config.json. */
struct tokenizer *tokenizer_open(const char *dir, struct err *err) MT_CHECK;
struct tokenizer *tokenizer_load(const char *path, struct err *err) MT_CHECK; /* path of tokenizer.json */
/* tokenizer_load from memory; messages begin with `name`. */
struct tokenizer *tokenizer_parse(const char *text, int64_t size, const char *name, struct err *err) MT_CHECK;
void tokenizer_free(struct tokenizer *tok);
/* Id of the token with exactly this text, or -1. */
int32_t tokenizer_id(const struct tokenizer *tok, const char *content);
uint64_t tokenizer_hash(const struct tokenizer *tok); /* hash of the files' content, for caches */

/* Appends the ids of text[0..size). `special`: special tokens in the text are recognised (HF's default), else they are
 * ordinary text. (Other added tokens are always recognised.) No token is added at either end, whatever post_processor
 * specifies: the text or its template has bos. Invalid UTF-8 is an error with the byte; after an error the list is
 * unchanged. */
int tokenizer_encode(const struct tokenizer *tok, const char *text, int64_t size, bool special, struct token_list *out,
                     struct err *err) MT_CHECK;
/* tokenizer_encode with special tokens, except that those with a byte of `plain`, [n_plain] ascending, are ordinary
 * text. */
int tokenizer_encode_plain(const struct tokenizer *tok, const char *text, int64_t size, const int64_t *plain,
                           int64_t n_plain, struct token_list *out, struct err *err) MT_CHECK;
/* Replaces the list by the special tokens that text[0..size), valid UTF-8, spells, with their byte ranges. */
void tokenizer_specials(const struct tokenizer *tok, const char *text, int64_t size, struct token_list *out);
/* Bytes of one id; NULL for an id without a token. */
const char *tokenizer_bytes(const struct tokenizer *tok, int32_t id, int64_t *size);
bool tokenizer_marks_spaces(const struct tokenizer *tok); /* U+2581 stands for a space in these bytes */
/* Whether the id is a special token: its text becomes this id only where special tokens are recognised. */
bool tokenizer_is_special(const struct tokenizer *tok, int32_t id);
bool tokenizer_is_added(const struct tokenizer *tok, int32_t id); /* no bytes of text merge to this token */

/* For writing a tiktoken.model as a tokenizer.json. The ids of its tokens are ranks: lower ones merge first. */
bool tokenizer_has_ranks(const struct tokenizer *tok);
/* The text of one id, with bytes in the printable alphabet, for mem_free. NULL: no token has this id. */
char *tokenizer_item(const struct tokenizer *tok, int32_t id);
/* Whether a merge joins bytes [0, at) and [at, size) of a token that is not added; the ids of the two. */
bool tokenizer_split(const struct tokenizer *tok, int32_t id, int64_t at, int32_t *left, int32_t *right);

#endif
