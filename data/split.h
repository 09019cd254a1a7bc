/* split.h - the pre_tokenizer: cuts text into the pieces that are encoded on their own. */
#ifndef MT_SPLIT_H
#define MT_SPLIT_H

#include "data/json.h"

struct split; /* read-only after load: threads may share it */

/* pre_tokenizer of a tokenizer.json: ByteLevel, or a Sequence of Split(Regex, Isolated) that ends in a ByteLevel.
 * Anything else is refused by name. */
struct split *split_load(struct json pre_tokenizer, struct err *err) MT_CHECK;
void split_free(struct split *s);

/* Called for each piece [begin, end) in order, never for an empty one; not 0 stops. */
typedef int split_fn(void *ctx, int64_t begin, int64_t end, struct err *err);
/* Scratch of one thread; split_work_free takes NULL. */
struct split_work;
struct split_work *split_work_new(void);
void split_work_free(struct split_work *w);
/* text: valid UTF-8. */
int split_run(const struct split *s, struct split_work *w, const char *text, int64_t size, split_fn *fn, void *ctx,
              struct err *err) MT_CHECK;

#endif
