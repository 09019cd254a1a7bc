/* row_request.h - a row of `generate --input` as a request. */
#ifndef MT_ROW_REQUEST_H
#define MT_ROW_REQUEST_H

#include "train/run/prompt.h"
#include "train/generate/sample.h"

/* Values for keys that a row does not set, from the options of the command. A row without a seed gets the hash of
 * `seed` and the row's number. */
struct row_defaults {
    struct sample_params params;
    int64_t n, seed;
};

int64_t row_request_seed(const struct row_defaults *d, int64_t number); /* seed of a row without one */

struct row_request {
    struct prompt prompt;
    char *id;                 /* JSON of the row's id; without one the number of the row, from 0 */
    char **stops;             /* [q.n_stops] */
    int32_t *ends;            /* [q.n_end_ids] */
    struct sample_bias *bias; /* [q.n_bias] */
    const char *role;         /* a role that few templates know, for a warning; points into the row; NULL: none */
    struct sample_request q;  /* points to the members above */
};

/* Reads {prompt | prompt_ids | messages, tools}, id, n, seed, max_tokens, min_tokens, temperature, top_k, top_p, min_p,
 * repetition_penalty, frequency_penalty, presence_penalty, stop (a text or a list), stop_token_ids, top_logprobs,
 * prompt_logprobs, ignore_eos, logit_bias {id: value}. Errors begin with `name`. */
int row_request_read(struct row_request *r, const struct run *run, struct json row, int64_t number,
                     const struct row_defaults *d, const char *name, struct err *err) MT_CHECK;
/* Whether `generate` reads this key of a row; *near: the known key that it resembles, or NULL. */
bool row_request_has_key(const char *key, const char **near);
void row_request_free(struct row_request *r); /* r may be zeroed */

#endif
