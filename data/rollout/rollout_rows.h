/* rollout_rows.h - rows {prompt_ids, completion_ids, reward, group, ...} of data files -> struct rollouts. */
#ifndef MT_ROLLOUT_ROWS_H
#define MT_ROLLOUT_ROWS_H

#include "data/json/json.h"
#include "data/rollout/rollouts.h"

struct rollout_options {
    int64_t vocab;          /* ids at or above it are an error */
    int64_t seq_len;        /* prompt and completion have at most so many tokens */
    const int32_t *end_ids; /* [n_end] tokens that end generation: a row without finish_reason that ends in another
                               token is truncated */
    int64_t n_end;
    int64_t n_layer, n_top,
        n_exp;        /* of `routing`: routed layers, experts per token, experts; n_layer 0: routing is not read */
    int64_t max_rows; /* the first so many rows of each entry of the list; 0: all */
};

/* Appends a row, an object; other keys are not read:
 * - prompt_ids, completion_ids: lists of ids, not empty
 * - reward: a number or null; group: an integer
 * - rewards: an object of numbers or null by name, at most ROLLOUT_REWARDS names in all rows; may be null or missing
 * - logprobs: a number or null per completion token; the list may be null or missing
 * - mask: 0 or 1 per completion token; missing: all 1
 * - routing: the experts of the sampler (routing_text.h); missing: unknown. r->n_routing is n_layer * n_top
 * - finish_reason: "length" is a row without an end token; missing: the last token decides
 * Programs write such rows, so every deviation is an error. */
int rollout_row_add(struct rollouts *r, struct json row, const struct rollout_options *opt, struct err *err) MT_CHECK;
/* Appends the rows of files, a list as in data.train without weights. The caller frees r, even after an error. */
int rollout_rows_load(struct rollouts *r, const char *files, const struct rollout_options *opt,
                      struct err *err) MT_CHECK;

#endif
