/* split.h - the pre_tokenizer: cuts text into pieces that are encoded separately. */
#ifndef MT_SPLIT_H
#define MT_SPLIT_H

#include "data/json/json.h"

#define SPLIT_SPACE "\xe2\x96\x81" /* U+2581, a space in vocabularies of characters */

struct split; /* read-only after load: threads may share it */

/* pre_tokenizer of a tokenizer.json: ByteLevel, a Sequence of Split(Regex; Isolated, or Removed with invert) that ends
 * in a ByteLevel, Metaspace, Split(" ", MergedWithPrevious), or null. Anything else is an error that names it. */
struct split *split_load(struct json pre_tokenizer, struct err *err) MT_CHECK;
/* How the vocabulary represents text. BYTE_LEVEL: bytes as characters of a 256-character alphabet. NULL: plain
 * characters. SPACES: plain characters without spaces, at which text is cut. META (Metaspace): spaces as U+2581, with a
 * U+2581 added in front unless the text begins with one: NEVER; FIRST: at the start of the whole text; ALWAYS: at the
 * start of every text between added tokens. */
enum split_kind { SPLIT_BYTE_LEVEL, SPLIT_NULL, SPLIT_SPACES, SPLIT_META_NEVER, SPLIT_META_FIRST, SPLIT_META_ALWAYS };
enum split_kind split_kind(const struct split *s);
void split_free(struct split *s);

/* Called for each piece [begin, end) in order, never for an empty one; nonzero stops. */
typedef int split_fn(void *ctx, int64_t begin, int64_t end, struct err *err);
/* Scratch of one thread; split_work_free takes NULL. */
struct split_work;
struct split_work *split_work_new(void);
void split_work_free(struct split_work *w);
/* Cuts text, which must be valid UTF-8, into pieces. */
int split_run(const struct split *s, struct split_work *w, const char *text, int64_t size, split_fn *fn, void *ctx,
              struct err *err) MT_CHECK;
const char *split_library(char name[64]); /* "PCRE2 10.42" */

#endif
