/* answer.h - a sample while engine.c generates it: its tokens with their log-probabilities, its text, what op_sample
 * reads, and when it ends. */
#ifndef MT_ANSWER_H
#define MT_ANSWER_H

#include "train/generate/answer_text.h"
#include "train/generate/sample.h"

/* A request with copies of all that it points to. */
struct answer_rules {
    struct sample_request q;
    int64_t n_cached;         /* first tokens of the prompt that were in the cache */
    float *prompt_logprob;    /* [n_ids]; NULL: not asked for */
    int64_t n_routing;        /* experts of a token in all layers; 0: not asked for */
    uint16_t *prompt_routing; /* [n_ids-1, n_routing] */
};
void answer_rules_copy(struct answer_rules *r, const struct sample_request *q, int64_t n_routing);
void answer_rules_free(struct answer_rules *r);

struct answer {
    const struct answer_rules *rules;
    int64_t index, n, cap;
    int32_t *ids;                               /* [n] */
    float *logprob, *kept_logprob, *kept_share; /* [n] */
    int32_t *top_id;                            /* [n, top_logprobs] */
    float *top_logprob;
    uint16_t *routing; /* [n, rules.n_routing] */
    struct sample_edit
        *seen; /* [n_seen] by ascending id: tokens with a bias; with penalties also all tokens of prompt and answer */
    int64_t n_seen, cap_seen;
    struct answer_text text;
    enum sample_end end;
};
void answer_begin(struct answer *a, const struct answer_rules *rules, int64_t index, const struct tokenizer *tok);
void answer_free(struct answer *a);

/* What op_sample reads for the next token. Appends the edits of its logits to *edits, which has *n_edit elements and
 * room for *cap. */
struct sample_row answer_row(const struct answer *a, struct sample_edit **edits, int64_t *n_edit, int64_t *cap);
/* What op_sample returned for that row. Sets a->end. */
struct answer_token {
    int32_t id;
    const float *logprob; /* [3] */
    const int32_t *top_id;
    const float *top_logprob;
    const uint16_t *routing; /* [rules.n_routing] of the token before */
};
void answer_add(struct answer *a, const struct answer_token *t);
void answer_end(struct answer *a, enum sample_end end);
struct sample answer_sample(const struct answer *a); /* as callbacks see it */

#endif
